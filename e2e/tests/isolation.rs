//! What a lane's records are and who may see them: the rules for header values, PPE records that stay in their lane
//! whatever fails, and the lag of a reader that is shown only a part of the log. Real clients, through the lane-router.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use e2e::clients::{Library, Record, Running};
use e2e::lanes::{self, HEADER, fails, kill, until, wait_ends, wait_state, write_ends};
use e2e::peer;
use e2e::process::{Local, Plan};
use e2e::wire::{self, BatchHead, Conn, FetchPlan, Put, batch, batches};

const TOPIC: &str = "orders";
const GROUP: &str = "shop";
const BOE: &str = "boe-cart";
const PPE: &str = "ppe-next";
const PARTITIONS: i32 = 2;

fn create_topic(local: &Local, partitions: i32) -> Result<()> {
    Conn::open(local.bootstrap(0))?.create_topic(TOPIC, partitions, &[("sealane.lanes", "true")])
}

fn consumer(library: Library, address: &str) -> Result<Running> {
    let options = ["--group", GROUP, "--commit", "--session", "6000", "--seconds", "300"];
    library.start("consume", address, TOPIC, &options)
}

fn texts(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(Record::text).collect()
}

/// Ids of what was written, by the lane that it names.
#[derive(Debug, Default)]
struct Written {
    base: BTreeSet<String>,
    boe: BTreeSet<String>,
    ppe: BTreeSet<String>,
}

impl Written {
    /// Batches that mix baseline, BOE and PPE records, plain and compressed; and a PPE record without a header, from
    /// a producer in the lane.
    fn add(&mut self, local: &Local, ppe: &str, round: usize) -> Result<()> {
        let records: Vec<Record> = (0..24).map(|n| self.mixed(round, n)).collect();
        let (raw, compressed) = records.split_at(12);
        let mut conn = Conn::open(local.bootstrap(0))?;
        for partition in 0..PARTITIONS {
            let here: Vec<Record> = raw.iter().filter(|r| r.partition == Some(partition)).cloned().collect();
            ensure!(conn.produce(TOPIC, partition, &batch(&here, BatchHead::default()))?.0 == 0);
        }
        let options = ["--codec", "lz4", "--linger", "50"];
        Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, compressed, &options)?;
        let stamped = Record::numbered("ppe-stamped-", round).partition(0);
        self.ppe.insert(stamped.text());
        Library::Confluent.produce_all(ppe, TOPIC, &[stamped], &[])?;
        Ok(())
    }

    fn mixed(&mut self, round: usize, n: usize) -> Record {
        let kind = ["base", "ppe", "boe", "ppe"][n % 4];
        let record = Record::numbered(&format!("{kind}-{round}-"), n).partition(n as i32 / 4 % PARTITIONS);
        let (ids, lane) = match kind {
            "base" => (&mut self.base, None),
            "boe" => (&mut self.boe, Some(BOE)),
            _ => (&mut self.ppe, Some(PPE)),
        };
        ids.insert(record.text());
        match lane {
            Some(lane) => record.header(HEADER, lane),
            None => record,
        }
    }

    /// What a group without members in a lane gets.
    fn fallback(&self) -> BTreeSet<String> {
        &self.base | &self.boe
    }
}

/// What Fetch under this client id gives from every offset of the topic: how many records there are from the start,
/// and the bytes of all answers.
fn fetch_raw(address: &str, client_id: &str) -> Result<(usize, Vec<u8>)> {
    let mut conn = Conn::open(address)?;
    let (mut count, mut bytes) = (0, Vec::new());
    for partition in 0..PARTITIONS {
        let mut next = 0;
        for from in 0..conn.end_offset(TOPIC, partition)? {
            let mut frame = Put::default();
            frame.i16(wire::FETCH).i16(11).i32(7).string(Some(client_id));
            frame.0.extend(FetchPlan::now(TOPIC, &[(partition, from)]).body());
            conn.send_frame(&frame.0)?;
            let part = conn.fetched(7)?.remove(0).1;
            ensure!(part.error == 0, "Fetch answers error {}", part.error);
            if from == next {
                let found = batches(&part.records);
                count += wire::shown(&found) as usize;
                next = found.last().map_or(next + 1, |(_, last, _, _)| last + 1);
            }
            bytes.extend(part.records);
        }
    }
    Ok((count, bytes))
}

/// Fails when anybody outside the PPE lane gets one of its records, or misses one of his own. Returns in how many
/// ways it was tried.
fn nothing_leaks(local: &Local, regions: usize, written: &Written, round: usize) -> Result<usize> {
    let mut ways = 0;
    for address in (0..regions).map(|region| local.bootstrap(region)) {
        // Also under the client id of the lane's consumer, in either form.
        for client_id in ["e2e", "", "e2e@ppe-next", "e2e@ppe-next#127.0.0.1"] {
            // A broker that has just started shows nothing until it knows who reads; a mirror may be on its way.
            until("the baseline records by raw Fetch", || {
                let (count, bytes) = fetch_raw(&address, client_id)?;
                let leaked = bytes.windows(4).any(|window| window == b"ppe-");
                ensure!(
                    !leaked && count <= written.base.len(),
                    "raw Fetch as {client_id:?}: a PPE record was seen"
                );
                Ok(count == written.base.len())
            })?;
            ways += 1;
        }
        for library in [Library::Confluent, Library::KafkaPython, Library::Aiokafka] {
            let (seen, _) = library.read_to_end(&address, TOPIC, &[])?;
            ours(&format!("{} by assign()", library.name()), &seen, &written.base)?;
            ways += 1;
        }
        let other = format!("other-{round}");
        for (library, group) in [(Library::KafkaPython, other.as_str()), (Library::Confluent, GROUP)] {
            let (seen, _) = library.read_to_end(&address, TOPIC, &["--group", group])?;
            ours(&format!("group {group}"), &seen, &written.fallback())?;
            ways += 1;
        }
    }
    Ok(ways)
}

fn ours(who: &str, seen: &[Record], wanted: &BTreeSet<String>) -> Result<()> {
    let seen = texts(seen);
    let leaked: Vec<&String> = seen.iter().filter(|id| id.starts_with("ppe-")).collect();
    ensure!(leaked.is_empty(), "{who}: a PPE record was seen: {leaked:?}");
    ensure!(seen == *wanted, "{who} got {seen:?} instead of {wanted:?}");
    Ok(())
}

fn ppe_stays_in_its_lane(plan: Plan) -> Result<()> {
    let mut local = plan.start()?;
    create_topic(&local, PARTITIONS)?;
    let (ppe, boe) = (lanes::create(&local, PPE)?, lanes::create(&local, BOE)?);
    let mut written = Written::default();
    written.add(&local, &ppe, 0)?;
    until("the topic in the other region", || {
        Ok(Conn::open(local.bootstrap(1))?.list_offset(TOPIC, PARTITIONS - 1, -1)?.0 == 0)
    })?;
    let mut ways = nothing_leaks(&local, 2, &written, 0)?;

    let inside = consumer(Library::Confluent, &ppe)?;
    inside.wait_records(written.ppe.len())?;
    ways += nothing_leaks(&local, 1, &written, 1)?;
    let (seen, _) = Library::KafkaPython.read_to_end(&boe, TOPIC, &[])?;
    ours("another lane", &seen, &written.boe)?;
    // The shared port of the router leads into no PPE lane.
    let mut shared = Conn::open(("127.0.0.1", local.port(0, 1)))?;
    let mut frame = Put::default();
    frame.i16(wire::METADATA).i16(1).i32(7).string(Some("e2e@ppe-next")).i32(0);
    shared.send_frame(&frame.0)?;
    ensure!(shared.is_closed_by_peer()?, "the shared port leads into a PPE lane");

    local.kill()?;
    local.start_again()?;
    ways += nothing_leaks(&local, 2, &written, 2)?;
    written.add(&local, &ppe, 1)?;
    inside.wait_records(written.ppe.len())?;
    ways += nothing_leaks(&local, 2, &written, 3)?;
    let (seen, _) = Library::KafkaPython.read_to_end(&ppe, TOPIC, &[])?;
    ensure!(texts(&seen) == written.ppe, "by assign() in the lane: {:?}", texts(&seen));
    ensure!(local.stop()?.success(), "it does not stop cleanly");
    local.start_again()?;
    ways += nothing_leaks(&local, 1, &written, 4)?;
    ensure!(texts(&kill(inside)?) == written.ppe, "the lane's consumer got something else");
    println!("at stake: {} PPE records, {ways} ways to see them from outside", written.ppe.len());
    ensure!(!written.ppe.is_empty() && ways > 0);
    Ok(())
}

#[test]
fn a_ppe_record_is_never_seen_outside_its_lane() -> Result<()> {
    ppe_stays_in_its_lane(Plan::two())
}

#[test]
fn twin_without_the_view_filter_shows_a_ppe_record_to_anybody() -> Result<()> {
    let plan = Plan::two().environment("SEALANE_TEST_OFF", "view-filter");
    fails(ppe_stays_in_its_lane(plan), &["a PPE record was seen"])
}

/// Headers of a record, and who must get it; regression cases C23 and C24.
type Case = (&'static [(&'static str, Option<&'static str>)], &'static str);

const CASES: &[Case] = &[
    (&[], "base"),
    (&[(HEADER, Some("boe"))], "boe"),
    (&[(HEADER, Some("BOE"))], "base"),
    (&[(HEADER, Some(" boe "))], "boe"),
    (&[(HEADER, Some("boe\n"))], "boe"),
    (&[(HEADER, Some(" BOE "))], "base"),
    (&[(HEADER, Some("BOE\n"))], "base"),
    (&[(HEADER, Some("boe,ppe"))], "base"),
    (&[(HEADER, Some("BOE,PPE"))], "base"),
    (&[(HEADER, Some("PPE"))], "base"),
    (&[(HEADER, Some("ppe"))], "ppe"),
    (&[(HEADER, Some("XYZ"))], "base"),
    (&[(HEADER, Some("xyz"))], "base"),
    (&[(HEADER, Some("ppe-other"))], "nobody"),
    (&[(HEADER, Some(""))], "base"),
    (&[(HEADER, None)], "base"),
    (&[(HEADER, Some("prod"))], "base"),
    (&[("X-Lane", Some("boe"))], "boe"),
    (&[(HEADER, Some("boe")), (HEADER, Some("ppe"))], "ppe"),
    (&[(HEADER, Some("ppe")), (HEADER, Some("boe"))], "boe"),
    (&[(HEADER, Some("boe")), (HEADER, Some("boe"))], "boe"),
    (&[(HEADER, Some("boe")), (HEADER, None)], "base"),
    (
        &[
            ("a", Some("ppe")),
            ("b", None),
            ("c", Some("")),
            ("x-lanes", Some("ppe")),
            ("lane", Some("ppe")),
            (HEADER, Some("boe")),
        ],
        "boe",
    ),
    (&[("baggage", Some("user=1,lane=boe;p=1"))], "boe"),
    (&[("traceparent", Some("boe"))], "base"),
];

fn case(n: usize, headers: &[(&str, Option<&str>)]) -> Record {
    let headers =
        headers.iter().map(|(name, value)| (name.to_string(), value.map(|v| v.as_bytes().to_vec())));
    Record { headers: headers.collect(), ..Record::numbered("case-", n).partition(0) }
}

#[test]
fn a_lane_value_is_read_by_one_rule_and_no_header_stops_a_partition() -> Result<()> {
    let local = Plan::one().start()?;
    create_topic(&local, 1)?;
    let mut sides = vec![("base", consumer(Library::Confluent, &local.bootstrap(0))?)];
    for (name, library) in [("boe", Library::FranzGo), ("ppe", Library::KafkaPython)] {
        sides.push((name, consumer(library, &lanes::create(&local, name)?)?));
        wait_state(&local, name, "active")?;
    }
    let mut records: Vec<(Record, &str)> =
        CASES.iter().enumerate().map(|(n, (headers, wanted))| (case(n, headers), *wanted)).collect();
    // A tombstone keeps lane and null; and ordinary records follow.
    let tombstone = case(records.len(), &[(HEADER, Some("boe"))]);
    records.push((Record { value: None, ..tombstone }, "boe"));
    records.extend((100..110).map(|n| (case(n, &[]), "base")));
    let all: Vec<Record> = records.iter().map(|(record, _)| record.clone()).collect();
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &all, &["--linger", "50"])?;
    for (name, client) in &sides {
        let lane = Some(*name).filter(|name| *name != "base");
        write_ends(&local.bootstrap(0), TOPIC, 1, lane, "end")?;
        wait_ends(&[client], 1, "end")?;
    }
    for (name, client) in sides {
        let got = kill(client)?;
        let mine: Vec<&Record> =
            records.iter().filter(|(_, side)| *side == name).map(|(record, _)| record).collect();
        let named = |record: &Record| (record.key.clone(), record.headers.clone());
        ensure!(
            got.len() == mine.len() + 1
                && mine.iter().zip(&got).all(|(sent, got)| sent.content() == got.content()),
            "{name}: its own are {:?}, it got {:?}",
            mine.iter().map(|record| named(record)).collect::<Vec<_>>(),
            got.iter().map(named).collect::<Vec<_>>()
        );
    }
    a_lane_connection_speaks_for_its_lane(&local)
}

/// On a lane's own connection a record without a lane is stamped, and another lane, or what is no lane's name, is
/// refused. A declaration that can never match is refused too, with a reason.
fn a_lane_connection_speaks_for_its_lane(local: &Local) -> Result<()> {
    let status = local.cli_ok(0, &["lane", "status", "boe", "--output", "json"])?;
    let status: serde_json::Value = serde_json::from_str(&status)?;
    let address = status["lane"]["address"].as_str().context("an address")?;
    for (value, accepted) in [("boe", true), ("ppe", false), ("other", false), ("BOE", false)] {
        let record = case(900, &[(HEADER, Some(value))]);
        let acks = Library::Confluent.produce(address, TOPIC, &[record], &["--seconds", "20"])?;
        ensure!(acks.len() == 1 && acks[0].outcome.is_ok() == accepted, "{value}: {acks:?}");
    }
    for (n, codec) in ["none", "gzip", "snappy", "lz4", "zstd"].into_iter().enumerate() {
        let options = ["--codec", codec, "--idempotent"];
        Library::Confluent.produce_all(address, TOPIC, &[case(1_000 + n, &[])], &options)?;
    }
    let (read, _) = Library::KafkaPython.read_to_end(address, TOPIC, &[])?;
    let stamped: Vec<&Record> = read.iter().filter(|record| record.text().starts_with("case-100")).collect();
    let stamp = case(0, &[(HEADER, Some("boe"))]).headers;
    ensure!(stamped.len() == 5 && stamped.iter().all(|record| record.headers == stamp), "{stamped:?}");
    for name in ["BOE", "boe cart", "a,b", "prod", ""] {
        let refused = local.cli(0, &["lane", "create", name])?;
        let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(!refused.status.success() && reason.contains("lane"), "{name:?}: {reason}");
    }
    Ok(())
}

/// (committed, log end, lag) by partition, as `kafka-consumer-groups` tells it at an address.
fn lags(address: &str) -> Result<Vec<(i64, i64, i64)>> {
    let mut tool = peer::tool("org.apache.kafka.tools.consumer.group.ConsumerGroupCommand")?;
    tool.args(["--bootstrap-server", address, "--describe", "--group", GROUP]);
    let printed = peer::run(&mut tool)?;
    let mut lags = Vec::new();
    for line in printed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()) {
        if line.get(..2) == Some(&[GROUP, TOPIC]) {
            // group, topic, partition, committed, end, lag
            let number = |at: usize| line.get(at).and_then(|text| text.parse::<i64>().ok()).unwrap_or(-1);
            lags.push((number(3), number(4), number(5)));
        }
    }
    ensure!(!lags.is_empty(), "no line of {GROUP} in:\n{printed}");
    Ok(lags)
}

/// Waits until the group stands at the end; its lag is never negative.
fn wait_no_lag(what: &str, address: &str) -> Result<()> {
    until(what, || {
        let lags = lags(address)?;
        ensure!(lags.iter().all(|(committed, _, lag)| *committed < 0 || *lag >= 0), "{what}: {lags:?}");
        Ok(lags.iter().all(|(committed, end, lag)| *lag == 0 && committed == end))
    })
}

/// An idle lane among baseline traffic; regression case C26.
#[test]
fn an_idle_lane_has_no_lag_and_starts_again_where_it_was() -> Result<()> {
    const RECORDS: usize = 1_000;
    let local = Plan::one().start()?;
    create_topic(&local, 1)?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, BOE)?);
    let mut idle = consumer(Library::Confluent, &lane)?;
    wait_state(&local, BOE, "active")?;
    let records: Vec<Record> = (0..RECORDS).map(|n| Record::numbered("base-", n).partition(0)).collect();
    Library::Confluent.produce_all(&baseline, TOPIC, &records, &[])?;
    wait_no_lag("the idle lane's lag of 0", &lane)?;
    // What a new member is told to begin at is the end: nothing is scanned from the start again.
    idle.kill();
    let idle = consumer(Library::FranzGo, &lane)?;
    idle.wait_assigned()?;
    wait_no_lag("the lag of 0 after a restart", &lane)?;
    let options = ["--group", GROUP, "--commit"];
    let (seen, ends) = Library::KafkaPython.read_to_end(&baseline, TOPIC, &options)?;
    ensure!(seen.len() == RECORDS && ends.iter().all(|(_, position, high)| position == high), "{ends:?}");
    // Records that the lane owns are no lag of the baseline's.
    let owned: Vec<Record> =
        (0..5).map(|n| Record::numbered("lane-", n).partition(0).header(HEADER, BOE)).collect();
    Library::Confluent.produce_all(&baseline, TOPIC, &owned, &[])?;
    idle.wait_records(5)?;
    wait_no_lag("the baseline's lag of 0", &baseline)?;
    wait_no_lag("the lane's lag of 0", &lane)?;
    ensure!(texts(&kill(idle)?) == texts(&owned), "the lane got something else");
    Ok(())
}
