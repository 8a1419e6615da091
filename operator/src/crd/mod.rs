//! The custom resources of group `sealane.io`: their schemas, rules, columns and statuses.
//!
//! Every rule is CEL in the schema, so the API server and `sealane lint` judge alike; a message names
//! the field and what it may be. What a rule cannot know (other objects) is told in conditions.

// Columns of one type repeat a word of an attribute, which clippy takes for a mistake.
#![allow(clippy::duplicated_attributes)]

mod cluster;
mod lane;
mod link;
mod pool;
#[doc(hidden)]
pub mod table;
#[cfg(test)]
mod tests;
mod topic;

pub use cluster::{
    Authentication, AuthenticationType, BrokerCluster, BrokerClusterSpec, BrokerClusterStatus, BrokerCounts,
    CertificateStatus, Certificates, ClusterLanes, Endpoint, Listener, ListenerType, Metadata, MetadataType,
    Mirror, MirrorListener, PullPolicy, Storage, StorageType, Tls, Update, UpdatePolicy,
};
pub use lane::{Lane, LaneClass, LaneRouter, LaneRouterSpec, LaneRouterStatus, LaneSpec, LaneStatus};
pub use link::{
    Bandwidth, GrantRef, LinkGrant, LinkGrantSpec, LinkGrantStatus, Links, MirrorLink, MirrorLinkSpec,
    MirrorLinkStatus, Rpo, TopicFilter,
};
pub use pool::{
    BrokerPool, BrokerPoolSpec, BrokerPoolStatus, BrokerRole, PoolBroker, PoolStorage, PvcRetention,
};
pub use topic::{DeletionPolicy, Topic, TopicLanes, TopicSpec, TopicStatus};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::CustomResourceExt as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Another object of the same namespace.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub struct Ref {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

impl Ref {
    pub fn to(name: &str) -> Ref {
        Ref { name: name.to_owned() }
    }
}

/// What every status has.
pub trait Conditions {
    fn conditions(&self) -> &[Condition];
}

/// All definitions, in the order of their file names.
pub fn all() -> Vec<CustomResourceDefinition> {
    let mut all = vec![
        BrokerCluster::crd(),
        BrokerPool::crd(),
        Topic::crd(),
        LinkGrant::crd(),
        MirrorLink::crd(),
        Lane::crd(),
        LaneRouter::crd(),
    ];
    all.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    all
}

/// A definition as a manifest.
pub fn yaml(definition: &CustomResourceDefinition) -> String {
    let text = serde_yaml_ng::to_string(definition).expect("a definition is plain data");
    format!(
        "# Made from the code by SEALANE_WRITE_DOCS=1 cargo test -p operator definitions; do not edit.\n{text}"
    )
}

/// The schema of conditions: a list that is merged by type.
pub(crate) fn conditions_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    let mut schema = <Vec<Condition>>::json_schema(generator);
    schema.insert("x-kubernetes-list-type".to_owned(), "map".into());
    schema.insert("x-kubernetes-list-map-keys".to_owned(), serde_json::json!(["type"]));
    schema
}

/// A map from words to words with a bound on both, so that rules over it have a bounded cost.
pub(crate) fn words_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "additionalProperties": { "type": "string", "maxLength": 1024 },
        "maxProperties": 64
    })
}

pub(crate) fn is_false(value: &bool) -> bool {
    !value
}
