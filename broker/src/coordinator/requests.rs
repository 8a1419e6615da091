//! What a shard does with each request.
//!
//! A request changes its group at once and is answered at once, unless the answer promises something
//! that the log must hold first: then the journal has it.

use std::collections::BTreeSet;

use broker_core::group::{Effect, Group, GroupState, JoinReply, Leaver, MemberId, SyncReply};
use broker_core::offsets_log::{CommittedOffset, Key};
use kafka::{ErrorCode, GroupId, TopicName};
use tokio::sync::oneshot;

use super::journal::{Entry as Write, Forget, Tell, Then, Value};
use super::message::{
    Description, Left, Listed, MemberDescription, Message, OffsetsDeleted, OffsetsFound, Sender,
    TopicPartition,
};
use super::observer::Assignment;
use super::shard::{Entry, GROUPS_MAX, Shard, Waiting};
use crate::api::Principal;

impl Shard {
    pub(super) fn handle(&mut self, message: Message) {
        match message {
            Message::Join { group, principal, request, reply } => self.join(group, principal, request, reply),
            Message::Sync { group, principal, request, reply } => {
                self.sync(&group, principal, request, reply)
            }
            Message::Heartbeat { group, principal, sender, reply } => {
                let _ = reply.send(self.heartbeat(&group, principal, &sender));
            }
            Message::Leave { group, leavers, reply } => self.leave(&group, &leavers, reply),
            Message::Commit { group, sender, offsets, reply } => self.commit(group, &sender, offsets, reply),
            Message::FetchOffsets { group, wanted, reply } => {
                let _ = reply.send(self.fetch_offsets(&group, wanted));
            }
            Message::DeleteOffsets { group, which, reply } => self.delete_offsets(group, which, reply),
            Message::DeleteGroup { group, reply } => self.delete_group(group, reply),
            Message::Describe { group, reply } => {
                let _ = reply.send(self.describe(&group));
            }
            Message::List { reply } => {
                let _ = reply.send(Ok(self.list()));
            }
            Message::TopicDeleted { topic, reply } => self.topic_deleted(&topic, reply),
            Message::Expire { reply } => self.expire(Some(reply)),
        }
    }

    fn join(
        &mut self,
        id: GroupId,
        principal: Principal,
        request: broker_core::group::JoinRequest,
        reply: oneshot::Sender<JoinReply>,
    ) {
        if let Err(error) = self.around.observer.admits(&id, &principal) {
            let _ = reply.send(JoinReply::error(error, request.member.as_ref()));
            return;
        }
        let now = self.now();
        if !self.groups.contains_key(&id) {
            let error = match request.member {
                Some(_) => Some(ErrorCode::UnknownMemberId),
                None if self.groups.len() >= GROUPS_MAX => Some(ErrorCode::CoordinatorNotAvailable),
                None => None,
            };
            if let Some(error) = error {
                let _ = reply.send(JoinReply::error(error, request.member.as_ref()));
                return;
            }
            let group = Group::new(id.clone(), self.around.rules.clone(), now);
            self.add(id.clone(), Entry::new(group));
        }
        let ticket = self.ticket(Waiting::Join(reply));
        let member = request.member.clone().unwrap_or_else(|| request.fresh_id.clone());
        if let Some(entry) = self.groups.get_mut(&id) {
            let effects = entry.group.join(now, ticket, request);
            if entry.group.member(&member).is_some() {
                entry.principals.insert(member, principal);
            }
            self.act(&id, effects);
            self.drop_if_void(&id);
        }
    }

    fn sync(
        &mut self,
        id: &GroupId,
        principal: Principal,
        request: broker_core::group::SyncRequest,
        reply: oneshot::Sender<SyncReply>,
    ) {
        let now = self.now();
        if !self.groups.contains_key(id) {
            let _ = reply.send(SyncReply::error(ErrorCode::UnknownMemberId));
            return;
        }
        self.heard_of(id, &request.member, principal);
        let ticket = self.ticket(Waiting::Sync(reply));
        if let Some(entry) = self.groups.get_mut(id) {
            let effects = entry.group.sync(now, ticket, request);
            self.act(id, effects);
        }
    }

    fn heartbeat(&mut self, id: &GroupId, principal: Principal, sender: &Sender) -> ErrorCode {
        let now = self.now();
        let (Some(entry), Some(member)) = (self.groups.get_mut(id), &sender.member) else {
            return ErrorCode::UnknownMemberId;
        };
        let code = entry.group.heartbeat(now, member, sender.instance.as_ref(), sender.generation);
        if matches!(code, ErrorCode::None | ErrorCode::RebalanceInProgress) {
            self.heard_of(id, member, principal);
        }
        code
    }

    /// A group that became empty is empty in the log before the last one to leave is told: else a
    /// restart would wait for members that are known to have gone.
    fn leave(&mut self, id: &GroupId, leavers: &[Leaver], reply: oneshot::Sender<Left>) {
        let now = self.now();
        let Some(entry) = self.groups.get_mut(id) else {
            let _ = reply.send(Ok(vec![ErrorCode::UnknownMemberId; leavers.len()]));
            return;
        };
        let (codes, effects) = entry.group.leave(now, leavers);
        let stores = effects.iter().any(|effect| matches!(effect, Effect::Store(..)));
        self.act(id, effects);
        self.drop_if_void(id);
        if !stores {
            let _ = reply.send(Ok(codes));
        } else if let Err(unwritten) = self.journal.write(now.wall, &[], Then::Left { codes, reply }) {
            self.complete(unwritten.then, Err(unwritten.code));
        }
    }

    /// The log does not say who a member of a loaded group is; its first request does.
    fn heard_of(&mut self, id: &GroupId, member: &MemberId, principal: Principal) {
        let Some(entry) = self.groups.get_mut(id) else { return };
        if entry.principals.contains_key(member) || entry.group.member(member).is_none() {
            return;
        }
        entry.principals.insert(member.clone(), principal);
        if entry.group.state() == GroupState::Stable {
            let metadata = entry.group.current();
            let known = &entry.principals;
            let assignment = Assignment::of(self.id, id, &metadata, true, |m| known.get(m).cloned());
            self.ask_observer(assignment, None);
        }
    }

    fn commit(
        &mut self,
        id: GroupId,
        sender: &Sender,
        offsets: Vec<(TopicPartition, CommittedOffset)>,
        reply: oneshot::Sender<Result<(), ErrorCode>>,
    ) {
        if let Err(error) = self.check_commit(&id, sender) {
            let _ = reply.send(Err(error));
            return;
        }
        let write = |(topic, partition): &TopicPartition, offset: &CommittedOffset| -> Write {
            let key = Key::Offset { group: id.clone(), topic: topic.clone(), partition: *partition };
            (key, Some(Value::Offset(offset.clone())))
        };
        let writes: Vec<Write> = offsets.iter().map(|(key, offset)| write(key, offset)).collect();
        if let Some(entry) = self.groups.get_mut(&id) {
            for (key, _) in &offsets {
                *entry.in_flight.entry(key.clone()).or_default() += 1;
            }
        }
        let now = self.now().wall;
        let then = Then::Commit { group: id.clone(), offsets, reply };
        if let Err(unwritten) = self.journal.write(now, &writes, then) {
            self.complete(unwritten.then, Err(unwritten.code));
            self.drop_if_void(&id);
        }
    }

    /// Tools and consumers without membership make a group by their first commit.
    fn check_commit(&mut self, id: &GroupId, sender: &Sender) -> Result<(), ErrorCode> {
        let now = self.now();
        if !self.groups.contains_key(id) {
            if sender.generation >= 0 {
                return Err(ErrorCode::GroupIdNotFound);
            }
            if self.groups.len() >= GROUPS_MAX {
                return Err(ErrorCode::CoordinatorNotAvailable);
            }
            let group = Group::new(id.clone(), self.around.rules.clone(), now);
            self.add(id.clone(), Entry::new(group));
        }
        match self.groups.get_mut(id) {
            Some(entry) => {
                let (member, instance) = (sender.member.as_ref(), sender.instance.as_ref());
                entry.group.commit(now, member, instance, sender.generation)
            }
            None => Err(ErrorCode::GroupIdNotFound),
        }
    }

    fn fetch_offsets(&self, id: &GroupId, wanted: Option<Vec<TopicPartition>>) -> OffsetsFound {
        let entry = self.groups.get(id).filter(|e| e.group.state() != GroupState::Dead);
        Ok(match (wanted, entry) {
            (Some(wanted), entry) => {
                let found = |key: TopicPartition| {
                    let offset = entry.and_then(|e| e.offsets.get(&key)).cloned();
                    (key, offset)
                };
                wanted.into_iter().map(found).collect()
            }
            (None, Some(entry)) => {
                entry.offsets.iter().map(|(key, offset)| (key.clone(), Some(offset.clone()))).collect()
            }
            (None, None) => Vec::new(),
        })
    }

    fn delete_offsets(
        &mut self,
        id: GroupId,
        which: Vec<TopicPartition>,
        reply: oneshot::Sender<OffsetsDeleted>,
    ) {
        let entry = match self.groups.get(&id) {
            None => Err(ErrorCode::GroupIdNotFound),
            Some(entry) => entry.group.may_lose_offsets().map(|()| entry),
        };
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        };
        let mut codes = Vec::with_capacity(which.len());
        let mut offsets = Vec::new();
        for key in which {
            if entry.group.is_subscribed(key.0.as_str()) {
                codes.push((key, ErrorCode::GroupSubscribedToTopic));
            } else {
                if entry.offsets.contains_key(&key) || entry.in_flight.contains_key(&key) {
                    offsets.push((id.clone(), key.clone()));
                }
                codes.push((key, ErrorCode::None));
            }
        }
        self.forget(Forget { offsets, groups: Vec::new(), tell: Some(Tell::Offsets(reply, codes)) });
    }

    fn delete_group(&mut self, id: GroupId, reply: oneshot::Sender<ErrorCode>) {
        let allowed = match self.groups.get(&id) {
            None => Err(ErrorCode::GroupIdNotFound),
            Some(entry) => entry.group.may_be_deleted(),
        };
        match allowed.and_then(|()| self.around.observer.may_delete(&id)) {
            Ok(()) => {
                let offsets = self.groups.get(&id).map(|e| e.keys(&id)).unwrap_or_default();
                self.forget(Forget { offsets, groups: vec![id], tell: Some(Tell::Code(reply)) });
            }
            Err(error) => {
                let _ = reply.send(error);
            }
        }
    }

    fn topic_deleted(&mut self, topic: &TopicName, reply: oneshot::Sender<Result<(), ErrorCode>>) {
        let of_topic = |(id, entry): (&GroupId, &Entry)| {
            entry.keys(id).into_iter().filter(|(_, (t, _))| t == topic).collect::<Vec<_>>()
        };
        let offsets = self.groups.iter().flat_map(of_topic).collect();
        self.forget(Forget { offsets, groups: Vec::new(), tell: Some(Tell::Outcome(reply)) });
    }

    /// Removes lapsed offsets, and groups that nothing is left of.
    pub(super) fn expire(&mut self, tell: Option<oneshot::Sender<()>>) {
        let now = self.now().wall;
        let mut forget = Forget { tell: tell.map(Tell::Done), ..Forget::default() };
        for (id, entry) in &self.groups {
            let lapsed = |(key, offset): &(&TopicPartition, &CommittedOffset)| {
                let (topic, partition) = key;
                entry.group.offset_has_lapsed(topic.as_str(), offset, self.around.offsets_retention, now)
                    && !entry.in_flight.contains_key(*key)
                    && !self.around.observer.keeps_offset(id, topic, *partition)
            };
            let lapsed: Vec<TopicPartition> =
                entry.offsets.iter().filter(lapsed).map(|(key, _)| key.clone()).collect();
            let nothing_left = lapsed.len() == entry.offsets.len() && entry.in_flight.is_empty();
            if nothing_left && entry.group.is_idle() && self.around.observer.may_delete(id).is_ok() {
                forget.groups.push(id.clone());
            }
            forget.offsets.extend(lapsed.into_iter().map(|key| (id.clone(), key)));
        }
        self.forget(forget);
    }

    /// Writes the tombstones. Groups that end are closed at once, so that nothing is committed to
    /// them between the write and its end.
    pub(super) fn forget(&mut self, forget: Forget) {
        let offset = |(group, (topic, partition)): &(GroupId, TopicPartition)| -> Write {
            (Key::Offset { group: group.clone(), topic: topic.clone(), partition: *partition }, None)
        };
        let mut writes: Vec<Write> = forget.offsets.iter().map(offset).collect();
        for id in &forget.groups {
            let Some(entry) = self.groups.get_mut(id) else { continue };
            if entry.group.generation() > 0 {
                writes.push((Key::Group(id.clone()), None));
            }
            let effects = entry.group.dissolve(ErrorCode::CoordinatorNotAvailable);
            self.act(id, effects);
        }
        let now = self.now().wall;
        if let Err(unwritten) = self.journal.write(now, &writes, Then::Forget(forget)) {
            self.complete(unwritten.then, Err(unwritten.code));
        }
    }

    pub(super) fn forgotten(&mut self, forget: Forget, outcome: Result<(), ErrorCode>) {
        if outcome.is_ok() {
            for (id, key) in &forget.offsets {
                if let Some(entry) = self.groups.get_mut(id) {
                    entry.offsets.remove(key);
                }
            }
            for id in &forget.groups {
                self.remove(id);
            }
        } else {
            // The group was empty: it goes on as it was, at the generation that the log has.
            for id in &forget.groups {
                let now = self.now();
                if let Some(entry) = self.groups.get_mut(id) {
                    entry.group =
                        Group::restore(id.clone(), self.around.rules.clone(), entry.group.current(), now);
                }
            }
        }
        let code = outcome.err().unwrap_or(ErrorCode::None);
        match forget.tell {
            None => {}
            Some(Tell::Outcome(reply)) => {
                let _ = reply.send(outcome);
            }
            Some(Tell::Code(reply)) => {
                let _ = reply.send(code);
            }
            Some(Tell::Offsets(reply, codes)) => {
                let _ = reply.send(outcome.map(|()| codes));
            }
            Some(Tell::Done(reply)) => {
                let _ = reply.send(());
            }
        }
    }

    fn list(&self) -> Vec<Listed> {
        let listed = |(id, entry): (&GroupId, &Entry)| Listed {
            group: id.clone(),
            protocol_type: entry.group.protocol_type().unwrap_or_default().to_owned(),
            state: entry.group.state().name(),
        };
        self.groups.iter().filter(|(_, e)| e.group.state() != GroupState::Dead).map(listed).collect()
    }

    fn describe(&self, id: &GroupId) -> Result<Description, ErrorCode> {
        let entry = self.groups.get(id).filter(|e| e.group.state() != GroupState::Dead);
        let group = &entry.ok_or(ErrorCode::GroupIdNotFound)?.group;
        let stable = group.state() == GroupState::Stable;
        let protocol = group.protocol().filter(|_| stable).unwrap_or_default();
        let member = |m: &broker_core::group::Member| MemberDescription {
            member: m.id.clone(),
            instance: m.instance.clone(),
            client_id: m.client_id.clone(),
            host: m.client_host.clone(),
            metadata: if stable { m.metadata(protocol) } else { Default::default() },
            assignment: if stable { m.assignment.clone() } else { Default::default() },
        };
        Ok(Description {
            state: group.state().name(),
            protocol_type: group.protocol_type().unwrap_or_default().to_owned(),
            protocol: protocol.to_owned(),
            members: group.members().map(member).collect(),
        })
    }
}

impl Entry {
    /// Every partition that the log may hold an offset of.
    fn keys(&self, id: &GroupId) -> Vec<(GroupId, TopicPartition)> {
        let keys: BTreeSet<&TopicPartition> = self.offsets.keys().chain(self.in_flight.keys()).collect();
        keys.into_iter().map(|key| (id.clone(), key.clone())).collect()
    }
}
