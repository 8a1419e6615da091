//! One broker on its own disk, on HDFS and on S3: throughput, latency, CPU, flushes and requests, by the number of
//! partitions that are written to. Flushes and requests of the store are what remote stores are paid for.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::contender::{Contender, Kind};
use super::generator::{Shape, generate};
use super::table::Samples;
use super::{Scale, Size, report};
use crate::cluster::{Cluster, Store};
use crate::soak::percentile;
use crate::usage;
use crate::wire::Conn;

const GIGABYTE: f64 = 1e9;
/// Of every batch under load.
const BATCH_BYTES: usize = 16 << 10;
/// Of every batch where one flush is waited for at a time.
const SINGLE_BYTES: usize = 64 << 10;
const CONNECTIONS: usize = 4;
const IN_FLIGHT: usize = 16;
const WHOS: [&str; 3] = ["disk", "hdfs", "s3"];

/// What is measured of a broker, wherever its bytes go.
struct Place {
    name: &'static str,
    address: String,
    pid: u32,
    held: Held,
}

enum Held {
    Disk(#[expect(dead_code, reason = "it ends with its place")] Contender),
    Cluster(Box<Cluster>),
}

/// Counts of what a store was asked.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    flushes: u64,
    objects: u64,
    /// At the NameNode, or at the S3 server.
    requests: u64,
}

impl Place {
    fn start(name: &'static str) -> Result<Place> {
        if name == "disk" {
            let broker = Contender::start(Kind::Sealane, "sync")?;
            return Ok(Place {
                name,
                address: broker.bootstrap(),
                pid: broker.pid(),
                held: Held::Disk(broker),
            });
        }
        let mut cluster = Cluster::prepare(Store::named(name)?)?;
        cluster.put_front_before_store(1)?;
        cluster.spawn_all(1)?;
        let (address, pid) = (cluster.address(0), cluster.pid(0)?);
        Ok(Place { name, address, pid, held: Held::Cluster(Box::new(cluster)) })
    }

    fn counts(&self) -> Result<Counts> {
        let Held::Cluster(cluster) = &self.held else { return Ok(Counts::default()) };
        let status = cluster.status(0)?;
        let log = &status["brokers"][0]["log"];
        let count = |name: &str| log[name].as_u64().with_context(|| format!("no {name} in {status}"));
        let requests = match (&cluster.store, &cluster.front) {
            (Store::Hdfs(hdfs), _) => hdfs.requests()?,
            (Store::S3(_), front) => front.as_ref().context("a front")?.counts().requests,
        };
        Ok(Counts { flushes: count("flushes")?, objects: count("objects")?, requests })
    }
}

/// Runs everything and writes `docs/benchmarks/store.md` and `store.tsv`.
pub fn run(scale: Scale) -> Result<()> {
    let mut samples = Samples::default();
    for name in WHOS {
        let place = Place::start(name)?;
        for partitions in [1, 100, 2_000] {
            Conn::open(&place.address)?.create_topic(&format!("p{partitions}"), partitions, &[])?;
        }
        // The first requests of a process are slower than all others.
        load(&place, "p100", 100, scale.records(1_000, 3_000))?;
        for round in 1..=scale.rounds {
            for partitions in [1, 100, 2_000] {
                measure(scale, round, &place, partitions, &mut samples)?;
            }
            single(scale, round, &place, &mut samples)?;
        }
        idle(scale, &place, &mut samples)?;
    }
    write(scale, &samples)
}

fn load(place: &Place, topic: &str, partitions: i32, batches: u64) -> Result<super::generator::Outcome> {
    let shape = Shape {
        topic,
        partitions,
        batch_bytes: BATCH_BYTES,
        batches,
        connections: CONNECTIONS,
        in_flight: IN_FLIGHT,
    };
    generate(&place.address, shape)
}

fn measure(scale: Scale, round: usize, place: &Place, partitions: i32, samples: &mut Samples) -> Result<()> {
    let batches = scale.records(8_000, 40_000);
    rest(place)?;
    let (before, cpu) = (place.counts()?, usage::cpu_seconds(place.pid)?);
    let outcome = load(place, &format!("p{partitions}"), partitions, batches)?;
    let at_once = place.counts()?;
    let used = usage::cpu_seconds(place.pid)? - cpu;
    // What is written in the background belongs to the load, too.
    rest(place)?;
    let (after, in_all) = (place.counts()?, usage::cpu_seconds(place.pid)? - cpu);
    let (cell, gigabytes) = (format!("{partitions} partitions"), outcome.bytes as f64 / GIGABYTE);
    let mut add = |metric, value| samples.add(round, place.name, &cell, metric, value);
    add("MB_per_s", outcome.bytes as f64 / 1e6 / outcome.took.as_secs_f64());
    add("ack_p50_us", percentile(&outcome.latencies, 50) as f64);
    add("ack_p99_us", percentile(&outcome.latencies, 99) as f64);
    add("cpu_us_per_batch", used * 1e6 / batches as f64);
    add("cpu_s_per_GB", in_all / gigabytes);
    if place.name != "disk" {
        add("flushes_per_GB", (at_once.flushes - before.flushes) as f64 / gigabytes);
        add("objects_per_GB", (after.objects - before.objects) as f64 / gigabytes);
        add("requests_per_GB", (after.requests - before.requests) as f64 / gigabytes);
    }
    Ok(())
}

/// Waits until the broker does nothing in the background any more, for a limited time.
fn rest(place: &Place) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let before = (usage::cpu_seconds(place.pid)?, place.counts()?.objects);
        std::thread::sleep(Duration::from_millis(700));
        let after = (usage::cpu_seconds(place.pid)?, place.counts()?.objects);
        if (after.0 - before.0 < 0.05 && after.1 == before.1) || Instant::now() > end {
            return Ok(());
        }
    }
}

/// One batch at a time, beside one bare flush at a time of the same size.
fn single(scale: Scale, round: usize, place: &Place, samples: &mut Samples) -> Result<()> {
    let cell = "one batch of 64 KiB at a time";
    let batches = scale.records(400, 2_000);
    // In turns, so that both meet the same machine.
    let turns = 4;
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for turn in 0..turns {
        let shape = Shape {
            topic: "p1",
            partitions: 1,
            batch_bytes: SINGLE_BYTES,
            batches: batches / turns,
            connections: 1,
            in_flight: 1,
        };
        ours.extend(generate(&place.address, shape)?.latencies);
        if let Held::Cluster(cluster) = &place.held
            && let Store::Hdfs(hdfs) = &cluster.store
        {
            let file = format!("/bare/{round}-{turn}");
            bare.extend(super::bare::hsyncs(&hdfs.url(), &file, SINGLE_BYTES, batches / turns)?);
        }
    }
    ours.sort_unstable();
    samples.add(round, place.name, cell, "single_p50_us", percentile(&ours, 50) as f64);
    samples.add(round, place.name, cell, "single_p99_us", percentile(&ours, 99) as f64);
    if !bare.is_empty() {
        bare.sort_unstable();
        samples.add(round, "bare hsync", cell, "single_p50_us", percentile(&bare, 50) as f64);
        samples.add(round, "bare hsync", cell, "single_p99_us", percentile(&bare, 99) as f64);
    }
    Ok(())
}

fn idle(scale: Scale, place: &Place, samples: &mut Samples) -> Result<()> {
    let Held::Cluster(_) = &place.held else { return Ok(()) };
    rest(place)?;
    let seconds = if scale.size == Size::Smoke { 1 } else { 30 };
    let (before, cpu) = (place.counts()?, usage::cpu_seconds(place.pid)?);
    std::thread::sleep(Duration::from_secs(seconds));
    let (after, used) = (place.counts()?, usage::cpu_seconds(place.pid)? - cpu);
    let per_hour = 3_600.0 / seconds as f64;
    let cell = "idle, 2,101 partitions";
    let mut add = |metric, value: f64| samples.add(1, place.name, cell, metric, value);
    add("flushes_per_hour", (after.flushes - before.flushes) as f64 * per_hour);
    add("requests_per_hour", (after.requests - before.requests) as f64 * per_hour);
    add("idle_cpu_percent", used / seconds as f64 * 100.0);
    Ok(())
}

fn write(scale: Scale, samples: &Samples) -> Result<()> {
    let mut text = report::heading("One broker on its own disk, on HDFS and on S3", "store", scale)?;
    text.push_str(ABOUT);
    for (metric, title) in [
        ("MB_per_s", "Throughput, MB per second"),
        ("ack_p50_us", "To the acknowledgement under this load, p50, µs"),
        ("ack_p99_us", "To the acknowledgement under this load, p99, µs"),
        ("cpu_us_per_batch", "Broker CPU per batch until its acknowledgement, µs"),
        ("cpu_s_per_GB", "Broker CPU, seconds per GB, objects written in the background included"),
        ("flushes_per_GB", "Flushes of the log per GB"),
        ("objects_per_GB", "Objects written per GB"),
        ("requests_per_GB", "Requests to the NameNode or to the S3 server per GB"),
        ("flushes_per_hour", "Flushes of the log per idle hour"),
        ("requests_per_hour", "Requests per idle hour"),
        ("idle_cpu_percent", "Broker CPU when idle, percent of a core"),
    ] {
        text.push_str(&report::columns(samples, metric, title, &WHOS));
    }
    let whos = ["disk", "hdfs", "bare hsync", "s3"];
    for (metric, title) in
        [("single_p50_us", "One batch at a time, p50, µs"), ("single_p99_us", "One batch at a time, p99, µs")]
    {
        text.push_str(&report::columns(samples, metric, title, &whos));
    }
    text.push_str(&targets(samples)?);
    report::write(scale, "store", &text, samples)
}

fn targets(samples: &Samples) -> Result<String> {
    let mut text =
        "\n## Targets\n\n| target | bound | measured | verdict |\n| --- | ---: | ---: | --- |\n".to_owned();
    let median = |who: &str, cell: &str, metric: &str| samples.spread(who, cell, metric).map(|s| s.median);
    for who in ["hdfs", "s3"] {
        for (metric, what) in
            [("cpu_us_per_batch", "broker CPU per batch"), ("flushes_per_GB", "flushes per GB")]
        {
            let (many, one) = (median(who, "2000 partitions", metric), median(who, "1 partitions", metric));
            let (Some(many), Some(one)) = (many, one) else { continue };
            let what = format!("{who}: {what}, 2,000 partitions to 1");
            text.push_str(&verdict(&what, 1.2, many / one)?);
        }
    }
    let cell = "one batch of 64 KiB at a time";
    if let (Some(ours), Some(bare)) =
        (median("hdfs", cell, "single_p99_us"), median("bare hsync", cell, "single_p99_us"))
    {
        text.push_str(&verdict("hdfs: p99 of acks=all to a bare hsync of 64 KiB", 2.0, ours / bare)?);
    }
    Ok(text)
}

fn verdict(what: &str, bound: f64, ratio: f64) -> Result<String> {
    let mut line = String::new();
    let verdict = if ratio <= bound { "holds" } else { "falls short" };
    writeln!(line, "| {what} | at most {bound} | {ratio:.2} | {verdict} |")?;
    Ok(line)
}

const ABOUT: &str = "One generator sends batches of 16 KiB, one in each request, round robin over the partitions, on \
4 connections with 16 requests in flight each, `acks=all`. Broker, generator, etcd and the store share the machine: \
throughput is that of all of them together. S3 is gofakes3 behind a proxy of the tests that counts requests and slows \
them down; HDFS has one NameNode and three DataNodes, replication 2; requests to the NameNode are those of clients. \
The disk is `durability = \"sync\"` without a cluster. Each figure is the median over the rounds, with the lowest and \
the highest in parentheses.\n";
