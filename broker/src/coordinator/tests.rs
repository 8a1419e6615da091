//! The coordinator over a real partition on the memory store: what survives a restart, what is
//! answered when, and what the observer learns before whom.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use broker_core::group::{
    Departure, InstanceId, JoinReply, JoinRequest, Leaver, MemberId, Protocol, SyncReply, SyncRequest,
};
use broker_core::offsets_log::CommittedOffset;
use broker_store::segment::Memory;
use broker_store::{Faults, Flaky};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use kafka::{ErrorCode as E, GroupId, LeaderEpoch, Offset, PartitionIndex, TimestampMs, TopicId, TopicName};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::api::Principal;
use crate::log::OpenFiles;
use crate::partition::{Durability, Flusher, OpenPartition, Settings};

/// Notes what it is told; assignments wait while it is closed.
struct Notes {
    assigned: Mutex<Vec<Assignment>>,
    departed: Mutex<Vec<(String, Departure)>>,
    open: watch::Sender<bool>,
    /// What the next assignments are answered with.
    answer: Mutex<Result<(), E>>,
}

impl Notes {
    fn new() -> Arc<Notes> {
        Arc::new(Notes {
            assigned: Mutex::default(),
            departed: Mutex::default(),
            open: watch::Sender::new(true),
            answer: Mutex::new(Ok(())),
        })
    }
}

impl AssignmentObserver for Notes {
    fn admits(&self, group: &GroupId, _: &Principal) -> Result<(), E> {
        if group.as_str() == "refused" { Err(E::GroupAuthorizationFailed) } else { Ok(()) }
    }

    fn assigned(&self, assignment: Assignment) -> BoxFuture<'static, Result<(), E>> {
        self.assigned.lock().push(assignment);
        let (mut open, answer) = (self.open.subscribe(), *self.answer.lock());
        Box::pin(async move {
            let _ = open.wait_for(|open| *open).await;
            answer
        })
    }

    fn departed(&self, _: &GroupId, member: &MemberId, how: Departure) {
        self.departed.lock().push((member.to_string(), how));
    }

    fn offsets_to_fetch(&self, _: &GroupId, committed: Vec<CommittedAt>) -> OffsetsToFetch {
        Box::pin(async move { Ok(committed.into_iter().map(|(_, _, offset)| offset).collect()) })
    }

    fn begun(&self, _: &GroupId) -> Vec<(TopicName, PartitionIndex)> {
        Vec::new()
    }

    fn keeps_offset(&self, group: &GroupId, _: &TopicName, _: PartitionIndex) -> bool {
        group.as_str().contains('@')
    }

    fn may_delete(&self, group: &GroupId) -> Result<(), E> {
        if group.as_str().contains('@') { Err(E::NonEmptyGroup) } else { Ok(()) }
    }
}

/// A coordinator that can be restarted over the same store.
struct Bench {
    store: Flaky<Arc<Memory>>,
    flusher: Arc<Flusher>,
    partition: Arc<Partition>,
    coordinator: Coordinator,
    notes: Arc<Notes>,
    topics: Arc<Mutex<HashSet<String>>>,
    stop: CancellationToken,
    epoch: i32,
    config: GroupConfig,
}

impl Bench {
    async fn start() -> Bench {
        Bench::start_with(GroupConfig { initial_rebalance_delay: Duration::ZERO, ..Default::default() }, 1)
            .await
    }

    async fn start_with(config: GroupConfig, seed: u64) -> Bench {
        let faults = Faults { is_torn_at_crash: true, ..Faults::default() };
        let store = Flaky::new(Arc::new(Memory::new()), seed, faults);
        let flusher = Flusher::start(1, Duration::from_millis(5), 1 << 30).unwrap();
        let topics = Arc::new(Mutex::new(HashSet::from(["t".to_owned()])));
        let (notes, stop) = (Notes::new(), CancellationToken::new());
        let partition = open(&store, &flusher, 0);
        let coordinator = coordinator(&config, &notes, &topics, &stop);
        coordinator.serve(1, vec![partition.clone()]);
        coordinator.loaded().await;
        Bench { store, flusher, partition, coordinator, notes, topics, stop, epoch: 0, config }
    }

    async fn restart(&mut self) {
        self.stop.cancel();
        self.coordinator.ended().await;
        self.partition.release();
        self.reopen().await;
    }

    /// As after kill -9 and a power cut: what was not synced is lost, and the last write is torn.
    async fn die(&mut self) {
        self.store.die_after(0);
        self.stop.cancel();
        self.coordinator.ended().await;
        self.partition.close();
        self.store.crash().unwrap();
        self.store.heal();
        self.reopen().await;
    }

    async fn reopen(&mut self) {
        self.epoch += 1;
        self.stop = CancellationToken::new();
        self.notes = Notes::new();
        self.partition = open(&self.store, &self.flusher, self.epoch);
        self.coordinator = coordinator(&self.config, &self.notes, &self.topics, &self.stop);
        self.coordinator.serve(1, vec![self.partition.clone()]);
        self.coordinator.loaded().await;
    }

    fn start_join(
        &self,
        member: Option<&str>,
        instance: Option<&str>,
    ) -> BoxFuture<'static, Result<JoinReply, E>> {
        let request = JoinRequest {
            member: member.and_then(MemberId::parse),
            fresh_id: self.coordinator.fresh_member_id("c"),
            instance: instance.map(InstanceId::new),
            client_id: "c".to_owned(),
            client_host: "/127.0.0.1".to_owned(),
            session_timeout: Duration::from_secs(30),
            rebalance_timeout: Duration::from_secs(60),
            protocol_type: "consumer".to_owned(),
            protocols: vec![Protocol { name: "range".to_owned(), metadata: subscription() }],
            id_required: false,
            may_skip_assignment: true,
        };
        let principal = Principal::Anonymous;
        self.coordinator.ask(&group(), |reply| Message::Join { group: group(), principal, request, reply })
    }

    async fn join(&self, member: Option<&str>, instance: Option<&str>) -> JoinReply {
        self.start_join(member, instance).await.unwrap()
    }

    fn start_sync(
        &self,
        member: &str,
        generation: i32,
        given: &[(&str, i32)],
    ) -> BoxFuture<'static, Result<SyncReply, E>> {
        let given = given.iter().map(|(m, p)| (MemberId::parse(m).unwrap(), assignment(*p)));
        let request = SyncRequest {
            member: MemberId::parse(member).unwrap(),
            instance: None,
            generation,
            protocol_type: None,
            protocol: None,
            assignments: given.collect(),
        };
        let principal = Principal::Anonymous;
        self.coordinator.ask(&group(), |reply| Message::Sync { group: group(), principal, request, reply })
    }

    async fn sync(&self, member: &str, generation: i32, given: &[(&str, i32)]) -> SyncReply {
        self.start_sync(member, generation, given).await.unwrap()
    }

    async fn heartbeat(&self, member: &str, instance: Option<&str>, generation: i32) -> E {
        let sender = sender(Some(member), instance, generation);
        let principal = Principal::Anonymous;
        let ask = |reply| Message::Heartbeat { group: group(), principal, sender, reply };
        self.coordinator.ask(&group(), ask).await.unwrap()
    }

    async fn commit(&self, id: &str, sender: Sender, offset: i64) -> Result<(), E> {
        let group = GroupId::new(id);
        let committed = CommittedOffset {
            offset: Offset(offset),
            leader_epoch: LeaderEpoch(3),
            metadata: "m".to_owned(),
            committed_at: crate::clock::now(),
            expires_at: None,
            topic: None,
        };
        let offsets = vec![(t0(), committed)];
        let ask = |reply| Message::Commit { group: group.clone(), sender, offsets, reply };
        self.coordinator.ask(&group, ask).await.unwrap()
    }

    async fn committed(&self, id: &str) -> Option<i64> {
        let group = GroupId::new(id);
        let ask = |reply| Message::FetchOffsets { group: group.clone(), wanted: Some(vec![t0()]), reply };
        let found = self.coordinator.ask(&group, ask).await.unwrap().unwrap();
        found[0].1.as_ref().map(|c| c.offset.0)
    }

    async fn delete(&self, id: &str) -> E {
        let group = GroupId::new(id);
        let ask = |reply| Message::DeleteGroup { group: group.clone(), reply };
        self.coordinator.ask(&group, ask).await.unwrap()
    }

    async fn states(&self) -> Vec<(String, &'static str)> {
        let mut listed: Vec<_> = self
            .coordinator
            .list()
            .await
            .unwrap()
            .into_iter()
            .map(|l| (l.group.to_string(), l.state))
            .collect();
        listed.sort();
        listed
    }

    /// One static member `a` and one `b` in a stable generation; their ids.
    async fn stable_pair(&self) -> (String, String, i32) {
        let first = self.join(None, Some("a")).await;
        let leader = first.member.unwrap().to_string();
        let (second, again) = (self.start_join(None, Some("b")), self.start_join(Some(&leader), Some("a")));
        let (second, again) = (second.await.unwrap(), again.await.unwrap());
        let follower = second.member.unwrap().to_string();
        let generation = again.generation;
        let waits = self.start_sync(&follower, generation, &[]);
        let led = self.sync(&leader, generation, &[(&leader, 0), (&follower, 1)]).await;
        assert_eq!((led.error, led.assignment), (E::None, assignment(0)));
        assert_eq!(waits.await.unwrap().assignment, assignment(1));
        (leader, follower, generation)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop.cancel();
        self.flusher.stop();
    }
}

fn coordinator(
    config: &GroupConfig,
    notes: &Arc<Notes>,
    topics: &Arc<Mutex<HashSet<String>>>,
    stop: &CancellationToken,
) -> Coordinator {
    let topics = topics.clone();
    let exists = Arc::new(move |topic: &TopicName| topics.lock().contains(topic.as_str()));
    Coordinator::new(config.clone(), notes.clone(), exists, GroupMetrics::default(), stop.clone())
}

fn open(store: &Flaky<Arc<Memory>>, flusher: &Arc<Flusher>, epoch: i32) -> Arc<Partition> {
    let open = OpenPartition {
        topic: TopicName::parse(OFFSETS_TOPIC).unwrap(),
        topic_id: TopicId(uuid::Uuid::from_u128(7)),
        index: PartitionIndex(0),
        epoch: LeaderEpoch(epoch),
        store: Arc::new(store.clone()),
        durability: Durability::Sync,
        flusher: flusher.clone(),
        settings: Settings { segment_bytes: 4096, retention_ms: None, ..Settings::default() },
        now: crate::clock::now(),
        open_files: OpenFiles::new(64),
        must_exist: false,
    };
    open.open().unwrap()
}

fn group() -> GroupId {
    GroupId::new("g")
}

fn t0() -> TopicPartition {
    (TopicName::parse("t").unwrap(), PartitionIndex(0))
}

fn sender(member: Option<&str>, instance: Option<&str>, generation: i32) -> Sender {
    Sender { member: member.and_then(MemberId::parse), instance: instance.map(InstanceId::new), generation }
}

fn tool() -> Sender {
    sender(None, None, -1)
}

fn subscription() -> Bytes {
    Bytes::from_static(b"\0\0\0\0\0\x01\0\x01t\xff\xff\xff\xff")
}

fn assignment(partition: i32) -> Bytes {
    let mut bytes = b"\0\0\0\0\0\x01\0\x01t\0\0\0\x01".to_vec();
    bytes.extend(partition.to_be_bytes());
    bytes.extend([0xff; 4]);
    bytes.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn members_and_offsets_survive_a_restart_of_the_coordinator() {
    let mut bench = Bench::start().await;
    let (leader, follower, generation) = bench.stable_pair().await;
    assert_eq!(bench.commit("g", sender(Some(&leader), Some("a"), generation), 5).await, Ok(()));
    assert_eq!(bench.commit("tool", tool(), 7).await, Ok(()));
    bench.restart().await;
    assert_eq!(bench.heartbeat(&leader, Some("a"), generation).await, E::None);
    assert_eq!(bench.heartbeat(&follower, Some("b"), generation).await, E::None);
    assert_eq!(bench.sync(&follower, generation, &[]).await.assignment, assignment(1));
    assert_eq!((bench.committed("g").await, bench.committed("tool").await), (Some(5), Some(7)));
    assert_eq!(bench.states().await, [("g".to_owned(), "Stable"), ("tool".to_owned(), "Empty")]);
    let told = bench.notes.assigned.lock().clone();
    assert!(told[0].loaded && told[0].members[0].principal.is_none(), "views come from the log first");
    let last = told.last().unwrap();
    assert!(last.members.iter().all(|m| m.principal == Some(Principal::Anonymous)), "{last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_static_member_keeps_its_share_and_its_twin_is_fenced() {
    let mut bench = Bench::start().await;
    let (leader, follower, generation) = bench.stable_pair().await;
    for round in 0..2 {
        let again = bench.join(None, Some("b")).await;
        assert_eq!((again.error, again.generation), (E::None, generation), "round {round}");
        let new = again.member.unwrap().to_string();
        assert_eq!(bench.sync(&new, generation, &[]).await.assignment, assignment(1));
        assert_eq!(bench.heartbeat(&leader, Some("a"), generation).await, E::None);
        assert_eq!(bench.heartbeat(&follower, Some("b"), generation).await, E::FencedInstanceId);
        bench.restart().await;
        assert_eq!(bench.heartbeat(&new, Some("b"), generation).await, E::None);
        assert_eq!(bench.heartbeat(&leader, Some("a"), generation).await, E::None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn assignments_wait_for_the_observer_and_its_refusal_sends_members_back() {
    let bench = Bench::start().await;
    let first = bench.join(None, None).await;
    let member = first.member.unwrap().to_string();
    bench.notes.open.send_replace(false);
    let mut waits = bench.start_sync(&member, first.generation, &[(&member, 0)]);
    let early = tokio::time::timeout(Duration::from_millis(100), &mut waits).await;
    assert!(early.is_err(), "answered before the lanes were ready");
    assert_eq!(bench.notes.assigned.lock()[0].members[0].partitions, [t0()]);
    bench.notes.open.send_replace(true);
    assert_eq!(waits.await.unwrap().error, E::None);

    *bench.notes.answer.lock() = Err(E::RebalanceInProgress);
    let again = bench.join(Some(&member), None).await;
    let refused = bench.sync(&member, again.generation, &[(&member, 0)]).await;
    assert_eq!(refused.error, E::RebalanceInProgress);
    assert_eq!(bench.heartbeat(&member, None, again.generation).await, E::RebalanceInProgress);
    let principal = Principal::Anonymous;
    let refused = GroupId::new("refused");
    let request = JoinRequest { ..bench_request(&bench) };
    let ask = |reply| Message::Join { group: refused.clone(), principal, request, reply };
    assert_eq!(bench.coordinator.ask(&refused, ask).await.unwrap().error, E::GroupAuthorizationFailed);
}

fn bench_request(bench: &Bench) -> JoinRequest {
    JoinRequest {
        member: None,
        fresh_id: bench.coordinator.fresh_member_id("c"),
        instance: None,
        client_id: String::new(),
        client_host: String::new(),
        session_timeout: Duration::from_secs(30),
        rebalance_timeout: Duration::from_secs(30),
        protocol_type: "consumer".to_owned(),
        protocols: vec![Protocol { name: "range".to_owned(), metadata: subscription() }],
        id_required: false,
        may_skip_assignment: false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_observer_learns_who_left_and_who_was_replaced() {
    let bench = Bench::start().await;
    let (leader, follower, generation) = bench.stable_pair().await;
    bench.join(None, Some("b")).await;
    let leaver = Leaver { member: MemberId::parse(&leader), instance: Some(InstanceId::new("a")) };
    let ask = |reply| Message::Leave { group: group(), leavers: vec![leaver], reply };
    assert_eq!(bench.coordinator.ask(&group(), ask).await.unwrap().unwrap(), [E::None]);
    let told = bench.notes.departed.lock().clone();
    assert_eq!(told, [(follower, Departure::Replaced), (leader, Departure::Left)]);
    assert_eq!(bench.notes.assigned.lock().last().unwrap().generation, generation);
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_deleted_only_when_empty_and_stay_deleted() {
    let mut bench = Bench::start().await;
    let (leader, _, generation) = bench.stable_pair().await;
    bench.commit("g", sender(Some(&leader), Some("a"), generation), 5).await.unwrap();
    bench.commit("tool", tool(), 7).await.unwrap();
    bench.commit("orders@boe-x", tool(), 7).await.unwrap();
    assert_eq!(bench.delete("g").await, E::NonEmptyGroup);
    assert_eq!(bench.delete("orders@boe-x").await, E::NonEmptyGroup, "the lanes hold it");
    assert_eq!(bench.delete("nope").await, E::GroupIdNotFound);
    let leavers = ["a", "b"].map(|i| Leaver { member: None, instance: Some(InstanceId::new(i)) }).to_vec();
    let ask = |reply| Message::Leave { group: group(), leavers, reply };
    bench.coordinator.ask(&group(), ask).await.unwrap().unwrap();
    assert_eq!(bench.notes.assigned.lock().last().unwrap().members, []);
    assert_eq!((bench.delete("g").await, bench.delete("tool").await), (E::None, E::None));
    assert_eq!(bench.committed("g").await, None);
    bench.restart().await;
    assert_eq!((bench.committed("g").await, bench.committed("tool").await), (None, None));
    assert_eq!(bench.states().await, [("orders@boe-x".to_owned(), "Empty")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_deleted_topic_are_gone_also_when_nobody_was_there_to_forget_them() {
    let mut bench = Bench::start().await;
    bench.commit("g", tool(), 5).await.unwrap();
    bench.coordinator.topic_deleted(&t0().0).await;
    assert_eq!(bench.committed("g").await, None);
    bench.commit("g", tool(), 6).await.unwrap();
    bench.topics.lock().clear();
    bench.restart().await;
    bench.topics.lock().insert("t".to_owned());
    assert_eq!(bench.committed("g").await, None);
    bench.restart().await;
    assert_eq!(bench.committed("g").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_topics_that_members_read_cannot_be_deleted() {
    let bench = Bench::start().await;
    let (leader, _, generation) = bench.stable_pair().await;
    bench.commit("g", sender(Some(&leader), Some("a"), generation), 5).await.unwrap();
    bench.commit("tool", tool(), 7).await.unwrap();
    let delete = |id: &'static str| {
        let group = GroupId::new(id);
        bench.coordinator.ask(&group.clone(), |reply| Message::DeleteOffsets {
            group,
            which: vec![t0()],
            reply,
        })
    };
    assert_eq!(delete("g").await.unwrap(), Ok(vec![(t0(), E::GroupSubscribedToTopic)]));
    assert_eq!(delete("tool").await.unwrap(), Ok(vec![(t0(), E::None)]));
    assert_eq!(delete("nope").await.unwrap(), Err(E::GroupIdNotFound));
    assert_eq!((bench.committed("g").await, bench.committed("tool").await), (Some(5), None));
}

#[tokio::test(flavor = "multi_thread")]
async fn lapsed_offsets_and_their_groups_go_and_those_the_lanes_need_stay() {
    let config = GroupConfig {
        initial_rebalance_delay: Duration::ZERO,
        offsets_retention: Duration::ZERO,
        ..Default::default()
    };
    let mut bench = Bench::start_with(config, 1).await;
    let (leader, _, generation) = bench.stable_pair().await;
    bench.commit("g", sender(Some(&leader), Some("a"), generation), 5).await.unwrap();
    bench.commit("tool", tool(), 7).await.unwrap();
    bench.commit("orders@boe-x", tool(), 9).await.unwrap();
    bench.coordinator.ask_all(|reply| Message::Expire { reply }).await;
    for _ in 0..2 {
        assert_eq!(bench.committed("g").await, Some(5), "its members read the topic");
        assert_eq!(bench.committed("orders@boe-x").await, Some(9));
        let states = bench.states().await;
        assert_eq!(states, [("g".to_owned(), "Stable"), ("orders@boe-x".to_owned(), "Empty")]);
        bench.restart().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compaction_keeps_the_last_record_of_each_key_and_a_restart_agrees() {
    let mut bench = Bench::start().await;
    for round in 0..150 {
        bench.commit("busy", tool(), round).await.unwrap();
        if round % 50 == 0 {
            bench.commit(&format!("idle{round}"), tool(), round).await.unwrap();
        }
    }
    bench.commit("gone", tool(), 1).await.unwrap();
    assert_eq!(bench.delete("gone").await, E::None);
    for round in 150..250 {
        bench.commit("busy", tool(), round).await.unwrap();
    }
    let before = bench.partition.size_bytes();
    let done = bench.partition.compact(TimestampMs(i64::MAX)).unwrap();
    assert!(done.segments_before > 4 && done.segments_after < done.segments_before, "{done:?}");
    assert!(bench.partition.size_bytes() < before / 2, "{done:?}");
    for pass in 0..3 {
        bench.restart().await;
        assert_eq!(bench.committed("busy").await, Some(249), "pass {pass}");
        assert_eq!(bench.committed("idle0").await, Some(0));
        assert_eq!(bench.committed("idle100").await, Some(100));
        assert_eq!(bench.committed("gone").await, None);
        bench.commit("busy", tool(), 249).await.unwrap();
        bench.partition.compact(TimestampMs(i64::MAX)).unwrap();
    }
}

/// Commits, failing syncs, a full disk and crashes in any order: what was acknowledged, or shown to
/// anybody, is there afterwards, or something newer.
#[tokio::test(flavor = "multi_thread")]
async fn no_fault_of_the_store_takes_an_acknowledged_commit_back() {
    let (mut acknowledged, mut refused, mut deaths) = (0, 0, 0);
    for seed in 1..=25u64 {
        let mut bench = Bench::start_with(GroupConfig::default(), seed).await;
        let mut dice = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut floors = [-1i64; 3];
        for step in 0..60i64 {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            let group = (dice >> 8) as usize % 3;
            let name = format!("g{group}");
            match dice % 16 {
                0 => bench.store.fail_next_sync(),
                1 => bench.store.set_full(true),
                2 | 3 => bench.store.set_full(false),
                4 => {
                    bench.die().await;
                    deaths += 1;
                }
                5 | 6 => {
                    let seen = bench.committed(&name).await.unwrap_or(-1);
                    assert!(seen >= floors[group], "seed {seed}: {seen} after {floors:?}");
                    floors[group] = seen;
                }
                _ => match bench.commit(&name, tool(), step).await {
                    Ok(()) => {
                        floors[group] = step;
                        acknowledged += 1;
                    }
                    Err(_) => refused += 1,
                },
            }
        }
        bench.die().await;
        for (group, floor) in floors.iter().enumerate() {
            let kept = bench.committed(&format!("g{group}")).await.unwrap_or(-1);
            assert!(kept >= *floor, "seed {seed}: group {group} has {kept}, was told {floor}");
        }
    }
    assert!(acknowledged > 100 && refused > 10 && deaths > 10, "{acknowledged} {refused} {deaths}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_answers_everybody_who_waits() {
    let bench = Bench::start().await;
    let first = bench.join(None, None).await;
    bench.sync(first.member.as_ref().unwrap().as_str(), 1, &[]).await;
    let waits = bench.start_join(None, None);
    bench.commit("tool", tool(), 1).await.unwrap();
    bench.stop.cancel();
    assert_eq!(waits.await.unwrap().error, E::NotCoordinator);
    bench.coordinator.ended().await;
    let late = bench.start_join(None, None).await;
    assert!(matches!(late, Err(E::NotCoordinator)) || late.unwrap().error == E::NotCoordinator);
}

#[test]
fn groups_lie_where_kafka_puts_them() {
    // Java: Math.abs("orders".hashCode()) % 50 and so on.
    assert_eq!(partition_of(&GroupId::new(""), 50), 0);
    assert_eq!(partition_of(&GroupId::new("a"), 50), 97 % 50);
    assert_eq!(partition_of(&GroupId::new("ab"), 50), (97 * 31 + 98) % 50);
    assert_eq!(partition_of(&GroupId::new("polygenelubricants"), 50), 0, "hash code is the least int");
}
