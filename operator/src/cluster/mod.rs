//! BrokerCluster and BrokerPool: one look at a cluster and its pools, and what follows from it.
//!
//! `plan` makes the objects (pure), `certificates` and `config` what is in them, `pods` tells why a pod is not ready. This
//! file observes, applies in an order in which nothing waits for what comes later, and says how it stands. Volumes are
//! never deleted from here; pods are restarted by their StatefulSet, one by one, and only as it finds them ready.

mod certificates;
mod config;
mod plan;
mod pods;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Secret, Service};
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::events::EventType;
use kube::runtime::reflector::ObjectRef;

use crate::apply::Owner;
use crate::conditions::{Status, Verdict, after, is_true};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled, Wakes, primary, run, secondary};
use crate::crd::{
    BrokerCluster, BrokerClusterStatus, BrokerCounts, BrokerPool, BrokerPoolStatus, Endpoint, Listener,
    ListenerType, MetadataType, PoolBroker,
};
use crate::failure::Failure;
use crate::names::{CLUSTER, COMPONENT, POOL};
use crate::region::Region;
use config::Outside;

/// Starts the controller.
pub fn start(cx: &Arc<Context>) {
    let component = format!("{COMPONENT}=broker");
    let wakes: Vec<Wakes<BrokerCluster>> = vec![
        secondary::<BrokerPool, BrokerCluster>(cx, "pools of clusters", None, |pool| {
            let namespace = pool.namespace().unwrap_or_default();
            vec![ObjectRef::new(&pool.spec.cluster_ref.name).within(&namespace)]
        }),
        secondary::<StatefulSet, BrokerCluster>(cx, "statefulsets", Some(component.clone()), of_cluster),
        secondary::<Pod, BrokerCluster>(cx, "pods", Some(component.clone()), of_cluster),
        secondary::<Service, BrokerCluster>(cx, "services", Some(component), of_cluster),
        secondary::<Secret, BrokerCluster>(
            cx,
            "certificates",
            Some(format!("{COMPONENT}=certificates")),
            of_cluster,
        ),
    ];
    let clusters = primary::<BrokerCluster>(cx);
    cx.service.spawn_child(run(cx.clone(), "clusters", clusters, wakes, reconcile));
}

fn of_cluster<K: kube::Resource>(object: &K) -> Vec<ObjectRef<BrokerCluster>> {
    let namespace = object.namespace().unwrap_or_default();
    let name = object.labels().get(CLUSTER);
    name.map(|name| ObjectRef::new(name).within(&namespace)).into_iter().collect()
}

fn reconcile(cx: Arc<Context>, cluster: Arc<BrokerCluster>) -> BoxFuture<'static, Reconciled> {
    async move {
        let again = Again(Duration::from_secs(u64::from(cx.config.resync_seconds.max(1))));
        if cluster.metadata.deletion_timestamp.is_some() {
            return Ok(again);
        }
        let mut status = cluster.status.clone().unwrap_or_default();
        let mut verdicts = Vec::new();
        if is_paused(&*cluster) {
            verdicts.push(Verdict::yes("Paused", "Annotation", "nothing is written for it"));
        } else {
            verdicts.push(Verdict::no("Paused", "No", ""));
            match bring(&cx, &cluster, &mut status).await {
                Ok(found) => verdicts.extend(found),
                Err(failure) => verdicts.push(told(failure)?),
            }
        }
        tell(&cx, &cluster, &verdicts).await;
        status.observed_generation = cluster.metadata.generation;
        status.conditions = after(&status.conditions, &verdicts, cluster.metadata.generation);
        let ready = is_true(&status.conditions, "Ready");
        cx.status(&*cluster, cluster.status.as_ref(), &status).await?;
        Ok(if ready { again } else { Again(NOT_READY) })
    }
    .boxed()
}

/// What a person can mend is a condition; all else is tried again.
fn told(failure: Failure) -> Result<Verdict, Failure> {
    match failure {
        foreign @ Failure::Foreign { .. } => Ok(Verdict::no("Ready", "NameTaken", foreign.to_string())),
        refused if refused.is_invalid() => Ok(Verdict::no("Ready", "Refused", refused.to_string())),
        Failure::DataPlane(text) => Ok(Verdict::no("Ready", "Starting", text)),
        other => Err(other),
    }
}

async fn bring(
    cx: &Context,
    cluster: &BrokerCluster,
    status: &mut BrokerClusterStatus,
) -> Result<Vec<Verdict>, Failure> {
    let mut region = Region::of(cx, cluster);
    // Remembered, so that a later operator with another default restarts nothing.
    let image = cluster
        .spec
        .image
        .clone()
        .or_else(|| status.image.clone())
        .unwrap_or_else(|| cx.config.image.clone());
    status.image = Some(image.clone());
    region.cluster.status = Some(status.clone());
    let pools = pools(cx, &region).await?;
    if let Some(text) = too_many(&region, &pools) {
        return Ok(vec![
            Verdict::no("Accepted", "TooManyBrokers", text.clone()),
            Verdict::no("Ready", "TooManyBrokers", text),
        ]);
    }
    let mut verdicts = vec![Verdict::yes("Accepted", "Accepted", "")];
    if let Some(text) = missing(cx, &region).await? {
        verdicts.push(Verdict::no("ResolvedRefs", "SecretMissing", text.clone()));
        verdicts.push(Verdict::no("Ready", "SecretMissing", text));
        return Ok(verdicts);
    }
    verdicts.push(Verdict::yes("ResolvedRefs", "Resolved", ""));

    let owner = Owner::of(cluster);
    lay(cx, &region, &owner).await?;
    let pods = pods_of(cx, &region).await?;
    let outside = outside(cx, &region, &owner, &pools, &pods).await?;
    let wanted = plan::certificates(&region, &hosts_of(&outside));
    status.certificates = certificates::bring(cx, &region, &owner, &wanted).await?;
    verdicts.push(Verdict::yes("CertificatesValid", "Valid", ""));

    let leaves =
        region.cluster.spec.listeners.iter().any(|listener| listener.type_ != ListenerType::Internal);
    let mut counts = BrokerCounts::default();
    let mut progressing = false;
    for pool in pools.iter().filter(|pool| !is_paused(*pool)) {
        let (map, set) = plan::pool(&region, pool, &image, &outside)?;
        let known = plan::pods_of(pool).iter().all(|pod| outside.contains_key(pod));
        // Without the file the pod waits on its node, whose address is what the file needs.
        if !leaves || known {
            cx.apply(&owner, &map).await?;
        }
        cx.apply(&Owner::of(pool), &set).await?;
        progressing |= pool_status(cx, &region, pool, &pods).await?;
        counts.total += pool.spec.replicas;
    }
    counts.ready = i32::try_from(pods.iter().filter(|pod| pods::is_ready(pod)).count()).unwrap_or(i32::MAX);
    counts.summary = format!("{}/{}", counts.ready, counts.total);
    status.brokers = counts.clone();
    status.endpoints = endpoints(&region, &outside);
    verdicts.push(match progressing {
        true => Verdict::yes("Progressing", "Updating", format!("{} brokers are ready", counts.summary)),
        false => Verdict::no("Progressing", "Settled", ""),
    });
    verdicts.push(ready(&pools, &counts, &pods, progressing));
    if status.cluster_id.is_none() && counts.ready > 0 {
        let mut control = region.control(cx).await?;
        let info = control.cluster_info(control::v1::ClusterInfoRequest {}).await;
        status.cluster_id = info.ok().map(|info| info.into_inner().cluster_id);
    }
    Ok(verdicts)
}

/// What stands before any pod.
async fn lay(cx: &Context, region: &Region, owner: &Owner) -> Result<(), Failure> {
    let ground = plan::ground(region)?;
    cx.apply(owner, &ground.account).await?;
    for service in &ground.services {
        cx.apply(owner, service).await?;
    }
    cx.apply(owner, &ground.budget).await.map(drop)
}

/// The hosts that clients outside connect to, for the certificates.
fn hosts_of(outside: &BTreeMap<String, Outside>) -> Vec<String> {
    let addresses = outside.values().flat_map(BTreeMap::values);
    let hosts = addresses.filter_map(|address| Some(address.rsplit_once(':')?.0.to_owned()));
    let mut hosts: Vec<String> = hosts.collect();
    hosts.sort();
    hosts.dedup();
    hosts
}

fn ready(pools: &[BrokerPool], counts: &BrokerCounts, pods: &[Pod], progressing: bool) -> Verdict {
    if pools.is_empty() {
        return Verdict::no("Ready", "NoPool", "no BrokerPool names this cluster in spec.clusterRef");
    }
    if let Some((reason, text)) = pods::trouble(pods) {
        return Verdict::no("Ready", reason, text);
    }
    match counts.total > 0 && counts.ready >= counts.total && !progressing {
        true => Verdict::yes("Ready", "Serving", format!("{} brokers are ready", counts.summary)),
        false => Verdict::no("Ready", "Starting", format!("{} brokers are ready", counts.summary)),
    }
}

/// The pools of a cluster, by name.
async fn pools(cx: &Context, region: &Region) -> Result<Vec<BrokerPool>, Failure> {
    let all = cx.api::<BrokerPool>(&region.names.namespace).list(&ListParams::default()).await?;
    let mut pools: Vec<BrokerPool> = all
        .items
        .into_iter()
        .filter(|pool| {
            pool.spec.cluster_ref.name == region.names.cluster && pool.metadata.deletion_timestamp.is_none()
        })
        .collect();
    pools.sort_by_key(|pool| pool.name_any());
    Ok(pools)
}

fn too_many(region: &Region, pools: &[BrokerPool]) -> Option<String> {
    let brokers: i32 = pools.iter().map(|pool| pool.spec.replicas).sum();
    let alone = region.cluster.spec.metadata.type_ == MetadataType::Embedded;
    (alone && brokers > 1).then(|| {
        format!("{brokers} brokers in all pools; with spec.metadata.type Embedded a cluster has one")
    })
}

/// A Secret that the spec names and that is not there.
async fn missing(cx: &Context, region: &Region) -> Result<Option<String>, Failure> {
    let own = region.names.certificate("broker");
    let mut named: Vec<String> = plan::secrets(region).into_iter().map(|(_, secret, _)| secret).collect();
    named.extend(region.cluster.spec.storage.credentials_secret_ref.iter().map(|secret| secret.name.clone()));
    for name in named.into_iter().filter(|name| *name != own) {
        if cx.api::<Secret>(&region.names.namespace).get_opt(&name).await?.is_none() {
            return Ok(Some(format!("there is no Secret {name}, which the spec names")));
        }
    }
    Ok(None)
}

async fn pods_of(cx: &Context, region: &Region) -> Result<Vec<Pod>, Failure> {
    let labels = format!("{CLUSTER}={},{COMPONENT}=broker", region.names.cluster);
    Ok(cx.api::<Pod>(&region.names.namespace).list(&ListParams::default().labels(&labels)).await?.items)
}

/// What each pod tells clients of listeners that leave the cluster, as far as all of it is known.
async fn outside(
    cx: &Context,
    region: &Region,
    owner: &Owner,
    pools: &[BrokerPool],
    pods: &[Pod],
) -> Result<BTreeMap<String, Outside>, Failure> {
    let spec = &region.cluster.spec;
    let leaving: Vec<&Listener> =
        spec.listeners.iter().filter(|listener| listener.type_ != ListenerType::Internal).collect();
    let alone = spec.metadata.type_ == MetadataType::Embedded;
    let mut all = BTreeMap::new();
    for pod in pools.iter().flat_map(plan::pods_of) {
        let mut told = Outside::new();
        for listener in &leaving {
            let name = if alone {
                region.names.listener(&listener.name)
            } else {
                region.names.of_pod(&pod, &listener.name)
            };
            if !alone {
                cx.apply(owner, &plan::of_one(region, &pod, listener)?).await?;
            }
            let service = cx.api::<Service>(&region.names.namespace).get_opt(&name).await?;
            let node = pods
                .iter()
                .find(|found| found.name_any() == pod)
                .and_then(|pod| pod.status.as_ref()?.host_ip.clone());
            if let Some(address) = service.and_then(|service| address(listener, &service, node)) {
                told.insert(listener.name.clone(), address);
            }
        }
        if told.len() == leaving.len() && !leaving.is_empty() {
            all.insert(pod, told);
        }
    }
    Ok(all)
}

fn address(listener: &Listener, service: &Service, node: Option<String>) -> Option<String> {
    let told = listener.advertised_host.clone();
    if listener.type_ == ListenerType::LoadBalancer {
        let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?.first()?.clone();
        return Some(format!("{}:{}", told.or(ingress.hostname).or(ingress.ip)?, listener.port));
    }
    let port = service.spec.as_ref()?.ports.as_ref()?.first()?.node_port?;
    Some(format!("{}:{port}", told.or(node)?))
}

/// The first address of each listener.
fn endpoints(region: &Region, outside: &BTreeMap<String, Outside>) -> Vec<Endpoint> {
    let names = &region.names;
    let of = |listener: &Listener| {
        let inside = format!("{}:{}", names.host_of(&names.listener(&listener.name)), listener.port);
        let address = match listener.type_ {
            ListenerType::Internal => Some(inside),
            _ => outside.values().find_map(|told| told.get(&listener.name).cloned()),
        };
        address.map(|address| Endpoint { listener: listener.name.clone(), address })
    };
    region.cluster.spec.listeners.iter().filter_map(of).collect()
}

/// Says of a pool how it stands; true while it is on its way.
async fn pool_status(
    cx: &Context,
    region: &Region,
    pool: &BrokerPool,
    pods: &[Pod],
) -> Result<bool, Failure> {
    let name = pool.name_any();
    let set = cx.api::<StatefulSet>(&region.names.namespace).get_opt(&name).await?;
    let seen = set.as_ref().and_then(|set| set.status.clone()).unwrap_or_default();
    let current = set.as_ref().is_some_and(|set| set.metadata.generation == seen.observed_generation);
    let mut own: Vec<&Pod> = pods.iter().filter(|pod| pod.labels().get(POOL) == Some(&name)).collect();
    own.sort_by_key(|pod| pod.name_any());
    let mut status = pool.status.clone().unwrap_or_default();
    status.observed_generation = pool.metadata.generation;
    status.replicas = i32::try_from(own.len()).unwrap_or(i32::MAX);
    status.ready_replicas =
        i32::try_from(own.iter().filter(|pod| pods::is_ready(pod)).count()).unwrap_or(i32::MAX);
    status.selector = format!("{CLUSTER}={},{COMPONENT}=broker,{POOL}={name}", region.names.cluster);
    status.brokers = own
        .iter()
        .map(|pod| PoolBroker {
            pod: pod.name_any(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            ready: pods::is_ready(pod),
            ..PoolBroker::default()
        })
        .collect();
    let wanted = pool.spec.replicas;
    let settled = current
        && seen.current_revision == seen.update_revision
        && status.replicas == wanted
        && status.ready_replicas == wanted;
    let own: Vec<Pod> = own.into_iter().cloned().collect();
    let text = format!("{} of {wanted} brokers are ready", status.ready_replicas);
    let verdicts = match (settled, pods::trouble(&own)) {
        (true, _) => [Verdict::yes("Ready", "Serving", text), Verdict::no("Progressing", "Settled", "")],
        (false, Some((reason, why))) => {
            [Verdict::no("Ready", reason, why), Verdict::yes("Progressing", reason, text)]
        }
        (false, None) => {
            [Verdict::no("Ready", "Starting", text.clone()), Verdict::yes("Progressing", "Starting", text)]
        }
    };
    status.conditions = after(&status.conditions, &verdicts, pool.metadata.generation);
    cx.status::<BrokerPool, BrokerPoolStatus>(pool, pool.status.as_ref(), &status).await?;
    Ok(!settled)
}

/// An Event when the reason of Ready changes.
async fn tell(cx: &Context, cluster: &BrokerCluster, verdicts: &[Verdict]) {
    let Some(ready) = verdicts.iter().find(|verdict| verdict.type_ == "Ready") else { return };
    let before =
        cluster.status.as_ref().and_then(|status| status.conditions.iter().find(|was| was.type_ == "Ready"));
    if before.is_some_and(|was| was.reason == ready.reason) {
        return;
    }
    let kind = if ready.status == Status::True { EventType::Normal } else { EventType::Warning };
    cx.event(cluster, kind, ready.reason, "Reconcile", ready.message.clone()).await;
}

const NOT_READY: Duration = Duration::from_secs(3);
