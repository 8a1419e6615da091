//! What a reader is shown of a partition: ranges of the segment file where nothing is hidden, rebuilt
//! batches where records of several lanes mix, and a batch that says nothing over what was hidden whole.
//!
//! Markers of ours are cut out for everybody. A reader that sees only its lane never touches the bytes
//! of other batches: the batch index says where to go on.
//!
//! Invariant: a decision is made by rules that are as new as the end of what was read, and not newer
//! than a log start that is above its beginning.

use bytes::Bytes;
use kafka::batch::Attributes;
use kafka::control::skip_batch;
use kafka::{Batch, BatchHeader, LeaderEpoch, Offset, ProducerEpoch, ProducerId, TimestampMs};
use lane_core::{LaneRules, LaneSummary, Showing, View};

use super::cache::{Rebuilt, RebuiltKey};
use crate::log::{BatchEntry, BatchKind};
use crate::partition::{Partition, ReadError, ReadOutcome, ReadUpTo, Slice, Watermarks};

/// How a connection reads a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Everything but markers: no lane is involved.
    Plain,
    View(View),
    /// It is not known yet who reads: nothing is shown, and no progress made.
    Wait,
}

/// Where the fetch of one partition stands while it waits: what was scanned is not scanned again.
#[derive(Clone, Debug)]
pub struct Scan {
    asked: Offset,
    scanned: Offset,
    reading: Reading,
}

/// One stretch of an answer.
#[derive(Clone, Debug)]
pub enum Part {
    File(Slice),
    Bytes(Bytes),
}

/// What a reader gets.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Whole batches in order.
    pub parts: Vec<Part>,
    pub len: usize,
    pub watermarks: Watermarks,
}

/// Reads of hidden data in one look; after that the fetch is answered with what progress there is.
const ROUNDS_MAX: usize = 32;
/// Entries of the batch index looked at in one step, and such steps in one look.
const ENTRIES_STEP: usize = 4096;
const STEPS_MAX: usize = 64;
const CONTROL_FILLER_SINCE: i16 = 11;
/// Hidden batches in a row that a committed offset is rounded over at a time.
const ROUND_UP_STEP: usize = 64;

impl Scan {
    pub fn new(asked: Offset) -> Scan {
        Scan { asked, scanned: asked, reading: Reading::Wait }
    }

    /// Something was hidden between what was asked for and what comes next.
    pub fn has_progress(&self) -> bool {
        self.scanned > self.asked
    }

    /// A batch that takes the reader over what was hidden, for an answer that would else be empty.
    ///
    /// As a rule a control batch that says nothing: librdkafka takes an answer without any record for one
    /// that its size limit has cut, and after some of them reports an error to the application. Before
    /// Fetch 11 an empty data batch: kafka-go, which asks with 10, hands control records to it.
    pub fn filler(&self, epoch: LeaderEpoch, fetch_version: i16) -> Option<Bytes> {
        if !self.has_progress() {
            return None;
        }
        if fetch_version >= CONTROL_FILLER_SINCE {
            return Some(skip_batch(self.asked, self.scanned, epoch).bytes);
        }
        let like = BatchHeader {
            base_offset: self.asked,
            batch_length: 0,
            leader_epoch: epoch,
            crc: 0,
            attributes: Attributes(0),
            last_offset_delta: 0,
            base_timestamp: TimestampMs::NONE,
            max_timestamp: TimestampMs::NONE,
            producer_id: ProducerId::NONE,
            producer_epoch: ProducerEpoch(-1),
            base_sequence: -1,
            record_count: 0,
        };
        Some(lane_core::batch::emptied_range(self.asked, self.scanned, &like).bytes)
    }

    /// A reader that turns out to be somebody else has seen nothing yet.
    fn is_read_by(&mut self, reading: &Reading) {
        if self.reading != *reading {
            self.reading = reading.clone();
            self.scanned = self.asked;
        }
    }
}

/// Looks at `partition` from where `scan` stands. An empty answer means: wait for more.
pub fn show(
    partition: &Partition,
    reading: &Reading,
    scan: &mut Scan,
    max_bytes: usize,
    at_least_one: bool,
    rebuilt: &Rebuilt,
) -> Result<Shown, ReadError> {
    scan.is_read_by(reading);
    let mut watermarks = None;
    for _ in 0..ROUNDS_MAX {
        if *reading == Reading::Wait {
            break;
        }
        if !skip_to_lane(partition, reading, scan)? {
            break;
        }
        let outcome = partition.read(scan.scanned, max_bytes, at_least_one, ReadUpTo::HighWatermark)?;
        watermarks = Some(outcome.watermarks);
        if outcome.slice.is_none() {
            if outcome.next <= scan.scanned {
                break;
            }
            scan.scanned = outcome.next;
            continue;
        }
        let viewed = match reading {
            Reading::View(view) => Some((view, rules_for(partition, scan.scanned)?)),
            Reading::Plain | Reading::Wait => None,
        };
        let viewed = viewed.as_ref().map(|(view, rules)| (*view, &**rules));
        let parts = Cut { partition, viewed, rebuilt }.parts(&outcome)?;
        let len = parts.iter().map(Part::byte_len).sum();
        if len > 0 {
            return Ok(Shown { parts, len, watermarks: outcome.watermarks });
        }
        scan.scanned = outcome.next;
    }
    let watermarks = watermarks.unwrap_or_else(|| partition.watermarks());
    Ok(Shown { parts: Vec::new(), len: 0, watermarks })
}

/// The rules for records at and above `from`. Retention forgets rules with the records they judge, so
/// a read that it has overtaken must not be judged.
fn rules_for(partition: &Partition, from: Offset) -> Result<std::sync::Arc<LaneRules>, ReadError> {
    let (rules, log_start) = partition.with_fold(|fold| (fold.lanes.rules(), fold.log_start));
    if from < log_start {
        let high_watermark = partition.watermarks().high_watermark;
        return Err(ReadError::OutOfRange { log_start, high_watermark });
    }
    Ok(rules)
}

/// Moves a reader that sees only its lane to the next batch that may hold a record of it; false if
/// none was found yet.
fn skip_to_lane(partition: &Partition, reading: &Reading, scan: &mut Scan) -> Result<bool, ReadError> {
    let Reading::View(view) = reading else { return Ok(true) };
    let Some(lane) = view.only_lane() else { return Ok(true) };
    for _ in 0..STEPS_MAX {
        let from = scan.scanned;
        let seen = |rules: &LaneRules, entry: &BatchEntry| match &entry.kind {
            BatchKind::Lanes(summary) => {
                entry.next > from
                    && summary.may_hold(lane)
                    && rules.showing(view, summary, entry.base) != Showing::Hidden
            }
            BatchKind::Marker { .. } => false,
        };
        let special = partition.special(from, ENTRIES_STEP, 1, seen)?;
        if let Some(entry) = special.entries.first() {
            scan.scanned = from.max(entry.base);
            return Ok(true);
        }
        scan.scanned = from.max(special.upto);
        if scan.scanned >= special.high_watermark || scan.scanned == from {
            break;
        }
    }
    Ok(false)
}

/// The next offset at or above `from` that `reading` may see, or the high watermark: where a group
/// that committed `from` really stands. Looks at a bounded number of batches.
pub fn round_up(partition: &Partition, reading: &Reading, from: Offset) -> Result<Offset, ReadError> {
    let mut scan = Scan { asked: from, scanned: from, reading: reading.clone() };
    if let Reading::View(view) = reading
        && view.only_lane().is_some()
    {
        return round_up_in_lane(partition, reading, scan);
    }
    for _ in 0..ROUNDS_MAX {
        let from = scan.scanned;
        let hidden = |rules: &LaneRules, entry: &BatchEntry| is_hidden(reading, rules, entry);
        let special = partition.special(from, ROUND_UP_STEP, ROUND_UP_STEP, hidden)?;
        for entry in &special.entries {
            if entry.base <= scan.scanned && scan.scanned < entry.next {
                scan.scanned = entry.next.min(special.high_watermark);
            }
        }
        if scan.scanned == from {
            break;
        }
    }
    Ok(scan.scanned)
}

/// A batch may hold the lane's records only below the offset, so the one it lies in is looked into.
fn round_up_in_lane(partition: &Partition, reading: &Reading, mut scan: Scan) -> Result<Offset, ReadError> {
    for _ in 0..ROUNDS_MAX {
        if !skip_to_lane(partition, reading, &mut scan)? {
            break;
        }
        let from = scan.scanned;
        let Some(slice) = partition.read(from, 1, true, ReadUpTo::HighWatermark)?.slice else { break };
        let damaged = |error| ReadError::Damaged { position: slice.position, error };
        let batch = Batch::split_first(&mut slice.bytes()?, false).map_err(damaged)?;
        let mut visible = VisibleRecords::new(partition, reading.clone());
        let next = batch.header.next_offset();
        if (from.0..next.0).any(|offset| visible.holds(&batch, Offset(offset))) {
            break;
        }
        scan.scanned = next;
    }
    Ok(scan.scanned)
}

/// Which records of the batches of a search a reader may see. Looks into each batch once.
pub struct VisibleRecords<'a> {
    partition: &'a Partition,
    reading: Reading,
    batch: Option<Offset>,
    /// Offsets of the batch that may be seen, ascending.
    seen: Vec<Offset>,
}

impl<'a> VisibleRecords<'a> {
    pub fn new(partition: &'a Partition, reading: Reading) -> VisibleRecords<'a> {
        VisibleRecords { partition, reading, batch: None, seen: Vec::new() }
    }

    pub fn holds(&mut self, batch: &Batch, offset: Offset) -> bool {
        let view = match &self.reading {
            Reading::Plain => return true,
            Reading::Wait => return false,
            Reading::View(view) => view.clone(),
        };
        let base = batch.header.base_offset;
        if self.batch != Some(base) {
            self.batch = Some(base);
            self.seen = self.look(batch, &view).unwrap_or_else(|error| {
                tracing::warn!(partition = %self.partition, %base, %error, "a batch cannot be judged; it is hidden");
                Vec::new()
            });
        }
        self.seen.binary_search(&offset).is_ok()
    }

    fn look(&self, batch: &Batch, view: &View) -> Result<Vec<Offset>, ReadError> {
        let base = batch.header.base_offset;
        let rules = rules_for(self.partition, base.max(self.partition.watermarks().log_start))?;
        let special = self.partition.read(
            base.max(self.partition.watermarks().log_start),
            1,
            true,
            ReadUpTo::HighWatermark,
        )?;
        let summary = special.entries.iter().find_map(|entry| match &entry.kind {
            BatchKind::Lanes(summary) if entry.base == base => Some(summary),
            _ => None,
        });
        // A batch without an entry holds baseline records alone, whatever another list would say of them.
        let judge = match summary {
            Some(summary) => summary.judged_by().cloned().unwrap_or_else(|| rules.extractors_at(base)),
            None => Default::default(),
        };
        let sees = |lane: &_| rules.sees(view, lane, base);
        let damaged = |error| ReadError::Damaged { position: 0, error };
        lane_core::batch::offsets(batch, &judge, sees).map_err(damaged)
    }
}

fn is_hidden(reading: &Reading, rules: &LaneRules, entry: &BatchEntry) -> bool {
    match (&entry.kind, reading) {
        (BatchKind::Marker { .. }, _) => true,
        (BatchKind::Lanes(summary), Reading::View(view)) => {
            rules.showing(view, summary, entry.base) == Showing::Hidden
        }
        (BatchKind::Lanes(_), Reading::Plain | Reading::Wait) => false,
    }
}

/// Cutting one read.
struct Cut<'a> {
    partition: &'a Partition,
    /// `None`: everything but markers is shown.
    viewed: Option<(&'a View, &'a LaneRules)>,
    rebuilt: &'a Rebuilt,
}

impl Cut<'_> {
    fn parts(&self, outcome: &ReadOutcome) -> Result<Vec<Part>, ReadError> {
        let Some(slice) = &outcome.slice else { return Ok(Vec::new()) };
        let end = slice.position + slice.len as u64;
        let mut parts = Vec::new();
        let mut at = slice.position;
        for entry in &outcome.entries {
            let from = u64::from(entry.position);
            let to = from + u64::from(entry.length);
            if from < at || to > end {
                continue; // the marker of a unit that began before the slice
            }
            let middle = match self.middle(entry, slice)? {
                Middle::Keep => continue,
                Middle::Cut => None,
                Middle::Replace(part) => Some(part),
            };
            self.between(slice, at, from, &mut parts);
            parts.extend(middle);
            at = to;
        }
        self.between(slice, at, end, &mut parts);
        Ok(parts)
    }

    /// Batches without an entry are plain: baseline records alone.
    fn between(&self, slice: &Slice, from: u64, to: u64, parts: &mut Vec<Part>) {
        let sees_plain = self.viewed.is_none_or(|(view, _)| view.sees_baseline());
        if sees_plain && from < to {
            parts.push(Part::File(slice.part(from, to)));
        }
    }

    fn middle(&self, entry: &BatchEntry, slice: &Slice) -> Result<Middle, ReadError> {
        let (summary, (view, rules)) = match (&entry.kind, self.viewed) {
            (BatchKind::Marker { .. }, _) => return Ok(Middle::Cut),
            (BatchKind::Lanes(_), None) => return Ok(Middle::Keep),
            (BatchKind::Lanes(summary), Some(viewed)) => (summary, viewed),
        };
        match rules.showing(view, summary, entry.base) {
            // A reader of one lane alone does not see what lies between, so its batches are named.
            Showing::Visible if !view.sees_baseline() => {
                let from = u64::from(entry.position);
                Ok(Middle::Replace(Part::File(slice.part(from, from + u64::from(entry.length)))))
            }
            Showing::Visible => Ok(Middle::Keep),
            Showing::Hidden => Ok(Middle::Cut),
            Showing::Mixed => self.rebuild(entry, slice, summary, view, rules),
        }
    }

    fn rebuild(
        &self,
        entry: &BatchEntry,
        slice: &Slice,
        summary: &LaneSummary,
        view: &View,
        rules: &LaneRules,
    ) -> Result<Middle, ReadError> {
        let key = RebuiltKey::new(self.partition, entry.base, rules, summary, view);
        if let Some(bytes) = key.as_ref().and_then(|key| self.rebuilt.find(key)) {
            return Ok(Middle::Replace(Part::Bytes(bytes)));
        }
        let from = u64::from(entry.position);
        let mut bytes = slice.part(from, from + u64::from(entry.length)).bytes()?;
        let damaged = |error| ReadError::Damaged { position: from, error };
        let batch = Batch::split_first(&mut bytes, false).map_err(damaged)?;
        let judge = summary.judged_by().cloned().unwrap_or_else(|| rules.extractors_at(entry.base));
        let seen = |lane: &_| rules.sees(view, lane, entry.base);
        let kept = lane_core::batch::filter(&batch, &judge, seen).map_err(damaged)?;
        if kept.header.record_count == 0 {
            return Ok(Middle::Cut);
        }
        if let Some(key) = key {
            self.rebuilt.keep(key, kept.bytes.clone());
        }
        Ok(Middle::Replace(Part::Bytes(kept.bytes)))
    }
}

enum Middle {
    Keep,
    Cut,
    Replace(Part),
}

impl Part {
    pub fn byte_len(&self) -> usize {
        match self {
            Part::File(slice) => slice.len,
            Part::Bytes(bytes) => bytes.len(),
        }
    }
}

#[cfg(test)]
#[path = "show_tests.rs"]
mod tests;
