//! The broker as a service: opens its stores, recovers, serves, and lets go in order.
//! What a broker is made of is `broker`; here is in which order it comes and goes.

use std::sync::Arc;
use std::time::Duration;

use broker_store::{MetaError, MetaStore, SegmentStore, StoreError, StorePath, meta, segment};
use chassis::ServiceHandle;
use tokio::net::TcpListener;

use crate::broker::{Broker, Identity, IdentityError, OpenError, Parts};
use crate::clock;
use crate::cluster::{self, ClusterStores, Joining};
use crate::config::{Config, Storage};
use crate::configs::{self, ConfigError, Overrides, TopicDefaults};
use crate::control;
use crate::partition::Flusher;
use crate::server::{BindError, BoundListener};
use crate::topics::{TopicError, TopicRegistry};
use crate::waiting::Waits;

/// Why a broker does not start; each names the thing.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("metadata in {dir}: {error}")]
    Meta { dir: String, error: MetaError },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Control(#[from] control::ControlError),
    #[error("topics in the metadata store: {0}")]
    Topics(#[from] TopicError),
    #[error("lanes_extractors: {0}")]
    Extractors(ConfigError),
    #[error("identity of this broker in {file}: {error}")]
    IdentityFile { file: String, error: std::io::Error },
    #[error("durability = \"os\" and [cluster]: {0}")]
    Durability(&'static str),
    #[error("cluster.{key}: {reason}")]
    Cluster { key: &'static str, reason: String },
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error("http_bind {address}: {error}")]
    Http { address: String, error: std::io::Error },
}

/// A broker that serves.
pub struct Running {
    pub broker: Arc<Broker>,
    /// Addresses of the listeners, in the order of the configuration.
    pub addresses: Vec<std::net::SocketAddr>,
}

/// Starts a broker as tasks of `service` and returns when clients are served.
pub async fn start(config: Config, service: ServiceHandle) -> Result<Running, StartError> {
    for name in crate::switches::all_set() {
        tracing::warn!(%name, "a safety mechanism is switched off, or a fault on, for a test");
    }
    let stores = Stores::open(&config).await?;
    start_on(stores, config, service).await
}

type Identified = (Arc<dyn SegmentStore>, Arc<dyn MetaStore>, Identity, Option<Joining>);

/// Who this broker is on its stores, and what it joins.
async fn identified(stores: Stores, config: &Config, waits: &Waits) -> Result<Identified, StartError> {
    match stores {
        Stores::Own(store, meta) => {
            let identity = Identity::load(&*meta, &config.region).await?;
            Ok((store, meta, identity, None))
        }
        Stores::Cluster(stores) => {
            let meta = stores.meta.clone();
            let joining = Joining::prepare(config, stores, waits).await?;
            // Partitions bring the store of the life that took them over.
            let store: Arc<dyn SegmentStore> = Arc::new(segment::Memory::new());
            Ok((store, meta, joining.identity.clone(), Some(joining)))
        }
    }
}

/// The same on stores that are open already.
pub async fn start_on(
    stores: Stores,
    mut config: Config,
    service: ServiceHandle,
) -> Result<Running, StartError> {
    // First of all: whoever asks is to hear that it lives, and what it waits for.
    let waits = Waits::default();
    if !config.http_bind.is_empty() {
        serve_http(&service, config.http_bind.clone()).await?;
    }
    let waiting = waits.clone();
    service.on_probe(move || waiting.troubles());
    let (store, meta, identity, joining) = identified(stores, &config, &waits).await?;
    let mut bound = Vec::new();
    for listener in &config.listeners {
        bound.push(BoundListener::bind(listener).await?);
    }
    let interval = Duration::from_millis(u64::from(config.flush_interval_ms.max(1)));
    let flusher = Flusher::start(config.flush_threads as usize, interval, config.inflight_produce_bytes_max)
        .map_err(StartError::Thread)?;
    let listeners = bound.iter().map(|b| b.info.clone()).collect();
    let control = control::bind(&config).await?;
    if config.control_bind.ends_with(":0") {
        // Others are told where it is.
        config.control_bind = control.address.to_string();
    }
    let directory = control::open_lanes(meta.clone(), &config).await?;
    let topics = Arc::new(open_topics(&config, meta.clone()).await?);
    let lane_exists = lane_exists(directory.clone());
    let service_handle = service.clone();
    let broker = Broker::new(Parts {
        config,
        identity,
        meta,
        store,
        flusher,
        service: service_handle,
        listeners,
        topics,
        lane_exists,
        cluster: joining.as_ref().map(|joining| joining.cluster.clone()),
    });
    let is_alone = joining.is_none();
    if let Some(peers) = &broker.peers {
        directory.share(peers.clone());
        follow_directory(&broker, &directory);
    }
    match joining {
        Some(joining) => joining.join(&broker).await,
        None => broker.recover().await?,
    }
    let addresses = bound.iter().map(|b| b.address).collect();
    for listener in bound {
        listener.serve(&broker);
    }
    follow_graces(&broker, &directory);
    control::serve(&broker, directory, control);
    follow_lanes(&broker);
    keep_house(&broker);
    if is_alone {
        release_at_the_end(&broker);
        mend_topics(&broker);
    }
    crate::health::follow(&broker);
    service.set_ready(true);
    let identity = &broker.identity;
    tracing::info!(region = %identity.region, cluster = %identity.cluster_id, epoch = %identity.epoch, "broker ready");
    Ok(Running { broker, addresses })
}

/// Topics that could not be served when they were made.
fn mend_topics(broker: &Arc<Broker>) {
    let (mending, stop) = (broker.clone(), broker.service.stopping().clone());
    broker.service.spawn_child(async move {
        stop.run_until_cancelled(mending.mend()).await;
    });
}

/// Grace timers of lanes; and word to them when every group of the log has been taken over.
fn follow_lanes(broker: &Arc<Broker>) {
    let (lanes, stop) = (broker.lanes.clone(), broker.service.stopping().clone());
    broker.service.spawn("lanes", async move {
        lanes.run(stop).await;
        Ok::<(), std::convert::Infallible>(())
    });
    if broker.cluster.is_some() {
        // There coordinators tell.
        return;
    }
    let (taking_over, stop) = (broker.clone(), broker.service.stopping().clone());
    broker.service.spawn_child(async move {
        if stop.run_until_cancelled(taking_over.coordinator.loaded()).await.is_some() {
            taking_over.lanes.views_known();
        }
    });
}

/// The lanes of a cluster, over every failure of the store.
fn follow_directory(broker: &Arc<Broker>, directory: &Arc<control::LaneDirectory>) {
    let (directory, stop) = (directory.clone(), broker.service.stopping().clone());
    broker.service.spawn_child(async move {
        let following = async {
            loop {
                if let Err(error) = directory.follow().await {
                    tracing::warn!(%error, "lanes cannot be followed; trying again");
                    tokio::time::sleep(FOLLOW_AGAIN).await;
                }
            }
        };
        stop.run_until_cancelled(following).await;
    });
}

/// Keeps the graces of lanes as the lanes' own settings say.
fn follow_graces(broker: &Arc<Broker>, directory: &Arc<control::LaneDirectory>) {
    let (mut sets, stop) = (directory.watch(), broker.service.stopping().clone());
    let lanes = broker.lanes.clone();
    broker.service.spawn_child(async move {
        let following = async {
            loop {
                lanes.set_graces(sets.borrow_and_update().graces());
                if sets.changed().await.is_err() {
                    return;
                }
            }
        };
        stop.run_until_cancelled(following).await;
    });
}

const FOLLOW_AGAIN: Duration = Duration::from_secs(1);

fn lane_exists(
    directory: Arc<control::LaneDirectory>,
) -> Arc<dyn Fn(&lane_core::Lane) -> bool + Send + Sync> {
    Arc::new(move |lane| directory.lane(lane.as_str()).is_ok_and(|object| !object.deleting))
}

async fn open_topics(config: &Config, meta: Arc<dyn MetaStore>) -> Result<TopicRegistry, StartError> {
    let mut values = Overrides::default();
    if config.lanes_default {
        values.insert(configs::LANES.to_owned(), "true".to_owned());
    }
    let extractors = config.lanes_extractors.join(",");
    if extractors != lane_core::extract::STANDARD {
        values.insert(configs::LANE_EXTRACTORS.to_owned(), extractors);
    }
    let defaults = TopicDefaults::new(values).map_err(StartError::Extractors)?;
    Ok(TopicRegistry::load(meta, defaults, config.num_partitions).await?)
}

/// Where a broker keeps things.
pub enum Stores {
    /// Its own directory, or memory.
    Own(Arc<dyn SegmentStore>, Arc<dyn MetaStore>),
    /// What a cluster shares.
    Cluster(ClusterStores),
}

impl Stores {
    /// As the configuration says.
    pub async fn open(config: &Config) -> Result<Stores, StartError> {
        match &config.cluster {
            Some(cluster) => Ok(Stores::Cluster(cluster::open_stores(cluster).await?)),
            None => open_stores(config).map(|(store, meta)| Stores::Own(store, meta)),
        }
    }
}

fn open_stores(config: &Config) -> Result<(Arc<dyn SegmentStore>, Arc<dyn MetaStore>), StartError> {
    let dir = &config.data_dir;
    let store: Arc<dyn SegmentStore> = match config.storage {
        Storage::Memory => return Ok((Arc::new(segment::Memory::new()), Arc::new(meta::Memory::new()))),
        Storage::Disk => Arc::new(segment::Disk::open(dir)?),
        Storage::Volatile => Arc::new(segment::Volatile::open(dir)?),
    };
    let meta_dir = dir.join("meta");
    let damaged = |error| StartError::Meta { dir: meta_dir.display().to_string(), error };
    // New metadata would name none of the topics that are there.
    if !meta::File::exists(&meta_dir) && !store.list(&StorePath::root())?.is_empty() {
        let reason = "its log is missing though the data directory holds topics".to_owned();
        return Err(damaged(MetaError::Corrupt(reason)));
    }
    let meta = meta::File::open(&meta_dir).map_err(damaged)?;
    Ok((store, Arc::new(meta)))
}

async fn serve_http(service: &ServiceHandle, address: String) -> Result<(), StartError> {
    let listener = TcpListener::bind(&address).await;
    let served = listener.and_then(|l| chassis::admin::serve(service, l, Vec::new()));
    served.map(|_| ()).map_err(|error| StartError::Http { address, error })
}

/// Retention at its interval.
fn keep_house(broker: &Arc<Broker>) {
    let period = Duration::from_millis(u64::from(broker.config.retention_check_ms.max(10)));
    let (cleaner, stop) = (broker.clone(), broker.service.stopping().clone());
    broker.service.spawn("retention", async move {
        while stop.run_until_cancelled(tokio::time::sleep(period)).await.is_some() {
            let broker = cleaner.clone();
            let _ = tokio::task::spawn_blocking(move || {
                enforce_retention(&broker);
                crate::coordinator::compact(&broker);
            })
            .await;
        }
        Ok::<(), std::io::Error>(())
    });
}

/// The release of all partitions, when nobody is served any more.
fn release_at_the_end(broker: &Arc<Broker>) {
    let (releaser, stop) = (broker.clone(), broker.service.back_stopping().clone());
    broker.service.spawn_back("release", async move {
        stop.cancelled().await;
        let released = tokio::task::spawn_blocking(move || releaser.release_partitions()).await;
        released.map_err(|_| std::io::Error::other("releasing partitions failed"))
    });
}

fn enforce_retention(broker: &Broker) {
    for partition in broker.all_partitions() {
        // In a cluster the log itself says what is durable, and each mark would be a flush of the store.
        if broker.cluster.is_none()
            && let Err(error) = partition.mark_durable()
        {
            tracing::warn!(%partition, %error, "the durable mark is written later");
        }
        if partition.topic.is_internal() {
            continue;
        }
        match partition.enforce_retention(clock::now()) {
            Ok(0) => {}
            Ok(bytes) => tracing::info!(%partition, bytes, "retention removed old segments"),
            Err(error) => tracing::warn!(%partition, %error, "retention failed and is tried again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_without_their_metadata_are_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data_dir: dir.path().to_owned(), ..Config::default() };
        drop(open_stores(&config).unwrap());
        std::fs::create_dir_all(dir.path().join("topics/some-topic/t-0")).unwrap();
        drop(open_stores(&config).unwrap());

        std::fs::remove_file(dir.path().join("meta/meta.log")).unwrap();
        let error = open_stores(&config).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("meta") && error.contains("missing"), "{error}");
        assert!(dir.path().join("topics/some-topic/t-0").exists());
    }
}
