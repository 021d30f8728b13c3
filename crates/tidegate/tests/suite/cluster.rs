//! A limiter on a cluster: each master has its own circuit breaker, and a check may have subjects on several masters.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, CheckOptions, Cost, Decision, Demand, Key, Limit, Limiter, Redeemed, Source, Store, Wait};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::server::{Brand, Cluster, Config, Server};
use tokio::time::sleep;

/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A store and a limiter on it, and a subject on each of the first three nodes.
struct Fixture {
    store: Arc<RedisStore>,
    limiter: Limiter,
    subjects: Vec<String>,
}

impl Fixture {
    async fn new(cluster: &Cluster, prefix: &str) -> Fixture {
        let builder = RedisStore::builder(cluster.url()).prefix(prefix).call_timeout(TIMEOUT).bans(true);
        Fixture::on(cluster, builder.build().unwrap(), TIMEOUT).await
    }

    async fn on(cluster: &Cluster, store: RedisStore, deadline: Duration) -> Fixture {
        store.check_server().await.unwrap();
        let shards = store.shards();
        let subject_on = |node: &Server| {
            let port = format!(":{}", node.port());
            let shard = shards.iter().find(|shard| shard.address.as_ref().unwrap().ends_with(&port)).unwrap().id;
            let mut names = (0..).map(|number| format!("user:{number}"));
            names.find(|name| store.locate(name.as_bytes()).shard == shard).unwrap()
        };
        let subjects = cluster.nodes()[..3].iter().map(subject_on).collect();
        let store = Arc::new(store);
        let limiter = Limiter::builder().store(store.clone()).deadline(deadline).build();
        Fixture { store, limiter, subjects }
    }

    fn demand<'a>(&'a self, limit: &str, subject: usize) -> Demand<'a> {
        Demand::new(limit.parse().unwrap(), Key::new(&self.subjects[subject]).unwrap())
    }

    async fn source(&self, subject: usize) -> Source {
        let demand = self.demand("1000000/h", subject);
        self.limiter.check(&Check::one(&demand)).await.unwrap().source
    }

    async fn remaining(&self, demand: &Demand<'_>) -> u32 {
        self.limiter.inspect(demand).await.unwrap().remaining
    }

    /// Checks the subject again and again until the decision has this source.
    async fn until_decided_by(&self, subject: usize, source: Source) {
        for _ in 0..3_000 {
            if self.source(subject).await == source {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("no decision has the source {source:?}: {:?}", self.limiter.stats());
    }

    /// Returns the ports of the servers whose breaker is open.
    fn open_ports(&self) -> Vec<u16> {
        let servers = self.limiter.servers().into_iter().filter(|server| server.breaker_open);
        servers.map(|server| server.address.unwrap().rsplit_once(':').unwrap().1.parse().unwrap()).collect()
    }
}

#[tokio::test]
async fn lost_master_degrades_only_its_own_keys_and_heals_after_a_restart() {
    // No failover within the test.
    let cluster = Cluster::with(&Config::new(Brand::Redis).set("cluster-node-timeout", "600000"));
    let fixture = Fixture::new(&cluster, "lost").await;
    for subject in 0..3 {
        assert_eq!(fixture.source(subject).await, Source::Store);
    }
    let lost = &cluster.nodes()[0];
    lost.kill9();
    for _ in 0..50 {
        assert_eq!(fixture.source(0).await, Source::Local);
        assert_eq!(fixture.source(1).await, Source::Store);
        assert_eq!(fixture.source(2).await, Source::Store);
    }
    assert_eq!(fixture.open_ports(), [lost.port()]);
    let before = fixture.limiter.stats();
    assert!(before.breaker_open);
    // With the breaker open, its keys do not call the store.
    for _ in 0..50 {
        assert_eq!(fixture.source(0).await, Source::Local);
    }
    assert_eq!(fixture.limiter.stats().store_calls, before.store_calls);
    // A check with a subject on the lost master charges no other one.
    let both = [fixture.demand("10/min", 0), fixture.demand("10/min", 1)];
    assert_eq!(fixture.limiter.check(&Check::new(&both).unwrap()).await.unwrap().source, Source::Local);
    assert_eq!(fixture.remaining(&both[1]).await, 10);

    lost.restart();
    fixture.until_decided_by(0, Source::Store).await;
    assert!(fixture.open_ports().is_empty() && !fixture.limiter.stats().breaker_open);
    assert_eq!(fixture.limiter.stats().breaker_opened, 1);
}

#[tokio::test]
async fn keys_of_a_killed_master_are_decided_by_its_promoted_replica() {
    for brand in Brand::ALL {
        let cluster = Cluster::with(&Config::new(brand).set("cluster-node-timeout", "1500"));
        let fixture = Fixture::new(&cluster, "killed").await;
        assert_eq!(fixture.source(0).await, Source::Store);
        cluster.nodes()[0].kill9();
        let replica = &cluster.nodes()[3];
        let mut others = Vec::new();
        let is_promoted = || replica.command(&["ROLE"]).items()[0].text() == "master";
        while !is_promoted() {
            others.extend([fixture.source(1).await, fixture.source(2).await]);
            let source = fixture.source(0).await;
            assert!(source == Source::Local || is_promoted(), "{brand} {source:?}");
        }
        assert!(others.iter().all(|source| *source == Source::Store), "{brand} {others:?}");
        fixture.until_decided_by(0, Source::Store).await;
    }
}

/// Cuts, delays and swallows the bytes between this process and one master.
#[tokio::test]
async fn network_fault_to_one_master_degrades_only_its_own_keys() {
    let cluster = Cluster::with(&Config::new(Brand::Redis).set("cluster-node-timeout", "600000"));
    let proxy = Proxy::start(cluster.nodes()[0].addr());
    let (behind, through) = (cluster.nodes()[0].port(), proxy.addr());
    let connect = move |host: &str, port: u16| {
        let address = if port == behind { through.to_string() } else { format!("{host}:{port}") };
        async move {
            let stream = tokio::net::TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        }
    };
    let builder = RedisStore::builder(cluster.url()).prefix("cut").connector(connect);
    // Some faults end only by these timeouts, and on a busy machine the calls to the other masters must not exceed them.
    let store = builder.call_timeout(Duration::from_secs(2)).build().unwrap();
    let fixture = Fixture::on(&cluster, store, Duration::from_secs(4)).await;
    for fault in [Fault::Cut, Fault::Reset, Fault::Blackhole, Fault::Hold] {
        for subject in 0..3 {
            fixture.until_decided_by(subject, Source::Store).await;
        }
        proxy.set(fault);
        for _ in 0..20 {
            assert_eq!(fixture.source(0).await, Source::Local, "{fault:?}");
            assert_eq!(fixture.source(1).await, Source::Store, "{fault:?}");
            assert_eq!(fixture.source(2).await, Source::Store, "{fault:?}");
        }
        proxy.set(Fault::Pass);
    }
    fixture.until_decided_by(0, Source::Store).await;
    assert_eq!(fixture.store.stats().panics, 0);
}

#[tokio::test]
async fn check_of_subjects_on_several_masters_is_charged_as_a_whole_or_not_at_all() {
    for brand in Brand::ALL {
        let cluster = Cluster::shared(brand);
        let fixture = Fixture::new(&cluster, "whole").await;
        let limiter = &fixture.limiter;
        let limits = ["10/h", "5/h sliding-counter", "3/h token-bucket"];
        let demands = [0, 1, 2].map(|subject| fixture.demand(limits[subject], subject));
        let check = Check::new(&demands).unwrap();
        for round in 1..=3 {
            let decision = limiter.check(&check).await.unwrap();
            assert_eq!((decision.source, decision.allowed()), (Source::Store, true), "{brand}");
            let remaining: Vec<u32> = decision.limits.iter().map(|status| status.remaining).collect();
            assert_eq!(remaining, [10 - round, 5 - round, 3 - round], "{brand}");
        }
        // The third limit is used up: nothing is charged, however often it is tried, and nothing is cached.
        for _ in 0..5 {
            let decision = limiter.check(&check).await.unwrap();
            assert_eq!((decision.source, decision.allowed()), (Source::Store, false), "{brand}");
            let allowed: Vec<bool> = decision.limits.iter().map(|status| status.allowed).collect();
            assert_eq!(allowed, [true, true, false], "{brand}");
            let remaining: Vec<u32> = decision.limits.iter().map(|status| status.remaining).collect();
            assert_eq!(remaining, [7, 2, 0], "{brand}");
            assert!(decision.retry_after() > Wait::ZERO, "{brand}");
        }
        for (demand, remaining) in demands.iter().zip([7, 2, 0]) {
            assert_eq!(fixture.remaining(demand).await, remaining, "{brand}");
        }
        assert_eq!(limiter.stats().split_checks_refunded, 5, "{brand}");

        // A ban of one subject refuses the check, and charges nothing.
        limiter.reset(&demands[2]).await.unwrap();
        limiter.ban(fixture.subjects[1].as_bytes(), None).await.unwrap();
        let banned = limiter.check(&check).await.unwrap();
        assert_eq!((banned.ban, banned.limits.len()), (Some(Wait::NEVER), 3), "{brand}");
        limiter.unban(fixture.subjects[1].as_bytes()).await.unwrap();
        for (demand, remaining) in demands.iter().zip([7, 2, 3]) {
            assert_eq!(fixture.remaining(demand).await, remaining, "{brand}");
        }

        // A limit with `count_denied` keeps its charge.
        let counting = demands[0].limit.with_count_denied(true);
        let demands = [Demand { limit: counting, ..demands[0] }, demands[2].cost(4)];
        assert!(!limiter.check(&Check::new(&demands).unwrap()).await.unwrap().allowed(), "{brand}");
        assert_eq!((fixture.remaining(&demands[0]).await, fixture.remaining(&demands[1]).await), (6, 3), "{brand}");
    }
}

#[tokio::test]
async fn charge_on_several_masters_is_refunded_and_redeemed_on_each() {
    for brand in Brand::ALL {
        let cluster = Cluster::shared(brand);
        let fixture = Fixture::new(&cluster, "refund").await;
        let limiter = &fixture.limiter;
        let limits = ["10/h", "5000/h", "10/h sliding-counter", "10/h token-bucket", "10/h fixed-window"];
        for limit in limits {
            let quota = limit.parse::<Limit>().unwrap().quota();
            let demands = [0, 1, 2].map(|subject| fixture.demand(limit, subject).cost(4));
            let check = Check::new(&demands).unwrap();
            let options = CheckOptions { refundable: true, ..CheckOptions::default() };
            let remaining = async || {
                let [one, other, last] = &demands;
                [fixture.remaining(one).await, fixture.remaining(other).await, fixture.remaining(last).await]
            };
            let decision = limiter.check_with(&check, options).await.unwrap();
            assert_eq!(remaining().await, [quota - 4; 3], "{brand} {limit}");
            limiter.refund(&check, &decision).await.unwrap();
            assert_eq!(remaining().await, [quota; 3], "{brand} {limit}");

            // Two units of the first, all of the second, six of the third.
            let decision = limiter.check_with(&check, options).await.unwrap();
            let (id, actual) = (limiter.receipt_id(&check), [2, 4, 6].map(Cost::new));
            let expected = [quota - 2, quota - 4, quota - 6];
            for outcome in [Redeemed::Done, Redeemed::AlreadyUsed] {
                assert_eq!(limiter.redeem(id, &check, &decision, &actual).await.unwrap(), outcome, "{brand} {limit}");
                assert_eq!(remaining().await, expected, "{brand} {limit}");
            }
            // Another use of the id changes no part, not even one that had no difference.
            let other = [4, 0, 4].map(Cost::new);
            assert_eq!(limiter.redeem(id, &check, &decision, &other).await.unwrap(), Redeemed::AlreadyUsed);
            assert_eq!(remaining().await, expected, "{brand} {limit}");
            limiter.settle(&check, &decision, Cost::new(5)).await.unwrap();
            assert_eq!(remaining().await, expected.map(|remaining| remaining - 1), "{brand} {limit}");

            // A receipt as text carries the times of all servers.
            let decision = limiter.check_with(&check, options).await.unwrap_or_else(|error| panic!("{error}"));
            if decision.allowed() {
                let receipt = limiter.receipt(&check, &decision).unwrap();
                let receipt = tidegate::receipt::Receipt::decode(&receipt.encode()).unwrap();
                let redeemed = limiter.redeem_receipt(&receipt, tidegate::receipt::Settlement::Refund).await.unwrap();
                assert_eq!(redeemed, Redeemed::Done, "{brand} {limit}");
                assert_eq!(remaining().await, expected.map(|remaining| remaining - 1), "{brand} {limit}");
            }
            for demand in &demands {
                limiter.reset(demand).await.unwrap();
            }
        }
    }
}

/// Several nodes with checks of two subjects each: denied checks give back what they charged, and no window is exceeded.
#[tokio::test]
async fn checks_of_two_subjects_exceed_no_quota() {
    const SUBJECTS: usize = 20;
    const QUOTA: u32 = 20;
    let cluster = Cluster::shared(Brand::Redis);
    let limit: Limit = format!("{QUOTA}/200ms").parse().unwrap();
    let tasks: Vec<_> = (0..3_u64)
        .flat_map(|node| {
            let builder = RedisStore::builder(cluster.url()).prefix("pairs").call_timeout(TIMEOUT);
            let limiter = Limiter::builder().store(Arc::new(builder.build().unwrap())).deadline(TIMEOUT).build();
            (0..8_u64).map(move |task| (limiter.clone(), Random::new(node * 100 + task)))
        })
        .map(|(limiter, mut random)| {
            tokio::spawn(async move {
                let mut admitted: HashMap<usize, Vec<(u64, u32)>> = HashMap::new();
                let subjects: Vec<String> = (0..SUBJECTS).map(|number| format!("pair-{number}")).collect();
                for _ in 0..1_000 {
                    let first = random.below(SUBJECTS as u64) as usize;
                    let second = (first + 1 + random.below(SUBJECTS as u64 - 1) as usize) % SUBJECTS;
                    let cost = 1 + random.below(3) as u32;
                    let demands =
                        [first, second].map(|it| Demand::new(limit, Key::new(&subjects[it]).unwrap()).cost(cost));
                    let decision: Decision = limiter.check(&Check::new(&demands).unwrap()).await.unwrap();
                    assert_ne!(decision.source, Source::Local);
                    for (counter, status) in [first, second].into_iter().zip(&decision.limits) {
                        if decision.allowed() {
                            let at_us = decision.at.as_micros() + u64::from(status.late_us);
                            admitted.entry(counter).or_default().push((at_us, cost));
                        }
                    }
                }
                (admitted, limiter)
            })
        })
        .collect();
    let (mut admitted, mut given_back, mut allowed) = (HashMap::<usize, Vec<(u64, u32)>>::new(), HashMap::new(), 0);
    for (index, task) in tasks.into_iter().enumerate() {
        let (own, limiter) = task.await.unwrap();
        own.into_iter().for_each(|(counter, own)| admitted.entry(counter).or_default().extend(own));
        let stats = limiter.stats();
        allowed = allowed.max(stats.allowed);
        given_back.insert(index / 8, stats.split_checks_refunded);
    }
    for (counter, mut admitted) in admitted {
        admitted.sort_unstable();
        for (index, &(end_us, _)) in admitted.iter().enumerate() {
            let window = admitted[..=index].iter().rev().take_while(|(at_us, _)| at_us + limit.window_us() > end_us);
            let units: u32 = window.map(|(_, cost)| cost).sum();
            assert!(units <= QUOTA, "{units} units of {QUOTA} on counter {counter}");
        }
    }
    println!("given back by node: {given_back:?}");
    assert!(allowed > 0 && given_back.values().sum::<u64>() > 0, "{given_back:?}");
}
