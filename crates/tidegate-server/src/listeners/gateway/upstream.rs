//! Upstreams: which server gets the next request, which servers are avoided, and how many requests run concurrently.
//!
//! **Ejection.** A server that fails three times in a row (it cannot be reached, does not answer in time, or answers
//! with something that is not HTTP) gets no requests for a second, then is tried again. Each further failure doubles
//! the time, up to 30 seconds. Statuses such as 500 are answers, not failures. If all servers of an upstream are
//! ejected, they are used as if none were: another attempt costs little, and a server that has recovered is used at
//! once.
//!
//! **Overload.** An upstream gets at most `max_concurrent` requests at a time. Up to `queue` more wait briefly, first
//! come, first served, and all others are answered with 503. So an overloaded upstream gets only as many requests as it
//! can handle, and clients get an answer before they give up.
//!
//! **Shares.** A client address has at most `max_concurrent_per_address` of these slots, requests in the queue included.
//! Its further requests are answered with 429. So one client, however slow its requests are, cannot take all slots.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use http::HeaderValue;
use parking_lot::Mutex;
use tidegate::engine::Engine;
use tidegate::gateway::{GatewaySettings, Routes, UpstreamSettings};
use tidegate::rules::RequestView;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::connector::{ClientTls, ConnectError, Connector};
use super::pool::{Lease, Pool};
use super::proxy::ProxyError;
use crate::address_slots::{AddressSlot, AddressSlots};
use crate::metrics::UpstreamStats;

/// The number of failures in a row after which a server is ejected.
const FAILURES_MAX: u32 = 3;
/// The duration of the first ejection, and the maximum.
const EJECTION: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// The reason why an upstream cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpstreamError {
    /// The certificate authorities cannot be used.
    #[error("cannot use the certificate authorities for the upstream `{upstream}`: {reason}")]
    Authorities {
        /// The name of the upstream.
        upstream: String,
        /// The reason.
        reason: String,
    },
    /// The host of an `https://` server is not a valid name for a certificate.
    #[error("the host {host} of the upstream `{upstream}` cannot be verified with TLS: {reason}")]
    Name {
        /// The name of the upstream.
        upstream: String,
        /// The host.
        host: String,
        /// The reason.
        reason: String,
    },
}

/// Checks that a gateway can use an upstream: its certificate authorities, and the names of its servers in certificates.
/// Opens no connection.
///
/// # Errors
/// If it cannot, for the reason with which [`Gateway::new`](crate::Gateway::new) would fail.
pub fn check_upstream(settings: &UpstreamSettings) -> Result<(), UpstreamError> {
    Upstream::new(settings, None).map(drop)
}

/// The upstreams of a gateway and the routes to them.
///
/// They are the [`Companion`](tidegate::engine::Companion) of the rules: a reload replaces both in one step, and a
/// request is forwarded to the upstreams of the rules that have admitted it.
#[derive(Debug, Default)]
pub(crate) struct Upstreams {
    routes: Routes,
    upstreams: Vec<Arc<Upstream>>,
}

impl Upstreams {
    /// Creates the upstreams of these settings. Opens no connection.
    ///
    /// An upstream of `running` with the same settings keeps its connections and state; one with the same name keeps
    /// its counters.
    ///
    /// # Errors
    /// If the certificate authorities or the host of an upstream cannot be used.
    pub(crate) fn new(settings: &GatewaySettings, running: Option<&Upstreams>) -> Result<Upstreams, UpstreamError> {
        let running = |name: &str| {
            running.into_iter().flat_map(|running| &running.upstreams).find(|upstream| &*upstream.settings.name == name)
        };
        let upstream = |settings: &UpstreamSettings| match running(&settings.name) {
            Some(upstream) if upstream.settings == *settings => Ok(upstream.clone()),
            before => Upstream::new(settings, before.map(|upstream| upstream.stats.clone())).map(Arc::new),
        };
        let upstreams = settings.upstreams.iter().map(upstream).collect::<Result<_, _>>()?;
        Ok(Upstreams { routes: settings.routes.clone(), upstreams })
    }

    /// Returns the upstreams of the rules that `engine` uses. `None` without a gateway.
    pub(crate) fn of(engine: &Engine) -> Option<Arc<Upstreams>> {
        engine.companion()?.downcast().ok()
    }

    /// Returns the upstream for a request, or `None` if there is no route for it.
    pub(super) fn find(&self, request: &RequestView<'_>) -> Option<&Arc<Upstream>> {
        self.routes.find(request).and_then(|index| self.upstreams.get(index))
    }

    /// Returns the name and the counters of each upstream, in the order of the configuration.
    pub(super) fn stats(&self) -> Vec<(Arc<str>, Arc<UpstreamStats>)> {
        self.upstreams.iter().map(|upstream| (upstream.settings.name.clone(), upstream.stats.clone())).collect()
    }
}

/// A service behind the gateway, with one or more servers.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) settings: UpstreamSettings,
    servers: Vec<Server>,
    next: AtomicUsize,
    slots: Arc<Semaphore>,
    /// The slots of each client address, including those for which a request waits.
    addresses: Arc<AddressSlots>,
    queued: AtomicUsize,
    /// The counters, which survive a reload.
    pub(super) stats: Arc<UpstreamStats>,
}

/// One of the slots of an upstream. It is free again when it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    _permit: OwnedSemaphorePermit,
    _share: Option<AddressSlot>,
}

impl Upstream {
    fn new(settings: &UpstreamSettings, stats: Option<Arc<UpstreamStats>>) -> Result<Upstream, UpstreamError> {
        let uses_tls = settings.servers.iter().any(|url| url.is_tls());
        let tls = uses_tls.then(|| ClientTls::new(&settings.name, settings.authorities.as_deref())).transpose()?;
        let stats = stats.unwrap_or_default();
        let server = |url: &tidegate::gateway::ServerUrl| {
            let connector = Connector::new(&settings.name, url.clone(), tls.as_ref())?;
            let authority = HeaderValue::from_str(url.authority()).expect("the host of a URL is visible ASCII");
            let pool = Pool::new(settings.idle_connections);
            Ok(Server { url: url.to_string(), authority, connector, pool, health: Health::default() })
        };
        Ok(Upstream {
            servers: settings.servers.iter().map(server).collect::<Result<_, _>>()?,
            next: AtomicUsize::new(0),
            slots: Arc::new(Semaphore::new(settings.max_concurrent)),
            addresses: Arc::default(),
            queued: AtomicUsize::new(0),
            stats,
            settings: settings.clone(),
        })
    }

    /// Takes one of the `max_concurrent` slots for a request of the client at `address`, if necessary after a wait in
    /// the queue. Without an address, the request has no share.
    ///
    /// # Errors
    /// Returns [`ProxyError::AddressLimit`] if the address has its share of the slots, and [`ProxyError::Overloaded`] if
    /// the queue is full or the request has waited in it for its timeout.
    pub(super) async fn admit(&self, address: Option<IpAddr>) -> Result<Slot, ProxyError> {
        let share_max = self.settings.share_of_address();
        let share = match address {
            Some(address) => Some(self.addresses.take(address, share_max).ok_or(ProxyError::AddressLimit)?),
            None => None,
        };
        if let Ok(permit) = self.slots.clone().try_acquire_owned() {
            return Ok(Slot { _permit: permit, _share: share });
        }
        let queued = Queued::enter(&self.queued, self.settings.queue).ok_or(ProxyError::Overloaded)?;
        let slot = self.slots.clone().acquire_owned();
        // Boxed, so that the future of a request that need not wait stays small.
        let waited = Box::pin(tokio::time::timeout(self.settings.timeouts.queue, slot)).await;
        drop(queued);
        let permit = waited.ok().and_then(Result::ok).ok_or(ProxyError::Overloaded)?;
        Ok(Slot { _permit: permit, _share: share })
    }

    /// Returns the next server in turn that is neither in `tried` nor ejected; if all others are ejected, one of them.
    /// Also returns its index, for `tried`.
    ///
    /// Returns `None` if all servers are in `tried`.
    pub(super) fn pick(&self, tried: &[usize]) -> Option<(usize, &Server)> {
        let start = self.next.fetch_add(1, Ordering::Relaxed);
        let count = self.servers.len();
        let untried = || (0..count).map(|step| start.wrapping_add(step) % count).filter(|index| !tried.contains(index));
        let index = untried().find(|index| !self.servers[*index].health.is_ejected()).or_else(|| untried().next())?;
        Some((index, &self.servers[index]))
    }

    /// Records a failure of a server, and ejects it after too many in a row.
    pub(super) fn record_failure(&self, server: &Server, reason: &dyn std::fmt::Display) {
        if let Some(ejected) = server.health.fail() {
            self.stats.count_ejection();
            let upstream = &*self.settings.name;
            tracing::warn!(upstream, server = server.url, %reason, ?ejected, "the server keeps failing and is avoided");
        }
    }
}

/// A place in the queue of an upstream.
struct Queued<'q>(&'q AtomicUsize);

impl<'q> Queued<'q> {
    /// Takes a place, or returns `None` if `max` are taken.
    fn enter(queued: &'q AtomicUsize, max: usize) -> Option<Queued<'q>> {
        let entered =
            queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < max).then_some(count + 1));
        entered.ok().map(|_| Queued(queued))
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A server of an upstream.
#[derive(Debug)]
pub(super) struct Server {
    /// The URL, for logs.
    pub(super) url: String,
    /// The value of `Host` if the client's is not preserved.
    pub(super) authority: HeaderValue,
    connector: Connector,
    pool: Arc<Pool>,
    health: Health,
}

impl Server {
    /// Returns an idle connection that may send this request, if there is one.
    pub(super) fn reuse(&self, repeatable: bool) -> Option<Lease> {
        self.pool.take(repeatable)
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// If the server cannot be reached within `timeout`, or its certificate is not accepted.
    pub(super) async fn connect(&self, timeout: Duration) -> Result<Lease, ConnectError> {
        // Boxed, so that the future of a request that needs no new connection stays small.
        Ok(self.pool.lease(Box::pin(self.connector.connect(timeout)).await?))
    }

    /// Records that the server has answered.
    pub(super) fn record_success(&self) {
        self.health.succeed();
    }
}

/// The recent failures of a server.
#[derive(Debug, Default)]
struct Health {
    /// Failures since the last success.
    failures: AtomicU32,
    ejection: Mutex<Ejection>,
}

#[derive(Debug, Default)]
struct Ejection {
    until: Option<Instant>,
    /// Ejections since the last success.
    count: u32,
}

impl Health {
    fn is_ejected(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= FAILURES_MAX
            && self.ejection.lock().until.is_some_and(|until| Instant::now() < until)
    }

    /// Counts a failure. Returns the duration of the ejection if this failure starts one, otherwise `None`.
    fn fail(&self) -> Option<Duration> {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if failures < FAILURES_MAX {
            return None;
        }
        let (mut ejection, now) = (self.ejection.lock(), Instant::now());
        if ejection.until.is_some_and(|until| now < until) {
            return None;
        }
        let [first, longest] = EJECTION;
        let time = first.saturating_mul(1 << ejection.count.min(5)).min(longest);
        *ejection = Ejection { until: Some(now + time), count: ejection.count + 1 };
        Some(time)
    }

    fn succeed(&self) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            let mut ejection = self.ejection.lock();
            *ejection = Ejection::default();
            self.failures.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream(servers: usize, change: impl FnOnce(&mut UpstreamSettings)) -> Upstream {
        let urls = (0..servers).map(|port| format!("http://127.0.0.1:{}", port + 1).parse().unwrap()).collect();
        let mut settings = UpstreamSettings::new("u", urls);
        change(&mut settings);
        Upstream::new(&settings, None).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_is_ejected_after_three_failures_in_a_row_and_tried_again_later() {
        let upstream = upstream(2, |_| {});
        let picked = || upstream.pick(&[]).unwrap().1.url.clone();
        let broken = &upstream.servers[0];
        upstream.record_failure(broken, &"planted");
        upstream.record_failure(broken, &"planted");
        broken.record_success();
        upstream.record_failure(broken, &"planted");
        upstream.record_failure(broken, &"planted");
        assert!((0..4).any(|_| picked() == broken.url), "two failures are not enough");
        upstream.record_failure(broken, &"planted");
        assert!((0..4).all(|_| picked() != broken.url));
        // Requests that were in progress fail as well. This does not prolong the ejection.
        upstream.record_failure(broken, &"planted");
        tokio::time::advance(EJECTION[0]).await;
        assert!((0..2).any(|_| picked() == broken.url), "the time is over");
        upstream.record_failure(broken, &"planted");
        tokio::time::advance(EJECTION[0]).await;
        assert!((0..4).all(|_| picked() != broken.url), "the second time is twice as long");
        tokio::time::advance(EJECTION[0]).await;
        assert!((0..2).any(|_| picked() == broken.url));
        assert_eq!(upstream.stats.ejections(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn if_all_servers_are_ejected_they_are_used_in_turn() {
        let upstream = upstream(2, |_| {});
        for server in &upstream.servers {
            (0..3).for_each(|_| upstream.record_failure(server, &"planted"));
        }
        let (first, _) = upstream.pick(&[]).unwrap();
        let (second, _) = upstream.pick(&[first]).unwrap();
        assert_ne!(first, second);
        assert!(upstream.pick(&[first, second]).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_over_the_bound_wait_in_a_short_queue_in_order() {
        let upstream = Arc::new(upstream(1, |settings| (settings.max_concurrent, settings.queue) = (1, 1)));
        let held = upstream.admit(None).await.unwrap();
        let waiting = tokio::spawn({
            let upstream = upstream.clone();
            async move { upstream.admit(None).await }
        });
        tokio::task::yield_now().await;
        assert_eq!(upstream.admit(None).await.err(), Some(ProxyError::Overloaded), "the queue is full");
        drop(held);
        let admitted = waiting.await.unwrap().unwrap();
        assert_eq!(
            upstream.admit(None).await.err(),
            Some(ProxyError::Overloaded),
            "the wait is over after its timeout"
        );
        drop(admitted);
        assert!(upstream.admit(None).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_has_a_share_of_the_slots() {
        let upstream = upstream(1, |settings| (settings.max_concurrent, settings.queue) = (6, 10));
        let admit = |address: &str| upstream.admit(address.parse().ok());
        let held = [admit("203.0.113.9").await, admit("203.0.113.9").await];
        assert!(held.iter().all(Result::is_ok), "a quarter of six, rounded up");
        assert_eq!(admit("203.0.113.9").await.err(), Some(ProxyError::AddressLimit));
        let others = [admit("203.0.113.10").await, admit("2001:db8::1").await, admit("2001:db8::2").await];
        assert!(others.iter().all(Result::is_ok));
        assert_eq!(admit("2001:db8::3").await.err(), Some(ProxyError::AddressLimit), "an IPv6 client is a /64 network");
        let last = upstream.admit(None).await;
        assert_eq!(
            admit("203.0.113.10").await.err(),
            Some(ProxyError::Overloaded),
            "the wait in the queue was too long"
        );
        drop(held);
        assert!(admit("203.0.113.10").await.is_ok() && admit("203.0.113.9").await.is_ok());
        drop((others, last));
    }
}
