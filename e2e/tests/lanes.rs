//! Lanes end to end: consumers of a lane come, restart and go while their baseline lags, and each record is
//! processed by exactly one side; a PPE record is never seen outside its lane.
//!
//! Real clients, through the lane-router; who owns a record is decided again from the log by code that shares
//! nothing with the product. Every run prints and asserts what was at stake, and has a twin that must fail.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::lanes::{self, Feed, HEADER, Judged, Side, judge, kill, until, wait_ends, wait_state, write_ends};
use e2e::logread;
use e2e::process::{Local, Plan};
use e2e::wire::Conn;

const TOPIC: &str = "orders";
const GROUP: &str = "shop";
const LANE: &str = "boe-cart";
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
    if n / PARTITIONS as usize % 2 == 0 { record.header(HEADER, LANE) } else { record }
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

    let behind = consumer(Library::Sarama, &baseline)?;
    inside.push(consume_and_leave(Library::FranzGo, &lane, 20)?);
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

    ensure!(local.stop()?.success(), "it does not stop cleanly");
    let log = logread::read(&local.region_dir(0), Some(TOPIC))?;
    let sides = [
        Side { lane: None, processes: outside },
        Side { lane: Some(LANE.to_owned()), processes: inside },
    ];
    let judged = judge(&log, TOPIC, GROUP, &sides)?;
    println!("at stake: {judged:?}, the baseline was {lag} records behind");
    ensure!(lag > 0, "the baseline did not lag");
    Ok(judged)
}

#[test]
fn each_record_is_processed_by_one_side_while_a_lane_comes_restarts_and_goes() -> Result<()> {
    let judged = come_restart_and_go(Plan::one())?;
    let lane = Some(LANE.to_owned());
    for at_stake in [judged.lane_records, judged.fallen_back, judged.processed[&None], judged.processed[&lane]] {
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

/// A twin must fail, and for the reason that the mechanism is there for.
fn fails<T: std::fmt::Debug>(outcome: Result<T>, reasons: &[&str]) -> Result<()> {
    match outcome {
        Ok(stake) => bail!("the mechanism is off and nobody notices: {stake:?}"),
        Err(error) => {
            let text = format!("{error:#}");
            println!("failed as it must: {text}");
            ensure!(reasons.iter().any(|reason| text.contains(reason)), "it failed for another reason: {text}");
            Ok(())
        }
    }
}
