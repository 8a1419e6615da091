//! A region of several brokers in one process, on a metadata store and a remote store in memory, each with
//! an internal listener of its own; and a load that counts what is acknowledged.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use broker::cluster::ClusterStores;
use broker::config::{ClusterConfig, ListenerConfig};
use broker::service::{self, Running, Stores};
use broker_store::meta::{self, MetaFaults};
use broker_store::remote::{self, RemoteFaults};
use chassis::ServiceHandle;
use chassis::tls::{ClientAuth, TlsFiles};
use control::v1;
use kafka::batch::Codec;
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::{InitProducerIdRequest, ProduceRequest};
use kafka::record::BatchBuilder;
use kafka::{ErrorCode, Offset, ProducerEpoch, ProducerId};
use kafka_client::{Cluster, ConnectOptions, Endpoint};

use super::{Client, now, text};

type Meta = meta::Flaky<meta::Memory>;

/// The brokers of a region.
pub struct Nodes {
    name: &'static str,
    tls: TlsFiles,
    meta: meta::Memory,
    remote: remote::Flaky<remote::Memory>,
    nodes: Vec<Node>,
    begun: usize,
}

struct Node {
    handle: ServiceHandle,
    running: Running,
    meta: Meta,
    control: u16,
    _dir: tempfile::TempDir,
}

impl Nodes {
    pub async fn start(name: &'static str, tls: &TlsFiles, count: usize) -> Nodes {
        // A store that takes its time, so that units are under way when owners change.
        let late = RemoteFaults {
            delay_per_mille: 1000,
            delay_max: Duration::from_millis(15),
            ..RemoteFaults::default()
        };
        let remote = remote::Flaky::new(remote::Memory::new(), 1, late);
        let (tls, meta) = (tls.clone(), meta::Memory::new());
        let mut nodes = Nodes { name, tls, meta, remote, nodes: Vec::new(), begun: 0 };
        for _ in 0..count {
            nodes.add().await;
        }
        nodes
    }

    /// One more broker; returns when it takes part.
    pub async fn add(&mut self) {
        let dir = tempfile::tempdir().unwrap();
        let meta = meta::Flaky::new(self.meta.clone(), 1, MetaFaults::default());
        let any = "127.0.0.1:0".to_owned();
        let listener = ListenerConfig { bind: any.clone(), ..ListenerConfig::default() };
        let internal = ListenerConfig {
            name: "internal".to_owned(),
            bind: any,
            tls: Some(self.tls.clone()),
            client_auth: ClientAuth::Required,
            internal: true,
            ..ListenerConfig::default()
        };
        self.begun += 1;
        let cluster = ClusterConfig {
            identity: format!("node-{}", self.begun),
            lease_ms: 2_000,
            ..ClusterConfig::default()
        };
        let mut config = broker::Config {
            data_dir: dir.path().to_owned(),
            region: self.name.to_owned(),
            listeners: vec![listener, internal],
            http_bind: String::new(),
            cluster: Some(cluster),
            ..broker::Config::default()
        };
        let stores = ClusterStores { meta: Arc::new(meta.clone()), remote: Arc::new(self.remote.clone()) };
        let handle = ServiceHandle::standalone("broker");
        let mut tries = 0;
        let (running, control) = loop {
            // Another test may take the port before it is used.
            let control = super::free_port();
            config.control_bind = format!("127.0.0.1:{control}");
            let stores = Stores::Cluster(stores.clone());
            match service::start_on(stores, config.clone(), handle.clone()).await {
                Ok(running) => break (running, control),
                Err(error) if tries == 5 => panic!("{error}"),
                Err(_) => tries += 1,
            }
        };
        self.nodes.push(Node { handle, running, meta, control, _dir: dir });
    }

    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Addresses of the internal listeners, for a mirror.
    pub fn internal(&self) -> String {
        let addresses: Vec<String> =
            self.nodes.iter().map(|node| node.running.addresses[1].to_string()).collect();
        addresses.join(",")
    }

    pub fn client(&self) -> Cluster {
        let endpoint = |node: &Node| Endpoint::new("127.0.0.1", node.running.addresses[0].port());
        Cluster::new(self.nodes.iter().map(endpoint).collect(), ConnectOptions::default())
    }

    pub async fn control(&self, at: usize) -> control::Client {
        control::connect(&format!("127.0.0.1:{}", self.nodes[at].control), None).await.unwrap()
    }

    /// The lease is gone, and its holder learns it at once: it begins another life, and others own what was
    /// its own.
    pub fn lose_lease(&self, at: usize) {
        self.nodes[at].meta.lose_leases();
    }

    pub async fn stop_one(&mut self, at: usize) {
        let node = self.nodes.remove(at);
        drop(node.running);
        node.handle.drain(Duration::from_secs(30)).await.unwrap();
    }

    pub async fn stop(mut self) {
        while !self.nodes.is_empty() {
            self.stop_one(0).await;
        }
    }

    /// Hands a partition to another broker than its owner, as a person would; false where it moves already.
    pub async fn move_on(&self, topic: &str, partition: i32) -> bool {
        let Ok(topic_now) = self.fresh(topic).await else { return false };
        let owner = topic_now.partitions[partition as usize].leader.0;
        let ids: Vec<i32> = self.nodes.iter().map(|node| node.running.broker.identity.broker_id.0).collect();
        let to = *ids.iter().find(|id| **id != owner).unwrap();
        let request = v1::MovePartitionRequest { topic: topic.to_owned(), partition, to };
        self.control(0).await.move_partition(request).await.is_ok()
    }

    /// Leader epochs by partition.
    pub async fn epochs(&self, topic: &str) -> Vec<i32> {
        let topic = self.fresh(topic).await.unwrap();
        topic.partitions.iter().map(|partition| partition.leader_epoch.0).collect()
    }

    /// Who leads each partition.
    pub async fn leaders(&self, topic: &str) -> Vec<i32> {
        let topic = self.fresh(topic).await.unwrap();
        topic.partitions.iter().map(|partition| partition.leader.0).collect()
    }

    async fn fresh(&self, topic: &str) -> Result<kafka_client::TopicMetadata, kafka_client::ClientError> {
        self.client().topic(topic, false).await
    }

    /// Values of a partition in log order, as a reader of the owner sees them.
    pub async fn values(&self, topic: &str, partition: i32) -> Vec<String> {
        let client = self.client();
        loop {
            if let Ok((owner, _)) = client.leader(topic, partition).await
                && let Some(values) = Client(owner).try_values(topic, partition).await
            {
                return values;
            }
            client.forget(topic);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Idempotent producers, one for each partition.
pub struct Load {
    stop: Arc<AtomicBool>,
    pub acknowledged: Arc<AtomicU64>,
    writers: Vec<tokio::task::JoinHandle<(i32, Vec<String>)>>,
}

impl Load {
    /// Values begin with `prefix`.
    pub async fn start(client: impl Fn() -> Cluster, topic: &str, partitions: i32, prefix: &str) -> Load {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut writers = Vec::new();
        for partition in 0..partitions {
            let request = InitProducerIdRequest::default().with_transactional_id(None);
            let answer = client().any().await.unwrap().call(&request).await.unwrap();
            assert_eq!(answer.error_code, 0, "{answer:?}");
            let writer = Writer {
                client: client(),
                topic: topic.to_owned(),
                partition,
                prefix: prefix.to_owned(),
                producer: ProducerId(answer.producer_id.0),
                stop: stop.clone(),
                acknowledged: acknowledged.clone(),
            };
            writers.push(tokio::spawn(writer.run()));
        }
        Load { stop, acknowledged, writers }
    }

    pub fn count(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// What was acknowledged, by partition and in order.
    pub async fn stop(self) -> BTreeMap<i32, Vec<String>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut written = BTreeMap::new();
        for writer in self.writers {
            let (partition, values) = writer.await.unwrap();
            written.insert(partition, values);
        }
        written
    }
}

struct Writer {
    client: Cluster,
    topic: String,
    partition: i32,
    prefix: String,
    producer: ProducerId,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
}

impl Writer {
    async fn run(self) -> (i32, Vec<String>) {
        let mut written = Vec::new();
        for sequence in 0.. {
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            let value = format!("{}{}-{sequence:06}", self.prefix, self.partition);
            let mut builder = BatchBuilder::new(Offset(0), now(), Codec::None);
            builder.producer(self.producer, ProducerEpoch(0), sequence);
            builder.push(0, 0, None, Some(value.as_bytes()), &[]);
            let batch = builder.build().bytes;
            while !self.send(batch.clone()).await {
                self.client.forget(&self.topic);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            written.push(value);
            self.acknowledged.fetch_add(1, Ordering::Relaxed);
        }
        (self.partition, written)
    }

    async fn send(&self, batch: bytes::Bytes) -> bool {
        let Ok((leader, _)) = self.client.leader(&self.topic, self.partition).await else { return false };
        let data = PartitionProduceData::default().with_index(self.partition).with_records(Some(batch));
        let topic =
            TopicProduceData::default().with_name(text(&self.topic).into()).with_partition_data(vec![data]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(10_000).with_topic_data(vec![topic]);
        let Ok(answer) = leader.call_at(9, &request).await else { return false };
        let code = answer.responses[0].partition_responses[0].error_code;
        let again = code == ErrorCode::KafkaStorageError.code()
            || ErrorCode::from_code(code).is_some_and(kafka_client::is_retriable);
        assert!(code == 0 || again, "produce answers error {code}");
        code == 0
    }
}

/// Reads the port of a region's plain listener as a cluster of one.
pub fn alone(region: &super::Region) -> Cluster {
    Cluster::new(vec![Endpoint::new("127.0.0.1", region.ports[0])], ConnectOptions::default())
}

/// Certificates of a region's brokers.
pub fn certificate(base: &Path) -> TlsFiles {
    super::Region::new(base, "east", broker::config::Storage::Memory).certificate().clone()
}
