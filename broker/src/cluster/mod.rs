//! Several brokers as one cluster: who is alive, who owns which partition, and how that changes.
//!
//! The metadata store says who owns what ([`objects`]); the controller decides it ([`controller`]); a
//! member carries it out ([`member`]): it takes partitions over, serves them, hands them over. The
//! remote store, not a clock, keeps a former owner from writing.

#[cfg(feature = "cluster")]
mod check;
mod controller;
mod follow;
mod janitor;
mod loads;
mod manifest;
mod member;
mod objects;
#[cfg(test)]
mod sim;
mod start;
mod stored;
#[cfg(feature = "cluster")]
mod stores;
mod transfer;
mod view;

use std::sync::{Arc, Weak};
use std::time::Duration;

use broker_store::shared::{Shared, Stats};
use broker_store::{Lease, MetaError, MetaStore, Remote, WeakLease};
use parking_lot::RwLock;

pub use controller::Controller;
pub use follow::Follow;
pub use member::Member;
pub use objects::{AssignmentObject, BrokerObject, IdObject, PartitionObject};
pub use start::Joining;
pub use stored::{shard_epochs, stored_brokers};
pub use view::{View, Views};

use crate::config::ClusterConfig;
use crate::service::StartError;
use crate::topics::Topic;

/// What a broker of a cluster stands on.
#[derive(Clone)]
pub struct ClusterStores {
    pub meta: Arc<dyn MetaStore>,
    pub remote: Arc<dyn Remote>,
}

/// The other brokers, as requests need them.
pub struct Cluster {
    pub me: i32,
    pub views: Arc<Views>,
    /// The log of the life that this broker leads.
    log: RwLock<Weak<Shared>>,
    lease: RwLock<Option<WeakLease>>,
}

/// What becomes of the wish to move a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    Noted,
    NoPartition,
    NoBroker,
    /// Its owner has not taken it over yet.
    NotTaken,
}

/// How long a change waits for its partitions to be served. Beyond it clients are told who will be.
const ASSIGNED_WITHIN: Duration = Duration::from_secs(10);

/// Tries to take a broker id before the start fails.
const ID_TRIES: usize = 20;

impl Cluster {
    pub fn new(me: i32) -> Cluster {
        Cluster { me, views: Arc::new(Views::new()), log: RwLock::default(), lease: RwLock::default() }
    }

    /// What the log of this broker has done; nothing between two lives.
    pub fn log_stats(&self) -> Option<Stats> {
        self.log.read().upgrade().map(|log| log.stats())
    }

    fn led_by(&self, log: &Arc<Shared>, lease: &Lease) {
        *self.log.write() = Arc::downgrade(log);
        *self.lease.write() = Some(lease.downgrade());
    }

    /// The lease is over and this life goes on all the same, for a moment: what it says now may be of the
    /// past. What it said while the lease was held was true, because nobody else could be the owner.
    pub fn is_overdue(&self) -> bool {
        let lease = self.lease.read();
        lease.as_ref().is_some_and(WeakLease::is_overdue) && !crate::switches::lease_check_off()
    }

    /// Notes that a partition shall go to another broker.
    pub async fn wish(
        &self,
        meta: &dyn MetaStore,
        topic: &Topic,
        index: i32,
        to: i32,
    ) -> Result<Wish, MetaError> {
        if !self.views.now().brokers.contains_key(&to) {
            return Ok(Wish::NoBroker);
        }
        let key = objects::assignment_key(topic.id);
        loop {
            let Some((value, version)) = meta.get(&key).await? else { return Ok(Wish::NotTaken) };
            let damaged = |error: serde_json::Error| MetaError::Corrupt(format!("object {key}: {error}"));
            let mut object: AssignmentObject = serde_json::from_slice(&value).map_err(damaged)?;
            let at = usize::try_from(index).unwrap_or(usize::MAX);
            let Some(partition) = object.partitions.get_mut(at) else { return Ok(Wish::NoPartition) };
            if !partition.taken {
                return Ok(Wish::NotTaken);
            }
            partition.moving_to = Some(to).filter(|to| partition.owner != Some(*to));
            match meta.put_if(&key, member::json(&object)?, Some(version)).await {
                Ok(_) => return Ok(Wish::Noted),
                Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether a broker gives away what it owns.
    pub async fn drain(&self, meta: &dyn MetaStore, broker: i32, drain: bool) -> Result<(), MetaError> {
        let key = format!("{}{broker}", objects::DRAINING);
        let found = meta.get(&key).await?;
        let done = match (found, drain) {
            (None, true) => meta.put_if(&key, Vec::new(), None).await.map(drop),
            (Some((_, version)), false) => meta.delete_if(&key, version).await,
            _ => Ok(()),
        };
        match done {
            // Somebody said the same.
            Err(MetaError::Conflict { .. }) => Ok(()),
            done => done,
        }
    }

    /// Waits until every partition of a topic is served by its owner; whether they are.
    pub async fn assigned(&self, topic: &Topic) -> bool {
        let (id, count) = (topic.id, topic.partitions.max(0) as usize);
        let served = |view: &View| {
            view.assignments.get(&id).is_some_and(|assigned| {
                let partitions = &assigned.object.partitions;
                partitions.len() >= count && partitions.iter().all(|partition| partition.taken)
            })
        };
        self.views.wait_for(ASSIGNED_WITHIN, served).await
    }
}

/// The broker id of an identity: given out once, and the same for ever.
pub async fn broker_id(meta: &dyn MetaStore, identity: &str) -> Result<i32, MetaError> {
    let key = format!("{}{identity}", objects::IDS);
    let mut last = None;
    for _ in 0..ID_TRIES {
        let ids = meta.list(objects::IDS).await?;
        let parsed = |item: &broker_store::Item| serde_json::from_slice::<IdObject>(&item.value).ok();
        if let Some(mine) = ids.iter().find(|item| item.key == key) {
            return parsed(mine)
                .map(|id| id.broker)
                .ok_or_else(|| MetaError::Corrupt(format!("object {key}")));
        }
        let highest = ids.iter().filter_map(parsed).map(|id| id.broker).max().unwrap_or(0);
        // Two that ask at the same time would get the same number: the number is claimed first.
        let claim = format!("{}number/{}", objects::IDS, highest + 1);
        let object = IdObject { broker: highest + 1, lives: 0 };
        let value = serde_json::to_vec(&object).map_err(|error| MetaError::Corrupt(error.to_string()))?;
        match meta.put_if(&claim, value.clone(), None).await {
            Ok(_) => {}
            Err(error) => {
                last = Some(error);
                continue;
            }
        }
        match meta.put_if(&key, value, None).await {
            Ok(_) => return Ok(object.broker),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| MetaError::Unavailable("no broker id".to_owned())))
}

/// The stores that the configuration names.
#[cfg(feature = "cluster")]
pub async fn open_stores(config: &ClusterConfig) -> Result<ClusterStores, StartError> {
    stores::open(config).await
}

#[cfg(not(feature = "cluster"))]
pub async fn open_stores(_config: &ClusterConfig) -> Result<ClusterStores, StartError> {
    let reason = "this program was built without etcd, S3 and HDFS: build it with `--features cluster`";
    Err(StartError::Cluster { key: "store", reason: reason.to_owned() })
}
