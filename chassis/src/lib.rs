//! What every service stands on: run, configuration, TLS, telemetry, metrics, admin endpoint.
