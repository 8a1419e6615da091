//! The objects of a cluster, from its spec and what is known of the outside. Pure, and the same for the same input.
//! Nothing here asks anybody anything: what is not known yet comes in as an argument, or the object waits.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use super::certificates::Wanted;
use super::config::{self, Outside};
use super::roll::pod_of;
use crate::apply::{digest, typed};
use crate::crd::{BrokerPool, Listener, ListenerType, MetadataType, PullPolicy, PvcRetention, StorageType};
use crate::failure::Failure;
use crate::names::{
    CLUSTER, COMPONENT, CONFIG_HASH, CONTROL_PORT, EMPTIED, HTTP_PORT, INTERNAL_PORT, POD, POOL,
};
use crate::region::Region;

/// What stands before any pod: names, accounts, Services.
pub struct Ground {
    pub services: Vec<Service>,
    pub account: ServiceAccount,
    pub budget: PodDisruptionBudget,
}

pub fn ground(region: &Region) -> Result<Ground, Failure> {
    let names = &region.names;
    let labels = names.labels("broker");
    let selector = names.broker_selector();
    let mut ports = vec![
        json!({ "name": "internal", "port": INTERNAL_PORT, "targetPort": INTERNAL_PORT, "protocol": "TCP" }),
        json!({ "name": "control", "port": CONTROL_PORT, "targetPort": CONTROL_PORT, "protocol": "TCP" }),
    ];
    ports.extend(region.cluster.spec.listeners.iter().map(port_of));
    let brokers = json!({
        "metadata": { "name": names.brokers(), "labels": labels },
        // A broker must be found by its name before it is ready: others wait for it, or it for itself.
        "spec": { "clusterIP": "None", "publishNotReadyAddresses": true, "selector": selector, "ports": ports },
    });
    let mut services = vec![typed(brokers)?];
    for listener in &region.cluster.spec.listeners {
        let kind = match listener.type_ {
            ListenerType::Internal => "ClusterIP",
            ListenerType::NodePort => "NodePort",
            ListenerType::LoadBalancer => "LoadBalancer",
        };
        let mut port = port_of(listener);
        if let Some(node_port) = listener.node_port {
            port["nodePort"] = node_port.into();
        }
        services.push(typed(json!({
            "metadata": { "name": names.listener(&listener.name), "labels": labels },
            "spec": { "type": kind, "selector": selector, "ports": [port] },
        }))?);
    }
    let account = typed(json!({
        "metadata": { "name": names.account(), "labels": labels },
        "automountServiceAccountToken": false,
    }))?;
    let budget = typed(json!({
        "metadata": { "name": names.brokers(), "labels": labels },
        "spec": { "maxUnavailable": region.cluster.spec.update.max_unavailable, "selector": { "matchLabels": selector } },
    }))?;
    Ok(Ground { services, account, budget })
}

/// The Service of one broker for a listener that leaves the cluster, where there are several brokers.
pub fn of_one(region: &Region, pod: &str, listener: &Listener) -> Result<Service, Failure> {
    let kind = if listener.type_ == ListenerType::NodePort { "NodePort" } else { "LoadBalancer" };
    let mut labels = region.names.labels("broker");
    labels.insert(POD.to_owned(), pod.to_owned());
    typed(json!({
        "metadata": { "name": region.names.of_pod(pod, &listener.name), "labels": labels },
        "spec": {
            "type": kind,
            "selector": { "statefulset.kubernetes.io/pod-name": pod },
            "ports": [port_of(listener)],
        },
    }))
}

fn port_of(listener: &Listener) -> Value {
    json!({ "name": listener.name, "port": listener.port, "targetPort": listener.port, "protocol": "TCP" })
}

/// The certificates of a cluster's services.
pub fn certificates(region: &Region, outside: &[String], routers: &[String]) -> Vec<Wanted> {
    let names = &region.names;
    let service = |service: &str| {
        let ns = &names.namespace;
        [service.to_owned(), format!("{service}.{ns}"), format!("{service}.{ns}.svc"), names.host_of(service)]
    };
    let brokers = names.brokers();
    let mut hosts: Vec<String> = service(&brokers).into();
    hosts.push(format!("*.{}", names.host_of(&brokers)));
    hosts.push("localhost".to_owned());
    for listener in &region.cluster.spec.listeners {
        hosts.extend(service(&names.listener(&listener.name)));
    }
    hosts.extend(outside.iter().cloned());
    let mut lanes: Vec<String> = service(&names.lanes()).into();
    lanes.push("localhost".to_owned());
    lanes.extend(routers.iter().cloned());
    let wanted = |of, name, hosts| Wanted { of, name, hosts };
    vec![
        wanted("broker", "sealane-broker", hosts),
        wanted("mirror", "sealane-mirror", Vec::new()),
        wanted("lane-router", "sealane-lane-router", lanes),
        wanted("control", "sealane-control", Vec::new()),
        wanted("client", "sealane-client", Vec::new()),
    ]
}

/// How many brokers a pool has at this step, and which of them are being emptied.
#[derive(Clone, Debug, Default)]
pub struct Standing {
    pub replicas: i32,
    pub emptied: String,
}

/// Names of so many pods of a pool.
pub fn pods(pool: &BrokerPool, replicas: i32) -> Vec<String> {
    (0..replicas.max(0)).map(|place| pod_of(&pool.name_any(), place)).collect()
}

/// The configuration files of a pool, one for each pod, and the StatefulSet that reads them.
pub fn pool(
    region: &Region,
    pool: &BrokerPool,
    image: &str,
    outside: &BTreeMap<String, Outside>,
    standing: &Standing,
) -> Result<(ConfigMap, StatefulSet), Failure> {
    let (names, spec) = (&region.names, &region.cluster.spec);
    let nowhere = Outside::new();
    let text = |pod: &str, outside: &Outside| config::file(region, &pool.spec.roles, pod, outside);
    let files: BTreeMap<String, String> = pods(pool, standing.replicas)
        .into_iter()
        .map(|pod| (format!("{pod}.toml"), text(&pod, outside.get(&pod).unwrap_or(&nowhere))))
        .collect();
    // Of what all pods have in common, so that one pod more restarts no other; addresses outside are those of the first.
    let first = outside.get(&pod_of(&pool.name_any(), 0)).unwrap_or(&nowhere);
    let hash = digest(text("any", first).as_bytes());
    let name = pool.name_any();
    let mut labels = names.labels("broker");
    labels.insert(POOL.to_owned(), name.clone());
    let map = json!({
        "metadata": { "name": names.config(&name), "labels": labels },
        "data": files,
    });
    let selector: BTreeMap<&str, &str> =
        [(CLUSTER, names.cluster.as_str()), (COMPONENT, "broker"), (POOL, name.as_str())].into();
    let keep = match pool.spec.pvc_retention {
        PvcRetention::Retain => "Retain",
        PvcRetention::Delete => "Delete",
    };
    let emptied: BTreeMap<&str, &str> =
        [(EMPTIED, standing.emptied.as_str())].into_iter().filter(|(_, text)| !text.is_empty()).collect();
    let mut set = json!({
        "metadata": { "name": name, "labels": labels, "annotations": emptied },
        "spec": {
            "serviceName": names.brokers(),
            "replicas": standing.replicas,
            "podManagementPolicy": "Parallel",
            // Pods are restarted by the operator, which asks the data plane first.
            "updateStrategy": { "type": "OnDelete" },
            "persistentVolumeClaimRetentionPolicy": { "whenDeleted": keep, "whenScaled": keep },
            "selector": { "matchLabels": selector },
            "template": {
                "metadata": { "labels": labels, "annotations": { CONFIG_HASH: hash } },
                "spec": pod(region, pool, image),
            },
        },
    });
    if spec.storage.type_ == StorageType::Disk {
        set["spec"]["volumeClaimTemplates"] = json!([claim(region, pool)]);
    }
    Ok((typed(map)?, typed(set)?))
}

fn claim(region: &Region, pool: &BrokerPool) -> Value {
    let (storage, own) = (&region.cluster.spec.storage, pool.spec.storage.as_ref());
    let size = own.and_then(|own| own.size.clone()).or_else(|| storage.size.clone());
    let class =
        own.and_then(|own| own.storage_class_name.clone()).or_else(|| storage.storage_class_name.clone());
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": { "name": "data", "labels": region.names.labels("broker") },
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": class,
            "resources": { "requests": { "storage": size } },
        },
    })
}

fn pod(region: &Region, pool: &BrokerPool, image: &str) -> Value {
    let (names, spec) = (&region.names, &region.cluster.spec);
    let pull = spec.image_pull_policy.map(|policy| match policy {
        PullPolicy::Always => "Always",
        PullPolicy::IfNotPresent => "IfNotPresent",
        PullPolicy::Never => "Never",
    });
    let mut volumes = vec![
        json!({ "name": "config", "configMap": { "name": names.config(&pool.name_any()) } }),
        json!({ "name": "trust", "configMap": { "name": names.trust() } }),
    ];
    let mut mounts = vec![
        json!({ "name": "config", "mountPath": "/etc/sealane/broker" }),
        json!({ "name": "trust", "mountPath": "/etc/sealane/trust" }),
        json!({ "name": "data", "mountPath": "/var/lib/sealane" }),
    ];
    for (name, secret, place) in secrets(region) {
        volumes.push(json!({ "name": name, "secret": { "secretName": secret, "defaultMode": 0o440 } }));
        mounts.push(json!({ "name": name, "mountPath": place }));
    }
    if spec.storage.type_ != StorageType::Disk {
        volumes.push(json!({ "name": "data", "emptyDir": {} }));
    }
    let env = environment(region);
    let mut ports = vec![
        json!({ "name": "http", "containerPort": HTTP_PORT, "protocol": "TCP" }),
        json!({ "name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP" }),
        json!({ "name": "internal", "containerPort": INTERNAL_PORT, "protocol": "TCP" }),
    ];
    ports.extend(
        spec.listeners.iter().map(
            |listener| json!({ "name": listener.name, "containerPort": listener.port, "protocol": "TCP" }),
        ),
    );
    let resources = pool.spec.resources.clone().map_or_else(
        || json!({ "requests": { "cpu": "50m", "memory": "128Mi" } }),
        |resources| json!(resources),
    );
    json!({
        "serviceAccountName": names.account(),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": 45,
        "nodeSelector": pool.spec.node_selector,
        "tolerations": tolerations(region, pool),
        "topologySpreadConstraints": spread(region),
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [{
            "name": "broker",
            "image": image,
            "imagePullPolicy": pull,
            "args": ["broker", "--config", "/etc/sealane/broker/$(POD_NAME).toml"],
            "env": env,
            "ports": ports,
            "readinessProbe": { "httpGet": { "path": "/readyz", "port": "http" }, "periodSeconds": 2 },
            "livenessProbe": { "httpGet": { "path": "/livez", "port": "http" }, "periodSeconds": 10, "failureThreshold": 6 },
            "resources": resources,
            "securityContext": {
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            },
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
    })
}

/// Where there are several nodes or zones, no one of them has most of the brokers.
fn spread(region: &Region) -> [Value; 2] {
    ["kubernetes.io/hostname", "topology.kubernetes.io/zone"].map(|key| {
        let brokers = json!({ "matchLabels": region.names.broker_selector() });
        json!({ "maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": brokers })
    })
}

/// What a person says, and where brokers keep nothing: that a node which is lost is left soon, not after minutes.
fn tolerations(region: &Region, pool: &BrokerPool) -> Vec<Value> {
    let mut all: Vec<Value> = pool.spec.tolerations.iter().map(|told| json!(told)).collect();
    if region.cluster.spec.metadata.type_ == MetadataType::Etcd {
        for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
            if !pool.spec.tolerations.iter().any(|told| told.key.as_deref() == Some(key)) {
                all.push(json!({
                    "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS,
                }));
            }
        }
    }
    all
}

fn environment(region: &Region) -> Vec<Value> {
    let field =
        |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    // HOST_IP stands in the broker's file where a port of its node is advertised.
    let mut env = vec![field("POD_NAME", "metadata.name"), field("HOST_IP", "status.hostIP")];
    if let Some(secret) = &region.cluster.spec.storage.credentials_secret_ref {
        env.extend(["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"].map(|key| {
            json!({ "name": key, "valueFrom": { "secretKeyRef": { "name": secret.name, "key": key } } })
        }));
    }
    env
}

/// Secrets that brokers read: name of the volume, of the Secret, and where it is.
pub fn secrets(region: &Region) -> Vec<(String, String, String)> {
    let spec = &region.cluster.spec;
    let mut secrets =
        vec![("tls".to_owned(), region.names.certificate("broker"), "/etc/sealane/tls".to_owned())];
    for listener in &spec.listeners {
        if let Some(secret) = listener.tls.as_ref().and_then(|tls| tls.secret_ref.as_ref()) {
            let place = format!("/etc/sealane/listener-{}", listener.name);
            secrets.push((format!("listener-{}", listener.name), secret.name.clone(), place));
        }
    }
    if let Some(secret) = &spec.storage.ca_secret_ref {
        secrets.push(("s3".to_owned(), secret.name.clone(), "/etc/sealane/s3".to_owned()));
    }
    if let Some(secret) = &spec.metadata.tls_secret_ref {
        secrets.push(("etcd".to_owned(), secret.name.clone(), "/etc/sealane/etcd".to_owned()));
    }
    secrets
}

/// After which pods of brokers that keep nothing leave a node that does not answer.
const LOST_NODE_SECONDS: i64 = 30;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{BrokerCluster, BrokerClusterSpec, BrokerPoolSpec, Ref};
    use crate::names::ClusterNames;

    fn region() -> Region {
        let names = ClusterNames {
            cluster: "east".to_owned(),
            namespace: "sea".to_owned(),
            domain: "cluster.local".to_owned(),
        };
        let spec = BrokerClusterSpec {
            region: "east".to_owned(),
            storage: crate::crd::Storage { size: Some("1Gi".to_owned()), ..Default::default() },
            ..BrokerClusterSpec::default()
        };
        Region { cluster: BrokerCluster::new("east", spec), names, etcd_identity: false }
    }

    fn pool_of(replicas: i32) -> BrokerPool {
        BrokerPool::new(
            "a",
            BrokerPoolSpec { cluster_ref: Ref::to("east"), replicas, ..BrokerPoolSpec::default() },
        )
    }

    #[test]
    fn a_pod_more_restarts_no_other() {
        let hash = |replicas| {
            let standing = Standing { replicas, ..Standing::default() };
            let (_, set) =
                pool(&region(), &pool_of(replicas), "image", &BTreeMap::new(), &standing).expect("made");
            set.spec
                .expect("a spec")
                .template
                .metadata
                .and_then(|meta| meta.annotations)
                .expect("annotations")
        };
        assert_eq!(hash(3), hash(5));
    }

    #[test]
    fn each_pod_has_a_file_of_its_own_and_volumes_stay_unless_told() {
        let standing = Standing { replicas: 2, ..Standing::default() };
        let (map, set) = pool(&region(), &pool_of(2), "image", &BTreeMap::new(), &standing).expect("made");
        let files: Vec<String> = map.data.expect("data").into_keys().collect();
        assert_eq!(files, ["a-0.toml", "a-1.toml"]);
        let retention = set.spec.expect("a spec").persistent_volume_claim_retention_policy.expect("said");
        assert_eq!(retention.when_deleted.as_deref(), Some("Retain"));
    }
}
