//! Brokers in one process that share their stores, and a load on them that counts what is acknowledged.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use broker::Config;
use broker::cluster::ClusterStores;
use broker::config::{ClusterConfig, ListenerConfig};
use broker::service::{self, Stores};
use broker_store::meta::{self, MetaFaults};
use broker_store::{MetaStore, Remote, StorePath, remote};
use chassis::ServiceHandle;
use chassis::certs::CertificateDir;
use chassis::tls::{ClientAuth, ClientTls};
use kafka::batch::{Batch, Codec};
use kafka::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka::messages::delete_topics_request::DeleteTopicState;
use kafka::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka::messages::incremental_alter_configs_request::{AlterConfigsResource, AlterableConfig};
use kafka::messages::offset_commit_request::{OffsetCommitRequestPartition, OffsetCommitRequestTopic};
use kafka::messages::offset_fetch_request::OffsetFetchRequestTopic;
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::{
    CreateTopicsRequest, DeleteTopicsRequest, FetchRequest, IncrementalAlterConfigsRequest,
    InitProducerIdRequest, OffsetCommitRequest, OffsetFetchRequest, ProduceRequest,
};
use kafka::record::{BatchBuilder, Records, unpack};
use kafka::{ErrorCode, Offset, ProducerEpoch, ProducerId, StrBytes, TimestampMs};
use kafka_client::{Cluster, ConnectOptions, Connection, Endpoint, Security};

pub const PATIENCE: Duration = Duration::from_secs(60);
pub const NAP: Duration = Duration::from_millis(20);

type Meta = meta::Flaky<meta::Memory>;

pub struct Nodes {
    pub remote: remote::Memory,
    meta: meta::Memory,
    nodes: Vec<Node>,
    names: usize,
    /// First port of lanes; 0 for none.
    pub lane_port: u16,
    /// Of the internal listeners; without it there are none.
    certificates: Option<CertificateDir>,
    _certificates: Option<tempfile::TempDir>,
}

struct Node {
    handle: ServiceHandle,
    endpoint: Endpoint,
    internal: Option<Endpoint>,
    control: String,
    id: i32,
    meta: Meta,
    _dir: tempfile::TempDir,
}

impl Nodes {
    pub async fn start(count: usize) -> Nodes {
        Nodes::start_each(count, None).await
    }

    /// The same with a listener for lane-routers at each of them.
    pub async fn start_with_internal(count: usize) -> Nodes {
        Nodes::start_each(count, Some(tempfile::tempdir().unwrap())).await
    }

    async fn start_each(count: usize, certificates: Option<tempfile::TempDir>) -> Nodes {
        // Shown with a failure only.
        let log = tracing_subscriber::fmt().with_test_writer().with_max_level(tracing::Level::INFO);
        let _ = log.try_init();
        let mut nodes = Nodes {
            remote: remote::Memory::new(),
            meta: meta::Memory::new(),
            nodes: Vec::new(),
            names: 0,
            lane_port: 0,
            certificates: certificates.as_ref().map(|dir| CertificateDir::open(dir.path()).unwrap()),
            _certificates: certificates,
        };
        for _ in 0..count {
            nodes.add().await;
        }
        nodes
    }

    /// One more broker; returns when it takes part.
    pub async fn add(&mut self) {
        let dir = tempfile::tempdir().unwrap();
        let meta = meta::Flaky::new(self.meta.clone(), 1, MetaFaults::default());
        let listener = ListenerConfig { bind: "127.0.0.1:0".to_owned(), ..ListenerConfig::default() };
        let internal = self.certificates.as_ref().map(|certificates| ListenerConfig {
            name: "internal".to_owned(),
            tls: Some(certificates.leaf("sealane-broker", &["127.0.0.1"]).unwrap()),
            client_auth: ClientAuth::Required,
            internal: true,
            ..listener.clone()
        });
        self.names += 1;
        let cluster = ClusterConfig {
            identity: format!("node-{}", self.names),
            lease_ms: 2_000,
            sweep_ms: 200,
            ..ClusterConfig::default()
        };
        let config = Config {
            data_dir: dir.path().to_owned(),
            listeners: [listener].into_iter().chain(internal.clone()).collect(),
            control_bind: "127.0.0.1:0".to_owned(),
            lane_port_first: self.lane_port,
            control_tls: internal.as_ref().and_then(|listener| listener.tls.clone()),
            http_bind: String::new(),
            cluster: Some(cluster),
            ..Config::default()
        };
        let stores = ClusterStores { meta: Arc::new(meta.clone()), remote: Arc::new(self.remote.clone()) };
        let handle = ServiceHandle::standalone("broker");
        let running = service::start_on(Stores::Cluster(stores), config, handle.clone()).await.unwrap();
        let endpoint = Endpoint::new("127.0.0.1", running.addresses[0].port());
        let internal = running.addresses.get(1).map(|address| Endpoint::new("127.0.0.1", address.port()));
        let id = running.broker.identity.broker_id.0;
        let control = running.broker.config.control_bind.clone();
        self.nodes.push(Node { handle, endpoint, internal, control, id, meta, _dir: dir });
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Where the node with this broker id is.
    pub fn at(&self, id: i32) -> Option<usize> {
        self.nodes.iter().position(|node| node.id == id)
    }

    pub fn id(&self, at: usize) -> i32 {
        self.nodes[at].id
    }

    pub fn endpoint(&self, at: usize) -> Endpoint {
        self.nodes[at].endpoint.clone()
    }

    pub async fn control(&self, at: usize) -> control::Client {
        let files = self.certificates.as_ref().map(|dir| dir.leaf("sealane-control", &[]).unwrap());
        let tls = files.as_ref().map(|files| control::TlsPaths {
            ca: files.ca.as_deref().unwrap(),
            cert: &files.cert,
            key: &files.key,
        });
        control::connect(&self.nodes[at].control, tls).await.unwrap()
    }

    /// A client of a lane, as its lane-router forwards it; of no lane where it has no name.
    pub fn client_as(&self, client_id: &str, lane: Option<&str>) -> Cluster {
        let Some(lane) = lane else {
            let bootstrap = self.nodes.iter().map(|node| node.endpoint.clone()).collect();
            return Cluster::new(
                bootstrap,
                ConnectOptions { client_id: client_id.to_owned(), ..ConnectOptions::default() },
            );
        };
        let files = self.certificates.as_ref().unwrap().leaf("sealane-lane-router", &[]).unwrap();
        let config = ClientTls::client(&files, &[]).unwrap();
        let options = ConnectOptions {
            client_id: format!("{client_id}@{lane}#127.0.0.1"),
            security: Security::Tls { config, server_name: None },
            ..ConnectOptions::default()
        };
        Cluster::new(self.nodes.iter().filter_map(|node| node.internal.clone()).collect(), options)
    }

    pub async fn stop(mut self) {
        while !self.nodes.is_empty() {
            self.stop_one(0).await;
        }
    }

    pub async fn stop_one(&mut self, at: usize) {
        let node = self.nodes.remove(at);
        node.handle.drain(Duration::from_secs(30)).await.unwrap();
    }

    /// A real lane-router, which knows the brokers that are there now.
    pub async fn start_lane_router(&self, broker_port_step: u16) -> ServiceHandle {
        let files = self.certificates.as_ref().unwrap().leaf("sealane-lane-router", &[]).unwrap();
        let internal = self.nodes.iter().filter_map(|node| node.internal.as_ref());
        let control: Vec<&str> = self.nodes.iter().map(|node| node.control.as_str()).collect();
        let config = lane_router::Config {
            broker: internal.map(|at| format!("{}:{}", at.host, at.port)).collect::<Vec<_>>().join(","),
            tls: files,
            control: control.join(","),
            control_tls: true,
            bind: "127.0.0.1:0".to_owned(),
            broker_port_step,
            ..lane_router::Config::default()
        };
        let handle = ServiceHandle::standalone("lane-router");
        lane_router::start(config, handle.clone()).await.unwrap();
        handle
    }

    /// It ends in the middle of whatever it does.
    pub async fn kill(&mut self, at: usize) {
        let node = self.nodes.remove(at);
        let _ = node.handle.drain(Duration::ZERO).await;
    }

    /// Somebody who is alive, owns nothing, and answers nobody; none again.
    pub async fn pretend_broker(&self, is_there: bool) {
        let key = "brokers/99";
        if is_there {
            let object = br#"{"life":1,"listeners":{},"control":"127.0.0.1:1","roles":[]}"#;
            self.meta.put_if(key, object.to_vec(), None).await.unwrap();
        } else {
            let (_, version) = self.meta.get(key).await.unwrap().unwrap();
            self.meta.delete_if(key, version).await.unwrap();
        }
    }

    /// The lease is gone, and its holder learns it at once.
    pub async fn lose_lease(&self, at: usize) {
        self.nodes[at].meta.lose_leases();
    }

    /// The leases are gone from the store, and their holder does not know.
    pub async fn forget_lease(&self, at: usize) {
        let id = self.nodes[at].id;
        let office = self.meta.get("controller").await.unwrap();
        let is_controller = office.is_some_and(|(value, _)| value == id.to_string().into_bytes());
        let keys = [format!("brokers/{id}"), "controller".to_owned()];
        for key in &keys[..1 + usize::from(is_controller)] {
            if let Some((_, version)) = self.meta.get(key).await.unwrap() {
                self.meta.delete_if(key, version).await.unwrap();
            }
        }
    }

    /// From now on the node hears nothing from the metadata store, and cannot ask it.
    pub async fn deafen(&self, at: usize) {
        self.nodes[at].meta.set_faults(MetaFaults { error_per_mille: 1000, ..MetaFaults::default() });
        self.nodes[at].meta.lose_watches();
    }

    pub async fn hear_again(&self, at: usize) {
        self.nodes[at].meta.set_faults(MetaFaults::default());
    }

    pub async fn until_alive(&self, at: usize) {
        let key = format!("brokers/{}", self.nodes[at].id);
        eventually("it is registered again", async || self.meta.get(&key).await.unwrap().is_some()).await;
    }

    /// Until nothing of the topic is this node's any more.
    pub async fn until_moved(&self, topic: &str, at: usize) {
        let (id, other) = (self.nodes[at].id, (at + 1) % self.nodes.len());
        eventually("others own its partitions", async || {
            let leaders = self.leaders(other, topic).await;
            !leaders.is_empty() && !leaders.contains(&id)
        })
        .await;
    }

    pub async fn connect(&self, at: usize) -> Connection {
        Connection::connect(&self.nodes[at].endpoint, &ConnectOptions::default()).await.unwrap()
    }

    pub fn client(&self) -> Cluster {
        let bootstrap = self.nodes.iter().map(|node| node.endpoint.clone()).collect();
        Cluster::new(bootstrap, ConnectOptions::default())
    }

    pub async fn create_topic(&self, name: &str, partitions: i32) {
        self.create_topic_with(name, partitions, &[]).await;
    }

    pub async fn create_topic_with(&self, name: &str, partitions: i32, configs: &[(&str, &str)]) {
        let config = |(name, value): &(&str, &str)| {
            CreatableTopicConfig::default().with_name(text(name)).with_value(Some(text(value)))
        };
        let topic = CreatableTopic::default().with_name(text(name).into()).with_num_partitions(partitions);
        let topic = topic.with_replication_factor(1).with_configs(configs.iter().map(config).collect());
        let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000);
        let answer = self.connect(0).await.call(&request).await.unwrap();
        assert_eq!(answer.topics[0].error_code, 0, "{answer:?}");
    }

    /// Sets one value through one node; the code of the answer.
    pub async fn alter_topic(&self, at: usize, name: &str, key: &str, value: &str) -> i16 {
        let config = AlterableConfig::default().with_name(text(key)).with_value(Some(text(value)));
        let resource = AlterConfigsResource::default()
            .with_resource_type(2)
            .with_resource_name(text(name))
            .with_configs(vec![config]);
        let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
        self.connect(at).await.call(&request).await.unwrap().responses[0].error_code
    }

    pub async fn delete_topic(&self, name: &str) {
        let topic = DeleteTopicState::default().with_name(Some(text(name).into()));
        let request = DeleteTopicsRequest::default()
            .with_topics(vec![topic])
            .with_topic_names(vec![text(name).into()])
            .with_timeout_ms(10_000);
        let answer = self.connect(0).await.call(&request).await.unwrap();
        assert_eq!(answer.responses[0].error_code, 0, "{answer:?}");
    }

    /// The leaders of a topic as one node tells them, by partition; none if it does not know the topic.
    pub async fn leaders(&self, at: usize, topic: &str) -> Vec<i32> {
        let client = Cluster::new(vec![self.nodes[at].endpoint.clone()], ConnectOptions::default());
        match client.topic(topic, false).await {
            Ok(topic) => {
                let mut partitions = topic.partitions;
                partitions.sort_by_key(|partition| partition.index);
                partitions.iter().map(|partition| partition.leader.0).collect()
            }
            Err(_) => Vec::new(),
        }
    }

    pub fn objects(&self, dir: &str) -> usize {
        self.remote.list(&StorePath::parse(dir).unwrap()).unwrap().len()
    }

    /// Lives whose logs are still there.
    pub fn lives(&self) -> usize {
        self.remote.lives().unwrap().len()
    }

    pub async fn keys(&self, prefix: &str) -> usize {
        self.meta.list(prefix).await.unwrap().len()
    }

    /// One batch of an idempotent producer, sent again while a client would do so; its offset, or the error.
    pub async fn produce(&self, topic: &str, producer: i64, sequence: i32) -> Result<i64, i16> {
        let writer = Writer {
            client: self.client(),
            topic: topic.to_owned(),
            partition: 0,
            producer: ProducerId(producer),
            stop: Arc::default(),
            acknowledged: Arc::default(),
            failed: Arc::default(),
        };
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            match writer.send(writer.batch(sequence, &format!("{sequence}"))).await {
                Ok(Some(offset)) => return Ok(offset),
                Ok(None) => assert!(tokio::time::Instant::now() < end, "nobody takes it"),
                Err(code) => return Err(code),
            }
            tokio::time::sleep(NAP).await;
        }
    }

    pub async fn commit(&self, group: &str, topic: &str, offset: i64) {
        let client = self.client();
        eventually("the offset is committed", async || {
            let Ok(coordinator) = client.coordinator(group).await else { return false };
            let partition = OffsetCommitRequestPartition::default().with_committed_offset(offset);
            let topic = OffsetCommitRequestTopic::default()
                .with_name(text(topic).into())
                .with_partitions(vec![partition]);
            let request =
                OffsetCommitRequest::default().with_group_id(text(group).into()).with_topics(vec![topic]);
            let Ok(answer) = coordinator.call_at(7, &request).await else { return false };
            answer.topics[0].partitions[0].error_code == 0
        })
        .await;
    }

    pub async fn committed(&self, group: &str, topic: &str) -> i64 {
        let client = self.client();
        let found = std::cell::Cell::new(-1);
        eventually("the offset is read", async || {
            let Ok(coordinator) = client.coordinator(group).await else { return false };
            let topic = OffsetFetchRequestTopic::default()
                .with_name(text(topic).into())
                .with_partition_indexes(vec![0]);
            let request = OffsetFetchRequest::default()
                .with_group_id(text(group).into())
                .with_topics(Some(vec![topic]));
            let Ok(answer) = coordinator.call_at(5, &request).await else { return false };
            if answer.error_code != 0 {
                return false;
            }
            found.set(answer.topics[0].partitions[0].committed_offset);
            true
        })
        .await;
        found.get()
    }

    /// Reads everything and compares it with what was acknowledged.
    pub async fn check(&self, topic: &str, sent: &Sent) -> Result<(), String> {
        if let Some(failed) = &sent.failed {
            return Err(failed.clone());
        }
        for (partition, acknowledged) in &sent.by_partition {
            let (values, epochs) = self.read_all(topic, *partition).await;
            let mut seen = BTreeMap::new();
            for (offset, value) in values.iter().enumerate() {
                if let Some(before) = seen.insert(value.clone(), offset) {
                    return Err(format!(
                        "{topic}-{partition}: {value} is there twice, at {before} (epoch {}) and {offset} (epoch {})",
                        epochs[before], epochs[offset]
                    ));
                }
            }
            for (value, offset) in acknowledged {
                match values.get(usize::try_from(*offset).unwrap()) {
                    Some(there) if there == value => {}
                    other => {
                        return Err(format!(
                            "{topic}-{partition}: {value} was acknowledged at {offset}, there is {other:?}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// The values of a partition by offset, and the epochs that they were appended under.
    async fn read_all(&self, topic: &str, partition: i32) -> (Vec<String>, Vec<i32>) {
        let client = self.client();
        let (mut values, mut epochs): (Vec<String>, Vec<i32>) = (Vec::new(), Vec::new());
        let end = tokio::time::Instant::now() + PATIENCE;
        loop {
            assert!(tokio::time::Instant::now() < end, "{topic}-{partition} cannot be read");
            let Ok((leader, _)) = client.leader(topic, partition).await else {
                client.forget(topic);
                tokio::time::sleep(NAP).await;
                continue;
            };
            let asked = FetchPartition::default()
                .with_partition(partition)
                .with_fetch_offset(values.len() as i64)
                .with_partition_max_bytes(4 << 20);
            let topics = FetchTopic::default().with_topic(text(topic).into()).with_partitions(vec![asked]);
            let request = FetchRequest::default().with_max_bytes(8 << 20).with_topics(vec![topics]);
            let answer = match leader.call_at(11, &request).await {
                Ok(mut answer) => answer.responses.remove(0).partitions.remove(0),
                Err(_) => {
                    client.forget(topic);
                    tokio::time::sleep(NAP).await;
                    continue;
                }
            };
            if answer.error_code != 0 {
                assert!(is_retriable(answer.error_code), "{topic}-{partition}: error {}", answer.error_code);
                client.forget(topic);
                tokio::time::sleep(NAP).await;
                continue;
            }
            for batch in Batch::split_all(answer.records.unwrap_or_default(), true).unwrap() {
                let section = unpack(&batch).unwrap();
                for record in Records::new(&section, batch.header.record_count) {
                    let record = record.unwrap();
                    let offset = batch.header.base_offset.0 + i64::from(record.offset_delta);
                    if offset < values.len() as i64 {
                        continue;
                    }
                    assert_eq!(offset, values.len() as i64, "offsets are dense");
                    epochs.push(batch.header.leader_epoch.0);
                    values.push(String::from_utf8(record.value.unwrap().to_vec()).unwrap());
                }
            }
            if values.len() as i64 >= answer.high_watermark {
                return (values, epochs);
            }
        }
    }
}

/// What was acknowledged: value and offset, by partition.
#[derive(Default)]
pub struct Sent {
    pub by_partition: BTreeMap<i32, Vec<(String, i64)>>,
    /// Batches that were sent more than once.
    pub again: u64,
    /// What a producer was told that it cannot get over.
    pub failed: Option<String>,
}

impl Sent {
    pub fn acknowledged(&self) -> usize {
        self.by_partition.values().map(Vec::len).sum()
    }
}

/// What one producer did.
struct Written {
    partition: i32,
    acknowledged: Vec<(String, i64)>,
    again: u64,
    failed: Option<String>,
}

/// One idempotent producer for each partition, one batch in flight each.
pub struct Load {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    failed: Arc<AtomicBool>,
    writers: Vec<tokio::task::JoinHandle<Written>>,
}

impl Load {
    pub async fn start(nodes: &Nodes, topic: &str, partitions: i32) -> Load {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let failed = Arc::new(AtomicBool::new(false));
        let mut writers = Vec::new();
        for partition in 0..partitions {
            let request = InitProducerIdRequest::default().with_transactional_id(None);
            let answer = nodes.connect(0).await.call(&request).await.unwrap();
            assert_eq!(answer.error_code, 0, "{answer:?}");
            let id = answer.producer_id;
            let writer = Writer {
                client: nodes.client(),
                topic: topic.to_owned(),
                partition,
                producer: ProducerId(id.0),
                stop: stop.clone(),
                acknowledged: acknowledged.clone(),
                failed: failed.clone(),
            };
            writers.push(tokio::spawn(writer.run()));
        }
        Load { stop, acknowledged, failed, writers }
    }

    /// Waits for that many more acknowledgements, or for a producer to give up.
    pub async fn until_more(&self, count: u64) {
        let aim = self.acknowledged.load(Ordering::Relaxed) + count;
        let enough =
            || self.failed.load(Ordering::Relaxed) || self.acknowledged.load(Ordering::Relaxed) >= aim;
        eventually("more is acknowledged", async || enough()).await;
    }

    pub async fn stop(self) -> Sent {
        self.stop.store(true, Ordering::Relaxed);
        let mut sent = Sent::default();
        for writer in self.writers {
            let written = writer.await.unwrap();
            sent.by_partition.insert(written.partition, written.acknowledged);
            sent.again += written.again;
            sent.failed = sent.failed.or(written.failed);
        }
        sent
    }
}

struct Writer {
    client: Cluster,
    topic: String,
    partition: i32,
    producer: ProducerId,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    failed: Arc<AtomicBool>,
}

impl Writer {
    async fn run(self) -> Written {
        let mut written =
            Written { partition: self.partition, acknowledged: Vec::new(), again: 0, failed: None };
        for sequence in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let value = format!("{}-{}-{sequence}", self.topic, self.partition);
            let batch = self.batch(sequence, &value);
            let end = tokio::time::Instant::now() + PATIENCE;
            loop {
                match self.send(batch.clone()).await {
                    Ok(Some(offset)) => {
                        written.acknowledged.push((value, offset));
                        self.acknowledged.fetch_add(1, Ordering::Relaxed);
                        break;
                    }
                    Ok(None) if tokio::time::Instant::now() < end => written.again += 1,
                    Ok(None) => written.failed = Some(format!("{value} is not acknowledged")),
                    Err(code) => written.failed = Some(format!("{value} was refused for good: error {code}")),
                }
                if written.failed.is_some() {
                    self.failed.store(true, Ordering::Relaxed);
                    return written;
                }
                self.client.forget(&self.topic);
                tokio::time::sleep(NAP).await;
            }
        }
        written
    }

    fn batch(&self, sequence: i32, value: &str) -> bytes::Bytes {
        let mut builder = BatchBuilder::new(Offset(0), now(), Codec::None);
        builder.producer(self.producer, ProducerEpoch(0), sequence);
        builder.push(0, 0, None, Some(value.as_bytes()), &[]);
        builder.build().bytes
    }

    /// The offset, or `None` where a client tries again; an error that it does not get over.
    async fn send(&self, batch: bytes::Bytes) -> Result<Option<i64>, i16> {
        let Ok((leader, _)) = self.client.leader(&self.topic, self.partition).await else { return Ok(None) };
        let data = PartitionProduceData::default().with_index(self.partition).with_records(Some(batch));
        let topic =
            TopicProduceData::default().with_name(text(&self.topic).into()).with_partition_data(vec![data]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(10_000).with_topic_data(vec![topic]);
        let Ok(answer) = leader.call_at(9, &request).await else { return Ok(None) };
        let answer = &answer.responses[0].partition_responses[0];
        match answer.error_code {
            0 => Ok(Some(answer.base_offset)),
            code if is_retriable(code) => Ok(None),
            code => Err(code),
        }
    }
}

/// Producers whose last batch is of long ago are forgotten, as in Kafka.
pub fn now() -> TimestampMs {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    TimestampMs(since.as_millis() as i64)
}

pub fn is_retriable(code: i16) -> bool {
    ErrorCode::from_code(code).is_some_and(kafka_client::is_retriable)
        || code == ErrorCode::KafkaStorageError.code()
}

/// Waits until a condition holds.
pub async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    let end = tokio::time::Instant::now() + PATIENCE;
    while !holds().await {
        assert!(tokio::time::Instant::now() < end, "not in time: {what}");
        tokio::time::sleep(NAP).await;
    }
}

pub fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}
