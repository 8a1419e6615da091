//! The operator as a process of this machine, with the rights that `manifests/install` gives it and no others; and a broker
//! as a process, which it is pointed at by an EndpointSlice, so that no node is needed.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use test_ports::Ports;

use super::{Kubectl, PATIENCE, Region, wait_for};
use crate::http;
use crate::process::{binary, is_error};

/// The machine, as the API server takes an address for an endpoint: no loopback.
pub const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 254);

/// An operator, killed at the end. An ERROR in its log that was not allowed fails the test then.
pub struct Operator {
    child: Child,
    ports: Ports,
    log: PathBuf,
    allowed: Mutex<Vec<String>>,
}

impl Operator {
    /// Looks after `namespaces`, which are named with commas between.
    pub fn start(region: &Region, namespaces: &str) -> Result<Operator> {
        let ports = Ports::take()?;
        let kubeconfig = region.kubeconfig_of("sealane-system", "sealane-operator")?;
        let config = kubeconfig.with_file_name(format!("operator-{}.toml", ports.base));
        let join = format!("127.0.0.1:{}", ports.base + 1);
        let text = format!(
            "http_bind = \"127.0.0.1:{}\"\njoin_bind = {join:?}\njoin_advertised = {join:?}\nlease_seconds = 4\n",
            ports.base
        );
        fs::write(&config, text)?;
        let log = config.with_extension("log");
        let output = fs::File::create(&log)?;
        let mut command = Command::new(binary()?);
        command.args(["operator", "--config"]).arg(config).env("KUBECONFIG", kubeconfig);
        command.env("SEALANE_NAMESPACES", namespaces).env("SEALANE_IMAGE", "localhost/sealane:0.1.0");
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().context("run the operator")?;
        Ok(Operator { child, ports, log, allowed: Mutex::default() })
    }

    /// An ERROR with this text is expected.
    pub fn allow_error(&self, text: &str) {
        self.allowed.lock().expect("no test panics under this lock").push(text.to_owned());
    }

    /// Fails on an ERROR in its log that was not allowed.
    pub fn judge_log(&self) -> Result<()> {
        let allowed = self.allowed.lock().expect("no test panics under this lock");
        let log = fs::read_to_string(&self.log)?;
        let errors: Vec<&str> = log
            .lines()
            .filter(|line| is_error(line) && !allowed.iter().any(|text| line.contains(text.as_str())))
            .collect();
        ensure!(errors.is_empty(), "errors in the operator's log:\n{}", errors.join("\n"));
        ensure!(log.contains("operator ready"), "this is no log of an operator:\n{log}");
        Ok(())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Of its metrics and probes.
    pub fn port(&self) -> u16 {
        self.ports.base
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- operator ---\n{}", fs::read_to_string(&self.log).unwrap_or_default());
            return;
        }
        if let Err(error) = self.judge_log() {
            panic!("{error:#}");
        }
    }
}

/// Watches that the operator with this address of metrics has not heard since then.
pub fn silent_since(operator: SocketAddr, then: Instant) -> Result<Vec<String>> {
    let (_, metrics) = http::page_at(operator, "/metrics")?;
    let ages = metrics.lines().filter(|line| line.starts_with("sealane_operator_watch_age_seconds{"));
    let mut silent = Vec::new();
    let mut count = 0;
    for line in ages {
        let (watch, age) = line.rsplit_once(' ').context("a value")?;
        count += 1;
        if age.parse::<f64>()? > then.elapsed().as_secs_f64() {
            silent.push(watch.to_owned());
        }
    }
    ensure!(count > 10, "these cannot be all watches: {count}");
    Ok(silent)
}

/// A broker with the certificates that the operator made for a cluster, in the place of its pod.
pub struct Stand {
    child: Child,
    dir: tempfile::TempDir,
    ports: Ports,
}

impl Stand {
    /// For a cluster and its only broker, both of this name.
    pub fn start(kubectl: &Kubectl, namespace: &str, cluster: &str) -> Result<Stand> {
        let (ports, dir) = (Ports::take()?, tempfile::Builder::new().prefix("sealane-stand").tempdir()?);
        let secret = format!("{cluster}-broker-tls");
        let files = ["tls.crt", "tls.key", "ca.crt"];
        for file in files {
            let text =
                wait_for("the broker's certificate", || kubectl.secret(namespace, &secret, file).map(Some))?;
            fs::write(dir.path().join(file), text)?;
        }
        let [cert, key, ca] = files.map(|file| dir.path().join(file));
        let tls = format!("cert = {cert:?}\nkey = {key:?}\nca = {ca:?}\n");
        let (control, internal) = (ports.base, ports.base + 1);
        let config = dir.path().join("broker.toml");
        fs::write(
            &config,
            format!(
                "data_dir = {:?}\nregion = \"{cluster}\"\ncontrol_bind = \"{MACHINE}:{control}\"\nhttp_bind = \"\"\n\
                 [control_tls]\n{tls}[[listeners]]\nname = \"internal\"\nbind = \"{MACHINE}:{internal}\"\n\
                 client_auth = \"required\"\ninternal = true\n[listeners.tls]\n{tls}\
                 [[listeners]]\nname = \"plain\"\nbind = \"127.0.0.1:{}\"\n",
                dir.path().join("data"),
                ports.base + 2,
            ),
        )?;
        let mut command = Command::new(binary()?);
        let log = fs::File::create(dir.path().join("log"))?;
        command
            .args(["broker", "--config"])
            .arg(config)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut stand = Stand { child: command.spawn()?, dir, ports };
        let begin = Instant::now();
        while std::net::TcpStream::connect((MACHINE, internal)).is_err() {
            if let Some(status) = stand.child.try_wait()? {
                bail!(
                    "the broker ended with {status}: {}",
                    fs::read_to_string(stand.dir.path().join("log"))?
                );
            }
            ensure!(begin.elapsed() < PATIENCE, "the broker does not serve");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        kubectl.apply(&format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: {cluster}-stand\n  namespace: {namespace}\n  \
             labels: {{kubernetes.io/service-name: {cluster}-brokers, endpointslice.kubernetes.io/managed-by: test}}\n\
             addressType: IPv4\nports:\n- {{name: control, port: {control}}}\n- {{name: internal, port: {internal}}}\n\
             endpoints:\n- addresses: [\"{MACHINE}\"]\n  conditions: {{ready: true, serving: true}}\n  \
             targetRef: {{kind: Pod, name: {cluster}-0}}\n"
        ))?;
        Ok(stand)
    }
}

impl Stand {
    /// For clients of this machine.
    pub fn bootstrap(&self) -> String {
        format!("127.0.0.1:{}", self.ports.base + 2)
    }
}

impl Drop for Stand {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
