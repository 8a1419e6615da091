//! Where another region reaches this one: its mirrors over UDP, and the place where tokens are redeemed.

use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;
use kube::api::ListParams;

use crate::context::Context;
use crate::crd::{ListenerType, Mirror};
use crate::failure::Failure;
use crate::names::{CLUSTER, COMPONENT};
use crate::region::Region;

/// UDP HOST:PORT of the region's mirrors, as far as it is known by now; why not otherwise.
pub async fn of_mirrors(
    cx: &Context,
    region: &Region,
    mirror: &Mirror,
) -> Result<Result<String, String>, Failure> {
    let name = region.names.mirror();
    let listener = &mirror.listener;
    if listener.type_ == ListenerType::Internal {
        return Ok(Ok(format!("{}:{}", region.names.host_of(&name), listener.port)));
    }
    let Some(service) = cx.api::<Service>(&region.names.namespace).get_opt(&name).await? else {
        return Ok(Err(format!("Service {name} is not there yet")));
    };
    let told = listener.advertised_host.clone();
    if listener.type_ == ListenerType::LoadBalancer {
        let host = told.or_else(|| balanced(&service));
        return Ok(host
            .map(|host| format!("{host}:{}", listener.port))
            .ok_or_else(|| format!("Service {name} has no load balancer yet")));
    }
    let Some(port) = node_port(&service) else {
        return Ok(Err(format!("Service {name} has no node port yet")));
    };
    let host = match told {
        Some(host) => Some(host),
        None => node_of_mirror(cx, region).await?,
    };
    Ok(host.map(|host| format!("{host}:{port}")).ok_or_else(|| "no mirror pod runs yet".to_owned()))
}

/// TCP HOST:PORT where this operator redeems tokens.
pub async fn of_join(cx: &Context) -> Result<Result<String, String>, Failure> {
    if !cx.config.join_advertised.is_empty() {
        return Ok(Ok(cx.config.join_advertised.clone()));
    }
    let (own, name) = (cx.client.default_namespace().to_owned(), &cx.config.join_service);
    let Some(service) = cx.api::<Service>(&own).get_opt(name).await? else {
        return Ok(Err(format!("there is no Service {name} in {own}: tokens cannot be redeemed")));
    };
    let spec = service.spec.clone().unwrap_or_default();
    let port = spec.ports.iter().flatten().next().map_or(0, |port| port.port);
    Ok(match spec.type_.as_deref() {
        Some("NodePort") => match (std::env::var("HOST_IP"), node_port(&service)) {
            (Ok(host), Some(port)) => Ok(format!("{host}:{port}")),
            _ => Err(format!("Service {name} is a NodePort, and HOST_IP is not set")),
        },
        Some("LoadBalancer") => balanced(&service)
            .map(|host| format!("{host}:{port}"))
            .ok_or_else(|| format!("Service {name} has no load balancer yet")),
        _ => Ok(format!("{name}.{own}.svc.{}:{port}", cx.config.cluster_domain)),
    })
}

fn node_port(service: &Service) -> Option<i32> {
    service.spec.as_ref()?.ports.as_ref()?.first()?.node_port
}

fn balanced(service: &Service) -> Option<String> {
    let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?.first()?;
    ingress.hostname.clone().or_else(|| ingress.ip.clone())
}

/// Address of the node of a mirror that runs: the oldest pod's, so that it does not change without need.
async fn node_of_mirror(cx: &Context, region: &Region) -> Result<Option<String>, Failure> {
    let labels = format!("{CLUSTER}={},{COMPONENT}=mirror", region.names.cluster);
    let pods = cx.api::<Pod>(&region.names.namespace);
    let mut pods = pods.list(&ListParams::default().labels(&labels)).await?.items;
    pods.sort_by_key(|pod| (pod.creation_timestamp(), pod.name_any()));
    Ok(pods.iter().find_map(|pod| pod.status.as_ref()?.host_ip.clone()))
}
