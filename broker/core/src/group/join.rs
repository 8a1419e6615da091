//! JoinGroup: who may join, under which id, and when that means a rebalance.
//!
//! New members (KIP-394), known ones, and static ones that take their predecessor's place (KIP-345).

use std::time::Duration;

use bytes::Bytes;
use kafka::ErrorCode;

use super::{
    Departure, Effect, Group, GroupState, InstanceId, JoinTimer, Member, MemberId, Now, Protocol, Storing,
    Ticket,
};

/// A JoinGroup request, with the id that the member gets if it has none.
#[derive(Clone, Debug)]
pub struct JoinRequest {
    pub member: Option<MemberId>,
    /// Unique; used only when `member` is `None`.
    pub fresh_id: MemberId,
    pub instance: Option<InstanceId>,
    pub client_id: String,
    pub client_host: String,
    pub session_timeout: Duration,
    pub rebalance_timeout: Duration,
    pub protocol_type: String,
    pub protocols: Vec<Protocol>,
    /// Version 4 and later: a new dynamic member must come back with the id it is given (KIP-394).
    pub id_required: bool,
    /// Version 9 and later: a leader can be told to keep the assignment it has (KIP-814).
    pub may_skip_assignment: bool,
}

/// The answer to a JoinGroup.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinReply {
    pub error: ErrorCode,
    pub generation: i32,
    pub protocol_type: Option<String>,
    pub protocol: Option<String>,
    pub leader: Option<MemberId>,
    pub skip_assignment: bool,
    pub member: Option<MemberId>,
    /// All members for the leader, else none.
    pub members: Vec<JoinedMember>,
}

/// What the leader learns about a member.
#[derive(Clone, Debug, PartialEq)]
pub struct JoinedMember {
    pub id: MemberId,
    pub instance: Option<InstanceId>,
    pub metadata: Bytes,
}

/// A static member's return that waits to be durable.
#[derive(Debug)]
pub(super) struct StaticRejoin {
    member: MemberId,
    ticket: Ticket,
    may_skip_assignment: bool,
    leader_before: Option<MemberId>,
}

impl JoinReply {
    pub fn error(error: ErrorCode, member: Option<&MemberId>) -> JoinReply {
        JoinReply {
            error,
            generation: -1,
            protocol_type: None,
            protocol: None,
            leader: None,
            skip_assignment: false,
            member: member.cloned(),
            members: Vec::new(),
        }
    }
}

impl Group {
    /// JoinGroup. `ticket` is answered in these effects or in later ones.
    pub fn join(&mut self, now: Now, ticket: Ticket, request: JoinRequest) -> Vec<Effect> {
        let mut out = Vec::new();
        if let Err(error) = self.admit(now, &request, &mut out) {
            // A member that was turned away for good must not believe that it has an id.
            let keeps_id = error != ErrorCode::GroupMaxSizeReached;
            let id = request.member.as_ref().filter(|_| keeps_id);
            out.push(Effect::AnswerJoin(ticket, JoinReply::error(error, id)));
            return out;
        }
        match (&request.member, &request.instance) {
            (Some(id), _) => {
                let id = id.clone();
                self.join_known(now, ticket, id, request, &mut out);
            }
            (None, Some(instance)) => match self.statics.get(instance).cloned() {
                Some(old) => self.rejoin_static(now, ticket, &old, request, &mut out),
                None => self.add(now, ticket, request.fresh_id.clone(), request, &mut out),
            },
            (None, None) if request.id_required => self.give_id(now, ticket, &request, &mut out),
            (None, None) => self.add(now, ticket, request.fresh_id.clone(), request, &mut out),
        }
        out
    }

    fn admit(&mut self, now: Now, request: &JoinRequest, out: &mut Vec<Effect>) -> Result<(), ErrorCode> {
        if self.state == GroupState::Dead {
            return Err(ErrorCode::CoordinatorNotAvailable);
        }
        if !self.has_room_for(request.member.as_ref()) {
            // The last to come back when the limit has been lowered: it leaves the group.
            if let Some(id) = &request.member {
                self.remove(id, Departure::Expired, out);
                self.complete_join_if_all_are_in(now, out);
            }
            return Err(ErrorCode::GroupMaxSizeReached);
        }
        if !self.supports(&request.protocol_type, &request.protocols) {
            return Err(ErrorCode::InconsistentGroupProtocol);
        }
        Ok(())
    }

    /// In preparation, those who wait count, so that a group over its limit loses its last comers;
    /// afterwards all members count.
    fn has_room_for(&self, id: Option<&MemberId>) -> bool {
        let known = id.and_then(|id| self.members.get(id));
        match self.state {
            GroupState::Empty | GroupState::Dead => true,
            GroupState::PreparingRebalance => {
                known.is_some_and(|m| m.awaiting_join.is_some())
                    || self.awaiting_join() < self.rules.members_max
            }
            GroupState::CompletingRebalance | GroupState::Stable => {
                known.is_some() || self.members.len() < self.rules.members_max
            }
        }
    }

    /// At least one of the protocols must be one that all members support.
    fn supports(&self, protocol_type: &str, protocols: &[Protocol]) -> bool {
        if self.state == GroupState::Empty || self.members.is_empty() {
            return !protocol_type.is_empty() && !protocols.is_empty();
        }
        self.protocol_type.as_deref() == Some(protocol_type)
            && protocols.iter().any(|p| self.support.get(&p.name) == Some(&self.members.len()))
    }

    fn give_id(&mut self, now: Now, ticket: Ticket, request: &JoinRequest, out: &mut Vec<Effect>) {
        if self.pending.len() >= self.rules.members_max {
            out.push(Effect::AnswerJoin(ticket, JoinReply::error(ErrorCode::GroupMaxSizeReached, None)));
            return;
        }
        self.pending.insert(request.fresh_id.clone(), now.elapsed + request.session_timeout);
        let reply = JoinReply::error(ErrorCode::MemberIdRequired, Some(&request.fresh_id));
        out.push(Effect::AnswerJoin(ticket, reply));
    }

    fn join_known(
        &mut self,
        now: Now,
        ticket: Ticket,
        id: MemberId,
        request: JoinRequest,
        out: &mut Vec<Effect>,
    ) {
        if self.pending.contains_key(&id) && request.instance.is_none() {
            return self.add(now, ticket, id, request, out);
        }
        if let Err(error) = self.validate(&id, request.instance.as_ref()) {
            out.push(Effect::AnswerJoin(ticket, JoinReply::error(error, Some(&id))));
            return;
        }
        let unchanged = self.members.get(&id).is_some_and(|m| m.protocols == request.protocols);
        let leads = self.leader.as_ref() == Some(&id);
        match self.state {
            // The answer to its first JoinGroup was lost: give it again.
            GroupState::CompletingRebalance if unchanged => self.answer_join(now, ticket, &id, out),
            // A follower that changed nothing goes on to SyncGroup; a leader that joins wants a
            // new assignment (the topics' metadata changed).
            GroupState::Stable if unchanged && !leads => self.answer_join(now, ticket, &id, out),
            GroupState::Empty | GroupState::Dead => {
                out.push(Effect::AnswerJoin(ticket, JoinReply::error(ErrorCode::UnknownMemberId, Some(&id))));
            }
            _ => {
                self.update(&id, ticket, request, out);
                self.rebalance_or_complete(now, out);
            }
        }
    }

    fn add(&mut self, now: Now, ticket: Ticket, id: MemberId, request: JoinRequest, out: &mut Vec<Effect>) {
        if let Some(JoinTimer::Initial { joined_since, .. }) = &mut self.join_timer {
            *joined_since = true;
        }
        if self.members.is_empty() {
            self.protocol_type = Some(request.protocol_type);
        }
        self.insert(Member {
            id,
            instance: request.instance,
            client_id: request.client_id,
            client_host: request.client_host,
            session_timeout: request.session_timeout,
            rebalance_timeout: request.rebalance_timeout,
            protocols: request.protocols,
            assignment: Bytes::new(),
            awaiting_join: Some(ticket),
            awaiting_sync: None,
            is_new: true,
            session_ends: Some(now.elapsed + self.rules.new_member_join_timeout),
        });
        self.rebalance_or_complete(now, out);
    }

    /// Takes over what a member says about itself, and lets it wait for the join phase.
    fn update(&mut self, id: &MemberId, ticket: Ticket, request: JoinRequest, out: &mut Vec<Effect>) {
        let Some(member) = self.members.get_mut(id) else {
            return;
        };
        let old = std::mem::replace(&mut member.protocols, request.protocols);
        member.session_timeout = request.session_timeout;
        member.rebalance_timeout = request.rebalance_timeout;
        member.client_id = request.client_id;
        member.client_host = request.client_host;
        if let Some(superseded) = member.awaiting_join.replace(ticket) {
            let reply = JoinReply::error(ErrorCode::RebalanceInProgress, Some(id));
            out.push(Effect::AnswerJoin(superseded, reply));
        }
        for protocol in &member.protocols {
            *self.support.entry(protocol.name.clone()).or_default() += 1;
        }
        self.withdraw_support(&old);
    }

    /// KIP-345: a process with a known instance takes its predecessor's place and assignment; the
    /// predecessor, should it live, is fenced. No rebalance if the protocol stays.
    fn rejoin_static(
        &mut self,
        now: Now,
        ticket: Ticket,
        old: &MemberId,
        request: JoinRequest,
        out: &mut Vec<Effect>,
    ) {
        let id = request.fresh_id.clone();
        let rejoin = StaticRejoin {
            member: id.clone(),
            ticket,
            may_skip_assignment: request.may_skip_assignment,
            leader_before: self.leader.clone(),
        };
        self.replace_static(old, &id, out);
        self.update(&id, ticket, request, out);
        self.renew_session(now, &id);
        match self.state {
            GroupState::Stable if self.select_protocol() == self.protocol => {
                self.store(Storing::StaticRejoin(rejoin), self.current(), out);
            }
            // In CompletingRebalance the leader may be assigning to the old id just now.
            GroupState::Stable | GroupState::CompletingRebalance => self.prepare_rebalance(now, out),
            _ => self.complete_join_if_all_are_in(now, out),
        }
    }

    fn replace_static(&mut self, old: &MemberId, new: &MemberId, out: &mut Vec<Effect>) {
        let Some(mut member) = self.members.remove(old) else {
            return;
        };
        if let Some(ticket) = member.awaiting_join.take() {
            let reply = JoinReply::error(ErrorCode::FencedInstanceId, Some(old));
            out.push(Effect::AnswerJoin(ticket, reply));
        }
        if let Some(ticket) = member.awaiting_sync.take() {
            out.push(Effect::AnswerSync(ticket, super::SyncReply::error(ErrorCode::FencedInstanceId)));
        }
        member.id = new.clone();
        member.is_new = false;
        if let Some(instance) = &member.instance {
            self.statics.insert(instance.clone(), new.clone());
        }
        if self.leader.as_ref() == Some(old) {
            self.leader = Some(new.clone());
        }
        if self.pending_sync.remove(old) {
            self.pending_sync.insert(new.clone());
        }
        self.members.insert(new.clone(), member);
        out.push(Effect::Departed(old.clone(), Departure::Replaced));
    }

    pub(super) fn finish_static_rejoin(
        &mut self,
        now: Now,
        rejoin: StaticRejoin,
        outcome: Result<(), ErrorCode>,
        out: &mut Vec<Effect>,
    ) {
        let StaticRejoin { member: id, ticket, may_skip_assignment, leader_before } = rejoin;
        let waits = self.members.get(&id).is_some_and(|m| m.awaiting_join == Some(ticket));
        // If a rebalance has begun meanwhile, its end answers the member.
        if self.state != GroupState::Stable || !waits {
            return;
        }
        self.take_join_ticket(&id);
        self.renew_session(now, &id);
        if let Err(error) = outcome {
            out.push(Effect::AnswerJoin(ticket, JoinReply::error(error, None)));
            return;
        }
        let mut reply = self.join_reply(&id);
        if may_skip_assignment {
            reply.skip_assignment = self.leader.as_ref() == Some(&id);
        } else {
            // Before version 9 a restarted leader is kept from assigning anew, for nobody would
            // ask for it, by naming its former self as the leader.
            reply.members = Vec::new();
            reply.leader = leader_before;
        }
        out.push(Effect::AnswerJoin(ticket, reply));
    }

    fn answer_join(&mut self, now: Now, ticket: Ticket, id: &MemberId, out: &mut Vec<Effect>) {
        self.renew_session(now, id);
        out.push(Effect::AnswerJoin(ticket, self.join_reply(id)));
    }

    pub(super) fn take_join_ticket(&mut self, id: &MemberId) -> Option<Ticket> {
        self.members.get_mut(id)?.awaiting_join.take()
    }

    /// The current generation as `id` learns of it.
    pub(super) fn join_reply(&self, id: &MemberId) -> JoinReply {
        let leads = self.leader.as_ref() == Some(id);
        JoinReply {
            error: ErrorCode::None,
            generation: self.generation,
            protocol_type: self.protocol_type.clone(),
            protocol: self.protocol.clone(),
            leader: self.leader.clone(),
            skip_assignment: false,
            member: Some(id.clone()),
            members: if leads { self.joined_members() } else { Vec::new() },
        }
    }

    fn joined_members(&self) -> Vec<JoinedMember> {
        let protocol = self.protocol.as_deref().unwrap_or_default();
        let joined = |m: &Member| JoinedMember {
            id: m.id.clone(),
            instance: m.instance.clone(),
            metadata: m.metadata(protocol),
        };
        self.members.values().map(joined).collect()
    }
}
