//! Logs of a process: to standard error, levels by a filter, as text or as JSON lines.
//!
//! Set up once, first thing. Services log through `tracing` and know nothing of where it goes.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Why logging was not set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("log levels {levels:?}: {reason} (an example that works: info,broker=debug)")]
    Levels { levels: String, reason: String },
    #[error("logging is set up already")]
    Twice(#[from] TryInitError),
}

/// Sets up logging for the process. `levels` is a default level and targets, such as
/// `info,mirror=debug`.
pub fn init(levels: &str, format: LogFormat) -> Result<(), TelemetryError> {
    let filter = EnvFilter::try_new(levels)
        .map_err(|error| TelemetryError::Levels { levels: levels.to_owned(), reason: error.to_string() })?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    match format {
        LogFormat::Text => registry.with(lines.with_ansi(false)).try_init()?,
        LogFormat::Json => registry.with(lines.json()).try_init()?,
    }
    Ok(())
}
