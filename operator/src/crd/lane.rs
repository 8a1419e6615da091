//! Lane and LaneRouter: a lane of a region, and the pods that are the way into lanes.

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Authentication, Conditions, ListenerType, Ref, Tls, conditions_schema};

/// A lane of a region.
#[derive(Clone, CustomResource, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "Lane",
    namespaced,
    status = "LaneStatus",
    category = "sealane",
    derive = "PartialEq",
    doc = "A lane of a region.",
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Lane", type_ = "string", json_path = ".spec.name"),
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.class"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.clusterRef == oldSelf.clusterRef && self.name == oldSelf.name && self.class == oldSelf.class").message("spec.clusterRef, spec.name and spec.class are immutable: make another Lane"))]
#[x_kube(validation = Rule::new("self.name.startsWith('ppe') == (self.class == 'PPE')").message("spec.name: a lane of class PPE has a name that begins with ppe, one of class BOE has another"))]
#[x_kube(validation = Rule::new("!has(self.topics) || self.topics == ['*']").message("spec.topics: ['*'] is all there is: a lane may touch every topic that has lanes; spec.principals says who may enter it"))]
#[x_kube(validation = Rule::new("!has(self.groups) || self.groups == ['*']").message("spec.groups: ['*'] is all there is: every consumer group may read in a lane; spec.principals says who may enter it"))]
#[x_kube(validation = Rule::new("!has(self.hold)").message("spec.hold: a lane keeps nothing by itself: what waits for its consumers stays in the topic for as long as retention.ms and retention.bytes of the Topic's spec.config say"))]
pub struct LaneSpec {
    /// The BrokerCluster that has the lane.
    pub cluster_ref: Ref,
    /// BOE (the baseline takes what no consumer of the lane takes) or PPE (nobody else ever sees it).
    pub class: LaneClass,
    /// What records name the lane by: 1 to 63 of a-z, 0-9 and '-'.
    #[schemars(length(min = 1, max = 63), pattern(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"))]
    pub name: String,
    /// Seconds after which this object, and the lane with it, is deleted; never when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31536000))]
    pub ttl_seconds: Option<i64>,
    /// Seconds from the silence of the lane's last consumer of a partition to the hand-over to the baseline (BOE); as
    /// lane_grace_seconds of the cluster's configuration says when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub grace_seconds: Option<i32>,
    /// Names in client certificates (common name or alternative names) that may enter the lane through a LaneRouter;
    /// everybody may when empty. It counts for new connections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 256)))]
    pub principals: Vec<String>,
    /// Topics that the lane may touch: ['*'], and nothing else yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 249)))]
    pub topics: Option<Vec<String>>,
    /// Consumer groups that may read in the lane: ['*'], and nothing else yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 249)))]
    pub groups: Option<Vec<String>>,
    /// How much of a PPE lane waits for its consumers; not to be set yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
}

/// Limits of what waits for the consumers of a lane.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hold {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_age_seconds: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_bytes: Option<i64>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum LaneClass {
    BOE,
    PPE,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LaneStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// HOST:PORT for the lane's workloads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The same for workloads that are not in this Kubernetes, where a LaneRouter leads out of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<String>,
    /// Records of the lane that wait for its consumers; not set where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_records: Option<i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Of each group and partition the last cut: from which offset on the lane has its records and, where it gave the
    /// partition back, up to which. 64 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub last_cuts: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for LaneStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

/// The way into the lanes of a cluster.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "LaneRouter",
    namespaced,
    status = "LaneRouterStatus",
    shortname = "lrouter",
    category = "sealane",
    derive = "PartialEq",
    doc = "The way into the lanes of a BrokerCluster.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    validation = Rule::new("size(self.metadata.name) <= 40").message("metadata.name: at most 40 characters, because names of pods are made from it"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Wanted", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Running", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.clusterRef == oldSelf.clusterRef").message("spec.clusterRef is immutable: make another LaneRouter"))]
#[x_kube(validation = Rule::new("self.type == 'Internal' || self.insecure || (has(self.tls) && self.authentication.type == 'TLS')").message("a LaneRouter of type NodePort or LoadBalancer leaves the cluster: set spec.tls and spec.authentication.type: TLS, or spec.insecure: true"))]
#[x_kube(validation = Rule::new("self.authentication.type != 'TLS' || has(self.tls)").message("spec.authentication.type TLS needs spec.tls: set spec.tls.generate: true or spec.tls.secretRef"))]
#[x_kube(validation = Rule::new("(self.type != 'NodePort' || has(self.port)) && (self.type != 'Internal' || !has(self.port))").message("spec.port is needed with type NodePort (a port of nodes: 30000 to 32767 where Kubernetes is not told otherwise), may be set with type LoadBalancer, and goes with no other"))]
#[x_kube(validation = Rule::new("!has(self.laneDomain) || has(self.tls)").message("spec.laneDomain needs spec.tls: a lane is told by the name in the TLS handshake"))]
pub struct LaneRouterSpec {
    /// The BrokerCluster whose lanes these are.
    pub cluster_ref: Ref,
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 32))]
    pub replicas: i32,
    /// Internal, NodePort or LoadBalancer. Each lane has a port of its own (spec.lanes.portFirst of the BrokerCluster).
    #[serde(rename = "type", default)]
    pub type_: ListenerType,
    /// NodePort, LoadBalancer: port of the listener that all lanes share; 9093 when not set. Through nodes every port is
    /// the same inside and outside, so it and those of lanes must be ports of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1024, max = 65535))]
    pub port: Option<i32>,
    /// Broker N of many is reached at a lane's port plus N times this; 1000 when not set. Larger than the number of
    /// ports for lanes, and small enough that all of them are ports of nodes where the type is NodePort.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10000))]
    pub broker_port_step: Option<i32>,
    /// Certificates that clients are shown; plain text when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    #[serde(default)]
    pub authentication: Authentication,
    /// Allows a type that leaves the cluster to be without TLS and client certificates.
    #[serde(default)]
    pub insecure: bool,
    /// Domain of lanes: a client that connects to NAME.laneDomain by TLS is in lane NAME.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 180), pattern(r"^[a-z0-9.-]+$"))]
    pub lane_domain: Option<String>,
    /// Host that clients are told to connect to; found as for listeners of brokers when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), pattern(r"^[A-Za-z0-9.-]+$"))]
    pub advertised_host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<ResourceRequirements>,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LaneRouterStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default)]
    pub replicas: i32,
    #[serde(default)]
    pub ready_replicas: i32,
    #[serde(default)]
    pub selector: String,
    /// HOST:PORT of the shared listener.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for LaneRouterStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

fn one() -> i32 {
    1
}
