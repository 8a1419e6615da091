//! What a cluster stands on fails and heals: etcd, S3, HDFS, clocks. Each fault is named in one line that says what
//! is being done about it; nobody ends, nothing is lost, and all is served again afterwards.

#![cfg(feature = "cluster")]

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use e2e::clients::{Library, PATIENCE, Record};
use e2e::cluster::{Cluster, Directory, LogMark, Store, Writers, judge_lines, read};
use e2e::lanes::Feed;
use e2e::soak::GIVEN_UP;
use e2e::stores::front::FrontFaults;
use e2e::stores::s3::S3;
use e2e::wire::{BatchHead, Conn, PRODUCE, Take, batch, produce_body};

const TOPIC: &str = "orders";
const PARTITIONS: i32 = 6;
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until one line of what came since has all of these words; that line.
fn line_with(cluster: &Cluster, since: &LogMark, words: &[&str]) -> Result<String> {
    let end = Instant::now() + PATIENCE;
    loop {
        let log = cluster.log_since(since);
        if let Some(line) = log.lines().find(|line| words.iter().all(|word| line.contains(word))) {
            return Ok(line.to_owned());
        }
        ensure!(Instant::now() < end, "no line has all of {words:?}:\n{log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A broker waits and says for what; then it is ended.
fn waits_for(cluster: &mut Cluster, broker: u16, words: &[&str]) -> Result<()> {
    let mark = cluster.mark_logs();
    cluster.spawn(broker)?;
    println!("{}", line_with(cluster, &mark, words)?);
    ensure!(cluster.ended(broker)?.is_none(), "it does not wait: it has ended");
    cluster.kill(broker)
}

/// A broker ends at once and says why.
fn is_refused(cluster: &mut Cluster, broker: u16, words: &[&str]) -> Result<()> {
    let mark = cluster.mark_logs();
    cluster.spawn(broker)?;
    println!("{}", line_with(cluster, &mark, words)?);
    let end = Instant::now() + PATIENCE;
    let status = loop {
        match cluster.ended(broker)? {
            Some(status) => break status,
            None if Instant::now() > end => bail!("it is not refused"),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    ensure!(!status.success(), "it is refused and says that all is well");
    cluster.kill(broker)
}

/// Loads on a topic of their own, over everything that happens. Not by kcat, which ends when no broker is connected
/// at some moment (edenhill/kcat#93), and here all of them may begin anew at once.
struct Load {
    lines: Feed,
    writers: Writers,
}

impl Load {
    fn start(cluster: &Cluster) -> Result<Load> {
        cluster.cli(0, &["topic", "create", TOPIC, "--partitions", &PARTITIONS.to_string()])?;
        let load = Load {
            lines: Feed::start(Library::Confluent, &cluster.bootstrap(), TOPIC, PAUSE, |number| Record {
                value: Some(number.to_string().into_bytes()),
                ..Record::default()
            })?,
            writers: Writers::start(&cluster.addresses(), TOPIC, PARTITIONS, 1),
        };
        load.flows()?;
        Ok(load)
    }

    /// Every partition acknowledges what is sent from now on.
    fn flows(&self) -> Result<()> {
        let all: Vec<usize> = (0..PARTITIONS as usize).collect();
        self.writers.until_first_after(&all, Instant::now()).map(drop)
    }

    fn judge(self, cluster: &Cluster) -> Result<()> {
        let promises = self.writers.finish()?;
        let lines = self.lines.finish()?;
        println!("{} acknowledged to writers of ours, {lines} to librdkafka", promises.acknowledged());
        ensure!(promises.acknowledged() > 0 && lines > 0, "something was at stake");
        let found = read(cluster, TOPIC)?;
        promises.judge(&found)?;
        judge_lines(&found, lines as u64)
    }
}

#[test]
fn what_is_missing_at_a_start_is_waited_for_and_named() -> Result<()> {
    let mut cluster = Cluster::prepare(Store::s3()?)?;
    cluster.put_front_before_store(1)?;
    cluster.etcd.kill(&[0, 1, 2])?;
    let etcd = "the metadata store does not answer; waiting for it";
    waits_for(&mut cluster, 0, &[etcd])?;
    cluster.etcd.start_all_again(&[0, 1, 2])?;
    cluster.set_of(0, "etcd", "[\"http://127.0.0.1:1\"]");
    waits_for(&mut cluster, 0, &[etcd, "127.0.0.1:1"])?;
    cluster.unset_of(0, "etcd");

    let store = "the store does not answer; waiting for it";
    cluster.set_of(0, "store", "\"s3://nowhere/test\"");
    waits_for(&mut cluster, 0, &[store, "s3://nowhere", "no such bucket: create it"])?;
    cluster.unset_of(0, "store");
    let faults = FrontFaults::default();
    for (faults, words) in [
        (FrontFaults { denied: 1_000, ..faults }, [store, "denied: check the credentials"]),
        (FrontFaults { broken: 1_000, ..faults }, [store, "500"]),
        (FrontFaults { hang_first: 1_000, hang: Duration::from_secs(30), ..faults }, [store, "s3://sealane"]),
    ] {
        cluster.front.as_ref().expect("it was put there").set_faults(faults);
        waits_for(&mut cluster, 0, &words)?;
    }
    // Healed while a broker waits.
    let mark = cluster.mark_logs();
    cluster.spawn(0)?;
    line_with(&cluster, &mark, &[store])?;
    cluster.front.as_ref().expect("it was put there").set_faults(FrontFaults::default());
    cluster.wait(0)?;
    Load::start(&cluster)?.judge(&cluster)?;

    // A broker of this cluster with another path.
    cluster.set_of(1, "store", &format!("\"s3://{}/elsewhere\"", S3::BUCKET));
    is_refused(&mut cluster, 1, &["cluster.store", "nothing of this cluster is there", "s3://sealane/test"])?;
    cluster.unset_of(1, "store");

    // Another cluster of the same name, by its own etcd, at the same path.
    let mut other = Cluster::prepare(Store::s3()?)?;
    let Store::S3(s3) = &cluster.store else { bail!("it is on S3") };
    other.set("s3_endpoint", &format!("{:?}", s3.endpoint()));
    let id = cluster.status(0)?["cluster_id"].as_str().unwrap_or_default().to_owned();
    ensure!(!id.is_empty(), "a cluster has an id");
    is_refused(&mut other, 0, &["it belongs to the cluster with id", &id, "choose another path"])?;
    other.set("store", &format!("\"s3://{}/other\"", S3::BUCKET));
    other.spawn_all(1)?;
    ensure!(other.status(0)?["cluster_id"].as_str() != Some(&id), "two clusters have one id");
    cluster.judge_logs()
}

#[test]
fn etcd_and_s3_may_fail_under_load_and_all_is_served_again() -> Result<()> {
    let mut cluster = Cluster::prepare(Store::s3()?)?;
    cluster.put_front_before_store(2)?;
    cluster.spawn_all(2)?;
    cluster.until_alive(0, 2)?;
    let load = Load::start(&cluster)?;

    // No quorum for longer than a lease lasts.
    let mark = cluster.mark_logs();
    cluster.etcd.kill(&[1, 2])?;
    println!("{}", line_with(&cluster, &mark, &["this life of the broker is over", "lease"])?);
    cluster.etcd.start_all_again(&[1, 2])?;
    load.flows()?;

    // Longer than a broker waits for its store.
    for (faults, word) in [
        (FrontFaults { broken: 1_000, ..FrontFaults::default() }, "500 Internal"),
        (FrontFaults { denied: 1_000, ..FrontFaults::default() }, "denied: check the credentials"),
    ] {
        let mark = cluster.mark_logs();
        let front = cluster.front.as_ref().expect("it was put there");
        front.set_faults(faults);
        println!(
            "{}",
            line_with(&cluster, &mark, &["the store takes no block of the log; trying again", word])?
        );
        line_with(&cluster, &mark, &["this life of the broker is over"])?;
        front.set_faults(FrontFaults::default());
        load.flows()?;
    }
    let Store::S3(s3) = &mut cluster.store else { bail!("it is on S3") };
    s3.daemon().pause()?;
    std::thread::sleep(Duration::from_secs(4));
    let Store::S3(s3) = &mut cluster.store else { bail!("it is on S3") };
    s3.daemon().resume()?;
    load.flows()?;
    cluster.until_alive(0, 2)?;
    load.judge(&cluster)?;
    cluster.judge_logs_but(GIVEN_UP)
}

#[test]
fn a_name_node_in_safe_mode_is_waited_for() -> Result<()> {
    let mut cluster = Cluster::prepare(Store::hdfs()?)?;
    let safe_mode = |cluster: &Cluster, on: bool| match &cluster.store {
        Store::Hdfs(hdfs) => hdfs.set_safe_mode(on),
        Store::S3(_) => bail!("it is on HDFS"),
    };
    safe_mode(&cluster, true)?;
    let mark = cluster.mark_logs();
    cluster.spawn(0)?;
    println!("{}", line_with(&cluster, &mark, &["safe mode", "waiting for it"])?);
    safe_mode(&cluster, false)?;
    cluster.wait(0)?;
    let load = Load::start(&cluster)?;
    let mark = cluster.mark_logs();
    safe_mode(&cluster, true)?;
    println!("{}", line_with(&cluster, &mark, &["safe mode"])?);
    safe_mode(&cluster, false)?;
    load.flows()?;
    load.judge(&cluster)?;
    cluster.judge_logs_but(GIVEN_UP)
}

/// Two brokers whose clocks are ten minutes apart from each other and from the store's.
#[test]
fn clocks_may_be_minutes_apart() -> Result<()> {
    let library = e2e::tools::library("libfaketime.so.1", "libfaketime")?;
    let mut cluster = Cluster::prepare(Store::s3()?)?;
    for (broker, shift) in [(0, "+10m"), (1, "-10m"), (2, "+0")] {
        cluster.set_environment("LD_PRELOAD", &library.display().to_string());
        cluster.set_environment("FAKETIME", shift);
        cluster.set_environment("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        cluster.spawn(broker)?;
    }
    (0..3).try_for_each(|broker| cluster.wait(broker))?;
    cluster.until_alive(0, 3)?;
    let load = Load::start(&cluster)?;
    let owners = Directory::new(cluster.addresses()).owners(TOPIC).unwrap_or_default();
    let distinct: std::collections::BTreeSet<_> = owners.iter().flatten().collect();
    ensure!(distinct.len() == 3, "each clock owns something: {owners:?}");
    for broker in [0, 1] {
        cluster.kill(broker)?;
        load.flows()?;
        // It comes back with the clock of the last one.
        cluster.spawn(broker)?;
        cluster.wait(broker)?;
    }
    load.judge(&cluster)?;
    cluster.judge_logs()
}

/// An owner is stopped until its lease has run out and another broker has taken more of the producer's batches; what
/// had reached it meanwhile it reads when it goes on. What it answers; `None` where it closes the connection.
fn asked_while_it_slept(off: &str) -> Result<Option<i16>> {
    let mut cluster = Cluster::prepare(Store::s3()?)?;
    cluster.set_environment("SEALANE_TEST_OFF", off);
    cluster.spawn_all(2)?;
    cluster.until_alive(0, 2)?;
    Conn::open(cluster.address(0))?.create_topic(TOPIC, 1, &[])?;
    let owners = Directory::new(cluster.addresses()).owners(TOPIC).unwrap_or_default();
    let owner = u16::from(owners.first() == Some(&Some(cluster.address(1))));
    let mut former = Conn::open(cluster.address(owner))?;
    let (producer_id, producer_epoch) = former.init_producer_id()?;
    let record = |sequence| {
        let head = BatchHead { producer_id, producer_epoch, sequence, ..BatchHead::default() };
        batch(&[Record { value: Some(b"x".to_vec()), ..Record::default() }], head)
    };
    ensure!(former.produce(TOPIC, 0, &record(0))?.0 == 0, "the owner takes the first one");

    cluster.pause(owner)?;
    let mut heir = Conn::open(cluster.address(1 - owner))?;
    let end = Instant::now() + PATIENCE;
    while heir.produce(TOPIC, 0, &record(1))?.0 != 0 {
        ensure!(Instant::now() < end, "nobody takes over:\n{}", cluster.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    let sent = former.send(PRODUCE, 7, &produce_body(TOPIC, 0, -1, &record(2)), false)?;
    cluster.resume(owner)?;
    let said = former.answer(sent).ok();
    ensure!(heir.produce(TOPIC, 0, &record(2))?.0 == 0, "the heir knows better");
    let Some(answer) = said else { return Ok(None) };
    let mut take = Take::new(&answer);
    take.i32()?;
    take.string()?;
    take.i32()?;
    take.i32()?;
    Ok(Some(take.i16()?))
}

#[test]
fn who_slept_through_his_own_end_says_nothing_that_is_no_longer_true() -> Result<()> {
    const NOT_LEADER_OR_FOLLOWER: i16 = 6;
    let said = asked_while_it_slept("")?;
    println!("it says {said:?}");
    ensure!(said.is_none_or(|code| code == NOT_LEADER_OR_FOLLOWER), "it says {said:?}");
    Ok(())
}

#[test]
fn twin_that_does_not_look_at_its_lease_refuses_what_its_heir_takes() -> Result<()> {
    const OUT_OF_ORDER_SEQUENCE_NUMBER: i16 = 45;
    let said = asked_while_it_slept("lease-check")?;
    ensure!(said == Some(OUT_OF_ORDER_SEQUENCE_NUMBER), "it says {said:?}");
    Ok(())
}
