//! The RESP listener as a subject of the conformance suite, by its own commands and by `CL.THROTTLE`.

use tidegate::{Check, Cost, Decision, Demand, Key, LimitStatus, Scope, ScopeName, Source, Timestamp, Wait};
use tidegate_testkit::conformance::net_use::RefundImplementation;
use tidegate_testkit::conformance::{Abilities, Implementation};
use tidegate_testkit::server::{Connection, Reply};

use crate::fixture::{Fixture, Names};
use crate::http_subject::in_whole_ms;

const ONE_LIMIT: Abilities = Abilities {
    refunds: false,
    rules: false,
    several_limits: false,
    several_subjects: false,
    microseconds: false,
    fills: false,
};

/// `TIDEGATE.CHECK`, `TIDEGATE.PEEK` and `TIDEGATE.RESET`.
pub(crate) struct OverResp<'d> {
    fixture: &'d Fixture,
    names: Names,
    connection: Connection,
}

/// `CL.THROTTLE`, for token buckets whose windows are whole seconds.
pub(crate) struct OverThrottle<'d>(OverResp<'d>);

impl<'d> OverResp<'d> {
    pub(crate) fn new(fixture: &'d Fixture) -> OverResp<'d> {
        OverResp { fixture, names: Names::unused(), connection: Connection::open(fixture.resp).unwrap() }
    }

    fn numbers(&mut self, command: &[String]) -> [i64; 5] {
        let reply = self.connection.call(command).unwrap();
        assert!(matches!(reply, Reply::Array(_)), "{command:?}: {reply:?}");
        let numbers: Vec<i64> = reply.items().iter().map(Reply::integer).collect();
        numbers.try_into().unwrap_or_else(|numbers| panic!("five numbers, not {numbers:?}"))
    }
}

impl<'d> OverThrottle<'d> {
    pub(crate) fn new(fixture: &'d Fixture) -> OverThrottle<'d> {
        OverThrottle(OverResp::new(fixture))
    }
}

/// Returns the only demand of a check.
fn only<'c>(check: &Check<'c>) -> &'c Demand<'c> {
    let [demand] = check.demands() else { panic!("one limit at a time") };
    demand
}

/// Converts a wait of the reply, in units of `micros`. A negative one is [`Wait::NEVER`].
fn wait(units: i64, micros: u64) -> Wait {
    u64::try_from(units).map_or(Wait::NEVER, |units| Wait::from_micros(units * micros))
}

fn decision(now: Timestamp, status: LimitStatus) -> Decision {
    Decision::new(now, Source::Store, std::iter::once(status).collect())
}

impl Implementation for OverResp<'_> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.fixture.clock.set(now);
        let demand = only(check);
        let (name, limit) = (self.names.name(demand), demand.limit.to_string());
        let command = match demand.cost {
            Cost::PEEK => vec!["TIDEGATE.PEEK".to_owned(), name, limit],
            Cost::ONE => vec!["TIDEGATE.CHECK".to_owned(), name, limit],
            cost => vec!["TIDEGATE.CHECK".to_owned(), name, limit, "COST".to_owned(), cost.to_string()],
        };
        let [allowed, quota, remaining, retry_after, reset_after] = self.numbers(&command);
        decision(
            now,
            LimitStatus {
                allowed: allowed == 1,
                cost: demand.cost.units(),
                quota: quota as u32,
                remaining: remaining as u32,
                retry_after: wait(retry_after, 1_000),
                next_after: Wait::ZERO,
                reset_after: wait(reset_after, 1_000),
                late_us: 0,
                refunded_before: 0,
            },
        )
    }

    fn refund(&mut self, _: Timestamp, _: &Check<'_>, _: &Decision) {
        unreachable!("this listener has no refunds");
    }

    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        self.fixture.clock.set(now);
        let command = ["TIDEGATE.RESET".to_owned(), self.names.name(demand), demand.limit.to_string()];
        assert_eq!(self.connection.call(&command).unwrap().text(), "OK");
    }

    /// Removes `next_after`, which the reply does not contain.
    fn as_seen(&self, mut decision: Decision) -> Decision {
        for line in &mut decision.limits {
            line.next_after = Wait::ZERO;
            (line.retry_after, line.reset_after) = (in_whole_ms(line.retry_after), in_whole_ms(line.reset_after));
        }
        decision
    }

    fn abilities(&self) -> Abilities {
        Abilities { fills: self.fixture.is_in_memory(), ..ONE_LIMIT }
    }

    fn fill(&mut self, demand: &Demand<'_>, instants: &mut dyn Iterator<Item = Timestamp>) {
        self.names.with(&[*demand], |demands| self.fixture.fill(&demands[0], instants));
    }
}

/// `TIDEGATE.CHECK` with `RECEIPT`, and `TIDEGATE.REFUND`.
pub(crate) struct RespReceipts<'d>(OverResp<'d>);

impl<'d> RespReceipts<'d> {
    pub(crate) fn new(fixture: &'d Fixture) -> RespReceipts<'d> {
        RespReceipts(OverResp::new(fixture))
    }
}

impl RefundImplementation for RespReceipts<'_> {
    type Charge = String;

    fn remaining(&mut self, now: Timestamp, demand: &Demand<'_>) -> u32 {
        self.0.remaining(now, demand)
    }

    fn charge(&mut self, now: Timestamp, demand: &Demand<'_>) -> Option<String> {
        self.0.fixture.clock.set(now);
        let (name, limit, cost) = (self.0.names.name(demand), demand.limit.to_string(), demand.cost.to_string());
        let command = ["TIDEGATE.CHECK", &name, &limit, "COST", &cost, "RECEIPT"];
        let reply = self.0.connection.call(&command).unwrap();
        let [allowed, .., receipt] = reply.items() else { panic!("{command:?}: {reply:?}") };
        (allowed.integer() == 1).then(|| receipt.text())
    }

    fn refund(&mut self, now: Timestamp, demand: &Demand<'_>, receipt: String, units: u32) {
        self.0.fixture.clock.set(now);
        let used = (demand.cost.units() - units).to_string();
        let command = ["TIDEGATE.REFUND", &receipt, "USED", &used];
        let command = if used == "0" { &command[..2] } else { &command[..] };
        assert_eq!(self.0.connection.call(command).unwrap(), Reply::Integer(1));
    }
}

impl Implementation for OverThrottle<'_> {
    fn check(&mut self, now: Timestamp, check: &Check<'_>) -> Decision {
        self.0.fixture.clock.set(now);
        let demand = only(check);
        let (limit, name) = (&demand.limit, self.0.names.name(demand));
        let period = limit.window_us() / 1_000_000;
        let arguments = [u64::from(limit.cost_max()) - 1, limit.quota().into(), period, demand.cost.units().into()];
        let mut command = vec!["CL.THROTTLE".to_owned(), name];
        command.extend(arguments.iter().map(ToString::to_string));
        let [limited, capacity, remaining, retry_after, reset_after] = self.0.numbers(&command);
        assert_eq!(capacity, i64::from(limit.cost_max()));
        let allowed = limited == 0;
        assert!(!allowed || retry_after == -1, "{command:?}: an admission waits {retry_after}");
        decision(
            now,
            LimitStatus {
                allowed,
                cost: demand.cost.units(),
                quota: limit.quota(),
                remaining: remaining as u32,
                retry_after: if allowed { Wait::ZERO } else { wait(retry_after, 1_000_000) },
                next_after: Wait::ZERO,
                reset_after: wait(reset_after, 1_000_000),
                late_us: 0,
                refunded_before: 0,
            },
        )
    }

    fn refund(&mut self, _: Timestamp, _: &Check<'_>, _: &Decision) {
        unreachable!("this listener has no refunds");
    }

    /// Resets by the limiter, because redis-cell has no such command.
    fn reset(&mut self, now: Timestamp, demand: &Demand<'_>) {
        let name = self.0.names.name(demand);
        let key = Key::scoped(&name, Scope::Named(ScopeName::new("throttle"))).unwrap();
        self.0.fixture.reset(now, &Demand { key, ..*demand });
    }

    /// Rounds waits up to whole seconds. An admission reports no wait, not even an exhausted peek.
    fn as_seen(&self, mut decision: Decision) -> Decision {
        let in_whole_s = |wait: Wait| wait.as_secs_ceil().map_or(Wait::NEVER, |s| Wait::from_micros(s * 1_000_000));
        for line in &mut decision.limits {
            line.next_after = Wait::ZERO;
            line.retry_after = if line.allowed { Wait::ZERO } else { in_whole_s(line.retry_after) };
            line.reset_after = in_whole_s(line.reset_after);
        }
        decision
    }

    fn abilities(&self) -> Abilities {
        ONE_LIMIT
    }
}
