//! Consumer groups with real clients: share, commit, resume, static members, groups without members.
//! With `SEALANE_E2E_TARGET=kafka` the same scenarios run against Apache Kafka, except where they restart it.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::clients::{Library, PATIENCE, Record, Running};
use e2e::process::Plan;
use e2e::server::Server;
use e2e::wire::{BatchHead, Conn, batch};

const GROUPS: &str = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand";

/// Writes records `from..to` to the partitions in turn.
fn write(bootstrap: &str, topic: &str, partitions: usize, numbers: std::ops::Range<usize>) -> Result<()> {
    let mut raw = Conn::open(bootstrap)?;
    for n in numbers {
        let bytes = batch(&[Record::numbered("v", n)], BatchHead::default());
        let (error, _) = raw.produce(topic, (n % partitions) as i32, &bytes)?;
        ensure!(error == 0, "produce answers error {error}");
    }
    Ok(())
}

fn texts(records: &[Record]) -> BTreeSet<String> {
    records.iter().map(Record::text).collect()
}

fn numbers(range: std::ops::Range<usize>) -> BTreeSet<String> {
    range.map(|n| format!("v{n}")).collect()
}

#[test]
fn a_group_of_any_client_commits_and_resumes_where_it_was() -> Result<()> {
    let server = Server::start()?;
    let bootstrap = server.bootstrap();
    for library in Library::ALL {
        let topic = library.name();
        Conn::open(&bootstrap)?.create_topic(topic, 2, &[])?;
        write(&bootstrap, topic, 2, 0..20)?;
        let options = ["--group", "resume", "--commit"];
        let first = library.consume(&bootstrap, topic, 20, &options)?;
        ensure!(texts(&first) == numbers(0..20), "{topic}: {:?}", texts(&first));
        write(&bootstrap, topic, 2, 20..40)?;
        let second = library.consume(&bootstrap, topic, 20, &options)?;
        ensure!(texts(&second) == numbers(20..40), "{topic}: {:?}", texts(&second));
    }
    Ok(())
}

#[test]
fn two_members_share_the_partitions_and_one_takes_over() -> Result<()> {
    let server = Server::start()?;
    let bootstrap = server.bootstrap();
    for library in [Library::Confluent, Library::FranzGo, Library::Sarama, Library::KafkaPython] {
        let topic = library.name();
        Conn::open(&bootstrap)?.create_topic(topic, 4, &[])?;
        write(&bootstrap, topic, 4, 0..40)?;
        let group = format!("share-{topic}");
        let options = ["--group", &group, "--commit", "--seconds", "300", "--session", "6000"];
        let mut one = library.start("consume", &bootstrap, topic, &options)?;
        one.wait_records(40)?;
        let mut other = library.start("consume", &bootstrap, topic, &options)?;
        write_until_both_read(&bootstrap, topic, &one, &other)?;
        // The one that stays gets everything that comes after the other one's death.
        other.kill();
        let seen = one.records().len();
        write(&bootstrap, topic, 4, 100_000..100_040)?;
        one.wait_until(PATIENCE, "the dead member's partitions", |lines, _| {
            let values: BTreeSet<&str> = lines.iter().filter_map(|line| line["v"].as_str()).collect();
            (100_000..100_040).all(|n| values.contains(hex(&format!("v{n}")).as_str()))
        })?;
        ensure!(one.records().len() > seen);
        one.kill();
    }
    Ok(())
}

/// Writes until the second member has got something, and everything written since it came is read by one of them.
fn write_until_both_read(bootstrap: &str, topic: &str, one: &Running, other: &Running) -> Result<()> {
    let mut written = 1_000;
    let end = Instant::now() + PATIENCE;
    while other.records().is_empty() {
        ensure!(Instant::now() < end, "{topic}: the second member gets nothing");
        write(bootstrap, topic, 4, written..written + 8)?;
        written += 8;
        std::thread::sleep(Duration::from_millis(200));
    }
    let all = numbers(1_000..written);
    until("every record at one of the two", || {
        all.is_subset(&(&texts(&one.records()) | &texts(&other.records())))
    })
}

/// Waits until `done`, which may look at several clients.
fn until(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done() {
        ensure!(Instant::now() < end, "took too long: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn static_member(server: &str, instance: &str) -> Result<Running> {
    let options =
        ["--group", "static", "--instance", instance, "--session", "30000", "--commit", "--seconds", "600"];
    Library::Confluent.start("consume", server, "t", &options)
}

#[test]
fn a_static_member_comes_back_to_its_partitions_without_a_rebalance() -> Result<()> {
    let mut local = if Server::is_kafka() { None } else { Some(Plan::one().start()?) };
    let kafka = if Server::is_kafka() { Some(Server::start()?) } else { None };
    let bootstrap = match (&local, &kafka) {
        (Some(local), _) => local.bootstrap(0),
        (_, Some(kafka)) => kafka.bootstrap(),
        _ => unreachable!(),
    };
    Conn::open(&bootstrap)?.create_topic("t", 2, &[])?;
    let mut m1 = static_member(&bootstrap, "m1")?;
    m1.wait_assigned()?;
    let m2 = static_member(&bootstrap, "m2")?;
    wait_split(&m1, &m2)?;
    let (held, assignments) = (m1.assigned(), assignment_count(&m2));

    m1.kill();
    let mut m1 = static_member(&bootstrap, "m1")?;
    m1.wait_assigned()?;
    ensure!(m1.assigned() == held, "m1 held {held:?} and got {:?}", m1.assigned());
    write(&bootstrap, "t", 2, 0..10)?;
    wait_both(&m1, &m2, 10)?;
    ensure!(assignment_count(&m2) == assignments, "m2 saw a rebalance");

    if let Some(local) = &mut local {
        local.stop()?;
        local.start_again()?;
        write(&bootstrap, "t", 2, 10..20)?;
        wait_both(&m1, &m2, 20)?;
        ensure!(m1.assigned() == held, "m1 held {held:?} and now {:?}", m1.assigned());
    }

    // With two live m1 the older one is fenced and the newer one works.
    let newer = static_member(&bootstrap, "m1")?;
    newer.wait_assigned()?;
    write(&bootstrap, "t", 2, 20..30)?;
    m1.wait_until(PATIENCE, "to be fenced", |lines, ended| {
        ended || lines.iter().any(|line| line["error"].as_str().is_some_and(|text| text.contains("FENCED")))
    })
    .or_else(|error| if m1.complaints().to_lowercase().contains("fenced") { Ok(()) } else { Err(error) })?;
    newer.wait_records(5)?;
    m1.kill();
    Ok(())
}

fn wait_split(one: &Running, other: &Running) -> Result<()> {
    until("one partition each", || (one.assigned().len(), other.assigned().len()) == (1, 1))
}

fn wait_both(one: &Running, other: &Running, records: usize) -> Result<()> {
    until("all records at the two", || (&texts(&one.records()) | &texts(&other.records())).len() >= records)
        .with_context(|| format!("{} {}", one.complaints(), other.complaints()))
}

fn assignment_count(member: &Running) -> usize {
    member.lines().iter().filter(|line| line.get("assigned").is_some()).count()
}

#[test]
fn a_group_without_members_is_listed_described_and_reset() -> Result<()> {
    let mut server = Server::start()?;
    let bootstrap = server.bootstrap();
    Conn::open(&bootstrap)?.create_topic("t", 1, &[])?;
    write(&bootstrap, "t", 1, 0..5)?;
    Library::KafkaPython.read_to_end(&bootstrap, "t", &["--group", "g", "--commit"])?;
    write(&bootstrap, "t", 1, 5..10)?;
    judge_empty_group(&server)?;
    if let Server::Sealane(local) = &mut server {
        local.stop()?;
        local.start_again()?;
        judge_empty_group(&server)?;
    }
    let reset = ["--group", "g", "--topic", "t", "--reset-offsets", "--to-earliest", "--execute"];
    server.run_tool(GROUPS, &reset)?;
    let described = server.run_tool(GROUPS, &["--describe", "--group", "g"])?;
    ensure!(row(&described, "t")?[3..6] == ["0", "10", "10"], "after the reset:\n{described}");
    let nope = server.tool(GROUPS, &["--describe", "--group", "nope"])?.output()?;
    let said = String::from_utf8_lossy(&nope.stdout) + String::from_utf8_lossy(&nope.stderr);
    ensure!(said.contains("nope not found") || said.contains("'nope' does not exist"), "{said}");
    Ok(())
}

fn judge_empty_group(server: &Server) -> Result<()> {
    let listed = server.run_tool(GROUPS, &["--list"])?;
    ensure!(listed.lines().any(|line| line == "g"), "{listed}");
    let described = server.run_tool(GROUPS, &["--describe", "--group", "g"])?;
    let row = row(&described, "t")?;
    ensure!(row[3..7] == ["5", "10", "5", "-"], "{described}");
    let states = server.run_tool(GROUPS, &["--describe", "--all-groups", "--state"])?;
    ensure!(states.lines().any(|line| line.starts_with("g ") && line.contains("Empty")), "{states}");
    Ok(())
}

/// The columns of a topic's first line: group, topic, partition, current, end, lag, ... by the tool's header.
fn row<'a>(described: &'a str, topic: &str) -> Result<Vec<&'a str>> {
    let header = described.lines().find(|line| line.contains("CURRENT-OFFSET")).context("a header")?;
    let names: Vec<&str> = header.split_whitespace().collect();
    let line =
        described.lines().find(|line| line.split_whitespace().nth(1) == Some(topic)).context("a row")?;
    let columns: Vec<&str> = line.split_whitespace().collect();
    let wanted = ["GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG", "CONSUMER-ID"];
    wanted
        .iter()
        .map(|name| {
            let at = names.iter().position(|known| known == name).with_context(|| format!("no {name}"))?;
            columns.get(at).copied().context("a short row")
        })
        .collect()
}
