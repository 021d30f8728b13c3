//! Sends a span per decision to an OpenTelemetry collector (OTLP over HTTP). Requires the feature `otlp`.
//!
//! An observer of the limiter creates a span after each decision, which starts at the time of the check. Spans are
//! queued in a bounded queue, and a separate thread sends them in batches. If the collector is slow or unavailable,
//! spans are dropped; no decision waits for it.
//!
//! A span has the verdict (`tidegate.verdict`), the source (`tidegate.source`), the rules (`tidegate.rules`) and the
//! number of limits (`tidegate.limits`). It contains nothing about the client: no key and no address.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use opentelemetry::trace::{Span, SpanBuilder, SpanKind, Tracer, TracerProvider};
use opentelemetry::{Array, KeyValue, StringValue, Value};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tidegate::observe::{DecidedCheck, Observer};
use tidegate::{Clock, Scope, Source, SystemClock};
use tokio::runtime::Handle;

use crate::{Failure, client};

/// Timeout for sending a batch of spans.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// An exporter of spans to a collector. Call [`finish`](SpanExport::finish) to send the queued spans before the process
/// exits.
pub(crate) struct SpanExport(SdkTracerProvider);

impl SpanExport {
    /// Creates an exporter to the collector at this URL, such as `http://127.0.0.1:4318`, and the thread that sends
    /// spans.
    ///
    /// Does not connect. Spans are posted to `/v1/traces` below the URL.
    ///
    /// # Errors
    /// If the URL is not `http` or `https`, or has a user or password.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub(crate) fn new(endpoint: &str) -> Result<SpanExport, Failure> {
        client::http_url("otlp", endpoint, Failure::OtlpUrl)?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Collector(Handle::current()))
            .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
            .with_timeout(SEND_TIMEOUT)
            .build()
            .map_err(|_| Failure::OtlpUrl)?;
        let resource = Resource::builder().with_service_name("tidegate").build();
        Ok(SpanExport(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build()))
    }

    /// Creates an observer that exports a span for each decision.
    pub(crate) fn observer(&self) -> DecisionSpans {
        DecisionSpans { tracer: self.0.tracer("tidegate"), clock: SystemClock::new() }
    }

    /// Sends the queued spans and ends the exporter. An error is logged at debug level. Later decisions are not
    /// exported.
    ///
    /// Blocks the thread. The tokio runtime of [`new`](SpanExport::new) must still be running.
    pub(crate) fn finish(self) {
        if let Err(error) = self.0.shutdown() {
            tracing::debug!(%error, "cannot send the last spans");
        }
    }
}

/// An observer that exports a span for each decision.
pub(crate) struct DecisionSpans {
    tracer: SdkTracer,
    clock: SystemClock,
}

impl Observer for DecisionSpans {
    fn decided(&self, decided: &DecidedCheck<'_>) {
        let end = UNIX_EPOCH + Duration::from_micros(self.clock.now().as_micros());
        let start: SystemTime = end.checked_sub(decided.took).unwrap_or(end);
        let source = decided.result.map_or(Source::None, |decision| decision.source);
        let demands = decided.check.demands();
        let mut rules: Vec<StringValue> = Vec::new();
        for demand in demands {
            if let Scope::Rule(scope) = demand.key.scope()
                && rules.last().is_none_or(|last| last.as_str() != scope.rule())
            {
                rules.push(scope.rule().to_owned().into());
            }
        }
        let attributes = vec![
            KeyValue::new("tidegate.verdict", decided.outcome().as_str()),
            KeyValue::new("tidegate.source", source.as_str()),
            KeyValue::new("tidegate.rules", Value::Array(Array::String(rules))),
            KeyValue::new("tidegate.limits", i64::try_from(demands.len()).unwrap_or(i64::MAX)),
        ];
        let span = SpanBuilder::from_name("decision").with_kind(SpanKind::Server);
        let mut span = self.tracer.build(span.with_start_time(start).with_attributes(attributes));
        span.end_with_timestamp(end);
    }
}

/// The HTTP client of the exporter, which sends each request as a task on this runtime, with a timeout of
/// [`SEND_TIMEOUT`].
#[derive(Debug)]
struct Collector(Handle);

#[async_trait::async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let sending = self.0.spawn(async move {
            let url = request.uri().clone();
            tokio::time::timeout(SEND_TIMEOUT, client::send(&url, request.map(Full::new))).await
        });
        let (status, body) = sending.await??.map_err(|why| -> HttpError { why.into() })?;
        Ok(Response::builder().status(status).body(body)?)
    }
}
