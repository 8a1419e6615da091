//! Reading: which bytes answer a fetch, and the special batches among them.
//!
//! A read gives one run of whole batches of one segment, as a range of its file, so that it can be
//! sent without being touched. What must be left out of it (markers, hidden lane records) is listed
//! beside it; `lanes` and the fetch handler cut it.

use std::sync::Arc;

use broker_store::{Reader, StoreError};
use bytes::Bytes;
use kafka::{Batch, BatchError, Offset};

use super::{Condition, Partition, Position, Queued, State, Watermarks};
use crate::log::scan::ScanError;
use crate::log::segment::{seek_boundary, seek_offset};
use crate::log::{BatchEntry, SealedSegment};

/// Up to where a reader may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadUpTo {
    HighWatermark,
    /// Confirmed by the store, whatever the durability setting: what may leave for another region.
    Synced,
}

/// A range of whole batches in one segment file.
#[derive(Clone)]
pub struct Slice {
    pub reader: Arc<dyn Reader>,
    pub position: u64,
    pub len: usize,
}

/// What a read found.
#[derive(Clone)]
pub struct ReadOutcome {
    /// Empty when there is nothing at the offset yet.
    pub slice: Option<Slice>,
    /// The offset after the slice; the asked one if it is empty.
    pub next: Offset,
    /// Special batches that touch the slice, with positions in the segment file.
    pub entries: Vec<BatchEntry>,
    pub watermarks: Watermarks,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("offset is outside of {log_start} to {high_watermark}")]
    OutOfRange { log_start: Offset, high_watermark: Offset },
    #[error("the partition was closed")]
    Closed,
    #[error("the partition is faulted: {0}")]
    Faulted(String),
    #[error("the store failed: {0}")]
    Store(#[from] StoreError),
    #[error("damaged data at position {position}: {error}")]
    Damaged { position: u64, error: BatchError },
}

/// Batches that were produced in this region, for the mirror.
#[derive(Clone, Debug)]
pub struct OriginRead {
    /// Own batches in order; anything between them is markers or other regions' records.
    pub batches: Vec<Batch>,
    /// Everything below is covered by this read.
    pub next: Offset,
    /// The end of what may leave now.
    pub end: Offset,
    pub log_start: Offset,
}

/// Recently read ends: a consumer goes on where its last fetch stopped.
#[derive(Default)]
pub(super) struct Hints {
    ring: [Option<Hint>; 8],
    turn: usize,
}

#[derive(Clone, Copy)]
struct Hint {
    offset: Offset,
    segment: Offset,
    position: u64,
}

impl Hints {
    fn position(&self, offset: Offset, segment: Offset) -> Option<u64> {
        let hit = self.ring.iter().flatten().find(|h| h.offset == offset && h.segment == segment);
        hit.map(|h| h.position)
    }

    fn note(&mut self, hint: Hint) {
        self.ring[self.turn] = Some(hint);
        self.turn = (self.turn + 1) % self.ring.len();
    }

    pub(super) fn clear(&mut self) {
        *self = Hints::default();
    }
}

/// Where a read goes on outside of the lock.
struct Plan {
    base: Offset,
    sealed: Option<Arc<SealedSegment>>,
    reader: Option<Arc<dyn Reader>>,
    /// A batch start at or before the one that is asked for, and whether it is that one.
    start: Option<(u64, bool)>,
    /// The last indexed batch start before the byte limit (active segment only).
    near_limit: u64,
    /// The readable part of the segment ends here.
    end: u64,
    end_offset: Offset,
    watermarks: Watermarks,
}

impl Partition {
    /// Whole batches from the one that holds `from`, up to `max_bytes`; at least one if
    /// `at_least_one`, however large it is. An offset between the high watermark and the log end
    /// reads as empty.
    pub fn read(
        &self,
        from: Offset,
        max_bytes: usize,
        at_least_one: bool,
        upto: ReadUpTo,
    ) -> Result<ReadOutcome, ReadError> {
        let mut at = from;
        loop {
            let outcome = self.read_segment(at, max_bytes, at_least_one, upto)?;
            // Compaction may leave nothing at the end of a segment: the data goes on in the next.
            if outcome.slice.is_some() || outcome.next <= at {
                return Ok(outcome);
            }
            at = outcome.next;
        }
    }

    fn read_segment(
        &self,
        from: Offset,
        max_bytes: usize,
        at_least_one: bool,
        upto: ReadUpTo,
    ) -> Result<ReadOutcome, ReadError> {
        let plan = match self.plan(from, max_bytes, upto)? {
            Ok(plan) => plan,
            Err(watermarks) => {
                return Ok(ReadOutcome { slice: None, next: from, entries: Vec::new(), watermarks });
            }
        };
        let store = &*self.store;
        let reader = match (&plan.reader, &plan.sealed) {
            (Some(reader), _) => reader.clone(),
            (None, Some(sealed)) => sealed.reader(store)?,
            (None, None) => unreachable!("a plan has a reader or a sealed segment"),
        };
        let start = match (plan.start, &plan.sealed) {
            (Some((position, true)), _) => position,
            (Some((position, false)), _) => seek_offset(&*reader, position, plan.end, from)?,
            (None, Some(sealed)) => sealed.position_of(store, from)?.min(plan.end),
            (None, None) => seek_offset(&*reader, 0, plan.end, from)?,
        };
        let limit = start.saturating_add(max_bytes as u64);
        let near = match &plan.sealed {
            Some(sealed) if limit < plan.end => sealed.floor_position(store, limit)?,
            _ => plan.near_limit,
        };
        let stop = seek_boundary(&*reader, (start, near), plan.end, limit, at_least_one)?;
        let next = stop.offset.unwrap_or(plan.end_offset);
        if stop.position == start {
            let (slice, entries) = (None, Vec::new());
            let next = if start == plan.end { next.max(from) } else { from };
            return Ok(ReadOutcome { slice, next, entries, watermarks: plan.watermarks });
        }
        let entries = self.finish_read(&plan, from, next, stop.position)?;
        self.used(stop.position - start);
        let slice = Slice { reader, position: start, len: (stop.position - start) as usize };
        Ok(ReadOutcome { slice: Some(slice), next, entries, watermarks: plan.watermarks })
    }

    /// The plan, or the watermarks if there is nothing to read yet.
    fn plan(
        &self,
        from: Offset,
        max_bytes: usize,
        upto: ReadUpTo,
    ) -> Result<Result<Plan, Watermarks>, ReadError> {
        let mut state = self.state.lock();
        match &state.condition {
            Condition::Serving => {}
            Condition::Faulted(reason) => return Err(ReadError::Faulted(reason.clone())),
            Condition::Closed => return Err(ReadError::Closed),
        }
        let watermarks = Watermarks {
            log_start: state.fold.log_start,
            high_watermark: state.visible.offset,
            log_end: state.fold.end,
        };
        if from < watermarks.log_start || from > watermarks.log_end {
            let Watermarks { log_start, high_watermark, .. } = watermarks;
            return Err(ReadError::OutOfRange { log_start, high_watermark });
        }
        let behind = state.synced.offset < state.visible.offset;
        if upto == ReadUpTo::Synced && behind && state.queued == Queued::No {
            // Under `Durability::Os` nobody else asks for a sync.
            state.queued = Queued::Lazy;
            self.flusher.queue_lazily(self);
        }
        let readable = match upto {
            ReadUpTo::Synced if behind => state.synced,
            ReadUpTo::HighWatermark | ReadUpTo::Synced => state.visible,
        };
        if from >= readable.offset {
            return Ok(Err(watermarks));
        }
        Ok(Ok(state.plan(from, max_bytes, readable, watermarks)))
    }

    /// Remembers where the read ended and collects the special batches of its range.
    fn finish_read(
        &self,
        plan: &Plan,
        from: Offset,
        next: Offset,
        position: u64,
    ) -> Result<Vec<BatchEntry>, ReadError> {
        {
            let mut state = self.state.lock();
            state.hints.note(Hint { offset: next, segment: plan.base, position });
            if state.active.base == plan.base {
                return Ok(state.active.content.batches.touching(from, next).to_vec());
            }
        }
        let sealed = match &plan.sealed {
            Some(sealed) => sealed.clone(),
            // The active segment of the plan was sealed meanwhile.
            None => {
                let state = self.state.lock();
                let found = state.sealed.iter().find(|s| s.base == plan.base).cloned();
                found.ok_or(ReadError::Closed)?
            }
        };
        Ok(sealed.batches(&*self.store)?.touching(from, next).to_vec())
    }

    /// Batches that were produced here, from `from` on: what a peer region lacks. Reads until about
    /// `max_bytes` of own batches are found or the synced end is reached; `max_scan` bounds the bytes
    /// looked at.
    pub fn origin_read(
        &self,
        from: Offset,
        max_bytes: usize,
        max_scan: usize,
    ) -> Result<OriginRead, ReadError> {
        let mut read =
            OriginRead { batches: Vec::new(), next: from, end: from, log_start: self.watermarks().log_start };
        let (mut bytes, mut scanned) = (0, 0);
        loop {
            let outcome = self.read(read.next, max_bytes, true, ReadUpTo::Synced)?;
            let synced = self.progress.borrow().synced;
            read.end = outcome.watermarks.high_watermark.min(synced);
            let Some(slice) = &outcome.slice else {
                read.next = outcome.next;
                return Ok(read);
            };
            scanned += slice.len;
            let batches = Batch::split_all(slice.bytes()?, false)
                .map_err(|error| ReadError::Damaged { position: slice.position, error })?;
            for batch in batches {
                let base = batch.header.base_offset;
                let foreign = |e: &BatchEntry| e.is_marker() && e.base <= base && base < e.unit_next();
                let own = !batch.header.is_control() && !outcome.entries.iter().any(foreign);
                if own && base.max(batch.header.last_offset()) >= from {
                    if bytes > 0 && bytes + batch.bytes.len() > max_bytes {
                        read.next = base;
                        return Ok(read);
                    }
                    bytes += batch.bytes.len();
                    read.next = batch.header.next_offset();
                    read.batches.push(batch);
                }
            }
            read.next = outcome.next;
            if bytes >= max_bytes || scanned >= max_scan || read.next >= read.end {
                return Ok(read);
            }
        }
    }
}

impl State {
    fn plan(&self, from: Offset, max_bytes: usize, readable: Position, watermarks: Watermarks) -> Plan {
        let hint = |segment| self.hints.position(from, segment).map(|position| (position, true));
        if from >= self.active.base {
            let size = self.active.content.size;
            let (end, end_offset) = Self::end_in(self.active.base, size, self.fold.end, readable);
            let relative = crate::log::index::relative(self.active.base, from);
            let floor = u64::from(self.active.content.index.floor(relative));
            let start = hint(self.active.base).unwrap_or((floor.min(end), false));
            let limit = start.0.saturating_add(max_bytes as u64).min(u64::from(u32::MAX)) as u32;
            return Plan {
                base: self.active.base,
                sealed: None,
                reader: Some(self.active.reader.clone()),
                start: Some(start),
                near_limit: u64::from(self.active.content.index.floor_position(limit)),
                end,
                end_offset,
                watermarks,
            };
        }
        let after = self.sealed.partition_point(|s| s.base <= from);
        let sealed = self.sealed[after.saturating_sub(1)].clone();
        let (end, end_offset) = Self::end_in(sealed.base, sealed.size, sealed.next, readable);
        Plan {
            base: sealed.base,
            start: hint(sealed.base),
            end,
            end_offset,
            sealed: Some(sealed),
            reader: None,
            near_limit: 0,
            watermarks,
        }
    }

    /// The readable end of a segment: all of it, unless `readable` lies in it.
    fn end_in(base: Offset, size: u64, next: Offset, readable: Position) -> (u64, Offset) {
        match readable.segment == base {
            true => (readable.bytes.min(size), readable.offset),
            false => (size, next),
        }
    }
}

impl Slice {
    pub fn bytes(&self) -> Result<Bytes, StoreError> {
        self.reader.read_at(self.position, self.len)
    }

    /// A part of this slice by positions in the file.
    pub fn part(&self, from: u64, to: u64) -> Slice {
        debug_assert!(self.position <= from && from <= to && to <= self.position + self.len as u64);
        Slice { reader: self.reader.clone(), position: from, len: (to - from) as usize }
    }
}

impl std::fmt::Debug for Slice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slice({}+{})", self.position, self.len)
    }
}

impl From<ScanError> for ReadError {
    fn from(error: ScanError) -> ReadError {
        match error {
            ScanError::Store(error) => ReadError::Store(error),
            ScanError::Batch { position, error } => ReadError::Damaged { position, error },
        }
    }
}
