//! `/metrics`: everything that is counted, read when somebody asks.
//!
//! Nothing is kept twice. The engine, the limiter, the doors and the reloader count what they do; a scrape reads them and
//! writes OpenMetrics text, which Prometheus and everything after it reads. `docs/metrics.md` explains each name; a test
//! compares the two.
//!
//! **Bounded, and nobody's name.** Labels are names of rules (as many as the configuration has) and words of ours. No key, address or
//! plan is ever a label: that would be a series per caller, and a list of callers for whoever reads the metrics.

mod histogram;
mod listener_stats;
mod store_times;

use std::borrow::Cow;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tollgate::engine::Engine;
use tollgate::{Counted, DecisionOutcome, Limiter, LimiterStats, MemoryStore, Source};

use self::histogram::Snapshot;
pub(crate) use self::listener_stats::{DecisionStats, ListenerStats, Rejection};
pub use self::store_times::StoreTimes;
use crate::accept::ListenerCounts;
use crate::readiness::Readiness;
use crate::reload::Reloader;

/// What the answer says that it is.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The rule under which decisions without rules are counted. No rule can have this name.
const EXPLICIT: &str = "";

/// Where the numbers come from.
pub(crate) struct Numbers {
    pub(crate) limiter: Limiter,
    pub(crate) reloader: Reloader,
    pub(crate) readiness: Readiness,
    pub(crate) decisions: Arc<DecisionStats>,
    pub(crate) store_times: Arc<StoreTimes>,
    pub(crate) doors: [(&'static str, Arc<ListenerCounts>); 3],
    /// In the order of `doors`.
    pub(crate) listeners: [Arc<ListenerStats>; 3],
}

impl Numbers {
    pub(crate) fn limiter(&self) -> &Limiter {
        &self.limiter
    }

    fn listeners_by_name(&self) -> [(&'static str, &ListenerStats); 3] {
        std::array::from_fn(|index| (self.doors[index].0, &*self.listeners[index]))
    }

    /// All of them, as text.
    pub(crate) fn text(self: &Arc<Self>) -> Option<String> {
        let mut registry = Registry::with_prefix("tollgate");
        registry.register_collector(Box::new(Scrape(self.clone())));
        let mut written = String::with_capacity(8 * 1024);
        text::encode(&mut written, &registry).ok()?;
        Some(written)
    }

    /// (rule, mode, what was said) of everybody who decides.
    fn decisions(&self) -> Vec<(Cow<'static, str>, &'static str, Counted)> {
        let explicit = self.decisions.explicit.counted().into_iter();
        let mut decisions: Vec<_> = explicit.map(|cell| (EXPLICIT.into(), "enforce", cell)).collect();
        let rules = self.reloader.engine().map(|engine| engine.rule_stats()).unwrap_or_default();
        for rule in rules {
            let name = rule.rule.to_string();
            decisions.extend(rule.counts.iter().map(|cell| (name.clone().into(), rule.mode.name(), *cell)));
        }
        decisions
    }
}

/// One reading of all numbers.
struct Scrape(Arc<Numbers>);

impl std::fmt::Debug for Scrape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scrape")
    }
}

/// A label's name and value.
type Label<'a> = (&'static str, Cow<'a, str>);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let numbers = &*self.0;
        let mut page = Page(&mut encoder);
        page.decisions(&numbers.decisions())?;
        let stats = numbers.limiter.stats();
        page.limiter(&stats)?;
        page.memory(&stats, numbers.reloader.engine().map(Engine::shield))?;
        page.histograms("decision_seconds", "Duration of decisions, by source.", "source", numbers.decisions.times())?;
        let help = "How long calls of the shared store took, by what they were for.";
        page.histograms("store_call_seconds", help, "call", numbers.store_times.read())?;
        page.reloads(&numbers.reloader)?;
        page.eviction(&numbers.readiness)?;
        page.connections(&numbers.doors)?;
        page.listeners(&numbers.listeners_by_name())?;
        page.gauge("ready", "Whether work should be sent here: 1 or 0.", u64::from(numbers.readiness.is_ready()))?;
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        self::info(page.0, "build", "What is running.", &version)
    }
}

fn info(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    labels: &[(&'static str, &'static str); 1],
) -> std::fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Info)?.encode_info(labels)
}

struct Page<'p, 'e>(&'p mut DescriptorEncoder<'e>);

impl Page<'_, '_> {
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
            match labels.is_empty() {
                true => metric.encode_counter::<Vec<Label<'_>>, u64, u64>(&value, None)?,
                false => metric.encode_family(&labels)?.encode_counter::<Vec<Label<'_>>, u64, u64>(&value, None)?,
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
            match labels.is_empty() {
                true => metric.encode_gauge(&value)?,
                false => metric.encode_family(&labels)?.encode_gauge(&value)?,
            }
        }
        Ok(())
    }

    fn decisions(&mut self, decisions: &[(Cow<'static, str>, &'static str, Counted)]) -> std::fmt::Result {
        let help = "Decisions by rule (empty: by limits that the question named), verdict, source and mode.";
        let series = decisions.iter().map(|(rule, mode, cell)| {
            let labels: Vec<Label<'_>> = vec![
                ("rule", Cow::Borrowed(&**rule)),
                ("verdict", cell.said.name().into()),
                ("source", cell.source.name().into()),
                ("mode", (*mode).into()),
            ];
            (labels, cell.times)
        });
        self.counters("decisions", help, series)?;

        let is_degraded = |cell: &Counted| match (cell.said, cell.source) {
            (DecisionOutcome::Unavailable, _) => Some("unavailable"),
            (_, Source::Local) => Some("local"),
            (_, Source::None) => Some("allow"),
            _ => None,
        };
        let help = "Decisions that were made without the store, by the policy that made them.";
        let series = ["local", "allow", "unavailable"].map(|policy| {
            let cells = decisions.iter().filter(|(.., cell)| is_degraded(cell) == Some(policy));
            (vec![("policy", policy.into())], cells.map(|(.., cell)| cell.times).sum())
        });
        self.counters("degraded", help, series)
    }

    fn limiter(&mut self, stats: &LimiterStats) -> std::fmt::Result {
        self.counter("store_calls", "Calls to the shared store.", stats.store_calls)?;
        self.counter("store_failures", "Calls to the shared store that failed.", stats.store_failures)?;
        self.gauge("breaker_open", "Whether the store is not being asked: 1 or 0.", u64::from(stats.breaker_open))?;
        self.counter("breaker_opened", "How often the breaker opened.", stats.breaker_opened)?;
        self.counter("deny_cache_hits", "Denials that were remembered.", stats.deny_cache_hits)
    }

    /// Two stores in this process: the limiter's own, and that of the shield rules, which is there once there are rules.
    fn memory(&mut self, stats: &LimiterStats, shield: Option<&MemoryStore>) -> std::fmt::Result {
        let limits = [stats.memory_keys, stats.memory_overflow_keys, stats.memory_bytes, stats.memory_max_bytes];
        let shield = shield
            .map(|store| [store.len(), store.overflow_len(), store.bytes_used(), store.max_bytes()].map(|n| n as u64));
        let read: Vec<(&'static str, [u64; 4])> =
            [("limits", limits)].into_iter().chain(shield.map(|read| ("shield", read))).collect();
        let column =
            |which: usize| read.iter().map(move |(kind, read)| (vec![("kind", Cow::from(*kind))], read[which]));
        let help = "Counters in process memory: of limits (beside a shared store those of the local shares), and of shield rules.";
        self.gauges("memory_keys", help, column(0))?;
        self.gauges("memory_overflow_keys", "Those of them that several keys share, for want of room.", column(1))?;
        self.gauges("memory_bytes", "The bytes that they take.", column(2))?;
        self.gauges("memory_max_bytes", "The most bytes that they may take.", column(3))
    }

    fn histograms(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        series: impl IntoIterator<Item = (&'static str, Snapshot)>,
    ) -> std::fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (value, read) in series {
            let labels = [(label, value)];
            let mut family = metric.encode_family(&labels)?;
            family.encode_histogram::<Vec<Label<'_>>>(read.sum_seconds, read.count, &read.buckets, None)?;
        }
        Ok(())
    }

    fn listeners(&mut self, listeners: &[(&'static str, &ListenerStats)]) -> std::fmt::Result {
        let times = listeners.iter().map(|(door, stats)| (*door, stats.request_times.read()));
        let help = "Time from a whole request to its answer, by listener.";
        self.histograms("request_seconds", help, "door", times)?;
        // Each listener has its own reasons.
        let reasons = |door: &str| match door {
            "resp" => &[Rejection::Http][..],
            "http" => &[Rejection::Origin],
            _ => &[Rejection::Origin, Rejection::Host],
        };
        let rejected = listeners.iter().flat_map(|(door, stats)| {
            let is_its_own = move |(reason, _): &(Rejection, u64)| reasons(door).contains(reason);
            stats
                .rejected()
                .into_iter()
                .filter(is_its_own)
                .map(|(reason, times)| (vec![("door", Cow::from(*door)), ("reason", reason.name().into())], times))
        });
        let help = "Requests that were rejected because a web page seems to have sent them, by listener and reason.";
        self.counters("requests_rejected", help, rejected)?;
        let authenticating = listeners.iter().filter(|(door, _)| *door != "http");
        let failures = authenticating.flat_map(|(door, stats)| {
            let read = ["wrong", "refused"].into_iter().zip(stats.auth_failures.read());
            read.map(|(result, times)| (vec![("door", Cow::from(*door)), ("result", result.into())], times))
        });
        let help = "Failed authentication attempts: with a wrong secret, or refused unseen because too many wait.";
        self.counters("auth_failures", help, failures)
    }

    fn reloads(&mut self, reloader: &Reloader) -> std::fmt::Result {
        let history = reloader.history();
        let series = [("ok", history.succeeded), ("failed", history.failed)]
            .map(|(result, times)| (vec![("result", Cow::from(result))], times));
        self.counters("reloads", "Times that the configuration was read again, by result.", series)?;
        let series = history.removed.iter().map(|(kind, count)| (vec![("kind", Cow::from(*kind))], *count));
        self.counters("reload_removed", "Parts of the configuration that reloads have removed, by kind.", series)?;
        let is_failed = u64::from(history.failure.is_some());
        self.gauge(
            "reload_failed",
            "Whether the last reload failed, so that older rules are in force: 1 or 0.",
            is_failed,
        )?;
        let seconds = history.last_success.as_micros() / 1_000_000;
        self.gauge("reload_last_success_timestamp_seconds", "When what is in force was read, in Unix seconds.", seconds)
    }

    fn eviction(&mut self, readiness: &Readiness) -> std::fmt::Result {
        let (may_forget, evicted) = readiness.eviction();
        let help = "Whether the shared store forgets counters when its memory is full: 1 or 0.";
        self.gauge("store_evicts", help, u64::from(may_forget))?;
        let help = "Keys that the shared store says it has evicted since it started.";
        self.gauge("store_evicted_keys", help, evicted.unwrap_or(0))
    }

    fn connections(&mut self, doors: &[(&'static str, Arc<ListenerCounts>)]) -> std::fmt::Result {
        let read = doors.iter().map(|(door, counts)| (vec![("door", Cow::from(*door))], counts.read()));
        let read: Vec<(Vec<Label<'_>>, [u64; 4])> = read.collect();
        let column = |which: usize| read.iter().map(move |(labels, counts)| (labels.clone(), counts[which]));
        self.gauges("connections", "Connections that are open, by door.", column(0))?;
        self.counters("connections_accepted", "Connections that were let in, by door.", column(1))?;
        self.counters("connections_refused", "Connections for which there was no place, by door.", column(2))?;
        self.counters(
            "connections_evicted",
            "Connections that were closed to make room for others, by door.",
            column(3),
        )
    }
}
