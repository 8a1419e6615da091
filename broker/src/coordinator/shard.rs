//! The one task that owns every group of one partition of `__consumer_offsets`.
//!
//! A group costs no task: its timers lie in one heap, its writes in one queue, its answers in one
//! map. The task never waits for a disk or for lanes; both come back as events. State changes in
//! memory when Kafka's would, answers that promise something leave when it is durable.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use broker_core::group::{
    Departure, Effect, Group, GroupRules, JoinReply, MemberId, Now, StoreToken, SyncReply, Ticket,
};
use broker_core::offsets_log::{CommittedOffset, GroupMetadata, Key, OffsetsFold};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use kafka::{ErrorCode, GroupId, TopicName};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::journal::{Journal, Then, Value};
use super::load::{self, LoadError};
use super::message::{Message, TopicPartition};
use super::observer::{Assignment, AssignmentObserver, ShardId};
use crate::api::Principal;
use crate::metrics::GroupMetrics;
use crate::partition::{Partition, ReadError};

/// Requests that may wait for a shard; beyond this senders wait.
pub const INBOX_MAX: usize = 1024;

/// Most groups of one shard; beyond this new ones are refused.
pub(super) const GROUPS_MAX: usize = 200_000;

/// What every shard of a coordinator shares.
#[derive(Clone)]
pub struct Surroundings {
    pub rules: GroupRules,
    pub offsets_retention: Duration,
    pub retention_check_interval: Duration,
    pub observer: Arc<dyn AssignmentObserver>,
    pub topic_exists: Arc<dyn Fn(&TopicName) -> bool + Send + Sync>,
    pub metrics: GroupMetrics,
}

/// Whether a shard answers for its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardState {
    Loading,
    Serving,
    /// Its partition cannot be read or the broker is stopping.
    Ended,
}

/// The task's state.
pub(super) struct Shard {
    pub(super) id: ShardId,
    pub(super) around: Surroundings,
    pub(super) journal: Journal,
    pub(super) groups: HashMap<GroupId, Entry>,
    started: Instant,
    /// When to look at a group; entries that are not what the group is armed for are void.
    timers: BinaryHeap<Reverse<(Duration, GroupId)>>,
    waiting: HashMap<Ticket, Waiting>,
    next_ticket: u64,
    hooks: FuturesUnordered<BoxFuture<'static, Hooked>>,
}

/// One group and what is committed for it.
pub(super) struct Entry {
    pub(super) group: Group,
    pub(super) offsets: BTreeMap<TopicPartition, CommittedOffset>,
    /// Commits that are written and not durable yet.
    pub(super) in_flight: BTreeMap<TopicPartition, u32>,
    pub(super) principals: HashMap<MemberId, Principal>,
    armed: Option<Duration>,
}

/// Who waits for a ticket.
pub(super) enum Waiting {
    Join(oneshot::Sender<JoinReply>),
    Sync(oneshot::Sender<SyncReply>),
}

/// The observer's word on an assignment.
struct Hooked {
    group: GroupId,
    /// `None` where nobody waits for it.
    token: Option<StoreToken>,
    outcome: Result<(), ErrorCode>,
}

/// Runs a shard until `stop`; `state` follows it.
pub(super) async fn run(
    id: ShardId,
    partition: Arc<Partition>,
    around: Surroundings,
    mut inbox: mpsc::Receiver<Message>,
    state: watch::Sender<ShardState>,
    stop: CancellationToken,
) {
    let fold = tokio::select! {
        fold = loaded(partition.clone(), &mut inbox) => fold,
        () = stop.cancelled() => None,
    };
    if let Some(fold) = fold.filter(|_| !stop.is_cancelled()) {
        let observer = around.observer.clone();
        observer.begins(id);
        let mut shard = Shard::new(id, partition, around);
        shard.take_over(fold);
        observer.loaded(id);
        state.send_replace(ShardState::Serving);
        shard.serve(&mut inbox, &stop).await;
        observer.ended(id);
    }
    state.send_replace(ShardState::Ended);
    inbox.close();
    while let Some(message) = inbox.recv().await {
        message.refuse(ErrorCode::NotCoordinator);
    }
}

/// Loads the partition; meanwhile requests are told so. `None`: it cannot be read.
async fn loaded(partition: Arc<Partition>, inbox: &mut mpsc::Receiver<Message>) -> Option<OffsetsFold> {
    let name = partition.to_string();
    let mut load = tokio::task::spawn_blocking(move || load::fold(&partition));
    let result: Result<OffsetsFold, LoadError> = loop {
        tokio::select! {
            result = &mut load => match result {
                Ok(result) => break result,
                Err(error) => {
                    tracing::error!(partition = %name, %error, "loading groups ended early");
                    return None;
                }
            },
            Some(message) = inbox.recv() => message.refuse(ErrorCode::CoordinatorLoadInProgress),
        }
    };
    match result {
        Ok(fold) => Some(fold),
        // It was given away before it was read to the end: its next owner loads it.
        Err(LoadError::Read(ReadError::Closed)) => {
            tracing::info!(partition = %name, "groups are not loaded: another broker has them now");
            None
        }
        Err(error) => {
            tracing::error!(partition = %name, %error, "groups cannot be loaded; they are offline until restart");
            None
        }
    }
}

impl Shard {
    fn new(id: ShardId, partition: Arc<Partition>, around: Surroundings) -> Shard {
        Shard {
            id,
            around,
            journal: Journal::new(partition),
            groups: HashMap::new(),
            started: Instant::now(),
            timers: BinaryHeap::new(),
            waiting: HashMap::new(),
            next_ticket: 0,
            hooks: FuturesUnordered::new(),
        }
    }

    /// Becomes the coordinator of what the log holds. Offsets of topics that were deleted while no
    /// coordinator looked are removed.
    fn take_over(&mut self, fold: OffsetsFold) {
        let now = self.now();
        let mut orphans = Vec::new();
        for (id, folded) in fold.groups {
            let group = match folded.metadata {
                Some(metadata) => {
                    if !metadata.members.is_empty() {
                        let assignment = Assignment::of(self.id, &id, &metadata, true, |_| None);
                        self.ask_observer(assignment, None);
                    }
                    Group::restore(id.clone(), self.around.rules.clone(), metadata, now)
                }
                None => Group::new(id.clone(), self.around.rules.clone(), now),
            };
            let mut entry = Entry::new(group);
            let exists = |key: &TopicPartition| (self.around.topic_exists)(&key.0);
            let (offsets, gone): (BTreeMap<_, _>, BTreeMap<_, _>) =
                folded.offsets.into_iter().partition(|(key, _)| exists(key));
            entry.offsets = offsets;
            orphans.extend(gone.into_keys().map(|key| (id.clone(), key)));
            self.add(id.clone(), entry);
            self.arm(&id);
        }
        if !orphans.is_empty() {
            tracing::info!(
                offsets = orphans.len(),
                "removing committed offsets of topics that no longer exist"
            );
            self.forget(super::journal::Forget { offsets: orphans, ..Default::default() });
        }
    }

    async fn serve(&mut self, inbox: &mut mpsc::Receiver<Message>, stop: &CancellationToken) {
        let mut check = tokio::time::interval(self.around.retention_check_interval);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        check.reset();
        loop {
            self.settle();
            let deadline = self.next_timer();
            tokio::select! {
                message = inbox.recv(), if !self.journal.is_full() => match message {
                    Some(message) => self.handle(message),
                    None => break,
                },
                () = self.journal.moved() => {}
                Some(hooked) = self.hooks.next(), if !self.hooks.is_empty() => self.hooked(hooked),
                () = tokio::time::sleep_until(deadline) => self.fire_timers(),
                _ = check.tick() => self.expire(None),
                () = stop.cancelled() => break,
            }
        }
        self.dissolve().await;
    }

    /// Ends every group here and waits for what is written.
    async fn dissolve(&mut self) {
        let ids: Vec<GroupId> = self.groups.keys().cloned().collect();
        for id in ids {
            if let Some(entry) = self.groups.get_mut(&id) {
                let effects = entry.group.dissolve(ErrorCode::NotCoordinator);
                self.act(&id, effects);
            }
        }
        self.settle();
        while !self.journal.is_empty() {
            self.journal.moved().await;
            self.settle();
        }
        self.around.metrics.groups.add(-(self.groups.len() as i64));
    }

    pub(super) fn now(&self) -> Now {
        Now { elapsed: self.started.elapsed(), wall: crate::clock::now() }
    }

    /// Completes what has become durable.
    fn settle(&mut self) {
        while let Some((then, outcome)) = self.journal.next_settled() {
            self.complete(then, outcome);
        }
    }

    pub(super) fn complete(&mut self, then: Then, outcome: Result<(), ErrorCode>) {
        match then {
            Then::Commit { group, offsets, reply } => {
                if let Some(entry) = self.groups.get_mut(&group) {
                    entry.landed(offsets, outcome);
                }
                if outcome.is_ok() {
                    self.around.metrics.commits.inc();
                }
                let _ = reply.send(outcome);
            }
            Then::Store { group, token, metadata } => match outcome {
                Ok(()) => {
                    self.around.metrics.generations.inc();
                    let (generation, members) = (metadata.generation, metadata.members.len());
                    tracing::debug!(%group, generation, members, "generation stored");
                    let known = self.groups.get(&group).map(|e| &e.principals);
                    let principal = |m: &MemberId| known.and_then(|p| p.get(m).cloned());
                    let assignment = Assignment::of(self.id, &group, &metadata, false, principal);
                    self.ask_observer(assignment, Some(token));
                }
                Err(_) => self.stored(&group, token, outcome),
            },
            Then::Forget(forget) => self.forgotten(forget, outcome),
            // They have left whatever became of the write.
            Then::Left { codes, reply } => {
                let _ = reply.send(Ok(codes));
            }
        }
    }

    pub(super) fn ask_observer(&mut self, assignment: Assignment, token: Option<StoreToken>) {
        let group = assignment.group.clone();
        let asked = self.around.observer.assigned(assignment);
        self.hooks.push(Box::pin(async move { Hooked { group, token, outcome: asked.await } }));
    }

    fn hooked(&mut self, hooked: Hooked) {
        match (hooked.token, hooked.outcome) {
            (Some(token), outcome) => self.stored(&hooked.group, token, outcome),
            (None, Err(error)) => {
                tracing::warn!(group = %hooked.group, ?error, "the views of a loaded group were not taken over");
            }
            (None, Ok(())) => {}
        }
    }

    fn stored(&mut self, id: &GroupId, token: StoreToken, outcome: Result<(), ErrorCode>) {
        let now = self.now();
        if let Some(entry) = self.groups.get_mut(id) {
            let effects = entry.group.stored(now, token, outcome);
            self.act(id, effects);
        }
    }

    pub(super) fn ticket(&mut self, who: Waiting) -> Ticket {
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        self.waiting.insert(ticket, who);
        ticket
    }

    /// Does what a group decided, and what follows from a write that fails at once.
    pub(super) fn act(&mut self, id: &GroupId, effects: Vec<Effect>) {
        let mut work = VecDeque::from(effects);
        while let Some(effect) = work.pop_front() {
            match effect {
                Effect::AnswerJoin(ticket, answer) => {
                    if let Some(Waiting::Join(reply)) = self.waiting.remove(&ticket) {
                        let _ = reply.send(answer);
                    }
                }
                Effect::AnswerSync(ticket, answer) => {
                    if let Some(Waiting::Sync(reply)) = self.waiting.remove(&ticket) {
                        let _ = reply.send(answer);
                    }
                }
                Effect::Store(token, metadata) => work.extend(self.store(id, token, metadata)),
                Effect::Departed(member, how) => {
                    tracing::debug!(group = %id, %member, ?how, "member left the group");
                    if how == Departure::Expired {
                        self.around.metrics.members_expired.inc();
                    }
                    if let Some(entry) = self.groups.get_mut(id) {
                        entry.principals.remove(&member);
                    }
                    self.around.observer.departed(id, &member, how);
                }
            }
        }
        self.arm(id);
    }

    fn store(&mut self, id: &GroupId, token: StoreToken, metadata: GroupMetadata) -> Vec<Effect> {
        let now = self.now();
        let entry = (Key::Group(id.clone()), Some(Value::Group(metadata.clone())));
        let then = Then::Store { group: id.clone(), token, metadata };
        match self.journal.write(now.wall, &[entry], then) {
            Ok(()) => Vec::new(),
            Err(unwritten) => match self.groups.get_mut(id) {
                Some(entry) => entry.group.stored(now, token, Err(unwritten.code)),
                None => Vec::new(),
            },
        }
    }

    /// Makes sure that the group is looked at when its next deadline comes.
    pub(super) fn arm(&mut self, id: &GroupId) {
        let Some(entry) = self.groups.get_mut(id) else { return };
        let Some(at) = entry.group.next_deadline() else { return };
        if entry.armed.is_none_or(|armed| at < armed) {
            entry.armed = Some(at);
            self.timers.push(Reverse((at, id.clone())));
        }
    }

    fn next_timer(&self) -> Instant {
        // Without a group there is nothing to look at; the day is only an upper bound.
        let next = self.timers.peek().map_or(Duration::from_secs(86_400) + self.started.elapsed(), |t| t.0.0);
        self.started + next
    }

    fn fire_timers(&mut self) {
        let now = self.now();
        while let Some(Reverse((at, _))) = self.timers.peek()
            && *at <= now.elapsed
        {
            let Some(Reverse((at, id))) = self.timers.pop() else { return };
            let Some(entry) = self.groups.get_mut(&id).filter(|e| e.armed == Some(at)) else { continue };
            entry.armed = None;
            let effects = entry.group.tick(now);
            self.act(&id, effects);
            self.drop_if_void(&id);
        }
    }

    /// Forgets a group of which there is nothing in the log.
    pub(super) fn drop_if_void(&mut self, id: &GroupId) {
        if self.groups.get(id).is_some_and(|e| e.is_void() && e.group.generation() == 0) {
            self.remove(id);
        }
    }

    pub(super) fn add(&mut self, id: GroupId, entry: Entry) {
        self.groups.insert(id, entry);
        self.around.metrics.groups.add(1);
    }

    pub(super) fn remove(&mut self, id: &GroupId) {
        if self.groups.remove(id).is_some() {
            self.around.metrics.groups.add(-1);
        }
    }
}

impl Entry {
    pub(super) fn new(group: Group) -> Entry {
        Entry {
            group,
            offsets: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            principals: HashMap::new(),
            armed: None,
        }
    }

    /// Nobody in it, nothing committed, nothing on its way.
    pub(super) fn is_void(&self) -> bool {
        self.group.is_idle() && self.offsets.is_empty() && self.in_flight.is_empty()
    }

    fn landed(&mut self, offsets: Vec<(TopicPartition, CommittedOffset)>, outcome: Result<(), ErrorCode>) {
        for (key, offset) in offsets {
            if let Some(count) = self.in_flight.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    self.in_flight.remove(&key);
                }
            }
            if outcome.is_ok() {
                self.offsets.insert(key, offset);
            }
        }
    }
}
