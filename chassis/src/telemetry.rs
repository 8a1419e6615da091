//! Logs of a process: to standard error, levels by a filter, as text or as JSON lines; with the
//! feature `otel` also, with the spans they belong to, to a collector over OTLP (gRPC).
//!
//! Set up once, first thing. Services log through `tracing` and know nothing of where it goes.

#[cfg(feature = "otel")]
mod otlp;

use tracing::Subscriber;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// What to log and where to.
#[derive(Clone, Debug, Default)]
pub struct LogOptions {
    /// A default level and targets, such as `info,mirror=debug`.
    pub levels: String,
    pub format: LogFormat,
    /// Collector, such as `http://127.0.0.1:4317`; needs the feature `otel`.
    pub otlp: Option<String>,
}

/// Why logging was not set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("log levels {levels:?}: {reason} (an example that works: info,broker=debug)")]
    Levels { levels: String, reason: String },
    #[error("logging is set up already")]
    Twice(#[from] TryInitError),
    #[error("OTLP: {0}")]
    Otlp(String),
}

/// Logging that is set up. Keep it until the end: what waits to be exported leaves with it.
#[must_use]
pub struct Telemetry {
    #[cfg(feature = "otel")]
    _export: Option<otlp::Export>,
}

/// Sets up logging for the process. With export, to be called inside the runtime.
pub fn init(options: &LogOptions) -> Result<Telemetry, TelemetryError> {
    let filter = EnvFilter::try_new(&options.levels).map_err(|error| TelemetryError::Levels {
        levels: options.levels.clone(),
        reason: error.to_string(),
    })?;
    let registry = tracing_subscriber::registry().with(filter).with(lines(options.format));
    #[cfg(not(feature = "otel"))]
    {
        if options.otlp.is_some() {
            return Err(TelemetryError::Otlp("this build has no export: the feature `otel` is off".into()));
        }
        registry.try_init()?;
        Ok(Telemetry {})
    }
    #[cfg(feature = "otel")]
    {
        let export = options.otlp.as_deref().map(otlp::Export::start).transpose();
        let export = export.map_err(|error| TelemetryError::Otlp(error.to_string()))?;
        let spans = export.as_ref().map(otlp::Export::spans);
        let logs = export.as_ref().map(otlp::Export::logs);
        registry.with(spans).with(logs).try_init()?;
        Ok(Telemetry { _export: export })
    }
}

fn lines<S>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        LogFormat::Text => Box::new(lines.with_ansi(false)),
        LogFormat::Json => Box::new(lines.json()),
    }
}
