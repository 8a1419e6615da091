//! `docs/KUBERNETES.md` as tests follow it: its commands are taken out of the file and run.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::{binaries, manifests};

pub const DOCUMENT: &str = include_str!("../../../docs/KUBERNETES.md");

/// The fenced blocks of the document whose info string is `info`, joined.
pub fn blocks(info: &str) -> String {
    crate::fenced::blocks(DOCUMENT, info)
}

/// Runs a script at the root of the checkout, with the kubectl of the test cluster first in its path.
pub fn follow(script: &str, environment: &[(&str, &Path)]) -> Result<String> {
    ensure!(!script.is_empty(), "the document has no such block");
    let path = format!("{}:{}", binaries()?.display(), std::env::var("PATH")?);
    let mut command = Command::new("timeout");
    command.args(["900", "bash", "-euxo", "pipefail", "-c", script]).current_dir(manifests().join(".."));
    let output = command.env("PATH", path).envs(environment.iter().copied()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ended with {}:\n{printed}\n{errors}", output.status);
    Ok(printed)
}
