//! Tests of the group, rule by rule; `world.rs` runs whole fleets of clients on virtual time.

mod world;

use super::*;
use ErrorCode as E;

struct Bench {
    group: Group,
    at: Duration,
    tickets: u64,
    ids: u64,
}

impl Bench {
    fn new() -> Bench {
        let rules = GroupRules {
            initial_rebalance_delay: Duration::from_secs(3),
            members_max: 3,
            new_member_join_timeout: Duration::from_secs(300),
        };
        let at = Duration::ZERO;
        Bench { group: Group::new(GroupId::new("g"), rules, now(at)), at, tickets: 0, ids: 0 }
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    fn request(&mut self, member: Option<&str>, instance: Option<&str>) -> JoinRequest {
        self.ids += 1;
        JoinRequest {
            member: member.and_then(MemberId::parse),
            fresh_id: MemberId::parse(&format!("m{}", self.ids)).unwrap(),
            instance: instance.map(InstanceId::new),
            client_id: "c".to_owned(),
            client_host: "/127.0.0.1".to_owned(),
            session_timeout: Duration::from_secs(10),
            rebalance_timeout: Duration::from_secs(60),
            protocol_type: "consumer".to_owned(),
            protocols: vec![protocol("range"), protocol("sticky")],
            id_required: false,
            may_skip_assignment: true,
        }
    }

    fn join(&mut self, member: Option<&str>, instance: Option<&str>) -> Vec<Effect> {
        let request = self.request(member, instance);
        self.join_with(request)
    }

    fn join_with(&mut self, request: JoinRequest) -> Vec<Effect> {
        let ticket = self.ticket();
        self.group.join(now(self.at), ticket, request)
    }

    fn sync(&mut self, member: &str, generation: i32, assignments: &[(&str, &str)]) -> Vec<Effect> {
        let ticket = self.ticket();
        let given = assignments.iter().map(|(m, a)| (id(m), Bytes::copy_from_slice(a.as_bytes())));
        let request = SyncRequest {
            member: id(member),
            instance: None,
            generation,
            protocol_type: None,
            protocol: None,
            assignments: given.collect(),
        };
        self.group.sync(now(self.at), ticket, request)
    }

    fn pass(&mut self, seconds: u64) -> Vec<Effect> {
        self.at += Duration::from_secs(seconds);
        self.group.tick(now(self.at))
    }

    fn store_succeeds(&mut self, effects: &[Effect]) -> Vec<Effect> {
        let token = effects.iter().find_map(|e| match e {
            Effect::Store(token, _) => Some(*token),
            _ => None,
        });
        self.group.stored(now(self.at), token.expect("a store"), Ok(()))
    }

    fn heartbeat(&mut self, member: &str) -> ErrorCode {
        let generation = self.group.generation();
        self.group.heartbeat(now(self.at), &id(member), None, generation)
    }

    /// Two members `m1` (leader) and `m2`, stable in generation 1, static if named.
    fn stable(names: [Option<&str>; 2]) -> Bench {
        let mut bench = Bench::new();
        bench.join(None, names[0]);
        bench.join(None, names[1]);
        // A member came while the delay ran, so it runs once more.
        assert!(bench.pass(3).is_empty());
        let joined = joins(&bench.pass(3));
        assert_eq!(joined.len(), 2);
        assert!(bench.sync("m2", 1, &[]).is_empty());
        let effects = bench.sync("m1", 1, &[("m1", "a"), ("m2", "b")]);
        let answers = bench.store_succeeds(&effects);
        assert_eq!(syncs(&answers).len(), 2);
        assert_eq!(bench.group.state(), GroupState::Stable);
        bench
    }
}

fn now(at: Duration) -> Now {
    Now { elapsed: at, wall: TimestampMs(1_000_000 + at.as_millis() as i64) }
}

fn id(text: &str) -> MemberId {
    MemberId::parse(text).unwrap()
}

fn protocol(name: &str) -> Protocol {
    // Version 0, one topic "t", null user data.
    Protocol { name: name.to_owned(), metadata: Bytes::from_static(b"\0\0\0\0\0\x01\0\x01t\xff\xff\xff\xff") }
}

fn joins(effects: &[Effect]) -> Vec<JoinReply> {
    effects
        .iter()
        .filter_map(|e| if let Effect::AnswerJoin(_, r) = e { Some(r.clone()) } else { None })
        .collect()
}

fn syncs(effects: &[Effect]) -> Vec<SyncReply> {
    effects
        .iter()
        .filter_map(|e| if let Effect::AnswerSync(_, r) = e { Some(r.clone()) } else { None })
        .collect()
}

fn departures(effects: &[Effect]) -> Vec<(String, Departure)> {
    let departure = |e: &Effect| match e {
        Effect::Departed(id, how) => Some((id.to_string(), *how)),
        _ => None,
    };
    effects.iter().filter_map(departure).collect()
}

#[test]
fn a_new_dynamic_member_must_come_back_with_its_id() {
    let mut bench = Bench::new();
    let request = JoinRequest { id_required: true, ..bench.request(None, None) };
    let reply = joins(&bench.join_with(request)).remove(0);
    assert_eq!((reply.error, reply.member), (E::MemberIdRequired, Some(id("m1"))));
    assert_eq!(bench.group.state(), GroupState::Empty);
    assert!(bench.join(Some("m1"), None).is_empty(), "it waits for the initial delay");
    let reply = joins(&bench.pass(3)).remove(0);
    assert_eq!((reply.error, reply.generation, reply.members.len()), (E::None, 1, 1));
    assert_eq!(reply.protocol.as_deref(), Some("range"));
}

#[test]
fn an_id_that_nobody_uses_lapses_after_its_session() {
    let mut bench = Bench::new();
    let request = JoinRequest { id_required: true, ..bench.request(None, None) };
    bench.join_with(request);
    assert_eq!(bench.group.next_deadline(), Some(Duration::from_secs(10)));
    bench.pass(10);
    assert!(bench.group.is_idle());
    assert_eq!(joins(&bench.join(Some("m1"), None))[0].error, E::UnknownMemberId);
}

#[test]
fn static_members_get_their_place_without_being_asked_back() {
    let mut bench = Bench::new();
    let request = JoinRequest { id_required: true, ..bench.request(None, Some("i")) };
    assert!(bench.join_with(request).is_empty());
}

#[test]
fn the_chosen_protocol_is_the_one_most_members_prefer_among_those_all_support() {
    let mut bench = Bench::new();
    for protocols in [&["range", "sticky", "own"][..], &["sticky", "range"], &["sticky", "range"]] {
        let protocols = protocols.iter().map(|p| protocol(p)).collect();
        let request = JoinRequest { protocols, ..bench.request(None, None) };
        bench.join_with(request);
    }
    bench.pass(3);
    let replies = joins(&bench.pass(3));
    assert!(replies.iter().all(|r| r.protocol.as_deref() == Some("sticky")));
    let odd = JoinRequest { protocols: vec![protocol("own")], ..bench.request(Some("m1"), None) };
    assert_eq!(joins(&bench.join_with(odd))[0].error, E::InconsistentGroupProtocol);
    let other = JoinRequest { protocol_type: "connect".to_owned(), ..bench.request(Some("m1"), None) };
    assert_eq!(joins(&bench.join_with(other))[0].error, E::InconsistentGroupProtocol);
}

#[test]
fn assignments_reach_members_only_after_they_are_stored() {
    let mut bench = Bench::stable([None, None]);
    assert_eq!(bench.heartbeat("m2"), E::None);
    let again = syncs(&bench.sync("m2", 1, &[])).remove(0);
    assert_eq!((again.assignment, again.protocol.as_deref()), (Bytes::from_static(b"b"), Some("range")));
    assert_eq!(syncs(&bench.sync("m2", 0, &[]))[0].error, E::IllegalGeneration);
    assert_eq!(syncs(&bench.sync("m9", 1, &[]))[0].error, E::UnknownMemberId);
}

#[test]
fn a_member_the_leader_forgot_gets_an_assignment_that_decodes() {
    let mut bench = Bench::new();
    bench.join(None, None);
    bench.pass(3);
    let effects = bench.sync("m1", 1, &[]);
    let answer = syncs(&bench.store_succeeds(&effects)).remove(0);
    assert_eq!(consumer_protocol::assigned_partitions(answer.assignment), Some(vec![]));
}

#[test]
fn a_failed_store_sends_everybody_back_to_join() {
    let mut bench = Bench::new();
    bench.join(None, None);
    bench.pass(3);
    let effects = bench.sync("m1", 1, &[]);
    let Effect::Store(token, _) = effects[0] else { panic!("{effects:?}") };
    let answers = bench.group.stored(now(bench.at), token, Err(E::CoordinatorNotAvailable));
    assert_eq!(syncs(&answers)[0].error, E::CoordinatorNotAvailable);
    assert_eq!(bench.group.state(), GroupState::PreparingRebalance);
    assert_eq!(joins(&bench.join(Some("m1"), None))[0].generation, 2);
}

#[test]
fn a_joining_member_makes_the_others_join_and_late_ones_are_out() {
    let mut bench = Bench::stable([None, None]);
    assert!(bench.join(None, None).is_empty());
    assert_eq!(bench.heartbeat("m1"), E::RebalanceInProgress);
    assert_eq!(syncs(&bench.sync("m1", 1, &[]))[0].error, E::RebalanceInProgress);
    assert!(bench.join(Some("m1"), None).is_empty());
    for _ in 0..6 {
        bench.heartbeat("m2");
        bench.pass(9);
    }
    bench.heartbeat("m2");
    let effects = bench.pass(6);
    assert_eq!(departures(&effects), [("m2".to_owned(), Departure::Expired)]);
    assert_eq!(joins(&effects).len(), 2);
    assert_eq!(bench.heartbeat("m2"), E::UnknownMemberId);
}

#[test]
fn the_leader_that_does_not_rejoin_loses_its_role() {
    let mut bench = Bench::stable([Some("a"), None]);
    let lead = bench.group.leader().cloned();
    assert_eq!(lead, Some(id("m1")));
    // m2 changes its subscription; the static leader m1 does not come back in time but stays.
    let protocols = vec![Protocol { name: "range".to_owned(), metadata: Bytes::from_static(b"x") }];
    let request = JoinRequest { protocols, ..bench.request(Some("m2"), None) };
    assert!(bench.join_with(request).is_empty());
    for _ in 0..6 {
        bench.heartbeat("m1");
        bench.pass(9);
    }
    bench.heartbeat("m1");
    let replies = joins(&bench.pass(6));
    assert_eq!(replies[0].leader, Some(id("m2")));
    assert_eq!(replies[0].members.len(), 2, "the static member is still in the group");
}

#[test]
fn leaving_starts_a_rebalance_and_the_last_one_empties_the_group() {
    let mut bench = Bench::stable([None, None]);
    let leaver = |m: &str| Leaver { member: MemberId::parse(m), instance: None };
    let (codes, effects) = bench.group.leave(now(bench.at), &[leaver("m9"), leaver("m1")]);
    assert_eq!(codes, [E::UnknownMemberId, E::None]);
    assert_eq!(departures(&effects), [("m1".to_owned(), Departure::Left)]);
    assert_eq!(bench.group.state(), GroupState::PreparingRebalance);
    let (_, effects) = bench.group.leave(now(bench.at), &[leaver("m2")]);
    assert_eq!(bench.group.state(), GroupState::Empty);
    let stored =
        effects.iter().find_map(|e| if let Effect::Store(_, m) = e { Some(m.clone()) } else { None });
    let stored = stored.expect("the empty generation is stored");
    assert_eq!((stored.generation, stored.members.len(), stored.protocol), (2, 0, None));
    assert_eq!(bench.group.may_be_deleted(), Ok(()));
}

#[test]
fn administrators_remove_static_members_by_instance() {
    let mut bench = Bench::stable([Some("a"), Some("b")]);
    let leaver = |i: &str| Leaver { member: None, instance: Some(InstanceId::new(i)) };
    let (codes, _) = bench.group.leave(now(bench.at), &[leaver("a"), leaver("zz")]);
    assert_eq!(codes, [E::None, E::UnknownMemberId]);
}

#[test]
fn a_silent_member_expires() {
    let mut bench = Bench::stable([None, None]);
    bench.pass(9);
    bench.heartbeat("m1");
    let effects = bench.pass(1);
    assert_eq!(departures(&effects), [("m2".to_owned(), Departure::Expired)]);
    assert_eq!(bench.heartbeat("m1"), E::RebalanceInProgress);
}

#[test]
fn members_that_never_sync_are_out_after_the_rebalance_timeout() {
    let mut bench = Bench::new();
    bench.join(None, None);
    bench.join(None, None);
    bench.pass(3);
    bench.pass(3);
    bench.sync("m1", 1, &[]);
    for _ in 0..6 {
        bench.heartbeat("m2");
        bench.pass(9);
    }
    bench.heartbeat("m2");
    let effects = bench.pass(6);
    assert_eq!(departures(&effects), [("m2".to_owned(), Departure::Expired)]);
    assert_eq!(syncs(&effects)[0].error, E::RebalanceInProgress);
}

#[test]
fn a_restarted_static_follower_keeps_its_partitions_without_a_rebalance() {
    let mut bench = Bench::stable([Some("a"), Some("b")]);
    let effects = bench.join(None, Some("b"));
    assert_eq!(departures(&effects), [("m2".to_owned(), Departure::Replaced)]);
    assert!(joins(&effects).is_empty(), "the answer waits for the log");
    let reply = joins(&bench.store_succeeds(&effects)).remove(0);
    assert_eq!((reply.error, reply.generation, reply.skip_assignment), (E::None, 1, false));
    assert_eq!(reply.member, Some(id("m3")));
    assert_eq!(syncs(&bench.sync("m3", 1, &[]))[0].assignment, Bytes::from_static(b"b"));
    assert_eq!(bench.heartbeat("m1"), E::None, "the other one sees no rebalance");
    let fenced = bench.group.heartbeat(now(bench.at), &id("m2"), Some(&InstanceId::new("b")), 1);
    assert_eq!(fenced, E::FencedInstanceId);
}

#[test]
fn a_restarted_static_leader_is_told_to_skip_its_assignment() {
    let mut bench = Bench::stable([Some("a"), Some("b")]);
    let effects = bench.join(None, Some("a"));
    let reply = joins(&bench.store_succeeds(&effects)).remove(0);
    assert_eq!((reply.skip_assignment, reply.leader, reply.members.len()), (true, Some(id("m3")), 2));
    let old_version = JoinRequest { may_skip_assignment: false, ..bench.request(None, Some("a")) };
    let effects = bench.join_with(old_version);
    let reply = joins(&bench.store_succeeds(&effects)).remove(0);
    assert_eq!((reply.skip_assignment, reply.members.len()), (false, 0));
    assert_eq!(reply.leader, Some(id("m3")), "its former self, so that it follows");
}

#[test]
fn a_duplicate_static_member_that_waits_is_fenced_at_once() {
    let mut bench = Bench::stable([Some("a"), Some("b")]);
    bench.join(None, None);
    assert!(bench.join(Some("m2"), Some("b")).is_empty());
    let effects = bench.join(None, Some("b"));
    assert_eq!(joins(&effects)[0].error, E::FencedInstanceId);
}

#[test]
fn a_full_group_turns_new_members_away() {
    let mut bench = Bench::stable([None, None]);
    bench.join(None, None);
    bench.join(Some("m1"), None);
    bench.join(Some("m2"), None);
    assert_eq!(bench.group.members().count(), 3);
    assert_eq!(joins(&bench.join(None, None))[0].error, E::GroupMaxSizeReached);
}

#[test]
fn commits_need_the_current_generation_or_an_empty_group() {
    let mut bench = Bench::stable([Some("a"), None]);
    let at = now(bench.at);
    let group = &mut bench.group;
    assert_eq!(group.commit(at, Some(&id("m2")), None, 1), Ok(()));
    assert_eq!(group.commit(at, Some(&id("m2")), None, 0), Err(E::IllegalGeneration));
    assert_eq!(group.commit(at, Some(&id("m9")), None, 1), Err(E::UnknownMemberId));
    assert_eq!(group.commit(at, None, None, -1), Err(E::UnknownMemberId));
    assert_eq!(group.commit(at, Some(&id("m2")), Some(&InstanceId::new("a")), 1), Err(E::FencedInstanceId));
    let mut empty = Bench::new();
    assert_eq!(empty.group.commit(at, None, None, -1), Ok(()));
    assert_eq!(empty.group.commit(at, Some(&id("m1")), None, 3), Err(E::UnknownMemberId));
}

#[test]
fn a_restored_group_goes_on_with_its_members_and_generation() {
    let mut bench = Bench::stable([Some("a"), None]);
    let kept = bench.group.members().map(|m| (m.id.clone(), m.assignment.clone())).collect();
    let metadata = bench.group.metadata(&kept);
    let at = Duration::from_secs(1000);
    let rules = bench.group.rules.clone();
    bench.group = Group::restore(GroupId::new("g"), rules, metadata, now(at));
    bench.at = at;
    assert_eq!(bench.group.state(), GroupState::Stable);
    assert_eq!((bench.heartbeat("m1"), bench.heartbeat("m2")), (E::None, E::None));
    assert_eq!(syncs(&bench.sync("m2", 1, &[]))[0].assignment, Bytes::from_static(b"b"));
    assert!(bench.group.is_subscribed("t"));
    assert!(!bench.group.is_subscribed("u"));
    assert_eq!(bench.group.next_deadline(), Some(at + Duration::from_secs(10)));
}

#[test]
fn dissolving_answers_everybody_who_waits() {
    let mut bench = Bench::new();
    bench.join(None, None);
    let effects = bench.group.dissolve(E::NotCoordinator);
    assert_eq!(joins(&effects)[0].error, E::NotCoordinator);
    assert_eq!(joins(&bench.join(None, None))[0].error, E::CoordinatorNotAvailable);
}

#[test]
fn offsets_lapse_only_where_nobody_needs_them() {
    let offset = crate::offsets_log::CommittedOffset {
        offset: kafka::Offset(1),
        leader_epoch: kafka::LeaderEpoch::NONE,
        metadata: String::new(),
        committed_at: TimestampMs(1_000_000),
        expires_at: None,
        topic: None,
    };
    let day = Duration::from_secs(86_400);
    let later = |days: i64| TimestampMs(1_000_000 + 20_000 + days * 86_400_000);
    let mut bench = Bench::stable([None, None]);
    assert!(!bench.group.offset_has_lapsed("t", &offset, day, later(9)), "a member reads it");
    assert!(bench.group.offset_has_lapsed("u", &offset, day, later(2)), "no member reads it any more");
    bench.join(None, None);
    assert!(!bench.group.offset_has_lapsed("u", &offset, day, later(9)), "the group is rebalancing");
    let leaver = |m: &str| Leaver { member: MemberId::parse(m), instance: None };
    bench.at = Duration::from_secs(86_400 * 5);
    bench.group.leave(now(bench.at), &[leaver("m1"), leaver("m2"), leaver("m3")]);
    assert!(!bench.group.offset_has_lapsed("t", &offset, day, later(5)), "empty for less than a day");
    assert!(bench.group.offset_has_lapsed("t", &offset, day, later(7)));
    let simple = Bench::new();
    assert!(simple.group.offset_has_lapsed("t", &offset, day, later(2)), "counts from the commit");
    let expiring = crate::offsets_log::CommittedOffset { expires_at: Some(later(8)), ..offset };
    assert!(!simple.group.offset_has_lapsed("t", &expiring, day, later(7)));
    assert!(simple.group.offset_has_lapsed("t", &expiring, day, later(8)));
}
