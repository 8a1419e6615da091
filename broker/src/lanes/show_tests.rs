//! Any log of mixed batches, cuts, lists of extractors and mirror units, read by any view in any steps, also
//! after a restart: the reader is shown exactly the records that a plain reading of the log says are its
//! own, in order, and reaches the high watermark.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use broker_store::{Memory, SegmentStore};
use kafka::batch::Codec;
use kafka::control::{Marker, parse_marker};
use kafka::record::{BatchBuilder, Records, unpack};
use kafka::{GroupId, LeaderEpoch, PartitionIndex, RegionId, TimestampMs, TopicId, TopicName};
use lane_core::{Cut as LaneCut, Lane};
use proptest::prelude::*;
use uuid::Uuid;

use super::*;
use crate::lanes::classify;
use crate::log::OpenFiles;
use crate::partition::{Append, Durability, Flusher, MirrorUnit, OpenPartition, Settings, UnitOutcome};

const NOW: TimestampMs = TimestampMs(1_000_000);
const LANES: [&str; 3] = ["", "boe-a", "ppe-x"];
const HEADERS: [&str; 2] = ["x-lane", "x-tt-env"];
const LISTS: [&str; 3] = ["x-lane,x-tt-env", "x-lane", "x-tt-env"];

/// One batch: which of `HEADERS` its records have; and what it names for each, a place in `LANES`, or (3)
/// what is no lane name.
#[derive(Clone, Debug)]
struct Named {
    header: usize,
    lanes: Vec<usize>,
}

#[derive(Clone, Debug)]
enum Step {
    Batch(Named),
    /// The same from another region, with the list that judged it there, if any.
    Unit(Option<usize>, Named),
    /// One of `LISTS` judges what follows.
    List(usize),
    Activate,
    Deactivate,
}

fn open(store: &Arc<dyn SegmentStore>, epoch: i32) -> Arc<Partition> {
    static FLUSHER: LazyLock<Arc<Flusher>> =
        LazyLock::new(|| Flusher::start(2, Duration::from_millis(1), 1 << 30).unwrap());
    let open = OpenPartition {
        topic: TopicName::parse("t").unwrap(),
        topic_id: TopicId(Uuid::from_u128(7)),
        index: PartitionIndex(0),
        epoch: LeaderEpoch(epoch),
        store: store.clone(),
        durability: Durability::Os,
        flusher: FLUSHER.clone(),
        // Small, so that a log has several segments.
        settings: Settings { segment_bytes: 1024, index_interval_bytes: 128, ..Settings::default() },
        now: NOW,
        open_files: OpenFiles::new(64),
        must_exist: false,
    };
    open.open().unwrap()
}

/// A record in the log: its offset, its lane, and whether the lane was active for the group then.
type Logged = (i64, usize, bool);

fn write(partition: &Partition, steps: &[Step]) -> Vec<Logged> {
    mark(partition, &Marker::Extractors(texts(0)));
    let (mut logged, mut active) = (Vec::new(), false);
    let (mut list, mut origin_next) = (0, 0);
    for step in steps {
        match step {
            Step::Batch(records) => {
                let base = append(partition, records);
                logged.extend(records.logged(base, Some(list), active));
            }
            Step::Unit(judge, records) => {
                let base = append_unit(partition, *judge, origin_next, records);
                origin_next += records.lanes.len() as i64;
                logged.extend(records.logged(base, *judge, active));
            }
            Step::List(new) => {
                list = *new;
                mark(partition, &Marker::Extractors(texts(list)));
            }
            Step::Activate | Step::Deactivate => {
                let (group, lane) = (GroupId::new("g"), Lane::parse("boe-a").unwrap());
                let cut = LaneCut { group, lane, coordinator_epoch: 1, previous: None }.written();
                active = matches!(step, Step::Activate);
                mark(
                    partition,
                    &if active { Marker::LaneActivate(cut) } else { Marker::LaneDeactivate(cut) },
                );
            }
        }
    }
    logged
}

fn mark(partition: &Partition, marker: &Marker) {
    let always = |_: &broker_core::Fold| Ok::<(), ()>(());
    partition.append_marker(marker, NOW, always).unwrap().unwrap();
}

fn texts(list: usize) -> Vec<String> {
    LISTS[list].split(',').map(str::to_owned).collect()
}

impl Named {
    fn batch(&self, base: i64) -> Batch {
        let codec = if self.lanes.len().is_multiple_of(2) { Codec::Lz4 } else { Codec::None };
        let mut builder = BatchBuilder::new(Offset(base), NOW, codec);
        for (i, lane) in self.lanes.iter().enumerate() {
            let name = LANES.get(*lane).copied().unwrap_or("Not A Lane");
            let header = (HEADERS[self.header], Some(name.as_bytes()));
            builder.push(i as i32, 0, None, Some(b"some value of some length"), &[header]);
        }
        builder.build()
    }

    /// What a plain reading of the list says of them.
    fn logged(&self, base: i64, list: Option<usize>, active: bool) -> Vec<Logged> {
        let read = list.is_some_and(|list| LISTS[list].contains(HEADERS[self.header]));
        let lanes = self.lanes.iter().enumerate();
        lanes.map(|(i, lane)| (base + i as i64, if read { *lane } else { 0 }, active)).collect()
    }
}

fn append_unit(partition: &Partition, list: Option<usize>, first: i64, records: &Named) -> i64 {
    let unit = MirrorUnit {
        origin: RegionId(Uuid::from_u128(8)),
        incarnation: TopicId(Uuid::from_u128(9)),
        first: Offset(first),
        batches: vec![records.batch(first)],
        extractors: list.map(texts),
        last_rewritten: false,
    };
    match partition.append_unit(&unit, NOW).unwrap() {
        UnitOutcome::Applied { local_next, .. } => local_next.0 - records.lanes.len() as i64,
        other => panic!("not applied: {other:?}"),
    }
}

fn append(partition: &Partition, records: &Named) -> i64 {
    let batch = records.batch(0);
    let by = partition.with_fold(|fold| fold.lanes.extractors());
    let judged = classify::judge(&batch, by).unwrap();
    let request =
        Append { batch: &batch, lanes: judged.summary, judged_by: judged.by, now: NOW, urgent: false };
    partition.append(request).unwrap().base_offset.0
}

fn reading(view: usize) -> Reading {
    let group = || GroupId::new("g");
    let lane = |name: &str| Lane::parse(name).unwrap();
    match view {
        0 => Reading::Plain,
        1 => Reading::View(View::Baseline(group())),
        2 => Reading::View(View::Lane(group(), lane("boe-a"))),
        3 => Reading::View(View::Lane(group(), lane("ppe-x"))),
        4 => Reading::View(View::NoGroup),
        5 => Reading::View(View::Raw),
        _ => Reading::View(View::WholeLane(lane("boe-a"))),
    }
}

fn owns(view: usize, (_, lane, active): &Logged) -> bool {
    match view {
        0 | 5 => true,
        1 => matches!(lane, 0 | 3) || (*lane == 1 && !active),
        2 => *lane == 1 && *active,
        3 => *lane == 2,
        4 => *lane == 0,
        _ => *lane == 1,
    }
}

/// kafka-go, which asks with Fetch 10, shows control records to the application; librdkafka, which asks
/// with 11 and more, takes an answer without a record for one that was cut.
fn check_fillers(old: Option<Bytes>, new: Option<Bytes>, at: i64) {
    let only = |bytes: Bytes| Batch::split_all(bytes, true).unwrap().remove(0);
    let (Some(old), Some(new)) = (old.map(only), new.map(only)) else { return };
    assert_eq!((old.header.base_offset, new.header.base_offset), (Offset(at), Offset(at)));
    assert_eq!(old.header.next_offset(), new.header.next_offset());
    assert_eq!((old.header.is_control(), old.header.record_count), (false, 0));
    assert_eq!((new.header.is_control(), new.header.record_count), (true, 1));
    let section = unpack(&new).unwrap();
    let record = Records::new(&section, 1).next().unwrap().unwrap();
    assert_eq!(record.offset_delta, new.header.last_offset_delta, "some clients go on after the last record");
}

/// Offsets that are shown from `from` on, and where the reader ends.
fn read(partition: &Partition, reading: &Reading, from: i64, max_bytes: usize) -> (Vec<i64>, i64) {
    let rebuilt = Rebuilt::new(1 << 20);
    let (mut at, mut offsets) = (from, Vec::new());
    for _ in 0..10_000 {
        let mut scan = Scan::new(Offset(at));
        let shown = show(partition, reading, &mut scan, max_bytes, true, &rebuilt).unwrap();
        let mut parts: Vec<Bytes> = Vec::new();
        for part in shown.parts {
            parts.push(match part {
                Part::File(slice) => slice.bytes().unwrap(),
                Part::Bytes(bytes) => bytes,
            });
        }
        if parts.is_empty() {
            let (old, new) = (scan.filler(partition.epoch, 10), scan.filler(partition.epoch, 11));
            check_fillers(old, new.clone(), at);
            parts.extend(new);
        }
        let before = at;
        for batch in parts.into_iter().flat_map(|bytes| Batch::split_all(bytes, true).unwrap()) {
            assert!(batch.header.next_offset().0 > at);
            at = batch.header.next_offset().0;
            assert!(batch.header.record_count > 0, "a client would think that its limit has cut the answer");
            assert_eq!(parse_marker(&batch), Ok(None), "markers stay inside");
            if batch.header.is_control() {
                continue;
            }
            let section = unpack(&batch).unwrap();
            for record in Records::new(&section, batch.header.record_count) {
                let offset = batch.header.base_offset.0 + i64::from(record.unwrap().offset_delta);
                offsets.extend((offset >= from).then_some(offset));
            }
        }
        if at == before {
            return (offsets, at);
        }
    }
    panic!("the reader goes round in circles at {at}")
}

/// Whether a search that looks into batches sees the same.
fn found(partition: &Partition, reading: &Reading, from: i64) -> Vec<i64> {
    let (mut at, mut offsets) = (from, Vec::new());
    let mut visible = VisibleRecords::new(partition, reading.clone());
    while let Some(slice) = partition.read(Offset(at), 1, true, ReadUpTo::HighWatermark).unwrap().slice {
        let batch = Batch::split_first(&mut slice.bytes().unwrap(), true).unwrap();
        at = batch.header.next_offset().0;
        if !batch.header.is_control() {
            let all = batch.header.base_offset.0.max(from)..at;
            offsets.extend(all.filter(|offset| visible.holds(&batch, Offset(*offset))));
        }
    }
    offsets
}

fn records() -> impl Strategy<Value = Named> {
    let lanes = prop_oneof![
        2 => proptest::collection::vec(0usize..4, 1..5),
        1 => (0usize..4, 1usize..4).prop_map(|(lane, n)| vec![lane; n]),
    ];
    (0usize..2, lanes).prop_map(|(header, lanes)| Named { header, lanes })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => records().prop_map(Step::Batch),
        3 => (proptest::option::of(0usize..3), records()).prop_map(|(list, records)| Step::Unit(list, records)),
        1 => (0usize..3).prop_map(Step::List),
        1 => Just(Step::Activate),
        1 => Just(Step::Deactivate),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_reader_is_shown_exactly_its_records_whatever_it_asks_and_restarts_change_nothing(
        steps in proptest::collection::vec(step(), 1..40),
        view in 0usize..7,
        from in 0usize..60,
        max_bytes in prop_oneof![Just(1usize), Just(300), Just(100_000)],
    ) {
        let store: Arc<dyn SegmentStore> = Arc::new(Memory::new());
        let partition = open(&store, 1);
        let logged = write(&partition, &steps);
        let end = partition.watermarks().high_watermark.0;
        let from = (from as i64).min(end);
        let right: Vec<i64> =
            logged.iter().filter(|r| r.0 >= from && owns(view, r)).map(|r| r.0).collect();
        let before = read(&partition, &reading(view), from, max_bytes);
        prop_assert_eq!(&before, &(right, end));
        prop_assert_eq!(&found(&partition, &reading(view), from), &before.0);

        let rounded = round_up(&partition, &reading(view), Offset(from)).unwrap().0;
        let skipped: BTreeSet<i64> = (from..rounded).collect();
        prop_assert!(before.0.iter().all(|offset| !skipped.contains(offset)));
        if matches!(view, 2 | 3 | 6) && before.0.is_empty() {
            prop_assert_eq!(rounded, end);
        }

        partition.release();
        let heir = open(&store, 2);
        prop_assert_eq!(&read(&heir, &reading(view), from, max_bytes), &before);
        prop_assert_eq!(&found(&heir, &reading(view), from), &before.0);
    }
}
