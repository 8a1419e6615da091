//! Consumers, producers and a watcher for lanes in a cluster: what each side has processed, by the value of the
//! record, and what was shown to somebody outside.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::{BufMut, Bytes, BytesMut};
use kafka::batch::{Batch, Codec};
use kafka::control::parse_marker;
use kafka::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka::messages::join_group_request::JoinGroupRequestProtocol;
use kafka::messages::leave_group_request::MemberIdentity;
use kafka::messages::offset_commit_request::{OffsetCommitRequestPartition, OffsetCommitRequestTopic};
use kafka::messages::offset_fetch_request::OffsetFetchRequestTopic;
use kafka::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka::messages::sync_group_request::SyncGroupRequestAssignment;
use kafka::messages::{
    FetchRequest, FindCoordinatorRequest, HeartbeatRequest, InitProducerIdRequest, JoinGroupRequest,
    LeaveGroupRequest, OffsetCommitRequest, OffsetFetchRequest, ProduceRequest, SyncGroupRequest,
};
use kafka::record::{BatchBuilder, Records, unpack};
use kafka::{ErrorCode, Offset, ProducerEpoch, ProducerId, StrBytes};
use kafka_client::{Cluster, ConnectOptions, Connection, Endpoint};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::support::{NAP, Nodes, PATIENCE, eventually, is_retriable, now, text};
use super::{LEAKED, STRAYED, WRONG_SIDE};

/// Clients look at the brokers again every so often: every broker that they know may go in turn.
const LOOK_EVERY: i32 = 16;

/// What one fetch of a partition showed.
struct Shown {
    values: Vec<String>,
    next: i64,
    high_watermark: i64,
}

/// One fetch; `None` where the broker has no answer for it now.
async fn fetch(at: &Connection, topic: &str, index: i32, from: i64) -> Option<Shown> {
    let asked = FetchPartition::default()
        .with_partition(index)
        .with_fetch_offset(from)
        .with_partition_max_bytes(1 << 20);
    let topics = FetchTopic::default().with_topic(text(topic).into()).with_partitions(vec![asked]);
    let request = FetchRequest::default()
        .with_max_wait_ms(20)
        .with_min_bytes(1)
        .with_max_bytes(1 << 20)
        .with_topics(vec![topics]);
    let mut answer = at.call_at(11, &request).await.ok()?;
    let partition = answer.responses.first_mut()?.partitions.pop()?;
    if partition.error_code != 0 {
        let code = partition.error_code;
        assert!(is_retriable(code) || code == ErrorCode::OffsetOutOfRange.code(), "{partition:?}");
        return None;
    }
    let mut shown = Shown { values: Vec::new(), next: from, high_watermark: partition.high_watermark };
    for batch in Batch::split_all(partition.records.unwrap_or_default(), true).unwrap() {
        assert_eq!(parse_marker(&batch), Ok(None), "markers stay inside");
        shown.next = shown.next.max(batch.header.next_offset().0);
        if batch.header.is_control() {
            continue;
        }
        let section = unpack(&batch).unwrap();
        for record in Records::new(&section, batch.header.record_count) {
            let record = record.unwrap();
            if batch.header.base_offset.0 + i64::from(record.offset_delta) >= from {
                shown.values.push(String::from_utf8(record.value.unwrap().to_vec()).unwrap());
            }
        }
    }
    Some(shown)
}

/// How a reader shall go on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Reads,
    Leaves,
    Dies,
}

/// A group of one member that reads every partition, commits, and notes what it has processed.
pub struct Reader {
    mode: watch::Sender<Mode>,
    assigned: watch::Receiver<u64>,
    /// Assignments that were taken back before they were told.
    put_off: watch::Receiver<u64>,
    /// Passes in which it stood at the end of every partition.
    at_end: watch::Receiver<u64>,
    task: JoinHandle<BTreeSet<String>>,
}

struct Reading {
    client: Cluster,
    group: String,
    in_lane: bool,
    topic: String,
    partitions: i32,
    mode: watch::Receiver<Mode>,
    assigned: watch::Sender<u64>,
    put_off: watch::Sender<u64>,
    at_end: watch::Sender<u64>,
    seen: BTreeSet<String>,
    passes: i32,
    member: StrBytes,
    generation: i32,
}

impl Reader {
    pub fn start(
        nodes: &Nodes,
        client_id: &str,
        group: &str,
        lane: Option<&str>,
        topic: &str,
        partitions: i32,
    ) -> Reader {
        let client = nodes.client_as(client_id, lane);
        Reader::start_on(client, group, lane.is_some(), topic, partitions)
    }

    pub fn start_on(client: Cluster, group: &str, in_lane: bool, topic: &str, partitions: i32) -> Reader {
        let (mode, follow) = watch::channel(Mode::Reads);
        let (assigned, is_assigned) = watch::channel(0);
        let (put_off, is_put_off) = watch::channel(0);
        let (at_end, is_at_end) = watch::channel(0);
        let reading = Reading {
            client,
            group: group.to_owned(),
            in_lane,
            topic: topic.to_owned(),
            partitions,
            mode: follow,
            assigned,
            put_off,
            at_end,
            seen: BTreeSet::new(),
            passes: 0,
            member: StrBytes::default(),
            generation: -1,
        };
        let task = tokio::spawn(reading.run());
        Reader { mode, assigned: is_assigned, put_off: is_put_off, at_end: is_at_end, task }
    }

    pub fn is_assigned(&self) -> bool {
        *self.assigned.borrow() > 0
    }

    pub async fn until_put_off(&self) {
        eventually("its assignment is put off", async || *self.put_off.borrow() > 0).await;
    }

    pub async fn until_assigned(&self) {
        eventually("it is assigned its partitions", async || self.is_assigned()).await;
    }

    /// Until it has stood at the end of everything after this was asked.
    pub async fn until_caught_up(&self) {
        self.until_assigned().await;
        let from = *self.at_end.borrow();
        eventually("it has read everything", async || {
            assert!(!self.task.is_finished(), "a reader failed");
            *self.at_end.borrow() >= from + 2
        })
        .await;
    }

    /// Leaves the group, or dies without a word; what it has processed.
    pub async fn end(self, leaves: bool) -> BTreeSet<String> {
        self.mode.send_replace(if leaves { Mode::Leaves } else { Mode::Dies });
        self.task.await.unwrap()
    }
}

impl Reading {
    async fn run(mut self) -> BTreeSet<String> {
        loop {
            if self.mode() != Mode::Reads {
                return self.seen;
            }
            if self.join().await.is_none() {
                tokio::time::sleep(NAP).await;
                continue;
            }
            let Some(mut positions) = self.positions().await else { continue };
            self.assigned.send_modify(|n| *n += 1);
            while self.beats().await && self.mode() == Mode::Reads {
                self.read(&mut positions).await;
            }
            match self.mode() {
                Mode::Reads => {}
                Mode::Leaves => {
                    self.leave().await;
                    return self.seen;
                }
                Mode::Dies => return self.seen,
            }
        }
    }

    fn mode(&self) -> Mode {
        *self.mode.borrow()
    }

    async fn join(&mut self) -> Option<()> {
        let coordinator = self.client.coordinator(&self.group).await.ok()?;
        let metadata = Bytes::from_static(b"\0\0\0\0\0\x01\0\x06orders\xff\xff\xff\xff");
        let protocol = JoinGroupRequestProtocol::default().with_name(text("range")).with_metadata(metadata);
        let request = JoinGroupRequest::default()
            .with_group_id(text(&self.group).into())
            .with_member_id(self.member.clone())
            .with_session_timeout_ms(6_000)
            .with_rebalance_timeout_ms(10_000)
            .with_protocol_type(text("consumer"))
            .with_protocols(vec![protocol]);
        let joined = coordinator.call_at(3, &request).await.ok()?;
        if joined.error_code == ErrorCode::UnknownMemberId.code() {
            self.member = StrBytes::default();
        }
        if joined.error_code != 0 {
            return None;
        }
        self.member = joined.member_id;
        self.generation = joined.generation_id;
        let share = SyncGroupRequestAssignment::default()
            .with_member_id(self.member.clone())
            .with_assignment(self.assignment());
        let request = SyncGroupRequest::default()
            .with_group_id(text(&self.group).into())
            .with_member_id(self.member.clone())
            .with_generation_id(self.generation)
            .with_assignments(vec![share]);
        let synced = coordinator.call_at(3, &request).await.ok()?;
        if synced.error_code == ErrorCode::RebalanceInProgress.code() {
            self.put_off.send_modify(|n| *n += 1);
        }
        (synced.error_code == 0).then_some(())
    }

    fn assignment(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        bytes.put_i16(0);
        bytes.put_i32(1);
        bytes.put_i16(self.topic.len() as i16);
        bytes.put_slice(self.topic.as_bytes());
        bytes.put_i32(self.partitions);
        (0..self.partitions).for_each(|index| bytes.put_i32(index));
        bytes.put_i32(-1);
        bytes.freeze()
    }

    /// Where it goes on, by partition; `None` if it has to join again.
    async fn positions(&mut self) -> Option<Vec<i64>> {
        let end = tokio::time::Instant::now() + PATIENCE;
        while self.mode() == Mode::Reads && self.beats().await {
            assert!(tokio::time::Instant::now() < end, "no offsets for {}", self.group);
            if let Some(found) = self.committed().await {
                return Some(found);
            }
            tokio::time::sleep(NAP).await;
        }
        None
    }

    async fn committed(&self) -> Option<Vec<i64>> {
        let coordinator = self.client.coordinator(&self.group).await.ok()?;
        let topic = OffsetFetchRequestTopic::default()
            .with_name(text(&self.topic).into())
            .with_partition_indexes((0..self.partitions).collect());
        let request = OffsetFetchRequest::default()
            .with_group_id(text(&self.group).into())
            .with_topics(Some(vec![topic]));
        let answer = coordinator.call_at(5, &request).await.ok()?;
        if answer.error_code != 0 {
            return None;
        }
        let offsets = answer.topics.first()?.partitions.iter();
        let offsets: Vec<i64> = offsets.map(|partition| partition.committed_offset).collect();
        // "Nothing" would let auto.offset.reset choose. Without a view filter it has no view to begin in.
        let told = !self.in_lane || is_off("view-filter") || offsets.iter().all(|at| *at >= 0);
        assert!(told, "a lane's group is told where to begin: {offsets:?}");
        Some(offsets.into_iter().map(|at| at.max(0)).collect())
    }

    async fn beats(&mut self) -> bool {
        let Ok(coordinator) = self.client.coordinator(&self.group).await else {
            tokio::time::sleep(NAP).await;
            return true;
        };
        let request = HeartbeatRequest::default()
            .with_group_id(text(&self.group).into())
            .with_member_id(self.member.clone())
            .with_generation_id(self.generation);
        let Ok(answer) = coordinator.call_at(3, &request).await else { return true };
        if answer.error_code == ErrorCode::UnknownMemberId.code() {
            self.member = StrBytes::default();
        }
        let elsewhere = [ErrorCode::NotCoordinator, ErrorCode::CoordinatorNotAvailable];
        answer.error_code == 0 || elsewhere.iter().any(|code| code.code() == answer.error_code)
    }

    async fn read(&mut self, positions: &mut [i64]) {
        self.passes += 1;
        if self.passes % LOOK_EVERY == 0 {
            self.client.forget(&self.topic);
        }
        let mut at_end = true;
        for index in 0..self.partitions {
            let at = &mut positions[index as usize];
            let shown = match self.client.leader(&self.topic, index).await {
                Ok((leader, _)) => fetch(&leader, &self.topic, index, *at).await,
                Err(_) => None,
            };
            let Some(shown) = shown else {
                at_end = false;
                self.client.forget(&self.topic);
                tokio::time::sleep(NAP).await;
                continue;
            };
            self.seen.extend(shown.values);
            *at = shown.next;
            at_end &= shown.next >= shown.high_watermark;
        }
        self.commit(positions).await;
        if at_end {
            self.at_end.send_modify(|n| *n += 1);
        }
    }

    async fn commit(&self, positions: &[i64]) {
        let Ok(coordinator) = self.client.coordinator(&self.group).await else { return };
        let partition = |(index, at): (i32, &i64)| {
            OffsetCommitRequestPartition::default().with_partition_index(index).with_committed_offset(*at)
        };
        let topic = OffsetCommitRequestTopic::default()
            .with_name(text(&self.topic).into())
            .with_partitions((0..).zip(positions).map(partition).collect());
        let request = OffsetCommitRequest::default()
            .with_group_id(text(&self.group).into())
            .with_member_id(self.member.clone())
            .with_generation_id_or_member_epoch(self.generation)
            .with_topics(vec![topic]);
        // What is not committed is read again.
        let _ = coordinator.call_at(7, &request).await;
    }

    async fn leave(&self) {
        let who = MemberIdentity::default().with_member_id(self.member.clone());
        let request =
            LeaveGroupRequest::default().with_group_id(text(&self.group).into()).with_members(vec![who]);
        let end = tokio::time::Instant::now() + PATIENCE;
        while !self.has_left(&request).await {
            assert!(tokio::time::Instant::now() < end, "{} cannot leave", self.group);
            tokio::time::sleep(NAP).await;
        }
    }

    async fn has_left(&self, request: &LeaveGroupRequest) -> bool {
        let Ok(coordinator) = self.client.coordinator(&self.group).await else { return false };
        coordinator.call_at(3, request).await.is_ok_and(|answer| answer.error_code == 0)
    }
}

/// A record that was acknowledged.
struct Acknowledged {
    value: String,
    /// Lane boe-a was deployed from before it was sent until it was acknowledged.
    while_deployed: bool,
}

/// One idempotent producer for each partition; each batch holds a record of the baseline, of a lane that comes and
/// goes, of one that is never deployed, and of a PPE lane.
pub struct Producers {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    /// Odd while the lane is deployed.
    deployed: Arc<AtomicU64>,
    tasks: Vec<JoinHandle<Vec<Acknowledged>>>,
}

const LANES: [Option<&str>; 4] = [None, Some("boe-a"), Some("boe-b"), Some("ppe-x")];

impl Producers {
    pub async fn start(nodes: &Nodes, topic: &str, partitions: i32) -> Producers {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let deployed = Arc::new(AtomicU64::new(0));
        let mut tasks = Vec::new();
        for index in 0..partitions {
            let request = InitProducerIdRequest::default().with_transactional_id(None);
            let answer = nodes.connect(0).await.call(&request).await.unwrap();
            assert_eq!(answer.error_code, 0, "{answer:?}");
            let producer = Producer {
                client: nodes.client_as("producer", None),
                topic: topic.to_owned(),
                index,
                id: ProducerId(answer.producer_id.0),
                stop: stop.clone(),
                acknowledged: acknowledged.clone(),
                deployed: deployed.clone(),
            };
            tasks.push(tokio::spawn(producer.run()));
        }
        Producers { stop, acknowledged, deployed, tasks }
    }

    pub fn lane_is_deployed(&self, is: bool) {
        let before = self.deployed.fetch_add(1, Ordering::SeqCst);
        assert_eq!(before.is_multiple_of(2), is);
    }

    /// Waits for that many more batches.
    pub async fn until_more(&self, count: u64) {
        let aim = self.acknowledged.load(Ordering::SeqCst) + count;
        eventually("more is acknowledged", async || {
            assert!(self.tasks.iter().all(|task| !task.is_finished()), "a producer failed");
            self.acknowledged.load(Ordering::SeqCst) >= aim
        })
        .await;
    }

    pub async fn stop(self) -> Sent {
        self.stop.store(true, Ordering::SeqCst);
        let mut sent = Sent { records: BTreeMap::new() };
        for task in self.tasks {
            sent.records.extend(task.await.unwrap().into_iter().map(|a| (a.value, a.while_deployed)));
        }
        sent
    }
}

struct Producer {
    client: Cluster,
    topic: String,
    index: i32,
    id: ProducerId,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    deployed: Arc<AtomicU64>,
}

impl Producer {
    async fn run(self) -> Vec<Acknowledged> {
        let mut all = Vec::new();
        for n in 0.. {
            if self.stop.load(Ordering::SeqCst) {
                break;
            }
            let value = |lane: &Option<&str>| format!("{}-{n}@{}", self.index, lane.unwrap_or("none"));
            let mut builder = BatchBuilder::new(Offset(0), now(), Codec::None);
            builder.producer(self.id, ProducerEpoch(0), n * LANES.len() as i32);
            for (at, lane) in (0..).zip(&LANES) {
                let header = lane.map(|lane| ("x-lane", Some(lane.as_bytes())));
                builder.push(at, 0, None, Some(value(lane).as_bytes()), header.as_slice());
            }
            let batch = builder.build().bytes;
            if n % LOOK_EVERY == 0 {
                self.client.forget(&self.topic);
            }
            let before = self.deployed.load(Ordering::SeqCst);
            let end = tokio::time::Instant::now() + PATIENCE;
            while !self.send(batch.clone()).await {
                assert!(tokio::time::Instant::now() < end, "{} is not acknowledged", value(&None));
                self.client.forget(&self.topic);
                tokio::time::sleep(NAP).await;
            }
            let while_deployed = before % 2 == 1 && self.deployed.load(Ordering::SeqCst) == before;
            all.extend(LANES.iter().map(|lane| Acknowledged { value: value(lane), while_deployed }));
            self.acknowledged.fetch_add(1, Ordering::SeqCst);
        }
        all
    }

    async fn send(&self, batch: Bytes) -> bool {
        let Ok((leader, _)) = self.client.leader(&self.topic, self.index).await else { return false };
        let data = PartitionProduceData::default().with_index(self.index).with_records(Some(batch));
        let topic =
            TopicProduceData::default().with_name(text(&self.topic).into()).with_partition_data(vec![data]);
        let request =
            ProduceRequest::default().with_acks(-1).with_timeout_ms(10_000).with_topic_data(vec![topic]);
        let Ok(answer) = leader.call_at(9, &request).await else { return false };
        let code = answer.responses[0].partition_responses[0].error_code;
        assert!(code == 0 || is_retriable(code), "a batch was refused for good: error {code}");
        code == 0
    }
}

/// All that was acknowledged: whether the lane was deployed throughout, by value.
pub struct Sent {
    records: BTreeMap<String, bool>,
}

impl Sent {
    pub fn of_lane(&self, lane: &str) -> usize {
        self.records.keys().filter(|value| value.rsplit_once('@').unwrap().1 == lane).count()
    }

    /// Each record was processed by the side that it belongs to, and by no other.
    pub fn check(&self, base: &BTreeSet<String>, lane: &BTreeSet<String>, ppe: &BTreeSet<String>) {
        let of_lane: Vec<_> = self.records.iter().filter(|(value, _)| value.ends_with("@boe-a")).collect();
        let deployed: Vec<_> = of_lane.iter().filter(|(_, d)| **d).map(|(value, _)| *value).collect();
        let by_lane = of_lane.iter().filter(|(value, _)| lane.contains(*value)).count();
        let by_base = of_lane.iter().filter(|(value, _)| base.contains(*value)).count();
        println!(
            "{} records acknowledged; of the lane's {} went to the lane and {by_base} to the baseline, {} were \
             produced while it was deployed; {} of a PPE lane",
            self.records.len(),
            by_lane,
            deployed.len(),
            ppe.len()
        );
        assert!(
            by_lane > 0 && by_base > 0 && !deployed.is_empty() && !ppe.is_empty(),
            "something was at stake"
        );
        assert!(base.iter().chain(lane).all(|value| !value.ends_with("@ppe-x")), "{LEAKED}");
        let strayed: Vec<_> = deployed.iter().filter(|value| !lane.contains(value.as_str())).collect();
        assert!(strayed.is_empty(), "{STRAYED}: {} of {}: {strayed:?}", strayed.len(), deployed.len());
        for value in self.records.keys() {
            let sides = [base, lane, ppe].map(|side| side.contains(value));
            let right = match value.rsplit_once('@').unwrap().1 {
                "ppe-x" => sides == [false, false, true],
                "boe-a" => sides == [true, false, false] || sides == [false, true, false],
                _ => sides == [true, false, false],
            };
            assert!(right, "{value} {WRONG_SIDE} {sides:?}");
        }
        let known = |value: &&String| !self.records.contains_key(*value);
        let more = base.iter().chain(lane).chain(ppe).filter(known).count();
        assert_eq!(more, 0, "records that nobody was told of");
    }
}

/// Reads every partition at every broker over plain connections, with and without a name that a group knows.
pub struct Watch {
    endpoints: Arc<Mutex<Vec<Endpoint>>>,
    stop: Arc<AtomicBool>,
    leaked: Arc<Mutex<BTreeSet<String>>>,
    task: JoinHandle<u64>,
}

impl Watch {
    pub fn start(nodes: &Nodes, topic: &str, partitions: i32) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let leaked: Arc<Mutex<BTreeSet<String>>> = Arc::default();
        let endpoints: Arc<Mutex<Vec<Endpoint>>> = Arc::default();
        let looked_at = endpoints.clone();
        let (topic, stopping, found) = (topic.to_owned(), stop.clone(), Arc::clone(&leaked));
        let task = tokio::spawn(async move {
            let mut looks = 0;
            while !stopping.load(Ordering::SeqCst) {
                let endpoints = looked_at.lock().clone();
                for (endpoint, client_id) in
                    endpoints.iter().flat_map(|endpoint| [(endpoint, "base"), (endpoint, "stranger")])
                {
                    let options =
                        ConnectOptions { client_id: client_id.to_owned(), ..ConnectOptions::default() };
                    let Ok(connection) = Connection::connect(endpoint, &options).await else { continue };
                    for index in 0..partitions {
                        let mut at = 0;
                        while let Some(shown) = fetch(&connection, &topic, index, at).await {
                            looks += 1;
                            let ppe = shown.values.into_iter().filter(|value| value.contains("@ppe"));
                            found.lock().extend(ppe);
                            if shown.next <= at {
                                break;
                            }
                            at = shown.next;
                        }
                    }
                }
                tokio::time::sleep(NAP * 10).await;
            }
            looks
        });
        let watch = Watch { endpoints, stop, leaked, task };
        watch.looks_at(nodes);
        watch
    }

    /// The brokers have changed.
    pub fn looks_at(&self, nodes: &Nodes) {
        *self.endpoints.lock() = (0..nodes.len()).map(|at| nodes.endpoint(at)).collect();
    }

    pub fn check(&self) {
        let leaked = self.leaked.lock();
        assert!(leaked.is_empty(), "{LEAKED}: {} of them", leaked.len());
    }

    /// How many fetches had an answer.
    pub async fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        let looks = self.task.await.unwrap();
        assert!(looks > 0, "something was looked at");
        let leaked = self.leaked.lock();
        assert!(leaked.is_empty(), "{LEAKED}: {} of them", leaked.len());
        looks
    }
}

/// The broker id of a group's coordinator.
pub async fn coordinator_of(nodes: &Nodes, group: &str) -> i32 {
    let found = std::cell::Cell::new(-1);
    let find = FindCoordinatorRequest::default().with_coordinator_keys(vec![text(group)]);
    eventually("the group has a coordinator", async || {
        let Ok(answer) = nodes.connect(0).await.call_at(4, &find).await else { return false };
        found.set(answer.coordinators[0].node_id.0);
        answer.coordinators[0].error_code == 0
    })
    .await;
    found.get()
}

fn is_off(mechanism: &str) -> bool {
    std::env::var("SEALANE_TEST_OFF").is_ok_and(|off| off.split(',').any(|name| name == mechanism))
}

/// Runs a test of this file in a process of its own, with mechanisms off and faults on.
pub fn run_again(test: &str, off: &str, fault: &str) -> Result<String, String> {
    let ran = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("SEALANE_TEST_OFF", off)
        .env("SEALANE_TEST_FAULT", fault)
        .output()
        .unwrap();
    let told = [ran.stdout, ran.stderr].map(|told| String::from_utf8_lossy(&told).into_owned()).concat();
    let summary: Vec<&str> =
        told.lines().filter(|line| line.contains("records") || line.contains("panicked")).collect();
    println!("with {off:?} off and {fault:?} on: {}", summary.join("\n"));
    if ran.status.success() { Ok(told) } else { Err(told) }
}

/// The same, where it has to fail; what it told.
pub fn twin(test: &str, off: &str, fault: &str) -> String {
    match run_again(test, off, fault) {
        Ok(_) => panic!("{off} is what keeps the other test green"),
        Err(told) => told,
    }
}
