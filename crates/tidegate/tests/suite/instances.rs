//! Limiters on one store count each other, on every kind of store and with the intervals of production.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate::{Limit, Limiter, Source};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::server::{Brand, Cluster, Config, SentinelGroup, Server};
use tokio::runtime::Runtime;
use tokio::time::sleep;

const PATIENCE: Duration = Duration::from_secs(10);
const PREFIX: &str = "counted";

fn limiter(url: &str) -> Limiter {
    let store = RedisStore::builder(url).prefix(PREFIX).call_timeout(PATIENCE).build().unwrap();
    Limiter::builder().store(Arc::new(store)).build()
}

/// Waits until every limiter knows that there are as many instances.
async fn until_counted(limiters: &[Limiter], url: &str) {
    for _ in 0..1_200 {
        if limiters.iter().all(|limiter| limiter.stats().instances as usize == limiters.len()) {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    panic!("{url}: {:?}", limiters.iter().map(|limiter| limiter.stats().instances).collect::<Vec<_>>());
}

async fn assert_counted(url: &str) {
    let mut limiters: Vec<Limiter> = (0..3).map(|_| limiter(url)).collect();
    until_counted(&limiters, url).await;
    limiters.push(limiter(url));
    until_counted(&limiters, url).await;
    drop(limiters.pop());
    until_counted(&limiters, url).await;
    limiters.pop().unwrap().withdraw().await;
    until_counted(&limiters, url).await;
}

#[tokio::test]
async fn limiters_on_one_store_count_each_other() {
    for brand in Brand::ALL {
        let (server, cluster) = (Config::new(brand).start(), Cluster::shared(brand));
        let sentinels = SentinelGroup::shared(brand);
        let urls = [server.url(), cluster.url(), sentinels.url()];
        join_all(urls.iter().map(|url| assert_counted(url))).await;
    }
}

/// Servers that are reached through proxies, so that the network between instances and servers can be cut.
struct Deployment {
    /// The servers, which run until this is dropped.
    _servers: Servers,
    addresses: Vec<SocketAddr>,
    scheme: &'static str,
}

enum Servers {
    One(#[expect(dead_code, reason = "keeps the server running")] Server),
    Cluster(#[expect(dead_code, reason = "keeps the nodes running")] Cluster),
}

impl Deployment {
    fn server(brand: Brand) -> Deployment {
        let server = Config::new(brand).start();
        Deployment { addresses: vec![server.addr()], scheme: "redis", _servers: Servers::One(server) }
    }

    /// The nodes do not announce their host, so a client uses the one through which it reached the first node.
    fn cluster(brand: Brand) -> Deployment {
        let cluster = Cluster::with(&Config::new(brand).set("cluster-preferred-endpoint-type", "unknown-endpoint"));
        let addresses = cluster.nodes().iter().map(Server::addr).collect();
        Deployment { addresses, scheme: "redis+cluster", _servers: Servers::Cluster(cluster) }
    }

    /// Returns the network on which the servers have this address, with the ports that they have on 127.0.0.1.
    fn network(&self, address: [u8; 4]) -> Network {
        let proxy = |server: &SocketAddr| Proxy::start_on((address, server.port()).into(), *server);
        let proxies: Vec<Proxy> = self.addresses.iter().map(proxy).collect();
        Network { url: format!("{}://{}", self.scheme, proxies[0].addr()), proxies }
    }
}

/// A way to all servers of a deployment, which can be cut.
struct Network {
    url: String,
    proxies: Vec<Proxy>,
}

impl Network {
    /// Creates an instance whose decisions wait for the store even on a busy machine. It does not cache denials, which
    /// would hold for a second of an outage.
    fn instance(&self) -> Limiter {
        let store = RedisStore::builder(&self.url).prefix(PREFIX).call_timeout(PATIENCE).build().unwrap();
        Limiter::builder().store(Arc::new(store)).deadline(PATIENCE).deny_cache(false).build()
    }

    fn set(&self, fault: Fault) {
        self.proxies.iter().for_each(|proxy| proxy.set(fault));
    }
}

/// Returns keys that nothing else uses, one on each master.
fn keys_on_each_master(instance: &Limiter, deployment: &Deployment, phase: &str) -> Vec<String> {
    let masters = deployment.addresses.len().div_ceil(2);
    let mut keys = HashMap::new();
    for key in (0..).map(|number| format!("{phase}:{number}")) {
        keys.entry(instance.locate(key.as_bytes()).map(|place| place.node)).or_insert(key);
        if keys.len() == masters {
            break;
        }
    }
    keys.into_values().collect()
}

/// Returns how many of many checks of this key the instances admit at 10 per hour, and asserts their source.
async fn admitted(instances: &[Limiter], key: &str, source: Source) -> u32 {
    let limit: Limit = "10/h".parse().unwrap();
    let mut admitted = 0;
    for _ in 0..12 {
        for instance in instances {
            let decision = instance.check_key(&limit, key).await.unwrap();
            assert_eq!(decision.source, source, "{decision:?}");
            admitted += u32::from(decision.allowed());
        }
    }
    admitted
}

/// Asserts what the instances admit before and during an outage, for keys on every master. An instance that starts
/// during the outage knows of no others.
async fn assert_bound(deployment: &Deployment, networks: &[Network; 2], instances: &[Limiter], phase: &str) {
    let count = u32::try_from(instances.len()).unwrap();
    let keys = keys_on_each_master(&instances[0], deployment, phase);
    for key in &keys {
        assert_eq!(admitted(instances, key, Source::Store).await, 10, "{phase}, before the outage");
    }
    networks.iter().for_each(|network| network.set(Fault::Cut));
    let late = [networks[0].instance()];
    for key in &keys {
        let in_outage = admitted(instances, key, Source::Local).await;
        assert_eq!(in_outage, count * 10_u32.div_ceil(count), "{phase}: the share of each of {count} instances");
        assert!(in_outage < 10 + count, "{phase}: the stated bound");
        assert_eq!(admitted(&late, key, Source::Local).await, 10, "{phase}: one that starts during the outage");
    }
    drop(late);
    networks.iter().for_each(|network| network.set(Fault::Pass));
    let limit: Limit = "1000000/h".parse().unwrap();
    for (instance, key) in instances.iter().flat_map(|instance| keys.iter().map(move |key| (instance, key))) {
        while instance.check_key(&limit, key).await.unwrap().source != Source::Store {
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Takes instances through joining, leaving, being killed and being partitioned.
async fn assert_bounds(deployment: Deployment) {
    let networks = [[127, 0, 0, 2], [127, 0, 0, 3]].map(|address| deployment.network(address));
    let url = &networks[0].url;
    // One whose runtime ends without a withdrawal, as with a killed process, and one on a network of its own.
    let (runtime, mut instances) = (Runtime::new().unwrap(), vec![networks[1].instance()]);
    // An instance knows the masters only after its first call.
    instances[0].check_key(&"1/h".parse().unwrap(), "first").await.unwrap();
    until_counted(&instances, url).await;
    assert_bound(&deployment, &networks, &instances, "one").await;
    instances.resize_with(3, || networks[0].instance());
    until_counted(&instances, url).await;
    assert_bound(&deployment, &networks, &instances, "three").await;
    instances.resize_with(7, || networks[0].instance());
    instances.push({
        let _entered = runtime.enter();
        networks[0].instance()
    });
    until_counted(&instances, url).await;
    assert_bound(&deployment, &networks, &instances, "eight").await;

    runtime.shutdown_background();
    instances.truncate(7);
    instances.pop().unwrap().withdraw().await;
    until_counted(&instances, url).await;
    assert_bound(&deployment, &networks, &instances, "one killed and one ended").await;

    let key = &keys_on_each_master(&instances[0], &deployment, "partitioned")[0];
    networks[1].set(Fault::Cut);
    let (partitioned, others) = instances.split_at(1);
    assert_eq!(admitted(partitioned, key, Source::Local).await, 2, "⌈10 / 6⌉");
    assert_eq!(admitted(others, key, Source::Store).await, 10, "the quota, in addition to the share");
    until_counted(others, url).await;
    assert_eq!(partitioned[0].stats().instances, 6, "the last known number");
}

#[tokio::test]
async fn outage_of_a_server_admits_no_more_than_the_bound() {
    join_all(Brand::ALL.map(|brand| assert_bounds(Deployment::server(brand)))).await;
}

#[tokio::test]
async fn outage_of_a_redis_cluster_admits_no_more_than_the_bound() {
    assert_bounds(Deployment::cluster(Brand::Redis)).await;
}

#[tokio::test]
async fn outage_of_a_valkey_cluster_admits_no_more_than_the_bound() {
    assert_bounds(Deployment::cluster(Brand::Valkey)).await;
}
