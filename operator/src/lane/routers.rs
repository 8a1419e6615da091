//! LaneRouter: a Deployment of lane-routers, its configuration, and the Service that clients know them by: a headless one, or
//! one that leaves the cluster (`outside`). What a router serves it learns from the control service, so a lane more changes
//! neither pods nor configuration.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::outside;
use crate::apply::{Owner, digest, typed};
use crate::conditions::{Verdict, after};
use crate::context::{Context, is_paused};
use crate::controller::{Again, Reconciled};
use crate::crd::{AuthenticationType, LaneRouter, LaneRouterStatus, PullPolicy};
use crate::failure::Failure;
use crate::names::{
    CLUSTER, COMPONENT, CONFIG_HASH, CONTROL_PORT, HTTP_PORT, INTERNAL_PORT, LANE_SHARED_PORT,
    OUTSIDE_ROUTER, ROUTER,
};
use crate::region::Region;

pub fn reconcile(cx: Arc<Context>, router: Arc<LaneRouter>) -> BoxFuture<'static, Reconciled> {
    async move {
        let again = Again(Duration::from_secs(u64::from(cx.config.resync_seconds.max(1))));
        if router.metadata.deletion_timestamp.is_some() || is_paused(&*router) {
            return Ok(again);
        }
        let mut status = router.status.clone().unwrap_or_default();
        let verdict = match bring(&cx, &router, &mut status).await {
            Ok(verdict) => verdict,
            Err(Failure::DataPlane(text)) => Verdict::no("Ready", "ClusterNotReady", text),
            Err(refused) if refused.is_invalid() => Verdict::no("Ready", "Refused", refused.to_string()),
            Err(foreign @ Failure::Foreign { .. }) => Verdict::no("Ready", "NameTaken", foreign.to_string()),
            Err(other) => return Err(other),
        };
        status.observed_generation = router.metadata.generation;
        status.conditions = after(&status.conditions, &[verdict], router.metadata.generation);
        cx.status(&*router, router.status.as_ref(), &status).await?;
        Ok(again)
    }
    .boxed()
}

async fn bring(cx: &Context, router: &LaneRouter, status: &mut LaneRouterStatus) -> Result<Verdict, Failure> {
    let namespace = router.namespace().unwrap_or_default();
    let Some(region) = Region::find(cx, &namespace, &router.spec.cluster_ref.name).await? else {
        let text = format!("there is no BrokerCluster {}", router.spec.cluster_ref.name);
        return Ok(Verdict::no("Ready", "ClusterNotFound", text));
    };
    let owner = Owner::of(router);
    let host = match outside::is_outside(router) {
        false => region.names.host_of(&region.names.lanes()),
        true => match outside::bring(cx, &region, router, &owner).await? {
            Ok(host) => host,
            Err(why) => return Ok(Verdict::no("Ready", "EndpointPending", why)),
        },
    };
    let made = make(&region, router, &region.image(cx), &host)?;
    if let Some(service) = &made.service {
        cx.apply(&owner, service).await?;
    }
    cx.apply(&owner, &made.config).await?;
    cx.apply(&owner, &made.pods).await?;

    let live = cx.api::<Deployment>(&namespace).get_opt(&pods_of(&router.name_any())).await?;
    let seen = live.as_ref().and_then(|live| live.status.clone()).unwrap_or_default();
    let current = live.as_ref().is_some_and(|live| live.metadata.generation == seen.observed_generation);
    status.replicas = seen.replicas.unwrap_or(0);
    status.ready_replicas = seen.ready_replicas.unwrap_or(0);
    status.selector = selector(&region, router)
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect::<Vec<_>>()
        .join(",");
    status.endpoint = match outside::is_outside(router) {
        false => Some(format!("{host}:{LANE_SHARED_PORT}")),
        true => outside::shown(cx, &region, router, &host).await?,
    };
    let (ready, wanted) = (status.ready_replicas, router.spec.replicas);
    let text = format!("{ready} of {wanted} are ready");
    Ok(match current && seen.updated_replicas.unwrap_or(0) >= wanted && ready >= wanted {
        true => Verdict::yes("Ready", "Serving", text),
        false => Verdict::no("Ready", "Starting", text),
    })
}

struct Made {
    /// The headless one; routers that leave the cluster have another.
    service: Option<Service>,
    config: ConfigMap,
    pods: Deployment,
}

/// What is told apart by labels: those inside are all behind one Service, each router that leaves has one of its own.
pub(super) fn selector(region: &Region, router: &LaneRouter) -> BTreeMap<String, String> {
    let mut selector: BTreeMap<&str, String> = [(CLUSTER, region.names.cluster.clone())].into();
    if outside::is_outside(router) {
        selector.insert(COMPONENT, OUTSIDE_ROUTER.to_owned());
        selector.insert(ROUTER, router.name_any());
    } else {
        selector.insert(COMPONENT, "lane-router".to_owned());
    }
    selector.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

pub(super) fn labels(region: &Region, router: &LaneRouter) -> BTreeMap<String, String> {
    let mut labels = region.names.labels("lane-router");
    labels.extend(selector(region, router));
    labels
}

/// Port of the shared listener.
pub(super) fn shared_port(router: &LaneRouter) -> i32 {
    router.spec.port.unwrap_or(LANE_SHARED_PORT)
}

fn pods_of(router: &str) -> String {
    format!("{router}-lane-router")
}

fn make(region: &Region, router: &LaneRouter, image: &str, host: &str) -> Result<Made, Failure> {
    let (name, labels) = (pods_of(&router.name_any()), labels(region, router));
    let text = config(region, router, host);
    let selector = selector(region, router);
    let service = json!({
        "metadata": { "name": region.names.lanes(), "labels": labels },
        // Headless: a client reaches every port of a router, that of its lane too.
        "spec": {
            "clusterIP": "None",
            "selector": selector,
            "ports": [{ "name": "shared", "port": LANE_SHARED_PORT, "targetPort": LANE_SHARED_PORT, "protocol": "TCP" }],
        },
    });
    let map = json!({
        "metadata": { "name": name, "labels": labels },
        "data": { "lane-router.toml": text },
    });
    let pods = json!({
        "metadata": { "name": name, "labels": labels },
        "spec": {
            "replicas": router.spec.replicas,
            "selector": { "matchLabels": selector },
            "template": {
                "metadata": { "labels": labels, "annotations": { CONFIG_HASH: digest(text.as_bytes()) } },
                "spec": pod(region, router, image),
            },
        },
    });
    let service = (!outside::is_outside(router)).then(|| typed(service)).transpose()?;
    Ok(Made { service, config: typed(map)?, pods: typed(pods)? })
}

/// Secret with the certificate that clients are shown.
fn client_tls(region: &Region, router: &LaneRouter) -> Option<String> {
    let tls = router.spec.tls.as_ref()?;
    let named = tls.secret_ref.as_ref().map(|secret| secret.name.clone());
    Some(named.unwrap_or_else(|| region.names.certificate("lane-router")))
}

fn pod(region: &Region, router: &LaneRouter, image: &str) -> Value {
    let pull = region.cluster.spec.image_pull_policy.map(|policy| match policy {
        PullPolicy::Always => "Always",
        PullPolicy::IfNotPresent => "IfNotPresent",
        PullPolicy::Never => "Never",
    });
    let certificate = region.names.certificate("lane-router");
    let mut volumes = vec![
        json!({ "name": "config", "configMap": { "name": pods_of(&router.name_any()) } }),
        json!({ "name": "tls", "secret": { "secretName": certificate, "defaultMode": 0o440 } }),
        json!({ "name": "trust", "configMap": { "name": region.names.trust() } }),
    ];
    let mut mounts = vec![
        json!({ "name": "config", "mountPath": "/etc/sealane/lane-router" }),
        json!({ "name": "tls", "mountPath": "/etc/sealane/tls" }),
        json!({ "name": "trust", "mountPath": "/etc/sealane/trust" }),
    ];
    if let Some(secret) = client_tls(region, router) {
        volumes.push(json!({ "name": "clients", "secret": { "secretName": secret, "defaultMode": 0o440 } }));
        mounts.push(json!({ "name": "clients", "mountPath": "/etc/sealane/clients" }));
    }
    // It stands in the configuration where a port of the node is told.
    let env = outside::is_outside(router).then(
        || json!([{ "name": "HOST_IP", "valueFrom": { "fieldRef": { "fieldPath": "status.hostIP" } } }]),
    );
    json!({
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [{
            "name": "lane-router",
            "image": image,
            "imagePullPolicy": pull,
            "args": ["lane-router", "--config", "/etc/sealane/lane-router/lane-router.toml"],
            "env": env,
            "ports": [
                { "name": "shared", "containerPort": shared_port(router), "protocol": "TCP" },
                { "name": "http", "containerPort": HTTP_PORT, "protocol": "TCP" },
            ],
            "readinessProbe": { "httpGet": { "path": "/readyz", "port": "http" }, "periodSeconds": 2 },
            "resources": router.spec.resources.clone().map_or_else(
                || json!({ "requests": { "cpu": "10m", "memory": "32Mi" } }),
                |resources| json!(resources),
            ),
            "securityContext": {
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            },
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
    })
}

fn config(region: &Region, router: &LaneRouter, host: &str) -> String {
    let names = &region.names;
    let brokers = names.host_of(&names.brokers());
    let host = router.spec.advertised_host.as_deref().unwrap_or(host);
    let auth = match router.spec.authentication.type_ {
        AuthenticationType::None => "none",
        AuthenticationType::TLS => "required",
    };
    let mut text = format!(
        "broker = \"{brokers}:{INTERNAL_PORT}\"\nbroker_server_name = \"sealane-broker\"\n\
         control = \"{brokers}:{CONTROL_PORT}\"\ncontrol_tls = true\n\
         bind = \"0.0.0.0:{}\"\nlane_bind_host = \"0.0.0.0\"\nadvertised_host = {host:?}\n\
         http_bind = \"0.0.0.0:{HTTP_PORT}\"\nclient_auth = {auth:?}\n",
        shared_port(router)
    );
    if let Some(step) = router.spec.broker_port_step {
        let _ = writeln!(text, "broker_port_step = {step}");
    }
    if let Some(domain) = &router.spec.lane_domain {
        let _ = writeln!(text, "lane_domain = {domain:?}");
    }
    text += "\n[tls]\ncert = \"/etc/sealane/tls/tls.crt\"\nkey = \"/etc/sealane/tls/tls.key\"\nca = \"/etc/sealane/trust/ca.crt\"\n";
    if let Some(tls) = &router.spec.tls {
        // Of a Secret of a person's own, its own ca.crt; else the region's authorities.
        let ca = if tls.secret_ref.is_some() {
            "/etc/sealane/clients/ca.crt"
        } else {
            "/etc/sealane/trust/ca.crt"
        };
        text += "\n[client_tls]\ncert = \"/etc/sealane/clients/tls.crt\"\nkey = \"/etc/sealane/clients/tls.key\"\n";
        if auth == "required" {
            let _ = writeln!(text, "ca = {ca:?}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{BrokerCluster, BrokerClusterSpec, LaneRouterSpec, Tls};
    use crate::names::ClusterNames;

    fn region() -> Region {
        let names = ClusterNames {
            cluster: "east".to_owned(),
            namespace: "sea".to_owned(),
            domain: "cluster.local".to_owned(),
        };
        Region {
            cluster: BrokerCluster::new("east", BrokerClusterSpec::default()),
            names,
            etcd_identity: false,
        }
    }

    #[test]
    fn the_configuration_reads_and_shows_clients_a_certificate_only_when_told() {
        let plain = LaneRouter::new("lanes", LaneRouterSpec::default());
        let parsed: toml::Value = toml::from_str(&config(&region(), &plain, "h")).expect("TOML");
        assert_eq!(parsed["control"].as_str(), Some("east-brokers.sea.svc.cluster.local:9094"));
        assert_eq!(parsed["advertised_host"].as_str(), Some("h"));
        assert_eq!(parsed.get("client_tls"), None);
        let tls = Some(Tls { generate: true, ..Tls::default() });
        let secure = LaneRouter::new("lanes", LaneRouterSpec { tls, ..LaneRouterSpec::default() });
        let parsed: toml::Value = toml::from_str(&config(&region(), &secure, "h")).expect("TOML");
        assert_eq!(parsed["client_tls"]["cert"].as_str(), Some("/etc/sealane/clients/tls.crt"));
    }
}
