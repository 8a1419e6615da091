//! Names of the mirror's metrics.

use chassis::metrics::{Counter, Registry, Scrape};
use kafka::private::{Direction, LinkReport, LinkState};

use crate::sink::state_name;
use crate::status::Board;

/// Counters of one link.
#[derive(Clone)]
pub struct LinkMetrics {
    /// Recreated topics and truncated sources.
    pub resets: Counter,
    pub quarantines: Counter,
    pub connections: Counter,
}

impl LinkMetrics {
    pub fn new(registry: &Registry, peer: &str) -> LinkMetrics {
        let labels = [("peer", peer)];
        LinkMetrics {
            resets: registry.counter(
                "sealane_mirror_resets_total",
                "Partitions whose source was recreated or had lost what is held here.",
                &labels,
            ),
            quarantines: registry.counter(
                "sealane_mirror_quarantines_total",
                "Partitions that stopped because a unit could not be applied.",
                &labels,
            ),
            connections: registry.counter(
                "sealane_mirror_connections_total",
                "Connections to the peer that came up.",
                &labels,
            ),
        }
    }
}

/// Shows the latest reports at every scrape.
pub fn show(registry: &Registry, board: Board) {
    registry.on_scrape(move |scrape| board.links().iter().for_each(|link| show_link(scrape, link)));
}

fn show_link(scrape: &mut Scrape, link: &LinkReport) {
    let peer = [("peer", link.peer.as_str())];
    let up = matches!(link.state, LinkState::Active | LinkState::Lagging);
    scrape.gauge("sealane_mirror_link_up", "1 while the link is connected.", &peer, f64::from(u8::from(up)));
    if let Some(rtt) = link.rtt_us {
        let help = "Round trip to the peer's mirror.";
        scrape.gauge("sealane_mirror_link_rtt_seconds", help, &peer, rtt as f64 / 1e6);
    }
    let help = "Bytes of units that this connection has sent.";
    scrape.gauge("sealane_mirror_link_sent_bytes", help, &peer, link.sent_bytes as f64);
    let help = "Bytes of units that this connection has received.";
    scrape.gauge("sealane_mirror_link_received_bytes", help, &peer, link.received_bytes as f64);
    for p in &link.partitions {
        let (index, direction) = (p.partition.0.to_string(), direction_name(p.direction));
        let labels = [
            ("peer", link.peer.as_str()),
            ("topic", p.topic.as_str()),
            ("partition", index.as_str()),
            ("direction", direction),
        ];
        // A lag that is not known has no sample, which is not the same as 0.
        if let Some(lag) = p.lag_records {
            let help = "Records of the source that are not durable at the receiver.";
            scrape.gauge("sealane_mirror_lag_records", help, &labels, lag as f64);
        }
        if let Some(lag) = p.lag_ms {
            let help = "For how long the receiver has been behind.";
            scrape.gauge("sealane_mirror_lag_seconds", help, &labels, lag as f64 / 1e3);
        }
        let [peer, topic, partition, direction] = labels;
        let labels = [peer, topic, partition, direction, ("state", state_name(p.state))];
        scrape.gauge("sealane_mirror_partition_state", "1 for the state it is in.", &labels, 1.0);
    }
}

fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Out => "out",
        Direction::In => "in",
    }
}
