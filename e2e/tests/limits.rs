//! What a broker holds in memory and in open files stays bounded, whatever clients send and however much is stored.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::clients::{PATIENCE, Record};
use e2e::single::Single;
use e2e::usage::rss_bytes;
use e2e::wire::{BatchHead, Conn, FetchPlan, batch};

const MIB: u64 = 1 << 20;

/// Connections that announce a large request: some send nothing of it, others half.
fn announce(address: &str, silent: usize, half: usize, bytes: usize) -> Result<Vec<TcpStream>> {
    let mut streams = Vec::new();
    for at in 0..silent + half {
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(&(bytes as i32).to_be_bytes())?;
        stream.set_nonblocking(true)?;
        streams.push(stream);
        if at < silent {
            continue;
        }
        let piece = vec![0x55; bytes / 2];
        let mut sent = 0;
        // What the broker does not read yet stays with us.
        for _ in 0..20 {
            match streams[at].write(&piece[sent..]) {
                Ok(more) => sent += more,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(streams)
}

/// How much memory many half-sent requests of 8 MiB take where `total` bytes of them may be held; others go on.
fn held_by_half_sent_requests(total: u64) -> Result<u64> {
    const HALF: usize = 48;
    let settings = format!(
        "request_bytes_max = {}\nrequest_bytes_total_max = {total}\nconnection_idle_ms = 5000\n",
        8 * MIB
    );
    let broker = Single::start(&settings)?;
    let config = [("max.message.bytes", "8000000")];
    Conn::open(broker.bootstrap())?.create_topic("t", 1, &config)?;
    let pid = broker.pid().context("it runs")?;
    let before = rss_bytes(pid)?;
    let streams = announce(&broker.bootstrap(), 100, HALF, 8 * MIB as usize)?;
    let (mut most, begin) = (0, Instant::now());
    while begin.elapsed() < Duration::from_secs(2) {
        most = most.max(rss_bytes(pid)?.saturating_sub(before));
        let mut other = Conn::open(broker.bootstrap())?;
        let small = batch(&[Record::numbered("v", 0)], BatchHead::default());
        ensure!(other.produce("t", 0, &small)?.0 == 0, "a small request is held up");
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("{} MiB for {HALF} half-sent requests", most / MIB);
    for mut stream in streams {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        // The end may come as a reset, because of what was not read.
        match stream.read(&mut [0; 16]) {
            Ok(0) => {}
            Ok(_) => anyhow::bail!("half a request was answered"),
            Err(error) => ensure!(error.kind() == ErrorKind::ConnectionReset, "not closed: {error}"),
        }
    }
    let large = Record { value: Some(vec![b'x'; 6_000_000]), ..Record::numbered("v", 0) };
    let large = batch(&[large], BatchHead::default());
    ensure!(Conn::open(broker.bootstrap())?.produce("t", 0, &large)?.0 == 0, "no room for a large request");
    Ok(most)
}

#[test]
fn half_sent_large_requests_share_bounded_memory_and_hold_nobody_else_up() -> Result<()> {
    // Each may hold 1 MiB for nothing, and two of them their whole length.
    let held = held_by_half_sent_requests(16 * MIB)?;
    ensure!(held < 110 * MIB, "{} MiB are held", held / MIB);
    Ok(())
}

#[test]
fn twin_with_room_for_every_large_request_takes_the_memory() -> Result<()> {
    let held = held_by_half_sent_requests(1_024 * MIB)?;
    ensure!(held > 150 * MIB, "only {} MiB are held without the bound", held / MIB);
    Ok(())
}

#[test]
fn many_more_segments_than_files_that_may_be_open_are_read() -> Result<()> {
    const SEGMENTS: usize = 400;
    const FILES_MAX: usize = 160;
    let limit = format!("ulimit -n {FILES_MAX} && exec \"$@\"");
    let mut broker = Single::prepare("")?.launched_by(&["sh", "-c", &limit, "sh"]);
    broker.start_again()?;
    let mut raw = Conn::open(broker.bootstrap())?;
    // Every record is late enough for a segment of its own.
    raw.create_topic("t", 1, &[("segment.ms", "1"), ("retention.ms", "-1")])?;
    let time = |n: usize| 1_700_000_000_000 + n as i64;
    for n in 0..SEGMENTS {
        let record = Record { timestamp: Some(time(n)), ..Record::numbered("v", n) };
        let answer = raw.produce("t", 0, &batch(&[record], BatchHead::default()))?;
        ensure!(answer == (0, n as i64), "record {n}: {answer:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
    let segments = segments(&broker.data_dir())?;
    ensure!(segments > FILES_MAX, "only {segments} segments");
    let mut most = 0;
    for round in 0..2 {
        let files = format!("/proc/{}/fd", broker.pid().context("it runs")?);
        for n in 0..SEGMENTS {
            let from = [(0, n as i64)];
            let answer = raw.fetch(FetchPlan { max_bytes: 1, ..FetchPlan::now("t", &from) })?;
            ensure!(answer[0].1.error == 0, "round {round}, offset {n}: error {}", answer[0].1.error);
            ensure!(!answer[0].1.records.is_empty(), "round {round}, offset {n}: nothing");
            let found = raw.list_offset("t", 0, time(n))?;
            ensure!(found == (0, time(n), n as i64), "round {round}, time {n}: {found:?}");
            most = most.max(fs::read_dir(&files)?.count());
        }
        if round == 0 {
            // And as they are found at a start.
            broker.stop()?;
            broker.start_again()?;
            raw = Conn::open(broker.bootstrap())?;
        }
    }
    println!("{segments} segments, at most {most} open files");
    ensure!(most < FILES_MAX, "{most} files are open");
    // A new connection and a new segment still find room.
    let next = batch(&[Record::numbered("v", SEGMENTS)], BatchHead::default());
    ensure!(Conn::open(broker.bootstrap())?.produce("t", 0, &next)? == (0, SEGMENTS as i64));
    broker.stop()
}

/// Log files below a folder.
fn segments(dir: &std::path::Path) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            count += segments(&path)?;
        } else if path.extension().is_some_and(|is| is == "log") {
            count += 1;
        }
    }
    Ok(count)
}
