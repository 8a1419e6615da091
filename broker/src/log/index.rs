//! Kafka's sparse indexes: `.index` (relative offset, position) and `.timeindex` (timestamp,
//! relative offset), big-endian, ascending. The active segment keeps them in memory; a sealed
//! segment's stay in their files and are searched there.

use broker_store::{Reader, StoreError};
use kafka::{Offset, TimestampMs};

use super::take;

/// Relative offset of a batch's last record, and where the batch begins: as Kafka writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetEntry {
    pub relative: u32,
    pub position: u32,
}

/// The largest timestamp so far, and the relative offset of the batch that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeEntry {
    pub timestamp: i64,
    pub relative: u32,
}

pub const OFFSET_ENTRY_LEN: usize = 8;
pub const TIME_ENTRY_LEN: usize = 12;

/// Both indexes of a segment that is being written.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LiveIndex {
    offsets: Vec<OffsetEntry>,
    times: Vec<TimeEntry>,
    bytes_since_entry: u32,
    largest: Option<TimeEntry>,
}

impl LiveIndex {
    /// Notes a batch of `length` bytes at `position`; adds entries every `interval` bytes.
    pub fn note(
        &mut self,
        last_relative: u32,
        position: u32,
        length: u32,
        stamp: TimestampMs,
        interval: u32,
    ) {
        // Kafka asks before it counts the batch: the first batch of a segment has no entry.
        if self.bytes_since_entry > interval {
            self.offsets.push(OffsetEntry { relative: last_relative, position });
            self.bytes_since_entry = 0;
            self.note_largest(stamp, last_relative);
            self.flush_largest();
        } else {
            self.note_largest(stamp, last_relative);
        }
        self.bytes_since_entry = self.bytes_since_entry.saturating_add(length);
    }

    fn note_largest(&mut self, stamp: TimestampMs, relative: u32) {
        if stamp.0 >= 0 && self.largest.is_none_or(|l| stamp.0 > l.timestamp) {
            self.largest = Some(TimeEntry { timestamp: stamp.0, relative });
        }
    }

    fn flush_largest(&mut self) {
        if let Some(largest) = self.largest
            && self
                .times
                .last()
                .is_none_or(|t| largest.timestamp > t.timestamp && largest.relative > t.relative)
        {
            self.times.push(largest);
        }
    }

    /// Where to begin a scan for the batch that holds `relative`: at or before it.
    pub fn floor(&self, relative: u32) -> u32 {
        let after = self.offsets.partition_point(|e| e.relative <= relative);
        after.checked_sub(1).map_or(0, |i| self.offsets[i].position)
    }

    /// The last indexed batch start at or before `position`.
    pub fn floor_position(&self, position: u32) -> u32 {
        let after = self.offsets.partition_point(|e| e.position <= position);
        after.checked_sub(1).map_or(0, |i| self.offsets[i].position)
    }

    /// Relative offset where a scan for the first record at or after `timestamp` may begin.
    pub fn floor_time(&self, timestamp: i64) -> u32 {
        let after = self.times.partition_point(|e| e.timestamp < timestamp);
        after.checked_sub(1).map_or(0, |i| self.times[i].relative)
    }

    pub fn max_timestamp(&self) -> TimestampMs {
        self.largest.map_or(TimestampMs::NONE, |l| TimestampMs(l.timestamp))
    }

    /// Ends the segment: the last time entry carries its largest timestamp, as in Kafka.
    pub fn finish(&mut self) {
        self.flush_largest();
    }

    /// The two files.
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let mut offsets = Vec::with_capacity(self.offsets.len() * OFFSET_ENTRY_LEN);
        self.offsets.iter().for_each(|e| e.encode(&mut offsets));
        let mut times = Vec::with_capacity(self.times.len() * TIME_ENTRY_LEN);
        self.times.iter().for_each(|e| e.encode(&mut times));
        (offsets, times)
    }

    /// Everything that [`Self::load`] needs to go on from here, with about so many entries of each kind at most.
    pub fn save(&self, entries_max: u32, out: &mut Vec<u8>) {
        let largest = self.largest.unwrap_or(TimeEntry { timestamp: -1, relative: 0 });
        out.extend_from_slice(&self.bytes_since_entry.to_be_bytes());
        largest.encode(out);
        let offsets = thinned(&self.offsets, entries_max, |e| e.position);
        let times = thinned(&self.times, entries_max, |e| e.relative);
        out.extend_from_slice(&(offsets.len() as u32).to_be_bytes());
        offsets.into_iter().for_each(|e| e.encode(out));
        out.extend_from_slice(&(times.len() as u32).to_be_bytes());
        times.into_iter().for_each(|e| e.encode(out));
    }

    pub fn load(rest: &mut &[u8]) -> Option<LiveIndex> {
        let bytes_since_entry = u32::from_be_bytes(take(rest)?);
        let largest = Some(TimeEntry::decode(rest)?).filter(|largest| largest.timestamp >= 0);
        let mut index = LiveIndex { bytes_since_entry, largest, ..LiveIndex::default() };
        for _ in 0..u32::from_be_bytes(take(rest)?) {
            index.offsets.push(OffsetEntry::decode(rest)?);
        }
        for _ in 0..u32::from_be_bytes(take(rest)?) {
            index.times.push(TimeEntry::decode(rest)?);
        }
        Some(index)
    }
}

/// Entries that are no nearer to each other than an even share of the whole, however often some were left
/// out before. What is left is still ascending, so a floor is only lower.
fn thinned<T>(entries: &[T], max: u32, place: impl Fn(&T) -> u32) -> Vec<&T> {
    let gap = entries.last().map_or(0, &place) / max;
    let mut least = 0;
    let far = |entry: &&T| {
        let is_far = place(entry) >= least;
        least = if is_far { place(entry).saturating_add(gap) } else { least };
        is_far
    };
    entries.iter().filter(far).collect()
}

impl OffsetEntry {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.relative.to_be_bytes());
        out.extend_from_slice(&self.position.to_be_bytes());
    }

    fn decode(rest: &mut &[u8]) -> Option<OffsetEntry> {
        let relative = u32::from_be_bytes(take(rest)?);
        Some(OffsetEntry { relative, position: u32::from_be_bytes(take(rest)?) })
    }
}

impl TimeEntry {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.timestamp.to_be_bytes());
        out.extend_from_slice(&self.relative.to_be_bytes());
    }

    fn decode(rest: &mut &[u8]) -> Option<TimeEntry> {
        let timestamp = i64::from_be_bytes(take(rest)?);
        Some(TimeEntry { timestamp, relative: u32::from_be_bytes(take(rest)?) })
    }
}

/// A sealed segment's index file: searched with positioned reads, nothing held in memory.
pub struct IndexFile<'a> {
    pub reader: &'a dyn Reader,
}

impl IndexFile<'_> {
    /// Begin of a scan for the batch that holds `relative`.
    pub fn floor(&self, relative: u32) -> Result<u32, StoreError> {
        let found = self.last_where(OFFSET_ENTRY_LEN, |e| be_u32(&e[0..4]) <= relative)?;
        Ok(found.map_or(0, |e| be_u32(&e[4..8])))
    }

    pub fn floor_position(&self, position: u32) -> Result<u32, StoreError> {
        let found = self.last_where(OFFSET_ENTRY_LEN, |e| be_u32(&e[4..8]) <= position)?;
        Ok(found.map_or(0, |e| be_u32(&e[4..8])))
    }

    pub fn floor_time(&self, timestamp: i64) -> Result<u32, StoreError> {
        let found = self.last_where(TIME_ENTRY_LEN, |e| be_i64(&e[0..8]) < timestamp)?;
        Ok(found.map_or(0, |e| be_u32(&e[8..12])))
    }

    /// The last entry of a time index: the segment's largest timestamp.
    pub fn max_timestamp(&self) -> Result<TimestampMs, StoreError> {
        let entries = self.reader.len() / TIME_ENTRY_LEN as u64;
        if entries == 0 {
            return Ok(TimestampMs::NONE);
        }
        let at = (entries - 1) * TIME_ENTRY_LEN as u64;
        Ok(TimestampMs(be_i64(&self.reader.read_at(at, 8)?)))
    }

    fn last_where(
        &self,
        width: usize,
        before: impl Fn(&[u8]) -> bool,
    ) -> Result<Option<bytes::Bytes>, StoreError> {
        let (mut low, mut high) = (0, self.reader.len() / width as u64);
        let mut found = None;
        while low < high {
            let middle = low + (high - low) / 2;
            let entry = self.reader.read_at(middle * width as u64, width)?;
            if before(&entry) {
                found = Some(entry);
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(found)
    }
}

/// Relative offset of `offset` in the segment that begins at `base`; segments are cut so that it fits.
pub fn relative(base: Offset, offset: Offset) -> u32 {
    (offset.0 - base.0).clamp(0, i64::from(i32::MAX)) as u32
}

fn be_u32(b: &[u8]) -> u32 {
    b.iter().take(4).fold(0, |n, b| n << 8 | u32::from(*b))
}

fn be_i64(b: &[u8]) -> i64 {
    b.iter().take(8).fold(0, |n, b| n << 8 | i64::from(*b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_floor_is_never_behind_the_batch_that_holds_the_offset() {
        let mut index = LiveIndex::default();
        // Batches of 10 records and 100 bytes.
        for i in 0..50u32 {
            index.note(i * 10 + 9, i * 100, 100, TimestampMs(i64::from(i)), 150);
        }
        for offset in 0..500u32 {
            let start = index.floor(offset);
            assert!(start <= offset / 10 * 100, "offset {offset} starts at {start}");
            assert!(offset / 10 * 100 - start <= 400, "offset {offset} starts at {start}");
        }
        assert!(index.floor_time(20) <= 209);
        assert_eq!(index.max_timestamp(), TimestampMs(49));
    }

    #[test]
    fn what_is_saved_goes_on_as_the_whole_would_and_finds_the_same_batches() {
        let (interval, stamp) = (150, |i: u32| TimestampMs(i64::from(i)));
        let mut whole = LiveIndex::default();
        (0..500_u32).for_each(|i| whole.note(i * 10 + 9, i * 100, 100, stamp(i), interval));
        let mut bytes = Vec::new();
        whole.save(u32::MAX, &mut bytes);
        let mut same = LiveIndex::load(&mut &bytes[..]).unwrap();
        assert_eq!(same, whole);
        bytes.clear();
        whole.save(20, &mut bytes);
        let mut thin = LiveIndex::load(&mut &bytes[..]).unwrap();
        assert!((10..=21).contains(&thin.offsets.len()) && (10..=21).contains(&thin.times.len()));
        for index in [&mut whole, &mut same, &mut thin] {
            (500..600_u32).for_each(|i| index.note(i * 10 + 9, i * 100, 100, stamp(i), interval));
            index.finish();
        }
        assert_eq!(same, whole);
        assert_eq!(thin.max_timestamp(), whole.max_timestamp());
        for offset in 0..6_000 {
            assert!(thin.floor(offset) <= whole.floor(offset), "offset {offset}");
            assert!(thin.floor_time(i64::from(offset / 10)) <= whole.floor_time(i64::from(offset / 10)));
        }
        assert_eq!(thin.floor(5_500), whole.floor(5_500), "what came later has its entries");
    }

    #[test]
    fn markers_without_a_timestamp_stay_out_of_the_time_index() {
        let mut index = LiveIndex::default();
        for i in 0..10u32 {
            index.note(i, i * 100, 100, TimestampMs::NONE, 50);
        }
        let (offsets, times) = index.encode();
        assert!(!offsets.is_empty());
        assert!(times.is_empty());
    }
}
