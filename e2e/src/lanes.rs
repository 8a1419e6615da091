//! What the tests of lanes stand on: lanes by their addresses, a producer that goes on, and who should process what.
//!
//! The judge takes records and lane cuts from the log as `logread.py` tells them, and decides by itself which side
//! of a group each record belongs to; then it compares with what the clients really got, by place and by count.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::clients::{Library, PATIENCE, Record, Running};
use crate::logread::{Log, Logged};
use crate::process::Local;
use crate::services::Services;
use crate::wire::{BatchHead, Conn, batch};

/// The header that names a record's lane in these tests.
pub const HEADER: &str = "x-lane";

/// Something whose first region the command line can be asked about.
pub trait Asked {
    fn ask(&self, arguments: &[&str]) -> Result<String>;
}

impl Asked for Local {
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        self.cli_ok(0, arguments)
    }
}

impl Asked for Services {
    fn ask(&self, arguments: &[&str]) -> Result<String> {
        self.cli(0, arguments)
    }
}

/// Makes a lane in the first region; the bootstrap address of its workloads.
pub fn create(region: &impl Asked, name: &str) -> Result<String> {
    Ok(region.ask(&["lane", "create", name])?.trim().to_owned())
}

/// What `sealane lane status` says of the lane's groups, a row for each partition.
pub fn status(region: &impl Asked, name: &str) -> Result<Vec<Value>> {
    let printed = region.ask(&["lane", "status", name, "--output", "json"])?;
    let status: Value = serde_json::from_str(&printed)?;
    Ok(status["groups"].as_array().cloned().unwrap_or_default())
}

/// Waits until there are rows in `lane status` and every one is in this state ("active", "grace", "closed").
pub fn wait_state(region: &impl Asked, name: &str, state: &str) -> Result<Vec<Value>> {
    let mut rows = Vec::new();
    until(&format!("lane {name} to be {state}"), || {
        rows = match status(region, name) {
            // A broker that was just started reads its groups first.
            Err(error) if format!("{error:#}").contains("try again in a moment") => return Ok(false),
            found => found?,
        };
        Ok(!rows.is_empty() && rows.iter().all(|row| row["state"] == state))
    })?;
    Ok(rows)
}

/// Waits until `done`, which may look at several things.
pub fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < end, "took too long: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// An idempotent producer that writes record after record until it is told to stop.
pub struct Feed {
    producer: Running,
    stop: Arc<AtomicBool>,
    made: Arc<AtomicUsize>,
    thread: JoinHandle<Result<usize>>,
}

impl Feed {
    /// Produces `make(0)`, `make(1)`, ... with a pause after each; the batches hold several of them.
    pub fn start(
        library: Library,
        bootstrap: &str,
        topic: &str,
        pause: Duration,
        make: impl Fn(usize) -> Record + Send + 'static,
    ) -> Result<Feed> {
        let options = ["--idempotent", "--linger", "50", "--codec", "snappy", "--seconds", "120"];
        let mut producer = library.start("produce", bootstrap, topic, &options)?;
        let mut input = producer.input()?;
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let counted = Arc::new(AtomicUsize::new(0));
        let made = Arc::clone(&counted);
        let thread = std::thread::spawn(move || {
            let mut made = 0;
            while !told.load(Ordering::SeqCst) {
                input.write_all(make(made).line(made).as_bytes())?;
                made += 1;
                counted.store(made, Ordering::SeqCst);
                std::thread::sleep(pause);
            }
            Ok(made)
        });
        Ok(Feed { producer, stop, made, thread })
    }

    /// Records that the producer was given by now.
    pub fn made(&self) -> usize {
        self.made.load(Ordering::SeqCst)
    }

    /// Records that were acknowledged by now.
    pub fn acked(&self) -> usize {
        self.producer.acks().len()
    }

    /// Stops, and waits for every acknowledgement; how many records there are.
    pub fn finish(mut self) -> Result<usize> {
        self.stop.store(true, Ordering::SeqCst);
        let made = self.thread.join().map_err(|_| anyhow::anyhow!("the feed panicked"))??;
        self.producer.wait_end(PATIENCE)?;
        let acks = self.producer.acks();
        ensure!(acks.len() == made, "{} of {made} records were answered", acks.len());
        if let Some(refused) = acks.iter().find(|ack| ack.outcome.is_err()) {
            bail!("record {} was refused: {:?}", refused.number, refused.outcome);
        }
        Ok(made)
    }
}

/// Kills a client and returns everything that it got before.
pub fn kill(mut client: Running) -> Result<Vec<Record>> {
    client.kill();
    client.wait_until(PATIENCE, "its end", |_, ended| ended)?;
    Ok(client.records())
}

/// Writes one last record for a side to each partition, named by `tag`.
pub fn write_ends(
    bootstrap: &str,
    topic: &str,
    partitions: i32,
    lane: Option<&str>,
    tag: &str,
) -> Result<()> {
    let mut conn = Conn::open(bootstrap)?;
    for partition in 0..partitions {
        let mut record = Record::numbered(&format!("{tag}-"), partition as usize);
        if let Some(lane) = lane {
            record = record.header(HEADER, lane);
        }
        let (error, _) = conn.produce(topic, partition, &batch(&[record], BatchHead::default()))?;
        ensure!(error == 0, "produce answers error {error}");
    }
    Ok(())
}

/// Waits until the clients together have got what [`write_ends`] wrote: they have seen everything before it.
pub fn wait_ends(clients: &[&Running], partitions: i32, tag: &str) -> Result<()> {
    let wanted: BTreeSet<String> = (0..partitions).map(|partition| format!("{tag}-{partition}")).collect();
    let waited = until(&format!("{tag} at its reader"), || {
        let got: BTreeSet<String> =
            clients.iter().flat_map(|client| client.records()).map(|record| record.text()).collect();
        Ok(wanted.is_subset(&got))
    });
    waited.with_context(|| {
        let said = clients.iter().map(|client| {
            let records = client.records();
            let last = records.last().map(Record::text);
            format!("{} records, the last {last:?}; {}", records.len(), client.complaints())
        });
        said.collect::<Vec<_>>().join("; ")
    })
}

/// A twin must fail, and for the reason that the mechanism is there for.
pub fn fails<T: std::fmt::Debug>(outcome: Result<T>, reasons: &[&str]) -> Result<()> {
    match outcome {
        Ok(stake) => bail!("the mechanism is off and nobody notices: {stake:?}"),
        Err(error) => {
            let text = format!("{error:#}");
            println!("failed as it must: {text}");
            ensure!(
                reasons.iter().any(|reason| text.contains(reason)),
                "it failed for another reason: {text}"
            );
            Ok(())
        }
    }
}

/// One side of a group: its baseline, or its consumers in one lane.
#[derive(Clone, Debug)]
pub struct Side {
    pub lane: Option<String>,
    /// What each process got, in its order.
    pub processes: Vec<Vec<Record>>,
}

/// What a judgement was made of.
#[derive(Clone, Debug, Default)]
pub struct Judged {
    /// Records in the log.
    pub records: usize,
    /// Of those, how many name one of the lanes, and how many of these its baseline got.
    pub lane_records: usize,
    pub fallen_back: usize,
    /// Different records that each side processed, and how often it processed one again.
    pub processed: BTreeMap<Option<String>, usize>,
    pub repeated: BTreeMap<Option<String>, usize>,
    pub activated: u64,
    pub deactivated: u64,
}

/// Fails unless each record of `topic` was processed by the side that it belongs to, and by no other.
pub fn judge(log: &Log, topic: &str, group: &str, sides: &[Side]) -> Result<Judged> {
    let mut judged = Judged {
        activated: log.markers(topic, "activate"),
        deactivated: log.markers(topic, "deactivate"),
        ..Judged::default()
    };
    let mut ids = BTreeSet::new();
    let got: Vec<BTreeMap<(i32, i64), usize>> = sides.iter().map(places).collect::<Result<_>>()?;
    for logged in log.records.iter().filter(|logged| logged.topic == topic) {
        ensure!(ids.insert(logged.record.text()), "{} stands in the log twice", logged.record.text());
        judged.records += 1;
        let named = named_lane(&logged.record);
        let owner = owner(log, logged, group, named.as_deref());
        judged.lane_records += usize::from(named.is_some());
        judged.fallen_back += usize::from(named.is_some() && owner.is_none());
        for (side, got) in sides.iter().zip(&got) {
            let times = got.get(&(logged.partition, logged.offset)).copied().unwrap_or(0);
            ensure!(
                (times > 0) == (side.lane == owner),
                "{} at {}/{} belongs to {owner:?}, and {:?} processed it {times} times",
                logged.record.text(),
                logged.partition,
                logged.offset,
                side.lane
            );
            if times > 0 {
                *judged.processed.entry(side.lane.clone()).or_default() += 1;
                *judged.repeated.entry(side.lane.clone()).or_default() += times - 1;
            }
        }
    }
    let total: usize = judged.processed.values().sum();
    ensure!(total == judged.records, "{total} of {} records were processed", judged.records);
    Ok(judged)
}

/// How often a side got the record at each place.
fn places(side: &Side) -> Result<BTreeMap<(i32, i64), usize>> {
    let mut count = BTreeMap::new();
    for process in &side.processes {
        for record in process {
            let place = (record.partition.context("partition")?, record.offset.context("offset")?);
            *count.entry(place).or_default() += 1;
        }
    }
    Ok(count)
}

fn named_lane(record: &Record) -> Option<String> {
    let value = record.headers.iter().rev().find(|(name, _)| name == HEADER)?.1.as_deref()?;
    Some(String::from_utf8_lossy(value).into_owned())
}

fn owner(log: &Log, logged: &Logged, group: &str, named: Option<&str>) -> Option<String> {
    let lane = named?;
    let at = (logged.topic.as_str(), logged.partition, logged.offset);
    (lane.starts_with("ppe") || log.is_lanes(at, group, lane)).then(|| lane.to_owned())
}
