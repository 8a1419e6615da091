//! An S3 server: gofakes3 with its objects in files. Its conditional writes are right; its listings ignore
//! `start-after`.

use anyhow::Result;
use tempfile::TempDir;

use super::{Daemon, go_program, http};
use crate::ports::Ports;

pub struct S3 {
    daemon: Daemon,
    ports: Ports,
    dir: TempDir,
}

impl S3 {
    /// Any credentials are accepted.
    pub const BUCKET: &str = "sealane";

    pub fn start() -> Result<S3> {
        let program = go_program("s3", "github.com/johannesboyne/gofakes3/cmd/gofakes3")?;
        let dir = tempfile::Builder::new().prefix("sealane-s3").tempdir()?;
        let ports = Ports::take()?;
        let data = dir.path().join("data");
        let host = format!("127.0.0.1:{}", ports.base);
        let data = data.display().to_string();
        let arguments = ["-host", &host, "-backend", "fs", "-fs.path", &data, "-fs.create", "-initialbucket"];
        let mut arguments: Vec<String> = arguments.map(str::to_owned).to_vec();
        arguments.push(S3::BUCKET.to_owned());
        let daemon = Daemon::new(&program, arguments, dir.path().join("log"));
        let mut s3 = S3 { daemon, ports, dir };
        s3.start_again()?;
        Ok(s3)
    }

    /// Starts it on the data and the port it had.
    pub fn start_again(&mut self) -> Result<()> {
        self.daemon.start()?;
        let port = self.ports.base;
        self.daemon.wait(|| http(port, "GET", "/", "").is_some())
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.base)
    }

    pub fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// Where it keeps what it was given.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }
}
