//! kill -9 of a lane-router alone, by seed, under a producer and a consumer of its lane, with the baseline beside it:
//! nothing acknowledged is missing, repeated in the log, or owned by two sides.
//!
//! The router holds nothing, so all that its death may cost is a reconnection, and a hand-over where it stays away
//! longer than a member may be silent. Who owns a record is decided again from the log, by code that shares nothing
//! with the product. `SEALANE_CRASH_SEED` and `SEALANE_CRASH_ROUNDS` (kills) change what is drawn.

use std::time::Duration;

use anyhow::{Result, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::dice::Dice;
use e2e::lanes::{self, Feed, HEADER, Side, judge, kill, until, wait_ends, wait_state, write_ends};
use e2e::logread;
use e2e::services::{Kind, Options, Services};
use e2e::wire::Conn;

const TOPIC: &str = "orders";
const GROUP: &str = "shop";
const LANE: &str = "boe-cart";
const PARTITIONS: i32 = 2;
const PAUSE: Duration = Duration::from_millis(10);
/// One kill in so many is followed by a hand-over.
const HAND_OVER_EVERY: u64 = 4;

#[derive(Debug, Default)]
struct Stake {
    kills: u64,
    hand_overs: u64,
    lane_acked: usize,
    base_acked: usize,
    in_flight_at_a_kill: usize,
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn consumer(address: &str) -> Result<Running> {
    let options = ["--group", GROUP, "--commit", "--session", "6000", "--seconds", "3600"];
    Library::Confluent.start("consume", address, TOPIC, &options)
}

fn partition(n: usize) -> i32 {
    (n % PARTITIONS as usize) as i32
}

/// What a producer in the lane writes: it does not name its lane.
fn unnamed(n: usize) -> Record {
    Record::numbered("lane-", n).partition(partition(n))
}

/// What the baseline writes: half of it for requests of the lane that it served.
fn mixed(n: usize) -> Record {
    let record = Record::numbered("base-", n).partition(partition(n));
    if (n / PARTITIONS as usize).is_multiple_of(2) { record.header(HEADER, LANE) } else { record }
}

#[test]
fn a_lane_router_killed_alone_loses_nothing_and_gives_nothing_to_two_sides() -> Result<()> {
    let (kills, seed) = (number("SEALANE_CRASH_ROUNDS", 5), number("SEALANE_CRASH_SEED", 7_311));
    println!("seed {seed}, {kills} kills");
    let mut dice = Dice::new(seed);
    let mut services = Services::start(Options { lane_grace_seconds: 1, ..Options::default() })?;
    let baseline = services.bootstrap(0);
    Conn::open(&baseline)?.create_topic(TOPIC, PARTITIONS, &[("sealane.lanes", "true")])?;
    let lane = lanes::create(&services, LANE)?;
    let (outside, inside) = (consumer(&baseline)?, consumer(&lane)?);
    wait_state(&services, LANE, "active")?;
    let base = Feed::start(Library::FranzGo, &baseline, TOPIC, PAUSE, mixed)?;
    let own = Feed::start(Library::Confluent, &lane, TOPIC, PAUSE, unnamed)?;
    let mut stake = Stake { kills, ..Stake::default() };
    for round in 0..kills {
        // Every router dies at work: its producer is answered and its consumer gets records.
        let (acked, got) = (own.acked(), inside.records().len());
        until("work through the lane-router", || {
            Ok(own.acked() > acked + 10 && inside.records().len() > got + 10)
        })?;
        std::thread::sleep(Duration::from_millis(dice.between(0, 700)));
        let given = own.made();
        services.kill(Kind::LaneRouter, 0)?;
        stake.in_flight_at_a_kill += given.saturating_sub(own.acked());
        if round % HAND_OVER_EVERY == 1 {
            // It stays away until the lane has lost its member, and the baseline has taken over.
            wait_state(&services, LANE, "closed")?;
            // Of four records in a row one names the lane for each partition: some fall to the baseline.
            let acked = base.acked();
            until("records that fall to the baseline", || Ok(base.acked() > acked + 20))?;
            stake.hand_overs += 1;
        } else {
            std::thread::sleep(Duration::from_millis(dice.below(1_500)));
        }
        services.spawn(Kind::LaneRouter, 0)?;
    }
    wait_state(&services, LANE, "active")?;
    stake.base_acked = base.finish()?;
    stake.lane_acked = own.finish()?;
    write_ends(&baseline, TOPIC, PARTITIONS, Some(LANE), "lane-end")?;
    write_ends(&baseline, TOPIC, PARTITIONS, None, "end")?;
    wait_ends(&[&inside], PARTITIONS, "lane-end")?;
    wait_ends(&[&outside], PARTITIONS, "end")?;
    let sides = [
        Side { lane: None, processes: vec![kill(outside)?] },
        Side { lane: Some(LANE.to_owned()), processes: vec![kill(inside)?] },
    ];
    services.stop()?;
    let judged = judge(&logread::read(&services.region_dir(0), Some(TOPIC))?, TOPIC, GROUP, &sides)?;
    println!("at stake: {stake:?}, {judged:?}");
    // The judge has seen every record of the log once, at its side; so none may be missing there.
    let written = stake.base_acked + stake.lane_acked + 2 * PARTITIONS as usize;
    ensure!(judged.records == written, "{} of {written} acknowledged records are in the log", judged.records);
    let at_stake = [stake.lane_acked, stake.base_acked, stake.in_flight_at_a_kill, judged.fallen_back];
    ensure!(stake.kills > 0 && stake.hand_overs > 0, "nothing was at stake: {stake:?}");
    ensure!(at_stake.iter().all(|count| *count > 0), "nothing was at stake: {stake:?}, {judged:?}");
    ensure!(judged.repeated[&None] == 0, "the baseline lost nobody and processed records twice: {judged:?}");
    Ok(())
}
