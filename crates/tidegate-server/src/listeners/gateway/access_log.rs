//! The access log: one line per request, on standard output. It is off by default.
//!
//! A line is written when the response has ended, so that it contains the number of bytes, or when the client
//! disconnects before the response; the status is then 499, as in nginx. Lines are written by a separate thread,
//! because a pipe that is not read must not delay requests. If the thread is too slow, lines are dropped, and their
//! number is logged.
//!
//! Unlike the other logs, the access log contains addresses and queries. With `anonymize`, the address is replaced by
//! the pseudonym under which it is counted, and queries and referrers are omitted.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, UNIX_EPOCH};

use http::header::{HOST, HeaderName, REFERER, USER_AGENT};
use http::{Request, StatusCode, Version};
use parking_lot::Mutex;
use serde::Serialize;
use tidegate::engine::{Engine, Outcome};
use tidegate::gateway::AccessLogFormat;
use tidegate::rules::{Facts, RequestView};
use tidegate::{Clock, SystemClock, Timestamp};
use tokio::time::Instant;

use crate::log_limit::LogLimit;

/// The maximum number of lines that wait to be written.
const QUEUE_LINES: usize = 4_096;
/// The status of a request whose client disconnected before the response.
const CLIENT_GONE: u16 = 499;

/// The access log of a gateway.
pub(super) struct AccessLog {
    format: AccessLogFormat,
    lines: SyncSender<String>,
    /// Its rules determine whether addresses are replaced by pseudonyms.
    engine: Engine,
    clock: SystemClock,
    dropped: AtomicU64,
    log: LogLimit,
}

impl AccessLog {
    /// Creates a log in this format and starts the thread that writes it. The rules of `engine` determine the
    /// pseudonyms.
    pub(super) fn new(format: AccessLogFormat, engine: Engine) -> Arc<AccessLog> {
        let (lines, queue) = sync_channel(QUEUE_LINES);
        if let Err(error) = std::thread::Builder::new().name("tidegate-log".to_owned()).spawn(move || write(&queue)) {
            tracing::error!(%error, "cannot start the access log thread; no requests are logged");
        }
        let (dropped, log) = (AtomicU64::new(0), LogLimit::default());
        Arc::new(AccessLog { format, lines, engine, clock: SystemClock::new(), dropped, log })
    }

    /// Begins the entry of a request. It is written when the returned value is dropped.
    pub(super) fn begin<B>(self: &Arc<Self>, request: &Request<B>, peer: IpAddr, began: Instant) -> Arc<LogEntry> {
        let rules = self.engine.rules();
        let (now, view) = (self.clock.now(), RequestView::of(request));
        let facts = Facts::of_request(&rules, &view, peer, None, now);
        let plain = format!("ip:{}", facts.identity().address());
        let stored = rules.identifier().stored_subject(&plain, now);
        let is_anonymous = stored != plain;
        let text = |name: &HeaderName| {
            let value = request.headers().get(name).filter(|_| *name != REFERER || !is_anonymous)?;
            Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let uri = request.uri();
        let path = if is_anonymous { uri.path() } else { uri.path_and_query().map_or("", |path| path.as_str()) };
        let fields = Fields {
            time: rfc3339(now),
            client: stored.strip_prefix("ip:").unwrap_or(&stored).to_owned(),
            method: request.method().to_string(),
            host: text(&HOST).or_else(|| uri.authority().map(|authority| authority.to_string())),
            path: path.to_owned(),
            protocol: protocol(request.version()),
            status: CLIENT_GONE,
            bytes: 0,
            duration_ms: 0.0,
            referer: text(&REFERER),
            user_agent: text(&USER_AGENT),
            decision: "none",
            rule: None,
            upstream: None,
            upstream_ms: None,
        };
        Arc::new(LogEntry { log: self.clone(), began, fields: Mutex::new(fields) })
    }

    fn write(&self, line: String) {
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.lines.try_send(line) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            if self.log.admit().is_some() {
                let dropped = self.dropped.swap(0, Ordering::Relaxed);
                tracing::warn!(dropped, "the access log could not be written fast enough; lines were dropped");
            }
        }
    }
}

/// Writes lines to standard output until the log is dropped or writing fails, for example to a closed pipe.
fn write(queue: &Receiver<String>) {
    while let Ok(mut lines) = queue.recv() {
        while lines.len() < 64 * 1024
            && let Ok(line) = queue.try_recv()
        {
            lines.push_str(&line);
        }
        let mut out = std::io::stdout().lock();
        if out.write_all(lines.as_bytes()).and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

/// The entry of one request. Its line is written when it is dropped.
pub(super) struct LogEntry {
    log: Arc<AccessLog>,
    began: Instant,
    fields: Mutex<Fields>,
}

/// The fields of a line, in the order of the JSON format.
#[derive(Serialize)]
struct Fields {
    time: String,
    client: String,
    method: String,
    host: Option<String>,
    path: String,
    protocol: &'static str,
    status: u16,
    bytes: u64,
    duration_ms: f64,
    referer: Option<String>,
    user_agent: Option<String>,
    /// The outcome: `allow`, the code of the refusal, or `none` if no rule applied.
    decision: &'static str,
    /// The rule that refused the request, or the first one that admitted it.
    rule: Option<String>,
    upstream: Option<String>,
    upstream_ms: Option<f64>,
}

impl LogEntry {
    /// Adds the outcome of the rules.
    pub(super) fn decided(&self, outcome: &Outcome) {
        let (decision, rule) = match outcome {
            Outcome::Admitted(permit) => {
                let rule = permit.policies().and_then(|policies| policies.policies().find_map(|policy| policy.rule()));
                (if permit.decision().is_some() { "allow" } else { "none" }, rule.map(str::to_owned))
            }
            Outcome::Refused(refusal) => (refusal.verdict().error(), refusal.fields().rule().map(str::to_owned)),
        };
        let mut fields = self.fields.lock();
        (fields.decision, fields.rule) = (decision, rule);
    }

    /// Adds the upstream, and the time until the head of its response, or `None` if there was none.
    pub(super) fn forwarded(&self, upstream: &str, took: Option<Duration>) {
        let mut fields = self.fields.lock();
        (fields.upstream, fields.upstream_ms) = (Some(upstream.to_owned()), took.map(milliseconds));
    }

    /// Adds the status of the response.
    pub(super) fn responded(&self, status: StatusCode) {
        self.fields.lock().status = status.as_u16();
    }

    /// Adds bytes of the response body.
    pub(super) fn sent(&self, bytes: usize) {
        self.fields.lock().bytes += bytes as u64;
    }
}

impl Drop for LogEntry {
    fn drop(&mut self) {
        let fields = self.fields.get_mut();
        fields.duration_ms = milliseconds(self.began.elapsed());
        let mut line = match self.log.format {
            AccessLogFormat::Combined => combined(fields),
            _ => serde_json::to_string(fields).unwrap_or_default(),
        };
        line.push('\n');
        self.log.write(line);
    }
}

/// Returns a duration in milliseconds, with microseconds as decimals.
fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1_000.0
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "HTTP/1.0",
        Version::HTTP_2 => "HTTP/2.0",
        _ => "HTTP/1.1",
    }
}

/// Returns a time such as `2026-01-31T12:00:00.000Z`.
fn rfc3339(now: Timestamp) -> String {
    humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_micros(now.as_micros())).to_string()
}

/// Returns a line in the combined format, followed by the fields of the decision and the upstream.
fn combined(fields: &Fields) -> String {
    let optional = |value: &Option<String>| escaped(value.as_deref().unwrap_or("-"));
    let mut line = format!(
        "{} - - [{}] \"{} {} {}\" {} {} \"{}\" \"{}\"",
        escaped(&fields.client),
        clf_time(&fields.time),
        escaped(&fields.method),
        escaped(&fields.path),
        fields.protocol,
        fields.status,
        fields.bytes,
        optional(&fields.referer),
        optional(&fields.user_agent),
    );
    let _ = write!(
        line,
        " decision={} rule={} upstream={} upstream_ms={} duration_ms={}",
        fields.decision,
        optional(&fields.rule),
        fields.upstream.as_deref().unwrap_or("-"),
        fields.upstream_ms.map_or("-".to_owned(), |ms| ms.to_string()),
        fields.duration_ms,
    );
    line
}

/// Returns a text in which quotes, backslashes and all characters outside printable ASCII are escaped.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' | 0..=31 | 127.. => {
                let _ = write!(escaped, "\\x{byte:02x}");
            }
            _ => escaped.push(char::from(byte)),
        }
    }
    escaped
}

/// Converts `2026-01-31T12:00:00.000Z` to `31/Jan/2026:12:00:00 +0000`.
fn clf_time(rfc3339: &str) -> String {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let part = |range: std::ops::Range<usize>| rfc3339.get(range).unwrap_or_default();
    let month = part(5..7).parse::<usize>().ok().and_then(|month| MONTHS.get(month.wrapping_sub(1)));
    format!("{}/{}/{}:{} +0000", part(8..10), month.unwrap_or(&"Jan"), part(0..4), part(11..19))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_combined_format_escapes_what_a_client_sends() {
        let fields = Fields {
            time: rfc3339(Timestamp::from_micros(1_700_000_000_123_456)),
            client: "203.0.113.9".to_owned(),
            method: "GET".to_owned(),
            host: Some("a".to_owned()),
            path: "/a?\"b".to_owned(),
            protocol: "HTTP/1.1",
            status: 200,
            bytes: 5,
            duration_ms: 1.5,
            referer: None,
            user_agent: Some("x\n\u{e9}\\".to_owned()),
            decision: "allow",
            rule: Some("api".to_owned()),
            upstream: Some("web".to_owned()),
            upstream_ms: Some(1.25),
        };
        let expected = "203.0.113.9 - - [14/Nov/2023:22:13:20 +0000] \"GET /a?\\x22b HTTP/1.1\" 200 5 \"-\" \
                        \"x\\x0a\\xc3\\xa9\\x5c\" decision=allow rule=api upstream=web upstream_ms=1.25 duration_ms=1.5";
        assert_eq!(combined(&fields), expected);
    }
}
