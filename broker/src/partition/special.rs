//! The special batches of a range, without reading a byte of it: markers, and batches with lane records.

use kafka::Offset;

use super::{Condition, Partition, ReadError};
use crate::log::BatchEntry;

/// Special batches in offset order.
#[derive(Clone, Debug)]
pub struct Special {
    pub entries: Vec<BatchEntry>,
    /// Every special batch below this offset is in `entries`.
    pub upto: Offset,
    pub high_watermark: Offset,
}

impl Partition {
    /// The special batches from the one that holds `from` on, below the high watermark; about `limit`
    /// of them, more if one segment has more.
    pub fn special(&self, from: Offset, limit: usize) -> Result<Special, ReadError> {
        let (sealed, high_watermark) = {
            let state = self.state.lock();
            match &state.condition {
                Condition::Serving => {}
                Condition::Faulted(reason) => return Err(ReadError::Faulted(reason.clone())),
                Condition::Closed => return Err(ReadError::Closed),
            }
            let high_watermark = state.visible.offset;
            if from >= state.active.base {
                let entries = state.active.content.batches.touching(from, high_watermark).to_vec();
                return Ok(Special { entries, upto: high_watermark, high_watermark });
            }
            let first = state.sealed.partition_point(|s| s.next <= from);
            (state.sealed[first..].to_vec(), high_watermark)
        };
        let mut found = Special { entries: Vec::new(), upto: from, high_watermark };
        for segment in sealed {
            let from = from.max(segment.base);
            found.entries.extend_from_slice(segment.batches(&*self.store)?.touching(from, high_watermark));
            found.upto = segment.next.min(high_watermark);
            if found.entries.len() >= limit || found.upto == high_watermark {
                return Ok(found);
            }
        }
        // What was active then may be sealed by now: the caller comes again for the rest.
        let state = self.state.lock();
        if found.upto >= state.active.base {
            found
                .entries
                .extend_from_slice(state.active.content.batches.touching(found.upto, high_watermark));
            found.upto = high_watermark;
        }
        Ok(found)
    }
}
