//! LinkGrant (the accepting region) and MirrorLink (either region): the two local halves of a link.
//! They are joined by a token that is good once; no region has credentials of another's API server.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Conditions, Ref, conditions_schema};

/// Leave for one peer to join, once.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "LinkGrant",
    namespaced,
    status = "LinkGrantStatus",
    category = "sealane",
    derive = "PartialEq",
    doc = "Leave for one region to link with this one, once.",
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Peer", type_ = "string", json_path = ".spec.peer"),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpoint"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.clusterRef == oldSelf.clusterRef && self.peer == oldSelf.peer").message("spec.clusterRef and spec.peer are immutable: make another LinkGrant"))]
pub struct LinkGrantSpec {
    /// The BrokerCluster that is joined.
    pub cluster_ref: Ref,
    /// Name of the region that may join.
    #[schemars(length(min = 1, max = 63), pattern(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"))]
    pub peer: String,
    /// Other namespaces of this Kubernetes cluster whose MirrorLinks may take the token by spec.grantRef.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(min = 1, max = 63)))]
    pub namespaces: Vec<String>,
    /// Minutes that the token is good for.
    #[serde(default = "hour")]
    #[schemars(range(min = 1, max = 10080))]
    pub valid_minutes: i32,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkGrantStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Secret with the token, for the peer's MirrorLink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<Ref>,
    /// UDP address of this region's mirrors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for LinkGrantStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

/// What crosses to and from one peer.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "MirrorLink",
    namespaced,
    status = "MirrorLinkStatus",
    shortname = "mlink",
    category = "sealane",
    derive = "PartialEq",
    doc = "What crosses to and from one other region.",
    printcolumn(name = "Peer", type_ = "string", json_path = ".spec.peer"),
    printcolumn(name = "Direction", type_ = "string", json_path = ".status.direction"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Lag", type_ = "string", json_path = ".status.lag"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.clusterRef == oldSelf.clusterRef && self.peer == oldSelf.peer").message("spec.clusterRef and spec.peer are immutable: make another MirrorLink"))]
#[x_kube(validation = Rule::new("!has(self.tokenSecretRef) || !has(self.grantRef)").message("set one of spec.tokenSecretRef and spec.grantRef, or none where the peer joins with our token"))]
#[x_kube(validation = Rule::new("!has(self.direction) || self.direction == 'Both'").message("spec.direction: Both is all there is: records cross a link both ways; spec.topics of the other end's MirrorLink says what it takes and sends"))]
#[x_kube(validation = Rule::new("!has(self.startOffset) || self.startOffset == 'Earliest'").message("spec.startOffset: Earliest is all there is: a link carries a topic from the first record that its region still has; spec.topics.exclude leaves a topic out"))]
#[x_kube(validation = Rule::new("!has(self.consumerOffsets) || self.consumerOffsets == 'None'").message("spec.consumerOffsets: None is all there is: positions of consumer groups do not cross a link; in each region a group begins where its own settings say"))]
pub struct MirrorLinkSpec {
    /// The BrokerCluster of this region.
    pub cluster_ref: Ref,
    /// Name of the region at the other end.
    #[schemars(length(min = 1, max = 63), pattern(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"))]
    pub peer: String,
    /// Secret with the token of the peer's LinkGrant; not set where the peer joins with ours.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_secret_ref: Option<Ref>,
    /// The peer's LinkGrant, where it is in this Kubernetes cluster and names this namespace in
    /// spec.namespaces: instead of tokenSecretRef.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant_ref: Option<GrantRef>,
    /// Which topics cross.
    #[serde(default)]
    pub topics: TopicFilter,
    /// Which records of lanes cross.
    #[serde(default)]
    pub lanes: Links,
    /// Which way records cross: Both, and nothing else yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub direction: Option<String>,
    /// Where in a topic the link begins: Earliest, and nothing else yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub start_offset: Option<String>,
    /// What crosses of the positions of consumer groups: None, and nothing else yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub consumer_offsets: Option<String>,
    /// Whether the deletion of a topic crosses.
    #[serde(default)]
    pub deletions: bool,
    /// What lag is too much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rpo: Option<Rpo>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Nothing crosses while it is true.
    #[serde(default)]
    pub paused: bool,
}

/// A LinkGrant of a namespace.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct GrantRef {
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Names of topics, in which `*` stands for any characters.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct TopicFilter {
    #[serde(default = "everything")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 249)))]
    pub include: Vec<String>,
    #[serde(default)]
    #[schemars(length(max = 256), inner(length(min = 1, max = 249)))]
    pub exclude: Vec<String>,
}

impl Default for TopicFilter {
    fn default() -> TopicFilter {
        TopicFilter { include: everything(), exclude: Vec::new() }
    }
}

#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Links {
    /// Records of BOE lanes cross.
    #[serde(default = "yes")]
    pub boe: bool,
    /// Records of PPE lanes cross.
    #[serde(default)]
    pub ppe: bool,
}

impl Default for Links {
    fn default() -> Links {
        Links { boe: true, ppe: false }
    }
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rpo {
    /// The link is not Ready when it lags more.
    #[schemars(range(min = 1, max = 86400))]
    pub max_lag_seconds: i32,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// Bytes per second that are sent.
    #[schemars(range(min = 1024))]
    pub bytes_per_second: i64,
}

#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MirrorLinkStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// both, or none while it is paused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<String>,
    /// Time or records, in words; not set where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_seconds: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lag_records: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_milliseconds: Option<i64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worst_topics: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for MirrorLinkStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

fn everything() -> Vec<String> {
    vec!["*".to_owned()]
}

fn hour() -> i32 {
    60
}

fn yes() -> bool {
    true
}
