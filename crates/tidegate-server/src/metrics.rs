//! `/metrics`: everything that is counted, read at each scrape.
//!
//! Nothing is kept twice. The engine, the limiter, the listeners and the reloader count what they do. A scrape reads
//! their counters and writes OpenMetrics text, or the older text format of Prometheus (`metrics/format.rs`).
//! `docs/metrics.md` explains each name; a test compares the two.
//!
//! **Labels are bounded and identify no caller.** Label values are names of rules and upstreams (as many as the
//! configuration has) and fixed words. No key, address or plan is a label: that would create a series per caller, and disclose callers to
//! anyone who reads the metrics.

mod format;
mod histogram;
mod listener_stats;
mod store_times;
mod upstream_stats;

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tidegate::engine::Engine;
use tidegate::rules::{LookupStats, Lookups};
use tidegate::{DecisionOutcome, Limiter, LimiterStats, MemoryStore, OutcomeCount, Source, UsedReceiptStats};

pub(crate) use self::format::MetricsFormat;
use self::histogram::Snapshot;
pub(crate) use self::listener_stats::{DecisionStats, HTTP_ERRORS, ListenerStats, RESP_ERRORS, Rejection};
pub use self::store_times::StoreTimes;
pub(crate) use self::upstream_stats::{InFlightGauge, UpstreamFailure, UpstreamStats};
use crate::readiness::Readiness;
use crate::reload::Reloader;

/// The `rule` label of explicit checks. No rule can have this name.
const EXPLICIT: &str = "";
/// The label that names a listener.
const LISTENER: &str = "listener";
/// The label that names an upstream of the gateway.
const UPSTREAM: &str = "upstream";

/// The parts of the server whose counters `/metrics` reports.
pub(crate) struct Metrics {
    limiter: Limiter,
    reloader: Reloader,
    readiness: Readiness,
    decisions: Arc<DecisionStats>,
    store_times: Arc<StoreTimes>,
    listeners: OnceLock<Vec<Arc<ListenerStats>>>,
    upstreams: OnceLock<ReadUpstreams>,
}

/// Returns the name and the counters of each upstream.
type ReadUpstreams = Box<dyn Fn() -> Vec<(Arc<str>, Arc<UpstreamStats>)> + Send + Sync>;

impl Metrics {
    /// Creates metrics that report no listeners until [`set_listeners`](Self::set_listeners).
    pub(crate) fn new(
        limiter: Limiter,
        reloader: Reloader,
        readiness: Readiness,
        decisions: Arc<DecisionStats>,
        store_times: Arc<StoreTimes>,
    ) -> Metrics {
        Metrics {
            limiter,
            reloader,
            readiness,
            decisions,
            store_times,
            listeners: OnceLock::new(),
            upstreams: OnceLock::new(),
        }
    }

    /// Sets the listeners to report, in this order. A second call has no effect.
    pub(crate) fn set_listeners(&self, listeners: Vec<Arc<ListenerStats>>) {
        let _ = self.listeners.set(listeners);
    }

    /// Sets the function that returns the upstreams to report. A second call has no effect.
    pub(crate) fn set_upstreams(
        &self,
        upstreams: impl Fn() -> Vec<(Arc<str>, Arc<UpstreamStats>)> + Send + Sync + 'static,
    ) {
        let _ = self.upstreams.set(Box::new(upstreams));
    }

    /// Returns the current values of all metrics in this format, or `None` if they cannot be encoded.
    pub(crate) fn encode(self: &Arc<Self>, format: MetricsFormat) -> Option<String> {
        let mut registry = Registry::with_prefix("tidegate");
        registry.register_collector(Box::new(Scrape(self.clone())));
        let mut encoded = String::with_capacity(8 * 1024);
        text::encode(&mut encoded, &registry).ok()?;
        Some(format.convert(encoded))
    }

    fn listeners(&self) -> &[Arc<ListenerStats>] {
        self.listeners.get().map_or(&[], Vec::as_slice)
    }

    /// Returns the decisions of explicit checks and of every rule: the name of the rule, its mode, and a count.
    ///
    /// Explicit checks have an empty name and the mode `enforce`.
    fn decisions(&self) -> Vec<(Cow<'static, str>, &'static str, OutcomeCount)> {
        let explicit = self.decisions.explicit.counts().into_iter();
        let mut decisions: Vec<_> = explicit.map(|cell| (EXPLICIT.into(), "enforce", cell)).collect();
        let rules = self.reloader.engine().map(|engine| engine.rule_stats()).unwrap_or_default();
        for rule in rules {
            let name = rule.rule.to_string();
            decisions.extend(rule.counts.iter().map(|cell| (name.clone().into(), rule.mode.as_str(), *cell)));
        }
        decisions
    }
}

/// A collector that reads the current values of all metrics and writes them, for one scrape.
struct Scrape(Arc<Metrics>);

impl std::fmt::Debug for Scrape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scrape")
    }
}

/// The name and value of a label.
type Label<'a> = (&'static str, Cow<'a, str>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let metrics = &*self.0;
        let mut page = MetricsPage(&mut encoder);
        page.decisions(&metrics.decisions())?;
        page.degraded(&metrics.decisions)?;
        page.banned(&metrics.decisions)?;
        let stats = metrics.limiter.stats();
        page.limiter(&stats)?;
        page.memory(&stats, metrics.reloader.engine().map(Engine::shield))?;
        page.histograms("decision_seconds", "Duration of decisions, by source.", "source", metrics.decisions.times())?;
        let help = "Duration of calls to the shared store, by kind of call.";
        page.histograms("store_call_seconds", help, "call", metrics.store_times.read())?;
        page.lookups(metrics.reloader.engine().map(Engine::lookups))?;
        page.reloads(&metrics.reloader)?;
        page.eviction(&metrics.readiness)?;
        page.nodes(&metrics.readiness)?;
        let help = "Number of times the Sentinels named another master, which then holds the counters.";
        page.counter("store_failovers", help, metrics.readiness.failovers())?;
        page.connections(metrics.listeners())?;
        page.requests(metrics.listeners())?;
        page.upstreams(&metrics.upstreams.get().map(|upstreams| upstreams()).unwrap_or_default())?;
        let help = "Whether requests should be sent to this instance: 1 or 0.";
        page.gauge("ready", help, u64::from(metrics.readiness.is_ready()))?;
        page.info("build", "The running version.", &[("version", env!("CARGO_PKG_VERSION"))])
    }
}

struct MetricsPage<'p, 'e>(&'p mut DescriptorEncoder<'e>);

impl MetricsPage<'_, '_> {
    fn info(&mut self, name: &str, help: &str, labels: &[(&'static str, &'static str); 1]) -> std::fmt::Result {
        self.0.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(labels)
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> std::fmt::Result {
        self.counters(name, help, [(Vec::new(), value)])
    }

    fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Vec<Label<'a>>, u64)>,
    ) -> std::fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in series {
            if labels.is_empty() {
                metric.encode_counter::<Vec<Label<'_>>, u64, u64>(&value, None)?
            } else {
                metric.encode_family(&labels)?.encode_counter::<Vec<Label<'_>>, u64, u64>(&value, None)?
            }
        }
        Ok(())
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) -> std::fmt::Result {
        self.gauges(name, help, [(Vec::new(), value)])
    }

    fn gauges<'a>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Vec<Label<'a>>, u64)>,
    ) -> std::fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in series {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            if labels.is_empty() {
                metric.encode_gauge(&value)?
            } else {
                metric.encode_family(&labels)?.encode_gauge(&value)?
            }
        }
        Ok(())
    }

    fn decisions(&mut self, decisions: &[(Cow<'static, str>, &'static str, OutcomeCount)]) -> std::fmt::Result {
        let help = "Decisions by rule (empty for explicit checks), verdict, source and mode.";
        let series = decisions.iter().map(|(rule, mode, cell)| {
            let labels: Vec<Label<'_>> = vec![
                ("rule", Cow::Borrowed(&**rule)),
                ("verdict", cell.outcome.as_str().into()),
                ("source", cell.source.as_str().into()),
                ("mode", (*mode).into()),
            ];
            (labels, cell.count)
        });
        self.counters("decisions", help, series)
    }

    /// Writes the decisions that were made without the store. Each check or request is one decision.
    fn degraded(&mut self, decisions: &DecisionStats) -> std::fmt::Result {
        let policy_of = |cell: &OutcomeCount| match (cell.outcome, cell.source) {
            (DecisionOutcome::Unavailable, _) => Some("unavailable"),
            (DecisionOutcome::Allow | DecisionOutcome::Deny, Source::Local) => Some("local"),
            (DecisionOutcome::Allow, Source::None) => Some("allow"),
            _ => None,
        };
        let answers: Vec<OutcomeCount> = decisions.answers().collect();
        let help = "Checks and requests decided without the store, by failure policy.";
        let series = ["local", "allow", "unavailable"].map(|policy| {
            let cells = answers.iter().filter(|cell| policy_of(cell) == Some(policy));
            (vec![("policy", policy.into())], cells.map(|cell| cell.count).sum())
        });
        self.counters("degraded", help, series)
    }

    fn banned(&mut self, decisions: &DecisionStats) -> std::fmt::Result {
        let series = decisions.banned().map(|(ban, count)| (vec![("ban", Cow::from(ban))], count));
        self.counters("banned_requests", "Checks and requests refused by a ban, by location of the ban.", series)
    }

    fn limiter(&mut self, stats: &LimiterStats) -> std::fmt::Result {
        self.counter("store_calls", "Calls to the shared store.", stats.store_calls)?;
        self.counter("store_failures", "Calls to the shared store that failed.", stats.store_failures)?;
        self.gauge(
            "breaker_open",
            "Whether the circuit breaker is open, so that the store is not called: 1 or 0.",
            u64::from(stats.breaker_open),
        )?;
        self.counter("breaker_opened", "Number of times the circuit breaker opened.", stats.breaker_opened)?;
        let help = "Number of instances among which a quota is divided while the store does not answer.";
        self.gauge("instances", help, stats.instances.into())?;
        let help =
            "Checks of several subjects that were charged in part, then refunded because the rest was not admitted.";
        self.counter("split_checks_refunded", help, stats.split_checks_refunded)?;
        self.counter("deny_cache_hits", "Denials answered from the deny cache.", stats.deny_cache_hits)
    }

    /// Writes the metrics `memory_*`: of the limiter's counters, and of those of shield rules if `shield` is given.
    fn memory(&mut self, stats: &LimiterStats, shield: Option<&MemoryStore>) -> std::fmt::Result {
        let limits = [stats.memory_keys, stats.memory_overflow_keys, stats.memory_bytes, stats.memory_max_bytes];
        let shield_read = shield
            .map(|store| [store.len(), store.overflow_len(), store.bytes_used(), store.max_bytes()].map(|n| n as u64));
        let read: Vec<(&'static str, [u64; 4])> =
            [("limits", limits)].into_iter().chain(shield_read.map(|read| ("shield", read))).collect();
        let column =
            |which: usize| read.iter().map(move |(kind, read)| (vec![("kind", Cow::from(*kind))], read[which]));
        let help = "Counters in process memory: of limits (with a shared store, those of the local shares), and of shield rules.";
        self.gauges("memory_keys", help, column(0))?;
        self.gauges("memory_overflow_keys", "Counters that several keys share because the memory is full.", column(1))?;
        self.gauges("memory_bytes", "Bytes used by counters in process memory.", column(2))?;
        self.gauges("memory_max_bytes", "Bytes that counters in process memory may use.", column(3))?;
        self.used_receipts(stats.used_receipts, shield.map(MemoryStore::used_receipts))
    }

    /// Writes the metrics of used receipts in process memory: of the limiter's, and of those of shield rules if given.
    fn used_receipts(&mut self, limits: UsedReceiptStats, shield: Option<UsedReceiptStats>) -> std::fmt::Result {
        let read: Vec<(&'static str, UsedReceiptStats)> =
            [("limits", limits)].into_iter().chain(shield.map(|read| ("shield", read))).collect();
        let column = |number: fn(&UsedReceiptStats) -> u64| {
            read.iter().map(move |(kind, read)| (vec![("kind", Cow::from(*kind))], number(read)))
        };
        let help = "Bytes that used receipts take in process memory.";
        self.gauges("memory_receipt_bytes", help, column(|read| read.bytes as u64))?;
        let help =
            "Blocks of used receipts in process memory that were dropped before they expired, because it is full.";
        self.counters("memory_receipt_blocks_dropped", help, column(|read| read.dropped_blocks))?;
        let help = "Refunds refused because their receipts expired early in process memory.";
        self.counters("receipts_expired_early", help, column(|read| read.expired_early))
    }

    fn histograms(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        series: impl IntoIterator<Item = (impl AsRef<str>, Snapshot)>,
    ) -> std::fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (value, read) in series {
            let labels = [(label, value.as_ref())];
            let mut family = metric.encode_family(&labels)?;
            family.encode_histogram::<Vec<Label<'_>>>(read.sum_seconds, read.count, &read.buckets, None)?;
        }
        Ok(())
    }

    fn requests(&mut self, listeners: &[Arc<ListenerStats>]) -> std::fmt::Result {
        let times = listeners.iter().map(|stats| (stats.name, stats.request_times.read()));
        let help = "Time from a complete request to its response, by listener.";
        self.histograms("request_seconds", help, LISTENER, times)?;
        let errors = listeners.iter().flat_map(|stats| {
            let labels = |status: &'static str| vec![(LISTENER, stats.name.into()), ("status", status.into())];
            stats.errors.read().map(move |(status, times)| (labels(status), times))
        });
        let help = "Error responses, by listener and status: the HTTP status, or the code of a RESP error.";
        self.counters("error_responses", help, errors)?;
        let rejected = listeners.iter().flat_map(|stats| {
            let labels = |reason: Rejection| vec![(LISTENER, stats.name.into()), ("reason", reason.name().into())];
            stats.rejected().map(move |(reason, times)| (labels(reason), times))
        });
        let help = "Requests rejected because a web page may have sent them, by listener and reason.";
        self.counters("requests_rejected", help, rejected)?;
        let failures = listeners.iter().flat_map(|stats| {
            let labels = |result: &'static str| vec![(LISTENER, stats.name.into()), ("result", result.into())];
            stats.auth_failures().map(move |(result, times)| (labels(result), times))
        });
        let help = "Failed authentication attempts: a wrong secret, or too many pending attempts from the address.";
        self.counters("auth_failures", help, failures)
    }

    /// Writes the metrics of the gateway's upstreams. Without a gateway, they have no series.
    fn upstreams(&mut self, upstreams: &[(Arc<str>, Arc<UpstreamStats>)]) -> std::fmt::Result {
        let times = upstreams.iter().map(|(name, stats)| (&**name, stats.times()));
        let help = "Time from choosing an upstream to the head of its response, including the queue, by upstream.";
        self.histograms("upstream_seconds", help, UPSTREAM, times)?;
        let errors = upstreams.iter().flat_map(|(name, stats)| {
            let labels = |reason: &'static str| vec![(UPSTREAM, Cow::from(&**name)), ("reason", reason.into())];
            stats.errors().map(move |(reason, count)| (labels(reason), count))
        });
        self.counters("upstream_errors", "Requests that an upstream did not answer, by upstream and reason.", errors)?;
        let column = |which: usize| {
            upstreams.iter().map(move |(name, stats)| (vec![(UPSTREAM, Cow::from(&**name))], stats.read()[which]))
        };
        self.gauges("upstream_in_flight", "Requests in progress at an upstream.", column(0))?;
        self.counters("upstream_ejections", "Number of times a server of an upstream was ejected.", column(1))?;
        self.counters("upstream_retries", "Attempts repeated after a connection closed without a response.", column(2))
    }

    /// Writes the metrics of lookups of plans and API keys, with zeros if there are none.
    fn lookups(&mut self, lookups: Option<&Lookups>) -> std::fmt::Result {
        let stats = [
            ("plan", lookups.map(Lookups::plan_stats).unwrap_or_default()),
            ("key", lookups.map(Lookups::key_stats).unwrap_or_default()),
        ];
        let column = |read: fn(&LookupStats) -> u64| {
            stats.iter().map(move |(kind, stats)| (vec![("kind", Cow::from(*kind))], read(stats)))
        };
        let help = "Lookups of plans and API keys that were sent to their source, by kind.";
        self.counters("lookups", help, column(|stats| stats.calls))?;
        let help = "Lookups of plans and API keys without an answer, by kind.";
        self.counters("lookup_failures", help, column(|stats| stats.failures))
    }

    fn reloads(&mut self, reloader: &Reloader) -> std::fmt::Result {
        let history = reloader.history();
        let series = [("ok", history.succeeded), ("failed", history.failed)]
            .map(|(result, times)| (vec![("result", Cow::from(result))], times));
        self.counters("reloads", "Reloads of the configuration, by result.", series)?;
        let series = history.removed.iter().map(|(kind, count)| (vec![("kind", Cow::from(*kind))], *count));
        self.counters("reload_removed", "Parts of the configuration that reloads removed, by kind.", series)?;
        let is_failed = u64::from(history.failure.is_some());
        self.gauge("reload_failed", "Whether the last reload failed: 1 or 0.", is_failed)?;
        let seconds = history.last_success.as_micros() / 1_000_000;
        self.gauge(
            "reload_last_success_timestamp_seconds",
            "Unix time of the last successful reload, or of the start.",
            seconds,
        )
    }

    fn eviction(&mut self, readiness: &Readiness) -> std::fmt::Result {
        let (evicts, evicted) = readiness.eviction();
        let help = "Whether the shared store evicts counters when its memory is full: 1 or 0.";
        self.gauge("store_evicts", help, u64::from(evicts))?;
        let help = "Keys that the shared store reports as evicted since it started.";
        self.gauge("store_evicted_keys", help, evicted.unwrap_or(0))
    }

    /// Writes the state of each master of a cluster, or of the master that Sentinels name. Writes nothing for other
    /// stores.
    fn nodes(&mut self, readiness: &Readiness) -> std::fmt::Result {
        let nodes = readiness.nodes();
        if nodes.is_empty() {
            return Ok(());
        }
        let series = nodes.iter().map(|node| (vec![("node", Cow::from(&*node.address))], u64::from(node.reachable)));
        self.gauges("store_node_reachable", "Whether a master answers: 1 or 0.", series)
    }

    fn connections(&mut self, listeners: &[Arc<ListenerStats>]) -> std::fmt::Result {
        let read: Vec<(&'static str, [u64; 4])> =
            listeners.iter().map(|stats| (stats.name, stats.connections.read())).collect();
        let column = |which: usize| {
            read.iter().map(move |(listener, counts)| (vec![(LISTENER, Cow::from(*listener))], counts[which]))
        };
        self.gauges("connections", "Open connections, by listener.", column(0))?;
        self.counters("connections_accepted", "Connections accepted, by listener.", column(1))?;
        self.counters(
            "connections_refused",
            "Connections refused because of the connection limit, by listener.",
            column(2),
        )?;
        self.counters("connections_evicted", "Connections closed to make room for others, by listener.", column(3))
    }
}
