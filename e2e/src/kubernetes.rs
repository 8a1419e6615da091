//! A real Kubernetes for a test: regions (clusters) that it starts, asks, hurts and takes down again.
//!
//! The scripts are in `e2e/kubernetes`; this file owns the life of a region and its faults, `kubernetes/kubectl.rs` what
//! a test asks it. A region is taken down when its value is dropped, and also when the test process dies. A machine that
//! cannot run it fails the test with the sentence of the script: nothing is skipped. Waits have generous deadlines.

mod control;
mod document;
mod install;
mod kubectl;
mod laned;
mod load;
mod many;
mod numbers;
mod operator;
mod stores;
mod story;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

pub use document::{DOCUMENT, blocks, follow};
pub use install::{alone, former, place};
pub use kubectl::{Kubectl, condition};
pub use laned::{grouped, lane, lane_router};
pub use load::Load;
pub use many::{Many, fewest_ready, ids, lives};
pub use operator::{Operator, Stand, silent_since};
pub use stores::Stores;
pub use story::Story;

use crate::tools;
use numbers::Number;

/// How long anything may take on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// One Kubernetes cluster, which is a region.
pub struct Region {
    number: Number,
    dir: PathBuf,
    kubectl: Kubectl,
    /// Takes the region down at the end of its standard input, which comes with our end at the latest.
    reaper: Option<Child>,
    logs_allowed: Mutex<Vec<String>>,
}

impl Region {
    /// The control plane alone: pods stay Pending. Enough for custom resources, RBAC and reconciling.
    pub fn control_plane() -> Result<Region> {
        Region::start(false, &[])
    }

    /// With one real node.
    pub fn with_node() -> Result<Region> {
        Region::start(true, &[])
    }

    /// As [`Region::with_node`]; `environment` as `up.sh` names it, such as `NODE_GRACE`.
    pub fn start(node: bool, environment: &[(&str, &str)]) -> Result<Region> {
        script(Command::new("bash").arg(scripts().join("build.sh")))?;
        let number = Number::take()?;
        let dir = run_dir().join(number.text());
        if dir.exists() {
            // Of a test that could not even start its reaper.
            script(Command::new("bash").arg(scripts().join("down.sh")).arg(number.text()))?;
        }
        let reaper = Some(number.reaper()?);
        let mut up = Command::new("bash");
        up.arg(scripts().join("up.sh")).arg(number.text()).env("NODE", if node { "1" } else { "0" });
        up.envs(environment.iter().copied());
        let kubeconfig = script(&mut up);
        let kubectl = Kubectl::new(binaries()?.join("kubectl"), dir.join("admin.kubeconfig"));
        let region = Region { number, dir, kubectl, reaper, logs_allowed: Mutex::default() };
        kubeconfig?;
        Ok(region)
    }

    /// One more node; its name. It lives as long as the region.
    pub fn join(&self) -> Result<(String, Number)> {
        let number = Number::take()?;
        let mut up = Command::new("bash");
        up.arg(scripts().join("up.sh")).arg(number.text()).env("JOIN", self.number.text());
        script(&mut up)?;
        Ok((format!("node{}", number.text()), number))
    }

    /// The number of the region: its node is `nodeN` at 10.250.0.N.
    pub fn number(&self) -> String {
        self.number.text()
    }

    /// Where NodePorts of this region are.
    pub fn address(&self) -> String {
        format!("10.250.0.{}", self.number.text())
    }

    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    pub fn kubeconfig(&self) -> &Path {
        self.kubectl.kubeconfig()
    }

    /// Packs `program` as the image `localhost/sealane:TAG` and gives it to every node.
    pub fn give_image(&self, program: &Path, tag: &str) -> Result<()> {
        let mut image = Command::new("bash");
        image.arg(scripts().join("image.sh")).arg(program).arg(self.number.text()).env("TAG", tag);
        script(&mut image).map(drop)
    }

    /// A kubeconfig that holds nothing but a token of this ServiceAccount, for a process outside of the cluster.
    pub fn kubeconfig_of(&self, namespace: &str, account: &str) -> Result<PathBuf> {
        let token = self.kubectl.run(&["create", "token", account, "-n", namespace, "--duration=6h"])?;
        let ca = self.dir.join("pki/ca.crt");
        let path = self.dir.join(format!("{namespace}-{account}.kubeconfig"));
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "clusters": [{"name": "c", "cluster": {
                "server": format!("https://{}:6443", self.address()), "certificate-authority": ca}}],
            "users": [{"name": "u", "user": {"token": token.trim()}}],
        });
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// Takes the region's cable away: nobody outside reaches it, and it reaches nobody. Its inside goes on.
    pub fn cut(&self) -> Result<()> {
        self.cable("down")
    }

    pub fn heal(&self) -> Result<()> {
        self.cable("up")
    }

    fn cable(&self, state: &str) -> Result<()> {
        self.number.cable(state)
    }

    /// Every connection that this pod has with the API server now carries nothing any more, and neither end is told, as when
    /// something between them forgets what it knew. New ones are as ever. How many they are.
    pub fn forget_connections(&self, pod: &str) -> Result<usize> {
        let inside = |program: &str| {
            let mut command = Command::new("nsenter");
            command.arg(format!("--net=/run/netns/slk{}", self.number.text())).arg(program);
            command
        };
        let listed = script(inside("ss").args(["-Htn", "state", "established", "sport = :6443"]))?;
        let peers = listed.lines().filter_map(|line| line.split_whitespace().last()?.rsplit_once(':'));
        let own = |ip: &str| ip.trim_matches(['[', ']']).trim_start_matches("::ffff:") == pod;
        let ports: Vec<&str> = peers.filter(|(ip, _)| own(ip)).map(|(_, port)| port).collect();
        ensure!(!ports.is_empty(), "{pod} has no connection with the API server:\n{listed}");
        let set = ports.join(", ");
        let rules = format!(
            "table ip forgotten {{\n\
             chain to {{ type filter hook prerouting priority -400; ip saddr {pod} tcp sport {{ {set} }} drop; }}\n\
             chain from {{ type filter hook postrouting priority 300; ip daddr {pod} tcp dport {{ {set} }} drop; }}\n}}\n"
        );
        let file = self.dir.join("forgotten.nft");
        fs::write(&file, rules)?;
        script(inside("nft").arg("-f").arg(&file))?;
        Ok(ports.len())
    }

    /// Kills a component (`kube-apiserver`, `kubelet`, `etcd` and so on, as `pids/` names them).
    pub fn kill(&self, component: &str) -> Result<()> {
        let pid = fs::read_to_string(self.dir.join("pids").join(component))
            .with_context(|| format!("{component} does not run"))?;
        tools::run(Command::new("kill").args(["-9", pid.trim()]))?;
        let gone = || Ok((!Path::new("/proc").join(pid.trim()).join("fd/0").exists()).then_some(()));
        wait_for(&format!("the end of {component}"), gone)
    }

    /// Starts a component as it was started at first.
    pub fn revive(&self, component: &str) -> Result<()> {
        tools::run(&mut Command::new(self.dir.join("cmd").join(component)))?;
        if component == "kube-apiserver" {
            wait_for("the API server", || Ok(self.kubectl.run(&["get", "--raw", "/readyz"]).ok()))?;
        }
        Ok(())
    }

    /// The power goes: every process of the control plane and of every pod is killed, and nobody outside reaches the region.
    /// What was on its disks stays.
    pub fn lose(&self) -> Result<()> {
        self.cut()?;
        // The kubelet first: it would start anew what ends.
        for component in ["kubelet", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"] {
            self.kill(component)?;
        }
        let cgroup = format!("slk{}", self.number.text());
        let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(|root| Path::new(root).join(&cgroup));
        let root = roots.iter().find(|root| root.is_dir()).context("pods have a cgroup")?;
        wait_for("the end of every process of a pod", || {
            let pids = processes(root)?;
            for pid in &pids {
                // It may have ended meanwhile.
                let _ = tools::run(Command::new("kill").args(["-9", pid]));
            }
            Ok(pids.is_empty().then_some(()))
        })
    }

    /// The power is back.
    pub fn bring_back(&self) -> Result<()> {
        self.heal()?;
        for component in ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet"] {
            self.revive(component)?;
        }
        Ok(())
    }

    /// What the API server's audit log holds so far of requests by `user`: one object for each answered request.
    pub fn audit(&self, user: &str) -> Result<Vec<Value>> {
        let log = fs::read_to_string(self.dir.join("log/audit.log"))?;
        let mut found = Vec::new();
        for line in log.lines() {
            // The last line may be half written.
            let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
            if event["stage"] == "ResponseComplete" && event["user"]["username"] == user {
                found.push(event);
            }
        }
        Ok(found)
    }

    /// Allows an ERROR in the logs of Sealane's pods.
    pub fn allow_error(&self, text: &str) {
        self.logs_allowed.lock().expect("no test panics under this lock").push(text.to_owned());
    }

    /// Fails on an ERROR in the log of any of Sealane's pods that was not allowed.
    pub fn judge_logs(&self) -> Result<()> {
        let allowed = self.logs_allowed.lock().expect("no test panics under this lock").clone();
        let mut unlisted = Vec::new();
        for (pod, log) in self.kubectl.sealane_logs()? {
            let errors = log.lines().filter(|line| crate::process::is_error(line));
            let errors = errors.filter(|line| !allowed.iter().any(|allowed| line.contains(allowed.as_str())));
            unlisted.extend(errors.map(|line| format!("{pod}: {line}")));
        }
        ensure!(unlisted.is_empty(), "errors in the logs:\n{}", unlisted.join("\n"));
        Ok(())
    }

    fn report(&self) {
        eprintln!("--- region {} ---\n{}", self.number.text(), self.kubectl.report());
        // Operators that are processes of this machine keep their logs beside.
        for file in fs::read_dir(&self.dir).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("operator-"))
                && file.extension().is_some_and(|kind| kind == "log")
            {
                eprintln!("--- {}\n{}", file.display(), fs::read_to_string(&file).unwrap_or_default());
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.report();
        }
        if let Some(mut reaper) = self.reaper.take() {
            // The end of its input is what it waits for.
            drop(reaper.stdin.take());
            let _ = reaper.wait();
        }
    }
}

/// Of a cgroup and all below it.
fn processes(cgroup: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![cgroup.to_owned()];
    while let Some(folder) = folders.pop() {
        // A pod's own may go at any moment.
        let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.split_whitespace().map(str::to_owned));
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            }
        }
    }
    Ok(found)
}

/// Runs the body of a test; where it fails, the region says how it stood. (A test that returns an error does not panic
/// before its values are dropped, so that dropping cannot tell.)
pub fn with_report(region: &Region, body: impl FnOnce() -> Result<()>) -> Result<()> {
    let outcome = body();
    if outcome.is_err() {
        region.report();
    }
    outcome
}

/// Two real clusters, east and west, with the image at hand; both are told of if the test fails.
pub fn with_two(body: impl FnOnce(&Region, &Region) -> Result<()>) -> Result<()> {
    tools::kcat()?;
    let (east, west) = (Region::with_node()?, Region::with_node()?);
    with_report(&east, || {
        with_report(&west, || {
            for region in [&east, &west] {
                region.give_image(&crate::process::binary()?, "0.1.0")?;
            }
            body(&east, &west)
        })
    })
}

/// Asks until there is an answer. The error names what was waited for and the last thing that was wrong.
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        let last = match ask() {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => String::new(),
            Err(error) => format!(": {error:#}"),
        };
        if Instant::now() > end {
            bail!("waited {} s in vain for {what}{last}", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Where `build.sh` puts programs: `kubectl`, `helm` and so on.
pub fn binaries() -> Result<PathBuf> {
    Ok(tools::cache_dir()?.join("kubernetes/bin"))
}

/// `manifests` of this checkout.
pub fn manifests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests")
}

/// `e2e/kubernetes` of this checkout.
pub fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kubernetes")
}

fn run_dir() -> PathBuf {
    std::env::var_os("SEALANE_KUBE_RUN").map_or_else(|| PathBuf::from("/tmp/sealane-kube"), PathBuf::from)
}

/// Runs a script; its standard output. What it complains of is the error.
pub fn script(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().context("run bash")?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", complaint.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
