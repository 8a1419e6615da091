//! The mirror pods of a cluster: one Deployment, its configuration, and the Service by which other regions reach it.
//!
//! The configuration is made from the MirrorLinks of the cluster and from the peers that have joined. When it changes the pods
//! begin anew; what a link has mirrored is in the logs, so nothing is lost or repeated by that.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::ListParams;
use serde_json::{Value, json};

use super::peers::Peer;
use crate::apply::{Claim, Owner, digest, typed};
use crate::context::{Context, Kind, is_paused};
use crate::controller::{Again, Reconciled};
use crate::crd::{BrokerCluster, ListenerType, Mirror, MirrorLink, PullPolicy};
use crate::failure::Failure;
use crate::names::{CONFIG_HASH, HTTP_PORT, INTERNAL_PORT, MIRROR_PORT};
use crate::region::Region;

pub fn reconcile(cx: Arc<Context>, cluster: Arc<BrokerCluster>) -> BoxFuture<'static, Reconciled> {
    async move {
        let again = Again(Duration::from_secs(u64::from(cx.config.resync_seconds.max(1))));
        if cluster.metadata.deletion_timestamp.is_some() || is_paused(&*cluster) {
            return Ok(again);
        }
        let region = Region::of(&cx, &cluster);
        let Some(mirror) = &cluster.spec.mirror else {
            remove(&cx, &region, &Owner::of(&*cluster)).await?;
            return Ok(again);
        };
        let ends = ends(&cx, &region).await?;
        let made = make(&region, mirror, &region.image(&cx), &ends)?;
        let owner = Owner::of(&*cluster);
        cx.apply(&owner, &made.service).await?;
        cx.apply(&owner, &made.config).await?;
        cx.apply(&owner, &made.pods).await?;
        Ok(again)
    }
    .boxed()
}

/// Takes away what a former spec asked for. The pods go last: while they are there, something may be left to do.
async fn remove(cx: &Context, region: &Region, owner: &Owner) -> Result<(), Failure> {
    async fn one<K: Kind>(cx: &Context, name: &str, owner: &Owner) -> Result<(), Failure> {
        let found = cx.api::<K>(&owner.namespace).get_opt(name).await?;
        match found.filter(|found| owner.claim(found.meta()) == Claim::Ours) {
            Some(found) => cx.delete(&found).await,
            None => Ok(()),
        }
    }
    let name = region.names.mirror();
    if cx.api::<Deployment>(&owner.namespace).get_opt(&name).await?.is_none() {
        return Ok(());
    }
    one::<Service>(cx, &name, owner).await?;
    one::<ConfigMap>(cx, &name, owner).await?;
    one::<Deployment>(cx, &name, owner).await
}

/// The other end of a link that is to be kept.
#[derive(Clone, Debug, Eq, PartialEq)]
struct End {
    peer: String,
    /// UDP HOST:PORT; none where it dials.
    address: Option<String>,
    authorities: Vec<String>,
}

/// Everybody who has joined and whom a MirrorLink names.
async fn ends(cx: &Context, region: &Region) -> Result<Vec<End>, Failure> {
    let namespace = &region.names.namespace;
    let links = cx.api::<MirrorLink>(namespace).list(&ListParams::default()).await?;
    let peers = Peer::all(cx, namespace, &region.names.cluster).await?;
    let wanted = links.items.iter().filter(|link| {
        link.metadata.deletion_timestamp.is_none() && link.spec.cluster_ref.name == region.names.cluster
    });
    let mut ends: BTreeMap<&str, End> = BTreeMap::new();
    for link in wanted {
        for peer in peers.iter().filter(|peer| peer.region == link.spec.peer) {
            let end = ends.entry(&link.spec.peer).or_insert_with(|| End {
                peer: peer.region.clone(),
                address: None,
                authorities: Vec::new(),
            });
            end.address = end.address.take().or_else(|| peer.endpoint.clone());
            if !end.authorities.contains(&peer.authorities) {
                end.authorities.push(peer.authorities.clone());
            }
        }
    }
    Ok(ends.into_values().collect())
}

struct Made {
    service: Service,
    config: ConfigMap,
    pods: Deployment,
}

fn make(region: &Region, mirror: &Mirror, image: &str, ends: &[End]) -> Result<Made, Failure> {
    let names = &region.names;
    let (name, labels) = (names.mirror(), names.labels("mirror"));
    let bundle = |ends: &[End]| -> String {
        ends.iter().flat_map(|end| &end.authorities).map(|pem| format!("{}\n", pem.trim_end())).collect()
    };
    let text = config(region, ends);
    // Authorities are followed by the mirrors, without a restart.
    let hash = digest(text.as_bytes());
    let mut files: BTreeMap<String, String> =
        ends.iter().map(|end| (file_of(&end.peer), bundle(std::slice::from_ref(end)))).collect();
    files.insert("peers.crt".to_owned(), bundle(ends));
    files.insert("mirror.toml".to_owned(), text);
    let selector: BTreeMap<&str, &str> =
        [(crate::names::CLUSTER, names.cluster.as_str()), (crate::names::COMPONENT, "mirror")].into();
    let listener = &mirror.listener;
    let port = json!({
        "name": "link", "protocol": "UDP", "port": listener.port, "targetPort": MIRROR_PORT,
        "nodePort": listener.node_port,
    });
    let kind = match listener.type_ {
        ListenerType::Internal => "ClusterIP",
        ListenerType::NodePort => "NodePort",
        ListenerType::LoadBalancer => "LoadBalancer",
    };
    let service = json!({
        "metadata": { "name": name, "labels": labels },
        "spec": { "type": kind, "selector": selector, "ports": [port] },
    });
    let map = json!({
        "metadata": { "name": name, "labels": labels },
        "data": files,
    });
    let pods = json!({
        "metadata": { "name": name, "labels": labels },
        "spec": {
            "replicas": mirror.replicas,
            "selector": { "matchLabels": selector },
            "template": {
                "metadata": { "labels": labels, "annotations": { CONFIG_HASH: hash } },
                "spec": pod(region, image),
            },
        },
    });
    Ok(Made { service: typed(service)?, config: typed(map)?, pods: typed(pods)? })
}

fn pod(region: &Region, image: &str) -> Value {
    let names = &region.names;
    let pull = region.cluster.spec.image_pull_policy.map(|policy| match policy {
        PullPolicy::Always => "Always",
        PullPolicy::IfNotPresent => "IfNotPresent",
        PullPolicy::Never => "Never",
    });
    json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [{
            "name": "mirror",
            "image": image,
            "imagePullPolicy": pull,
            "args": ["mirror", "--config", "/etc/sealane/mirror/mirror.toml"],
            "ports": [
                { "name": "link", "containerPort": MIRROR_PORT, "protocol": "UDP" },
                { "name": "http", "containerPort": HTTP_PORT, "protocol": "TCP" },
            ],
            "readinessProbe": { "httpGet": { "path": "/readyz", "port": "http" }, "periodSeconds": 2 },
            "resources": { "requests": { "cpu": "10m", "memory": "64Mi" } },
            "securityContext": {
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            },
            "volumeMounts": [
                { "name": "config", "mountPath": "/etc/sealane/mirror" },
                { "name": "tls", "mountPath": "/etc/sealane/tls" },
                { "name": "trust", "mountPath": "/etc/sealane/trust" },
            ],
        }],
        "volumes": [
            { "name": "config", "configMap": { "name": names.mirror() } },
            { "name": "tls", "secret": { "secretName": names.certificate("mirror"), "defaultMode": 0o440 } },
            { "name": "trust", "configMap": { "name": names.trust() } },
        ],
    })
}

fn config(region: &Region, ends: &[End]) -> String {
    let names = &region.names;
    let broker = format!("{}:{INTERNAL_PORT}", names.host_of(&names.brokers()));
    let mut text = format!(
        "broker = {broker:?}\nbroker_server_name = \"sealane-broker\"\nbind = \"0.0.0.0:{MIRROR_PORT}\"\n\
         http_bind = \"0.0.0.0:{HTTP_PORT}\"\n\n\
         [tls]\ncert = \"/etc/sealane/tls/tls.crt\"\nkey = \"/etc/sealane/tls/tls.key\"\nca = \"/etc/sealane/trust/ca.crt\"\n"
    );
    if !ends.is_empty() {
        text += "\n[link_tls]\ncert = \"/etc/sealane/tls/tls.crt\"\nkey = \"/etc/sealane/tls/tls.key\"\n\
                 ca = \"/etc/sealane/mirror/peers.crt\"\n";
    }
    for end in ends {
        // Whoever is a peer may connect; as this one, only who has a certificate of its own authorities.
        let ca = format!("/etc/sealane/mirror/{}", file_of(&end.peer));
        let _ = write!(text, "\n[[links]]\npeer = {:?}\nca = {ca:?}\n", end.peer);
        if let Some(address) = &end.address {
            let _ = write!(text, "address = {address:?}\nserver_name = \"sealane-mirror\"\n");
        }
    }
    text
}

/// The authorities of one peer, among the files of the configuration.
fn file_of(peer: &str) -> String {
    format!("peer-{peer}.crt")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::ClusterNames;

    fn region() -> Region {
        let names = ClusterNames {
            cluster: "east".to_owned(),
            namespace: "sea".to_owned(),
            domain: "cluster.local".to_owned(),
        };
        Region {
            cluster: BrokerCluster::new("east", crate::crd::BrokerClusterSpec::default()),
            names,
            etcd_identity: false,
        }
    }

    fn end(peer: &str, address: Option<&str>, authority: &str) -> End {
        End {
            peer: peer.to_owned(),
            address: address.map(str::to_owned),
            authorities: vec![authority.to_owned()],
        }
    }

    #[test]
    fn the_configuration_is_one_that_a_mirror_reads_and_trusts_peers_for_links_only() {
        let ends = [end("north", None, "N"), end("west", Some("10.0.0.2:30096"), "W")];
        let made = make(&region(), &Mirror::default(), "image:1", &ends).expect("made");
        let data = made.config.data.expect("data");
        assert_eq!(data["peers.crt"], "N\nW\n");
        assert_eq!(data["peer-west.crt"], "W\n", "nobody else passes for it");
        let parsed: toml::Value = toml::from_str(&data["mirror.toml"]).expect("TOML");
        assert_eq!(parsed["broker"].as_str(), Some("east-brokers.sea.svc.cluster.local:9097"));
        assert_eq!(parsed["tls"]["ca"].as_str(), Some("/etc/sealane/trust/ca.crt"));
        assert_eq!(parsed["link_tls"]["ca"].as_str(), Some("/etc/sealane/mirror/peers.crt"));
        let links = parsed["links"].as_array().expect("links");
        assert_eq!(links[0].get("address"), None, "it dials");
        assert_eq!(links[1]["address"].as_str(), Some("10.0.0.2:30096"));
        assert_eq!(links[1]["ca"].as_str(), Some("/etc/sealane/mirror/peer-west.crt"));
        assert_eq!(links[1]["server_name"].as_str(), Some("sealane-mirror"));
    }

    #[test]
    fn pods_begin_anew_when_links_change_and_for_nothing_else() {
        let hash = |ends: &[End]| {
            let made = make(&region(), &Mirror::default(), "image:1", ends).expect("made");
            let template = made.pods.spec.expect("a spec").template;
            template.metadata.and_then(|meta| meta.annotations).expect("annotations")[CONFIG_HASH].clone()
        };
        let before = hash(&[end("west", None, "W")]);
        assert_eq!(before, hash(&[end("west", None, "W")]));
        assert_eq!(before, hash(&[end("west", None, "W2")]), "mirrors follow the files of authorities");
        assert_ne!(before, hash(&[end("west", Some("a:1"), "W")]));
        assert_ne!(before, hash(&[]));
    }
}
