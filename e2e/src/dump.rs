//! Apache Kafka's own dump-log as a judge of what lies on disk: it must read every segment and index without a word.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::peer;

/// What dump-log says when something does not add up.
const COMPLAINTS: &[&str] = &[
    "Mismatches in",
    "mismatch in",
    "Found timestamp",
    "isvalid: false",
    "isValid: false",
    "corrupt",
    "Exception",
];

/// Runs dump-log with deep iteration over every segment and index below `data`; returns what it printed.
pub fn judge(data: &Path) -> Result<String> {
    let mut files = Vec::new();
    collect(data, &mut files)?;
    ensure!(files.iter().any(|file| file.ends_with(".log")), "no segments in {}", data.display());
    let mut dump = peer::tool("org.apache.kafka.tools.DumpLogSegments")?;
    dump.args(["--deep-iteration", "--files", &files.join(",")]);
    let printed = peer::run(&mut dump)?;
    for complaint in COMPLAINTS {
        ensure!(
            !printed.contains(complaint),
            "kafka-dump-log complains ({complaint}):\n{}",
            around(&printed, complaint)
        );
    }
    Ok(printed)
}

fn around(text: &str, what: &str) -> String {
    let at = text.find(what).unwrap_or(0);
    let from = text[..at].char_indices().rev().nth(400).map_or(0, |(at, _)| at);
    text[from..].chars().take(1_000).collect()
}

fn collect(dir: &Path, files: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            // Kafka's own metadata log has record types that only its own decoder reads.
            if !path.ends_with("__cluster_metadata-0") {
                collect(&path, files)?;
            }
        } else if is_segment_file(&path) && path.metadata()?.len() > 0 {
            files.push(path.to_string_lossy().into_owned());
        }
    }
    Ok(())
}

/// `<20-digit base offset>.log`, `.index` or `.timeindex`.
fn is_segment_file(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some((base, kind)) = name.split_once('.') else { return false };
    base.len() == 20
        && base.bytes().all(|byte| byte.is_ascii_digit())
        && ["log", "index", "timeindex"].contains(&kind)
}
