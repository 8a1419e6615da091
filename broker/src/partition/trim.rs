//! Moving the log start: retention, DeleteRecords; and letting go at shutdown.
//!
//! A segment goes only when the snapshot that makes it unnecessary is durable, that is when its roll
//! is finished. The new log start is durable before its move is answered.

use broker_core::Fold;
use broker_core::retention::{RetentionPolicy, SealedSegment as Judged, log_start_after_retention};
use broker_store::StoreError;
use kafka::{Offset, TimestampMs};

use super::{Condition, Partition, ReadError};
use crate::log::recovery::delete_segment;
use crate::log::{SegmentFiles, mark};

impl Partition {
    /// Applies the topic's retention; returns how many bytes went.
    pub fn enforce_retention(&self, now: TimestampMs) -> Result<u64, StoreError> {
        let settings = self.settings();
        let policy = RetentionPolicy { bytes: settings.retention_bytes, ms: settings.retention_ms };
        self.roll_when_expired(policy, now)?;
        let new_start = {
            let state = self.state.lock();
            let finished = state.finished().len();
            let judged: Vec<Judged> = state.sealed[..finished]
                .iter()
                .map(|s| Judged {
                    next: s.next,
                    bytes: s.size,
                    max_timestamp: s.max_timestamp,
                    written: s.written,
                })
                .collect();
            let rest: u64 = state.sealed[finished..].iter().map(|s| s.size).sum();
            log_start_after_retention(policy, &judged, rest + state.active.content.size, now)
        };
        match new_start {
            Some(start) => self.drop_below(start),
            None => Ok(0),
        }
    }

    /// An active segment whose every record has expired is sealed, as in Kafka, so that it can go.
    fn roll_when_expired(&self, policy: RetentionPolicy, now: TimestampMs) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let active = &state.active;
        let stamp = match active.content.index.max_timestamp() {
            TimestampMs::NONE => active.first_append,
            stamp => stamp,
        };
        let expired = policy.ms.is_some_and(|ms| now.0.saturating_sub(stamp.0) > ms);
        if state.condition == Condition::Serving && active.content.size > 0 && expired {
            self.roll(&mut state, now).map_err(|e| StoreError::Io(e.to_string()))?;
            drop(state);
            self.flush();
        }
        Ok(())
    }

    /// DeleteRecords: records below `to` are gone when this returns. `to` may not be above the high
    /// watermark. Returns the new log start.
    pub fn delete_records(&self, to: Offset) -> Result<Offset, ReadError> {
        let to = {
            let mut state = self.state.lock();
            let (log_start, high_watermark) = (state.fold.log_start, state.visible.offset);
            if to.0 < 0 || to > high_watermark {
                return Err(ReadError::OutOfRange { log_start, high_watermark });
            }
            // Written also when the log begins there already: an earlier call may have failed to.
            let to = to.max(log_start);
            state.fold.trim(to);
            to
        };
        self.flush();
        self.write_log_start(to)?;
        self.drop_below(to)?;
        Ok(to)
    }

    fn write_log_start(&self, log_start: Offset) -> Result<(), ReadError> {
        // One at a time with the flusher, which makes newer snapshots.
        let _one_at_a_time = self.flushing.lock();
        let base = {
            let state = self.state.lock();
            if !state.rolls.is_empty() {
                // Their snapshots are of before and would bring the old log start back.
                return Err(StoreError::Io("segments still wait for the disk".into()).into());
            }
            state.snapshot
        };
        let path = SegmentFiles::new(&self.dir, base, 0).state();
        let mut fold = match self.store.open(&path) {
            Ok(reader) => Fold::decode(&reader.read_at(0, reader.len() as usize)?)
                .map_err(|e| StoreError::Corrupt(format!("{path}: {e}")))?,
            Err(error) => return Err(error.into()),
        };
        // Not `trim`: the fold is of `base`, which may lie below the new start.
        fold.log_start = fold.log_start.max(log_start);
        Ok(self.store.put(&path, &fold.encode(TimestampMs(i64::MIN)))?)
    }

    /// Deletes finished segments that end at or below `start`.
    fn drop_below(&self, start: Offset) -> Result<u64, StoreError> {
        let gone = {
            let mut state = self.state.lock();
            let count = state.finished().iter().take_while(|s| s.next <= start).count();
            state.fold.trim(start);
            state.hints.clear();
            state.sealed.drain(..count).collect::<Vec<_>>()
        };
        for segment in &gone {
            delete_segment(&*self.store, &self.dir, segment.base)?;
        }
        Ok(gone.iter().map(|s| s.size).sum())
    }

    /// Flushes, writes down what the next opening need not read, and ends the partition.
    pub fn release(&self) {
        self.flush();
        self.checkpoint_at_close();
        if let Err(error) = self.mark_durable() {
            tracing::warn!(partition = %self, %error, "the durable mark stays where it was");
        }
        self.close();
    }

    /// Writes down how far the store has confirmed, if that has moved: what a start must find again.
    pub fn mark_durable(&self) -> Result<(), StoreError> {
        let _one_at_a_time = self.flushing.lock();
        let synced = {
            let state = self.state.lock();
            if state.condition != Condition::Serving || state.marked >= state.synced.offset {
                return Ok(());
            }
            state.synced.offset
        };
        mark::write(&*self.store, &self.dir, synced)?;
        self.state.lock().marked = synced;
        Ok(())
    }
}
