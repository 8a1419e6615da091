//! SyncGroup: the leader's assignments go to the log first, then to everybody.

use std::collections::BTreeMap;

use bytes::Bytes;
use kafka::ErrorCode;

use super::consumer_protocol::EMPTY_ASSIGNMENT;
use super::{Effect, Group, GroupState, InstanceId, MemberId, Now, Storing, Ticket};

/// A SyncGroup request.
#[derive(Clone, Debug)]
pub struct SyncRequest {
    pub member: MemberId,
    pub instance: Option<InstanceId>,
    pub generation: i32,
    /// From version 5 on: what the member believes (KIP-559).
    pub protocol_type: Option<String>,
    pub protocol: Option<String>,
    /// From the leader; else empty.
    pub assignments: Vec<(MemberId, Bytes)>,
}

/// The answer to a SyncGroup.
#[derive(Clone, Debug, PartialEq)]
pub struct SyncReply {
    pub error: ErrorCode,
    pub protocol_type: Option<String>,
    pub protocol: Option<String>,
    pub assignment: Bytes,
}

impl SyncReply {
    pub fn error(error: ErrorCode) -> SyncReply {
        SyncReply { error, protocol_type: None, protocol: None, assignment: Bytes::new() }
    }
}

impl Group {
    /// SyncGroup. `ticket` is answered in these effects or in later ones.
    pub fn sync(&mut self, now: Now, ticket: Ticket, request: SyncRequest) -> Vec<Effect> {
        let mut out = Vec::new();
        if let Err(error) = self.check_sync(&request) {
            out.push(Effect::AnswerSync(ticket, SyncReply::error(error)));
            return out;
        }
        let id = request.member.clone();
        self.pending_sync.remove(&id);
        if self.pending_sync.is_empty() {
            self.sync_deadline = None;
        }
        let Some(member) = self.members.get_mut(&id) else {
            return out;
        };
        if self.state == GroupState::Stable {
            member.session_ends = Some(now.elapsed + member.session_timeout);
            out.push(Effect::AnswerSync(ticket, self.sync_reply(&id)));
            return out;
        }
        if let Some(superseded) = member.awaiting_sync.replace(ticket) {
            out.push(Effect::AnswerSync(superseded, SyncReply::error(ErrorCode::RebalanceInProgress)));
        }
        if self.leader.as_ref() == Some(&id) && !self.is_storing_assignments() {
            self.store_assignments(request.assignments, &mut out);
        }
        out
    }

    fn check_sync(&self, request: &SyncRequest) -> Result<(), ErrorCode> {
        match self.state {
            GroupState::Dead => return Err(ErrorCode::CoordinatorNotAvailable),
            GroupState::Empty => return Err(ErrorCode::UnknownMemberId),
            _ => self.validate(&request.member, request.instance.as_ref())?,
        }
        let differs = |theirs: &Option<String>, ours: &Option<String>| matches!((theirs, ours), (Some(theirs), Some(ours)) if theirs != ours);
        if request.generation != self.generation {
            Err(ErrorCode::IllegalGeneration)
        } else if differs(&request.protocol_type, &self.protocol_type)
            || differs(&request.protocol, &self.protocol)
        {
            Err(ErrorCode::InconsistentGroupProtocol)
        } else if self.state == GroupState::PreparingRebalance {
            Err(ErrorCode::RebalanceInProgress)
        } else {
            Ok(())
        }
    }

    /// A leader that repeats its request while the first is being written waits for that one:
    /// two records of one generation could disagree with what members were told.
    fn is_storing_assignments(&self) -> bool {
        self.stores
            .values()
            .any(|s| matches!(s, Storing::Assignments { generation, .. } if *generation == self.generation))
    }

    fn store_assignments(&mut self, given: Vec<(MemberId, Bytes)>, out: &mut Vec<Effect>) {
        let mut given: BTreeMap<MemberId, Bytes> = given.into_iter().collect();
        // Clients die on an assignment that they cannot decode, also on one of no bytes.
        let none: &'static [u8] = if self.speaks_consumer_protocol() { EMPTY_ASSIGNMENT } else { &[] };
        let assignments: BTreeMap<MemberId, Bytes> = self
            .members
            .keys()
            .map(|id| {
                let assignment = given.remove(id).filter(|bytes| !bytes.is_empty());
                (id.clone(), assignment.unwrap_or(Bytes::from_static(none)))
            })
            .collect();
        let metadata = self.metadata(&assignments);
        self.store(Storing::Assignments { generation: self.generation, assignments }, metadata, out);
    }

    pub(super) fn finish_sync(
        &mut self,
        now: Now,
        generation: i32,
        assignments: BTreeMap<MemberId, Bytes>,
        outcome: Result<(), ErrorCode>,
        out: &mut Vec<Effect>,
    ) {
        // A rebalance that began meanwhile has answered everybody.
        if self.state != GroupState::CompletingRebalance || generation != self.generation {
            return;
        }
        if let Err(error) = outcome {
            self.fail_sync(now, error, out);
            return self.prepare_rebalance(now, out);
        }
        for (id, assignment) in assignments {
            if let Some(member) = self.members.get_mut(&id) {
                member.assignment = assignment;
            }
        }
        self.transition(now, GroupState::Stable);
        let ids: Vec<MemberId> = self.members.keys().cloned().collect();
        for id in ids {
            if let Some(ticket) = self.members.get_mut(&id).and_then(|m| m.awaiting_sync.take()) {
                self.renew_session(now, &id);
                out.push(Effect::AnswerSync(ticket, self.sync_reply(&id)));
            }
        }
    }

    fn sync_reply(&self, id: &MemberId) -> SyncReply {
        SyncReply {
            error: ErrorCode::None,
            protocol_type: self.protocol_type.clone(),
            protocol: self.protocol.clone(),
            assignment: self.members.get(id).map(|m| m.assignment.clone()).unwrap_or_default(),
        }
    }
}
