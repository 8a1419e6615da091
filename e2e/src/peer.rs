//! A real Apache Kafka (KRaft, one node) started from its jars as a child process, and its command line tools.
//! The yardstick of benchmarks and comparisons: configuration and JVM options are the committed files in
//! `e2e/kafka`. A peer's data lives in a temporary folder and goes with it; the process is stopped on drop.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{maven, probe, tools};

const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// A running Apache Kafka node.
pub struct Peer {
    child: Child,
    dir: TempDir,
    address: SocketAddr,
    started_after: Duration,
}

impl Peer {
    /// Formats storage and starts a node on free ports; `extra` lines are appended to its properties.
    /// Returns when it answers Metadata.
    pub fn start(extra: &[&str]) -> Result<Peer> {
        let dir = tempfile::Builder::new().prefix("kafka-peer").tempdir()?;
        let address = free_address()?;
        let properties = dir.path().join("server.properties");
        fs::write(&properties, properties_text(dir.path(), address, free_address()?, extra)?)?;
        format_storage(&properties)?;
        let begin = Instant::now();
        let child = node(&properties, dir.path())?;
        let mut peer = Peer { child, dir, address, started_after: Duration::ZERO };
        loop {
            if let Some(status) = peer.child.try_wait()? {
                bail!("Kafka ended with {status}:\n{}", peer.log());
            }
            if probe::serves(address) {
                peer.started_after = begin.elapsed();
                return Ok(peer);
            }
            ensure!(
                begin.elapsed() < START_LIMIT,
                "Kafka does not serve after {START_LIMIT:?}:\n{}",
                peer.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Its listener, as `bootstrap.servers`.
    pub fn bootstrap(&self) -> String {
        self.address.to_string()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// From the start of the process to its first answer to Metadata (formatting not counted).
    pub fn started_after(&self) -> Duration {
        self.started_after
    }

    /// Folder with its partitions, for tools that read segments.
    pub fn data_dir(&self) -> std::path::PathBuf {
        self.dir.path().join("data")
    }

    /// What it wrote to standard output and error.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Stops it with SIGTERM and waits for its end.
    pub fn stop(mut self) -> Result<()> {
        self.stop_and_keep()
    }

    /// As [`Peer::stop`], but its data stays for as long as this value lives.
    pub fn stop_and_keep(&mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let begin = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(begin.elapsed() < STOP_LIMIT, "Kafka does not stop within {STOP_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command that runs a class of Kafka's (`org.apache.kafka.tools.TopicCommand`, ...) with its class path.
pub fn tool(class: &str) -> Result<Command> {
    let mut command = java()?;
    command.args(["-Xmx512m", class]);
    Ok(command)
}

/// A command that runs one Java source file with Kafka's class path.
pub fn program(source: &Path) -> Result<Command> {
    let mut command = java()?;
    command.args(["-Xmx512m"]).arg(source);
    Ok(command)
}

/// Runs a command to its end and returns what it printed; a failure carries both outputs.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("run {:?}", command.get_program()))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{:?} ended with {}:\n{printed}\n{errors}",
            command.get_args().collect::<Vec<_>>(),
            output.status
        );
    }
    Ok(printed)
}

fn java() -> Result<Command> {
    // A JDK: programs in source form are compiled as they start.
    tools::program("javac", "default-jdk-headless")?;
    let mut command = Command::new("java");
    let log = maven::kafka_files().join("log4j2.properties");
    command.arg("-cp").arg(maven::class_path()?);
    command.arg(format!("-Dlog4j2.configurationFile={}", log.display()));
    Ok(command)
}

fn node(properties: &Path, dir: &Path) -> Result<Child> {
    let log = fs::File::create(dir.join("log"))?;
    let mut command = java()?;
    for option in jvm_options()? {
        command.arg(option);
    }
    command.arg("kafka.Kafka").arg(properties).stdin(Stdio::null());
    command.stdout(log.try_clone()?).stderr(log);
    command.spawn().context("start java")
}

fn format_storage(properties: &Path) -> Result<()> {
    let mut format = tool("kafka.tools.StorageTool")?;
    format.args(["format", "--standalone", "-t", "c2VhbGFuZXBlZXJwZWVyAA", "-c"]).arg(properties);
    run(&mut format).map(drop)
}

fn jvm_options() -> Result<Vec<String>> {
    let text = fs::read_to_string(maven::kafka_files().join("jvm.options"))?;
    Ok(text.lines().filter(|line| line.starts_with('-')).map(str::to_owned).collect())
}

fn properties_text(dir: &Path, broker: SocketAddr, controller: SocketAddr, extra: &[&str]) -> Result<String> {
    let mut text = fs::read_to_string(maven::kafka_files().join("server.properties"))?;
    text.push_str(&format!(
        "listeners=PLAINTEXT://{broker},CONTROLLER://{controller}\n\
         advertised.listeners=PLAINTEXT://{broker}\n\
         controller.quorum.bootstrap.servers={controller}\n\
         log.dirs={}\n",
        dir.join("data").display()
    ));
    for line in extra {
        text.push_str(line);
        text.push('\n');
    }
    Ok(text)
}

fn free_address() -> Result<SocketAddr> {
    Ok((Ipv4Addr::LOCALHOST, test_ports::free_port()?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_real_kafka_starts_serves_a_tool_and_stops() {
        let peer = Peer::start(&[]).unwrap();
        let mut topics = tool("org.apache.kafka.tools.TopicCommand").unwrap();
        topics.args(["--bootstrap-server", &peer.bootstrap(), "--create", "--topic", "t"]);
        assert!(run(&mut topics).unwrap().contains("Created topic t"));
        peer.stop().unwrap();
    }
}
