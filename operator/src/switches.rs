//! Switches for tests alone: each turns one safety mechanism of the operator off, so that a test can show that the mechanism
//! is what keeps it green. Read once, from the environment; absent means that everything is on.

use std::sync::LazyLock;

/// Comma-separated names in `SEALANE_TEST_OFF`: `restart-gate`, `connection-deadline`.
static OFF: LazyLock<Vec<String>> = LazyLock::new(|| {
    let value = std::env::var("SEALANE_TEST_OFF").unwrap_or_default();
    value.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
});

/// Names of the mechanisms that are off, for a warning at start.
pub fn all_set() -> impl Iterator<Item = &'static String> {
    OFF.iter()
}

/// Pods are restarted and removed without a question to the data plane or to a budget.
pub fn restart_gate_off() -> bool {
    OFF.iter().any(|name| name == "restart-gate")
}

/// A connection to the API server is waited on for ever.
pub fn deadline_off() -> bool {
    OFF.iter().any(|name| name == "connection-deadline")
}
