//! `settle` and `redeem` on a real Redis and in memory: the same calls at the same times leave equal counters.

use std::sync::Arc;
use std::time::Duration;

use tidegate::receipt::Receipt;
use tidegate::{
    Algorithm, Check, CheckOptions, Cost, Decision, Demand, Key, Limit, LimitStatus, Limiter, ManualClock, ReceiptId,
    Redeemed, Source, Timestamp,
};
use tidegate_redis::RedisStore;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::{Brand, Config, Server};

const START: Timestamp = Timestamp::from_micros(1_760_000_000_000_000);
/// So long that a busy machine makes no decision local.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A limiter on Redis and one in memory, with the same manual clock.
struct Nodes {
    limiters: [Limiter; 2],
    clock: Arc<ManualClock>,
}

impl Nodes {
    fn new(server: &Server) -> Nodes {
        let clock = Arc::new(ManualClock::new(START));
        let store = RedisStore::builder(server.url()).clock_override(clock.clone()).call_timeout(TIMEOUT);
        let store = Arc::new(store.build().unwrap());
        let on_redis = Limiter::builder().store(store).clock(clock.clone()).deadline(TIMEOUT).build();
        let in_memory = Limiter::builder().clock(clock.clone()).build();
        Nodes { limiters: [on_redis, in_memory], clock }
    }

    /// Reserves units, advances the clock, charges one more unit and settles; then asserts that both counters are equal.
    async fn settle_on_each(&self, demand: Demand<'_>, reserve: u32, wait_ms: u64, actual: u32) {
        let options = CheckOptions { refundable: true, ..CheckOptions::default() };
        let mut reserved: Vec<Decision> = Vec::new();
        let estimate = demand.cost(reserve);
        for limiter in &self.limiters {
            let decision = limiter.check_with(&Check::one(&estimate), options).await.unwrap();
            assert_eq!((decision.source, decision.allowed()), (Source::Store, true));
            reserved.push(decision);
        }
        self.clock.advance(Duration::from_millis(wait_ms));
        for (limiter, decision) in self.limiters.iter().zip(&reserved) {
            limiter.check_with(&Check::one(&demand), options).await.unwrap();
            limiter.settle(&Check::one(&estimate), decision, Cost::new(actual)).await.unwrap();
        }
        let [on_redis, in_memory] = &self.limiters;
        let context = format!("{}: {reserve}, {actual} after {wait_ms} ms", demand.limit);
        assert_eq!(on_redis.inspect(&demand).await.unwrap(), in_memory.inspect(&demand).await.unwrap(), "{context}");
    }
}

#[tokio::test]
async fn settle_on_redis_equals_settle_in_memory() {
    let server = Server::redis();
    for algorithm in Algorithm::ALL {
        let limit: Limit = format!("100/s {}", algorithm.as_str()).parse().unwrap();
        let nodes = Nodes::new(&server);
        for (number, (wait_ms, actual)) in
            [(0, 20), (150, 20), (1_100, 20), (3_000, 0), (0, 70), (150, 99), (150, 100_000)].into_iter().enumerate()
        {
            let subject = format!("{} {number}", algorithm.as_str());
            let demand = Demand::new(limit, Key::new(&subject).unwrap());
            nodes.settle_on_each(demand, 50, wait_ms, actual).await;
        }
    }
}

#[tokio::test]
async fn settle_refunds_both_limits_of_a_check_and_clears_cached_denials() {
    let server = Server::redis();
    let nodes = Nodes::new(&server);
    let demand = |limit: &str| Demand::new(limit.parse().unwrap(), Key::new("api-key:7").unwrap()).cost(900);
    let demands = [demand("1000/min"), demand("2000/day token-bucket")];
    let check = Check::new(&demands).unwrap();
    let [limiter, _] = &nodes.limiters;
    let reserved = limiter.check(&check).await.unwrap();
    assert!(!limiter.check(&check).await.unwrap().allowed(), "this denial is cached");
    limiter.settle(&check, &reserved, Cost::new(50)).await.unwrap();
    let again = limiter.check(&check).await.unwrap();
    assert_eq!((again.allowed(), again.limits[0].remaining, again.limits[1].remaining), (true, 50, 1_050));
    limiter.settle(&check, &again, Cost::new(2_000)).await.unwrap();
    for demand in &demands {
        let line = limiter.inspect(demand).await.unwrap();
        assert_eq!(line.remaining, 0, "the actual cost is more than the rest: {line:?}");
    }
}

/// A settlement of a check of one to three limits: what is reserved, used and charged between.
struct Settlement {
    /// The limits, each with the units that are reserved and those that are used.
    limits: Vec<(Limit, u32, u32)>,
    wait_ms: u64,
}

impl Settlement {
    fn random(random: &mut Random) -> Settlement {
        let limits = (1..=1 + random.below(3)).map(|nth| {
            let algorithm = Algorithm::ALL[random.below(Algorithm::ALL.len() as u64) as usize];
            let quota = [20, 400, 3_000][random.below(3) as usize];
            let limit: Limit = format!("{quota}/{nth}s {}", algorithm.as_str()).parse().unwrap();
            let reserved = random.below(quota / 2) as u32;
            let used = match random.below(4) {
                0 => random.below(u64::from(reserved) + 1) as u32,
                1 => reserved,
                2 => reserved + random.below(quota / 2) as u32,
                _ => reserved + random.below(5 * quota) as u32,
            };
            (limit, reserved, used)
        });
        Settlement { limits: limits.collect(), wait_ms: [0, 1, 150, 900, 2_500][random.below(5) as usize] }
    }

    /// Reserves, waits, charges one more unit of each limit, settles, and returns the status of each limit.
    ///
    /// With an `id`, redeems it twice instead of settling.
    async fn run(
        &self,
        limiter: &Limiter,
        clock: &ManualClock,
        subject: &str,
        id: Option<ReceiptId>,
    ) -> Vec<LimitStatus> {
        clock.set(START);
        let options = CheckOptions { refundable: true, ..CheckOptions::default() };
        let demand = |limit: &Limit| Demand::new(*limit, Key::new(subject).unwrap());
        let reserved: Vec<Demand<'_>> =
            self.limits.iter().map(|(limit, reserved, _)| demand(limit).cost(*reserved)).collect();
        let one: Vec<Demand<'_>> = reserved.iter().map(|demand| demand.cost(Cost::ONE)).collect();
        let used: Vec<Cost> = self.limits.iter().map(|(.., used)| Cost::new(*used)).collect();
        let check = Check::new(&reserved).unwrap();
        limiter.check_with(&Check::new(&one).unwrap(), options).await.unwrap();
        let decision = limiter.check_with(&check, options).await.unwrap();
        assert!(decision.allowed());
        clock.advance(Duration::from_millis(self.wait_ms));
        limiter.check_with(&Check::new(&one).unwrap(), options).await.unwrap();
        match id {
            None => limiter.settle_each(&check, &decision, &used).await.unwrap(),
            Some(id) => {
                for expected in [Redeemed::Done, Redeemed::AlreadyUsed] {
                    assert_eq!(limiter.redeem(id, &check, &decision, &used).await.unwrap(), expected);
                }
            }
        }
        let mut statuses = Vec::new();
        for demand in &reserved {
            statuses.push(limiter.inspect(demand).await.unwrap());
        }
        statuses
    }
}

async fn redemption_equals_settlement(brand: Brand) {
    const SEED: u64 = 0x5e77_1e0e;
    let server = Config::new(brand).start();
    let Nodes { limiters: [on_redis, in_memory], clock } = Nodes::new(&server);
    let mut random = Random::new(SEED);
    for number in 0..150_u128 {
        let settlement = Settlement::random(&mut random);
        let id = ReceiptId::from_bytes(number.to_be_bytes());
        let (settled, redeemed) = (format!("settled {number}"), format!("redeemed {number}"));
        let expected = settlement.run(&in_memory, &clock, &settled, None).await;
        for (name, limiter, subject, id) in [
            ("redeemed in memory", &in_memory, &redeemed, Some(id)),
            ("settled on the server", &on_redis, &settled, None),
            ("redeemed on the server", &on_redis, &redeemed, Some(id)),
        ] {
            let statuses = settlement.run(limiter, &clock, subject, id).await;
            assert_eq!(statuses, expected, "{brand}, {name}: {:?} after {} ms", settlement.limits, settlement.wait_ms);
        }
    }
}

#[tokio::test]
async fn redemption_on_redis_equals_settlement() {
    redemption_equals_settlement(Brand::Redis).await;
}

#[tokio::test]
async fn redemption_on_valkey_equals_settlement() {
    redemption_equals_settlement(Brand::Valkey).await;
}

/// Charges units and returns the encoded receipt, as the service sends it to its clients.
async fn receipt_of(limiter: &Limiter, demand: Demand<'_>) -> Vec<u8> {
    let options = CheckOptions { refundable: true, ..CheckOptions::default() };
    let decision = limiter.check_with(&Check::one(&demand), options).await.unwrap();
    assert!(decision.allowed(), "{decision:?}");
    limiter.receipt(&Check::one(&demand), &decision).unwrap().encode()
}

async fn redeem_receipt(limiter: &Limiter, receipt: &[u8]) {
    let receipt = Receipt::decode(receipt).unwrap();
    assert_eq!(limiter.redeem_receipt(&receipt, tidegate::receipt::Settlement::Refund).await.unwrap(), Redeemed::Done);
}

/// A charge leaks sooner if an earlier one was refunded. Without that, 19 more units would pass in the first stage.
#[tokio::test]
async fn receipts_redeemed_in_stages_never_exceed_the_burst() {
    let server = Server::redis();
    for text in ["20/s token-bucket burst=40", "20/s leaky-bucket queue=39"] {
        let nodes = Nodes::new(&server);
        let demand = Demand::new(text.parse().unwrap(), Key::new(text).unwrap()).cost(20);
        for stage in 0..4 {
            let mut second = Vec::new();
            for limiter in &nodes.limiters {
                let first = receipt_of(limiter, demand).await;
                second.push(receipt_of(limiter, demand).await);
                redeem_receipt(limiter, &first).await;
            }
            nodes.clock.advance(Duration::from_secs(1));
            for (limiter, second) in nodes.limiters.iter().zip(&second) {
                for _ in 0..2 {
                    receipt_of(limiter, demand).await;
                }
                redeem_receipt(limiter, second).await;
                let more = limiter.check(&Check::one(&demand.cost(1))).await.unwrap();
                assert!(!more.allowed(), "{text}, stage {stage}: {more:?}");
            }
            // Longer than the burst takes to leak, and not so long that the refunds are forgotten.
            nodes.clock.advance(Duration::from_millis(1_999));
            for limiter in &nodes.limiters {
                let _ = limiter.check(&Check::one(&demand.cost(1))).await.unwrap();
            }
            nodes.clock.advance(Duration::from_millis(200));
        }
    }
}

/// Without the count of the receipt, all refunds before the charge would seem to be later than it.
#[tokio::test]
async fn receipt_of_a_bucket_tells_which_refunds_were_before_it() {
    let server = Server::redis();
    let nodes = Nodes::new(&server);
    let demand = Demand::new("20/s token-bucket burst=40".parse().unwrap(), Key::new("ann").unwrap());
    let mut last = Vec::new();
    for limiter in &nodes.limiters {
        let first = receipt_of(limiter, demand.cost(20)).await;
        redeem_receipt(limiter, &first).await;
        receipt_of(limiter, demand.cost(20)).await;
        last.push(receipt_of(limiter, demand.cost(10)).await);
    }
    nodes.clock.advance(Duration::from_millis(500));
    for (limiter, last) in nodes.limiters.iter().zip(&last) {
        redeem_receipt(limiter, last).await;
        assert_eq!(limiter.inspect(&demand).await.unwrap().remaining, 30);
    }
}
