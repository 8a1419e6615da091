//! Faults that users of comparable systems met in their logs, on brokers that share a store: producers that repeat
//! themselves, logs that were trimmed, topics that are made again under the same name. Each is looked at again after
//! the owner was killed, and after every broker was, so that all there is comes out of the store.

#![cfg(feature = "cluster")]

use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::clients::{PATIENCE, Record};
use e2e::cluster::{Cluster, Directory, Store};
use e2e::soak::GIVEN_UP;
use e2e::stores::front::FrontFaults;
use e2e::wire::{BatchHead, Conn, FetchPlan, Put, Take, batch, numbered};

const BROKERS: u16 = 2;
const GROUP: &str = "readers";
const OUT_OF_RANGE: i16 = 1;
const OUT_OF_ORDER: i16 = 45;

#[test]
fn what_others_met_in_their_logs_does_not_happen_on_s3() -> Result<()> {
    all_cases(Store::s3()?)
}

#[test]
fn what_others_met_in_their_logs_does_not_happen_on_hdfs() -> Result<()> {
    all_cases(Store::hdfs()?)
}

/// Case: redpanda-data/redpanda#8959, amazon-mq/rabbitmq-stream-s3#206 (data that reached the store without what refers to
/// it, or the other way round). Objects fail while the log is written, and the owner dies; answers get lost.
#[test]
fn objects_that_are_not_taken_lose_nothing_and_are_written_when_they_are() -> Result<()> {
    let mut cluster = Cluster::prepare(Store::s3()?)?;
    cluster.put_front_before_store(17)?;
    cluster.spawn_all(BROKERS)?;
    cluster.until_alive(0, BROKERS as usize)?;
    let topic = "segments";
    let small = [("segment.bytes", "2000000")];
    Conn::open(cluster.address(0))?.create_topic(topic, 1, &small)?;
    let producer = Conn::open(cluster.address(0))?.init_producer_id()?;
    let front = |cluster: &Cluster, faults: FrontFaults| {
        let front = cluster.front.as_ref().expect("it was put there");
        front.set_faults(faults);
        (front.harmed(), front.counts().record_puts)
    };
    let calm = FrontFaults::default();
    let (harmed, _) = front(&cluster, FrontFaults { objects_broken: 1_000, ..calm });
    let mut written = write_large(&cluster, topic, producer, 0)?;
    let refused = until("objects that are refused", || {
        match front(&cluster, FrontFaults { objects_broken: 1_000, ..calm }) {
            (now, _) if now > harmed => Ok(now - harmed),
            _ => bail!("none is refused"),
        }
    })?;
    let (address, mut conn) = owner(&cluster, topic)?;
    all_there(&mut conn, topic, written)?;
    let victim = (0..BROKERS).find(|broker| cluster.address(*broker) == address).context("a broker")?;
    let mark = cluster.mark_logs();
    cluster.kill(victim)?;
    // What only the log of the dead one holds has to become objects first.
    until("an heir that waits", || {
        let said = cluster.log_since(&mark);
        ensure!(said.contains("cannot be taken over yet"), "nobody says so: {said}");
        Ok(())
    })?;
    let (_, puts) = front(&cluster, calm);
    cluster.spawn(victim)?;
    cluster.wait(victim)?;
    also_after_kills(&mut cluster, topic, |_, conn| all_there(conn, topic, written))?;
    let taken = until("objects that are taken", || match front(&cluster, calm) {
        (_, now) if now > puts => Ok(now - puts),
        _ => bail!("none is written"),
    })?;
    let (harmed, _) = front(&cluster, FrontFaults { lost: 200, ..calm });
    written = write_large(&cluster, topic, producer, written)?;
    also_after_kills(&mut cluster, topic, |_, conn| all_there(conn, topic, written))?;
    let (now, _) = front(&cluster, calm);
    println!("{refused} objects were refused, {taken} taken afterwards, {} answers were lost", now - harmed);
    ensure!(now > harmed, "nothing was at stake");
    also_after_kills(&mut cluster, topic, |_, conn| all_there(conn, topic, written))?;
    cluster.judge_logs_but(GIVEN_UP)
}

/// Ten segments of large records, from this number on; the number after the last.
fn write_large(
    cluster: &Cluster,
    topic: &str,
    (producer_id, producer_epoch): (i64, i16),
    from: usize,
) -> Result<usize> {
    const RECORDS: usize = 40;
    for n in from..from + RECORDS {
        let value = format!("{n} {}", "x".repeat(500_000)).into_bytes();
        // With a producer's number: what is sent again for want of an answer is stored once.
        let record = Record { value: Some(value), ..Record::default() };
        let sequence = n as i32;
        let head = BatchHead { producer_id, producer_epoch, sequence, ..BatchHead::default() };
        let bytes = batch(&[record], head);
        until("a large record", || {
            let (_, mut conn) = owner(cluster, topic)?;
            let answer = conn.produce(topic, 0, &bytes)?;
            ensure!(answer == (0, n as i64), "record {n}: {answer:?}");
            Ok(())
        })?;
    }
    Ok(from + RECORDS)
}

/// Every record up to `count` is at its offset, once.
fn all_there(conn: &mut Conn, topic: &str, count: usize) -> Result<()> {
    ensure!(conn.end_offset(topic, 0)? == count as i64, "the log ends elsewhere");
    for n in 0..count as i64 {
        judge_fetch(conn, topic, n, (0, Some(n)))?;
    }
    Ok(())
}

fn all_cases(store: Store) -> Result<()> {
    let mut cluster = Cluster::start(store, BROKERS, "")?;
    repeated_batches(&mut cluster)?;
    trimmed_log(&mut cluster)?;
    topic_made_again(&mut cluster)?;
    cluster.judge_logs()
}

/// Tries until there is an answer; what went wrong last is told when time is up.
fn until<T>(what: &str, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Ok(found) => return Ok(found),
            Err(error) if Instant::now() > end => return Err(error.context(format!("{what}: in vain"))),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// A connection to the broker that serves partition 0 of a topic.
fn owner(cluster: &Cluster, topic: &str) -> Result<(String, Conn)> {
    let mut directory = Directory::new(cluster.addresses());
    until(&format!("an owner of {topic}"), || {
        let owners = directory.owners(topic).context("no broker answers")?;
        let address = owners.into_iter().next().flatten().context("it has none")?;
        let mut conn = Conn::open(&address)?;
        let (error, ..) = conn.list_offset(topic, 0, -1)?;
        ensure!(error == 0, "{address} answers error {error}");
        Ok((address, conn))
    })
}

/// Looks, kills the owner and looks at what its heir has, kills all and looks at what the store has.
fn also_after_kills(
    cluster: &mut Cluster,
    topic: &str,
    look: impl Fn(&Cluster, &mut Conn) -> Result<()>,
) -> Result<()> {
    let (address, mut conn) = owner(cluster, topic)?;
    look(cluster, &mut conn).context("before any kill")?;
    let victim = (0..BROKERS).find(|broker| cluster.address(*broker) == address).context("a broker")?;
    cluster.kill(victim)?;
    let (heir, mut conn) = until("an heir", || {
        let (heir, conn) = owner(cluster, topic)?;
        if heir == address { bail!("the dead one is named") } else { Ok((heir, conn)) }
    })?;
    look(cluster, &mut conn).context(format!("{heir} has it from {address}"))?;
    cluster.kill(1 - victim)?;
    for broker in 0..BROKERS {
        cluster.spawn(broker)?;
    }
    for broker in 0..BROKERS {
        cluster.wait(broker)?;
    }
    let (_, mut conn) = owner(cluster, topic)?;
    look(cluster, &mut conn).context("after all were killed")
}

/// Case: redpanda-data/redpanda#3039, #3038 (a retried batch that was stored twice).
fn repeated_batches(cluster: &mut Cluster) -> Result<()> {
    let topic = "repeated";
    Conn::open(cluster.address(0))?.create_topic(topic, 1, &[])?;
    let (_, mut conn) = owner(cluster, topic)?;
    let producer = conn.init_producer_id()?;
    for sequence in 0..6 {
        ensure!(conn.produce(topic, 0, &numbered(producer, sequence))? == (0, i64::from(sequence)));
    }
    also_after_kills(cluster, topic, |_, conn| {
        for sequence in [5, 1] {
            let answer = conn.produce(topic, 0, &numbered(producer, sequence))?;
            ensure!(answer == (0, i64::from(sequence)), "sequence {sequence} again: {answer:?}");
        }
        ensure!(conn.produce(topic, 0, &numbered(producer, 9))?.0 == OUT_OF_ORDER, "a gap is taken");
        ensure!(conn.end_offset(topic, 0)? == 6, "something was stored");
        Ok(())
    })?;
    let (_, mut conn) = owner(cluster, topic)?;
    ensure!(conn.produce(topic, 0, &numbered(producer, 6))? == (0, 6), "the producer cannot go on");
    Ok(())
}

/// Case: Aiven-Open/tiered-storage-for-apache-kafka#663, redpanda-data/redpanda#31064 (bounds of a trimmed log).
fn trimmed_log(cluster: &mut Cluster) -> Result<()> {
    let topic = "trimmed";
    Conn::open(cluster.address(0))?.create_topic(topic, 1, &[])?;
    let (_, mut conn) = owner(cluster, topic)?;
    write(&mut conn, topic, 0..10)?;
    commit(cluster, topic, 2)?;
    also_after_kills(cluster, topic, |cluster, conn| {
        ensure!(committed(cluster, topic)? == 2, "the group is elsewhere");
        judge_fetch(conn, topic, 2, (0, Some(2)))?;
        ensure!(conn.list_offset(topic, 0, -2)?.2 == 0, "the log starts elsewhere");
        Ok(())
    })?;
    let (_, mut conn) = owner(cluster, topic)?;
    ensure!(conn.delete_records(topic, 0, 5)? == (0, 5), "the log is not trimmed");
    also_after_kills(cluster, topic, |cluster, conn| {
        ensure!(committed(cluster, topic)? == 2, "the group is elsewhere");
        ensure!(conn.list_offset(topic, 0, -2)?.2 == 5, "the log starts elsewhere");
        ensure!(conn.end_offset(topic, 0)? == 10, "the log ends elsewhere");
        for (offset, expected) in
            [(2, (OUT_OF_RANGE, None)), (5, (0, Some(5))), (10, (0, None)), (11, (OUT_OF_RANGE, None))]
        {
            judge_fetch(conn, topic, offset, expected)?;
        }
        ensure!(conn.count_records(topic, 1)? == 5, "more or fewer than the last five records are there");
        Ok(())
    })
}

/// Case: twmb/franz-go#908, #1426 (offsets and data of a topic that was deleted apply to its successor).
fn topic_made_again(cluster: &mut Cluster) -> Result<()> {
    let topic = "made-again";
    Conn::open(cluster.address(0))?.create_topic(topic, 1, &[])?;
    let (address, mut conn) = owner(cluster, topic)?;
    write(&mut conn, topic, 0..10)?;
    commit(cluster, topic, 10)?;
    ensure!(conn.delete_topic(topic)? == 0, "the topic is not deleted");
    // Its owner dies before the next one comes.
    let victim = (0..BROKERS).find(|broker| cluster.address(*broker) == address).context("a broker")?;
    cluster.kill(victim)?;
    cluster.spawn(victim)?;
    cluster.wait(victim)?;
    until("the topic again", || Conn::open(cluster.address(victim))?.create_topic(topic, 1, &[]))?;
    let (_, mut conn) = owner(cluster, topic)?;
    ensure!(conn.end_offset(topic, 0)? == 0, "the new topic begins with what the old one had");
    write(&mut conn, topic, 0..2)?;
    also_after_kills(cluster, topic, |cluster, conn| {
        let at = committed(cluster, topic)?;
        ensure!(at == -1, "the group has the offset {at} of the old topic");
        ensure!(conn.count_records(topic, 1)? == 2 && conn.end_offset(topic, 0)? == 2, "old data is back");
        judge_fetch(conn, topic, 0, (0, Some(0)))
    })
}

fn write(conn: &mut Conn, topic: &str, numbers: std::ops::Range<usize>) -> Result<()> {
    for n in numbers {
        let answer = conn.produce(topic, 0, &batch(&[Record::numbered("v", n)], BatchHead::default()))?;
        ensure!(answer == (0, n as i64), "record {n}: {answer:?}");
    }
    Ok(())
}

/// A fetch there answers this error, and the batches begin there if there are any.
fn judge_fetch(conn: &mut Conn, topic: &str, offset: i64, expected: (i16, Option<i64>)) -> Result<()> {
    let answer = conn.fetch(FetchPlan::now(topic, &[(0, offset)]))?;
    let part = &answer.first().context("one partition")?.1;
    let first = e2e::wire::batches(&part.records).first().map(|batch| batch.0);
    ensure!(
        (part.error, first) == expected,
        "a fetch at {offset}: {:?}, not {expected:?}",
        (part.error, first)
    );
    Ok(())
}

fn coordinator(cluster: &Cluster) -> Result<Conn> {
    const FIND_COORDINATOR: i16 = 10;
    let mut body = Put::default();
    body.string(Some(GROUP)).i8(0);
    for address in cluster.addresses() {
        let Ok(mut conn) = Conn::open(&address) else { continue };
        let answer = conn.call(FIND_COORDINATOR, 1, &body.0)?;
        let mut take = Take::new(&answer);
        take.i32()?;
        let error = take.i16()?;
        ensure!(error == 0, "FindCoordinator answers error {error}");
        take.string()?;
        take.i32()?;
        let host = take.string()?.context("a host")?;
        return Conn::open(
            (host.as_str(), take.i32()? as u16).to_socket_addrs()?.next().context("an address")?,
        );
    }
    bail!("no broker answers")
}

/// OffsetCommit 2, of a group that has no members.
fn commit(cluster: &Cluster, topic: &str, offset: i64) -> Result<()> {
    const OFFSET_COMMIT: i16 = 8;
    let mut body = Put::default();
    body.string(Some(GROUP)).i32(-1).string(Some("")).i64(-1).i32(1).string(Some(topic)).i32(1);
    body.i32(0).i64(offset).string(None);
    until("a commit", || {
        let answer = coordinator(cluster)?.call(OFFSET_COMMIT, 2, &body.0)?;
        let mut take = Take::new(&answer);
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        ensure!(take.i32()? == 1 && take.i32()? == 0, "one partition");
        let error = take.i16()?;
        ensure!(error == 0, "OffsetCommit answers error {error}");
        Ok(())
    })
}

/// OffsetFetch 2; -1 where nothing is committed.
fn committed(cluster: &Cluster, topic: &str) -> Result<i64> {
    const OFFSET_FETCH: i16 = 9;
    let mut body = Put::default();
    body.string(Some(GROUP)).i32(1).string(Some(topic)).i32(1).i32(0);
    until("the offset of a group", || {
        let answer = coordinator(cluster)?.call(OFFSET_FETCH, 2, &body.0)?;
        let mut take = Take::new(&answer);
        ensure!(take.i32()? == 1, "one topic");
        take.string()?;
        ensure!(take.i32()? == 1 && take.i32()? == 0, "one partition");
        let offset = take.i64()?;
        take.string()?;
        let errors = (take.i16()?, take.i16()?);
        ensure!(errors == (0, 0), "OffsetFetch answers errors {errors:?}");
        Ok(offset)
    })
}
