//! The built `sealane` as child processes: start, wait for `ready`, kill, stop, and read what they logged.
//!
//! A process belongs to one test: its data is a temporary folder, its ports a block of its own (`ports.rs`). An
//! ERROR in its log that the test has not listed fails the test when the process is dropped. Nothing here asserts
//! a duration; waits have generous deadlines.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::clients::PATIENCE;
use test_ports::Ports;

const REGIONS: [&str; 2] = ["east", "west"];

/// How a `sealane local` is started.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    regions: Vec<String>,
    ephemeral: bool,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    errors_allowed: Vec<String>,
    /// Size of a tmpfs that holds the data; the ordinary disk when empty.
    disk: String,
}

/// A `sealane local`: all regions in one process.
pub struct Local {
    plan: Plan,
    ports: Ports,
    dir: TempDir,
    child: Option<Child>,
    starts: usize,
}

impl Plan {
    /// One region: what a single broker is tested with.
    pub fn one() -> Plan {
        Plan { regions: vec![REGIONS[0].to_owned()], ..Plan::default() }
    }

    /// Two regions with a mirror between them.
    pub fn two() -> Plan {
        Plan { regions: REGIONS.map(str::to_owned).to_vec(), ..Plan::default() }
    }

    pub fn ephemeral(mut self) -> Plan {
        self.ephemeral = true;
        self
    }

    pub fn argument(mut self, argument: &str) -> Plan {
        self.arguments.push(argument.to_owned());
        self
    }

    pub fn environment(mut self, name: &str, value: &str) -> Plan {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// An ERROR line that holds `text` is expected.
    pub fn allow_error(mut self, text: &str) -> Plan {
        self.errors_allowed.push(text.to_owned());
        self
    }

    /// Its data lies on a tmpfs of this size, in a mount namespace of its own.
    pub fn small_disk(mut self, size: &str) -> Plan {
        self.disk = size.to_owned();
        self
    }

    /// Starts it in a new folder and waits for `ready`.
    pub fn start(self) -> Result<Local> {
        let dir = tempfile::Builder::new().prefix("sealane-e2e").tempdir()?;
        let mut local = Local { plan: self, ports: Ports::take()?, dir, child: None, starts: 0 };
        local.start_again()?;
        Ok(local)
    }
}

impl Local {
    /// Starts it on the data and the ports it had, and waits for `ready`.
    pub fn start_again(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "it runs already");
        self.starts += 1;
        let mut command = self.command()?;
        command.stdin(Stdio::null()).stdout(File::create(self.output_path())?);
        command.stderr(File::create(self.log_path())?);
        self.child = Some(command.spawn().context("start sealane")?);
        self.wait_ready()
    }

    fn command(&self) -> Result<Command> {
        let mut command = if self.plan.disk.is_empty() {
            Command::new(binary()?)
        } else {
            let mut command = namespace()?;
            let script = "mount -t tmpfs -o size=$1 none $2 && shift 2 && exec \"$@\"";
            command.args(["sh", "-c", script, "sh", &self.plan.disk]).arg(self.data_dir()).arg(binary()?);
            std::fs::create_dir_all(self.data_dir())?;
            command
        };
        command.arg("local").args(["--regions", &self.plan.regions.join(",")]);
        command.args(["--port-base", &self.ports.base.to_string(), "--log-format", "json"]);
        if self.plan.ephemeral {
            command.arg("--ephemeral");
        } else {
            command.arg("--data").arg(self.data_dir());
        }
        command.args(&self.plan.arguments);
        command.envs(self.plan.environment.iter().map(|(name, value)| (name, value)));
        // Where a working directory matters (core files, stray output), it is the test's own.
        command.current_dir(self.dir.path());
        Ok(command)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let output = fs::read_to_string(self.output_path())?;
            if output.lines().any(|line| line.trim() == "ready") {
                return Ok(());
            }
            let child = self.child.as_mut().context("it was started")?;
            if let Some(status) = child.try_wait()? {
                self.child = None;
                bail!("sealane local ended with {status} before `ready`:\n{output}{}", self.log());
            }
            ensure!(Instant::now() < end, "sealane local is not ready:\n{output}{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The Kafka address of region number `region`.
    pub fn bootstrap(&self, region: usize) -> String {
        format!("127.0.0.1:{}", self.port(region, 0))
    }

    /// A port of a region by its distance from the broker's: +1 router, +2 control, +3 HTTP, +4 mirror.
    pub fn port(&self, region: usize, distance: u16) -> u16 {
        self.ports.base + 100 * region as u16 + distance
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// The part of the data that belongs to one region.
    pub fn region_dir(&self, region: usize) -> PathBuf {
        self.data_dir().join(&self.plan.regions[region])
    }

    /// The data as seen from outside of the process's mount namespace.
    pub fn disk_path(&self) -> Result<PathBuf> {
        let pid = self.pid().context("it does not run")?;
        let inside = self.data_dir();
        Ok(Path::new("/proc").join(pid.to_string()).join("root").join(inside.strip_prefix("/")?))
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// SIGKILL, and nothing of it is left when this returns.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("it does not run")?;
        child.kill()?;
        child.wait()?;
        self.judge_log()
    }

    /// SIGTERM; waits for the end.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let mut child = self.child.take().context("it does not run")?;
        kill_process(Pid::from_child(&child), Signal::TERM)?;
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait()? {
                self.judge_log()?;
                return Ok(status);
            }
            if Instant::now() > end {
                child.kill()?;
                child.wait()?;
                bail!("sealane local does not stop on SIGTERM:\n{}", self.log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the latest start wrote to standard output.
    pub fn output(&self) -> String {
        fs::read_to_string(self.output_path()).unwrap_or_default()
    }

    /// What the latest start logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Fails on an ERROR line (or a panic) that the plan does not list.
    pub fn judge_log(&self) -> Result<()> {
        let log = self.log();
        let unlisted: Vec<&str> = log
            .lines()
            .filter(|line| is_error(line))
            .filter(|line| !self.plan.errors_allowed.iter().any(|allowed| line.contains(allowed.as_str())))
            .collect();
        ensure!(unlisted.is_empty(), "errors in the log:\n{}", unlisted.join("\n"));
        Ok(())
    }

    /// Allows an ERROR from now on.
    pub fn allow_error(&mut self, text: &str) {
        self.plan.errors_allowed.push(text.to_owned());
    }

    /// Sets an environment variable for the next start.
    pub fn set_environment(&mut self, name: &str, value: &str) {
        self.plan.environment.retain(|(known, _)| known != name);
        self.plan.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Runs `sealane ARGUMENTS --server ...` against a region, to its end.
    pub fn cli(&self, region: usize, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(binary()?);
        command.args(arguments).args(["--server", &self.bootstrap(region)]);
        command.stdin(Stdio::null()).output().context("run sealane")
    }

    /// As [`Local::cli`], and fails unless it succeeds; its standard output.
    pub fn cli_ok(&self, region: usize, arguments: &[&str]) -> Result<String> {
        let output = self.cli(region, arguments)?;
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "sealane {} ended with {}:\n{printed}{}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(printed)
    }

    fn output_path(&self) -> PathBuf {
        self.dir.path().join(format!("output-{}", self.starts))
    }

    fn log_path(&self) -> PathBuf {
        self.dir.path().join(format!("log-{}", self.starts))
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            let tail: Vec<String> =
                BufReader::new(self.log().as_bytes()).lines().map_while(Result::ok).collect();
            let from = tail.len().saturating_sub(40);
            eprintln!("--- the end of sealane's log ---\n{}", tail[from..].join("\n"));
        } else if let Err(error) = self.judge_log() {
            panic!("{error:#}");
        }
    }
}

/// A command prefix that gives what follows a mount namespace of its own.
pub fn namespace() -> Result<Command> {
    let mut command = Command::new(crate::tools::program("unshare", "util-linux")?);
    let root = rustix::process::geteuid().is_root();
    command.arg(if root { "-m" } else { "-rm" });
    Ok(command)
}

/// SIGSTOP: a process hangs, its connections stay open, and its own clock seems to stand still. All of its threads have
/// stopped when this returns; after the signal alone they go on for as long as it takes them to notice.
pub fn hang(child: &Child) -> Result<()> {
    kill_process(Pid::from_child(child), Signal::STOP)?;
    let end = Instant::now() + PATIENCE;
    while !crate::usage::has_stopped(child.id())? {
        ensure!(Instant::now() < end, "process {} does not stop", child.id());
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// SIGCONT: it goes on after [`hang`].
pub fn go_on(child: &Child) -> Result<()> {
    Ok(kill_process(Pid::from_child(child), Signal::CONT)?)
}

/// True for a line of level ERROR in either format, and for a panic.
pub(crate) fn is_error(line: &str) -> bool {
    line.contains("\"level\":\"ERROR\"") || line.contains(" ERROR ") || line.contains("panicked at")
}

/// The `sealane` binary of this build: built once by cargo, in the profile that the tests run in.
pub fn binary() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    BUILT.get_or_init(|| build().map_err(|error| format!("{error:#}"))).clone().map_err(anyhow::Error::msg)
}

fn build() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("SEALANE_BIN") {
        return Ok(PathBuf::from(given));
    }
    // target/<profile>/deps/<test>-<hash>
    let test = std::env::current_exe()?;
    let profile = test.parent().and_then(Path::parent).context("a test lies in target/<profile>/deps")?;
    let binary = profile.join("sealane");
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let needed: &[&str] = match (cfg!(feature = "cluster"), cfg!(feature = "kubernetes")) {
        (_, true) => &["cluster", "operator"],
        (true, false) => &["cluster"],
        (false, false) => &[],
    };
    // `cargo test --workspace` has just built it; to ask cargo again would wait for its lock, and compile what a build
    // without tests has other features of.
    if newer_than_sources(&binary, &workspace)? && has_features(&binary, needed)? {
        return Ok(binary);
    }
    // Not $CARGO: where one cargo was started by another, it names the outer one, of another toolchain.
    let mut command = Command::new("cargo");
    // The whole workspace decides on the features of what is shared: otherwise everything is compiled again.
    command.args(["build", "--quiet", "--workspace", "--bin", "sealane"]);
    if !needed.is_empty() {
        command.args(["--features", &needed.join(",")]);
    }
    if profile.ends_with("release") {
        command.arg("--release");
    }
    let output = command.current_dir(&workspace).output().context("run cargo")?;
    ensure!(output.status.success(), "cargo build:\n{}", String::from_utf8_lossy(&output.stderr));
    ensure!(binary.is_file(), "no {} after cargo build", binary.display());
    Ok(binary)
}

/// Whether it says that it was built with these.
fn has_features(binary: &Path, needed: &[&str]) -> Result<bool> {
    let output = Command::new(binary).arg("--version").output().context("ask a binary for its version")?;
    let version = String::from_utf8_lossy(&output.stdout);
    let built: Vec<&str> = version.split(['(', ',', ')']).map(str::trim).collect();
    Ok(needed.iter().all(|feature| built.contains(feature)))
}

/// True when nothing that the binary is made of has changed since it was made.
fn newer_than_sources(binary: &Path, workspace: &Path) -> Result<bool> {
    const NOT_PART_OF_IT: [&str; 7] = ["target", ".git", "e2e", "tests", "docs", "fuzz", "node_modules"];
    let Ok(built) = binary.metadata().and_then(|file| file.modified()) else { return Ok(false) };
    let mut folders = vec![workspace.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                if !NOT_PART_OF_IT.contains(&name.as_str()) {
                    folders.push(entry.path());
                }
                continue;
            }
            let is_source = [".rs", ".toml", ".lock", ".proto"].iter().any(|end| name.ends_with(end));
            if is_source && entry.metadata()?.modified()? > built {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
