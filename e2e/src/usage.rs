//! What a process has used, read from `/proc/<pid>`: CPU seconds and resident memory. Leaves deciding what to
//! measure to the caller. All threads of the process count, children do not.

use std::fs;

use anyhow::{Context, Result};

/// CPU time (user and system, all threads) since the process began, in seconds.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid}"))?;
    // The name in parentheses may hold blanks: fields are counted from behind it. utime is field 14, stime 15.
    let (_, fields) = stat.rsplit_once(')').context("stat without a name")?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut ticks = || -> Result<u64> { Ok(fields.next().context("short stat")?.parse()?) };
    Ok((ticks()? + ticks()?) as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Resident memory now, in bytes.
pub fn rss_bytes(pid: u32) -> Result<u64> {
    status_bytes(pid, "VmRSS:")
}

/// Of that, what the process took itself: no pages of its program and libraries, which a build without optimisation has
/// many of.
pub fn anonymous_bytes(pid: u32) -> Result<u64> {
    status_bytes(pid, "RssAnon:")
}

/// Highest resident memory since the process began or since [`reset_peak`], in bytes.
pub fn peak_rss_bytes(pid: u32) -> Result<u64> {
    status_bytes(pid, "VmHWM:")
}

/// Starts a new period for [`peak_rss_bytes`].
pub fn reset_peak(pid: u32) -> Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5").with_context(|| format!("process {pid}"))
}

/// Whether every thread of a process stands still by a signal.
pub fn has_stopped(pid: u32) -> Result<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task")).with_context(|| format!("process {pid}"))? {
        // One that has ended meanwhile does nothing any more.
        let Ok(stat) = fs::read_to_string(task?.path().join("stat")) else { continue };
        let (_, fields) = stat.rsplit_once(')').context("stat without a name")?;
        if !matches!(fields.split_ascii_whitespace().next(), Some("T" | "Z" | "X")) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn status_bytes(pid: u32, field: &str) -> Result<u64> {
    let status =
        fs::read_to_string(format!("/proc/{pid}/status")).with_context(|| format!("process {pid}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).context("field is missing")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_sees_its_own_cpu_time_and_memory() {
        let pid = std::process::id();
        let mut sum = 0u64;
        while cpu_seconds(pid).unwrap() == 0.0 {
            sum = sum.wrapping_add(std::hint::black_box(1));
        }
        assert!(rss_bytes(pid).unwrap() > 100_000);
        assert!(peak_rss_bytes(pid).unwrap() >= 100_000);
        std::hint::black_box(sum);
    }
}
