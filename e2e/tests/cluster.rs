//! A cluster of brokers on real etcd, S3 and HDFS: owners die, hang and come back, and every acknowledged record is
//! there once. `just test-cluster`; more by `just soak-cluster`.

#![cfg(feature = "cluster")]

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::clients::Record;
use e2e::cluster::{Cluster, Lines, Store, judge};
use e2e::dice::Dice;
use e2e::stake;
use e2e::wire::{BatchHead, Conn, batch};
use rustix::process::Signal;

const TOPIC: &str = "orders";
const PARTITIONS: &str = "12";

fn cluster(store: Store, off: &str) -> Result<Cluster> {
    let cluster = Cluster::start(store, 3, off)?;
    cluster.cli(0, &["topic", "create", TOPIC, "--partitions", PARTITIONS])?;
    Ok(cluster)
}

/// Kills brokers by seed, one after the other, under load.
fn killed(store: Store) -> Result<()> {
    let mut cluster = cluster(store, "")?;
    let seed = stake::seed(1);
    let mut dice = Dice::new(seed);
    let lines = Lines::start(&cluster, TOPIC)?;
    let rounds = stake::rounds(3);
    for _ in 0..rounds {
        lines.until_more(2_000 + dice.below(2_000))?;
        let victim = dice.below(3) as u16;
        cluster.kill(victim)?;
        lines.until_more(2_000 + dice.below(2_000))?;
        cluster.spawn(victim)?;
        cluster.wait(victim)?;
    }
    lines.until_more(4_000)?;
    let acknowledged = lines.finish()?;
    println!("seed {seed}: {acknowledged} acknowledged over {rounds} kills");
    ensure!(acknowledged > 0 && rounds > 0, "something was at stake");
    judge(&cluster, TOPIC, acknowledged)
}

#[test]
fn brokers_on_s3_that_are_killed_under_load_lose_and_repeat_nothing() -> Result<()> {
    killed(Store::s3()?)
}

#[test]
fn brokers_on_hdfs_that_are_killed_under_load_lose_and_repeat_nothing() -> Result<()> {
    killed(Store::hdfs()?)
}

/// A broker hangs past its lease and goes on; it looks neither at its lease nor at who owns what now, so that the
/// store alone stops it.
fn zombie(store: Store) -> Result<()> {
    let cluster = cluster(store, "lease-check")?;
    let lines = Lines::start(&cluster, TOPIC)?;
    let rounds = stake::rounds(2);
    let mut refused = 0;
    for round in 0..rounds {
        let victim = (round % 3) as u16;
        let others = (victim + 1) % 3;
        lines.until_more(3_000)?;
        cluster.signal(victim, Signal::STOP)?;
        until_alive(&cluster, others, 2)?;
        lines.until_more(4_000)?;
        cluster.signal(victim, Signal::CONT)?;
        // It believes that it owns what it had, and takes records for it; the store does not.
        let record = batch(&[Record::numbered("zombie", 0)], BatchHead::default());
        for partition in 0..PARTITIONS.parse()? {
            let answer =
                Conn::open(format!("127.0.0.1:{}", cluster.port(victim)))?.produce(TOPIC, partition, &record);
            if let Ok((error, offset)) = answer {
                ensure!(error != 0, "a zombie acknowledged a record of {TOPIC}-{partition} at {offset}");
                refused += 1;
            }
        }
        until_alive(&cluster, others, 3)?;
    }
    lines.until_more(4_000)?;
    let acknowledged = lines.finish()?;
    let ended = cluster.count_in_logs("another broker ended this life");
    println!(
        "{acknowledged} acknowledged, {rounds} zombies, {refused} records refused, {ended} lives ended by the store"
    );
    ensure!(refused > 0 && ended as u64 >= rounds, "the store refused every zombie:\n{}", cluster.logs());
    judge(&cluster, TOPIC, acknowledged)
}

/// Waits until so many brokers are alive, as one of them sees it.
fn until_alive(cluster: &Cluster, asked: u16, count: usize) -> Result<()> {
    let end = std::time::Instant::now() + Duration::from_secs(90);
    loop {
        let status: serde_json::Value =
            serde_json::from_str(&cluster.cli(asked, &["cluster", "status", "--output", "json"])?)?;
        if status["brokers"].as_array().is_some_and(|brokers| brokers.len() == count) {
            return Ok(());
        }
        ensure!(
            std::time::Instant::now() < end,
            "not {count} brokers are alive: {status}\n{}",
            cluster.logs()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_zombie_on_s3_gets_nothing_acknowledged() -> Result<()> {
    zombie(Store::s3()?)
}

#[test]
fn a_zombie_on_hdfs_gets_nothing_acknowledged() -> Result<()> {
    zombie(Store::hdfs()?)
}

#[test]
fn a_person_sees_moves_and_empties_brokers_and_no_client_notices() -> Result<()> {
    let mut cluster = cluster(Store::s3()?, "")?;
    let lines = Lines::start(&cluster, TOPIC)?;
    lines.until_more(2_000)?;
    let status = cluster.cli(0, &["cluster", "status"])?;
    ensure!(status.contains("controller: broker"), "{status}");
    cluster.cli(1, &["cluster", "drain", "1"])?;
    let end = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let status = cluster.cli(2, &["cluster", "status", "--output", "json"])?;
        let status: serde_json::Value = serde_json::from_str(&status)?;
        let drained = status["brokers"].as_array().into_iter().flatten().find(|broker| broker["id"] == 1);
        if drained.is_some_and(|broker| broker["partitions"] == 0) {
            break;
        }
        ensure!(std::time::Instant::now() < end, "broker 1 is not emptied: {status}");
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.cli(1, &["cluster", "drain", "1", "--undo"])?;
    lines.until_more(2_000)?;
    for broker in 0..3 {
        cluster.stop(broker)?;
        lines.until_more(1_000)?;
        cluster.spawn(broker)?;
        cluster.wait(broker)?;
    }
    let acknowledged = lines.finish()?;
    judge(&cluster, TOPIC, acknowledged)?;
    cluster.judge_logs()
}
