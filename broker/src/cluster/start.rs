//! How a broker joins its cluster at a start: its id, the view, the controller's election, its first life.
//!
//! And which store it may use: a cluster has one, and a store has one cluster. What does not answer is waited for
//! and told; what cannot work ends the start with the key that is to be changed.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use broker_store::shared::Options;
use broker_store::{MetaError, Remote, StoreError, StorePath};
use bytes::Bytes;
use tokio::sync::{oneshot, watch};

use super::objects::{ASSIGNMENTS, STORE};
use super::{BrokerObject, Cluster, ClusterStores, Controller, Member, Views, broker_id};
use crate::broker::{Broker, Identity, IdentityError};
use crate::config::{ClusterConfig, Config, Role};
use crate::partition::Durability;
use crate::service::StartError;
use crate::waiting::{self, Waits};

/// Between two tries of a store that does not answer.
const RETRY: Duration = Duration::from_secs(1);

/// What is known before the broker is made.
pub struct Joining {
    pub cluster: Arc<Cluster>,
    pub identity: Identity,
    stores: ClusterStores,
    config: ClusterConfig,
    pub(super) options: Options,
    name: String,
}

impl Joining {
    /// Takes the broker's id. Waits for a metadata store that does not answer, and says so.
    pub async fn prepare(
        config: &Config,
        stores: ClusterStores,
        waits: &Waits,
    ) -> Result<Joining, StartError> {
        let of_cluster = config.cluster.clone().unwrap_or_default();
        if config.durability != Durability::Sync {
            let reason =
                "a cluster has no page cache to trust: only \"sync\", and acks=1 for who is in a hurry";
            return Err(StartError::Durability(reason));
        }
        let name = match of_cluster.identity.is_empty() {
            true => kept_name(&config.data_dir)?,
            false => of_cluster.identity.clone(),
        };
        loop {
            let id = match broker_id(&*stores.meta, &name).await {
                Ok(id) => id,
                Err(error) if error.is_retryable() => {
                    waits.on("the metadata store", &error);
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
                Err(error) => return Err(StartError::Meta { dir: of_cluster.etcd.join(","), error }),
            };
            let identity = match Identity::in_cluster(&*stores.meta, &config.region, id).await {
                Err(IdentityError::Meta(error)) if error.is_retryable() => {
                    waits.on("the metadata store", &error);
                    tokio::time::sleep(RETRY).await;
                    continue;
                }
                identity => identity?,
            };
            claim(&stores, &of_cluster.store, identity.cluster_id.as_str(), waits).await?;
            waits.over();
            let cluster = Arc::new(Cluster::new(id));
            let options = options(&of_cluster);
            return Ok(Joining { cluster, identity, stores, config: of_cluster, options, name });
        }
    }

    /// Follows the cluster, stands for election, and returns when this broker takes part.
    pub async fn join(self, broker: &Arc<Broker>) {
        let (first, complete) = oneshot::channel();
        follow(broker, &self.stores, &self.cluster.views, first);
        // Dropped only when the service stops.
        let _ = complete.await;
        let lease = Duration::from_millis(u64::from(self.config.lease_ms.max(500)));
        if self.config.roles.contains(&Role::Controller) {
            let controller = Controller {
                me: self.cluster.me,
                meta: self.stores.meta.clone(),
                views: self.cluster.views.clone(),
                topics: broker.topics.clone(),
                remote: self.stores.remote.clone(),
                lease,
                sweep_every: Duration::from_millis(u64::from(self.config.sweep_ms.max(100))),
            };
            broker.service.spawn_child(controller.run(broker.service.stopping().clone()));
        }
        let (serving, mut served) = watch::channel(false);
        let member = Member {
            broker: broker.clone(),
            cluster: self.cluster,
            stores: self.stores,
            identity: self.name,
            registration: registration(broker, self.config.roles.clone()),
            lease,
            options: self.options,
            serving,
        };
        // Handed back while clients are still here to be told.
        let stop = broker.service.stopping().clone();
        broker.service.spawn("cluster member", async move {
            member.run(stop).await;
            Ok::<(), std::convert::Infallible>(())
        });
        let (flusher, stop) = (broker.flusher.clone(), broker.service.back_stopping().clone());
        broker.service.spawn_back("flusher", async move {
            stop.cancelled().await;
            flusher.stop();
            Ok::<(), std::convert::Infallible>(())
        });
        let stopping = broker.service.stopping().clone();
        let _ = stopping.run_until_cancelled(served.wait_for(|serving| *serving)).await;
    }
}

/// The store belongs to the first cluster that used it, and the cluster to the first store: what another keeps
/// there would not be found here, and what this broker kept elsewhere would not be found by the others.
///
/// The store is claimed first, then it is named in the metadata store: a name that was never right does not stay.
/// Once there is a name, only a store of that name is claimed; one that is called otherwise may be the same, and is
/// if it names the cluster.
async fn claim(stores: &ClusterStores, place: &str, id: &str, waits: &Waits) -> Result<(), StartError> {
    let wrong = |reason: String| StartError::Cluster { key: "store", reason };
    let place = place.trim_end_matches('/');
    let known = known_store(stores, place, waits).await?;
    // Of a cluster that has topics, but was made before its store was written down.
    let is_old = known.is_none() && {
        let topics = answered(waits, async || stores.meta.list(ASSIGNMENTS).await).await;
        !topics.map_err(|error| StartError::Meta { dir: place.to_owned(), error })?.is_empty()
    };
    let may_claim = known.as_deref().map_or(!is_old, |known| known == place);
    let (remote, name_of, waits_on) = (stores.remote.clone(), id.to_owned(), waits.clone());
    let there = waiting::blocking(move || {
        loop {
            match cluster_of(&*remote, &name_of, may_claim) {
                Err(error) if error.is_retryable() => {
                    waits_on.on("the store", &error);
                    std::thread::sleep(RETRY);
                }
                outcome => return outcome,
            }
        }
    });
    match there.await {
        Some(Ok(Some(there))) if there == id => {}
        Some(Ok(Some(there))) => {
            return Err(wrong(format!(
                "it belongs to the cluster with id {there}; choose another path, or that cluster's etcd"
            )));
        }
        Some(Ok(None)) => {
            let known = known.as_deref().unwrap_or("another place");
            return Err(wrong(format!(
                "nothing of this cluster is there, whose brokers keep their bytes at {known}; write that, or another \
                 `cluster.name` for a new cluster"
            )));
        }
        Some(Err(error)) => return Err(wrong(error.to_string())),
        None => return Err(wrong("interrupted".to_owned())),
    }
    if known.is_some() {
        return Ok(());
    }
    let first = name_store(stores, place, waits).await?;
    if first == place {
        return Ok(());
    }
    // Another broker was the first, elsewhere: what was claimed here is let go.
    if may_claim {
        let remote = stores.remote.clone();
        let let_go = waiting::blocking(move || remote.delete(&cluster_id_name()?)).await;
        if let Some(Err(error)) = let_go {
            tracing::warn!(%error, "the object cluster-id stays at {place}; remove it");
        }
    }
    Err(wrong(format!("the brokers of this cluster keep their bytes at {first}; write that")))
}

/// Where the brokers of this cluster keep their bytes, once one of them has begun.
async fn known_store(
    stores: &ClusterStores,
    place: &str,
    waits: &Waits,
) -> Result<Option<String>, StartError> {
    let known = answered(waits, async || stores.meta.get(STORE).await).await;
    let known = known.map_err(|error| StartError::Meta { dir: place.to_owned(), error })?;
    Ok(known.map(|(value, _)| String::from_utf8_lossy(&value).into_owned()))
}

/// Writes the place down, unless another broker was the first; the place that counts.
async fn name_store(stores: &ClusterStores, place: &str, waits: &Waits) -> Result<String, StartError> {
    let put =
        answered(waits, async || stores.meta.put_if(STORE, place.as_bytes().to_vec(), None).await).await;
    match put {
        Ok(_) => Ok(place.to_owned()),
        Err(MetaError::Conflict { .. }) => {
            let known = known_store(stores, place, waits).await?;
            Ok(known.unwrap_or_else(|| place.to_owned()))
        }
        Err(error) => Err(StartError::Meta { dir: place.to_owned(), error }),
    }
}

/// Asks the metadata store until it answers.
async fn answered<T>(waits: &Waits, ask: impl AsyncFn() -> Result<T, MetaError>) -> Result<T, MetaError> {
    loop {
        match ask().await {
            Err(error) if error.is_retryable() => {
                waits.on("the metadata store", &error);
                tokio::time::sleep(RETRY).await;
            }
            outcome => return outcome,
        }
    }
}

fn cluster_id_name() -> Result<StorePath, StoreError> {
    StorePath::parse("cluster-id").map_err(|error| StoreError::Io(error.to_string()))
}

/// The id of the cluster that a store belongs to: `id` from now on if it is nobody's and may be claimed.
fn cluster_of(remote: &dyn Remote, id: &str, may_claim: bool) -> Result<Option<String>, StoreError> {
    let name = cluster_id_name()?;
    if may_claim {
        match remote.put(&name, Bytes::from(id.to_owned())) {
            Ok(()) => return Ok(Some(id.to_owned())),
            Err(StoreError::AlreadyExists) => {}
            Err(error) => return Err(error),
        }
    }
    match remote.get(&name, 0, CLUSTER_ID_BYTES_MAX) {
        Ok(there) => Ok(Some(String::from_utf8_lossy(&there).into_owned())),
        Err(StoreError::NotFound) if !may_claim => Ok(None),
        Err(error) => Err(error),
    }
}

const CLUSTER_ID_BYTES_MAX: usize = 64;

/// The view and the topics, for the life of the service, over every failure of the store.
fn follow(broker: &Arc<Broker>, stores: &ClusterStores, views: &Arc<Views>, first: oneshot::Sender<()>) {
    let (views, meta, stop) = (views.clone(), stores.meta.clone(), broker.service.stopping().clone());
    let (topics, stop_topics) = (broker.topics.clone(), stop.clone());
    broker.service.spawn_child(async move {
        let mut first = Some(first);
        let following = async {
            loop {
                if let Err(error) = views.follow(meta.clone(), &mut first).await {
                    tracing::warn!(%error, "the cluster cannot be followed; trying again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        stop.run_until_cancelled(following).await;
    });
    broker.service.spawn_child(async move {
        let following = async {
            loop {
                if let Err(error) = topics.follow().await {
                    tracing::warn!(%error, "topics cannot be followed; trying again");
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        stop_topics.run_until_cancelled(following).await;
    });
}

fn registration(broker: &Broker, roles: Vec<Role>) -> BrokerObject {
    let address = |l: &Arc<crate::server::ListenerInfo>| {
        (l.name.clone(), format!("{}:{}", l.advertised_host, l.advertised_port))
    };
    let listeners: BTreeMap<String, String> = broker.listeners.iter().map(address).collect();
    let config = &broker.config;
    let control = match config.control_advertised.is_empty() {
        true => config.control_bind.clone(),
        false => config.control_advertised.clone(),
    };
    BrokerObject { life: 0, listeners, control, roles }
}

fn options(config: &ClusterConfig) -> Options {
    Options {
        log_bytes_target: config.log_bytes_max / 2,
        log_bytes_max: config.log_bytes_max,
        cache_bytes: usize::try_from(config.cache_bytes_max).unwrap_or(usize::MAX),
        ..Options::default()
    }
}

const NAME_FILE: &str = "identity";

/// The name that is kept in the data directory, made at the first start.
fn kept_name(dir: &Path) -> Result<String, StartError> {
    let file = dir.join(NAME_FILE);
    let failed = |error: std::io::Error| StartError::IdentityFile { file: file.display().to_string(), error };
    match std::fs::read_to_string(&file) {
        Ok(name) if !name.trim().is_empty() => return Ok(name.trim().to_owned()),
        Ok(_) => {
            return Err(failed(std::io::Error::other(
                "it is empty; restore it, or remove it for a new broker",
            )));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let name = uuid::Uuid::new_v4().to_string();
    std::fs::create_dir_all(dir).map_err(failed)?;
    let fresh = dir.join("identity.new");
    let write = || {
        std::fs::write(&fresh, &name)?;
        std::fs::File::open(&fresh)?.sync_all()?;
        std::fs::rename(&fresh, &file)?;
        std::fs::File::open(dir)?.sync_all()
    };
    write().map_err(failed)?;
    Ok(name)
}
