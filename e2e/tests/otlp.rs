//! Logs and spans arrive at an OpenTelemetry collector: a small one in the test's own process, over gRPC.
//! Telemetry is set up once per process, so this file holds one test.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use chassis::telemetry::{self, LogFormat, LogOptions};
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{ExportLogsServiceRequest, ExportLogsServiceResponse};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Keeps what it is sent.
#[derive(Clone, Default)]
struct Collector {
    logs: Arc<Mutex<Vec<ExportLogsServiceRequest>>>,
    traces: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

#[tonic::async_trait]
impl LogsService for Collector {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        self.logs.lock().map_err(|_| Status::internal("poisoned"))?.push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.traces.lock().map_err(|_| Status::internal("poisoned"))?.push(request.into_inner());
        Ok(Response::new(Default::default()))
    }
}

fn text(value: &Option<AnyValue>) -> String {
    match value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}

fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    attributes.iter().find(|one| one.key == key).map(|one| text(&one.value))
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_and_their_spans_arrive_at_a_collector_before_the_process_ends() -> Result<()> {
    let collector = Collector::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let server = tonic::transport::Server::builder()
        .add_service(LogsServiceServer::new(collector.clone()))
        .add_service(TraceServiceServer::new(collector.clone()));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));

    let levels = "info".to_owned();
    let options = LogOptions { levels, format: LogFormat::Text, otlp: Some(endpoint) };
    let telemetry = telemetry::init(&options)?;
    tracing::info_span!("restore", topic = "orders").in_scope(|| {
        tracing::warn!(partition = 3, "a segment is damaged");
        tracing::debug!("nobody asked for this");
    });
    // What waits leaves with it.
    tokio::task::spawn_blocking(move || drop(telemetry)).await?;

    let logs = collector.logs.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.clone();
    let resource = logs.first().and_then(|sent| sent.resource_logs.first()?.resource.clone());
    let service = resource.and_then(|resource| attribute(&resource.attributes, "service.name"));
    ensure!(service.as_deref() == Some("sealane"), "the service is {service:?}");
    let records: Vec<_> = logs
        .iter()
        .flat_map(|sent| &sent.resource_logs)
        .flat_map(|resource| &resource.scope_logs)
        .flat_map(|scope| &scope.log_records)
        .collect();
    let log = records.iter().find(|record| text(&record.body) == "a segment is damaged");
    let log = log.context("the line did not arrive")?;
    ensure!(log.severity_text == "WARN", "{}", log.severity_text);
    ensure!(attribute(&log.attributes, "partition").as_deref() == Some("3"), "{:?}", log.attributes);
    ensure!(!records.iter().any(|record| text(&record.body).contains("nobody asked")), "a level too many");

    let traces = collector.traces.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.clone();
    let spans =
        traces.iter().flat_map(|sent| &sent.resource_spans).flat_map(|resource| &resource.scope_spans);
    let span = spans.flat_map(|scope| &scope.spans).find(|span| span.name == "restore");
    let span = span.context("the span did not arrive")?;
    ensure!(attribute(&span.attributes, "topic").as_deref() == Some("orders"), "{:?}", span.attributes);
    ensure!(log.trace_id == span.trace_id && log.span_id == span.span_id, "the line is of another span");
    Ok(())
}
