//! What this broker knows of its cluster: who is alive, who owns what, who the controller is.
//!
//! Follows the metadata store; may be a moment behind it. Nothing is decided by it that a guarded write
//! does not decide again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use broker_store::{Item, MetaError, MetaStore, Version};
use kafka::TopicId;
use parking_lot::RwLock;
use tokio::sync::{oneshot, watch};
use uuid::Uuid;

use super::follow::Follow;
use super::loads::{self, Rates};
use super::objects::{
    ASSIGNMENTS, AssignmentObject, BROKERS, BrokerObject, CONTROLLER, DRAINING, LOADS, PartitionObject,
};

/// The cluster at one moment.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub brokers: BTreeMap<i32, BrokerObject>,
    pub draining: BTreeSet<i32>,
    pub controller: Option<i32>,
    pub assignments: HashMap<TopicId, Arc<Assigned>>,
    pub rates: Arc<Rates>,
}

/// The assignment of a topic, and the version to guard a change with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assigned {
    pub object: AssignmentObject,
    pub version: Version,
}

/// The view, kept up to date.
pub struct Views {
    now: RwLock<Arc<View>>,
    generation: watch::Sender<u64>,
}

impl View {
    pub fn partition(&self, topic: TopicId, index: i32) -> Option<&PartitionObject> {
        self.assignments.get(&topic)?.object.partitions.get(usize::try_from(index).ok()?)
    }

    /// Whom to ask for a partition, and under which epoch: the next owner of one that moves.
    pub fn leader(&self, topic: TopicId, index: i32) -> Option<(i32, i32)> {
        let partition = self.partition(topic, index)?;
        let owner = partition.owner.filter(|owner| self.brokers.contains_key(owner))?;
        Some((owner, partition.epoch))
    }
}

impl Views {
    pub fn new() -> Views {
        Views { now: RwLock::default(), generation: watch::Sender::new(0) }
    }

    pub fn now(&self) -> Arc<View> {
        self.now.read().clone()
    }

    /// A number that grows with every change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Waits until `enough` holds, at most for `patience`. Whether it does.
    pub async fn wait_for(&self, patience: Duration, enough: impl Fn(&View) -> bool) -> bool {
        let mut changes = self.changes();
        let found = async {
            while !enough(&self.now()) {
                if changes.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(patience, found).await.is_ok() && enough(&self.now())
    }

    /// Follows the store for ever; `first` hears when the view is complete for the first time.
    pub async fn follow(
        &self,
        meta: Arc<dyn MetaStore>,
        first: &mut Option<oneshot::Sender<()>>,
    ) -> Result<(), MetaError> {
        let mut brokers = Follow::start(meta.clone(), BROKERS).await?;
        let mut draining = Follow::start(meta.clone(), DRAINING).await?;
        let mut controller = Follow::start(meta.clone(), CONTROLLER).await?;
        let mut loads = Follow::start(meta.clone(), LOADS).await?;
        let mut assignments = Follow::start(meta, ASSIGNMENTS).await?;
        let mut rates = Arc::new(loads::merged(&self.now().rates, loads.items()));
        loop {
            let assigned = assignments_of(&assignments, &self.now().assignments);
            let view = View {
                brokers: brokers_of(&brokers),
                draining: draining.items().keys().filter_map(|key| number(key, DRAINING)).collect(),
                controller: controller.items().get(CONTROLLER).and_then(broker_in),
                assignments: assigned,
                rates: rates.clone(),
            };
            *self.now.write() = Arc::new(view);
            self.generation.send_modify(|generation| *generation += 1);
            if let Some(first) = first.take() {
                // Nobody may be waiting any more.
                let _ = first.send(());
            }
            let more = tokio::select! {
                more = brokers.changed() => more,
                more = draining.changed() => more,
                more = controller.changed() => more,
                more = assignments.changed() => more,
                more = loads.changed() => {
                    rates = Arc::new(loads::merged(&rates, loads.items()));
                    more
                }
            };
            if !more {
                return Err(MetaError::Unavailable("the metadata store is closed".to_owned()));
            }
        }
    }
}

impl Default for Views {
    fn default() -> Views {
        Views::new()
    }
}

fn brokers_of(follow: &Follow) -> BTreeMap<i32, BrokerObject> {
    let broker = |item: &Item| Some((number(&item.key, BROKERS)?, parsed(item)?));
    follow.items().values().filter_map(broker).collect()
}

/// What has not changed is not parsed again.
fn assignments_of(
    follow: &Follow,
    before: &HashMap<TopicId, Arc<Assigned>>,
) -> HashMap<TopicId, Arc<Assigned>> {
    let assigned = |item: &Item| {
        let topic = TopicId(Uuid::parse_str(item.key.strip_prefix(ASSIGNMENTS)?).ok()?);
        let known = before.get(&topic).filter(|known| known.version == item.version);
        let assigned = match known {
            Some(known) => known.clone(),
            None => Arc::new(Assigned { object: parsed(item)?, version: item.version }),
        };
        Some((topic, assigned))
    };
    follow.items().values().filter_map(assigned).collect()
}

fn parsed<T: serde::de::DeserializeOwned>(item: &Item) -> Option<T> {
    let parsed = serde_json::from_slice(&item.value);
    if let Err(error) = &parsed {
        tracing::error!(key = %item.key, %error, "an object of the metadata store cannot be read and is ignored");
    }
    parsed.ok()
}

fn broker_in(item: &Item) -> Option<i32> {
    std::str::from_utf8(&item.value).ok()?.parse().ok()
}

fn number(key: &str, prefix: &str) -> Option<i32> {
    key.strip_prefix(prefix)?.parse().ok()
}
