//! Regions in one process for tests: a broker on loopback each, mirrors between them over real UDP,
//! and a client that reads logs without any of the mirror's own code.

// Each test binary uses a part of this.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use broker::config::{ListenerConfig, Storage};
use broker::partition::ReadUpTo;
use bytes::Bytes;
use chassis::ServiceHandle;
use chassis::certs::CertificateDir;
use chassis::tls::{ClientAuth, ClientTls, TlsFiles};
use control::v1;
use kafka::batch::Codec;
use kafka::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka::messages::delete_records_request::{DeleteRecordsPartition, DeleteRecordsTopic};
use kafka::messages::describe_configs_request::DescribeConfigsResource;
use kafka::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka::messages::incremental_alter_configs_request::{AlterConfigsResource, AlterableConfig};
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::{
    CreatePartitionsRequest, CreateTopicsRequest, DeleteRecordsRequest, DeleteTopicsRequest,
    DescribeConfigsRequest, FetchRequest, IncrementalAlterConfigsRequest, ProduceRequest,
    create_partitions_request,
};
use kafka::private::{LinkState, MIRROR_NOTES, Message, Note, NotesAnswer, NotesRequest, PartitionReport};
use kafka::record::{BatchBuilder, Records, unpack};
use kafka::{Batch, Offset, StrBytes, TimestampMs};
use kafka_client::{ClientError, ConnectOptions, Connection, Endpoint, Security};
use mirror::LinkConfig;

pub mod nodes;

/// A region: its broker, and perhaps its mirror.
pub struct Region {
    pub name: &'static str,
    dir: PathBuf,
    storage: Storage,
    /// Plain, internal, control.
    ports: [u16; 3],
    tls: TlsFiles,
    mirror_tls: TlsFiles,
    pub broker: Option<(ServiceHandle, broker::service::Running)>,
    pub mirror: Option<(ServiceHandle, mirror::Running)>,
    /// UDP port of the mirror.
    pub udp: u16,
    pub streams_max: u32,
    pub lanes: bool,
    /// Brokers of the mirror; the region's own when empty.
    pub brokers: String,
}

/// One record as a reader sees it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    pub offset: i64,
    pub timestamp: i64,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Option<Vec<u8>>)>,
}

impl Region {
    /// `base` holds the certificates of all regions of a test and the data of this one.
    pub fn new(base: &Path, name: &'static str, storage: Storage) -> Region {
        let certificates = CertificateDir::open(&base.join("certs")).unwrap();
        Region {
            name,
            dir: base.join(name),
            storage,
            ports: [free_port(), free_port(), free_port()],
            tls: certificates.leaf("sealane-broker", &["127.0.0.1"]).unwrap(),
            mirror_tls: certificates.leaf("sealane-mirror", &["127.0.0.1"]).unwrap(),
            broker: None,
            mirror: None,
            udp: free_port(),
            streams_max: 32,
            lanes: false,
            brokers: String::new(),
        }
    }

    pub fn certificate(&self) -> &TlsFiles {
        &self.tls
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub async fn start_broker(&mut self) {
        let [plain, internal, control] = self.ports;
        let listener = ListenerConfig { bind: format!("127.0.0.1:{plain}"), ..ListenerConfig::default() };
        let internal = ListenerConfig {
            name: "internal".to_owned(),
            bind: format!("127.0.0.1:{internal}"),
            tls: Some(self.tls.clone()),
            client_auth: ClientAuth::Required,
            internal: true,
            ..ListenerConfig::default()
        };
        let config = broker::Config {
            data_dir: self.dir.clone(),
            storage: self.storage,
            region: self.name.to_owned(),
            listeners: vec![listener, internal],
            control_bind: format!("127.0.0.1:{control}"),
            http_bind: String::new(),
            lanes_default: self.lanes,
            ..broker::Config::default()
        };
        let handle = ServiceHandle::standalone("broker");
        let running = broker::service::start(config, handle.clone()).await.unwrap();
        self.broker = Some((handle, running));
    }

    pub async fn stop_broker(&mut self) {
        let (handle, running) = self.broker.take().expect("runs");
        drop(running);
        handle.drain(Duration::from_secs(20)).await.unwrap();
    }

    pub fn link_to(&self, peer: &Region) -> LinkConfig {
        let address = Some(format!("127.0.0.1:{}", peer.udp));
        LinkConfig { peer: peer.name.to_owned(), address, ..LinkConfig::default() }
    }

    pub fn mirror_config(&self, links: Vec<LinkConfig>) -> mirror::Config {
        let broker = match self.brokers.is_empty() {
            true => format!("127.0.0.1:{}", self.ports[1]),
            false => self.brokers.clone(),
        };
        mirror::Config {
            broker,
            tls: self.mirror_tls.clone(),
            bind: format!("127.0.0.1:{}", self.udp),
            streams_max: self.streams_max,
            links,
            ..mirror::Config::default()
        }
    }

    pub async fn start_mirror(&mut self, links: Vec<LinkConfig>) {
        self.start_mirror_as(self.mirror_config(links)).await;
    }

    pub async fn start_mirror_as(&mut self, config: mirror::Config) {
        let handle = ServiceHandle::standalone("mirror");
        // The port of a mirror that just stopped may be free only a moment later.
        let deadline = Instant::now() + Duration::from_secs(5);
        let running = loop {
            match mirror::start(config.clone(), handle.clone()).await {
                Ok(running) => break running,
                Err(error) if Instant::now() > deadline => panic!("{error}"),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        self.mirror = Some((handle, running));
    }

    pub async fn stop_mirror(&mut self) {
        let (handle, _) = self.mirror.take().expect("runs");
        handle.drain(Duration::from_secs(10)).await.unwrap();
    }

    pub async fn client(&self) -> Client {
        let endpoint = Endpoint::new("127.0.0.1", self.ports[0]);
        Client(Connection::connect(&endpoint, &ConnectOptions::default()).await.unwrap())
    }

    /// As [`Self::client`], where the broker may be down.
    pub async fn try_client(&self) -> Result<Client, ClientError> {
        let endpoint = Endpoint::new("127.0.0.1", self.ports[0]);
        Ok(Client(Connection::connect(&endpoint, &ConnectOptions::default()).await?))
    }

    /// The same region for a writer that outlives its restarts.
    pub fn handle(&self) -> Region {
        Region {
            dir: self.dir.clone(),
            tls: self.tls.clone(),
            mirror_tls: self.mirror_tls.clone(),
            brokers: self.brokers.clone(),
            broker: None,
            mirror: None,
            ..*self
        }
    }

    /// The same region with one more mirror, at an address of its own.
    pub fn second(&self) -> Region {
        Region { udp: free_port(), ..self.handle() }
    }

    pub async fn control(&self) -> control::Client {
        control::connect(&format!("127.0.0.1:{}", self.ports[2]), None).await.unwrap()
    }

    /// Changes what crosses the link to `peer`, and returns when the mirror has it.
    pub async fn set_link(&self, peer: &str, change: v1::SetLinkRequest) {
        let change = v1::SetLinkRequest { peer: peer.to_owned(), ..change };
        let answer = self.control().await.set_link(change).await.unwrap().into_inner();
        // Which it has not where it does not run, or has not reported since the broker started.
        println!("{}: link to {peer} set, {:?}", self.name, answer.warnings);
    }

    /// Entries of this kind in the status: topic, partition, from, to.
    pub async fn entries(&self, kind: &str) -> Vec<(String, i32, i64, i64)> {
        let status = self.control().await.mirror_status(v1::MirrorStatusRequest {}).await.unwrap();
        let notes = status.into_inner().notes.into_iter().filter(|note| note.kind == kind);
        notes.map(|note| (note.topic, note.partition, note.from_offset, note.to_offset)).collect()
    }

    /// Connections to `peer` that have come up.
    pub fn connections(&self, peer: &str) -> u64 {
        let name = format!("sealane_mirror_connections_total{{peer=\"{peer}\"}} ");
        let metrics = self.metrics();
        let line = metrics.lines().find_map(|line| line.strip_prefix(&name));
        line.map_or(0, |count| count.parse().unwrap())
    }

    /// The state of the link to `peer`, its reason, and its partitions.
    pub fn link(&self, peer: &str) -> (LinkState, String, Vec<PartitionReport>) {
        let (_, running) = self.mirror.as_ref().expect("runs");
        let link = running.board.links().into_iter().find(|link| link.peer == peer).expect("configured");
        (link.state, link.reason, link.partitions)
    }

    pub fn metrics(&self) -> String {
        self.mirror.as_ref().expect("runs").0.metrics().render()
    }

    /// Every batch of a partition as the log holds it, markers and hidden records too.
    pub fn raw(&self, topic: &str, partition: i32) -> Vec<Batch> {
        let (_, running) = self.broker.as_ref().expect("runs");
        let Some(partition) = running.broker.partition(topic, partition) else { return Vec::new() };
        let (mut at, mut batches) = (Offset(0), Vec::new());
        while let Some(slice) = partition.read(at, 1 << 20, true, ReadUpTo::HighWatermark).unwrap().slice {
            batches.extend(Batch::split_all(slice.bytes().unwrap(), true).unwrap());
            at = batches.last().expect("a slice holds a batch").header.next_offset();
        }
        batches
    }

    /// Records of the raw log, markers left out: (offset inside its batch, value).
    pub fn raw_values(&self, topic: &str) -> Vec<(i64, String)> {
        let data = self.raw(topic, 0).into_iter().filter(|batch| !batch.header.is_control());
        let of = |batch: &Batch| {
            let base = batch.header.base_offset.0;
            let value = |r: Seen| (r.offset - base, String::from_utf8(r.value.unwrap()).unwrap());
            records_of(batch).into_iter().map(value).collect::<Vec<_>>()
        };
        data.flat_map(|batch| of(&batch)).collect()
    }

    /// The durable notes, asked as the mirror would.
    pub async fn notes(&self) -> Vec<Note> {
        let tls = ClientTls::client(&self.mirror_tls, &[]).unwrap();
        let security = Security::Tls { config: tls, server_name: None };
        let options = ConnectOptions { security, ..ConnectOptions::default() };
        let endpoint = Endpoint::new("127.0.0.1", self.ports[1]);
        let connection = Connection::connect(&endpoint, &options).await.unwrap();
        let request = NotesRequest { add: Vec::new(), list: Some(String::new()) };
        let answer = connection.send(MIRROR_NOTES, 0, request.encode()).await.unwrap();
        NotesAnswer::decode(answer).unwrap().notes
    }
}

/// A plain Kafka client.
#[derive(Clone)]
pub struct Client(pub Connection);

impl Client {
    pub async fn create(&self, name: &str, partitions: i32, configs: &[(&str, &str)]) {
        let config = |(key, value): &(&str, &str)| {
            CreatableTopicConfig::default().with_name(text(key)).with_value(Some(text(value)))
        };
        let topic = CreatableTopic::default()
            .with_name(text(name).into())
            .with_num_partitions(partitions)
            .with_replication_factor(-1)
            .with_configs(configs.iter().map(config).collect());
        let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000);
        let answer = self.0.call(&request).await.unwrap();
        assert_eq!(answer.topics[0].error_code, 0, "{answer:?}");
    }

    pub async fn delete(&self, name: &str) {
        let request =
            DeleteTopicsRequest::default().with_topic_names(vec![text(name).into()]).with_timeout_ms(10_000);
        let answer = self.0.call_at(5, &request).await.unwrap();
        assert_eq!(answer.responses[0].error_code, 0, "{answer:?}");
    }

    pub async fn grow(&self, name: &str, count: i32) {
        let topic = create_partitions_request::CreatePartitionsTopic::default()
            .with_name(text(name).into())
            .with_count(count)
            .with_assignments(None);
        let request = CreatePartitionsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000);
        let answer = self.0.call(&request).await.unwrap();
        assert_eq!(answer.results[0].error_code, 0, "{answer:?}");
    }

    /// One record with this value.
    pub async fn produce(&self, topic: &str, partition: i32, value: &str) {
        self.produce_batch(topic, partition, one_record(value)).await;
    }

    pub async fn produce_all(&self, topic: &str, partition: i32, values: impl IntoIterator<Item = String>) {
        for value in values {
            self.produce(topic, partition, &value).await;
        }
    }

    pub async fn produce_batch(&self, topic: &str, partition: i32, batch: Batch) {
        let code = self.try_produce(topic, partition, batch).await.unwrap();
        assert_eq!(code, 0, "produce to {topic}-{partition}");
    }

    /// Tries to produce; false when it was not acknowledged.
    pub async fn offer(&self, topic: &str, partition: i32, value: &str) -> bool {
        self.try_produce(topic, partition, one_record(value)).await.is_ok_and(|code| code == 0)
    }

    /// The error code that the broker answers.
    pub async fn try_produce(&self, topic: &str, partition: i32, batch: Batch) -> Result<i16, ClientError> {
        let data = PartitionProduceData::default().with_index(partition).with_records(Some(batch.bytes));
        let topic = TopicProduceData::default().with_name(text(topic).into()).with_partition_data(vec![data]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(10_000).with_topic_data(vec![topic]);
        let answer = self.0.call_at(9, &request).await?;
        Ok(answer.responses[0].partition_responses[0].error_code)
    }

    /// Removes the records below `offset`.
    pub async fn delete_records(&self, topic: &str, partition: i32, offset: i64) {
        let below = DeleteRecordsPartition::default().with_partition_index(partition).with_offset(offset);
        let topic = DeleteRecordsTopic::default().with_name(text(topic).into()).with_partitions(vec![below]);
        let request = DeleteRecordsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000);
        let answer = self.0.call(&request).await.unwrap();
        assert_eq!(answer.topics[0].partitions[0].error_code, 0, "{answer:?}");
    }

    /// The value of one key of a topic's configuration.
    pub async fn config(&self, topic: &str, key: &str) -> String {
        let resource = DescribeConfigsResource::default()
            .with_resource_type(TOPIC)
            .with_resource_name(text(topic))
            .with_configuration_keys(Some(vec![text(key)]));
        let request = DescribeConfigsRequest::default().with_resources(vec![resource]);
        let answer = self.0.call(&request).await.unwrap();
        let value = answer.results[0].configs.first().and_then(|config| config.value.clone());
        value.map(|value| value.as_str().to_owned()).unwrap_or_default()
    }

    pub async fn set_config(&self, topic: &str, key: &str, value: &str) {
        let config = AlterableConfig::default()
            .with_name(text(key))
            .with_config_operation(0)
            .with_value(Some(text(value)));
        let resource = AlterConfigsResource::default()
            .with_resource_type(TOPIC)
            .with_resource_name(text(topic))
            .with_configs(vec![config]);
        let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
        let answer = self.0.call(&request).await.unwrap();
        assert_eq!(answer.responses[0].error_code, 0, "{answer:?}");
    }

    /// All records of a partition, and its high watermark; `None` while it is not there.
    pub async fn read(&self, topic: &str, partition: i32) -> Option<(Vec<Seen>, i64)> {
        let (mut at, mut seen) = (0, Vec::new());
        loop {
            let (records, high_watermark) = self.fetch(topic, partition, at).await?;
            let batches = Batch::split_all(records, true).unwrap();
            for batch in &batches {
                at = batch.header.next_offset().0;
                assert_eq!(batch.header.producer_id.0, -1, "nothing here is idempotent after mirroring");
                seen.extend(records_of(batch));
            }
            if at >= high_watermark || batches.is_empty() {
                return Some((seen, high_watermark));
            }
        }
    }

    pub async fn fetch(&self, topic: &str, partition: i32, at: i64) -> Option<(Bytes, i64)> {
        self.try_fetch(topic, partition, at).await.unwrap()
    }

    /// As [`Self::fetch`], where the broker may be gone.
    pub async fn try_fetch(
        &self,
        topic: &str,
        partition: i32,
        at: i64,
    ) -> Result<Option<(Bytes, i64)>, ClientError> {
        let asked = FetchPartition::default()
            .with_partition(partition)
            .with_fetch_offset(at)
            .with_partition_max_bytes(4 << 20);
        let asked = FetchTopic::default().with_topic(text(topic).into()).with_partitions(vec![asked]);
        let request = FetchRequest::default()
            .with_max_wait_ms(0)
            .with_min_bytes(0)
            .with_max_bytes(8 << 20)
            .with_topics(vec![asked]);
        let answer = self.0.call_at(11, &request).await?;
        let data = &answer.responses[0].partitions[0];
        let is_there = data.error_code == 0;
        Ok(is_there.then(|| (data.records.clone().unwrap_or_default(), data.high_watermark)))
    }

    /// Values in log order; `None` where they cannot be had from this broker.
    pub async fn try_values(&self, topic: &str, partition: i32) -> Option<Vec<String>> {
        let (mut at, mut values) = (0, Vec::new());
        loop {
            let (records, high_watermark) = self.try_fetch(topic, partition, at).await.ok().flatten()?;
            let batches = Batch::split_all(records, true).unwrap();
            for batch in &batches {
                at = batch.header.next_offset().0;
                let text = |r: Seen| String::from_utf8(r.value.unwrap_or_default()).unwrap();
                values.extend(records_of(batch).into_iter().map(text));
            }
            if at >= high_watermark || batches.is_empty() {
                return Some(values);
            }
        }
    }

    /// Values in log order; empty while the partition is not there.
    pub async fn values(&self, topic: &str, partition: i32) -> Vec<String> {
        let seen = self.read(topic, partition).await.map(|(seen, _)| seen).unwrap_or_default();
        seen.into_iter().map(|r| String::from_utf8(r.value.unwrap_or_default()).unwrap()).collect()
    }

    pub async fn log_end(&self, topic: &str, partition: i32) -> i64 {
        self.fetch(topic, partition, 0).await.map_or(-1, |(_, end)| end)
    }

    /// Waits until the partition holds `count` records, and returns their values.
    pub async fn wait_for(&self, topic: &str, partition: i32, count: usize) -> Vec<String> {
        let mut values = Vec::new();
        let there = eventually(async || {
            values = self.values(topic, partition).await;
            values.len() >= count
        });
        assert!(there.await, "{topic}-{partition} has {} of {count} records: {values:?}", values.len());
        values
    }
}

fn one_record(value: &str) -> Batch {
    let mut builder = BatchBuilder::new(Offset(0), now(), Codec::None);
    builder.push(0, 0, None, Some(value.as_bytes()), &[]);
    builder.build()
}

pub fn records_of(batch: &Batch) -> Vec<Seen> {
    let section = unpack(batch).unwrap();
    Records::new(&section, batch.header.record_count)
        .map(|record| {
            let record = record.unwrap();
            let headers = record.headers().map(|header| {
                let header = header.unwrap();
                (header.key.to_owned(), header.value.map(<[u8]>::to_vec))
            });
            Seen {
                offset: batch.header.base_offset.0 + i64::from(record.offset_delta),
                timestamp: batch.header.base_timestamp.0 + record.timestamp_delta,
                key: record.key.map(<[u8]>::to_vec),
                value: record.value.map(<[u8]>::to_vec),
                headers: headers.collect(),
            }
        })
        .collect()
}

/// Each origin's records are in both logs, in order and once, and there are `count` in all.
pub async fn same_in_both(east: &Client, west: &Client, count: usize) {
    let a = by_origin(&east.wait_for("t", 0, count).await);
    let b = by_origin(&west.wait_for("t", 0, count).await);
    assert_eq!(a, b, "each origin's records, in order");
    assert_eq!(a.values().map(Vec::len).sum::<usize>(), count, "no record twice: {a:?}");
}

/// Copies a directory with all that is in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// Tries until `look` is true, for a time that is long for a loaded machine.
pub async fn eventually(mut look: impl AsyncFnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        if look().await {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    false
}

/// Two regions with brokers, and mirrors that both dial.
pub async fn two(base: &Path, storage: Storage) -> (Region, Region) {
    let (mut east, mut west) = (Region::new(base, "east", storage), Region::new(base, "west", storage));
    east.start_broker().await;
    west.start_broker().await;
    link(&mut east, &mut west).await;
    (east, west)
}

pub async fn link(east: &mut Region, west: &mut Region) {
    east.start_mirror(vec![east.link_to(west)]).await;
    west.start_mirror(vec![west.link_to(east)]).await;
}

pub async fn stop(regions: [Region; 2]) {
    for mut region in regions {
        if region.mirror.is_some() {
            region.stop_mirror().await;
        }
        region.stop_broker().await;
    }
}

pub fn numbered(prefix: &str, range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|n| format!("{prefix}{n}")).collect()
}

/// Values by the region that their first letter names: the order of each origin.
pub fn by_origin(values: &[String]) -> BTreeMap<char, Vec<String>> {
    let mut origins: BTreeMap<char, Vec<String>> = BTreeMap::new();
    for value in values {
        origins.entry(value.chars().next().unwrap_or(' ')).or_default().push(value.clone());
    }
    origins
}

pub fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

pub fn now() -> TimestampMs {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    TimestampMs(since.as_millis() as i64)
}

/// Resource type of a topic in configuration requests.
const TOPIC: i8 = 2;

fn free_port() -> u16 {
    test_ports::free_port().unwrap()
}
