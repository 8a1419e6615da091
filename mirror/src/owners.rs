//! Who owns which partition of the own region, and a connection to each owner, for one half of a session.
//!
//! What is known may be old: an owner that is none any more says so, and the caller forgets the topic and
//! looks again. Requests to one owner go out in the order of the calls, and it starts them in that order,
//! so a position read after an append sees it.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use kafka::private::{MIRROR_VECTORS, PartitionVector, VectorsAnswer, VectorsRequest};
use kafka::{BrokerId, ErrorCode, LeaderEpoch, Offset, TopicId, TopicName};
use kafka_client::{ClientError, Cluster, Connection, TopicMetadata};
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::link::Place;
use crate::local::{Local, LocalError, Target, read, start};

/// The owners of partitions, as one half of a session asks them. Cheap to share.
pub struct Owners {
    cluster: Cluster,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// By index; `None` is led by nobody. Of a topic that is not there, an empty list.
    topics: HashMap<TopicName, Vec<Option<Led>>>,
    /// Brokers that could not be reached, since when, and why.
    unreachable: HashMap<BrokerId, (Instant, String)>,
    /// Brokers with which there was a connection.
    connected: HashMap<BrokerId, Connection>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Led {
    by: BrokerId,
    epoch: LeaderEpoch,
}

/// Where a partition is asked for. From another seat it may be told of another past.
#[derive(Clone)]
pub struct Seat {
    pub broker: BrokerId,
    epoch: LeaderEpoch,
    pub connection: Connection,
}

impl Seat {
    /// The same owner in the same life, asked without a break.
    pub fn is_same(&self, other: &Seat) -> bool {
        self.broker == other.broker
            && self.epoch == other.epoch
            && self.connection.is_same(&other.connection)
            && !self.connection.is_closed()
    }
}

impl Owners {
    /// Connects to a broker of the region.
    pub async fn connect(target: &Target) -> Result<Arc<Owners>, LocalError> {
        let owners = Owners { cluster: target.cluster(), known: Mutex::default() };
        owners.brokers().await?;
        Ok(Arc::new(owners))
    }

    /// Any broker, for what every broker answers.
    pub async fn any(&self) -> Result<Local, LocalError> {
        Ok(Local::on(self.cluster.any().await?))
    }

    /// Where a partition is asked for, or why it cannot be now; `None` where [`Self::look`] must find out.
    pub fn seat(&self, place: &Place) -> Option<Result<Seat, String>> {
        let mut known = self.known.lock();
        let indexes = known.topics.get(&place.0)?;
        let led = usize::try_from(place.1.0).ok().and_then(|index| indexes.get(index).copied().flatten());
        let Some(led) = led else { return Some(Err("no broker of the region leads it now".to_owned())) };
        if let Some(connection) = self.cluster.open(led.by) {
            known.connected.insert(led.by, connection.clone());
            return Some(Ok(Seat { broker: led.by, epoch: led.epoch, connection }));
        }
        let (since, reason) = known.unreachable.get(&led.by)?;
        (since.elapsed() < UNREACHABLE_FOR).then(|| Err(format!("broker {}: {reason}", led.by)))
    }

    /// The connection to a broker, if it is open.
    pub fn connection(&self, broker: BrokerId) -> Option<Connection> {
        self.cluster.open(broker)
    }

    /// What is known of a topic is old.
    pub fn forget(&self, topic: &TopicName) {
        self.known.lock().topics.remove(topic);
    }

    /// Finds out who owns these topics' partitions, where that is not known, and connects to them. Fails
    /// only where no broker of the region can be reached.
    pub async fn look(&self, topics: BTreeSet<TopicName>) -> Result<(), LocalError> {
        let missing: Vec<TopicName> = {
            let known = self.known.lock();
            topics.iter().filter(|topic| !known.topics.contains_key(*topic)).cloned().collect()
        };
        self.read(&missing).await?;
        let mut wanted: BTreeSet<BrokerId> = {
            let known = self.known.lock();
            let led = topics.iter().filter_map(|topic| known.topics.get(topic)).flatten();
            led.flatten().map(|led| led.by).collect()
        };
        wanted.retain(|broker| self.cluster.open(*broker).is_none());
        let connecting: Vec<_> =
            wanted.into_iter().map(|broker| connect(self.cluster.clone(), broker)).collect();
        let connected = join_all(connecting).await;
        let mut last = None;
        for (broker, connected) in connected {
            let mut known = self.known.lock();
            match connected {
                Ok(_) => drop(known.unreachable.remove(&broker)),
                Err(error) => {
                    known.unreachable.insert(broker, (Instant::now(), error.to_string()));
                    last = Some(error);
                }
            }
        }
        match last {
            Some(error) if !self.cluster.is_connected() => Err(error.into()),
            _ => Ok(()),
        }
    }

    async fn read(&self, topics: &[TopicName]) -> Result<(), LocalError> {
        for some in topics.chunks(TOPICS_MAX) {
            let (cluster, names) = (self.cluster.clone(), some.to_vec());
            let ask = move || read_topics(cluster.clone(), names.clone()).boxed();
            let found = of_cluster(ask).await?;
            let mut known = self.known.lock();
            for topic in some {
                let mut led = Vec::new();
                let there = found.iter().find(|found| found.name == topic.as_str());
                for partition in there.iter().flat_map(|found| &found.partitions) {
                    let index = usize::try_from(partition.index).unwrap_or(0);
                    led.resize(led.len().max(index + 1), None);
                    let is_led = partition.leader.0 >= 0;
                    led[index] =
                        is_led.then_some(Led { by: partition.leader, epoch: partition.leader_epoch });
                }
                known.topics.insert(topic.clone(), led);
            }
        }
        Ok(())
    }

    /// Every broker that is alive.
    async fn brokers(&self) -> Result<Vec<BrokerId>, LocalError> {
        let cluster = self.cluster.clone();
        of_cluster(move || read_brokers(cluster.clone()).boxed()).await
    }

    /// Keeps what is known up to date, and lets go of brokers that the cluster counts as gone: nobody waits
    /// for them any more. Of a broker that is alone there is little to learn: which topics are gone.
    pub async fn follow(self: Arc<Self>) {
        for round in 1_u64.. {
            tokio::time::sleep(FOLLOW_EVERY).await;
            // Whoever asks for something meets the error himself.
            let Ok(brokers) = self.brokers().await else { continue };
            let topics: Vec<TopicName> = {
                let mut known = self.known.lock();
                known.connected.retain(|broker, connection| {
                    let stays = brokers.contains(broker);
                    if !stays {
                        connection.abandon();
                    }
                    stays
                });
                known.topics.keys().cloned().collect()
            };
            if brokers.len() > 1 || round % ROUNDS_ALONE == 0 {
                let _ = self.read(&topics).await;
                // Who asks for one that is not there looks again.
                self.known.lock().topics.retain(|_, indexes| !indexes.is_empty());
            }
        }
    }

    /// What partitions hold, each as its owner says; with an error where it cannot be asked now. And from
    /// where it was said.
    pub async fn vectors(
        &self,
        places: &[Place],
    ) -> Result<Vec<(PartitionVector, Option<Seat>)>, LocalError> {
        self.look(places.iter().map(|place| place.0.clone()).collect()).await?;
        let mut answers: Vec<_> =
            places.iter().map(|_| (unknown(ErrorCode::LeaderNotAvailable), None)).collect();
        let mut groups: HashMap<BrokerId, (Connection, Vec<usize>)> = HashMap::new();
        let mut nowhere = Vec::new();
        for (at, place) in places.iter().enumerate() {
            match self.seat(place) {
                Some(Ok(seat)) => {
                    let group = groups.entry(seat.broker).or_insert((seat.connection.clone(), Vec::new()));
                    group.1.push(at);
                    answers[at].1 = Some(seat);
                }
                // Whether it is there at all, every broker can say.
                _ if !self.is_there(&place.0) => nowhere.push(at),
                _ => self.forget(&place.0),
            }
        }
        let mut started = Vec::new();
        if !nowhere.is_empty() {
            started.push((ask(self.cluster.any().await?, places, &nowhere).await, nowhere));
        }
        for (connection, asked) in groups.into_values() {
            started.push((ask(connection, places, &asked).await, asked));
        }
        for (answer, asked) in started {
            let answer: Result<VectorsAnswer, LocalError> = match answer {
                Ok(answer) => read(MIRROR_VECTORS, answer).await,
                Err(error) => Err(error),
            };
            let vectors = match answer {
                Ok(answer) => answer.partitions,
                Err(error) if error.is_of_one_broker() => Vec::new(),
                Err(error) => return Err(error),
            };
            let mut vectors = vectors.into_iter();
            for at in asked {
                answers[at].0 = vectors.next().unwrap_or_else(|| unknown(ErrorCode::NetworkException));
                if answers[at].0.error == ErrorCode::None && answers[at].1.is_none() {
                    // It came up in between; the next look finds its owner.
                    answers[at].0 = unknown(ErrorCode::LeaderNotAvailable);
                }
                if answers[at].0.error != ErrorCode::None {
                    answers[at].1 = None;
                    self.forget(&places[at].0);
                }
            }
        }
        Ok(answers)
    }

    fn is_there(&self, topic: &TopicName) -> bool {
        self.known.lock().topics.get(topic).is_some_and(|indexes| !indexes.is_empty())
    }
}

/// Asks about the cluster: another broker where one fails or hangs.
async fn of_cluster<T>(
    ask: impl Fn() -> BoxFuture<'static, Result<T, ClientError>>,
) -> Result<T, LocalError> {
    let mut last = None;
    for _ in 0..CLUSTER_TRIES {
        match timeout(CLUSTER_WITHIN, ask()).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if error.is_retriable() => last = Some(error),
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => {}
        }
    }
    Err(last.map_or(LocalError::Silent, LocalError::Client))
}

async fn read_brokers(cluster: Cluster) -> Result<Vec<BrokerId>, ClientError> {
    Ok(cluster.brokers().await?.into_iter().map(|(id, _)| id).collect())
}

async fn read_topics(cluster: Cluster, names: Vec<TopicName>) -> Result<Vec<TopicMetadata>, ClientError> {
    let names: Vec<&str> = names.iter().map(TopicName::as_str).collect();
    cluster.read_topics(&names).await
}

async fn connect(cluster: Cluster, broker: BrokerId) -> (BrokerId, Result<Connection, ClientError>) {
    (broker, cluster.broker(broker).await)
}

async fn ask(
    connection: Connection,
    places: &[Place],
    asked: &[usize],
) -> Result<kafka_client::Answer, LocalError> {
    let partitions = asked.iter().map(|at| places[*at].clone()).collect();
    start(&connection, MIRROR_VECTORS, &VectorsRequest { partitions }).await
}

fn unknown(error: ErrorCode) -> PartitionVector {
    PartitionVector {
        error,
        id: TopicId(uuid::Uuid::nil()),
        log_start: Offset::ZERO,
        durable: Offset::ZERO,
        origins: Vec::new(),
    }
}

/// Topics in one question about metadata.
const TOPICS_MAX: usize = 500;
/// How long a broker that could not be reached is not tried again.
const UNREACHABLE_FOR: Duration = Duration::from_secs(1);
/// Brokers that are asked, one after the other, before the region counts as gone; and for how long each.
const CLUSTER_TRIES: usize = 3;
const CLUSTER_WITHIN: Duration = Duration::from_secs(5);
const FOLLOW_EVERY: Duration = Duration::from_secs(2);
/// So many times less often where there is one broker.
const ROUNDS_ALONE: u64 = 15;
