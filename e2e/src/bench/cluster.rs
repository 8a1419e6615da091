//! How long a cluster of brokers takes for what happens to it: a planned move, a broker that joins, a restart with
//! many partitions, a night with nothing to do, a broker that is killed. What other faults do to the time of a kill is
//! for the soak to tell (`just soak-cluster`).

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::table::Samples;
use super::{Scale, Size, report};
use crate::clients::Record;
use crate::cluster::{Cluster, Store, Writers};
use crate::soak::percentile;
use crate::usage;
use crate::wire::{BatchHead, Conn, batch};

const MEBIBYTE: f64 = 1024.0 * 1024.0;
/// The default, and one for those who want to hear of a dead broker sooner; kills in a full run.
const LEASES_MS: [(u32, u64); 2] = [(3_000, 100), (2_000, 50)];
/// A DataNode counts what it has written only so often, and a block when it is whole.
const COUNTED_EVERY: Duration = Duration::from_secs(12);
/// Partitions that were written to just now are moved by that; a share is one of their number when all rest.
const LOADS_FORGOTTEN: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(300);

/// Runs everything and writes `docs/benchmarks/cluster.md` and `cluster.tsv`.
pub fn run(scale: Scale) -> Result<()> {
    let mut samples = Samples::default();
    for name in ["hdfs", "s3"] {
        let mut cluster = Cluster::prepare(Store::named(name)?)?;
        cluster.put_front_before_store(1)?;
        cluster.spawn_all(3)?;
        cluster.until_alive(0, 3)?;
        moves(scale, name, &cluster, &mut samples)?;
        fourth(scale, name, &mut cluster, &mut samples)?;
        drop(cluster);
        for lease in LEASES_MS {
            kills(scale, name, lease, &mut samples)?;
        }
        many(scale, name, &mut samples)?;
        // What is measured so far is kept, whatever becomes of the rest.
        write(scale, &samples)?;
    }
    write(scale, &samples)
}

/// The fourth broker alone, once on each store; what the brokers say goes to files that stay.
pub fn fourth_alone(scale: Scale) -> Result<()> {
    for name in ["s3", "hdfs"] {
        let mut samples = Samples::default();
        let mut cluster = Cluster::prepare(Store::named(name)?)?;
        cluster.put_front_before_store(1)?;
        cluster.spawn_all(3)?;
        cluster.until_alive(0, 3)?;
        fourth(scale, name, &mut cluster, &mut samples)?;
        for metric in ["share_s", "held_MiB", "read_MiB", "written_MiB"] {
            println!("{name} {metric} {:?}", samples.values(name, &fourth_cell(scale), metric));
        }
        std::fs::write(std::env::temp_dir().join(format!("fourth-{name}.log")), cluster.logs())?;
    }
    Ok(())
}

/// One partition, written to without a pause, goes round.
fn moves(scale: Scale, name: &str, cluster: &Cluster, samples: &mut Samples) -> Result<()> {
    let topic = "moved";
    Conn::open(cluster.address(0))?.create_topic(topic, 1, &[])?;
    let writers = Writers::start(&cluster.addresses(), topic, 1, 1);
    writers.until_first_after(&[0], Instant::now())?;
    let ids = ids(&cluster.status(0)?);
    for round in 0..scale.records(10, 30).max(3) as usize {
        let to = ids[round % ids.len()];
        let begin = Instant::now();
        cluster.cli(0, &["cluster", "move", topic, "0", &to.to_string()])?;
        cluster.until_moved(0)?;
        writers.until_first_after(&[0], Instant::now())?;
        let pause = writers.longest_pause_since(0, begin).as_secs_f64() * 1_000.0;
        samples.add(round + 1, name, "planned move of a busy partition", "move_pause_ms", pause);
    }
    writers.finish()?;
    // As long as it counts as busy, a broker that has it gets fewer partitions.
    cluster.cli(0, &["topic", "delete", topic])?;
    Ok(())
}

/// One broker after the other is killed under load and started again.
fn kills(scale: Scale, name: &str, (lease_ms, count): (u32, u64), samples: &mut Samples) -> Result<()> {
    const PARTITIONS: i32 = 6;
    let topic = "killed";
    let mut cluster = Cluster::prepare(Store::named(name)?)?;
    cluster.set("lease_ms", &lease_ms.to_string());
    cluster.spawn_all(3)?;
    cluster.until_alive(0, 3)?;
    Conn::open(cluster.address(0))?.create_topic(topic, PARTITIONS, &[])?;
    let writers = Writers::start(&cluster.addresses(), topic, PARTITIONS, 1);
    let all: Vec<usize> = (0..PARTITIONS as usize).collect();
    let mut directory = crate::cluster::Directory::new(cluster.addresses());
    for round in 0..scale.records(20, count).max(2) as usize {
        let victim = (round % 3) as u16;
        at_rest(&cluster, (victim + 1) % 3, 3)?;
        writers.until_first_after(&all, Instant::now())?;
        let owners = directory.owners(topic).context("no broker answers")?;
        let its = |at: &usize| owners[*at].as_deref() == Some(&cluster.address(victim));
        let owned: Vec<usize> = all.iter().copied().filter(its).collect();
        ensure!(!owned.is_empty(), "broker {victim} owns nothing when all is at rest: {owners:?}");
        let begin = Instant::now();
        cluster.kill(victim)?;
        let times = writers.until_first_after(&owned, begin)?;
        let slowest = times.into_iter().max().unwrap_or_default().as_secs_f64() * 1_000.0;
        let cell = format!("lease of {lease_ms} ms");
        samples.add(round + 1, name, &cell, "failover_ms", slowest);
        cluster.spawn(victim)?;
        cluster.wait(victim)?;
    }
    writers.finish()?;
    Ok(())
}

/// Waits until so many brokers are alive and nothing is on its way between them, as one of them sees it.
fn at_rest(cluster: &Cluster, asked: u16, alive: usize) -> Result<()> {
    cluster.until(asked, "rest", |status| {
        brokers(status).count() == alive
            && status["moving"].as_array().is_some_and(Vec::is_empty)
            && brokers(status).all(|broker| broker["taking_over"] == 0 && broker["partitions"] != 0)
    })
}

/// A fourth broker gets its share of 1,000 partitions that hold records.
fn fourth(scale: Scale, name: &str, cluster: &mut Cluster, samples: &mut Samples) -> Result<()> {
    let partitions = shared_partitions(scale);
    let topic = "shared";
    Conn::open(cluster.address(0))?.create_topic(topic, partitions, &[])?;
    let bytes = fill(cluster, topic, partitions)?;
    // Of what is in objects nothing is copied. What is in the logs alone goes through the store, and is counted.
    std::thread::sleep(LOADS_FORGOTTEN);
    at_rest(cluster, 0, 3)?;
    let (before, read_before) = (written(cluster)?, records_read(cluster));
    let begin = Instant::now();
    cluster.spawn(3)?;
    cluster.wait(3)?;
    let share = partitions as u64 / 4;
    cluster.until(0, "the share of the fourth broker", |status| {
        brokers(status).any(|broker| {
            broker["address"] == cluster.address(3) && broker["partitions"].as_u64() >= Some(share)
        })
    })?;
    at_rest(cluster, 0, 4)?;
    let took = begin.elapsed().as_secs_f64();
    std::thread::sleep(COUNTED_EVERY);
    let after = written(cluster)?;
    let cell = fourth_cell(scale);
    let mut add = |metric, value| samples.add(1, name, &cell, metric, value);
    add("share_s", took);
    add("held_MiB", bytes as f64 / MEBIBYTE);
    add("written_MiB", (after - before) as f64 / MEBIBYTE);
    if let (Some(before), Some(after)) = (read_before, records_read(cluster)) {
        add("read_MiB", (after - before) as f64 / MEBIBYTE);
    }
    Ok(())
}

fn shared_partitions(scale: Scale) -> i32 {
    if scale.size == Size::Smoke { 40 } else { 1_000 }
}

fn fourth_cell(scale: Scale) -> String {
    format!("a fourth broker and {} partitions", shared_partitions(scale))
}

/// As much into each partition as makes the brokers put most of it into objects; how much that is.
fn fill(cluster: &Cluster, topic: &str, partitions: i32) -> Result<u64> {
    let record = Record { value: Some(vec![7; 512 << 10]), ..Record::default() };
    let bytes = batch(&[record], BatchHead::default());
    let mut directory = crate::cluster::Directory::new(cluster.addresses());
    let owners = directory.owners(topic).context("no broker answers")?;
    let mut conns = std::collections::BTreeMap::new();
    for partition in 0..partitions {
        let owner = owners[partition as usize].clone().context("every partition has an owner")?;
        let conn = match conns.entry(owner) {
            std::collections::btree_map::Entry::Occupied(there) => there.into_mut(),
            std::collections::btree_map::Entry::Vacant(free) => {
                let conn = Conn::open(free.key())?;
                free.insert(conn)
            }
        };
        let (error, _) = conn.produce(topic, partition, &bytes)?;
        ensure!(error == 0, "produce answers error {error}");
    }
    Ok(partitions as u64 * bytes.len() as u64)
}

/// Bytes that the store was given so far: by all of S3's requests, or as it lies on the DataNodes.
fn written(cluster: &Cluster) -> Result<u64> {
    match (&cluster.store, &cluster.front) {
        (Store::Hdfs(hdfs), _) => hdfs.written_bytes(),
        (Store::S3(_), front) => Ok(front.as_ref().context("a front")?.counts().bytes_in),
    }
}

/// Bytes that brokers have read from objects with records so far, where something counts them.
fn records_read(cluster: &Cluster) -> Option<u64> {
    cluster.front.as_ref().map(|front| front.counts().record_bytes_out)
}

/// One broker that owns everything, in many partitions: it stops, starts, dies, starts, and has nothing to do.
fn many(scale: Scale, name: &str, samples: &mut Samples) -> Result<()> {
    let partitions = if scale.size == Size::Smoke { 100 } else { 10_000 };
    let cell = format!("one broker, {partitions} partitions");
    let mut cluster = Cluster::prepare(Store::named(name)?)?;
    cluster.put_front_before_store(1)?;
    cluster.spawn_all(1)?;
    let begin = Instant::now();
    for topic in 0..10 {
        Conn::open(cluster.address(0))?.create_topic(&format!("t{topic}"), partitions / 10, &[])?;
    }
    let all = partitions as u64;
    let served = |cluster: &Cluster| {
        cluster.until(0, "all partitions", |status| {
            brokers(status)
                .any(|broker| broker["partitions"].as_u64() >= Some(all) && broker["taking_over"] == 0)
        })
    };
    served(&cluster)?;
    samples.add(1, name, &cell, "create_s", begin.elapsed().as_secs_f64());
    for topic in 0..10 {
        fill_one(&cluster, &format!("t{topic}"), partitions / 10)?;
    }
    for (how, metric) in [(true, "restart_s"), (false, "after_kill_s")] {
        if how {
            cluster.stop(0)?
        } else {
            cluster.kill(0)?
        }
        let begin = Instant::now();
        cluster.spawn(0)?;
        cluster.wait(0)?;
        served(&cluster)?;
        samples.add(1, name, &cell, metric, begin.elapsed().as_secs_f64());
        ensure!(begin.elapsed() < LIMIT, "it took too long to go on with");
    }
    let seconds = if scale.size == Size::Smoke { 1 } else { 60 };
    std::thread::sleep(Duration::from_secs(10.min(seconds)));
    let (before, cpu) = (requests(&cluster)?, usage::cpu_seconds(cluster.pid(0)?)?);
    std::thread::sleep(Duration::from_secs(seconds));
    let per_minute = (requests(&cluster)? - before) as f64 * 60.0 / seconds as f64;
    let used = (usage::cpu_seconds(cluster.pid(0)?)? - cpu) / seconds as f64 * 100.0;
    samples.add(1, name, &cell, "idle_requests_per_minute", per_minute);
    samples.add(1, name, &cell, "idle_cpu_percent", used);
    samples.add(1, name, &cell, "rss_MiB", usage::rss_bytes(cluster.pid(0)?)? as f64 / MEBIBYTE);
    Ok(())
}

/// A record into each partition.
fn fill_one(cluster: &Cluster, topic: &str, partitions: i32) -> Result<()> {
    let shape = super::generator::Shape {
        topic,
        partitions,
        batch_bytes: 1_024,
        batches: partitions as u64,
        connections: 2,
        in_flight: 64,
    };
    super::generator::generate(&cluster.address(0), shape).map(drop)
}

fn requests(cluster: &Cluster) -> Result<u64> {
    match (&cluster.store, &cluster.front) {
        (Store::Hdfs(hdfs), _) => hdfs.requests(),
        (Store::S3(_), front) => Ok(front.as_ref().context("a front")?.counts().requests),
    }
}

fn brokers(status: &Value) -> impl Iterator<Item = &Value> {
    status["brokers"].as_array().into_iter().flatten()
}

fn ids(status: &Value) -> Vec<i64> {
    brokers(status).filter_map(|broker| broker["id"].as_i64()).collect()
}

fn write(scale: Scale, samples: &Samples) -> Result<()> {
    let mut text = report::heading("What a cluster takes its time for", "cluster", scale)?;
    text.push_str(ABOUT);
    for (metric, title) in [
        (
            "move_pause_ms",
            "Planned move: longest time without an acknowledged write, ms (target: under 1,000)",
        ),
        ("share_s", "A fourth broker: from its start to its share, s (target: under 10)"),
        ("held_MiB", "What these partitions hold, MiB"),
        (
            "read_MiB",
            "Bytes of objects with records that brokers read meanwhile, MiB (target: 0, nothing is copied)",
        ),
        (
            "written_MiB",
            "Bytes that the store was given meanwhile, MiB: of the share, what had been in logs alone, and the logs",
        ),
        ("create_s", "Creating them, s"),
        ("restart_s", "Stopped and started again: to all of them being served, s"),
        ("after_kill_s", "Killed and started again: to all of them being served, the old lease included, s"),
        ("rss_MiB", "Resident memory, MiB"),
        ("idle_requests_per_minute", "Requests to the NameNode or the S3 server, per idle minute"),
        ("idle_cpu_percent", "CPU when idle, percent of a core"),
    ] {
        text.push_str(&report::columns(samples, metric, title, &["hdfs", "s3"]));
    }
    text.push_str(
        "\n## From kill -9 of an owner to the next acknowledged write on its partitions, ms\n\n\
         The slowest of the two partitions that it owned, the lease that has to run out included.\n\n\
         | store | lease, ms | kills | p50 | p99 | most | target for p99 |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (store, lease, target) in
        [("s3", 3_000, 5_000), ("s3", 2_000, 3_000), ("hdfs", 3_000, 8_000), ("hdfs", 2_000, 5_000)]
    {
        let times = samples.values(store, &format!("lease of {lease} ms"), "failover_ms");
        let mut times: Vec<u64> = times.iter().map(|time| time.round() as u64).collect();
        times.sort();
        if let Some(most) = times.iter().max() {
            let (half, high) = (percentile(&times, 50), percentile(&times, 99));
            writeln!(text, "| {store} | {lease} | {} | {half} | {high} | {most} | {target} |", times.len())?;
        }
    }
    report::write(scale, "cluster", &text, samples)
}

const ABOUT: &str = "Three brokers (one, where that is said), etcd with three members and the store are processes of \
this one machine. S3 is gofakes3 behind a proxy of the tests that counts requests; HDFS has one NameNode and three \
DataNodes, replication 2. Figures are medians with the lowest and the highest in parentheses.\n";
