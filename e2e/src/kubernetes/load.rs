//! A real client's load on brokers in a region: current librdkafka, idempotent, `acks=all`, which remembers the offset of
//! every acknowledged record; and a reader that remembers what it saw where. Both come from outside, through ports of nodes,
//! and retry as their defaults say; anything that they tell their user beyond that is an error.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{PATIENCE, wait_for};
use crate::clients::{Library, Record, Running};

const RECORDS_PER_SECOND: u64 = 200;
/// Records in a topic, by partition and offset.
type Found = BTreeMap<(i32, i64), String>;

pub struct Load {
    bootstrap: String,
    topic: String,
    stop: Arc<AtomicBool>,
    written: Arc<AtomicUsize>,
    feeder: Option<JoinHandle<Result<()>>>,
    producer: Running,
    reader: Running,
}

impl Load {
    /// Begins to write numbers to a topic, and to read them. The topic is this load's own.
    pub fn start(bootstrap: &str, topic: &str) -> Result<Load> {
        let client = Library::Confluent;
        let reader = client.start("consume", bootstrap, topic, &["--seconds", "100000"])?;
        reader.wait_assigned()?;
        let settings = ["--idempotent", "--acks", "all", "--seconds", "280"];
        let mut producer = client.start("produce", bootstrap, topic, &settings)?;
        let mut input = producer.input()?;
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, count) = (stop.clone(), written.clone());
        let feeder = std::thread::spawn(move || {
            let begin = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let due = (begin.elapsed().as_millis() as u64 * RECORDS_PER_SECOND / 1000) as usize;
                for number in count.load(Ordering::Relaxed)..due {
                    input.write_all(Record::numbered("", number).line(number).as_bytes())?;
                    count.fetch_add(1, Ordering::Relaxed);
                }
                input.flush()?;
                sleep(Duration::from_millis(10));
            }
            Ok(())
        });
        let (bootstrap, topic) = (bootstrap.to_owned(), topic.to_owned());
        Ok(Load { bootstrap, topic, stop, written, feeder: Some(feeder), producer, reader })
    }

    /// Waits until so many more records are acknowledged: for something to happen under load.
    pub fn until_more(&self, records: usize) -> Result<()> {
        let aim = self.written.load(Ordering::Relaxed) + records;
        self.producer.wait_until(PATIENCE, "more acknowledged records", |lines, _| lines.len() >= aim)
    }

    /// Ends it and holds what is in the topic against what was promised and seen: each record once, those of a partition in
    /// order, where the producer was told, and where the reader saw it. How many records that is.
    pub fn judge(self) -> Result<usize> {
        self.judge_but("nothing is allowed")
    }

    /// The same where no broker at all was to be reached for a while, which a reader is told.
    pub fn judge_after_silence(self) -> Result<usize> {
        self.judge_but("brokers are down")
    }

    fn judge_but(mut self, allowed: &str) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        let feeder = self.feeder.take().context("it feeds")?;
        feeder.join().map_err(|_| anyhow::anyhow!("the feeder panicked"))??;
        self.producer.wait_end(PATIENCE)?;
        let (acks, written) = (self.producer.acks(), self.written.load(Ordering::Relaxed));
        ensure!(acks.len() == written, "{} answers for {written} records", acks.len());
        let found = self.read()?;
        ensure!(found.len() == written, "{} records are there, {written} were written", found.len());
        for ack in acks {
            let number = ack.number;
            let place = ack.outcome.map_err(|error| anyhow::anyhow!("record {number}: {error}"))?;
            let there = found.get(&place);
            ensure!(there == Some(&number.to_string()), "record {number} is not at {place:?}, but {there:?}");
        }
        let mut last: BTreeMap<i32, u64> = BTreeMap::new();
        for ((partition, _), value) in &found {
            let number: u64 = value.parse()?;
            let before = last.insert(*partition, number);
            ensure!(before < Some(number), "partition {partition}: {before:?} before {number}");
        }
        wait_for("the reader to see the end", || {
            let seen = seen(&self.reader.records());
            ensure!(seen == found, "it saw {} of {}", seen.len(), found.len());
            Ok(Some(()))
        })?;
        // What librdkafka logs while it tries again is not told to its user.
        let mut told = self.reader.lines();
        told.retain(|line| line.get("error").is_some_and(|error| !error.to_string().contains(allowed)));
        ensure!(told.is_empty(), "the reader was told: {told:?}");
        Ok(written)
    }

    fn read(&self) -> Result<Found> {
        let (records, _) = Library::Confluent.read_to_end(&self.bootstrap, &self.topic, &[])?;
        Ok(seen(&records))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn seen(records: &[Record]) -> Found {
    let place = |record: &Record| Some((record.partition?, record.offset?));
    records.iter().filter_map(|record| Some((place(record)?, record.text()))).collect()
}
