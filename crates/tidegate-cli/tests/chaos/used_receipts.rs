//! A caller that is refunded millions of times, beside one that is refunded now and then.
//!
//! Each used receipt must be remembered until it expires, so the memory for them is bounded by design: in Redis by less
//! than half a byte per receipt of a caller, in process memory by a fixed number of bytes. The refunds of the other
//! caller are applied throughout, each once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tidegate::receipt::{Receipt, Settlement};
use tidegate::redis::RedisStore;
use tidegate::{Check, CheckOptions, Demand, Key, Limiter, Redeemed};
use tidegate_testkit::server::{Brand, Config, Server};

use super::campaign::{is_long, record, scale};

const QUOTA: u32 = 1_000_000;
/// The number of checks, and then of refunds, that are in flight together.
const ROUND: usize = 1_000;
/// A deadline that does not pass on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum memory in Redis per used receipt of one caller, in bytes.
const RECEIPT_BYTES_MAX: f64 = 0.5;
/// Growth of a server under load that does not depend on the number of receipts: buffers, the script, the counters.
const SLACK_BYTES: i64 = 4 * 1024 * 1024;

/// Charges a unit to `key` this many times at once, and returns the receipts.
async fn charge(limiter: &Limiter, key: &str, times: usize) -> Vec<Receipt> {
    let limit = format!("{QUOTA}/h fixed-window").parse().unwrap();
    let demand = Demand::new(limit, Key::new(key).unwrap());
    let (check, options) = (Check::one(&demand), CheckOptions { refundable: true, ..CheckOptions::default() });
    let decisions = limiter.check_batch(&vec![check; times], options).await;
    decisions.into_iter().map(|decision| limiter.receipt(&check, &decision.unwrap()).unwrap()).collect()
}

async fn redeem(limiter: &Limiter, receipts: &[Receipt]) -> Vec<Redeemed> {
    let redeem = |receipt| limiter.redeem_receipt(receipt, Settlement::Refund);
    join_all(receipts.iter().map(redeem)).await.into_iter().map(Result::unwrap).collect()
}

async fn remaining(limiter: &Limiter, key: &str) -> u32 {
    let limit = format!("{QUOTA}/h fixed-window").parse().unwrap();
    limiter.inspect(&Demand::new(limit, Key::new(key).unwrap())).await.unwrap().remaining
}

/// Refunds `receipts` charges of one caller. After every 100,000 of them, refunds ten of another caller, twice.
async fn refund_many(what: &str, limiter: &Limiter, receipts: usize) {
    let (began, resident_before) = (Instant::now(), resident_bytes());
    for round in 0..receipts / ROUND {
        let hot = charge(limiter, "hot", ROUND).await;
        let redeemed = redeem(limiter, &hot).await;
        assert!(redeemed.iter().all(|redeemed| *redeemed == Redeemed::Done), "{what}: {redeemed:?}");
        if round % 100 == 0 {
            assert!(redeem(limiter, &hot[..10]).await.iter().all(|redeemed| *redeemed == Redeemed::AlreadyUsed));
            let other = charge(limiter, "other", 10).await;
            for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
                assert_eq!(redeem(limiter, &other).await, [expected; 10], "{what}, round {round}");
            }
        }
    }
    assert_eq!((remaining(limiter, "hot").await, remaining(limiter, "other").await), (QUOTA, QUOTA), "{what}");
    let figure = format!("{receipts} in {:.0} s", began.elapsed().as_secs_f64());
    record("used receipts", &format!("{what}: refunds of one caller"), figure);
    let grown = resident_bytes() as i64 - resident_before as i64;
    record("used receipts", &format!("{what}: growth of this process"), format!("{} KiB", grown / 1024));
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn used_memory(server: &Server) -> i64 {
    let info = server.command(&["INFO", "memory"]).text();
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    line.trim().parse().unwrap()
}

async fn memory_of_the_server_is_bounded(brand: Brand, receipts: usize) {
    let server = Config::new(brand).start();
    let store = RedisStore::builder(server.url()).call_timeout(PATIENCE).build().unwrap();
    let limiter = Limiter::builder().store(Arc::new(store)).deadline(PATIENCE).build();
    refund_many("before", &limiter, 1_000).await;
    let (bytes_before, keys_before) = (used_memory(&server), server.command(&["DBSIZE"]).integer());
    refund_many(&brand.to_string(), &limiter, receipts).await;
    let bytes = used_memory(&server) - bytes_before;
    let keys = server.command(&["DBSIZE"]).integer() - keys_before;
    record("used receipts", &format!("{brand}: growth of used_memory"), format!("{bytes} bytes, {keys} keys"));
    // A block of the hot caller that was there before, one of the other caller, and the key of the instances.
    let keys_max = receipts as i64 / 1_024 + 4;
    assert!(keys <= keys_max, "{brand}: {keys} keys, at most {keys_max}");
    let bytes_max = (RECEIPT_BYTES_MAX * receipts as f64) as i64 + SLACK_BYTES;
    assert!(bytes <= bytes_max, "{brand}: {bytes} bytes, at most {bytes_max}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_redis_is_bounded_while_one_caller_is_refunded_many_times() {
    memory_of_the_server_is_bounded(Brand::Redis, scale(20_000, 10_000_000)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_valkey_is_bounded_while_one_caller_is_refunded_many_times() {
    memory_of_the_server_is_bounded(Brand::Valkey, scale(20_000, 1_000_000)).await;
}

/// In the long form, the caller is refunded more often than there is room for.
#[tokio::test]
async fn memory_of_the_process_is_bounded_while_one_caller_is_refunded_many_times() {
    let (limiter, receipts) = (Limiter::memory(), scale(200_000, 10_000_000));
    refund_many("memory", &limiter, receipts).await;
    let stats = limiter.stats().used_receipts;
    record("used receipts", "memory: used receipts", format!("{stats:?}"));
    // At most 204 bytes for each 256 receipts, in one of 16 parts of the memory.
    assert!(stats.bytes <= (receipts / 256 + 4) * 204 && stats.bytes <= stats.max_bytes / 16 + 1_000, "{stats:?}");
    assert_eq!((stats.dropped_blocks > 0, stats.expired_early), (is_long(), 0), "{stats:?}");
}
