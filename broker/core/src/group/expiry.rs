//! When a committed offset has lapsed (KIP-211): only where nobody can still need it.

use std::time::Duration;

use kafka::TimestampMs;

use super::{Group, GroupState};
use crate::offsets_log::CommittedOffset;

impl Group {
    /// Whether `offset` on `topic` may be forgotten after `retention`.
    ///
    /// Counts from the commit for groups without members of their own (tools, `assign()`) and for
    /// topics that a stable group no longer reads; from the day the group became empty for empty
    /// groups. A group that is rebalancing, or whose subscriptions are unknown, keeps everything.
    pub fn offset_has_lapsed(
        &self,
        topic: &str,
        offset: &CommittedOffset,
        retention: Duration,
        now: TimestampMs,
    ) -> bool {
        let since = match (self.protocol_type(), self.state) {
            (None, _) => offset.committed_at,
            (Some(_), GroupState::Empty) => self.state_since.unwrap_or(offset.committed_at),
            (Some(_), GroupState::Stable) if self.subscribed.is_some() => offset.committed_at,
            _ => return false,
        };
        if self.is_subscribed(topic) {
            return false;
        }
        match offset.expires_at {
            Some(at) => now >= at,
            None => now.0.saturating_sub(since.0) >= i64::try_from(retention.as_millis()).unwrap_or(i64::MAX),
        }
    }
}
