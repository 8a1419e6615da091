//! What a partition's log says about lanes up to an offset: ownership intervals, purges, extractors.
//!
//! Fed with the lane markers (control types 101 to 104) and the lane summaries of batches, in log
//! order; the same log gives the same fold, at any broker, at any time. Part of the snapshot.
//! Leaves out who is reading: that is `view.rs`.
//!
//! Invariant: no marker that is applied later changes the owner of an offset below it.

use std::collections::BTreeMap;
use std::sync::Arc;

use kafka::control::{LaneCut, Marker};
use kafka::{GroupId, Offset};

use crate::extract::{ExtractorError, Extractors};
use crate::name::{Lane, LaneNameError};
use crate::summary::LaneSummary;

/// The fold of one partition. `rules` is shared with readers and copied when a marker comes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneFold {
    rules: Arc<LaneRules>,
    last_ppe: Option<Offset>,
    last_boe: Option<Offset>,
}

/// What a reader needs to decide who owns a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneRules {
    /// (first offset it judges, list), ascending.
    pub(crate) extractors: Vec<(Offset, Arc<Extractors>)>,
    pub(crate) groups: BTreeMap<GroupId, BTreeMap<Lane, GroupLane>>,
    /// A later lane of this name sees nothing below the offset.
    pub(crate) purges: BTreeMap<Lane, Offset>,
}

/// What the log says of one base group in one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupLane {
    /// Ascending and apart; only the last may be open.
    pub intervals: Vec<Interval>,
    pub last_marker: Offset,
    pub coordinator_epoch: i32,
}

/// BOE records of the lane from `start` to before `end` belong to the lane's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    pub start: Offset,
    /// `None`: open.
    pub end: Option<Offset>,
    /// A record of the lane was appended in it.
    pub used: bool,
}

/// A cut as the coordinator asks for it, and as the marker keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    pub group: GroupId,
    pub lane: Lane,
    pub coordinator_epoch: i32,
    /// The last marker of (group, lane) that the coordinator knows.
    pub previous: Option<Offset>,
}

/// A lane marker, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneMarker {
    Activate(Cut),
    Deactivate(Cut),
    Purge(Lane),
    Extractors(Extractors),
}

impl LaneMarker {
    /// A lane's marker out of a marker of the log; `None` for the others. A mirror's unit may name a list.
    pub fn parse(marker: &Marker) -> Result<Option<LaneMarker>, MarkerError> {
        Ok(Some(match marker {
            Marker::LaneActivate(cut) => LaneMarker::Activate(Cut::parse(cut)?),
            Marker::LaneDeactivate(cut) => LaneMarker::Deactivate(Cut::parse(cut)?),
            Marker::LanePurge(purge) => LaneMarker::Purge(Lane::parse(&purge.lane)?),
            Marker::Extractors(list) => LaneMarker::Extractors(Extractors::parse(list)?),
            Marker::Mirror(unit) => {
                Extractors::parse(unit.extractors.as_deref().unwrap_or_default())?;
                return Ok(None);
            }
        }))
    }
}

impl Cut {
    pub fn parse(cut: &LaneCut) -> Result<Cut, LaneNameError> {
        Ok(Cut {
            group: GroupId::new(&cut.group),
            lane: Lane::parse(&cut.lane)?,
            coordinator_epoch: cut.coordinator_epoch,
            previous: cut.previous,
        })
    }

    /// As the marker carries it.
    pub fn written(&self) -> LaneCut {
        LaneCut {
            group: self.group.as_str().to_owned(),
            lane: self.lane.as_str().to_owned(),
            coordinator_epoch: self.coordinator_epoch,
            previous: self.previous,
        }
    }
}

/// Why a marker in a log is not one that this build can follow. To go on would be to guess.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MarkerError {
    #[error("a lane marker names no lane: {0}")]
    Lane(#[from] LaneNameError),
    #[error("a marker lists extractors that this build does not know: {0}")]
    Extractors(#[from] ExtractorError),
}

/// Why a cut is not appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutRefused {
    /// Another coordinator has taken over: give up.
    #[error("coordinator epoch {asked} is older than {known}")]
    Fenced { asked: i32, known: i32 },
    /// Read the fold again, then decide again.
    #[error("the last marker is at {last:?}, not where the coordinator thinks")]
    Moved { last: Option<Offset>, open: bool },
}

/// Why bytes are not a fold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaneFoldError {
    #[error("the lane part of a snapshot is damaged: {0}")]
    Damaged(&'static str),
    #[error("the lane part of a snapshot has version {0}, this build knows {VERSION}")]
    Newer(i16),
    #[error("the lane part of a snapshot holds a list of extractors that is not one: {0}")]
    Extractors(#[from] ExtractorError),
}

impl LaneFold {
    pub fn rules(&self) -> Arc<LaneRules> {
        self.rules.clone()
    }

    /// See [`LaneRules::has_lanes`].
    pub fn has_lanes(&self) -> bool {
        self.rules.has_lanes()
    }

    /// Whether a cut may be appended now. The caller appends the marker before anything else.
    pub fn check(&self, cut: &Cut) -> Result<(), CutRefused> {
        let known = self.rules.group_lane(&cut.group, &cut.lane);
        if let Some(known) = known
            && cut.coordinator_epoch < known.coordinator_epoch
        {
            let (asked, known) = (cut.coordinator_epoch, known.coordinator_epoch);
            return Err(CutRefused::Fenced { asked, known });
        }
        let last = known.map(|k| k.last_marker);
        let open = known.is_some_and(|k| k.open().is_some());
        if cut.previous == last { Ok(()) } else { Err(CutRefused::Moved { last, open }) }
    }

    /// Takes the marker at `offset` in. Markers in a log were checked when they were appended.
    pub fn apply(&mut self, marker: &LaneMarker, offset: Offset) {
        let rules = Arc::make_mut(&mut self.rules);
        match marker {
            LaneMarker::Activate(cut) => rules.cut(cut, offset).activate(offset),
            LaneMarker::Deactivate(cut) => rules.cut(cut, offset).deactivate(offset),
            LaneMarker::Purge(lane) => {
                rules.purges.insert(lane.clone(), offset);
            }
            LaneMarker::Extractors(list) => rules.extractors.push((offset, Arc::new(list.clone()))),
        }
    }

    /// Takes in what a batch at `offset` holds. Plain batches may be left out.
    pub fn note_batch(&mut self, summary: &LaneSummary, offset: Offset) {
        if summary.is_plain() {
            return;
        }
        let boe = summary.has_unnamed() || summary.lanes().iter().any(|l| !l.is_ppe());
        if boe || summary.is_many() {
            self.last_boe = Some(offset);
        }
        if summary.is_many() || summary.lanes().iter().any(Lane::is_ppe) {
            self.last_ppe = Some(offset);
        }
        if self.rules.has_unused_open(summary) {
            Arc::make_mut(&mut self.rules).use_open(summary);
        }
    }

    /// The list that judges the next record. Empty: lanes are off.
    pub fn extractors(&self) -> Arc<Extractors> {
        self.rules.extractors_at(Offset(i64::MAX))
    }

    /// Forgets what decides nothing at or above `log_start`.
    pub fn trim(&mut self, log_start: Offset) {
        self.last_ppe = self.last_ppe.filter(|at| *at >= log_start);
        self.last_boe = self.last_boe.filter(|at| *at >= log_start);
        if self.rules.needs_trim(log_start) {
            Arc::make_mut(&mut self.rules).trim(log_start);
        }
    }

    /// PPE records or intervals are in the log: lanes cannot be turned off.
    pub fn holds_ppe_or_intervals(&self) -> bool {
        self.last_ppe.is_some() || self.rules.groups.values().flatten().any(|(_, g)| !g.intervals.is_empty())
    }

    /// Lane records or intervals are in the log: the topic cannot be compacted.
    pub fn holds_lanes(&self) -> bool {
        self.last_boe.is_some() || self.holds_ppe_or_intervals()
    }

    /// Nothing to write into a snapshot.
    pub fn is_empty(&self) -> bool {
        *self == LaneFold::default()
    }
}

impl LaneRules {
    /// Lanes are on, or were while records that are still here were appended.
    pub fn has_lanes(&self) -> bool {
        self.extractors.iter().any(|(_, list)| !list.is_empty())
    }

    pub fn group_lane(&self, group: &GroupId, lane: &Lane) -> Option<&GroupLane> {
        self.groups.get(group)?.get(lane)
    }

    /// Every (group, lane) with a marker in the log, closed ones too.
    pub fn group_lanes(&self) -> impl Iterator<Item = (&GroupId, &Lane, &GroupLane)> {
        self.groups.iter().flat_map(|(group, lanes)| lanes.iter().map(move |(lane, g)| (group, lane, g)))
    }

    /// The list that judged the records at `offset`.
    pub fn extractors_at(&self, offset: Offset) -> Arc<Extractors> {
        let n = self.extractors.partition_point(|(from, _)| *from <= offset);
        n.checked_sub(1).map_or_else(Arc::default, |i| self.extractors[i].1.clone())
    }

    /// Whether an interval of (group, lane) holds `offset`.
    pub fn in_interval(&self, group: &GroupId, lane: &Lane, offset: Offset) -> bool {
        let Some(known) = self.group_lane(group, lane) else { return false };
        let n = known.intervals.partition_point(|i| i.start <= offset);
        n.checked_sub(1).is_some_and(|i| known.intervals[i].end.is_none_or(|end| offset < end))
    }

    /// Below this offset a lane of this name sees nothing.
    pub fn purged_below(&self, lane: &Lane) -> Offset {
        self.purges.get(lane).copied().unwrap_or(Offset::ZERO)
    }

    fn cut(&mut self, cut: &Cut, offset: Offset) -> &mut GroupLane {
        let lanes = self.groups.entry(cut.group.clone()).or_default();
        let known = lanes.entry(cut.lane.clone()).or_insert_with(|| GroupLane {
            intervals: Vec::new(),
            last_marker: offset,
            coordinator_epoch: cut.coordinator_epoch,
        });
        known.last_marker = offset;
        known.coordinator_epoch = known.coordinator_epoch.max(cut.coordinator_epoch);
        known
    }

    fn has_unused_open(&self, summary: &LaneSummary) -> bool {
        let unused =
            |(lane, g): (&Lane, &GroupLane)| summary.may_hold(lane) && g.open().is_some_and(|i| !i.used);
        self.groups.values().flatten().any(unused)
    }

    fn use_open(&mut self, summary: &LaneSummary) {
        for (lane, group) in self.groups.values_mut().flatten() {
            if summary.may_hold(lane)
                && let Some(open) = group.intervals.last_mut().filter(|i| i.end.is_none())
            {
                open.used = true;
            }
        }
    }

    fn needs_trim(&self, log_start: Offset) -> bool {
        self.extractors.get(1).is_some_and(|(from, _)| *from <= log_start)
            || self.purges.values().any(|at| *at <= log_start)
            || self.groups.values().flatten().any(|(_, g)| g.needs_trim(log_start))
    }

    fn trim(&mut self, log_start: Offset) {
        let judged = self.extractors.partition_point(|(from, _)| *from <= log_start);
        self.extractors.drain(..judged.saturating_sub(1));
        self.purges.retain(|_, at| *at > log_start);
        for lanes in self.groups.values_mut() {
            for group in lanes.values_mut() {
                group.intervals.retain(|i| i.end.is_none_or(|end| end > log_start));
            }
            // The last marker stays while it is in the log, so that an older cut still fails.
            lanes.retain(|_, g| !g.intervals.is_empty() || g.last_marker >= log_start);
        }
        self.groups.retain(|_, lanes| !lanes.is_empty());
    }
}

impl GroupLane {
    pub fn open(&self) -> Option<&Interval> {
        self.intervals.last().filter(|i| i.end.is_none())
    }

    fn activate(&mut self, offset: Offset) {
        if self.open().is_none() {
            self.intervals.push(Interval { start: offset, end: None, used: false });
        }
    }

    /// An interval in which no record of the lane lies owns nothing and goes at once: otherwise a
    /// lane that comes and goes every minute would fill the snapshot.
    fn deactivate(&mut self, offset: Offset) {
        if let Some(last) = self.intervals.last_mut().filter(|i| i.end.is_none()) {
            last.end = Some(offset);
            if !last.used {
                self.intervals.pop();
            }
        }
    }

    fn needs_trim(&self, log_start: Offset) -> bool {
        let passed = |i: &Interval| i.end.is_some_and(|end| end <= log_start);
        self.intervals.iter().any(passed) || (self.intervals.is_empty() && self.last_marker < log_start)
    }
}

// ---- the snapshot's bytes ----
//
// i16 version | extractors: u32 n, (i64 from, u32 m, m texts) | groups: u32 n, (text group, text lane,
// i32 epoch, i64 last marker, u32 m, (i64 start, i64 end or -1, u8 used)) | purges: u32 n, (text, i64)
// | i64 last PPE or -1 | i64 last BOE or -1.     text: u32 length, UTF-8

const VERSION: i16 = 1;

impl LaneFold {
    pub fn encode(&self, out: &mut Vec<u8>) {
        let rules = &*self.rules;
        out.extend_from_slice(&VERSION.to_be_bytes());
        put_len(out, rules.extractors.len());
        for (from, list) in &rules.extractors {
            put_offset(out, Some(*from));
            put_len(out, list.texts().len());
            list.texts().iter().for_each(|text| put_text(out, text));
        }
        put_len(out, rules.group_lanes().count());
        for (group, lane, known) in rules.group_lanes() {
            put_text(out, group.as_str());
            put_text(out, lane.as_str());
            out.extend_from_slice(&known.coordinator_epoch.to_be_bytes());
            put_offset(out, Some(known.last_marker));
            put_len(out, known.intervals.len());
            for interval in &known.intervals {
                put_offset(out, Some(interval.start));
                put_offset(out, interval.end);
                out.push(u8::from(interval.used));
            }
        }
        put_len(out, rules.purges.len());
        for (lane, at) in &rules.purges {
            put_text(out, lane.as_str());
            put_offset(out, Some(*at));
        }
        put_offset(out, self.last_ppe);
        put_offset(out, self.last_boe);
    }

    /// Reads what [`encode`](Self::encode) wrote, off the front of `bytes`.
    pub fn decode(bytes: &mut &[u8]) -> Result<LaneFold, LaneFoldError> {
        let mut from = Input(bytes);
        let version = i16::from_be_bytes(from.array()?);
        if version != VERSION {
            return Err(LaneFoldError::Newer(version));
        }
        let mut rules = LaneRules::default();
        for _ in 0..from.len()? {
            let at = from.present_offset()?;
            let texts = (0..from.len()?).map(|_| from.text()).collect::<Result<Vec<_>, _>>()?;
            rules.extractors.push((at, Arc::new(Extractors::parse(&texts)?)));
        }
        for _ in 0..from.len()? {
            let (group, lane) = (GroupId::new(from.text()?), from.lane()?);
            let known = from.group_lane()?;
            rules.groups.entry(group).or_default().insert(lane, known);
        }
        for _ in 0..from.len()? {
            let lane = from.lane()?;
            rules.purges.insert(lane, from.present_offset()?);
        }
        let fold = LaneFold { rules: Arc::new(rules), last_ppe: from.offset()?, last_boe: from.offset()? };
        *bytes = from.0;
        Ok(fold)
    }
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], LaneFoldError> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(LaneFoldError::Damaged("it ends early"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], LaneFoldError> {
        Ok(self.take(N)?.try_into().expect("take gave N bytes"))
    }

    /// A count of things that take at least one byte each.
    fn len(&mut self) -> Result<usize, LaneFoldError> {
        let n = u32::from_be_bytes(self.array()?) as usize;
        if n > self.0.len() { Err(LaneFoldError::Damaged("a count is too large")) } else { Ok(n) }
    }

    fn text(&mut self) -> Result<&'a str, LaneFoldError> {
        let n = self.len()?;
        std::str::from_utf8(self.take(n)?).map_err(|_| LaneFoldError::Damaged("a text is not UTF-8"))
    }

    fn lane(&mut self) -> Result<Lane, LaneFoldError> {
        Lane::parse(self.text()?).map_err(|_| LaneFoldError::Damaged("a lane name is not one"))
    }

    fn offset(&mut self) -> Result<Option<Offset>, LaneFoldError> {
        let at = i64::from_be_bytes(self.array()?);
        Ok((at >= 0).then_some(Offset(at)))
    }

    fn present_offset(&mut self) -> Result<Offset, LaneFoldError> {
        self.offset()?.ok_or(LaneFoldError::Damaged("an offset is missing"))
    }

    fn group_lane(&mut self) -> Result<GroupLane, LaneFoldError> {
        let coordinator_epoch = i32::from_be_bytes(self.array()?);
        let last_marker = self.present_offset()?;
        let mut intervals: Vec<Interval> = Vec::new();
        for _ in 0..self.len()? {
            let (start, end) = (self.present_offset()?, self.offset()?);
            let used = self.array::<1>()?[0] == 1;
            let after = intervals.last().is_none_or(|i| i.end.is_some_and(|end| end <= start));
            if !after || end.is_some_and(|end| end < start) {
                return Err(LaneFoldError::Damaged("intervals overlap"));
            }
            intervals.push(Interval { start, end, used });
        }
        Ok(GroupLane { intervals, last_marker, coordinator_epoch })
    }
}

fn put_len(out: &mut Vec<u8>, n: usize) {
    out.extend_from_slice(&(n as u32).to_be_bytes());
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_len(out, text.len());
    out.extend_from_slice(text.as_bytes());
}

fn put_offset(out: &mut Vec<u8>, at: Option<Offset>) {
    out.extend_from_slice(&at.map_or(-1, |o| o.0).to_be_bytes());
}
