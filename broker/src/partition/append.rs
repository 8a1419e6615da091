//! Appending: batches of clients, markers of ours, units of a mirror.
//!
//! Each is one decision and one write under the lock, so that what is compared is what is appended
//! to. Bytes are written as received, but for base offset and leader epoch.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

use broker_core::Fold;
use broker_core::fold::{Content, Origin};
use broker_core::producer::Sequence;
use broker_store::StoreError;
use bytes::{Bytes, BytesMut};
use kafka::batch::{Attributes, HEADER_LEN};
use kafka::control::{Marker, MirrorMarker, marker_batch};
use kafka::{
    Batch, BatchHeader, ErrorCode, LeaderEpoch, Offset, ProducerEpoch, ProducerId, RegionId, TimestampMs,
    TopicId,
};
use lane_core::{Extractors, LaneSummary};

use super::{Condition, Durability, Partition, Position, Queued, Settings, State, Unsynced};
use crate::lanes::classify;
use crate::log::BatchKind;
use crate::log::recovery::{apply_marker, judge_of_unit, marker_kind};
use crate::waiting::may_wait;

/// A batch of a client, its CRC and records checked.
pub struct Append<'a> {
    pub batch: &'a Batch,
    /// What its lane headers say (see `lanes::classify`), and the extractors that judged them.
    pub lanes: Option<LaneSummary>,
    pub judged_by: Arc<Extractors>,
    pub now: TimestampMs,
    /// Somebody waits for durability: flush at once, not at the next interval.
    pub urgent: bool,
}

/// Where a batch went, or where its original is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    pub base_offset: Offset,
    pub last_offset: Offset,
    /// The append time on topics with LogAppendTime, else `NONE`.
    pub log_append_time: TimestampMs,
    pub log_start: Offset,
    pub duplicate: bool,
}

/// Why nothing was appended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    #[error("refused: {0:?}")]
    Refused(ErrorCode),
    /// The extractor list changed after the batch was judged: judge it again.
    #[error("the lanes of the batch were judged by another list of extractors")]
    JudgedByOthers,
    /// Retry later: space may come back.
    #[error("the disk is full")]
    Full,
    #[error("the partition is faulted: {0}")]
    Faulted(String),
    #[error("the partition was closed")]
    Closed,
    #[error("the store failed: {0}")]
    Store(StoreError),
}

impl AppendError {
    pub fn code(&self) -> ErrorCode {
        match self {
            AppendError::Refused(code) => *code,
            // Deleted or handed over: the client looks again, and then hears which.
            AppendError::Closed => ErrorCode::NotLeaderOrFollower,
            AppendError::JudgedByOthers => ErrorCode::UnknownServerError,
            AppendError::Full | AppendError::Faulted(_) | AppendError::Store(_) => {
                ErrorCode::KafkaStorageError
            }
        }
    }
}

/// Batches of one origin that go in together, with what the sender assumes.
pub struct MirrorUnit {
    pub origin: RegionId,
    pub incarnation: TopicId,
    /// The unit covers the origin's offsets from `first` on.
    pub first: Offset,
    /// In the origin's order, with the origin's offsets, epochs and CRCs.
    pub batches: Vec<Batch>,
    pub extractors: Option<Vec<String>>,
    /// The last batch lost records on its way, so its CRC says nothing about the origin's log.
    pub last_rewritten: bool,
}

/// What became of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitOutcome {
    /// Appended; durable when the high watermark reaches `local_next`.
    Applied {
        next: Offset,
        local_next: Offset,
    },
    Duplicate {
        next: Offset,
    },
    Gap {
        next: Offset,
    },
    /// Neither wholly known nor the next: histories differ.
    Overlap {
        next: Offset,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("a unit without a batch is not appended")]
    Empty,
    #[error("the unit's batches are not in order")]
    Disorder,
    #[error(transparent)]
    Append(#[from] AppendError),
}

/// Bytes that go into the log in one write, already at their final offsets.
struct Write<'a> {
    parts: &'a [IoSlice<'a>],
    len: u64,
    /// What a failed sync needs to write it again; shares the bytes, copies a header at most.
    keep: &'a dyn Fn() -> [Bytes; 2],
}

/// How long after a take-over a client may still be sending again what it had under way.
const REORDERED_WITHIN: Duration = Duration::from_secs(120);

impl Partition {
    /// Appends a client's batch, or finds that it is there already.
    pub fn append(&self, request: Append<'_>) -> Result<Appended, AppendError> {
        self.may_wait(|| self.append_batch(request))
    }

    /// Does what may wait for room in a remote store; what is local never waits for long.
    fn may_wait<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.store.is_remote() { may_wait(work) } else { work() }
    }

    /// Batches that follow each other may meet a broker that is not the owner yet and the same broker as the
    /// owner. The later one must not be taken before the earlier one, also where the former owner lost all that
    /// the producer had written here: its client would believe that the earlier one is stored, too.
    fn lately_taken_over(&self) -> bool {
        self.store.is_remote() && self.epoch.0 > 0 && self.opened.elapsed() < REORDERED_WITHIN
    }

    fn append_batch(&self, request: Append<'_>) -> Result<Appended, AppendError> {
        let settings = self.settings();
        let mut state = self.state.lock();
        state.check_serving()?;
        if *state.fold.lanes.extractors() != *request.judged_by {
            return Err(AppendError::JudgedByOthers);
        }
        let header = &request.batch.header;
        match state.fold.producers.check(header) {
            Sequence::Append if self.lately_taken_over() && state.fold.producers.is_of_a_stranger(header) => {
                return Err(AppendError::Refused(ErrorCode::OutOfOrderSequenceNumber));
            }
            Sequence::Append => {}
            Sequence::Refuse(code) => return Err(AppendError::Refused(code)),
            Sequence::Duplicate { base_offset, last_offset, timestamp } => {
                let log_append_time = if settings.log_append_time { timestamp } else { TimestampMs::NONE };
                return Ok(Appended {
                    base_offset,
                    last_offset,
                    log_append_time,
                    log_start: state.fold.log_start,
                    duplicate: true,
                });
            }
        }
        let records = &request.batch.bytes[HEADER_LEN..];
        self.make_room(
            &mut state,
            &settings,
            header.total_len() as u64,
            header.last_offset_delta,
            request.now,
        )?;
        let stamped = self.stamp(&state, header, records, &settings, request.now);
        let head = stamped.encode();
        let write = Write {
            parts: &[IoSlice::new(&head), IoSlice::new(records)],
            len: stamped.total_len() as u64,
            keep: &|| [Bytes::copy_from_slice(&head), request.batch.bytes.slice(HEADER_LEN..)],
        };
        self.write(&mut state, &write, stamped.base_offset, stamped.next_offset())?;
        let state = &mut *state;
        let special = match request.lanes {
            Some(summary) => {
                state.fold.apply(&stamped, Content::Lanes(&summary));
                Some(BatchKind::Lanes(summary))
            }
            None => {
                state.fold.apply(&stamped, Content::Records);
                None
            }
        };
        let base = state.active.base;
        state.active.content.note(base, &stamped, special, settings.index_interval_bytes);
        self.appended(state, request.now, request.urgent);
        Ok(Appended {
            base_offset: stamped.base_offset,
            last_offset: stamped.last_offset(),
            log_append_time: if settings.log_append_time { request.now } else { TimestampMs::NONE },
            log_start: state.fold.log_start,
            duplicate: false,
        })
    }

    /// Appends a marker if `check` agrees with the fold at that moment: compare-and-append. Returns
    /// the marker's offset; it is durable when the high watermark has passed it.
    pub fn append_marker<E>(
        &self,
        marker: &Marker,
        now: TimestampMs,
        check: impl FnOnce(&Fold) -> Result<(), E>,
    ) -> Result<Result<Offset, E>, AppendError> {
        self.may_wait(|| self.append_checked(marker, now, check))
    }

    fn append_checked<E>(
        &self,
        marker: &Marker,
        now: TimestampMs,
        check: impl FnOnce(&Fold) -> Result<(), E>,
    ) -> Result<Result<Offset, E>, AppendError> {
        let settings = self.settings();
        let mut state = self.state.lock();
        state.check_serving()?;
        if let Err(refused) = check(&state.fold) {
            return Ok(Err(refused));
        }
        let len = marker_batch(marker, Offset::ZERO, self.epoch).bytes.len() as u64;
        self.make_room(&mut state, &settings, len, 0, now)?;
        let batch = marker_batch(marker, state.fold.end, self.epoch);
        let keep = || [batch.bytes.clone(), Bytes::new()];
        let write = Write { parts: &[IoSlice::new(&batch.bytes)], len, keep: &keep };
        self.write(&mut state, &write, batch.header.base_offset, batch.header.next_offset())?;
        let state = &mut *state;
        apply_marker(&mut state.fold, &batch.header, marker);
        let base = state.active.base;
        let kind = Some(marker_kind(marker, 0));
        state.active.content.note(base, &batch.header, kind, settings.index_interval_bytes);
        self.appended(state, now, true);
        Ok(Ok(batch.header.base_offset))
    }

    /// Appends a mirror's unit, marker and batches in one write, if the vector still is what the
    /// sender assumed. A unit never crosses a segment, and readers see it as a whole.
    pub fn append_unit(&self, unit: &MirrorUnit, now: TimestampMs) -> Result<UnitOutcome, UnitError> {
        let Some(last) = unit.batches.last() else { return Err(UnitError::Empty) };
        let next = last.header.next_offset();
        let in_order = unit.batches.windows(2).all(|w| w[0].header.next_offset() <= w[1].header.base_offset);
        if !in_order || unit.batches[0].header.base_offset < unit.first {
            return Err(UnitError::Disorder);
        }
        self.may_wait(|| self.append_unit_from(unit, next, now))
    }

    fn append_unit_from(
        &self,
        unit: &MirrorUnit,
        next: Offset,
        now: TimestampMs,
    ) -> Result<UnitOutcome, UnitError> {
        let settings = self.settings();
        let mut state = self.state.lock();
        state.check_serving()?;
        let origin = Origin { region: unit.origin, incarnation: unit.incarnation };
        let held = state.fold.vector.get(&origin).map_or(Offset::ZERO, |p| p.next);
        if !crate::switches::apply_rule_off() {
            if next <= held {
                return Ok(UnitOutcome::Duplicate { next: held });
            }
            if unit.first > held {
                return Ok(UnitOutcome::Gap { next: held });
            }
            if unit.first != held {
                return Ok(UnitOutcome::Overlap { next: held });
            }
        }
        let prepared = Prepared::new(unit, next);
        self.make_room(&mut state, &settings, prepared.len_max, prepared.offsets_max, now)?;
        let written = prepared.place(state.fold.end, self.epoch);
        let len = written.bytes.len() as u64;
        let keep = || [written.bytes.clone(), Bytes::new()];
        let write = Write { parts: &[IoSlice::new(&written.bytes)], len, keep: &keep };
        self.write(&mut state, &write, written.marker.header.base_offset, written.next)?;
        let state = &mut *state;
        self.take_in_unit(state, &written, &settings);
        self.appended(state, now, true);
        Ok(UnitOutcome::Applied { next, local_next: written.next })
    }

    fn take_in_unit(&self, state: &mut State, written: &PlacedUnit, settings: &Settings) {
        let base = state.active.base;
        let interval = settings.index_interval_bytes;
        let marker = Marker::Mirror(written.content.clone());
        apply_marker(&mut state.fold, &written.marker.header, &marker);
        let covered = (written.next.0 - written.marker.header.next_offset().0) as u32;
        let kind = Some(marker_kind(&marker, covered));
        state.active.content.note(base, &written.marker.header, kind, interval);
        let judge = judge_of_unit(&written.content);
        for batch in &written.batches {
            let local = state.fold.lanes.extractors();
            let special = match classify::summarize_as(batch, &judge, &local) {
                Some(summary) => {
                    state.fold.apply(&batch.header, Content::Lanes(&summary));
                    Some(BatchKind::Lanes(summary))
                }
                None => {
                    state.fold.apply(&batch.header, Content::Records);
                    None
                }
            };
            state.active.content.note(base, &batch.header, special, interval);
        }
    }

    /// The header as it goes to disk.
    fn stamp(
        &self,
        state: &State,
        header: &BatchHeader,
        records: &[u8],
        settings: &Settings,
        now: TimestampMs,
    ) -> BatchHeader {
        let mut stamped = BatchHeader { base_offset: state.fold.end, leader_epoch: self.epoch, ..*header };
        if settings.log_append_time {
            stamped.attributes = Attributes(stamped.attributes.0 | Attributes::LOG_APPEND_TIME);
            stamped.max_timestamp = now;
            stamped.crc = stamped.compute_crc(records);
        }
        stamped
    }

    /// Rolls to a new segment if `bytes` more, or their offsets, do not fit the active one.
    fn make_room(
        &self,
        state: &mut State,
        settings: &Settings,
        bytes: u64,
        offsets: i32,
        now: TimestampMs,
    ) -> Result<(), AppendError> {
        let active = &state.active;
        let full = active.content.size + bytes > u64::from(settings.segment_bytes);
        let span = state.fold.end.0 - active.base.0 + i64::from(offsets);
        let old = now.0.saturating_sub(active.first_append.0) > settings.segment_ms;
        if active.content.size > 0 && (full || old || span >= i64::from(i32::MAX)) {
            self.roll(state, now)?;
        }
        Ok(())
    }

    fn write(
        &self,
        state: &mut State,
        write: &Write<'_>,
        base: Offset,
        next: Offset,
    ) -> Result<(), AppendError> {
        debug_assert_eq!(base, state.fold.end, "appends are dense");
        self.used(write.len);
        match state.active.writer.append(write.parts) {
            Ok(end) => debug_assert_eq!(end, state.active.content.size + write.len),
            Err(StoreError::Full) => {
                self.flusher.disk().note();
                return Err(AppendError::Full);
            }
            Err(error) if error.ends_writer() && state.condition == Condition::Serving => {
                // The flusher meets the same error and mends or faults the partition.
                self.flusher.queue_now(self);
                return Err(AppendError::Store(error));
            }
            Err(error) => return Err(AppendError::Store(error)),
        }
        if self.durability == Durability::Sync {
            state.unsynced.push_back(Unsynced { base, next, parts: (write.keep)() });
            self.flusher.unsynced_grew(write.len);
        }
        Ok(())
    }

    /// After an append: readers see it if that needs no sync, else the flusher is told.
    fn appended(&self, state: &mut State, now: TimestampMs, urgent: bool) {
        if state.active.first_append == TimestampMs::NONE {
            state.active.first_append = now;
        }
        match self.durability {
            Durability::Os => {
                state.visible = state.end_position();
                self.publish(state);
            }
            Durability::Sync if urgent && state.queued != Queued::Now => {
                state.queued = Queued::Now;
                self.flusher.queue_now(self);
            }
            Durability::Sync if state.queued == Queued::No => {
                state.queued = Queued::Lazy;
                self.flusher.queue_lazily(self);
            }
            Durability::Sync => {}
        }
    }
}

impl State {
    pub(super) fn check_serving(&self) -> Result<(), AppendError> {
        match &self.condition {
            Condition::Serving => Ok(()),
            Condition::Faulted(reason) => Err(AppendError::Faulted(reason.clone())),
            Condition::Closed => Err(AppendError::Closed),
        }
    }

    pub(super) fn end_position(&self) -> Position {
        Position { offset: self.fold.end, segment: self.active.base, bytes: self.active.content.size }
    }
}

/// A unit whose batches are cleaned of what must not have effects here.
struct Prepared<'a> {
    unit: &'a MirrorUnit,
    next: Offset,
    cleaned: Vec<Batch>,
    len_max: u64,
    offsets_max: i32,
}

/// A unit at its local offsets.
struct PlacedUnit {
    marker: Batch,
    content: MirrorMarker,
    batches: Vec<Batch>,
    bytes: Bytes,
    next: Offset,
}

impl<'a> Prepared<'a> {
    fn new(unit: &'a MirrorUnit, next: Offset) -> Prepared<'a> {
        let cleaned: Vec<Batch> = unit.batches.iter().map(without_producer).collect();
        let bytes: u64 = cleaned.iter().map(|b| b.bytes.len() as u64).sum();
        // A marker is 61 bytes of header, 100 of fields and 12 for each batch; extractors are few.
        let marker_max =
            512 + 16 * cleaned.len() as u64 + 256 * unit.extractors.as_ref().map_or(0, Vec::len) as u64;
        let records = cleaned.iter().map(|b| i64::from(b.header.last_offset_delta) + 1).sum::<i64>();
        let offsets_max = records.min(i64::from(i32::MAX)) as i32;
        Prepared { unit, next, cleaned, len_max: bytes + marker_max, offsets_max }
    }

    fn place(self, at: Offset, epoch: LeaderEpoch) -> PlacedUnit {
        let mut offset = at.plus(1);
        let mut batches = Vec::with_capacity(self.cleaned.len());
        let mut entries = Vec::with_capacity(self.cleaned.len());
        for (cleaned, original) in self.cleaned.iter().zip(&self.unit.batches) {
            entries.push(((offset.0 - at.0) as i32, original.header.base_offset));
            let batch = cleaned.restamped(offset, epoch);
            offset = batch.header.next_offset();
            batches.push(batch);
        }
        let last = self.unit.batches.last().map(|b| b.header);
        let content = MirrorMarker {
            origin: self.unit.origin,
            incarnation: self.unit.incarnation,
            origin_epoch: last.map_or(LeaderEpoch::NONE, |h| h.leader_epoch),
            first: self.unit.first,
            next: self.next,
            batches: entries,
            byte_len: batches.iter().map(|b| b.bytes.len() as u64).sum(),
            last_crc: last.filter(|_| !self.unit.last_rewritten).map_or(0, |h| h.crc),
            extractors: self.unit.extractors.clone(),
        };
        let marker = marker_batch(&Marker::Mirror(content.clone()), at, epoch);
        let mut bytes = BytesMut::with_capacity(marker.bytes.len() + content.byte_len as usize);
        bytes.extend_from_slice(&marker.bytes);
        for batch in &batches {
            bytes.extend_from_slice(&batch.bytes);
        }
        PlacedUnit { marker, content, batches, bytes: bytes.freeze(), next: offset }
    }
}

/// Nothing remote may block or fence a local producer: identity and transaction are cleared.
fn without_producer(batch: &Batch) -> Batch {
    let h = &batch.header;
    if h.producer_id == ProducerId::NONE && !h.attributes.is_transactional() {
        return batch.clone();
    }
    let header = BatchHeader {
        producer_id: ProducerId::NONE,
        producer_epoch: ProducerEpoch(-1),
        base_sequence: -1,
        attributes: Attributes(h.attributes.0 & !Attributes::TRANSACTIONAL),
        ..*h
    };
    header.seal(&batch.bytes[HEADER_LEN..])
}
