//! A master with a replica and three Sentinels: failovers, Sentinels that fail and restart, passwords.

use std::fs;
use std::time::Duration;

use tidegate_core::{Atomicity, Check, Decision, Demand, Key, ShardId, Store, StoreError, StoreErrorKind as Kind};
use tidegate_redis::{CredentialSource, RedisStore, RedisStoreBuilder, Reply, ServerCheckError};
use tidegate_testkit::fake_sentinel::{FakeSentinel, SentinelAnswer};
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::history::{Bounds, History};
use tidegate_testkit::poll;
use tidegate_testkit::server::{Brand, Config, MASTER_NAME, SentinelGroup, Server};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

/// A timeout that does not pass on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum number of calls of one check each that a store has in flight to a server.
const IN_FLIGHT_MAX: u64 = 32;

fn builder(url: &str) -> RedisStoreBuilder {
    RedisStore::builder(url).call_timeout(TIMEOUT).bans(true)
}

fn store_on(group: &SentinelGroup) -> RedisStore {
    builder(&group.url()).build().unwrap()
}

/// A demand for one unit of a limit of a million per hour.
fn demand(subject: &str) -> Demand<'_> {
    Demand::new("1000000/h".parse().unwrap(), Key::new(subject).unwrap())
}

async fn decide(store: &RedisStore, subject: &str) -> Result<Decision, StoreError> {
    let demand = demand(subject);
    store.decide(&[Check::one(&demand)]).await.map(|mut decisions| decisions.remove(0))
}

/// Charges one unit and returns the number of charged units.
async fn charge(store: &RedisStore, subject: &str) -> Result<u32, Kind> {
    let decided = decide(store, subject).await;
    decided.map(|decision| 1_000_000 - decision.limits[0].remaining).map_err(|error| error.kind())
}

/// Retries charging one unit until the store decides, and returns the number of charged units.
async fn charge_eventually(store: &RedisStore, subject: &str) -> u32 {
    let mut last = None;
    for _ in 0..3_000 {
        match charge(store, subject).await {
            Ok(charged) => return charged,
            Err(kind) => last = Some(kind),
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("the store does not decide: {last:?}");
}

/// Waits until the store uses this server as the master.
async fn until_master(store: &RedisStore, server: &Server) {
    let address = Some(server.url());
    poll::until("the store uses the master", || store.shards().iter().any(|shard| shard.address == address)).await;
}

/// Returns whether a server has a connection of a store.
fn has_connection(server: &Server) -> bool {
    server.command(&["CLIENT", "LIST"]).text().contains("name=tidegate")
}

/// Callers that charge without a pause, and the errors that they got, until they are stopped.
struct Load(Vec<JoinHandle<()>>);

impl Load {
    fn start(store: &RedisStore, callers: usize) -> Load {
        let caller = |_| {
            let store = store.clone();
            tokio::spawn(async move {
                loop {
                    let _ = charge(&store, "load").await;
                    tokio::task::yield_now().await;
                }
            })
        };
        Load((0..callers).map(caller).collect())
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

#[tokio::test]
async fn store_uses_the_master_and_names_it() {
    for brand in Brand::ALL {
        let group = SentinelGroup::shared(brand);
        let store = builder(&group.url()).prefix("named").build().unwrap();
        assert_eq!(store.atomicity(), Atomicity::Check);
        assert_eq!(store.address(), Some(group.url()));
        let report = store.check_server().await.unwrap();
        assert_eq!((report.name, report.warnings.len()), (if brand == Brand::Redis { "Redis" } else { "Valkey" }, 0));
        let shards = store.shards();
        assert_eq!((shards.len(), shards[0].address.clone()), (1, Some(group.servers()[0].url())), "{brand}");
        assert_eq!(store.locate(b"ann").shard, shards[0].id);
        assert_eq!(charge(&store, "ann").await, Ok(1));
        store.ban(b"bob", None).await.unwrap();
        assert!(decide(&store, "bob").await.unwrap().ban.is_some());
        for shard in [shards[0].id, ShardId::default(), ShardId::new(4_711)] {
            store.probe(shard).await.unwrap();
        }
        let stats = store.stats();
        assert_eq!((stats.redirections, stats.failovers, stats.panics), (0, 0, 0), "{brand} {stats:?}");
    }
}

/// After the store knows the new master, no call reaches the old one, and no unexecuted check fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planned_failover_is_followed_and_nothing_more_is_sent_to_the_old_master() {
    for brand in Brand::ALL {
        let group = SentinelGroup::start(brand);
        let store = store_on(&group);
        assert_eq!(charge(&store, "ann").await, Ok(1));
        let [old, new] = [&group.servers()[0], &group.servers()[1]];
        let load = Load::start(&store, 8);
        group.fail_over();
        until_master(&store, new).await;
        poll::until("calls in flight have ended", || !has_connection(old)).await;
        let (on_old, on_new) = (old.script_calls(), new.script_calls());
        poll::until("the new master is used", || new.script_calls() > on_new + 1_000).await;
        assert_eq!(old.script_calls(), on_old, "{brand}");
        drop(load);
        assert_eq!(charge(&store, "ann").await, Ok(2), "{brand}");
        assert_eq!(store.stats().failovers, 1, "{brand}");
        assert_eq!(store.stats().panics, 0);
    }
}

/// The old master has stopped answering when the new one is known: checks that were not sent yet do not wait for it.
#[tokio::test]
async fn checks_that_were_not_sent_are_decided_by_the_new_master_and_never_sent_to_the_old_one() {
    let [old, new] = [Server::redis(), Server::redis()];
    let link = Proxy::start(old.addr());
    let sentinel = FakeSentinel::start(SentinelAnswer::Master { port: link.port(), epoch: 1, announces: true }).await;
    let builder = builder(&format!("redis+sentinel://{}/main", sentinel.addr()));
    // The calls in flight wait for their replies meanwhile.
    let store = builder.call_timeout(Duration::from_secs(60)).build().unwrap();
    assert_eq!(charge(&store, "ann").await, Ok(1));
    link.set(Fault::Hold);
    // Each is a call, or shares one on a busy machine, until no more calls may be in flight. The rest is not sent.
    let sent = store.stats().calls + IN_FLIGHT_MAX;
    let mut callers = Vec::new();
    let mut unsent = 0;
    while unsent < 18 {
        unsent += u32::from(store.stats().calls >= sent);
        assert!(callers.len() < 2_000, "{} calls are in flight", store.stats().calls);
        let store = store.clone();
        callers.push(tokio::spawn(async move { charge(&store, "ann").await }));
        sleep(Duration::from_millis(3)).await;
    }
    let total = callers.len() as u32 + 1;
    sentinel.set_answer(SentinelAnswer::Master { port: new.port(), epoch: 2, announces: true });
    until_master(&store, &new).await;
    let finished = || callers.iter().filter(|caller| caller.is_finished()).count() as u64;
    poll::until("the checks in the queue are decided", || finished() > 0 && new.script_calls() > 0).await;
    link.set(Fault::Pass);
    let answers = futures_util::future::join_all(callers).await.into_iter().map(Result::unwrap);
    let failed: Vec<Kind> = answers.filter_map(Result::err).collect();
    assert_eq!(failed, []);
    poll::until("the old connection is closed", || !has_connection(&old)).await;
    assert_eq!(old.script_calls(), sent);
    // Those in the queue were charged on the new master.
    let directly = RedisStore::builder(old.url()).call_timeout(Duration::from_secs(60)).build().unwrap();
    let on_old = charge(&directly, "ann").await.unwrap() - 1;
    assert_eq!(charge(&store, "ann").await, Ok(total - on_old + 1));
}

#[tokio::test]
async fn killed_master_is_replaced_by_the_elected_one() {
    for brand in Brand::ALL {
        let group = SentinelGroup::start(brand);
        let store = store_on(&group);
        assert_eq!(charge(&store, "ann").await, Ok(1));
        // Replication is asynchronous: what the replica does not have yet would be lost.
        let [old, new] = [&group.servers()[0], &group.servers()[1]];
        assert_eq!(store.command(&["WAIT", "1", "9000"]).await.unwrap(), Reply::Integer(1));
        group.detect_failures();
        old.kill9();
        let failed = charge(&store, "ann").await.unwrap_err();
        assert!(matches!(failed, Kind::Unreachable | Kind::Interrupted), "{brand} {failed:?}");
        assert_eq!(charge_eventually(&store, "ann").await, 2, "{brand}");
        assert_eq!(store.shards()[0].address, Some(new.url()));
        // It comes back as a replica, and is not used.
        let calls = new.script_calls();
        old.restart();
        group.wait_until_complete();
        assert_eq!(charge(&store, "ann").await, Ok(3), "{brand}");
        assert_eq!((old.script_calls(), new.script_calls()), (0, calls + 1), "{brand}");
    }
}

/// The Sentinel does not announce the new master. The store asks for it when the old one reports that it is a replica.
#[tokio::test]
async fn read_only_reply_leads_to_the_new_master_without_an_error() {
    for brand in Brand::ALL {
        let [old, new] = [(); 2].map(|()| Config::new(brand).start());
        let answer = |server: &Server, epoch| SentinelAnswer::Master { port: server.port(), epoch, announces: false };
        let sentinel = FakeSentinel::start(answer(&old, 1)).await;
        let store = builder(&format!("redis+sentinel://{}/main", sentinel.addr())).build().unwrap();
        assert_eq!(charge(&store, "ann").await, Ok(1));
        let replicate = ["REPLICAOF", "127.0.0.1", &new.port().to_string()];
        assert_eq!(old.command(&replicate).text(), "OK");
        sentinel.set_answer(answer(&new, 2));
        // All of them are sent to the new master after the reply of the old one.
        let decided = futures_util::future::join_all((0..50).map(|_| charge(&store, "ann"))).await;
        let mut charged: Vec<u32> = decided.into_iter().map(Result::unwrap).collect();
        charged.sort_unstable();
        assert_eq!(charged, (1..=50).collect::<Vec<_>>(), "{brand}");
        assert_eq!(store.shards()[0].address, Some(new.url()), "{brand}");
        // A server that is a replica when the store connects is not used either.
        sentinel.set_answer(answer(&old, 3));
        let other = builder(&format!("redis+sentinel://{}/main", sentinel.addr())).build().unwrap();
        let error = decide(&other, "ann").await.unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable, "{brand}");
        let expected = format!("store {}: the server is a read-only replica", old.url());
        assert_eq!(error.to_string(), expected, "{brand}");
    }
}

#[tokio::test]
async fn answer_with_the_highest_epoch_wins_and_an_announcement_is_not_needed() {
    let [first, second] = [Server::redis(), Server::redis()];
    let answer = |server: &Server, epoch, announces| SentinelAnswer::Master { port: server.port(), epoch, announces };
    let leader = FakeSentinel::start(answer(&first, 1, true)).await;
    let outdated = FakeSentinel::start(answer(&first, 1, true)).await;
    let url = format!("redis+sentinel://{},{}/main", outdated.addr(), leader.addr());
    let store = builder(&url).build().unwrap();
    assert_eq!(charge(&store, "ann").await, Ok(1));
    // The leader announces it, while the other one still names the old master.
    leader.set_answer(answer(&second, 2, true));
    until_master(&store, &second).await;
    // Neither the announcement of an old failover nor a lost connection makes the store return to the old master.
    outdated.set_answer(answer(&first, 1, true));
    let connects = store.stats().connects;
    second.command(&["CLIENT", "KILL", "TYPE", "normal"]);
    poll::until("the store has connected again", || store.stats().connects > connects).await;
    assert_eq!(charge_eventually(&store, "ann").await, 1);
    assert_eq!((store.shards()[0].address.clone(), store.stats().failovers), (Some(second.url()), 1));
}

/// A master, a replica behind a proxy that can hold it back, and a Sentinel that names the master.
struct HeldBack {
    master: Server,
    replica: Server,
    link: Proxy,
    sentinel: FakeSentinel,
}

impl HeldBack {
    async fn start(brand: Brand) -> HeldBack {
        let master = Config::new(brand).set("repl-diskless-sync", "no").start();
        let link = Proxy::start(master.addr());
        let replica = Config::new(brand).set("replicaof", &format!("127.0.0.1 {}", link.port())).start();
        let answer = SentinelAnswer::Master { port: master.port(), epoch: 1, announces: true };
        let in_sync = || replica.command(&["INFO", "replication"]).text().contains("master_link_status:up");
        poll::until("the replica is in sync", in_sync).await;
        HeldBack { master, replica, link, sentinel: FakeSentinel::start(answer).await }
    }

    fn builder(&self) -> RedisStoreBuilder {
        builder(&format!("redis+sentinel://{}/main", self.sentinel.addr()))
    }

    /// Kills the master, and promotes the replica with what it has received.
    async fn fail_over(&self, store: &RedisStore) {
        self.master.kill9();
        assert_eq!(self.replica.command(&["REPLICAOF", "NO", "ONE"]).text(), "OK");
        self.sentinel.set_answer(SentinelAnswer::Master { port: self.replica.port(), epoch: 2, announces: true });
        until_master(store, &self.replica).await;
    }
}

/// Makes checks of a limit of 100 units, and records the answered ones. Returns how many were admitted.
async fn admit(store: &RedisStore, checks: usize, history: &mut History, since: Instant) -> usize {
    let mut admitted = 0;
    for _ in 0..checks {
        let demand = Demand::new("100/h".parse().unwrap(), Key::new("ann").unwrap());
        let sent_us = since.elapsed().as_micros() as u64;
        if let Ok(decisions) = store.decide(&[Check::one(&demand)]).await {
            history.note(&[0], sent_us, since.elapsed().as_micros() as u64, &decisions[0]);
            admitted += usize::from(decisions[0].allowed());
        }
    }
    admitted
}

/// What a failover loses: the writes that the replica had not received. The promoted replica admits that much again.
#[tokio::test]
async fn failover_loses_the_writes_that_the_replica_had_not_received_and_no_more() {
    for brand in Brand::ALL {
        let servers = HeldBack::start(brand).await;
        let store = servers.builder().build().unwrap();
        let (mut history, since) = (History::new(["100/h".parse().unwrap()]), Instant::now());
        assert_eq!(admit(&store, 40, &mut history, since).await, 40, "{brand}");
        assert_eq!(store.command(&["WAIT", "1", "9000"]).await.unwrap(), Reply::Integer(1));
        servers.link.set(Fault::Blackhole);
        assert_eq!(admit(&store, 30, &mut history, since).await, 30, "{brand}");
        servers.fail_over(&store).await;
        // The counter continues with 40 charged units. The 30 lost ones are admitted again.
        assert_eq!(admit(&store, 100, &mut history, since).await, 60, "{brand}");
        let bounds = |lost| Bounds { lost: Some(lost), ..Bounds::default() };
        history.clone().verify(bounds(30)).expect_clean();
        assert!(history.verify(bounds(29)).violations_total > 0, "{brand}");
    }
}

#[tokio::test]
async fn check_that_no_replica_has_acknowledged_is_an_error_and_an_answered_one_survives_a_failover() {
    for brand in Brand::ALL {
        let servers = HeldBack::start(brand).await;
        let store = servers.builder().replicas(1, Duration::from_millis(200)).build().unwrap();
        let (mut history, since) = (History::new(["100/h".parse().unwrap()]), Instant::now());
        // A busy machine may make some of them late.
        let before = admit(&store, 40, &mut history, since).await;
        assert!(before > 0, "{brand}");
        servers.link.set(Fault::Blackhole);
        let demand = Demand::new("100/h".parse().unwrap(), Key::new("ann").unwrap());
        let error = store.decide(&[Check::one(&demand)]).await.unwrap_err();
        let message = "0 of 1 replicas have acknowledged the write within 200 ms";
        let expected = format!("store {}: {message}", servers.master.url());
        assert_eq!((error.kind(), error.to_string()), (Kind::TimedOut, expected), "{brand}");
        // The connection is still in use.
        assert_eq!(store.stats().connects, 1, "{brand}");
        // Many callers share a call, and get its error.
        let checks = (0..50).map(|_| decide(&store, "bob"));
        let failed = futures_util::future::join_all(checks).await.into_iter().filter(Result::is_err).count();
        assert_eq!(failed, 50, "{brand}");

        servers.fail_over(&store).await;
        let plain = servers.builder().build().unwrap();
        let after = admit(&plain, 100, &mut history, since).await;
        // The replica may have received a check whose acknowledgement was late, but it has all that were answered.
        assert!(before + after <= 100, "{brand}: {before} and {after}");
        let charged_late = (40 - before) as u64;
        history.verify(Bounds { lost: Some(charged_late), ..Bounds::default() }).expect_clean();
    }
}

#[tokio::test]
async fn sentinels_may_be_killed_and_restarted_while_the_store_decides() {
    for brand in [Brand::Redis] {
        let group = SentinelGroup::start(brand);
        // One Sentinel is enough to learn of the others.
        let url = format!("redis+sentinel://{}/{MASTER_NAME}", group.sentinels()[0].addr());
        let store = builder(&url).build().unwrap();
        assert_eq!(charge(&store, "ann").await, Ok(1));
        let is_followed = |sentinel: &Server| sentinel.command(&["CLIENT", "LIST"]).text().contains("name=tidegate");
        for sentinel in group.sentinels() {
            poll::until("all Sentinels are followed", || is_followed(sentinel)).await;
        }
        group.sentinels()[0].kill9();
        group.fail_over();
        until_master(&store, &group.servers()[1]).await;
        group.detect_failures();
        group.wait_until_complete();
        // Without any Sentinel, the last known master is used, even after a lost connection.
        group.sentinels().iter().for_each(Server::kill9);
        assert_eq!(charge_eventually(&store, "ann").await, 2, "{brand}");
        let connects = store.stats().connects;
        group.servers()[1].command(&["CLIENT", "KILL", "TYPE", "normal"]);
        poll::until("the store has connected again", || store.stats().connects > connects).await;
        assert_eq!(charge_eventually(&store, "ann").await, 3, "{brand}");
        (0..3).for_each(|index| group.restart_sentinel(index));
        group.wait_until_complete();
        for sentinel in group.sentinels() {
            poll::until("all Sentinels are followed again", || is_followed(sentinel)).await;
        }
        group.fail_over();
        until_master(&store, &group.servers()[0]).await;
        assert_eq!(charge_eventually(&store, "ann").await, 4, "{brand}");
        assert_eq!(store.stats().panics, 0);
    }
}

#[tokio::test]
async fn passwords_of_the_sentinels_and_of_the_master_are_separate() {
    for brand in [Brand::Valkey] {
        let config = Config::new(brand).set("requirepass", "data-pass");
        let group = SentinelGroup::with(&config, 1, Some("watch-pass"));
        let url = group.url().replace("://", "://:data-pass@");
        let dir = tempfile::tempdir().unwrap();
        let file = |text: &str| {
            let file = dir.path().join(text);
            fs::write(&file, text).unwrap();
            CredentialSource::File(file)
        };
        let right = || file("watch-pass");
        let store = builder(&url).sentinel_password_from(right()).build().unwrap();
        assert_eq!(charge(&store, "ann").await, Ok(1), "{brand}");
        group.fail_over();
        until_master(&store, &group.servers()[1]).await;
        assert_eq!(charge_eventually(&store, "ann").await, 2, "{brand}");

        let missing = builder(&url);
        let wrong = builder(&url).sentinel_password_from(file("hunter2"));
        let wrong_user = builder(&url).sentinel_username_from(file("ann")).sentinel_password_from(right());
        for (builder, reason) in [
            (missing, "the server requires a password"),
            (wrong, "the server rejects the user or the password"),
            (wrong_user, "the server rejects the user or the password"),
        ] {
            let shown = format!("{builder:?}");
            let error = decide(&builder.build().unwrap(), "ann").await.unwrap_err();
            assert_eq!(error.kind(), Kind::Forbidden, "{brand}: {error}");
            let expected = format!("Sentinel {}: {reason}", group.sentinels()[0].addr());
            assert!(error.to_string().contains(&expected), "{brand}: {error}");
            for secret in ["data-pass", "watch-pass", "hunter2"] {
                assert!(!error.to_string().contains(secret) && !shown.contains(secret), "{error} {shown}");
            }
        }
        // An error before the store connects names the Sentinels too.
        for (builder, expected) in [
            (
                builder(&url).sentinel_username_from(file("ann")),
                "a user name is set for the Sentinels, but no password",
            ),
            (builder(&url).sentinel_password_from(file("\n")), "cannot read the password of the Sentinels from"),
        ] {
            let error = builder.build().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        // The master's password: it is the master that rejects it.
        let store = builder(&group.url()).sentinel_password_from(right()).build().unwrap();
        let error = decide(&store, "ann").await.unwrap_err();
        let expected = format!("store {}: the server requires a password", group.master().url());
        assert_eq!((error.kind(), error.to_string()), (Kind::Forbidden, expected), "{brand}");
    }
}

#[tokio::test]
async fn server_that_is_no_sentinel_or_does_not_know_the_name_is_an_error_that_says_so() {
    let group = SentinelGroup::shared(Brand::Redis);
    let sentinel = &group.sentinels()[0];
    let error_of = |url: String| async move {
        let store = builder(&url).build().unwrap();
        let error = decide(&store, "ann").await.unwrap_err();
        if error.kind() == Kind::Unsupported {
            // `serve` does not start with such a store.
            let checked = store.check_server().await;
            assert!(matches!(checked, Err(ServerCheckError::Store(error)) if error.kind() == Kind::Unsupported));
        }
        (error.kind(), error.to_string())
    };

    let (kind, message) = error_of(format!("redis+sentinel://{}/other", sentinel.addr())).await;
    let reason = "it does not watch a master named other; it watches main";
    let expected = format!("store redis+sentinel://{0}/other: Sentinel {0}: {reason}", sentinel.addr());
    assert_eq!((kind, message), (Kind::Unsupported, expected));

    let server = Server::redis();
    let (kind, message) = error_of(format!("redis+sentinel://{}/main", server.addr())).await;
    let reason = "the server is not a Sentinel; a redis+sentinel:// URL lists Sentinels, usually with port 26379";
    let expected = format!("store redis+sentinel://{0}/main: Sentinel {0}: {reason}", server.addr());
    assert_eq!((kind, message), (Kind::Unsupported, expected));

    for scheme in ["redis", "redis+cluster"] {
        let (kind, message) = error_of(format!("{scheme}://{}", sentinel.addr())).await;
        let reason = "the server is a Sentinel, which holds no keys; use redis+sentinel://host:port/NAME";
        assert!(kind == Kind::Unsupported && message.ends_with(reason), "{scheme}: {kind:?} {message}");
    }

    let [one, other] = [(); 2].map(|()| format!("127.0.0.1:{}", tidegate_testkit::server::free_port()));
    let (kind, message) = error_of(format!("redis+sentinel://{one},{other}/main")).await;
    let reasons = format!("Sentinel {one}: connection refused; Sentinel {other}: connection refused");
    let expected = format!("cannot reach the store redis+sentinel://{one},{other}/main: {reasons}");
    assert_eq!((kind, message), (Kind::Unreachable, expected));

    // Malformed: not RESP, no address, an error, a reply without a request.
    for (bytes, expected) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "the server's reply is not valid RESP2"),
        (b"+OK\r\n", "the reply to SENTINEL GET-MASTER-ADDR-BY-NAME is not an address"),
        (b"*2\r\n$1\r\nh\r\n$5\r\n99999\r\n", "the reply to SENTINEL GET-MASTER-ADDR-BY-NAME is not an address"),
        (b"-ERR nonsense\r\n", "the server returned an unknown error"),
    ] {
        let sentinel = FakeSentinel::start(SentinelAnswer::Bytes(bytes)).await;
        let (kind, message) = error_of(format!("redis+sentinel://{}/main", sentinel.addr())).await;
        assert!(kind == Kind::Protocol && message.ends_with(expected), "{kind:?} {message}");
    }

    // A Sentinel that works is enough.
    let url = format!("redis+sentinel://{},{one},{}/main", server.addr(), sentinel.addr());
    let store = builder(&url).prefix("enough").build().unwrap();
    assert_eq!(charge(&store, "ann").await, Ok(1));
}

#[tokio::test]
async fn dropped_store_closes_its_connections() {
    let group = SentinelGroup::start(Brand::Redis);
    let store = store_on(&group);
    assert_eq!(charge(&store, "ann").await, Ok(1));
    let connected = || group.sentinels().iter().chain(group.servers()).filter(|server| has_connection(server)).count();
    poll::until("the master and all Sentinels are connected", || connected() == 4).await;
    drop(store);
    poll::until("all connections are closed", || connected() == 0).await;
}

/// The store's tasks follow the Sentinels, listen for the workers, and serve the master.
#[tokio::test]
async fn dropped_store_ends_its_tasks() {
    let server = Server::redis();
    let sentinel = FakeSentinel::start(SentinelAnswer::Master { port: server.port(), epoch: 1, announces: true }).await;
    let alive = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = alive();
    let down = tidegate_testkit::server::free_port();
    let store = builder(&format!("redis+sentinel://{},127.0.0.1:{down}/main", sentinel.addr())).build().unwrap();
    assert_eq!(charge(&store, "ann").await, Ok(1));
    // Two followers, the listener, and the worker of the master; and a connection of the Sentinel.
    assert_eq!(alive() - before, 5);
    drop(store);
    poll::until("all tasks have ended", || alive() == before).await;
}
