//! The special batches of a range, without reading a byte of it: markers, and batches with lane records.

use std::sync::Arc;

use kafka::Offset;
use lane_core::LaneRules;

use super::{Condition, Partition, ReadError, State};
use crate::log::{BatchEntry, SealedSegment};

/// Special batches in offset order.
#[derive(Clone, Debug)]
pub struct Special {
    pub entries: Vec<BatchEntry>,
    /// Every special batch below this offset was looked at.
    pub upto: Offset,
    pub high_watermark: Offset,
    /// What the log said of lanes, at least up to the high watermark.
    pub rules: Arc<LaneRules>,
}

impl Partition {
    /// The special batches from the one that holds `from` on, below the high watermark, that `wanted`
    /// accepts: the first `count` of them. Looks at about `limit`; `upto` says how far it came.
    pub fn special(
        &self,
        from: Offset,
        limit: usize,
        count: usize,
        mut wanted: impl FnMut(&LaneRules, &BatchEntry) -> bool,
    ) -> Result<Special, ReadError> {
        let (mut walk, sealed) = {
            let state = self.state.lock();
            let mut walk = Walk::begin(&state, from, limit, count)?;
            if from >= state.active.base {
                walk.take(state.active.content.batches.touching(from, walk.end()), walk.end(), &mut wanted);
                return Ok(walk.found);
            }
            let first = state.sealed.partition_point(|s| s.next <= from);
            // A few at a time: the caller comes again for the rest.
            let some: Vec<Arc<SealedSegment>> =
                state.sealed[first..].iter().take(SEGMENTS_MAX).cloned().collect();
            (walk, some)
        };
        for segment in sealed {
            let (from, next) = (from.max(segment.base), segment.next.min(walk.end()));
            let batches = segment.batches(&*self.store)?;
            if !walk.take(batches.touching(from, next), next, &mut wanted) {
                break;
            }
        }
        Ok(walk.found)
    }
}

/// Sealed segments that one call looks into.
const SEGMENTS_MAX: usize = 16;

struct Walk {
    found: Special,
    left: usize,
    count: usize,
}

impl Walk {
    fn begin(state: &State, from: Offset, limit: usize, count: usize) -> Result<Walk, ReadError> {
        let (log_start, high_watermark) = (state.fold.log_start, state.visible.offset);
        match &state.condition {
            Condition::Serving => {}
            Condition::Faulted(reason) => return Err(ReadError::Faulted(reason.clone())),
            Condition::Closed => return Err(ReadError::Closed),
        }
        // The rules of what was removed are gone with it.
        if from < log_start {
            return Err(ReadError::OutOfRange { log_start, high_watermark });
        }
        let rules = state.fold.lanes.rules();
        let found = Special { entries: Vec::new(), upto: from, high_watermark, rules };
        Ok(Walk { found, left: limit, count })
    }

    fn end(&self) -> Offset {
        self.found.high_watermark
    }

    /// Looks at `entries`, all that lie below `next`; false if that is enough.
    fn take(
        &mut self,
        entries: &[BatchEntry],
        next: Offset,
        wanted: &mut impl FnMut(&LaneRules, &BatchEntry) -> bool,
    ) -> bool {
        for entry in entries {
            if self.left == 0 || self.found.entries.len() == self.count {
                self.found.upto = self.found.upto.max(entry.base);
                return false;
            }
            self.left -= 1;
            if wanted(&self.found.rules, entry) {
                self.found.entries.push(entry.clone());
            }
        }
        self.found.upto = self.found.upto.max(next);
        true
    }
}
