//! What every service stands on: run, configuration, TLS, telemetry, metrics, admin endpoint.
//!
//! Knows no Kafka. A service takes its configuration (a [`config!`] struct) and a
//! [`ServiceHandle`], spawns its tasks through the handle, and is stopped through it.

pub mod admin;
pub mod certs;
pub mod config;
pub mod metrics;
pub mod service;
pub mod telemetry;
pub mod tls;

pub use metrics::Registry;
pub use service::{Process, RunError, ServiceHandle, TaskFailure, Trouble};
