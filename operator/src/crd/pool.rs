//! BrokerPool: a number of brokers of one kind in a cluster.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Conditions, Ref, conditions_schema};

/// Brokers of one kind.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "BrokerPool",
    namespaced,
    status = "BrokerPoolStatus",
    shortname = "bpool",
    category = "sealane",
    derive = "PartialEq",
    doc = "Brokers of one kind in a BrokerCluster.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    validation = Rule::new("size(self.metadata.name) <= 40").message("metadata.name: at most 40 characters, because names of pods are made from it"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Wanted", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Progress", type_ = "string", json_path = ".status.conditions[?(@.type==\"Progressing\")].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.clusterRef == oldSelf.clusterRef").message("spec.clusterRef is immutable: make another BrokerPool"))]
#[x_kube(validation = Rule::new("self.roles.all(a, self.roles.exists_one(b, a == b))").message("spec.roles: each role once"))]
pub struct BrokerPoolSpec {
    /// The BrokerCluster that these brokers belong to.
    pub cluster_ref: Ref,
    /// Number of brokers. With metadata Embedded a cluster has one in all.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 100))]
    pub replicas: i32,
    /// What these brokers do; everything when empty. Only with metadata Etcd.
    #[serde(default)]
    #[schemars(length(max = 3))]
    pub roles: Vec<BrokerRole>,
    /// Replaces what the cluster says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<PoolStorage>,
    /// Requests and limits of the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
    /// Labels of the nodes that brokers may run on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// As in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Whether volumes go with the pods that had them (scaled down, or the pool deleted).
    #[serde(default)]
    pub pvc_retention: PvcRetention,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolStorage {
    /// Disk: size of the volume, for pods that have none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), pattern(r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|k)?$"))]
    pub size: Option<String>,
    /// Disk: class of the volume, for pods that have none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class_name: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum BrokerRole {
    Broker,
    Coordinator,
    Controller,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum PvcRetention {
    #[default]
    Retain,
    Delete,
}

/// What the operator has seen of a pool.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BrokerPoolStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods that there are.
    #[serde(default)]
    pub replicas: i32,
    #[serde(default)]
    pub ready_replicas: i32,
    /// Selector of the pods, for the scale subresource.
    #[serde(default)]
    pub selector: String,
    /// By pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub brokers: Vec<PoolBroker>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for BrokerPoolStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

/// A broker by the identity that it reports itself.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolBroker {
    pub pod: String,
    /// Broker id; not set while the broker does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    pub ready: bool,
    #[serde(default, skip_serializing_if = "super::is_false")]
    pub draining: bool,
}

fn one() -> i32 {
    1
}
