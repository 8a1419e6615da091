//! Names of the broker's metrics, and the handles that are counted on.

use std::sync::Arc;

use chassis::metrics::{Counter, Gauge, Registry};

use crate::lanes::Lanes;

/// Handles of the series that every request touches.
pub struct Metrics {
    pub connections: Gauge,
    pub connections_refused: Counter,
    pub requests: Counter,
    pub malformed: Counter,
    pub bytes_in: Counter,
    pub bytes_out: Counter,
    pub produced_batches: Counter,
    pub produced_bytes: Counter,
    pub duplicates: Counter,
    pub fetched_bytes: Counter,
    pub parked_fetches: Gauge,
    pub lane_unknown: Counter,
    pub lane_disagreed: Counter,
}

/// Handles of the group coordinator's series.
#[derive(Clone, Default)]
pub struct GroupMetrics {
    pub groups: Gauge,
    pub generations: Counter,
    pub commits: Counter,
    pub members_expired: Counter,
}

impl GroupMetrics {
    pub fn new(registry: &Registry) -> GroupMetrics {
        let counter = |name, help| registry.counter(name, help, &[]);
        GroupMetrics {
            groups: registry.gauge("sealane_groups", "Consumer groups, empty ones included.", &[]),
            generations: counter(
                "sealane_group_generations_total",
                "Generations of groups that were stored: rebalances, and groups that became empty.",
            ),
            commits: counter("sealane_offset_commits_total", "Requests whose offsets are durably committed."),
            members_expired: counter(
                "sealane_group_members_expired_total",
                "Members that were taken out of their group because they were silent or late.",
            ),
        }
    }
}

impl Metrics {
    pub fn new(registry: &Registry) -> Metrics {
        let counter = |name, help| registry.counter(name, help, &[]);
        let gauge = |name, help| registry.gauge(name, help, &[]);
        Metrics {
            connections: gauge("sealane_connections", "Open client connections."),
            connections_refused: counter(
                "sealane_connections_refused_total",
                "Connections closed at once because the listener had too many.",
            ),
            requests: counter("sealane_requests_total", "Requests started."),
            malformed: counter(
                "sealane_malformed_requests_total",
                "Connections closed because of what they sent.",
            ),
            bytes_in: counter("sealane_received_bytes_total", "Bytes received from clients."),
            bytes_out: counter("sealane_sent_bytes_total", "Bytes sent to clients."),
            produced_batches: counter("sealane_produced_batches_total", "Batches appended for clients."),
            produced_bytes: counter("sealane_produced_bytes_total", "Bytes of batches appended for clients."),
            duplicates: counter(
                "sealane_duplicate_batches_total",
                "Batches of idempotent producers that were there already.",
            ),
            fetched_bytes: counter("sealane_fetched_bytes_total", "Bytes of records sent to clients."),
            parked_fetches: gauge("sealane_parked_fetches", "Fetches that wait for data."),
            lane_unknown: counter(
                "sealane_lane_unknown_records_total",
                "Records whose lane header is no lane name; they are the baseline's.",
            ),
            lane_disagreed: counter(
                "sealane_lane_disagreeing_records_total",
                "Records whose headers name different lanes, of which the first won.",
            ),
        }
    }

    /// Series that are looked up when they are asked for.
    pub fn follow_lanes(registry: &Registry, lanes: &Arc<Lanes>) {
        let lanes = Arc::downgrade(lanes);
        registry.on_scrape(move |scrape| {
            let pairs = lanes.upgrade().map_or(0, |lanes| lanes.ambiguous_groups().len());
            scrape.gauge(
                "sealane_lane_ambiguous_group_pairs",
                "Pairs of groups whose consumers share a client.id and cannot be told apart.",
                &[],
                pairs as f64,
            );
        });
    }
}
