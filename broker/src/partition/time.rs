//! Looking up offsets by time (ListOffsets): searched inside batches, by record timestamps.
//!
//! Client timestamps need not ascend, so an index entry only says where a search may begin. Markers
//! have no timestamp and are never an answer.

use kafka::record::{self, Records};
use kafka::{Batch, LeaderEpoch, Offset, TimestampMs};

use super::{Partition, ReadError, ReadUpTo};

/// A record found by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    pub offset: Offset,
    pub timestamp: TimestampMs,
    pub epoch: LeaderEpoch,
}

/// Bytes looked at in one step of a search.
const STEP: usize = 1 << 20;

impl Partition {
    /// The earliest record below the high watermark with a timestamp of at least `at`. `visible`
    /// says whether the asking view may see a record of this batch.
    pub fn find_time(
        &self,
        at: TimestampMs,
        mut visible: impl FnMut(&Batch, Offset) -> bool,
    ) -> Result<Option<Found>, ReadError> {
        let start = self.search_start(at)?;
        self.search(start, |batch| {
            if batch.header.max_timestamp < at {
                return Ok(None);
            }
            first_record(batch, |offset, stamp| stamp >= at && visible(batch, offset))
        })
    }

    /// The record with the largest timestamp (the earliest of equals).
    pub fn find_max_time(
        &self,
        mut visible: impl FnMut(&Batch, Offset) -> bool,
    ) -> Result<Option<Found>, ReadError> {
        let largest = {
            let state = self.state.lock();
            let sealed = state.sealed.iter().map(|s| s.max_timestamp);
            sealed.chain([state.active.content.index.max_timestamp()]).max()
        };
        let Some(largest) = largest.filter(|t| t.0 >= 0) else { return Ok(None) };
        let exact = self.find_time(largest, &mut visible)?;
        if exact.is_some() {
            return Ok(exact);
        }
        // The largest one is hidden or not durable yet: look at everything.
        let mut best: Option<Found> = None;
        self.search(self.watermarks().log_start, |batch| {
            if best.is_none_or(|b| batch.header.max_timestamp > b.timestamp) {
                let better = |stamp: TimestampMs| best.is_none_or(|b| stamp > b.timestamp);
                if let Some(found) =
                    max_record(batch, |offset, stamp| better(stamp) && visible(batch, offset))?
                {
                    best = Some(found);
                }
            }
            Ok(None)
        })?;
        Ok(best)
    }

    fn search_start(&self, at: TimestampMs) -> Result<Offset, ReadError> {
        let (segment, log_start) = {
            let state = self.state.lock();
            let found = state.sealed.iter().find(|s| s.max_timestamp >= at).cloned();
            let log_start = state.fold.log_start;
            if found.is_none() {
                let active = &state.active;
                let relative = active.content.index.floor_time(at.0);
                return Ok(active.base.plus(i64::from(relative)).max(log_start));
            }
            (found, log_start)
        };
        let Some(segment) = segment else { return Ok(log_start) };
        Ok(segment.offset_before_time(&*self.store, at)?.max(log_start))
    }

    fn search(
        &self,
        from: Offset,
        mut look: impl FnMut(&Batch) -> Result<Option<Found>, ReadError>,
    ) -> Result<Option<Found>, ReadError> {
        let mut next = from;
        loop {
            let outcome = self.read(next, STEP, true, ReadUpTo::HighWatermark)?;
            let Some(slice) = outcome.slice else { return Ok(None) };
            let damaged = |error| ReadError::Damaged { position: slice.position, error };
            for batch in Batch::split_all(slice.bytes()?, false).map_err(damaged)? {
                if batch.header.is_control() || batch.header.last_offset() < from {
                    continue;
                }
                if let Some(found) = look(&batch)? {
                    return Ok(Some(found));
                }
            }
            next = outcome.next;
        }
    }
}

fn first_record(
    batch: &Batch,
    mut wanted: impl FnMut(Offset, TimestampMs) -> bool,
) -> Result<Option<Found>, ReadError> {
    let mut found = None;
    each_record(batch, |offset, timestamp| {
        let hit = wanted(offset, timestamp);
        if hit {
            found = Some(Found { offset, timestamp, epoch: batch.header.leader_epoch });
        }
        !hit
    })?;
    Ok(found)
}

fn max_record(
    batch: &Batch,
    mut wanted: impl FnMut(Offset, TimestampMs) -> bool,
) -> Result<Option<Found>, ReadError> {
    let mut best: Option<Found> = None;
    each_record(batch, |offset, timestamp| {
        if best.is_none_or(|b| timestamp > b.timestamp) && wanted(offset, timestamp) {
            best = Some(Found { offset, timestamp, epoch: batch.header.leader_epoch });
        }
        true
    })?;
    Ok(best)
}

/// Calls `look` with each record's offset and timestamp until it says stop.
fn each_record(batch: &Batch, mut look: impl FnMut(Offset, TimestampMs) -> bool) -> Result<(), ReadError> {
    let header = &batch.header;
    let damaged = |error| ReadError::Damaged { position: 0, error };
    let section = record::unpack(batch).map_err(damaged)?;
    for record in Records::new(&section, header.record_count) {
        let record = record.map_err(damaged)?;
        let stamp = match header.attributes.is_log_append_time() {
            true => header.max_timestamp,
            false => TimestampMs(header.base_timestamp.0.saturating_add(record.timestamp_delta)),
        };
        if !look(header.base_offset.plus(i64::from(record.offset_delta)), stamp) {
            break;
        }
    }
    Ok(())
}
