//! A cluster that is linked to a region of one broker: the mirrors of both, the other region's broker, and what
//! must be in both logs in the end.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Cluster, Found, Promises, judge_lines, read};
use crate::clients::PATIENCE;
use crate::probe;
use crate::process::{binary, is_error};
use crate::services::{make_certificates, stop};
use crate::tools;
use test_ports::Ports;

/// A process beside the cluster's brokers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    WestBroker,
    EastMirror,
    WestMirror,
    /// One more mirror of each region: only the apply rule keeps it and the first apart.
    SecondEastMirror,
    SecondWestMirror,
    /// The lane-router of the cluster.
    LaneRouter,
}

/// The cluster is the region `east`.
pub struct Linked {
    pub cluster: Cluster,
    ports: Ports,
    off: String,
    running: BTreeMap<Side, Child>,
    starts: u32,
}

impl Linked {
    /// Starts the brokers of both regions and a mirror in each.
    pub fn start(mut cluster: Cluster, brokers: u16, off: &str) -> Result<Linked> {
        let ports = Ports::take()?;
        make_certificates(&cluster.dir().join("own"), ports.base)?;
        let tls = tls(&cluster, "sealane-broker");
        cluster.listen_internally(&tls);
        cluster.set_environment("SEALANE_TEST_OFF", off);
        cluster.spawn_all(brokers)?;
        let mut linked = Linked { cluster, ports, off: off.to_owned(), running: BTreeMap::new(), starts: 0 };
        for side in [Side::WestBroker, Side::EastMirror, Side::WestMirror] {
            linked.spawn(side)?;
        }
        Ok(linked)
    }

    /// Starts one process, on the data that it had; a broker serves when this returns.
    pub fn spawn(&mut self, side: Side) -> Result<()> {
        ensure!(!self.running.contains_key(&side), "{side:?} runs already");
        self.starts += 1;
        let dir = self.cluster.dir().to_owned();
        let (kind, config) = match side {
            Side::WestBroker => ("broker", self.west_broker()),
            Side::EastMirror => ("mirror", self.mirror(&self.east(), 4, ("west", Some(14)))),
            Side::WestMirror => ("mirror", self.mirror(&self.west(), 14, ("east", None))),
            Side::SecondEastMirror => ("mirror", self.mirror(&self.east(), 6, ("west", Some(16)))),
            Side::LaneRouter => ("lane-router", self.router()),
            Side::SecondWestMirror => ("mirror", self.mirror(&self.west(), 16, ("east", None))),
        };
        let file = dir.join(format!("{side:?}.toml"));
        fs::write(&file, config)?;
        let log = File::create(dir.join(format!("{:03}-{side:?}.log", self.starts)))?;
        let mut command = Command::new(binary()?);
        command.args([kind, "--config"]).arg(&file).args(["--log-format", "json"]).current_dir(&dir);
        command.env("SEALANE_TEST_OFF", &self.off);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.running.insert(side, command.spawn()?);
        let end = Instant::now() + PATIENCE;
        while side == Side::WestBroker && !probe::serves(([127, 0, 0, 1], self.ports.base).into()) {
            ensure!(Instant::now() < end, "the broker of west does not serve:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// SIGKILL; nothing of it is left when this returns.
    pub fn kill(&mut self, side: Side) -> Result<()> {
        let mut child = self.running.remove(&side).context("it does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// SIGTERM to the mirrors, then to the brokers; every one must end with success, and no log holds an ERROR.
    pub fn stop(mut self, brokers: u16) -> Result<()> {
        for (side, child) in std::mem::take(&mut self.running).into_iter().rev() {
            stop(child).with_context(|| format!("{side:?} does not stop well:\n{}", self.logs()))?;
        }
        for broker in 0..brokers {
            self.cluster.stop(broker)?;
        }
        self.cluster.judge_logs()?;
        let logs = self.logs();
        let error = logs.lines().find(|line| is_error(line));
        ensure!(error.is_none(), "an ERROR in a log: {error:?}");
        Ok(())
    }

    pub fn west_bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.ports.base)
    }

    /// `sealane` with these arguments, against the broker of west.
    pub fn west_cli(&self, arguments: &[&str]) -> Result<String> {
        let server = self.west_bootstrap();
        let output = Command::new(binary()?).args(arguments).args(["--server", &server]).output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sealane {arguments:?}: {errors}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What the processes beside the cluster's brokers wrote.
    pub fn logs(&self) -> String {
        let mut names: Vec<_> = fs::read_dir(self.cluster.dir())
            .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
            .unwrap_or_default();
        let sides = ["WestBroker", "Mirror", "LaneRouter"];
        names.retain(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            name.ends_with(".log") && sides.iter().any(|side| name.contains(side))
        });
        names.sort();
        names.iter().map(|path| fs::read_to_string(path).unwrap_or_default()).collect()
    }

    /// Waits until both regions hold so many records of a topic; what they hold.
    pub fn until_equal(&self, topic: &str, count: u64) -> Result<[Found; 2]> {
        let end = Instant::now() + PATIENCE;
        loop {
            let both = [read(&self.cluster, topic)?, read_at(&self.west_bootstrap(), topic)?];
            if both.iter().all(|found| found.len() as u64 >= count) {
                return Ok(both);
            }
            let counts = both.each_ref().map(BTreeMap::len);
            ensure!(
                Instant::now() < end,
                "{counts:?} of {count} records are in the regions\n{}\n{}",
                self.cluster.cli(0, &["mirror", "status"]).unwrap_or_default(),
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Every line of east and every promise of west is in both regions, once, and in the order of its origin.
    pub fn judge(&self, topic: &str, lines: u64, promises: &Promises) -> Result<()> {
        let both = self.until_equal(topic, lines + promises.made())?;
        for found in &both {
            judge_lines(found, lines)?;
        }
        promises.judge(&both[1])?;
        let (east, west) = (by_origin(&both[0]), by_origin(&both[1]));
        for (place, values) in &west {
            let there = east.get(place);
            ensure!(
                there == Some(values),
                "partition {} of origin {}: {} records in west, {:?} in east, or others, or in another order",
                place.0,
                place.1,
                values.len(),
                there.map(Vec::len)
            );
        }
        ensure!(east.len() == west.len(), "an origin is missing in a region");
        Ok(())
    }

    fn east(&self) -> String {
        let internal = (0..3).map(|broker| format!("127.0.0.1:{}", self.cluster.port(broker) + 5));
        internal.collect::<Vec<_>>().join(",")
    }

    fn west(&self) -> String {
        format!("127.0.0.1:{}", self.ports.base + 5)
    }

    fn west_broker(&self) -> String {
        let base = self.ports.base;
        format!(
            "data_dir = {:?}\nregion = \"west\"\ncontrol_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n\
             [[listeners]]\nname = \"plain\"\nbind = \"127.0.0.1:{base}\"\n\
             [[listeners]]\nname = \"internal\"\nbind = \"{}\"\nclient_auth = \"required\"\ninternal = true\n\
             [listeners.tls]\n{}",
            self.cluster.dir().join("west"),
            base + 2,
            base + 3,
            self.west(),
            tls(&self.cluster, "sealane-broker"),
        )
    }

    fn router(&self) -> String {
        let control = (0..3).map(|broker| format!("127.0.0.1:{}", self.cluster.port(broker) + 2));
        format!(
            "broker = {:?}\nbroker_server_name = \"sealane-broker\"\ncontrol = {:?}\nbroker_port_step = 10\n\
             bind = \"127.0.0.1:{}\"\n[tls]\n{}",
            self.east(),
            control.collect::<Vec<_>>().join(","),
            self.ports.base + 220,
            tls(&self.cluster, "sealane-lane-router"),
        )
    }

    fn mirror(&self, brokers: &str, port: u16, (peer, dials): (&str, Option<u16>)) -> String {
        let base = self.ports.base;
        let address = dials.map(|port| format!("address = \"127.0.0.1:{}\"\n", base + port));
        format!(
            "broker = {brokers:?}\nbroker_server_name = \"sealane-broker\"\nbind = \"127.0.0.1:{}\"\n\
             [tls]\n{}[[links]]\npeer = {peer:?}\n{}server_name = \"sealane-mirror\"\n",
            base + port,
            tls(&self.cluster, "sealane-mirror"),
            address.unwrap_or_default(),
        )
    }
}

impl Drop for Linked {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// By partition and origin: the values in the order of the log.
fn by_origin(found: &Found) -> BTreeMap<(i32, &'static str), Vec<String>> {
    let mut all: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for ((partition, _), value) in found {
        let origin = if value.starts_with('w') { "west" } else { "east" };
        all.entry((*partition, origin)).or_default().push(value.clone());
    }
    all
}

/// Everything that a broker which is alone has of a topic.
fn read_at(bootstrap: &str, topic: &str) -> Result<Found> {
    let mut command = Command::new(tools::kcat()?);
    command.args(["-C", "-b", bootstrap, "-t", topic, "-o", "beginning", "-e", "-f", "%p %o %s\n"]);
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "kcat: {}", String::from_utf8_lossy(&output.stderr));
    let line = |line: &str| {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().with_context(|| format!("not three words: {line}"));
        Ok(((word()?.parse()?, word()?.parse()?), word()?.to_owned()))
    };
    String::from_utf8_lossy(&output.stdout).lines().map(line).collect()
}

fn tls(cluster: &Cluster, name: &str) -> String {
    let dir = cluster.dir().join("own/tls");
    let (pem, ca) = (dir.join(format!("{name}.pem")), dir.join("ca.crt"));
    format!("cert = {pem:?}\nkey = {pem:?}\nca = {ca:?}\n")
}
