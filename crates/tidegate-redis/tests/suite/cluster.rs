//! A cluster of three masters and three replicas: slots that move, masters that fail, addresses that differ.

use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{
    Atomicity, Check, Decision, Demand, Key, ReceiptId, Redeemed, Redemption, ShardId, Store, StoreError,
    StoreErrorKind as Kind, Timestamp, Wait,
};
use tidegate_redis::{RedisStore, RedisStoreBuilder, ServerCheckError};
use tidegate_testkit::poll;
use tidegate_testkit::server::{Brand, Cluster, Config, SLOTS, Server};
use tokio::time::sleep;

/// A timeout that does not pass on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);

fn builder(url: &str) -> RedisStoreBuilder {
    RedisStore::builder(url).call_timeout(TIMEOUT).bans(true)
}

fn store_on(cluster: &Cluster) -> RedisStore {
    builder(&cluster.url()).build().unwrap()
}

/// A demand for one unit of 100 in an hour.
fn demand(subject: &str) -> Demand<'_> {
    Demand::new("100/h".parse().unwrap(), Key::new(subject).unwrap())
}

async fn decide(store: &RedisStore, check: Check<'_>) -> Result<Decision, StoreError> {
    store.decide(&[check]).await.map(|mut decisions| decisions.remove(0))
}

/// Charges one unit and returns the remaining ones.
async fn charge(store: &RedisStore, subject: &str) -> Result<u32, Kind> {
    let demand = demand(subject);
    let decided = decide(store, Check::one(&demand)).await;
    decided.map(|decision| decision.limits[0].remaining).map_err(|error| error.kind())
}

/// Charges one unit again and again until the store decides, and returns the remaining ones.
async fn charge_eventually(store: &RedisStore, subject: &str) -> u32 {
    let mut last = None;
    for _ in 0..3_000 {
        match charge(store, subject).await {
            Ok(remaining) => return remaining,
            Err(kind) => last = Some(kind),
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the store does not decide: {last:?}");
}

/// Waits until the store knows that `server` owns the slot of the subject.
///
/// The nodes must agree on that. The store may still have the answer of a node that did not know it yet. A peek at the
/// counter is then redirected.
async fn locate_eventually(store: &RedisStore, subject: &str, server: &Server) {
    let address = format!("redis://{}", server.addr());
    for _ in 0..3_000 {
        store.inspect(&demand(subject)).await.unwrap();
        let shard = store.locate(subject.as_bytes()).shard;
        if store.shards().iter().any(|known| known.id == shard && known.address.as_ref() == Some(&address)) {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the store does not use {address} for {subject}");
}

fn slot_of(cluster: &Cluster, subject: &str) -> u16 {
    cluster.slot_of(&format!("{{{subject}}}"))
}

/// Returns a master other than the owner of the slot.
fn other_master(cluster: &Cluster, slot: u16) -> &Server {
    let owner = cluster.owner_of(slot).port();
    cluster.masters().into_iter().find(|node| node.port() != owner).expect("another master")
}

/// Returns subjects on each of the first three nodes: one list per node.
fn subjects_by_master(cluster: &Cluster, store: &RedisStore, count: usize) -> Vec<Vec<String>> {
    let shards = store.shards();
    let id_of = |server: &Server| {
        let address = Some(format!("redis://{}", server.addr()));
        shards.iter().find(|shard| shard.address == address).expect("a known master").id
    };
    let ids: Vec<ShardId> = cluster.nodes()[..3].iter().map(id_of).collect();
    let subjects = |id: &ShardId| {
        let names = (0..).map(|number| format!("user:{number}"));
        names.filter(|name| store.locate(name.as_bytes()).shard == *id).take(count).collect()
    };
    ids.iter().map(subjects).collect()
}

#[tokio::test]
async fn checks_of_many_subjects_are_decided_in_order_by_all_masters() {
    for (brand, across_slots) in Brand::ALL.into_iter().flat_map(|brand| [(brand, false), (brand, true)]) {
        let cluster = Cluster::shared(brand);
        let builder = builder(&cluster.url()).prefix(format!("many-{across_slots}"));
        let store = builder.calls_across_slots(across_slots).build().unwrap();
        assert_eq!(store.atomicity(), Atomicity::Subject);
        let report = store.check_server().await.unwrap();
        assert_eq!((report.name, report.warnings.len()), (if brand == Brand::Redis { "Redis" } else { "Valkey" }, 0));
        assert_eq!(store.shards().len(), 3);
        let subjects: Vec<String> = (0..60).map(|number| format!("user:{number}")).collect();
        let demands: Vec<Demand<'_>> = subjects.iter().map(|subject| demand(subject)).collect();

        // Many callers at once.
        let one = |demand| {
            let store = &store;
            async move { decide(store, Check::one(demand)).await.unwrap().limits[0].remaining }
        };
        let remaining: Vec<u32> = join_all(demands.iter().chain(&demands).chain(&demands).map(one)).await;
        assert_eq!(remaining, [[99; 60], [98; 60], [97; 60]].concat(), "{brand}");
        let calls = store.stats().calls;
        assert_eq!(calls < 60, across_slots, "{brand}: {calls} calls for 180 checks of 60 subjects");

        // One caller with many checks, whose slots it has determined for half of them.
        let partition = |check: &Check<'_>| store.locate(check.demands()[0].key.subject()).partition;
        let located = demands.iter().map(Check::one).map(|check| check.in_partition(partition(&check)));
        let checks: Vec<Check<'_>> = demands.iter().map(Check::one).chain(located).collect();
        let decided = store.decide(&checks).await.unwrap();
        let remaining: Vec<u32> = decided.iter().map(|decision| decision.limits[0].remaining).collect();
        assert_eq!(remaining, [[96; 60], [95; 60]].concat(), "{brand}");

        // Refunds, resets, bans and commands find the right node.
        let refunds = checks.iter().zip(&decided).map(|(check, decision)| store.refund(check, decision));
        join_all(refunds).await.into_iter().for_each(Result::unwrap);
        for demand in &demands {
            assert_eq!(store.inspect(demand).await.unwrap().remaining, 97, "{brand}");
            store.reset(demand).await.unwrap();
            assert_eq!(store.inspect(demand).await.unwrap().remaining, 100, "{brand}");
        }
        for (subject, demand) in subjects.iter().zip(&demands) {
            store.ban(subject.as_bytes(), None).await.unwrap();
            assert_eq!(store.ban_of(subject.as_bytes()).await.unwrap(), Some(Wait::NEVER));
            assert_eq!(decide(&store, Check::one(demand)).await.unwrap().ban, Some(Wait::NEVER));
            assert!(store.unban(subject.as_bytes()).await.unwrap());
        }
        store.command(&["SET", "a key", "x"]).await.unwrap();
        assert_eq!(store.command(&["GET", "a key"]).await.unwrap().as_text(), Some("x"));
        let stats = store.stats();
        assert_eq!((stats.redirections, stats.panics), (0, 0), "{brand} {stats:?}");
    }
}

#[tokio::test]
async fn check_of_subjects_in_several_slots_is_rejected_and_one_slot_is_decided_together() {
    let cluster = Cluster::shared(Brand::Redis);
    let store = builder(&cluster.url()).prefix("several").build().unwrap();
    let [ann, bob] = [demand("ann"), demand("bob")];
    let error = decide(&store, Check::new(&[ann, bob]).unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Forbidden, "{error}");
    // Two subjects of one slot are one partition.
    let slot = store.locate(b"ann").partition;
    let twin = (0..).map(|number| format!("twin-{number}")).find(|it| store.locate(it.as_bytes()).partition == slot);
    let twin = twin.unwrap();
    let both = [ann, demand(&twin)];
    let check = Check::new(&both).unwrap();
    for (check, remaining) in [(check, 99), (check.in_partition(slot), 98)] {
        let decision = decide(&store, check).await.unwrap();
        assert_eq!(decision.limits.iter().map(|status| status.remaining).collect::<Vec<_>>(), [remaining; 2]);
    }
}

#[tokio::test]
async fn slot_that_was_moved_is_found_and_its_counters_continue() {
    for brand in Brand::ALL {
        let cluster = Cluster::start(brand);
        let store = store_on(&cluster);
        assert_eq!(charge(&store, "ann").await, Ok(99));
        let slot = slot_of(&cluster, "ann");
        for round in 0..4 {
            let target = other_master(&cluster, slot);
            // A target that does not have the script is sent its source.
            target.command(&["SCRIPT", "FLUSH"]);
            cluster.move_slots(&[slot], target);
            // The nodes may disagree for a moment on who owns the slot.
            assert_eq!(charge_eventually(&store, "ann").await, 98 - round, "{brand}");
            cluster.wait_until_complete();
            locate_eventually(&store, "ann", target).await;
        }
        let stats = store.stats();
        assert!(stats.redirections >= 4 && stats.panics == 0, "{brand} {stats:?}");
    }
}

/// Holds a slot half migrated: some keys are on the source, some on the target, some exist nowhere.
#[tokio::test]
async fn slot_held_half_migrated_decides_checks_of_one_limit() {
    for (brand, across_slots) in Brand::ALL.into_iter().flat_map(|brand| [(brand, false), (brand, true)]) {
        let cluster = Cluster::start(brand);
        let store = builder(&cluster.url()).calls_across_slots(across_slots).build().unwrap();
        // The windows are so long that none ends within the test.
        let of_ann = |limit: &str| Demand::new(limit.parse().unwrap(), Key::new("ann").unwrap());
        let (on_target, on_source, absent) = (demand("ann"), of_ann("50/30min"), of_ann("20/10min"));
        let both = [on_target, on_source];
        let decision = decide(&store, Check::new(&both).unwrap()).await.unwrap();
        assert!(decision.allowed());

        let slot = slot_of(&cluster, "ann");
        let target = other_master(&cluster, slot);
        cluster.begin_move(slot, target);
        assert_eq!(cluster.move_keys(slot, target, |key| key.ends_with("3600000000")), 1);
        target.command(&["SCRIPT", "FLUSH"]);
        for round in 1..=20 {
            for (demand, quota) in [(&on_target, 100), (&on_source, 50), (&absent, 20)] {
                let decision = decide(&store, Check::one(demand)).await.unwrap();
                assert_eq!(decision.limits[0].remaining, quota - round - u32::from(quota != 20), "{brand} {quota}");
            }
        }
        // Many callers at once, whose calls would name keys of both nodes.
        let checks = [&on_target, &on_source].map(Check::one);
        let decided = join_all((0..32).map(|caller| decide(&store, checks[caller % 2]))).await;
        assert!(decided.into_iter().all(|decided| decided.unwrap().allowed()), "{brand}");
        // Checks of other slots in the same calls are decided once.
        let names: Vec<String> = (0..32).map(|number| format!("user:{number}")).collect();
        let demands: Vec<Demand<'_>> = names.iter().map(|name| demand(name)).collect();
        let others = demands.iter().chain(&demands).map(Check::one);
        let decided =
            join_all(others.flat_map(|other| [other, Check::one(&absent)]).map(|check| decide(&store, check))).await;
        let remaining = |index: usize| decided[2 * index].as_ref().unwrap().limits[0].remaining;
        assert!((0..32).all(|index| (remaining(index), remaining(index + 32)) == (99, 98)), "{brand} {decided:?}");
        assert_eq!(store.inspect(&on_target).await.unwrap().remaining, 100 - 21 - 16, "{brand}");
        assert_eq!(store.inspect(&on_source).await.unwrap().remaining, 50 - 21 - 16, "{brand}");

        // A refund finds its counter. Two limits on two nodes, and a receipt beside its counter, have to wait.
        let decision = decide(&store, Check::one(&on_target)).await.unwrap();
        store.refund(&Check::one(&on_target), &decision).await.unwrap();
        assert_eq!(store.inspect(&on_target).await.unwrap().remaining, 100 - 21 - 16, "{brand}");
        let error = decide(&store, Check::new(&both).unwrap()).await.unwrap_err();
        assert_eq!(
            (error.kind(), error.is_unexecuted(), error.is_transient()),
            (Kind::Relocating, true, true),
            "{error}"
        );
        let decision = decide(&store, Check::one(&on_source)).await.unwrap();
        let redemption = Redemption::new(ReceiptId::from_bytes([7; 16]), b"ann", Timestamp::MAX)
            .refund(Check::one(&on_source), &decision);
        assert_eq!(store.redeem(&redemption).await.unwrap_err().kind(), Kind::Relocating, "{brand}");

        // A ban that was set during the move is on the target, one from before it on the source.
        store.ban(b"ann", Some(Duration::from_secs(600))).await.unwrap();
        let banned = decide(&store, Check::one(&on_source)).await.unwrap();
        assert!(banned.ban.is_some() && !banned.allowed() && banned.at > decision.at, "{brand} {banned:?}");
        assert!(store.unban(b"ann").await.unwrap());

        cluster.move_keys(slot, target, |_| true);
        cluster.end_move(slot, target);
        let decision = decide(&store, Check::new(&both).unwrap()).await.unwrap();
        let remaining: Vec<u32> = decision.limits.iter().map(|status| status.remaining).collect();
        assert_eq!(remaining, [100 - 21 - 16 - 1, 50 - 21 - 16 - 2], "{brand}");
        assert_eq!(store.redeem(&redemption).await.unwrap(), Redeemed::Done, "{brand}");
        assert_eq!(store.stats().panics, 0);
    }
}

#[tokio::test]
async fn planned_failover_is_followed_and_keeps_the_counters() {
    for brand in Brand::ALL {
        let cluster = Cluster::start(brand);
        let store = store_on(&cluster);
        store.check_server().await.unwrap();
        let subjects = subjects_by_master(&cluster, &store, 1);
        let subject = &subjects[0][0];
        assert_eq!(charge(&store, subject).await, Ok(99));
        let (master, replica) = (&cluster.nodes()[0], &cluster.nodes()[3]);
        cluster.fail_over_to(replica);
        // Before the old master knows that it is a replica, it may close the connection.
        assert_eq!(charge_eventually(&store, subject).await, 98, "{brand}");
        assert!(replica.script_calls() > 0, "{brand}");
        cluster.wait_until_complete();
        cluster.fail_over_to(master);
        assert_eq!(charge_eventually(&store, subject).await, 97, "{brand}");
    }
}

#[tokio::test]
async fn killed_master_fails_only_its_own_keys_and_its_replica_takes_over() {
    for brand in Brand::ALL {
        let cluster = Cluster::with(&Config::new(brand).set("cluster-node-timeout", "1500"));
        let store = store_on(&cluster);
        store.check_server().await.unwrap();
        let subjects = subjects_by_master(&cluster, &store, 5);
        for subject in subjects.iter().flatten() {
            assert_eq!(charge(&store, subject).await, Ok(99));
        }
        // Replication is asynchronous: what the replica does not have yet would be lost.
        assert_eq!(cluster.nodes()[0].command(&["WAIT", "1", "10000"]).integer(), 1);
        let lost = &cluster.nodes()[0];
        lost.kill9();
        let failed = charge(&store, &subjects[0][0]).await.unwrap_err();
        assert!(matches!(failed, Kind::Unreachable | Kind::Interrupted), "{brand} {failed:?}");
        let mut charged = 0;
        let replica = &cluster.nodes()[3];
        while replica.command(&["ROLE"]).items()[0].text() != "master" {
            // The other masters do not notice.
            charged += 1;
            for subject in subjects[1..].iter().flatten() {
                assert_eq!(charge(&store, subject).await, Ok(99 - charged % 90), "{brand}");
            }
            if charged % 90 == 89 {
                for subject in subjects[1..].iter().flatten() {
                    store.reset(&demand(subject)).await.unwrap();
                    assert_eq!(charge(&store, subject).await, Ok(99));
                }
                charged += 1;
            }
        }
        for subject in &subjects[0] {
            assert_eq!(charge_eventually(&store, subject).await, 98, "{brand}");
        }
        // The old master comes back as a replica, and redirects clients that still call it.
        lost.restart();
        cluster.wait_until_complete();
        for subject in &subjects[0] {
            assert_eq!(charge(&store, subject).await, Ok(97), "{brand}");
        }
        assert_eq!(store.stats().panics, 0);
    }
}

#[tokio::test]
async fn all_masters_killed_and_restarted_are_used_again() {
    let cluster = Cluster::with(&Config::new(Brand::Redis).persistent().set("cluster-node-timeout", "60000"));
    let store = store_on(&cluster);
    assert_eq!(charge(&store, "ann").await, Ok(99));
    assert_eq!(charge(&store, "bob").await, Ok(99));
    cluster.nodes()[..3].iter().for_each(Server::kill9);
    assert!(charge(&store, "ann").await.is_err());
    cluster.nodes()[..3].iter().for_each(Server::restart);
    cluster.wait_until_complete();
    assert_eq!(charge_eventually(&store, "ann").await, 98);
    assert_eq!(charge_eventually(&store, "bob").await, 98);
}

#[tokio::test]
async fn one_node_of_the_url_is_enough_even_a_replica() {
    let cluster = Cluster::shared(Brand::Redis);
    let nowhere = tidegate_testkit::server::free_port();
    let replica = cluster.nodes()[4].port();
    for (round, hosts) in [
        format!("127.0.0.1:{nowhere},localhost:{}", cluster.nodes()[1].port()),
        format!("localhost:{replica}"),
        format!("127.0.0.1:{replica},127.0.0.1:{nowhere}"),
    ]
    .iter()
    .enumerate()
    {
        let store = builder(&format!("redis+cluster://{hosts}")).prefix(format!("url-{round}")).build().unwrap();
        for subject in ["a", "b", "c", "d", "e", "f"] {
            assert_eq!(charge(&store, subject).await, Ok(99), "{hosts}");
        }
        assert_eq!(store.address(), Some(format!("redis+cluster://{hosts}")));
    }
}

#[tokio::test]
async fn announced_host_names_and_unknown_hosts_are_followed() {
    for endpoint_type in ["hostname", "unknown-endpoint"] {
        let config = Config::new(Brand::Redis).set("cluster-announce-hostname", "localhost");
        let cluster = Cluster::with(&config.set("cluster-preferred-endpoint-type", endpoint_type));
        let store = store_on(&cluster);
        assert_eq!(charge(&store, "ann").await, Ok(99), "{endpoint_type}");
        let slot = slot_of(&cluster, "ann");
        let target = other_master(&cluster, slot);
        cluster.begin_move(slot, target);
        cluster.move_keys(slot, target, |_| true);
        assert_eq!(charge(&store, "ann").await, Ok(98), "ASK: {endpoint_type}");
        cluster.end_move(slot, target);
        assert_eq!(charge(&store, "ann").await, Ok(97), "MOVED: {endpoint_type}");
        let host = if endpoint_type == "hostname" { "localhost" } else { "127.0.0.1" };
        let shards = store.shards();
        assert!(shards.iter().all(|shard| shard.address.as_ref().unwrap().contains(host)), "{shards:?}");
    }
}

#[tokio::test]
async fn server_that_is_not_in_a_cluster_and_hosts_that_do_not_answer_are_errors_with_reasons() {
    let server = Server::redis();
    let store = builder(&server.url().replace("redis://", "redis+cluster://")).build().unwrap();
    let error = decide(&store, Check::one(&demand("ann"))).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    let expected = format!("store redis+cluster://{0}: {0}: the server is not a node of a cluster", server.addr());
    assert!(error.to_string().starts_with(&expected), "{error}");
    assert!(
        matches!(store.check_server().await, Err(ServerCheckError::Store(error)) if error.kind() == Kind::Unsupported)
    );

    let [one, other] = [(); 2].map(|()| format!("127.0.0.1:{}", tidegate_testkit::server::free_port()));
    let store = builder(&format!("redis+cluster://{one},{other}")).build().unwrap();
    let error = decide(&store, Check::one(&demand("ann"))).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unreachable, "{error}");
    let message = error.to_string();
    for part in
        [format!("cannot reach the store redis+cluster://{one},{other}"), format!("{other}: connection refused")]
    {
        assert!(message.contains(&part), "{message}");
    }

    // A node that has not joined a cluster, and one that is not assigned all slots.
    let node =
        Config::new(Brand::Redis).set("cluster-enabled", "yes").set("cluster-require-full-coverage", "no").start();
    let store = builder(&node.url().replace("redis://", "redis+cluster://")).build().unwrap();
    let error = decide(&store, Check::one(&demand("ann"))).await.unwrap_err();
    assert_eq!(error.kind(), Kind::Unavailable, "{error}");
    assert!(error.to_string().contains("the node knows no owner of any slot"), "{error}");
    let slot = store.locate(b"ann").partition.to_string();
    node.command(&["CLUSTER", "ADDSLOTS", &slot]);
    assert_eq!(charge_eventually(&store, "ann").await, 99);
    let error = decide(&store, Check::one(&demand("bob"))).await.unwrap_err();
    assert!(error.to_string().contains("no node of the cluster owns this slot"), "{error}");
}

#[tokio::test]
async fn nodes_of_two_clusters_in_one_url_are_an_error_that_names_them() {
    let [one, other] = [(); 2].map(|()| {
        let node = Config::new(Brand::Redis).set("cluster-enabled", "yes").start();
        assert_eq!(node.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).text(), "OK");
        poll::eventually("the node serves", || node.command(&["CLUSTER", "INFO"]).text(), |info| info.contains(":ok"));
        node
    });
    let url = format!("redis+cluster://{},{}", one.addr(), other.addr());
    let mut error = None;
    // A store compares the answers that arrive soon after the first one. A busy machine may delay one of them.
    for _ in 0..100 {
        let store = builder(&url).build().unwrap();
        error = decide(&store, Check::one(&demand("ann"))).await.err();
        if error.is_some() {
            break;
        }
    }
    let error = error.expect("a store that has compared the nodes");
    assert_eq!(error.kind(), Kind::Unsupported, "{error}");
    let names = [one.addr(), other.addr()].iter().all(|address| error.to_string().contains(&address.to_string()));
    assert!(names && error.to_string().ends_with("are nodes of different clusters"), "{error}");
    // Each of them alone can be used.
    let store = builder(&format!("redis+cluster://{}", one.addr())).build().unwrap();
    assert_eq!(charge(&store, "ann").await, Ok(99));
}

#[tokio::test]
async fn master_that_joins_and_one_that_leaves_are_noticed() {
    let mut cluster = Cluster::start(Brand::Redis);
    let store = store_on(&cluster);
    let subjects: Vec<String> = (0..30).map(|number| format!("user:{number}")).collect();
    for subject in &subjects {
        assert_eq!(charge(&store, subject).await, Ok(99));
    }
    // A fourth master takes the slots of all subjects of the third one, which then leaves with its replica.
    cluster.add_master();
    let leaving = cluster.nodes()[2].port();
    let joined = cluster.nodes()[6].port();
    let mut slots: Vec<u16> = subjects.iter().map(|subject| slot_of(&cluster, subject)).collect();
    slots.retain(|&slot| cluster.owner_of(slot).port() == leaving);
    assert!(!slots.is_empty());
    for &slot in &slots {
        cluster.move_slots(&[slot], &cluster.nodes()[6]);
        cluster.wait_until_complete();
    }
    for subject in &subjects {
        assert_eq!(charge(&store, subject).await, Ok(98));
    }
    let ports = |store: &RedisStore| -> Vec<u16> {
        let addresses = store.shards().into_iter().map(|shard| shard.address.unwrap());
        addresses.map(|address| address.rsplit_once(':').unwrap().1.parse().unwrap()).collect()
    };
    assert!(ports(&store).contains(&joined), "{:?}", store.shards());

    // The other slots of the third master, which hold no keys.
    let rest: Vec<u16> = (10_924..SLOTS).filter(|slot| !slots.contains(slot)).collect();
    for slots in rest.chunks(1_000) {
        cluster.move_slots(slots, &cluster.nodes()[6]);
    }
    cluster.wait_until_complete();
    cluster.remove(5);
    cluster.remove(2);
    poll::until("the node that left is not used", || !ports(&store).contains(&leaving)).await;
    for subject in &subjects {
        assert_eq!(charge(&store, subject).await, Ok(97));
    }
}

#[tokio::test]
async fn probe_reaches_the_server_that_it_names() {
    let cluster = Cluster::start(Brand::Redis);
    let store = store_on(&cluster);
    store.check_server().await.unwrap();
    for shard in store.shards() {
        store.probe(shard.id).await.unwrap();
    }
    store.probe(ShardId::default()).await.unwrap();
    store.probe(ShardId::new(4_711)).await.unwrap();
    cluster.nodes()[2].kill9();
    let lost = format!("redis://{}", cluster.nodes()[2].addr());
    for shard in store.shards() {
        assert_eq!(store.probe(shard.id).await.is_ok(), shard.address.as_ref() != Some(&lost), "{shard:?}");
    }
}
