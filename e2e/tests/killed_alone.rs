//! kill -9 of one service alone, by seed, where all services are processes of their own: brokers and mirrors.
//!
//! The whole of `sealane local` is killed in `crash.rs`, the lane-router under lane load beside the lane tests. The
//! link between the mirrors has a delay, so that something is under way at any time. `SEALANE_CRASH_SEED` and
//! `SEALANE_CRASH_ROUNDS` (kills per test) change what is drawn.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::clients::PATIENCE;
use e2e::dice::Dice;
use e2e::load::{Load, Writer};
use e2e::logread;
use e2e::services::{Kind, Options, Services};
use e2e::stake::{Stake, come_to_rest, rounds, seed};
use e2e::wire::Conn;

const TOPIC: &str = "t";
const PARTITIONS: i32 = 2;
/// Kills in the ordinary run; `just soak` makes more.
const KILLS: u64 = 6;
/// With as many kills of a broker, one of them certainly fell between a write and its answer.
const KILLS_MANY: u64 = 20;

/// Kills one of the two services of a kind again and again while every partition of both regions is written to.
fn killed_alone(victim: Kind, options: Options, kills: u64, seed: u64) -> Result<Stake> {
    println!("seed {seed}, {kills} kills of a {victim:?}");
    let mut dice = Dice::new(seed);
    let mut services = Services::start(options)?;
    services.link.faults.delay(Duration::from_millis(5));
    let both = [services.bootstrap(0), services.bootstrap(1)];
    Conn::open(&both[0])?.create_topic(TOPIC, PARTITIONS, &[("segment.bytes", "1048576")])?;
    wait_for_topic(&both[1])?;
    let (mut writers, addresses) = writers(&both, &mut dice);
    let mut stake = Stake { kills, ..Stake::default() };
    for _ in 0..kills {
        let region = dice.below(2) as usize;
        let load = Load::start(writers, &addresses);
        std::thread::sleep(Duration::from_millis(dice.between(60, 500)));
        // Its counters die with a broker.
        stake.known_already += services.metric(region, "sealane_duplicate_batches_total")? as u64
            * u64::from(victim == Kind::Broker);
        services.kill(victim, region)?;
        std::thread::sleep(Duration::from_millis(dice.between(10, 200)));
        writers = load.finish()?;
        if victim == Kind::Mirror {
            stake.behind += records_missing(&writers, &both)?;
        }
        services.spawn(victim, region)?;
    }
    // One more time without a death, so that what was in flight is answered.
    let load = Load::start(writers, &addresses);
    std::thread::sleep(Duration::from_millis(300));
    writers = load.finish()?;
    come_to_rest(&both, TOPIC, PARTITIONS)?;
    for region in 0..2 {
        stake.known_already += services.metric(region, "sealane_duplicate_batches_total")? as u64;
    }
    services.stop()?;
    let logs = [0, 1].map(|region| logread::read(&services.region_dir(region), Some(TOPIC)));
    let [east, west] = logs;
    stake.judge_logs(&[east?, west?], &writers, TOPIC)?;
    println!("{} bytes went through the relay", services.link.faults.passed_bytes());
    stake.judge(2)?;
    Ok(stake)
}

/// One writer for each partition of each region, and the address of each.
fn writers(brokers: &[String; 2], dice: &mut Dice) -> (Vec<Writer>, Vec<String>) {
    let (mut writers, mut addresses) = (Vec::new(), Vec::new());
    for (region, address) in brokers.iter().enumerate() {
        for partition in 0..PARTITIONS {
            let prefix = format!("r{region}p{partition}-");
            writers.push(Writer::new(TOPIC, partition, &prefix, dice.below(u64::MAX)));
            addresses.push(address.clone());
        }
    }
    (writers, addresses)
}

fn wait_for_topic(address: &str) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while (0..PARTITIONS)
        .any(|partition| Conn::open(address).and_then(|mut conn| conn.end_offset(TOPIC, partition)).is_err())
    {
        ensure!(Instant::now() < end, "the topic does not come to {address}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// How many of the records that were made some region still lacks.
fn records_missing(writers: &[Writer], brokers: &[String; 2]) -> Result<u64> {
    let made: u64 = writers.iter().map(Writer::made).sum();
    let mut missing = 0;
    for address in brokers {
        missing += made.saturating_sub(Conn::open(address)?.count_records(TOPIC, PARTITIONS)?);
    }
    Ok(missing)
}

fn a_broker(options: Options, seed: u64) -> Result<()> {
    let lost_unsynced = options.storage == "volatile";
    let stake = killed_alone(Kind::Broker, options, rounds(KILLS), seed)?;
    ensure!(stake.in_flight_at_a_kill > 0 && stake.sent_again > 0, "nothing was in flight: {stake:?}");
    // What a store forgot is new when it comes again.
    let sure = stake.kills >= KILLS_MANY && !lost_unsynced;
    ensure!(!sure || stake.known_already > 0, "no batch came again that was there: {stake:?}");
    Ok(())
}

fn a_mirror(options: Options, seed: u64) -> Result<()> {
    let stake = killed_alone(Kind::Mirror, options, rounds(KILLS), seed)?;
    ensure!(stake.behind > 0, "nothing was under way when a mirror was killed: {stake:?}");
    Ok(())
}

fn forgetful() -> Options {
    Options { storage: "volatile".to_owned(), ..Options::default() }
}

#[test]
fn a_broker_killed_alone_loses_and_repeats_nothing() -> Result<()> {
    a_broker(Options::default(), seed(4_126))
}

#[test]
fn a_broker_killed_alone_with_what_it_had_not_synced_loses_and_repeats_nothing() -> Result<()> {
    a_broker(forgetful(), seed(4_126) + 1)
}

#[test]
fn a_mirror_killed_alone_loses_and_repeats_nothing() -> Result<()> {
    a_mirror(Options::default(), seed(4_126) + 2)
}

#[test]
fn a_mirror_killed_alone_between_stores_that_forget_loses_and_repeats_nothing() -> Result<()> {
    a_mirror(forgetful(), seed(4_126) + 3)
}

/// The same run must fail where acknowledged records are not on disk, or it would not have seen a loss.
#[test]
fn twin_without_sync_loses_what_a_killed_broker_acknowledged() -> Result<()> {
    let options = Options { durability: "os".to_owned(), ..forgetful() };
    let outcome = killed_alone(Kind::Broker, options, rounds(KILLS), seed(4_126) + 4);
    let error = outcome.err().context("nothing is synced and nobody notices")?;
    let text = format!("{error:#}");
    println!("failed as it must: {text}");
    let reasons = ["is lost", "and stands at", "stands after", "error 45", "come to rest", "arrived"];
    ensure!(reasons.iter().any(|reason| text.contains(reason)), "it failed for another reason: {text}");
    Ok(())
}
