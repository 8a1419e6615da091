//! What lies in a region's log, told by `e2e/clients/logread.py`, which shares no code with the product.
//!
//! Owns the comparison of regions: same set of records, each origin's order kept, none twice. The process whose
//! data is read must be stopped or killed first: a reader of a log that is being written may see half a batch.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::clients::{PATIENCE, Record, Running};
use crate::tools;

/// A record with where it was produced.
#[derive(Clone, Debug)]
pub struct Logged {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    /// The origin region's id; none: produced in the region whose log this is.
    pub origin: Option<String>,
    pub origin_offset: i64,
    pub record: Record,
}

/// One partition of a region.
#[derive(Clone, Debug)]
pub struct PartitionLog {
    pub topic: String,
    pub partition: i32,
    pub start: i64,
    pub end: i64,
    /// Bytes of batches that came over a mirror.
    pub unit_bytes: u64,
    pub markers: BTreeMap<String, u64>,
}

/// From here on a lane's group owns, or no longer owns, the lane's records.
#[derive(Clone, Debug)]
pub struct Cut {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    pub activate: bool,
    pub group: String,
    pub lane: String,
}

/// Everything in a region's log.
#[derive(Clone, Debug, Default)]
pub struct Log {
    pub records: Vec<Logged>,
    /// In the order of each partition's log.
    pub cuts: Vec<Cut>,
    pub partitions: Vec<PartitionLog>,
}

/// Reads the log below `data`; fails on the first thing that does not add up.
pub fn read(data: &Path, topic: Option<&str>) -> Result<Log> {
    let mut command = Command::new(tools::python()?);
    command.arg(tools::client_files().join("logread.py")).arg("records").arg(data);
    if let Some(topic) = topic {
        command.args(["--topic", topic]);
    }
    let mut running = Running::start(&mut command)?;
    running.wait_end(PATIENCE).with_context(|| format!("read the log in {}", data.display()))?;
    let mut log = Log::default();
    for line in running.lines() {
        if line.get("partition").is_some() {
            log.partitions.push(partition_of(&line)?);
        } else if line.get("cut").is_some() {
            log.cuts.push(cut_of(&line)?);
        } else {
            log.records.push(Logged {
                topic: text(&line, "topic")?,
                partition: number(&line, "p")? as i32,
                offset: number(&line, "o")?,
                origin: line["origin"].as_str().map(str::to_owned),
                origin_offset: number(&line, "oo")?,
                record: Record::from_line(&line)?,
            });
        }
    }
    Ok(log)
}

impl Log {
    /// The values of a topic's partition, in log order.
    pub fn values(&self, topic: &str, partition: i32) -> Vec<String> {
        let here = |logged: &&Logged| logged.topic == topic && logged.partition == partition;
        self.records.iter().filter(here).map(|logged| logged.record.text()).collect()
    }

    /// How many control records of a kind ("mirror", "activate", ...) a topic holds.
    pub fn markers(&self, topic: &str, kind: &str) -> u64 {
        let here = self.partitions.iter().filter(|partition| partition.topic == topic);
        here.filter_map(|partition| partition.markers.get(kind)).sum()
    }

    /// Whether a record of `lane` at this place is the lane's, for a base group: it lies in an interval from an
    /// activate to the next deactivate.
    pub fn is_lanes(&self, at: (&str, i32, i64), group: &str, lane: &str) -> bool {
        let (topic, partition, offset) = at;
        let mut before = self.cuts.iter().filter(|cut| {
            (cut.topic.as_str(), cut.partition) == (topic, partition)
                && (cut.group.as_str(), cut.lane.as_str()) == (group, lane)
                && cut.offset <= offset
        });
        before.next_back().is_some_and(|cut| cut.activate)
    }

    /// (key, value, headers, timestamp) of what was produced here, by partition, in order.
    fn local(&self, topic: &str) -> BTreeMap<i32, Vec<&Logged>> {
        self.by_partition(topic, |logged| logged.origin.is_none())
    }

    /// The same of what came over the mirror.
    fn remote(&self, topic: &str) -> BTreeMap<i32, Vec<&Logged>> {
        self.by_partition(topic, |logged| logged.origin.is_some())
    }

    fn by_partition(&self, topic: &str, keep: impl Fn(&Logged) -> bool) -> BTreeMap<i32, Vec<&Logged>> {
        let mut found: BTreeMap<i32, Vec<&Logged>> = BTreeMap::new();
        for logged in self.records.iter().filter(|logged| logged.topic == topic && keep(logged)) {
            found.entry(logged.partition).or_default().push(logged);
        }
        found
    }
}

/// Fails unless what `from` produced stands in `to`: the same records, at the origin offsets they have in `from`,
/// in that order, unchanged, each once.
pub fn ensure_mirrored(from: &Log, to: &Log, topic: &str) -> Result<usize> {
    let (sent, got) = (from.local(topic), to.remote(topic));
    let mut count = 0;
    for (partition, sent) in &sent {
        let got = got.get(partition).map(Vec::as_slice).unwrap_or_default();
        ensure!(
            sent.len() == got.len(),
            "{topic}-{partition}: {} records were produced, {} arrived; the first that differs is number {}",
            sent.len(),
            got.len(),
            sent.iter().zip(got).take_while(|(one, other)| one.offset == other.origin_offset).count()
        );
        for (one, other) in sent.iter().zip(got) {
            ensure!(
                one.offset == other.origin_offset
                    && one.record.content() == other.record.content()
                    && one.record.timestamp == other.record.timestamp,
                "{topic}-{partition}: {one:?} arrived as {other:?}"
            );
            count += 1;
        }
    }
    let extra: usize = got.keys().filter(|partition| !sent.contains_key(partition)).count();
    ensure!(extra == 0, "{topic}: records arrived on {extra} partitions where none was produced");
    Ok(count)
}

fn partition_of(line: &Value) -> Result<PartitionLog> {
    let markers = line["markers"].as_object().context("markers")?;
    Ok(PartitionLog {
        topic: text(line, "topic")?,
        partition: number(line, "p")? as i32,
        start: line["start"].as_i64().unwrap_or(0),
        end: line["end"].as_i64().unwrap_or(0),
        unit_bytes: line["unit_bytes"].as_u64().unwrap_or(0),
        markers: markers.iter().map(|(kind, n)| (kind.clone(), n.as_u64().unwrap_or(0))).collect(),
    })
}

fn cut_of(line: &Value) -> Result<Cut> {
    Ok(Cut {
        topic: text(line, "topic")?,
        partition: number(line, "p")? as i32,
        offset: number(line, "o")?,
        activate: line["cut"] == "activate",
        group: text(line, "group")?,
        lane: text(line, "lane")?,
    })
}

fn text(line: &Value, name: &str) -> Result<String> {
    line[name].as_str().map(str::to_owned).with_context(|| format!("no {name} in {line}"))
}

fn number(line: &Value, name: &str) -> Result<i64> {
    line[name].as_i64().with_context(|| format!("no {name} in {line}"))
}
