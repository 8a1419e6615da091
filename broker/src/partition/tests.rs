//! The partition over real stores: what survives a restart, a crash, a torn tail, a failed sync.

use std::io::IoSlice;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use broker_store::{Faults, Flaky, Memory, SegmentStore, StorePath};
use kafka::batch::Codec;
use kafka::control::Marker;
use kafka::record::BatchBuilder;
use kafka::{
    Batch, LeaderEpoch, Offset, PartitionIndex, ProducerEpoch, ProducerId, RegionId, TimestampMs, TopicId,
    TopicName,
};
use lane_core::Extractors;
use uuid::Uuid;

use super::*;
use crate::log::recovery::RecoverError;

const NOW: TimestampMs = TimestampMs(1_000_000);

/// One for all: its threads never end.
fn flusher() -> Arc<Flusher> {
    static FLUSHER: LazyLock<Arc<Flusher>> =
        LazyLock::new(|| Flusher::start(2, Duration::from_millis(1), 1 << 30).unwrap());
    FLUSHER.clone()
}

struct Fixture {
    store: Arc<dyn SegmentStore>,
    settings: Settings,
    durability: Durability,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture::on(Arc::new(Memory::new()))
    }

    fn on(store: Arc<dyn SegmentStore>) -> Fixture {
        let settings = Settings { segment_bytes: 4096, index_interval_bytes: 256, ..Settings::default() };
        Fixture { store, settings, durability: Durability::Sync }
    }

    fn try_open(&self, epoch: i32) -> Result<Arc<Partition>, RecoverError> {
        let open = OpenPartition {
            topic: TopicName::parse("t").unwrap(),
            topic_id: TopicId(Uuid::from_u128(7)),
            index: PartitionIndex(0),
            epoch: LeaderEpoch(epoch),
            store: self.store.clone(),
            durability: self.durability,
            flusher: flusher(),
            settings: self.settings.clone(),
            now: NOW,
            open_files: OpenFiles::new(64),
            must_exist: false,
        };
        open.open()
    }

    fn open(&self, epoch: i32) -> Arc<Partition> {
        self.try_open(epoch).unwrap()
    }

    fn file(&self, name: &str) -> StorePath {
        open::directory(TopicId(Uuid::from_u128(7)), &TopicName::parse("t").unwrap(), PartitionIndex(0))
            .join(name)
            .unwrap()
    }

    /// Adds bytes to the end of a file, as a crash might.
    fn scribble(&self, name: &str, bytes: &[u8]) {
        let path = self.file(name);
        let len = self.store.open(&path).unwrap().len();
        let writer = self.store.resume(&path, len).unwrap();
        writer.append(&[IoSlice::new(bytes)]).unwrap();
        writer.sync().unwrap();
    }

    fn cut(&self, name: &str, bytes: u64) {
        let path = self.file(name);
        let len = self.store.open(&path).unwrap().len();
        self.store.resume(&path, len - bytes).unwrap().sync().unwrap();
    }

    fn first_log(&self) -> String {
        let dir = self.file("x").parent().unwrap();
        let names = self.store.list(&dir).unwrap().into_iter().map(|e| e.name);
        names.filter(|n| n.ends_with(".log")).min().unwrap()
    }

    fn last_log(&self) -> String {
        let dir = self.file("x").parent().unwrap();
        let names = self.store.list(&dir).unwrap().into_iter().map(|e| e.name);
        names.filter(|n| n.ends_with(".log")).max().unwrap()
    }
}

fn batch(values: &[&str]) -> Batch {
    let mut builder = BatchBuilder::new(Offset::ZERO, TimestampMs(1000), Codec::None);
    for (i, value) in values.iter().enumerate() {
        builder.push(i as i32, i as i64, None, Some(value.as_bytes()), &[]);
    }
    builder.build()
}

fn idempotent(sequence: i32, value: &str) -> Batch {
    let mut builder = BatchBuilder::new(Offset::ZERO, TimestampMs(1000), Codec::None);
    builder.push(0, 0, None, Some(value.as_bytes()), &[]);
    builder.producer(ProducerId(5), ProducerEpoch(0), sequence);
    builder.build()
}

fn append(partition: &Partition, batch: &Batch) -> Appended {
    try_append(partition, batch).unwrap()
}

fn try_append(partition: &Partition, batch: &Batch) -> Result<Appended, AppendError> {
    let judged_by = Arc::new(Extractors::none());
    partition.append(Append { batch, lanes: None, judged_by, now: NOW, urgent: false })
}

/// All records that readers see, by offset.
fn read_all(partition: &Partition) -> Vec<(i64, String)> {
    let mut records = Vec::new();
    let mut next = partition.watermarks().log_start;
    loop {
        let outcome = partition.read(next, 500, true, ReadUpTo::HighWatermark).unwrap();
        let Some(slice) = outcome.slice else { return records };
        for batch in Batch::split_all(slice.bytes().unwrap(), true).unwrap() {
            if batch.header.is_control() {
                continue;
            }
            let section = kafka::record::unpack(&batch).unwrap();
            for record in kafka::record::Records::new(&section, batch.header.record_count) {
                let record = record.unwrap();
                let offset = batch.header.base_offset.0 + i64::from(record.offset_delta);
                let value = String::from_utf8(record.value.unwrap().to_vec()).unwrap();
                records.push((offset, value));
            }
        }
        assert!(outcome.next > next, "a read moves on");
        next = outcome.next;
    }
}

fn numbered(count: i64) -> Vec<(i64, String)> {
    (0..count).map(|i| (i, format!("record {i}"))).collect()
}

fn fill(partition: &Partition, range: std::ops::Range<i64>) {
    for i in range {
        let appended = append(partition, &batch(&[&format!("record {i}")]));
        assert_eq!(appended.base_offset, Offset(i));
    }
    partition.flush();
}

#[test]
fn what_was_appended_is_read_over_many_segments_and_after_a_restart() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    fill(&partition, 0..300);
    assert_eq!(read_all(&partition), numbered(300));
    partition.release();
    let again = fixture.open(1);
    assert_eq!(read_all(&again), numbered(300));
    fill(&again, 300..301);
    assert_eq!(read_all(&again), numbered(301));
    assert_eq!(again.with_fold(|f| f.epochs.at(Offset(300))), Some(LeaderEpoch(1)));
}

#[test]
fn every_offset_can_be_asked_for_with_any_byte_limit() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    for i in 0..60 {
        append(&partition, &batch(&[&format!("{i} a"), &format!("{i} b"), &format!("{i} c")]));
    }
    partition.flush();
    for from in 0..180 {
        for limit in [1, 100, 1000, 100_000] {
            let outcome = partition.read(Offset(from), limit, true, ReadUpTo::HighWatermark).unwrap();
            let bytes = outcome.slice.unwrap().bytes().unwrap();
            let batches = Batch::split_all(bytes.clone(), true).unwrap();
            assert_eq!(batches[0].header.base_offset, Offset(from / 3 * 3));
            assert_eq!(batches.last().unwrap().header.next_offset(), outcome.next);
            assert!(batches.len() == 1 || bytes.len() <= limit);
        }
    }
    let end = partition.read(Offset(180), 100, true, ReadUpTo::HighWatermark).unwrap();
    assert!(end.slice.is_none());
    assert!(matches!(
        partition.read(Offset(181), 100, true, ReadUpTo::HighWatermark),
        Err(ReadError::OutOfRange { .. })
    ));
}

#[test]
fn readers_see_nothing_that_is_not_durable() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    partition.state.lock().queued = Queued::Now; // keeps the flusher away
    append(&partition, &batch(&["a"]));
    assert_eq!(partition.watermarks().high_watermark, Offset(0));
    assert_eq!(partition.watermarks().log_end, Offset(1));
    assert_eq!(read_all(&partition), []);
    partition.flush();
    assert_eq!(read_all(&partition), [(0, "a".into())]);
}

#[test]
fn a_read_of_what_is_synced_has_the_rest_synced_where_acknowledging_needs_no_sync() {
    let fixture = Fixture { durability: Durability::Os, ..Fixture::new() };
    let partition = fixture.open(0);
    append(&partition, &batch(&["a"]));
    assert_eq!(partition.origin_read(Offset(0), 1000, 1000).unwrap().end, Offset(0));
    wait_until("the record is synced", || {
        partition.origin_read(Offset(0), 1000, 1000).unwrap().batches.len() == 1
    });
}

#[test]
fn a_torn_tail_is_cut_and_nothing_else_is() {
    // Case: linkedin/kafka#409, basho/riak_kv#1120 (C16).
    type Damage = fn(&Fixture);
    let kinds: [(&str, Damage, i64); 5] = [
        ("random bytes", |f| f.scribble(&f.last_log(), &[0x5a; 37]), 100),
        ("zeros", |f| f.scribble(&f.last_log(), &[0; 4096]), 100),
        ("cut", |f| f.cut(&f.last_log(), 5), 99),
        ("half a batch again", |f| f.scribble(&f.last_log(), &batch(&["x"]).bytes[..40]), 100),
        ("a whole batch at a wrong offset", |f| f.scribble(&f.last_log(), &batch(&["x"]).bytes), 100),
    ];
    for (kind, damage, left) in kinds {
        let fixture = Fixture::new();
        let partition = fixture.open(0);
        fill(&partition, 0..100);
        partition.close();
        damage(&fixture);
        let again = fixture.open(1);
        assert_eq!(read_all(&again), numbered(left), "{kind}");
        fill(&again, left..left + 1);
        again.close();
        assert_eq!(read_all(&fixture.open(2)), numbered(left + 1), "{kind}");
    }
}

#[test]
fn missing_indexes_are_rebuilt_and_are_what_they_were() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    fill(&partition, 0..200);
    partition.close();
    let dir = fixture.file("x").parent().unwrap();
    let mut before = Vec::new();
    for entry in fixture.store.list(&dir).unwrap() {
        if entry.name.ends_with("index") || entry.name.ends_with("batches") {
            let path = dir.join(&entry.name).unwrap();
            let reader = fixture.store.open(&path).unwrap();
            before.push((path.clone(), reader.read_at(0, reader.len() as usize).unwrap()));
            fixture.store.delete(&path).unwrap();
        }
    }
    assert!(before.len() >= 6, "{} index files", before.len());
    let again = fixture.open(1);
    for (path, bytes) in before {
        let reader = fixture.store.open(&path).unwrap();
        assert_eq!(reader.read_at(0, reader.len() as usize).unwrap(), bytes, "{path}");
    }
    assert_eq!(read_all(&again), numbered(200));
}

/// With a checkpoint after so many bytes.
fn often(after: u64) -> Settings {
    let checkpoints = Some(Checkpoints { after, at_close: 100, bytes_per_byte: 1 });
    Settings { checkpoints, ..Fixture::new().settings }
}

/// An empty partition with large segments and a checkpoint now and then, filled; its records up to the
/// first checkpoint are no batches any more.
fn damaged_below_its_checkpoint() -> Fixture {
    let mut fixture = Fixture::new();
    fixture.settings = Settings { segment_bytes: 1 << 20, ..often(2_000) };
    let partition = fixture.open(0);
    for i in 0..100 {
        fill(&partition, i..i + 1);
    }
    partition.close();
    let path = fixture.file(&fixture.last_log());
    let reader = fixture.store.open(&path).unwrap();
    let mut bytes = reader.read_at(0, reader.len() as usize).unwrap().to_vec();
    bytes[..2_000].fill(0x5a);
    fixture.store.delete(&path).unwrap();
    let writer = fixture.store.create(&path).unwrap();
    writer.append(&[IoSlice::new(&bytes)]).unwrap();
    writer.sync().unwrap();
    fixture
}

#[test]
fn an_opening_reads_only_what_follows_the_checkpoint() {
    let fixture = damaged_below_its_checkpoint();
    let again = fixture.open(1);
    assert_eq!(again.watermarks().high_watermark, Offset(100));
    let outcome = again.read(Offset(99), 500, true, ReadUpTo::HighWatermark).unwrap();
    assert_eq!(outcome.next, Offset(100));
    fill(&again, 100..101);
    again.release();
    // One that is damaged counts for nothing, and everything is read; nor does one of a file that is too short.
    let fixture = damaged_below_its_checkpoint();
    let checkpoint = fixture.last_log().replace(".log", ".checkpoint");
    fixture.scribble(&checkpoint, b"x");
    assert_eq!(fixture.open(1).watermarks().log_end, Offset(0), "what is read is damaged");
    let fixture = damaged_below_its_checkpoint();
    fixture.cut(&fixture.last_log(), 5_000);
    let error = fixture.try_open(1).err().unwrap();
    assert!(matches!(&error, RecoverError::Faulted(reason) if reason.contains("were durable")), "{error}");
}

#[test]
fn a_checkpoint_of_other_bytes_is_ignored() {
    let kept = |values: &str| {
        let mut fixture = Fixture::new();
        fixture.settings = Settings { segment_bytes: 1 << 20, ..often(500) };
        let partition = fixture.open(0);
        for _ in 0..50 {
            append(&partition, &batch(&[values]));
        }
        partition.release();
        fixture
    };
    // Somebody has put an older file back.
    let (one, other) = (kept("short"), kept("longer than that"));
    let name = one.last_log().replace(".log", ".checkpoint");
    let checkpoint = one.store.open(&one.file(&name)).unwrap();
    let bytes = checkpoint.read_at(0, checkpoint.len() as usize).unwrap();
    other.store.put(&other.file(&name), &bytes).unwrap();
    let again = other.open(1);
    assert_eq!(read_all(&again).len(), 50);
    assert_eq!(again.watermarks().log_end, Offset(50));
    again.close();
    assert!(other.store.open(&other.file(&name)).is_err(), "nobody takes it for one of these bytes later");
    // But what it was of was durable, so less than that is no torn tail.
    other.store.put(&other.file(&name), &bytes).unwrap();
    other.cut(&other.last_log(), 5);
    let error = other.try_open(2).err().unwrap();
    assert!(matches!(&error, RecoverError::Faulted(reason) if reason.contains("were durable")), "{error}");
}

#[test]
fn a_close_leaves_little_to_read_and_an_opening_goes_on_from_there() {
    let mut fixture = Fixture::new();
    fixture.settings = Settings { segment_bytes: 1 << 20, ..often(u64::MAX) };
    let partition = fixture.open(0);
    for i in 0..100 {
        append(&partition, &idempotent(i, "x"));
    }
    partition.release();
    let again = fixture.open(1);
    let position = |partition: &Partition| partition.state.lock().active.checkpointed.position;
    assert_eq!(position(&again), again.size_bytes(), "nothing is left to read");
    let repeat = append(&again, &idempotent(99, "x"));
    assert!(repeat.duplicate && repeat.base_offset == Offset(99));
    append(&again, &idempotent(100, "x"));
    again.close();
    let once_more = fixture.open(2);
    assert!(position(&once_more) < once_more.size_bytes(), "what was appended since is read");
    assert_eq!(once_more.watermarks().high_watermark, Offset(101));
}

#[test]
fn a_segment_takes_its_checkpoint_along() {
    let mut fixture = Fixture::new();
    fixture.settings = often(500);
    let partition = fixture.open(0);
    let checkpoints = || -> Vec<String> {
        let dir = fixture.file("x").parent().unwrap();
        let names = fixture.store.list(&dir).unwrap().into_iter().map(|entry| entry.name);
        names.filter(|name| name.ends_with(".checkpoint")).collect()
    };
    for i in 0..300 {
        fill(&partition, i..i + 1);
    }
    assert!(partition.state.lock().sealed.len() > 3);
    assert_eq!(checkpoints(), [fixture.last_log().replace(".log", ".checkpoint")]);
    partition.release();
    assert_eq!(read_all(&fixture.open(1)), numbered(300));
}

#[test]
fn a_corrupt_snapshot_under_live_data_faults_the_partition() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    fill(&partition, 0..200);
    partition.close();
    let state = fixture.last_log().replace(".log", ".state");
    fixture.store.put(&fixture.file(&state), b"garbage").unwrap();
    let error = fixture.try_open(1).err().unwrap();
    assert!(matches!(&error, RecoverError::Faulted(reason) if reason.contains(&state)), "{error}");
}

#[test]
fn a_log_that_lost_what_was_durable_is_faulted_and_left_alone() {
    type Damage = fn(&Fixture);
    let kinds: [(&str, Damage); 4] = [
        ("cut", |f| f.cut(&f.last_log(), 5)),
        ("the last file is gone", |f| f.store.delete(&f.file(&f.last_log())).unwrap()),
        ("a sealed file is cut", |f| f.cut(&f.first_log(), 5)),
        ("all files are gone", |f| {
            for entry in f.store.list(&f.file("x").parent().unwrap()).unwrap() {
                if entry.name != "durable" {
                    f.store.delete(&f.file(&entry.name)).unwrap();
                }
            }
        }),
    ];
    for (kind, damage) in kinds {
        let fixture = Fixture::new();
        let partition = fixture.open(0);
        fill(&partition, 0..100);
        partition.release();
        damage(&fixture);
        for epoch in 1..3 {
            let error = fixture.try_open(epoch).err().unwrap_or_else(|| panic!("{kind}: it opens"));
            assert!(matches!(&error, RecoverError::Faulted(_)), "{kind}: {error}");
        }
    }
}

#[test]
fn a_repeat_is_known_after_a_restart() {
    // Case: redpanda-data/redpanda#3039, #3038 (C11).
    let fixture = Fixture::new();
    let mut partition = fixture.open(0);
    for i in 0..6 {
        append(&partition, &idempotent(i, "x"));
    }
    for epoch in 1..3 {
        partition.flush();
        for sequence in 1..6 {
            let repeat = append(&partition, &idempotent(sequence, "x"));
            assert!(repeat.duplicate);
            assert_eq!(repeat.base_offset, Offset(i64::from(sequence)));
        }
        let gap = try_append(&partition, &idempotent(9, "x"));
        assert_eq!(gap, Err(AppendError::Refused(kafka::ErrorCode::OutOfOrderSequenceNumber)));
        assert_eq!(partition.watermarks().log_end, Offset(6));
        partition.close();
        partition = fixture.open(epoch);
    }
}

#[test]
fn retention_removes_old_segments_and_a_restart_keeps_the_log_start() {
    let mut fixture = Fixture::new();
    fixture.settings.retention_bytes = Some(5000);
    fixture.settings.retention_ms = None;
    let partition = fixture.open(0);
    for i in 0..6 {
        append(&partition, &idempotent(i, "before the cut"));
    }
    for i in 6..300 {
        append(&partition, &batch(&[&format!("record {i}")]));
    }
    partition.flush();
    assert!(partition.enforce_retention(NOW).unwrap() > 0);
    let start = partition.watermarks().log_start;
    assert!(start > Offset(6));
    assert!(partition.size_bytes() < 5000 + 2 * 4096);
    assert!(matches!(
        partition.read(Offset(0), 10, true, ReadUpTo::HighWatermark),
        Err(ReadError::OutOfRange { log_start, .. }) if log_start == start
    ));
    partition.close();
    let again = fixture.open(1);
    assert_eq!(again.watermarks().log_start, start);
    // The producer's batches are gone from the log, its state is not.
    assert!(append(&again, &idempotent(5, "before the cut")).duplicate);
}

#[test]
fn deleted_records_stay_deleted() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    fill(&partition, 0..100);
    for to in [3, 50, 77] {
        assert_eq!(partition.delete_records(Offset(to)), Ok(Offset(to)));
        assert_eq!(partition.watermarks().log_start, Offset(to));
    }
    assert_eq!(partition.delete_records(Offset(5)), Ok(Offset(77)));
    assert!(matches!(partition.delete_records(Offset(101)), Err(ReadError::OutOfRange { .. })));
    partition.close();
    let again = fixture.open(1);
    assert_eq!(again.watermarks().log_start, Offset(77));
    assert_eq!(again.delete_records(Offset(100)), Ok(Offset(100)));
    assert_eq!(read_all(&again), []);
}

#[test]
fn a_lookup_by_time_looks_at_records_not_at_batches() {
    // Case: redpanda-data/redpanda#4308 (C06).
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    let mut builder = BatchBuilder::new(Offset::ZERO, TimestampMs(1000), Codec::None);
    for (i, stamp) in [1000, 3000, 2000].into_iter().enumerate() {
        builder.push(i as i32, stamp - 1000, None, Some(b"v"), &[]);
    }
    append(&partition, &builder.build());
    partition.flush();
    let find =
        |at| partition.find_time(TimestampMs(at), |_, _| true).unwrap().map(|f| (f.offset.0, f.timestamp.0));
    assert_eq!(find(0), Some((0, 1000)));
    assert_eq!(find(1500), Some((1, 3000)));
    assert_eq!(find(2500), Some((1, 3000)));
    assert_eq!(find(3000), Some((1, 3000)));
    assert_eq!(find(3001), None);
    let largest = partition.find_max_time(|_, _| true).unwrap().unwrap();
    assert_eq!((largest.offset, largest.timestamp), (Offset(1), TimestampMs(3000)));
}

fn unit(first: i64, batches: &[(i64, &str)]) -> MirrorUnit {
    let batches =
        batches.iter().map(|(offset, value)| batch(&[value]).restamped(Offset(*offset), LeaderEpoch(4)));
    MirrorUnit {
        origin: RegionId(Uuid::from_u128(1)),
        incarnation: TopicId(Uuid::from_u128(2)),
        first: Offset(first),
        batches: batches.collect(),
        last_rewritten: false,
        extractors: None,
    }
}

#[test]
fn a_unit_is_applied_once_whatever_is_sent_again() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    append(&partition, &batch(&["local"]));
    let apply = |p: &Partition, u: &MirrorUnit| p.append_unit(u, NOW).unwrap();
    let first = unit(0, &[(0, "a"), (3, "b")]);
    assert_eq!(apply(&partition, &first), UnitOutcome::Applied { next: Offset(4), local_next: Offset(4) });
    assert_eq!(apply(&partition, &first), UnitOutcome::Duplicate { next: Offset(4) });
    assert_eq!(apply(&partition, &unit(6, &[(6, "d")])), UnitOutcome::Gap { next: Offset(4) });
    assert_eq!(apply(&partition, &unit(2, &[(3, "b"), (5, "c")])), UnitOutcome::Overlap { next: Offset(4) });
    assert_eq!(
        apply(&partition, &unit(4, &[(5, "c")])),
        UnitOutcome::Applied { next: Offset(6), local_next: Offset(6) }
    );
    partition.flush();
    let expected: Vec<(i64, String)> =
        [(0, "local"), (2, "a"), (3, "b"), (5, "c")].map(|(o, v)| (o, v.to_owned())).into();
    assert_eq!(read_all(&partition), expected);
    partition.close();
    let again = fixture.open(1);
    assert_eq!(apply(&again, &first), UnitOutcome::Duplicate { next: Offset(6) });
    assert_eq!(read_all(&again), expected);
    // What came from elsewhere does not go back: only the local record is of this origin.
    let own = again.origin_read(Offset(0), 1 << 20, 1 << 20).unwrap();
    assert_eq!(own.batches.iter().map(|b| b.header.base_offset.0).collect::<Vec<_>>(), [0]);
    assert_eq!(own.next, Offset(6));
}

#[test]
fn an_incomplete_unit_is_cut_at_its_marker() {
    let bytes_of_last_batch = batch(&["b"]).bytes.len() as u64;
    for cut in [1, bytes_of_last_batch, bytes_of_last_batch + 1] {
        let fixture = Fixture::new();
        let partition = fixture.open(0);
        append(&partition, &batch(&["local"]));
        partition.append_unit(&unit(0, &[(0, "a"), (1, "b")]), NOW).unwrap();
        partition.flush();
        partition.close();
        fixture.cut(&fixture.last_log(), cut);
        let again = fixture.open(1);
        assert_eq!(again.watermarks().log_end, Offset(1), "cut {cut}");
        let outcome = again.append_unit(&unit(0, &[(0, "a"), (1, "b")]), NOW).unwrap();
        assert!(matches!(outcome, UnitOutcome::Applied { .. }), "cut {cut}");
    }
}

#[test]
fn the_vector_survives_retention_that_took_every_marker() {
    let mut fixture = Fixture::new();
    fixture.settings.retention_ms = Some(1);
    let partition = fixture.open(0);
    partition.append_unit(&unit(0, &[(0, "a")]), NOW).unwrap();
    fill(&partition, 2..200);
    partition.enforce_retention(TimestampMs(NOW.0 + 10_000)).unwrap();
    assert_eq!(partition.watermarks().log_start, Offset(200));
    partition.close();
    let again = fixture.open(1);
    assert_eq!(
        again.append_unit(&unit(0, &[(0, "a")]), NOW).unwrap(),
        UnitOutcome::Duplicate { next: Offset(1) }
    );
}

#[test]
fn a_marker_is_compared_and_appended_in_one_step() {
    let fixture = Fixture::new();
    let partition = fixture.open(0);
    append(&partition, &batch(&["a"]));
    let marker = Marker::Extractors(vec!["x-lane".into()]);
    let refused = partition.append_marker(&marker, NOW, |_| Err("not now"));
    assert_eq!(refused, Ok(Err("not now")));
    assert_eq!(partition.append_marker(&marker, NOW, |_| Ok::<(), &str>(())), Ok(Ok(Offset(1))));
    // From here on a batch that was judged by the former list is not taken.
    assert_eq!(try_append(&partition, &batch(&["b"])), Err(AppendError::JudgedByOthers));
}

fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !reached() {
        assert!(std::time::Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn after_a_failed_sync_everything_is_written_again_at_the_same_offsets() {
    for (before, after) in [(0, 3), (20, 1), (70, 60)] {
        let store = Arc::new(Flaky::new(Memory::new(), 1, Faults::default()));
        let fixture = Fixture::on(store.clone());
        let partition = fixture.open(0);
        fill(&partition, 0..before);
        partition.state.lock().queued = Queued::Now; // keeps the flusher away
        for i in before..before + after {
            append(&partition, &batch(&[&format!("record {i}")]));
        }
        store.fail_next_sync();
        partition.flush();
        wait_until("the second attempt is durable", || {
            partition.watermarks().high_watermark == Offset(before + after)
        });
        assert_eq!(partition.condition(), Condition::Serving);
        assert_eq!(read_all(&partition), numbered(before + after));
        fill(&partition, before + after..before + after + 100);
        partition.close();
        assert_eq!(read_all(&fixture.open(1)), numbered(before + after + 100), "{before} + {after}");
    }
}

#[test]
fn a_full_disk_refuses_and_recovers_without_a_restart() {
    let store = Arc::new(Flaky::new(Memory::new(), 1, Faults::default()));
    let fixture = Fixture::on(store.clone());
    let partition = fixture.open(0);
    fill(&partition, 0..30);
    store.set_full(true);
    for _ in 0..100 {
        assert_eq!(try_append(&partition, &batch(&["no room"])), Err(AppendError::Full));
    }
    assert_eq!(read_all(&partition), numbered(30));
    store.set_full(false);
    fill(&partition, 30..100);
    partition.close();
    assert_eq!(read_all(&fixture.open(1)), numbered(100));
}

/// Appends, flushes, restarts and crashes at random; returns what was confirmed and what was read.
fn lived_through(seed: u64, durability: Durability) -> (Vec<(i64, String)>, Vec<(i64, String)>) {
    let faults = Faults { is_torn_at_crash: true, ..Faults::default() };
    let store = Arc::new(Flaky::new(Memory::new(), seed, faults));
    let mut fixture = Fixture::on(store.clone());
    fixture.durability = durability;
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut dice = move |sides: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % sides
    };
    let mut confirmed: Vec<(i64, String)> = Vec::new();
    let mut partition = fixture.open(0);
    for step in 0..400 {
        match dice(20) {
            0 => {
                // Confirmed is what readers could see at the crash.
                confirmed = read_all(&partition);
                partition.close();
                store.crash().unwrap();
                partition = fixture.open(step);
            }
            1..4 => partition.flush(),
            4 => {
                let units = partition.with_fold(|f| f.vector.values().next().map_or(0, |p| p.next.0));
                partition.append_unit(&unit(units, &[(units, "mirrored"), (units + 1, "too")]), NOW).unwrap();
            }
            _ => {
                append(&partition, &batch(&[&format!("step {step}"), "second"]));
            }
        }
    }
    partition.flush();
    (confirmed, read_all(&partition))
}

#[test]
fn what_a_reader_saw_is_there_after_any_crash() {
    let mut at_stake = 0;
    for seed in 0..40 {
        let (confirmed, read) = lived_through(seed, Durability::Sync);
        at_stake += confirmed.len();
        assert!(read.starts_with(&confirmed), "seed {seed}");
        let mut offsets = read.iter().map(|(offset, _)| *offset);
        let mut last = -1;
        assert!(offsets.all(|offset| std::mem::replace(&mut last, offset) < offset), "seed {seed}");
    }
    assert!(at_stake > 1000, "{at_stake} records were at stake");
}

#[test]
fn without_sync_a_crash_takes_what_readers_saw() {
    // The twin of the test above: it must be able to fail.
    let lost = (0..40).any(|seed| {
        let (confirmed, read) = lived_through(seed, Durability::Os);
        !read.starts_with(&confirmed)
    });
    assert!(lost);
}
