//! What a batch holds, lane by lane: the entry of the batch index.
//!
//! Bounded: a batch of more than [`LANES_MAX`] lanes is marked `many`, and is then looked into
//! record by record. Counts are not kept; only what is needed to say "visible", "hidden" or "mixed".
//! A mirrored batch was judged by the list of the region where it was produced; where that differs
//! from the partition's own list, the entry keeps it.
//!
//! ```text
//!  | flags u8 | lanes u8 | (length u8 | name)*  | if flag 8: count u8 | (length u16 | extractor)*
//!    flags: 1 baseline, 2 unnamed, 4 many, 8 judged by another list
//! ```

use std::sync::Arc;

use crate::extract::Extractors;
use crate::name::Lane;

/// Most lanes that an entry names.
pub const LANES_MAX: usize = 16;

/// The lane of one record, as its headers say.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RecordLane {
    Baseline,
    /// A value that is no lane name: a BOE record of a lane that nobody can deploy.
    Unnamed,
    Lane(Lane),
    /// Its headers contradict each other. Never appended here; should one be in a log all the same,
    /// nobody sees it.
    Refused,
}

/// The lanes in one batch. The default holds nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneSummary {
    baseline: bool,
    unnamed: bool,
    many: bool,
    /// Sorted, each once.
    lanes: Vec<Lane>,
    judged_by: Option<Arc<Extractors>>,
}

impl LaneSummary {
    /// A batch of baseline records only.
    pub fn plain() -> LaneSummary {
        LaneSummary { baseline: true, ..LaneSummary::default() }
    }

    /// A batch that must be looked into.
    pub fn unknown() -> LaneSummary {
        LaneSummary { baseline: true, unnamed: true, many: true, ..LaneSummary::default() }
    }

    pub fn add(&mut self, lane: &RecordLane) {
        match lane {
            RecordLane::Baseline => self.baseline = true,
            RecordLane::Unnamed => self.unnamed = true,
            RecordLane::Lane(lane) => {
                let Err(at) = self.lanes.binary_search(lane) else { return };
                if self.lanes.len() == LANES_MAX {
                    self.many = true;
                } else {
                    self.lanes.insert(at, lane.clone());
                }
            }
            RecordLane::Refused => self.many = true,
        }
    }

    /// Only baseline records: no index entry is needed.
    pub fn is_plain(&self) -> bool {
        !self.unnamed && !self.many && self.lanes.is_empty()
    }

    pub fn has_baseline(&self) -> bool {
        self.baseline
    }

    pub fn has_unnamed(&self) -> bool {
        self.unnamed
    }

    /// More lanes than are named: the batch must be looked into.
    pub fn is_many(&self) -> bool {
        self.many
    }

    pub fn lanes(&self) -> &[Lane] {
        &self.lanes
    }

    /// Whether a record of `lane` may be in the batch.
    pub fn may_hold(&self, lane: &Lane) -> bool {
        self.many || self.lanes.binary_search(lane).is_ok()
    }

    /// The list by which its records were judged, if it was not the partition's own.
    pub fn judged_by(&self) -> Option<&Arc<Extractors>> {
        self.judged_by.as_ref()
    }

    pub fn with_judge(mut self, judge: Arc<Extractors>) -> LaneSummary {
        self.judged_by = Some(judge);
        self
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        let flags = [self.baseline, self.unnamed, self.many, self.judged_by.is_some()];
        out.push(flags.iter().enumerate().map(|(bit, on)| u8::from(*on) << bit).sum());
        out.push(self.lanes.len() as u8);
        for lane in &self.lanes {
            out.push(lane.as_str().len() as u8);
            out.extend_from_slice(lane.as_str().as_bytes());
        }
        if let Some(judge) = &self.judged_by {
            out.push(judge.texts().len() as u8);
            for text in judge.texts() {
                out.extend_from_slice(&(text.len() as u16).to_be_bytes());
                out.extend_from_slice(text.as_bytes());
            }
        }
    }

    /// Reads what [`encode`](Self::encode) wrote, off the front of `bytes`; `None` if it is damaged.
    pub fn decode(bytes: &mut &[u8]) -> Option<LaneSummary> {
        let flags = take(bytes, 1)?[0];
        let count = take(bytes, 1)?[0] as usize;
        if flags > 15 || count > LANES_MAX {
            return None;
        }
        let mut lanes = Vec::with_capacity(count);
        for _ in 0..count {
            let len = take(bytes, 1)?[0] as usize;
            let lane = Lane::parse(std::str::from_utf8(take(bytes, len)?).ok()?).ok()?;
            if lanes.last().is_some_and(|last| *last >= lane) {
                return None;
            }
            lanes.push(lane);
        }
        let judged_by = if flags & 8 != 0 { Some(Arc::new(decode_list(bytes)?)) } else { None };
        let [baseline, unnamed, many] = [1, 2, 4].map(|bit| flags & bit != 0);
        Some(LaneSummary { baseline, unnamed, many, lanes, judged_by })
    }
}

fn decode_list(bytes: &mut &[u8]) -> Option<Extractors> {
    let count = take(bytes, 1)?[0] as usize;
    let mut texts = Vec::with_capacity(count);
    for _ in 0..count {
        let len = u16::from_be_bytes(take(bytes, 2)?.try_into().ok()?) as usize;
        texts.push(std::str::from_utf8(take(bytes, len)?).ok()?);
    }
    Extractors::parse(&texts).ok()
}

fn take<'a>(bytes: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (head, rest) = bytes.split_at_checked(n)?;
    *bytes = rest;
    Some(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_survives_encoding_and_stays_bounded() {
        let mut summary = LaneSummary::default();
        summary.add(&RecordLane::Baseline);
        for i in 0..40 {
            summary.add(&RecordLane::Lane(Lane::parse(&format!("boe-{}", i % 20)).unwrap()));
        }
        assert!(summary.is_many());
        assert_eq!(summary.lanes().len(), LANES_MAX);
        let summary = summary.with_judge(Arc::new(Extractors::standard()));
        let mut bytes = Vec::new();
        summary.encode(&mut bytes);
        assert_eq!(LaneSummary::decode(&mut &bytes[..]), Some(summary));
        for cut in 0..bytes.len() {
            assert_eq!(LaneSummary::decode(&mut &bytes[..cut]), None);
        }
    }

    #[test]
    fn only_baseline_records_need_no_entry() {
        assert!(LaneSummary::plain().is_plain());
        assert!(!LaneSummary::unknown().is_plain());
        let mut unnamed = LaneSummary::plain();
        unnamed.add(&RecordLane::Unnamed);
        assert!(!unnamed.is_plain());
    }
}
