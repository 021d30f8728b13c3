//! The HTTP and the RESP listener on free ports, with a limiter whose clock the test moves.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, CheckOptions, Cost, Decision, Demand, Key, Limiter, ManualClock, OnFailure, Timestamp};
use tidegate_redis::RedisStore;
use tidegate_server::listeners::http::HTTP;
use tidegate_server::listeners::resp::RESP;
use tidegate_server::{ReceiptSecret, ServerOptions, run};
use tidegate_testkit::conformance::{Abilities, Implementation};
use tidegate_testkit::server::{Cluster, Server};
use tokio::runtime::{Builder, Runtime};

/// Long enough for a busy machine: every decision must come from the store.
const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Fixture {
    pub(crate) limiter: Limiter,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) http: SocketAddr,
    pub(crate) resp: SocketAddr,
    runtime: Runtime,
    is_in_memory: bool,
    _redis: Option<Server>,
}

impl Fixture {
    pub(crate) fn in_memory() -> Fixture {
        Fixture::open(None, None)
    }

    pub(crate) fn on_redis() -> Fixture {
        let redis = Server::redis();
        Fixture::open(Some(redis.url()), Some(redis))
    }

    pub(crate) fn on_cluster(cluster: &Cluster) -> Fixture {
        Fixture::open(Some(cluster.url()), None)
    }

    fn open(url: Option<String>, redis: Option<Server>) -> Fixture {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let context = runtime.enter();
        let clock = Arc::new(ManualClock::default());
        let mut limiter = Limiter::builder().clock(clock.clone()).deadline(DEADLINE).on_failure(OnFailure::Deny);
        if let Some(url) = &url {
            let store = RedisStore::builder(url).clock_override(clock.clone()).build().unwrap();
            // A cached denial repeats the store's last answer, which differs from the oracle's a moment later.
            limiter = limiter.store(Arc::new(store)).deny_cache(false);
        }
        let limiter = limiter.build();
        let (http, resp) = (bind(), bind());
        let addresses = (http.local_addr().unwrap(), resp.local_addr().unwrap());
        let [http, resp] = [http, resp].map(|socket| tokio::net::TcpListener::from_std(socket).unwrap());
        let options = ServerOptions::new(limiter.clone()).receipt_secret(ReceiptSecret::new(b"a secret of the tests"));
        runtime.spawn(run([(&HTTP, http), (&RESP, resp)], options, std::future::pending()));
        drop(context);
        let (http, resp) = addresses;
        Fixture { limiter, clock, http, resp, runtime, is_in_memory: url.is_none(), _redis: redis }
    }

    pub(crate) fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    pub(crate) fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub(crate) fn reset(&self, now: Timestamp, demand: &Demand<'_>) {
        self.clock.set(now);
        self.wait(self.limiter.reset(demand)).expect("a reset");
    }

    /// Charges one unit at each instant by the limiter itself, whose counters the listeners use.
    pub(crate) fn fill(&self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        let demand = demand.cost(Cost::ONE);
        for now in instants {
            self.clock.set(now);
            let decision = self.wait(self.limiter.check(&Check::one(&demand))).expect("a decision");
            assert!(decision.allowed(), "filling up at {now:?}: {decision:?}");
        }
    }
}

/// Binds a free port.
fn bind() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

/// Prefixes the subjects of one run, so that runs can share a store.
#[derive(Clone)]
pub(crate) struct Names(String);

impl Names {
    pub(crate) fn unused() -> Names {
        static RUNS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        Names(format!("run {} of ", RUNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed)))
    }

    /// Returns the name of a subject in this run.
    pub(crate) fn name(&self, demand: &Demand<'_>) -> String {
        self.0.clone() + std::str::from_utf8(demand.key.subject()).unwrap()
    }

    /// Calls `call` with the demands under their names in this run.
    pub(crate) fn with<T>(&self, demands: &[Demand<'_>], call: impl FnOnce(&[Demand<'_>]) -> T) -> T {
        let names: Vec<String> = demands.iter().map(|demand| self.name(demand)).collect();
        let mut renamed = Vec::with_capacity(demands.len());
        for (demand, name) in demands.iter().zip(&names) {
            renamed.push(Demand { key: Key::scoped(name, demand.key.scope()).unwrap(), ..*demand });
        }
        call(&renamed)
    }
}

/// The library itself, without a listener.
pub(crate) struct Library<'d> {
    fixture: &'d Fixture,
    names: Names,
}

impl<'d> Library<'d> {
    pub(crate) fn new(fixture: &'d Fixture) -> Library<'d> {
        Library { fixture, names: Names::unused() }
    }
}

impl Implementation for Library<'_> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.fixture.clock.set(now);
        self.names.with(check.demands(), |demands| {
            let check = Check::new(demands).unwrap();
            self.fixture.wait(self.fixture.limiter.check_with(&check, CheckOptions::default())).expect("a decision")
        })
    }

    fn refund(&mut self, now: Timestamp, check: &Check<'_>, decision: &Decision) {
        self.fixture.clock.set(now);
        self.names.with(check.demands(), |demands| {
            let check = Check::new(demands).unwrap();
            self.fixture.wait(self.fixture.limiter.refund(&check, decision)).expect("a refund");
        });
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.names.with(&[*demand], |demands| self.fixture.reset(now, &demands[0]));
    }

    fn abilities(&self) -> Abilities {
        Abilities { fills: self.fixture.is_in_memory(), ..Abilities::default() }
    }

    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.names.with(&[*demand], |demands| self.fixture.fill(&demands[0], instants));
    }
}
