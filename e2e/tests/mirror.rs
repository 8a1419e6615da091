//! Two regions: no cycles, recreated topics, many topics on few streams, foreign peers. Kills are in `crash.rs` and
//! `killed_alone.rs`.
//! What both logs hold is read by `logread.py`, which shares no code with the product.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::clients::{Library, PATIENCE, Record};
use e2e::load::{Load, Writer};
use e2e::process::Plan;
use e2e::services::{Kind, Options, Services};
use e2e::wire::{BatchHead, Conn, batch};
use e2e::{dump, logread};

fn write(address: &str, topic: &str, prefix: &str, numbers: std::ops::Range<usize>) -> Result<()> {
    let mut raw = Conn::open(address)?;
    for n in numbers {
        let answer = raw.produce(topic, 0, &batch(&[Record::numbered(prefix, n)], BatchHead::default()))?;
        ensure!(answer.0 == 0, "{topic}: produce answers error {}", answer.0);
    }
    Ok(())
}

/// Waits until `done`; what it says meanwhile is the error's text.
fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut last = String::new();
    loop {
        match done() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) => last = format!("{error:#}"),
        }
        ensure!(Instant::now() < end, "took too long: {what}; {last}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn wait_count(address: &str, topic: &str, partitions: i32, wanted: u64) -> Result<()> {
    let mut found = 0;
    let waited = until("records", || {
        found = Conn::open(address)?.count_records(topic, partitions)?;
        Ok(found >= wanted)
    });
    waited.map_err(|error| error.context(format!("{address} has {found} of {wanted} records of {topic}")))?;
    ensure!(found == wanted, "{address} has {found} records of {topic}, {wanted} were written");
    Ok(())
}

fn ends(addresses: &[String], topic: &str) -> Result<Vec<i64>> {
    addresses.iter().map(|address| Conn::open(address)?.end_offset(topic, 0)).collect()
}

/// The log ends at two moments some seconds apart are the same.
fn ensure_at_rest(addresses: &[String], topic: &str) -> Result<()> {
    let before = ends(addresses, topic)?;
    std::thread::sleep(Duration::from_secs(4));
    let after = ends(addresses, topic)?;
    ensure!(before == after, "the logs of {topic} move by themselves: {before:?}, then {after:?}");
    Ok(())
}

#[test]
fn records_go_round_neither_idle_nor_after_a_restart_nor_after_a_cut() -> Result<()> {
    let mut services = Services::start(Options::default())?;
    let both = [services.bootstrap(0), services.bootstrap(1)];
    Conn::open(&both[0])?.create_topic("t", 1, &[("max.message.bytes", "777777")])?;
    until("the topic in both regions", || Ok(ends(&both, "t").is_ok()))?;
    write(&both[0], "t", "east-", 0..10)?;
    write(&both[1], "t", "west-", 0..10)?;
    wait_count(&both[0], "t", 1, 20)?;
    wait_count(&both[1], "t", 1, 20)?;
    // A group's commits are a region's own and must not cross.
    Library::KafkaPython.read_to_end(&both[0], "t", &["--group", "g", "--commit"])?;
    ensure_at_rest(&both, "t")?;

    for kind in [Kind::Mirror, Kind::Broker] {
        services.kill(kind, 1)?;
        services.spawn(kind, 1)?;
    }
    ensure_at_rest(&both, "t")?;

    services.link.faults.cut(true);
    write(&both[0], "t", "east-", 10..15)?;
    write(&both[1], "t", "west-", 10..15)?;
    let mut local = Vec::new();
    for address in &both {
        local.push(Conn::open(address)?.count_records("t", 1)?);
    }
    ensure!(local == [25, 25], "while the link is cut: {local:?}");
    services.link.faults.cut(false);
    wait_count(&both[0], "t", 1, 30)?;
    wait_count(&both[1], "t", 1, 30)?;
    ensure_at_rest(&both, "t")?;
    let described = services.cli(1, &["topic", "describe", "t", "--output", "json"])?;
    ensure!(described.contains("777777"), "the configuration did not cross: {described}");

    services.stop()?;
    let (east, west) =
        (logread::read(&services.region_dir(0), None)?, logread::read(&services.region_dir(1), None)?);
    ensure!(logread::ensure_mirrored(&east, &west, "t")? == 15, "from east");
    ensure!(logread::ensure_mirrored(&west, &east, "t")? == 15, "from west");
    let crossed = |log: &logread::Log| {
        log.records.iter().any(|one| one.topic.starts_with("__") && one.origin.is_some())
    };
    ensure!(!crossed(&east) && !crossed(&west), "an internal topic was mirrored");
    Ok(())
}

#[test]
fn a_topic_deleted_and_created_again_is_mirrored_from_its_new_beginning() -> Result<()> {
    for (again, while_down) in [(3, true), (15, true), (7, false)] {
        let mut services = Services::start(Options::default())?;
        let both = [services.bootstrap(0), services.bootstrap(1)];
        let mut east = Conn::open(&both[0])?;
        east.create_topic("t", 1, &[])?;
        write(&both[0], "t", "old-", 0..10)?;
        wait_count(&both[1], "t", 1, 10)?;
        if while_down {
            services.kill(Kind::Mirror, 0)?;
        }
        ensure!(east.delete_topic("t")? == 0, "delete");
        east.create_topic("t", 1, &[])?;
        write(&both[0], "t", "new-", 0..again)?;
        if while_down {
            services.spawn(Kind::Mirror, 0)?;
        }
        wait_count(&both[1], "t", 1, 10 + again as u64)?;
        until("the reset in the status of west", || {
            let status = services.cli(1, &["mirror", "status", "--all", "--output", "json"])?;
            let status: serde_json::Value = serde_json::from_str(&status)?;
            let notes = status["notes"].as_array().cloned().unwrap_or_default();
            Ok(notes.iter().any(|note| note["topic"] == "t"))
        })?;
        wait_count(&both[0], "t", 1, again as u64)?;
        services.stop()?;
        let west = logread::read(&services.region_dir(1), Some("t"))?;
        let (old, new) = ((0..10).map(|n| format!("old-{n}")), (0..again).map(|n| format!("new-{n}")));
        let wanted: Vec<String> = old.chain(new).collect();
        ensure!(west.values("t", 0) == wanted, "west holds {:?}", west.values("t", 0));
    }
    Ok(())
}

/// Regression case C22: more topics than streams, then topics that come and go.
fn many_topics(options: Options) -> Result<()> {
    const TOPICS: usize = 150;
    let mut services = Services::start(options)?;
    let both = [services.bootstrap(0), services.bootstrap(1)];
    let mut east = Conn::open(&both[0])?;
    for n in 0..TOPICS {
        east.create_topic(&format!("t{n}"), 1, &[])?;
        write(&both[0], &format!("t{n}"), "v", 0..1)?;
    }
    for n in 0..TOPICS {
        write(&both[0], &format!("t{n}"), "v", 1..2)?;
    }
    for n in 0..TOPICS {
        wait_count(&both[1], &format!("t{n}"), 1, 2)?;
    }
    for n in 0..200 {
        let name = format!("short-{n}");
        east.create_topic(&name, 1, &[])?;
        ensure!(east.delete_topic(&name)? == 0, "delete");
    }
    write(&both[0], "t7", "v", 2..3)?;
    wait_count(&both[1], "t7", 1, 3)?;
    services.stop()
}

#[test]
fn a_hundred_and_fifty_topics_share_the_streams_of_a_link() -> Result<()> {
    many_topics(Options::default())
}

#[test]
fn a_peer_that_allows_eight_streams_gets_everything_too() -> Result<()> {
    many_topics(Options { streams_max: 8, ..Options::default() })
}

#[test]
fn a_peer_with_a_foreign_certificate_gets_nothing_and_the_regions_go_on() -> Result<()> {
    let mut services = Services::start(Options { foreign_peer: true, ..Options::default() })?;
    let both = [services.bootstrap(0), services.bootstrap(1)];
    Conn::open(&both[0])?.create_topic("t", 1, &[])?;
    write(&both[0], "t", "v", 0..10)?;
    until("a link that says why it does not stand", || {
        let status = services.cli(0, &["mirror", "status", "--output", "json"])?;
        let status: serde_json::Value = serde_json::from_str(&status)?;
        let link = &status["links"][0];
        Ok(link["state"] != "active"
            && link["reason"].as_str().is_some_and(|reason| reason.contains("certificate")))
    })?;
    ensure!(Conn::open(&both[1])?.list_offset("t", 0, -1)?.0 == 3, "something crossed");
    ensure!(Conn::open(&both[0])?.count_records("t", 1)? == 10, "the region does not go on");
    services.stop()
}

#[test]
fn odd_headers_arrive_in_the_other_region_as_they_were() -> Result<()> {
    let mut local = Plan::two().start()?;
    let (east, west) = (local.bootstrap(0), local.bootstrap(1));
    Conn::open(&east)?.create_topic("t", 1, &[])?;
    let list = [("b", Some("1")), ("a", None), ("a", Some("")), ("a", Some("2")), ("b", Some("1"))];
    let headers: Vec<_> =
        list.iter().map(|(name, value)| (name.to_string(), value.map(|v| v.as_bytes().to_vec()))).collect();
    let mut sent = Vec::new();
    for codec in ["none", "gzip", "snappy", "lz4", "zstd"] {
        let records = [
            Record { key: None, headers: headers.clone(), ..Record::numbered("v", 0).partition(0) },
            Record { key: Some(vec![]), value: None, ..Record::default() }.partition(0),
        ];
        Library::Confluent.produce_all(&east, "t", &records, &["--codec", codec])?;
        sent.extend(records);
    }
    for library in [Library::Confluent, Library::KafkaPython, Library::Aiokafka, Library::FranzGo] {
        for isolation in ["read_uncommitted", "read_committed"] {
            let read = library.consume(&west, "t", sent.len(), &["--isolation", isolation])?;
            for (one, other) in sent.iter().zip(&read) {
                ensure!(one.content() == other.content(), "{}: {one:?} became {other:?}", library.name());
            }
        }
    }
    local.stop()?;
    let (east, west) =
        (logread::read(&local.region_dir(0), Some("t"))?, logread::read(&local.region_dir(1), Some("t"))?);
    ensure!(logread::ensure_mirrored(&east, &west, "t")? == sent.len());
    let printed = dump::judge(&local.region_dir(1))?;
    ensure!(printed.contains("UNKNOWN(100)"), "dump-log shows no mirror marker");
    Ok(())
}

/// Two mirrors in each region carry the same records at the same time.
fn two_mirrors(options: Options) -> Result<(logread::Log, logread::Log)> {
    let mut services = Services::start(options)?;
    let both = [services.bootstrap(0), services.bootstrap(1)];
    for region in [1, 0] {
        services.spawn(Kind::SecondMirror, region)?;
    }
    // Two links, each seen from both ends.
    until("both links", || Ok(services.logs().matches("link is up").count() >= 4))?;
    Conn::open(&both[0])?.create_topic("t", 1, &[])?;
    until("the topic in both regions", || Ok(ends(&both, "t").is_ok()))?;
    let writers = vec![Writer::new("t", 0, "east-", 1), Writer::new("t", 0, "west-", 2)];
    let load = Load::start(writers, &both);
    std::thread::sleep(Duration::from_secs(2));
    let writers = load.finish()?;
    let total: u64 = writers.iter().map(Writer::made).sum();
    for address in &both {
        until("all records, or more than all", || Ok(Conn::open(address)?.count_records("t", 1)? >= total))?;
    }
    ensure_at_rest(&both, "t")?;
    services.stop()?;
    let (east, west) = (
        logread::read(&services.region_dir(0), Some("t"))?,
        logread::read(&services.region_dir(1), Some("t"))?,
    );
    writers[0].judge(&east)?;
    writers[1].judge(&west)?;
    println!("{total} records, {} markers in west", west.markers("t", "mirror"));
    Ok((east, west))
}

#[test]
fn two_mirrors_of_one_region_apply_every_record_once() -> Result<()> {
    let (east, west) = two_mirrors(Options::default())?;
    ensure!(logread::ensure_mirrored(&east, &west, "t")? > 0, "nothing was at stake");
    ensure!(logread::ensure_mirrored(&west, &east, "t")? > 0, "nothing was at stake");
    Ok(())
}

#[test]
fn twin_without_the_apply_rule_repeats_records() -> Result<()> {
    let off = Options { mechanism_off: "apply-rule".to_owned(), ..Options::default() };
    match two_mirrors(off).and_then(|(east, west)| logread::ensure_mirrored(&east, &west, "t")) {
        Ok(count) => anyhow::bail!("the rule is off and nobody notices in {count} records"),
        Err(error) => {
            let text = format!("{error:#}");
            println!("failed as it must: {text}");
            ensure!(
                ["again", "arrived", "move by themselves"].iter().any(|reason| text.contains(reason)),
                "{text}"
            );
            Ok(())
        }
    }
}
