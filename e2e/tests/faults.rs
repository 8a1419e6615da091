//! What a person does wrong, and a disk: each gets one line that names the thing, and nothing is lost.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use e2e::clients::{PATIENCE, Record};
use e2e::process::{Plan, binary};
use e2e::wire::{BatchHead, Conn, FetchPlan, batch};
use e2e::{logread, ports::Ports};

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
    std::fs::remove_file(&ballast)?;
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

fn can_mount() -> Result<bool> {
    let probe = e2e::process::namespace()?.args(["mount", "-t", "tmpfs", "none", "/tmp"]).output()?;
    Ok(probe.status.success())
}
