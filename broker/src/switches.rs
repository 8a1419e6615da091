//! Switches for tests alone: each turns one safety mechanism off, so that a test can show that the
//! mechanism is what keeps it green; or makes happen what the mechanism is there for. Read once, from the
//! environment; absent means that everything is on and nothing happens.

use std::sync::LazyLock;

/// Comma-separated names in `SEALANE_TEST_OFF`: `apply-rule`, `compare-and-append`, `lane-markers`,
/// `lease-check`, `state`, `store-fence`, `view-acks`, `view-filter`, `view-lives`.
static OFF: LazyLock<Vec<String>> = LazyLock::new(|| names("SEALANE_TEST_OFF"));
/// The same in `SEALANE_TEST_FAULT`: `late-views`, `stale-cut`.
static FAULTS: LazyLock<Vec<String>> = LazyLock::new(|| names("SEALANE_TEST_FAULT"));

fn names(variable: &str) -> Vec<String> {
    let value = std::env::var(variable).unwrap_or_default();
    value.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect()
}

fn off(name: &str) -> bool {
    OFF.iter().any(|n| n == name)
}

/// Names of the mechanisms that are off and of the faults, for a warning at start.
pub fn all_set() -> impl Iterator<Item = &'static String> {
    OFF.iter().chain(FAULTS.iter())
}

/// Mirror units are appended without comparing their origin offsets.
pub fn apply_rule_off() -> bool {
    off("apply-rule")
}

/// Snapshots are neither written nor read.
pub fn state_off() -> bool {
    off("state")
}

/// A broker of a cluster goes on when its lease is gone and when others own what it had, so that the store's
/// fence alone stops it.
pub fn lease_check_off() -> bool {
    off("lease-check")
}

/// On HDFS the log of a broker goes on in another directory when an heir has taken its own away.
#[cfg(feature = "cluster")]
pub fn store_fence_off() -> bool {
    off("store-fence")
}

/// A lane cut is appended whatever its coordinator knew.
pub fn compare_and_append_off() -> bool {
    off("compare-and-append")
}

/// A lane's members get their assignment though no marker says so in the log.
pub fn lane_markers_off() -> bool {
    off("lane-markers")
}

/// After each activate of a lane comes a deactivate that the coordinator before this one had sent.
pub fn stale_cuts() -> bool {
    FAULTS.iter().any(|name| name == "stale-cut")
}

/// Members get their assignment before every broker knows whom it is to be shown to.
pub fn view_acks_off() -> bool {
    off("view-acks")
}

/// A broker believes that it knows all readers though its present life has not been told.
pub fn view_lives_off() -> bool {
    off("view-lives")
}

/// Brokers are told who reads what half a second late.
pub fn late_views() -> bool {
    FAULTS.iter().any(|name| name == "late-views")
}

/// Lane records are shown to every reader.
pub fn view_filter_off() -> bool {
    off("view-filter")
}
