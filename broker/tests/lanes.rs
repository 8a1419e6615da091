//! One broker on loopback, asked in the raw protocol: who is shown which record, whatever happens.
//!
//! The lane's clients speak as the lane-router would: on the internal listener, under its certificate,
//! with its form of client ids and group ids.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use broker::config::{ListenerConfig, ListenerView, Storage};
use broker::{Config, service};
use bytes::Bytes;
use chassis::ServiceHandle;
use chassis::certs::CertificateDir;
use chassis::tls::{ClientAuth, ClientTls};
use control::v1;
use kafka::batch::Codec;
use kafka::control::parse_marker;
use kafka::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka::messages::incremental_alter_configs_request::{AlterConfigsResource, AlterableConfig};
use kafka::messages::join_group_request::JoinGroupRequestProtocol;
use kafka::messages::leave_group_request::MemberIdentity;
use kafka::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka::messages::offset_commit_request::{OffsetCommitRequestPartition, OffsetCommitRequestTopic};
use kafka::messages::offset_delete_request::{OffsetDeleteRequestPartition, OffsetDeleteRequestTopic};
use kafka::messages::offset_fetch_request::{OffsetFetchRequestGroup, OffsetFetchRequestTopics};
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::sync_group_request::SyncGroupRequestAssignment;
use kafka::messages::{
    CreateTopicsRequest, DeleteGroupsRequest, FetchRequest, FindCoordinatorRequest, HeartbeatRequest,
    IncrementalAlterConfigsRequest, JoinGroupRequest, LeaveGroupRequest, ListOffsetsRequest,
    OffsetCommitRequest, OffsetDeleteRequest, OffsetFetchRequest, ProduceRequest, SyncGroupRequest,
};
use kafka::record::{Records, unpack};
use kafka::{Batch, BatchBuilder, ErrorCode, Offset, StrBytes, TimestampMs};
use kafka_client::{ConnectOptions, Connection, Endpoint, Security};

const TOPIC: &str = "orders";

struct Server {
    handle: ServiceHandle,
    plain: Endpoint,
    internal: Endpoint,
    /// Shows every record, to `auditor` alone.
    raw: Endpoint,
    control: String,
    certificates: CertificateDir,
}

impl Server {
    async fn start(dir: &Path, grace_seconds: u32) -> Server {
        let certificates = CertificateDir::open(&dir.join("certs")).unwrap();
        let tls = certificates.leaf("sealane-broker", &["127.0.0.1"]).unwrap();
        let control = free_address();
        let any = "127.0.0.1:0".to_owned();
        let plain = ListenerConfig { bind: any.clone(), ..ListenerConfig::default() };
        let internal = ListenerConfig {
            name: "internal".to_owned(),
            bind: any,
            tls: Some(tls),
            client_auth: ClientAuth::Required,
            internal: true,
            ..ListenerConfig::default()
        };
        let raw = ListenerConfig {
            name: "raw".to_owned(),
            internal: false,
            view: ListenerView::Raw,
            raw_readers: vec!["auditor".to_owned()],
            ..internal.clone()
        };
        let config = Config {
            data_dir: dir.join("data"),
            storage: Storage::Disk,
            listeners: vec![plain, internal, raw],
            control_bind: control.clone(),
            http_bind: String::new(),
            lane_grace_seconds: grace_seconds,
            ..Config::default()
        };
        let handle = ServiceHandle::standalone("broker");
        let running = service::start(config, handle.clone()).await.unwrap();
        let endpoint = |at: usize| Endpoint::new("127.0.0.1", running.addresses[at].port());
        let (plain, internal, raw) = (endpoint(0), endpoint(1), endpoint(2));
        Server { handle, plain, internal, raw, control, certificates }
    }

    async fn stop(self) {
        self.handle.drain(Duration::from_secs(20)).await.unwrap();
    }

    async fn baseline(&self, client_id: &str) -> Client {
        let options = ConnectOptions { client_id: client_id.to_owned(), ..ConnectOptions::default() };
        Client(Connection::connect(&self.plain, &options).await.unwrap())
    }

    /// A client of the raw listener under this certificate.
    async fn raw(&self, name: &str) -> Result<Client, kafka_client::ClientError> {
        let files = self.certificates.leaf(name, &[]).unwrap();
        let config = ClientTls::client(&files, &[]).unwrap();
        let options = ConnectOptions {
            security: Security::Tls { config, server_name: None },
            ..ConnectOptions::default()
        };
        Connection::connect(&self.raw, &options).await.map(Client)
    }

    /// A client of `lane`, as its lane-router forwards it.
    async fn in_lane(&self, client_id: &str, lane: &str) -> Client {
        let files = self.certificates.leaf("sealane-lane-router", &[]).unwrap();
        let config = ClientTls::client(&files, &[]).unwrap();
        let options = ConnectOptions {
            client_id: format!("{client_id}@{lane}#127.0.0.1"),
            security: Security::Tls { config, server_name: None },
            ..ConnectOptions::default()
        };
        Client(Connection::connect(&self.internal, &options).await.unwrap())
    }

    async fn create_lane(&self, name: &str) -> Result<(), tonic::Status> {
        let mut control = control::connect(&self.control, None).await.unwrap();
        let request = v1::CreateLaneRequest { name: name.to_owned(), class: 0, ..Default::default() };
        control.create_lane(request).await.map(drop)
    }

    async fn delete_lane(&self, name: &str) -> i64 {
        let mut control = control::connect(&self.control, None).await.unwrap();
        let request = v1::DeleteLaneRequest { name: name.to_owned() };
        control.delete_lane(request).await.unwrap().into_inner().hidden_records
    }

    async fn doctor(&self) -> v1::LaneDoctorResponse {
        let mut control = control::connect(&self.control, None).await.unwrap();
        control.lane_doctor(v1::LaneDoctorRequest {}).await.unwrap().into_inner()
    }

    async fn lane_status(&self, name: &str) -> v1::LaneStatusResponse {
        let mut control = control::connect(&self.control, None).await.unwrap();
        control.lane_status(v1::LaneStatusRequest { name: name.to_owned() }).await.unwrap().into_inner()
    }
}

fn free_address() -> String {
    format!("127.0.0.1:{}", test_ports::free_port().unwrap())
}

struct Client(Connection);

/// A member of a group with all of the topic.
struct Member {
    group: String,
    id: StrBytes,
    generation: i32,
}

/// What one fetch showed.
#[derive(Debug, Default)]
struct Fetched {
    values: Vec<String>,
    next: i64,
    high_watermark: i64,
    took: Duration,
}

impl Client {
    async fn create_topic(&self) {
        self.create_topic_with(&[]).await;
    }

    async fn create_topic_with(&self, configs: &[(&str, &str)]) {
        let config = |(name, value): &(&str, &str)| {
            CreatableTopicConfig::default().with_name(text(name)).with_value(Some(text(value)))
        };
        let topic = CreatableTopic::default()
            .with_name(text(TOPIC).into())
            .with_num_partitions(1)
            .with_replication_factor(1)
            .with_configs(configs.iter().chain(&[("sealane.lanes", "true")]).map(config).collect());
        let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(10_000);
        assert_eq!(self.0.call(&request).await.unwrap().topics[0].error_code, 0);
    }

    /// One batch; each record is its value and, after `@`, its lane header. Code and base offset.
    async fn produce(&self, records: &[&str]) -> (i16, i64) {
        let mut builder = BatchBuilder::new(Offset(0), TimestampMs(1_000), Codec::Zstd);
        for (i, record) in records.iter().enumerate() {
            let lane = record.split_once('@').map(|(_, lane)| ("x-lane", Some(lane.as_bytes())));
            builder.push(i as i32, i as i64, None, Some(record.as_bytes()), lane.as_slice());
        }
        self.produce_batch(builder.build().bytes).await
    }

    /// One record without a key, with this header and its value as the record's.
    async fn produce_with(&self, header: &str, value: &str) -> (i16, i64) {
        let mut builder = BatchBuilder::new(Offset(0), TimestampMs(1_000), Codec::None);
        let named = format!("{header}={value}");
        builder.push(0, 0, None, Some(named.as_bytes()), &[(header, Some(value.as_bytes()))]);
        self.produce_batch(builder.build().bytes).await
    }

    async fn set_extractors(&self, list: &str) -> (i16, String) {
        let config = AlterableConfig::default()
            .with_name(text("sealane.lanes.extractors"))
            .with_value(Some(text(list)));
        let resource = AlterConfigsResource::default()
            .with_resource_type(2)
            .with_resource_name(text(TOPIC))
            .with_configs(vec![config]);
        let request = IncrementalAlterConfigsRequest::default().with_resources(vec![resource]);
        let answer = self.0.call(&request).await.unwrap().responses.remove(0);
        (answer.error_code, answer.error_message.map(|m| m.to_string()).unwrap_or_default())
    }

    async fn produce_batch(&self, batch: Bytes) -> (i16, i64) {
        let partition = PartitionProduceData::default().with_index(0).with_records(Some(batch));
        let topic =
            TopicProduceData::default().with_name(text(TOPIC).into()).with_partition_data(vec![partition]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(10_000).with_topic_data(vec![topic]);
        let answer = self.0.call_at(9, &request).await.unwrap();
        let partition = &answer.responses[0].partition_responses[0];
        (partition.error_code, partition.base_offset)
    }

    async fn fetch(&self, from: i64, max_wait_ms: i32) -> Fetched {
        let partition = FetchPartition::default()
            .with_partition(0)
            .with_fetch_offset(from)
            .with_partition_max_bytes(1 << 20);
        let topic = FetchTopic::default().with_topic(text(TOPIC).into()).with_partitions(vec![partition]);
        let request = FetchRequest::default()
            .with_max_wait_ms(max_wait_ms)
            .with_min_bytes(1)
            .with_max_bytes(1 << 20)
            .with_topics(vec![topic]);
        let started = Instant::now();
        let answer = self.0.call_at(11, &request).await.unwrap();
        let partition = &answer.responses[0].partitions[0];
        assert_eq!(partition.error_code, 0, "{partition:?}");
        let mut fetched = Fetched {
            next: from,
            high_watermark: partition.high_watermark,
            took: started.elapsed(),
            ..Fetched::default()
        };
        for batch in Batch::split_all(partition.records.clone().unwrap_or_default(), true).unwrap() {
            assert_eq!(parse_marker(&batch), Ok(None), "markers stay inside");
            assert!(batch.header.next_offset().0 > fetched.next, "no batch twice");
            fetched.next = batch.header.next_offset().0;
            if batch.header.is_control() {
                continue;
            }
            let section = unpack(&batch).unwrap();
            for record in Records::new(&section, batch.header.record_count) {
                let record = record.unwrap();
                if batch.header.base_offset.0 + i64::from(record.offset_delta) >= from {
                    let value = String::from_utf8(record.value.unwrap().to_vec()).unwrap();
                    fetched.values.push(value);
                }
            }
        }
        fetched
    }

    /// Reads until the high watermark.
    async fn read_from(&self, mut from: i64) -> (Vec<String>, i64) {
        let mut values = Vec::new();
        for _ in 0..100 {
            let fetched = self.fetch(from, 300).await;
            values.extend(fetched.values);
            from = fetched.next;
            if from == fetched.high_watermark {
                return (values, from);
            }
        }
        panic!("the high watermark is not reached: {values:?}, {from}")
    }

    async fn join(&self, group: &str) -> Member {
        let find = FindCoordinatorRequest::default().with_coordinator_keys(vec![text(group)]);
        for _ in 0..100 {
            if self.0.call_at(4, &find).await.unwrap().coordinators[0].error_code == 0 {
                break;
            }
        }
        let protocol =
            JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(subscription());
        let request = JoinGroupRequest::default()
            .with_group_id(text(group).into())
            .with_session_timeout_ms(6_000)
            .with_rebalance_timeout_ms(6_000)
            .with_protocol_type(text("consumer"))
            .with_protocols(vec![protocol]);
        let joined = self.0.call_at(3, &request).await.unwrap();
        assert_eq!(joined.error_code, 0, "{joined:?}");
        let member =
            Member { group: group.to_owned(), id: joined.member_id, generation: joined.generation_id };
        let share = SyncGroupRequestAssignment::default()
            .with_member_id(member.id.clone())
            .with_assignment(assignment());
        let request = SyncGroupRequest::default()
            .with_group_id(text(group).into())
            .with_member_id(member.id.clone())
            .with_generation_id(member.generation)
            .with_assignments(vec![share]);
        assert_eq!(self.0.call_at(3, &request).await.unwrap().error_code, 0);
        member
    }

    async fn leave(&self, member: &Member) {
        let who = MemberIdentity::default().with_member_id(member.id.clone());
        let request =
            LeaveGroupRequest::default().with_group_id(text(&member.group).into()).with_members(vec![who]);
        assert_eq!(self.0.call_at(3, &request).await.unwrap().error_code, 0);
    }

    async fn commit(&self, member: &Member, offset: i64) {
        let partition = OffsetCommitRequestPartition::default().with_committed_offset(offset);
        let topic = OffsetCommitRequestTopic::default()
            .with_name(text(TOPIC).into())
            .with_partitions(vec![partition]);
        let request = OffsetCommitRequest::default()
            .with_group_id(text(&member.group).into())
            .with_member_id(member.id.clone())
            .with_generation_id_or_member_epoch(member.generation)
            .with_topics(vec![topic]);
        assert_eq!(self.0.call_at(7, &request).await.unwrap().topics[0].partitions[0].error_code, 0);
    }

    async fn committed(&self, group: &str) -> i64 {
        let topic =
            OffsetFetchRequestTopics::default().with_name(text(TOPIC).into()).with_partition_indexes(vec![0]);
        let group = OffsetFetchRequestGroup::default()
            .with_group_id(text(group).into())
            .with_topics(Some(vec![topic]));
        let request = OffsetFetchRequest::default().with_groups(vec![group]);
        let answer = self.0.call_at(8, &request).await.unwrap();
        answer.groups[0].topics[0].partitions[0].committed_offset
    }

    async fn offset_at(&self, timestamp: i64) -> i64 {
        let partition = ListOffsetsPartition::default().with_timestamp(timestamp);
        let topic =
            ListOffsetsTopic::default().with_name(text(TOPIC).into()).with_partitions(vec![partition]);
        let request = ListOffsetsRequest::default().with_topics(vec![topic]);
        let answer = self.0.call_at(7, &request).await.unwrap();
        assert_eq!(answer.topics[0].partitions[0].error_code, 0);
        answer.topics[0].partitions[0].offset
    }
}

fn text(text: &str) -> StrBytes {
    StrBytes::from_string(text.to_owned())
}

fn subscription() -> Bytes {
    Bytes::from_static(b"\0\0\0\0\0\x01\0\x06orders\xff\xff\xff\xff")
}

fn assignment() -> Bytes {
    Bytes::from_static(b"\0\0\0\0\0\x01\0\x06orders\0\0\0\x01\0\0\0\0\xff\xff\xff\xff")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boe_record_goes_to_its_lane_while_it_is_deployed_and_to_the_baseline_else() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 1).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    server.create_lane("boe-a").await.unwrap();
    let base = baseline.join("g").await;

    // Nobody is deployed in the lane: fallback. The baseline lags; it reads only at the end.
    assert_eq!(baseline.produce(&["1", "2@boe-a", "3@boe-b", "4@BOE"]).await.0, 0);
    let lane = server.in_lane("cart", "boe-a").await;
    let member = lane.join("g@boe-a").await;
    assert_eq!(lane.committed("g@boe-a").await, 6, "the log start, rounded up to what it may see");
    assert_eq!(lane.produce(&["5@boe-a", "6@boe-a"]).await.0, 0);
    assert_eq!(baseline.produce(&["7", "8@boe-a"]).await.0, 0);

    let (own, end) = lane.read_from(0).await;
    assert_eq!(own, ["5@boe-a", "6@boe-a", "8@boe-a"]);
    lane.commit(&member, end).await;
    lane.leave(&member).await;
    // Handed over at once: a clean leave.
    baseline.produce(&["9@boe-a"]).await;
    // It comes back, and dies without a word.
    let again = server.in_lane("cart", "boe-a").await;
    let died = again.join("g@boe-a").await;
    baseline.produce(&["10@boe-a"]).await;
    assert_eq!(again.read_from(end).await.0, ["10@boe-a"]);
    drop((again, died));

    let (all, _) = baseline.read_from(0).await;
    assert_eq!(all, ["1", "2@boe-a", "3@boe-b", "4@BOE", "7", "9@boe-a"]);
    let status = server.lane_status("boe-a").await;
    assert_eq!(status.groups.len(), 1);
    assert_eq!(status.groups[0].waiting_records, 1);
    assert_eq!(status.partitions[0].records, 6);

    // Session end, then grace, then the baseline takes over.
    baseline.leave(&base).await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    let base = baseline.join("g").await;
    let from = baseline.fetch(0, 0).await.high_watermark;
    baseline.produce(&["11@boe-a"]).await;
    assert_eq!(baseline.read_from(from).await.0, ["11@boe-a"]);
    baseline.commit(&base, from).await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ppe_record_is_never_seen_outside_its_lane_not_after_a_restart_either() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    server.create_lane("ppe-x").await.unwrap();
    server.create_lane("boe-a").await.unwrap();
    let ppe = server.in_lane("svc", "ppe-x").await;
    assert_eq!(baseline.produce(&["1", "2@ppe-x", "3"]).await.0, 0);
    assert_eq!(ppe.produce(&["4@ppe-x"]).await.0, 0);
    // A connection of the lane produces its lane only.
    for other in ["5@ppe-y", "5@PPE"] {
        assert_eq!(ppe.produce(&[other]).await.0, ErrorCode::InvalidRecord.code(), "{other}");
    }
    baseline.join("g").await;
    nobody_else_sees_ppe(&server).await;
    // A member of the lane that is known again after the restart, but has not been heard of.
    ppe.join("other@ppe-x").await;
    server.stop().await;

    let server = Server::start(dir.path(), 30).await;
    nobody_else_sees_ppe(&server).await;
    let ppe = server.in_lane("svc", "ppe-x").await;
    assert_eq!(ppe.read_from(0).await.0, ["2@ppe-x", "4@ppe-x"], "without a group: its lane");
    let member = ppe.join("g@ppe-x").await;
    assert_eq!(ppe.read_from(0).await.0, ["2@ppe-x", "4@ppe-x"], "what waited for it");
    ppe.leave(&member).await;
    server.stop().await;
}

async fn marker_end(client: &Client) -> i64 {
    client.fetch(0, 0).await.high_watermark
}

async fn nobody_else_sees_ppe(server: &Server) {
    let clients = [
        server.baseline("base").await,
        server.baseline("nobody").await,
        // The form of the lane-router, but not from it.
        server.baseline("svc@ppe-x#127.0.0.1").await,
        server.in_lane("svc", "boe-a").await,
    ];
    for (i, client) in clients.iter().enumerate() {
        let (values, end) = client.read_from(0).await;
        let right: &[&str] = if i < 3 { &["1", "3"] } else { &[] };
        assert_eq!((values, end), (right.map_to_strings(), marker_end(client).await), "client {i}");
        for from in 0..5 {
            let seen = client.fetch(from, 0).await.values;
            assert!(seen.iter().all(|v| !v.contains("ppe")), "client {i} from {from}: {seen:?}");
        }
    }
}

trait MapToStrings {
    fn map_to_strings(&self) -> Vec<String>;
}

impl MapToStrings for &[&str] {
    fn map_to_strings(&self) -> Vec<String> {
        self.iter().map(|s| (*s).to_owned()).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_lane_has_no_lag_and_a_record_of_it_arrives_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    server.create_lane("boe-a").await.unwrap();
    let lane = server.in_lane("cart", "boe-a").await;
    let member = lane.join("g@boe-a").await;
    lane.commit(&member, 0).await;
    let base = baseline.join("g").await;
    baseline.commit(&base, 0).await;
    for _ in 0..100 {
        baseline.produce(&["x"; 10]).await;
    }
    let end = baseline.fetch(0, 0).await.high_watermark;
    assert_eq!(end, 1002, "a thousand records and two markers");
    assert_eq!(lane.committed("g@boe-a").await, end, "its lag is 0 whatever it committed");
    assert_eq!(baseline.committed("g").await, 2, "the markers are nobody's lag");
    // A long poll is told of the progress in a bounded time, and answered at once by a record.
    let progress = lane.fetch(0, 30_000).await;
    assert_eq!((progress.values.len(), progress.next), (0, end));
    assert!(progress.took < Duration::from_secs(3), "{:?}", progress.took);
    let (waiting, _) = tokio::join!(lane.fetch(end, 20_000), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        baseline.produce(&["y", "z@boe-a"]).await
    });
    assert_eq!(waiting.values, ["z@boe-a"]);
    assert!(waiting.took < Duration::from_secs(2), "{:?}", waiting.took);
    // Lane records that the baseline never gets are not its lag.
    let own = baseline.produce(&["v@boe-a"]).await.1;
    baseline.commit(&base, own).await;
    assert_eq!(baseline.committed("g").await, own + 1);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_reader_cannot_see_does_not_attract_its_time_lookups() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    server.create_lane("ppe-x").await.unwrap();
    let (_, first) = baseline.produce(&["1"]).await;
    let mut builder = BatchBuilder::new(Offset(0), TimestampMs(9_000), Codec::None);
    builder.push(0, 0, None, Some(b"held"), &[("x-lane", Some(b"ppe-x"))]);
    let (code, held) = baseline.produce_batch(builder.build().bytes).await;
    assert_eq!(code, 0);
    let (_, last) = baseline.produce(&["2@ppe-x", "3"]).await;
    let ppe = server.in_lane("svc", "ppe-x").await;
    assert_eq!((baseline.offset_at(1_000).await, ppe.offset_at(1_000).await), (first, held));
    assert_eq!((baseline.offset_at(5_000).await, ppe.offset_at(5_000).await), (-1, held));
    assert_eq!(baseline.offset_at(1_001).await, last + 1, "inside a mixed batch");
    assert_eq!((baseline.offset_at(-3).await, ppe.offset_at(-3).await), (last + 1, held));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_lane_leaves_its_records_to_nobody_else_and_its_name_free() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    for lane in ["boe-a", "ppe-x"] {
        server.create_lane(lane).await.unwrap();
    }
    let taken = baseline.join("g").await;
    baseline.leave(&taken).await;
    let lane = server.in_lane("cart", "boe-a").await;
    let member = lane.join("g@boe-a").await;
    baseline.produce(&["1@boe-a", "2@ppe-x", "3@ppe-x"]).await;
    lane.commit(&member, 1).await;
    assert_eq!(server.delete_lane("boe-a").await, 0);
    assert_eq!(server.delete_lane("ppe-x").await, 2);
    let from = baseline.fetch(0, 0).await.high_watermark;
    baseline.produce(&["4@boe-a"]).await;
    assert_eq!(baseline.read_from(0).await.0, Vec::<String>::new(), "no group: no lane record");
    let base = baseline.join("g").await;
    assert_eq!(baseline.read_from(0).await.0, ["4@boe-a"]);
    baseline.leave(&base).await;
    // A later lane of the name begins empty.
    server.create_lane("boe-a").await.unwrap();
    server.create_lane("ppe-x").await.unwrap();
    for (lane, group) in [("boe-a", "g@boe-a"), ("ppe-x", "g@ppe-x")] {
        let client = server.in_lane("cart", lane).await;
        let member = client.join(group).await;
        assert_eq!(client.read_from(0).await.0, Vec::<String>::new(), "{lane}");
        client.leave(&member).await;
    }
    assert!(from > 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_lanes_and_groups_do_not_collide() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    // Anywhere else the suffix is part of a plain name, and such a group keeps its name.
    let plain = baseline.join("team@boe-a").await;
    assert!(server.create_lane("boe-a").await.is_err());
    baseline.commit(&plain, 0).await;
    server.create_lane("boe-b").await.unwrap();
    let request = JoinGroupRequest::default()
        .with_group_id(text("team@boe-b").into())
        .with_session_timeout_ms(6_000)
        .with_rebalance_timeout_ms(6_000)
        .with_protocol_type(text("consumer"))
        .with_protocols(vec![
            JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(subscription()),
        ]);
    let refused = baseline.0.call_at(3, &request).await.unwrap();
    assert_eq!(refused.error_code, ErrorCode::InvalidGroupId.code());
    let lane = server.in_lane("cart", "boe-b").await;
    lane.join("team@boe-b").await;
    let names: BTreeSet<String> =
        server.lane_status("boe-b").await.groups.into_iter().map(|g| g.group).collect();
    assert_eq!(names, BTreeSet::from(["team".to_owned()]));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_record_is_of_the_lane_that_the_list_of_its_time_names() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic_with(&[("sealane.lanes.extractors", "x-tt-env")]).await;
    server.create_lane("ppe-x").await.unwrap();
    let ppe = server.in_lane("svc", "ppe-x").await;
    baseline.produce_with("x-lane", "ppe-x").await;
    baseline.produce_with("x-tt-env", "ppe-x").await;
    // The connection's lane, as the topic's list reads it; x-lane names nothing, not even another lane.
    assert_eq!(ppe.produce_with("x-lane", "boe-z").await.0, 0);
    assert_eq!(ppe.produce_with("x-tt-env", "boe-z").await.0, ErrorCode::InvalidRecord.code());
    let (code, reason) = baseline.set_extractors("x-lane,baggage").await;
    assert_eq!(code, ErrorCode::InvalidConfig.code());
    assert!(reason.contains("\"baggage\"") && reason.contains("baggage/KEY"), "{reason}");
    assert_eq!(baseline.set_extractors("baggage/lane,x-lane").await, (0, String::new()));
    baseline.produce_with("x-tt-env", "ppe-x").await;
    baseline.produce_with("x-lane", "ppe-x").await;
    assert_eq!(ppe.produce_with("baggage", "user=1").await.0, 0);

    let outside = ["x-lane=ppe-x", "x-tt-env=ppe-x"];
    let inside = ["x-tt-env=ppe-x", "x-lane=boe-z", "x-lane=ppe-x", "baggage=user=1"];
    let read = async |server: &Server| {
        let (baseline, ppe) = (server.baseline("base").await, server.in_lane("svc", "ppe-x").await);
        assert_eq!(baseline.read_from(0).await.0, outside);
        assert_eq!(ppe.read_from(0).await.0, inside);
    };
    read(&server).await;
    server.stop().await;
    // From the snapshot, and from the log alone.
    let server = Server::start(dir.path(), 30).await;
    read(&server).await;
    server.stop().await;
    assert!(remove_derived(&dir.path().join("data")) > 0);
    let server = Server::start(dir.path(), 30).await;
    read(&server).await;
    server.stop().await;
}

/// Removes everything that can be made again from the log; how many files that were.
fn remove_derived(dir: &Path) -> usize {
    let mut removed = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let is_derived = |end: &str| matches!(end, "index" | "timeindex" | "batches" | "state");
        if path.is_dir() {
            removed += remove_derived(&path);
        } else if path.extension().and_then(|end| end.to_str()).is_some_and(is_derived) {
            std::fs::remove_file(path).unwrap();
            removed += 1;
        }
    }
    removed
}

/// The code that every request which changes a group gets from this connection.
async fn codes_of_changes(client: &Client, group: &str, member: &StrBytes) -> Vec<(&'static str, i16)> {
    let id = || text(group).into();
    let partition = OffsetCommitRequestPartition::default().with_committed_offset(7);
    let topic =
        OffsetCommitRequestTopic::default().with_name(text(TOPIC).into()).with_partitions(vec![partition]);
    let commit = OffsetCommitRequest::default().with_group_id(id()).with_topics(vec![topic]);
    let commit = client.0.call_at(7, &commit).await.unwrap().topics[0].partitions[0].error_code;
    let topic = OffsetDeleteRequestTopic::default()
        .with_name(text(TOPIC).into())
        .with_partitions(vec![OffsetDeleteRequestPartition::default()]);
    let forget = OffsetDeleteRequest::default().with_group_id(id()).with_topics(vec![topic]);
    let forget = client.0.call_at(0, &forget).await.unwrap().error_code;
    let delete = DeleteGroupsRequest::default().with_groups_names(vec![id()]);
    let delete = client.0.call_at(1, &delete).await.unwrap().results[0].error_code;
    let who = MemberIdentity::default().with_member_id(member.clone());
    let leave = LeaveGroupRequest::default().with_group_id(id()).with_members(vec![who]);
    let leave = client.0.call_at(3, &leave).await.unwrap().error_code;
    let beat = HeartbeatRequest::default().with_group_id(id()).with_member_id(member.clone());
    let beat = client.0.call_at(3, &beat).await.unwrap().error_code;
    vec![("commit", commit), ("forget", forget), ("delete", delete), ("leave", leave), ("heartbeat", beat)]
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_lane_router_changes_a_lanes_groups() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    server.create_lane("boe-a").await.unwrap();
    let lane = server.in_lane("cart", "boe-a").await;
    let member = lane.join("team@boe-a").await;
    lane.commit(&member, 0).await;
    let committed = lane.committed("team@boe-a").await;

    for (what, code) in codes_of_changes(&baseline, "team@boe-a", &member.id).await {
        assert_eq!(code, ErrorCode::InvalidGroupId.code(), "{what}");
    }
    // It may still be looked at, and nothing happened to it.
    assert_eq!(baseline.committed("team@boe-a").await, committed);
    lane.commit(&member, 0).await;
    // The suffix of no lane is part of a plain name.
    let codes = codes_of_changes(&baseline, "team@boe-z", &member.id).await;
    assert_eq!(codes[0], ("commit", 0));
    assert!(codes.iter().all(|(_, code)| *code != ErrorCode::InvalidGroupId.code()), "{codes:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_reader_sees_every_record_and_nobody_else_becomes_one() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    for lane in ["ppe-x", "boe-a"] {
        server.create_lane(lane).await.unwrap();
    }
    let lane = server.in_lane("cart", "boe-a").await;
    lane.join("g@boe-a").await;
    baseline.produce(&["1", "2@ppe-x", "3@boe-a", "4@BOE"]).await;
    baseline.produce(&["5@ppe-x"]).await;
    let all = ["1", "2@ppe-x", "3@boe-a", "4@BOE", "5@ppe-x"];
    let auditor = server.raw("auditor").await.unwrap();
    assert_eq!(auditor.read_from(0).await.0, all);
    assert_eq!(auditor.offset_at(-3).await, baseline.fetch(0, 0).await.high_watermark - 2);
    // Nothing of it leaks into what others of that name see.
    assert_eq!(server.baseline("sealane").await.read_from(0).await.0, ["1"]);
    // It only reads: no groups, whose offsets would leave out what it may see, and no writing.
    let find = FindCoordinatorRequest::default().with_coordinator_keys(vec![text("g")]);
    assert!(auditor.0.call_at(4, &find).await.is_err());
    let auditor = server.raw("auditor").await.unwrap();
    assert_eq!(auditor.produce(&["6"]).await.0, ErrorCode::TopicAuthorizationFailed.code());
    for stranger in ["sealane-mirror", "sealane-lane-router", "somebody"] {
        assert!(server.raw(stranger).await.is_err(), "{stranger}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_raw_listener_without_a_guard_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tls = Some(CertificateDir::open(dir.path()).unwrap().leaf("broker", &[]).unwrap());
    let good = ListenerConfig {
        bind: "127.0.0.1:0".to_owned(),
        tls,
        client_auth: ClientAuth::Required,
        view: ListenerView::Raw,
        raw_readers: vec!["auditor".to_owned()],
        ..ListenerConfig::default()
    };
    let own = ListenerConfig { view: ListenerView::Own, ..good.clone() };
    for (listener, says) in [
        (ListenerConfig { tls: None, ..good.clone() }, "raw_readers"),
        (ListenerConfig { client_auth: ClientAuth::Optional, ..good.clone() }, "client_auth"),
        (ListenerConfig { raw_readers: Vec::new(), ..good.clone() }, "raw_readers"),
        (ListenerConfig { internal: true, ..good.clone() }, "internal"),
        (own, "raw_readers"),
    ] {
        let config = Config {
            storage: Storage::Memory,
            listeners: vec![listener],
            control_bind: free_address(),
            http_bind: String::new(),
            ..Config::default()
        };
        let started = service::start(config, ServiceHandle::standalone("broker")).await;
        let error = started.err().expect("refused").to_string();
        assert!(error.starts_with("listener plain") && error.contains(says), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_knows_who_bypasses_a_group_and_which_groups_are_alike() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), 30).await;
    let baseline = server.baseline("base").await;
    baseline.create_topic().await;
    server.create_lane("boe-a").await.unwrap();
    let lane = server.in_lane("cart", "boe-a").await;
    lane.join("g@boe-a").await;
    let member = baseline.join("g").await;
    baseline.commit(&member, 1).await;
    let healthy = v1::LaneDoctorResponse { topics: 1, ..v1::LaneDoctorResponse::default() };
    assert_eq!(server.doctor().await, healthy);

    let other = server.baseline("base").await;
    let twin = other.join("h").await;
    let nobody = Member { group: "flink".to_owned(), id: StrBytes::default(), generation: -1 };
    baseline.commit(&nobody, 1).await;
    server.baseline("nobody").await.read_from(0).await;
    let found = server.doctor().await;
    let bypassing = v1::BypassingGroup { group: "flink".to_owned(), topic: TOPIC.to_owned(), partitions: 1 };
    assert_eq!(found.bypassing, std::slice::from_ref(&bypassing));
    let reader = v1::GrouplessReader { client_id: "nobody".to_owned(), topic: TOPIC.to_owned() };
    assert_eq!(found.groupless, [reader]);
    let alike = &found.alike[0];
    assert_eq!((&*alike.client_id, &*alike.group, &*alike.other_group), ("base", "g", "h"));
    assert_eq!((alike.same_host, alike.stops, found.alike.len()), (true, false, 1));
    // Without its members a group is no longer alike, and a start does not make it one that bypasses.
    other.leave(&twin).await;
    baseline.leave(&member).await;
    server.stop().await;
    let server = Server::start(dir.path(), 30).await;
    let found = server.doctor().await;
    assert_eq!((found.bypassing, found.groupless, found.alike), (vec![bypassing], vec![], vec![]));
    server.stop().await;
}
