//! Lane-routers that are reached from outside of this Kubernetes: the Service with a port for each lane (and for each broker
//! of many), and the host that clients are told.
//!
//! Every port is the same inside and outside, because a router tells its clients the ports at which it listens. Which lanes
//! and brokers there are is asked of the control service; where it does not answer, the Service stays as it is.

use std::collections::BTreeMap;

use control::v1;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;
use kube::api::ListParams;
use serde_json::{Value, json};

use super::routers::{labels, selector, shared_port};
use crate::apply::{Owner, typed};
use crate::context::Context;
use crate::crd::{Lane, LaneRouter, ListenerType, MetadataType};
use crate::failure::Failure;
use crate::names::{CLUSTER, COMPONENT, OUTSIDE_ROUTER};
use crate::region::Region;

pub fn is_outside(router: &LaneRouter) -> bool {
    router.spec.type_ != ListenerType::Internal
}

/// Brings the Service; the host that routers tell their clients, or why it is not known yet.
pub async fn bring(
    cx: &Context,
    region: &Region,
    router: &LaneRouter,
    owner: &Owner,
) -> Result<Result<String, String>, Failure> {
    let mut control = region.control(cx).await?;
    let silent = |error: tonic::Status| Failure::DataPlane(format!("control service: {}", error.message()));
    let lanes = control.list_lanes(v1::ListLanesRequest {}).await.map_err(silent)?.into_inner().lanes;
    let brokers = match region.cluster.spec.metadata.type_ {
        MetadataType::Embedded => Vec::new(),
        MetadataType::Etcd => {
            let status = control.cluster_status(v1::ClusterStatusRequest {}).await.map_err(silent)?;
            status.into_inner().brokers.iter().map(|broker| broker.id).collect()
        }
    };
    let lanes: BTreeMap<String, i32> = lanes
        .into_iter()
        .filter_map(|lane| Some((lane.name, i32::try_from(lane.port).ok().filter(|port| *port > 0)?)))
        .collect();
    let wanted = service(region, router, &lanes, &brokers)?;
    cx.apply(owner, &wanted).await?;
    if let Some(told) = &router.spec.advertised_host {
        return Ok(Ok(told.clone()));
    }
    if router.spec.type_ == ListenerType::NodePort {
        // The process puts the address of its node here.
        return Ok(Ok("${HOST_IP}".to_owned()));
    }
    let name = service_of(router);
    let live = cx.api::<Service>(&owner.namespace).get_opt(&name).await?;
    let host = live.and_then(|live| {
        let ingress = live.status?.load_balancer?.ingress?.into_iter().next()?;
        ingress.hostname.or(ingress.ip)
    });
    Ok(host.ok_or_else(|| format!("Service {name} has no load balancer yet")))
}

/// HOST:PORT of the shared listener for people: of the oldest pod's node, where each node has an address of its own.
pub async fn shown(
    cx: &Context,
    region: &Region,
    router: &LaneRouter,
    host: &str,
) -> Result<Option<String>, Failure> {
    let host = match host.starts_with("${") {
        false => Some(host.to_owned()),
        true => {
            let labels: Vec<String> =
                selector(region, router).iter().map(|(key, value)| format!("{key}={value}")).collect();
            nodes(cx, region, &labels.join(",")).await?.into_iter().next()
        }
    };
    Ok(host.map(|host| format!("{host}:{}", shared_port(router))))
}

/// Hosts by which clients outside know lane-routers of this cluster, for certificates.
pub async fn hosts(cx: &Context, region: &Region) -> Result<Vec<String>, Failure> {
    let routers = of_cluster(cx, region).await?;
    let mut hosts: Vec<String> = routers
        .iter()
        .filter_map(|router| router.spec.lane_domain.as_ref())
        .map(|domain| format!("*.{domain}"))
        .collect();
    let told = routers.iter().filter(|router| is_outside(router)).filter_map(|router| {
        let shown = router.status.as_ref()?.endpoint.as_deref()?;
        router.spec.advertised_host.clone().or_else(|| Some(shown.rsplit_once(':')?.0.to_owned()))
    });
    hosts.extend(told);
    if routers.iter().any(|router| router.spec.type_ == ListenerType::NodePort) {
        let labels = format!("{CLUSTER}={},{COMPONENT}={OUTSIDE_ROUTER}", region.names.cluster);
        hosts.extend(nodes(cx, region, &labels).await?);
    }
    hosts.sort();
    hosts.dedup();
    Ok(hosts)
}

/// Where workloads that are not in this Kubernetes reach a lane.
pub async fn of_lane(
    cx: &Context,
    region: &Region,
    lane: &Lane,
    port: u32,
) -> Result<Option<String>, Failure> {
    let routers = of_cluster(cx, region).await?;
    let found = routers.iter().filter(|router| is_outside(router)).find_map(|router| {
        let (host, shared) = router.status.as_ref()?.endpoint.as_deref()?.rsplit_once(':')?;
        Some(match &router.spec.lane_domain {
            Some(domain) => format!("{}.{domain}:{shared}", lane.spec.name),
            None => format!("{host}:{port}"),
        })
    });
    Ok(found)
}

async fn of_cluster(cx: &Context, region: &Region) -> Result<Vec<LaneRouter>, Failure> {
    let all = cx.api::<LaneRouter>(&region.names.namespace).list(&ListParams::default()).await?;
    let mut routers = all.items;
    routers.retain(|router| router.spec.cluster_ref.name == region.names.cluster);
    routers.sort_by_key(|router| (router.creation_timestamp(), router.name_any()));
    Ok(routers)
}

/// Addresses of the nodes of these pods, the oldest pod's first.
async fn nodes(cx: &Context, region: &Region, labels: &str) -> Result<Vec<String>, Failure> {
    let pods = cx.api::<Pod>(&region.names.namespace);
    let mut pods = pods.list(&ListParams::default().labels(labels)).await?.items;
    pods.sort_by_key(|pod| (pod.creation_timestamp(), pod.name_any()));
    Ok(pods.iter().filter_map(|pod| pod.status.as_ref()?.host_ip.clone()).collect())
}

fn service_of(router: &LaneRouter) -> String {
    format!("{}-lane-router", router.name_any())
}

/// `brokers` are the ids of many; none where one broker is at the lanes' own ports.
fn service(
    region: &Region,
    router: &LaneRouter,
    lanes: &BTreeMap<String, i32>,
    brokers: &[i32],
) -> Result<Service, Failure> {
    let step = router.spec.broker_port_step.unwrap_or(1000);
    let through_nodes = router.spec.type_ == ListenerType::NodePort;
    let port = |name: String, port: i32| -> Value {
        let mut said = json!({ "name": name, "port": port, "targetPort": port, "protocol": "TCP" });
        if through_nodes {
            said["nodePort"] = port.into();
        }
        said
    };
    let mut ports = Vec::new();
    let bases = std::iter::once(("shared".to_owned(), shared_port(router)))
        .chain(lanes.values().map(|base| (format!("p{base}"), *base)));
    for (name, base) in bases {
        ports.push(port(name.clone(), base));
        ports.extend(brokers.iter().map(|id| port(format!("{name}-{id}"), base + id * step)));
    }
    typed(json!({
        "metadata": { "name": service_of(router), "labels": labels(region, router) },
        "spec": {
            "type": if through_nodes { "NodePort" } else { "LoadBalancer" },
            "selector": selector(region, router),
            "ports": ports,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{BrokerCluster, BrokerClusterSpec, LaneRouterSpec};
    use crate::names::ClusterNames;

    #[test]
    fn each_lane_has_a_port_and_each_broker_of_many_one_in_it_the_same_inside_and_outside() {
        let names = ClusterNames {
            cluster: "east".to_owned(),
            namespace: "sea".to_owned(),
            domain: "cluster.local".to_owned(),
        };
        let cluster = BrokerCluster::new("east", BrokerClusterSpec::default());
        let region = Region { cluster, names, etcd_identity: false };
        let made = |type_, brokers: &[i32]| {
            let spec = LaneRouterSpec {
                type_,
                port: Some(31000),
                broker_port_step: Some(100),
                ..LaneRouterSpec::default()
            };
            let lanes = [("cart".to_owned(), 31001)].into();
            let made = service(&region, &LaneRouter::new("out", spec), &lanes, brokers).expect("made");
            made.spec.and_then(|spec| spec.ports).expect("ports")
        };
        let ports = made(ListenerType::NodePort, &[]);
        let pairs: Vec<(i32, Option<i32>)> = ports.iter().map(|port| (port.port, port.node_port)).collect();
        assert_eq!(pairs, [(31000, Some(31000)), (31001, Some(31001))]);
        let ports = made(ListenerType::LoadBalancer, &[1, 3]);
        let numbers: Vec<i32> = ports.iter().map(|port| port.port).collect();
        assert_eq!(numbers, [31000, 31100, 31300, 31001, 31101, 31301]);
        assert!(ports.iter().all(|port| port.node_port.is_none()));
    }
}
