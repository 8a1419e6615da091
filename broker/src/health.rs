//! What is wrong with a broker that runs, for `/readyz`, the metrics and the log.
//!
//! A full disk makes it unready: whoever can be sent elsewhere should be, and it serves again by itself
//! when there is room. A partition or a topic that is offline does not: only this broker can serve all
//! the others, so to take it away would make one lost partition a lost broker.

use std::sync::{Arc, Weak};
use std::time::Duration;

use broker_store::{SegmentStore, StoreError, StorePath};
use chassis::Trouble;

use crate::broker::Broker;
use crate::partition::Condition;

/// Between two looks whether a full disk has room again.
const TRIAL_INTERVAL: Duration = Duration::from_secs(1);
/// Room that must be there.
const TRIAL_BYTES: usize = 1 << 20;
/// Partitions that are named at a probe; of more there is only the number.
const NAMED_MAX: usize = 10;

/// Watches a broker as long as it lives.
pub fn follow(broker: &Arc<Broker>) {
    let watched = Arc::downgrade(broker);
    broker.service.on_probe(move || watched.upgrade().map(|broker| troubles(&broker)).unwrap_or_default());
    let watched = Arc::downgrade(broker);
    broker.service.metrics().on_scrape(move |scrape| {
        let Some(broker) = watched.upgrade() else { return };
        let full = f64::from(u8::from(broker.flusher.disk().is_full()));
        scrape.gauge("sealane_disk_full", "1 while the disk has no room for records.", &[], full);
        let help = "Partitions that take and give nothing until a person looks.";
        scrape.gauge("sealane_faulted_partitions", help, &[], faulted(&broker).len() as f64);
    });
    let (watched, stop) = (Arc::downgrade(broker), broker.service.stopping().clone());
    broker.service.spawn_child(async move {
        stop.run_until_cancelled(watch_disk(&watched)).await;
    });
}

fn troubles(broker: &Broker) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    if broker.flusher.disk().is_full() {
        troubles.push(Trouble::Unready(FULL.to_owned()));
    }
    let faulted = faulted(broker);
    let named = faulted.iter().take(NAMED_MAX);
    troubles.extend(named.map(|(name, why)| Trouble::Known(format!("partition {name} is offline: {why}"))));
    if faulted.len() > NAMED_MAX {
        troubles.push(Trouble::Known(format!("{} partitions are offline", faulted.len())));
    }
    let closed = not_served(broker);
    if let Some(topic) = closed.first() {
        let more = if closed.len() > 1 { format!(" and {} more", closed.len() - 1) } else { String::new() };
        troubles.push(Trouble::Known(format!(
            "topic {topic}{more}: not all partitions could be opened, see the log"
        )));
    }
    troubles
}

/// Topics with partitions that could not be opened. In a cluster others may have them.
fn not_served(broker: &Broker) -> Vec<String> {
    if broker.cluster.is_some() {
        return Vec::new();
    }
    let served = |name: &str| broker.topic_partitions(name).map_or(0, |open| open.len());
    let topics = broker.topics.all().into_iter();
    topics
        .filter(|topic| served(topic.name.as_str()) < topic.partitions.max(0) as usize)
        .map(|topic| topic.name.to_string())
        .collect()
}

const FULL: &str = "the disk is full: produce is refused until there is room, reading goes on";

fn faulted(broker: &Broker) -> Vec<(String, String)> {
    let faulted = |condition| match condition {
        Condition::Faulted(reason) => Some(reason),
        Condition::Serving | Condition::Closed => None,
    };
    let partitions = broker.all_partitions().into_iter();
    partitions.filter_map(|p| Some((p.to_string(), faulted(p.condition())?))).collect()
}

/// Says when the disk is full, and finds out when it no longer is.
async fn watch_disk(broker: &Weak<Broker>) {
    loop {
        let Some((flusher, store)) = broker.upgrade().map(|b| (b.flusher.clone(), b.store.clone())) else {
            return;
        };
        flusher.disk().noted().await;
        tracing::error!("{FULL}");
        loop {
            tokio::time::sleep(TRIAL_INTERVAL).await;
            let store = store.clone();
            if let Ok(Ok(())) = tokio::task::spawn_blocking(move || try_to_write(&*store)).await {
                break;
            }
        }
        flusher.disk().has_room();
        tracing::info!("the disk has room again");
    }
}

fn try_to_write(store: &dyn SegmentStore) -> Result<(), StoreError> {
    let path = StorePath::root().join("trial-write").map_err(|e| StoreError::Io(e.to_string()))?;
    // Nothing that a file system could fold together.
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let bytes = (0..TRIAL_BYTES / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    let written = store.put(&path, &bytes.collect::<Vec<u8>>());
    store.delete(&path)?;
    written
}
