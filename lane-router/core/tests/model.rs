//! A model of lanes in motion: lanes come, leave, crash; cuts are late and overtaken; the coordinator
//! and the owners of partitions are replaced at any step, also a coordinator that does not notice and goes
//! on by what it knew; the baseline lags and rewinds; the log start moves. One seed per run, printed when it fails (`SEALANE_SEED` runs one again).
//!
//! Checked: each record is processed by exactly one side, the one that the log says; a record appended
//! while a lane was served its assignment is the lane's. Each twin switches one mechanism off and must
//! fail.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use kafka::{GroupId, Offset};
use lane_core::{
    Ask, Cut, CutAnswer, CutKeeper, CutKind, Extractors, Lane, LaneFold, LaneMarker, LaneSummary, RecordLane,
    View,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Twin {
    Whole,
    /// Readers go by who is deployed now, not by markers.
    NoMarkers,
    NoViewFilter,
    NoCompare,
}

const PARTITIONS: usize = 2;
const STEPS: usize = 400;
const GRACE: u64 = 30;
const LANES: [&str; 3] = ["boe-a", "boe-b", "ppe-x"];

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone)]
enum Entry {
    /// The records' lanes; a record's id is (partition, offset, index).
    Batch(Vec<RecordLane>),
    Marker(LaneMarker),
}

/// One partition and its owner.
struct Partition {
    log: Vec<Entry>,
    log_start: usize,
    fold: LaneFold,
    snapshots: Vec<(usize, Vec<u8>)>,
    /// (offset, lane) of batches that must be the lane's, because its members had their assignment.
    promised: BTreeSet<(usize, Lane)>,
}

impl Partition {
    fn new() -> Partition {
        let mut made = Partition {
            log: Vec::new(),
            log_start: 0,
            fold: LaneFold::default(),
            snapshots: Vec::new(),
            promised: BTreeSet::new(),
        };
        made.append(Entry::Marker(LaneMarker::Extractors(Extractors::standard())));
        made.snapshot();
        made
    }

    fn append(&mut self, entry: Entry) -> Offset {
        let at = Offset(self.log.len() as i64);
        fold_in(&mut self.fold, &entry, at);
        self.log.push(entry);
        at
    }

    fn snapshot(&mut self) {
        let mut bytes = Vec::new();
        self.fold.encode(&mut bytes);
        self.snapshots.push((self.log.len(), bytes));
    }

    /// A new owner: the fold comes from any snapshot and the log behind it.
    fn take_over(&mut self, rng: &mut Rng) {
        let (at, bytes) = &self.snapshots[rng.below(self.snapshots.len())];
        let mut fold = LaneFold::decode(&mut &bytes[..]).expect("a snapshot is whole");
        for (i, entry) in self.log.iter().enumerate().skip(*at) {
            fold_in(&mut fold, entry, Offset(i as i64));
        }
        fold.trim(Offset(self.log_start as i64));
        self.fold.trim(Offset(self.log_start as i64));
        assert_eq!(fold, self.fold, "an heir knows what the owner knew");
        self.fold = fold;
    }

    fn cut(&mut self, kind: CutKind, cut: &Cut, twin: Twin) -> CutAnswer {
        if twin != Twin::NoCompare
            && let Err(why) = self.fold.check(cut)
        {
            return CutAnswer::Refused(why);
        }
        let marker = match kind {
            CutKind::Activate => LaneMarker::Activate(cut.clone()),
            CutKind::Deactivate => LaneMarker::Deactivate(cut.clone()),
        };
        CutAnswer::Done(self.append(Entry::Marker(marker)))
    }
}

fn fold_in(fold: &mut LaneFold, entry: &Entry, at: Offset) {
    match entry {
        Entry::Marker(marker) => fold.apply(marker, at),
        Entry::Batch(records) => fold.note_batch(&summary(records), at),
    }
}

fn summary(records: &[RecordLane]) -> LaneSummary {
    let mut summary = LaneSummary::default();
    records.iter().for_each(|r| summary.add(r));
    summary
}

/// A consumer group's position in one partition, in the baseline or in a lane.
#[derive(Clone, Default)]
struct Reader {
    position: usize,
    committed: usize,
}

type Id = (usize, usize, usize);
type Side = Option<Lane>;

struct World {
    twin: Twin,
    rng: Rng,
    now: u64,
    group: GroupId,
    lanes: Vec<Lane>,
    partitions: Vec<Partition>,
    keeper: CutKeeper<usize>,
    epoch: i32,
    /// A coordinator that was replaced and has not noticed.
    former: Option<(i32, CutKeeper<usize>)>,
    /// Cuts of a former coordinator that an owner took.
    former_cuts: usize,
    /// What each lane's members hold.
    held: BTreeMap<Lane, BTreeSet<usize>>,
    /// Whether the coordinator has answered with that assignment.
    served: BTreeSet<Lane>,
    asks: Vec<Ask<usize>>,
    answers: Vec<(i32, Ask<usize>, CutAnswer)>,
    readers: BTreeMap<(Side, usize), Reader>,
    processed: BTreeMap<Id, BTreeSet<Side>>,
}

impl World {
    fn new(seed: u64, twin: Twin) -> World {
        World {
            twin,
            rng: Rng(seed),
            now: 0,
            group: GroupId::new("orders"),
            lanes: LANES.iter().map(|l| Lane::parse(l).unwrap()).collect(),
            partitions: (0..PARTITIONS).map(|_| Partition::new()).collect(),
            keeper: CutKeeper::new(1, GRACE),
            epoch: 1,
            former: None,
            former_cuts: 0,
            held: BTreeMap::new(),
            served: BTreeSet::new(),
            asks: Vec::new(),
            answers: Vec::new(),
            readers: BTreeMap::new(),
            processed: BTreeMap::new(),
        }
    }

    fn step(&mut self) {
        self.now += self.rng.below(4) as u64;
        let due = self.keeper.tick(self.now);
        self.asks.extend(due);
        self.act_of_old();
        match self.rng.below(20) {
            0..=6 => self.produce(),
            7..=8 => self.deliver(),
            9..=10 => self.answer(),
            11..=12 => self.rebalance(),
            13..=16 => self.read(),
            17 => self.crash_reader(),
            18 if self.rng.one_in(3) => self.replace_coordinator(),
            19 if self.rng.one_in(2) => self.replace_owner(),
            _ => self.produce(),
        }
        self.serve();
    }

    fn produce(&mut self) {
        let p = self.rng.below(PARTITIONS);
        let one_lane = self.rng.one_in(2).then(|| self.record());
        let records: Vec<RecordLane> =
            (0..1 + self.rng.below(4)).map(|_| one_lane.clone().unwrap_or_else(|| self.record())).collect();
        let at = self.partitions[p].append(Entry::Batch(records)).0 as usize;
        for (lane, held) in &self.held {
            if self.served.contains(lane) && held.contains(&p) {
                self.partitions[p].promised.insert((at, lane.clone()));
            }
        }
        if self.rng.one_in(6) {
            self.partitions[p].snapshot();
        }
    }

    fn record(&mut self) -> RecordLane {
        match self.rng.below(LANES.len() + 2) {
            0 => RecordLane::Baseline,
            1 => RecordLane::Unnamed,
            i => RecordLane::Lane(self.lanes[i - 2].clone()),
        }
    }

    /// One cut arrives at its owner, in any order.
    fn deliver(&mut self) {
        if self.asks.is_empty() {
            return;
        }
        let at = self.rng.below(self.asks.len());
        let ask = self.asks.swap_remove(at);
        let answer = if self.rng.one_in(10) {
            CutAnswer::Failed
        } else {
            self.partitions[ask.partition].cut(ask.kind, &ask.cut, self.twin)
        };
        self.answers.push((ask.cut.coordinator_epoch, ask, answer));
    }

    fn answer(&mut self) {
        if self.answers.is_empty() {
            return;
        }
        let at = self.rng.below(self.answers.len());
        let (epoch, ask, answer) = self.answers.swap_remove(at);
        let keeper = match &mut self.former {
            _ if epoch == self.epoch => &mut self.keeper,
            Some((former, keeper)) if epoch == *former => {
                self.former_cuts += usize::from(matches!(answer, CutAnswer::Done(_)));
                keeper
            }
            _ => return,
        };
        let Cut { group, lane, .. } = &ask.cut;
        let more = keeper.answered(group, lane, &ask.partition, ask.kind, answer, self.now);
        self.asks.extend(more);
    }

    /// What a coordinator does that was replaced: its deadlines pass, and it asks again for what failed. It
    /// learns of no other assignment, because it cannot make one durable any more.
    fn act_of_old(&mut self) {
        if let Some((_, keeper)) = &mut self.former {
            self.asks.extend(keeper.tick(self.now));
        }
    }

    /// A lane's members come, go cleanly, crash, or hold something else.
    fn rebalance(&mut self) {
        let lane = self.lanes[self.rng.below(LANES.len())].clone();
        let held: BTreeSet<usize> = (0..PARTITIONS).filter(|_| self.rng.one_in(2)).collect();
        let clean = self.rng.one_in(2);
        self.hold(lane, held, clean);
    }

    fn hold(&mut self, lane: Lane, held: BTreeSet<usize>, clean: bool) {
        for p in 0..PARTITIONS {
            let reader = self.readers.entry((Some(lane.clone()), p)).or_default();
            if clean {
                reader.committed = reader.position;
            }
            reader.position = reader.committed;
        }
        let asks = self.keeper.assign(&self.group, &lane, &held, clean, self.now);
        self.asks.extend(asks);
        self.served.remove(&lane);
        self.held.insert(lane, held);
    }

    /// SyncGroup is answered once every cut is durable.
    fn serve(&mut self) {
        for lane in &self.lanes {
            if self.held.contains_key(lane) && self.keeper.ready(&self.group, lane) {
                self.served.insert(lane.clone());
            }
        }
    }

    fn read(&mut self) {
        let p = self.rng.below(PARTITIONS);
        let side = match self.rng.below(LANES.len() + 1) {
            0 => None,
            i => Some(self.lanes[i - 1].clone()),
        };
        if let Some(lane) = &side
            && !(self.served.contains(lane) && self.held.get(lane).is_some_and(|h| h.contains(&p)))
        {
            return;
        }
        self.read_one(side, p);
    }

    /// One batch, as a fetch shows it to this side.
    fn read_one(&mut self, side: Side, p: usize) {
        let partition = &self.partitions[p];
        let reader = self.readers.entry((side.clone(), p)).or_default();
        reader.position = reader.position.max(partition.log_start);
        let Some(entry) = partition.log.get(reader.position) else { return };
        let at = reader.position;
        reader.position += 1;
        if self.rng.one_in(3) {
            reader.committed = reader.position;
        }
        let Entry::Batch(records) = entry else { return };
        let view = match &side {
            None => View::Baseline(self.group.clone()),
            Some(lane) => View::Lane(self.group.clone(), lane.clone()),
        };
        let rules = partition.fold.rules();
        for (i, record) in records.iter().enumerate() {
            let seen = match self.twin {
                Twin::NoViewFilter => true,
                Twin::NoMarkers => match (record, &side) {
                    (RecordLane::Lane(lane), None) => !self.served.contains(lane) && !lane.is_ppe(),
                    (RecordLane::Lane(lane), Some(own)) => lane == own,
                    (_, side) => side.is_none(),
                },
                _ => rules.sees(&view, record, Offset(at as i64)),
            };
            if seen {
                self.processed.entry((p, at, i)).or_default().insert(side.clone());
            }
        }
    }

    /// The baseline restarts from its commit, is rewound by hand, or retention moves on.
    fn crash_reader(&mut self) {
        let p = self.rng.below(PARTITIONS);
        match self.rng.below(3) {
            0 => {
                let reader = self.readers.entry((None, p)).or_default();
                reader.position = reader.committed;
            }
            1 => {
                let back = self.rng.below(1 + self.partitions[p].log.len());
                let reader = self.readers.entry((None, p)).or_default();
                reader.position = reader.position.min(back);
                reader.committed = reader.committed.min(reader.position);
            }
            _ => self.trim(p),
        }
    }

    /// Never past what somebody has still to read, so that "each record is processed" can be checked.
    fn trim(&mut self, p: usize) {
        let sides = std::iter::once(None).chain(self.lanes.iter().cloned().map(Some));
        let least = sides.map(|s| self.readers.get(&(s, p)).map_or(0, |r| r.committed)).min();
        let partition = &mut self.partitions[p];
        partition.log_start = partition.log_start.max(least.unwrap_or(0));
        partition.fold.trim(Offset(partition.log_start as i64));
    }

    /// A new coordinator loads: it learns the markers from the owners and what the members hold. Members
    /// go on with what they were served before.
    fn replace_coordinator(&mut self) {
        let keeper = CutKeeper::new(self.epoch + 1, GRACE);
        let former = std::mem::replace(&mut self.keeper, keeper);
        self.former = self.rng.one_in(2).then_some((self.epoch, former));
        self.epoch += 1;
        self.list();
        for (lane, held) in self.held.clone() {
            let asks = self.keeper.assign(&self.group, &lane, &held, false, self.now);
            self.asks.extend(asks);
        }
    }

    fn replace_owner(&mut self) {
        let p = self.rng.below(PARTITIONS);
        self.partitions[p].take_over(&mut self.rng);
        self.list();
    }

    fn list(&mut self) {
        for (p, partition) in self.partitions.iter().enumerate() {
            for (group, lane, known) in partition.fold.rules().group_lanes() {
                let open = known.open().is_some();
                let asks = self.keeper.listed(group, lane, &p, known.last_marker, open, self.now);
                self.asks.extend(asks);
            }
        }
    }

    /// Every lane is deployed for good and everybody reads to the end.
    fn settle(&mut self) {
        self.former = None;
        for lane in self.lanes.clone() {
            self.hold(lane, (0..PARTITIONS).collect(), false);
        }
        while !(self.asks.is_empty() && self.answers.is_empty() && self.keeper.next_tick().is_none()) {
            self.deliver();
            self.answer();
            self.now += 1;
            let due = self.keeper.tick(self.now);
            self.asks.extend(due);
            self.serve();
        }
        for p in 0..PARTITIONS {
            let sides = std::iter::once(None).chain(self.lanes.clone().into_iter().map(Some));
            for side in sides {
                for _ in 0..=self.partitions[p].log.len() {
                    self.read_one(side.clone(), p);
                }
            }
        }
    }

    fn check(&self) -> Result<usize, String> {
        let mut owned_by_lanes = 0;
        for (p, partition) in self.partitions.iter().enumerate() {
            let owners = owners(partition);
            for (at, entry) in partition.log.iter().enumerate() {
                let Entry::Batch(records) = entry else { continue };
                for (i, record) in records.iter().enumerate() {
                    let owner = owners(at, record);
                    owned_by_lanes += usize::from(owner.is_some());
                    let by = self.processed.get(&(p, at, i)).cloned().unwrap_or_default();
                    if by != BTreeSet::from([owner.clone()]) {
                        return Err(format!(
                            "record {p}/{at}/{i} {record:?} is {owner:?}'s, processed by {by:?}"
                        ));
                    }
                    if let RecordLane::Lane(lane) = record
                        && partition.promised.contains(&(at, lane.clone()))
                        && owner.as_ref() != Some(lane)
                    {
                        return Err(format!("record {p}/{at}/{i} was produced while {lane} was served"));
                    }
                }
            }
        }
        if self.served.len() < LANES.len() {
            return Err(format!("only {:?} were ever served", self.served));
        }
        Ok(owned_by_lanes)
    }
}

/// Who owns a record by a plain reading of the log, sharing no code with the fold.
fn owners(partition: &Partition) -> impl Fn(usize, &RecordLane) -> Side + use<> {
    let mut open: BTreeSet<Lane> = BTreeSet::new();
    let mut by_offset = Vec::new();
    for entry in &partition.log {
        match entry {
            Entry::Marker(LaneMarker::Activate(cut)) => drop(open.insert(cut.lane.clone())),
            Entry::Marker(LaneMarker::Deactivate(cut)) => drop(open.remove(&cut.lane)),
            _ => {}
        }
        by_offset.push(open.clone());
    }
    move |at, record| match record {
        RecordLane::Lane(lane) if lane.as_str().starts_with("ppe") => Some(lane.clone()),
        RecordLane::Lane(lane) if by_offset[at].contains(lane) => Some(lane.clone()),
        _ => None,
    }
}

/// Records that lanes owned, and cuts that owners took of coordinators that had been replaced.
fn run(seed: u64, twin: Twin) -> Result<(usize, usize), String> {
    let mut world = World::new(seed, twin);
    for _ in 0..STEPS {
        world.step();
    }
    world.settle();
    Ok((world.check()?, world.former_cuts))
}

fn seeds() -> Vec<u64> {
    match std::env::var("SEALANE_SEED").ok().and_then(|s| s.parse().ok()) {
        Some(seed) => vec![seed],
        None => (1..=300).collect(),
    }
}

#[test]
fn each_record_is_processed_by_exactly_the_side_that_owns_it() {
    let (mut at_stake, mut of_old) = (0, 0);
    for seed in seeds() {
        match run(seed, Twin::Whole) {
            Ok((owned_by_lanes, former_cuts)) => {
                at_stake += owned_by_lanes;
                of_old += former_cuts;
            }
            Err(why) => panic!("seed {seed}: {why}"),
        }
    }
    println!("{at_stake} records were owned by lanes; {of_old} cuts of replaced coordinators were taken");
    assert!(at_stake > 0 && of_old > 0);
}

fn must_fail(twin: Twin) {
    let failed = (1..=100).filter(|seed| run(*seed, twin).is_err()).count();
    println!("{twin:?}: {failed} of 100 seeds fail");
    assert!(failed > 0, "the check does not notice that {twin:?}");
}

#[test]
fn without_markers_records_are_lost_or_processed_twice() {
    must_fail(Twin::NoMarkers);
}

#[test]
fn without_the_view_filter_records_are_processed_twice() {
    must_fail(Twin::NoViewFilter);
}

#[test]
fn without_compare_and_append_an_old_cut_takes_a_served_lanes_records() {
    must_fail(Twin::NoCompare);
}
