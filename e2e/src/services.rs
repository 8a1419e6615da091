//! The services of two regions as processes of their own: broker, mirror and lane-router each, killed one by one.
//!
//! The same ports as `sealane local` gives them. The mirrors of the two regions talk through a UDP relay of ours, so
//! that a test can cut or harm the link. Certificates come from a `sealane local` that ran for a moment.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::clients::PATIENCE;
use crate::http;
use crate::probe;
use crate::process::{binary, is_error};
use crate::relay::Relay;
use test_ports::Ports;

pub const REGIONS: [&str; 2] = ["east", "west"];

/// A kind of service; with the number of a region it names a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Broker,
    Mirror,
    /// One more mirror of the region, beside the first: only the apply rule keeps the two apart.
    SecondMirror,
    LaneRouter,
}

/// What a test may set before the services start.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Streams that a mirror's peer may open; the default when zero.
    pub streams_max: u32,
    /// The second region's mirror shows peers a certificate of an authority that the first does not know.
    pub foreign_peer: bool,
    /// Seconds of a lane's grace; the default when zero.
    pub lane_grace_seconds: u32,
    /// Mechanisms that are off, for twins.
    pub mechanism_off: String,
    /// The brokers' `storage`; the default when empty.
    pub storage: String,
    /// The brokers' `durability`; the default when empty.
    pub durability: String,
}

/// The processes of two regions.
pub struct Services {
    ports: Ports,
    dir: TempDir,
    options: Options,
    /// The UDP path from the first region's mirror to the second's.
    pub link: Relay,
    running: BTreeMap<(Kind, usize), Child>,
    starts: usize,
    errors_allowed: Vec<String>,
}

impl Services {
    /// Starts broker, mirror and lane-router in both regions.
    pub fn start(options: Options) -> Result<Services> {
        let dir = tempfile::Builder::new().prefix("sealane-e2e").tempdir()?;
        let ports = Ports::take()?;
        make_certificates(&dir.path().join("own"), ports.base)?;
        if options.foreign_peer {
            make_certificates(&dir.path().join("foreign"), ports.base)?;
        }
        let link = Relay::udp(([127, 0, 0, 1], ports.base + 104).into(), 1)?;
        let errors_allowed = Vec::new();
        let running = BTreeMap::new();
        let mut services = Services { ports, dir, options, link, running, starts: 0, errors_allowed };
        for region in 0..REGIONS.len() {
            services.spawn(Kind::Broker, region)?;
        }
        for region in 0..REGIONS.len() {
            services.spawn(Kind::Mirror, region)?;
            services.spawn(Kind::LaneRouter, region)?;
        }
        Ok(services)
    }

    /// Starts one process, on the data that it had; a broker serves when this returns.
    pub fn spawn(&mut self, kind: Kind, region: usize) -> Result<()> {
        ensure!(!self.running.contains_key(&(kind, region)), "{kind:?} {region} runs already");
        self.starts += 1;
        let (command_name, config) = match kind {
            Kind::Broker => ("broker", self.broker_config(region)),
            Kind::Mirror => {
                let address = self.link.address.to_string();
                ("mirror", self.mirror_config(region, 4, &address))
            }
            Kind::SecondMirror => {
                let address = format!("127.0.0.1:{}", self.ports.base + 106);
                ("second-mirror", self.mirror_config(region, 6, &address))
            }
            Kind::LaneRouter => ("lane-router", self.router_config(region)),
        };
        let path = self.dir.path().join(format!("{command_name}-{region}.toml"));
        fs::write(&path, config)?;
        let log =
            File::create(self.dir.path().join(format!("{:03}-{command_name}-{region}.log", self.starts)))?;
        let mut command = Command::new(binary()?);
        command
            .arg(command_name.trim_start_matches("second-"))
            .arg("--config")
            .arg(&path)
            .args(["--log-format", "json"]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).current_dir(self.dir.path());
        command.env("SEALANE_TEST_OFF", &self.options.mechanism_off);
        self.running.insert((kind, region), command.spawn()?);
        let port = match kind {
            Kind::Broker => self.ports.base + 100 * region as u16,
            Kind::LaneRouter => self.ports.base + 100 * region as u16 + 1,
            Kind::Mirror | Kind::SecondMirror => return Ok(()),
        };
        self.wait_until_serves(kind, region, port)
    }

    fn wait_until_serves(&mut self, kind: Kind, region: usize, port: u16) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let open = std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
            if open && (kind != Kind::Broker || probe::serves(([127, 0, 0, 1], port).into())) {
                return Ok(());
            }
            let child = self.running.get_mut(&(kind, region)).context("it was started")?;
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "{kind:?} {region} ended with {ended:?}:\n{}", self.logs());
            ensure!(Instant::now() < end, "{kind:?} {region} does not serve:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// SIGKILL; nothing of it is left when this returns.
    pub fn kill(&mut self, kind: Kind, region: usize) -> Result<()> {
        let mut child = self.running.remove(&(kind, region)).context("it does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// SIGTERM to everything, and every process must end with success.
    pub fn stop(&mut self) -> Result<()> {
        // Brokers last, as an operator would.
        for ((kind, region), child) in std::mem::take(&mut self.running).into_iter().rev() {
            stop(child).with_context(|| format!("{kind:?} {region} does not stop well:\n{}", self.logs()))?;
        }
        self.judge_logs()
    }

    pub fn bootstrap(&self, region: usize) -> String {
        format!("127.0.0.1:{}", self.ports.base + 100 * region as u16)
    }

    /// A series of a region's broker, as `/metrics` shows it.
    pub fn metric(&self, region: usize, series: &str) -> Result<f64> {
        http::metric(self.ports.base + 100 * region as u16 + 3, series)
    }

    pub fn region_dir(&self, region: usize) -> PathBuf {
        self.dir.path().join(REGIONS[region])
    }

    /// An ERROR line that holds `text` is expected.
    pub fn allow_error(&mut self, text: &str) {
        self.errors_allowed.push(text.to_owned());
    }

    /// Runs `sealane ARGUMENTS --server ...` against a region; its standard output.
    pub fn cli(&self, region: usize, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(binary()?);
        command.args(arguments).args(["--server", &self.bootstrap(region)]).stdin(Stdio::null());
        let output = command.output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "sealane {}: {errors}", arguments.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Everything that was logged, by every process that ran.
    pub fn logs(&self) -> String {
        let mut names: Vec<PathBuf> = fs::read_dir(self.dir.path())
            .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
            .unwrap_or_default();
        names.retain(|path| path.extension().is_some_and(|is| is == "log"));
        names.sort();
        names.iter().map(|path| fs::read_to_string(path).unwrap_or_default()).collect()
    }

    fn judge_logs(&self) -> Result<()> {
        let logs = self.logs();
        let unlisted: Vec<&str> = logs
            .lines()
            .filter(|line| is_error(line))
            .filter(|line| !self.errors_allowed.iter().any(|allowed| line.contains(allowed.as_str())))
            .collect();
        ensure!(unlisted.is_empty(), "errors in the logs:\n{}", unlisted.join("\n"));
        Ok(())
    }

    fn broker_config(&self, region: usize) -> String {
        let base = self.ports.base + 100 * region as u16;
        let mut more = match self.options.lane_grace_seconds {
            0 => String::new(),
            seconds => format!("lane_grace_seconds = {seconds}\n"),
        };
        for (key, value) in [("storage", &self.options.storage), ("durability", &self.options.durability)] {
            if !value.is_empty() {
                more.push_str(&format!("{key} = {value:?}\n"));
            }
        }
        format!(
            "data_dir = {:?}\nregion = {:?}\ncontrol_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n\
             lane_port_first = {}\nlane_port_count = 90\nlane_shared_address = \"127.0.0.1:{}\"\n{more}\
             [[listeners]]\nname = \"kafka\"\nbind = \"127.0.0.1:{base}\"\n\
             [[listeners]]\nname = \"internal\"\nbind = \"127.0.0.1:{}\"\nclient_auth = \"required\"\ninternal = true\n\
             [listeners.tls]\n{}",
            self.region_dir(region),
            REGIONS[region],
            base + 2,
            base + 3,
            base + 10,
            base + 1,
            base + 5,
            self.tls("own", "sealane-broker"),
        )
    }

    fn mirror_config(&self, region: usize, port: u16, peer: &str) -> String {
        let base = self.ports.base + 100 * region as u16;
        let streams = match self.options.streams_max {
            0 => String::new(),
            streams => format!("streams_max = {streams}\n"),
        };
        let link_tls = match self.options.foreign_peer && region == 1 {
            true => format!("[link_tls]\n{}", self.tls("foreign", "sealane-mirror")),
            false => String::new(),
        };
        // The first region dials.
        let address = match region {
            0 => format!("address = \"{peer}\"\n"),
            _ => String::new(),
        };
        format!(
            "broker = \"127.0.0.1:{}\"\nbroker_server_name = \"sealane-broker\"\nbind = \"127.0.0.1:{}\"\n{streams}\
             [tls]\n{}{link_tls}[[links]]\npeer = {:?}\n{address}server_name = \"sealane-mirror\"\n",
            base + 5,
            base + port,
            self.tls("own", "sealane-mirror"),
            REGIONS[1 - region],
        )
    }

    fn router_config(&self, region: usize) -> String {
        let base = self.ports.base + 100 * region as u16;
        format!(
            "broker = \"127.0.0.1:{}\"\nbroker_server_name = \"sealane-broker\"\ncontrol = \"127.0.0.1:{}\"\n\
             bind = \"127.0.0.1:{}\"\n[tls]\n{}",
            base + 5,
            base + 2,
            base + 1,
            self.tls("own", "sealane-lane-router"),
        )
    }

    fn tls(&self, authority: &str, name: &str) -> String {
        let dir = self.dir.path().join(authority).join("tls");
        let (pem, ca) = (dir.join(format!("{name}.pem")), dir.join("ca.crt"));
        format!("cert = {pem:?}\nkey = {pem:?}\nca = {ca:?}\n")
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        for child in self.running.values_mut() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            return;
        }
        if let Err(error) = self.judge_logs() {
            panic!("{error:#}");
        }
    }
}

/// SIGTERM to a process that must end with success.
pub(crate) fn stop(mut child: Child) -> Result<()> {
    kill_process(Pid::from_child(&child), Signal::TERM)?;
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            ensure!(status.success(), "it ended with {status}");
            return Ok(());
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("it does not stop on SIGTERM");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Lets a `sealane local` make an authority and the certificates of every role in `dir`.
pub(crate) fn make_certificates(dir: &Path, port_base: u16) -> Result<()> {
    let output = dir.with_extension("output");
    let mut command = Command::new(binary()?);
    command
        .args(["local", "--regions", "certificates", "--port-base", &port_base.to_string(), "--data"])
        .arg(dir);
    command.stdin(Stdio::null()).stdout(File::create(&output)?).stderr(Stdio::null());
    let mut child = command.spawn()?;
    let end = Instant::now() + PATIENCE;
    while !fs::read_to_string(&output)?.lines().any(|line| line == "ready") {
        let waiting = child.try_wait()?.is_none() && Instant::now() < end;
        if !waiting {
            let _ = child.kill();
            anyhow::bail!("sealane local makes no certificates");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    stop(child)
}
