//! The classic consumer group (JoinGroup, SyncGroup, Heartbeat, LeaveGroup) as a state machine.
//!
//! Owns membership, generations, leader and assignments as Apache Kafka 4.4 does, static members
//! (KIP-345) included. Leaves out offsets, storage, clocks and ids: the caller brings `now` and
//! fresh member ids, appends what [`Effect::Store`] holds and reports it with [`Group::stored`].
//! Invariant: every ticket that was taken is answered by exactly one effect; a member that keeps
//! its session is never told UNKNOWN_MEMBER_ID.

pub mod consumer_protocol;
pub mod expiry;
mod join;
mod member;
mod rebalance;
mod sync;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kafka::{ErrorCode, GroupId, TimestampMs};

pub use join::{JoinReply, JoinRequest, JoinedMember};
pub use member::{InstanceId, Member, MemberId, Protocol, Ticket};
pub use sync::{SyncReply, SyncRequest};

use crate::offsets_log::{GroupMetadata, MemberMetadata};
use consumer_protocol::CONSUMER;

/// Both clocks at one moment: sessions run on the first, records carry the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// Since some fixed start; never goes back.
    pub elapsed: Duration,
    pub wall: TimestampMs,
}

/// What an operator can set about groups.
#[derive(Clone, Debug)]
pub struct GroupRules {
    /// How long the first rebalance of an empty group waits for more members.
    pub initial_rebalance_delay: Duration,
    /// Most members of one group, and most ids given out and not used yet.
    pub members_max: usize,
    /// How long a JoinGroup of a member that has never been answered may wait.
    pub new_member_join_timeout: Duration,
}

/// States of the classic protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupState {
    Empty,
    PreparingRebalance,
    CompletingRebalance,
    Stable,
    Dead,
}

/// Names one [`Effect::Store`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreToken(u64);

/// Why a member is no longer in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// It said so, or an administrator did.
    Left,
    /// Its session ended, or it was late for a rebalance.
    Expired,
    /// Another process took over its `group.instance.id`.
    Replaced,
}

/// What the caller must do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    AnswerJoin(Ticket, JoinReply),
    AnswerSync(Ticket, SyncReply),
    /// Append the metadata to the log, then call [`Group::stored`] with the outcome.
    Store(StoreToken, GroupMetadata),
    Departed(MemberId, Departure),
}

/// One member named by a LeaveGroup request.
#[derive(Clone, Debug)]
pub struct Leaver {
    pub member: Option<MemberId>,
    pub instance: Option<InstanceId>,
}

/// One group.
#[derive(Debug)]
pub struct Group {
    id: GroupId,
    rules: GroupRules,
    state: GroupState,
    /// The rebalance in preparation began in an empty group: it waits for its timer alone.
    initial_rebalance: bool,
    state_since: Option<TimestampMs>,
    generation: i32,
    protocol_type: Option<String>,
    protocol: Option<String>,
    leader: Option<MemberId>,
    members: BTreeMap<MemberId, Member>,
    statics: BTreeMap<InstanceId, MemberId>,
    /// Ids given out with MEMBER_ID_REQUIRED, and when they lapse.
    pending: BTreeMap<MemberId, Duration>,
    /// Members that have not sent SyncGroup in this generation.
    pending_sync: BTreeSet<MemberId>,
    /// How many members support a protocol.
    support: BTreeMap<String, usize>,
    /// `None`: not known, because the group does not speak the consumer protocol.
    subscribed: Option<BTreeSet<String>>,
    join_timer: Option<JoinTimer>,
    sync_deadline: Option<Duration>,
    stores: BTreeMap<StoreToken, Storing>,
    next_store: u64,
}

/// When the join phase ends at the latest.
#[derive(Clone, Copy, Debug)]
enum JoinTimer {
    Initial { at: Duration, delay: Duration, remaining: Duration, joined_since: bool },
    Rebalance { at: Duration },
}

/// What a store completes.
#[derive(Debug)]
enum Storing {
    Assignments { generation: i32, assignments: BTreeMap<MemberId, Bytes> },
    StaticRejoin(join::StaticRejoin),
    Emptied,
}

impl Group {
    pub fn new(id: GroupId, rules: GroupRules, now: Now) -> Group {
        Group {
            id,
            rules,
            state: GroupState::Empty,
            initial_rebalance: false,
            state_since: Some(now.wall),
            generation: 0,
            protocol_type: None,
            protocol: None,
            leader: None,
            members: BTreeMap::new(),
            statics: BTreeMap::new(),
            pending: BTreeMap::new(),
            pending_sync: BTreeSet::new(),
            support: BTreeMap::new(),
            subscribed: None,
            join_timer: None,
            sync_deadline: None,
            stores: BTreeMap::new(),
            next_store: 0,
        }
    }

    /// The group as the log knows it: members keep ids and generation and get a whole session to
    /// be heard of.
    pub fn restore(id: GroupId, rules: GroupRules, metadata: GroupMetadata, now: Now) -> Group {
        let mut group = Group::new(id, rules, now);
        let protocol = metadata.protocol.clone().unwrap_or_default();
        for member in metadata.members {
            group.insert(restored_member(member, &protocol, now));
        }
        if !group.members.is_empty() {
            group.state = GroupState::Stable;
        }
        group.generation = metadata.generation;
        group.protocol_type = Some(metadata.protocol_type).filter(|t| !t.is_empty());
        group.protocol = metadata.protocol;
        group.leader = metadata.leader;
        if group.leader.as_ref().is_none_or(|leader| !group.members.contains_key(leader)) {
            group.leader = group.members.keys().next().cloned();
        }
        group.state_since = metadata.state_since;
        group.subscribed = group.compute_subscribed();
        group
    }

    pub fn id(&self) -> &GroupId {
        &self.id
    }

    pub fn state(&self) -> GroupState {
        self.state
    }

    pub fn generation(&self) -> i32 {
        self.generation
    }

    /// `None` for a group that has only ever committed offsets.
    pub fn protocol_type(&self) -> Option<&str> {
        self.protocol_type.as_deref()
    }

    /// The assignor chosen for this generation.
    pub fn protocol(&self) -> Option<&str> {
        self.protocol.as_deref()
    }

    pub fn leader(&self) -> Option<&MemberId> {
        self.leader.as_ref()
    }

    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    pub fn member(&self, id: &MemberId) -> Option<&Member> {
        self.members.get(id)
    }

    /// The group as it would go to the log now.
    pub fn current(&self) -> GroupMetadata {
        self.metadata(&self.members.values().map(|m| (m.id.clone(), m.assignment.clone())).collect())
    }

    /// No member, none on its way in, no write outstanding: nothing is lost when it is forgotten.
    pub fn is_idle(&self) -> bool {
        self.state == GroupState::Empty && self.pending.is_empty() && self.stores.is_empty()
    }

    /// Whether members read `topic`; a consumer group that is not understood reads everything.
    pub fn is_subscribed(&self, topic: &str) -> bool {
        match &self.subscribed {
            Some(topics) => topics.contains(topic),
            None => self.speaks_consumer_protocol(),
        }
    }

    /// Heartbeat: `None` is success.
    pub fn heartbeat(
        &mut self,
        now: Now,
        member: &MemberId,
        instance: Option<&InstanceId>,
        generation: i32,
    ) -> ErrorCode {
        if self.state == GroupState::Dead {
            return ErrorCode::CoordinatorNotAvailable;
        }
        if let Err(error) = self.validate(member, instance) {
            return error;
        }
        if generation != self.generation {
            return ErrorCode::IllegalGeneration;
        }
        self.renew_session(now, member);
        match self.state {
            GroupState::PreparingRebalance => ErrorCode::RebalanceInProgress,
            _ => ErrorCode::None,
        }
    }

    /// Whether a commit of offsets is legal now; one from a member also renews its session.
    pub fn commit(
        &mut self,
        now: Now,
        member: Option<&MemberId>,
        instance: Option<&InstanceId>,
        generation: i32,
    ) -> Result<(), ErrorCode> {
        match self.state {
            GroupState::Dead => return Err(ErrorCode::CoordinatorNotAvailable),
            // Tools and consumers that assign themselves have no generation.
            GroupState::Empty if generation < 0 => return Ok(()),
            _ => {}
        }
        let Some(member) = member else {
            return Err(ErrorCode::UnknownMemberId);
        };
        self.validate(member, instance)?;
        if generation != self.generation {
            return Err(ErrorCode::IllegalGeneration);
        }
        if self.state == GroupState::CompletingRebalance {
            return Err(ErrorCode::RebalanceInProgress);
        }
        self.renew_session(now, member);
        Ok(())
    }

    /// LeaveGroup: one code per leaver, in their order.
    pub fn leave(&mut self, now: Now, leavers: &[Leaver]) -> (Vec<ErrorCode>, Vec<Effect>) {
        let mut out = Vec::new();
        let codes: Vec<ErrorCode> = leavers.iter().map(|leaver| self.leave_one(leaver, &mut out)).collect();
        if codes.contains(&ErrorCode::None) {
            match self.state {
                GroupState::Stable | GroupState::CompletingRebalance => self.prepare_rebalance(now, &mut out),
                GroupState::PreparingRebalance => self.complete_join_if_all_are_in(now, &mut out),
                GroupState::Empty | GroupState::Dead => {}
            }
        }
        (codes, out)
    }

    /// Whether DeleteGroups may remove the group.
    pub fn may_be_deleted(&self) -> Result<(), ErrorCode> {
        match self.state {
            GroupState::Dead => Err(ErrorCode::GroupIdNotFound),
            GroupState::Empty => Ok(()),
            _ => Err(ErrorCode::NonEmptyGroup),
        }
    }

    /// Whether OffsetDelete may touch the group at all; topics that members read stay refused.
    pub fn may_lose_offsets(&self) -> Result<(), ErrorCode> {
        match self.state {
            GroupState::Dead => Err(ErrorCode::GroupIdNotFound),
            GroupState::Empty => Ok(()),
            _ if self.speaks_consumer_protocol() => Ok(()),
            _ => Err(ErrorCode::NonEmptyGroup),
        }
    }

    /// Ends the group here: whoever waits is told `error` and may look for another coordinator.
    pub fn dissolve(&mut self, error: ErrorCode) -> Vec<Effect> {
        let mut out = Vec::new();
        for member in self.members.values_mut() {
            if let Some(ticket) = member.awaiting_join.take() {
                out.push(Effect::AnswerJoin(ticket, JoinReply::error(error, Some(&member.id))));
            }
            if let Some(ticket) = member.awaiting_sync.take() {
                out.push(Effect::AnswerSync(ticket, SyncReply::error(error)));
            }
        }
        self.state = GroupState::Dead;
        self.pending.clear();
        self.stores.clear();
        self.join_timer = None;
        self.sync_deadline = None;
        out
    }

    /// The earliest time at which [`Group::tick`] has something to do.
    pub fn next_deadline(&self) -> Option<Duration> {
        if self.state == GroupState::Dead {
            return None;
        }
        let join = self.join_timer.map(|timer| match timer {
            JoinTimer::Initial { at, .. } | JoinTimer::Rebalance { at } => at,
        });
        let sessions = self.members.values().filter_map(|m| m.session_ends);
        let pending = self.pending.values().copied();
        sessions.chain(pending).chain(join).chain(self.sync_deadline).min()
    }

    /// Acts on every deadline that has passed.
    pub fn tick(&mut self, now: Now) -> Vec<Effect> {
        let mut out = Vec::new();
        if self.state == GroupState::Dead {
            return out;
        }
        self.expire_pending(now, &mut out);
        self.expire_sessions(now, &mut out);
        self.fire_join_timer(now, &mut out);
        self.fire_sync_deadline(now, &mut out);
        out
    }

    /// The outcome of an [`Effect::Store`]: durable, or why not.
    pub fn stored(&mut self, now: Now, token: StoreToken, outcome: Result<(), ErrorCode>) -> Vec<Effect> {
        let mut out = Vec::new();
        match self.stores.remove(&token) {
            Some(Storing::Assignments { generation, assignments }) => {
                self.finish_sync(now, generation, assignments, outcome, &mut out);
            }
            Some(Storing::StaticRejoin(rejoin)) => self.finish_static_rejoin(now, rejoin, outcome, &mut out),
            // An empty generation that is not in the log is empty again after a restart: its
            // members' sessions end.
            Some(Storing::Emptied) | None => {}
        }
        out
    }

    fn speaks_consumer_protocol(&self) -> bool {
        self.protocol_type.as_deref() == Some(CONSUMER)
    }

    fn validate(&self, member: &MemberId, instance: Option<&InstanceId>) -> Result<(), ErrorCode> {
        if let Some(instance) = instance {
            match self.statics.get(instance) {
                None => return Err(ErrorCode::UnknownMemberId),
                Some(current) if current != member => return Err(ErrorCode::FencedInstanceId),
                Some(_) => {}
            }
        }
        if self.members.contains_key(member) { Ok(()) } else { Err(ErrorCode::UnknownMemberId) }
    }

    fn leave_one(&mut self, leaver: &Leaver, out: &mut Vec<Effect>) -> ErrorCode {
        if self.state == GroupState::Dead {
            return ErrorCode::CoordinatorNotAvailable;
        }
        let id = match (&leaver.member, &leaver.instance) {
            (Some(id), _) if self.pending.remove(id).is_some() => return ErrorCode::None,
            (Some(id), instance) => match self.validate(id, instance.as_ref()) {
                Ok(()) => id.clone(),
                Err(error) => return error,
            },
            // Administrators remove static members by instance alone.
            (None, Some(instance)) => match self.statics.get(instance) {
                Some(id) => id.clone(),
                None => return ErrorCode::UnknownMemberId,
            },
            (None, None) => return ErrorCode::UnknownMemberId,
        };
        self.remove(&id, Departure::Left, out);
        ErrorCode::None
    }

    fn insert(&mut self, member: Member) {
        if let Some(instance) = &member.instance {
            self.statics.insert(instance.clone(), member.id.clone());
        }
        for protocol in &member.protocols {
            *self.support.entry(protocol.name.clone()).or_default() += 1;
        }
        self.leader.get_or_insert_with(|| member.id.clone());
        self.pending.remove(&member.id);
        self.members.insert(member.id.clone(), member);
    }

    /// Takes a member out and answers what it waits for.
    fn remove(&mut self, id: &MemberId, how: Departure, out: &mut Vec<Effect>) {
        self.pending.remove(id);
        self.pending_sync.remove(id);
        let Some(member) = self.members.remove(id) else {
            return;
        };
        self.withdraw_support(&member.protocols);
        if let Some(instance) = &member.instance {
            self.statics.remove(instance);
        }
        if let Some(ticket) = member.awaiting_join {
            out.push(Effect::AnswerJoin(ticket, JoinReply::error(ErrorCode::UnknownMemberId, None)));
        }
        if let Some(ticket) = member.awaiting_sync {
            out.push(Effect::AnswerSync(ticket, SyncReply::error(ErrorCode::UnknownMemberId)));
        }
        if self.leader.as_ref() == Some(id) {
            self.leader = self.members.keys().next().cloned();
        }
        out.push(Effect::Departed(id.clone(), how));
    }

    fn withdraw_support(&mut self, protocols: &[Protocol]) {
        for protocol in protocols {
            if let Some(count) = self.support.get_mut(&protocol.name) {
                *count -= 1;
                if *count == 0 {
                    self.support.remove(&protocol.name);
                }
            }
        }
    }

    fn renew_session(&mut self, now: Now, id: &MemberId) {
        if let Some(member) = self.members.get_mut(id) {
            member.session_ends = Some(now.elapsed + member.session_timeout);
        }
    }

    fn transition(&mut self, now: Now, to: GroupState) {
        self.state = to;
        self.state_since = Some(now.wall);
    }

    /// The group as it goes to the log, with these assignments.
    fn metadata(&self, assignments: &BTreeMap<MemberId, Bytes>) -> GroupMetadata {
        let protocol = self.protocol.as_deref().unwrap_or_default();
        let members = self.members.values().map(|member| MemberMetadata {
            member_id: member.id.clone(),
            instance_id: member.instance.clone(),
            client_id: member.client_id.clone(),
            client_host: member.client_host.clone(),
            rebalance_timeout: member.rebalance_timeout,
            session_timeout: member.session_timeout,
            subscription: member.metadata(protocol),
            assignment: assignments.get(&member.id).cloned().unwrap_or_default(),
        });
        GroupMetadata {
            protocol_type: self.protocol_type.clone().unwrap_or_default(),
            generation: self.generation,
            protocol: self.protocol.clone(),
            leader: self.leader.clone(),
            state_since: self.state_since,
            members: members.collect(),
        }
    }

    fn store(&mut self, storing: Storing, metadata: GroupMetadata, out: &mut Vec<Effect>) {
        let token = StoreToken(self.next_store);
        self.next_store += 1;
        self.stores.insert(token, storing);
        out.push(Effect::Store(token, metadata));
    }

    fn compute_subscribed(&self) -> Option<BTreeSet<String>> {
        if !self.speaks_consumer_protocol() {
            return None;
        }
        if self.members.is_empty() {
            return Some(BTreeSet::new());
        }
        let protocol = self.protocol.as_deref()?;
        let mut topics = BTreeSet::new();
        for member in self.members.values() {
            topics.append(&mut consumer_protocol::subscribed_topics(member.metadata(protocol))?);
        }
        Some(topics)
    }
}

impl GroupState {
    /// The name in DescribeGroups and ListGroups.
    pub fn name(self) -> &'static str {
        match self {
            GroupState::Empty => "Empty",
            GroupState::PreparingRebalance => "PreparingRebalance",
            GroupState::CompletingRebalance => "CompletingRebalance",
            GroupState::Stable => "Stable",
            GroupState::Dead => "Dead",
        }
    }
}

fn restored_member(stored: MemberMetadata, protocol: &str, now: Now) -> Member {
    Member {
        id: stored.member_id,
        instance: stored.instance_id,
        client_id: stored.client_id,
        client_host: stored.client_host,
        session_timeout: stored.session_timeout,
        rebalance_timeout: stored.rebalance_timeout,
        protocols: vec![Protocol { name: protocol.to_owned(), metadata: stored.subscription }],
        assignment: stored.assignment,
        awaiting_join: None,
        awaiting_sync: None,
        is_new: false,
        session_ends: Some(now.elapsed + stored.session_timeout),
    }
}
