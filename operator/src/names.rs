//! Names and labels of everything that the operator makes. They are an interface: people select by
//! them, and an operator finds its own work again by them.

use std::collections::BTreeMap;

pub const GROUP: &str = "sealane.io";
/// Field manager, finalizer prefix and value of the label `app.kubernetes.io/managed-by`.
pub const MANAGER: &str = "sealane-operator";

pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
pub const PART_OF: &str = "app.kubernetes.io/part-of";
pub const COMPONENT: &str = "app.kubernetes.io/component";
/// Name of the BrokerCluster.
pub const CLUSTER: &str = "sealane.io/cluster";
/// Name of the BrokerPool.
pub const POOL: &str = "sealane.io/pool";
/// Name of the pod that an object is for.
pub const POD: &str = "sealane.io/pod";
/// KIND.NAME of the object that an object was made for; what an orphan is adopted by.
pub const OWNER: &str = "sealane.io/owner";

/// Hash of what was applied, so that nothing is written twice.
pub const APPLIED: &str = "sealane.io/applied";
/// On any of our resources, "true": nothing is written for it.
pub const PAUSED: &str = "sealane.io/paused";
/// On a BrokerCluster: a word; every new one has all certificates of services made anew.
pub const ROTATE: &str = "sealane.io/rotate-certificates";
/// On a BrokerCluster: a word; every new one has the authority of the region replaced. On the authority's Secret: the last.
pub const ROTATE_AUTHORITY: &str = "sealane.io/rotate-authority";
/// On the Secret of an authority: since when it stands as it does.
pub const AUTHORITY_SINCE: &str = "sealane.io/authority-since";
/// On a BrokerCluster with update policy Plan: the status.planId that a person agrees to.
pub const APPROVED: &str = "sealane.io/approved";
/// On a pool's StatefulSet: POD=ID of brokers that the operator empties, with commas between.
pub const EMPTIED: &str = "sealane.io/emptied";
/// Name of the LaneRouter whose pods leave the cluster.
pub const ROUTER: &str = "sealane.io/lane-router";
/// Component of those pods: they are not behind the Service that workloads inside use.
pub const OUTSIDE_ROUTER: &str = "lane-router-outside";
/// On a pod template: hash of the configuration file.
pub const CONFIG_HASH: &str = "sealane.io/config";

/// Ports of every broker beside those of its listeners for clients.
pub const CONTROL_PORT: i32 = 9094;
pub const HTTP_PORT: i32 = 9095;
pub const MIRROR_PORT: i32 = 9096;
pub const INTERNAL_PORT: i32 = 9097;
/// Ports of lane-routers: the shared one, and the first of those that lanes get.
pub const LANE_SHARED_PORT: i32 = 9093;
pub const LANE_PORT_FIRST: i32 = 19100;
pub const LANE_PORT_COUNT: i32 = 90;

/// Names that belong to one BrokerCluster.
#[derive(Clone, Debug)]
pub struct ClusterNames {
    pub cluster: String,
    pub namespace: String,
    pub domain: String,
}

impl ClusterNames {
    /// Headless Service of all brokers.
    pub fn brokers(&self) -> String {
        format!("{}-brokers", self.cluster)
    }

    /// Service of one listener.
    pub fn listener(&self, listener: &str) -> String {
        format!("{}-{listener}", self.cluster)
    }

    /// Service of one listener of one broker.
    pub fn of_pod(&self, pod: &str, listener: &str) -> String {
        format!("{pod}-{listener}")
    }

    pub fn authority(&self) -> String {
        format!("{}-authority", self.cluster)
    }

    /// ConfigMap with the authorities that are trusted.
    pub fn trust(&self) -> String {
        format!("{}-trust", self.cluster)
    }

    /// Secret of one kind of service: broker, mirror, lane-router, control, client.
    pub fn certificate(&self, of: &str) -> String {
        format!("{}-{of}-tls", self.cluster)
    }

    pub fn mirror(&self) -> String {
        format!("{}-mirror", self.cluster)
    }

    /// Service of all lane-routers of the cluster.
    pub fn lanes(&self) -> String {
        format!("{}-lanes", self.cluster)
    }

    /// ServiceAccount of brokers and mirrors. It may do nothing.
    pub fn account(&self) -> String {
        format!("{}-broker", self.cluster)
    }

    pub fn config(&self, pool: &str) -> String {
        format!("{pool}-config")
    }

    /// Full name of a Service.
    pub fn host_of(&self, service: &str) -> String {
        format!("{service}.{}.svc.{}", self.namespace, self.domain)
    }

    /// Full name of a pod of the brokers.
    pub fn host_of_pod(&self, pod: &str) -> String {
        format!("{pod}.{}", self.host_of(&self.brokers()))
    }

    /// Labels of everything of this cluster.
    pub fn labels(&self, component: &str) -> BTreeMap<String, String> {
        [
            ("app.kubernetes.io/name", "sealane"),
            (PART_OF, "sealane"),
            ("app.kubernetes.io/instance", self.cluster.as_str()),
            (COMPONENT, component),
            (MANAGED_BY, MANAGER),
            (CLUSTER, self.cluster.as_str()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
    }

    /// What selects all brokers.
    pub fn broker_selector(&self) -> BTreeMap<String, String> {
        [(CLUSTER, self.cluster.as_str()), (COMPONENT, "broker")]
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect()
    }
}
