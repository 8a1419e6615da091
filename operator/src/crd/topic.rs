//! Topic: a topic of a cluster, held to what the object says.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Conditions, Ref, conditions_schema, words_schema};

/// A topic of a cluster.
#[derive(Clone, CustomResource, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "sealane.io",
    version = "v1alpha1",
    kind = "Topic",
    namespaced,
    status = "TopicStatus",
    category = "sealane",
    derive = "PartialEq",
    doc = "A topic of a BrokerCluster.",
    validation = Rule::new("has(self.spec.topicName) || self.metadata.name.size() <= 249").message("metadata.name: at most 249 characters where spec.topicName is not set"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".spec.clusterRef.name"),
    printcolumn(name = "Topic", type_ = "string", json_path = ".status.topicName"),
    printcolumn(name = "Partitions", type_ = "integer", json_path = ".status.partitions"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.clusterRef == oldSelf.clusterRef").message("spec.clusterRef is immutable: make another Topic"))]
#[x_kube(validation = Rule::new("has(self.topicName) == has(oldSelf.topicName) && (!has(self.topicName) || self.topicName == oldSelf.topicName)").message("spec.topicName is immutable: make another Topic"))]
#[x_kube(validation = Rule::new("self.partitions >= oldSelf.partitions").message("spec.partitions can only grow"))]
#[x_kube(validation = Rule::new("!has(self.topicName) || (self.topicName != '.' && self.topicName != '..' && !self.topicName.startsWith('__'))").message("spec.topicName: not '.', not '..', and not beginning with '__', which is for the broker's own topics"))]
#[x_kube(validation = Rule::new("!self.config.exists(key, key == 'sealane.lanes')").message("spec.config: sealane.lanes is set by spec.lanes.enabled"))]
pub struct TopicSpec {
    /// The BrokerCluster that has the topic.
    pub cluster_ref: Ref,
    /// Name of the topic; the object's own name when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 249), pattern(r"^[A-Za-z0-9._-]+$"))]
    pub topic_name: Option<String>,
    /// Number of partitions; it can only grow.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 10000))]
    pub partitions: i32,
    /// Configuration of the topic, as Kafka names it. A key that is left out has its default.
    #[serde(default)]
    #[schemars(schema_with = "topic_config_schema")]
    pub config: BTreeMap<String, String>,
    /// Whether the topic has lanes; as the cluster says when not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<TopicLanes>,
    /// Whether the topic and its records go with this object.
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct TopicLanes {
    pub enabled: bool,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum DeletionPolicy {
    #[default]
    Retain,
    Delete,
}

/// What the operator has seen of a topic.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TopicStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topic_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topic_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partitions: Option<i32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions_schema")]
    pub conditions: Vec<Condition>,
}

impl Conditions for TopicStatus {
    fn conditions(&self) -> &[Condition] {
        &self.conditions
    }
}

impl Topic {
    /// Name of the topic in the cluster.
    pub fn topic_name(&self) -> String {
        self.named().to_owned()
    }

    /// The same, to look at.
    pub fn named(&self) -> &str {
        let own = || self.metadata.name.as_deref().unwrap_or_default();
        self.spec.topic_name.as_deref().unwrap_or_else(own)
    }
}

fn topic_config_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = words_schema(generator);
    schema.insert("default".to_owned(), serde_json::json!({}));
    schema
}

fn one() -> i32 {
    1
}
