//! What a cluster keeps in its metadata store.
//!
//! ```text
//! cluster                  its id and region
//! store                    where its brokers keep their bytes, as the first of them calls it
//! ids/<identity>           the broker id and the count of lives of whoever has this identity
//! brokers/<id>             a broker that is alive, under its lease
//! controller               the controller's broker id, under its lease
//! draining/<id>            a broker that shall give everything away
//! loads/<id>               how much its partitions are used, under its lease
//! assignments/<topic id>   who owns each partition of a topic
//! ```
//! All values are JSON. Unknown fields are kept out of the way of a newer version, not refused.

use std::collections::BTreeMap;

use broker_store::Life;
use kafka::TopicId;
use serde::{Deserialize, Serialize};

use crate::config::Role;

pub const BROKERS: &str = "brokers/";
pub const DRAINING: &str = "draining/";
pub const LOADS: &str = "loads/";
pub const ASSIGNMENTS: &str = "assignments/";
pub const IDS: &str = "ids/";
pub const CONTROLLER: &str = "controller";
pub const STORE: &str = "store";

/// What stays with an identity (a data directory, a pod's name).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdObject {
    pub broker: i32,
    /// Lives begun so far; the number of the latest.
    pub lives: u64,
}

/// A broker that is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerObject {
    pub life: u64,
    /// Advertised `host:port` by name of the listener.
    pub listeners: BTreeMap<String, String>,
    /// Where the command line finds it.
    #[serde(default)]
    pub control: String,
    /// What it does.
    pub roles: Vec<Role>,
}

/// Who owns the partitions of one topic, by index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignmentObject {
    /// The topic's name; its id is in the key.
    pub topic: String,
    pub partitions: Vec<PartitionObject>,
}

impl AssignmentObject {
    /// Whether heirs of a partition are to read the log of this life.
    pub fn names(&self, index: i32, life: &str) -> bool {
        let record = usize::try_from(index).ok().and_then(|index| self.partitions.get(index));
        record.is_some_and(|record| record.lives.iter().any(|named| named == life))
    }
}

/// Who owns one partition, and what is needed to take it over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionObject {
    /// None before the first assignment.
    pub owner: Option<i32>,
    /// Grows with every change of the owner and of the owner's life: the leader epoch of Kafka.
    pub epoch: i32,
    /// The lives whose logs hold what is not in the manifest, oldest first; beside a manifest the one that
    /// left it, whose packs it may refer to.
    #[serde(default)]
    pub lives: Vec<String>,
    /// The object that the last owner left when it handed the partition over.
    #[serde(default)]
    pub manifest: Option<String>,
    /// Whom the owner shall hand it to.
    #[serde(default)]
    pub moving_to: Option<i32>,
    /// The owner has taken it over: `lives` names the owner's life alone, and it is served.
    #[serde(default)]
    pub taken: bool,
}

impl PartitionObject {
    pub fn new() -> PartitionObject {
        PartitionObject {
            owner: None,
            epoch: -1,
            lives: Vec::new(),
            manifest: None,
            moving_to: None,
            taken: false,
        }
    }

    /// Whether `life` has taken it over.
    pub fn is_served_by(&self, life: Life) -> bool {
        self.taken && self.owner == Some(life.broker) && self.lives.first() == Some(&life.to_string())
    }
}

impl Default for PartitionObject {
    fn default() -> PartitionObject {
        PartitionObject::new()
    }
}

pub fn broker_key(broker: i32) -> String {
    format!("{BROKERS}{broker}")
}

pub fn assignment_key(topic: TopicId) -> String {
    format!("{ASSIGNMENTS}{}", topic.0)
}
