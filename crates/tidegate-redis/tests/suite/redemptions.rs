//! Receipts on real servers: redeemed once by many callers, gone when they expire, and unused after an error.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{
    Algorithm, Check, Decision, Demand, Key, Limit, LimitStatus, ManualClock, ReceiptId, Redeemed, Redemption, Source,
    Store, StoreErrorKind as Kind, Timestamp,
};
use tidegate_redis::RedisStore;
use tidegate_testkit::fault::Fault;
use tidegate_testkit::server::{Brand, Config, Server};
use tidegate_testkit::simulated::{SimulatedRedis, VirtualClock};

use crate::on_server::OnServer;
use crate::state::{fill_chunked, keys_and_values};
use crate::subjects::{node_with_all_slots, store_on};

/// A call timeout that does not pass on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);
const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
const MINUTE_US: u64 = 60_000_000;

fn id(number: u8) -> ReceiptId {
    ReceiptId::from_bytes([number; 16])
}

fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
    Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap())
}

fn limits() -> [Limit; 6] {
    Algorithm::ALL.map(|algorithm| "100/min".parse::<Limit>().unwrap().with_algorithm(algorithm).unwrap())
}

async fn decided(store: &RedisStore, check: Check<'_>) -> Decision {
    store.decide(&[check]).await.unwrap().remove(0)
}

async fn remaining(store: &RedisStore, demand: &Demand<'_>) -> u32 {
    store.inspect(demand).await.unwrap().remaining
}

/// Returns the key of the block with a receipt of this subject.
fn receipt_key(subject: &str, id: ReceiptId) -> String {
    format!("tidegate:tg2:{{{subject}}}:receipts:{:016x}:{}", id.stream(), id.sequence() / 1_024)
}

/// Returns the sum of the bits under a key.
fn bit_count(server: &Server, key: &str) -> i64 {
    server.command(&["BITCOUNT", key]).integer()
}

#[tokio::test]
async fn used_receipt_lives_until_it_expires_and_every_key_has_a_ttl() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let store = RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap();
        for limit in limits() {
            server.command(&["FLUSHALL"]);
            let unused = Demand::new(limit, Key::new("k").unwrap()).cost(4);
            let over = demand("50/h fixed-window", "k").cost(7);
            let (refund, charge) = (Check::one(&unused), Check::one(&over));
            // Something is left of the refunded counter.
            decided(&store, refund).await;
            let decision = decided(&store, refund).await;
            let both = |id, until| Redemption::new(id, b"k", until).refund(refund, &decision).charge(charge);
            let until = decision.at.plus_micros(2 * MINUTE_US);
            let redemption = both(id(1), until);
            assert_eq!(store.redeem(&redemption).await.unwrap(), Redeemed::Done);
            let ends_ms = server.command(&["PEXPIRETIME", &receipt_key("k", id(1))]).integer();
            let too_long_us = ends_ms * 1_000 - i64::try_from(until.as_micros()).unwrap();
            assert!((0..=2_000).contains(&too_long_us), "{brand} {limit}: {too_long_us} µs");
            let keys = server.command(&["KEYS", "*"]);
            assert_eq!(keys.items().len(), 3);
            for key in keys.items() {
                assert!(server.command(&["PTTL", &key.text()]).integer() > 0, "{brand} {limit}: {}", key.text());
            }
            assert_eq!(remaining(&store, &over).await, 43);

            // Redeemed before, or expired by the server's clock: nothing changes.
            let before = keys_and_values(&server);
            assert_eq!(store.redeem(&redemption).await.unwrap(), Redeemed::AlreadyUsed);
            assert_eq!(store.redeem(&both(id(2), decision.at)).await.unwrap(), Redeemed::Expired);
            assert_eq!(store.redeem(&both(id(1), decision.at)).await.unwrap(), Redeemed::Expired);
            assert_eq!(keys_and_values(&server), before, "{brand} {limit}");
        }
    }
}

#[test]
fn receipt_is_expired_from_its_end_on_and_nothing_changes() {
    let redis = OnServer::new(Brand::Redis);
    redis.clock.set(START);
    for limit in limits() {
        redis.emptied();
        let demand = Demand::new(limit, Key::new("k").unwrap()).cost(4);
        let check = Check::one(&demand);
        let decision = redis.wait(decided(&redis.store, check));
        let redeem = |number, until, at| {
            redis.clock.set(at);
            redis.wait(redis.store.redeem(&Redemption::new(id(number), b"k", until).refund(check, &decision))).unwrap()
        };
        let until = START.plus_micros(1_000);
        let before = keys_and_values(redis.server());
        assert_eq!(redeem(1, until, until), Redeemed::Expired);
        assert_eq!(redeem(1, Timestamp::ZERO, until), Redeemed::Expired);
        assert_eq!(keys_and_values(redis.server()), before, "{limit}");
        assert_eq!(redeem(1, until, until.minus_micros(1)), Redeemed::Done);
        assert_eq!(redeem(2, Timestamp::MAX, until), Redeemed::Done, "the longest time");
        redis.clock.set(START);
    }
}

/// Half of the tasks use one store, half another.
async fn one_of_many_tasks_redeems_a_receipt(brand: Brand) {
    let server = Config::new(brand).start();
    let clock = Arc::new(ManualClock::new(START));
    let store = || RedisStore::builder(server.url()).call_timeout(PATIENCE).clock_override(clock.clone()).build();
    let stores = [store().unwrap(), store().unwrap()];
    for (round, limit) in (0..).zip(limits()) {
        let unused = Demand::new(limit, Key::new("k").unwrap()).cost(30);
        let over = demand("1000/h sliding-log", "k").cost(5);
        let refund = Check::one(&unused);
        decided(&stores[0], refund).await;
        let decision = decided(&stores[0], refund).await;
        let before = remaining(&stores[0], &over).await;
        let until = decision.at.plus_micros(MINUTE_US);
        let redemption = Redemption::new(id(round), b"k", until).refund(refund, &decision).charge(Check::one(&over));
        let redeem = |task: usize| stores[task % 2].redeem(&redemption);
        let redeemed: Vec<Redeemed> = join_all((0..16).map(redeem)).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(redeemed.iter().filter(|redeemed| **redeemed == Redeemed::Done).count(), 1, "{limit}: {redeemed:?}");
        assert_eq!(redeemed.iter().filter(|redeemed| **redeemed == Redeemed::AlreadyUsed).count(), 15, "{limit}");
        assert_eq!(remaining(&stores[1], &over).await, before - 5, "{limit}");
        // A leaky bucket holds one unit besides those in its queue.
        let held = u32::from(limit.algorithm() == Algorithm::LeakyBucket);
        assert_eq!(remaining(&stores[1], &unused).await, 70 + held, "{limit}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_many_tasks_redeems_a_receipt_on_redis() {
    one_of_many_tasks_redeems_a_receipt(Brand::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_of_many_tasks_redeems_a_receipt_on_valkey() {
    one_of_many_tasks_redeems_a_receipt(Brand::Valkey).await;
}

/// A batch holds refunds and redemptions of many callers, some of the same counter, which are executed in order.
#[test]
fn refunds_and_redemptions_share_a_call() {
    let redis = OnServer::new(Brand::Redis);
    for limit in limits() {
        redis.emptied();
        redis.clock.set(START);
        let one = Demand::new(limit, Key::new("k").unwrap());
        let check = Check::one(&one);
        let decisions = redis.wait(redis.store.decide(&[check; 40])).unwrap();
        let over = demand("50/h", "k").cost(2);
        let redemptions: Vec<Redemption<'_>> = (0..40)
            .map(|nth: u8| {
                let redemption = Redemption::new(id(nth / 2), b"k", Timestamp::MAX);
                redemption.refund(check, &decisions[nth as usize]).charge(Check::one(&over))
            })
            .collect();
        let calls_before = redis.store.stats().calls;
        let redeemed = redis.wait(async {
            let redeem = async |nth: usize| match nth % 4 {
                // Every fourth is a refund, so its pair can be redeemed by the other one.
                3 => redis.store.refund(&check, &decisions[nth]).await.map(|()| Redeemed::Done),
                _ => redis.store.redeem(&redemptions[nth]).await,
            };
            join_all((0..40).map(redeem)).await
        });
        let redeemed: Vec<Redeemed> = redeemed.into_iter().map(Result::unwrap).collect();
        let expected = [Redeemed::Done, Redeemed::AlreadyUsed, Redeemed::Done, Redeemed::Done].repeat(10);
        assert_eq!(redeemed, expected, "{limit}");
        // A leaky bucket holds one unit besides those in its queue.
        let held = u32::from(limit.algorithm() == Algorithm::LeakyBucket);
        assert_eq!(redis.wait(remaining(&redis.store, &one)), (90 + held).min(100), "{limit}");
        assert_eq!(redis.wait(remaining(&redis.store, &over)), 10, "{limit}: 20 redemptions charge 2 each");
        redis.verified();
        let calls = redis.store.stats().calls - calls_before;
        assert!(calls < 10, "{calls} calls");
    }
}

#[test]
fn foreign_data_under_one_counter_leaves_the_receipt_unused() {
    let redis = OnServer::new(Brand::Redis);
    redis.clock.set(START);
    for limit in limits() {
        for is_foreign_refunded in [false, true] {
            redis.emptied();
            let [good, bad] =
                [demand("100/h", "k"), Demand::new(limit, Key::new("k").unwrap())].map(|demand| demand.cost(4));
            let (refunded, charged) = if is_foreign_refunded { (bad, good) } else { (good, bad) };
            let (refund, charge) = (Check::one(&refunded), Check::one(&charged));
            let decision = redis.wait(decided(&redis.store, refund));
            let foreign = format!("tidegate:tg2:{{k}}:{}:60000000", limit.algorithm().as_str());
            redis.server().command(&["DEL", &foreign]);
            redis.server().command(&["SADD", &foreign, "member"]);
            let before = keys_and_values(redis.server());
            let redemption = Redemption::new(id(1), b"k", Timestamp::MAX).refund(refund, &decision).charge(charge);
            let other = Redemption::new(id(2), b"other", Timestamp::MAX);
            let both = async { tokio::join!(redis.store.redeem(&redemption), redis.store.redeem(&other)) };
            let (error, other) = redis.wait(both);
            assert_eq!(error.unwrap_err().kind(), Kind::Foreign, "{limit}");
            assert_eq!(other.unwrap(), Redeemed::Done, "a neighbour in the batch is not harmed");
            redis.server().command(&["DEL", &receipt_key("other", id(2))]);
            assert_eq!(keys_and_values(redis.server()), before, "{limit}");
            redis.server().command(&["DEL", &foreign]);
            assert_eq!(redis.wait(redis.store.redeem(&redemption)).unwrap(), Redeemed::Done);
        }
    }
}

/// Damage inside a log is found when a refund needs the damaged element.
#[test]
fn damaged_log_leaves_the_receipt_unused_or_the_error_says_that_it_may_be_used() {
    let redis = OnServer::new(Brand::Redis);
    let log = demand("1000/min", "k");
    let key = "tidegate:tg2:{k}:sliding:60000000";
    fill_chunked(&redis, &log, 700, START.as_micros());
    redis.server().command(&["COPY", key, "intact"]);
    let mut errors = 0;
    for damage in [&["LSET", "0", "hello"][..], &["LSET", "1", "C"], &["LSET", "2", ""], &["LPOP"]] {
        for entry_us in [1, 100, 250, 400, 690] {
            redis.server().command(&["DEL", &receipt_key("k", id(1))]);
            redis.server().command(&["COPY", "intact", key, "REPLACE"]);
            redis.server().command(&[&damage[..1], &[key], &damage[1..]].concat());
            let before = keys_and_values(redis.server());
            let at = START.minus_micros(entry_us);
            let status = redis.wait(redis.store.inspect(&demand("1000/min", "fresh"))).unwrap();
            let limits = [LimitStatus { cost: 1, ..status }].into_iter().collect();
            let decision = Decision::new(at, Source::Store, limits);
            let redemption = Redemption::new(id(1), b"k", Timestamp::MAX).refund(Check::one(&log), &decision);
            match redis.wait(redis.store.redeem(&redemption)) {
                Ok(redeemed) => {
                    assert_eq!(redeemed, Redeemed::Done);
                    assert_eq!(bit_count(redis.server(), &receipt_key("k", id(1))), 1);
                }
                Err(error) => {
                    errors += 1;
                    assert!(matches!(error.kind(), Kind::Foreign | Kind::ForeignInPart), "{error}");
                    if error.is_unexecuted() {
                        assert_eq!(keys_and_values(redis.server()), before, "{damage:?}, {entry_us}");
                    }
                }
            }
        }
    }
    assert!(errors > 5, "{errors}");
}

#[test]
fn server_out_of_memory_executes_nothing_of_a_redemption() {
    for brand in Brand::ALL {
        let redis = OnServer::new(brand);
        redis.clock.set(START);
        for (limit, cost) in limits().into_iter().flat_map(|limit| [(limit, 4), (limit, 5)]) {
            redis.emptied();
            let unused = Demand::new(limit, Key::new("k").unwrap()).cost(cost);
            let over = demand("100/h", "k").cost(4);
            let (refund, charge) = (Check::one(&unused), Check::one(&over));
            // With four units at a time a log is plain, with five it is chunked.
            redis.clock.set(START.minus_micros(1_000));
            redis.wait(decided(&redis.store, refund));
            redis.clock.set(START);
            let decision = redis.wait(decided(&redis.store, refund));
            let marks = Redemption::new(id(1), b"k", Timestamp::MAX);
            let gives_back = marks.refund(refund, &decision);
            // A refund that finds no charge, too: it only sets the TTL of its counter.
            let mut late = decision.clone();
            late.at = START.minus_micros(10 * MINUTE_US);
            let finds_nothing = marks.refund(refund, &late);
            redis.server().command(&["CONFIG", "SET", "maxmemory", "1"]);
            let before = keys_and_values(redis.server());
            for redemption in [marks, finds_nothing, gives_back, marks.charge(charge), gives_back.charge(charge)] {
                let error = redis.wait(redis.store.redeem(&redemption)).unwrap_err();
                assert_eq!((error.kind(), error.is_unexecuted()), (Kind::Unavailable, true), "{brand} {limit}");
                assert_eq!(keys_and_values(redis.server()), before, "{brand} {limit}");
            }
            redis.server().command(&["CONFIG", "SET", "maxmemory", "0"]);
            assert_eq!(redis.wait(redis.store.redeem(&gives_back)).unwrap(), Redeemed::Done, "{brand} {limit}");
            assert_eq!(redis.wait(redis.store.redeem(&gives_back)).unwrap(), Redeemed::AlreadyUsed);
        }
    }
}

#[tokio::test]
async fn one_subject_per_call_redeems_receipts_of_one_subject_each() {
    for brand in Brand::ALL {
        let server = node_with_all_slots(brand);
        let store = store_on(&server, true);
        let [ann, bob] = [demand("100/h", "ann").cost(4), demand("100/h", "bob").cost(4)];
        let (anns, bobs) = (Check::one(&ann), Check::one(&bob));
        let decisions = store.decide(&[anns, bobs]).await.unwrap();
        let redemptions = [
            Redemption::new(id(1), b"ann", Timestamp::MAX).refund(anns, &decisions[0]),
            Redemption::new(id(1), b"bob", Timestamp::MAX).refund(bobs, &decisions[1]),
            Redemption::new(id(2), b"cyd", Timestamp::MAX),
        ];
        for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
            for redeemed in join_all(redemptions.iter().map(|redemption| store.redeem(redemption))).await {
                assert_eq!(redeemed.unwrap(), expected, "{brand}");
            }
        }
        assert_eq!((remaining(&store, &ann).await, remaining(&store, &bob).await), (100, 100));

        let of_two = Redemption::new(id(3), b"ann", Timestamp::MAX).refund(anns, &decisions[0]).charge(bobs);
        let error = store.redeem(&of_two).await.unwrap_err();
        assert_eq!((error.kind(), error.is_unexecuted()), (Kind::Forbidden, true), "{brand}");
        assert_eq!((remaining(&store, &ann).await, remaining(&store, &bob).await), (100, 100));
    }
}

/// After a timeout it is unknown whether the call was executed. The caller redeems again.
#[tokio::test(start_paused = true)]
async fn redemption_that_timed_out_is_repeated_and_takes_effect_once() {
    let server = SimulatedRedis::new(VirtualClock::start());
    let dial = server.clone();
    let builder =
        RedisStore::builder("redis://simulated").connector(move |_, _| std::future::ready(Ok(dial.connect())));
    let store = builder.call_timeout(Duration::from_millis(200)).build().unwrap();
    let demand = demand("100/h", "k").cost(30);
    let check = Check::one(&demand);
    decided(&store, check).await;
    for (round, fault, second) in [(1, Fault::Hold, Redeemed::AlreadyUsed), (2, Fault::Blackhole, Redeemed::Done)] {
        let decision = decided(&store, check).await;
        let redemption = Redemption::new(id(round), b"k", Timestamp::MAX).refund(check, &decision);
        server.set(fault);
        let error = store.redeem(&redemption).await.unwrap_err();
        assert_eq!((error.kind(), error.is_unexecuted()), (Kind::TimedOut, false));
        server.set(Fault::Pass);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(store.redeem(&redemption).await.unwrap(), second, "{fault:?}");
        assert_eq!(store.redeem(&redemption).await.unwrap(), Redeemed::AlreadyUsed);
        assert_eq!(remaining(&store, &demand).await, 70, "{fault:?}");
    }
}

/// Returns a redemption that marks a receipt of a stream that the subject `k` has for itself.
fn nth(sequence: u64, until: Timestamp) -> Redemption<'static> {
    Redemption::new(ReceiptId::new(7, sequence), b"k", until)
}

/// The receipts of one caller have consecutive sequence numbers.
#[test]
fn used_receipts_of_one_caller_share_keys() {
    for brand in Brand::ALL {
        let redis = OnServer::new(brand);
        redis.clock.set(START);
        for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
            let redemptions: Vec<Redemption<'_>> = (0..4_000).map(|number| nth(number, Timestamp::MAX)).collect();
            let redeem = join_all(redemptions.iter().map(|redemption| redis.store.redeem(redemption)));
            assert!(redis.wait(redeem).into_iter().all(|redeemed| redeemed.unwrap() == expected), "{brand}");
        }
        let keys = redis.server().command(&["KEYS", "*"]);
        assert_eq!(keys.items().len(), 4, "{brand}");
        let bits = keys.items().iter().map(|key| bit_count(redis.server(), &key.text())).sum::<i64>();
        assert_eq!(bits, 4_000, "{brand}");
    }
}

#[test]
fn every_receipt_of_a_block_is_used_alone_and_the_block_lives_as_long_as_the_last() {
    for brand in Brand::ALL {
        let redis = OnServer::new(brand);
        redis.clock.set(START);
        let redeem = |number, minutes| {
            let until = START.plus_micros(minutes * MINUTE_US);
            redis.wait(redis.store.redeem(&nth(number, until))).unwrap()
        };
        let key = receipt_key("k", ReceiptId::new(7, 0));
        let minutes_left = || redis.server().command(&["PTTL", &key]).integer() / 60_000;
        // In an order in which the string grows, and not.
        let order = [5, 1_023, 0, 7, 8, 511, 512];
        for (index, number) in (0..).zip(order) {
            let minutes = [30, 20, 40, 15, 50, 12, 60][index];
            assert_eq!(redeem(number, minutes), Redeemed::Done, "{brand} {number}");
            let longest = [30, 30, 40, 40, 50, 50, 60][index];
            assert!((longest - 1..=longest).contains(&minutes_left()), "{brand} {number}: {}", minutes_left());
        }
        assert_eq!(redis.server().command(&["STRLEN", &key]).integer(), 128, "{brand}");
        for number in 0..1_024 {
            let expected = if order.contains(&number) { Redeemed::AlreadyUsed } else { Redeemed::Done };
            assert_eq!(redeem(number, 60), expected, "{brand} {number}");
        }
        assert_eq!(bit_count(redis.server(), &key), 1_024, "{brand}");
        assert_eq!(redis.server().command(&["DBSIZE"]).integer(), 1, "{brand}");
    }
}

#[test]
fn foreign_data_under_the_key_of_a_block_is_an_error_that_changes_nothing() {
    let redis = OnServer::new(Brand::Redis);
    redis.clock.set(START);
    let key = receipt_key("k", ReceiptId::new(7, 0));
    let unused = demand("100/h", "k").cost(4);
    let refund = Check::one(&unused);
    let decision = redis.wait(decided(&redis.store, refund));
    let long = "x".repeat(129);
    for foreign in [&["SADD", &key, "member"][..], &["RPUSH", &key, "1"], &["SET", &key, &long]] {
        redis.server().command(foreign);
        let before = keys_and_values(redis.server());
        let redemption = nth(0, Timestamp::MAX).refund(refund, &decision);
        let error = redis.wait(redis.store.redeem(&redemption)).unwrap_err();
        assert_eq!((error.kind(), error.is_unexecuted()), (Kind::Foreign, true), "{foreign:?}");
        assert_eq!(keys_and_values(redis.server()), before, "{foreign:?}");
        redis.server().command(&["DEL", &key]);
    }
    assert_eq!(
        redis.wait(redis.store.redeem(&nth(0, Timestamp::MAX).refund(refund, &decision))).unwrap(),
        Redeemed::Done
    );
}
