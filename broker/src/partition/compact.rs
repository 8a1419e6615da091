//! Compaction of a partition whose topic keeps the last record of each key (`log::compact`).
//!
//! Works beside appends and reads: only segments that are sealed and durable are rewritten, and the
//! lock is held for the swap alone. Segments that end up empty join the one before them.

use std::sync::Arc;

use kafka::{Offset, TimestampMs};

use super::{Condition, Partition};
use crate::log::SealedSegment;
use crate::log::compact::{CompactError, LastOffsets, Remainder, sweep};
use crate::log::recovery::delete_segment;

/// What a pass did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compacted {
    pub segments_before: usize,
    pub segments_after: usize,
    pub bytes_before: u64,
    pub bytes_after: u64,
}

impl Partition {
    /// One pass over the sealed segments, if any was sealed since the last. Tombstones older than
    /// `tombstones_before` go with what they deleted. Blocks for the disk; one pass at a time.
    pub fn compact(&self, tombstones_before: TimestampMs) -> Result<Compacted, CompactError> {
        let segments = self.finished_segments();
        let mut done = Compacted::default();
        if segments.iter().all(|s| s.generation > 0) {
            return Ok(done);
        }
        let store = &*self.store;
        sweep(store, &self.dir, &segments)?;
        let mut last = LastOffsets::default();
        let mut judged = 0;
        for segment in &segments {
            if !last.add(store, segment)? {
                break;
            }
            judged += 1;
        }
        let segments = &segments[..judged];
        done.segments_before = segments.len();
        done.bytes_before = segments.iter().map(|s| s.size).sum();
        let interval = self.settings().index_interval_bytes;
        let mut open: Option<(Arc<SealedSegment>, Remainder, Vec<Arc<SealedSegment>>)> = None;
        for segment in segments {
            let rest = last.remainder(store, segment, tombstones_before, interval)?;
            match &mut open {
                Some((_, _, empty)) if rest.bytes.is_empty() => empty.push(segment.clone()),
                _ => {
                    if let Some((old, rest, empty)) = open.replace((segment.clone(), rest, Vec::new())) {
                        done.count(self.replace(&old, rest, &empty)?);
                    }
                }
            }
        }
        if let Some((old, rest, empty)) = open {
            done.count(self.replace(&old, rest, &empty)?);
        }
        Ok(done)
    }

    /// Sealed segments whose roll is finished: nothing about them will change.
    fn finished_segments(&self) -> Vec<Arc<SealedSegment>> {
        let state = self.state.lock();
        if state.condition != Condition::Serving {
            return Vec::new();
        }
        state.finished().to_vec()
    }

    /// Puts the rewritten segment in the place of `old` and the empty ones behind it. Returns its size.
    fn replace(
        &self,
        old: &Arc<SealedSegment>,
        rest: Remainder,
        empty: &[Arc<SealedSegment>],
    ) -> Result<u64, CompactError> {
        // Generation 0 has been looked at and needs no second look, even if all of it stays.
        if !rest.changed && empty.is_empty() && old.generation > 0 {
            return Ok(old.size);
        }
        let next = empty.last().map_or(old.next, |s| s.next);
        let new = rest.write(&*self.store, &self.dir, old, next)?;
        let size = new.size;
        {
            let mut state = self.state.lock();
            let gone: Vec<Offset> = empty.iter().map(|s| s.base).collect();
            state.sealed.retain(|s| !gone.contains(&s.base));
            match state.sealed.iter_mut().find(|s| s.base == old.base) {
                Some(place) => *place = new,
                // Retention was faster.
                None => return Ok(0),
            }
            state.hints.clear();
        }
        for segment in empty {
            delete_segment(&*self.store, &self.dir, segment.base)?;
        }
        Ok(size)
    }
}

impl Compacted {
    fn count(&mut self, bytes: u64) {
        self.segments_after += 1;
        self.bytes_after += bytes;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use broker_store::segment::Memory;
    use broker_store::{Faults, Flaky, SegmentStore};
    use kafka::batch::Codec;
    use kafka::{Batch, BatchBuilder, LeaderEpoch, PartitionIndex, Records, TopicId, TopicName};
    use lane_core::Extractors;

    use super::*;
    use crate::log::OpenFiles;
    use crate::partition::{Append, Durability, Flusher, OpenPartition, ReadUpTo, Settings};

    fn open(store: Arc<dyn SegmentStore>, flusher: &Arc<Flusher>, epoch: i32) -> Arc<Partition> {
        let open = OpenPartition {
            topic: TopicName::parse("t").unwrap(),
            topic_id: TopicId(uuid::Uuid::from_u128(1)),
            index: PartitionIndex(0),
            epoch: LeaderEpoch(epoch),
            store,
            durability: Durability::Sync,
            flusher: flusher.clone(),
            settings: Settings { segment_bytes: 1024, retention_ms: None, ..Settings::default() },
            now: TimestampMs(1),
            open_files: OpenFiles::new(64),
            must_exist: false,
        };
        open.open().unwrap()
    }

    /// Twelve keys again and again, one seldom, one deleted; each batch of three records.
    fn fill(partition: &Partition) {
        for round in 0..120i64 {
            let mut builder = BatchBuilder::new(Offset::ZERO, TimestampMs(round), Codec::None);
            for n in 0..3 {
                let key = match (round, n) {
                    (0, 0) => "seldom".to_owned(),
                    (40, 0) | (45, 0) => "deleted".to_owned(),
                    _ => format!("key{}", (round * 3 + i64::from(n)) % 12),
                };
                let value = format!("value of round {round}, number {n}");
                let value = Some(value.as_bytes()).filter(|_| (round, n) != (45, 0));
                builder.push(n, 0, Some(key.as_bytes()), value, &[]);
            }
            let judged_by = Arc::new(Extractors::none());
            let batch = builder.build();
            let append =
                Append { batch: &batch, lanes: None, judged_by, now: TimestampMs(round), urgent: true };
            partition.append(append).unwrap();
            partition.flush();
        }
    }

    type Row = (Offset, Option<Vec<u8>>);

    /// The last record of each key, and how many records there are.
    fn last_records(partition: &Partition) -> (BTreeMap<Vec<u8>, Row>, usize) {
        let (mut last, mut count) = (BTreeMap::new(), 0);
        let mut next = partition.watermarks().log_start;
        while next < partition.watermarks().high_watermark {
            let read = partition.read(next, 1 << 20, true, ReadUpTo::HighWatermark).unwrap();
            if let Some(slice) = read.slice {
                for batch in Batch::split_all(slice.bytes().unwrap(), true).unwrap() {
                    let section = batch.records();
                    for record in Records::new(&section, batch.header.record_count).map(Result::unwrap) {
                        let offset = batch.header.base_offset.plus(i64::from(record.offset_delta));
                        let key = record.key.unwrap().to_vec();
                        let before = last.insert(key, (offset, record.value.map(<[u8]>::to_vec)));
                        assert!(before.is_none_or(|(before, _): Row| before < offset), "offsets rise");
                        count += 1;
                    }
                }
            }
            assert!(read.next > next, "reading goes on");
            next = read.next;
        }
        (last, count)
    }

    #[test]
    fn a_pass_that_dies_at_any_step_loses_no_last_record() {
        let flusher = Flusher::start(1, Duration::from_secs(3600), 1 << 30).unwrap();
        for dies_after in 0.. {
            let store = Flaky::new(Arc::new(Memory::new()), dies_after, Faults::default());
            let partition = open(Arc::new(store.clone()), &flusher, 0);
            fill(&partition);
            let (right, records) = last_records(&partition);
            store.die_after(dies_after);
            let done = partition.compact(TimestampMs(0));
            drop(partition);

            store.heal();
            let partition = open(Arc::new(store), &flusher, 1);
            assert_eq!(last_records(&partition).0, right, "died after {dies_after} changes");
            let again = partition.compact(TimestampMs(0)).unwrap();
            let (kept, left) = last_records(&partition);
            assert_eq!(kept, right, "died after {dies_after} changes");
            if done.is_ok() {
                assert_eq!(again, Compacted::default(), "nothing was sealed since");
                assert!(left < records / 4, "{left} of {records} records are left");
                let counts = partition.finished_segments().len();
                assert!(counts <= 4, "{counts} segments are left");
                break;
            }
        }
        flusher.stop();
    }

    #[test]
    fn old_tombstones_go_with_what_they_deleted_and_offsets_stay() {
        let flusher = Flusher::start(1, Duration::from_secs(3600), 1 << 30).unwrap();
        let partition = open(Arc::new(Memory::new()), &flusher, 0);
        fill(&partition);
        let (mut right, _) = last_records(&partition);
        partition.compact(TimestampMs(100)).unwrap();
        assert_eq!(right.remove(&b"deleted"[..]), Some((Offset(135), None)));
        let (kept, _) = last_records(&partition);
        assert_eq!(kept, right);
        // A reader in a gap goes on with the next record that is there.
        let read = partition.read(Offset(1), 1 << 20, true, ReadUpTo::HighWatermark).unwrap();
        assert!(read.next > Offset(1));
        flusher.stop();
    }
}
