//! A partition on a store that fails: random work, failing syncs, a full disk, kills and power cuts.
//!
//! Whatever anybody has seen stays at its offset. What was appended and not yet seen may survive or
//! not, but never as something else. In every second case the flusher's threads add their own disorder.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use broker_core::fold::Origin;
use broker_store::{Faults, Flaky, Memory};
use kafka::batch::Codec;
use kafka::record::{BatchBuilder, Records};
use kafka::{
    Batch, LeaderEpoch, Offset, PartitionIndex, ProducerEpoch, ProducerId, RegionId, TimestampMs, TopicId,
    TopicName,
};
use lane_core::Extractors;
use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::log::recovery::RecoverError;

const NOW: TimestampMs = TimestampMs(1_000_000);

/// One for all cases: its interval thread never ends.
static FLUSHER: LazyLock<Arc<Flusher>> =
    LazyLock::new(|| Flusher::start(2, Duration::from_secs(3600), 1 << 30).unwrap());

/// Flushes nothing by itself, so that a case can be repeated by its seed.
static QUIET: LazyLock<Arc<Flusher>> = LazyLock::new(|| {
    let flusher = Flusher::start(1, Duration::from_secs(3600), 1 << 30).unwrap();
    flusher.stop();
    flusher
});

#[derive(Clone, Debug)]
enum Step {
    Append {
        records: u8,
        bytes: usize,
    },
    Repeat,
    /// A unit of the mirror, of so many batches.
    Unit {
        batches: u8,
    },
    Flush,
    DeleteRecords {
        share: u8,
    },
    Retention,
    FailNextSync,
    Full {
        is_full: bool,
    },
    Kill,
    PowerCut,
    /// The process dies in the middle of what it does some changes later.
    DieAfter {
        changes: u8,
    },
    /// It dies while it starts again.
    DieInRecovery {
        changes: u8,
        is_power_cut: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (1..4_u8, 0..300_usize).prop_map(|(records, bytes)| Step::Append { records, bytes }),
        2 => Just(Step::Repeat),
        4 => (1..5_u8).prop_map(|batches| Step::Unit { batches }),
        6 => Just(Step::Flush),
        1 => (0..=100_u8).prop_map(|share| Step::DeleteRecords { share }),
        1 => Just(Step::Retention),
        1 => Just(Step::FailNextSync),
        1 => any::<bool>().prop_map(|is_full| Step::Full { is_full }),
        1 => Just(Step::Kill),
        1 => Just(Step::PowerCut),
        2 => (0..12_u8).prop_map(|changes| Step::DieAfter { changes }),
        1 => (0..8_u8, any::<bool>())
            .prop_map(|(changes, is_power_cut)| Step::DieInRecovery { changes, is_power_cut }),
    ];
    prop::collection::vec(step, 1..80)
}

struct World {
    store: Arc<Flaky<Memory>>,
    flusher: &'static Arc<Flusher>,
    durability: Durability,
    epoch: i32,
    partition: Arc<Partition>,
    /// What was appended at an offset and may still be there: by record offset.
    written: BTreeMap<i64, String>,
    /// Everything below has been seen.
    seen: i64,
    /// Everything below was deleted with an answer.
    deleted: i64,
    next_value: u32,
    next_sequence: i32,
    /// Last offset and last sequence of every batch that may still be there.
    batches: Vec<(i64, i32)>,
    /// Offset of every unit's marker, the offset after it, and what the vector says from then on.
    units: Vec<(i64, i64, Offset)>,
    /// The latest batch that was acknowledged, and its offset.
    last_acknowledged: Option<(Batch, Offset)>,
    unacknowledged: Vec<(Batch, Appended)>,
}

impl World {
    fn new(seed: u64, durability: Durability) -> World {
        let store = Arc::new(Flaky::new(Memory::new(), seed, calm()));
        let flusher = if seed.is_multiple_of(2) { &*QUIET } else { &*FLUSHER };
        let partition = try_open(&store, flusher, 0, durability).unwrap();
        World {
            store,
            flusher,
            durability,
            epoch: 0,
            partition,
            written: BTreeMap::new(),
            seen: 0,
            deleted: 0,
            next_value: 0,
            next_sequence: 0,
            batches: Vec::new(),
            units: Vec::new(),
            last_acknowledged: None,
            unacknowledged: Vec::new(),
        }
    }

    fn run(mut self, steps: &[Step]) -> World {
        for step in steps {
            self.store.set_faults(Faults { sync_error_per_mille: 60, ..calm() });
            self.step(step);
            self.store.set_faults(calm());
            self.look();
            if self.store.is_dead() || matches!(self.partition.condition(), Condition::Faulted(_)) {
                self.restart(self.next_value.is_multiple_of(2));
            }
        }
        self.restart(true);
        self.restart(false);
        self
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Append { records, bytes } => self.append(*records, *bytes),
            Step::Repeat => self.repeat(),
            Step::Unit { batches } => self.append_unit(i64::from(*batches)),
            Step::Flush => self.partition.flush(),
            Step::DeleteRecords { share } => {
                let marks = self.partition.watermarks();
                let (start, end) = (marks.log_start.0, marks.high_watermark.0);
                let to = start + (end - start) * i64::from(*share) / 100;
                if let Ok(log_start) = self.partition.delete_records(Offset(to)) {
                    assert!(log_start.0 >= to);
                    self.deleted = self.deleted.max(to);
                }
            }
            Step::Retention => {
                let _ = self.partition.enforce_retention(NOW);
            }
            Step::FailNextSync => self.store.fail_next_sync(),
            Step::Full { is_full } => self.store.set_full(*is_full),
            Step::Kill => self.restart(false),
            Step::PowerCut => self.restart(true),
            Step::DieAfter { changes } => self.store.die_after(u64::from(*changes)),
            Step::DieInRecovery { changes, is_power_cut } => {
                self.end(*is_power_cut);
                self.store.die_after(u64::from(*changes));
                if let Ok(half_open) = try_open(&self.store, self.flusher, self.epoch, self.durability) {
                    half_open.close();
                    half_open.flush();
                }
                self.begin(*is_power_cut);
            }
        }
    }

    fn append(&mut self, records: u8, bytes: usize) {
        let mut builder = BatchBuilder::new(Offset::ZERO, TimestampMs(1_000), Codec::None);
        let values: Vec<String> =
            (0..records).map(|i| format!("{}/{i}/{}", self.next_value, "x".repeat(bytes))).collect();
        self.next_value += 1;
        for (i, value) in values.iter().enumerate() {
            builder.push(i as i32, 0, None, Some(value.as_bytes()), &[]);
        }
        builder.producer(ProducerId(5), ProducerEpoch(0), self.next_sequence);
        let batch = builder.build();
        let appended = match self.try_append(&batch) {
            Ok(appended) => appended,
            Err(AppendError::Refused(code)) => panic!("a batch in sequence was refused with {code:?}"),
            Err(_) => return,
        };
        assert!(!appended.duplicate);
        for (offset, value) in (appended.base_offset.0..).zip(values) {
            self.written.insert(offset, value);
        }
        self.next_sequence += i32::from(records);
        self.batches.push((appended.last_offset.0, self.next_sequence - 1));
        self.unacknowledged.push((batch, appended));
    }

    /// A mirror asks what is there and sends what follows; and sends it once more.
    fn append_unit(&mut self, count: i64) {
        let first = self.vector();
        let batch = |origin: i64| {
            let mut builder = BatchBuilder::new(Offset(origin), TimestampMs(1_000), Codec::None);
            builder.push(0, 0, None, Some(mirrored(origin).as_bytes()), &[]);
            builder.build()
        };
        let unit = MirrorUnit {
            origin: ORIGIN.region,
            incarnation: ORIGIN.incarnation,
            first,
            batches: (first.0..first.0 + count).map(batch).collect(),
            extractors: None,
            last_rewritten: false,
        };
        let Ok(UnitOutcome::Applied { next, local_next }) = self.partition.append_unit(&unit, NOW) else {
            return;
        };
        let marker = local_next.0 - count - 1;
        self.written.insert(marker, "marker".to_owned());
        for i in 0..count {
            self.written.insert(marker + 1 + i, mirrored(first.0 + i));
        }
        self.units.push((marker, local_next.0, next));
        if let Ok(again) = self.partition.append_unit(&unit, NOW) {
            assert_eq!(again, UnitOutcome::Duplicate { next });
        }
    }

    /// The next offset of the origin.
    fn vector(&self) -> Offset {
        self.partition
            .with_fold(|fold| fold.vector.get(&ORIGIN).map_or(Offset::ZERO, |position| position.next))
    }

    /// A producer that lost the answer sends again: the same offset, and nothing is added.
    fn repeat(&mut self) {
        let Some((batch, base)) = self.last_acknowledged.clone() else { return };
        let end = self.partition.watermarks().log_end;
        if let Ok(again) = self.try_append(&batch) {
            assert!(again.duplicate);
            assert_eq!(again.base_offset, base);
            assert_eq!(self.partition.watermarks().log_end, end);
        }
    }

    fn try_append(&self, batch: &Batch) -> Result<Appended, AppendError> {
        let judged_by = Arc::new(Extractors::none());
        self.partition.append(Append { batch, lanes: None, judged_by, now: NOW, urgent: false })
    }

    /// A consumer reads from the log start to the high watermark.
    fn look(&mut self) {
        if self.partition.condition() != Condition::Serving {
            return;
        }
        let marks = self.partition.watermarks();
        assert!(marks.high_watermark.0 >= self.seen, "{} after {}", marks.high_watermark, self.seen);
        assert!(marks.log_start.0 >= self.deleted, "{} after {}", marks.log_start, self.deleted);
        assert!(marks.log_start <= marks.high_watermark && marks.high_watermark <= marks.log_end);
        let mut expected = marks.log_start.0;
        // The flusher may have found out meanwhile that the store fails.
        let Some(records) = read(&self.partition) else { return };
        for (offset, value) in records {
            // A delete may lie inside of a batch, which is read whole.
            if offset >= marks.log_start.0 {
                assert_eq!(offset, expected, "no offset is missing");
                expected += 1;
            }
            assert_eq!(self.written.get(&offset), Some(&value), "offset {offset}");
        }
        // The flusher may have made more visible while this was reading.
        assert!(expected >= marks.high_watermark.0, "read up to {expected} of {}", marks.high_watermark);
        self.seen = marks.high_watermark.0;
        let acknowledged = self.unacknowledged.iter().rfind(|(_, a)| a.last_offset.0 < self.seen);
        if let Some((batch, appended)) = acknowledged {
            self.last_acknowledged = Some((batch.clone(), appended.base_offset));
        }
        let seen = self.seen;
        self.unacknowledged.retain(|(_, appended)| appended.last_offset.0 >= seen);
    }

    fn restart(&mut self, is_power_cut: bool) {
        self.end(is_power_cut);
        self.begin(false);
    }

    /// The process is gone.
    fn end(&mut self, is_power_cut: bool) {
        self.look();
        self.partition.close();
        // Waits for a flush that is under way: the dead write nothing.
        self.partition.flush();
        self.cut_power_if(is_power_cut);
    }

    fn cut_power_if(&mut self, is_power_cut: bool) {
        self.store.heal();
        self.store.set_faults(calm());
        if is_power_cut {
            self.store.crash().unwrap();
            if self.durability == Durability::Os {
                self.seen = 0;
            }
        }
    }

    /// It starts again, perhaps after another power cut.
    fn begin(&mut self, is_power_cut: bool) {
        self.cut_power_if(is_power_cut);
        self.epoch += 1;
        self.partition = try_open(&self.store, self.flusher, self.epoch, self.durability).unwrap();
        let end = self.partition.watermarks().log_end.0;
        self.written.retain(|offset, _| *offset < end);
        self.look();
        let marks = self.partition.watermarks();
        assert_eq!(marks.high_watermark, marks.log_end, "everything that is left is durable");
        self.forget_lost_batches(end);
    }

    /// The producer goes on with the sequence after the last batch that is there.
    fn forget_lost_batches(&mut self, end: i64) {
        self.unacknowledged.retain(|(_, appended)| appended.last_offset.0 < end);
        self.batches.retain(|(last_offset, _)| *last_offset < end);
        for (marker, after, _) in &self.units {
            assert!(
                end <= *marker || *after <= end,
                "half of the unit at {marker} is there: the log ends at {end}"
            );
        }
        self.units.retain(|(_, after, _)| *after <= end);
        assert_eq!(self.vector(), self.units.last().map_or(Offset::ZERO, |(_, _, next)| *next));
        self.last_acknowledged.take_if(|(_, base)| base.0 >= end);
        self.next_sequence = self.batches.last().map_or(0, |(_, last_sequence)| last_sequence + 1);
    }
}

const ORIGIN: Origin =
    Origin { region: RegionId(Uuid::from_u128(1)), incarnation: TopicId(Uuid::from_u128(2)) };

fn mirrored(origin_offset: i64) -> String {
    format!("mirrored {origin_offset} {}", "y".repeat(100))
}

/// `PARTITION_CRASH_CASES` asks for more.
fn cases() -> u32 {
    std::env::var("PARTITION_CRASH_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(400)
}

fn calm() -> Faults {
    Faults { is_torn_at_crash: true, ..Faults::default() }
}

fn try_open(
    store: &Arc<Flaky<Memory>>,
    flusher: &Arc<Flusher>,
    epoch: i32,
    durability: Durability,
) -> Result<Arc<Partition>, RecoverError> {
    let settings = Settings {
        segment_bytes: 1_500,
        index_interval_bytes: 200,
        checkpoints: Some(Checkpoints { after: 400, at_close: 100, bytes_per_byte: 1 }),
        retention_bytes: Some(4_000),
        ..Settings::default()
    };
    let open = OpenPartition {
        topic: TopicName::parse("t").unwrap(),
        topic_id: TopicId(Uuid::from_u128(7)),
        index: PartitionIndex(0),
        epoch: LeaderEpoch(epoch),
        store: store.clone(),
        durability,
        flusher: flusher.clone(),
        settings,
        now: NOW,
        open_files: OpenFiles::new(64),
        must_exist: false,
    };
    open.open()
}

fn read(partition: &Partition) -> Option<Vec<(i64, String)>> {
    let mut records = Vec::new();
    let mut next = partition.watermarks().log_start;
    loop {
        let outcome = match partition.read(next, 700, true, ReadUpTo::HighWatermark) {
            Ok(outcome) => outcome,
            Err(ReadError::Faulted(_)) => return None,
            Err(error) => panic!("{error}"),
        };
        let Some(slice) = outcome.slice else { return Some(records) };
        for batch in Batch::split_all(slice.bytes().unwrap(), true).unwrap() {
            if batch.header.is_control() {
                records.push((batch.header.base_offset.0, "marker".to_owned()));
                continue;
            }
            let section = kafka::record::unpack(&batch).unwrap();
            for record in Records::new(&section, batch.header.record_count).map(Result::unwrap) {
                let offset = batch.header.base_offset.0 + i64::from(record.offset_delta);
                records.push((offset, String::from_utf8(record.value.unwrap().to_vec()).unwrap()));
            }
        }
        next = outcome.next;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_seen_stays_whatever_fails(steps in steps(), seed: u64) {
        World::new(seed, Durability::Sync).run(&steps);
    }

    #[test]
    fn os_durability_survives_kills_and_stays_whole_after_a_power_cut(steps in steps(), seed: u64) {
        let steps: Vec<Step> = steps.into_iter().filter(|step| !matches!(step, Step::DeleteRecords { .. })).collect();
        World::new(seed, Durability::Os).run(&steps);
    }
}

#[test]
fn a_disk_that_is_full_at_a_roll_delays_and_needs_no_restart() {
    let mut world = World::new(0, Durability::Sync);
    for _ in 0..12 {
        world.append(1, 200);
    }
    let end = world.partition.watermarks().log_end;
    world.store.set_full(true);
    for _ in 0..3 {
        world.partition.flush();
        assert_eq!(world.partition.condition(), Condition::Serving);
        assert!(
            world.partition.watermarks().high_watermark < end,
            "the segments' snapshots are not there yet"
        );
    }
    world.store.set_full(false);
    world.partition.flush();
    assert_eq!(world.partition.watermarks().high_watermark, end);
    world.append(1, 200);
    world.restart(true);
}

#[test]
fn deleted_records_stay_deleted_when_the_roll_at_the_durable_end_is_written_again() {
    let mut world = World::new(0, Durability::Sync);
    // Durable exactly up to where the next segment begins.
    while world.partition.state.lock().rolls.is_empty() {
        world.partition.flush();
        world.append(1, 200);
    }
    world.look();
    // More rolls than may wait: the first one's snapshot is written, but its roll is not finished.
    while world.partition.state.lock().rolls.len() <= 4 {
        world.append(1, 200);
    }
    world.store.fail_next_sync();
    world.step(&Step::DeleteRecords { share: 60 });
    assert!(world.deleted > 0);
    world.restart(true);
}
