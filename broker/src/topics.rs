//! The topics of this region: their names, ids, partition counts and settings.
//!
//! A topic is one object `topics/<name>` in the metadata store, and `deleted-topics/<id>` from before its
//! end until its files are gone; nothing else writes them. What is in memory follows what is durable,
//! never the reverse; in a cluster every broker writes them, and memory follows the store. Opening and
//! deleting partition data is the business of whoever watches (`changes`) or called.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use broker_store::{Item, MetaError, MetaStore, Version};
use kafka::names::NameError;
use kafka::{ErrorCode, TopicId, TopicName};
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, MutexGuard, watch};
use uuid::Uuid;

use crate::cluster::Follow;
use crate::configs::{self, ConfigError, Overrides, TopicDefaults};
use crate::partition::Settings;

/// One topic as it is now; a change makes a new one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    pub name: TopicName,
    pub id: TopicId,
    pub partitions: i32,
    /// What was set for this topic; everything else follows the defaults.
    pub overrides: Overrides,
    pub created_ms: i64,
    /// When partitions or settings were last changed.
    pub altered_ms: i64,
    /// So many partitions were served once: their files must be there.
    pub opened: i32,
    pub settings: Settings,
}

/// A topic to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewTopic {
    pub name: String,
    /// -1: the broker's default.
    pub partitions: i32,
    pub overrides: Overrides,
}

/// Why a topic is not made or changed. The text is shown to people.
#[derive(Debug, thiserror::Error)]
pub enum TopicError {
    #[error("Topic '{0}' already exists.")]
    Exists(TopicName),
    #[error("This server does not host this topic-partition.")]
    Unknown,
    #[error("{0}")]
    Name(#[from] NameError),
    #[error("Topic '{new}' collides with existing topic: {existing}")]
    Collides { new: TopicName, existing: TopicName },
    #[error("Topic '{0}' is internal: the broker itself makes and keeps it.")]
    Internal(TopicName),
    #[error("Number of partitions was set to an invalid non-positive value.")]
    NoPartitions,
    #[error("{asked} partitions are more than the {max} that one topic may have.")]
    TooManyPartitions { asked: i32, max: i32 },
    #[error("The topic {name} currently has {current} partition(s); {asked} would not be an increase.")]
    NotAnIncrease { name: TopicName, current: i32, asked: i32 },
    #[error("Topic already has {0} partition(s).")]
    SameCount(i32),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Store(#[from] MetaError),
}

/// All topics. Reads take a short lock; changes are made one at a time.
pub struct TopicRegistry {
    store: Arc<dyn MetaStore>,
    defaults: TopicDefaults,
    default_partitions: i32,
    topics: RwLock<Topics>,
    changing: Mutex<()>,
    /// Held around a change that goes beyond the metadata.
    whole_change: Mutex<()>,
    generation: watch::Sender<u64>,
    /// Other brokers write the store too.
    is_shared: AtomicBool,
}

#[derive(Default)]
struct Topics {
    by_name: BTreeMap<TopicName, Stored>,
    names: HashMap<TopicId, TopicName>,
}

#[derive(Clone)]
struct Stored {
    topic: Arc<Topic>,
    version: Version,
}

/// The object in the metadata store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TopicObject {
    /// A UUID.
    id: String,
    partitions: i32,
    #[serde(default)]
    configs: Overrides,
    created_ms: i64,
    #[serde(default)]
    altered_ms: i64,
    #[serde(default)]
    opened: i32,
}

/// Most partitions of one topic.
pub const PARTITIONS_PER_TOPIC_MAX: i32 = 10_000;

const PREFIX: &str = "topics/";
const DELETED_PREFIX: &str = "deleted-topics/";

/// How long a change may take to come back from a store that several brokers write.
const HEARD_WITHIN: Duration = Duration::from_secs(10);

impl TopicRegistry {
    /// Reads all topics. `default_partitions` is what -1 means.
    pub async fn load(
        store: Arc<dyn MetaStore>,
        defaults: TopicDefaults,
        default_partitions: i32,
    ) -> Result<TopicRegistry, TopicError> {
        let items = store.list(PREFIX).await?;
        let registry = TopicRegistry {
            store,
            defaults,
            default_partitions,
            topics: RwLock::default(),
            changing: Mutex::new(()),
            whole_change: Mutex::new(()),
            generation: watch::Sender::new(0),
            is_shared: AtomicBool::new(false),
        };
        for item in &items {
            let stored = registry.parsed(item)?;
            registry.topics.write().insert(stored);
        }
        Ok(registry)
    }

    pub fn defaults(&self) -> &TopicDefaults {
        &self.defaults
    }

    /// Follows the store for ever, for a broker that does not write it alone. From now on memory says
    /// what the store has said, and a change here waits until it has come back that way.
    pub async fn follow(&self) -> Result<(), MetaError> {
        self.is_shared.store(true, Ordering::Release);
        let mut follow = Follow::start(self.store.clone(), PREFIX).await?;
        loop {
            self.replace_all(follow.items());
            if !follow.changed().await {
                return Err(MetaError::Unavailable("the metadata store is closed".to_owned()));
            }
        }
    }

    fn replace_all(&self, items: &BTreeMap<String, Item>) {
        let known = self.topics.read().by_name.clone();
        let mut topics = Topics::default();
        for item in items.values() {
            let same = item.key.strip_prefix(PREFIX).and_then(|name| known.get(name));
            let same = same.filter(|stored| stored.version == item.version);
            match same.cloned().map_or_else(|| self.parsed(item), Ok) {
                Ok(stored) => topics.insert(stored),
                Err(error) => {
                    tracing::error!(key = %item.key, %error, "a topic cannot be read and is ignored")
                }
            }
        }
        *self.topics.write() = topics;
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Waits until a change of the store is known here.
    async fn heard(&self, holds: impl Fn(&Topics) -> bool) -> Result<(), MetaError> {
        let mut changes = self.changes();
        let heard = async {
            while !holds(&self.topics.read()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        let late = |_| MetaError::Unavailable("the change is made and not heard of yet".to_owned());
        tokio::time::timeout(HEARD_WITHIN, heard).await.map_err(late)
    }

    fn parsed(&self, item: &Item) -> Result<Stored, TopicError> {
        let name = item.key.strip_prefix(PREFIX).unwrap_or_default();
        let damaged =
            |error: &dyn std::fmt::Display| MetaError::Corrupt(format!("object {}: {error}", item.key));
        let object: TopicObject = serde_json::from_slice(&item.value).map_err(|error| damaged(&error))?;
        let id = Uuid::parse_str(&object.id).map_err(|error| damaged(&error))?;
        let topic = build(TopicName::parse(name)?, TopicId(id), object, &self.defaults);
        Ok(Stored { topic, version: item.version })
    }

    /// Whether the store holds the topic with this id, asked now.
    pub async fn is_stored(&self, name: &str, id: TopicId) -> Result<bool, MetaError> {
        let Some((value, _)) = self.store.get(&format!("{PREFIX}{name}")).await? else { return Ok(false) };
        let object: TopicObject =
            serde_json::from_slice(&value).map_err(|error| MetaError::Corrupt(error.to_string()))?;
        Ok(object.id == id.0.to_string())
    }

    /// A topic as the store has it now.
    pub async fn read(&self, name: &str) -> Result<Option<Arc<Topic>>, TopicError> {
        let key = format!("{PREFIX}{name}");
        let Some((value, version)) = self.store.get(&key).await? else { return Ok(None) };
        Ok(Some(self.parsed(&Item { key, value, version })?.topic))
    }

    pub fn by_name(&self, name: &str) -> Option<Arc<Topic>> {
        self.topics.read().by_name.get(name).map(|stored| stored.topic.clone())
    }

    pub fn has_partition(&self, topic: &str, index: i32) -> bool {
        self.topics.read().by_name.get(topic).is_some_and(|stored| stored.topic.has_partition(index))
    }

    pub fn by_id(&self, id: TopicId) -> Option<Arc<Topic>> {
        let topics = self.topics.read();
        let name = topics.names.get(&id)?;
        topics.by_name.get(name).map(|stored| stored.topic.clone())
    }

    /// All topics, by name.
    pub fn all(&self) -> Vec<Arc<Topic>> {
        self.topics.read().by_name.values().map(|stored| stored.topic.clone()).collect()
    }

    /// Up to `limit` topics whose names are at or after `from`, by name.
    pub fn page(&self, from: &str, limit: usize) -> Vec<Arc<Topic>> {
        use std::ops::Bound::{Included, Unbounded};
        let topics = self.topics.read();
        let range = topics.by_name.range::<str, _>((Included(from), Unbounded));
        range.take(limit).map(|(_, stored)| stored.topic.clone()).collect()
    }

    /// For whoever changes metadata and partitions together: one at a time.
    pub async fn one_change(&self) -> MutexGuard<'_, ()> {
        self.whole_change.lock().await
    }

    /// A number that grows with every change of any topic.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// What [`Self::create`] would make, without making it.
    pub fn check_new(&self, new: &NewTopic) -> Result<Topic, TopicError> {
        let name = TopicName::parse(&new.name)?;
        if name.is_internal() {
            return Err(TopicError::Internal(name));
        }
        self.planned(name, new)
    }

    /// Makes a topic that a client, the mirror or a person asks for. Durable when it returns.
    pub async fn create(&self, new: &NewTopic) -> Result<Arc<Topic>, TopicError> {
        let _one = self.changing.lock().await;
        let topic = self.check_new(new)?;
        self.put(topic, None).await
    }

    /// Makes a topic of the broker's own, or returns it if it is there.
    pub async fn ensure_internal(&self, new: &NewTopic) -> Result<Arc<Topic>, TopicError> {
        let _one = self.changing.lock().await;
        if let Some(topic) = self.by_name(&new.name) {
            return Ok(topic);
        }
        let topic = self.planned(TopicName::parse(&new.name)?, new)?;
        self.put(topic, None).await
    }

    /// Deletes a topic from the metadata; its data is garbage from then on, until [`Self::files_gone`].
    /// Returns what it was.
    pub async fn delete(&self, name: &str) -> Result<Arc<Topic>, TopicError> {
        let _one = self.changing.lock().await;
        let stored = self.stored(name)?;
        if stored.topic.name.is_internal() {
            return Err(TopicError::Internal(stored.topic.name.clone()));
        }
        let (key, mark) = (key(&stored.topic.name), deleted_key(stored.topic.id));
        match self.store.put_if(&mark, name.as_bytes().to_vec(), None).await {
            // It is there from an attempt that failed.
            Ok(_) | Err(MetaError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if let Err(error) = self.store.delete_if(&key, stored.version).await {
            // The delete may have happened: look, because memory must not say otherwise.
            if !matches!(self.store.get(&key).await, Ok(None)) {
                return Err(error.into());
            }
        }
        if self.is_shared.load(Ordering::Acquire) {
            self.heard(|topics| !topics.names.contains_key(&stored.topic.id)).await?;
            return Ok(stored.topic);
        }
        self.topics.write().remove(&stored.topic);
        self.generation.send_modify(|generation| *generation += 1);
        Ok(stored.topic)
    }

    /// Topics that were deleted and whose files may be left.
    pub async fn deleted(&self) -> Result<Vec<TopicId>, MetaError> {
        let marks = self.store.list(DELETED_PREFIX).await?;
        let id = |key: &str| Uuid::parse_str(key.strip_prefix(DELETED_PREFIX)?).ok().map(TopicId);
        Ok(marks.iter().filter_map(|mark| id(&mark.key)).collect())
    }

    /// No file of a deleted topic is left.
    pub async fn files_gone(&self, id: TopicId) -> Result<(), MetaError> {
        let mark = deleted_key(id);
        match self.store.get(&mark).await? {
            Some((_, version)) => self.store.delete_if(&mark, version).await,
            None => Ok(()),
        }
    }

    /// What [`Self::grow`] would make, without making it.
    pub fn check_grow(&self, name: &str, partitions: i32) -> Result<Topic, TopicError> {
        let current = self.by_name(name).ok_or(TopicError::Unknown)?;
        if current.name.is_internal() {
            return Err(TopicError::Internal(current.name.clone()));
        }
        if partitions == current.partitions {
            return Err(TopicError::SameCount(partitions));
        }
        if partitions < current.partitions {
            let name = current.name.clone();
            return Err(TopicError::NotAnIncrease { name, current: current.partitions, asked: partitions });
        }
        check_partitions(partitions)?;
        Ok(Topic { partitions, altered_ms: now_ms(), ..(*current).clone() })
    }

    /// Gives a topic more partitions; `partitions` is the new total.
    pub async fn grow(&self, name: &str, partitions: i32) -> Result<Arc<Topic>, TopicError> {
        let _one = self.changing.lock().await;
        let version = self.stored(name)?.version;
        let topic = self.check_grow(name, partitions)?;
        self.put(topic, Some(version)).await
    }

    /// Notes that the first `count` partitions are served: from now on their files are missed.
    pub async fn note_opened(&self, name: &str, count: i32) -> Result<(), TopicError> {
        let _one = self.changing.lock().await;
        let Stored { topic, version } = self.stored(name)?;
        let topic = Topic { opened: count.min(topic.partitions), ..(*topic).clone() };
        self.put(topic, Some(version)).await.map(drop)
    }

    /// What [`Self::alter`] would make, without making it.
    pub fn check_alter(&self, name: &str, change: &ConfigChange) -> Result<Topic, TopicError> {
        let current = self.by_name(name).ok_or(TopicError::Unknown)?;
        if current.name.is_internal() {
            return Err(TopicError::Internal(current.name.clone()));
        }
        let overrides = change.applied(&current.overrides, &self.defaults)?;
        configs::check_all(&overrides)?;
        let settings = self.defaults.settings(&overrides);
        Ok(Topic { overrides, settings, altered_ms: now_ms(), ..(*current).clone() })
    }

    /// Changes the settings of a topic.
    pub async fn alter(&self, name: &str, change: &ConfigChange) -> Result<Arc<Topic>, TopicError> {
        let _one = self.changing.lock().await;
        let version = self.stored(name)?.version;
        let topic = self.check_alter(name, change)?;
        self.put(topic, Some(version)).await
    }

    fn planned(&self, name: TopicName, new: &NewTopic) -> Result<Topic, TopicError> {
        self.check_free(&name)?;
        let partitions = if new.partitions == -1 { self.default_partitions } else { new.partitions };
        check_partitions(partitions)?;
        configs::check_all(&new.overrides)?;
        let now = now_ms();
        Ok(Topic {
            name,
            id: TopicId(Uuid::new_v4()),
            partitions,
            settings: self.defaults.settings(&new.overrides),
            overrides: new.overrides.clone(),
            created_ms: now,
            altered_ms: now,
            opened: 0,
        })
    }

    /// `.` and `_` are one character in metric names, so Kafka keeps such names apart (C02 of KIP-4).
    fn check_free(&self, name: &TopicName) -> Result<(), TopicError> {
        let topics = self.topics.read();
        if topics.by_name.contains_key(name) {
            return Err(TopicError::Exists(name.clone()));
        }
        if !name.as_str().contains(['.', '_']) {
            return Ok(());
        }
        let flat = |name: &TopicName| name.as_str().replace('.', "_");
        let wanted = flat(name);
        match topics.by_name.keys().find(|existing| flat(existing) == wanted) {
            Some(existing) => Err(TopicError::Collides { new: name.clone(), existing: existing.clone() }),
            None => Ok(()),
        }
    }

    fn stored(&self, name: &str) -> Result<Stored, TopicError> {
        self.topics.read().by_name.get(name).cloned().ok_or(TopicError::Unknown)
    }

    async fn put(&self, topic: Topic, expected: Option<Version>) -> Result<Arc<Topic>, TopicError> {
        let key = key(&topic.name);
        let value = object(&topic)?;
        let version = match self.store.put_if(&key, value.clone(), expected).await {
            Ok(version) => version,
            // The write may have happened: if our very value is there, it has.
            Err(error) => match self.store.get(&key).await {
                Ok(Some((there, version))) if there == value => version,
                Ok(Some(_)) if expected.is_none() => return Err(TopicError::Exists(topic.name)),
                // Another broker was faster; what is known here has caught up when the client tries again.
                _ if matches!(error, MetaError::Conflict { .. }) => {
                    return Err(MetaError::Unavailable(format!("{key} was changed by another")).into());
                }
                _ => return Err(error.into()),
            },
        };
        if self.is_shared.load(Ordering::Acquire) {
            let there = |stored: &Stored| stored.version >= version;
            self.heard(|topics| topics.by_name.get(&topic.name).is_some_and(there)).await?;
            return self.by_name(topic.name.as_str()).ok_or(TopicError::Unknown);
        }
        let topic = Arc::new(topic);
        self.topics.write().insert(Stored { topic: topic.clone(), version });
        self.generation.send_modify(|generation| *generation += 1);
        Ok(topic)
    }
}

impl Topics {
    fn insert(&mut self, stored: Stored) {
        self.names.insert(stored.topic.id, stored.topic.name.clone());
        self.by_name.insert(stored.topic.name.clone(), stored);
    }

    fn remove(&mut self, topic: &Topic) {
        self.names.remove(&topic.id);
        self.by_name.remove(&topic.name);
    }
}

/// How settings change: all at once, or one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigChange {
    /// AlterConfigs: what is not named goes back to its default.
    Replace(Overrides),
    /// IncrementalAlterConfigs, in order.
    Each(Vec<(String, ConfigOp)>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigOp {
    Set(String),
    Delete,
    /// Adds the elements of a list that are not there yet.
    Append(String),
    /// Takes elements off a list.
    Subtract(String),
}

impl ConfigChange {
    fn applied(&self, current: &Overrides, defaults: &TopicDefaults) -> Result<Overrides, ConfigError> {
        let changes = match self {
            ConfigChange::Replace(overrides) => return Ok(overrides.clone()),
            ConfigChange::Each(changes) => changes,
        };
        let mut overrides = current.clone();
        for (name, op) in changes {
            let key = configs::topic_key(name).ok_or_else(|| ConfigError::Unknown(name.clone()))?;
            let is_list = |op| match key.kind {
                configs::Kind::List => Ok(()),
                _ => Err(ConfigError::NotList { op, key: name.clone() }),
            };
            let holds = defaults.value(key, &overrides).0;
            let value = match op {
                ConfigOp::Delete => {
                    overrides.remove(name);
                    continue;
                }
                ConfigOp::Set(value) => value.clone(),
                ConfigOp::Append(more) => {
                    is_list("append")?;
                    let mut all = elements(holds);
                    for element in elements(more) {
                        if !all.contains(&element) {
                            all.push(element);
                        }
                    }
                    all.join(",")
                }
                ConfigOp::Subtract(less) => {
                    is_list("subtract")?;
                    let less = elements(less);
                    let mut all = elements(holds);
                    all.retain(|element| !less.contains(element));
                    all.join(",")
                }
            };
            overrides.insert(name.clone(), value);
        }
        Ok(overrides)
    }
}

fn elements(list: &str) -> Vec<&str> {
    list.split(',').map(str::trim).filter(|element| !element.is_empty()).collect()
}

impl Topic {
    pub fn is_internal(&self) -> bool {
        self.name.is_internal()
    }

    pub fn has_partition(&self, index: i32) -> bool {
        (0..self.partitions).contains(&index)
    }
}

impl TopicError {
    /// The code of the protocol.
    pub fn code(&self) -> ErrorCode {
        match self {
            TopicError::Exists(_) => ErrorCode::TopicAlreadyExists,
            TopicError::Unknown => ErrorCode::UnknownTopicOrPartition,
            TopicError::Name(_) | TopicError::Collides { .. } => ErrorCode::InvalidTopicException,
            TopicError::Internal(_) => ErrorCode::PolicyViolation,
            TopicError::NoPartitions
            | TopicError::TooManyPartitions { .. }
            | TopicError::NotAnIncrease { .. }
            | TopicError::SameCount(_) => ErrorCode::InvalidPartitions,
            TopicError::Config(ConfigError::Null(_)) => ErrorCode::InvalidRequest,
            TopicError::Config(_) => ErrorCode::InvalidConfig,
            TopicError::Store(MetaError::Full) => ErrorCode::KafkaStorageError,
            TopicError::Store(error) if error.is_retryable() => ErrorCode::RequestTimedOut,
            TopicError::Store(_) => ErrorCode::UnknownServerError,
        }
    }
}

fn check_partitions(partitions: i32) -> Result<(), TopicError> {
    match partitions {
        ..=0 => Err(TopicError::NoPartitions),
        asked if asked > PARTITIONS_PER_TOPIC_MAX => {
            Err(TopicError::TooManyPartitions { asked, max: PARTITIONS_PER_TOPIC_MAX })
        }
        _ => Ok(()),
    }
}

fn build(name: TopicName, id: TopicId, object: TopicObject, defaults: &TopicDefaults) -> Arc<Topic> {
    Arc::new(Topic {
        name,
        id,
        partitions: object.partitions,
        settings: defaults.settings(&object.configs),
        overrides: object.configs,
        created_ms: object.created_ms,
        altered_ms: object.altered_ms,
        opened: object.opened,
    })
}

fn object(topic: &Topic) -> Result<Vec<u8>, TopicError> {
    let object = TopicObject {
        id: topic.id.0.to_string(),
        partitions: topic.partitions,
        configs: topic.overrides.clone(),
        created_ms: topic.created_ms,
        altered_ms: topic.altered_ms,
        opened: topic.opened,
    };
    serde_json::to_vec(&object).map_err(|error| MetaError::Corrupt(error.to_string()).into())
}

fn key(name: &TopicName) -> String {
    format!("{PREFIX}{name}")
}

fn deleted_key(id: TopicId) -> String {
    format!("{DELETED_PREFIX}{}", id.0)
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

#[cfg(test)]
#[path = "topics_tests.rs"]
mod tests;
