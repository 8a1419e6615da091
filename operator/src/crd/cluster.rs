//! BrokerCluster: one region's brokers as a whole - where bytes and agreement are kept, where clients
//! connect, who is trusted. How many brokers there are is said by its pools.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Conditions, Ref, conditions_schema, words_schema};

/// The brokers of one region.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "BrokerCluster",
    namespaced,
    status = "BrokerClusterStatus",
    shortname = "bc",
    category = "sealane",
    derive = "PartialEq",
    doc = "The brokers of one region.",
    validation = Rule::new("size(self.metadata.name) <= 40").message("metadata.name: at most 40 characters, because names of other objects are made from it"),
    printcolumn(name = "Region", type_ = "string", json_path = ".spec.region"),
    printcolumn(name = "Brokers", type_ = "string", json_path = ".status.brokers.summary"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.region == oldSelf.region").message("spec.region is immutable: data carry the region's name; make another BrokerCluster"))]
#[x_kube(validation = Rule::new("self.storage == oldSelf.storage").message("spec.storage is immutable: data do not move by themselves; make another BrokerCluster"))]
#[x_kube(validation = Rule::new("self.metadata == oldSelf.metadata").message("spec.metadata is immutable: what the brokers agreed on does not move by itself; make another BrokerCluster"))]
#[x_kube(validation = Rule::new("(self.metadata.type == 'Embedded') == (self.storage.type == 'Disk')").message("spec.metadata.type Embedded goes with spec.storage.type Disk (one broker), Etcd with S3 or HDFS (many)"))]
pub struct BrokerClusterSpec {
    /// Name of the region: 1 to 63 of a-z, 0-9 and '-'. Fixed for the life of the data.
    #[schemars(length(min = 1, max = 63), pattern(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"))]
    pub region: String,
    /// Image of the brokers, mirrors and lane-routers. Without it: what the operator was told when the
    /// cluster was made, which a later operator does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub image: Option<String>,
    /// When the image is fetched; as in a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    /// Where the bytes are.
    pub storage: Storage,
    /// Where the brokers agree.
    pub metadata: Metadata,
    /// Where Kafka clients connect.
    #[schemars(schema_with = "listeners_schema")]
    pub listeners: Vec<Listener>,
    /// Keys of the broker's configuration file, beside those that the operator sets.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "config_schema")]
    pub config: BTreeMap<String, String>,
    /// How changes reach the brokers.
    #[serde(default)]
    pub update: Update,
    /// The certificates that the operator makes.
    #[serde(default)]
    pub certificates: Certificates,
    /// Lanes of topics that do not say otherwise.
    #[serde(default)]
    pub lanes: ClusterLanes,
    /// The pods that speak to other regions; none when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Mirror>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type != 'Disk' || has(self.size)").message("spec.storage.size is needed with type Disk, such as 10Gi"))]
#[x_kube(validation = Rule::new("self.type == 'Disk' || (!has(self.size) && !has(self.storageClassName))").message("spec.storage.size and storageClassName go with type Disk only"))]
#[x_kube(validation = Rule::new("(self.type == 'S3') == has(self.bucket)").message("spec.storage.bucket is needed with type S3, and goes with no other"))]
#[x_kube(validation = Rule::new("self.type == 'S3' || (!has(self.prefix) && !has(self.endpoint) && !has(self.region) && !has(self.credentialsSecretRef) && !has(self.caSecretRef))").message("spec.storage.prefix, endpoint, region, credentialsSecretRef and caSecretRef go with type S3 only"))]
#[x_kube(validation = Rule::new("(self.type == 'HDFS') == has(self.uri)").message("spec.storage.uri is needed with type HDFS, such as hdfs://namenode:9000/sealane, and goes with no other"))]
pub struct Storage {
    /// Disk (a volume of one broker), S3 or HDFS (shared by many).
    #[serde(rename = "type")]
    pub type_: StorageType,
    /// Disk: size of the volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), pattern(r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|k)?$"))]
    pub size: Option<String>,
    /// Disk: class of the volume; the cluster's default when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class_name: Option<String>,
    /// S3: name of the bucket, which must exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 3, max = 63), pattern(r"^[a-z0-9][a-z0-9.-]*[a-z0-9]$"))]
    pub bucket: Option<String>,
    /// S3: what the names of this cluster's objects begin with; NAMESPACE/NAME when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 200), pattern(r"^[A-Za-z0-9._/-]+$"))]
    pub prefix: Option<String>,
    /// S3: endpoint of a server that is not Amazon's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512), pattern(r"^https?://[^/]+/?$"))]
    pub endpoint: Option<String>,
    /// S3: region of the bucket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub region: Option<String>,
    /// S3: Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret_ref: Option<Ref>,
    /// S3: Secret whose ca.crt signs the server's certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_secret_ref: Option<Ref>,
    /// HDFS: hdfs://HOST:PORT/PATH.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512), pattern(r"^hdfs://[^/:]+:[0-9]+/.*$"))]
    pub uri: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum StorageType {
    #[default]
    Disk,
    S3,
    HDFS,
}

#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.type == 'Etcd') == (size(self.endpoints) > 0)").message("spec.metadata.endpoints is needed with type Etcd, such as http://etcd:2379, and goes with no other"))]
#[x_kube(validation = Rule::new("self.type == 'Etcd' || !has(self.tlsSecretRef)").message("spec.metadata.tlsSecretRef goes with type Etcd only"))]
#[x_kube(validation = Rule::new("self.endpoints.all(e, e.startsWith('https://')) ? has(self.tlsSecretRef) || size(self.endpoints) == 0 : self.endpoints.all(e, e.startsWith('http://')) && !has(self.tlsSecretRef)").message("spec.metadata.endpoints begin all with https://, and then spec.metadata.tlsSecretRef is needed, or all with http://"))]
pub struct Metadata {
    /// Embedded (one broker, in its volume) or Etcd.
    #[serde(rename = "type")]
    pub type_: MetadataType,
    /// Etcd: its endpoints.
    #[serde(default)]
    #[schemars(schema_with = "endpoints_schema")]
    pub endpoints: Vec<String>,
    /// Etcd: Secret with ca.crt, and with tls.crt and tls.key where etcd asks for certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_secret_ref: Option<Ref>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum MetadataType {
    #[default]
    Embedded,
    Etcd,
}

#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type == 'Internal' || self.insecure || (has(self.tls) && self.authentication.type == 'TLS')").message("a listener of type NodePort or LoadBalancer leaves the cluster: set tls and authentication.type: TLS, or insecure: true"))]
#[x_kube(validation = Rule::new("self.authentication.type != 'TLS' || has(self.tls)").message("authentication.type TLS needs tls: set tls.generate: true or tls.secretRef"))]
#[x_kube(validation = Rule::new("self.type == 'NodePort' || !has(self.nodePort)").message("nodePort goes with type NodePort only"))]
#[x_kube(validation = Rule::new("self.type != 'Internal' || !has(self.advertisedHost)").message("advertisedHost goes with type NodePort or LoadBalancer only"))]
#[x_kube(validation = Rule::new("self.name != 'internal' && self.name != 'brokers' && self.name != 'mirror'").message("name: internal, brokers and mirror are taken by the operator; choose another"))]
#[x_kube(validation = Rule::new("!(self.port in [9094, 9095, 9096, 9097])").message("port: 9094 to 9097 are taken by the broker itself; choose another, such as 9092"))]
pub struct Listener {
    /// Name of the listener: 1 to 15 of a-z, 0-9 and '-'.
    #[schemars(length(min = 1, max = 15), pattern(r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"))]
    pub name: String,
    /// Port in the pod, and of the Service.
    #[schemars(range(min = 1024, max = 65535))]
    pub port: i32,
    /// Internal (reached in this Kubernetes cluster), NodePort or LoadBalancer (reached from outside).
    #[serde(rename = "type", default)]
    pub type_: ListenerType,
    /// Certificates of the listener; plain text when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// How clients prove who they are.
    #[serde(default)]
    pub authentication: Authentication,
    /// Allows a listener that leaves the cluster to be without TLS and client certificates.
    #[serde(default)]
    pub insecure: bool,
    /// Host that clients outside are told, for every broker. NodePort: the address of the broker's
    /// node when not set. LoadBalancer: what the load balancer says when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), pattern(r"^[A-Za-z0-9.-]+$"))]
    pub advertised_host: Option<String>,
    /// NodePort: port of the nodes for the first contact; chosen by Kubernetes when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub node_port: Option<i32>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum ListenerType {
    #[default]
    Internal,
    NodePort,
    LoadBalancer,
}

#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.secretRef) != self.generate").message("tls: set either generate: true or secretRef"))]
pub struct Tls {
    /// Secret with tls.crt, tls.key, and ca.crt where clients show certificates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<Ref>,
    /// The operator makes certificates, and rotates them.
    #[serde(default)]
    pub generate: bool,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Authentication {
    /// None, or TLS (a certificate of the listener's authority).
    #[serde(rename = "type", default)]
    pub type_: AuthenticationType,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum AuthenticationType {
    #[default]
    None,
    TLS,
}

#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Update {
    /// Auto (brokers are restarted one by one), Plan (so, once the annotation sealane.io/approved holds
    /// status.planId), or OnDelete (a person deletes the pods).
    #[serde(default)]
    pub policy: UpdatePolicy,
    /// Brokers that may be down at a time.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 100))]
    pub max_unavailable: i32,
}

impl Default for Update {
    fn default() -> Update {
        Update { policy: UpdatePolicy::Auto, max_unavailable: 1 }
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum UpdatePolicy {
    #[default]
    Auto,
    Plan,
    OnDelete,
}

#[derive(Clone, Debug, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.renewBeforeDays < self.validityDays").message("spec.certificates.renewBeforeDays must be less than validityDays"))]
pub struct Certificates {
    /// Days that a certificate of a service is good for. Authorities live ten times as long.
    #[serde(default = "ninety")]
    #[schemars(range(min = 1, max = 3650))]
    pub validity_days: i32,
    /// Days before its end that a certificate is replaced.
    #[serde(default = "thirty")]
    #[schemars(range(min = 0, max = 3649))]
    pub renew_before_days: i32,
    /// Seconds within which every process has taken changed files: each step of the replacement of an authority
    /// lasts so long.
    #[serde(default = "five_minutes")]
    #[schemars(range(min = 10, max = 86400))]
    pub settle_seconds: i32,
}

impl Default for Certificates {
    fn default() -> Certificates {
        Certificates { validity_days: 90, renew_before_days: 30, settle_seconds: 300 }
    }
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterLanes {
    /// What names the lane of a record: names of headers, baggage/KEY or tracestate/KEY; the broker's
    /// own list when empty.
    #[serde(default)]
    #[schemars(length(max = 32), inner(length(min = 1, max = 128)))]
    pub extractors: Vec<String>,
    /// Whether topics are created with lanes on.
    #[serde(default)]
    pub default: bool,
    /// First of the 90 ports from which each lane gets its own at lane-routers; 19100 when not set. Where a LaneRouter
    /// is of type NodePort they must be ports of nodes. A lane keeps the port that it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1024, max = 65000))]
    pub port_first: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Mirror {
    /// Number of mirror pods.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 16))]
    pub replicas: i32,
    /// Where other regions' mirrors reach these, over UDP.
    #[serde(default)]
    pub listener: MirrorListener,
}

#[derive(Clone, Debug, Deserialize, Eq, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.type == 'NodePort' || !has(self.nodePort)").message("spec.mirror.listener.nodePort goes with type NodePort only"))]
pub struct MirrorListener {
    /// Internal, NodePort or LoadBalancer.
    #[serde(rename = "type", default)]
    pub type_: ListenerType,
    /// UDP port of the Service.
    #[serde(default = "mirror_port")]
    #[schemars(range(min = 1024, max = 65535))]
    pub port: i32,
    /// NodePort: UDP port of the nodes; chosen by Kubernetes when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub node_port: Option<i32>,
    /// Host that other regions are told; found as for listeners of brokers when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), pattern(r"^[A-Za-z0-9.-]+$"))]
    pub advertised_host: Option<String>,
}

impl Default for MirrorListener {
    fn default() -> MirrorListener {
        MirrorListener {
            type_: ListenerType::Internal,
            port: mirror_port(),
            node_port: None,
            advertised_host: None,
        }
    }
}

/// What the operator has seen of a cluster.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BrokerClusterStatus {
    /// Generation of the spec that this status judges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Image that the brokers run, or shall run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The cluster's own id, as Kafka clients see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster_id: Option<String>,
    /// First address for clients, by listener.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub endpoints: Vec<Endpoint>,
    #[serde(default)]
    pub brokers: BrokerCounts,
    /// What is to be done and why it is not done yet, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub plan: Vec<String>,
    /// With update policy Plan: what the annotation sealane.io/approved must hold for the plan to be carried
    /// out. It is of what the brokers shall run, so a later change needs leave of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_id: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub certificates: Vec<CertificateStatus>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for BrokerClusterStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Endpoint {
    /// Name of the listener.
    pub listener: String,
    /// HOST:PORT.
    pub address: String,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct BrokerCounts {
    pub ready: i32,
    pub total: i32,
    /// READY/TOTAL.
    #[serde(default)]
    pub summary: String,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateStatus {
    /// Name of the Secret.
    pub secret: String,
    /// Until when it is good.
    pub not_after: String,
    /// First 16 digits of the SHA-256 of the certificate.
    pub fingerprint: String,
}

/// Keys of the broker's file that the operator leaves to the person.
pub const CONFIG_KEYS: &[&str] = &[
    "auto_create_topics",
    "cluster.cache_bytes_max",
    "cluster.lease_ms",
    "cluster.log_bytes_max",
    "cluster.sweep_ms",
    "connection_idle_ms",
    "connections_max",
    "drain_seconds",
    "durability",
    "fetch_bytes_max",
    "flush_interval_ms",
    "flush_threads",
    "group_initial_rebalance_delay_ms",
    "inflight_produce_bytes_max",
    "lane_grace_seconds",
    "num_partitions",
    "offsets_partitions",
    "offsets_retention_minutes",
    "request_bytes_max",
    "request_bytes_total_max",
    "retention_check_ms",
    "segment_files_open_max",
];

fn config_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = words_schema(generator);
    let quoted: Vec<String> = CONFIG_KEYS.iter().map(|key| format!("'{key}'")).collect();
    schema.insert(
        "x-kubernetes-validations".to_owned(),
        serde_json::json!([{
            "rule": format!("self.all(key, key in [{}])", quoted.join(", ")),
            "message": format!("spec.config: its keys may be {}", CONFIG_KEYS.join(", ")),
        }, {
            "rule": "self.all(key, key == 'durability' ? self[key] in ['sync', 'os'] : key == 'auto_create_topics' ? self[key] in ['true', 'false'] : self[key].matches('^[0-9]{1,18}$'))",
            "message": "spec.config: durability is sync or os, auto_create_topics is true or false, every other key is a whole number in quotes",
        }]),
    );
    schema
}

fn endpoints_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "array",
        "default": [],
        "items": { "type": "string", "maxLength": 256, "pattern": "^https?://[^/]+/?$" },
        "maxItems": 9
    })
}

fn listeners_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = <Vec<Listener>>::json_schema(generator);
    schema.insert("minItems".to_owned(), 1.into());
    schema.insert("maxItems".to_owned(), 8.into());
    schema.insert("x-kubernetes-list-type".to_owned(), "map".into());
    schema.insert("x-kubernetes-list-map-keys".to_owned(), serde_json::json!(["name"]));
    schema.insert(
        "x-kubernetes-validations".to_owned(),
        serde_json::json!([{
            "rule": "self.all(a, self.exists_one(b, a.port == b.port))",
            "message": "spec.listeners: every listener needs a port of its own",
        }]),
    );
    schema
}

fn one() -> i32 {
    1
}

fn thirty() -> i32 {
    30
}

fn five_minutes() -> i32 {
    300
}

fn ninety() -> i32 {
    90
}

fn mirror_port() -> i32 {
    9096
}
