//! Raw requests: version negotiation, null and empty, long poll, pipelining, duplicates, and bad input.
//! With `SEALANE_E2E_TARGET=kafka` the cases run against Apache Kafka, where they do not restart it.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use e2e::clients::{Library, Record};
use e2e::process::Plan;
use e2e::server::Server;
use e2e::wire::{
    self, BatchHead, Conn, FetchPlan, Put, Take, batch, batches, crc32c, numbered, produce_body,
};

fn one(n: usize) -> Vec<u8> {
    batch(&[Record::numbered("v", n)], BatchHead::default())
}

/// (error, key -> range) of an ApiVersions answer laid out as v0.
fn versions_v0(body: &[u8]) -> Result<(i16, Vec<(i16, i16, i16)>)> {
    let mut take = Take::new(body);
    let error = take.i16()?;
    let mut keys = Vec::new();
    for _ in 0..take.i32()? {
        keys.push((take.i16()?, take.i16()?, take.i16()?));
    }
    ensure!(take.left() == 0, "{} bytes too many", take.left());
    Ok((error, keys))
}

#[test]
fn a_client_from_the_future_learns_the_versions_and_goes_on() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    // Header v2: key, version, correlation id 7, client id, no tags; the body's fields are compact.
    let mut frame = Put::default();
    frame.i16(wire::API_VERSIONS).i16(99).i32(7).string(Some("future")).tags();
    frame.compact_string(Some("f")).compact_string(Some("1")).tags();
    raw.send_frame(&frame.0)?;
    let answer = raw.receive()?;
    ensure!(answer[..4] == 7i32.to_be_bytes(), "another correlation id");
    let (error, keys) = versions_v0(&answer[4..])?;
    ensure!(error == 35, "error {error}");
    ensure!(keys.iter().any(|(key, min, max)| *key == 18 && *min == 0 && *max >= 3), "{keys:?}");
    let (error, keys) = versions_v0(&raw.call(wire::API_VERSIONS, 0, &[])?)?;
    ensure!(error == 0 && keys.len() > 20, "error {error}, {} keys", keys.len());
    let mut body = Put::default();
    body.compact_string(Some("f")).compact_string(Some("1")).tags();
    let sent = raw.send(wire::API_VERSIONS, 3, &body.0, true)?;
    let answer = raw.answer(sent)?;
    let mut take = Take::new(&answer);
    ensure!(take.i16()? == 0, "v3 fails");
    ensure!(take.uvarint()? as usize == keys.len() + 1, "v3 lists other keys than v0");
    Ok(())
}

/// Metadata with this list of topics; (brokers, (error, topic)...).
fn metadata(
    raw: &mut Conn,
    version: i16,
    topics: Option<&[&str]>,
    create: bool,
) -> Result<(usize, Vec<(i16, String)>)> {
    let mut body = Put::default();
    if version >= 9 {
        body.uvarint(topics.map_or(0, |topics| topics.len() as u64 + 1));
        for topic in topics.unwrap_or_default() {
            if version >= 10 {
                body.0.extend_from_slice(&[0; 16]);
            }
            body.compact_string(Some(topic)).tags();
        }
        body.i8(create.into()).i8(0).tags();
    } else {
        body.i32(topics.map_or(-1, |topics| topics.len() as i32));
        for topic in topics.unwrap_or_default() {
            body.string(Some(topic));
        }
    }
    let sent = raw.send(wire::METADATA, version, &body.0, version >= 9)?;
    let answer = raw.answer(sent)?;
    let mut take = Take::new(&answer);
    if version >= 9 { metadata_flexible(&mut take, version) } else { metadata_old(&mut take, version) }
}

fn metadata_old(take: &mut Take<'_>, version: i16) -> Result<(usize, Vec<(i16, String)>)> {
    let brokers = take.i32()? as usize;
    for _ in 0..brokers {
        take.i32()?;
        take.string()?;
        take.i32()?;
        if version >= 1 {
            take.string()?;
        }
    }
    if version >= 1 {
        take.i32()?;
    }
    let mut topics = Vec::new();
    for _ in 0..take.i32()? {
        let error = take.i16()?;
        topics.push((error, take.string()?.unwrap_or_default()));
        if version >= 1 {
            take.i8()?;
        }
        for _ in 0..take.i32()? {
            take.skip(2 + 4 + 4)?;
            for _ in 0..2 {
                let replicas = take.i32()? as usize;
                take.skip(4 * replicas)?;
            }
        }
    }
    Ok((brokers, topics))
}

fn metadata_flexible(take: &mut Take<'_>, version: i16) -> Result<(usize, Vec<(i16, String)>)> {
    take.tags()?; // response header v1
    take.i32()?;
    let brokers = take.uvarint()? as usize - 1;
    for _ in 0..brokers {
        take.i32()?;
        take.compact_string()?;
        take.i32()?;
        take.compact_string()?;
        take.tags()?;
    }
    ensure!(take.compact_string()?.is_some(), "no cluster id");
    take.i32()?;
    let mut topics = Vec::new();
    for _ in 1..take.uvarint()? {
        let error = take.i16()?;
        let name = take.compact_string()?.unwrap_or_default();
        if version >= 10 {
            let id = take.skip(16)?;
            ensure!(error != 0 || id != [0; 16], "{name} has no id");
        }
        take.i8()?;
        for _ in 1..take.uvarint()? {
            take.skip(2 + 4 + 4 + 4)?;
            for _ in 0..3 {
                let brokers = take.uvarint()? as usize - 1;
                take.skip(4 * brokers)?;
            }
            take.tags()?;
        }
        take.i32()?;
        take.tags()?;
        topics.push((error, name));
    }
    Ok((brokers, topics))
}

#[test]
fn null_empty_and_absent_topic_lists_are_three_things() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("a", 1, &[])?;
    raw.create_topic("b", 1, &[])?;
    let both = |topics: &[(i16, String)]| {
        let mut names: Vec<&str> =
            topics.iter().filter(|(error, _)| *error == 0).map(|(_, name)| &**name).collect();
        names.retain(|name| !name.starts_with("__"));
        names.sort_unstable();
        names == ["a", "b"]
    };
    ensure!(both(&metadata(&mut raw, 0, Some(&[]), false)?.1), "v0 with an empty list means all");
    for version in [1, 12, 13] {
        ensure!(both(&metadata(&mut raw, version, None, false)?.1), "v{version}: null means all");
        let (brokers, topics) = metadata(&mut raw, version, Some(&[]), false)?;
        ensure!(brokers == 1 && topics.is_empty(), "v{version}: empty means none: {topics:?}");
    }
    let (_, topics) = metadata(&mut raw, 12, Some(&["a", "nope"]), false)?;
    ensure!(topics == [(0, "a".to_owned()), (3, "nope".to_owned())], "{topics:?}");
    ensure!(both(&metadata(&mut raw, 1, None, false)?.1), "nope was created");
    Ok(())
}

#[test]
fn a_parked_fetch_is_answered_by_time_or_by_a_record_and_holds_nobody_up() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("t", 1, &[])?;
    let wait = |max_wait_ms| FetchPlan { max_wait_ms, ..FetchPlan::now("t", &[(0, 0)]) };
    let begin = Instant::now();
    let empty = raw.fetch(wait(500))?;
    ensure!(begin.elapsed() >= Duration::from_millis(450), "answered before its time");
    ensure!(empty[0].1.error == 0 && empty[0].1.records.is_empty(), "{empty:?}");

    // The wait is far longer than the test's patience: only the record can end it.
    let parked = raw.send(wire::FETCH, 11, &wait(600_000).body(), false)?;
    let mut other = Conn::open(server.bootstrap())?;
    ensure!(other.end_offset("t", 0)? == 0, "another connection is held up");
    ensure!(raw.is_silent_for(Duration::from_millis(300))?, "answered without a record");
    ensure!(other.produce("t", 0, &one(0))? == (0, 0));
    let woken = raw.fetched(parked)?;
    ensure!(batches(&woken[0].1.records).len() == 1, "{woken:?}");

    // A dropped connection with a parked fetch does no harm.
    let at_end = FetchPlan { max_wait_ms: 600_000, ..FetchPlan::now("t", &[(0, 1)]) };
    let mut dropped = Conn::open(server.bootstrap())?;
    dropped.send(wire::FETCH, 11, &at_end.body(), false)?;
    drop(dropped);
    ensure!(other.produce("t", 0, &one(1))? == (0, 1));

    for library in [Library::FranzGo, Library::KafkaPython, Library::Confluent] {
        let group = format!("tail-{}", library.name());
        let options = ["--group", &group, "--reset", "latest", "--seconds", "110"];
        let tail = library.start("consume", &server.bootstrap(), "t", &options)?;
        // Whether it has looked up the end yet cannot be seen from outside: write until it has.
        let begin = Instant::now();
        while tail.records().is_empty() {
            ensure!(begin.elapsed() < e2e::clients::PATIENCE, "{}: {}", library.name(), tail.complaints());
            ensure!(other.produce("t", 0, &one(2))?.0 == 0);
            std::thread::sleep(Duration::from_millis(300));
        }
    }
    Ok(())
}

#[test]
fn pipelined_requests_are_answered_in_order() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("t", 1, &[])?;
    let parked = FetchPlan { max_wait_ms: 700, ..FetchPlan::now("t", &[(0, 0)]) };
    let first = raw.send(wire::FETCH, 11, &parked.body(), false)?;
    let mut sent = Vec::new();
    for n in 0..50 {
        sent.push(raw.send(wire::PRODUCE, 7, &produce_body("t", 0, -1, &one(n)), false)?);
        sent.push(raw.send(wire::API_VERSIONS, 0, &[], false)?);
    }
    raw.fetched(first)?;
    for id in sent {
        raw.answer(id)?;
    }
    ensure!(raw.end_offset("t", 0)? == 50, "records are missing");
    Ok(())
}

#[test]
fn a_request_that_came_behind_a_waiting_one_is_started_when_that_is_answered() -> Result<()> {
    const OFFSET_COMMIT: i16 = 8;
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("t", 1, &[])?;
    if Server::is_kafka() {
        // Its coordinator loads first; what follows is not about that.
        Library::KafkaPython.read_to_end(&server.bootstrap(), "t", &["--group", "g", "--commit"])?;
    }
    // OffsetCommit 2 of a consumer that joined nothing.
    let mut commit = Put::default();
    commit.string(Some("plain")).i32(-1).string(Some("")).i64(-1);
    commit.i32(1).string(Some("t")).i32(1).i32(0).i64(0).string(None);
    let parked = FetchPlan { max_wait_ms: 300, ..FetchPlan::now("t", &[(0, 0)]) };
    for _ in 0..20 {
        let first = raw.send(OFFSET_COMMIT, 2, &commit.0, false)?;
        let second = raw.send(wire::FETCH, 11, &parked.body(), false)?;
        let third = raw.send(wire::API_VERSIONS, 0, &[], false)?;
        raw.answer(first)?;
        raw.fetched(second)?;
        raw.answer(third)?;
    }
    Ok(())
}

#[test]
fn acks_0_is_never_answered_and_acks_1_is() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("t", 1, &[])?;
    raw.send(wire::PRODUCE, 7, &produce_body("t", 0, 0, &one(0)), false)?;
    let answer = raw.call(wire::PRODUCE, 7, &produce_body("t", 0, 1, &one(1)))?;
    ensure!(Take::new(&answer).i32()? == 1, "not the answer of the second produce");
    ensure!(raw.end_offset("t", 0)? <= 2);
    // With acks=0 an error can only be told by closing.
    raw.send(wire::PRODUCE, 7, &produce_body("nope", 0, 0, &one(0)), false)?;
    ensure!(raw.is_closed_by_peer()?, "the connection stays open");
    Ok(())
}

/// A one-record batch of an idempotent producer.
#[test]
fn a_repeated_batch_gets_its_first_offset_also_after_a_stop_and_after_kill_9() -> Result<()> {
    let mut local = if Server::is_kafka() { None } else { Some(Plan::one().start()?) };
    let kafka = if Server::is_kafka() { Some(Server::start()?) } else { None };
    let address = match (&local, &kafka) {
        (Some(local), _) => local.bootstrap(0),
        (_, Some(kafka)) => kafka.bootstrap(),
        _ => unreachable!("one of the two was started"),
    };
    let mut raw = Conn::open(&address)?;
    raw.create_topic("t", 1, &[])?;
    let producer = raw.init_producer_id()?;
    for sequence in 0..6 {
        ensure!(raw.produce("t", 0, &numbered(producer, sequence))? == (0, i64::from(sequence)));
    }
    judge_repeats(&mut raw, producer)?;
    if let Some(local) = &mut local {
        local.stop()?;
        local.start_again()?;
        judge_repeats(&mut Conn::open(&address)?, producer)?;
        local.kill()?;
        local.start_again()?;
        let mut raw = Conn::open(&address)?;
        judge_repeats(&mut raw, producer)?;
        ensure!(raw.produce("t", 0, &numbered(producer, 6))? == (0, 6), "the producer cannot go on");
        let (other, _) = raw.init_producer_id()?;
        ensure!(other != producer.0, "a producer id was given out twice");
    }
    Ok(())
}

fn judge_repeats(raw: &mut Conn, producer: (i64, i16)) -> Result<()> {
    for sequence in [5, 1] {
        let answer = raw.produce("t", 0, &numbered(producer, sequence))?;
        ensure!(answer == (0, i64::from(sequence)), "sequence {sequence} again: {answer:?}");
    }
    ensure!(raw.produce("t", 0, &numbered(producer, 9))?.0 == 45, "a gap is taken");
    ensure!(raw.end_offset("t", 0)? == 6, "something was stored");
    Ok(())
}

/// A batch of the old message format, magic 0 or 1.
fn old_format(magic: i8) -> Vec<u8> {
    let mut message = Put::default();
    message.i8(magic).i8(0);
    if magic == 1 {
        message.i64(1_000);
    }
    message.i32(-1).i32(1).i8(b'v' as i8);
    let mut set = Put::default();
    set.i64(0).i32(message.0.len() as i32 + 4);
    set.i32(crc32_ieee(&message.0) as i32);
    set.0.extend_from_slice(&message.0);
    set.0
}

fn crc32_ieee(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xEDB8_8320 } else { crc >> 1 };
        }
    }
    !crc
}

/// Overwrites bytes behind the CRC and makes the CRC fit again.
fn patched(mut batch: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    batch[at..at + bytes.len()].copy_from_slice(bytes);
    let crc = crc32c(&batch[21..]);
    batch[17..21].copy_from_slice(&crc.to_be_bytes());
    batch
}

#[test]
fn bad_batches_are_refused_in_kafkas_words_and_nothing_of_them_is_stored() -> Result<()> {
    let server = Server::start()?;
    let mut raw = Conn::open(server.bootstrap())?;
    raw.create_topic("t", 1, &[("max.message.bytes", "2000")])?;
    let mut bad_crc = one(0);
    *bad_crc.last_mut().expect("a batch has bytes") ^= 1;
    let control = batch(&[Record::numbered("v", 0)], BatchHead { attributes: 0x20, ..BatchHead::default() });
    let marker = Record { key: Some(vec![0, 0, 0, 100]), ..Record::numbered("v", 0) };
    let marker = batch(&[marker], BatchHead { attributes: 0x20, ..BatchHead::default() });
    let large = Record { value: Some(vec![b'x'; 3_000]), ..Record::numbered("v", 0) };
    let cases: [(&str, Vec<u8>, &[i16]); 11] = [
        ("bad CRC", bad_crc, &[2]),
        ("magic 0", old_format(0), &[87, 43]),
        ("magic 1", old_format(1), &[87, 43]),
        ("control batch", control, &[87]),
        ("mirror marker", marker, &[87]),
        ("too large", batch(&[large], BatchHead::default()), &[10]),
        ("cut off", one(0)[..50].to_vec(), &[2, 87]),
        ("record count 7 of 1", patched(one(0), 57, &7i32.to_be_bytes()), &[2, 87]),
        ("last offset delta 9", patched(one(0), 23, &9i32.to_be_bytes()), &[2, 87]),
        ("codec 7", patched(one(0), 21, &7i16.to_be_bytes()), &[2, 87, 76]),
        ("two batches", [one(0), one(1)].concat(), &[87]),
    ];
    for (name, bytes, wanted) in cases {
        let (error, _) = raw.produce("t", 0, &bytes)?;
        // Kafka itself has no better word for an unknown codec than UNKNOWN_SERVER_ERROR.
        let kafka_unknown = Server::is_kafka() && error == -1;
        ensure!(wanted.contains(&error) || kafka_unknown, "{name}: error {error}, not one of {wanted:?}");
    }
    ensure!(raw.produce("nope-7", 3, &one(0))?.0 == 3, "an unknown topic");
    ensure!(raw.produce("t", 9, &one(0))?.0 == 3, "an unknown partition");
    ensure!(raw.end_offset("t", 0)? == 0, "something was stored");
    ensure!(raw.try_create_topic("u", 1, &[("no.such.key", "1")])? == 40, "a wrong configuration key");
    ensure!(raw.try_create_topic("u", 1, &[("retention.ms", "soon")])? == 40, "a wrong configuration value");
    ensure!(raw.try_create_topic("a/b", 1, &[])? == 17, "an impossible name");
    ensure!(raw.try_create_topic("t", 1, &[])? == 36, "the same topic again");
    ensure!(raw.produce("t", 0, &one(0))? == (0, 0), "the connection does not go on");
    Ok(())
}

#[test]
fn what_is_no_kafka_frame_ends_its_connection_and_no_other() -> Result<()> {
    let server = Server::start()?;
    let mut steady = Conn::open(server.bootstrap())?;
    steady.create_topic("t", 1, &[])?;
    let mut unknown_api = Put::default();
    unknown_api.i32(11).i16(999).i16(0).i32(1).i16(1).i8(b'x' as i8);
    let mut unknown_version = Put::default();
    unknown_version.i32(15).i16(wire::METADATA).i16(99).i32(1).i16(1).i8(b'x' as i8).i32(-1);
    let mut private = Put::default();
    private.i32(11).i16(10_000).i16(0).i32(1).i16(1).i8(b'x' as i8);
    let mut cut_off = Put::default();
    cut_off.i32(15).i16(wire::METADATA).i16(1).i32(1).i16(1).i8(b'x' as i8).i32(1_000_000);
    let garbage: Vec<u8> =
        (0..4_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 | 0x80).collect();
    // The beginning of a TLS 1.2 ClientHello record.
    let tls = [&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03][..], &[7; 502]].concat();
    let cases: [(&str, Vec<u8>); 8] = [
        ("a frame of 2 GiB", i32::MAX.to_be_bytes().to_vec()),
        ("a frame of negative length", (-5i32).to_be_bytes().to_vec()),
        ("garbage", garbage),
        ("TLS", tls),
        ("an unknown API", unknown_api.0),
        ("an unknown version", unknown_version.0),
        ("a private API", private.0),
        ("a list longer than its frame", cut_off.0),
    ];
    for (name, bytes) in cases {
        let mut bad = Conn::open(server.bootstrap())?;
        // The far end may close while we still write.
        let _ = bad.stream.write_all(&bytes);
        ensure!(bad.is_closed_by_peer()?, "{name}: the connection stays open or is answered");
        ensure!(steady.end_offset("t", 0)? == 0, "{name}: another connection does not go on");
    }
    Ok(())
}

#[test]
fn requests_without_tls_on_a_tls_port_are_refused() -> Result<()> {
    if Server::is_kafka() {
        return Ok(());
    }
    let local = Plan::one().start()?;
    let mut plain = Conn::open(("127.0.0.1", local.port(0, 5)))?;
    plain.send(wire::API_VERSIONS, 0, &[], false)?;
    // A TLS alert may come first; what matters is that no Kafka answer does and that it ends.
    let mut bytes = Vec::new();
    let ended = std::io::Read::read_to_end(&mut plain.stream, &mut bytes);
    ensure!(ended.is_ok() || bytes.is_empty(), "the connection stays open");
    ensure!(bytes.len() < 40, "{} bytes came back", bytes.len());
    ensure!(Conn::open(local.bootstrap(0))?.call(wire::API_VERSIONS, 0, &[]).is_ok());
    Ok(())
}
