//! A broker of the own region, as a mirror asks it: private APIs, and topic administration.
//!
//! One `Local` is one connection. Requests go out in the order of the calls and the broker starts
//! them in that order. A connection that fails is not mended here. What only the owner of a partition
//! answers is `owners` and `append`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chassis::tls::ClientTls;
use kafka::messages::TopicName as TopicText;
use kafka::messages::create_partitions_request::{CreatePartitionsRequest, CreatePartitionsTopic};
use kafka::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig, CreateTopicsRequest};
use kafka::messages::delete_topics_request::{DeleteTopicState, DeleteTopicsRequest};
use kafka::messages::incremental_alter_configs_request::{
    AlterConfigsResource, AlterableConfig, IncrementalAlterConfigsRequest,
};
use kafka::private::{
    self, LinksAnswer, LinksRequest, Message, Note, NotesAnswer, NotesRequest, ReportAnswer, ReportRequest,
    TopicInfo, TopicsAnswer, TopicsRequest,
};
use kafka::wire::WireError;
use kafka::{ErrorCode, StrBytes, TopicId, TopicName};
use kafka_client::{Answer, ClientError, Cluster, ConnectOptions, Connection, Endpoint, Security};

/// How to reach the brokers of the own region.
#[derive(Clone)]
pub struct Target {
    /// One that answers is enough.
    pub bootstrap: Vec<Endpoint>,
    pub tls: Arc<ClientTls>,
    pub server_name: Option<String>,
}

/// One connection to a broker.
#[derive(Clone)]
pub struct Local {
    connection: Connection,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum LocalError {
    #[error("the region's own broker: {0}")]
    Client(#[from] ClientError),
    #[error("the region's own broker answered what cannot be read: {0}")]
    Wire(#[from] WireError),
    #[error("the region's own brokers do not answer")]
    Silent,
    #[error("the region's own broker refused {api}: {code:?}")]
    Refused { api: &'static str, code: ErrorCode },
}

impl Target {
    /// The brokers, none of them connected yet.
    pub fn cluster(&self) -> Cluster {
        let options = ConnectOptions {
            client_id: "sealane-mirror".to_owned(),
            security: Security::Tls { config: self.tls.clone(), server_name: self.server_name.clone() },
            connect_timeout: Duration::from_secs(4),
            request_timeout: REQUEST,
            tls_read_bytes: TLS_READ_BYTES,
            ..ConnectOptions::default()
        };
        Cluster::new(self.bootstrap.clone(), options)
    }
}

impl LocalError {
    /// The broker that was asked is at fault, and another may answer.
    pub fn is_of_one_broker(&self) -> bool {
        match self {
            LocalError::Client(error) => error.is_retriable(),
            LocalError::Refused { code, .. } => kafka_client::is_retriable(*code),
            LocalError::Wire(_) | LocalError::Silent => false,
        }
    }
}

impl Local {
    pub fn on(connection: Connection) -> Local {
        Local { connection }
    }

    pub fn is_closed(&self) -> bool {
        self.connection.is_closed()
    }

    async fn ask<A: Message>(&self, key: i16, request: &impl Message) -> Result<A, LocalError> {
        read(key, start(&self.connection, key, request).await?).await
    }

    /// The topics of this region, if they are others than at `since`.
    pub async fn topics(&self, since: u64) -> Result<TopicsAnswer, LocalError> {
        self.ask(private::MIRROR_TOPICS, &TopicsRequest { since }).await
    }

    /// The policies of this region's links, if they are others than at `since`.
    pub async fn links(&self, since: u64) -> Result<LinksAnswer, LocalError> {
        self.ask(private::MIRROR_LINKS, &LinksRequest { since }).await
    }

    pub async fn report(&self, report: &ReportRequest) -> Result<(), LocalError> {
        self.ask::<ReportAnswer>(private::MIRROR_REPORT, report).await.map(|_| ())
    }

    /// Keeps notes durably.
    pub async fn note(&self, notes: Vec<Note>) -> Result<(), LocalError> {
        let request = NotesRequest { add: notes, list: None };
        self.ask::<NotesAnswer>(private::MIRROR_NOTES, &request).await.map(|_| ())
    }

    /// All notes about a peer.
    pub async fn notes(&self, peer: &str) -> Result<Vec<Note>, LocalError> {
        let request = NotesRequest { add: Vec::new(), list: Some(peer.to_owned()) };
        Ok(self.ask::<NotesAnswer>(private::MIRROR_NOTES, &request).await?.notes)
    }

    /// Creates a topic as the peer has it. One that exists already is no error.
    pub async fn create_topic(&self, like: &TopicInfo) -> Result<(), LocalError> {
        let configs = like.configs.iter().map(|(key, value)| {
            CreatableTopicConfig::default().with_name(text(key)).with_value(Some(text(value)))
        });
        let topic = CreatableTopic::default()
            .with_name(topic_text(&like.name))
            .with_num_partitions(like.partitions)
            .with_replication_factor(-1)
            .with_configs(configs.collect());
        let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(ADMIN_MS);
        let answer = self.connection.call(&request).await?;
        let Some(result) = answer.topics.first() else { return Ok(()) };
        match ErrorCode::from_code(result.error_code) {
            Some(ErrorCode::TopicAlreadyExists) => Ok(()),
            _ => refused("creating it", result.error_code, result.error_message.as_ref()),
        }
    }

    /// Deletes this incarnation of a topic. One that is gone already is no error.
    pub async fn delete_topic(&self, id: TopicId) -> Result<(), LocalError> {
        let topic = DeleteTopicState::default().with_topic_id(id.0);
        let request = DeleteTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(ADMIN_MS);
        let answer = self.connection.call(&request).await?;
        let Some(result) = answer.responses.first() else { return Ok(()) };
        match ErrorCode::from_code(result.error_code) {
            Some(ErrorCode::UnknownTopicId) => Ok(()),
            _ => refused("deleting it", result.error_code, result.error_message.as_ref()),
        }
    }

    pub async fn grow_topic(&self, name: &TopicName, partitions: i32) -> Result<(), LocalError> {
        let topic = CreatePartitionsTopic::default()
            .with_name(topic_text(name))
            .with_count(partitions)
            .with_assignments(None);
        let request = CreatePartitionsRequest::default().with_topics(vec![topic]).with_timeout_ms(ADMIN_MS);
        let answer = self.connection.call(&request).await?;
        let Some(result) = answer.results.first() else { return Ok(()) };
        refused("growing it", result.error_code, result.error_message.as_ref())
    }

    pub async fn alter_topic(
        &self,
        name: &TopicName,
        set: &[(String, String)],
        unset: &[String],
    ) -> Result<(), LocalError> {
        const SET: i8 = 0;
        const DELETE: i8 = 1;
        const TOPIC: i8 = 2;
        let change = |key: &str, op, value: Option<&str>| {
            let change = AlterableConfig::default().with_name(text(key)).with_config_operation(op);
            change.with_value(value.map(text))
        };
        let set = set.iter().map(|(key, value)| change(key, SET, Some(value)));
        let unset = unset.iter().map(|key| change(key, DELETE, None));
        let resource = AlterConfigsResource::default()
            .with_resource_type(TOPIC)
            .with_resource_name(text(name.as_str()))
            .with_configs(set.chain(unset).collect());
        let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
        let answer = self.connection.call(&request).await?;
        let Some(result) = answer.responses.first() else { return Ok(()) };
        refused("configuring it", result.error_code, result.error_message.as_ref())
    }
}

/// Sends a request of a private key; see [`read`] for its answer.
pub async fn start(connection: &Connection, key: i16, request: &impl Message) -> Result<Answer, LocalError> {
    Ok(connection.start(key, private::VERSION, vec![request.encode()]).await?)
}

/// Waits for the answer to [`start`].
pub async fn read<A: Message>(key: i16, answer: Answer) -> Result<A, LocalError> {
    let bytes: Bytes = answer.received().await?;
    // Every private answer begins with an error code.
    let code = bytes.first_chunk::<2>().map_or(0, |raw| i16::from_be_bytes(*raw));
    match ErrorCode::from_code(code) {
        Some(ErrorCode::None) => Ok(A::decode(bytes)?),
        code => Err(LocalError::Refused {
            api: kafka::api::name(key),
            code: code.unwrap_or(ErrorCode::UnknownServerError),
        }),
    }
}

fn refused(what: &str, code: i16, message: Option<&StrBytes>) -> Result<(), LocalError> {
    Ok(ClientError::check(|| what.to_owned(), code, message.map(|m| m.as_str().to_owned()))?)
}

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn topic_text(name: &TopicName) -> TopicText {
    TopicText(text(name.as_str()))
}

/// Longest wait of a read, and a margin.
const REQUEST: Duration = Duration::from_secs(30);
const ADMIN_MS: i32 = 10_000;
const TLS_READ_BYTES: usize = 128 * 1024;
