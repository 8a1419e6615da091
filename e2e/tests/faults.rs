//! What a person does wrong, and a disk: each gets one line that names the thing, and nothing is lost.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::clients::{PATIENCE, Record};
use e2e::process::{Local, Plan, binary};
use e2e::wire::{BatchHead, Conn, FetchPlan, batch};
use e2e::{http, logread, single::Single};
use test_ports::Ports;

/// Runs `sealane` with arguments that cannot work; its one line of complaint.
fn refused(arguments: &[&str]) -> Result<String> {
    let dir = tempfile::tempdir()?;
    let mut command = Command::new(binary()?);
    command.args(arguments).stdin(Stdio::null()).current_dir(dir.path());
    let output = command.output().context("run sealane")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success(), "sealane {} succeeds", arguments.join(" "));
    let complaints: Vec<&str> = said.lines().filter(|line| line.starts_with("sealane: ")).collect();
    ensure!(complaints.len() == 1, "sealane {}: not one line of complaint:\n{said}", arguments.join(" "));
    Ok(complaints[0].to_owned())
}

#[test]
fn a_port_in_use_is_named() -> Result<()> {
    let ports = Ports::take()?;
    let _taken = std::net::TcpListener::bind(("127.0.0.1", ports.base))?;
    let base = ports.base.to_string();
    let line = refused(&["local", "--ephemeral", "--regions", "east", "--port-base", &base])?;
    ensure!(line.contains(&base), "{line}");
    Ok(())
}

#[test]
fn a_data_directory_in_use_is_named_and_its_owner_goes_on() -> Result<()> {
    let local = Plan::one().start()?;
    let ports = Ports::take()?;
    let data = local.data_dir().to_string_lossy().into_owned();
    let arguments = ["local", "--regions", "east", "--data", &data, "--port-base", &ports.base.to_string()];
    let line = refused(&arguments)?;
    ensure!(line.contains(&data) && line.contains("in use"), "{line}");
    Conn::open(local.bootstrap(0))?.create_topic("t", 1, &[])
}

#[test]
fn a_data_directory_of_a_newer_format_is_refused_and_left_alone() -> Result<()> {
    let mut local = Plan::one().start()?;
    local.stop()?;
    let format = local.region_dir(0).join("FORMAT");
    let known = std::fs::read_to_string(&format)?;
    let newer = known.replace('1', "7");
    ensure!(newer != known, "the format is not 1: {known}");
    std::fs::write(&format, &newer)?;
    let data = local.data_dir().to_string_lossy().into_owned();
    let ports = Ports::take()?;
    let arguments = ["local", "--regions", "east", "--data", &data, "--port-base", &ports.base.to_string()];
    let line = refused(&arguments)?;
    ensure!(line.contains("format 7"), "{line}");
    ensure!(std::fs::read_to_string(&format)? == newer, "it was changed");
    Ok(())
}

#[test]
fn wrong_settings_are_named() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("broker.toml");
    std::fs::write(&file, "data_dri = \"x\"\n")?;
    let line = refused(&["broker", "--config", &file.to_string_lossy()])?;
    ensure!(line.contains("data_dri") && line.contains("broker.toml"), "{line}");
    let missing = dir.path().join("nowhere.toml");
    let line = refused(&["mirror", "--config", &missing.to_string_lossy()])?;
    ensure!(line.contains("nowhere.toml"), "{line}");
    Ok(())
}

#[test]
fn commands_say_in_one_line_what_is_wrong() -> Result<()> {
    let local = Plan::one().start()?;
    let server = local.bootstrap(0);
    let closed = Ports::take()?;
    let nobody = format!("127.0.0.1:{}", closed.base);
    let cases: [(&[&str], &str); 6] = [
        (&["topic", "list", "--server", &nobody], &nobody),
        (&["topic", "describe", "nope", "--server", &server], "nope"),
        (&["topic", "create", "t", "--config", "no.such.key=1", "--server", &server], "no.such.key"),
        (&["topic", "create", "a b", "--server", &server], "a b"),
        (&["lane", "create", "boe-x", "--class", "ppe", "--server", &server], "boe-x"),
        (&["lane", "status", "nope", "--server", &server], "nope"),
    ];
    for (arguments, names) in cases {
        let line = refused(arguments)?;
        ensure!(line.contains(names), "{arguments:?}: {line}");
    }
    Ok(())
}

#[test]
fn sigterm_answers_what_is_in_flight_and_the_next_start_finds_everything() -> Result<()> {
    let mut local = Plan::one().start()?;
    let mut raw = Conn::open(local.bootstrap(0))?;
    raw.create_topic("t", 1, &[])?;
    let record = |n: usize| batch(&[Record::numbered("v", n)], BatchHead::default());
    for n in 0..50 {
        ensure!(raw.produce("t", 0, &record(n))? == (0, n as i64));
    }
    ensure!(local.stop()?.success(), "it does not end with success");
    local.start_again()?;
    let mut raw = Conn::open(local.bootstrap(0))?;
    ensure!(raw.end_offset("t", 0)? == 50 && raw.count_records("t", 1)? == 50, "records are missing");
    ensure!(raw.produce("t", 0, &record(50))? == (0, 50));
    Ok(())
}

#[test]
fn an_ephemeral_region_keeps_nothing() -> Result<()> {
    let mut local = Plan::one().ephemeral().start()?;
    let mut raw = Conn::open(local.bootstrap(0))?;
    raw.create_topic("t", 1, &[])?;
    ensure!(raw.produce("t", 0, &batch(&[Record::numbered("v", 0)], BatchHead::default()))? == (0, 0));
    local.stop()?;
    local.start_again()?;
    ensure!(Conn::open(local.bootstrap(0))?.list_offset("t", 0, -1)?.0 == 3, "the topic is still there");
    ensure!(!local.data_dir().exists(), "it wrote into a data directory");
    Ok(())
}

/// The directory of partition 0 of a topic.
fn partition_dir(broker: &Single, topic: &str) -> Result<PathBuf> {
    for entry in std::fs::read_dir(broker.data_dir().join("topics"))? {
        let dir = entry?.path().join(format!("{topic}-0"));
        if dir.is_dir() {
            return Ok(dir);
        }
    }
    anyhow::bail!("{topic} has no directory")
}

#[test]
fn a_partition_whose_directory_vanished_is_missed_and_never_begun_anew_by_itself() -> Result<()> {
    let mut broker = Single::start("")?;
    let mut raw = Conn::open(broker.bootstrap())?;
    for topic in ["gone", "kept"] {
        raw.create_topic(topic, 1, &[])?;
        for n in 0..3 {
            ensure!(raw.produce(topic, 0, &batch(&[Record::numbered("v", n)], BatchHead::default()))?.0 == 0);
        }
    }
    let noted = |broker: &Single| -> Result<usize> {
        let meta = std::fs::read(broker.data_dir().join("meta/meta.log"))?;
        Ok(String::from_utf8_lossy(&meta).matches("\"opened\":1").count())
    };
    until("it is noted that the topics were served", || Ok(noted(&broker)? >= 2))?;
    broker.stop()?;
    let (dir, away) = (partition_dir(&broker, "gone")?, broker.dir().join("away"));
    std::fs::rename(&dir, &away)?;

    broker.allow_error("a topic cannot be opened");
    broker.start_again()?;
    let mut raw = Conn::open(broker.bootstrap())?;
    ensure!(raw.count_records("kept", 1)? == 3, "another topic is held up");
    let answer = raw.produce("gone", 0, &batch(&[Record::numbered("v", 3)], BatchHead::default()))?;
    ensure!(answer.0 != 0, "it begins anew: {answer:?}");
    ensure!(broker.log().contains("gone-0") && broker.log().contains("accept-loss"), "{}", broker.log());
    let (status, page) = http::get(broker.http_port(), "/readyz")?;
    ensure!(status == 200 && page.contains("topic gone"), "{status}: {page}");
    ensure!(!dir.exists(), "the directory was made again");

    // Put back, it is served without a restart.
    std::fs::rename(&away, &dir)?;
    until("the topic is served", || Ok(Conn::open(broker.bootstrap())?.count_records("gone", 1).is_ok()))?;
    ensure!(Conn::open(broker.bootstrap())?.count_records("gone", 1)? == 3, "records are missing");
    broker.stop()?;

    // Lost for good, a person may begin it anew.
    std::fs::remove_dir_all(&dir)?;
    broker.start_again()?;
    std::fs::create_dir_all(&dir)?;
    std::fs::write(dir.join("accept-loss"), "")?;
    until("the topic is served", || Ok(Conn::open(broker.bootstrap())?.end_offset("gone", 0).is_ok()))?;
    let first = batch(&[Record::numbered("v", 0)], BatchHead::default());
    ensure!(Conn::open(broker.bootstrap())?.produce("gone", 0, &first)? == (0, 0), "not offset 0");
    ensure!(!dir.join("accept-loss").exists(), "it would accept the next loss too");
    until("green without a word", || Ok(http::get(broker.http_port(), "/readyz")?.1 == "broker: ok\n"))?;
    broker.stop()
}

/// A tmpfs of this size is the disk.
const DISK: &str = "24m";

#[test]
fn a_full_disk_refuses_produce_lets_reading_go_on_and_heals_without_a_restart() -> Result<()> {
    ensure!(can_mount()?, "this machine lets nobody mount a small tmpfs in a namespace of its own");
    let mut local = Plan::one().small_disk(DISK).allow_error("full").start()?;
    let mut raw = Conn::open(local.bootstrap(0))?;
    raw.create_topic("t", 1, &[])?;
    let large = Record { value: Some(vec![b'x'; 400_000]), ..Record::numbered("v", 0) };
    let large = batch(&[large], BatchHead::default());
    let ballast = local.disk_path()?.join("ballast");
    std::fs::write(&ballast, vec![0u8; 8 << 20])?;
    let (mut stored, end) = (0, Instant::now() + PATIENCE);
    let error = loop {
        ensure!(Instant::now() < end, "the disk never fills");
        match raw.produce("t", 0, &large)? {
            (0, offset) => {
                ensure!(offset == stored, "offset {offset} instead of {stored}");
                stored += 1;
            }
            (error, _) => break error,
        }
    };
    println!("{stored} records stored, then error {error}");
    ensure!(stored > 0 && error != 0, "nothing was at stake");
    let mut other = Conn::open(local.bootstrap(0))?;
    ensure!(other.count_records("t", 1)? == stored as u64, "what was acknowledged cannot be read");
    ensure!(other.fetch(FetchPlan::now("t", &[(0, 0)]))?[0].1.error == 0);
    let http = local.port(0, 3);
    until("/readyz says that the disk is full", || {
        let (status, page) = http::get(http, "/readyz")?;
        Ok(status == 503 && page.contains("the disk is full"))
    })?;
    ensure!(http::get(http, "/healthz")?.0 == 200, "a restart would not help");
    let mut waiting = produce_a_line(&local)?;
    std::fs::remove_file(&ballast)?;
    let said = waiting.finish()?;
    ensure!(said.matches("the disk is full").count() == 1, "sealane produce says:\n{said}");
    stored += 1;
    until("/readyz is green again", || Ok(http::get(http, "/readyz")?.0 == 200))?;
    let end = Instant::now() + PATIENCE;
    loop {
        match raw.produce("t", 0, &large)? {
            (0, offset) => {
                ensure!(offset == stored, "after the disk has room: offset {offset} instead of {stored}");
                break;
            }
            _ => ensure!(Instant::now() < end, "it does not heal"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // The disk is gone with the process that mounted it: read it before.
    let copy = tempfile::tempdir()?;
    let data = local.disk_path()?;
    let copied = Command::new("cp").arg("-r").arg(&data).arg(copy.path()).status()?;
    ensure!(copied.success(), "cannot copy the data");
    ensure!(local.stop()?.success());
    let log = logread::read(copy.path(), Some("t"))?;
    ensure!(log.records.len() as i64 == stored + 1, "{} records in the log", log.records.len());
    Ok(())
}

/// `sealane produce` of one large line, which the disk has no room for.
struct Waiting {
    child: Child,
    said: PathBuf,
}

fn produce_a_line(local: &Local) -> Result<Waiting> {
    let (line, said) = (local.dir().join("line"), local.dir().join("said"));
    std::fs::write(&line, vec![b'x'; 400_000])?;
    let mut command = Command::new(binary()?);
    command.args(["produce", "t", "--server", &local.bootstrap(0)]).stdout(Stdio::null());
    let child = command.stdin(File::open(&line)?).stderr(File::create(&said)?).spawn()?;
    let waiting = Waiting { child, said };
    until("sealane produce says why it waits", || {
        Ok(std::fs::read_to_string(&waiting.said)?.contains("the disk is full"))
    })?;
    Ok(waiting)
}

impl Waiting {
    /// Waits for its success; what it said.
    fn finish(&mut self) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                self.child.kill()?;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let said = std::fs::read_to_string(&self.said)?;
        ensure!(self.child.wait()?.success(), "sealane produce fails: {said}");
        Ok(said)
    }
}

fn until(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !done()? {
        ensure!(Instant::now() < end, "took too long: {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn can_mount() -> Result<bool> {
    let probe = e2e::process::namespace()?.args(["mount", "-t", "tmpfs", "none", "/tmp"]).output()?;
    Ok(probe.status.success())
}
