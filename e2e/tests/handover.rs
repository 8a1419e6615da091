//! Lanes that come, restart, go and die while their baseline lags: each record is processed by exactly one side.
//!
//! Real clients, through the lane-router. Who owns a record is decided again from the log, by code that shares
//! nothing with the product, and compared with what the clients got, by id and by count. Every run prints and
//! asserts what was at stake; the twins without the view filter, without markers and without the comparison of cuts
//! must fail.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::lanes::{
    self, Feed, HEADER, Judged, Side, fails, judge, kill, until, wait_ends, wait_state, write_ends,
};
use e2e::logread;
use e2e::process::{Local, Plan};
use e2e::wire::Conn;

const TOPIC: &str = "orders";
const GROUP: &str = "shop";
const LANE: &str = "boe-cart";
const OTHER: &str = "boe-other";
const PARTITIONS: i32 = 2;
const PAUSE: Duration = Duration::from_millis(10);
/// Consumers commit what they have processed; a dead one is noticed soon.
const CONSUMER: [&str; 7] = ["--group", GROUP, "--commit", "--session", "6000", "--seconds", "300"];

fn create_topic(local: &Local, topic: &str, partitions: i32) -> Result<()> {
    Conn::open(local.bootstrap(0))?.create_topic(topic, partitions, &[("sealane.lanes", "true")])
}

/// Records of the lane and of the baseline in turns on every partition, so that batches mix them.
fn numbered(n: usize) -> Record {
    let record = Record::numbered("r", n).partition((n % PARTITIONS as usize) as i32);
    if (n / PARTITIONS as usize).is_multiple_of(2) { record.header(HEADER, LANE) } else { record }
}

fn consumer(library: Library, address: &str) -> Result<Running> {
    library.start("consume", address, TOPIC, &CONSUMER)
}

/// A consumer that leaves its group properly once it has processed `count` records.
fn consume_and_leave(library: Library, address: &str, count: usize) -> Result<Vec<Record>> {
    library.consume(address, TOPIC, count, &CONSUMER)
}

/// Lets the lane come, crash, restart within grace, go, come again and go again, while the baseline is far behind.
fn come_restart_and_go(plan: Plan) -> Result<Judged> {
    let mut local = plan.start()?;
    create_topic(&local, TOPIC, PARTITIONS)?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, LANE)?);
    let feed = Feed::start(Library::Confluent, &baseline, TOPIC, PAUSE, numbered)?;
    let mut outside = vec![consume_and_leave(Library::Confluent, &baseline, 20)?];

    let first = consumer(Library::Confluent, &lane)?;
    first.wait_records(20)?;
    let mut inside = vec![kill(first)?];
    inside.push(consume_and_leave(Library::Confluent, &lane, 60)?);
    wait_state(&local, LANE, "closed")?;
    let lag = feed.acked() - outside[0].len();

    let behind = consumer(Library::FranzGo, &baseline)?;
    inside.push(consume_and_leave(Library::Sarama, &lane, 20)?);
    wait_state(&local, LANE, "closed")?;
    let after = feed.acked();
    until("some records after the lane went", || Ok(feed.acked() > after + 20))?;

    let last = consumer(Library::KafkaPython, &lane)?;
    wait_state(&local, LANE, "active")?;
    feed.finish()?;
    write_ends(&baseline, TOPIC, PARTITIONS, Some(LANE), "lane-end")?;
    write_ends(&baseline, TOPIC, PARTITIONS, None, "end")?;
    wait_ends(&[&last], PARTITIONS, "lane-end")?;
    wait_ends(&[&behind], PARTITIONS, "end")?;
    inside.push(kill(last)?);
    outside.push(kill(behind)?);

    let judged = stop_and_judge(&mut local, outside, inside)?;
    println!("at stake: {judged:?}, the baseline was {lag} records behind");
    ensure!(lag > 0, "the baseline did not lag");
    Ok(judged)
}

#[test]
fn each_record_is_processed_by_one_side_while_a_lane_comes_restarts_and_goes() -> Result<()> {
    let judged = come_restart_and_go(Plan::one())?;
    let lane = Some(LANE.to_owned());
    for at_stake in
        [judged.lane_records, judged.fallen_back, judged.processed[&None], judged.processed[&lane]]
    {
        ensure!(at_stake > 0, "nothing was at stake: {judged:?}");
    }
    // It came three times and went twice; the restart was no hand-over.
    let partitions = PARTITIONS as u64;
    ensure!((judged.activated, judged.deactivated) == (3 * partitions, 2 * partitions), "{judged:?}");
    ensure!(judged.repeated[&None] == 0, "the baseline processed records twice: {judged:?}");
    // The process that was killed commits record by record, so one may have been delivered and not committed.
    ensure!(judged.repeated[&lane] <= 1, "the lane processed records twice: {judged:?}");
    Ok(())
}

#[test]
fn twin_without_the_view_filter_processes_records_on_both_sides() -> Result<()> {
    fails(come_restart_and_go(Plan::one().environment("SEALANE_TEST_OFF", "view-filter")), &["belongs to"])
}

/// What is acknowledged once the lane's consumer has its assignment is the lane's, whatever a coordinator of before
/// sends after it. Returns how many such records there were.
fn belongs_to_the_lane_from_its_assignment_on(plan: Plan, stale_cuts: bool) -> Result<usize> {
    const RECORDS: usize = 200;
    let local = plan.start()?;
    create_topic(&local, TOPIC, PARTITIONS)?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, LANE)?);
    let outside = consumer(Library::Confluent, &baseline)?;
    let inside = consumer(Library::FranzGo, &lane)?;
    for client in [&outside, &inside] {
        until("all partitions", || Ok(client.wait_assigned()?.len() == PARTITIONS as usize))?;
    }
    let log = local.log();
    let cuts: Vec<&str> = log.lines().filter(|line| line.contains("a stale cut was sent")).collect();
    let accepted = cuts.iter().filter(|line| line.contains("\"accepted\":true")).count();
    println!("at stake: {RECORDS} records, {} stale cuts, {accepted} of them accepted", cuts.len());
    ensure!(!stale_cuts || cuts.len() >= PARTITIONS as usize, "no stale cut was sent");

    let records: Vec<Record> = (0..RECORDS).map(numbered).collect();
    let options = ["--linger", "20", "--idempotent"];
    Library::FranzGo.produce_all(&baseline, TOPIC, &records, &options)?;
    write_ends(&baseline, TOPIC, PARTITIONS, None, "end")?;
    wait_ends(&[&outside], PARTITIONS, "end")?;
    until("every record at one of the two", || {
        Ok(inside.records().len() + outside.records().len() >= RECORDS + PARTITIONS as usize)
    })?;
    let (inside, outside) = (kill(inside)?, kill(outside)?);
    let ids = |records: &[Record]| records.iter().map(Record::text).collect::<BTreeSet<_>>();
    let (lanes, others): (Vec<Record>, Vec<Record>) =
        records.into_iter().partition(|record| !record.headers.is_empty());
    if let Some(id) = ids(&outside).intersection(&ids(&lanes)).next() {
        bail!("{id} belongs to the lane, which had its assignment, and the baseline processed it");
    }
    ensure!(ids(&inside) == ids(&lanes), "the lane processed {:?}", ids(&inside));
    ensure!(ids(&outside).is_superset(&ids(&others)), "the baseline processed {:?}", ids(&outside));
    ensure!(!lanes.is_empty() && accepted == 0, "nothing was at stake, or a stale cut was accepted");
    Ok(lanes.len())
}

#[test]
fn what_comes_after_a_lane_has_its_assignment_is_the_lanes() -> Result<()> {
    belongs_to_the_lane_from_its_assignment_on(Plan::one(), false).map(drop)
}

#[test]
fn twin_without_lane_markers_gives_the_lanes_records_to_the_baseline() -> Result<()> {
    let plan = Plan::one().environment("SEALANE_TEST_OFF", "lane-markers");
    fails(belongs_to_the_lane_from_its_assignment_on(plan, false), &["belongs to the lane"])
}

#[test]
fn a_cut_of_the_coordinator_of_before_changes_nothing() -> Result<()> {
    let plan = Plan::one().environment("SEALANE_TEST_FAULT", "stale-cut");
    belongs_to_the_lane_from_its_assignment_on(plan, true).map(drop)
}

#[test]
fn twin_without_the_comparison_lets_a_stale_cut_close_a_lane() -> Result<()> {
    let plan = Plan::one().environment("SEALANE_TEST_FAULT", "stale-cut");
    let plan = plan.environment("SEALANE_TEST_OFF", "compare-and-append");
    fails(belongs_to_the_lane_from_its_assignment_on(plan, true), &["belongs to the lane"])
}

/// The only consumer of a lane dies: after grace the baseline gets what comes, and what waited stays the lane's.
#[test]
fn a_lane_that_dies_is_handed_over_after_grace_and_what_it_had_waits_for_it() -> Result<()> {
    let mut local = Plan::one().start()?;
    create_topic(&local, TOPIC, PARTITIONS)?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, LANE)?);
    let feed = Feed::start(Library::FranzGo, &baseline, TOPIC, 4 * PAUSE, numbered)?;
    let outside = consumer(Library::Confluent, &baseline)?;
    let dying = consumer(Library::Confluent, &lane)?;
    dying.wait_records(20)?;
    let mut inside = vec![kill(dying)?];
    let rows = wait_state(&local, LANE, "closed")?;
    let waiting: i64 = rows.iter().filter_map(|row| row["waiting_records"].as_i64()).sum();
    let handed_over = |records: &[Record]| records.iter().any(|record| !record.headers.is_empty());
    until("lane records at the baseline", || Ok(handed_over(&outside.records())))?;

    let back = consumer(Library::Confluent, &lane)?;
    wait_state(&local, LANE, "active")?;
    feed.finish()?;
    write_ends(&baseline, TOPIC, PARTITIONS, Some(LANE), "lane-end")?;
    write_ends(&baseline, TOPIC, PARTITIONS, None, "end")?;
    wait_ends(&[&back], PARTITIONS, "lane-end")?;
    wait_ends(&[&outside], PARTITIONS, "end")?;
    inside.push(kill(back)?);
    let judged = stop_and_judge(&mut local, vec![kill(outside)?], inside)?;
    println!("at stake: {judged:?}, {waiting} records waited for the lane");
    ensure!(waiting > 0 && judged.fallen_back > 0, "nothing was at stake");
    ensure!(judged.repeated.values().sum::<usize>() <= 1, "{judged:?}");
    Ok(())
}

/// Broker and router die again and again, under a baseline that works on and lanes that come.
#[test]
fn ownership_outlives_the_death_of_broker_and_router() -> Result<()> {
    const KILLS: usize = 4;
    let mut local = Plan::one().start()?;
    create_topic(&local, TOPIC, PARTITIONS)?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, LANE)?);
    let feed = Feed::start(Library::Confluent, &baseline, TOPIC, PAUSE, numbered)?;
    let outside = consumer(Library::Confluent, &baseline)?;
    let mut inside = Vec::new();
    let mut held = 0;
    for round in 0..KILLS {
        // They die while the lane is coming and, every other time, while it works.
        let working = consumer(Library::Confluent, &lane)?;
        if round % 2 == 0 {
            working.wait_records(10)?;
            held += 1;
        }
        local.kill()?;
        local.start_again()?;
        working.wait_records(20)?;
        inside.push(kill(working)?);
    }
    let last = consumer(Library::Confluent, &lane)?;
    last.wait_records(1)?;
    feed.finish()?;
    write_ends(&baseline, TOPIC, PARTITIONS, Some(LANE), "lane-end")?;
    write_ends(&baseline, TOPIC, PARTITIONS, None, "end")?;
    wait_ends(&[&last], PARTITIONS, "lane-end")?;
    wait_ends(&[&outside], PARTITIONS, "end")?;
    inside.push(kill(last)?);
    let judged = stop_and_judge(&mut local, vec![kill(outside)?], inside)?;
    println!("at stake: {judged:?}, {KILLS} kills, {held} while the lane worked");
    ensure!(judged.processed.len() == 2 && judged.activated > 0 && held > 0, "nothing was at stake");
    Ok(())
}

/// Stops it, and judges what the baseline and the lane processed.
fn stop_and_judge(local: &mut Local, outside: Vec<Vec<Record>>, inside: Vec<Vec<Record>>) -> Result<Judged> {
    ensure!(local.stop()?.success(), "it does not stop cleanly");
    let sides =
        [Side { lane: None, processes: outside }, Side { lane: Some(LANE.to_owned()), processes: inside }];
    judge(&logread::read(&local.region_dir(0), Some(TOPIC))?, TOPIC, GROUP, &sides)
}

/// Members of one group in two lanes and the baseline, in every layout of members and partitions; regression case
/// C25. Every second record is of a lane.
#[test]
fn one_group_in_two_lanes_and_the_baseline_loses_nothing_in_any_layout() -> Result<()> {
    let mut local = Plan::one().start()?;
    let addresses = [
        (None, local.bootstrap(0)),
        (Some(LANE), lanes::create(&local, LANE)?),
        (Some(OTHER), lanes::create(&local, OTHER)?),
    ];
    // Topic, partitions, members in the baseline and in each lane.
    let layouts = [("one-each", 2, [1, 1, 1]), ("three-one", 2, [3, 1, 0]), ("one-partition", 1, [2, 2, 1])];
    let mut judgements = Vec::new();
    for (topic, partitions, members) in layouts {
        create_topic(&local, topic, partitions)?;
        let mut sides = Vec::new();
        for ((lane, address), members) in addresses.iter().zip(members) {
            sides.push((*lane, members_of(topic, address, lane.is_some(), members)?));
            if let (Some(lane), 1..) = (lane, members) {
                until("the lane's group", || {
                    let rows = lanes::status(&local, lane)?;
                    let here = rows.iter().filter(|row| row["topic"] == topic && row["state"] == "active");
                    Ok(here.count() == partitions as usize)
                })?;
            }
        }
        let records: Vec<Record> = (0..100).map(|n| of_two_lanes(n, n as i32 / 4 % partitions)).collect();
        let options = ["--linger", "20", "--idempotent"];
        Library::FranzGo.produce_all(&local.bootstrap(0), topic, &records, &options)?;
        for (lane, clients) in &sides {
            let tag = format!("end-{}", lane.unwrap_or("base"));
            // Without members in a lane its records fall back.
            let reader = if clients.is_empty() { &sides[0].1 } else { clients };
            write_ends(&local.bootstrap(0), topic, partitions, *lane, &tag)?;
            wait_ends(&reader.iter().collect::<Vec<_>>(), partitions, &tag)?;
        }
        let sides = sides.into_iter().filter(|(_, clients)| !clients.is_empty()).map(|(lane, clients)| {
            let processes = clients.into_iter().map(kill).collect::<Result<_>>()?;
            Ok(Side { lane: lane.map(str::to_owned), processes })
        });
        judgements.push((topic, sides.collect::<Result<Vec<_>>>()?));
    }
    ensure!(local.stop()?.success(), "it does not stop cleanly");
    let log = logread::read(&local.region_dir(0), None)?;
    for (topic, sides) in judgements {
        let judged = judge(&log, topic, topic, &sides)?;
        println!("{topic}: {judged:?}");
        ensure!(judged.lane_records >= 50 && judged.activated > 0, "{topic}: nothing was at stake");
    }
    Ok(())
}

/// Consumers of `topic` in the group of its name.
fn members_of(topic: &str, address: &str, in_lane: bool, members: usize) -> Result<Vec<Running>> {
    let library = if in_lane { Library::FranzGo } else { Library::Confluent };
    let options = ["--group", topic, "--commit", "--session", "6000", "--seconds", "300"];
    (0..members).map(|_| library.start("consume", address, topic, &options)).collect()
}

/// A lane's consumer joins and leaves five times under load, and twice dies and is replaced within grace, beside a
/// second lane of the same group that stays.
#[test]
fn a_lane_that_joins_and_leaves_five_times_under_load_loses_nothing() -> Result<()> {
    const DEATHS: usize = 2;
    let mut local = Plan::one().start()?;
    create_topic(&local, TOPIC, PARTITIONS)?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, LANE)?);
    let stays = consumer(Library::FranzGo, &lanes::create(&local, OTHER)?)?;
    wait_state(&local, OTHER, "active")?;
    let outside = [consumer(Library::Confluent, &baseline)?, consumer(Library::Confluent, &baseline)?];
    let make = |n: usize| {
        let turn = of_two_lanes(n / PARTITIONS as usize, n as i32 % PARTITIONS);
        Record { value: Record::numbered("r", n).value, ..turn }
    };
    let feed = Feed::start(Library::FranzGo, &baseline, TOPIC, PAUSE / 2, make)?;
    let mut inside = Vec::new();
    for round in 0..5 {
        if round < DEATHS {
            let dies = consumer(Library::Confluent, &lane)?;
            dies.wait_records(5)?;
            inside.push(kill(dies)?);
        }
        inside.push(consume_and_leave(Library::FranzGo, &lane, 20)?);
        wait_state(&local, LANE, "closed")?;
        let gone = feed.acked();
        until("records without the lane", || Ok(feed.acked() > gone + 20))?;
    }
    let last = consumer(Library::FranzGo, &lane)?;
    wait_state(&local, LANE, "active")?;
    feed.finish()?;
    write_ends(&baseline, TOPIC, PARTITIONS, Some(LANE), "lane-end")?;
    write_ends(&baseline, TOPIC, PARTITIONS, Some(OTHER), "other-end")?;
    write_ends(&baseline, TOPIC, PARTITIONS, None, "end")?;
    wait_ends(&[&last], PARTITIONS, "lane-end")?;
    wait_ends(&[&stays], PARTITIONS, "other-end")?;
    wait_ends(&outside.iter().collect::<Vec<_>>(), PARTITIONS, "end")?;
    inside.push(kill(last)?);
    let sides = [
        Side { lane: None, processes: outside.into_iter().map(kill).collect::<Result<_>>()? },
        Side { lane: Some(LANE.to_owned()), processes: inside },
        Side { lane: Some(OTHER.to_owned()), processes: vec![kill(stays)?] },
    ];
    ensure!(local.stop()?.success(), "it does not stop cleanly");
    let judged = judge(&logread::read(&local.region_dir(0), Some(TOPIC))?, TOPIC, GROUP, &sides)?;
    println!("at stake: {judged:?}");
    ensure!(judged.fallen_back > 0 && judged.deactivated >= 5, "nothing was at stake: {judged:?}");
    let repeated = |lane: &str| judged.repeated[&Some(lane.to_owned())];
    // Each of the dead may have been given one record that it did not commit.
    ensure!(
        repeated(LANE) <= DEATHS && repeated(OTHER) == 0,
        "who leaves properly repeats nothing: {judged:?}"
    );
    Ok(())
}

/// Every second record is of one of two lanes.
fn of_two_lanes(n: usize, partition: i32) -> Record {
    let record = Record::numbered("r", n).partition(partition);
    match [None, Some(LANE), None, Some(OTHER)][n % 4] {
        Some(lane) => record.header(HEADER, lane),
        None => record,
    }
}
