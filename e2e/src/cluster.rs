//! Brokers of one cluster as processes, on a real etcd and a real store, with a load from librdkafka and a reader
//! that knows nothing of the product.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::clients::PATIENCE;
use crate::ports::Ports;
use crate::process::{binary, is_error};
use crate::stores::etcd::Etcd;
use crate::stores::hdfs::Hdfs;
use crate::stores::s3::S3;
use crate::{probe, tools};

/// What keeps the bytes.
pub enum Store {
    S3(S3),
    Hdfs(Hdfs),
}

/// A cluster and what it stands on.
pub struct Cluster {
    pub etcd: Etcd,
    pub store: Store,
    ports: Ports,
    dir: TempDir,
    brokers: BTreeMap<u16, Child>,
    starts: u32,
    /// `SEALANE_TEST_OFF` of the brokers.
    off: String,
}

impl Store {
    pub fn s3() -> Result<Store> {
        S3::start().map(Store::S3)
    }

    pub fn hdfs() -> Result<Store> {
        Hdfs::start(3).map(Store::Hdfs)
    }
}

impl Cluster {
    /// Starts etcd with three members, and so many brokers, which serve when this returns.
    pub fn start(store: Store, brokers: u16, off: &str) -> Result<Cluster> {
        let etcd = Etcd::start(3)?;
        let (ports, dir) = (Ports::take()?, tempfile::Builder::new().prefix("sealane-cluster").tempdir()?);
        let mut cluster =
            Cluster { etcd, store, ports, dir, brokers: BTreeMap::new(), starts: 0, off: off.to_owned() };
        for broker in 0..brokers {
            cluster.spawn(broker)?;
        }
        for broker in 0..brokers {
            cluster.wait(broker)?;
        }
        Ok(cluster)
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
        command.env("SEALANE_TEST_OFF", &self.off);
        command
            .env("AWS_ACCESS_KEY_ID", S3::ACCESS_KEY_ID)
            .env("AWS_SECRET_ACCESS_KEY", S3::SECRET_ACCESS_KEY);
        self.brokers.insert(broker, command.spawn()?);
        Ok(())
    }

    /// Waits until a broker serves.
    pub fn wait(&mut self, broker: u16) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        let address = ([127, 0, 0, 1], self.port(broker)).into();
        while !probe::serves(address) {
            let child = self.brokers.get_mut(&broker).context("it was started")?;
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "broker {broker} ended with {ended:?}:\n{}", self.logs());
            ensure!(Instant::now() < end, "broker {broker} does not serve:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// SIGKILL; nothing of it is left when this returns.
    pub fn kill(&mut self, broker: u16) -> Result<()> {
        let mut child = self.brokers.remove(&broker).context("it does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// SIGSTOP, or SIGCONT.
    pub fn signal(&self, broker: u16, signal: Signal) -> Result<()> {
        let child = self.brokers.get(&broker).context("it does not run")?;
        Ok(kill_process(Pid::from_child(child), signal)?)
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

    pub fn port(&self, broker: u16) -> u16 {
        self.ports.base + 100 * broker
    }

    /// All brokers, for a client.
    pub fn bootstrap(&self) -> String {
        let addresses: Vec<String> =
            (0..4).map(|broker| format!("127.0.0.1:{}", self.port(broker))).collect();
        addresses.join(",")
    }

    /// `sealane` with these arguments, against one broker; what it prints.
    pub fn cli(&self, broker: u16, arguments: &[&str]) -> Result<String> {
        let server = format!("127.0.0.1:{}", self.port(broker));
        let output = Command::new(binary()?).args(arguments).args(["--server", &server]).output()?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "sealane {arguments:?}: {printed}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(printed)
    }

    /// What all brokers wrote, all of their lives.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for start in 1..=self.starts {
            for broker in 0..4 {
                if let Ok(log) = fs::read_to_string(self.log_file(start, broker)) {
                    text.push_str(&format!("--- start {start}, broker {broker}\n{log}\n"));
                }
            }
        }
        text
    }

    /// How many lines of the logs hold this text.
    pub fn count_in_logs(&self, text: &str) -> usize {
        self.logs().lines().filter(|line| line.contains(text)).count()
    }

    /// No line is an ERROR.
    pub fn judge_logs(&self) -> Result<()> {
        let logs = self.logs();
        match logs.lines().find(|line| is_error(line)) {
            None => Ok(()),
            Some(line) => bail!("an ERROR in a log: {line}"),
        }
    }

    fn log_file(&self, start: u32, broker: u16) -> PathBuf {
        self.dir.path().join(format!("{start:03}-broker-{broker}.log"))
    }

    fn config(&self, broker: u16) -> String {
        let port = self.port(broker);
        let store = match &self.store {
            Store::S3(s3) => {
                format!("store = \"s3://{}/test\"\ns3_endpoint = \"{}\"\n", S3::BUCKET, s3.endpoint())
            }
            Store::Hdfs(hdfs) => format!("store = \"{}/sealane\"\n", hdfs.url()),
        };
        format!(
            "data_dir = {:?}\nregion = \"east\"\ncontrol_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n\
             [[listeners]]\nname = \"plain\"\nbind = \"127.0.0.1:{port}\"\n\
             [cluster]\nname = \"test\"\netcd = {:?}\nlease_ms = 3000\n{store}",
            self.dir.path().join(format!("data-{broker}")),
            port + 2,
            port + 3,
            self.etcd.endpoints(),
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

/// Numbered lines that kcat produces, idempotent and `acks=all`, with librdkafka's defaults beside that.
pub struct Lines {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    feeder: std::thread::JoinHandle<Result<()>>,
    kcat: Child,
    errors: PathBuf,
}

/// Lines each second.
const LINES_PER_SECOND: u64 = 2_000;

impl Lines {
    pub fn start(cluster: &Cluster, topic: &str) -> Result<Lines> {
        let errors = cluster.dir.path().join(format!("kcat-{topic}.log"));
        let mut command = Command::new(tools::kcat()?);
        command.args(["-P", "-b", &cluster.bootstrap(), "-t", topic]);
        for setting in ["enable.idempotence=true", "acks=all", "linger.ms=5", "message.timeout.ms=300000"] {
            command.args(["-X", setting]);
        }
        let mut kcat = command.stdin(Stdio::piped()).stderr(File::create(&errors)?).spawn()?;
        let mut input = kcat.stdin.take().context("it has a standard input")?;
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (stop.clone(), written.clone());
        let feeder = std::thread::spawn(move || {
            let begin = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                let due = begin.elapsed().as_millis() as u64 * LINES_PER_SECOND / 1000;
                for number in count.load(Ordering::Relaxed)..due {
                    writeln!(input, "{number}")?;
                    count.fetch_add(1, Ordering::Relaxed);
                }
                input.flush()?;
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(())
        });
        Ok(Lines { stop, written, feeder, kcat, errors })
    }

    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Waits until so many more lines were written.
    pub fn until_more(&self, count: u64) -> Result<()> {
        let (aim, end) = (self.written() + count, Instant::now() + PATIENCE);
        while self.written() < aim {
            let said = || fs::read_to_string(&self.errors).unwrap_or_default();
            ensure!(!self.feeder.is_finished(), "kcat takes no more lines: {}", said());
            ensure!(Instant::now() < end, "kcat takes lines too slowly");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends the input and waits until all of it is acknowledged; how many lines that is.
    pub fn finish(mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.feeder.join().expect("it returns its errors")?;
        let end = Instant::now() + PATIENCE;
        loop {
            let said = || fs::read_to_string(&self.errors).unwrap_or_default();
            match self.kcat.try_wait()? {
                Some(status) if status.success() => break,
                Some(status) => bail!("kcat ended with {status}: {}", said()),
                None if Instant::now() > end => {
                    self.kcat.kill()?;
                    self.kcat.wait()?;
                    bail!("not everything is acknowledged: {}", said());
                }
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        let said = fs::read_to_string(&self.errors).unwrap_or_default();
        ensure!(!said.contains("Delivery failed"), "kcat gave lines up: {said}");
        Ok(self.written.load(Ordering::Relaxed))
    }
}

/// Every line from 0 to `count` is in the topic exactly once, and each partition has them in order.
pub fn judge(cluster: &Cluster, topic: &str, count: u64) -> Result<()> {
    let mut command = Command::new(tools::kcat()?);
    command.args([
        "-C",
        "-b",
        &cluster.bootstrap(),
        "-t",
        topic,
        "-o",
        "beginning",
        "-e",
        "-f",
        "%p %o %s\\n",
    ]);
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "kcat: {}", String::from_utf8_lossy(&output.stderr));
    let mut seen = vec![0u8; count as usize];
    let mut last: BTreeMap<u32, (i64, u64)> = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let mut words = line.split(' ');
        let mut word = || words.next().with_context(|| format!("not three words: {line}"));
        let (partition, offset, number): (u32, i64, u64) =
            (word()?.parse()?, word()?.parse()?, word()?.parse()?);
        let place = seen.get_mut(number as usize).with_context(|| format!("line {number} was never sent"))?;
        *place += 1;
        ensure!(*place == 1, "line {number} is there twice");
        if let Some((before, earlier)) = last.insert(partition, (offset, number)) {
            ensure!(offset > before && number > earlier, "partition {partition}: {earlier} before {number}");
        }
    }
    let lost = seen.iter().filter(|times| **times == 0).count();
    ensure!(
        lost == 0,
        "{lost} of {count} acknowledged lines are lost, the first is {:?}",
        seen.iter().position(|t| *t == 0)
    );
    Ok(())
}
