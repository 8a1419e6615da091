//! Which headers name a lane, what becomes of a batch that mixes lanes, who may look at everything, and what the
//! doctor finds. Real clients, through the lane-router. Who gets what while lanes come and go is `handover.rs`,
//! what never leaks is `isolation.rs`.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Result, ensure};
use chassis::certs::CertificateDir;
use e2e::clients::{Library, Record, Running};
use e2e::lanes::{self, HEADER, kill, until, wait_ends, wait_state, write_ends};
use e2e::process::{Local, Plan};
use e2e::single::Single;
use e2e::wire::{BatchHead, Conn, Put, Take, batch};
use e2e::{peer, tools};

const TOPIC: &str = "orders";
const GROUP: &str = "shop";
const LANE: &str = "boe-cart";
const ENV: &str = "x-tt-env";
const EXTRACTORS: &str = "sealane.lanes.extractors";

/// A region with a topic of one partition that has lanes on.
fn region(configs: &[(&str, &str)]) -> Result<Local> {
    let local = Plan::one().start()?;
    let configs: Vec<_> = configs.iter().copied().chain([("sealane.lanes", "true")]).collect();
    Conn::open(local.bootstrap(0))?.create_topic(TOPIC, 1, &configs)?;
    Ok(local)
}

fn consumer(address: &str, client_id: &str) -> Result<Running> {
    let options =
        ["--group", GROUP, "--client-id", client_id, "--commit", "--session", "6000", "--seconds", "300"];
    Library::Confluent.start("consume", address, TOPIC, &options)
}

fn texts(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(Record::text).collect()
}

fn named(id: &str) -> Record {
    Record { value: Some(id.as_bytes().to_vec()), ..Record::default() }.partition(0)
}

/// What a lane and the baseline have to get.
#[derive(Default)]
struct Sides {
    lane: BTreeSet<String>,
    base: BTreeSet<String>,
}

impl Sides {
    /// Produces a record with this header to an address; `in_lane` says whose it is.
    fn write(&mut self, address: &str, id: &str, header: Option<(&str, &str)>, in_lane: bool) -> Result<()> {
        let record = header.into_iter().fold(named(id), |record, (name, value)| record.header(name, value));
        Library::Confluent.produce_all(address, TOPIC, &[record], &[])?;
        let ids = if in_lane { &mut self.lane } else { &mut self.base };
        ids.insert(id.to_owned());
        Ok(())
    }
}

#[test]
fn a_topic_that_goes_by_x_tt_env_alone_knows_no_x_lane_until_its_list_says_so() -> Result<()> {
    let mut local = region(&[(EXTRACTORS, ENV)])?;
    let (baseline, lane) = (local.bootstrap(0), lanes::create(&local, LANE)?);
    let outside = consumer(&baseline, "outside")?;
    let inside = consumer(&lane, "inside")?;
    wait_state(&local, LANE, "active")?;
    let mut sides = Sides::default();
    sides.write(&baseline, "by-x-lane", Some((HEADER, LANE)), false)?;
    sides.write(&baseline, "by-env", Some((ENV, LANE)), true)?;
    // A lane's connection speaks the topic's language, and x-lane names nothing, so no other lane either.
    sides.write(&lane, "stamped", None, true)?;
    sides.write(&lane, "other-x-lane", Some((HEADER, "boe-other")), true)?;
    let other = named("other-env").header(ENV, "boe-other");
    let acks = Library::Confluent.produce(&lane, TOPIC, &[other], &["--seconds", "20"])?;
    ensure!(acks.len() == 1 && acks[0].outcome.is_err(), "another lane's record was taken: {acks:?}");

    let set =
        |list: &str| local.cli(0, &["topic", "alter", TOPIC, "--config", &format!("{EXTRACTORS}={list}")]);
    let refused = set("x-lane,cookie/lane")?;
    let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        !refused.status.success() && reason.contains("\"cookie/lane\"") && reason.contains("baggage/KEY"),
        "{reason}"
    );
    let described = local.cli_ok(0, &["topic", "describe", TOPIC])?;
    ensure!(described.contains(&format!("{EXTRACTORS}  {ENV}")), "{described}");
    ensure!(set("baggage/lane,x-lane")?.status.success(), "the list cannot be changed");
    sides.write(&baseline, "by-env-later", Some((ENV, LANE)), false)?;
    sides.write(&baseline, "by-x-lane-later", Some((HEADER, LANE)), true)?;
    sides.write(&lane, "stamped-later", Some(("baggage", "user=7")), true)?;
    for (address, id, in_lane) in [(&lane, "lane-end", true), (&baseline, "end", false)] {
        sides.write(address, id, None, in_lane)?;
    }
    until("both ends", || {
        Ok(texts(&inside.records()).contains("lane-end") && texts(&outside.records()).contains("end"))
    })?;
    let stamp = |id: &str| inside.records().into_iter().find(|r| r.text() == id).map(|r| r.headers);
    let header = |name: &str, value: &str| named("").header(name, value).headers;
    ensure!(stamp("stamped") == Some(header(ENV, LANE)), "{:?}", stamp("stamped"));
    let both = [header("baggage", "user=7"), header("baggage", "user=7,lane=boe-cart")].concat();
    ensure!(stamp("stamped-later") == Some(both), "{:?}", stamp("stamped-later"));
    let (inside, outside) = (texts(&kill(inside)?), texts(&kill(outside)?));
    ensure!(inside == sides.lane, "the lane got {inside:?}");
    ensure!(outside == sides.base, "the baseline got {outside:?}");

    // After a death each record still is what the list of its time says.
    local.kill()?;
    local.start_again()?;
    let (whole, _) = Library::KafkaPython.read_to_end(&lane, TOPIC, &[])?;
    ensure!(texts(&whole) == sides.lane, "after a restart the lane reads {:?}", texts(&whole));
    let (others, _) = Library::KafkaPython.read_to_end(&baseline, TOPIC, &[])?;
    ensure!(texts(&others) == sides.base, "after a restart the baseline reads {:?}", texts(&others));
    Ok(())
}

#[test]
fn a_batch_that_mixes_lanes_is_taken_apart_without_a_change_to_any_record() -> Result<()> {
    let local = region(&[])?;
    let lane = lanes::create(&local, LANE)?;
    let (baseline, in_lane) = (consumer(&local.bootstrap(0), "base")?, consumer(&lane, "lane")?);
    wait_state(&local, LANE, "active")?;
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
            .map(|n| if n % 2 == 0 { odd(n) } else { odd(n).header(HEADER, LANE) })
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

/// A record of no lane, of a BOE lane, and of a PPE lane that nobody can enter.
fn write_one_of_each(address: &str) -> Result<BTreeSet<String>> {
    let mut conn = Conn::open(address)?;
    conn.create_topic(TOPIC, 1, &[("sealane.lanes", "true")])?;
    let records = [named("base"), named("boe").header(HEADER, LANE), named("ppe").header(HEADER, "ppe-next")];
    ensure!(conn.produce(TOPIC, 0, &batch(&records, BatchHead::default()))?.0 == 0);
    Ok(texts(&records))
}

#[test]
fn a_raw_listener_shows_everything_to_its_readers_and_says_so_at_the_start() -> Result<()> {
    let certificates = tempfile::tempdir()?;
    let authority = CertificateDir::open(certificates.path())?;
    let server = authority.leaf("broker", &["localhost", "127.0.0.1"])?;
    let mut port = 0;
    let broker = Single::with_listeners("", |free| {
        port = free;
        let (pem, ca) = (&server.cert, certificates.path().join("ca.crt"));
        Ok(format!(
            "[[listeners]]\nname = \"audit\"\nbind = \"127.0.0.1:{port}\"\nadvertised = \"localhost:{port}\"\n\
             client_auth = \"required\"\nview = \"raw\"\nraw_readers = [\"auditor\"]\n\
             [listeners.tls]\ncert = {pem:?}\nkey = {pem:?}\nca = {ca:?}\n",
        ))
    })?;
    let all = write_one_of_each(&broker.bootstrap())?;
    let kcat = |name: &str, what: &[&str]| -> Result<BTreeSet<String>> {
        let pem = authority.leaf(name, &[])?.cert;
        let mut kcat = Command::new(tools::kcat()?);
        kcat.args(["-b", &format!("localhost:{port}"), "-X", "security.protocol=ssl"]).args(what);
        let ca = certificates.path().join("ca.crt");
        for (key, path) in
            [("ssl.ca.location", &ca), ("ssl.certificate.location", &pem), ("ssl.key.location", &pem)]
        {
            kcat.args(["-X", &format!("{key}={}", path.display())]);
        }
        Ok(peer::run(&mut kcat)?.lines().map(str::to_owned).collect())
    };
    let raw = kcat("auditor", &["-C", "-t", TOPIC, "-p", "0", "-o", "beginning", "-e", "-q"])?;
    ensure!(raw == all, "the auditor reads {raw:?}");
    ensure!(kcat("somebody", &["-L", "-m", "10"]).is_err(), "somebody is let in");
    let (plain, _) = Library::Confluent.read_to_end(&broker.bootstrap(), TOPIC, &[])?;
    ensure!(texts(&plain) == BTreeSet::from(["base".to_owned()]), "{:?}", texts(&plain));
    let log = broker.log();
    let warned = log.lines().any(|line| {
        line.contains("WARN") && line.contains("audit") && line.contains("auditor") && line.contains("PPE")
    });
    ensure!(warned, "no warning names the raw listener: {log}");
    ensure!(log.contains("it is not in raw_readers"), "no word of who was refused: {log}");
    Ok(())
}

/// OffsetCommit 2 of somebody who is no member.
fn commit_alone(address: &str, group: &str) -> Result<()> {
    const OFFSET_COMMIT: i16 = 8;
    let mut body = Put::default();
    body.string(Some(group)).i32(-1).string(Some("")).i64(-1);
    body.i32(1).string(Some(TOPIC)).i32(1).i32(0).i64(1).string(Some(""));
    let answer = Conn::open(address)?.call(OFFSET_COMMIT, 2, &body.0)?;
    let mut take = Take::new(&answer);
    ensure!(take.i32()? == 1, "one topic");
    take.string()?;
    ensure!((take.i32()?, take.i32()?, take.i16()?) == (1, 0, 0), "the commit is refused");
    Ok(())
}

#[test]
fn the_doctor_finds_who_bypasses_a_group_and_whose_consumers_are_alike() -> Result<()> {
    let local = region(&[])?;
    let baseline = local.bootstrap(0);
    let lane = lanes::create(&local, LANE)?;
    let healthy = consumer(&lane, "own")?;
    wait_state(&local, LANE, "active")?;
    let found = local.cli_ok(0, &["lane", "doctor"])?;
    ensure!(found == "nothing found on 1 topic with lanes\n", "{found}");

    let twins: Vec<Running> = ["twin-a", "twin-b"]
        .into_iter()
        .map(|group| {
            let options = ["--group", group, "--client-id", "same", "--seconds", "300"];
            Library::Confluent.start("consume", &baseline, TOPIC, &options)
        })
        .collect::<Result<_>>()?;
    twins.iter().try_for_each(|twin| twin.wait_assigned().map(drop))?;
    write_ends(&baseline, TOPIC, 1, None, "end")?;
    for twin in &twins {
        wait_ends(&[twin], 1, "end")?;
    }
    // A consumer of assign() that keeps its position in a group of which nobody is a member.
    commit_alone(&baseline, "flink")?;
    Library::KafkaPython.read_to_end(&baseline, TOPIC, &["--client-id", "no-group"])?;

    let printed = local.cli_ok(0, &["lane", "doctor", "--output", "json"])?;
    let found: serde_json::Value = serde_json::from_str(&printed)?;
    let bypassing = &found["bypassing_groups"];
    ensure!(
        bypassing[0]["group"] == "flink" && bypassing.as_array().is_some_and(|b| b.len() == 1),
        "{printed}"
    );
    ensure!(found["readers_without_group"][0]["client_id"] == "no-group", "{printed}");
    let alike = &found["groups_of_one_client_id"];
    ensure!(alike[0]["groups"] == serde_json::json!(["twin-a", "twin-b"]), "{printed}");
    ensure!(alike[0]["same_host"] == true && alike[0]["stops"] == false, "{printed}");
    let told = local.cli_ok(0, &["lane", "doctor"])?;
    for name in ["flink", "no-group", "twin-a", "give each consumer its own"] {
        ensure!(told.contains(name), "{told}");
    }
    drop(healthy);
    Ok(())
}
