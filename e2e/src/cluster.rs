//! Brokers of one cluster as processes, on a real etcd and a real store.
//!
//! Owns how a broker of a cluster is configured, started, hurt and ended, and what its log says. Loads and readers
//! are in `cluster/lines.rs` (a real client) and `cluster/writers.rs` (our own, which remember every promise).

mod lines;
mod linked;
mod writers;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

pub use lines::{Along, Found, Lines, judge, judge_lines, read};
pub use linked::{Linked, Side};
pub use writers::{Directory, Promises, Writers};

use crate::clients::PATIENCE;
use crate::probe;
use crate::process::{binary, go_on, hang, is_error};
use crate::stores::etcd::Etcd;
use crate::stores::front::{Front, FrontFaults};
use crate::stores::hdfs::Hdfs;
use crate::stores::s3::S3;
use test_ports::Ports;

/// Most brokers of a cluster here.
pub const BROKERS_MAX: u16 = 4;

/// What keeps the bytes.
pub enum Store {
    S3(S3),
    Hdfs(Hdfs),
}

/// A cluster and what it stands on.
pub struct Cluster {
    pub etcd: Etcd,
    pub store: Store,
    /// What S3 is reached through, where that was asked for.
    pub front: Option<Front>,
    ports: Ports,
    dir: TempDir,
    brokers: BTreeMap<u16, Child>,
    starts: u32,
    /// Lines of the table `[cluster]`, of all brokers.
    settings: BTreeMap<String, String>,
    /// Beside or instead of those, of one broker.
    own_settings: BTreeMap<(u16, String), String>,
    environment: BTreeMap<String, String>,
    /// Lines of the internal listeners' `tls`; without them there are none.
    internal_tls: Option<String>,
}

/// What all logs held at some moment; [`Cluster::log_since`] tells what came later.
#[derive(Clone, Debug, Default)]
pub struct LogMark(BTreeMap<PathBuf, usize>);

impl Store {
    pub fn s3() -> Result<Store> {
        S3::start().map(Store::S3)
    }

    pub fn hdfs() -> Result<Store> {
        Hdfs::start(3).map(Store::Hdfs)
    }

    /// `s3` or `hdfs`.
    pub fn named(name: &str) -> Result<Store> {
        match name {
            "s3" => Store::s3(),
            "hdfs" => Store::hdfs(),
            _ => bail!("{name:?} is neither s3 nor hdfs"),
        }
    }
}

impl Cluster {
    /// Starts etcd with three members, and so many brokers, which serve when this returns.
    pub fn start(store: Store, brokers: u16, off: &str) -> Result<Cluster> {
        let mut cluster = Cluster::prepare(store)?;
        cluster.set_environment("SEALANE_TEST_OFF", off);
        cluster.spawn_all(brokers)?;
        Ok(cluster)
    }

    /// Starts etcd with three members, and no broker yet.
    pub fn prepare(store: Store) -> Result<Cluster> {
        let etcd = Etcd::start(3)?;
        let (ports, dir) = (Ports::take()?, tempfile::Builder::new().prefix("sealane-cluster").tempdir()?);
        let mut cluster = Cluster {
            etcd,
            store,
            front: None,
            ports,
            dir,
            brokers: BTreeMap::new(),
            starts: 0,
            settings: BTreeMap::new(),
            own_settings: BTreeMap::new(),
            environment: BTreeMap::new(),
            internal_tls: None,
        };
        cluster.set("name", "\"test\"");
        cluster.set("lease_ms", "3000");
        cluster.set("etcd", &format!("{:?}", cluster.etcd.endpoints()));
        match &cluster.store {
            Store::S3(s3) => {
                let endpoint = format!("{:?}", s3.endpoint());
                cluster.set("store", &format!("\"s3://{}/test\"", S3::BUCKET));
                cluster.set("s3_endpoint", &endpoint);
            }
            Store::Hdfs(hdfs) => {
                let url = format!("\"{}/sealane\"", hdfs.url());
                cluster.set("store", &url);
            }
        }
        cluster.set_environment("AWS_ACCESS_KEY_ID", S3::ACCESS_KEY_ID);
        cluster.set_environment("AWS_SECRET_ACCESS_KEY", S3::SECRET_ACCESS_KEY);
        Ok(cluster)
    }

    /// Lets brokers that start from now on reach S3 through a front. Without meaning on HDFS.
    pub fn put_front_before_store(&mut self, seed: u64) -> Result<()> {
        let Store::S3(s3) = &self.store else { return Ok(()) };
        let front = Front::start(s3.address(), seed, FrontFaults::default())?;
        self.set("s3_endpoint", &format!("{:?}", front.endpoint()));
        self.front = Some(front);
        Ok(())
    }

    /// A line of the table `[cluster]` of every broker that starts from now on; the value in TOML.
    pub fn set(&mut self, key: &str, value: &str) {
        self.settings.insert(key.to_owned(), value.to_owned());
    }

    /// As [`Cluster::set`], of one broker alone.
    pub fn set_of(&mut self, broker: u16, key: &str, value: &str) {
        self.own_settings.insert((broker, key.to_owned()), value.to_owned());
    }

    /// Takes back what [`Cluster::set_of`] said.
    pub fn unset_of(&mut self, broker: u16, key: &str) {
        self.own_settings.remove(&(broker, key.to_owned()));
    }

    /// Of every broker that starts from now on.
    pub fn set_environment(&mut self, name: &str, value: &str) {
        self.environment.insert(name.to_owned(), value.to_owned());
    }

    pub fn unset_environment(&mut self, name: &str) {
        self.environment.remove(name);
    }

    /// Gives brokers that start from now on an internal listener, five ports above the plain one.
    pub fn listen_internally(&mut self, tls: &str) {
        self.internal_tls = Some(tls.to_owned());
    }

    /// Starts brokers side by side, which serve when this returns.
    pub fn spawn_all(&mut self, brokers: u16) -> Result<()> {
        (0..brokers).try_for_each(|broker| self.spawn(broker))?;
        (0..brokers).try_for_each(|broker| self.wait(broker))
    }

    /// Starts a broker, on its identity if it ran before.
    pub fn spawn(&mut self, broker: u16) -> Result<()> {
        self.starts += 1;
        let config = self.dir.path().join(format!("broker-{broker}.toml"));
        fs::write(&config, self.config(broker))?;
        let log = File::create(self.log_file(self.starts, broker))?;
        let mut command = Command::new(binary()?);
        command.arg("broker").arg("--config").arg(&config).args(["--log-format", "json"]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).current_dir(self.dir.path());
        command.envs(&self.environment);
        self.brokers.insert(broker, command.spawn()?);
        Ok(())
    }

    /// Waits until a broker serves.
    pub fn wait(&mut self, broker: u16) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        let address = ([127, 0, 0, 1], self.port(broker)).into();
        while !probe::serves(address) {
            let ended = self.ended(broker)?;
            ensure!(ended.is_none(), "broker {broker} ended with {ended:?}:\n{}", self.logs());
            ensure!(Instant::now() < end, "broker {broker} does not serve:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// How a broker that was started has ended, if it has.
    pub fn ended(&mut self, broker: u16) -> Result<Option<std::process::ExitStatus>> {
        Ok(self.brokers.get_mut(&broker).context("it was not started")?.try_wait()?)
    }

    /// SIGKILL; nothing of it is left when this returns.
    pub fn kill(&mut self, broker: u16) -> Result<()> {
        let mut child = self.brokers.remove(&broker).context("it does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Waits until no partition is on its way from one broker to another, as `broker` sees it.
    pub fn until_moved(&self, broker: u16) -> Result<()> {
        self.until(broker, "the move", |status| {
            let mut brokers = status["brokers"].as_array().into_iter().flatten();
            status["moving"].as_array().is_some_and(Vec::is_empty)
                && brokers.all(|broker| broker["taking_over"] == 0)
        })
    }

    /// A broker stands still, and does not know it.
    pub fn pause(&self, broker: u16) -> Result<()> {
        hang(self.brokers.get(&broker).context("it does not run")?)
    }

    pub fn resume(&self, broker: u16) -> Result<()> {
        go_on(self.brokers.get(&broker).context("it does not run")?)
    }

    /// SIGTERM; it must end with success.
    pub fn stop(&mut self, broker: u16) -> Result<()> {
        let mut child = self.brokers.remove(&broker).context("it does not run")?;
        kill_process(Pid::from_child(&child), Signal::TERM)?;
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait()? {
                ensure!(status.success(), "broker {broker} ended with {status}:\n{}", self.logs());
                return Ok(());
            }
            ensure!(Instant::now() < end, "broker {broker} does not stop:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn pid(&self, broker: u16) -> Result<u32> {
        Ok(self.brokers.get(&broker).context("it does not run")?.id())
    }

    pub fn runs(&self, broker: u16) -> bool {
        self.brokers.contains_key(&broker)
    }

    pub fn port(&self, broker: u16) -> u16 {
        self.ports.base + 100 * broker
    }

    /// Of the first lane. The brokers of a lane are behind it, ten ports apart.
    pub fn lane_port(&self) -> u16 {
        self.ports.base + 340
    }

    pub fn address(&self, broker: u16) -> String {
        format!("127.0.0.1:{}", self.port(broker))
    }

    /// Addresses of all brokers there may be.
    pub fn addresses(&self) -> Vec<String> {
        (0..BROKERS_MAX).map(|broker| self.address(broker)).collect()
    }

    /// All brokers, for a client.
    pub fn bootstrap(&self) -> String {
        self.addresses().join(",")
    }

    /// Where the bytes are, as the brokers are told.
    pub fn store_url(&self) -> String {
        let at = self.settings.get("s3_endpoint").map(|endpoint| format!(" at {endpoint}"));
        let url = self.settings.get("store").cloned().unwrap_or_default();
        format!("{url}{}", at.unwrap_or_default()).replace('"', "")
    }

    /// Where what is written down during a test can lie.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// `sealane` with these arguments, against one broker; what it prints.
    pub fn cli(&self, broker: u16, arguments: &[&str]) -> Result<String> {
        let output =
            Command::new(binary()?).args(arguments).args(["--server", &self.address(broker)]).output()?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "sealane {arguments:?}: {printed}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(printed)
    }

    /// What a command says that must be refused.
    pub fn cli_refused(&self, broker: u16, arguments: &[&str]) -> Result<String> {
        match self.cli(broker, arguments) {
            Ok(printed) => bail!("sealane {arguments:?} is not refused: {printed}"),
            Err(error) => Ok(error.to_string()),
        }
    }

    /// `sealane cluster status`, as one broker sees it.
    pub fn status(&self, asked: u16) -> Result<Value> {
        Ok(serde_json::from_str(&self.cli(asked, &["cluster", "status", "--output", "json"])?)?)
    }

    /// Waits until the cluster is as it should be, as one broker sees it.
    pub fn until(&self, asked: u16, what: &str, enough: impl Fn(&Value) -> bool) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.status(asked);
            if status.as_ref().is_ok_and(&enough) {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{what} does not come: {status:?}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until so many brokers are alive, as one of them sees it.
    pub fn until_alive(&self, asked: u16, count: usize) -> Result<()> {
        let what = format!("a cluster of {count} brokers");
        self.until(asked, &what, |status| status["brokers"].as_array().is_some_and(|b| b.len() == count))
    }

    /// What all brokers wrote, all of their lives.
    pub fn logs(&self) -> String {
        self.log_since(&LogMark::default())
    }

    /// What all brokers wrote up to now.
    pub fn mark_logs(&self) -> LogMark {
        let length = |(file, text): (PathBuf, String)| (file, text.len());
        LogMark(self.log_texts().map(length).collect())
    }

    /// What all brokers wrote since then, a file after the other.
    pub fn log_since(&self, mark: &LogMark) -> String {
        let mut all = String::new();
        for (file, text) in self.log_texts() {
            let new = text.get(mark.0.get(&file).copied().unwrap_or(0)..).unwrap_or_default();
            if !new.is_empty() {
                let name = file.file_name().map(|name| name.to_string_lossy().into_owned());
                all.push_str(&format!("--- {}\n{new}\n", name.unwrap_or_default()));
            }
        }
        all
    }

    /// How many lines of the logs hold this text.
    pub fn count_in_logs(&self, text: &str) -> usize {
        self.logs().lines().filter(|line| line.contains(text)).count()
    }

    /// No line is an ERROR.
    pub fn judge_logs(&self) -> Result<()> {
        self.judge_logs_but("no line is excepted")
    }

    /// No line is an ERROR that does not say this.
    pub fn judge_logs_but(&self, expected: &str) -> Result<()> {
        let logs = self.logs();
        match logs.lines().find(|line| is_error(line) && !line.contains(expected)) {
            None => Ok(()),
            Some(line) => bail!("an ERROR in a log: {line}"),
        }
    }

    fn log_texts(&self) -> impl Iterator<Item = (PathBuf, String)> {
        let files = (1..=self.starts).flat_map(|start| (0..BROKERS_MAX).map(move |broker| (start, broker)));
        files.filter_map(|(start, broker)| {
            let file = self.log_file(start, broker);
            let bytes = fs::read(&file).ok()?;
            Some((file, String::from_utf8_lossy(&bytes).into_owned()))
        })
    }

    fn log_file(&self, start: u32, broker: u16) -> PathBuf {
        self.dir.path().join(format!("{start:03}-broker-{broker}.log"))
    }

    fn config(&self, broker: u16) -> String {
        let port = self.port(broker);
        let mut settings = self.settings.clone();
        let own = self.own_settings.iter().filter(|((of, _), _)| *of == broker);
        settings.extend(own.map(|((_, key), value)| (key.clone(), value.clone())));
        let settings: String = settings.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
        let internal = self.internal_tls.as_ref().map(|tls| {
            format!(
                "[[listeners]]\nname = \"internal\"\nbind = \"127.0.0.1:{}\"\nclient_auth = \"required\"\n\
                 internal = true\n[listeners.tls]\n{tls}",
                port + 5
            )
        });
        format!(
            "data_dir = {:?}\nregion = \"east\"\ncontrol_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n\
             lane_port_first = {}\nlane_port_count = 5\n\
             [[listeners]]\nname = \"plain\"\nbind = \"127.0.0.1:{port}\"\n{}\
             [cluster]\n{settings}",
            self.dir.path().join(format!("data-{broker}")),
            port + 2,
            port + 3,
            self.lane_port(),
            internal.unwrap_or_default(),
        )
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.brokers.values_mut() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
