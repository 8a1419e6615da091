//! Numbers of regions that no two test processes of this machine share, and the reaper that takes a region down even if
//! its test is killed. A number is held by a lock on a file, by the test and by its reaper: it is free when both ended.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::tools;

/// Below it are the regions that a person starts.
const FIRST: u8 = 20;
const LAST: u8 = 99;

/// The number of a region, or of a node that joined one.
#[derive(Debug)]
pub struct Number {
    number: u8,
    lock: File,
}

impl Number {
    pub(super) fn take() -> Result<Number> {
        let dir = std::env::temp_dir().join("sealane-kube-numbers");
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        for number in FIRST..=LAST {
            let lock = File::create(dir.join(number.to_string()))?;
            if lock.try_lock().is_ok() {
                return Ok(Number { number, lock });
            }
        }
        bail!("all regions from {FIRST} to {LAST} are in use")
    }

    pub fn text(&self) -> String {
        self.number.to_string()
    }

    /// Takes its cable away (`down`), or gives it back (`up`).
    pub fn cable(&self, state: &str) -> Result<()> {
        tools::run(Command::new("ip").args(["link", "set", &format!("vslk{}", self.number), state]))
    }

    /// Starts what waits for the end of its standard input and then takes the region down.
    pub(super) fn reaper(&self) -> Result<Child> {
        let mut command = Command::new("setsid");
        command.args(["bash", "-c", "read -r _; exec bash \"$0\" \"$1\""]);
        command.arg(super::scripts().join("down.sh")).arg(self.text());
        // Standard output is the lock, so that it is held until the region is gone.
        command.stdin(Stdio::piped()).stdout(self.lock.try_clone()?).stderr(Stdio::null());
        command.spawn().context("start setsid")
    }
}
