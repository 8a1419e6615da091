//! Apache Kafka and Sealane side by side: both run all the time, and each round gives both the same loads, in turns.
//! Start-up and idle memory are measured on processes of their own. What the product promises is in [`TARGETS`].

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Scale;
use super::contender::{Contender, Kind};
use super::load::{self, Client, Load};
use super::report::{self, Target};
use super::table::Samples;
use crate::usage;

const GIGABYTE: f64 = 1e9;
const MEBIBYTE: f64 = 1024.0 * 1024.0;
/// Payload that makes the JVM compile its hot path before anything is measured.
const WARM_UP_RECORDS: (u64, u64) = (300_000, 600_000);
/// Records per second and their number in a latency run.
const RATE: u64 = 2_000;
/// The same with a sync for each batch, which is what Kafka can keep up with.
const SYNC_RATE: u64 = 50;
/// How long a started broker rests before its memory counts as idle.
const REST: Duration = Duration::from_secs(3);

/// What is asked of Sealane, as a ratio to Kafka in the same run.
pub const TARGETS: &[Target] = &[
    Target {
        metric: "cpu_s_per_GB",
        cells: "produce ",
        most: true,
        ratio: 1.0 / 3.0,
        what: "produce CPU per GB",
    },
    Target {
        metric: "cpu_s_per_GB",
        cells: "consume ",
        most: true,
        ratio: 2.0 / 3.0,
        what: "consume CPU per GB",
    },
    Target { metric: "MB_per_s", cells: "produce ", most: false, ratio: 1.0, what: "produce throughput" },
    Target { metric: "MB_per_s", cells: "consume ", most: false, ratio: 1.0, what: "consume throughput" },
    Target { metric: "ack_p99_us", cells: "latency", most: true, ratio: 0.5, what: "p99 to acknowledgement" },
    Target { metric: "arrival_p99_us", cells: "latency", most: true, ratio: 0.5, what: "p99 to arrival" },
    Target { metric: "idle_rss_MiB", cells: "", most: true, ratio: 1.0 / 8.0, what: "idle RSS" },
    Target { metric: "peak_rss_MiB", cells: "", most: true, ratio: 1.0 / 8.0, what: "peak RSS" },
    Target { metric: "start_ms", cells: "", most: true, ratio: 0.1, what: "start-up time" },
];

/// One load that both brokers get.
#[derive(Clone, Copy, Debug)]
struct Cell {
    record_bytes: u64,
    codec: &'static str,
    partitions: i32,
    records: u64,
}

impl Cell {
    fn name(self, action: &str, client: Client) -> String {
        let Cell { record_bytes, codec, partitions, .. } = self;
        format!("{action} {} {record_bytes} B {codec} {partitions}p", client.name())
    }
}

/// Runs everything and writes `docs/benchmarks/broker.md` and `broker.tsv`.
pub fn run(scale: Scale) -> Result<()> {
    load::rdkafka_program()?;
    let mut samples = Samples::default();
    start_and_idle(scale, &mut samples)?;
    let brokers = [Contender::start(Kind::Kafka, "os")?, Contender::start(Kind::Sealane, "os")?];
    for broker in &brokers {
        warm_up(scale, broker)?;
        usage::reset_peak(broker.pid())?;
    }
    for round in 1..=scale.rounds {
        for cell in cells(scale) {
            for broker in in_turns(&brokers, round) {
                throughput(round, broker, cell, &mut samples)?;
            }
        }
        for (bytes, partitions) in latency_cells(scale) {
            for broker in in_turns(&brokers, round) {
                latency(scale, round, broker, bytes, partitions, &mut samples)?;
            }
        }
    }
    for broker in brokers {
        let peak = usage::peak_rss_bytes(broker.pid())? as f64 / MEBIBYTE;
        samples.add(scale.rounds, broker.kind.name(), "under all loads", "peak_rss_MiB", peak);
        broker.stop()?;
    }
    synced(scale, &mut samples)?;
    report::write_broker(scale, &samples)
}

/// Writes the report again from `docs/benchmarks/broker.tsv`.
pub fn report_again(scale: Scale) -> Result<()> {
    let file = report::folder().join("broker.tsv");
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let samples = Samples::from_tsv(&text)?;
    let rounds = samples.all.iter().map(|sample| sample.round).max().unwrap_or(0);
    report::write_broker(Scale { rounds, ..scale }, &samples)
}

/// The order alternates, so that a drift of the machine does not favour one.
fn in_turns(brokers: &[Contender; 2], round: usize) -> [&Contender; 2] {
    let [kafka, sealane] = brokers;
    if round % 2 == 1 { [kafka, sealane] } else { [sealane, kafka] }
}

fn start_and_idle(scale: Scale, samples: &mut Samples) -> Result<()> {
    for round in 1..=scale.rounds {
        for kind in Kind::BOTH {
            let broker = Contender::start(kind, "os")?;
            std::thread::sleep(REST);
            let rss = usage::rss_bytes(broker.pid())? as f64 / MEBIBYTE;
            let start = broker.started_after.as_secs_f64() * 1000.0;
            samples.add(round, kind.name(), "empty data", "start_ms", start);
            samples.add(round, kind.name(), "after 3 s", "idle_rss_MiB", rss);
            broker.stop()?;
        }
    }
    Ok(())
}

fn warm_up(scale: Scale, broker: &Contender) -> Result<()> {
    broker.create_topic("warm-up", 1, &[])?;
    let load = Load::plain("warm-up", scale.records(WARM_UP_RECORDS.0, WARM_UP_RECORDS.1), 1024, "none");
    load::produce(Client::Java, &broker.bootstrap(), &load)?;
    load::consume(Client::Java, &broker.bootstrap(), &load)?;
    load::produce(Client::Librdkafka, &broker.bootstrap(), &load)?;
    load::consume(Client::Librdkafka, &broker.bootstrap(), &load)?;
    broker.delete_topic("warm-up")
}

fn throughput(round: usize, broker: &Contender, cell: Cell, samples: &mut Samples) -> Result<()> {
    let who = broker.kind.name();
    for client in Client::ALL {
        let topic =
            format!("t{round}-{}-{}-{}-{}", cell.record_bytes, cell.codec, cell.partitions, client.name());
        broker.create_topic(&topic, cell.partitions, &[])?;
        let load = Load::plain(&topic, cell.records, cell.record_bytes, cell.codec);
        type Action = fn(Client, &str, &Load) -> Result<f64>;
        let actions: [(&str, Action); 2] = [("produce", load::produce), ("consume", load::consume)];
        for (action, act) in actions {
            let before = broker.cpu_seconds()?;
            let rate = act(client, &broker.bootstrap(), &load)?;
            let cpu = (broker.cpu_seconds()? - before) / (load.bytes() / GIGABYTE);
            let name = cell.name(action, client);
            samples.add(round, who, &name, "MB_per_s", rate);
            samples.add(round, who, &name, "cpu_s_per_GB", cpu);
        }
        broker.delete_topic(&topic)?;
    }
    Ok(())
}

fn latency(
    scale: Scale,
    round: usize,
    broker: &Contender,
    record_bytes: u64,
    partitions: i32,
    samples: &mut Samples,
) -> Result<()> {
    let topic = format!("latency-{round}-{record_bytes}-{partitions}");
    broker.create_topic(&topic, partitions, &[])?;
    let load = Load::plain(&topic, scale.records(RATE * 5, RATE * 10), record_bytes, "none");
    let (ack, arrival) = load::latency(&broker.bootstrap(), &load, RATE)?;
    let cell = format!("latency {RATE}/s {record_bytes} B {partitions}p");
    for (metric, value) in [
        ("ack_p50_us", ack.p50),
        ("ack_p99_us", ack.p99),
        ("ack_p999_us", ack.p999),
        ("arrival_p50_us", arrival.p50),
        ("arrival_p99_us", arrival.p99),
        ("arrival_p999_us", arrival.p999),
    ] {
        samples.add(round, broker.kind.name(), &cell, metric, value);
    }
    broker.delete_topic(&topic)
}

/// For information: every record on the disk before it is acknowledged. Sealane with `durability = "sync"` shares
/// a sync between records; Kafka with `flush.messages=1` makes one for each batch.
fn synced(scale: Scale, samples: &mut Samples) -> Result<()> {
    let brokers = [Contender::start(Kind::Kafka, "sync")?, Contender::start(Kind::Sealane, "sync")?];
    for round in 1..=scale.rounds {
        for broker in in_turns(&brokers, round) {
            let topic = format!("synced-{round}");
            broker.create_topic(&topic, 1, &[("flush.messages", "1")])?;
            let load = Load::plain(&topic, scale.records(20_000, 30_000), 1024, "none");
            let before = broker.cpu_seconds()?;
            let rate = load::produce(Client::Java, &broker.bootstrap(), &load)?;
            let cpu = (broker.cpu_seconds()? - before) / (load.bytes() / GIGABYTE);
            let latency = Load::plain(&topic, scale.records(SYNC_RATE * 5, SYNC_RATE * 20), 1024, "none");
            let (ack, _) = load::latency(&broker.bootstrap(), &latency, SYNC_RATE)?;
            for (metric, value) in [
                ("sync_MB_per_s", rate),
                ("sync_cpu_s_per_GB", cpu),
                ("sync_p50_us", ack.p50),
                ("sync_p99_us", ack.p99),
            ] {
                samples.add(round, broker.kind.name(), "synced 1024 B none 1p", metric, value);
            }
            broker.delete_topic(&topic)?;
        }
    }
    brokers.into_iter().try_for_each(Contender::stop)
}

/// Small records are fewer bytes: clients take longer for each byte of them.
fn cells(scale: Scale) -> Vec<Cell> {
    let all = [(100, "none", 1), (1024, "none", 1), (1024, "zstd", 12)];
    let more =
        [(100, "none", 12), (100, "zstd", 1), (100, "zstd", 12), (1024, "none", 12), (1024, "zstd", 1)];
    let more = if scale.is_full() { &more[..] } else { &more[..0] };
    let cell = |&(record_bytes, codec, partitions): &(u64, &'static str, i32)| {
        let quick = if record_bytes < 1024 { 800_000 } else { 200_000 };
        let records = scale.records(quick, 2 * quick);
        Cell { record_bytes, codec, partitions, records }
    };
    all.iter().chain(more).map(cell).collect()
}

fn latency_cells(scale: Scale) -> Vec<(u64, i32)> {
    if scale.is_full() { vec![(1024, 1), (1024, 12), (100, 1)] } else { vec![(1024, 1)] }
}
