//! A region of three brokers on etcd and S3 linked to a region of one: owners and mirrors are killed under load on
//! both sides, and both regions hold the same records, each once and in the order of its origin. And a lane's clients
//! that reach the three brokers through the lane-router alone.

#![cfg(feature = "cluster")]

use anyhow::{Result, ensure};
use e2e::cluster::{Cluster, Lines, Linked, Side, Store, Writers};
use e2e::dice::Dice;
use e2e::stake;

const TOPIC: &str = "orders";
const PARTITIONS: i32 = 6;
const BROKERS: u16 = 3;
const LINES_PER_SECOND: u64 = 400;

fn linked(off: &str) -> Result<Linked> {
    let linked = Linked::start(Cluster::prepare(Store::s3()?)?, BROKERS, off)?;
    linked.cluster.cli(0, &["topic", "create", TOPIC, "--partitions", &PARTITIONS.to_string()])?;
    // Writers of west need the topic there.
    let end = std::time::Instant::now() + e2e::clients::PATIENCE;
    while linked.west_cli(&["topic", "describe", TOPIC]).is_err() {
        ensure!(std::time::Instant::now() < end, "the topic does not cross:\n{}", linked.logs());
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    Ok(linked)
}

/// Kills brokers and mirrors by seed, one after the other, under load on both sides.
fn killed(mut linked: Linked, rounds: u64, victims: &[Side]) -> Result<()> {
    let seed = stake::seed(1);
    let mut dice = Dice::new(seed);
    let lines = Lines::with(&linked.cluster, TOPIC, LINES_PER_SECOND, &[])?;
    let writers = Writers::start(&[linked.west_bootstrap()], TOPIC, PARTITIONS, seed);
    let (mut owners, mut mirrors) = (0, 0);
    for _ in 0..rounds {
        lines.until_more(600 + dice.below(600))?;
        let victim = dice.below(u64::from(BROKERS)) as u16;
        linked.cluster.kill(victim)?;
        owners += 1;
        lines.until_more(dice.below(1_500))?;
        if !victims.is_empty() {
            let side = victims[dice.below(victims.len() as u64) as usize];
            linked.kill(side)?;
            mirrors += 1;
            lines.until_more(dice.below(600))?;
            linked.spawn(side)?;
        }
        linked.cluster.spawn(victim)?;
        linked.cluster.wait(victim)?;
    }
    lines.until_more(1_000)?;
    let (lines, promises) = (lines.finish()?, writers.finish()?);
    println!(
        "seed {seed}: {lines} lines of east and {} records of west over {owners} kills of brokers, {mirrors} of \
         mirrors; {} batches sent again",
        promises.made(),
        promises.sent_again
    );
    ensure!(lines > 0 && promises.made() > 0 && owners > 0, "something was at stake");
    linked.judge(TOPIC, lines, &promises)?;
    // The status is the same at every broker, and no partition gave up.
    for broker in 0..BROKERS {
        let status: serde_json::Value = serde_json::from_str(
            &linked.cluster.cli(broker, &["mirror", "status", "--all", "--output", "json"])?,
        )?;
        ensure!(status["links"][0]["peer"] == "west", "broker {broker} shows the link: {status}");
        ensure!(!status.to_string().contains("faulted"), "a partition gave up: {status}");
    }
    linked.stop(BROKERS)
}

#[test]
fn both_regions_hold_the_same_whatever_is_killed() -> Result<()> {
    killed(linked("")?, stake::rounds(3), &[Side::EastMirror, Side::EastMirror, Side::WestMirror])
}

#[test]
fn a_lane_reaches_every_owner_through_its_router_whichever_broker_is_killed() -> Result<()> {
    let mut linked = linked("")?;
    linked.cluster.cli(0, &["lane", "create", "boe-cart"])?;
    linked.spawn(Side::LaneRouter)?;
    // The only address that the writers are told.
    let entry = format!("127.0.0.1:{}", linked.cluster.lane_port());
    let writers = Writers::start(&[entry], TOPIC, PARTITIONS, stake::seed(1));
    let all: Vec<usize> = (0..PARTITIONS as usize).collect();
    writers.until_first_after(&all, std::time::Instant::now())?;
    for victim in 0..BROKERS {
        linked.cluster.kill(victim)?;
        // Every partition goes on, those of the dead broker at their next owners.
        writers.until_first_after(&all, std::time::Instant::now())?;
        linked.cluster.spawn(victim)?;
        linked.cluster.wait(victim)?;
    }
    writers.until_first_after(&all, std::time::Instant::now())?;
    let promises = writers.finish()?;
    println!(
        "{} records through the router over {BROKERS} kills of brokers; {} batches sent again, {} refused",
        promises.made(),
        promises.sent_again,
        promises.refusals
    );
    ensure!(promises.made() > 0 && promises.sent_again > 0, "something was at stake");
    let both = linked.until_equal(TOPIC, promises.made())?;
    for found in &both {
        ensure!(found.len() as u64 == promises.made(), "{} records of {}", found.len(), promises.made());
    }
    promises.judge(&both[0])?;
    linked.stop(BROKERS)
}

/// Two mirrors in each region carry the same records at the same time.
fn two_mirrors(off: &str) -> Result<()> {
    let mut linked = linked(off)?;
    for side in [Side::SecondWestMirror, Side::SecondEastMirror] {
        linked.spawn(side)?;
    }
    killed(linked, 1, &[])
}

#[test]
fn two_mirrors_of_a_cluster_apply_every_record_once() -> Result<()> {
    two_mirrors("")
}

#[test]
fn twin_without_the_apply_rule_repeats_records() -> Result<()> {
    match two_mirrors("apply-rule") {
        Ok(()) => anyhow::bail!("the rule is off and nobody notices"),
        Err(error) => {
            let text = format!("{error:#}");
            println!("failed as it must: {}", text.lines().next().unwrap_or_default());
            let symptoms = ["there twice", "before", "after", "another order"];
            ensure!(
                symptoms.iter().any(|symptom| text.contains(symptom)),
                "it fails of something else: {text}"
            );
            Ok(())
        }
    }
}
