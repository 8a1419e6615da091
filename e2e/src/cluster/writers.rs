//! Idempotent producers that find a partition's owner as any client does, and remember every promise.
//!
//! One thread for each partition. What was not answered is sent again, to whoever owns the partition by then, under
//! the same sequence numbers. Each acknowledgement is kept with the time at which its batch was sent, so that the
//! first one of after a fault can be told from those that were on their way.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::lines::Found;
use crate::clients::{PATIENCE, Record};
use crate::dice::Dice;
use crate::wire::{self, BatchHead, Conn, METADATA, Put, Take, batch, produce_body};

/// As many batches as the broker must remember of a producer.
const IN_FLIGHT_MAX: usize = 5;
const BATCH_RECORDS_MAX: u64 = 5;
const VALUE_BYTES_MAX: u64 = 300;
/// Between two batches of a partition.
const PACE: Duration = Duration::from_millis(15);
/// Between two looks for an owner.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// A broker that hangs is asked no longer than this.
const ANSWER_LIMIT: Duration = Duration::from_millis(1_500);
/// Answers after which the same batch is sent again: not leader, loading, storage, timeout and their kin. A gap in
/// the sequence numbers (45) comes of a batch before that was refused.
const RETRIED: &[i16] = &[3, 5, 6, 7, 9, 13, 14, 15, 19, 20, 45, 56];

/// Brokers of which some may be dead, and what they say about who owns what.
#[derive(Clone, Debug)]
pub struct Directory {
    addresses: Vec<String>,
    /// Whom to ask first: who answered last.
    first: usize,
}

/// Writers that run, one for each partition of a topic.
pub struct Writers {
    stop: Arc<AtomicBool>,
    progress: Vec<Arc<Progress>>,
    threads: Vec<JoinHandle<(Writer, Result<()>)>>,
}

/// What is seen of a writer from outside.
#[derive(Debug, Default)]
struct Progress {
    /// (sent, acknowledged) of every batch.
    acks: Mutex<Vec<(Instant, Instant)>>,
    in_flight: AtomicU64,
    refusals: AtomicU64,
    sent_again: AtomicU64,
}

/// What writers were promised and how it went.
#[derive(Debug, Default)]
pub struct Promises {
    /// By partition: record number -> offset.
    acked: Vec<BTreeMap<u64, i64>>,
    made: Vec<u64>,
    pub refusals: u64,
    pub sent_again: u64,
}

struct Unanswered {
    first: u64,
    count: u64,
    bytes: Vec<u8>,
    sent: Option<Instant>,
}

struct Writer {
    directory: Directory,
    topic: String,
    partition: i32,
    dice: Dice,
    producer: Option<(i64, i16)>,
    next: u64,
    unanswered: VecDeque<Unanswered>,
    acked: BTreeMap<u64, i64>,
    progress: Arc<Progress>,
}

impl Directory {
    pub fn new(addresses: Vec<String>) -> Directory {
        Directory { addresses, first: 0 }
    }

    /// `host:port` of the owner of each partition of a topic, where one is known; none if no broker answers.
    pub fn owners(&mut self, topic: &str) -> Option<Vec<Option<String>>> {
        let count = self.addresses.len();
        let (owners, at) = (0..count)
            .map(|step| (self.first + step) % count)
            .find_map(|at| Some((owners_by(&self.addresses[at], topic).ok()?, at)))?;
        self.first = at;
        Some(owners)
    }
}

/// What one broker says.
fn owners_by(address: &str, topic: &str) -> Result<Vec<Option<String>>> {
    let mut conn = connect(address)?;
    let mut body = Put::default();
    body.i32(1).string(Some(topic));
    let answer = conn.call(METADATA, 1, &body.0)?;
    let mut take = Take::new(&answer);
    let mut brokers = BTreeMap::new();
    for _ in 0..take.i32()? {
        let (id, host) = (take.i32()?, take.string()?.unwrap_or_default());
        brokers.insert(id, format!("{host}:{}", take.i32()?));
        take.string()?;
    }
    take.i32()?; // controller
    ensure!(take.i32()? == 1, "one topic");
    let error = take.i16()?;
    ensure!(error == 0, "Metadata of {topic} answers error {error}");
    take.string()?;
    take.i8()?;
    let mut owners = BTreeMap::new();
    for _ in 0..take.i32()? {
        take.i16()?;
        let (partition, leader) = (take.i32()?, take.i32()?);
        owners.insert(partition, brokers.get(&leader).cloned());
        for _ in 0..2 {
            let replicas = take.i32()?.max(0) as usize;
            take.skip(4 * replicas)?;
        }
    }
    Ok(owners.into_values().collect())
}

fn connect(address: &str) -> Result<Conn> {
    let conn = Conn::open(address)?;
    conn.stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    conn.stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    Ok(conn)
}

impl Writers {
    pub fn start(addresses: &[String], topic: &str, partitions: i32, seed: u64) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let (mut threads, mut all) = (Vec::new(), Vec::new());
        for partition in 0..partitions {
            let progress = Arc::new(Progress::default());
            all.push(progress.clone());
            let mut writer = Writer {
                directory: Directory::new(addresses.to_vec()),
                topic: topic.to_owned(),
                partition,
                dice: Dice::new(seed * 1_000 + partition as u64 + 1),
                producer: None,
                next: 0,
                unanswered: VecDeque::new(),
                acked: BTreeMap::new(),
                progress,
            };
            let stop = stop.clone();
            threads.push(std::thread::spawn(move || {
                let result = writer.run(&stop);
                (writer, result)
            }));
        }
        Writers { stop, progress: all, threads }
    }

    /// Of a partition: the first acknowledgement of a batch that was sent after a moment.
    pub fn first_after(&self, partition: usize, moment: Instant) -> Option<Instant> {
        let acks = self.progress[partition].acks.lock().expect("no writer panics");
        acks.iter().filter(|(sent, _)| *sent > moment).map(|(_, at)| *at).min()
    }

    /// Of a partition: the longest time without an acknowledgement since then.
    pub fn longest_pause_since(&self, partition: usize, moment: Instant) -> Duration {
        let acks = self.progress[partition].acks.lock().expect("no writer panics");
        let after: Vec<Instant> = acks.iter().map(|(_, at)| *at).filter(|at| *at > moment).collect();
        let before = acks.iter().map(|(_, at)| *at).filter(|at| *at <= moment).max().unwrap_or(moment);
        let mut pause = Duration::ZERO;
        let mut last = before;
        for at in after.into_iter().chain([Instant::now()]) {
            pause = pause.max(at - last);
            last = at;
        }
        pause
    }

    /// Waits until these partitions have acknowledged what was sent after a moment; how long each of them took.
    pub fn until_first_after(&self, partitions: &[usize], moment: Instant) -> Result<Vec<Duration>> {
        let end = Instant::now() + PATIENCE;
        let mut times = Vec::new();
        for partition in partitions {
            loop {
                if let Some(at) = self.first_after(*partition, moment) {
                    times.push(at - moment);
                    break;
                }
                ensure!(
                    !self.threads[*partition].is_finished(),
                    "the writer of partition {partition} has ended"
                );
                ensure!(Instant::now() < end, "partition {partition} acknowledges nothing any more");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(times)
    }

    /// Records that were sent and not answered yet.
    pub fn in_flight(&self) -> u64 {
        self.progress.iter().map(|progress| progress.in_flight.load(Ordering::Relaxed)).sum()
    }

    /// Waits for every answer that is due.
    pub fn finish(self) -> Result<Promises> {
        self.stop.store(true, Ordering::SeqCst);
        let mut promises = Promises::default();
        let mut failure = None;
        for (thread, progress) in self.threads.into_iter().zip(&self.progress) {
            let (writer, result) = thread.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?;
            failure = failure.or(result.err());
            promises.acked.push(writer.acked);
            promises.made.push(writer.next);
            promises.refusals += progress.refusals.load(Ordering::Relaxed);
            promises.sent_again += progress.sent_again.load(Ordering::Relaxed);
        }
        match failure {
            Some(error) => Err(error),
            None => Ok(promises),
        }
    }
}

impl Promises {
    /// Records that were made. When all writers have finished, each of them was acknowledged.
    pub fn made(&self) -> u64 {
        self.made.iter().sum()
    }

    pub fn acknowledged(&self) -> u64 {
        self.acked.iter().map(|acked| acked.len() as u64).sum()
    }

    /// Everything that was promised stands where it was promised, once, in order, and nothing that nobody sent.
    pub fn judge(&self, found: &Found) -> Result<()> {
        let mut last: BTreeMap<i32, u64> = BTreeMap::new();
        let mut there: Vec<BTreeMap<u64, i64>> = vec![BTreeMap::new(); self.acked.len()];
        for ((partition, offset), value) in found {
            let Some((of, number)) = value.strip_prefix('w').and_then(|rest| rest.split_once('/')) else {
                continue;
            };
            let number = number.split('/').next().unwrap_or_default();
            let (of, number): (i32, u64) = (of.parse()?, number.parse()?);
            ensure!(of == *partition, "a record of partition {of} stands in {partition}");
            let before = last.insert(of, number);
            ensure!(before < Some(number), "partition {of}: record {number} after {before:?}");
            let at = of as usize;
            ensure!(number < self.made[at], "partition {of}: record {number} was never sent");
            there[at].insert(number, *offset);
        }
        for (partition, acked) in self.acked.iter().enumerate() {
            for (number, offset) in acked {
                match there[partition].get(number) {
                    Some(at) if at == offset => {}
                    at => bail!("{partition}: record {number}, acknowledged at {offset}, stands at {at:?}"),
                }
            }
        }
        Ok(())
    }
}

impl Writer {
    fn run(&mut self, stop: &AtomicBool) -> Result<()> {
        let mut stopped_at = None;
        loop {
            match self.talk(stop) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if error.downcast_ref::<std::io::Error>().is_some() => {}
                Err(error) => return Err(error),
            }
            if stop.load(Ordering::SeqCst) {
                let since = *stopped_at.get_or_insert_with(Instant::now);
                let left = self.unanswered.len();
                let (topic, partition) = (&self.topic, self.partition);
                ensure!(since.elapsed() < PATIENCE, "{topic}-{partition}: {left} batches are not answered");
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// With one connection to the owner, until it ends or says that it is none. Whether all is done.
    fn talk(&mut self, stop: &AtomicBool) -> Result<bool> {
        let owners = self.directory.owners(&self.topic);
        let owner = owners.and_then(|owners| owners.get(self.partition as usize).cloned().flatten());
        let Some(owner) = owner else { return Ok(false) };
        let mut conn = connect(&owner)?;
        if self.producer.is_none() {
            // Any broker gives one out, as soon as it can write down that it did.
            let Ok(producer) = conn.init_producer_id() else { return Ok(false) };
            self.producer = Some(producer);
        }
        self.progress.sent_again.fetch_add(self.unanswered.len() as u64, Ordering::Relaxed);
        let mut sent = VecDeque::new();
        loop {
            // Nothing overtakes the first batch, which tells the broker of the producer.
            let window = if self.acked.is_empty() { 1 } else { IN_FLIGHT_MAX };
            while sent.len() < window {
                if sent.len() == self.unanswered.len() {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    std::thread::sleep(PACE);
                    let made = self.make()?;
                    self.unanswered.push_back(made);
                }
                let batch = &mut self.unanswered[sent.len()];
                batch.sent = Some(Instant::now());
                let body = produce_body(&self.topic, self.partition, -1, &batch.bytes);
                sent.push_back(conn.send(wire::PRODUCE, 7, &body, false)?);
                let in_flight = self.unanswered.iter().map(|batch| batch.count).sum();
                self.progress.in_flight.store(in_flight, Ordering::Relaxed);
            }
            let Some(id) = sent.pop_front() else { return Ok(true) };
            let (error, base) = produced(&conn.answer(id)?)?;
            if RETRIED.contains(&error) {
                self.progress.refusals.fetch_add(1, Ordering::Relaxed);
                return Ok(false);
            }
            ensure!(error == 0, "{}-{}: produce answers error {error}", self.topic, self.partition);
            self.answered(base)?;
        }
    }

    fn make(&mut self) -> Result<Unanswered> {
        let (producer_id, producer_epoch) = self.producer.context("a producer id was given")?;
        let (first, count) = (self.next, self.dice.between(1, BATCH_RECORDS_MAX + 1));
        let records: Vec<Record> = (first..first + count)
            .map(|number| {
                let padding = "x".repeat(self.dice.below(VALUE_BYTES_MAX) as usize);
                let value = format!("w{}/{number}/{padding}", self.partition);
                Record { value: Some(value.into_bytes()), ..Record::default() }
            })
            .collect();
        let head = BatchHead { producer_id, producer_epoch, sequence: first as i32, ..BatchHead::default() };
        self.next += count;
        Ok(Unanswered { first, count, bytes: batch(&records, head), sent: None })
    }

    fn answered(&mut self, base: i64) -> Result<()> {
        let batch = self.unanswered.pop_front().context("an answer is to something sent")?;
        for at in 0..batch.count {
            let (number, offset) = (batch.first + at, base + at as i64);
            self.acked.insert(number, offset);
        }
        if let Some(sent) = batch.sent {
            let mut acks = self.progress.acks.lock().expect("no writer panics");
            acks.push((sent, Instant::now()));
        }
        Ok(())
    }
}

/// (error, base offset) of a Produce 7 answer for one partition.
fn produced(answer: &[u8]) -> Result<(i16, i64)> {
    let mut take = Take::new(answer);
    ensure!(take.i32()? == 1, "one topic");
    take.string()?;
    ensure!(take.i32()? == 1, "one partition");
    take.i32()?;
    Ok((take.i16()?, take.i64()?))
}
