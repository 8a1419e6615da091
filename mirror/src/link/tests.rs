//! Two links on virtual time, over a fake network that delays, reorders between streams and dies.
//!
//! The fake brokers keep real logs: what is not yet durable is lost in a crash, appends survive the
//! connection that sent them, and their answers may be lost. One seed per run, printed by a failure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use bytes::{Bytes, BytesMut};
use kafka::batch::Attributes;
use kafka::private::{
    AppendOutcome, Claim, FetchFrom, FetchOutcome, LinkState, OriginRead, TopicInfo, Unit, Verdict,
};
use kafka::{
    Batch, BatchHeader, ErrorCode, LeaderEpoch, Offset, PartitionIndex, ProducerEpoch, ProducerId, RegionId,
    RegionName, TimestampMs, TopicId, TopicName,
};
use uuid::Uuid;

use super::*;

mod rate;

const PARTITIONS: usize = 3;
const STREAMS: usize = 2;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone)]
enum Slot {
    Own { id: u64 },
    Marker { next: Offset, claim: Claim },
    Theirs { id: u64, origin_offset: i64 },
}

#[derive(Default)]
struct Partition {
    log: Vec<Slot>,
    durable: usize,
}

impl Partition {
    fn held(&self) -> (Offset, Option<Claim>) {
        let last = self.log.iter().rev().find_map(|slot| match slot {
            Slot::Marker { next, claim } => Some((*next, Some(*claim))),
            _ => None,
        });
        last.unwrap_or((Offset::ZERO, None))
    }

    fn read_own(&self, ask: &FetchFrom) -> Option<FetchOutcome> {
        let (from, durable) = (ask.from.0 as usize, self.durable);
        if let Some(claim) = ask.claim {
            let same = matches!(self.log.get(claim.base.0 as usize), Some(Slot::Own { id })
                if own_batch(claim.base.0, *id).header.crc == claim.crc);
            if from > durable || !same {
                return Some(FetchOutcome::Truncated { reason: format!("its log ends at {durable}") });
            }
        }
        let mut bytes = BytesMut::new();
        let (mut next, mut last) = (from, from);
        for (offset, slot) in self.log.iter().enumerate().take(durable).skip(from) {
            if bytes.len() >= ask.bytes_max as usize {
                break;
            }
            if let Slot::Own { id } = slot {
                bytes.extend_from_slice(&own_batch(offset as i64, *id).bytes);
                last = offset + 1;
            }
            next = offset + 1;
        }
        // As the broker says it: only a read to the end knows where the last own record is.
        let end = if next >= durable { last } else { durable };
        let news = next > from || ask.known_end < Offset::ZERO;
        news.then(|| {
            FetchOutcome::Read(OriginRead {
                batches: bytes.freeze(),
                next: Offset(next as i64),
                end: Offset(end as i64),
                log_start: Offset::ZERO,
                extractors: None,
                rewritten: Vec::new(),
            })
        })
    }

    fn append(&mut self, unit: &Unit, rule: bool) -> AppendOutcome {
        let batches = Batch::split_all(unit.batches.clone(), true).expect("whole batches");
        let last = batches.last().expect("a unit has a batch");
        let next = last.header.next_offset();
        let held = self.held().0;
        match Verdict::of(held, unit.first, next) {
            Verdict::Duplicate if rule => return AppendOutcome::Duplicate { next: held },
            Verdict::Gap if rule => return AppendOutcome::Gap { next: held },
            Verdict::Fence if rule => return AppendOutcome::Overlap { next: held },
            _ => {}
        }
        let claim = Claim {
            epoch: last.header.leader_epoch,
            base: last.header.base_offset,
            crc: if unit.last_rewritten { 0 } else { last.header.crc },
        };
        self.log.push(Slot::Marker { next, claim });
        for batch in &batches {
            let id = u64::from_be_bytes(batch.records()[..8].try_into().expect("an id"));
            self.log.push(Slot::Theirs { id, origin_offset: batch.header.base_offset.0 });
        }
        AppendOutcome::Applied { next }
    }
}

fn own_batch(offset: i64, id: u64) -> Batch {
    let header = BatchHeader {
        base_offset: Offset(offset),
        batch_length: 0,
        leader_epoch: LeaderEpoch(1),
        crc: 0,
        attributes: Attributes(0),
        last_offset_delta: 0,
        base_timestamp: TimestampMs(0),
        max_timestamp: TimestampMs(0),
        producer_id: ProducerId::NONE,
        producer_epoch: ProducerEpoch(-1),
        base_sequence: -1,
        record_count: 1,
    };
    let mut records = id.to_be_bytes().to_vec();
    records.resize(8 + (id % 300) as usize, 7);
    header.seal(&records)
}

enum Event {
    Control { generation: u64, to: usize, bytes: Bytes },
    Unit { generation: u64, to: usize, bytes: Bytes },
    Read { generation: u64, side: usize, found: Vec<(Sub, Offset, FetchOutcome)> },
    Positions { generation: u64, side: usize, partitions: Vec<usize> },
    Append { generation: u64, side: usize, append: Box<Append> },
    Answer { generation: u64, side: usize, life: u64, len: usize, partition: usize, appended: Appended },
    Synced { region: usize, life: u64, partition: usize, len: usize },
    Produce { region: usize },
    Crash { region: usize },
    Cut,
    Connect,
    Tick { generation: u64 },
}

/// A connection and its in-order channels.
struct Connection {
    links: [Link; 2],
    /// When the last message of a channel arrives: (receiver, channel), channel 0 is control.
    arrives: BTreeMap<(usize, usize), u64>,
    reading: [bool; 2],
}

struct World {
    rng: Rng,
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<Event>>,
    generation: u64,
    connection: Option<Connection>,
    regions: [Vec<Partition>; 2],
    lives: [u64; 2],
    acknowledged: [BTreeSet<(usize, u64)>; 2],
    ids: u64,
    rule: bool,
    units: u64,
    lost_answers: u64,
    cuts: u64,
    faults_until: u64,
}

fn region(side: usize) -> RegionId {
    RegionId(Uuid::from_u128(side as u128 + 1))
}

fn name(side: usize) -> RegionName {
    RegionName::parse(["east", "west"][side]).expect("legal")
}

fn topic() -> TopicName {
    TopicName::parse("t").expect("legal")
}

fn incarnation(side: usize) -> TopicId {
    TopicId(Uuid::from_u128(100 + side as u128))
}

fn identity(side: usize) -> Identity {
    Identity { region: region(side), name: name(side), instance: Uuid::nil(), peer: name(1 - side) }
}

impl World {
    fn new(seed: u64, rule: bool) -> World {
        let partitions = || (0..PARTITIONS).map(|_| Partition::default()).collect();
        let mut world = World {
            rng: Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            events: Vec::new(),
            generation: 0,
            connection: None,
            regions: [partitions(), partitions()],
            lives: [0, 0],
            acknowledged: [BTreeSet::new(), BTreeSet::new()],
            ids: 0,
            rule,
            units: 0,
            lost_answers: 0,
            cuts: 0,
            faults_until: 20_000,
        };
        world.at(0, Event::Connect);
        for region in 0..2 {
            world.at(1, Event::Produce { region });
            world.at(3_000, Event::Crash { region });
        }
        world.at(1_000, Event::Cut);
        world
    }

    fn at(&mut self, delay: u64, event: Event) {
        self.events.push(Some(event));
        self.queue.push(Reverse((self.now + delay, self.order, self.events.len() - 1)));
        self.order += 1;
    }

    fn run_until(&mut self, end: u64) {
        while let Some(Reverse((time, _, index))) = self.queue.peek().copied() {
            if time > end {
                break;
            }
            self.queue.pop();
            self.now = time;
            let event = self.events[index].take().expect("each event once");
            self.step(event);
        }
        self.now = end;
    }

    fn faulty(&self) -> bool {
        self.now < self.faults_until
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Produce { region } => self.produce(region),
            Event::Synced { region, life, partition, len } => self.synced(region, life, partition, len),
            Event::Crash { region } => self.crash(region),
            Event::Cut => {
                self.cut();
                if self.faulty() {
                    let wait = 500 + self.rng.below(4_000);
                    self.at(wait, Event::Cut);
                }
            }
            Event::Connect => self.connect(),
            Event::Append { generation, side, append } => self.append(generation, side, *append),
            Event::Tick { generation } if generation == self.generation => {
                self.pump();
                self.at(20, Event::Tick { generation });
            }
            Event::Control { generation, to, bytes } => self.with_link(generation, to, |link, now| {
                let mut buffer = BytesMut::from(&bytes[..]);
                while let Some(body) = take_body(&mut buffer, CONTROL_BYTES_MAX).expect("a frame") {
                    link.on_frame(Frame::read(body).expect("a frame"), now);
                }
            }),
            Event::Unit { generation, to, bytes } => self.with_link(generation, to, |link, now| {
                let mut buffer = BytesMut::from(&bytes[..]);
                let body = take_body(&mut buffer, UNIT_FRAME_BYTES_MAX).expect("a frame").expect("whole");
                link.on_unit(UnitFrame::decode(body).expect("a unit"), now);
            }),
            Event::Read { generation, side, found } => {
                if let Some(connection) = self.connection.as_mut().filter(|_| generation == self.generation) {
                    connection.reading[side] = false;
                }
                self.with_link(generation, side, |link, now| {
                    for (sub, from, outcome) in found {
                        link.supply(sub, from, outcome, now);
                    }
                });
            }
            Event::Positions { generation, side, partitions } => self.positions(generation, side, partitions),
            Event::Answer { generation, side, life, len, partition, appended } => {
                if life == self.lives[side] {
                    self.regions[side][partition].durable = self.regions[side][partition].durable.max(len);
                    if self.faulty() && self.rng.one_in(25) {
                        // Applied, but the mirror never hears of it.
                        self.lost_answers += 1;
                        let code = ErrorCode::RequestTimedOut;
                        let outcome = AppendOutcome::Failed { code, reason: "timed out".into() };
                        let appended = Appended { outcome, ..appended };
                        self.with_link(generation, side, |link, now| link.appended(&appended, now));
                    } else {
                        self.with_link(generation, side, |link, now| link.appended(&appended, now));
                    }
                }
            }
            Event::Tick { .. } => {}
        }
    }

    fn produce(&mut self, region: usize) {
        if self.now > self.faults_until {
            return;
        }
        for _ in 0..1 + self.rng.below(4) {
            let partition = self.rng.below(PARTITIONS as u64) as usize;
            self.ids += 1;
            let log = &mut self.regions[region][partition].log;
            log.push(Slot::Own { id: self.ids });
            let len = log.len();
            let life = self.lives[region];
            let wait = 1 + self.rng.below(20);
            self.at(wait, Event::Synced { region, life, partition, len });
        }
        let wait = 1 + self.rng.below(60);
        self.at(wait, Event::Produce { region });
    }

    fn synced(&mut self, region: usize, life: u64, partition: usize, len: usize) {
        if life != self.lives[region] {
            return;
        }
        let p = &mut self.regions[region][partition];
        p.durable = p.durable.max(len);
        for slot in &p.log[..p.durable] {
            if let Slot::Own { id } = slot {
                self.acknowledged[region].insert((partition, *id));
            }
        }
    }

    /// What was not durable is gone, and with it all that was under way at this region.
    fn crash(&mut self, region: usize) {
        if !self.faulty() {
            return;
        }
        self.lives[region] += 1;
        for p in &mut self.regions[region] {
            // An incomplete unit is cut at its marker; a unit becomes durable as a whole here.
            p.log.truncate(p.durable);
        }
        self.cut();
        let wait = 2_000 + self.rng.below(4_000);
        self.at(wait, Event::Crash { region });
    }

    fn cut(&mut self) {
        if self.connection.take().is_some() {
            self.cuts += 1;
            self.generation += 1;
            let wait = 1 + self.rng.below(40);
            self.at(wait, Event::Connect);
        }
    }

    fn connect(&mut self) {
        if self.connection.is_some() {
            return;
        }
        let mut link = |side| {
            let mut link = Link::new(identity(side), STREAMS, 4_000, Now(self.now));
            // Some connections have a limit, well above what is produced.
            link.limit_rate(self.rng.below(3) * 250_000, Now(self.now));
            link
        };
        let links = [link(0), link(1)];
        self.connection = Some(Connection { links, arrives: BTreeMap::new(), reading: [false; 2] });
        let generation = self.generation;
        self.at(0, Event::Tick { generation });
    }

    fn with_link(&mut self, generation: u64, side: usize, act: impl FnOnce(&mut Link, Now)) {
        if generation != self.generation {
            return;
        }
        if let Some(connection) = &mut self.connection {
            act(&mut connection.links[side], Now(self.now));
            self.pump();
        }
    }

    /// Does what both links ask for, until they ask for nothing.
    fn pump(&mut self) {
        for side in 0..2 {
            let Some(connection) = &mut self.connection else { return };
            let link = &mut connection.links[side];
            if Now(self.now) >= link.deadline() {
                link.on_time(Now(self.now));
            }
            let mut outputs = Vec::new();
            while let Some(output) = link.poll() {
                outputs.push(output);
            }
            for output in outputs {
                self.carry_out(side, output);
            }
            self.send_units(side);
            self.read(side);
        }
    }

    fn carry_out(&mut self, side: usize, output: Output) {
        let generation = self.generation;
        match output {
            Output::Control(frame) => {
                let mut bytes = BytesMut::new();
                frame.write(&mut bytes);
                self.send(1 - side, 0, |to| Event::Control { generation, to, bytes: bytes.freeze() });
            }
            Output::Up(_) => {
                let info = TopicInfo {
                    name: topic(),
                    id: incarnation(side),
                    partitions: PARTITIONS as i32,
                    lanes: false,
                    configs: Vec::new(),
                    changed_at: TimestampMs(0),
                };
                if let Some(connection) = &mut self.connection {
                    connection.links[side].offer(vec![info]);
                }
            }
            Output::Offered { topics, gone } => {
                assert!(gone.is_empty() && topics.len() == 1);
                let partitions = (0..PARTITIONS).collect();
                let wait = self.rng.below(30);
                self.at(wait, Event::Positions { generation, side, partitions });
            }
            Output::Reposition(places) => {
                let partitions = places.iter().map(|(_, p)| p.0 as usize).collect();
                let wait = self.rng.below(30);
                self.at(wait, Event::Positions { generation, side, partitions });
            }
            Output::Append(append) => {
                // In order within a partition and a connection, as one task sends them.
                let channel = 100 + append.unit.partition.0 as usize;
                self.send(side, channel, |side| Event::Append { generation, side, append });
            }
            Output::Close { .. } => self.cut(),
            Output::SourceTruncated { .. } | Output::Quarantined { .. } | Output::Deleted { .. } => {
                assert!(!self.rule, "nothing is truncated or poisoned here: {output:?}");
            }
        }
    }

    /// Schedules a message on an in-order channel.
    fn send(&mut self, to: usize, channel: usize, event: impl FnOnce(usize) -> Event) {
        let slow = if self.rng.one_in(20) { 300 } else { 20 };
        let wait = 1 + self.rng.below(slow);
        let Some(connection) = &mut self.connection else { return };
        let arrives = connection.arrives.entry((to, channel)).or_insert(0);
        *arrives = (*arrives).max(self.now + wait);
        let delay = *arrives - self.now;
        self.at(delay, event(to));
    }

    fn send_units(&mut self, side: usize) {
        let Some(connection) = &mut self.connection else { return };
        for stream in connection.links[side].turn(Now(self.now)) {
            while let Some(unit) = self.connection.as_mut().and_then(|c| c.links[side].take_unit(stream)) {
                self.units += 1;
                let (head, payload) = unit.encode(&mut Packer::default());
                let (generation, bytes) = (self.generation, Bytes::from([head, payload].concat()));
                self.send(1 - side, 1 + stream, |to| Event::Unit { generation, to, bytes });
            }
        }
    }

    fn read(&mut self, side: usize) {
        let Some(connection) = &mut self.connection else { return };
        if connection.reading[side] {
            return;
        }
        let wishes = connection.links[side].wishes(Now(self.now));
        let mut found = Vec::new();
        for wish in wishes {
            let partition = &self.regions[side][wish.from.partition.0 as usize];
            if let Some(outcome) = partition.read_own(&wish.from) {
                found.push((wish.sub, wish.from.from, outcome));
            }
        }
        if !found.is_empty() {
            connection.reading[side] = true;
            let generation = self.generation;
            let wait = 1 + self.rng.below(10);
            self.at(wait, Event::Read { generation, side, found });
        }
    }

    fn positions(&mut self, generation: u64, side: usize, partitions: Vec<usize>) {
        let mut positions = Vec::new();
        for index in partitions {
            let (next, claim) = self.regions[side][index].held();
            positions.push(Position {
                topic: topic(),
                partition: PartitionIndex(index as i32),
                incarnation: incarnation(1 - side),
                local: incarnation(side),
                next,
                claim,
            });
        }
        self.with_link(generation, side, |link, _| positions.into_iter().for_each(|p| link.want(p)));
    }

    /// The broker: compares and appends in one step, whoever the sender was.
    fn append(&mut self, generation: u64, side: usize, append: Append) {
        let partition = append.unit.partition.0 as usize;
        let outcome = self.regions[side][partition].append(&append.unit, self.rule);
        let len = self.regions[side][partition].log.len();
        let appended = Appended { sub: append.sub, charge: append.charge, outcome };
        let life = self.lives[side];
        let wait = 1 + self.rng.below(15);
        self.at(wait, Event::Answer { generation, side, life, len, partition, appended });
    }

    /// What an independent reader of both logs finds wrong.
    fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for partition in 0..PARTITIONS {
            for side in 0..2 {
                let (mine, theirs) = (&self.regions[side][partition], &self.regions[1 - side][partition]);
                let own: Vec<u64> = mine.log.iter().filter_map(own_id).collect();
                let copied: Vec<(i64, u64)> = theirs.log.iter().filter_map(their_id).collect();
                let ids: Vec<u64> = copied.iter().map(|(_, id)| *id).collect();
                if ids != own {
                    wrong.push(format!(
                        "partition {partition} of {}: {} own records, the peer holds {}, first difference at {:?}",
                        name(side),
                        own.len(),
                        ids.len(),
                        own.iter().zip(&ids).position(|(a, b)| a != b),
                    ));
                }
                if copied.iter().any(|(offset, id)| {
                    !matches!(mine.log.get(*offset as usize),
                    Some(Slot::Own { id: own }) if own == id)
                }) {
                    wrong.push(format!("partition {partition}: a copy names a wrong origin offset"));
                }
                for (p, id) in &self.acknowledged[side] {
                    if *p == partition && !own.contains(id) {
                        wrong.push(format!("acknowledged record {id} is gone"));
                    }
                }
            }
        }
        wrong
    }
}

fn own_id(slot: &Slot) -> Option<u64> {
    if let Slot::Own { id } = slot { Some(*id) } else { None }
}

fn their_id(slot: &Slot) -> Option<(i64, u64)> {
    if let Slot::Theirs { id, origin_offset } = slot { Some((*origin_offset, *id)) } else { None }
}

fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("SEALANE_SEED") {
        Ok(seed) => vec![seed.parse().expect("SEALANE_SEED is a number")],
        Err(_) => (1..=count).collect(),
    }
}

#[test]
fn both_regions_hold_the_same_records_once_and_in_order_whatever_the_network_does() {
    for seed in seeds(60) {
        let mut world = World::new(seed, true);
        world.run_until(80_000);
        assert!(world.wrong().is_empty(), "seed {seed}: {:?}", world.wrong());
        let stake = (world.units, world.lost_answers, world.cuts, world.ids);
        assert!(stake.0 > 100 && stake.1 > 0 && stake.2 > 3 && stake.3 > 500, "seed {seed}: {stake:?}");
        let lens = |w: &World| -> Vec<usize> { w.regions.iter().flatten().map(|p| p.log.len()).collect() };
        let at_rest = lens(&world);
        world.run_until(200_000);
        assert_eq!(lens(&world), at_rest, "seed {seed}: logs grow while nobody produces");
        let reports = world.connection.as_ref().expect("healed").links[0].report(Now(world.now));
        assert_eq!(reports.len(), 2 * PARTITIONS);
        for report in reports {
            assert_eq!(
                (report.state, report.lag_records),
                (LinkState::Active, Some(0)),
                "seed {seed}: {report:?}"
            );
        }
    }
}

#[test]
fn without_the_apply_rule_the_same_runs_show_damage() {
    let damaged = seeds(20).into_iter().filter(|seed| {
        let mut world = World::new(*seed, false);
        world.run_until(80_000);
        !world.wrong().is_empty()
    });
    let damaged = damaged.count();
    println!("{damaged} of 20 runs damaged");
    assert!(damaged > 10, "the test cannot tell a mirror with the apply rule from one without");
}

/// Two links joined without delay, until both are quiet; all but control frames comes back.
fn exchange(a: &mut Link, b: &mut Link, now: Now) -> Vec<(usize, Output)> {
    let mut seen = Vec::new();
    loop {
        let (from_a, from_b) = (a.poll(), b.poll());
        if from_a.is_none() && from_b.is_none() {
            return seen;
        }
        for (side, output) in [(0, from_a), (1, from_b)] {
            match (side, output) {
                (0, Some(Output::Control(frame))) => b.on_frame(frame, now),
                (1, Some(Output::Control(frame))) => a.on_frame(frame, now),
                (_, Some(output)) => seen.push((side, output)),
                (_, None) => {}
            }
        }
    }
}

const POOL: u64 = 100_000;

fn joined() -> (Link, Link) {
    let mut east = Link::new(identity(0), STREAMS, POOL, Now(0));
    let mut west = Link::new(identity(1), STREAMS, POOL, Now(0));
    let seen = exchange(&mut east, &mut west, Now(0));
    assert!(seen.iter().all(|(_, output)| matches!(output, Output::Up(_))), "{seen:?}");
    (east, west)
}

fn position(partition: i32, next: i64, claim: Option<Claim>) -> Position {
    Position {
        topic: topic(),
        partition: PartitionIndex(partition),
        incarnation: incarnation(0),
        local: incarnation(1),
        next: Offset(next),
        claim,
    }
}

fn closes(seen: &[(usize, Output)]) -> Vec<LinkErrorCode> {
    let code = |output: &Output| if let Output::Close { code, .. } = output { Some(*code) } else { None };
    seen.iter().filter_map(|(_, output)| code(output)).collect()
}

/// What a log that holds `ids` from offset `from` on answers.
fn read_of(from: i64, ids: &[u64], next: i64) -> FetchOutcome {
    let mut bytes = BytesMut::new();
    for (i, id) in ids.iter().enumerate() {
        bytes.extend_from_slice(&own_batch(from + i as i64, *id).bytes);
    }
    let end = Offset(from + ids.len() as i64);
    let next = Offset(next);
    FetchOutcome::Read(OriginRead {
        batches: bytes.freeze(),
        next,
        end,
        log_start: Offset::ZERO,
        extractors: None,
        rewritten: Vec::new(),
    })
}

fn unit_count(link: &mut Link) -> usize {
    (0..STREAMS).map(|stream| std::iter::from_fn(|| link.take_unit(stream)).count()).sum()
}

#[test]
fn a_link_between_two_names_of_one_region_is_refused_at_both_ends() {
    let mut east = Link::new(identity(0), STREAMS, POOL, Now(0));
    let mut twin = Link::new(Identity { region: region(0), ..identity(1) }, STREAMS, POOL, Now(0));
    let seen = exchange(&mut east, &mut twin, Now(0));
    assert_eq!(closes(&seen), [LinkErrorCode::SelfLink, LinkErrorCode::SelfLink], "{seen:?}");
}

#[test]
fn a_peer_of_another_name_or_another_version_is_refused() {
    let mut east = Link::new(identity(0), STREAMS, POOL, Now(0));
    let mut north = Link::new(
        Identity { name: RegionName::parse("north").expect("legal"), ..identity(1) },
        STREAMS,
        POOL,
        Now(0),
    );
    let seen = exchange(&mut east, &mut north, Now(0));
    assert!(closes(&seen).contains(&LinkErrorCode::WrongPeer), "{seen:?}");

    let mut east = Link::new(identity(0), STREAMS, POOL, Now(0));
    let (region, name, instance) = (region(1), name(1), Uuid::nil());
    let newer = VERSION + 1;
    east.on_frame(Frame::Hello(Hello { version: newer, version_min: newer, region, name, instance }), Now(0));
    let last = std::iter::from_fn(|| east.poll()).last();
    assert!(matches!(last, Some(Output::Close { code: LinkErrorCode::Version, .. })), "{last:?}");
}

#[test]
fn a_silent_peer_is_given_up_and_its_lag_is_unknown_before_that() {
    let mut east = Link::new(identity(0), STREAMS, POOL, Now(0));
    assert_eq!(east.deadline(), Now(HELLO_MS));
    east.on_time(Now(HELLO_MS));
    let last = std::iter::from_fn(|| east.poll()).last();
    assert!(matches!(last, Some(Output::Close { code: LinkErrorCode::Silent, .. })), "{last:?}");

    let (mut east, mut west) = joined();
    west.want(position(0, 0, None));
    exchange(&mut east, &mut west, Now(0));
    let wish = east.wishes(Now(0)).remove(0);
    east.supply(wish.sub, wish.from.from, read_of(0, &[1, 2, 3], 3), Now(0));
    east.on_time(Now(BEACON_MS));
    exchange(&mut east, &mut west, Now(BEACON_MS));
    let lag = |now| west.report(Now(now))[0].lag_records;
    assert_eq!(lag(BEACON_MS), Some(3));
    assert_eq!(lag(BEACON_MS * 5), None, "a number that is no longer known is shown");
    west.on_time(Now(BEACON_MS + SILENCE_MS));
    let last = std::iter::from_fn(|| west.poll()).last();
    assert!(matches!(last, Some(Output::Close { code: LinkErrorCode::Silent, .. })), "{last:?}");
}

#[test]
fn what_the_peer_wrote_is_no_lag_of_the_peer() {
    let (mut east, mut west) = joined();
    west.want(position(0, 0, None));
    exchange(&mut east, &mut west, Now(0));
    // East only mirrors: its log grows by what came from west, read after read.
    for (from, next) in [(0, 4), (4, 9), (9, 12)] {
        let wish = east.wishes(Now(0)).remove(0);
        east.supply(wish.sub, Offset(from), read_of(from, &[], next), Now(0));
        east.on_time(Now(BEACON_MS));
        exchange(&mut east, &mut west, Now(BEACON_MS));
        for report in [&east.report(Now(BEACON_MS))[0], &west.report(Now(BEACON_MS))[0]] {
            assert_eq!((report.lag_records, report.lag_ms), (Some(0), Some(0)), "{report:?}");
        }
    }
}

#[test]
fn a_source_that_lost_what_the_receiver_holds_is_a_fault_and_feeds_nothing() {
    let (mut east, mut west) = joined();
    let claim = Claim { epoch: LeaderEpoch(1), base: Offset(9), crc: 77 };
    west.want(position(0, 10, Some(claim)));
    exchange(&mut east, &mut west, Now(0));
    let wish = east.wishes(Now(0)).remove(0);
    assert_eq!(wish.from.claim, Some(claim));
    let reason = "its log ends at 5".to_owned();
    east.supply(wish.sub, wish.from.from, FetchOutcome::Truncated { reason }, Now(0));
    let seen = exchange(&mut east, &mut west, Now(0));
    assert!(
        matches!(&seen[..], [(1, Output::SourceTruncated { next: Offset(10), .. })]),
        "the receiver notes it durably: {seen:?}"
    );
    for link in [&east, &west] {
        let report = &link.report(Now(0))[0];
        assert_eq!(report.state, LinkState::Faulted);
        assert!(report.reason.contains("source truncated: its log ends at 5"), "{report:?}");
        assert_eq!(report.lag_records, None);
    }
    assert!(east.wishes(Now(0)).is_empty());
}

#[test]
fn a_log_that_is_read_elsewhere_must_hold_the_last_batch_that_was_sent() {
    let (mut east, mut west) = joined();
    west.want(position(0, 0, None));
    exchange(&mut east, &mut west, Now(0));
    let wish = east.wishes(Now(0)).remove(0);
    east.prove_again(wish.sub);
    assert_eq!(east.wishes(Now(0))[0].from.claim, None, "nothing was sent that could be missed");
    // Two records, and behind them what no unit can carry yet.
    east.supply(wish.sub, wish.from.from, read_of(0, &[5, 6], 40), Now(0));
    let last = own_batch(1, 6).header;
    let proof = Claim { epoch: last.leader_epoch, base: last.base_offset, crc: last.crc };
    assert_eq!((east.wishes(Now(0))[0].from.from, east.wishes(Now(0))[0].from.claim), (Offset(40), None));

    east.prove_again(wish.sub);
    assert!(east.has_fresh_wishes());
    let asked = east.wishes(Now(0)).remove(0).from;
    assert_eq!((asked.from, asked.claim), (Offset(2), Some(proof)), "a proof ends where the read begins");
    // Nobody answers: it is asked for again until somebody does.
    let failed = FetchOutcome::Failed { code: ErrorCode::NotLeaderOrFollower, reason: "moved".to_owned() };
    east.supply(wish.sub, Offset(2), failed, Now(0));
    assert!(east.wishes(Now(0)).is_empty());
    assert_eq!(east.wishes(Now(300)).remove(0).from, asked);
    east.supply(wish.sub, Offset(2), read_of(2, &[], 41), Now(300));
    let asked = east.wishes(Now(300)).remove(0).from;
    assert_eq!((asked.from, asked.claim), (Offset(41), None), "once is enough");
    assert_eq!(unit_count(&mut east), 1, "and nothing is sent twice");
}

#[test]
fn units_that_several_owners_gave_at_once_wait_for_credit() {
    let (mut east, mut west) = joined();
    west.want(position(0, 0, None));
    west.want(position(1, 0, None));
    exchange(&mut east, &mut west, Now(0));
    // Both reads began when all of the credit was free.
    let wishes = east.wishes(Now(0));
    let ids = vec![7; POOL as usize / 1_000];
    for wish in &wishes {
        for batch in 0..20 {
            let from = batch * ids.len() as i64;
            let next = from + ids.len() as i64;
            east.supply(wish.sub, Offset(from), read_of(from, &ids, next), Now(0));
        }
    }
    let mut sent = 0;
    loop {
        let units: Vec<_> = (0..STREAMS).filter_map(|stream| east.take_unit(stream)).collect();
        if units.is_empty() {
            break;
        }
        sent += units.iter().map(UnitFrame::charge).sum::<u64>();
    }
    assert!(sent > POOL / 2, "the credit is used: {sent}");
    assert!(sent <= POOL + 2 * 20_000, "and not passed by more than a unit: {sent}");
}

#[test]
fn a_trailing_covered_range_is_never_sent_so_idle_regions_write_nothing() {
    let (mut east, mut west) = joined();
    west.want(position(0, 0, None));
    exchange(&mut east, &mut west, Now(0));
    let wish = east.wishes(Now(0)).remove(0);
    east.supply(wish.sub, wish.from.from, read_of(0, &[], 40), Now(0));
    assert_eq!(unit_count(&mut east), 0);
    let wish = east.wishes(Now(0)).remove(0);
    assert_eq!(wish.from.from, Offset(40), "it is not scanned again");
    east.supply(wish.sub, wish.from.from, read_of(40, &[5], 41), Now(0));
    let unit = east.take_unit(0).expect("a record leads to a unit");
    assert_eq!(unit.first, Offset(0), "the covered range is the unit's leading gap");
}

#[test]
fn credit_bounds_what_is_on_its_way_and_a_slow_partition_does_not_take_it_all() {
    let (mut east, mut west) = joined();
    west.want(position(0, 0, None));
    west.want(position(1, 0, None));
    exchange(&mut east, &mut west, Now(0));
    // Partition 0 is never acknowledged: it reads on until it may not.
    let slow = Sub(0);
    let mut at = 0;
    while let Some(wish) = east.wishes(Now(0)).into_iter().find(|wish| wish.sub == slow) {
        let from = wish.from.from;
        assert!(wish.from.bytes_max as u64 <= POOL);
        east.supply(slow, from, read_of(from.0, &[7; 10], from.0 + 10), Now(0));
        unit_count(&mut east);
        at += 10;
        assert!(at < 10_000, "a partition that is not acknowledged reads without end");
    }
    let wishes = east.wishes(Now(0));
    assert_eq!(wishes.len(), 1, "the other partition goes on");
    assert!(wishes[0].from.bytes_max as u64 > POOL / 4, "with a fair part of the credit: {wishes:?}");
    let report = &east.report(Now(60_000))[0];
    assert_eq!(report.state, LinkState::Lagging);
    assert!(report.reason.contains("no acknowledgement for 60 s"), "{report:?}");
}

#[test]
fn a_unit_that_cannot_be_applied_stops_its_partition_alone() {
    let (mut east, mut west) = joined();
    for partition in 0..2 {
        west.want(position(partition, 0, None));
    }
    exchange(&mut east, &mut west, Now(0));
    for wish in east.wishes(Now(0)) {
        east.supply(wish.sub, wish.from.from, read_of(0, &[1], 1), Now(0));
    }
    for stream in 0..STREAMS {
        while let Some(unit) = east.take_unit(stream) {
            west.on_unit(unit, Now(0));
        }
    }
    for (_, output) in exchange(&mut east, &mut west, Now(0)) {
        let Output::Append(append) = output else { panic!("{output:?}") };
        let outcome = match append.unit.partition.0 {
            0 => AppendOutcome::Faulted { reason: "poison".into() },
            _ => AppendOutcome::Applied { next: Offset(1) },
        };
        west.appended(&Appended { sub: append.sub, charge: append.charge, outcome }, Now(0));
    }
    let seen = exchange(&mut east, &mut west, Now(0));
    assert!(matches!(&seen[..], [(1, Output::Quarantined { .. })]), "{seen:?}");
    let states: Vec<_> = west.report(Now(0)).iter().map(|r| (r.partition.0, r.state)).collect();
    assert_eq!(states[0], (0, LinkState::Faulted));
    assert_ne!(states[1].1, LinkState::Faulted);
    assert_eq!(east.report(Now(0)).len(), 1, "the source forgets the partition that is not wanted");
}

#[test]
fn a_deletion_is_told_once_and_only_to_a_peer_that_understands_it() {
    let (mut east, mut west) = joined();
    for _ in 0..2 {
        west.tell_deleted(topic(), incarnation(0));
    }
    let seen = exchange(&mut east, &mut west, Now(0));
    let told = Output::Deleted { topic: topic(), incarnation: incarnation(0) };
    assert_eq!(seen, [(0, told)]);

    let mut west = Link::new(identity(1), STREAMS, POOL, Now(0));
    let Identity { region, name, instance, .. } = identity(0);
    west.on_frame(Frame::Hello(Hello { version: 1, version_min: 1, region, name, instance }), Now(0));
    west.tell_deleted(topic(), incarnation(0));
    west.close(LinkErrorCode::Paused, "paused".to_owned());
    let frames: Vec<_> = std::iter::from_fn(|| west.poll())
        .filter_map(|output| if let Output::Control(frame) = output { Some(frame) } else { None })
        .collect();
    let told = |frame: &Frame| matches!(frame, Frame::Deleted { .. });
    assert!(!frames.iter().any(told), "{frames:?}");
    let last = frames.last();
    assert!(matches!(last, Some(Frame::Error { code: LinkErrorCode::Stopping, .. })), "{last:?}");
}

#[test]
fn a_peer_that_breaks_the_protocol_is_told_so_and_closed() {
    let (mut east, _) = joined();
    east.on_frame(Frame::Unwant { sub: Sub(9) }, Now(0));
    assert!(east.is_up(), "forgetting what is unknown is no fault: frames cross");
    let hello = east.peer().expect("up").clone();
    east.on_frame(Frame::Hello(hello), Now(0));
    let outputs: Vec<_> = std::iter::from_fn(|| east.poll()).collect();
    let [.., Output::Control(Frame::Error { .. }), Output::Close { code, told_by_peer, .. }] = &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!((*code, *told_by_peer), (LinkErrorCode::Protocol, false));
}
