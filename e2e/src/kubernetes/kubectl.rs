//! What a test asks of a region: the real kubectl, objects as JSON, conditions, refusals, and the report of a failure.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::wait_for;

/// kubectl with one kubeconfig.
#[derive(Clone, Debug)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    pub fn new(program: PathBuf, kubeconfig: PathBuf) -> Kubectl {
        Kubectl { program, kubeconfig }
    }

    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A command of kubectl that the test runs by itself.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(arguments);
        command
    }

    /// Runs to the end, whatever the outcome.
    pub fn output(&self, arguments: &[&str]) -> Result<Output> {
        self.command(arguments).stdin(Stdio::null()).output().context("run kubectl")
    }

    /// Standard output; fails unless it succeeds.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.output(arguments)?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {}: {}", arguments.join(" "), complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs with `input` on its standard input.
    pub fn feed(&self, arguments: &[&str], input: &str) -> Result<Output> {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("run kubectl")?;
        child.stdin.take().context("it is piped")?.write_all(input.as_bytes())?;
        child.wait_with_output().context("run kubectl")
    }

    /// `kubectl apply -f -`.
    pub fn apply(&self, objects: &str) -> Result<String> {
        let output = self.feed(&["apply", "-f", "-"], objects)?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl apply: {}", complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Applies what must be refused; the refusal.
    pub fn refused(&self, objects: &str) -> Result<String> {
        let output = self.feed(&["apply", "-f", "-"], objects)?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success(), "this was accepted:\n{objects}");
        Ok(said)
    }

    /// The object, or none. `what` is `kind/name`.
    pub fn find(&self, namespace: &str, what: &str) -> Result<Option<Value>> {
        let text = self.run(&["get", "-n", namespace, what, "-o", "json", "--ignore-not-found"])?;
        if text.trim().is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&text)?)) }
    }

    pub fn object(&self, namespace: &str, what: &str) -> Result<Value> {
        self.find(namespace, what)?.with_context(|| format!("there is no {what} in {namespace}"))
    }

    /// All objects of a kind, such as `pods`; of all namespaces where `namespace` is empty.
    pub fn list(&self, namespace: &str, kind: &str) -> Result<Vec<Value>> {
        let place: &[&str] = if namespace.is_empty() { &["-A"] } else { &["-n", namespace] };
        let text = self.run(&[&["get", kind, "-o", "json"], place].concat())?;
        let mut list: Value = serde_json::from_str(&text)?;
        match list["items"].take() {
            Value::Array(items) => Ok(items),
            other => bail!("kubectl get {kind} gave {other}"),
        }
    }

    /// A value of a Secret.
    pub fn secret(&self, namespace: &str, name: &str, key: &str) -> Result<String> {
        let template = format!("go-template={{{{index .data {key:?} | base64decode}}}}");
        self.run(&["get", "-n", namespace, "secret", name, "-o", &template])
    }

    /// Waits until the object's condition has this status for its present generation; the condition.
    pub fn wait_condition(&self, namespace: &str, what: &str, kind: &str, status: &str) -> Result<Value> {
        wait_for(&format!("{kind}={status} of {what} in {namespace}"), || {
            let object = self.object(namespace, what)?;
            let found = condition(&object, kind).with_context(|| format!("no condition {kind} yet"))?;
            let generation = &object["metadata"]["generation"];
            let is_current =
                found["observedGeneration"].is_null() || found["observedGeneration"] == *generation;
            if found["status"] == status && is_current {
                return Ok(Some(found));
            }
            bail!("it is {found}")
        })
    }

    /// Waits until there is no such object any more.
    pub fn wait_gone(&self, namespace: &str, what: &str) -> Result<()> {
        wait_for(&format!("the end of {what} in {namespace}"), || {
            Ok(self.find(namespace, what)?.is_none().then_some(()))
        })
    }

    /// Log of every container of Sealane's pods, of this life and the one before, by the pod's name.
    pub(super) fn sealane_logs(&self) -> Result<Vec<(String, String)>> {
        let mut logs = Vec::new();
        for pod in self.list("", "pods")? {
            let is_ours = pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "sealane";
            let (Some(namespace), Some(name)) =
                (pod["metadata"]["namespace"].as_str(), pod["metadata"]["name"].as_str())
            else {
                continue;
            };
            if !is_ours {
                continue;
            }
            for life in [&["--previous"][..], &[]] {
                let arguments = [&["logs", "-n", namespace, name, "--all-containers"], life].concat();
                // There may be no life before, and none yet.
                if let Ok(log) = self.run(&arguments) {
                    logs.push((format!("{namespace}/{name}"), log));
                }
            }
        }
        Ok(logs)
    }

    /// How the cluster stands: for a person who looks at a test that failed.
    pub(super) fn report(&self) -> String {
        let mut text = String::new();
        let kinds = "pods,statefulsets,deployments,services,persistentvolumeclaims";
        let own = "brokerclusters,brokerpools,topics.sealane.io,linkgrants,mirrorlinks,lanes,lanerouters";
        for arguments in [
            &["get", kinds, "-A", "-o", "wide"][..],
            &["get", own, "-A", "-o", "yaml"],
            &["get", "events", "-A", "--sort-by=.lastTimestamp"],
        ] {
            text += &match self.run(arguments) {
                Ok(said) => tail(&said, 150),
                Err(error) => format!("{error:#}\n"),
            };
        }
        for (pod, log) in self.sealane_logs().unwrap_or_default() {
            text += &format!("--- {pod}\n{}", tail(&log, 30));
        }
        text
    }
}

/// The condition of this kind in an object's status.
pub fn condition(object: &Value, kind: &str) -> Option<Value> {
    let conditions = object["status"]["conditions"].as_array()?;
    conditions.iter().find(|condition| condition["type"] == kind).cloned()
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n") + "\n"
}
