//! The stores that a cluster stands on, as real processes on loopback: etcd, an S3 server, HDFS.
//!
//! Owns how a store's process is started, hurt and ended, and how it is told that it serves. What is missing
//! on the machine is installed into the tool cache first. Data lives in a temporary folder and goes with the
//! value; a process is ended on drop.

pub mod etcd;
pub mod front;
pub mod hdfs;
pub mod s3;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
pub use chassis::certs::CertificateDir;
pub use chassis::tls::TlsFiles;

use crate::process::{go_on, hang};
use crate::tools;

/// Machines that are busy with something else take long.
const START_LIMIT: Duration = Duration::from_secs(180);

/// One process of a store, which can be started again on the data it had.
pub struct Daemon {
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    child: Option<Child>,
}

impl Daemon {
    fn new(program: &Path, arguments: Vec<String>, log: PathBuf) -> Daemon {
        Daemon { program: program.to_owned(), arguments, log, child: None }
    }

    pub fn start(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "{} runs already", self.program.display());
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("start {}", self.program.display()))?;
        self.child = Some(child);
        Ok(())
    }

    /// SIGKILL; nothing of it is left when this returns.
    pub fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("it does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// It hangs, and its connections stay open.
    pub fn pause(&self) -> Result<()> {
        hang(self.child.as_ref().context("it does not run")?)
    }

    pub fn resume(&self) -> Result<()> {
        go_on(self.child.as_ref().context("it does not run")?)
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// What it printed since its first start.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until `serves` says so; an end of the process or too long a wait shows its log.
    fn wait(&mut self, mut serves: impl FnMut() -> bool) -> Result<()> {
        let begin = Instant::now();
        while !serves() {
            let child = self.child.as_mut().context("it does not run")?;
            if let Some(status) = child.try_wait()? {
                bail!("{} ended with {status}:\n{}", self.program.display(), self.log_end());
            }
            let name = self.program.display();
            ensure!(begin.elapsed() < START_LIMIT, "{name} does not serve:\n{}", self.log_end());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn log_end(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// `e2e/stores` of this checkout: the manifests of the stores.
fn files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("stores")
}

/// A program from a Go module that is pinned in `e2e/stores/<name>`.
fn go_program(name: &str, package: &str) -> Result<PathBuf> {
    let source = files().join(name);
    let manifests = [source.join("go.mod"), source.join("go.sum")];
    let manifests: Vec<&Path> = manifests.iter().map(PathBuf::as_path).collect();
    let home = tools::installed(&format!("store-{name}"), &manifests, |home| {
        tools::program("go", "golang-go")?;
        let mut build = Command::new("go");
        build.current_dir(&source).env("CGO_ENABLED", "0");
        build.args(["build", "-mod=readonly", "-trimpath", "-p", "2", "-ldflags", "-s -w", "-o"]);
        tools::run(build.arg(home.join(name)).arg(package))
    })?;
    Ok(home.join(name))
}

/// The body of an answer to an HTTP request to a port of this machine, or none if there is no answer.
fn http(port: u16, method: &str, path: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}
