//! Rebuilt batches, each kept once for all views that are shown the same records of it.
//!
//! Bounded in bytes for the whole process; the oldest go first.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use kafka::{Offset, PartitionIndex, TopicId};
use lane_core::{LaneRules, LaneSummary, RecordLane, View};
use parking_lot::Mutex;

use crate::partition::Partition;

/// A batch and which of its lanes are kept.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RebuiltKey {
    topic: TopicId,
    partition: PartitionIndex,
    base: Offset,
    /// Bit 0: baseline, 1: unnamed, 2 and up: the summary's lanes.
    kept: u32,
}

/// The cache.
#[derive(Debug)]
pub struct Rebuilt {
    bytes_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    batches: HashMap<RebuiltKey, Bytes>,
    order: VecDeque<RebuiltKey>,
    bytes: usize,
}

/// Bytes kept by default.
pub const REBUILT_BYTES_MAX: usize = 16 * 1024 * 1024;

impl RebuiltKey {
    /// `None` where the summary does not name every lane, so that the key would not say what is kept.
    pub fn new(
        partition: &Partition,
        base: Offset,
        rules: &LaneRules,
        summary: &LaneSummary,
        view: &View,
    ) -> Option<RebuiltKey> {
        if summary.is_many() {
            return None;
        }
        let named = summary.lanes().iter().map(|lane| RecordLane::Lane(lane.clone()));
        let lanes = [RecordLane::Baseline, RecordLane::Unnamed].into_iter().chain(named);
        let kept = lanes.enumerate().map(|(bit, lane)| u32::from(rules.sees(view, &lane, base)) << bit).sum();
        Some(RebuiltKey { topic: partition.topic_id, partition: partition.index, base, kept })
    }
}

impl Rebuilt {
    pub fn new(bytes_max: usize) -> Rebuilt {
        Rebuilt { bytes_max, inner: Mutex::default() }
    }

    pub fn find(&self, key: &RebuiltKey) -> Option<Bytes> {
        self.inner.lock().batches.get(key).cloned()
    }

    pub fn keep(&self, key: RebuiltKey, bytes: Bytes) {
        let mut inner = self.inner.lock();
        if bytes.len() > self.bytes_max || inner.batches.contains_key(&key) {
            return;
        }
        inner.bytes += bytes.len();
        inner.order.push_back(key.clone());
        inner.batches.insert(key, bytes);
        while inner.bytes > self.bytes_max {
            let Some(oldest) = inner.order.pop_front() else { break };
            inner.bytes -= inner.batches.remove(&oldest).map_or(0, |b| b.len());
        }
    }
}
