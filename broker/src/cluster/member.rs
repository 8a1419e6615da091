//! A broker as a member of its cluster: registers, takes partitions over, hands them over, and begins a
//! new life when its lease or its log is gone.
//!
//! One task. A partition is served only after the metadata store has recorded that this life took it
//! over, in a write that is guarded by this life's registration; before that, nothing that was written
//! here counts. What the view says may be old: epochs decide.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use broker_store::shared::{Lost, Options, Shared};
use broker_store::{Lease, Life, MetaError, MetaStore, SegmentStore, StoreError, Version};
use kafka::{TopicId, TopicName};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::loads::Meter;
use super::objects::{BrokerObject, IDS, IdObject, PartitionObject, broker_key};
use super::{Cluster, ClusterStores};
use crate::broker::Broker;
use crate::coordinator::OFFSETS_TOPIC;
use crate::partition::{Condition, Partition};
use crate::topics::Topic;
use crate::waiting;

/// Between two tries of what failed.
const RETRY: Duration = Duration::from_millis(200);
/// What could not be settled so often is tried less often.
const OFTEN: u32 = 50;
const RETRY_LATER: Duration = Duration::from_secs(2);
/// Between two attempts to begin a life.
const BEGIN_AGAIN_MAX: Duration = Duration::from_secs(2);
/// Looks again even when nothing was heard.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Keeps a broker's partitions as the cluster says.
pub struct Member {
    pub broker: Arc<Broker>,
    pub cluster: Arc<Cluster>,
    pub stores: ClusterStores,
    /// Whose broker id it is.
    pub identity: String,
    pub registration: BrokerObject,
    /// How long a broker that died is believed to live.
    pub lease: Duration,
    pub options: Options,
    /// True while this broker takes part.
    pub serving: watch::Sender<bool>,
}

/// One life, while it lasts.
pub(super) struct Living {
    pub life: Life,
    pub shared: Arc<Shared>,
    lease: Lease,
    /// Guards every record that this life writes.
    pub registered: (String, Version),
    pub owned: BTreeMap<(TopicId, i32), Arc<Partition>>,
    /// Closed, because somebody else was made the owner, and still in this life's log for him to read.
    pub bequeathed: BTreeMap<(TopicId, i32), Arc<Partition>>,
    /// Hand-overs that were tried.
    pub hand_overs: u64,
    /// As of the last look.
    topics: BTreeMap<TopicId, TopicName>,
    /// Former owners whose logs could not be read the last time.
    pub unread: HashSet<Vec<Life>>,
    /// Manifests of which it was said, since all was well, that they cannot be read.
    pub told: BTreeSet<String>,
}

/// Why a life ends, or does not begin.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the lease is lost")]
    Lease,
    #[error("its log cannot begin: {0}")]
    Begin(StoreError),
    #[error("its log takes no more blocks: {0:?}")]
    Log(Lost),
    #[error("metadata store: {0}")]
    Meta(#[from] MetaError),
    #[error("interrupted")]
    Interrupted,
}

/// A partition to be taken over.
#[derive(Clone)]
pub(super) struct Taking {
    pub topic: Arc<Topic>,
    pub index: i32,
    pub record: PartitionObject,
}

impl Member {
    /// Lives until `stop`, then hands back what it can.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut pause = RETRY;
        while !stop.is_cancelled() {
            let ended = self.live(&stop).await;
            self.serving.send_replace(false);
            let Err(error) = ended else { continue };
            tracing::warn!(broker = self.cluster.me, %error, "this life of the broker is over; it begins another");
            // A store that refuses every life is not asked again and again.
            pause = match error {
                Ended::Begin(_) => (2 * pause).min(BEGIN_AGAIN_MAX),
                _ => RETRY,
            };
            let _ = stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }

    async fn live(&mut self, stop: &CancellationToken) -> Result<(), Ended> {
        let Some(living) = stop.run_until_cancelled(self.begin()).await else { return Ok(()) };
        let mut living = living?;
        tracing::info!(life = %living.life, "this broker takes part in the cluster");
        let ended = self.serve(&mut living, stop).await;
        self.close_all(&mut living);
        living.lease.end();
        let shared = living.shared.clone();
        let _ = waiting::blocking(move || shared.close()).await;
        ended
    }

    /// Begins the log, then tells the others: whoever is told can end this life's log.
    async fn begin(&mut self) -> Result<Living, Ended> {
        let life = self.next_life().await?;
        let (remote, options) = (self.stores.remote.clone(), self.options.clone());
        let opened = waiting::blocking(move || Shared::open(remote, life, options)).await;
        let shared = opened.ok_or(Ended::Interrupted)?.map_err(Ended::Begin)?;
        let lease = self.stores.meta.lease(self.lease).await?;
        self.cluster.led_by(&shared, &lease);
        self.registration.life = life.epoch;
        let value = json(&self.registration)?;
        let key = broker_key(life.broker);
        let (began, mut is_told) = (Instant::now(), false);
        let version = loop {
            let mut watch = self.stores.meta.watch(&key).await?;
            match self.stores.meta.put_leased(&key, value.clone(), None, &lease).await {
                Ok(version) => break version,
                // The lease of the life before has not run out yet.
                Err(MetaError::Conflict { .. }) if began.elapsed() < 3 * self.lease || is_told => {}
                Err(MetaError::Conflict { .. }) => {
                    is_told = true;
                    tracing::warn!(
                        broker = life.broker,
                        identity = self.identity,
                        "a broker with this identity is alive elsewhere; this one waits for its end, or give it a \
                         `cluster.identity` or a data directory of its own"
                    );
                }
                Err(error) => return Err(error.into()),
            }
            tokio::select! {
                _ = watch.next() => {}
                () = lease.lost() => return Err(Ended::Lease),
                () = tokio::time::sleep(LOOK_AGAIN) => {}
            }
        };
        self.broker.lanes.begin_life(life.epoch);
        Ok(Living {
            life,
            shared,
            lease,
            registered: (key, version),
            owned: BTreeMap::new(),
            bequeathed: BTreeMap::new(),
            hand_overs: 0,
            topics: BTreeMap::new(),
            unread: HashSet::new(),
            told: BTreeSet::new(),
        })
    }

    async fn next_life(&self) -> Result<Life, MetaError> {
        let key = format!("{IDS}{}", self.identity);
        loop {
            let damaged = || MetaError::Corrupt(format!("object {key}"));
            let (value, version) = self.stores.meta.get(&key).await?.ok_or_else(damaged)?;
            let mut id: IdObject = serde_json::from_slice(&value).map_err(|_| damaged())?;
            id.lives += 1;
            match self.stores.meta.put_if(&key, json(&id)?, Some(version)).await {
                Ok(_) => return Ok(Life { broker: id.broker, epoch: id.lives }),
                Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn serve(&self, living: &mut Living, stop: &CancellationToken) -> Result<(), Ended> {
        let mut views = self.cluster.views.changes();
        let mut topics = self.broker.topics.changes();
        let (lease, shared) = (living.lease.clone(), living.shared.clone());
        let over = async {
            tokio::select! {
                () = lease_lost(&lease) => Ended::Lease,
                error = log_lost(&shared) => Ended::Log(error),
            }
        };
        tokio::pin!(over);
        let mut meter = Meter::new();
        let mut in_vain = 0_u32;
        loop {
            let settled = tokio::select! {
                settled = self.settle(living) => settled,
                ended = &mut over => return Err(ended),
            };
            let again = match settled {
                Ok(true) => {
                    in_vain = 0;
                    living.told.clear();
                    living.unread.clear();
                    LOOK_AGAIN
                }
                Ok(false) => {
                    in_vain += 1;
                    if in_vain < OFTEN { RETRY } else { RETRY_LATER }
                }
                Err(MetaError::GuardGone) => return Err(Ended::Lease),
                Err(error) => {
                    tracing::debug!(%error, "partitions are settled later");
                    RETRY
                }
            };
            self.serving.send_if_modified(|serving| !std::mem::replace(serving, true));
            tokio::select! {
                _ = views.changed() => {}
                _ = topics.changed() => {}
                () = tokio::time::sleep(again) => {}
                () = meter.due() => {
                    let (meta, me) = (&*self.stores.meta, living.life.broker);
                    if let Err(error) = meter.report(&living.owned, meta, me, &living.lease).await {
                        tracing::debug!(%error, "how much partitions are used is told later");
                    }
                }
                ended = &mut over => return Err(ended),
                () = stop.cancelled() => {
                    self.hand_back(living).await;
                    return Ok(());
                }
            }
        }
    }

    /// Makes what is served here agree with the view. False if something has to be tried again.
    async fn settle(&self, living: &mut Living) -> Result<bool, MetaError> {
        let view = self.cluster.views.now();
        self.let_go(living, &view).await;
        self.forget_offsets(living).await;
        let mut all = self.hand_over(living, &view).await?;
        let is_stuck = |open: &Arc<Partition>| {
            let record = view.partition(open.topic_id, open.index.0);
            let stays = record.is_some_and(|r| r.epoch == open.epoch.0 && r.moving_to.is_none());
            stays && open.condition() == Condition::Closed
        };
        if let Some(open) = living.owned.values().find(|open| is_stuck(open)) {
            tracing::warn!(partition = %open, "a hand-over was begun and called off; it is served again by another life");
            return Err(MetaError::GuardGone);
        }
        let mut missing = Vec::new();
        for topic in self.broker.topics.all() {
            let Some(assigned) = view.assignments.get(&topic.id) else { continue };
            for (index, record) in (0..).zip(&assigned.object.partitions) {
                let mine = record.owner == Some(living.life.broker) && topic.has_partition(index);
                let open = living.owned.get(&(topic.id, index));
                // A view of before its hand-over still names this life.
                let former = living.bequeathed.get(&(topic.id, index));
                // A served record of another life of this broker gets a new epoch from the controller first.
                let free = !record.taken || record.is_served_by(living.life);
                let is_new =
                    |held: Option<&Arc<Partition>>| held.is_none_or(|held| held.epoch.0 < record.epoch);
                if mine && free && is_new(open) && is_new(former) {
                    missing.push(Taking { topic: topic.clone(), index, record: record.clone() });
                }
            }
        }
        if !missing.is_empty() {
            all &= self.take_over(living, missing).await?;
        }
        self.serve_groups(living);
        for open in living.owned.values() {
            if let Some(topic) = self.broker.topics.by_id(open.topic_id)
                && *open.settings() != topic.settings
            {
                open.set_settings(topic.settings.clone());
            }
            self.broker.judge_as_set(open).await;
        }
        Ok(all)
    }

    /// Closes what is no longer this broker's: the topic is gone, or somebody else was made the owner.
    async fn let_go(&self, living: &mut Living, view: &super::View) {
        let mut gone = Vec::new();
        for ((topic, index), open) in &living.owned {
            // What is in memory may lag behind or be unreadable; only the store's word costs data.
            let is_deleted = self.broker.topics.by_id(*topic).is_none()
                && matches!(self.broker.topics.is_stored(open.topic.as_str(), *topic).await, Ok(false));
            let record = view.partition(*topic, *index);
            let elsewhere = !crate::switches::lease_check_off()
                && record.is_some_and(|record| {
                    record.epoch > open.epoch.0 && record.owner != Some(living.life.broker)
                });
            if is_deleted || elsewhere {
                gone.push((*topic, *index, is_deleted));
            }
        }
        for (topic, index, is_deleted) in gone {
            let Some(open) = living.owned.remove(&(topic, index)) else { continue };
            self.stop_serving(&open);
            open.close();
            if !is_deleted {
                living.bequeathed.insert((topic, index), open);
                continue;
            }
            self.end(living, &open, true).await;
        }
        let life = living.life.to_string();
        let mut read = Vec::new();
        for ((topic, index), open) in &living.bequeathed {
            match view.partition(*topic, *index) {
                // The heir, or the manifest, has it all.
                Some(record) if record.epoch > open.epoch.0 && !record.lives.contains(&life) => {
                    read.push((*topic, *index));
                }
                Some(_) => {}
                // A record that cannot be read is none that is gone.
                None => {
                    if matches!(self.broker.topics.is_stored(open.topic.as_str(), *topic).await, Ok(false)) {
                        read.push((*topic, *index));
                    }
                }
            }
        }
        for key in read {
            if let Some(open) = living.bequeathed.remove(&key) {
                self.end(living, &open, false).await;
            }
        }
    }

    /// Groups keep no offsets of topics that are gone, also where no partition of them was.
    async fn forget_offsets(&self, living: &mut Living) {
        let now: BTreeMap<TopicId, TopicName> =
            self.broker.topics.all().into_iter().map(|topic| (topic.id, topic.name.clone())).collect();
        let before = std::mem::take(&mut living.topics);
        for (id, name) in before {
            let is_gone = !now.contains_key(&id)
                && matches!(self.broker.topics.is_stored(name.as_str(), id).await, Ok(false));
            if is_gone {
                self.broker.coordinator.topic_deleted(&name).await;
            }
        }
        living.topics = now;
    }

    /// Removes a partition from this life's log, and its data with it if nobody is to have it.
    async fn end(&self, living: &Living, open: &Arc<Partition>, is_deleted: bool) {
        let (shared, dir) = (living.shared.clone(), open.directory().clone());
        let end = move || match is_deleted {
            // What was released, and not handed over, is not removed by a deletion.
            true => shared.delete(&dir).and_then(|()| shared.disown(&dir)),
            false => shared.disown(&dir),
        };
        if let Some(Err(error)) = waiting::blocking(end).await {
            tracing::warn!(partition = %open, %error, "what is left of a partition stays in the log");
        }
    }

    /// Shards of the groups whose partitions are here.
    fn serve_groups(&self, living: &Living) {
        let Some(topic) = self.broker.topics.by_name(OFFSETS_TOPIC) else { return };
        let here = living.owned.range((topic.id, 0)..=(topic.id, i32::MAX));
        self.broker
            .coordinator
            .serve(topic.partitions.max(1) as usize, here.map(|(_, open)| open.clone()).collect());
    }

    pub(super) fn stop_serving(&self, open: &Arc<Partition>) {
        if open.topic.as_str() == OFFSETS_TOPIC {
            self.broker.coordinator.stop_serving(open.index.0.max(0) as usize);
        }
        self.broker.forget_partition(open);
    }

    fn close_all(&self, living: &mut Living) {
        for open in std::mem::take(&mut living.owned).into_values() {
            self.stop_serving(&open);
            open.close();
        }
    }
}

async fn log_lost(shared: &Shared) -> Lost {
    loop {
        if let Some(error) = shared.lost() {
            return error;
        }
        tokio::time::sleep(LOST_CHECK).await;
    }
}

/// With its switch off, a broker goes on for long as if it had its lease.
async fn lease_lost(lease: &Lease) {
    lease.lost().await;
    if crate::switches::lease_check_off() {
        tokio::time::sleep(GOES_ON_WITHOUT_LEASE).await;
    }
}

/// Longer than a test needs a zombie; nobody else ends one that owns nothing.
const GOES_ON_WITHOUT_LEASE: Duration = Duration::from_secs(30);

/// Between two looks at the log. What is lost refuses every write meanwhile.
const LOST_CHECK: Duration = Duration::from_millis(20);

pub(super) fn json(object: &impl serde::Serialize) -> Result<Vec<u8>, MetaError> {
    serde_json::to_vec(object).map_err(|error| MetaError::Corrupt(error.to_string()))
}
