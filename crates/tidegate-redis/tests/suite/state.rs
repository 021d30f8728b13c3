//! The state in Redis: its bytes, its lifetime, foreign data, and servers out of memory.

use std::time::Duration;

use futures_util::future::join_all;
use tidegate_core::{
    Algorithm, Check, Cost, Decision, Demand, Key, Limit, ReceiptId, Redeemed, Redemption, Scope, Source, Store,
    StoreErrorKind, Timestamp, Wait,
};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Config, Server};

use crate::on_server::OnServer;

/// A call timeout that does not pass on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
    Demand::new(limit.parse().unwrap(), Key::new(subject).unwrap())
}

fn limits() -> impl Iterator<Item = Limit> {
    let shapes = ["5/10s", "7/1500ms", "40/min", "3000/h"];
    Algorithm::ALL.into_iter().flat_map(move |algorithm| {
        shapes.map(|shape| shape.parse::<Limit>().unwrap().with_algorithm(algorithm).unwrap())
    })
}

/// Returns by how many microseconds the only key lives longer than the decision matters. A fixed window matters for one
/// window more, because the rule may change to a sliding counter.
fn lives_too_long_us(server: &Server, limit: &Limit, decision: &Decision) -> i64 {
    let keys = server.command(&["KEYS", "*"]);
    assert_eq!(keys.items().len(), 1);
    let ends_us = 1_000 * server.command(&["PEXPIRETIME", &keys.items()[0].text()]).integer();
    let reset_us = decision.limits[0].reset_after.as_micros().unwrap();
    let next_us = if limit.algorithm() == Algorithm::FixedWindow { limit.window_us() } else { 0 };
    ends_us - i64::try_from(decision.at.as_micros() + reset_us + next_us).unwrap()
}

async fn key_expires_when_its_state_stops_to_matter(brand: Brand) {
    let server = Config::new(brand).start();
    let store = RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap();
    for limit in limits() {
        for (scope, count_denied) in [(Scope::Explicit, false), (Scope::rule("r", "l"), true)] {
            server.command(&["FLUSHALL"]);
            let limit = limit.with_count_denied(count_denied);
            let demand = Demand::new(limit, Key::scoped("k", scope).unwrap());
            for cost in [1, 3, 1, 100, 0, 2, 2] {
                let demand = demand.cost(Cost::new(cost));
                let decision = store.decide(&[Check::one(&demand)]).await.unwrap().remove(0);
                let too_long_us = lives_too_long_us(&server, &demand.limit, &decision);
                assert!((0..=1_000_000).contains(&too_long_us), "{limit}: {too_long_us} µs");
            }
        }
    }
}

#[tokio::test]
async fn key_expires_when_its_state_stops_to_matter_on_redis() {
    key_expires_when_its_state_stops_to_matter(Brand::Redis).await;
}

#[tokio::test]
async fn key_expires_when_its_state_stops_to_matter_on_valkey() {
    key_expires_when_its_state_stops_to_matter(Brand::Valkey).await;
}

/// The TTL of a log is not set at every admission, only when it must be. Only the server's clock shows that.
#[tokio::test]
async fn log_in_steady_use_always_lives_long_enough() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap();
    let demand = demand("100/10s", "k");
    for _ in 0..40 {
        let decision = store.decide(&[Check::one(&demand)]).await.unwrap().remove(0);
        let too_long_us = lives_too_long_us(&server, &demand.limit, &decision);
        assert!((0..=1_000_000).contains(&too_long_us), "{too_long_us} µs");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn key_written_at_a_given_time_lives_ten_minutes() {
    let redis = OnServer::new(Brand::Redis);
    for limit in limits() {
        redis.emptied();
        redis.clock.set(Timestamp::from_micros(5_000_000));
        let demand = Demand::new(limit, Key::new("k").unwrap());
        redis.wait(redis.store.decide(&[Check::one(&demand)])).unwrap();
        let keys = redis.server().command(&["KEYS", "*"]);
        let pttl_ms = redis.server().command(&["PTTL", &keys.items()[0].text()]).integer();
        assert!(pttl_ms > 590_000, "{limit}: {pttl_ms}");
    }
}

/// The examples in `docs/redis-state.md`.
#[test]
fn state_is_as_documented() {
    let redis = OnServer::new(Brand::Redis);
    let at = |us: u64, demand: &Demand<'_>| {
        redis.clock.set(Timestamp::from_micros(1_760_000_000_000_000 + us));
        assert!(redis.wait(redis.store.decide(&[Check::one(demand)])).unwrap()[0].allowed());
    };
    let list = |key: &str| {
        let items = redis.server().command(&["LRANGE", key, "0", "-1"]);
        items.items().iter().map(|item| item.text()).collect::<Vec<_>>().join(" ")
    };
    let log = demand("100/min", "a");
    let key = "tidegate:tg2:{a}:sliding:60000000";
    at(0, &log);
    at(250_000, &log);
    at(250_000, &log);
    assert_eq!(list(key), "1760000000000000 1760000000250000 1760000000250000");
    at(300_000, &log.cost(25));
    let hex = |key: &str, element: &str| {
        let script = "local text = redis.call('LINDEX', KEYS[1], ARGV[1])
            return (text:gsub('.', function(byte) return ('%02x'):format(byte:byte()) end))";
        redis.server().command(&["EVAL", script, "1", key, element]).text()
    };
    let bytes = |text: &str| text.replace(' ', "");
    assert_eq!(redis.server().command(&["LLEN", key]).integer(), 1, "an open chunk alone");
    let header = "4f 0640b5eece0000 00001c 000000 000000";
    let entries = "0640b5eece0000 000001 0640b5eed1d090 000002 0640b5eed293e0 000019";
    assert_eq!(hex(key, "-1"), bytes(header) + &bytes(entries));

    let log = demand("100000/min sliding-log", "d");
    let key = "tidegate:tg2:{d}:sliding-log:60000000";
    for entry in 0..65 {
        at(entry, &log.cost(5));
    }
    assert_eq!(redis.server().command(&["LLEN", key]).integer(), 3, "directory, chunk, open chunk");
    assert_eq!(hex(key, "0"), bytes("44 0640b5eece003f 000140"));
    assert!(hex(key, "1").starts_with(&bytes("43 0640b5eece0000 000005 0640b5eece0001 000005")));
    assert_eq!(hex(key, "2"), bytes("4f 0640b5eece0000 000145 000140 000000 0640b5eece0040 000005"));

    at(0, &demand("100/min sliding-counter", "b"));
    at(61_000_000, &demand("100/min sliding-counter", "b").cost(2));
    let text = redis.server().command(&["GET", "tidegate:tg2:{b}:sliding-counter:60000000"]).text();
    assert_eq!(text, "1760000040000000 60000000 2 1", "start window current previous");

    at(0, &demand("100/min token-bucket", "c").cost(2));
    let text = redis.server().command(&["GET", "tidegate:tg2:{c}:token-bucket:60000000"]).text();
    assert_eq!(text, "1760000000000000 120000000 60000000", "time level scale");

    let id = ReceiptId::from_bytes(0x0001_0203_0405_0607_0809_0a0b_0c0d_feff_u128.to_be_bytes());
    let redeemed = redis.wait(redis.store.redeem(&Redemption::new(id, b"user:42", Timestamp::MAX)));
    assert_eq!(redeemed.unwrap(), Redeemed::Done);
    // The sequence 0x08090a0b0c0dfeff is number 767 of its block, the last bit of byte 95.
    let key = "tidegate:tg2:{user:42}:receipts:0001020304050607:565434638336895";
    assert_eq!(redis.server().command(&["STRLEN", key]).integer(), 96);
    assert_eq!(redis.server().command(&["GETBIT", key, "767"]).integer(), 1);
    assert_eq!(redis.server().command(&["BITCOUNT", key]).integer(), 1);
}

/// Returns all keys with their values as the server dumps them.
pub(crate) fn keys_and_values(server: &Server) -> Vec<String> {
    let keys = server.command(&["KEYS", "*"]);
    let mut dump: Vec<String> =
        keys.items().iter().map(|key| format!("{} {:?}", key.text(), server.command(&["DUMP", &key.text()]))).collect();
    dump.sort();
    dump
}

#[test]
fn foreign_data_is_an_error_of_its_kind_and_nothing_is_written() {
    let redis = OnServer::new(Brand::Redis);
    redis.clock.set(Timestamp::from_micros(1_760_000_000_000_000));
    let foreign: [&[&str]; 17] = [
        &["SET", "hello"],
        &["SET", "1 2 3 99999999999999999999"],
        &["SET", ""],
        &["SET", "1 2 3 4 5"],
        &["SET", "-1 60000000 3 4"],
        &["SET", "99999999999999999999 1 2"],
        &["SET", "1760000000000000 60000000 999999999999 4"],
        &["HSET", "field", "value"],
        &["SADD", "member"],
        &["ZADD", "1", "member"],
        &["RPUSH", "hello"],
        &["RPUSH", "1.5"],
        &["RPUSH", "-3"],
        &["RPUSH", "O"],
        &["RPUSH", "O234567890123456"],
        &["RPUSH", "Oooooooooooooooooooooooooooo"],
        &["RPUSH", "D234567890123456789012345"],
    ];
    for algorithm in Algorithm::ALL {
        let limit: Limit = "100/min".parse::<Limit>().unwrap().with_algorithm(algorithm).unwrap();
        let name = algorithm.as_str();
        // Four numbers are a bucket after a refund, of which only the range is limited.
        let is_bucket = name.ends_with("-bucket");
        for command in foreign.iter().filter(|command| !(is_bucket && command[1].ends_with(" 999999999999 4"))) {
            redis.emptied();
            let key = format!("tidegate:tg2:{{k}}:{name}:60000000");
            let parts: Vec<&str> = [&command[..1], &[key.as_str()], &command[1..]].concat();
            assert_eq!(redis.server().command(&parts).error(), None);
            let before = keys_and_values(redis.server());
            // Beside a good line, and as a step of a batch.
            let good = demand("100/min", "k2");
            let bad = Demand::new(limit, Key::new("k").unwrap());
            let demands = [good, bad];
            let error = redis.wait(redis.store.decide(&[Check::new(&demands).unwrap()])).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Foreign, "{name} {command:?}: {error}");
            assert_eq!(keys_and_values(redis.server()), before, "{name} {command:?}");
            let other = demand("100/min", "k3");
            let (checks, others) = ([Check::one(&bad)], [Check::one(&other)]);
            let both = async { tokio::join!(redis.store.decide(&checks), redis.store.decide(&others)) };
            let (bad, other) = redis.wait(both);
            assert_eq!(bad.unwrap_err().kind(), StoreErrorKind::Foreign);
            assert!(other.unwrap()[0].allowed(), "{name} {command:?}: a neighbour in the batch is not harmed");
        }
    }
}

#[test]
fn log_with_foreign_data_inside_fails_only_its_own_checks() {
    let redis = OnServer::new(Brand::Redis);
    let now_us: u64 = 1_760_000_000_000_000;
    redis.clock.set(Timestamp::from_micros(now_us));
    spoil(&redis, now_us, "k");
    let before = keys_and_values(redis.server());
    // So many that they are sent in two calls, each with a check of the bad log.
    let subjects: Vec<String> =
        (0..40).map(|caller| if caller % 20 == 7 { "k".into() } else { format!("other {caller}") }).collect();
    let demands: Vec<Demand<'_>> = subjects.iter().map(|subject| demand("100/min", subject)).collect();
    let checks: Vec<[Check<'_>; 1]> = demands.iter().map(|demand| [Check::one(demand)]).collect();
    let decided = redis.wait(join_all(checks.iter().map(|check| redis.store.decide(check))));
    for (subject, decided) in subjects.iter().zip(decided) {
        match decided {
            Ok(decisions) => assert_eq!((subject != "k", decisions[0].limits[0].remaining), (true, 99), "{subject}"),
            Err(error) => assert_eq!((subject.as_str(), error.kind()), ("k", StoreErrorKind::Foreign)),
        }
    }
    assert!(keys_and_values(redis.server()).contains(&before[0]), "it is left as it is");
}

/// Puts foreign data into the middle of a subject's log.
fn spoil(redis: &OnServer, now_us: u64, subject: &str) {
    let [old, fresh] = [now_us - 70_000_000, now_us - 1_000_000].map(|us| us.to_string());
    let key = format!("tidegate:tg2:{{{subject}}}:sliding:60000000");
    redis.server().command(&["RPUSH", &key, &old, "hello", &fresh, &fresh]);
}

/// Writes a chunked log with `entries` entries of one unit, one every microsecond, the last a microsecond before
/// `now_us`.
pub(crate) fn fill_chunked(redis: &OnServer, log: &Demand<'_>, entries: u64, now_us: u64) {
    for entry in 0..entries {
        redis.clock.set(Timestamp::from_micros(now_us - entries + entry));
        // More than four units at once: the list is chunked from the beginning.
        let demand = log.cost(if entry == 0 { 5 } else { 1 });
        assert!(redis.wait(redis.store.decide(&[Check::one(&demand)])).unwrap()[0].allowed());
    }
    redis.clock.set(Timestamp::from_micros(now_us));
}

#[test]
fn damaged_chunked_log_is_foreign_data_and_nothing_is_written() {
    let redis = OnServer::new(Brand::Redis);
    let now_us: u64 = 1_760_000_000_000_000;
    let log = demand("1000/min", "k");
    let key = "tidegate:tg2:{k}:sliding:60000000";
    fill_chunked(&redis, &log, 700, now_us);
    assert_eq!(redis.server().command(&["LLEN", key]).integer(), 5, "directory, three chunks, open chunk");
    redis.server().command(&["COPY", key, "intact"]);
    for damage in [
        &["LSET", "0", "hello"][..],
        &["LSET", "0", "D"],
        &["LSET", "0", "D1234567890"],
        &["LSET", "1", "C"],
        &["LSET", "1", "C1234567890"],
        &["LSET", "2", ""],
        &["LSET", "2", "1760000000000000"],
        &["LPOP"],
        &["RPOP"],
        &["RPUSH", "hello"],
        &["LPUSH", "hello"],
    ] {
        redis.server().command(&["COPY", "intact", key, "REPLACE"]);
        let command: Vec<&str> = [&damage[..1], &[key], &damage[1..]].concat();
        assert_eq!(redis.server().command(&command).error(), None);
        let before = keys_and_values(redis.server());
        // Costs that read each chunk in turn.
        let mut is_found = false;
        for cost in [300, 500, 800, 1000] {
            match redis.wait(redis.store.decide(&[Check::one(&log.cost(cost))])) {
                // The check needed no damaged element.
                Ok(decisions) => assert!(!decisions[0].allowed(), "{damage:?}, cost {cost}"),
                Err(error) => {
                    assert_eq!(error.kind(), StoreErrorKind::Foreign, "{damage:?}, cost {cost}: {error}");
                    is_found = true;
                }
            }
            assert_eq!(keys_and_values(redis.server()), before, "{damage:?}");
        }
        assert!(is_found, "{damage:?}");
    }
}

#[test]
fn server_out_of_memory_accepts_a_refund() {
    for brand in Brand::ALL {
        let redis = OnServer::new(brand);
        let now_us: u64 = 1_760_000_000_000_000;
        // Plain, an open chunk alone, and many chunks.
        for (limit, entries) in [("100/min", 0), ("100/min", 20), ("3000/min sliding-log", 700)] {
            redis.emptied();
            let log = demand(limit, "k");
            fill_chunked(&redis, &log, entries, now_us - 2);
            let charged: Vec<Decision> = (0..3)
                .map(|us| {
                    redis.clock.set(Timestamp::from_micros(now_us - 2 + us));
                    redis.wait(redis.store.decide(&[Check::one(&log)])).unwrap().remove(0)
                })
                .collect();
            let remaining = charged[2].limits[0].remaining;
            redis.server().command(&["CONFIG", "SET", "maxmemory", "1"]);
            redis.wait(redis.store.refund(&Check::one(&log), &charged[1])).unwrap();
            assert_eq!(redis.wait(redis.store.inspect(&log)).unwrap().remaining, remaining + 1, "{brand} {limit}");
            redis.server().command(&["CONFIG", "SET", "maxmemory", "0"]);
            redis.verified();
        }
    }
}

#[test]
fn bucket_counts_refunded_units_until_a_full_one_would_be_empty() {
    for brand in Brand::ALL {
        let redis = OnServer::new(brand);
        let (start, key) = (Timestamp::from_micros(1_760_000_000_000_000), "tidegate:tg2:{k}:token-bucket:3600000000");
        let bucket = demand("3600/h token-bucket burst=7200", "k").cost(2);
        let check = [Check::one(&bucket)];
        let state = |after_us: u64| {
            redis.clock.set(start.plus_micros(after_us));
            let decision = redis.wait(redis.store.decide(&check)).unwrap().remove(0);
            assert!(decision.allowed());
            (decision, redis.server().command(&["GET", key]).text())
        };
        let (first, text) = state(0);
        assert_eq!((first.limits[0].refunded_before, &*text), (0, "1760000000000000 7200000000 3600000000"));
        redis.clock.set(start.plus_micros(500_000));
        redis.wait(redis.store.refund(&check[0], &first)).unwrap();
        // One and a half units were given back, which count as two. The empty bucket is kept for two hours.
        assert_eq!(redis.server().command(&["GET", key]).text(), "1760000000500000 0 3600000000 2");
        assert!((7_190_000..=7_200_002).contains(&redis.server().command(&["PTTL", key]).integer()));
        assert_eq!(redis.wait(redis.store.inspect(&bucket)).unwrap().reset_after, Wait::ZERO);
        let (second, text) = state(1_000_000);
        assert_eq!((second.limits[0].refunded_before, &*text), (2, "1760000001000000 7200000000 3600000000 2"));
        // The count is forgotten two hours after the last write.
        let (last, _) = state(7_200_999_999);
        assert_eq!(last.limits[0].refunded_before, 2);
        let (later, text) = state(14_400_999_999);
        assert_eq!((later.limits[0].refunded_before, &*text), (0, "1760014400999999 7200000000 3600000000"));
    }
}

#[test]
fn many_callers_of_a_bad_log_cost_few_calls() {
    let redis = OnServer::new(Brand::Redis);
    let now_us: u64 = 1_760_000_000_000_000;
    redis.clock.set(Timestamp::from_micros(now_us));
    redis.wait(redis.store.command(&["TIME"])).unwrap();
    redis.server().command(&["SET", "tidegate:tg2:{foreign}:sliding:60000000", "hello"]);
    spoil(&redis, now_us, "spoilt");
    let calls_for = |subjects: &[String]| {
        let demands: Vec<Demand<'_>> = subjects.iter().map(|subject| demand("100/min", subject)).collect();
        let checks: Vec<[Check<'_>; 1]> = demands.iter().map(|demand| [Check::one(demand)]).collect();
        let before = redis.store.stats().calls;
        let decided = redis.wait(join_all(checks.iter().map(|check| redis.store.decide(check))));
        for (subject, decided) in subjects.iter().zip(decided) {
            let expected = if subject.starts_with("other") { None } else { Some(StoreErrorKind::Foreign) };
            assert_eq!(decided.err().map(|error| error.kind()), expected, "{subject}");
        }
        redis.store.stats().calls - before
    };
    for bad in ["foreign", "spoilt"] {
        let all = vec![bad.to_owned(); 64];
        assert_eq!(calls_for(&all), 2, "{bad}: one check, however many callers send it");
        let half: Vec<String> =
            (0..64).map(|caller| if caller % 2 == 0 { bad.to_owned() } else { format!("other {caller}") }).collect();
        let calls = calls_for(&half);
        assert!(calls < 24, "{bad}: {calls} calls to find it among others");
    }
}

#[test]
fn steps_written_before_the_error_are_not_resent() {
    let redis = OnServer::new(Brand::Redis);
    let now_us: u64 = 1_760_000_000_000_000;
    redis.clock.set(Timestamp::from_micros(now_us));
    redis.wait(redis.store.command(&["TIME"])).unwrap();
    spoil(&redis, now_us, "z");
    let connects_before = redis.store.stats().connects;

    // Two windows on one counter: the second reads what the first has written.
    let (fine, coarse, spoilt) = (demand("5/s", "k"), demand("3000/s", "k"), demand("100/min", "z"));
    let checks = [&fine, &coarse, &spoilt].map(|demand| [Check::one(demand)]);
    let decided = redis.wait(join_all(checks.iter().map(|check| redis.store.decide(check))));
    for decided in decided {
        let error = decided.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::ForeignInPart);
        assert!(!error.is_unexecuted(), "some were executed: {error}");
    }
    assert!(redis.wait(redis.store.inspect(&fine)).unwrap().remaining >= 3, "each was charged once at most");

    // A refund is written at once.
    let (good, bad) = ([Check::one(&fine)], [Check::one(&spoilt)]);
    let charged = redis.wait(redis.store.decide(&good)).unwrap().remove(0);
    let remaining = charged.limits[0].remaining;
    let both = async { tokio::join!(redis.store.refund(&good[0], &charged), redis.store.refund(&bad[0], &charged)) };
    let (good_refund, bad_refund) = redis.wait(both);
    assert!(good_refund.is_err_and(|error| !error.is_unexecuted()) && bad_refund.is_err());
    assert_eq!(redis.wait(redis.store.inspect(&fine)).unwrap().remaining, remaining + 1, "given back once");

    // If it is found before anything was written, the others are resent.
    let charged = redis.wait(redis.store.decide(&good)).unwrap().remove(0);
    let both = async { tokio::join!(redis.store.refund(&bad[0], &charged), redis.store.refund(&good[0], &charged)) };
    let (bad_refund, good_refund) = redis.wait(both);
    assert_eq!(bad_refund.unwrap_err().kind(), StoreErrorKind::Foreign);
    good_refund.unwrap();
    assert_eq!(redis.store.stats().connects, connects_before, "the connection stays");
}

#[test]
fn batch_whose_later_part_fails_is_not_unexecuted() {
    let redis = OnServer::new(Brand::Redis);
    redis.clock.set(Timestamp::from_micros(1_760_000_000_000_000));
    redis.server().command(&["SET", "tidegate:tg2:{foreign}:sliding:60000000", "hello"]);
    let (good, bad) = (demand("1000/min", "good"), demand("1000/min", "foreign"));
    let in_part = StoreErrorKind::ForeignInPart;
    // In one call; and more than go in one, so that the last is alone in its own.
    for (good_ones, kind) in [(0, StoreErrorKind::Foreign), (1, in_part), (128, in_part)] {
        let checks: Vec<Check<'_>> = std::iter::repeat_n(&good, good_ones).chain([&bad]).map(Check::one).collect();
        let error = redis.wait(redis.store.decide(&checks)).unwrap_err();
        assert_eq!((error.kind(), error.is_unexecuted()), (kind, good_ones == 0), "{error}");
    }
    assert_eq!(redis.wait(redis.store.inspect(&good)).unwrap().remaining, 1000 - 1 - 128);
}

#[test]
fn each_check_of_a_batch_has_its_own_result() {
    let redis = OnServer::new(Brand::Redis);
    redis.clock.set(Timestamp::from_micros(1_760_000_000_000_000));
    redis.server().command(&["SET", "tidegate:tg2:{foreign}:sliding:60000000", "hello"]);
    let (good, bad) = (demand("2/min", "good"), demand("2/min", "foreign"));
    let checks = [&good, &bad, &good, &bad, &good].map(Check::one);
    let answers = redis.wait(redis.store.decide_each(&checks)).unwrap();
    let outcomes =
        answers.into_iter().map(|answer| answer.map(|decision| decision.allowed()).map_err(|error| error.kind()));
    let foreign = Err(StoreErrorKind::Foreign);
    assert_eq!(outcomes.collect::<Vec<_>>(), [Ok(true), foreign, Ok(true), foreign, Ok(false)]);
}

#[test]
fn server_out_of_memory_rejects_admissions_and_answers_denials() {
    for brand in Brand::ALL {
        let redis = OnServer::new(brand);
        let start = Timestamp::from_micros(1_760_000_000_000_000);
        for limit in limits() {
            redis.server().command(&["CONFIG", "SET", "maxmemory", "0"]);
            redis.emptied();
            redis.clock.set(start);
            let demand = Demand::new(limit, Key::new("k").unwrap());
            let all = demand.cost(Cost::new(limit.cost_max()));
            // Twice: a leaky bucket holds one more than may wait.
            redis.wait(redis.store.decide(&[Check::one(&all), Check::one(&demand)])).unwrap();
            redis.server().command(&["CONFIG", "SET", "maxmemory", "1"]);
            let before = keys_and_values(redis.server());
            redis.clock.set(start.plus_micros(limit.window_us() * 3));
            let fresh = Demand::new(limit, Key::new("fresh").unwrap());
            for demand in [&demand, &fresh] {
                let error = redis.wait(redis.store.decide(&[Check::one(demand)])).unwrap_err();
                assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{brand} {limit}: {error}");
                assert!(error.is_unexecuted());
                assert_eq!(keys_and_values(redis.server()), before, "{brand} {limit}");
            }
            redis.clock.set(start);
            let denied = redis.wait(redis.store.decide(&[Check::one(&demand)])).unwrap();
            assert!(!denied[0].allowed(), "{brand} {limit}");
        }
        redis.server().command(&["CONFIG", "SET", "maxmemory", "0"]);
    }
}

#[test]
fn denial_that_drops_entries_works_on_a_server_out_of_memory() {
    let redis = OnServer::new(Brand::Redis);
    let start = Timestamp::from_micros(1_760_000_000_000_000);
    for limit in ["4/s", "3000/s"] {
        redis.server().command(&["CONFIG", "SET", "maxmemory", "0"]);
        redis.emptied();
        let demand = demand(limit, "k");
        let cost = demand.cost(demand.limit.quota() / 2);
        redis.clock.set(start);
        redis.wait(redis.store.decide(&[Check::one(&cost)])).unwrap();
        redis.clock.set(start.plus_micros(500_000));
        redis.wait(redis.store.decide(&[Check::one(&cost)])).unwrap();
        redis.server().command(&["CONFIG", "SET", "maxmemory", "1"]);
        redis.clock.set(start.plus_micros(1_100_000));
        let all = demand.cost(demand.limit.quota());
        let denied = redis.wait(redis.store.decide(&[Check::one(&all)])).unwrap().remove(0);
        assert_eq!((denied.allowed(), denied.limits[0].remaining), (false, demand.limit.quota() / 2), "{limit}");
    }
}

#[tokio::test]
async fn ban_denies_until_it_is_lifted_and_charges_nothing() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).bans(true).call_timeout(PATIENCE).build().unwrap();
    let demands = [demand("5/min", "ann"), demand("9/h fixed-window", "ann"), demand("5/min", "bob")];
    let check = Check::new(&demands).unwrap();
    store.ban(b"ann", Some(Duration::from_secs(60))).await.unwrap();
    let denied = store.decide(&[check]).await.unwrap().remove(0);
    assert!(!denied.allowed());
    for ban in [denied.ban, store.ban_of(b"ann").await.unwrap()] {
        let ban_ms = ban.and_then(Wait::as_millis_ceil).unwrap();
        assert!((50_000..=60_000).contains(&ban_ms), "{ban_ms}");
    }
    assert_eq!(denied, Decision::banned(denied.at, Source::Store, denied.retry_after(), &check));
    for demand in &demands {
        assert_eq!(store.inspect(demand).await.unwrap().remaining, demand.limit.quota(), "a peek sees past the ban");
    }
    assert!(store.unban(b"ann").await.unwrap());
    let admitted = store.decide(&[check]).await.unwrap().remove(0);
    assert_eq!((admitted.ban, admitted.allowed()), (None, true));
    assert_eq!(store.ban_of(b"ann").await.unwrap(), None);

    store.ban(b"bob", None).await.unwrap();
    let denied = store.decide(&[check]).await.unwrap().remove(0);
    assert_eq!(denied.ban, Some(Wait::NEVER));
    assert_eq!(store.ban_of(b"bob").await.unwrap(), Some(Wait::NEVER));
    assert!(store.unban(b"bob").await.unwrap());
    assert!(!store.unban(b"bob").await.unwrap());
}

#[tokio::test]
async fn very_long_ban_denies_only_its_subject() {
    let server = Server::redis();
    let store = RedisStore::builder(server.url()).bans(true).call_timeout(PATIENCE).build().unwrap();
    let (ann, bob) = (demand("5/min", "ann"), demand("5/min", "bob"));
    let checks = [Check::one(&ann), Check::one(&bob)];
    let long_ms = (1_u64 << 62).to_string();
    for duration in [Duration::MAX, Duration::from_secs(u64::from(u32::MAX) << 13)] {
        store.ban(b"ann", Some(duration)).await.unwrap();
        let decisions = store.decide(&checks).await.unwrap();
        assert_eq!((decisions[0].allowed(), decisions[1].allowed()), (false, true));
        assert!(decisions[0].retry_after() > tidegate_core::Wait::from_micros(1 << 52), "{:?}", decisions[0]);
    }
    // Written by another client.
    assert_eq!(server.command(&["SET", "tidegate:tg2:{ann}:ban", "1", "PX", &long_ms]).error(), None);
    let decisions = store.decide(&checks).await.unwrap();
    assert_eq!((decisions[0].allowed(), decisions[1].allowed()), (false, true));
    assert_eq!(store.stats().connects, 1);
}

#[tokio::test]
async fn server_report_has_name_version_and_warnings() {
    for brand in Brand::ALL {
        let server = Config::new(brand).set("maxmemory-policy", "allkeys-lru").start();
        let store = RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap();
        let report = store.check_server().await.unwrap();
        assert_eq!(report.name, brand.to_string());
        assert!(report.warnings[0].contains("allkeys-lru"), "{:?}", report.warnings);
        server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        assert!(store.check_server().await.unwrap().warnings.is_empty());
        let eviction = store.eviction().await.unwrap();
        assert_eq!((eviction.policy.as_deref(), eviction.evicted_keys), (Some("noeviction"), Some(0)));
    }
}
