//! The lanes that exist, and the lane-routers that serve them.
//!
//! A lane is an object `lanes/NAME` in the metadata store: name, port, time. Its class is in its name.
//! In a cluster every broker writes them, memory follows the store, and a change is made when every broker,
//! and every lane-router at it, has followed.
//! Owns creation, deletion and the sessions of lane-routers; what a lane's records and groups are is
//! the partitions' and the coordinator's. Invariant: a port belongs to one lane from the write that
//! creates it to the write that deletes it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use broker_store::meta::{MetaError, MetaStore, Version};
use lane_core::Lane;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;

use super::ports;
use crate::cluster::Follow;
use crate::peers::{Incomplete, Peers};

/// All lanes of this region. One per broker process.
pub struct LaneDirectory {
    meta: Arc<dyn MetaStore>,
    ports: Option<RangeInclusive<u16>>,
    /// The other brokers of a cluster.
    peers: OnceLock<Arc<Peers>>,
    /// One change at a time.
    changing: Mutex<()>,
    lanes: watch::Sender<LaneSet>,
    routers: watch::Sender<BTreeMap<u64, Router>>,
    next_session: AtomicU64,
}

/// The lanes as of one moment.
#[derive(Clone, Debug, Default)]
pub struct LaneSet {
    /// Rises with every change; 1 for the set found at start.
    pub generation: u64,
    pub lanes: BTreeMap<String, LaneObject>,
}

impl LaneSet {
    /// In milliseconds, of lanes that have one of their own.
    pub fn graces(&self) -> BTreeMap<Lane, u64> {
        let of = |lane: &LaneObject| {
            let seconds = u64::from(lane.settings.grace_seconds);
            Some((Lane::parse(&lane.name).ok()?, seconds * 1000)).filter(|_| seconds > 0)
        };
        self.lanes.values().filter_map(of).collect()
    }
}

/// A lane as it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneObject {
    pub name: String,
    /// 0 where this region has no lane listeners.
    pub port: u16,
    pub created_ms: i64,
    /// A deletion has begun and must be finished.
    #[serde(default)]
    pub deleting: bool,
    #[serde(default)]
    pub settings: LaneSettings,
}

/// What may change in a lane's life.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneSettings {
    /// From a member's silence to the hand-over; 0: as the broker's configuration says.
    pub grace_seconds: u32,
    /// Names in client certificates that may enter; everybody may where there is none.
    pub principals: Vec<String>,
}

/// What a connected lane-router has said last.
#[derive(Clone, Debug, Default)]
pub struct Router {
    pub address: String,
    /// The generation of the set that it serves.
    pub generation: u64,
    /// Lane and reason, for listeners that could not be opened.
    pub failures: Vec<(String, String)>,
}

/// How far a lane-router is with a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Following {
    pub address: String,
    pub late: bool,
    /// Why it cannot.
    pub failure: Option<String>,
}

/// A lane-router's place in the directory; leaving is dropping it.
pub struct Session {
    directory: Arc<LaneDirectory>,
    id: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("lane {0} exists already")]
    Exists(String),
    #[error("lane {0} is being deleted; try again in a moment, or `sealane lane delete {0}` once more")]
    Deleting(String),
    #[error("lane {0} does not exist; `sealane lane list` shows what there is")]
    Unknown(String),
    #[error(
        "no port is left for lane {lane}: all of {first} to {last} are taken; delete a lane, or give the broker a larger range (lane_port_count)"
    )]
    PortsTaken { lane: String, first: u16, last: u16 },
    #[error("lane-router {router} cannot serve lane {lane}: {reason}")]
    Router { lane: String, router: String, reason: String },
    #[error("lane {lane}: {source}")]
    Meta { lane: String, source: MetaError },
    #[error("lane {lane}: {error}")]
    Others { lane: String, error: Incomplete },
    #[error("lane {0} is not heard of by every broker yet; try again")]
    Unheard(String),
    #[error("the stored lane {0} cannot be read: {1}")]
    Damaged(String, String),
}

/// A new lane, and how far it is served.
pub struct Created {
    pub lane: LaneObject,
    pub warnings: Vec<String>,
}

impl LaneDirectory {
    /// Reads what there is.
    pub async fn open(
        meta: Arc<dyn MetaStore>,
        ports: Option<RangeInclusive<u16>>,
    ) -> Result<Arc<LaneDirectory>, DirectoryError> {
        let lanes = stored(&*meta).await?;
        Ok(Arc::new(LaneDirectory {
            meta,
            ports,
            peers: OnceLock::new(),
            changing: Mutex::new(()),
            lanes: watch::Sender::new(LaneSet { generation: 1, lanes }),
            routers: watch::Sender::new(BTreeMap::new()),
            next_session: AtomicU64::new(0),
        }))
    }

    /// This broker is one of a cluster's.
    pub fn share(&self, peers: Arc<Peers>) {
        let _ = self.peers.set(peers);
    }

    /// Follows the store for ever, for a broker that does not write it alone.
    pub async fn follow(&self) -> Result<(), MetaError> {
        let mut follow = Follow::start(self.meta.clone(), PREFIX).await?;
        loop {
            let mut lanes = BTreeMap::new();
            for item in follow.items().values() {
                match serde_json::from_slice::<LaneObject>(&item.value) {
                    Ok(lane) => drop(lanes.insert(lane.name.clone(), lane)),
                    Err(error) => {
                        tracing::error!(key = %item.key, %error, "a lane cannot be read and is ignored");
                    }
                }
            }
            if self.lanes.borrow().lanes != lanes {
                self.publish(|known| *known = lanes);
            }
            if !follow.changed().await {
                return Err(MetaError::Unavailable("the metadata store is closed".to_owned()));
            }
        }
    }

    /// Follows the set of lanes.
    pub fn watch(&self) -> watch::Receiver<LaneSet> {
        self.lanes.subscribe()
    }

    pub fn lanes(&self) -> BTreeMap<String, LaneObject> {
        self.lanes.borrow().lanes.clone()
    }

    pub fn lane(&self, name: &str) -> Result<LaneObject, DirectoryError> {
        let lane = self.lanes.borrow().lanes.get(name).cloned();
        lane.ok_or_else(|| DirectoryError::Unknown(name.to_owned()))
    }

    pub fn routers(&self) -> Vec<Router> {
        self.routers.borrow().values().cloned().collect()
    }

    /// Makes a lane, and returns when every connected lane-router serves it.
    pub async fn create(
        &self,
        lane: &Lane,
        settings: LaneSettings,
        now_ms: i64,
    ) -> Result<Created, DirectoryError> {
        let _one = self.changing.lock().await;
        let name = lane.as_str().to_owned();
        match self.lanes.borrow().lanes.get(&name) {
            Some(existing) if existing.deleting => return Err(DirectoryError::Deleting(name)),
            Some(_) => return Err(DirectoryError::Exists(name)),
            None => {}
        }
        let port = self.choose_port(&name).await?;
        let object = LaneObject { name: name.clone(), port, created_ms: now_ms, deleting: false, settings };
        match self.put(&object, None).await {
            // Another broker was faster.
            Err(DirectoryError::Meta { source: MetaError::Conflict { .. }, .. }) => {
                return Err(DirectoryError::Exists(name));
            }
            put => put?,
        }
        self.note(&object);
        let mut warnings = Vec::new();
        if port == 0 {
            warnings.push("this region has no lane listeners (lane_port_first is not set)".to_owned());
        }
        let routers = match self.followed_everywhere(&object).await {
            Ok(routers) => routers,
            Err(error) => {
                self.remove(&object).await?;
                return Err(error);
            }
        };
        if let Some(failed) = routers.iter().find(|router| router.failure.is_some()) {
            // The port goes to the end of the queue, so that trying again takes another.
            self.remove(&object).await?;
            let (router, reason) = (failed.address.clone(), failed.failure.clone().unwrap_or_default());
            return Err(DirectoryError::Router { lane: name, router, reason });
        }
        let late = routers.iter().filter(|router| router.late);
        warnings.extend(late.map(|router| format!("lane-router {} does not serve it yet", router.address)));
        if routers.is_empty() && port != 0 {
            warnings.push("no lane-router is connected; the address works once one is".to_owned());
        }
        Ok(Created { lane: object, warnings })
    }

    /// Changes a lane's settings, and returns when this broker and its lane-routers have followed.
    pub async fn set(
        &self,
        name: &str,
        change: impl FnOnce(&mut LaneSettings),
    ) -> Result<LaneObject, DirectoryError> {
        let _one = self.changing.lock().await;
        let mut object = self.lane(name)?;
        if object.deleting {
            return Err(DirectoryError::Deleting(name.to_owned()));
        }
        change(&mut object.settings);
        let version = self.version_of(name).await?;
        self.put(&object, version).await?;
        self.note(&object);
        let mut sets = self.lanes.subscribe();
        let follows = |set: &LaneSet| set.lanes.get(name) == Some(&object);
        let generation = match timeout(HEARD_WITHIN, sets.wait_for(follows)).await {
            Ok(Ok(set)) => set.generation,
            Ok(Err(_)) | Err(_) => return Err(DirectoryError::Unheard(name.to_owned())),
        };
        self.settled(generation).await;
        Ok(object)
    }

    /// Marks a lane as being deleted, and returns when no connected lane-router serves it any more.
    pub async fn begin_delete(&self, name: &str) -> Result<LaneObject, DirectoryError> {
        let _one = self.changing.lock().await;
        let mut object = self.lane(name)?;
        if !object.deleting {
            object.deleting = true;
            let version = self.version_of(name).await?;
            self.put(&object, version).await?;
        }
        self.note(&object);
        self.followed_everywhere(&object).await?;
        Ok(object)
    }

    /// Waits until this broker and its lane-routers, or what can be waited for of them, have followed a
    /// change of a lane.
    pub async fn followed(&self, object: &LaneObject) -> Result<Vec<Following>, DirectoryError> {
        let mut sets = self.lanes.subscribe();
        let follows = |set: &LaneSet| match (set.lanes.get(&object.name), object.deleting) {
            (Some(known), true) => known.deleting || known.created_ms != object.created_ms,
            (None, true) => true,
            (known, false) => known.is_some_and(|known| known.created_ms == object.created_ms),
        };
        let generation = match timeout(HEARD_WITHIN, sets.wait_for(follows)).await {
            Ok(Ok(set)) => set.generation,
            Ok(Err(_)) | Err(_) => return Err(DirectoryError::Unheard(object.name.clone())),
        };
        let routers = self.settled(generation).await.into_iter();
        let following = |router: Router| Following {
            late: router.generation < generation,
            failure: router.failures.into_iter().find(|(lane, _)| *lane == object.name).map(|(_, why)| why),
            address: router.address,
        };
        Ok(routers.map(following).collect())
    }

    async fn followed_everywhere(&self, object: &LaneObject) -> Result<Vec<Following>, DirectoryError> {
        let mut all = self.followed(object).await?;
        if let Some(peers) = self.peers.get() {
            let others = peers.follow_lane(&object.name, object.created_ms, object.deleting).await;
            let failed = |error| DirectoryError::Others { lane: object.name.clone(), error };
            all.extend(others.map_err(failed)?.into_iter().map(|router| Following {
                address: router.address,
                late: router.late,
                failure: Some(router.failure).filter(|failure| !failure.is_empty()),
            }));
        }
        Ok(all)
    }

    /// A broker that is alone need not hear of what it wrote.
    fn note(&self, object: &LaneObject) {
        if self.peers.get().is_none() {
            self.publish(|lanes| {
                lanes.insert(object.name.clone(), object.clone());
            });
        }
    }

    /// Removes a lane whose deletion has begun and whose records are hidden.
    pub async fn finish_delete(&self, object: &LaneObject) -> Result<(), DirectoryError> {
        let _one = self.changing.lock().await;
        self.remove(object).await
    }

    /// A lane-router connects.
    pub fn join(self: &Arc<Self>, address: &str) -> Session {
        let id = self.next_session.fetch_add(1, Ordering::Relaxed);
        let router = Router { address: address.to_owned(), ..Router::default() };
        self.routers.send_modify(|routers| {
            routers.insert(id, router);
        });
        Session { directory: self.clone(), id }
    }

    /// Waits until every lane-router that is connected now serves `generation`, or has gone, or
    /// [`ROUTER_TIMEOUT`] has passed; returns them all.
    async fn settled(&self, generation: u64) -> Vec<Router> {
        let mut routers = self.routers.subscribe();
        let waited: BTreeSet<u64> = routers.borrow().keys().copied().collect();
        let all_serve = |routers: &BTreeMap<u64, Router>| {
            waited.iter().all(|id| routers.get(id).is_none_or(|router| router.generation >= generation))
        };
        let _ = timeout(ROUTER_TIMEOUT, routers.wait_for(all_serve)).await;
        self.routers()
    }

    /// In a cluster the port is noted as given back first: another broker that chooses at the same time
    /// then takes it last.
    async fn choose_port(&self, name: &str) -> Result<u16, DirectoryError> {
        let Some(range) = self.ports.clone() else { return Ok(0) };
        let is_shared = self.peers.get().is_some();
        loop {
            let (released, version) = self.released().await?;
            let lanes = match is_shared {
                true => stored(&*self.meta).await?,
                false => self.lanes(),
            };
            let taken = lanes.values().map(|lane| lane.port).collect();
            let none_left = || DirectoryError::PortsTaken {
                lane: name.to_owned(),
                first: *range.start(),
                last: *range.end(),
            };
            let port = ports::choose(range.clone(), &taken, &released).ok_or_else(none_left)?;
            if !is_shared {
                return Ok(port);
            }
            match self.put_released(&ports::give_back(range.clone(), &released, port), version).await {
                Ok(()) => return Ok(port),
                Err(MetaError::Conflict { .. }) => {}
                Err(source) => return Err(at(name, source)),
            }
        }
    }

    async fn put_released(&self, released: &[u16], version: Option<Version>) -> Result<(), MetaError> {
        let value = serde_json::to_vec(released).expect("numbers are JSON");
        self.meta.put_if(RELEASED, value, version).await.map(drop)
    }

    async fn remove(&self, object: &LaneObject) -> Result<(), DirectoryError> {
        // The port is noted as released first: a crash between the two writes then only makes it be
        // reused later, never sooner.
        if let Some(range) = self.ports.clone() {
            loop {
                let (released, version) = self.released().await?;
                let released = ports::give_back(range.clone(), &released, object.port);
                match self.put_released(&released, version).await {
                    Ok(()) => break,
                    Err(MetaError::Conflict { .. }) if self.peers.get().is_some() => {}
                    Err(source) => return Err(at(&object.name, source)),
                }
            }
        }
        if let Some(version) = self.version_of(&object.name).await? {
            self.meta
                .delete_if(&key(&object.name), version)
                .await
                .map_err(|source| at(&object.name, source))?;
        }
        if self.peers.get().is_none() {
            self.publish(|lanes| {
                lanes.remove(&object.name);
            });
        }
        Ok(())
    }

    async fn released(&self) -> Result<(Vec<u16>, Option<Version>), DirectoryError> {
        match self.meta.get(RELEASED).await.map_err(|source| at("(ports)", source))? {
            None => Ok((Vec::new(), None)),
            Some((value, version)) => {
                let released = serde_json::from_slice(&value)
                    .map_err(|error| DirectoryError::Damaged(RELEASED.to_owned(), error.to_string()))?;
                Ok((released, Some(version)))
            }
        }
    }

    async fn put(&self, object: &LaneObject, expected: Option<Version>) -> Result<(), DirectoryError> {
        let value = serde_json::to_vec(object).expect("a lane is JSON");
        let put = self.meta.put_if(&key(&object.name), value, expected).await;
        put.map(drop).map_err(|source| at(&object.name, source))
    }

    async fn version_of(&self, name: &str) -> Result<Option<Version>, DirectoryError> {
        let found = self.meta.get(&key(name)).await.map_err(|source| at(name, source))?;
        Ok(found.map(|(_, version)| version))
    }

    fn publish(&self, change: impl FnOnce(&mut BTreeMap<String, LaneObject>)) -> u64 {
        let mut generation = 0;
        self.lanes.send_modify(|set| {
            set.generation += 1;
            generation = set.generation;
            change(&mut set.lanes);
        });
        generation
    }
}

impl Session {
    /// The router serves the set of this generation, but for `failures`.
    pub fn report(&self, generation: u64, failures: Vec<(String, String)>) {
        self.directory.routers.send_modify(|routers| {
            if let Some(router) = routers.get_mut(&self.id) {
                router.generation = generation;
                router.failures = failures;
            }
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.directory.routers.send_modify(|routers| {
            routers.remove(&self.id);
        });
    }
}

async fn stored(meta: &dyn MetaStore) -> Result<BTreeMap<String, LaneObject>, DirectoryError> {
    let items = meta.list(PREFIX).await.map_err(|source| at("(all)", source))?;
    let mut lanes = BTreeMap::new();
    for item in items {
        let lane: LaneObject = serde_json::from_slice(&item.value)
            .map_err(|error| DirectoryError::Damaged(item.key.clone(), error.to_string()))?;
        lanes.insert(lane.name.clone(), lane);
    }
    Ok(lanes)
}

fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

fn at(lane: &str, source: MetaError) -> DirectoryError {
    DirectoryError::Meta { lane: lane.to_owned(), source }
}

const PREFIX: &str = "lanes/";
/// Ports of deleted lanes, oldest first.
const RELEASED: &str = "lane-ports";
/// How long a change waits for lane-routers to follow.
const ROUTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a change may take to come back from a store that several brokers write.
const HEARD_WITHIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use broker_store::meta::Memory;

    use super::*;

    fn lane(name: &str) -> Lane {
        Lane::parse(name).expect("a lane name")
    }

    async fn directory(meta: &Arc<dyn MetaStore>) -> Arc<LaneDirectory> {
        LaneDirectory::open(meta.clone(), Some(10..=11)).await.expect("opened")
    }

    #[tokio::test]
    async fn a_lane_keeps_its_port_over_restarts_and_a_full_range_is_an_error() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let first = directory(&meta).await;
        let a = first.create(&lane("boe-a"), LaneSettings::default(), 1).await.expect("created").lane;
        let b = first.create(&lane("boe-b"), LaneSettings::default(), 2).await.expect("created").lane;
        assert_eq!((a.port, b.port), (10, 11));
        let full =
            first.create(&lane("boe-c"), LaneSettings::default(), 3).await.err().expect("full").to_string();
        assert!(full.starts_with("no port is left for lane boe-c: all of 10 to 11 are taken"), "{full}");

        let second = directory(&meta).await;
        assert_eq!(second.lane("boe-b").expect("kept"), b);
        let twice = second
            .create(&lane("boe-a"), LaneSettings::default(), 4)
            .await
            .err()
            .expect("exists")
            .to_string();
        assert_eq!(twice, "lane boe-a exists already");
    }

    #[tokio::test]
    async fn settings_change_alone_and_are_kept_over_restarts() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let first = directory(&meta).await;
        let made = first.create(&lane("boe-a"), LaneSettings::default(), 1).await.expect("created").lane;
        let set = first.set("boe-a", |settings| settings.grace_seconds = 7).await.expect("set");
        assert_eq!((set.port, set.created_ms, set.settings.grace_seconds), (made.port, 1, 7));
        let second = directory(&meta).await;
        assert_eq!(second.lane("boe-a").expect("kept"), set);
        assert_eq!(second.watch().borrow().graces(), BTreeMap::from([(lane("boe-a"), 7000)]));
        let unknown = second.set("boe-b", |_| ()).await.expect_err("unknown").to_string();
        assert!(unknown.starts_with("lane boe-b does not exist"), "{unknown}");
        // What an earlier build wrote has none.
        let old: LaneObject =
            serde_json::from_str(r#"{"name":"boe-c","port":1,"created_ms":2}"#).expect("read");
        assert_eq!(old.settings, LaneSettings::default());
    }

    #[tokio::test]
    async fn the_port_of_a_deleted_lane_is_reused_last() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let directory = directory(&meta).await;
        directory.create(&lane("boe-a"), LaneSettings::default(), 1).await.expect("created");
        let object = directory.begin_delete("boe-a").await.expect("begun");
        assert!(matches!(
            directory.create(&lane("boe-a"), LaneSettings::default(), 2).await,
            Err(DirectoryError::Deleting(_))
        ));
        directory.finish_delete(&object).await.expect("finished");
        assert_eq!(
            directory.create(&lane("boe-b"), LaneSettings::default(), 3).await.expect("created").lane.port,
            11
        );
        assert_eq!(
            directory.create(&lane("boe-c"), LaneSettings::default(), 4).await.expect("created").lane.port,
            10
        );
    }

    #[tokio::test]
    async fn creation_waits_for_routers_and_is_undone_when_one_cannot_serve() {
        let meta: Arc<dyn MetaStore> = Arc::new(Memory::new());
        let directory = directory(&meta).await;
        let session = directory.join("127.0.0.1:9093");
        let mut lanes = directory.watch();
        let router = tokio::spawn(async move {
            let set = lanes.wait_for(|set| set.lanes.contains_key("boe-a")).await.expect("open").clone();
            session.report(set.generation, Vec::new());
            let set = lanes.wait_for(|set| set.lanes.contains_key("boe-b")).await.expect("open").clone();
            session.report(set.generation, vec![("boe-b".to_owned(), "address in use".to_owned())]);
            session
        });
        let created = directory.create(&lane("boe-a"), LaneSettings::default(), 1).await.expect("created");
        assert!(created.warnings.is_empty(), "{:?}", created.warnings);
        let error = directory
            .create(&lane("boe-b"), LaneSettings::default(), 1)
            .await
            .err()
            .expect("no listener")
            .to_string();
        assert_eq!(error, "lane-router 127.0.0.1:9093 cannot serve lane boe-b: address in use");
        assert!(directory.lane("boe-b").is_err());
        drop(router.await.expect("no panic"));
        assert!(directory.routers().is_empty());
    }
}
