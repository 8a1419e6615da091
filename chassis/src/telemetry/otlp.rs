//! Spans and logs to an OpenTelemetry collector, in batches, on a thread of the SDK's own.
//!
//! What the collector does not take in time is dropped: a service never waits for it.

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_appender_tracing::layer::OpenTelemetryTracingBridge;
use opentelemetry_otlp::{ExporterBuildError, LogExporter, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::{SdkLogger, SdkLoggerProvider};
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tracing::{Metadata, Subscriber};
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::LookupSpan;

/// A running export; dropping it sends what waits.
pub struct Export {
    spans: SdkTracerProvider,
    logs: SdkLoggerProvider,
}

impl Export {
    pub fn start(endpoint: &str) -> Result<Export, ExporterBuildError> {
        let resource = Resource::builder().with_service_name("sealane").build();
        let spans = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        let logs = LogExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        Ok(Export {
            spans: SdkTracerProvider::builder()
                .with_batch_exporter(spans)
                .with_resource(resource.clone())
                .build(),
            logs: SdkLoggerProvider::builder().with_batch_exporter(logs).with_resource(resource).build(),
        })
    }

    pub fn spans<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let layer: OpenTelemetryLayer<S, SdkTracer> =
            tracing_opentelemetry::layer().with_tracer(self.spans.tracer("sealane"));
        layer.with_filter(FilterFn::new(is_ours))
    }

    pub fn logs<S>(&self) -> impl Layer<S> + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        let bridge: OpenTelemetryTracingBridge<SdkLoggerProvider, SdkLogger> =
            OpenTelemetryTracingBridge::new(&self.logs);
        bridge.with_filter(FilterFn::new(is_ours))
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let flushed = [self.spans.force_flush(), self.logs.force_flush()];
        let ended = [self.spans.shutdown(), self.logs.shutdown()];
        if flushed.iter().chain(&ended).any(Result::is_err) {
            eprintln!("sealane: the OpenTelemetry collector did not take the last logs");
        }
    }
}

/// What the export itself logs must not be exported, or it would never end.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    let crates = [
        "h2",
        "hyper",
        "hyper_util",
        "opentelemetry",
        "opentelemetry_otlp",
        "opentelemetry_sdk",
        "tonic",
        "tower",
    ];
    let target = metadata.target().split("::").next().unwrap_or("");
    !crates.contains(&target)
}
