//! The Maven part of the tool cache: Apache Kafka's own jars, pinned in `e2e/kafka/pom.xml`, copied once into
//! `$SEALANE_TOOLS/kafka` and shared by every test and benchmark on the machine. Leaves running them to
//! `peer.rs`. The copy of the pom beside the jars is written last: where it equals ours, the jars are whole.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// `e2e/kafka` of this checkout: pom, server properties, JVM options, log configuration.
pub fn kafka_files() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kafka")
}

/// The class path of Apache Kafka, in Java's wildcard form; the first call on a machine downloads it.
pub fn class_path() -> Result<String> {
    let home = tools::cache_dir()?.join("kafka");
    let jars = home.join("jars");
    let stamp = home.join("pom.xml");
    let pom = kafka_files().join("pom.xml");
    let wanted = fs::read(&pom).with_context(|| format!("read {}", pom.display()))?;
    fs::create_dir_all(&home).with_context(|| format!("create {}", home.display()))?;
    let lock = File::create(home.join("lock"))?;
    lock.lock().context("lock the tool cache")?;
    if fs::read(&stamp).ok().as_deref() != Some(&wanted) {
        if jars.exists() {
            fs::remove_dir_all(&jars)?;
        }
        copy_jars(&pom, &jars)?;
        fs::write(&stamp, &wanted)?;
    }
    Ok(format!("{}/*", jars.display()))
}

fn copy_jars(pom: &Path, jars: &Path) -> Result<()> {
    let mvn = tools::program("mvn", "maven")?;
    let mut copy = Command::new(mvn);
    copy.args(["-q", "-B", "-ntp", "-f"]).arg(pom);
    copy.args(["dependency:copy-dependencies", "-DincludeScope=runtime"]);
    let output = copy.arg(format!("-DoutputDirectory={}", jars.display())).output().context("run mvn")?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "mvn could not fetch Apache Kafka:\n{printed}");
    Ok(())
}
