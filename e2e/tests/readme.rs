//! The README is followed to the letter: its commands are taken out of the file and run.
//!
//! Changed in them are the ports (this machine may use the default ones) and how the binary is called
//! (the one that this test built). The two commands that build are what runs this test.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use e2e::process::{Plan, binary};
use e2e::tools;

const README: &str = include_str!("../../README.md");

/// The fenced blocks of the README whose info string is `info`, joined.
fn blocks(info: &str) -> String {
    e2e::fenced::blocks(README, info)
}

/// Runs a script in `dir` and returns what it printed.
fn bash(script: &str, dir: &std::path::Path) -> Result<String> {
    let bash = ["300", "bash", "-euo", "pipefail", "-c", script];
    let output = Command::new("timeout").args(bash).current_dir(dir).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{script}\nfailed ({}):\n{printed}\n{errors}", output.status);
    Ok(printed)
}

fn expect(printed: &str, lines: &[&str]) -> Result<()> {
    for line in lines {
        ensure!(printed.lines().any(|l| l.trim() == *line), "no line {line:?} in:\n{printed}");
    }
    Ok(())
}

#[test]
fn there_are_two_commands_to_get_going() -> Result<()> {
    for command in ["cargo run --release -- local", "cargo test --workspace --features cluster,operator"] {
        ensure!(README.lines().any(|line| line == command), "the README does not show {command:?}");
    }
    Ok(())
}

#[test]
fn the_quick_start_does_what_it_says() -> Result<()> {
    let local = Plan::two().start()?;
    let (east, west) = (local.bootstrap(0), local.bootstrap(1));
    let ports = |text: &str| text.replace("127.0.0.1:9092", &east).replace("127.0.0.1:9192", &west);
    let folder = tempfile::tempdir()?;

    let calls_cargo = "sealane() { cargo run --quiet --release -- \"$@\"; }";
    let script = blocks("sh quickstart");
    ensure!(script.contains(calls_cargo), "the README calls the binary in another way than this test knows");
    let calls_binary =
        format!("export SEALANE_SERVER={east}\nsealane() {{ '{}' \"$@\"; }}", binary()?.display());
    let printed = bash(&ports(&script.replace(calls_cargo, &calls_binary)), folder.path())?;
    expect(
        &printed,
        &[
            "first order",
            "the lane got: lane order",
            "the baseline got: first order",
            "the baseline got: second order",
        ],
    )?;
    ensure!(
        !printed.contains("the baseline got: lane order"),
        "the lane's record reached the baseline:\n{printed}"
    );

    tools::kcat()?;
    let printed = bash(&ports(&blocks("sh kcat")), folder.path())?;
    expect(&printed, &["order by kcat", "lane order by kcat"])?;

    bash(&blocks("sh python"), folder.path())?;
    let program = folder.path().join("quickstart.py");
    std::fs::write(&program, ports(&blocks("python python")))?;
    let python = folder.path().join("venv/bin/python");
    let output = Command::new(python).arg(&program).stderr(Stdio::inherit()).output()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "the Python program failed:\n{printed}");
    let last = printed.lines().last().context("the Python program printed nothing")?;
    ensure!(last.ends_with("order by Python"), "{printed}");
    local.judge_log()
}
