//! A cluster: its brokers, who leads which partition, who coordinates which group.
//!
//! Owns one connection per broker, made when needed and again after it closed, and a cache of topic
//! metadata that callers drop when an answer shows it to be old. Decides no retries: callers do, by
//! `ClientError::is_retriable` and `forget`. Metadata is read from another broker each time, so that one
//! whose view is old is not believed for ever.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kafka::messages::{FindCoordinatorRequest, MetadataRequest, MetadataResponse, metadata_request};
use kafka::{BrokerId, ErrorCode, LeaderEpoch, StrBytes, TopicId};
use parking_lot::Mutex;

use crate::connection::{ConnectOptions, Connection};
use crate::endpoint::Endpoint;
use crate::error::ClientError;

/// A cheap handle; clones share connections and cache.
#[derive(Clone)]
pub struct Cluster {
    shared: Arc<Shared>,
}

struct Shared {
    bootstrap: Vec<Endpoint>,
    options: ConnectOptions,
    state: Mutex<State>,
    /// Held while connecting to an address, so that many callers make one connection.
    connecting: Mutex<HashMap<Endpoint, Arc<tokio::sync::Mutex<()>>>>,
}

#[derive(Default)]
struct State {
    brokers: HashMap<i32, Endpoint>,
    controller: Option<i32>,
    cluster_id: Option<String>,
    topics: HashMap<String, TopicMetadata>,
    connections: HashMap<Endpoint, Connection>,
    /// Addresses that did not answer, and when.
    unreachable: HashMap<Endpoint, Instant>,
    /// Counts the questions about metadata.
    turn: usize,
}

/// An address that did not answer is asked last for so long.
const UNREACHABLE_FOR: Duration = Duration::from_secs(5);

/// Topics kept in the cache; beyond this it starts anew.
const TOPICS_CACHED_MAX: usize = 100_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicMetadata {
    pub name: String,
    pub id: TopicId,
    pub is_internal: bool,
    /// By ascending index.
    pub partitions: Vec<PartitionMetadata>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionMetadata {
    pub index: i32,
    pub leader: BrokerId,
    pub leader_epoch: LeaderEpoch,
}

impl Cluster {
    /// Connects to nothing yet.
    pub fn new(bootstrap: Vec<Endpoint>, options: ConnectOptions) -> Cluster {
        Cluster {
            shared: Arc::new(Shared {
                bootstrap,
                options,
                state: Mutex::default(),
                connecting: Mutex::default(),
            }),
        }
    }

    pub fn options(&self) -> &ConnectOptions {
        &self.shared.options
    }

    /// A connection to any broker: one that is open, else the first that answers.
    pub async fn any(&self) -> Result<Connection, ClientError> {
        let candidates: Vec<Endpoint> = {
            let state = self.shared.state.lock();
            if let Some(open) = state.connections.values().find(|connection| !connection.is_closed()) {
                return Ok(open.clone());
            }
            self.shared.bootstrap.iter().chain(state.brokers.values()).cloned().collect()
        };
        let mut last = None;
        for endpoint in candidates {
            match self.connection_to(&endpoint).await {
                Ok(connection) => return Ok(connection),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| ClientError::Connect {
            endpoint: Endpoint::new("", 0),
            reason: "no bootstrap address is given".to_owned(),
        }))
    }

    pub async fn broker(&self, id: BrokerId) -> Result<Connection, ClientError> {
        let known = self.shared.state.lock().brokers.get(&id.0).cloned();
        let endpoint = match known {
            Some(endpoint) => endpoint,
            None => {
                self.read_metadata(Some(&[]), false).await?;
                self.shared.state.lock().brokers.get(&id.0).cloned().ok_or_else(|| ClientError::Refused {
                    what: format!("broker {id}"),
                    code: ErrorCode::BrokerNotAvailable.code(),
                    message: Some("the cluster does not list it".to_owned()),
                })?
            }
        };
        self.connection_to(&endpoint).await
    }

    /// The connection to a broker that is open already.
    pub fn open(&self, id: BrokerId) -> Option<Connection> {
        let endpoint = self.shared.state.lock().brokers.get(&id.0).cloned()?;
        self.open_connection(&endpoint)
    }

    /// Whether any broker is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.state.lock().connections.values().any(|connection| !connection.is_closed())
    }

    /// The broker that takes admin requests.
    pub async fn controller(&self) -> Result<Connection, ClientError> {
        let known = self.shared.state.lock().controller;
        let id = match known {
            Some(id) => id,
            None => {
                self.read_metadata(Some(&[]), false).await?;
                self.shared.state.lock().controller.unwrap_or(-1)
            }
        };
        if id < 0 { self.any().await } else { self.broker(BrokerId(id)).await }
    }

    pub async fn cluster_id(&self) -> Result<Option<String>, ClientError> {
        self.read_metadata(Some(&[]), false).await?;
        Ok(self.shared.state.lock().cluster_id.clone())
    }

    /// All brokers with their addresses on the listener that was asked.
    pub async fn brokers(&self) -> Result<Vec<(BrokerId, Endpoint)>, ClientError> {
        self.read_metadata(Some(&[]), false).await?;
        let state = self.shared.state.lock();
        let mut brokers: Vec<_> = state.brokers.iter().map(|(id, at)| (BrokerId(*id), at.clone())).collect();
        brokers.sort_by_key(|(id, _)| *id);
        Ok(brokers)
    }

    /// All topics, by name, read now.
    pub async fn topics(&self) -> Result<Vec<TopicMetadata>, ClientError> {
        let answer = self.read_metadata(None, false).await?;
        let mut topics: Vec<_> =
            answer.topics.iter().filter(|topic| topic.error_code == 0).map(topic_metadata).collect();
        topics.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(topics)
    }

    /// Those of these topics that exist, by name, read now.
    pub async fn read_topics(&self, names: &[&str]) -> Result<Vec<TopicMetadata>, ClientError> {
        let answer = self.read_metadata(Some(names), false).await?;
        Ok(answer.topics.iter().filter(|topic| topic.error_code == 0).map(topic_metadata).collect())
    }

    /// One topic, from the cache if it is there. `create`: the broker may create it.
    pub async fn topic(&self, name: &str, create: bool) -> Result<TopicMetadata, ClientError> {
        if let Some(topic) = self.shared.state.lock().topics.get(name) {
            return Ok(topic.clone());
        }
        let answer = self.read_metadata(Some(&[name]), create).await?;
        let topic =
            answer.topics.iter().find(|topic| topic.name.as_ref().is_some_and(|n| n.as_str() == name));
        let code = topic.map_or(ErrorCode::UnknownTopicOrPartition.code(), |topic| topic.error_code);
        ClientError::check(|| format!("topic {name}"), code, None)?;
        topic.map(topic_metadata).ok_or_else(|| unknown(name))
    }

    /// A connection to the leader of a partition, and its epoch as the cache has it.
    pub async fn leader(&self, topic: &str, index: i32) -> Result<(Connection, LeaderEpoch), ClientError> {
        let metadata = self.topic(topic, false).await?;
        let partition = metadata.partitions.iter().find(|partition| partition.index == index);
        let partition = partition.ok_or_else(|| unknown(&format!("{topic}-{index}")))?;
        if partition.leader.0 < 0 {
            return Err(ClientError::Refused {
                what: format!("partition {topic}-{index}"),
                code: ErrorCode::LeaderNotAvailable.code(),
                message: None,
            });
        }
        Ok((self.broker(partition.leader).await?, partition.leader_epoch))
    }

    /// The coordinator of a group.
    pub async fn coordinator(&self, group: &str) -> Result<Connection, ClientError> {
        let any = self.any().await?;
        let version = any.version_of::<FindCoordinatorRequest>(4)?;
        let group = StrBytes::from_string(group.to_owned());
        let mut request = FindCoordinatorRequest::default();
        if version >= 4 {
            request.coordinator_keys = vec![group.clone()];
        } else {
            request.key = group.clone();
        }
        let answer = any.call_at(version, &request).await?;
        let (code, host, port) = match answer.coordinators.into_iter().next() {
            Some(found) => (found.error_code, found.host, found.port),
            None => (answer.error_code, answer.host, answer.port),
        };
        ClientError::check(|| format!("coordinator of group {group}"), code, None)?;
        self.connection_to(&Endpoint::new(host.to_string(), port as u16)).await
    }

    /// Drops what the cache knows of a topic; the next look reads it anew.
    pub fn forget(&self, topic: &str) {
        self.shared.state.lock().topics.remove(topic);
    }

    async fn connection_to(&self, endpoint: &Endpoint) -> Result<Connection, ClientError> {
        if let Some(open) = self.open_connection(endpoint) {
            return Ok(open);
        }
        let turn = self.shared.connecting.lock().entry(endpoint.clone()).or_default().clone();
        let _one = turn.lock().await;
        if let Some(open) = self.open_connection(endpoint) {
            return Ok(open);
        }
        let connected = Connection::connect(endpoint, &self.shared.options).await;
        let mut state = self.shared.state.lock();
        let connection = match connected {
            Ok(connection) => connection,
            Err(error) => {
                state.unreachable.retain(|_, at| at.elapsed() < UNREACHABLE_FOR);
                state.unreachable.insert(endpoint.clone(), Instant::now());
                return Err(error);
            }
        };
        state.unreachable.remove(endpoint);
        state.connections.retain(|_, connection| !connection.is_closed());
        state.connections.insert(endpoint.clone(), connection.clone());
        Ok(connection)
    }

    fn open_connection(&self, endpoint: &Endpoint) -> Option<Connection> {
        let state = self.shared.state.lock();
        state.connections.get(endpoint).filter(|connection| !connection.is_closed()).cloned()
    }

    /// A connection for a question about the cluster.
    async fn next(&self) -> Result<Connection, ClientError> {
        let candidates = self.shared.state.lock().candidates(&self.shared.bootstrap);
        let mut last = None;
        for endpoint in candidates {
            match self.connection_to(&endpoint).await {
                Ok(connection) => return Ok(connection),
                Err(error) => last = Some(error),
            }
        }
        match last {
            Some(error) => Err(error),
            None => self.any().await,
        }
    }

    /// `None` asks for all topics, an empty list for the brokers alone.
    async fn read_metadata(
        &self,
        topics: Option<&[&str]>,
        create: bool,
    ) -> Result<MetadataResponse, ClientError> {
        let broker = self.next().await?;
        let version = broker.version(3, 1, 12)?;
        let topics = topics.map(|names| {
            let topic = |name: &&str| {
                let name = StrBytes::from_string((*name).to_owned());
                metadata_request::MetadataRequestTopic::default().with_name(Some(name.into()))
            };
            names.iter().map(topic).collect()
        });
        let mut request = MetadataRequest::default().with_topics(topics);
        // Before version 4 there is no such field, and the broker takes it as true.
        request.allow_auto_topic_creation = create || version < 4;
        let answer = broker.call_at(version, &request).await?;
        self.keep(&answer, broker.endpoint());
        Ok(answer)
    }

    fn keep(&self, answer: &MetadataResponse, told_by: &Endpoint) {
        let mut state = self.shared.state.lock();
        if !answer.brokers.is_empty() {
            let endpoint = |host: &StrBytes, port: i32| Endpoint::new(host.to_string(), port as u16);
            state.brokers = answer.brokers.iter().map(|b| (b.node_id.0, endpoint(&b.host, b.port))).collect();
            if let [alone] = answer.brokers.as_slice() {
                // It has just answered at this address, whatever it tells others.
                state.brokers.insert(alone.node_id.0, told_by.clone());
            }
        }
        state.controller = Some(answer.controller_id.0).filter(|id| *id >= 0);
        state.cluster_id = answer.cluster_id.as_ref().map(|id| id.to_string());
        if state.topics.len() + answer.topics.len() > TOPICS_CACHED_MAX {
            state.topics.clear();
        }
        for topic in answer.topics.iter().filter(|topic| topic.error_code == 0).take(TOPICS_CACHED_MAX) {
            let topic = topic_metadata(topic);
            state.topics.insert(topic.name.clone(), topic);
        }
    }
}

impl State {
    /// Whom to ask next, and whom after that.
    fn candidates(&mut self, bootstrap: &[Endpoint]) -> Vec<Endpoint> {
        self.turn = self.turn.wrapping_add(1);
        let mut known: Vec<_> = self.brokers.iter().collect();
        known.sort_by_key(|(id, _)| **id);
        let mut candidates: Vec<Endpoint> = known.into_iter().map(|(_, at)| at.clone()).collect();
        if !candidates.is_empty() {
            let first = self.turn % candidates.len();
            candidates.rotate_left(first);
        }
        for endpoint in bootstrap {
            if !candidates.contains(endpoint) {
                candidates.push(endpoint.clone());
            }
        }
        let failed = |at: &Instant| at.elapsed() < UNREACHABLE_FOR;
        candidates.sort_by_key(|endpoint| self.unreachable.get(endpoint).is_some_and(failed));
        candidates
    }
}

fn topic_metadata(topic: &kafka::messages::metadata_response::MetadataResponseTopic) -> TopicMetadata {
    let partition = |p: &kafka::messages::metadata_response::MetadataResponsePartition| PartitionMetadata {
        index: p.partition_index,
        leader: BrokerId(p.leader_id.0),
        leader_epoch: LeaderEpoch(p.leader_epoch),
    };
    let mut partitions: Vec<_> = topic.partitions.iter().map(partition).collect();
    partitions.sort_by_key(|partition| partition.index);
    TopicMetadata {
        name: topic.name.as_ref().map(|name| name.to_string()).unwrap_or_default(),
        id: TopicId(topic.topic_id),
        is_internal: topic.is_internal,
        partitions,
    }
}

fn unknown(what: &str) -> ClientError {
    ClientError::Refused {
        what: what.to_owned(),
        code: ErrorCode::UnknownTopicOrPartition.code(),
        message: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> Endpoint {
        Endpoint::new("h", port)
    }

    #[test]
    fn every_broker_is_asked_in_turn_and_one_that_did_not_answer_last() {
        let bootstrap = [at(1), at(9)];
        let mut state = State::default();
        assert_eq!(state.candidates(&bootstrap), bootstrap);
        state.brokers = [(1, at(1)), (2, at(2)), (3, at(3))].into();
        let mut first: Vec<_> = (0..3).map(|_| state.candidates(&bootstrap)[0].port).collect();
        first.sort_unstable();
        assert_eq!(first, [1, 2, 3]);
        state.unreachable.insert(at(2), Instant::now());
        for _ in 0..3 {
            let all = state.candidates(&bootstrap);
            assert_eq!((all.len(), &all[3]), (4, &at(2)));
        }
    }
}
