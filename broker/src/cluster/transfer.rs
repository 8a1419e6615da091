//! How partitions change hands: released into objects by a living owner, or read out of a dead owner's
//! log; opened, recorded, served.
//!
//! A record is changed only by whoever it names, under the epoch that it names, guarded by the life's
//! registration. A heir that could not record what it read forgets it again.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use broker_store::shared::{Inheritance, Shared};
use broker_store::{Life, MetaError, MetaStore, Remote, SegmentStore, StoreError, StorePath};
use bytes::Bytes;
use kafka::{LeaderEpoch, PartitionIndex, TopicId};
use tokio::time::Instant;

use super::member::{Living, Member, Taking, json};
use super::objects::{AssignmentObject, PartitionObject, assignment_key};
use super::{View, manifest};
use crate::broker::{Broker, OpenError};
use crate::partition::{self, Partition};
use crate::waiting::{self, side_by_side};

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
        let mut groups: BTreeMap<TopicId, Leaving> = BTreeMap::new();
        for (topic, index, to) in leaving {
            let Some(open) = living.owned.get(&(*topic, *index)).cloned() else { continue };
            self.stop_serving(&open);
            groups.entry(*topic).or_default().push((open, *to));
        }
        living.hand_overs += 1;
        let (remote, shared) = (self.stores.remote.clone(), living.shared.clone());
        let (life, number) = (living.life, living.hand_overs);
        let left = waiting::blocking(move || {
            let closed: Vec<_> = groups.values().flatten().map(|(open, _)| open.clone()).collect();
            let close = |at: usize| closed[at].release();
            side_by_side(closed.len(), WAITING_AT_ONCE, close);
            leave(&remote, &shared, groups, (life, number))
        });
        let Some((left, all)) = left.await else { return Ok(false) };
        for Left { topic, manifest, partitions } in left {
            let wanted: Vec<_> = partitions.iter().map(|(open, _)| (open.index.0, open.epoch)).collect();
            let next: BTreeMap<i32, Option<i32>> =
                partitions.iter().map(|(open, to)| (open.index.0, *to)).collect();
            let moved = |index: i32, record: &mut PartitionObject| {
                record.owner = next.get(&index).copied().flatten();
                record.epoch += 1;
                // Until the heir is on record: what the manifest refers to may be in packs of this life.
                record.lives = vec![life.to_string()];
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

    /// Reads what former owners left, opens it, records it, serves it.
    pub(super) async fn take_over(
        &self,
        living: &mut Living,
        missing: Vec<Taking>,
    ) -> Result<bool, MetaError> {
        let mut all = true;
        let (mut adopts, mut open) = (Vec::new(), Vec::new());
        let mut named = HashMap::new();
        for taking in missing.iter().filter(|taking| !taking.record.is_served_by(living.life)) {
            if let Some(manifest) = &taking.record.manifest {
                named.insert((taking.topic.id, taking.index), manifest.clone());
            }
        }
        let Some(manifests) = self.manifests(named.values()).await else { return Ok(false) };
        for taking in missing {
            // It comes back: what is said of it from now on is not of the time before.
            living.bequeathed.remove(&(taking.topic.id, taking.index));
            match adoption(living.life, &taking, &manifests) {
                Ok(Some(adopt)) => adopts.push((adopt, taking)),
                Ok(None) => open.push(taking),
                Err(error) => {
                    all = false;
                    // A manifest is of many partitions, and looked for again and again.
                    let name = taking.record.manifest.clone().unwrap_or_default();
                    if living.told.insert(name) {
                        tracing::warn!(topic = %taking.topic.name, index = taking.index, %error, "a manifest cannot be read yet");
                    }
                }
            }
        }
        let mut failed = None;
        for adopts in by_source(adopts, &living.unread) {
            let lives = adopts.first().filter(|(adopt, _)| adopt.manifest.is_none());
            let lives = lives.map(|(adopt, _)| adopt.lives.clone());
            let (some, outcome) =
                self.take_some_over(living, std::mem::take(&mut open), adopts, &named).await;
            all &= some;
            failed = failed.or(outcome.err());
            if let Some(lives) = lives {
                if some {
                    living.unread.remove(&lives)
                } else {
                    living.unread.insert(lives)
                };
            }
        }
        failed.map_or(Ok(all), Err)
    }

    /// Those that are here already, and those of one source. Whether that is all of them.
    async fn take_some_over(
        &self,
        living: &mut Living,
        mut open: Vec<Taking>,
        adopts: Vec<(Inheritance, Taking)>,
        named: &HashMap<(TopicId, i32), String>,
    ) -> (bool, Result<(), MetaError>) {
        let (broker, shared, life) = (self.broker.clone(), living.shared.clone(), living.life);
        let opened = waiting::blocking(move || {
            let (adopted, whole) = adopt_what_can_be(&shared, adopts);
            open.extend(adopted);
            (open_all(&broker, &shared, life, open), whole)
        });
        let Some((opened, adopted)) = opened.await else { return (false, Ok(())) };
        let (by_topic, all) = by_topic(&living.shared, opened);
        let mut failed = None;
        for (topic, partitions) in by_topic {
            if let Err(error) = self.take_possession(living, topic, partitions, named).await {
                failed = failed.or(Some(error));
            }
        }
        (adopted && all, failed.map_or(Ok(()), Err))
    }

    /// Records partitions of one topic that were read and opened, and serves those that are this life's now.
    async fn take_possession(
        &self,
        living: &mut Living,
        topic: TopicId,
        partitions: Vec<Arc<Partition>>,
        named: &HashMap<(TopicId, i32), String>,
    ) -> Result<(), MetaError> {
        let life = living.life.to_string();
        let wanted: Vec<_> = partitions.iter().map(|open| (open.index.0, open.epoch)).collect();
        let taken = |_: i32, record: &mut PartitionObject| {
            record.lives = vec![life.clone()];
            record.manifest = None;
            record.taken = true;
        };
        let (recorded, object) = match self.record(living, topic, &wanted, taken).await {
            Ok(recorded) => recorded,
            Err(error) => {
                // It may be on record all the same: it stays in the log, and is opened again when that is known.
                partitions.iter().for_each(|open| open.close());
                return Err(error);
            }
        };
        if let Some(first) = partitions.first() {
            let (topic, count) = (&first.topic, recorded.len());
            tracing::info!(%topic, partitions = count, "partitions are taken over and served here");
        }
        let mut read = BTreeSet::new();
        for open in partitions {
            match recorded.contains(&open.index.0) {
                true => {
                    read.extend(named.get(&(topic, open.index.0)).cloned());
                    self.serve_opened(living, open).await;
                }
                false => {
                    open.close();
                    // An answer that was lost, and a later change: the heir of this life reads its log.
                    if object.as_ref().is_some_and(|object| object.names(open.index.0, &life)) {
                        living.bequeathed.insert((topic, open.index.0), open);
                        continue;
                    }
                    let (shared, dir) = (living.shared.clone(), open.directory().clone());
                    let _ = waiting::blocking(move || shared.disown(&dir)).await;
                }
            }
        }
        read.retain(|name| object.as_ref().is_none_or(|object| !manifest::is_named(object, name)));
        remove_manifests(&self.stores.remote, read);
        Ok(())
    }

    /// It is on record as this life's: whatever it was read from is needed no longer.
    async fn serve_opened(&self, living: &mut Living, open: Arc<Partition>) {
        living.shared.confirm(std::slice::from_ref(open.directory()));
        living.owned.insert((open.topic_id, open.index.0), open.clone());
        self.broker.judge_as_set(&open).await;
        self.broker.serve_partition(open);
    }

    /// Each of them once, several at a time.
    async fn manifests(&self, names: impl Iterator<Item = &String>) -> Option<Manifests> {
        let names: BTreeSet<String> = names.cloned().collect();
        let remote = self.stores.remote.clone();
        waiting::blocking(move || {
            let names: Vec<String> = names.into_iter().collect();
            let read = side_by_side(names.len(), OBJECTS_AT_ONCE, |at| manifest::read(&remote, &names[at]));
            names.into_iter().zip(read).collect()
        })
        .await
    }

    /// Changes the records of partitions that are this broker's under exactly these epochs; those that
    /// it changed, and all of the topic. Guarded by the registration, tried again when somebody else wrote.
    async fn record(
        &self,
        living: &Living,
        topic: TopicId,
        wanted: &[(i32, LeaderEpoch)],
        change: impl Fn(i32, &mut PartitionObject),
    ) -> Result<(Vec<i32>, Option<AssignmentObject>), MetaError> {
        let key = assignment_key(topic);
        let guard = (living.registered.0.as_str(), living.registered.1);
        loop {
            let Some((value, version)) = self.stores.meta.get(&key).await? else {
                return Ok((Vec::new(), None));
            };
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
                return Ok((changed, Some(object)));
            }
            match self.stores.meta.put_guarded(&key, json(&object)?, Some(version), guard).await {
                Ok(_) => return Ok((changed, Some(object))),
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
        for some in owned.chunks(manifest::PARTITIONS_MAX) {
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

/// Partitions that are brought into objects together while the broker goes on. All of them are without an owner
/// until the last is ready.
const RELEASED_AT_ONCE: usize = 64;
/// Partitions that wait side by side for what all of them share: a flush of the log.
const WAITING_AT_ONCE: usize = 64;
/// Objects that are read or written side by side.
const OBJECTS_AT_ONCE: usize = 8;
/// Well below what a service has to stop.
const HAND_BACK_MAX: Duration = Duration::from_secs(12);

/// What is closed, and who is to have it.
type Leaving = Vec<(Arc<Partition>, Option<i32>)>;
/// By name, what they say.
type Manifests = HashMap<String, Result<Bytes, StoreError>>;

/// Partitions of one topic that are in objects by now.
struct Left {
    topic: TopicId,
    manifest: StorePath,
    partitions: Leaving,
}

/// Brings closed partitions into objects and writes a manifest for each topic; where that cannot be done, each
/// partition by itself, so that it keeps nobody from the others. Whether all were. Blocks.
fn leave(
    remote: &Arc<dyn Remote>,
    shared: &Shared,
    groups: BTreeMap<TopicId, Leaving>,
    (life, number): (Life, u64),
) -> (Vec<Left>, bool) {
    let groups: Vec<(TopicId, Leaving)> = groups.into_iter().collect();
    let (states, mut all) = match release(shared, &groups) {
        Ok(states) => (groups.into_iter().zip(states).collect(), true),
        Err(error) => {
            tracing::warn!(%error, "partitions cannot be handed over together yet");
            let is_hopeless = error.is_retryable() || shared.lost().is_some();
            (if is_hopeless { Vec::new() } else { one_by_one(shared, groups) }, false)
        }
    };
    let put = |at: usize| {
        let ((topic, partitions), state): &((TopicId, Leaving), Bytes) = &states[at];
        let left: Vec<_> = partitions.iter().map(|(open, _)| (open.index.0, open.epoch)).collect();
        let name = manifest::name(*topic, life, number);
        remote.put(&name, manifest::encode(&left, state)).map(|()| name)
    };
    let put = side_by_side(states.len(), OBJECTS_AT_ONCE, put);
    let mut written = Vec::new();
    for (((topic, partitions), _), put) in states.into_iter().zip(put) {
        match put {
            Ok(manifest) => written.push(Left { topic, manifest, partitions }),
            Err(error) => {
                all = false;
                tracing::warn!(topic_id = %topic.0, %error, "the manifest of a hand-over cannot be written yet");
            }
        }
    }
    (written, all)
}

fn release(shared: &Shared, groups: &[(TopicId, Leaving)]) -> Result<Vec<Bytes>, StoreError> {
    let dirs = |partitions: &Leaving| partitions.iter().map(|(open, _)| open.directory().clone()).collect();
    let dirs: Vec<Vec<StorePath>> = groups.iter().map(|(_, partitions)| dirs(partitions)).collect();
    shared.release(&dirs.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// The first of each topic that can be released, as there is one manifest for each topic.
fn one_by_one(shared: &Shared, groups: Vec<(TopicId, Leaving)>) -> Vec<((TopicId, Leaving), Bytes)> {
    let mut released = Vec::new();
    for (topic, partitions) in groups {
        for one in partitions {
            let group = [(topic, vec![one])];
            match release(shared, &group) {
                Ok(states) => {
                    released.extend(group.into_iter().zip(states));
                    break;
                }
                Err(error) => {
                    let partition = &group[0].1[0].0;
                    tracing::warn!(%partition, %error, "a partition cannot be handed over yet");
                }
            }
        }
    }
    released
}

/// Where what a record says of a partition is to be found; `None` if it is here already, or new.
fn adoption(life: Life, taking: &Taking, manifests: &Manifests) -> Result<Option<Inheritance>, StoreError> {
    let record = &taking.record;
    if record.is_served_by(life) || (record.lives.is_empty() && record.manifest.is_none()) {
        return Ok(None);
    }
    let of_name = |name: &String| manifests.get(name).cloned().unwrap_or(Err(StoreError::NotFound));
    let manifest = record.manifest.as_ref().map(of_name).transpose()?;
    let dir = partition::directory(taking.topic.id, &taking.topic.name, PartitionIndex(taking.index));
    let named = record.lives.iter().map(|life| Life::parse(life));
    let lives =
        named.collect::<Option<Vec<_>>>().ok_or_else(|| StoreError::Corrupt("a life's name".to_owned()))?;
    Ok(Some(Inheritance { dir, lives, manifest }))
}

/// What was left in manifests, and then what each dead owner's log has, those last that could not be read before:
/// one that cannot be read keeps nobody from the others. The first part is there even if it is empty.
fn by_source<T>(adopts: Vec<(Inheritance, T)>, unread: &HashSet<Vec<Life>>) -> Vec<Vec<(Inheritance, T)>> {
    let mut left = Vec::new();
    let mut of_lives: BTreeMap<(bool, Vec<Life>), Vec<(Inheritance, T)>> = BTreeMap::new();
    for (adopt, taking) in adopts {
        match adopt.manifest {
            Some(_) => left.push((adopt, taking)),
            None => {
                let key = (unread.contains(&adopt.lives), adopt.lives.clone());
                of_lives.entry(key).or_default().push((adopt, taking));
            }
        }
    }
    std::iter::once(left).chain(of_lives.into_values()).collect()
}

/// Takes directories over together; where one of them cannot be, each by itself, so that it keeps nobody
/// from the others. Whether all were. Blocks.
fn adopt_what_can_be(shared: &Shared, adopts: Vec<(Inheritance, Taking)>) -> (Vec<Taking>, bool) {
    if adopts.is_empty() {
        return (Vec::new(), true);
    }
    let all: Vec<Inheritance> = adopts.iter().map(|(adopt, _)| adopt.clone()).collect();
    match shared.adopt(&all) {
        Ok(found) => {
            for (adopt, from) in all.iter().zip(found) {
                tracing::debug!(partition = %adopt.dir, lives = ?adopt.lives, ?from, "a partition is read");
            }
            return (adopts.into_iter().map(|(_, taking)| taking).collect(), true);
        }
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

/// What former owners left to be read is read, and on record as read.
fn remove_manifests(remote: &Arc<dyn Remote>, names: BTreeSet<String>) {
    if names.is_empty() {
        return;
    }
    let remote = remote.clone();
    tokio::spawn(waiting::blocking(move || {
        for name in names {
            let Ok(path) = StorePath::parse(&name) else { continue };
            if let Err(error) = remote.delete(&path) {
                tracing::debug!(%name, %error, "a manifest that was read stays until the controller finds it");
            }
        }
    }));
}

/// Opens partitions side by side. Blocks.
fn open_all(
    broker: &Arc<Broker>,
    shared: &Arc<Shared>,
    life: Life,
    missing: Vec<Taking>,
) -> Vec<Result<Arc<Partition>, OpenError>> {
    let store: Arc<dyn SegmentStore> = shared.clone();
    let open = |taking: &Taking| {
        let topic = &taking.topic;
        let under = (LeaderEpoch(taking.record.epoch), store.clone());
        let must_exist = taking.record.is_served_by(life);
        broker.open_under(&topic.name, topic.id, taking.index, &topic.settings, under, must_exist)
    };
    side_by_side(missing.len(), WAITING_AT_ONCE, |at| open(&missing[at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_manifests_comes_first_and_a_log_that_could_not_be_read_last() {
        let life = |broker| Life { broker, epoch: 1 };
        let one = |of: i32, manifest: bool| Inheritance {
            dir: StorePath::parse("t/p-0").unwrap(),
            lives: vec![life(of)],
            manifest: manifest.then(|| Bytes::from_static(b"m")),
        };
        let all = vec![(one(1, false), 'a'), (one(2, false), 'b'), (one(1, true), 'c'), (one(1, false), 'd')];
        let order = |unread: &[i32]| -> Vec<String> {
            let unread = unread.iter().map(|of| vec![life(*of)]).collect();
            let parts = by_source(all.clone(), &unread);
            parts.iter().map(|part| part.iter().map(|(_, name)| *name).collect()).collect()
        };
        assert_eq!(order(&[]), ["c", "ad", "b"]);
        assert_eq!(order(&[1]), ["c", "b", "ad"]);
        assert_eq!(
            by_source::<()>(Vec::new(), &HashSet::new()).len(),
            1,
            "those that are here already go with it"
        );
    }
}
