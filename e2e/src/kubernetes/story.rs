//! What `kubectl get --watch` showed of objects, from beginning to end: no state that the API server had is missed, as one
//! between two looks would be.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Stdio};

use anyhow::{Context, Result};
use serde_json::{Deserializer, Value};

use super::Kubectl;

pub struct Story {
    kubectl: Child,
    file: PathBuf,
    _dir: tempfile::TempDir,
}

impl Story {
    /// Begins to record objects of one kind.
    pub fn of(kubectl: &Kubectl, namespace: &str, kind: &str) -> Result<Story> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("story");
        let mut command = kubectl.command(&[
            "get",
            kind,
            "-n",
            namespace,
            "-o",
            "json",
            "--watch",
            "--output-watch-events",
        ]);
        let child = command.stdin(Stdio::null()).stdout(File::create(&file)?).stderr(Stdio::null()).spawn();
        Ok(Story { kubectl: child.context("run kubectl")?, file, _dir: dir })
    }

    /// Each state so far: ADDED, MODIFIED or DELETED, and the object.
    pub fn told(&self) -> Result<Vec<(String, Value)>> {
        let text = fs::read_to_string(&self.file)?;
        let mut told = Vec::new();
        for event in Deserializer::from_str(&text).into_iter::<Value>() {
            // The last may be half written.
            let Ok(mut event) = event else { break };
            let type_ = event["type"].as_str().unwrap_or_default().to_owned();
            told.push((type_, event["object"].take()));
        }
        Ok(told)
    }
}

impl Drop for Story {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}
