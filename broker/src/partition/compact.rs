//! Compaction of a partition whose topic keeps the last record of each key (`log::compact`).
//!
//! Works beside appends and reads: only segments that are sealed and durable are rewritten, and the
//! lock is held for the swap alone. Segments that end up empty join the one before them.

use std::sync::Arc;

use kafka::{Offset, TimestampMs};

use super::{Condition, Partition};
use crate::log::SealedSegment;
use crate::log::compact::{CompactError, LastOffsets, Remainder, sweep};
use crate::log::recovery::delete_segment;

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    pub segments_before: usize,
    pub segments_after: usize,
    pub bytes_before: u64,
    pub bytes_after: u64,
}

impl Partition {
    /// One pass over the sealed segments, if any was sealed since the last. Tombstones older than
    /// `tombstones_before` go with what they deleted. Blocks for the disk; one pass at a time.
    pub fn compact(&self, tombstones_before: TimestampMs) -> Result<Compacted, CompactError> {
        let segments = self.finished_segments();
        let mut done = Compacted::default();
        if segments.iter().all(|s| s.generation > 0) {
            return Ok(done);
        }
        let store = &*self.store;
        sweep(store, &self.dir, &segments)?;
        let mut last = LastOffsets::default();
        let mut judged = 0;
        for segment in &segments {
            if !last.add(store, segment)? {
                break;
            }
            judged += 1;
        }
        let segments = &segments[..judged];
        done.segments_before = segments.len();
        done.bytes_before = segments.iter().map(|s| s.size).sum();
        let interval = self.settings().index_interval_bytes;
        let mut open: Option<(Arc<SealedSegment>, Remainder, Vec<Arc<SealedSegment>>)> = None;
        for segment in segments {
            let rest = last.remainder(store, segment, tombstones_before, interval)?;
            match &mut open {
                Some((_, _, empty)) if rest.bytes.is_empty() => empty.push(segment.clone()),
                _ => {
                    if let Some((old, rest, empty)) = open.replace((segment.clone(), rest, Vec::new())) {
                        done.count(self.replace(&old, rest, &empty)?);
                    }
                }
            }
        }
        if let Some((old, rest, empty)) = open {
            done.count(self.replace(&old, rest, &empty)?);
        }
        Ok(done)
    }

    /// Sealed segments whose roll is finished: nothing about them will change.
    fn finished_segments(&self) -> Vec<Arc<SealedSegment>> {
        let state = self.state.lock();
        if state.condition != Condition::Serving {
            return Vec::new();
        }
        state.finished().to_vec()
    }

    /// Puts the rewritten segment in the place of `old` and the empty ones behind it. Returns its size.
    fn replace(
        &self,
        old: &Arc<SealedSegment>,
        rest: Remainder,
        empty: &[Arc<SealedSegment>],
    ) -> Result<u64, CompactError> {
        // Generation 0 has been looked at and needs no second look, even if all of it stays.
        if !rest.changed && empty.is_empty() && old.generation > 0 {
            return Ok(old.size);
        }
        let next = empty.last().map_or(old.next, |s| s.next);
        let new = rest.write(&*self.store, &self.dir, old, next)?;
        let size = new.size;
        {
            let mut state = self.state.lock();
            let gone: Vec<Offset> = empty.iter().map(|s| s.base).collect();
            state.sealed.retain(|s| !gone.contains(&s.base));
            match state.sealed.iter_mut().find(|s| s.base == old.base) {
                Some(place) => *place = new,
                // Retention was faster.
                None => return Ok(0),
            }
            state.hints.clear();
        }
        for segment in empty {
            delete_segment(&*self.store, &self.dir, segment.base)?;
        }
        Ok(size)
    }
}

impl Compacted {
    fn count(&mut self, bytes: u64) {
        self.segments_after += 1;
        self.bytes_after += bytes;
    }
}
