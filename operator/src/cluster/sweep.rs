//! Removes what a cluster's spec does not ask for any more: Services of listeners and of single brokers, files of pools.
//! Only what was made for this very cluster is touched; volumes and Secrets are not looked at.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::apply::{Claim, Owner};
use crate::context::{Context, Kind};
use crate::crd::{BrokerPool, ListenerType, MetadataType};
use crate::failure::Failure;
use crate::names::{CLUSTER, COMPONENT, POOL};
use crate::region::Region;

/// `pods` are the names of all that are there, or shall be.
pub async fn sweep(
    cx: &Context,
    region: &Region,
    owner: &Owner,
    pools: &[BrokerPool],
    pods: &[String],
) -> Result<(), Failure> {
    let cluster = &region.names.cluster;
    let brokers = format!("{CLUSTER}={cluster},{COMPONENT}=broker");
    let wanted = services(region, pods);
    for service in stale::<Service>(cx, owner, &brokers, &wanted).await? {
        cx.delete(&service).await?;
    }
    let wanted = pools.iter().map(|pool| region.names.config(&pool.name_any())).collect();
    for files in stale::<ConfigMap>(cx, owner, &format!("{CLUSTER}={cluster},{POOL}"), &wanted).await? {
        let pool = files.labels().get(POOL).cloned().unwrap_or_default();
        // Pods that outlive their pool (`kubectl delete --cascade=orphan`) need them still.
        if cx.api::<StatefulSet>(&owner.namespace).get_opt(&pool).await?.is_none() {
            cx.delete(&files).await?;
        }
    }
    Ok(())
}

/// Names of the Services that the spec asks for.
fn services(region: &Region, pods: &[String]) -> BTreeSet<String> {
    let (names, spec) = (&region.names, &region.cluster.spec);
    let mut wanted: BTreeSet<String> =
        spec.listeners.iter().map(|listener| names.listener(&listener.name)).collect();
    wanted.insert(names.brokers());
    if spec.metadata.type_ == MetadataType::Etcd {
        let outside = spec.listeners.iter().filter(|listener| listener.type_ != ListenerType::Internal);
        wanted.extend(outside.flat_map(|listener| pods.iter().map(|pod| names.of_pod(pod, &listener.name))));
    }
    wanted
}

/// Made for this cluster, and wanted no more.
async fn stale<K: Kind>(
    cx: &Context,
    owner: &Owner,
    labels: &str,
    wanted: &BTreeSet<String>,
) -> Result<Vec<K>, Failure> {
    let mut found = cx.api::<K>(&owner.namespace).list(&ListParams::default().labels(labels)).await?.items;
    found.retain(|found| !wanted.contains(&found.name_any()) && owner.claim(found.meta()) == Claim::Ours);
    Ok(found)
}
