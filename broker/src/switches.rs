//! Switches for tests alone: each turns one safety mechanism off, so that a test can show that the
//! mechanism is what keeps it green. Read once, from the environment; absent means everything is on.

use std::sync::LazyLock;

/// Comma-separated names in `SEALANE_TEST_OFF`: `apply-rule`, `state`, `view-filter`.
static OFF: LazyLock<Vec<String>> = LazyLock::new(|| {
    let value = std::env::var("SEALANE_TEST_OFF").unwrap_or_default();
    value.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned).collect()
});

fn off(name: &str) -> bool {
    OFF.iter().any(|n| n == name)
}

/// Names of the mechanisms that are off, for a warning at start.
pub fn all_off() -> &'static [String] {
    &OFF
}

/// Mirror units are appended without comparing their origin offsets.
pub fn apply_rule_off() -> bool {
    off("apply-rule")
}

/// Snapshots are neither written nor read.
pub fn state_off() -> bool {
    off("state")
}

/// Lane records are shown to every reader.
pub fn view_filter_off() -> bool {
    off("view-filter")
}
