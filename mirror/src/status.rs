//! What this mirror says about its links: to the broker, which shows it, and to Prometheus.

use std::collections::BTreeMap;
use std::sync::Arc;

use kafka::private::{LinkReport, LinkState};
use parking_lot::Mutex;

/// The latest report of each link, by peer. Cheap to clone.
#[derive(Clone, Default)]
pub struct Board(Arc<Mutex<BTreeMap<String, LinkReport>>>);

impl Board {
    pub fn put(&self, report: LinkReport) {
        self.0.lock().insert(report.peer.clone(), report);
    }

    /// A link without a connection: its partitions are not known to be anything.
    pub fn disconnected(&self, peer: &str, address: &str, state: LinkState, reason: &str) {
        let mut links = self.0.lock();
        let earlier = links.remove(peer);
        let region = earlier.as_ref().and_then(|link| link.region);
        let mut partitions = earlier.map(|link| link.partitions).unwrap_or_default();
        for partition in &mut partitions {
            // A fault stays shown; all else is unknown while the peer is silent.
            if partition.state != LinkState::Faulted {
                partition.state = LinkState::Connecting;
                partition.reason = String::new();
            }
            (partition.lag_records, partition.lag_bytes, partition.lag_ms) = (None, None, None);
        }
        let report = LinkReport {
            peer: peer.to_owned(),
            region,
            address: address.to_owned(),
            state,
            reason: reason.to_owned(),
            rtt_us: None,
            sent_bytes: 0,
            received_bytes: 0,
            partitions,
        };
        links.insert(peer.to_owned(), report);
    }

    pub fn links(&self) -> Vec<LinkReport> {
        self.0.lock().values().cloned().collect()
    }
}
