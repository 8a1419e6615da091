//! Where the broker's CPU goes under load: `perf` samples the process while it is produced to and read from, and
//! the functions with the largest shares go into `docs/benchmarks/profile.md`. Needs Debian's `linux-perf`.

use std::fmt::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Scale;
use super::contender::{Contender, Kind};
use super::load::{self, Client, Load};
use super::report;
use super::table::Samples;
use crate::{peer, tools};

/// Samples per second of CPU time. The clock event works in virtual machines too.
const FREQUENCY: &str = "999";
/// Functions below this share are left out.
const SHARE_PERCENT: &str = "0.7";

/// Profiles produce, then consume, and writes the report.
pub fn run(scale: Scale) -> Result<()> {
    let perf = tools::program("perf", "linux-perf")?;
    let broker = Contender::start(Kind::Sealane, "os")?;
    broker.create_topic("profile", 1, &[])?;
    let load = Load::plain("profile", scale.records(500_000, 2_000_000), 1024, "none");
    let folder = tempfile::tempdir()?;
    let mut text = report::heading("Where the broker's CPU goes", "profile", scale)?;
    text.push_str("`perf record -e cpu-clock` on the broker, 1 KiB records, Kafka's ProducerPerformance and librdkafka; shares of its CPU time.\n");
    type Action<'a> = (&'a str, &'a dyn Fn() -> Result<f64>);
    let bootstrap = broker.bootstrap();
    let actions: [Action<'_>; 3] = [
        ("produce java", &|| load::produce(Client::Java, &bootstrap, &load)),
        ("produce librdkafka", &|| load::produce(Client::Librdkafka, &bootstrap, &load)),
        ("consume librdkafka", &|| load::consume(Client::Librdkafka, &bootstrap, &load)),
    ];
    for (name, act) in actions {
        let data = folder.path().join("perf.data");
        let mut record = Command::new(&perf);
        record.args([
            "record",
            "-q",
            "-e",
            "cpu-clock",
            "-F",
            FREQUENCY,
            "-p",
            &broker.pid().to_string(),
            "-o",
        ]);
        let mut recorder = record.arg(&data).stdin(Stdio::null()).spawn().context("start perf")?;
        let rate = act()?;
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&recorder),
            rustix::process::Signal::INT,
        )?;
        recorder.wait()?;
        let mut report = Command::new(&perf);
        report.args([
            "report",
            "--stdio",
            "--no-children",
            "-g",
            "none",
            "--percent-limit",
            SHARE_PERCENT,
            "-i",
        ]);
        let shares = peer::run(report.arg(&data))?;
        let lines: Vec<&str> =
            shares.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()).collect();
        ensure!(!lines.is_empty(), "perf saw nothing");
        write!(text, "\n## {name}, {rate:.0} MB/s\n\n```\n{}\n```\n", lines.join("\n"))?;
    }
    broker.stop()?;
    report::write(scale, "profile", &text, &Samples::default())
}
