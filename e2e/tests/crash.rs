//! kill -9 under load, by seed: no acknowledged record lost, moved or repeated, and both regions end up equal.
//!
//! The logs are read by `logread.py`, which shares no code with the product. Since the page cache outlives a killed
//! process, the same runs go on a store that throws away what was not synced. Every run prints and asserts what was
//! at stake; each exactness test has twins with one mechanism off, which must fail.
//! `SEALANE_CRASH_SEED` and `SEALANE_CRASH_ROUNDS` (kills per test) change what is drawn.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::clients::{PATIENCE, Record};
use e2e::dice::Dice;
use e2e::load::{Load, Writer};
use e2e::logread::{self, Log};
use e2e::process::{Local, Plan};
use e2e::stake::{Stake, come_to_rest, rounds, seed};
use e2e::wire::{BatchHead, Conn, batch};

const TOPIC: &str = "t";
const PARTITIONS: i32 = 2;

/// Kills the process `kills` times while every partition of every region is written to, then lets it come to rest,
/// stops it and judges the logs.
fn kill_and_judge(plan: Plan, regions: usize, kills: u64, seed: u64) -> Result<Stake> {
    println!("seed {seed}, {kills} kills");
    let mut dice = Dice::new(seed);
    let mut local = plan.start()?;
    Conn::open(local.bootstrap(0))?.create_topic(TOPIC, PARTITIONS, &[("segment.bytes", "1048576")])?;
    for region in 1..regions {
        wait_for_topic(&local, region)?;
    }
    let mut writers = Vec::new();
    let mut addresses = Vec::new();
    for region in 0..regions {
        for partition in 0..PARTITIONS {
            let prefix = format!("r{region}p{partition}-");
            writers.push(Writer::new(TOPIC, partition, &prefix, dice.below(u64::MAX)));
            addresses.push(local.bootstrap(region));
        }
    }
    let mut stake = Stake { kills, ..Stake::default() };
    for _ in 0..kills {
        let load = Load::start(writers, &addresses);
        std::thread::sleep(Duration::from_millis(dice.between(60, 500)));
        local.kill()?;
        writers = load.join()?;
        local.start_again()?;
    }
    // One more time without a death, so that what was in flight is answered.
    let load = Load::start(writers, &addresses);
    std::thread::sleep(Duration::from_millis(200));
    writers = load.finish()?;
    let brokers: Vec<String> = (0..regions).map(|region| local.bootstrap(region)).collect();
    come_to_rest(&brokers, TOPIC, PARTITIONS)?;
    ensure!(local.stop()?.success(), "it does not stop cleanly");
    let logs: Vec<Log> = (0..regions)
        .map(|region| logread::read(&local.region_dir(region), Some(TOPIC)))
        .collect::<Result<_>>()?;
    stake.judge_logs(&logs, &writers, TOPIC)?;
    stake.judge(regions)?;
    ensure!(stake.in_flight_at_a_kill > 0, "nothing was in flight at a kill");
    Ok(stake)
}

fn wait_for_topic(local: &Local, region: usize) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut conn = Conn::open(local.bootstrap(region))?;
    while (0..PARTITIONS)
        .any(|partition| conn.list_offset(TOPIC, partition, -1).map_or(true, |answer| answer.0 != 0))
    {
        ensure!(Instant::now() < end, "the topic does not come to region {region}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn nothing_acknowledged_is_lost_moved_or_repeated_when_all_is_killed_under_load() -> Result<()> {
    kill_and_judge(Plan::two(), 2, rounds(10), seed(20_26)).map(drop)
}

#[test]
fn nothing_acknowledged_is_lost_when_what_was_not_synced_is_lost_with_the_process() -> Result<()> {
    kill_and_judge(Plan::two().argument("--lose-unsynced"), 2, rounds(10), seed(20_26) + 1).map(drop)
}

#[test]
fn twin_without_sync_loses_acknowledged_records() -> Result<()> {
    let plan = Plan::one().argument("--lose-unsynced").argument("--durability").argument("os");
    fails(
        kill_and_judge(plan, 1, rounds(10), seed(20_26) + 2),
        &["is lost", "and stands at", "stands after", "error 45"],
    )
}

/// A twin must fail, and for the reason that the mechanism is there for.
fn fails(outcome: Result<Stake>, reasons: &[&str]) -> Result<()> {
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

/// An idempotent producer writes, the front of the log with its batches is cut away, the process is killed, and the
/// last batch comes again: only the snapshot beside the segment still knows it.
fn repeat_after_a_cut(mechanism_off: &str) -> Result<(i16, i64)> {
    let mut local = Plan::one().start()?;
    let mut conn = Conn::open(local.bootstrap(0))?;
    conn.create_topic(TOPIC, 1, &[("segment.bytes", "1048576")])?;
    let (producer_id, producer_epoch) = conn.init_producer_id()?;
    let record = Record { value: Some(vec![b'x'; 12_000]), ..Record::numbered("v", 0) };
    let last = {
        let head = BatchHead { producer_id, producer_epoch, sequence: 0, ..BatchHead::default() };
        batch(std::slice::from_ref(&record), head)
    };
    let answer = conn.produce(TOPIC, 0, &last)?;
    ensure!(answer == (0, 0), "the first batch: {answer:?}");
    // Other records push the producer's own batch out of the segments that stay.
    for _ in 0..200 {
        ensure!(conn.produce(TOPIC, 0, &batch(std::slice::from_ref(&record), BatchHead::default()))?.0 == 0);
    }
    ensure!(conn.delete_records(TOPIC, 0, 150)? == (0, 150), "the log is not trimmed");
    local.kill()?;
    local.set_environment("SEALANE_TEST_OFF", mechanism_off);
    local.start_again()?;
    Conn::open(local.bootstrap(0))?.produce(TOPIC, 0, &last)
}

#[test]
fn a_snapshot_remembers_a_producer_whose_batches_are_gone() -> Result<()> {
    let answer = repeat_after_a_cut("")?;
    ensure!(answer == (0, 0), "the repeated batch: {answer:?}");
    Ok(())
}

#[test]
fn twin_without_state_stores_the_repeated_batch_again() -> Result<()> {
    let answer = repeat_after_a_cut("state")?;
    println!("the repeated batch: {answer:?}");
    ensure!(answer.0 == 0 && answer.1 > 0, "the snapshots are off and nobody notices: {answer:?}");
    Ok(())
}

/// The torn tails of regression case C16: what a crash can leave at the end of the newest segment.
#[test]
fn a_torn_tail_costs_the_damaged_batch_alone() -> Result<()> {
    for case in ["garbage", "zeros", "cut", "flipped", "no indexes"] {
        let mut local = Plan::one().start()?;
        let mut conn = Conn::open(local.bootstrap(0))?;
        conn.create_topic(TOPIC, 1, &[])?;
        for n in 0..100 {
            let answer = conn.produce(TOPIC, 0, &batch(&[Record::numbered("v", n)], BatchHead::default()))?;
            ensure!(answer == (0, n as i64));
        }
        local.kill()?;
        damage(&local, case).with_context(|| case)?;
        // Damage below the durable mark is a person's business, and said aloud.
        local.allow_error("");
        local.start_again().with_context(|| case)?;
        let mut conn = Conn::open(local.bootstrap(0))?;
        let end = conn.end_offset(TOPIC, 0)?;
        let intact = if ["cut", "flipped"].contains(&case) { 99 } else { 100 };
        ensure!(end == intact, "{case}: the log ends at {end}");
        ensure!(conn.count_records(TOPIC, 1)? == intact as u64, "{case}: records are missing");
        let answer = conn.produce(TOPIC, 0, &batch(&[Record::numbered("v", 100)], BatchHead::default()))?;
        ensure!(answer == (0, intact), "{case}: the next record: {answer:?}");
        local.stop()?;
        let log = logread::read(&local.data_dir(), Some(TOPIC)).with_context(|| case)?;
        ensure!(log.records.len() as i64 == intact + 1, "{case}: {} records in the log", log.records.len());
    }
    Ok(())
}

fn damage(local: &Local, case: &str) -> Result<()> {
    let mut segments = Vec::new();
    files(&local.data_dir(), &mut segments)?;
    segments.retain(|path| path.to_string_lossy().contains("/t-0/"));
    let log = segments
        .iter()
        .filter(|path| path.extension().is_some_and(|is| is == "log"))
        .max()
        .context("a segment")?;
    let mut bytes = std::fs::read(log)?;
    match case {
        "garbage" => bytes.extend((0..37u8).map(|n| n.wrapping_mul(97))),
        "zeros" => bytes.extend([0; 4096]),
        "cut" => bytes.truncate(bytes.len() - 5),
        "flipped" => *bytes.last_mut().context("bytes")? ^= 1,
        _ => {
            for path in &segments {
                if path.extension().is_some_and(|is| is == "index" || is == "timeindex") {
                    std::fs::remove_file(path)?;
                }
            }
        }
    }
    std::fs::write(log, bytes)?;
    Ok(())
}

fn files(dir: &std::path::Path, found: &mut Vec<std::path::PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() { files(&path, found)? } else { found.push(path) }
    }
    Ok(())
}
