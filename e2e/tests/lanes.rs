//! Lanes with real clients: who gets a record is a function of the record and the log, and a PPE record never leaks.
//! Every record has an id; "exactly one of the two" is checked by id, not by count alone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::clients::{Library, PATIENCE, Record, Running};
use e2e::process::{Local, Plan};
use e2e::wire::{Conn, FetchPlan};
use e2e::{dump, logread};

const TOPIC: &str = "orders";
const GROUP: &str = "shop";

/// A region with a topic that has lanes on.
fn region(plan: Plan, partitions: i32) -> Result<Local> {
    let local = plan.start()?;
    Conn::open(local.bootstrap(0))?.create_topic(TOPIC, partitions, &[("sealane.lanes", "true")])?;
    Ok(local)
}

/// Makes a lane and returns the address of its workloads.
fn lane(local: &Local, name: &str) -> Result<String> {
    let row: serde_json::Value =
        serde_json::from_str(&local.cli_ok(0, &["lane", "create", name, "--output", "json"])?)?;
    Ok(row["address"].as_str().context("an address")?.to_owned())
}

/// A consumer of the group; every one has a client id of its own, as the documents ask for.
fn consumer(address: &str, client_id: &str) -> Result<Running> {
    let options =
        ["--group", GROUP, "--client-id", client_id, "--commit", "--session", "6000", "--seconds", "600"];
    Library::Confluent.start("consume", address, TOPIC, &options)
}

fn ids(consumer: &Running) -> Vec<String> {
    consumer.records().iter().map(Record::text).collect()
}

fn set(ids: &[String]) -> BTreeSet<String> {
    ids.iter().cloned().collect()
}

fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < end, "took too long: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Waits until the lane's group holds `partitions` partitions by marker.
fn wait_active(local: &Local, name: &str, partitions: usize) -> Result<()> {
    until("the lane is active", || {
        let status: serde_json::Value =
            serde_json::from_str(&local.cli_ok(0, &["lane", "status", name, "--output", "json"])?)?;
        let groups = status["groups"].as_array().cloned().unwrap_or_default();
        Ok(groups.iter().filter(|group| group["state"] == "active").count() >= partitions)
    })
}

fn plain(id: &str) -> Record {
    Record { key: Some(id.as_bytes().to_vec()), value: Some(id.as_bytes().to_vec()), ..Record::default() }
}

fn of_lane(id: &str, lane: &str) -> Record {
    plain(id).header("x-lane", lane)
}

#[test]
fn header_values_are_judged_by_one_rule_and_every_record_goes_to_exactly_one_side() -> Result<()> {
    let local = region(Plan::one(), 1)?;
    let (boe, ppe) = (lane(&local, "boe")?, lane(&local, "ppe")?);
    let (baseline, in_boe, in_ppe) = (
        consumer(&local.bootstrap(0), "base")?,
        consumer(&boe, "boe-reader")?,
        consumer(&ppe, "ppe-reader")?,
    );
    wait_active(&local, "boe", 1)?;
    wait_active(&local, "ppe", 1)?;
    baseline.wait_assigned()?;
    let mut tombstone = of_lane("tombstone", "boe");
    tombstone.value = None;
    let mut null_value = plain("null");
    null_value.headers.push(("x-lane".to_owned(), None));
    let mut many = plain("many");
    for n in 0..5 {
        many = many.header(&format!("h{n}"), "v");
    }
    // (record, who gets it: b baseline, l lane boe, p lane ppe)
    let cases = [
        (of_lane("capitals", "BOE"), 'b'),
        (of_lane("exact", "boe"), 'l'),
        (of_lane("spaces", " boe "), 'l'),
        (of_lane("newline", "boe\n"), 'l'),
        (of_lane("comma", "boe,ppe"), 'b'),
        (of_lane("ppe", "ppe"), 'p'),
        (of_lane("unknown", "xyz"), 'b'),
        (of_lane("empty", ""), 'b'),
        (of_lane("prod", "prod"), 'b'),
        (plain("other-case").header("X-Lane", "boe"), 'l'),
        (plain("baggage").header("baggage", "a=1,lane=boe"), 'l'),
        (plain("none"), 'b'),
        (null_value, 'b'),
        (of_lane("last-wins", "ppe").header("x-lane", "boe"), 'l'),
        (of_lane("twice", "boe").header("x-lane", "boe"), 'l'),
        (many.header("x-lane", "boe"), 'l'),
        (of_lane("class-is-in-the-name", "ppe-nobody"), '-'),
    ];
    let records: Vec<Record> = cases.iter().map(|(record, _)| record.clone()).collect();
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &records, &[])?;
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &[tombstone], &[])?;
    let tail: Vec<Record> = (0..10).map(|n| plain(&format!("tail-{n}"))).collect();
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &tail, &[])?;
    let wanted = |side: char| -> BTreeSet<String> {
        cases.iter().filter(|(_, who)| *who == side).map(|(record, _)| record.text()).collect()
    };
    let mut base = wanted('b');
    base.extend((0..10).map(|n| format!("tail-{n}")));
    let lane_count = wanted('l').len() + 1;
    baseline.wait_records(base.len())?;
    in_boe.wait_records(lane_count)?;
    in_ppe.wait_records(1)?;
    ensure!(set(&ids(&baseline)) == base, "baseline: {:?}", ids(&baseline));
    let tombstones = in_boe.records().iter().filter(|record| record.value.is_none()).count();
    ensure!(tombstones == 1, "the tombstone lost its lane or its null");
    let mut lane_ids = set(&ids(&in_boe));
    lane_ids.remove("");
    ensure!(lane_ids == wanted('l'), "lane boe: {:?}", ids(&in_boe));
    ensure!(set(&ids(&in_ppe)) == wanted('p'), "lane ppe: {:?}", ids(&in_ppe));
    Ok(())
}

#[test]
fn a_lane_consumer_that_comes_and_goes_under_load_shares_every_record_exactly() -> Result<()> {
    for partitions in [1, 2] {
        let mut local = region(Plan::one(), partitions)?;
        let address = lane(&local, "boe-cart")?;
        let baseline = consumer(&local.bootstrap(0), "base")?;
        baseline.wait_assigned()?;
        let mut lane_ids = Vec::new();
        let mut written = BTreeMap::new();
        let mut write = |local: &Local, count: usize| -> Result<()> {
            let from = written.len();
            let records: Vec<Record> = (from..from + count)
                .map(|n| match n % 2 {
                    0 => plain(&format!("b{n}")),
                    _ => of_lane(&format!("l{n}"), "boe-cart"),
                })
                .collect();
            Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &records, &["--linger", "0"])?;
            written.extend((from..from + count).map(|n| (n, n % 2 == 1)));
            Ok(())
        };
        for round in 0..5 {
            write(&local, 20)?;
            let mut in_lane = consumer(&address, &format!("lane-{round}"))?;
            // Half of the visits write before they know whether they are active: the log decides all the same.
            if round % 2 == 0 {
                wait_active(&local, "boe-cart", partitions as usize)?;
            }
            write(&local, 20)?;
            in_lane.wait_assigned()?;
            std::thread::sleep(Duration::from_millis(300));
            in_lane.kill();
            lane_ids.extend(ids(&in_lane));
        }
        // The last visitor takes what the lane owns and had not been read.
        let last = consumer(&address, "lane-last")?;
        wait_active(&local, "boe-cart", partitions as usize)?;
        write(&local, 10)?;
        let all: BTreeSet<String> =
            written.iter().map(|(n, lane)| format!("{}{n}", if *lane { 'l' } else { 'b' })).collect();
        let waited = until("every record at one of the two", || {
            let mut seen = set(&ids(&baseline));
            seen.extend(lane_ids.iter().cloned());
            seen.extend(ids(&last));
            Ok(seen == all)
        });
        let mut lane_seen = set(&lane_ids);
        lane_seen.extend(ids(&last));
        let base_seen = set(&ids(&baseline));
        if let Err(error) = waited {
            let missing: Vec<_> =
                all.iter().filter(|id| !base_seen.contains(*id) && !lane_seen.contains(*id)).collect();
            bail!("{error:#}; missing {missing:?}");
        }
        let both: Vec<_> = base_seen.intersection(&lane_seen).collect();
        ensure!(both.is_empty(), "{partitions} partitions: processed by both: {both:?}");
        ensure!(
            lane_seen.iter().all(|id| id.starts_with('l')),
            "the lane got baseline records: {lane_seen:?}"
        );
        ensure!(
            !lane_seen.is_empty() && base_seen.iter().any(|id| id.starts_with('l')),
            "nothing changed sides"
        );
        drop((baseline, last));
        local.stop()?;
        let log = logread::read(&local.region_dir(0), Some(TOPIC))?;
        let markers = (log.markers(TOPIC, "activate"), log.markers(TOPIC, "deactivate"));
        println!("{partitions} partitions: {} records, markers {markers:?}", written.len());
        ensure!(markers.0 > 0, "no marker was written");
    }
    Ok(())
}

#[test]
fn an_idle_lane_has_no_lag_and_a_lagging_baseline_gets_only_its_own() -> Result<()> {
    const GROUPS: &str = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand";
    let local = region(Plan::one(), 1)?;
    let address = lane(&local, "boe-idle")?;
    let mut in_lane = consumer(&address, "idle")?;
    wait_active(&local, "boe-idle", 1)?;
    let records: Vec<Record> = (0..1_000).map(|n| plain(&format!("b{n}"))).collect();
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &records, &[])?;
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &[of_lane("l0", "boe-idle")], &[])?;
    in_lane.wait_records(1)?;
    ensure!(ids(&in_lane) == ["l0"], "the lane: {:?}", ids(&in_lane));
    until("a lag of 0 in the lane", || {
        let mut tool = e2e::peer::tool(GROUPS)?;
        tool.args(["--bootstrap-server", &address, "--describe", "--group", GROUP]);
        let described = e2e::peer::run(&mut tool)?;
        let row = described.lines().find(|line| line.split_whitespace().nth(1) == Some(TOPIC));
        Ok(row.is_some_and(|row| row.split_whitespace().nth(5) == Some("0")))
    })?;
    // Dies, and is back within grace: nothing changes hands.
    in_lane.kill();
    let back = consumer(&address, "idle-again")?;
    back.wait_assigned()?;
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &[of_lane("l1", "boe-idle")], &[])?;
    back.wait_records(1)?;
    ensure!(set(&ids(&back)).contains("l1"), "{:?}", ids(&back));
    // The baseline comes late, reads from the start, and sees none of the lane's records.
    let baseline = consumer(&local.bootstrap(0), "late")?;
    baseline.wait_records(1_000)?;
    Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &[plain("end")], &[])?;
    baseline.wait_records(1_001)?;
    ensure!(ids(&baseline).iter().all(|id| !id.starts_with('l')), "the baseline got lane records");
    Ok(())
}

/// Everything that a reader without a lane can do to see `orders`; the ids it saw.
fn seen_outside(local: &Local, lane_client_id: &str) -> Result<BTreeSet<String>> {
    let address = local.bootstrap(0);
    let mut seen = BTreeSet::new();
    // Raw Fetch, outside of any group.
    let mut raw = Conn::open(&address)?;
    let mut bytes = Vec::new();
    for partition in 0..2 {
        let end = raw.end_offset(TOPIC, partition)?;
        for from in 0..end {
            let from = [(partition, from)];
            let plan = FetchPlan { max_wait_ms: 100, ..FetchPlan::now(TOPIC, &from) };
            bytes.extend(raw.fetch(plan)?.into_iter().flat_map(|(_, part)| part.records));
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    seen.extend(text.match_indices("secret").map(|(at, _)| format!("raw fetch: {}", &text[at..at + 6])));
    // assign(), a group, and a group under the client id of the lane's own consumer.
    let readers = [
        vec!["--until-end", "--seconds", "60"],
        vec!["--until-end", "--seconds", "60", "--group", "stranger", "--client-id", "stranger"],
        vec!["--until-end", "--seconds", "60", "--group", GROUP, "--client-id", "base"],
        // Where two groups cannot be told apart one of them may get nowhere: it is given a moment only.
        vec!["--seconds", "4", "--group", "thief", "--client-id", lane_client_id],
    ];
    for options in readers {
        let mut reader = Library::Confluent.start("consume", &address, TOPIC, &options)?;
        reader.wait_end(PATIENCE)?;
        seen.extend(ids(&reader).into_iter().map(|id| format!("{options:?}: {id}")));
    }
    Ok(seen)
}

/// PPE records and baseline ones in turn, a PPE consumer in its lane, and every way to look from outside.
fn ppe_run(plan: Plan) -> Result<(Local, Running)> {
    let local = region(plan, 2)?;
    let address = lane(&local, "ppe-next")?;
    let in_lane = consumer(&address, "ppe-reader")?;
    wait_active(&local, "ppe-next", 2)?;
    let mut records = Vec::new();
    for n in 0..20 {
        records.push(plain(&format!("open-{n}")).partition(n % 2));
        records.push(of_lane(&format!("secret-{n}"), "ppe-next").partition(n % 2));
        // Held although nobody will ever read it.
        records.push(of_lane(&format!("secret-{n}"), "ppe-nobody").partition(n % 2));
    }
    for codec in ["none", "zstd"] {
        let options = ["--codec", codec, "--linger", "50"];
        Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &records, &options)?;
    }
    Ok((local, in_lane))
}

#[test]
fn a_ppe_record_is_never_seen_outside_its_lane() -> Result<()> {
    let (mut local, in_lane) = ppe_run(Plan::one())?;
    in_lane.wait_records(40)?;
    ensure!(ids(&in_lane).iter().all(|id| id.starts_with("secret")), "the lane got others' records");
    judge_outside(&local)?;
    drop(in_lane);
    local.stop()?;
    local.start_again()?;
    judge_outside(&local)?;
    local.kill()?;
    local.start_again()?;
    judge_outside(&local)
}

fn judge_outside(local: &Local) -> Result<()> {
    let seen = seen_outside(local, "ppe-reader")?;
    let leaked: Vec<_> = seen.iter().filter(|id| id.contains("secret")).collect();
    ensure!(leaked.is_empty(), "seen outside of the lane: {leaked:?}");
    ensure!(seen.iter().any(|id| id.contains("open")), "nothing was seen at all: {seen:?}");
    Ok(())
}

#[test]
fn twin_without_the_view_filter_leaks() -> Result<()> {
    let (local, _in_lane) = ppe_run(Plan::one().environment("SEALANE_TEST_OFF", "view-filter"))?;
    let seen = seen_outside(&local, "ppe-reader")?;
    ensure!(seen.iter().any(|id| id.contains("secret")), "the filter is off and nobody notices: {seen:?}");
    Ok(())
}

#[test]
fn a_lanes_connection_stamps_what_carries_no_lane_and_refuses_another_one() -> Result<()> {
    let local = region(Plan::one(), 1)?;
    let address = lane(&local, "boe-cart")?;
    let in_lane = consumer(&address, "lane")?;
    wait_active(&local, "boe-cart", 1)?;
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let options = ["--codec", codec, "--idempotent"];
        Library::Confluent.produce_all(&address, TOPIC, &[plain(&format!("stamped-{codec}"))], &options)?;
    }
    let read = in_lane.wait_records(5)?;
    for record in &read {
        let stamp = [("x-lane".to_owned(), Some(b"boe-cart".to_vec()))];
        ensure!(record.headers == stamp, "{record:?}");
    }
    let acks = Library::Confluent.produce(
        &address,
        TOPIC,
        &[of_lane("other", "boe-other")],
        &["--seconds", "20"],
    )?;
    ensure!(acks.iter().all(|ack| ack.outcome.is_err()), "another lane's record was taken: {acks:?}");
    Ok(())
}

/// A topic whose log holds lane markers between its records and at its end.
fn marked_region() -> Result<Local> {
    let local = region(Plan::one(), 1)?;
    let address = lane(&local, "boe-cart")?;
    for n in 0..4 {
        Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &[plain(&format!("b{n}"))], &[])?;
        let options = ["--group", GROUP, "--client-id", "visitor", "--seconds", "1"];
        let mut visitor = Library::Confluent.start("consume", &address, TOPIC, &options)?;
        wait_active(&local, "boe-cart", 1)?;
        visitor.wait_end(PATIENCE)?;
        until("the lane's end in the log", || {
            let status = local.cli_ok(0, &["lane", "status", "boe-cart", "--output", "json"])?;
            Ok(status.contains("\"closed\""))
        })?;
    }
    Ok(local)
}

#[test]
fn a_topic_with_lane_markers_is_read_clean_and_without_lag_by_every_client() -> Result<()> {
    const GROUPS: &str = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand";
    let mut local = marked_region()?;
    let address = local.bootstrap(0);
    let mut groups = Vec::new();
    for library in Library::ALL {
        for isolation in ["read_uncommitted", "read_committed"] {
            let group = format!("all-{}-{isolation}", library.name());
            let options = ["--group", &group, "--client-id", &group, "--commit", "--isolation", isolation];
            let read = library.consume(&address, TOPIC, 4, &options)?;
            let texts: Vec<String> = read.iter().map(Record::text).collect();
            ensure!(texts == ["b0", "b1", "b2", "b3"], "{}: {texts:?}", library.name());
            groups.push(group);
        }
    }
    let mut java = e2e::peer::tool("org.apache.kafka.tools.consumer.ConsoleConsumer")?;
    java.args(["--bootstrap-server", &address, "--topic", TOPIC, "--group", "all-java", "--from-beginning"]);
    java.args(["--max-messages", "4", "--command-property", "isolation.level=read_committed"]);
    ensure!(e2e::peer::run(&mut java)? == "b0\nb1\nb2\nb3\n", "the Java client reads something else");
    groups.push("all-java".to_owned());
    let mut tool = e2e::peer::tool(GROUPS)?;
    tool.args(["--bootstrap-server", &address, "--describe", "--all-groups"]);
    let described = e2e::peer::run(&mut tool)?;
    for group in &groups {
        let row = described.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let row = row.into_iter().find(|row| row.first() == Some(&group.as_str())).context("a row")?;
        ensure!(row[5] == "0", "{group} lags: {row:?}");
    }
    local.stop()?;
    let log = logread::read(&local.region_dir(0), Some(TOPIC))?;
    let markers = log.markers(TOPIC, "activate") + log.markers(TOPIC, "deactivate");
    ensure!(markers >= 8, "the topic holds {markers} lane markers");
    let end = log.partitions.iter().map(|partition| partition.end).max();
    let last = log.records.iter().map(|logged| logged.offset).max();
    ensure!(end > last.map(|last| last + 1), "the log does not end in a marker");
    dump::judge(&local.region_dir(0)).map(drop)
}

#[test]
fn a_batch_that_mixes_lanes_is_taken_apart_without_a_change_to_any_record() -> Result<()> {
    let local = region(Plan::one(), 1)?;
    let address = lane(&local, "boe-cart")?;
    let baseline = consumer(&local.bootstrap(0), "base")?;
    let in_lane = consumer(&address, "lane")?;
    wait_active(&local, "boe-cart", 1)?;
    baseline.wait_assigned()?;
    let list = [("b", Some("1")), ("a", None), ("a", Some("")), ("a", Some("2")), ("b", Some("1"))];
    let odd = |n: usize| {
        let headers =
            list.iter().map(|(name, value)| (name.to_string(), value.map(|v| v.as_bytes().to_vec())));
        let value = if n % 5 == 4 { None } else { Some(format!("v{n}").into_bytes()) };
        Record {
            key: (!n.is_multiple_of(3)).then(Vec::new),
            value,
            headers: headers.collect(),
            ..Record::default()
        }
    };
    let mut sent = Vec::new();
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let records: Vec<Record> = (0..12)
            .map(|n| if n % 2 == 0 { odd(n) } else { odd(n).header("x-lane", "boe-cart") })
            .map(|record| Record { timestamp: Some(1_700_000_000_123), ..record }.partition(0))
            .collect();
        let options = ["--codec", codec, "--linger", "500"];
        Library::Confluent.produce_all(&local.bootstrap(0), TOPIC, &records, &options)?;
        sent.extend(records);
    }
    let half = sent.len() / 2;
    for (side, reader) in [(0, &baseline), (1, &in_lane)] {
        let read = reader.wait_records(half)?;
        let wanted: Vec<&Record> = sent.iter().skip(side).step_by(2).collect();
        ensure!(read.len() == wanted.len(), "{} of {} records", read.len(), wanted.len());
        for (one, other) in wanted.into_iter().zip(&read) {
            ensure!(one.content() == other.content(), "{one:?} became {other:?}");
            ensure!(one.timestamp == other.timestamp, "a timestamp changed: {other:?}");
        }
    }
    Ok(())
}
