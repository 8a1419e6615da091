//! An S3 server: gofakes3 with its objects in files, or SeaweedFS where `SEALANE_S3=seaweed` says so.
//!
//! Both keep create-if-absent. gofakes3 is built in seconds and starts at once, and its listings ignore
//! `start-after`; SeaweedFS takes minutes to build, and half a minute to come back after a kill.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::{Daemon, files, go_program, http};
use crate::tools;
use test_ports::Ports;

pub struct S3 {
    daemon: Daemon,
    ports: Ports,
    dir: TempDir,
}

impl S3 {
    pub const BUCKET: &str = "sealane";
    pub const ACCESS_KEY_ID: &str = "test";
    pub const SECRET_ACCESS_KEY: &str = "testtest";

    pub fn start() -> Result<S3> {
        let dir = tempfile::Builder::new().prefix("sealane-s3").tempdir()?;
        let ports = Ports::take()?;
        let log = dir.path().join("log");
        let data = dir.path().join("data");
        std::fs::create_dir(&data)?;
        let data = data.display().to_string();
        let daemon = match is_seaweed() {
            true => {
                let users = dir.path().join("users.json");
                std::fs::write(&users, USERS)?;
                Daemon::new(
                    &seaweed()?,
                    seaweed_arguments(ports.base, &data, &users.display().to_string()),
                    log,
                )
            }
            false => {
                let program = go_program("s3", "github.com/johannesboyne/gofakes3/cmd/gofakes3")?;
                let host = format!("127.0.0.1:{}", ports.base);
                let arguments = [
                    "-host",
                    &host,
                    "-backend",
                    "fs",
                    "-fs.path",
                    &data,
                    "-fs.create",
                    "-initialbucket",
                    S3::BUCKET,
                ];
                Daemon::new(&program, arguments.map(str::to_owned).to_vec(), log)
            }
        };
        let mut s3 = S3 { daemon, ports, dir };
        s3.start_again()?;
        Ok(s3)
    }

    /// Starts it on the data and the port it had.
    pub fn start_again(&mut self) -> Result<()> {
        self.daemon.start()?;
        let port = self.ports.base;
        match is_seaweed() {
            // A bucket is a folder of its filer.
            true => self.daemon.wait(|| {
                http(port, "GET", "/healthz", "").is_some()
                    && http(port + 3, "POST", &format!("/buckets/{}/", S3::BUCKET), "").is_some()
            }),
            false => self.daemon.wait(|| http(port, "GET", "/", "").is_some()),
        }
    }

    /// One more bucket.
    pub fn make_bucket(&self, name: &str) -> Result<()> {
        let made = match is_seaweed() {
            true => http(self.ports.base + 3, "POST", &format!("/buckets/{name}/"), ""),
            false => http(self.ports.base, "PUT", &format!("/{name}"), ""),
        };
        made.map(drop).with_context(|| format!("make the bucket {name}"))
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.ports.base)
    }

    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.ports.base).into()
    }

    pub fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    /// Where it keeps what it was given.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }
}

fn is_seaweed() -> bool {
    std::env::var_os("SEALANE_S3").is_some_and(|name| name == "seaweed")
}

const USERS: &str = r#"{"identities":[{"name":"t","credentials":[{"accessKey":"test","secretKey":"testtest"}],
    "actions":["Admin","Read","Write","List","Tagging"]}]}"#;

/// Every port is named: those that are not are derived, opened on every address, or both.
fn seaweed_arguments(port: u16, data: &str, users: &str) -> Vec<String> {
    let ports = [
        ("-s3.port", 0),
        ("-master.port", 1),
        ("-volume.port", 2),
        ("-filer.port", 3),
        ("-s3.port.grpc", 10),
        ("-master.port.grpc", 11),
        ("-volume.port.grpc", 12),
        ("-filer.port.grpc", 13),
    ];
    let mut arguments: Vec<String> = ["-logtostderr=true", "-v=0", "server"].map(str::to_owned).to_vec();
    arguments.extend(ports.map(|(name, distance)| format!("{name}={}", port + distance)));
    arguments.extend(
        [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.heartbeatInterval=100ms",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=100",
            "-volume.fileSizeLimitMB=256",
            "-filer",
            "-s3",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        .map(str::to_owned),
    );
    arguments.extend([format!("-dir={data}"), format!("-s3.config={users}")]);
    arguments
}

/// Built from its module as it is; the first call on a machine takes minutes.
fn seaweed() -> Result<PathBuf> {
    let manifest = files().join("seaweed/module");
    let home = tools::installed("store-seaweed", &[&manifest], |home| {
        tools::program("go", "golang-go")?;
        let module = std::fs::read_to_string(&manifest)?;
        let (package, _) = module.trim().split_once('@').context("a module and its version")?;
        let go = |arguments: &[&str]| {
            let mut command = Command::new("go");
            tools::run(command.current_dir(home).env("CGO_ENABLED", "0").args(arguments))
        };
        go(&["mod", "init", "sealane/e2e/seaweed"])?;
        go(&["get", module.trim()])?;
        go(&["build", "-p", "2", "-ldflags", "-s -w", "-o", "weed", package])
    })?;
    Ok(home.join("weed"))
}
