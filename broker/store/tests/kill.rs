//! A real process, killed at any moment: what it said was durable is there.
//!
//! The test starts itself as the child, reads what the child reports, kills it with SIGKILL and opens
//! the same directory. Each run prints its seed and what was at stake.

// Helpers of tests count as tests.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use broker_store::meta::File;
use broker_store::{DataDir, Disk, MetaStore, SegmentStore, StoreError, StorePath, Volatile, Writer};

const DIR: &str = "STORE_KILL_DIR";
const KIND: &str = "STORE_KILL_KIND";
const RECORD_BYTES: usize = 512;

/// Not a test by itself: the process that is killed.
#[test]
fn child() {
    let (Ok(dir), Ok(kind)) = (std::env::var(DIR), std::env::var(KIND)) else { return };
    match kind.as_str() {
        "meta" => write_metadata(Path::new(&dir)),
        kind => write_segments(open(kind, Path::new(&dir))),
    }
}

fn open(kind: &str, dir: &Path) -> Arc<dyn SegmentStore> {
    match kind {
        "disk" => Arc::new(Disk::open(dir).unwrap()),
        _ => Arc::new(Volatile::open(dir).unwrap()),
    }
}

fn log_path(generation: u64) -> StorePath {
    StorePath::parse(&format!("t/p-0/{generation:020}.log")).unwrap()
}

fn state_path() -> StorePath {
    StorePath::parse("t/p-0/now.state").unwrap()
}

/// Appends twice per sync, replaces a state file now and then, rolls, deletes old logs; reports each
/// thing only when it is durable.
fn write_segments(store: Arc<dyn SegmentStore>) {
    let mut generation = 0;
    loop {
        let writer = store.create(&log_path(generation)).unwrap();
        report(&format!("log {generation} 0"));
        for i in 0..64_u64 {
            append(&writer, 2 * i);
            append(&writer, 2 * i + 1);
            if i % 3 == 0 {
                let durable = writer.sync().unwrap();
                report(&format!("log {generation} {durable}"));
            }
            if i % 8 == 0 {
                let count = generation * 64 + i;
                store.put(&state_path(), &count.to_be_bytes().repeat(1_000)).unwrap();
                report(&format!("state {count}"));
            }
        }
        writer.seal().unwrap();
        report(&format!("log {generation} {}", 128 * RECORD_BYTES));
        if generation >= 2 {
            store.delete(&log_path(generation - 2)).unwrap();
            report(&format!("deleted {}", generation - 2));
        }
        generation += 1;
    }
}

fn append(writer: &Arc<dyn Writer>, index: u64) {
    let record = record(index);
    let (front, back) = record.split_at(100);
    writer.append(&[IoSlice::new(front), IoSlice::new(back)]).unwrap();
}

fn record(index: u64) -> Vec<u8> {
    (index + 1).to_be_bytes().repeat(RECORD_BYTES / 8)
}

fn write_metadata(dir: &Path) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let _lock = DataDir::open(dir).unwrap();
        let store = File::open(dir.join("meta")).unwrap();
        let mut version = None;
        for count in 0_u64.. {
            // Large, so that the log is rewritten often.
            let value = count.to_be_bytes().repeat(1_000);
            version = Some(store.put_if("count", value, version).await.unwrap());
            report(&format!("meta {count} {}", version.unwrap().0));
        }
    });
}

fn report(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "durable: {line}").unwrap();
    out.flush().unwrap();
}

/// Runs the child for a while, kills it, and returns what it reported.
fn run_and_kill(kind: &str, dir: &Path, life: Duration) -> Vec<Vec<String>> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(DIR, dir)
        .env(KIND, kind)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let reader = std::thread::spawn(move || out.lines().map_while(Result::ok).collect::<Vec<String>>());
    // A life begins when the child holds the directory, however busy the machine is.
    let start = Instant::now();
    while !dir.join("LOCK").exists() && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(life);
    child.kill().unwrap();
    child.wait().unwrap();
    // The test harness writes its own text before the first report, on the same line.
    let reports = reader.join().unwrap();
    let words = |line: &String| Some(line.split_once("durable: ")?.1.split(' ').map(str::to_owned).collect());
    reports.iter().filter_map(words).collect()
}

fn lives() -> impl Iterator<Item = Duration> {
    let seed = std::env::var("STORE_KILL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u64);
    println!("STORE_KILL_SEED={seed}");
    let mut state = seed;
    (0..20).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Duration::from_micros(2_000 + (state >> 33) % 80_000)
    })
}

fn kill_segments(kind: &str) {
    let (mut synced_bytes, mut lost_bytes, mut states) = (0, 0, 0);
    for life in lives() {
        let dir = tempfile::tempdir().unwrap();
        let reports = run_and_kill(kind, dir.path(), life);
        let of = |what: &str| reports.iter().filter(|words| words[0] == what).collect::<Vec<_>>();
        let store = open(kind, dir.path());
        let deleted = of("deleted").len() as u64;
        let mut latest = std::collections::BTreeMap::new();
        for words in of("log") {
            latest.insert(words[1].parse::<u64>().unwrap(), words[2].parse::<usize>().unwrap());
        }
        for (generation, durable) in latest {
            let path = log_path(generation);
            if generation < deleted {
                assert_eq!(
                    store.open(&path).err(),
                    Some(StoreError::NotFound),
                    "a reported deletion is kept"
                );
                continue;
            }
            let found = match store.open(&path) {
                Ok(reader) => reader.read_at(0, usize::MAX).unwrap(),
                // Its deletion was done and not yet reported.
                Err(StoreError::NotFound) if generation == deleted => continue,
                Err(error) => panic!("{path}: {error}"),
            };
            assert!(found.len() >= durable, "{path}: {} of {durable} durable bytes", found.len());
            for (index, bytes) in found.chunks(RECORD_BYTES).enumerate() {
                let expected = record(index as u64);
                assert!(bytes == &expected[..bytes.len()], "{path}: record {index} is damaged");
            }
            synced_bytes += durable;
            lost_bytes += found.len() % RECORD_BYTES;
        }
        if let Some(words) = of("state").last() {
            let found = store.open(&state_path()).unwrap().read_at(0, usize::MAX).unwrap();
            let count = u64::from_be_bytes(found[..8].try_into().unwrap());
            assert!(count >= words[1].parse().unwrap(), "an older state came back");
            assert!(found[..] == count.to_be_bytes().repeat(1_000)[..], "the state is a mixture");
            states += 1;
        }
    }
    println!("{kind}: {synced_bytes} durable bytes, {states} states, {lost_bytes} torn bytes");
    assert!(synced_bytes > 0 && states > 0, "nothing was at stake");
}

#[test]
fn a_killed_process_on_disk_keeps_what_it_synced() {
    kill_segments("disk");
}

#[test]
fn a_killed_process_on_the_volatile_store_keeps_what_it_synced() {
    kill_segments("volatile");
}

#[test]
fn a_killed_process_keeps_its_metadata() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut writes = 0;
    for life in lives() {
        let dir = tempfile::tempdir().unwrap();
        let reports = run_and_kill("meta", dir.path(), life);
        let _lock = DataDir::open(dir.path()).unwrap();
        let store = File::open(dir.path().join("meta")).unwrap();
        let Some(words) = reports.last() else { continue };
        let (value, version) = runtime.block_on(store.get("count")).unwrap().unwrap();
        let count = u64::from_be_bytes(value[..8].try_into().unwrap());
        let reported: u64 = words[1].parse().unwrap();
        assert!(count == reported || count == reported + 1, "{count} after {reported}");
        assert_eq!(version.0, words[2].parse::<u64>().unwrap() + count - reported);
        assert!(value == count.to_be_bytes().repeat(1_000));
        writes += reported;
    }
    println!("{writes} writes");
    assert!(writes > 0, "nothing was at stake");
}

#[test]
fn a_directory_in_use_by_another_process_is_refused_with_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(DIR, dir.path())
        .env(KIND, "disk")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.by_ref().map_while(Result::ok).find(|line| line.contains("durable: ")).expect("the child runs");
    let error = Disk::open(dir.path()).map(|_| ()).unwrap_err();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(error.to_string().contains(&format!("process {}", child.id())), "{error}");
    Disk::open(dir.path()).unwrap();
}
