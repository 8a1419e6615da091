//! The broker's state: who it is, its partitions, and the parts that own the rest.
//! Opens and closes partitions; changes to topics are `topic_changes`, requests are `api`.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use broker_store::{MetaError, MetaStore, SegmentStore, StoreError};
use futures_util::StreamExt;
use kafka::{
    BrokerId, ClusterId, ErrorCode, LeaderEpoch, PartitionIndex, RegionId, RegionName, TopicId, TopicName,
};
use lane_core::Lane;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::clock;
use crate::cluster::Cluster;
use crate::config::Config;
use crate::control::LinkBoard;
use crate::coordinator::{self, Coordinator, GroupConfig};
use crate::lanes::{LaneParts, Lanes, Owned};
use crate::log::OpenFiles;
use crate::log::recovery::RecoverError;
use crate::metrics::{GroupMetrics, Metrics};
use crate::partition::{Flusher, OpenPartition, Partition, Settings};
use crate::peers::Peers;
use crate::producer_ids::ProducerIds;
use crate::server::{FrameRoom, ListenerInfo};
use crate::topics::{Topic, TopicRegistry};
use crate::waiting::{may_wait, side_by_side};

/// Who this broker is, as the metadata store remembers it.
#[derive(Clone, Debug)]
pub struct Identity {
    pub broker_id: BrokerId,
    pub cluster_id: ClusterId,
    pub region: RegionName,
    pub region_id: RegionId,
    /// The leader epoch of everything this broker owns: one higher at each start.
    pub epoch: LeaderEpoch,
}

/// Everything that handlers work on.
pub struct Broker {
    pub config: Config,
    pub identity: Identity,
    pub meta: Arc<dyn MetaStore>,
    pub store: Arc<dyn SegmentStore>,
    pub flusher: Arc<Flusher>,
    pub metrics: Metrics,
    pub service: chassis::ServiceHandle,
    pub listeners: Vec<Arc<ListenerInfo>>,
    pub topics: Arc<TopicRegistry>,
    pub coordinator: Coordinator,
    pub mirror: crate::api::mirror::Board,
    pub lanes: Arc<Lanes>,
    pub producer_ids: ProducerIds,
    /// What the mirror reports.
    pub links: LinkBoard,
    pub frame_room: FrameRoom,
    pub open_files: Arc<OpenFiles>,
    /// The other brokers; none for a broker that is alone.
    pub cluster: Option<Arc<Cluster>>,
    /// The way to them.
    pub peers: Option<Arc<Peers>>,
    partitions: RwLock<Arc<PartitionMap>>,
}

/// By topic, then index; `None` is owned by another broker, or not open yet.
type PartitionMap = HashMap<TopicName, Arc<[Option<Arc<Partition>>]>>;

/// Why a partition is not there to be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("partition {topic}-{index}: {error}")]
    Recover { topic: TopicName, index: i32, error: RecoverError },
    #[error("opening partitions of {0} was interrupted")]
    Interrupted(TopicName),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Meta(#[from] MetaError),
}

/// What a broker is made of.
pub struct Parts {
    pub config: Config,
    pub identity: Identity,
    pub meta: Arc<dyn MetaStore>,
    pub store: Arc<dyn SegmentStore>,
    pub flusher: Arc<Flusher>,
    pub service: chassis::ServiceHandle,
    pub listeners: Vec<Arc<ListenerInfo>>,
    pub topics: Arc<TopicRegistry>,
    /// Whether a lane exists and is not being deleted.
    pub lane_exists: Arc<dyn Fn(&Lane) -> bool + Send + Sync>,
    pub cluster: Option<Arc<Cluster>>,
}

impl Broker {
    pub fn new(parts: Parts) -> Arc<Broker> {
        let registry = parts.topics.clone();
        let topic_exists = Arc::new(move |topic: &TopicName| registry.by_name(topic.as_str()).is_some());
        let peers = parts.cluster.clone().map(|cluster| {
            let tls = parts.config.control_tls.clone();
            Peers::new(cluster, parts.topics.clone(), parts.meta.clone(), tls)
        });
        Arc::new_cyclic(|me: &Weak<Broker>| {
            let lanes = Lanes::new(LaneParts {
                owned: owned(me),
                exists: parts.lane_exists,
                peers: peers.clone(),
                grace: Duration::from_secs(u64::from(parts.config.lane_grace_seconds)),
            });
            Metrics::follow_lanes(parts.service.metrics(), &lanes);
            let rules = GroupConfig::of(&parts.config);
            let group_metrics = GroupMetrics::new(parts.service.metrics());
            let stop = parts.service.stopping().clone();
            Broker {
                topics: parts.topics,
                coordinator: Coordinator::new(rules, lanes.clone(), topic_exists, group_metrics, stop),
                mirror: crate::api::mirror::Board::default(),
                lanes,
                producer_ids: ProducerIds::new(parts.meta.clone()),
                links: LinkBoard::default(),
                frame_room: FrameRoom::new(
                    parts.config.request_bytes_total_max,
                    parts.config.request_bytes_max,
                ),
                open_files: OpenFiles::new(files_open_max(parts.config.segment_files_open_max)),
                metrics: Metrics::new(parts.service.metrics()),
                config: parts.config,
                identity: parts.identity,
                meta: parts.meta,
                store: parts.store,
                flusher: parts.flusher,
                service: parts.service,
                listeners: parts.listeners,
                cluster: parts.cluster,
                peers,
                partitions: RwLock::default(),
            }
        })
    }

    pub fn partition(&self, topic: &str, index: i32) -> Option<Arc<Partition>> {
        let partitions = self.partitions.read();
        partitions.get(topic)?.get(usize::try_from(index).ok()?)?.clone()
    }

    /// Does what may wait for the store where that is a remote one.
    pub fn may_wait<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.cluster.is_some() { may_wait(work) } else { work() }
    }

    /// What is said about a partition that is not here: another broker has it, or nobody.
    pub fn absent(&self, topic: &str, index: i32) -> ErrorCode {
        match self.topics.by_name(topic) {
            Some(topic) if topic.has_partition(index) => ErrorCode::NotLeaderOrFollower,
            _ => ErrorCode::UnknownTopicOrPartition,
        }
    }

    /// The partitions of a topic that are open here, by index.
    pub fn topic_partitions(&self, topic: &str) -> Option<Vec<Arc<Partition>>> {
        let partitions = self.partitions.read().get(topic).cloned()?;
        Some(partitions.iter().flatten().cloned().collect())
    }

    /// Every partition of this broker.
    pub fn all_partitions(&self) -> Vec<Arc<Partition>> {
        let partitions = self.partitions.read().clone();
        partitions.values().flat_map(|p| p.iter().flatten().cloned()).collect()
    }

    /// Opens the partitions of a topic up to `count` that are not open yet, and serves them.
    pub async fn open_partitions(
        self: &Arc<Self>,
        topic: &TopicName,
        topic_id: TopicId,
        count: i32,
        settings: &Settings,
    ) -> Result<(), OpenError> {
        let mut open = self.topic_partitions(topic.as_str()).unwrap_or_default();
        let first = open.len();
        let missing = (count.max(0) as usize).saturating_sub(first);
        let known = self.topics.by_id(topic_id).map_or(0, |topic| topic.opened);
        let (broker, name, settings) = (self.clone(), topic.clone(), settings.clone());
        let opened = tokio::task::spawn_blocking(move || {
            let one = |at: usize| {
                let index = (first + at) as i32;
                broker.open_one(&name, topic_id, index, &settings, index < known)
            };
            side_by_side(missing, PARTITIONS_OPENED_AT_ONCE, one).into_iter().collect::<Result<Vec<_>, _>>()
        });
        open.extend(opened.await.map_err(|_| OpenError::Interrupted(topic.clone()))??);
        let mut map = self.partitions.write();
        Arc::make_mut(&mut map).insert(topic.clone(), open.into_iter().map(Some).collect());
        Ok(())
    }

    /// Serves a partition that was opened by the caller, in the place of an older one.
    pub fn serve_partition(&self, partition: Arc<Partition>) {
        let mut map = self.partitions.write();
        let map = Arc::make_mut(&mut map);
        let mut open: Vec<Option<Arc<Partition>>> =
            map.get(&partition.topic).map(|open| open.to_vec()).unwrap_or_default();
        let index = partition.index.0.max(0) as usize;
        if open.len() <= index {
            open.resize(index + 1, None);
        }
        let topic = partition.topic.clone();
        open[index] = Some(partition);
        map.insert(topic, open.into());
    }

    /// Stops finding this partition; it is not closed.
    pub fn forget_partition(&self, partition: &Arc<Partition>) {
        let mut map = self.partitions.write();
        let map = Arc::make_mut(&mut map);
        let Some(open) = map.get(&partition.topic) else { return };
        let others = |open: &Option<Arc<Partition>>| {
            open.as_ref().filter(|open| !Arc::ptr_eq(open, partition)).cloned()
        };
        let left: Arc<[_]> = open.iter().map(others).collect();
        match left.iter().any(Option::is_some) {
            true => map.insert(partition.topic.clone(), left),
            false => map.remove(&partition.topic),
        };
    }

    fn open_one(
        &self,
        topic: &TopicName,
        topic_id: TopicId,
        index: i32,
        settings: &Settings,
        must_exist: bool,
    ) -> Result<Arc<Partition>, OpenError> {
        let under = (self.identity.epoch, self.store.clone());
        self.open(topic, topic_id, index, settings, under, must_exist)
    }

    /// Recovers a partition from `store` and makes it ready for appends under `epoch`. Blocks.
    pub fn open_under(
        &self,
        topic: &TopicName,
        topic_id: TopicId,
        index: i32,
        settings: &Settings,
        under: (LeaderEpoch, Arc<dyn SegmentStore>),
        must_exist: bool,
    ) -> Result<Arc<Partition>, OpenError> {
        self.open(topic, topic_id, index, settings, under, must_exist)
    }

    fn open(
        &self,
        topic: &TopicName,
        topic_id: TopicId,
        index: i32,
        settings: &Settings,
        (epoch, store): (LeaderEpoch, Arc<dyn SegmentStore>),
        must_exist: bool,
    ) -> Result<Arc<Partition>, OpenError> {
        let open = OpenPartition {
            topic: topic.clone(),
            topic_id,
            index: PartitionIndex(index),
            epoch,
            store,
            durability: self.config.durability,
            flusher: self.flusher.clone(),
            settings: settings.clone(),
            now: clock::now(),
            open_files: self.open_files.clone(),
            must_exist,
        };
        open.open().map_err(|error| OpenError::Recover { topic: topic.clone(), index, error })
    }

    /// New settings for all partitions of a topic, from the next append on.
    pub fn set_topic_settings(&self, topic: &TopicName, settings: &Settings) {
        for partition in self.topic_partitions(topic.as_str()).iter().flat_map(|p| p.iter()) {
            partition.set_settings(settings.clone());
        }
    }

    /// Stops serving a topic and removes its files. Readers and writers are told at once.
    pub async fn delete_partitions(&self, topic: &TopicName, topic_id: TopicId) -> Result<(), StoreError> {
        let gone = Arc::make_mut(&mut self.partitions.write()).remove(topic);
        let store = self.store.clone();
        let delete = move || {
            for partition in gone.iter().flat_map(|p| p.iter().flatten()) {
                partition.delete()?;
            }
            let dir = broker_store::StorePath::root().join(&topic_id.0.to_string());
            store.delete(&dir.map_err(|e| StoreError::Io(e.to_string()))?)
        };
        let deleted = tokio::task::spawn_blocking(delete).await;
        deleted.map_err(|_| StoreError::Io("interrupted".into()))??;
        if let Err(error) = self.topics.files_gone(topic_id).await {
            tracing::warn!(%topic, %error, "that its files are gone is noted at the next start");
        }
        Ok(())
    }

    /// Opens everything that the metadata store says is this broker's.
    pub async fn recover(self: &Arc<Self>) -> Result<(), OpenError> {
        self.remove_deleted().await?;
        let topics = futures_util::stream::iter(self.topics.all());
        let open = async |topic: Arc<Topic>| {
            let opened = self.open_partitions(&topic.name, topic.id, topic.partitions, &topic.settings).await;
            if let Err(error) = opened {
                // The others are served; this one is tried again for as long as the broker runs.
                tracing::error!(topic = %topic.name, %error, "a topic cannot be opened and is not served");
            }
        };
        topics.for_each_concurrent(TOPICS_OPENED_AT_ONCE, open).await;
        coordinator::serve_existing(self);
        self.coordinator.loaded().await;
        Ok(())
    }

    /// Removes what is left of topics whose deletion is on record. Files that no record explains are
    /// not touched: metadata that lost its end, or is of an older day, must not cost any data.
    async fn remove_deleted(&self) -> Result<(), OpenError> {
        let root = broker_store::StorePath::root();
        for id in self.topics.deleted().await? {
            if self.topics.by_id(id).is_none() {
                tracing::info!(topic_id = %id, "removing the files of a deleted topic");
                let dir = root.join(&id.0.to_string()).map_err(|e| StoreError::Io(e.to_string()))?;
                self.store.delete(&dir)?;
            }
            // Where the topic is still there its deletion failed.
            self.topics.files_gone(id).await?;
        }
        for entry in self.store.list(&root)? {
            let Ok(id) = Uuid::parse_str(&entry.name) else { continue };
            if self.topics.by_id(TopicId(id)).is_none() {
                tracing::warn!(
                    topic_id = %id,
                    "the metadata names no topic with this id; its folder in `topics` is left alone: restore the \
                     metadata, or remove it"
                );
            }
        }
        Ok(())
    }

    /// Flushes and ends every partition, at a stop.
    pub fn release_partitions(&self) {
        for partition in self.all_partitions() {
            partition.release();
        }
        self.flusher.stop();
    }
}

/// The partitions, as lanes see them: lanes are a part of the broker and must not keep it alive.
fn owned(broker: &Weak<Broker>) -> Owned {
    let (one, all) = (broker.clone(), broker.clone());
    Owned {
        find: Arc::new(move |topic, index| one.upgrade()?.partition(topic.as_str(), index.0)),
        all: Arc::new(move || all.upgrade().map(|b| b.all_partitions()).unwrap_or_default()),
    }
}

/// Sealed segments may hold a quarter of the files that this process may open: connections and active
/// segments are files too.
fn files_open_max(configured: u32) -> usize {
    use rustix::process::{Resource, getrlimit};
    let allowed = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    (configured as usize).min(allowed / 4)
}

/// The object `cluster` in the metadata store.
#[derive(Serialize, Deserialize)]
struct ClusterObject {
    cluster_id: String,
    region: String,
    region_id: Uuid,
    starts: i32,
}

const TOPICS_OPENED_AT_ONCE: usize = 8;
/// Opening waits for the disk more than it works, and the disk syncs many files in little more time than one.
const PARTITIONS_OPENED_AT_ONCE: usize = 8;

/// Why the broker cannot say who it is.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("region: {0}")]
    Region(#[from] kafka::names::NameError),
    #[error("this data directory belongs to region {found:?}; the configuration says region {asked:?}")]
    OtherRegion { found: String, asked: String },
    #[error("the object `cluster` in the metadata store cannot be read: {0}")]
    Damaged(#[from] serde_json::Error),
    #[error(transparent)]
    Meta(#[from] MetaError),
}

const CLUSTER_KEY: &str = "cluster";

impl Identity {
    /// Reads the identity, or makes one at the first start; counts this start.
    pub async fn load(meta: &dyn MetaStore, region: &str) -> Result<Identity, IdentityError> {
        let region = RegionName::parse(region)?;
        let found = meta.get(CLUSTER_KEY).await?;
        let version = found.as_ref().map(|(_, version)| *version);
        let mut object = match found {
            Some((bytes, _)) => serde_json::from_slice(&bytes)?,
            None => ClusterObject {
                cluster_id: cluster_id(),
                region: region.to_string(),
                region_id: Uuid::new_v4(),
                starts: -1,
            },
        };
        if object.region != region.as_str() {
            return Err(IdentityError::OtherRegion { found: object.region, asked: region.to_string() });
        }
        object.starts += 1;
        meta.put_if(CLUSTER_KEY, serde_json::to_vec(&object)?, version).await?;
        Ok(Identity {
            broker_id: BrokerId(1),
            cluster_id: ClusterId::new(&object.cluster_id),
            region,
            region_id: RegionId(object.region_id),
            epoch: LeaderEpoch(object.starts),
        })
    }

    /// The identity of one broker of a cluster; the first of them makes the cluster's.
    pub async fn in_cluster(
        meta: &dyn MetaStore,
        region: &str,
        broker: i32,
    ) -> Result<Identity, IdentityError> {
        let region = RegionName::parse(region)?;
        let object = loop {
            if let Some((bytes, _)) = meta.get(CLUSTER_KEY).await? {
                break serde_json::from_slice::<ClusterObject>(&bytes)?;
            }
            let object = ClusterObject {
                cluster_id: cluster_id(),
                region: region.to_string(),
                region_id: Uuid::new_v4(),
                starts: 0,
            };
            match meta.put_if(CLUSTER_KEY, serde_json::to_vec(&object)?, None).await {
                Ok(_) | Err(MetaError::Conflict { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        };
        if object.region != region.as_str() {
            return Err(IdentityError::OtherRegion { found: object.region, asked: region.to_string() });
        }
        Ok(Identity {
            broker_id: BrokerId(broker),
            cluster_id: ClusterId::new(&object.cluster_id),
            region,
            region_id: RegionId(object.region_id),
            // Of partitions, each has its own.
            epoch: LeaderEpoch(0),
        })
    }
}

/// 22 characters of URL-safe base 64 over 16 random bytes, as Apache Kafka makes them: never with a
/// dash in front, which command lines would take for an option.
fn cluster_id() -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut bits = Uuid::new_v4().as_u128();
    let mut text: Vec<u8> = Vec::with_capacity(22);
    for place in 0..22 {
        // The version and variant bits of a UUID are not random; 62 letters and digits are in front.
        let choices = if place == 0 { 62 } else { 64 };
        text.push(ALPHABET[(bits % choices) as usize]);
        bits >>= 6;
    }
    String::from_utf8_lossy(&text).into_owned()
}
