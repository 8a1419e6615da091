//! A real etcd of one member or three. Short elections, so that the death of a member is soon over.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::{Daemon, TlsFiles, go_program, http};
use test_ports::Ports;

pub struct Etcd {
    members: Vec<Daemon>,
    ports: Ports,
    scheme: &'static str,
    _dir: TempDir,
}

impl Etcd {
    /// Starts so many members on free ports and waits until all of them serve.
    pub fn start(members: u16) -> Result<Etcd> {
        Etcd::start_with(members, None)
    }

    /// One member that speaks TLS, and only with clients that show a certificate of the same authority.
    pub fn start_tls(files: &TlsFiles) -> Result<Etcd> {
        Etcd::start_with(1, Some(files))
    }

    fn start_with(members: u16, tls: Option<&TlsFiles>) -> Result<Etcd> {
        let program = go_program("etcd", "go.etcd.io/etcd/server/v3")?;
        let dir = tempfile::Builder::new().prefix("sealane-etcd").tempdir()?;
        let ports = Ports::take()?;
        let name = |member: u16| format!("m{member}");
        let peer = |member: u16| format!("http://127.0.0.1:{}", ports.base + 2 * member + 1);
        let cluster: Vec<String> =
            (0..members).map(|member| format!("{}={}", name(member), peer(member))).collect();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let daemon = |member: u16| {
            let client = format!("{scheme}://127.0.0.1:{}", ports.base + 2 * member);
            let data: PathBuf = dir.path().join(name(member));
            let settings = [
                ("--name", name(member)),
                ("--data-dir", data.display().to_string()),
                ("--listen-client-urls", client.clone()),
                ("--advertise-client-urls", client),
                ("--listen-peer-urls", peer(member)),
                ("--initial-advertise-peer-urls", peer(member)),
                ("--initial-cluster", cluster.join(",")),
                ("--initial-cluster-state", "new".to_owned()),
                ("--log-level", "warn".to_owned()),
                ("--heartbeat-interval", "50".to_owned()),
                ("--election-timeout", "500".to_owned()),
            ];
            let mut arguments: Vec<String> =
                settings.into_iter().flat_map(|(key, value)| [key.to_owned(), value]).collect();
            if let Some(TlsFiles { cert, key, ca }) = tls {
                let metrics = format!("http://127.0.0.1:{}", ports.base + HEALTH_DISTANCE);
                let file = |path: &Path| path.display().to_string();
                let settings = [
                    ("--cert-file", file(cert)),
                    ("--key-file", file(key)),
                    ("--trusted-ca-file", file(ca.as_deref().unwrap_or(cert))),
                    ("--listen-metrics-urls", metrics),
                ];
                arguments.extend(settings.into_iter().flat_map(|(key, value)| [key.to_owned(), value]));
                arguments.push("--client-cert-auth".to_owned());
            }
            Daemon::new(&program, arguments, dir.path().join(format!("{}.log", name(member))))
        };
        let members = (0..members).map(daemon).collect();
        let mut etcd = Etcd { members, ports, scheme, _dir: dir };
        etcd.members.iter_mut().try_for_each(Daemon::start)?;
        (0..etcd.members.len()).try_for_each(|member| etcd.wait(member))?;
        Ok(etcd)
    }

    /// The client addresses of all members.
    pub fn endpoints(&self) -> Vec<String> {
        (0..self.members.len())
            .map(|member| format!("{}://127.0.0.1:{}", self.scheme, self.port(member)))
            .collect()
    }

    pub fn member(&mut self, member: usize) -> &mut Daemon {
        &mut self.members[member]
    }

    /// Starts a member that was killed and waits until it serves.
    pub fn start_again(&mut self, member: usize) -> Result<()> {
        self.members[member].start()?;
        self.wait(member)
    }

    /// SIGKILL of members, then nothing.
    pub fn kill(&mut self, members: &[usize]) -> Result<()> {
        members.iter().try_for_each(|member| self.members[*member].kill())
    }

    /// Starts members that were killed, together, and waits until they serve: alone one of them may not.
    pub fn start_all_again(&mut self, members: &[usize]) -> Result<()> {
        members.iter().try_for_each(|member| self.members[*member].start())?;
        members.iter().try_for_each(|member| self.wait(*member))
    }

    /// Throws away the history up to now: watches that are behind are told so.
    pub fn compact(&self) -> Result<()> {
        let status = self.post("/v3/kv/range", r#"{"key":"AA=="}"#)?;
        let revision = status["header"]["revision"].as_str().context("etcd names its revision")?.to_owned();
        let request = format!(r#"{{"revision":"{revision}","physical":true}}"#);
        self.post("/v3/kv/compaction", &request).map(drop)
    }

    /// A request to etcd's JSON gateway, at the first member that answers.
    pub fn post(&self, path: &str, request: &str) -> Result<serde_json::Value> {
        let answers =
            (0..self.members.len()).filter_map(|member| http(self.port(member), "POST", path, request));
        let answer = answers.into_iter().next().context("no member of etcd answers")?;
        serde_json::from_str(&answer).with_context(|| format!("etcd answered {answer}"))
    }

    fn wait(&mut self, member: usize) -> Result<()> {
        let port = match self.scheme {
            "https" => self.ports.base + HEALTH_DISTANCE,
            _ => self.port(member),
        };
        let serves =
            || http(port, "GET", "/health", "").is_some_and(|answer| answer.contains(r#""health":"true""#));
        self.members[member].wait(serves)
    }

    fn port(&self, member: usize) -> u16 {
        self.ports.base + 2 * member as u16
    }
}

/// Where a member that speaks TLS says in plain text how it is, from the first port.
const HEALTH_DISTANCE: u16 = 20;
