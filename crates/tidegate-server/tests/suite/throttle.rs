//! `CL.THROTTLE`: the replies in the documentation, and redis-cell's arithmetic on random traffic.

use std::collections::HashMap;

use tidegate::Timestamp;
use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::{Connection, Reply};

use crate::fixture::Fixture;

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const PAGE: &str = include_str!("../../../../docs/cl-throttle.md");

struct Throttle<'d> {
    fixture: &'d Fixture,
    connection: Connection,
}

impl Throttle<'_> {
    fn of(fixture: &Fixture) -> Throttle<'_> {
        Throttle { fixture, connection: Connection::open(fixture.resp).unwrap() }
    }

    fn at(&mut self, ms: u64, arguments: &str) -> Vec<i64> {
        self.fixture.clock.set(START.plus_micros(ms * 1_000));
        let command: Vec<&str> = std::iter::once("CL.THROTTLE").chain(arguments.split(' ')).collect();
        self.connection.call(&command).unwrap().items().iter().map(Reply::integer).collect()
    }
}

/// Returns the rows of the page: the time, the arguments, and the five numbers of the reply.
fn documented() -> Vec<(u64, String, Vec<i64>)> {
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, at, arguments, answer @ .., _] = cells.as_slice() else { return None };
        let answer: Vec<i64> = answer.iter().map(|cell| cell.parse().ok()).collect::<Option<_>>()?;
        (answer.len() == 5).then(|| Some((at.parse().ok()?, (*arguments).to_owned(), answer)))?
    };
    PAGE.lines().filter_map(row).collect()
}

fn assert_documented_replies(fixture: &Fixture) {
    let mut throttle = Throttle::of(fixture);
    let rows = documented();
    assert!(rows.len() > 30, "{rows:?}");
    for (ms, arguments, answer) in rows {
        assert_eq!(throttle.at(ms, &arguments), answer, "CL.THROTTLE {arguments} at {ms} ms");
    }
}

#[test]
fn cl_throttle_gives_the_documented_replies_in_memory() {
    assert_documented_replies(&Fixture::in_memory());
}

#[test]
fn cl_throttle_gives_the_documented_replies_on_redis() {
    assert_documented_replies(&Fixture::on_redis());
}

/// redis-cell's arithmetic, in milliseconds: per key the theoretical arrival time and nothing else.
#[derive(Default)]
struct RedisCell(HashMap<String, u64>);

impl RedisCell {
    fn answer(&mut self, now: u64, key: &str, capacity: u64, interval: u64, quantity: u64) -> Vec<i64> {
        let arrival = self.0.get(key).copied().unwrap_or(now).max(now);
        let after = arrival + quantity * interval;
        let tolerance = capacity * interval;
        let limited = after > now + tolerance;
        let left = if limited { arrival - now } else { after - now };
        if !limited {
            self.0.insert(key.to_owned(), after);
        }
        let retry_after =
            if limited && quantity <= capacity { (after - tolerance - now).div_ceil(1_000) as i64 } else { -1 };
        let remaining = (tolerance - left) / interval;
        vec![limited.into(), capacity as i64, remaining as i64, retry_after, left.div_ceil(1_000) as i64]
    }
}

/// Rates whose interval is whole milliseconds, so that nothing is rounded before the seconds are.
#[test]
fn cl_throttle_follows_redis_cells_arithmetic_on_random_traffic() {
    let fixture = Fixture::in_memory();
    let (mut throttle, mut cell, mut random) = (Throttle::of(&fixture), RedisCell::default(), Random::new(5));
    let rates = [(1, 1), (30, 60), (100, 1), (1_000, 1), (5, 2), (1, 3_600), (8, 1)];
    let mut now = 0;
    for _ in 0..20_000 {
        now += [0, 0, 1, 10, 499, 1_000, 4_000][random.below(7) as usize];
        let number = random.below(7);
        let (count, period) = rates[number as usize];
        let max_burst = [0, 1, 4, 15, 99, 0, 3][number as usize];
        let quantity = random.below(max_burst + 3);
        let interval = period * 1_000 / count;
        let expected = cell.answer(now, &format!("key{number}"), max_burst + 1, interval, quantity);
        let asked = format!("key{number} {max_burst} {count} {period} {quantity}");
        assert_eq!(throttle.at(now, &asked), expected, "CL.THROTTLE {asked} at {now} ms");
    }
}
