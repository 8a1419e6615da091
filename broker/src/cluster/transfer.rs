//! How partitions change hands: released into objects by a living owner, or read out of a dead owner's
//! log; opened, recorded, served.
//!
//! A record is changed only by whoever it names, under the epoch that it names, guarded by the life's
//! registration. A heir that could not record what it read forgets it again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use broker_store::shared::{Inheritance, Shared};
use broker_store::{Life, MetaError, MetaStore, Remote, SegmentStore, StoreError, StorePath};
use kafka::{LeaderEpoch, PartitionIndex, TopicId};
use tokio::time::Instant;

use super::View;
use super::member::{Living, Member, Taking, json};
use super::objects::{AssignmentObject, PartitionObject, assignment_key};
use crate::broker::{Broker, OpenError, side_by_side};
use crate::clock;
use crate::partition::{self, Partition};
use crate::waiting;

impl Member {
    /// Hands over what the controller wants to be elsewhere.
    pub(super) async fn hand_over(&self, living: &mut Living, view: &View) -> Result<bool, MetaError> {
        let mut leaving = Vec::new();
        for ((topic, index), open) in &living.owned {
            let record = view.partition(*topic, *index);
            let to = record.filter(|record| record.epoch == open.epoch.0).and_then(|record| record.moving_to);
            if let Some(to) = to {
                leaving.push((*topic, *index, Some(to)));
            }
        }
        let mut all = true;
        for some in leaving.chunks(RELEASED_AT_ONCE) {
            all &= self.hand_some_over(living, some).await?;
        }
        Ok(all)
    }

    /// Everything of these partitions goes into objects, then the records name the next owners (`None`: whom
    /// the controller chooses). From the moment one is closed clients are told to look again.
    async fn hand_some_over(
        &self,
        living: &mut Living,
        leaving: &[(TopicId, i32, Option<i32>)],
    ) -> Result<bool, MetaError> {
        let mut releases = Vec::new();
        for (topic, index, to) in leaving {
            let Some(open) = living.owned.get(&(*topic, *index)).cloned() else { continue };
            self.stop_serving(&open);
            releases.push(self.release(living.shared.clone(), open, *to));
        }
        let mut all = true;
        let mut by_topic: BTreeMap<TopicId, Vec<(Arc<Partition>, Option<i32>)>> = BTreeMap::new();
        for released in futures_util::future::join_all(releases).await {
            match released {
                Some((open, to)) => by_topic.entry(open.topic_id).or_default().push((open, to)),
                None => all = false,
            }
        }
        for (topic, partitions) in by_topic {
            let wanted: Vec<_> = partitions.iter().map(|(open, _)| (open.index.0, open.epoch)).collect();
            let next: BTreeMap<i32, Option<i32>> =
                partitions.iter().map(|(open, to)| (open.index.0, *to)).collect();
            let life = living.life.to_string();
            let moved = |index: i32, record: &mut PartitionObject| {
                let manifest = manifest_name(topic, index, LeaderEpoch(record.epoch));
                record.owner = next.get(&index).copied().flatten();
                record.epoch += 1;
                // Until the heir is on record: what the manifest refers to may be in packs of this life.
                record.lives = vec![life.clone()];
                record.manifest = Some(manifest.to_string());
                record.moving_to = None;
                record.taken = false;
            };
            self.record(living, topic, &wanted, moved).await?;
            for (open, to) in partitions {
                tracing::debug!(partition = %open, to, "a partition is handed over");
                living.owned.remove(&(topic, open.index.0));
                // Where the record was not ours to change any more, the heir reads this life's log. It is
                // forgotten only when the record says that nobody will.
                living.bequeathed.insert((topic, open.index.0), open);
            }
        }
        Ok(all)
    }

    /// Brings a partition into objects and writes its manifest. Nothing if that has to be tried again.
    async fn release(
        &self,
        shared: Arc<Shared>,
        open: Arc<Partition>,
        to: Option<i32>,
    ) -> Option<(Arc<Partition>, Option<i32>)> {
        let (remote, partition) = (self.stores.remote.clone(), open.clone());
        let object = manifest_name(open.topic_id, open.index.0, open.epoch);
        let released = waiting::blocking(move || {
            partition.release(clock::now());
            let manifest = shared.release(partition.directory())?;
            match remote.put(&object, manifest) {
                // From an attempt whose record was not written.
                Ok(()) | Err(StoreError::AlreadyExists) => Ok(()),
                Err(error) => Err(error),
            }
        });
        match released.await? {
            Ok(()) => Some((open, to)),
            Err(error) => {
                tracing::warn!(partition = %open, %error, "a partition cannot be handed over yet");
                None
            }
        }
    }

    /// Reads what former owners left, opens it, records it, serves it.
    pub(super) async fn take_over(
        &self,
        living: &mut Living,
        missing: Vec<Taking>,
    ) -> Result<bool, MetaError> {
        let mut all = true;
        let (mut adopts, mut open) = (Vec::new(), Vec::new());
        let mut manifests = HashMap::new();
        for taking in missing {
            if let Some(manifest) = &taking.record.manifest {
                manifests.insert((taking.topic.id, taking.index), manifest.clone());
            }
            // It comes back: what is said of it from now on is not of the time before.
            living.bequeathed.remove(&(taking.topic.id, taking.index));
            match self.adoption(living.life, &taking).await {
                Ok(Some(adopt)) => adopts.push((adopt, taking)),
                Ok(None) => open.push(taking),
                Err(error) => {
                    all = false;
                    tracing::warn!(topic = %taking.topic.name, index = taking.index, %error, "a manifest cannot be read yet");
                }
            }
        }
        let (broker, shared) = (self.broker.clone(), living.shared.clone());
        let opened = waiting::blocking(move || {
            let (adopted, whole) = adopt_what_can_be(&shared, adopts);
            open.extend(adopted);
            (open_all(&broker, &shared, open), whole)
        });
        let Some((opened, whole)) = opened.await else { return Ok(false) };
        all &= whole;
        let (by_topic, whole) = by_topic(&living.shared, opened);
        all &= whole;
        let life = living.life.to_string();
        let mut failed = None;
        for (topic, partitions) in by_topic {
            let wanted: Vec<_> = partitions.iter().map(|open| (open.index.0, open.epoch)).collect();
            let taken = |_: i32, record: &mut PartitionObject| {
                record.lives = vec![life.clone()];
                record.manifest = None;
                record.taken = true;
            };
            let recorded = self.record(living, topic, &wanted, taken).await;
            let Ok(recorded) = recorded else {
                // It may be on record all the same: it stays in the log, and is opened again when that is known.
                partitions.iter().for_each(|open| open.close());
                failed = failed.or(recorded.err());
                continue;
            };
            if let Some(first) = partitions.first() {
                let (topic, count) = (&first.topic, recorded.len());
                tracing::info!(%topic, partitions = count, "partitions are taken over and served here");
            }
            for open in partitions {
                let manifest = manifests.remove(&(topic, open.index.0));
                match recorded.contains(&open.index.0) {
                    true => self.serve_opened(living, open, manifest).await,
                    false => {
                        open.close();
                        let (shared, dir) = (living.shared.clone(), open.directory().clone());
                        let _ = waiting::blocking(move || shared.disown(&dir)).await;
                    }
                }
            }
        }
        failed.map_or(Ok(all), Err)
    }

    /// It is on record as this life's: whatever it was read from is needed no longer.
    async fn serve_opened(&self, living: &mut Living, open: Arc<Partition>, manifest: Option<String>) {
        living.shared.confirm(std::slice::from_ref(open.directory()));
        if let Some(manifest) = manifest {
            remove_manifest(&self.stores.remote, manifest);
        }
        living.owned.insert((open.topic_id, open.index.0), open.clone());
        self.broker.judge_as_set(&open).await;
        self.broker.serve_partition(open);
    }

    async fn adoption(&self, life: Life, taking: &Taking) -> Result<Option<Inheritance>, StoreError> {
        let record = &taking.record;
        if record.is_served_by(life) || (record.lives.is_empty() && record.manifest.is_none()) {
            return Ok(None);
        }
        let manifest = match &record.manifest {
            None => None,
            Some(name) => {
                let damaged = |_| StoreError::Corrupt(format!("{name:?} is no name of a manifest"));
                let (remote, name) = (self.stores.remote.clone(), StorePath::parse(name).map_err(damaged)?);
                let read = waiting::blocking(move || remote.get(&name, 0, MANIFEST_BYTES_MAX));
                Some(read.await.ok_or_else(|| StoreError::Io("interrupted".to_owned()))??)
            }
        };
        let dir = partition::directory(taking.topic.id, &taking.topic.name, PartitionIndex(taking.index));
        let named = record.lives.iter().map(|life| Life::parse(life));
        let lives = named
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| StoreError::Corrupt("a life's name".to_owned()))?;
        Ok(Some(Inheritance { dir, lives, manifest }))
    }

    /// Changes the records of partitions that are this broker's under exactly these epochs; those that
    /// it changed. Guarded by the registration, tried again when somebody else wrote.
    async fn record(
        &self,
        living: &Living,
        topic: TopicId,
        wanted: &[(i32, LeaderEpoch)],
        change: impl Fn(i32, &mut PartitionObject),
    ) -> Result<Vec<i32>, MetaError> {
        let key = assignment_key(topic);
        let guard = (living.registered.0.as_str(), living.registered.1);
        loop {
            let Some((value, version)) = self.stores.meta.get(&key).await? else { return Ok(Vec::new()) };
            let damaged = |error: serde_json::Error| MetaError::Corrupt(format!("object {key}: {error}"));
            let mut object: AssignmentObject = serde_json::from_slice(&value).map_err(damaged)?;
            let mut changed = Vec::new();
            for (index, epoch) in wanted {
                let record = object.partitions.get_mut(usize::try_from(*index).unwrap_or(usize::MAX));
                let mine = |record: &&mut PartitionObject| {
                    record.owner == Some(living.life.broker) && record.epoch == epoch.0
                };
                if let Some(record) = record.filter(mine) {
                    change(*index, record);
                    changed.push(*index);
                }
            }
            if changed.is_empty() {
                return Ok(changed);
            }
            match self.stores.meta.put_guarded(&key, json(&object)?, Some(version), guard).await {
                Ok(_) => return Ok(changed),
                Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// At a stop: everything into objects, so that heirs need not read this life's log. What that takes too
    /// long for they read all the same.
    pub(super) async fn hand_back(&self, living: &mut Living) {
        let owned: Vec<_> = living.owned.keys().map(|(topic, index)| (*topic, *index, None)).collect();
        let end = Instant::now() + HAND_BACK_MAX;
        for some in owned.chunks(RELEASED_AT_ONCE) {
            let handed = match end > Instant::now() {
                true => self.hand_some_over(living, some).await.map_err(|error| error.to_string()),
                false => Err(format!("not done within {HAND_BACK_MAX:?}")),
            };
            if let Err(reason) = handed {
                let left = living.owned.len();
                tracing::warn!(left, reason, "the rest is taken over from this broker's log");
                return;
            }
        }
    }
}

/// Partitions that are brought into objects side by side. All of one group are without an owner until the last of
/// them is ready.
const RELEASED_AT_ONCE: usize = 16;
/// Well below what a service has to stop.
const HAND_BACK_MAX: Duration = Duration::from_secs(12);

/// Largest manifest.
const MANIFEST_BYTES_MAX: usize = 64 << 20;

/// `manifests/<topic id>/<partition>-<epoch>`.
pub(super) fn manifest_name(topic: TopicId, index: i32, epoch: LeaderEpoch) -> StorePath {
    StorePath::parse(&format!("manifests/{}/{index}-{}", topic.0, epoch.0))
        .expect("ids and numbers are legal names")
}

/// Takes directories over together; where one of them cannot be, each by itself, so that it keeps nobody
/// from the others. Whether all were. Blocks.
fn adopt_what_can_be(shared: &Shared, adopts: Vec<(Inheritance, Taking)>) -> (Vec<Taking>, bool) {
    let all: Vec<Inheritance> = adopts.iter().map(|(adopt, _)| adopt.clone()).collect();
    match shared.adopt(&all) {
        Ok(_) => return (adopts.into_iter().map(|(_, taking)| taking).collect(), true),
        Err(error) if error.is_retryable() || error.ends_writer() => {
            tracing::warn!(%error, "partitions of a former owner cannot be taken over yet");
            return (Vec::new(), false);
        }
        Err(_) => {}
    }
    let mut adopted = Vec::new();
    for (adopt, taking) in adopts {
        match shared.adopt(std::slice::from_ref(&adopt)) {
            Ok(_) => adopted.push(taking),
            Err(error) => {
                tracing::error!(partition = %adopt.dir, %error, "a partition of a former owner cannot be taken over");
            }
        }
    }
    (adopted, false)
}

type ByTopic = HashMap<TopicId, Vec<Arc<Partition>>>;

/// What could be opened, by topic, and whether that is all.
fn by_topic(shared: &Shared, opened: Vec<Result<Arc<Partition>, OpenError>>) -> (ByTopic, bool) {
    let (mut by_topic, mut all) = (ByTopic::new(), true);
    for opened in opened {
        match opened {
            Ok(partition) => by_topic.entry(partition.topic_id).or_default().push(partition),
            Err(error) if shared.lost().is_some() => {
                tracing::debug!(%error, "this life is over while it opens a partition");
                all = false;
            }
            Err(error) => {
                tracing::error!(%error, "a partition cannot be opened and is not served");
                all = false;
            }
        }
    }
    (by_topic, all)
}

/// What a former owner left to be read is read, and on record as read.
fn remove_manifest(remote: &Arc<dyn Remote>, name: String) {
    let remote = remote.clone();
    tokio::spawn(waiting::blocking(move || {
        let Ok(path) = StorePath::parse(&name) else { return };
        if let Err(error) = remote.delete(&path) {
            tracing::debug!(%name, %error, "a manifest that was read stays until the controller finds it");
        }
    }));
}

/// Opens partitions side by side. Blocks.
fn open_all(
    broker: &Arc<Broker>,
    shared: &Arc<Shared>,
    missing: Vec<Taking>,
) -> Vec<Result<Arc<Partition>, OpenError>> {
    let store: Arc<dyn SegmentStore> = shared.clone();
    let open = |taking: &Taking| {
        let topic = &taking.topic;
        let under = (LeaderEpoch(taking.record.epoch), store.clone());
        broker.open_under(&topic.name, topic.id, taking.index, &topic.settings, under)
    };
    let each = |at: i32| Ok::<_, std::convert::Infallible>(open(&missing[at as usize]));
    let Ok(opened) = side_by_side(0..missing.len() as i32, each);
    opened
}
