//! Carrying cuts to the logs: what a keeper asks for is compared, appended and awaited, here or by the
//! partition's owner.
//!
//! One keeper for each shard of groups that this broker coordinates, in the shard's epoch: an answer that
//! comes when the shard has gone on is nobody's. Owns the clock of grace; deciding is
//! `lane_core::CutKeeper`'s, comparing is the log's.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kafka::control::Marker;
use kafka::{ErrorCode, GroupId, Offset, PartitionIndex, TopicId, TopicName};
use lane_core::{Ask, Cut, CutAnswer, CutKeeper, CutKind, Lane};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Owned;
use super::markers::Known;
use crate::coordinator::{ShardId, partition_of};
use crate::partition::Partition;
use crate::peers::{Markers, Peers};
use crate::{clock, switches};

/// One partition of one incarnation of a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub topic: TopicName,
    pub topic_id: TopicId,
    pub index: PartitionIndex,
}

/// The cuts of this broker's groups.
pub struct Cuts {
    owned: Owned,
    /// None for a broker that is alone.
    peers: Option<Arc<Peers>>,
    grace: Duration,
    started: Instant,
    inner: Mutex<Inner>,
    /// Rises with every answer.
    answered: watch::Sender<u64>,
    /// A keeper has a new deadline.
    wake: Notify,
    /// The logs should be asked soon.
    list: Notify,
}

/// What is decided together: a listing must never bring an older assignment back.
#[derive(Default)]
struct Inner {
    /// How many shards there are.
    count: usize,
    shards: BTreeMap<usize, Shard>,
    known: Known,
    /// Of lanes that have a grace of their own, in milliseconds.
    graces: BTreeMap<Lane, u64>,
}

/// The cuts of one shard.
struct Shard {
    id: ShardId,
    /// All groups of its log have been told.
    loaded: bool,
    /// Everything has been listed since.
    listed: bool,
    keeper: CutKeeper<Place>,
    /// What each lane's group holds, by the names that assignments carry.
    held: BTreeMap<(GroupId, Lane), Held>,
}

pub type Held = BTreeSet<(TopicName, PartitionIndex)>;

/// How long an assignment waits for its cuts.
pub const READY_MAX: Duration = Duration::from_secs(10);
/// How often what the logs say is compared with what is assigned.
const LIST_EVERY: Duration = Duration::from_secs(60);
/// The same where somebody did not answer.
const LIST_AGAIN: Duration = Duration::from_secs(1);
/// Changes of topics come in numbers.
const LIST_AFTER: Duration = Duration::from_millis(100);

impl Cuts {
    pub fn new(owned: Owned, peers: Option<Arc<Peers>>, grace: Duration) -> Arc<Cuts> {
        Arc::new(Cuts {
            owned,
            peers,
            grace,
            started: Instant::now(),
            inner: Mutex::default(),
            answered: watch::Sender::new(0),
            wake: Notify::new(),
            list: Notify::new(),
        })
    }

    pub fn begins(&self, id: ShardId) {
        let mut inner = self.inner.lock();
        inner.count = id.count;
        if inner.shards.get(&id.index).is_some_and(|shard| shard.id.epoch >= id.epoch) {
            return;
        }
        let mut keeper = CutKeeper::new(id.epoch, self.grace.as_millis() as u64);
        keeper.set_graces(inner.graces.clone());
        let shard = Shard { id, loaded: false, listed: false, keeper, held: BTreeMap::new() };
        inner.shards.insert(id.index, shard);
    }

    /// The lanes that have a grace of their own.
    pub fn set_graces(&self, graces: BTreeMap<Lane, u64>) {
        let mut inner = self.inner.lock();
        if inner.graces != graces {
            for shard in inner.shards.values_mut() {
                shard.keeper.set_graces(graces.clone());
            }
            inner.graces = graces;
        }
    }

    pub fn loaded(&self, id: ShardId) {
        if let Some(shard) = self.inner.lock().shards.get_mut(&id.index).filter(|shard| shard.id == id) {
            shard.loaded = true;
        }
        self.list.notify_one();
    }

    pub fn ended(&self, id: ShardId) {
        let mut inner = self.inner.lock();
        if inner.shards.get(&id.index).is_some_and(|shard| shard.id == id) {
            inner.shards.remove(&id.index);
        }
        drop(inner);
        self.answered.send_modify(|n| *n += 1);
    }

    /// Follows deadlines, and lists what the logs say at first and every minute, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let both = async { tokio::join!(self.follow_deadlines(), self.follow_logs()) };
        stop.run_until_cancelled(both).await;
    }

    async fn follow_deadlines(self: &Arc<Self>) {
        loop {
            let (asks, next) = {
                let (mut inner, now) = (self.inner.lock(), self.now());
                let keepers = inner.shards.values_mut().map(|shard| &mut shard.keeper);
                let (mut asks, mut next) = (Vec::new(), None::<u64>);
                for keeper in keepers {
                    asks.extend(keeper.tick(now));
                    next = keeper.next_tick().into_iter().chain(next).min();
                }
                (asks, next)
            };
            self.send(asks);
            let next = next.map(|ms| self.started + Duration::from_millis(ms));
            tokio::select! {
                () = tokio::time::sleep_until(next.unwrap_or_else(|| Instant::now() + LIST_EVERY)) => {}
                () = self.wake.notified() => {}
            }
        }
    }

    async fn follow_logs(self: &Arc<Self>) {
        // What was not asked of an owner that went is asked of the next; the logs stay what they are.
        let mut topics = self.peers.as_ref().map(|peers| peers.topic_changes());
        loop {
            let again = if self.reconcile().await { LIST_EVERY } else { LIST_AGAIN };
            let changed = async {
                match &mut topics {
                    None => std::future::pending().await,
                    Some(topics) => drop(topics.changed().await),
                }
            };
            tokio::select! {
                () = tokio::time::sleep(again) => {}
                () = self.list.notified() => tokio::time::sleep(LIST_AFTER).await,
                () = changed => tokio::time::sleep(LIST_AFTER).await,
            }
        }
    }

    /// The members of (group, lane) now hold exactly `held`. Ready when all of it is activated,
    /// durably; an error if that takes too long.
    pub fn assign(
        self: &Arc<Self>,
        id: ShardId,
        (group, lane): (&GroupId, &Lane),
        held: Held,
        clean: bool,
    ) -> impl Future<Output = Result<(), ErrorCode>> + Send + use<> {
        let places = self.places(&held);
        let key = (group.clone(), lane.clone());
        let asks = {
            let mut inner = self.inner.lock();
            match inner.shards.get_mut(&id.index).filter(|shard| shard.id == id) {
                Some(shard) => {
                    if held.is_empty() {
                        shard.held.remove(&key);
                    } else {
                        shard.held.insert(key.clone(), held);
                    }
                    shard.keeper.assign(group, lane, &places, clean, self.now())
                }
                None => Vec::new(),
            }
        };
        self.send(asks);
        self.wake.notify_one();
        let cuts = self.clone();
        async move {
            let (group, lane) = key;
            let mut answered = cuts.answered.subscribe();
            // Some once it is known.
            let outcome = || {
                let inner = cuts.inner.lock();
                match inner.shards.get(&id.index).filter(|shard| shard.id == id) {
                    Some(shard) if shard.keeper.ready(&group, &lane) => Some(Ok(())),
                    Some(shard) if shard.keeper.is_fenced() => Some(Err(ErrorCode::NotCoordinator)),
                    Some(_) => None,
                    None => Some(Err(ErrorCode::NotCoordinator)),
                }
            };
            let mut found = None;
            let ready = answered.wait_for(|_| {
                found = outcome();
                found.is_some()
            });
            let _ = tokio::time::timeout(READY_MAX, ready).await;
            found.unwrap_or_else(|| {
                tracing::warn!(%group, %lane, "an assignment waits in vain for its lane cuts");
                Err(ErrorCode::RebalanceInProgress)
            })
        }
    }

    /// The lists of extractors have changed: now, where all logs are here, else soon.
    pub fn lists_changed(self: &Arc<Self>) {
        match &self.peers {
            None => self.compare(&self.loaded_shards(), &self.markers_here(), true),
            Some(_) => self.list.notify_one(),
        }
    }

    fn loaded_shards(&self) -> Vec<ShardId> {
        let inner = self.inner.lock();
        inner.shards.values().filter(|shard| shard.loaded).map(|shard| shard.id).collect()
    }

    /// Compares what the logs say with what is assigned: what is assigned but closed is activated
    /// again, what is open and unknown goes into grace. False if a log was not to be asked.
    pub async fn reconcile(self: &Arc<Self>) -> bool {
        let asked = self.loaded_shards();
        if asked.is_empty() {
            return true;
        }
        let (listings, whole) = match &self.peers {
            None => (self.markers_here(), true),
            Some(peers) => peers.all_markers(self.markers_here()).await,
        };
        self.compare(&asked, &listings, whole);
        whole
    }

    fn compare(self: &Arc<Self>, asked: &[ShardId], listings: &[Markers], whole: bool) {
        let exists = self.existing(listings);
        let mut asks = Vec::new();
        let mut inner = self.inner.lock();
        let (count, now) = (inner.count, self.now());
        let Inner { shards, known, .. } = &mut *inner;
        known.take(listings, &exists);
        for shard in shards.values_mut().filter(|shard| asked.contains(&shard.id)) {
            shard.listed |= whole;
            shard.keeper.forget(|place| !exists(place));
            for (place, markers) in listings {
                let mine = |lane: &Lane, group: &GroupId| {
                    partition_of(&GroupId::new(&lane.suffixed(group.as_str())), count) == shard.id.index
                };
                for marker in markers.iter().filter(|marker| mine(&marker.lane, &marker.group)) {
                    let (group, lane) = (&marker.group, &marker.lane);
                    asks.extend(shard.keeper.listed(group, lane, place, marker.last, marker.open, now));
                }
            }
            for ((group, lane), held) in &shard.held {
                let places = self.places(held);
                asks.extend(shard.keeper.assign(group, lane, &places, false, now));
            }
        }
        drop(inner);
        self.send(asks);
        self.wake.notify_one();
    }

    /// The last markers in the logs that are here.
    pub fn markers_here(&self) -> Vec<Markers> {
        let listed = |p: Arc<Partition>| {
            let rules = p.with_fold(|fold| fold.lanes.rules());
            let markers = rules.group_lanes().map(|(group, lane, known)| crate::peers::Marker {
                group: group.clone(),
                lane: lane.clone(),
                last: known.last_marker,
                open: known.open().is_some(),
                intervals: !known.intervals.is_empty(),
            });
            (Place::of(&p), markers.collect())
        };
        (self.owned.all)().into_iter().map(listed).collect()
    }

    /// Whether a place is of a topic that exists.
    fn existing(&self, listings: &[Markers]) -> impl Fn(&Place) -> bool + use<> {
        let peers = self.peers.clone();
        let here: BTreeSet<(TopicName, TopicId)> = match &peers {
            None => listings.iter().map(|(place, _)| (place.topic.clone(), place.topic_id)).collect(),
            Some(_) => BTreeSet::new(),
        };
        move |place: &Place| match &peers {
            None => here.contains(&(place.topic.clone(), place.topic_id)),
            Some(peers) => peers.topic(&place.topic).is_some_and(|topic| topic.id == place.topic_id),
        }
    }

    /// Deactivates whatever is open of a lane; ready when nothing is, durably.
    pub async fn close_lane(self: &Arc<Self>, lane: &Lane) -> Result<(), CloseError> {
        for shard in self.inner.lock().shards.values_mut() {
            shard.held.retain(|(_, l), _| l != lane);
        }
        self.reconcile().await;
        let asks: Vec<_> = {
            let (mut inner, now) = (self.inner.lock(), self.now());
            inner.shards.values_mut().flat_map(|shard| shard.keeper.close_lane(lane, now)).collect()
        };
        self.send(asks);
        self.wake.notify_one();
        let mut answered = self.answered.subscribe();
        let busy = || self.inner.lock().shards.values().any(|shard| shard.keeper.lane_busy(lane));
        let closed = answered.wait_for(|_| !busy());
        match tokio::time::timeout(READY_MAX, closed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(CloseError(lane.clone())),
        }
    }

    /// Every partition that members of the group in the lane hold.
    pub fn held_by(&self, group: &GroupId, lane: &Lane) -> Vec<(TopicName, PartitionIndex)> {
        let inner = self.inner.lock();
        let key = (group.clone(), lane.clone());
        inner.shards.values().find_map(|shard| shard.held.get(&key)).into_iter().flatten().cloned().collect()
    }

    /// Whether an interval of (group, lane) may be in the log of a partition that is elsewhere.
    pub fn may_own(&self, group: &GroupId, lane: &Lane, topic: &TopicName, index: PartitionIndex) -> bool {
        let Some(topic_id) = self.peers.as_ref().and_then(|peers| peers.topic(topic)).map(|topic| topic.id)
        else {
            return false;
        };
        let place = Place { topic: topic.clone(), topic_id, index };
        let inner = self.inner.lock();
        let Some(shard) = inner.shard_of(group, lane) else { return true };
        let listed = shard.listed && inner.known.is_listed(&place);
        !listed || shard.keeper.knows(group, lane, &place) || inner.known.owns(&place, group, lane)
    }

    /// Whether something of (group, lane) is open, or may be, in any log.
    pub fn may_be_open(&self, group: &GroupId, lane: &Lane) -> bool {
        let inner = self.inner.lock();
        let Some(shard) = inner.shard_of(group, lane) else { return true };
        let lanes = self.peers.as_ref().is_none_or(|peers| !peers.topics_with_lanes().is_empty());
        lanes && (!shard.listed || shard.keeper.busy(group, lane) || inner.known.is_open(group, lane))
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Partitions of topics with lanes; the others have no intervals.
    fn places(&self, held: &Held) -> BTreeSet<Place> {
        let here = |(topic, index): &(TopicName, PartitionIndex)| {
            let partition = (self.owned.find)(topic, *index)?;
            let on = partition.with_fold(|fold| !fold.lanes.extractors().is_empty());
            on.then(|| Place::of(&partition))
        };
        let anywhere = |peers: &Peers, (topic, index): &(TopicName, PartitionIndex)| {
            let topic = peers.topic(topic).filter(|topic| topic.has_partition(index.0))?;
            let place = || Place { topic: topic.name.clone(), topic_id: topic.id, index: *index };
            topic.settings.lanes.then(place)
        };
        match &self.peers {
            None => held.iter().filter_map(here).collect(),
            Some(peers) => held.iter().filter_map(|one| anywhere(peers, one)).collect(),
        }
    }

    /// Appends every cut that is for a log of this broker now, in order, and waits for each in a task of
    /// its own; so does every question to another owner. There are never more than two per (group, lane,
    /// partition).
    fn send(self: &Arc<Self>, asks: Vec<Ask<Place>>) {
        for ask in asks {
            let cuts = self.clone();
            let appended = self.here(&ask.partition).map(|partition| {
                let at = append(&partition, ask.kind, &ask.cut);
                (partition, at)
            });
            drop(tokio::spawn(async move {
                // Answered in a task, so that a cut that fails at once cannot loop here.
                let answer = match (appended, &cuts.peers) {
                    (Some((partition, Ok(at))), _) => durable(&partition, at).await,
                    (Some((_, Err(answer))), _) => answer,
                    (None, Some(peers)) => peers.cut(&ask).await,
                    (None, None) => CutAnswer::Failed,
                };
                cuts.take_answer(&ask, answer).await;
            }));
        }
    }

    fn here(&self, place: &Place) -> Option<Arc<Partition>> {
        (self.owned.find)(&place.topic, place.index).filter(|p| p.topic_id == place.topic_id)
    }

    /// A cut that a coordinator asks for, in a log of this broker; ready when it is durable.
    pub async fn cut_here(&self, place: &Place, kind: CutKind, cut: &Cut) -> CutAnswer {
        let Some(partition) = self.here(place) else { return CutAnswer::Failed };
        match append(&partition, kind, cut) {
            Ok(at) => durable(&partition, at).await,
            Err(answer) => answer,
        }
    }

    /// What the coordinator before this one would have sent before it heard of the activate.
    async fn send_stale(&self, activate: &Ask<Place>) {
        let cut = Cut { coordinator_epoch: activate.cut.coordinator_epoch - 1, ..activate.cut.clone() };
        let stale = Ask { kind: CutKind::Deactivate, cut, partition: activate.partition.clone() };
        let answer = match (self.here(&stale.partition), &self.peers) {
            (None, Some(peers)) => peers.cut(&stale).await,
            _ => self.cut_here(&stale.partition, stale.kind, &stale.cut).await,
        };
        tracing::warn!(partition = %stale.partition.topic, ?answer, "a stale cut was sent, for a test");
    }

    async fn take_answer(self: &Arc<Self>, ask: &Ask<Place>, answer: CutAnswer) {
        let activated = ask.kind == CutKind::Activate && matches!(answer, CutAnswer::Done(_));
        if switches::stale_cuts() && activated {
            self.send_stale(ask).await;
        }
        let now = self.now();
        let (group, lane) = (&ask.cut.group, &ask.cut.lane);
        let asks = {
            let mut inner = self.inner.lock();
            match (ask.kind, answer) {
                (CutKind::Activate, CutAnswer::Done(_)) => {
                    inner.known.note_activated(&ask.partition, group, lane);
                }
                (CutKind::Deactivate, CutAnswer::Done(_)) => {
                    inner.known.note_closed(&ask.partition, group, lane);
                }
                _ => {}
            }
            match inner.shard_of_mut(group, lane).filter(|s| s.id.epoch == ask.cut.coordinator_epoch) {
                Some(shard) => shard.keeper.answered(group, lane, &ask.partition, ask.kind, answer, now),
                None => Vec::new(),
            }
        };
        self.answered.send_modify(|n| *n += 1);
        self.send(asks);
        self.wake.notify_one();
    }
}

impl Inner {
    fn index_of(&self, group: &GroupId, lane: &Lane) -> usize {
        partition_of(&GroupId::new(&lane.suffixed(group.as_str())), self.count)
    }

    fn shard_of(&self, group: &GroupId, lane: &Lane) -> Option<&Shard> {
        self.shards.get(&self.index_of(group, lane))
    }

    fn shard_of_mut(&mut self, group: &GroupId, lane: &Lane) -> Option<&mut Shard> {
        let index = self.index_of(group, lane);
        self.shards.get_mut(&index)
    }
}

fn append(partition: &Partition, kind: CutKind, cut: &Cut) -> Result<Offset, CutAnswer> {
    if switches::lane_markers_off() {
        return Ok(Offset(partition.watermarks().log_end.0 - 1));
    }
    let marker = match kind {
        CutKind::Activate => Marker::LaneActivate(cut.written()),
        CutKind::Deactivate => Marker::LaneDeactivate(cut.written()),
    };
    let check = |fold: &broker_core::Fold| match switches::compare_and_append_off() {
        true => Ok(()),
        false => fold.lanes.check(cut),
    };
    match partition.append_marker(&marker, clock::now(), check) {
        Ok(Ok(at)) => {
            let (group, lane, epoch) = (&cut.group, &cut.lane, cut.coordinator_epoch);
            tracing::info!(%partition, %group, %lane, ?kind, epoch, offset = at.0, "lane cut");
            Ok(at)
        }
        Ok(Err(refused)) => Err(CutAnswer::Refused(refused)),
        Err(error) => {
            tracing::warn!(%partition, %error, "a lane cut was not appended; it is tried again");
            Err(CutAnswer::Failed)
        }
    }
}

async fn durable(partition: &Partition, at: Offset) -> CutAnswer {
    match partition.wait_durable(at.plus(1)).await {
        Ok(()) => CutAnswer::Done(at),
        Err(_) => CutAnswer::Failed,
    }
}

/// Cuts of a lane that is being deleted did not become durable in time; try again.
#[derive(Debug, thiserror::Error)]
#[error("lane {0} could not be closed in every partition yet; try again")]
pub struct CloseError(Lane);

impl Place {
    pub fn of(partition: &Partition) -> Place {
        let topic = partition.topic.clone();
        Place { topic, topic_id: partition.topic_id, index: partition.index }
    }
}
