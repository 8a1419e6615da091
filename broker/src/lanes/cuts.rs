//! Carrying cuts to the logs: what the keeper asks for is compared, appended and awaited here.
//!
//! One keeper per broker, because this broker owns every partition and coordinates every group. Its
//! epoch is the broker's life. Owns the clock of grace; deciding is `lane_core::CutKeeper`'s.

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
use crate::partition::Partition;
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
    started: Instant,
    inner: Mutex<Inner>,
    /// Rises with every answer.
    answered: watch::Sender<u64>,
    /// The keeper has a new deadline.
    wake: Notify,
}

/// What is decided together: a listing must never bring an older assignment back.
struct Inner {
    keeper: CutKeeper<Place>,
    /// What each lane's group holds, by the names that assignments carry.
    held: BTreeMap<(GroupId, Lane), Held>,
}

type Held = BTreeSet<(TopicName, PartitionIndex)>;

/// How long an assignment waits for its cuts.
const READY_MAX: Duration = Duration::from_secs(10);
/// How often what the logs say is compared with what is assigned.
const LIST_EVERY: Duration = Duration::from_secs(60);

impl Cuts {
    pub fn new(owned: Owned, epoch: i32, grace: Duration) -> Arc<Cuts> {
        Arc::new(Cuts {
            owned,
            started: Instant::now(),
            inner: Mutex::new(Inner {
                keeper: CutKeeper::new(epoch, grace.as_millis() as u64),
                held: BTreeMap::new(),
            }),
            answered: watch::Sender::new(0),
            wake: Notify::new(),
        })
    }

    /// Follows deadlines, and lists what the logs say at first and every minute, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let mut list_at = Instant::now();
        while !stop.is_cancelled() {
            if Instant::now() >= list_at {
                self.reconcile();
                list_at = Instant::now() + LIST_EVERY;
            }
            let asks = self.inner.lock().keeper.tick(self.now());
            self.send(asks);
            let next =
                self.inner.lock().keeper.next_tick().map(|ms| self.started + Duration::from_millis(ms));
            let until = next.map_or(list_at, |at| at.min(list_at));
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                () = self.wake.notified() => {}
                () = stop.cancelled() => {}
            }
        }
    }

    /// The members of (group, lane) now hold exactly `held`. Ready when all of it is activated,
    /// durably; an error if that takes too long.
    pub fn assign(
        self: &Arc<Self>,
        group: &GroupId,
        lane: &Lane,
        held: Held,
        clean: bool,
    ) -> impl Future<Output = Result<(), ErrorCode>> + Send + use<> {
        let places = self.places(&held);
        let key = (group.clone(), lane.clone());
        let asks = {
            let mut inner = self.inner.lock();
            if held.is_empty() {
                inner.held.remove(&key);
            } else {
                inner.held.insert(key.clone(), held);
            }
            inner.keeper.assign(group, lane, &places, clean, self.now())
        };
        self.send(asks);
        self.wake.notify_one();
        let cuts = self.clone();
        async move {
            let (group, lane) = key;
            let mut answered = cuts.answered.subscribe();
            let ready = answered.wait_for(|_| cuts.inner.lock().keeper.ready(&group, &lane));
            match tokio::time::timeout(READY_MAX, ready).await {
                Ok(Ok(_)) => Ok(()),
                Ok(Err(_)) | Err(_) => {
                    tracing::warn!(%group, %lane, "an assignment waits in vain for its lane cuts");
                    Err(ErrorCode::RebalanceInProgress)
                }
            }
        }
    }

    /// Compares what the logs say with what is assigned: what is assigned but closed is activated
    /// again, what is open and unknown goes into grace.
    pub fn reconcile(self: &Arc<Self>) {
        let all = (self.owned.all)();
        let live: BTreeSet<(TopicName, TopicId)> =
            all.iter().map(|p| (p.topic.clone(), p.topic_id)).collect();
        let listings: Vec<_> =
            all.iter().map(|p| (Place::of(p), p.with_fold(|fold| fold.lanes.rules()))).collect();
        let mut asks = Vec::new();
        let mut inner = self.inner.lock();
        let Inner { keeper, held } = &mut *inner;
        keeper.forget(|place| !live.contains(&(place.topic.clone(), place.topic_id)));
        for (place, rules) in &listings {
            for (group, lane, known) in rules.group_lanes() {
                let open = known.open().is_some();
                asks.extend(keeper.listed(group, lane, place, known.last_marker, open, self.now()));
            }
        }
        for ((group, lane), held) in held.iter() {
            let places = self.places(held);
            asks.extend(keeper.assign(group, lane, &places, false, self.now()));
        }
        drop(inner);
        self.send(asks);
    }

    /// Deactivates whatever is open of a lane; ready when nothing is, durably.
    pub async fn close_lane(self: &Arc<Self>, lane: &Lane) -> Result<(), CloseError> {
        self.inner.lock().held.retain(|(_, l), _| l != lane);
        self.reconcile();
        let asks = self.inner.lock().keeper.close_lane(lane, self.now());
        self.send(asks);
        self.wake.notify_one();
        let mut answered = self.answered.subscribe();
        let closed = answered.wait_for(|_| !self.inner.lock().keeper.lane_busy(lane));
        match tokio::time::timeout(READY_MAX, closed).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(CloseError(lane.clone())),
        }
    }

    /// Whether the group's members of this lane hold the partition now.
    pub fn is_held(&self, group: &GroupId, lane: &Lane, topic: &TopicName, index: PartitionIndex) -> bool {
        let inner = self.inner.lock();
        inner.held.get(&(group.clone(), lane.clone())).is_some_and(|h| h.contains(&(topic.clone(), index)))
    }

    /// Every partition that members of the group in the lane hold.
    pub fn held_by(&self, group: &GroupId, lane: &Lane) -> Vec<(TopicName, PartitionIndex)> {
        let inner = self.inner.lock();
        inner.held.get(&(group.clone(), lane.clone())).into_iter().flatten().cloned().collect()
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Partitions of topics with lanes; the others have no intervals.
    fn places(&self, held: &Held) -> BTreeSet<Place> {
        let place = |(topic, index): &(TopicName, PartitionIndex)| {
            let partition = (self.owned.find)(topic, *index)?;
            let on = partition.with_fold(|fold| !fold.lanes.extractors().is_empty());
            on.then(|| Place::of(&partition))
        };
        held.iter().filter_map(place).collect()
    }

    /// Appends every cut now, in order, and waits for each in a task of its own. There are never more
    /// than two per (group, lane, partition).
    fn send(self: &Arc<Self>, asks: Vec<Ask<Place>>) {
        for ask in asks {
            let cuts = self.clone();
            match self.append(&ask) {
                Ok((partition, at)) => drop(tokio::spawn(async move {
                    let answer = match partition.wait_durable(at.plus(1)).await {
                        Ok(()) => CutAnswer::Done(at),
                        Err(_) => CutAnswer::Failed,
                    };
                    cuts.take_answer(&ask, answer);
                })),
                // Answered in a task too, so that a cut that fails at once cannot loop here.
                Err(answer) => drop(tokio::spawn(async move { cuts.take_answer(&ask, answer) })),
            }
        }
    }

    /// What the coordinator before this one would have sent before it heard of the activate.
    fn send_stale(&self, activate: &Ask<Place>) {
        let cut = Cut { coordinator_epoch: activate.cut.coordinator_epoch - 1, ..activate.cut.clone() };
        let stale = Ask { kind: CutKind::Deactivate, cut, partition: activate.partition.clone() };
        let accepted = self.append(&stale).is_ok();
        tracing::warn!(partition = %stale.partition.topic, accepted, "a stale cut was sent, for a test");
    }

    fn append(&self, ask: &Ask<Place>) -> Result<(Arc<Partition>, Offset), CutAnswer> {
        let Place { topic, topic_id, index } = &ask.partition;
        let found = (self.owned.find)(topic, *index).filter(|p| p.topic_id == *topic_id);
        let partition = found.ok_or(CutAnswer::Failed)?;
        if switches::lane_markers_off() {
            let end = partition.watermarks().log_end;
            return Ok((partition, Offset(end.0 - 1)));
        }
        let marker = match ask.kind {
            CutKind::Activate => Marker::LaneActivate(ask.cut.written()),
            CutKind::Deactivate => Marker::LaneDeactivate(ask.cut.written()),
        };
        let check = |fold: &broker_core::Fold| match switches::compare_and_append_off() {
            true => Ok(()),
            false => fold.lanes.check(&ask.cut),
        };
        match partition.append_marker(&marker, clock::now(), check) {
            Ok(Ok(at)) => {
                let (group, lane) = (&ask.cut.group, &ask.cut.lane);
                tracing::info!(%partition, %group, %lane, kind = ?ask.kind, offset = at.0, "lane cut");
                Ok((partition, at))
            }
            Ok(Err(refused)) => Err(CutAnswer::Refused(refused)),
            Err(error) => {
                tracing::warn!(%partition, %error, "a lane cut was not appended; it is tried again");
                Err(CutAnswer::Failed)
            }
        }
    }

    fn take_answer(self: &Arc<Self>, ask: &Ask<Place>, answer: CutAnswer) {
        if switches::stale_cuts() && ask.kind == CutKind::Activate && matches!(answer, CutAnswer::Done(_)) {
            self.send_stale(ask);
        }
        let now = self.now();
        let asks = {
            let keeper = &mut self.inner.lock().keeper;
            keeper.answered(&ask.cut.group, &ask.cut.lane, &ask.partition, ask.kind, answer, now)
        };
        self.answered.send_modify(|n| *n += 1);
        self.send(asks);
        self.wake.notify_one();
    }
}

/// Cuts of a lane that is being deleted did not become durable in time; try again.
#[derive(Debug, thiserror::Error)]
#[error("lane {0} could not be closed in every partition yet; try again")]
pub struct CloseError(Lane);

impl Place {
    fn of(partition: &Partition) -> Place {
        let topic = partition.topic.clone();
        Place { topic, topic_id: partition.topic_id, index: partition.index }
    }
}
