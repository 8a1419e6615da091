//! What a scenario runs against: Sealane, or a real Apache Kafka to prove the scenario itself right.
//!
//! `SEALANE_E2E_TARGET=kafka` makes the scenarios that only speak the Kafka protocol run against Apache Kafka.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::peer::{self, Peer};
use crate::process::{Local, Plan};

/// A server under a Kafka scenario.
pub enum Server {
    Sealane(Box<Local>),
    Kafka(Peer),
}

impl Server {
    /// One region of Sealane, or one Kafka broker.
    pub fn start() -> Result<Server> {
        if Server::is_kafka() {
            return Ok(Server::Kafka(Peer::start(&[])?));
        }
        Ok(Server::Sealane(Box::new(Plan::one().start()?)))
    }

    /// True when scenarios run against Apache Kafka.
    pub fn is_kafka() -> bool {
        std::env::var_os("SEALANE_E2E_TARGET").is_some_and(|target| target == "kafka")
    }

    pub fn bootstrap(&self) -> String {
        match self {
            Server::Sealane(local) => local.bootstrap(0),
            Server::Kafka(peer) => peer.bootstrap(),
        }
    }

    /// Stops it with SIGTERM, and returns the folder with its data, which lives as long as this value.
    pub fn stop_and_data(&mut self) -> Result<PathBuf> {
        match self {
            Server::Sealane(local) => {
                let status = local.stop()?;
                if !status.success() {
                    bail!("sealane local ended with {status}");
                }
                Ok(local.data_dir())
            }
            Server::Kafka(peer) => {
                peer.stop_and_keep()?;
                Ok(peer.data_dir())
            }
        }
    }

    /// A tool of Apache Kafka's that takes `--bootstrap-server`.
    pub fn tool(&self, class: &str, arguments: &[&str]) -> Result<Command> {
        let mut command = peer::tool(class)?;
        command.args(["--bootstrap-server", &self.bootstrap()]).args(arguments);
        Ok(command)
    }

    /// Runs [`Server::tool`] to its end; what it printed.
    pub fn run_tool(&self, class: &str, arguments: &[&str]) -> Result<String> {
        peer::run(&mut self.tool(class, arguments)?)
    }
}
