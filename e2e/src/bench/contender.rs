//! The brokers that are compared: an Apache Kafka and a Sealane, each one process with its own data, started and
//! measured alike. Figures of memory and CPU are those of the broker process alone.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::peer::Peer;
use crate::wire::Conn;
use crate::{probe, process, usage};
use test_ports::Ports;

const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Which broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Kafka,
    Sealane,
}

/// A running broker.
pub struct Contender {
    pub kind: Kind,
    pub address: SocketAddr,
    pub started_after: Duration,
    process: Process,
}

enum Process {
    Kafka(Peer),
    Sealane(Box<Sealane>),
}

struct Sealane {
    child: Child,
    dir: TempDir,
    _ports: Ports,
}

impl Kind {
    pub const BOTH: [Kind; 2] = [Kind::Kafka, Kind::Sealane];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Kafka => "Kafka",
            Kind::Sealane => "Sealane",
        }
    }
}

impl Contender {
    /// Starts a broker on empty data. `durability` is Sealane's (`os` is Kafka's own habit).
    pub fn start(kind: Kind, durability: &str) -> Result<Contender> {
        match kind {
            Kind::Kafka => {
                let peer = Peer::start(&[])?;
                let (address, started_after) = (peer.address(), peer.started_after());
                Ok(Contender { kind, address, started_after, process: Process::Kafka(peer) })
            }
            Kind::Sealane => {
                let ports = Ports::take()?;
                let address = SocketAddr::from(([127, 0, 0, 1], ports.base));
                let (sealane, started_after) = Sealane::start(ports, durability)?;
                Ok(Contender { kind, address, started_after, process: Process::Sealane(Box::new(sealane)) })
            }
        }
    }

    pub fn bootstrap(&self) -> String {
        self.address.to_string()
    }

    pub fn pid(&self) -> u32 {
        match &self.process {
            Process::Kafka(peer) => peer.pid(),
            Process::Sealane(sealane) => sealane.child.id(),
        }
    }

    pub fn cpu_seconds(&self) -> Result<f64> {
        usage::cpu_seconds(self.pid())
    }

    pub fn create_topic(&self, topic: &str, partitions: i32, config: &[(&str, &str)]) -> Result<()> {
        Conn::open(self.address)?.create_topic(topic, partitions, config)
    }

    pub fn delete_topic(&self, topic: &str) -> Result<()> {
        let code = Conn::open(self.address)?.delete_topic(topic)?;
        ensure!(code == 0, "{} answers DeleteTopics with {code}", self.kind.name());
        Ok(())
    }

    pub fn stop(self) -> Result<()> {
        match self.process {
            Process::Kafka(peer) => peer.stop(),
            Process::Sealane(mut sealane) => sealane.stop(),
        }
    }
}

impl Sealane {
    fn start(ports: Ports, durability: &str) -> Result<(Sealane, Duration)> {
        let dir = tempfile::Builder::new().prefix("sealane-bench").tempdir()?;
        let config = dir.path().join("broker.toml");
        fs::write(&config, config_text(&ports, dir.path().join("data"), durability))?;
        let log = File::create(dir.path().join("log"))?;
        let begin = Instant::now();
        let mut command = Command::new(binary()?);
        command.arg("broker").arg("--config").arg(&config).stdin(Stdio::null());
        let child = command.stdout(log.try_clone()?).stderr(log).spawn().context("start sealane")?;
        let address = SocketAddr::from(([127, 0, 0, 1], ports.base));
        let mut sealane = Sealane { child, dir, _ports: ports };
        while !probe::serves(address) {
            if let Some(status) = sealane.child.try_wait()? {
                bail!("sealane broker ended with {status}:\n{}", sealane.log());
            }
            ensure!(begin.elapsed() < START_LIMIT, "sealane broker does not serve:\n{}", sealane.log());
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok((sealane, begin.elapsed()))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn stop(&mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let end = Instant::now() + STOP_LIMIT;
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "sealane broker ended with {status}:\n{}", self.log());
                return Ok(());
            }
            ensure!(Instant::now() < end, "sealane broker does not stop on SIGTERM");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Sealane {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The binary under test: `$SEALANE_BIN`, else the one beside this program, else (from a test) one built now.
pub fn binary() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("SEALANE_BIN") {
        return Ok(PathBuf::from(given));
    }
    let beside = std::env::current_exe()?.with_file_name("sealane");
    if beside.is_file() { Ok(beside) } else { process::binary() }
}

fn config_text(ports: &Ports, data: PathBuf, durability: &str) -> String {
    format!(
        "data_dir = {data:?}\nregion = \"east\"\ndurability = \"{durability}\"\n\
         control_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n\
         [[listeners]]\nname = \"plain\"\nbind = \"127.0.0.1:{}\"\n",
        ports.base + 2,
        ports.base + 3,
        ports.base
    )
}
