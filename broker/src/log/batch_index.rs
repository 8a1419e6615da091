//! The batch index beside a segment: where its special batches are.
//!
//! An entry for every marker of ours and every batch that holds lane records; plain batches have
//! none. A missing entry would read as "nothing hidden", so the file is checksummed and says up to
//! which offset it is complete; where it is not, the segment is scanned again before it is served.
//!
//! ```text
//! "SLBI" | version i16 | complete to i64 | count u32 | entries | CRC-32C u32 (of all before)
//! entry: base i64, next i64, position u32, length u32, kind u8, then
//!        kind 1 (marker): records covered u32, bytes covered u32;  kind 2 (lanes): lane summary
//! ```

use kafka::Offset;
use lane_core::LaneSummary;

use super::take;

/// A batch that a reader may have to treat differently from plain bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchEntry {
    pub base: Offset,
    /// The offset after the batch.
    pub next: Offset,
    pub position: u32,
    pub length: u32,
    pub kind: BatchKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchKind {
    /// A control batch of ours. A mirror marker covers the batches after it, as one unit.
    Marker { records_covered: u32, bytes_covered: u32 },
    /// A batch on a topic with lanes that holds lane records.
    Lanes(LaneSummary),
}

/// The special batches of one segment, in offset order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchIndex {
    pub entries: Vec<BatchEntry>,
}

const MAGIC: &[u8; 4] = b"SLBI";
const VERSION: i16 = 1;
const HEAD: usize = 18;

impl BatchEntry {
    /// The offset after the unit that this marker opens; `next` for everything else.
    pub fn unit_next(&self) -> Offset {
        match self.kind {
            BatchKind::Marker { records_covered, .. } => self.next.plus(i64::from(records_covered)),
            BatchKind::Lanes(_) => self.next,
        }
    }

    pub fn is_marker(&self) -> bool {
        matches!(self.kind, BatchKind::Marker { .. })
    }
}

impl BatchIndex {
    pub fn push(&mut self, entry: BatchEntry) {
        debug_assert!(self.entries.last().is_none_or(|e| e.next <= entry.base), "entries ascend");
        self.entries.push(entry);
    }

    /// Entries whose batch, or whose unit, touches `[from, to)`.
    pub fn touching(&self, from: Offset, to: Offset) -> &[BatchEntry] {
        let mut first = self.entries.partition_point(|e| e.next <= from);
        // A unit that began before `from` may reach into the range.
        if let Some(unit) = self.entries[..first].iter().rposition(BatchEntry::is_marker)
            && self.entries[unit].unit_next() > from
        {
            first = unit;
        }
        let end = self.entries.partition_point(|e| e.base < to);
        &self.entries[first..end.max(first)]
    }

    pub fn encode(&self, complete_to: Offset) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + self.entries.len() * 40 + 4);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&complete_to.0.to_be_bytes());
        out.extend_from_slice(&(self.entries.len() as u32).to_be_bytes());
        for e in &self.entries {
            out.extend_from_slice(&e.base.0.to_be_bytes());
            out.extend_from_slice(&e.next.0.to_be_bytes());
            out.extend_from_slice(&e.position.to_be_bytes());
            out.extend_from_slice(&e.length.to_be_bytes());
            match &e.kind {
                BatchKind::Marker { records_covered, bytes_covered } => {
                    out.push(1);
                    out.extend_from_slice(&records_covered.to_be_bytes());
                    out.extend_from_slice(&bytes_covered.to_be_bytes());
                }
                BatchKind::Lanes(summary) => {
                    out.push(2);
                    summary.encode(&mut out);
                }
            }
        }
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_be_bytes());
        out
    }

    /// The index, if the bytes are whole and complete up to `needed`; `None` asks for a scan.
    pub fn decode(bytes: &[u8], needed: Offset) -> Option<BatchIndex> {
        let (body, crc) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
        if body.len() < HEAD || &body[..4] != MAGIC || crc32c::crc32c(body).to_be_bytes() != crc {
            return None;
        }
        let mut rest = &body[4..];
        if i16::from_be_bytes(take(&mut rest)?) != VERSION || i64::from_be_bytes(take(&mut rest)?) < needed.0
        {
            return None;
        }
        let count = u32::from_be_bytes(take(&mut rest)?);
        let mut entries = Vec::new();
        for _ in 0..count {
            let base = Offset(i64::from_be_bytes(take(&mut rest)?));
            let next = Offset(i64::from_be_bytes(take(&mut rest)?));
            let position = u32::from_be_bytes(take(&mut rest)?);
            let length = u32::from_be_bytes(take(&mut rest)?);
            let kind = match take::<1>(&mut rest)?[0] {
                1 => BatchKind::Marker {
                    records_covered: u32::from_be_bytes(take(&mut rest)?),
                    bytes_covered: u32::from_be_bytes(take(&mut rest)?),
                },
                2 => BatchKind::Lanes(LaneSummary::decode(&mut rest)?),
                _ => return None,
            };
            entries.push(BatchEntry { base, next, position, length, kind });
        }
        rest.is_empty().then_some(BatchIndex { entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marker(base: i64, covered: u32) -> BatchEntry {
        BatchEntry {
            base: Offset(base),
            next: Offset(base + 1),
            position: base as u32 * 10,
            length: 10,
            kind: BatchKind::Marker { records_covered: covered, bytes_covered: covered * 10 },
        }
    }

    fn index() -> BatchIndex {
        BatchIndex { entries: vec![marker(2, 0), marker(5, 10), marker(20, 0)] }
    }

    #[test]
    fn a_range_inside_a_unit_still_sees_its_marker() {
        let index = index();
        let bases =
            |from, to| index.touching(Offset(from), Offset(to)).iter().map(|e| e.base.0).collect::<Vec<_>>();
        assert_eq!(bases(0, 3), [2]);
        assert_eq!(bases(8, 9), [5]);
        assert_eq!(bases(16, 20), Vec::<i64>::new());
        assert_eq!(bases(3, 30), [5, 20]);
    }

    #[test]
    fn a_damaged_or_incomplete_file_asks_for_a_scan() {
        let bytes = index().encode(Offset(21));
        assert_eq!(BatchIndex::decode(&bytes, Offset(21)), Some(index()));
        assert_eq!(BatchIndex::decode(&bytes, Offset(22)), None);
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert_eq!(BatchIndex::decode(&damaged, Offset(0)), None, "byte {at}");
            assert_eq!(BatchIndex::decode(&bytes[..at], Offset(0)), None, "cut at {at}");
        }
    }
}
