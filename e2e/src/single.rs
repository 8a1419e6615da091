//! One `sealane broker` as a process of its own, with a configuration that the test writes: other listeners,
//! limits, stores. Its first listener is plain; an ERROR in its log that the test has not listed fails the test.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::clients::PATIENCE;
use crate::probe;
use crate::process::{binary, is_error};
use crate::services::stop;
use test_ports::Ports;

/// A broker that runs, or that ran.
pub struct Single {
    ports: Ports,
    dir: TempDir,
    settings: String,
    listeners: String,
    errors_allowed: Vec<String>,
    child: Option<Child>,
    starts: usize,
    /// A program that is put in front of the command line.
    launcher: Vec<String>,
}

impl Single {
    /// Starts a broker with these lines of settings beside what it needs to be reached.
    pub fn start(settings: &str) -> Result<Single> {
        Single::with_listeners(settings, |_| Ok(String::new()))
    }

    /// As [`Single::start`]; `more` gives the TOML of further listeners, for ports from the one it gets upward.
    pub fn with_listeners(settings: &str, more: impl FnOnce(u16) -> Result<String>) -> Result<Single> {
        let mut single = Single::prepare(settings)?;
        single.listeners = more(single.port(10))?;
        single.start_again()?;
        Ok(single)
    }

    /// A broker that was not started yet.
    pub fn prepare(settings: &str) -> Result<Single> {
        let dir = tempfile::Builder::new().prefix("sealane-e2e").tempdir()?;
        Ok(Single {
            ports: Ports::take()?,
            dir,
            settings: settings.to_owned(),
            listeners: String::new(),
            errors_allowed: Vec::new(),
            child: None,
            starts: 0,
            launcher: Vec::new(),
        })
    }

    /// Lets `program` start the broker: its arguments, then the command line.
    pub fn launched_by(mut self, program: &[&str]) -> Single {
        self.launcher = program.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// An ERROR line that holds `text` is expected.
    pub fn allow_error(&mut self, text: &str) {
        self.errors_allowed.push(text.to_owned());
    }

    /// Other settings from the next start on.
    pub fn set(&mut self, settings: &str) {
        self.settings = settings.to_owned();
    }

    /// Starts it on the data that it had; it serves when this returns.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "it runs already");
        self.starts += 1;
        let path = self.dir.path().join("broker.toml");
        fs::write(&path, self.config())?;
        let mut words: Vec<std::ffi::OsString> = self.launcher.iter().map(Into::into).collect();
        words.extend([binary()?.into_os_string(), "broker".into(), "--config".into(), path.into_os_string()]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["--log-format", "json"]);
        let log = File::create(self.log_path())?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).current_dir(self.dir.path());
        self.child = Some(command.spawn().context("start sealane")?);
        let end = Instant::now() + PATIENCE;
        while !probe::serves(([127, 0, 0, 1], self.port(0)).into()) {
            let child = self.child.as_mut().context("it was started")?;
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "the broker ended with {ended:?}:\n{}", self.log());
            ensure!(Instant::now() < end, "the broker does not serve:\n{}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(())
    }

    fn config(&self) -> String {
        format!(
            "data_dir = {:?}\nregion = \"east\"\ncontrol_bind = \"127.0.0.1:{}\"\nhttp_bind = \"127.0.0.1:{}\"\n{}\n\
             [[listeners]]\nname = \"kafka\"\nbind = \"127.0.0.1:{}\"\n{}",
            self.data_dir(),
            self.port(2),
            self.http_port(),
            self.settings,
            self.port(0),
            self.listeners,
        )
    }

    pub fn bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.port(0))
    }

    pub fn http_port(&self) -> u16 {
        self.port(3)
    }

    fn port(&self, distance: u16) -> u16 {
        self.ports.base + distance
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// A folder for whatever the test needs.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// SIGKILL; nothing of it is left when this returns.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("it does not run")?;
        child.kill()?;
        child.wait()?;
        self.judge_log()
    }

    /// SIGTERM, and it must end with success.
    pub fn stop(&mut self) -> Result<()> {
        let child = self.child.take().context("it does not run")?;
        stop(child).with_context(|| format!("the broker does not stop well:\n{}", self.log()))?;
        self.judge_log()
    }

    /// What the latest start logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join(format!("log-{}", self.starts))
    }

    fn judge_log(&self) -> Result<()> {
        let log = self.log();
        let unlisted: Vec<&str> = log
            .lines()
            .filter(|line| is_error(line))
            .filter(|line| !self.errors_allowed.iter().any(|allowed| line.contains(allowed.as_str())))
            .collect();
        ensure!(unlisted.is_empty(), "errors in the log:\n{}", unlisted.join("\n"));
        Ok(())
    }
}

impl Drop for Single {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            return;
        }
        if let Err(error) = self.judge_log() {
            panic!("{error:#}");
        }
    }
}
