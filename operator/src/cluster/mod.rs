//! BrokerCluster and BrokerPool: one look at a cluster and its pools, and what follows from it.
//!
//! `plan` makes the objects (pure), `certificates` and `config` what is in them, `outside` finds where clients reach them, `sweep`
//! removes what is not asked for any more; `brokers` and `probe` ask the data plane, `roll` says which pod may go next (pure), `told` what
//! statuses say. This file observes, applies in an order in which nothing waits for what comes later, and takes the steps.
//! Volumes are never deleted here.

mod authority;
mod brokers;
mod certificates;
mod config;
mod outside;
mod plan;
mod pods;
mod pools;
mod probe;
mod roll;
mod sweep;
mod told;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control::v1;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret, Service};
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::events::EventType;
use kube::runtime::reflector::ObjectRef;

use crate::apply::{Owner, digest};
use crate::conditions::{Verdict, after, is_true};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled, Wakes, primary, run, secondary};
use crate::crd::{
    BrokerCluster, BrokerClusterStatus, BrokerPool, LaneRouter, MetadataType, StorageType, UpdatePolicy,
};
use crate::failure::Failure;
use crate::names::{APPROVED, CLUSTER, COMPONENT};
use crate::region::Region;
use crate::switches;
use plan::Standing;
use roll::{Decision, Scene, Step};

/// Starts the controller.
pub fn start(cx: &Arc<Context>) {
    let component = format!("{COMPONENT}=broker");
    let wakes: Vec<Wakes<BrokerCluster>> = vec![
        secondary::<BrokerPool, BrokerCluster>(cx, "pools of clusters", None, |pool| {
            let namespace = pool.namespace().unwrap_or_default();
            vec![ObjectRef::new(&pool.spec.cluster_ref.name).within(&namespace)]
        }),
        secondary::<StatefulSet, BrokerCluster>(cx, "statefulsets", Some(component.clone()), of_cluster),
        // Their hosts stand in a certificate.
        secondary::<LaneRouter, BrokerCluster>(cx, "lane-routers of clusters", None, |router| {
            let namespace = router.namespace().unwrap_or_default();
            vec![ObjectRef::new(&router.spec.cluster_ref.name).within(&namespace)]
        }),
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
    cx.clusters.get_or_init(|| clusters.store.clone());
    cx.service.spawn_child(run(cx.clone(), "clusters", clusters, wakes, reconcile));
    pools::start(cx);
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
        told::events(&cx, &cluster, &verdicts, &status.plan).await;
        status.observed_generation = cluster.metadata.generation;
        status.conditions = after(&status.conditions, &verdicts, cluster.metadata.generation);
        let at_rest = ["Ready", "DataSafe"].iter().all(|type_| is_true(&status.conditions, type_));
        cx.status(&*cluster, cluster.status.as_ref(), &status).await?;
        let is = |reason: &str| status.conditions.iter().any(|condition| condition.reason == reason);
        let on_its_way = !status.plan.is_empty() && !is(told::WAITING);
        Ok(match (on_its_way, at_rest && !is("Rotating")) {
            (true, _) => Again(ON_ITS_WAY),
            (false, false) => Again(NOT_READY),
            (false, true) => again,
        })
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
    let image = image(cx, cluster, status);
    status.image = Some(image.clone());
    region.cluster.status = Some(status.clone());
    let pools = pools::of(cx, &region).await?;
    if let Some(text) = pools::too_many(&region, &pools) {
        return Ok(vec![
            Verdict::no("Accepted", "TooManyBrokers", text.clone()),
            Verdict::no("Ready", "TooManyBrokers", text),
        ]);
    }
    let mut verdicts = vec![Verdict::yes("Accepted", "Accepted", "")];
    if let Some(text) = missing(cx, &mut region).await? {
        verdicts.push(Verdict::no("ResolvedRefs", "SecretMissing", text.clone()));
        verdicts.push(Verdict::no("Ready", "SecretMissing", text));
        return Ok(verdicts);
    }
    verdicts.push(Verdict::yes("ResolvedRefs", "Resolved", ""));

    let owner = Owner::of(cluster);
    pools::hold(cx, &region, &pools).await?;
    lay(cx, &region, &owner).await?;
    let seen = Seen::look(cx, &region, &pools).await?;
    let mut decision = seen.decide(&region, &pools, status);
    let standing = |pool: &BrokerPool| standing(pool, &decision);
    volumes(cx, &region, &pools).await?;
    let names: Vec<String> =
        pools.iter().flat_map(|pool| plan::pods(pool, standing(pool).replicas)).collect();
    let reached = outside::find(cx, &region, &owner, &names, &seen.pods).await?;
    sweep::sweep(cx, &region, &owner, &pools, &names).await?;
    verdicts.push(certify(cx, &region, &owner, &reached.hosts, status).await?);

    let mut progressing = false;
    for pool in pools.iter().filter(|pool| !is_paused(*pool)) {
        let standing = standing(pool);
        if pools::is_done(pool, seen.sets.get(&pool.name_any()), &seen.pods, &standing) {
            pools::let_go(cx, pool).await?;
            continue;
        }
        let (map, set) = plan::pool(&region, pool, &image, &reached.told, &standing)?;
        // Without its file a pod waits on its node.
        if reached.knows(&plan::pods(pool, standing.replicas)) {
            cx.apply(&owner, &map).await?;
        }
        let written = cx.apply(&Owner::of(pool), &set).await?;
        let known = !written && seen.sets.get(&pool.name_any()).and_then(brokers::revision).is_some();
        progressing |= told::pool(cx, &region, pool, &seen, known, &decision).await?;
    }
    take(cx, &region, &seen.pods, &mut decision).await?;
    status.plan = std::mem::take(&mut decision.plan);
    status.brokers = told::counts(&pools, &seen.pods);
    status.endpoints = reached.endpoints;
    verdicts.extend(told::verdicts(&pools, &status.brokers, &seen, progressing, &status.plan));
    if status.cluster_id.is_none() && status.brokers.ready > 0 {
        let mut control = region.control(cx).await?;
        let info = control.cluster_info(v1::ClusterInfoRequest {}).await;
        status.cluster_id = info.ok().map(|info| info.into_inner().cluster_id);
    }
    Ok(verdicts)
}

/// Brings the certificates of all services; `hosts` are those by which clients outside know brokers.
async fn certify(
    cx: &Context,
    region: &Region,
    owner: &Owner,
    hosts: &[String],
    status: &mut BrokerClusterStatus,
) -> Result<Verdict, Failure> {
    let routers = crate::lane::outside::hosts(cx, region).await?;
    let wanted = plan::certificates(region, hosts, &routers);
    let (made, rotating) = certificates::bring(cx, region, owner, &wanted).await?;
    status.certificates = made;
    Ok(match rotating {
        Some(text) => Verdict::yes("CertificatesValid", "Rotating", text),
        None => Verdict::yes("CertificatesValid", "Valid", ""),
    })
}

/// What the brokers shall run. Remembered, so that a later operator with another default restarts nothing.
fn image(cx: &Context, cluster: &BrokerCluster, status: &BrokerClusterStatus) -> String {
    let told = cluster.spec.image.clone().or_else(|| status.image.clone());
    told.unwrap_or_else(|| cx.config.image.clone())
}

/// What a decision makes of a pool.
fn standing(pool: &BrokerPool, decision: &Decision) -> Standing {
    let (name, none) = (pool.name_any(), BTreeMap::new());
    Standing {
        replicas: decision.replicas.get(&name).copied().unwrap_or(pool.spec.replicas),
        emptied: brokers::remembered(decision.emptied.get(&name).unwrap_or(&none)),
    }
}

/// A cluster's pods and what their brokers say.
struct Seen {
    pods: Vec<Pod>,
    sets: BTreeMap<String, StatefulSet>,
    brokers: Vec<roll::Broker>,
    /// What those that are not ready say of it, by pod.
    said: BTreeMap<String, String>,
}

impl Seen {
    async fn look(cx: &Context, region: &Region, pools: &[BrokerPool]) -> Result<Seen, Failure> {
        let namespace = &region.names.namespace;
        let labels = format!("{CLUSTER}={},{COMPONENT}=broker", region.names.cluster);
        let pods = cx.api::<Pod>(namespace).list(&ListParams::default().labels(&labels)).await?.items;
        let mut sets = BTreeMap::new();
        for pool in pools {
            let set = cx.api::<StatefulSet>(namespace).get_opt(&pool.name_any()).await?;
            sets.extend(set.map(|set| (pool.name_any(), set)));
        }
        let (answers, said) = tokio::join!(brokers::ask(cx, region), probe::ask(&pods));
        let brokers = brokers::seen(&pods, &sets, &answers?);
        Ok(Seen { pods, sets, brokers, said })
    }

    fn decide(&self, region: &Region, pools: &[BrokerPool], status: &mut BrokerClusterStatus) -> Decision {
        let spec = &region.cluster.spec;
        let is_still = |name: &String| pools.iter().any(|pool| pool.name_any() == *name && is_paused(pool));
        let mut brokers = self.brokers.clone();
        for broker in brokers.iter_mut().filter(|broker| is_still(&broker.pool)) {
            broker.outdated = false;
        }
        let standing: Vec<roll::Pool> = pools
            .iter()
            .map(|pool| {
                let mut standing = brokers::pool(pool, self.sets.get(&pool.name_any()));
                if is_paused(pool) {
                    standing.wanted = standing.current.unwrap_or(standing.wanted);
                }
                standing
            })
            .collect();
        // Of what all pods shall run.
        let revisions: Vec<String> = self.sets.values().filter_map(brokers::revision).collect();
        let id = digest(revisions.join(",").as_bytes());
        let planned =
            spec.update.policy == UpdatePolicy::Plan && brokers.iter().any(|broker| broker.outdated);
        status.plan_id = planned.then(|| id.clone());
        roll::decide(&Scene {
            pools: &standing,
            brokers: &brokers,
            alone: spec.metadata.type_ == MetadataType::Embedded,
            policy: spec.update.policy,
            max_unavailable: spec.update.max_unavailable,
            approved: region.cluster.annotations().get(APPROVED) == Some(&id),
            careless: switches::restart_gate_off(),
        })
    }
}

/// Takes the steps that were decided on.
async fn take(cx: &Context, region: &Region, pods: &[Pod], decision: &mut Decision) -> Result<(), Failure> {
    for step in std::mem::take(&mut decision.steps) {
        match step {
            Step::Restart { pod, uid, down } => {
                let Some(found) = pods.iter().find(|found| found.uid().as_ref() == Some(&uid)) else {
                    continue;
                };
                let gone = match down {
                    true => cx.delete(found).await.map(|()| true)?,
                    false => cx.evict(found).await?,
                };
                match gone {
                    true => {
                        let note = format!("pod {pod} begins anew with what its spec says now");
                        cx.event(
                            &region.cluster,
                            EventType::Normal,
                            "BrokerRestarted",
                            &format!("Restart {pod}"),
                            note,
                        )
                        .await;
                    }
                    false => decision.plan.push(format!("pod {pod} waits: its PodDisruptionBudget says no")),
                }
            }
            Step::Abandon { pod, uid } => {
                let Some(found) = pods.iter().find(|found| found.uid().as_ref() == Some(&uid)) else {
                    continue;
                };
                cx.strike_off(found).await?;
                let note =
                    format!("pod {pod} is struck off: its node does not answer, and its broker is not alive");
                cx.event(
                    &region.cluster,
                    EventType::Warning,
                    "BrokerStruckOff",
                    &format!("Strike {pod}"),
                    note,
                )
                .await;
            }
            Step::Drain { id, .. } => drain(cx, region, id, true).await?,
            Step::Undrain { id } => drain(cx, region, id, false).await?,
        }
    }
    Ok(())
}

async fn drain(cx: &Context, region: &Region, broker: i32, drain: bool) -> Result<(), Failure> {
    cx.fence()?;
    let mut control = region.control(cx).await?;
    let asked = control.drain_broker(v1::DrainBrokerRequest { broker, drain }).await;
    asked.map_err(|error| Failure::DataPlane(format!("broker {broker}: {}", error.message())))?;
    let (reason, note) = match drain {
        true => ("BrokerEmptied", format!("broker {broker} gives away what it owns, to be removed")),
        false => ("BrokerBack", format!("broker {broker} is not kept empty any more")),
    };
    cx.event(&region.cluster, EventType::Normal, reason, &format!("Drain {broker}"), note).await;
    Ok(())
}

/// A StatefulSet takes a volume of the right name whoever made it, with whatever is on it: so it is looked at before.
async fn volumes(cx: &Context, region: &Region, pools: &[BrokerPool]) -> Result<(), Failure> {
    if region.cluster.spec.storage.type_ != StorageType::Disk {
        return Ok(());
    }
    let claims = cx.api::<PersistentVolumeClaim>(&region.names.namespace);
    for pod in pools.iter().flat_map(|pool| plan::pods(pool, pool.spec.replicas)) {
        let name = format!("data-{pod}");
        let Some(found) = claims.get_opt(&name).await? else { continue };
        if found.labels().get(CLUSTER) != Some(&region.names.cluster) {
            let why = format!("was not made for BrokerCluster {}", region.names.cluster);
            return Err(Failure::Foreign { kind: "PersistentVolumeClaim".to_owned(), name, why });
        }
    }
    Ok(())
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

/// A Secret that the spec names and that is not there. What is to be known of those that are there is in the region then.
async fn missing(cx: &Context, region: &mut Region) -> Result<Option<String>, Failure> {
    let own = region.names.certificate("broker");
    let spec = region.cluster.spec.clone();
    let mut named: Vec<String> = plan::secrets(region).into_iter().map(|(_, secret, _)| secret).collect();
    named.extend(spec.storage.credentials_secret_ref.iter().map(|secret| secret.name.clone()));
    for name in named.into_iter().filter(|name| *name != own) {
        let Some(found) = cx.api::<Secret>(&region.names.namespace).get_opt(&name).await? else {
            return Ok(Some(format!("there is no Secret {name}, which the spec names")));
        };
        if spec.metadata.tls_secret_ref.as_ref().is_some_and(|secret| secret.name == name) {
            region.etcd_identity = found.data.is_some_and(|data| data.contains_key("tls.crt"));
        }
    }
    Ok(None)
}

/// While there is something to do that waits for the data plane, which wakes nobody here.
const ON_ITS_WAY: Duration = Duration::from_secs(1);
const NOT_READY: Duration = Duration::from_secs(3);
