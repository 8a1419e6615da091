//! What the coordinator takes from the broker's configuration, and Apache Kafka's own figures for
//! the rest.

use std::time::Duration;

use broker_core::group::GroupRules;

use crate::config::Config;

/// Settings of groups and committed offsets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    pub initial_rebalance_delay: Duration,
    /// What a member may ask for as its session timeout.
    pub session_timeout_ms: std::ops::RangeInclusive<i32>,
    /// Most members of one group.
    pub members_max: usize,
    /// How long offsets outlive their group.
    pub offsets_retention: Duration,
    /// How often lapsed offsets are looked for.
    pub retention_check_interval: Duration,
    /// Longest text that a client may store with an offset, in bytes.
    pub offset_metadata_bytes_max: usize,
}

impl Default for GroupConfig {
    fn default() -> GroupConfig {
        GroupConfig {
            initial_rebalance_delay: Duration::from_secs(3),
            session_timeout_ms: 6_000..=1_800_000,
            members_max: 10_000,
            offsets_retention: Duration::from_secs(7 * 24 * 3600),
            retention_check_interval: Duration::from_secs(600),
            offset_metadata_bytes_max: 4_096,
        }
    }
}

impl GroupConfig {
    pub fn of(config: &Config) -> GroupConfig {
        let minutes = u64::try_from(config.offsets_retention_minutes).unwrap_or(0);
        GroupConfig {
            initial_rebalance_delay: Duration::from_millis(config.group_initial_rebalance_delay_ms.into()),
            offsets_retention: Duration::from_secs(minutes.saturating_mul(60)),
            // An interval of nothing would be a busy loop.
            retention_check_interval: Duration::from_millis(config.retention_check_ms.max(1).into()),
            ..GroupConfig::default()
        }
    }

    pub fn rules(&self) -> GroupRules {
        GroupRules {
            initial_rebalance_delay: self.initial_rebalance_delay,
            members_max: self.members_max,
            // Kafka's constant: a first JoinGroup that waits longer has lost its client.
            new_member_join_timeout: Duration::from_secs(5 * 60),
        }
    }
}
