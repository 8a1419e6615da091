//! One member of a group, and what it brings: identity, protocols, timeouts, waiting requests.
//!
//! Owns the member's own state; which requests are answered when is decided by the group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

/// Identity of a member in its group, given by the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(Arc<str>);

/// `group.instance.id` of a static member (KIP-345).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(Arc<str>);

/// Names one waiting JoinGroup or SyncGroup request; the caller gives it and gets it back once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One protocol (assignor) that a member supports, with its subscription.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Protocol {
    pub name: String,
    pub metadata: Bytes,
}

/// A member as the group knows it.
#[derive(Clone, Debug)]
pub struct Member {
    pub id: MemberId,
    pub instance: Option<InstanceId>,
    pub client_id: String,
    pub client_host: String,
    pub session_timeout: Duration,
    pub rebalance_timeout: Duration,
    /// In the order of the member's preference.
    pub protocols: Vec<Protocol>,
    pub assignment: Bytes,
    pub(super) awaiting_join: Option<Ticket>,
    pub(super) awaiting_sync: Option<Ticket>,
    /// Joined but not answered yet: it has no id to send heartbeats with.
    pub(super) is_new: bool,
    /// When the session ends, as time since start; `None` while the member waits for the group.
    pub(super) session_ends: Option<Duration>,
}

impl MemberId {
    /// `None` for the empty id, which in Kafka means "not known yet".
    pub fn parse(text: &str) -> Option<MemberId> {
        (!text.is_empty()).then(|| MemberId(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl InstanceId {
    pub fn new(text: &str) -> InstanceId {
        InstanceId(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Member {
    /// The subscription under `protocol`; empty when the member does not support it.
    pub fn metadata(&self, protocol: &str) -> Bytes {
        self.protocols.iter().find(|p| p.name == protocol).map(|p| p.metadata.clone()).unwrap_or_default()
    }

    /// Waiting for the group proves that the member lives, except for one that never had an answer:
    /// its connection may have gone, and it would wait here for ever.
    pub(super) fn is_alive_by_waiting(&self) -> bool {
        !self.is_new && (self.awaiting_join.is_some() || self.awaiting_sync.is_some())
    }
}
