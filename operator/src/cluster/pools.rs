//! The pools of a cluster, those that go included; and pools that no cluster speaks for.
//!
//! A pool that is deleted is made smaller as one that is scaled to nothing: its brokers give away what they own, one after
//! the other, and a finalizer holds the object so long. Where its cluster is gone, or has one broker only, there is nobody
//! to give anything to, and nothing holds the pool.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::ListParams;
use kube::runtime::reflector::ObjectRef;

use super::plan::Standing;
use crate::conditions::{Verdict, after};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled, Wakes, primary, run, secondary};
use crate::crd::{BrokerCluster, BrokerPool, MetadataType};
use crate::failure::Failure;
use crate::names::POOL;
use crate::region::Region;

/// Starts the controller of pools whose cluster is not there; all others are brought by their cluster's.
pub fn start(cx: &Arc<Context>) {
    let pools = primary::<BrokerPool>(cx);
    let known = pools.store.clone();
    let wakes: Vec<Wakes<BrokerPool>> =
        vec![secondary::<BrokerCluster, BrokerPool>(cx, "clusters of pools", None, move |cluster| {
            let of_it = known.state().into_iter().filter(|pool| {
                pool.namespace() == cluster.namespace() && pool.spec.cluster_ref.name == cluster.name_any()
            });
            of_it.map(|pool| ObjectRef::from_obj(&*pool)).collect()
        })];
    cx.service.spawn_child(run(cx.clone(), "pools", pools, wakes, reconcile));
}

fn reconcile(cx: Arc<Context>, pool: Arc<BrokerPool>) -> BoxFuture<'static, Reconciled> {
    async move {
        let again = Again(Duration::from_secs(u64::from(cx.config.resync_seconds.max(1))));
        let (namespace, cluster) = (pool.namespace().unwrap_or_default(), &pool.spec.cluster_ref.name);
        if is_paused(&*pool) {
            return Ok(again);
        }
        let goes = is_going(&pool);
        // For what holds a pool the API server is asked: it must not be held by what is only remembered.
        let found = match goes {
            true => Region::find_now(&cx, &namespace, cluster).await?,
            false => Region::find(&cx, &namespace, cluster).await?,
        };
        match found {
            Some(_) => {}
            None if goes => let_go(&cx, &pool).await?,
            None => {
                let text = format!("there is no BrokerCluster {cluster}");
                let verdicts = [Verdict::no("Ready", "ClusterNotFound", text)];
                let mut status = pool.status.clone().unwrap_or_default();
                status.observed_generation = pool.metadata.generation;
                status.conditions = after(&status.conditions, &verdicts, pool.metadata.generation);
                cx.status(&*pool, pool.status.as_ref(), &status).await?;
            }
        }
        Ok(again)
    }
    .boxed()
}

/// The pools of a cluster, by name. Of one that goes nothing is wanted any more.
pub async fn of(cx: &Context, region: &Region) -> Result<Vec<BrokerPool>, Failure> {
    let all = cx.api::<BrokerPool>(&region.names.namespace).list(&ListParams::default()).await?;
    let mut pools: Vec<BrokerPool> = all
        .items
        .into_iter()
        .filter(|pool| pool.spec.cluster_ref.name == region.names.cluster)
        .filter(|pool| !is_going(pool) || is_held(pool))
        .collect();
    for pool in pools.iter_mut().filter(|pool| is_going(pool)) {
        pool.spec.replicas = 0;
    }
    pools.sort_by_key(|pool| pool.name_any());
    Ok(pools)
}

/// Sees to it that no pool goes unasked where brokers have others to give to.
pub async fn hold(cx: &Context, region: &Region, pools: &[BrokerPool]) -> Result<(), Failure> {
    let shared = region.cluster.spec.metadata.type_ == MetadataType::Etcd;
    for pool in pools.iter().filter(|pool| !is_going(pool) && !is_paused(*pool)) {
        cx.finalizer(pool, FINALIZER, shared).await?;
    }
    Ok(())
}

/// Whether nothing is left of a pool that goes.
pub fn is_done(pool: &BrokerPool, set: Option<&StatefulSet>, pods: &[Pod], standing: &Standing) -> bool {
    let name = pool.name_any();
    let wanted = set.and_then(|set| set.spec.as_ref()?.replicas).unwrap_or(0);
    let left = pods.iter().any(|pod| pod.labels().get(POOL) == Some(&name));
    // Where no pod is left of any pool there is nobody to ask, and nobody who could be kept empty.
    let kept = !standing.emptied.is_empty() && !pods.is_empty();
    is_going(pool) && wanted == 0 && !left && standing.replicas == 0 && !kept
}

pub async fn let_go(cx: &Context, pool: &BrokerPool) -> Result<(), Failure> {
    cx.finalizer(pool, FINALIZER, false).await
}

pub fn too_many(region: &Region, pools: &[BrokerPool]) -> Option<String> {
    let brokers: i32 = pools.iter().map(|pool| pool.spec.replicas).sum();
    let alone = region.cluster.spec.metadata.type_ == MetadataType::Embedded;
    (alone && brokers > 1).then(|| {
        format!("{brokers} brokers in all pools; with spec.metadata.type Embedded a cluster has one")
    })
}

fn is_going(pool: &BrokerPool) -> bool {
    pool.metadata.deletion_timestamp.is_some()
}

fn is_held(pool: &BrokerPool) -> bool {
    pool.finalizers().iter().any(|finalizer| finalizer == FINALIZER)
}

const FINALIZER: &str = "sealane.io/broker-pool";

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::crd::{BrokerPoolSpec, Ref};

    fn pool(going: bool) -> BrokerPool {
        let spec = BrokerPoolSpec { cluster_ref: Ref::to("east"), ..BrokerPoolSpec::default() };
        let mut pool = BrokerPool::new("a", spec);
        pool.metadata.deletion_timestamp = going.then_some(Time(jiff::Timestamp::UNIX_EPOCH));
        pool
    }

    #[test]
    fn a_pool_goes_when_it_has_no_pod_and_nobody_is_kept_empty_for_it() {
        let set = |replicas: i32| -> StatefulSet {
            serde_json::from_value(serde_json::json!({ "spec": {
                "replicas": replicas, "serviceName": "s", "selector": {}, "template": {} } }))
            .expect("a StatefulSet")
        };
        let pod: Pod = serde_json::from_value(serde_json::json!({ "metadata": { "labels": { POOL: "a" } } }))
            .expect("a Pod");
        let (none, kept) = (Standing::default(), Standing { replicas: 0, emptied: "a-0=1".to_owned() });
        assert!(is_done(&pool(true), Some(&set(0)), &[], &none));
        assert!(is_done(&pool(true), None, &[], &none), "it had none ever");
        assert!(!is_done(&pool(false), Some(&set(0)), &[], &none), "it is wanted");
        assert!(!is_done(&pool(true), Some(&set(1)), &[], &none));
        assert!(!is_done(&pool(true), Some(&set(0)), &[pod], &none));
        assert!(!is_done(&pool(true), Some(&set(0)), &[Pod::default()], &kept));
        assert!(is_done(&pool(true), Some(&set(0)), &[], &kept), "there is nobody to ask");
    }
}
