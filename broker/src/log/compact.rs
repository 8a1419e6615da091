//! Rewriting sealed segments so that each key keeps its last record.
//!
//! For topics without markers and lanes: `__consumer_offsets`. Offsets never change; what is dropped
//! leaves gaps. A rewrite is a new generation of the segment's files, put whole and durable before it
//! counts; older generations are garbage. Owns the bytes; `partition` swaps the segments.

use std::collections::HashMap;
use std::sync::Arc;

use broker_store::{SegmentStore, StoreError, StorePath};
use bytes::{Bytes, BytesMut};
use kafka::{Batch, BatchBuilder, BatchError, Offset, Records, TimestampMs, record};

use super::recovery::{parse_name, write_indexes};
use super::scan::{Cursor, ScanError};
use super::segment::{SealedFacts, SealedSegment, SegmentContent, SegmentFiles};

/// Keys whose last offsets are held in memory at a time; beyond it a pass stops early.
pub const KEYS_MAX: usize = 4_000_000;

#[derive(Debug, thiserror::Error)]
pub enum CompactError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Scan(#[from] ScanError),
    #[error("batch at offset {base}: {error}")]
    Batch { base: Offset, error: BatchError },
}

/// The last offset of every key in a range of segments.
#[derive(Default)]
pub struct LastOffsets {
    last: HashMap<Bytes, Offset>,
}

/// What stays of a segment.
pub struct Remainder {
    pub bytes: Bytes,
    content: SegmentContent,
    pub max_timestamp: TimestampMs,
    /// Whether anything was dropped.
    pub changed: bool,
}

impl LastOffsets {
    /// Takes a segment in. False if it does not fit any more; then nothing of it may be judged.
    pub fn add(&mut self, store: &dyn SegmentStore, segment: &SealedSegment) -> Result<bool, CompactError> {
        let reader = segment.reader(store)?;
        let mut cursor = Cursor::new(&*reader, 0, segment.size);
        while let Some(batch) = cursor.next_batch()? {
            if self.last.len() > KEYS_MAX {
                return Ok(false);
            }
            for_each_record(&batch, |offset, key, _, _| {
                if let Some(key) = key {
                    match self.last.get_mut(key) {
                        Some(last) => *last = offset,
                        None => {
                            self.last.insert(Bytes::copy_from_slice(key), offset);
                        }
                    }
                }
            })?;
        }
        Ok(true)
    }

    /// A record stays unless a later one has its key; a last tombstone stays until `tombstones_before`.
    fn keeps(
        &self,
        offset: Offset,
        key: &[u8],
        is_tombstone: bool,
        at: TimestampMs,
        before: TimestampMs,
    ) -> bool {
        self.last.get(key).is_none_or(|last| *last <= offset) && !(is_tombstone && at < before)
    }

    /// What stays of a segment, in its batches where they lose nothing.
    pub fn remainder(
        &self,
        store: &dyn SegmentStore,
        segment: &SealedSegment,
        tombstones_before: TimestampMs,
        index_interval: u32,
    ) -> Result<Remainder, CompactError> {
        let reader = segment.reader(store)?;
        let mut cursor = Cursor::new(&*reader, 0, segment.size);
        let mut bytes = BytesMut::new();
        let mut content = SegmentContent::default();
        let mut changed = false;
        while let Some(batch) = cursor.next_batch()? {
            let rest = self.rest_of(&batch, tombstones_before)?;
            changed |= rest.as_ref().is_none_or(|rest| rest.header.record_count < batch.header.record_count);
            if let Some(rest) = rest {
                content.note(segment.base, &rest.header, None, index_interval);
                bytes.extend_from_slice(&rest.bytes);
            }
        }
        let max_timestamp = content.index.max_timestamp();
        Ok(Remainder { bytes: bytes.freeze(), content, max_timestamp, changed })
    }

    fn rest_of(&self, batch: &Batch, tombstones_before: TimestampMs) -> Result<Option<Batch>, CompactError> {
        let damaged = |error| CompactError::Batch { base: batch.header.base_offset, error };
        let section = record::unpack(batch).map_err(damaged)?;
        let mut builder = BatchBuilder::like(&batch.header);
        for found in Records::new(&section, batch.header.record_count) {
            let found = found.map_err(damaged)?;
            let offset = batch.header.base_offset.plus(i64::from(found.offset_delta));
            let at = TimestampMs(batch.header.base_timestamp.0.saturating_add(found.timestamp_delta));
            let keeps = |key| self.keeps(offset, key, found.value.is_none(), at, tombstones_before);
            if found.key.is_none_or(keeps) {
                builder.push_raw(&found);
            }
        }
        Ok(match builder.record_count() {
            0 => None,
            all if all == batch.header.record_count => Some(batch.clone()),
            _ => Some(builder.build()),
        })
    }
}

impl Remainder {
    /// Writes the segment's next generation, which reaches up to `next`: over empty segments behind
    /// it, which may be deleted once this returns.
    pub fn write(
        mut self,
        store: &dyn SegmentStore,
        dir: &StorePath,
        old: &SealedSegment,
        next: Offset,
    ) -> Result<Arc<SealedSegment>, StoreError> {
        let generation = old.generation + 1;
        let files = SegmentFiles::new(dir, old.base, generation);
        // The log last: it is what makes the generation count.
        write_indexes(store, &files, &mut self.content, next)?;
        store.put(&files.log(), &self.bytes)?;
        let facts = SealedFacts {
            base: old.base,
            next,
            size: self.bytes.len() as u64,
            generation,
            max_timestamp: self.max_timestamp,
            written: old.written,
        };
        Ok(Arc::new(SealedSegment::new(dir, facts, old.open_files())))
    }
}

/// Removes the files of generations that no longer count. Kept for one pass, because a reader may
/// still be about to open them.
pub fn sweep(
    store: &dyn SegmentStore,
    dir: &StorePath,
    current: &[Arc<SealedSegment>],
) -> Result<(), StoreError> {
    let generations: HashMap<Offset, u32> = current.iter().map(|s| (s.base, s.generation)).collect();
    for entry in store.list(dir)? {
        let Some((base, generation, extension)) = parse_name(&entry.name) else { continue };
        let old = generations.get(&base).is_some_and(|current| generation < *current);
        if old && extension != "state" {
            store.delete(&dir.join(&entry.name).map_err(|e| StoreError::Io(e.to_string()))?)?;
        }
    }
    Ok(())
}

fn for_each_record(
    batch: &Batch,
    mut look: impl FnMut(Offset, Option<&[u8]>, Option<&[u8]>, i64),
) -> Result<(), CompactError> {
    let damaged = |error| CompactError::Batch { base: batch.header.base_offset, error };
    let section = record::unpack(batch).map_err(damaged)?;
    for found in Records::new(&section, batch.header.record_count) {
        let found = found.map_err(damaged)?;
        let offset = batch.header.base_offset.plus(i64::from(found.offset_delta));
        look(offset, found.key, found.value, found.timestamp_delta);
    }
    Ok(())
}
