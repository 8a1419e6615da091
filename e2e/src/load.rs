//! Idempotent producers that survive the death of their broker, and remember every promise they were given.
//!
//! A writer owns one partition of one region: it numbers its records, keeps several batches in flight, and after a
//! lost connection sends again what was not answered, under the same sequence numbers, as a real client does. What
//! it was told (record number -> offset) is what a crash test holds the log against.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::clients::Record;
use crate::dice::Dice;
use crate::logread::Log;
use crate::wire::{self, BatchHead, Conn, Take, batch, produce_body};

/// As many batches as the broker must remember of a producer.
const IN_FLIGHT_MAX: usize = 5;
const BATCH_RECORDS_MAX: u64 = 12;
const VALUE_BYTES_MAX: u64 = 2_000;
/// Answers after which the same batch is sent again: not leader, loading, storage, timeout and their kin.
const RETRIED: &[i16] = &[3, 5, 6, 7, 9, 13, 14, 15, 19, 20, 56];

/// How long a broker may say "try again".
const RETRY_LIMIT: Duration = Duration::from_secs(30);

/// A batch that waits for its answer.
#[derive(Debug)]
struct Unanswered {
    first: u64,
    count: u64,
    bytes: Vec<u8>,
}

/// One producer of one partition.
#[derive(Debug)]
pub struct Writer {
    pub topic: String,
    pub partition: i32,
    prefix: String,
    dice: Dice,
    producer: Option<(i64, i16)>,
    next: u64,
    unanswered: VecDeque<Unanswered>,
    /// Record number -> offset, for every record whose batch was acknowledged with acks=all.
    pub acked: BTreeMap<u64, i64>,
    /// Records that were in flight when a connection broke.
    pub in_flight_at_a_break: u64,
    /// Batches that were sent again over another connection.
    pub sent_again: u64,
    /// Answers that said "try again".
    pub refusals: u64,
}

/// Writers that run.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<(Writer, Result<()>)>>,
}

impl Writer {
    pub fn new(topic: &str, partition: i32, prefix: &str, seed: u64) -> Writer {
        Writer {
            topic: topic.to_owned(),
            partition,
            prefix: prefix.to_owned(),
            dice: Dice::new(seed),
            producer: None,
            next: 0,
            unanswered: VecDeque::new(),
            acked: BTreeMap::new(),
            in_flight_at_a_break: 0,
            sent_again: 0,
            refusals: 0,
        }
    }

    /// Records made so far, acknowledged or not.
    pub fn made(&self) -> u64 {
        self.next
    }

    /// Writes until `stop`, then waits for the answers that are due. A broken connection is an ordinary end;
    /// an answer that a broker must never give is an error.
    fn run(&mut self, address: &str, stop: &AtomicBool) -> Result<()> {
        let Ok(mut conn) = Conn::open(address) else { return Ok(()) };
        self.sent_again += self.unanswered.len() as u64;
        let result = self.talk(&mut conn, stop);
        match result {
            Err(error) if error.downcast_ref::<std::io::Error>().is_some() => {
                self.in_flight_at_a_break += self.unanswered.iter().map(|batch| batch.count).sum::<u64>();
                Ok(())
            }
            other => other,
        }
    }

    fn talk(&mut self, conn: &mut Conn, stop: &AtomicBool) -> Result<()> {
        if self.producer.is_none() {
            self.producer = Some(conn.init_producer_id()?);
        }
        let mut sent = VecDeque::new();
        let mut progress = Instant::now();
        loop {
            while sent.len() < IN_FLIGHT_MAX {
                if sent.len() == self.unanswered.len() {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let made = self.make()?;
                    self.unanswered.push_back(made);
                }
                let bytes = &self.unanswered[sent.len()].bytes;
                let body = produce_body(&self.topic, self.partition, -1, bytes);
                sent.push_back(conn.send(wire::PRODUCE, 7, &body, false)?);
            }
            let Some(id) = sent.pop_front() else { return Ok(()) };
            let (error, base) = produced(&conn.answer(id)?)?;
            if RETRIED.contains(&error) {
                self.refusals += 1;
                ensure!(
                    progress.elapsed() < RETRY_LIMIT,
                    "{}-{}: produce answers error {error} again and again",
                    self.topic,
                    self.partition
                );
                // What was pipelined behind it fails or is a repeat; all of it is sent again, in order.
                for id in sent.drain(..) {
                    conn.answer(id)?;
                }
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            ensure!(error == 0, "{}-{}: produce answers error {error}", self.topic, self.partition);
            self.answered(base)?;
            progress = Instant::now();
        }
    }

    fn make(&mut self) -> Result<Unanswered> {
        let (producer_id, producer_epoch) = self.producer.context("a producer id was given")?;
        let (first, count) = (self.next, self.dice.between(1, BATCH_RECORDS_MAX));
        let records: Vec<Record> = (first..first + count)
            .map(|n| {
                let padding = "x".repeat(self.dice.below(VALUE_BYTES_MAX) as usize);
                let value = format!("{}{n}/{padding}", self.prefix);
                Record { value: Some(value.into_bytes()), ..Record::numbered("", n as usize) }
            })
            .collect();
        let head = BatchHead { producer_id, producer_epoch, sequence: first as i32, ..BatchHead::default() };
        self.next += count;
        Ok(Unanswered { first, count, bytes: batch(&records, head) })
    }

    fn answered(&mut self, base: i64) -> Result<()> {
        let batch = self.unanswered.pop_front().context("an answer is to something sent")?;
        for at in 0..batch.count {
            let (n, offset) = (batch.first + at, base + at as i64);
            let before = self.acked.insert(n, offset);
            ensure!(
                before.is_none_or(|before| before == offset),
                "record {n} was acknowledged at two offsets"
            );
        }
        Ok(())
    }

    /// Holds the log of the writer's region against what was promised. Returns how many records it found.
    pub fn judge(&self, log: &Log) -> Result<usize> {
        let mut found: BTreeMap<u64, i64> = BTreeMap::new();
        let mut last = None;
        for logged in &log.records {
            if logged.topic != self.topic || logged.partition != self.partition || logged.origin.is_some() {
                continue;
            }
            let text = logged.record.text();
            let Some(rest) = text.strip_prefix(&self.prefix) else { continue };
            let number = rest.split('/').next().unwrap_or_default().parse::<u64>()?;
            ensure!(last < Some(number), "{}{number} stands after {}{last:?}", self.prefix, self.prefix);
            last = Some(number);
            ensure!(
                found.insert(number, logged.offset).is_none(),
                "{}{number} stands there twice",
                self.prefix
            );
        }
        for (number, offset) in &self.acked {
            match found.get(number) {
                Some(at) if at == offset => {}
                Some(at) => bail!("{}{number} was acknowledged at {offset} and stands at {at}", self.prefix),
                None => bail!("{}{number} was acknowledged at {offset} and is lost", self.prefix),
            }
        }
        ensure!(found.keys().all(|number| *number < self.next), "records that nobody wrote");
        Ok(found.len())
    }
}

impl Load {
    /// Lets the writers run against their brokers; `addresses[i]` is that of `writers[i]`.
    pub fn start(writers: Vec<Writer>, addresses: &[String]) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = writers.into_iter().zip(addresses.iter().cloned());
        let threads = threads.map(|(mut writer, address)| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                let result = writer.run(&address, &stop);
                (writer, result)
            })
        });
        Load { threads: threads.collect(), stop }
    }

    /// Tells the writers to stop, waits for them, and returns them in their order.
    pub fn finish(self) -> Result<Vec<Writer>> {
        self.stop.store(true, Ordering::SeqCst);
        self.join()
    }

    /// Waits for writers whose broker was killed.
    pub fn join(self) -> Result<Vec<Writer>> {
        let mut writers = Vec::new();
        for thread in self.threads {
            let (writer, result) = thread.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?;
            result?;
            writers.push(writer);
        }
        Ok(writers)
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
