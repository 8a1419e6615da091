//! The region a command talks to: found by one Kafka address, all else through it.
//!
//! The control address is the broker's configuration `sealane.control.address`; lane addresses come
//! from control.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use chassis::tls::{ClientTls, TlsFiles};
use control::TlsPaths;
use kafka::StrBytes;
use kafka::messages::describe_configs_request::DescribeConfigsResource;
use kafka::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic};
use kafka::messages::{BrokerId, DescribeConfigsRequest};
use kafka_client::{ClientError, Cluster, ConnectOptions, Endpoint, Security};

use crate::args::Server;

/// A region as a client of it.
pub struct Region {
    pub kafka: Cluster,
    server: Server,
}

impl Region {
    /// Connects nothing yet, but reads the files that `server` names.
    pub fn new(server: &Server) -> anyhow::Result<Region> {
        let bootstrap = Endpoint::parse_list(&server.server).context("--server")?;
        Ok(Region { kafka: Cluster::new(bootstrap, connect_options(server)?), server: server.clone() })
    }

    /// The region's control service.
    pub async fn control(&self) -> anyhow::Result<control::Client> {
        let address = self.control_address().await?;
        let Some(address) = address.strip_prefix("https://") else {
            return Ok(control::connect(&address, None).await?);
        };
        match (&self.server.tls_ca, &self.server.tls_cert, &self.server.tls_key) {
            (Some(ca), Some(cert), Some(key)) => {
                Ok(control::connect(address, Some(TlsPaths { ca, cert, key })).await?)
            }
            _ => bail!(
                "the control service at {address} wants a certificate: give --tls-ca, --tls-cert and --tls-key (those \
                 of `sealane local` are in the folder tls of its data directory)"
            ),
        }
    }

    async fn control_address(&self) -> anyhow::Result<String> {
        let configs = self.configs(BROKER_RESOURCE, None, Some(&[CONTROL_ADDRESS])).await?;
        match configs.into_iter().find_map(|config| config.value.filter(|value| !value.is_empty())) {
            Some(address) => Ok(address),
            None => bail!(
                "the broker at {} names no control service; set control_bind or control_advertised in its configuration",
                self.server.server
            ),
        }
    }

    /// The region seen through a lane's own address.
    pub async fn in_lane(&self, lane: &str) -> anyhow::Result<Region> {
        let answer = self.control().await?.list_lanes(control::v1::ListLanesRequest {}).await?;
        let found = answer.into_inner().lanes.into_iter().find(|known| known.name == lane);
        let Some(found) = found else {
            bail!("lane {lane} does not exist; `sealane lane create {lane}` makes it");
        };
        if found.address.is_empty() {
            bail!("lane {lane} has no address; is a lane-router set up for this region?");
        }
        let server = Server { server: found.address, ..self.server.clone() };
        Region::new(&server)
    }

    /// Configuration of a topic, or of the broker where `name` is `None`; all keys without `keys`.
    pub async fn configs(
        &self,
        resource_type: i8,
        name: Option<&str>,
        keys: Option<&[&str]>,
    ) -> anyhow::Result<Vec<Config>> {
        let mut connection = self.kafka.any().await?;
        let name = match name {
            Some(name) => name.to_owned(),
            None => {
                // A broker tells its own configuration only: the one at the other end, if it can be told.
                let brokers = self.kafka.brokers().await?;
                let here = brokers.iter().find(|(_, endpoint)| endpoint == connection.endpoint());
                let Some((id, _)) = here.or(brokers.first()) else { bail!("the region names no broker") };
                connection = self.kafka.broker(*id).await?;
                id.0.to_string()
            }
        };
        let keys = keys.map(|keys| keys.iter().map(|key| text(key)).collect());
        let resource = DescribeConfigsResource::default()
            .with_resource_type(resource_type)
            .with_resource_name(text(&name))
            .with_configuration_keys(keys);
        let answer =
            connection.call(&DescribeConfigsRequest::default().with_resources(vec![resource])).await?;
        let mut configs = Vec::new();
        for result in answer.results {
            let message = result.error_message.as_ref().map(ToString::to_string);
            ClientError::check(|| format!("configuration of {name}"), result.error_code, message)?;
            configs.extend(result.configs.into_iter().map(|config| Config {
                name: config.name.to_string(),
                value: config.value.map(|value| value.to_string()),
                is_default: config.config_source == DEFAULT_CONFIG,
            }));
        }
        Ok(configs)
    }

    /// Offset by partition at a time (milliseconds, or [`LATEST`], [`EARLIEST`]).
    pub async fn offsets(
        &self,
        topic: &str,
        partitions: &[i32],
        timestamp: i64,
    ) -> Result<BTreeMap<i32, i64>, ClientError> {
        let mut offsets = BTreeMap::new();
        for index in partitions {
            let (connection, _) = self.kafka.leader(topic, *index).await?;
            let partition =
                ListOffsetsPartition::default().with_partition_index(*index).with_timestamp(timestamp);
            let asked =
                ListOffsetsTopic::default().with_name(text(topic).into()).with_partitions(vec![partition]);
            let request =
                ListOffsetsRequest::default().with_replica_id(BrokerId(-1)).with_topics(vec![asked]);
            // From version 10 on the request has a timeout of its own, which we do not need.
            let version = connection.version_of::<ListOffsetsRequest>(9)?;
            let answer = connection.call_at(version, &request).await?;
            for partition in answer.topics.into_iter().flat_map(|topic| topic.partitions) {
                ClientError::check(|| format!("offsets of {topic}-{index}"), partition.error_code, None)?;
                offsets.insert(partition.partition_index, partition.offset);
            }
        }
        Ok(offsets)
    }
}

/// One key of a topic's or broker's configuration.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Config {
    pub name: String,
    pub value: Option<String>,
    pub is_default: bool,
}

fn connect_options(server: &Server) -> anyhow::Result<ConnectOptions> {
    let security = match (&server.tls_ca, server.tls) {
        (Some(ca), true) => Security::Tls { config: client_tls(server, ca)?, server_name: None },
        _ => Security::Plain,
    };
    Ok(ConnectOptions {
        client_id: "sealane-cli".to_owned(),
        security,
        connect_timeout: Duration::from_secs(10),
        ..ConnectOptions::default()
    })
}

fn client_tls(server: &Server, ca: &Path) -> anyhow::Result<std::sync::Arc<ClientTls>> {
    let tls = match (&server.tls_cert, &server.tls_key) {
        (Some(cert), Some(key)) => {
            let files = TlsFiles { cert: cert.clone(), key: key.clone(), ca: Some(ca.to_owned()) };
            ClientTls::client(&files, &[])?
        }
        _ => ClientTls::anonymous(ca, &[])?,
    };
    Ok(tls)
}

/// A text of the protocol.
pub fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

pub const TOPIC_RESOURCE: i8 = 2;
pub const BROKER_RESOURCE: i8 = 4;
/// Timestamps of ListOffsets with a meaning of their own.
pub const LATEST: i64 = -1;
pub const EARLIEST: i64 = -2;
/// Source of a configuration that nobody has set (Kafka's `ConfigSource`).
const DEFAULT_CONFIG: i8 = 5;
const CONTROL_ADDRESS: &str = "sealane.control.address";
