//! The wall clock, asked in one place.

use std::time::{SystemTime, UNIX_EPOCH};

use kafka::TimestampMs;

/// Milliseconds since the Unix epoch.
pub fn now() -> TimestampMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TimestampMs(since.as_millis().min(i64::MAX as u128) as i64)
}
