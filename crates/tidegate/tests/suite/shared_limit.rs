//! A limit that all clients share, beside a client that is over its own limit and keeps 128 requests in flight.
//!
//! On a single server, a check is decided as a whole, so the requests of that client take nothing from the shared limit.
//! On a cluster, the two limits are on different masters, and a check is charged on each of them. The other clients must
//! not lose more than one in a hundred of the requests that a single server admits.
//!
//! The windows are an hour long, so the numbers of admissions do not depend on how fast the machine is. They must not
//! depend on it with the default deadline either: on a busy machine, most replies arrive after it, and the charges of
//! these calls are refunded then. A request that the local share admits counts as admitted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{Check, Decision, Demand, Key, Limit, Limiter, Source, Store};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::server::{Brand, Cluster, Config, Server};

/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The deadline for a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Deadline {
    /// That of the limiter and the store, if none is set.
    Default,
    /// [`TIMEOUT`].
    Long,
}
const IN_FLIGHT: u64 = 128;
/// The quota of each client's own limit.
const OWN: u64 = 10;
/// The number of requests of the other clients, each of which has an address of its own.
const HONEST: u64 = 104;
/// The quota of the shared limit has hardly more room than they need.
const ROOM: u64 = 2;
/// The number of other clients that send requests at the same time.
const HONEST_TASKS: u64 = 8;
/// The number of rounds. Defaults to one.
const ROUNDS_VARIABLE: &str = "TIDEGATE_SHARED_LIMIT_ROUNDS";

/// A limiter on servers behind proxies that add a round trip. The proxies end when this is dropped.
struct Behind {
    deadline: Deadline,
    limiter: Limiter,
    store: Arc<RedisStore>,
    _proxies: Vec<Proxy>,
}

impl Behind {
    /// `prefix` separates the counters of the runs.
    fn new(url: &str, servers: &[&Server], deadline: Deadline, round_trip: Duration, prefix: &str) -> Behind {
        let proxies: Vec<Proxy> = servers.iter().map(|server| Proxy::start(server.addr())).collect();
        if !round_trip.is_zero() {
            proxies.iter().for_each(|proxy| proxy.set(Fault::Delay(round_trip / 2)));
        }
        let routes: Vec<(u16, u16)> =
            servers.iter().zip(&proxies).map(|(server, proxy)| (server.port(), proxy.port())).collect();
        let connect = move |host: &str, port: u16| {
            let through = routes.iter().find(|(behind, _)| *behind == port).map_or(port, |(_, through)| *through);
            let address = format!("{host}:{through}");
            async move {
                let stream = tokio::net::TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                Ok(stream)
            }
        };
        let (mut builder, mut limiter) =
            (RedisStore::builder(url).prefix(prefix).connector(connect), Limiter::builder());
        if deadline == Deadline::Long {
            (builder, limiter) = (builder.call_timeout(TIMEOUT), limiter.deadline(TIMEOUT));
        }
        let store = Arc::new(builder.build().unwrap());
        let limiter = limiter.store(store.clone()).build();
        Behind { deadline, limiter, store, _proxies: proxies }
    }

    /// Returns names of subjects that, on a cluster, are not on the server of the shared one.
    fn others(&self, count: u64) -> Vec<String> {
        let shared = self.store.locate(b"everyone");
        let is_elsewhere = |name: &String| {
            let shard = self.store.locate(name.as_bytes()).shard;
            shard != shared.shard || self.store.shards().len() == 1
        };
        (0..).map(|number| format!("client-{number}")).filter(is_elsewhere).take(count as usize).collect()
    }

    /// Makes the requests of all clients, and returns how many of the honest ones were admitted.
    async fn admitted(&self) -> u64 {
        until("the store answers", async || self.store.check_server().await.is_ok()).await;
        let names = Arc::new(self.others(1 + HONEST));
        let (stop, denied) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let attackers: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                let (limiter, names, stop, denied) =
                    (self.limiter.clone(), names.clone(), stop.clone(), denied.clone());
                tokio::spawn(async move {
                    while !stop.load(Ordering::Relaxed) {
                        let decision = decide(&limiter, &names[0]).await;
                        denied.fetch_add(u64::from(!decision.allowed()), Ordering::Relaxed);
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        // The requests that are in flight when the client reaches its own limit may still take units for a moment.
        until("the client is denied", async || denied.load(Ordering::Relaxed) >= 4 * IN_FLIGHT).await;
        until("these units are refunded", async || {
            let left = self.limiter.inspect(&shared()).await.map_or(0, |status| status.remaining);
            u64::from(left) > HONEST
        })
        .await;
        let honest: Vec<_> = (0..HONEST_TASKS)
            .map(|task| {
                let (limiter, names) = (self.limiter.clone(), names.clone());
                tokio::spawn(async move {
                    let mut decisions = Vec::new();
                    for name in names[1..].iter().skip(task as usize).step_by(HONEST_TASKS as usize) {
                        decisions.push(decide(&limiter, name).await);
                    }
                    decisions
                })
            })
            .collect();
        let mut decisions = Vec::new();
        for task in honest {
            decisions.extend(task.await.unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        for task in attackers {
            task.await.unwrap();
        }
        let may_be_local = self.deadline == Deadline::Default;
        let is_expected = |decision: &Decision| {
            matches!(decision.source, Source::Store | Source::DenyCache)
                || may_be_local && decision.source == Source::Local
        };
        assert!(decisions.iter().all(is_expected), "{decisions:?}");
        let count =
            |is_counted: fn(&Decision) -> bool| decisions.iter().filter(|decision| is_counted(decision)).count();
        let admitted = count(Decision::allowed);
        println!(
            "{:?}: {admitted} of {HONEST} admitted, {} by the local share, {} denied: {:?}",
            self.deadline,
            count(|decision| decision.source == Source::Local),
            denied.load(Ordering::Relaxed),
            self.limiter.stats()
        );
        for denied in decisions.iter().filter(|decision| !decision.allowed()) {
            println!("denied: {denied:?}");
        }
        admitted as u64
    }
}

/// Waits until a condition holds, at most for a minute.
async fn until(what: &str, holds: impl AsyncFn() -> bool) {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("{what}"));
}

fn limit(quota: u64) -> Limit {
    Limit::new(quota, Duration::from_secs(3_600)).unwrap()
}

/// Returns the demand of one unit of the shared limit.
fn shared() -> Demand<'static> {
    Demand::new(limit(OWN + HONEST + ROOM), Key::new("everyone").unwrap())
}

/// Sends a request of this client, which its own limit and the shared one decide.
async fn decide(limiter: &Limiter, client: &str) -> Decision {
    let own = Demand::new(limit(OWN), Key::new(client).unwrap());
    let decision = limiter.check(&Check::new(&[own, shared()]).unwrap()).await.unwrap();
    assert_eq!(decision.limits.len(), 2, "{decision:?}");
    decision
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_over_its_own_limit_does_not_take_a_shared_limit_from_others_on_a_cluster() {
    let rounds: usize = std::env::var(ROUNDS_VARIABLE).map_or(1, |text| text.parse().expect("a number of rounds"));
    // The long run alternates between the brands.
    for (round, brand) in (0..rounds).zip(Brand::ALL.into_iter().cycle()) {
        let (server, cluster) = (Config::new(brand).start(), Cluster::shared(brand));
        let masters: Vec<&Server> = cluster.nodes().iter().collect();
        for deadline in [Deadline::Long, Deadline::Default] {
            let mut admitted = Vec::new();
            for added_ms in [0, 4, 15] {
                let round_trip = Duration::from_millis(added_ms);
                let prefix = format!("shared-{round}-{added_ms}-{deadline:?}");
                let single = Behind::new(&server.url(), &[&server], deadline, round_trip, &prefix).admitted().await;
                assert_eq!(single, HONEST, "a single server, {deadline:?}, {added_ms} ms");
                admitted.push(Behind::new(&cluster.url(), &masters, deadline, round_trip, &prefix).admitted().await);
            }
            let least = HONEST - HONEST / 100;
            assert!(admitted.iter().all(|it| *it >= least), "{brand}, {deadline:?}: {admitted:?} of {HONEST}");
        }
    }
}
