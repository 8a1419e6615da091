//! Where clients that are not in this Kubernetes reach each broker: what its file says, and what people are shown.
//!
//! A port of a node is advertised with the address that the broker's process finds in its environment, so a pod that
//! comes up on another node needs no other file, and none of its neighbours is restarted for it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, Service};
use kube::ResourceExt as _;

use super::config::Outside;
use super::plan;
use crate::apply::Owner;
use crate::context::Context;
use crate::crd::{Endpoint, Listener, ListenerType, MetadataType};
use crate::failure::Failure;
use crate::region::Region;

/// As far as it is known now.
#[derive(Debug, Default)]
pub struct Reached {
    /// For the file of each pod; a pod is in it when all of its listeners are known.
    pub told: BTreeMap<String, Outside>,
    /// Hosts that clients connect to, for certificates.
    pub hosts: Vec<String>,
    /// Where a client begins, by listener.
    pub endpoints: Vec<Endpoint>,
    /// No listener leaves the cluster: files need nothing of this.
    pub is_inside: bool,
}

impl Reached {
    /// Whether the files of all these pods can be made.
    pub fn knows(&self, pods: &[String]) -> bool {
        self.is_inside || pods.iter().all(|pod| self.told.contains_key(pod))
    }
}

/// Makes the Services of single brokers, and finds out what they were given.
pub async fn find(
    cx: &Context,
    region: &Region,
    owner: &Owner,
    names: &[String],
    pods: &[Pod],
) -> Result<Reached, Failure> {
    let spec = &region.cluster.spec;
    let leaving: Vec<&Listener> =
        spec.listeners.iter().filter(|listener| listener.type_ != ListenerType::Internal).collect();
    let alone = spec.metadata.type_ == MetadataType::Embedded;
    let mut reached = Reached { is_inside: leaving.is_empty(), ..Reached::default() };
    let services = cx.api::<Service>(&region.names.namespace);
    let nodes: BTreeMap<String, String> =
        pods.iter().filter_map(|pod| Some((pod.name_any(), pod.status.as_ref()?.host_ip.clone()?))).collect();
    let any_node = names.iter().find_map(|pod| nodes.get(pod));
    for pod in names {
        let mut told = Outside::new();
        for listener in &leaving {
            let name = if alone {
                region.names.listener(&listener.name)
            } else {
                region.names.of_pod(pod, &listener.name)
            };
            if !alone {
                cx.apply(owner, &plan::of_one(region, pod, listener)?).await?;
            }
            let Some(service) = services.get_opt(&name).await? else { continue };
            if let Some((host, port)) = address(listener, &service) {
                told.insert(listener.name.clone(), format!("{host}:{port}"));
                reached.hosts.extend(shown(&host, nodes.get(pod)));
            }
        }
        if told.len() == leaving.len() && !leaving.is_empty() {
            reached.told.insert(pod.clone(), told);
        }
    }
    for listener in &spec.listeners {
        let service = region.names.listener(&listener.name);
        let address = match listener.type_ {
            ListenerType::Internal => Some(format!("{}:{}", region.names.host_of(&service), listener.port)),
            _ => services.get_opt(&service).await?.and_then(|service| {
                let (host, port) = address(listener, &service)?;
                let host = shown(&host, any_node)?;
                reached.hosts.push(host.clone());
                Some(format!("{host}:{port}"))
            }),
        };
        let listener = listener.name.clone();
        reached.endpoints.extend(address.map(|address| Endpoint { listener, address }));
    }
    reached.hosts.sort();
    reached.hosts.dedup();
    Ok(reached)
}

/// What a listener's Service was given: host and port.
fn address(listener: &Listener, service: &Service) -> Option<(String, i32)> {
    let told = listener.advertised_host.clone();
    if listener.type_ == ListenerType::LoadBalancer {
        let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?.first()?.clone();
        return Some((told.or(ingress.hostname).or(ingress.ip)?, listener.port));
    }
    let port = service.spec.as_ref()?.ports.as_ref()?.first()?.node_port?;
    Some((told.unwrap_or_else(|| OF_THE_NODE.to_owned()), port))
}

fn shown(host: &str, node: Option<&String>) -> Option<String> {
    if host == OF_THE_NODE { node.cloned() } else { Some(host.to_owned()) }
}

/// The broker puts its environment's variable here when it reads its file.
const OF_THE_NODE: &str = "${HOST_IP}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_a_node_is_told_with_the_address_that_the_process_finds() {
        let service: Service = serde_json::from_str(r#"{"spec":{"ports":[{"port":9192,"nodePort":30092}]}}"#)
            .expect("a Service");
        let mut listener = Listener { type_: ListenerType::NodePort, port: 9192, ..Listener::default() };
        let (host, port) = address(&listener, &service).expect("known");
        assert_eq!(format!("{host}:{port}"), "${HOST_IP}:30092");
        assert_eq!(shown(&host, Some(&"10.0.0.7".to_owned())), Some("10.0.0.7".to_owned()));
        assert_eq!(shown(&host, None), None, "it runs nowhere yet");
        listener.advertised_host = Some("kafka.example.org".to_owned());
        let (host, _) = address(&listener, &service).expect("known");
        assert_eq!(shown(&host, None), Some("kafka.example.org".to_owned()));
    }
}
