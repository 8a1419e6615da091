//! What a scenario runs against: Sealane on its own disk, a cluster of it on a remote store, or a real Apache
//! Kafka to prove the scenario itself right.
//!
//! `SEALANE_E2E_TARGET` chooses for the scenarios that only speak the Kafka protocol: `kafka`, `s3` or `hdfs`
//! (these two in builds with the feature `cluster`).

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

#[cfg(feature = "cluster")]
use crate::cluster::{Cluster, Store};
use crate::peer::{self, Peer};
use crate::process::{Local, Plan};

/// A server under a Kafka scenario.
pub enum Server {
    Sealane(Box<Local>),
    Kafka(Peer),
    #[cfg(feature = "cluster")]
    Cluster(Box<Cluster>),
}

/// Brokers of a cluster, where a scenario bears several.
const BROKERS: u16 = 3;

impl Server {
    /// One broker: everything is to be had at its address.
    pub fn start() -> Result<Server> {
        Server::with_brokers(1)
    }

    /// Several brokers where the target is a cluster, for scenarios whose clients all look for the leader.
    pub fn start_several() -> Result<Server> {
        Server::with_brokers(BROKERS)
    }

    fn with_brokers(brokers: u16) -> Result<Server> {
        match std::env::var("SEALANE_E2E_TARGET").as_deref() {
            Err(_) => Ok(Server::Sealane(Box::new(Plan::one().start()?))),
            Ok("kafka") => Ok(Server::Kafka(Peer::start(&[])?)),
            Ok(store) => Server::cluster(store, brokers),
        }
    }

    #[cfg(feature = "cluster")]
    fn cluster(store: &str, brokers: u16) -> Result<Server> {
        let store = match store {
            "s3" => Store::s3()?,
            "hdfs" => Store::hdfs()?,
            other => bail!("SEALANE_E2E_TARGET={other} is neither kafka, s3 nor hdfs"),
        };
        Ok(Server::Cluster(Box::new(Cluster::start(store, brokers, "")?)))
    }

    #[cfg(not(feature = "cluster"))]
    fn cluster(store: &str, brokers: u16) -> Result<Server> {
        bail!(
            "SEALANE_E2E_TARGET={store} with {brokers} brokers: only kafka in a build without the feature cluster"
        )
    }

    /// True when scenarios run against Apache Kafka.
    pub fn is_kafka() -> bool {
        std::env::var_os("SEALANE_E2E_TARGET").is_some_and(|target| target == "kafka")
    }

    pub fn bootstrap(&self) -> String {
        match self {
            Server::Sealane(local) => local.bootstrap(0),
            Server::Kafka(peer) => peer.bootstrap(),
            #[cfg(feature = "cluster")]
            Server::Cluster(cluster) => format!("127.0.0.1:{}", cluster.port(0)),
        }
    }

    /// Stops it with SIGTERM, and returns the folder with its data, which lives as long as this value; none where
    /// the data is in no folder.
    pub fn stop_and_data(&mut self) -> Result<Option<PathBuf>> {
        match self {
            Server::Sealane(local) => {
                let status = local.stop()?;
                if !status.success() {
                    bail!("sealane local ended with {status}");
                }
                Ok(Some(local.data_dir()))
            }
            Server::Kafka(peer) => {
                peer.stop_and_keep()?;
                Ok(Some(peer.data_dir()))
            }
            #[cfg(feature = "cluster")]
            Server::Cluster(cluster) => {
                cluster.stop(0)?;
                cluster.judge_logs()?;
                Ok(None)
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
