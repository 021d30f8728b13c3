//! Verification of one counter by the store's clock.
//!
//! Answers are processed in the order of their time, with three sliding windows: the units that must have counted, the
//! units that counted if all ties came first, and the units that may have counted (ties, and entries kept longer by
//! their tick). Each charge enters and leaves each window once.
//!
//! **Several clocks.** The clocks of the servers may differ by up to `skew_us`. A server whose clock is behind may have moved
//! the entry of a charge at `at` to a time as early as `at − skew_us`, and one whose clock is ahead drops it that much
//! earlier. So the charge must count from `at + skew_us` until `at + window − 2 × skew_us`, and may count from
//! `at − skew_us` until `at + window + skew_us`. Units in a window that is shorter by `2 × skew_us` have all counted in the
//! last decision among them, whatever the order, so they are at most the quota.

use tidegate_core::Source;

use super::{Answer, Bounds, Counter, Refund, Report, Violation, tick_us};

/// Verifies all decisions of the store for this counter, and adds violations to `report`, as well as the numbers of
/// limit statuses of admitted checks and of denials.
///
/// `number` is the index of the counter in the history, for violations. Of the bounds, `lost` and `skew_us` are used. Sorts
/// all its answers by `at_us`; those of other sources are not verified.
pub(super) fn verify(number: usize, counter: &mut Counter, bounds: Bounds, report: &mut Report) {
    counter.answers.sort_unstable_by_key(|answer| answer.at_us);
    let by_store = counter.answers.iter().filter(|answer| answer.source == Source::Store);
    let charges: Vec<Charge> =
        by_store.clone().filter(|answer| answer.admitted && answer.cost > 0).map(Charge::of).collect();
    let window_us = counter.limit.window_us();
    let held_us = tick_us(&counter.limit) - 1;
    let (lost, skew_us) = (bounds.lost.unwrap_or(0), bounds.skew_us);
    let earliest = || Refunds::new(&counter.refunds, |refund| refund.earliest_us.saturating_sub(skew_us));
    let latest = Refunds::new(&counter.refunds, |refund| refund.latest_us + 1 + skew_us);
    let shorter_us = window_us.saturating_sub(2 * skew_us);
    let mut view = View {
        number,
        quota: counter.limit.quota().into(),
        lost,
        window_us,
        held_us,
        skew_us,
        least: Window { late_us: skew_us, ..Window::new(&charges, shorter_us, Ties::Out, earliest()) },
        exact: Window::new(&charges, shorter_us, Ties::In, earliest()),
        most: Window { early_us: skew_us, ..Window::new(&charges, window_us + held_us + skew_us, Ties::In, latest) },
    };
    for answer in by_store {
        if answer.admitted {
            report.admitted += 1;
        } else if !answer.allowed {
            report.refused += 1;
        }
        view.verify(answer, report);
    }
}

#[derive(Clone, Copy)]
struct Charge {
    at_us: u64,
    units: u64,
}

impl Charge {
    fn of(answer: &Answer) -> Charge {
        Charge { at_us: answer.at_us, units: answer.cost.into() }
    }
}

/// The verification of one counter, and the bounds of the units that count on it at the time of the current answer.
///
/// [`View::verify`] moves the three windows to the time of each answer, so answers must come in that order.
struct View {
    /// The index of the counter in the history, for violations.
    number: usize,
    /// The quota and the window of the counter's limit.
    quota: u64,
    window_us: u64,
    /// By how many units the store's count may differ from that of the history.
    lost: u64,
    /// How much longer than the window an entry may be kept: one tick minus one microsecond.
    held_us: u64,
    /// The most by which the times of two servers differ.
    skew_us: u64,
    /// The units that must have counted.
    least: Window,
    /// The units that counted if all ties came first.
    exact: Window,
    /// The units that may have counted.
    most: Window,
}

impl View {
    /// Verifies one answer of the store, and adds violations to `report`. Answers must come in the order of the store's
    /// time; the windows cannot move back.
    fn verify(&mut self, answer: &Answer, report: &mut Report) {
        for window in [&mut self.least, &mut self.exact, &mut self.most] {
            window.move_to(answer.at_us);
        }
        let (counter, at_us, cost) = (self.number, answer.at_us, u64::from(answer.cost));
        let own = if answer.admitted { cost } else { 0 };
        let (least_counted, most_counted) = (self.least.total.saturating_sub(self.lost), self.most.total + self.lost);
        let quota = self.quota + self.lost;
        if own > 0 && self.exact.total > quota {
            report.add(Violation::Over { counter, at_us, units: self.exact.total, quota });
        }
        if !answer.allowed && most_counted + cost <= self.quota {
            report.add(Violation::UnjustifiedDenial { counter, at_us, cost, counted: most_counted });
        }
        if answer.allowed && !answer.admitted && cost > 0 && least_counted + cost > self.quota {
            report.add(Violation::UnjustifiedAllowance { counter, at_us });
        }
        let least = self.quota.saturating_sub(most_counted);
        let most = self.quota.saturating_sub(least_counted + own);
        if !(least..=most).contains(&answer.remaining.into()) {
            report.add(Violation::Remaining { counter, at_us, reported: answer.remaining.into(), least, most });
        }
        if self.lost == 0 {
            self.verify_retry_after(answer, report);
        }
    }

    fn verify_retry_after(&self, answer: &Answer, report: &mut Report) {
        let (at_us, cost) = (answer.at_us, u64::from(answer.cost));
        let (least_us, most_us) = match (answer.allowed, cost) {
            (_, 0) => return,
            (true, _) => (0, 0),
            (false, _) if cost > self.quota => (u64::MAX, u64::MAX),
            (false, _) => {
                let room = self.quota - cost;
                let expires_us = |charged_us: u64| charged_us + self.window_us;
                let earliest_us = self.least.must_expire(room).map_or(at_us + 1, expires_us).max(at_us + 1);
                let latest_us = self.most.must_expire(room).map_or(at_us + 1, expires_us) + self.held_us;
                let least_us = (earliest_us - at_us).saturating_sub(self.skew_us).max(1);
                (least_us, latest_us.saturating_sub(at_us) + self.skew_us)
            }
        };
        let reported_us = answer.retry_after_us;
        if !(least_us..=most_us).contains(&reported_us.unwrap_or(u64::MAX)) {
            report.add(Violation::RetryAfter { counter: self.number, at_us, reported_us, least_us, most_us });
        }
    }
}

/// Whether a [`Window`] includes charges made in the current microsecond.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ties {
    In,
    Out,
}

/// A sliding window over the charges of a counter, whose end only moves forward. `total` is the units inside.
struct Window {
    /// All charges, in the order of their time. Refunds reduce their units.
    charges: Vec<Charge>,
    window_us: u64,
    ties: Ties,
    /// A charge enters the window that much later than its time, or earlier.
    late_us: u64,
    early_us: u64,
    /// The refunds that are not applied yet.
    refunds: Refunds,
    /// The charges from `first` up to, but not including, `next` are inside the window.
    first: usize,
    next: usize,
    total: u64,
}

impl Window {
    fn new(charges: &[Charge], window_us: u64, ties: Ties, refunds: Refunds) -> Window {
        let (late_us, early_us) = (0, 0);
        Window { charges: charges.to_vec(), window_us, ties, late_us, early_us, refunds, first: 0, next: 0, total: 0 }
    }

    fn move_to(&mut self, now_us: u64) {
        while self.charges.get(self.next).is_some_and(|charge| self.has_started(charge, now_us)) {
            self.total += self.charges[self.next].units;
            self.next += 1;
        }
        while let Some(refund) = self.refunds.due(now_us) {
            self.apply_refund(refund);
        }
        while self.first < self.next && self.charges[self.first].at_us + self.window_us <= now_us {
            self.total -= self.charges[self.first].units;
            self.first += 1;
        }
    }

    fn has_started(&self, charge: &Charge, now_us: u64) -> bool {
        let (starts_us, now_us) = (charge.at_us + self.late_us, now_us + self.early_us);
        starts_us < now_us || (starts_us == now_us && self.ties == Ties::In)
    }

    /// Removes the refunded units from the charges made at the time of the refunded decision, as far as they have
    /// units.
    fn apply_refund(&mut self, refund: Refund) {
        let mut units = u64::from(refund.units);
        let from = self.charges.partition_point(|charge| charge.at_us < refund.charged_at_us);
        let charged_then = self.charges[from..].iter_mut().take_while(|charge| charge.at_us == refund.charged_at_us);
        for (index, charge) in charged_then.enumerate() {
            let taken = units.min(charge.units);
            charge.units -= taken;
            units -= taken;
            if (self.first..self.next).contains(&(from + index)) {
                self.total -= taken;
            }
        }
    }

    /// Returns the time, in microseconds, of the oldest charge whose expiry, after that of all charges before it,
    /// leaves at most `room` units in the window. Returns `None` if there are no more than that already.
    fn must_expire(&self, room: u64) -> Option<u64> {
        let mut excess = self.total.checked_sub(room).filter(|excess| *excess > 0)?;
        for charge in &self.charges[self.first..self.next] {
            if charge.units >= excess {
                return Some(charge.at_us);
            }
            excess -= charge.units;
        }
        None
    }
}

/// Refunds in the order of the times at which a [`Window`] assumes them to have been made.
struct Refunds {
    /// The assumed time in microseconds, and the refund.
    due: Vec<(u64, Refund)>,
    /// The index of the first refund that is not applied yet.
    next: usize,
}

impl Refunds {
    fn new(refunds: &[Refund], time_us: impl Fn(&Refund) -> u64) -> Refunds {
        let mut due: Vec<(u64, Refund)> = refunds.iter().map(|refund| (time_us(refund), *refund)).collect();
        due.sort_unstable_by_key(|(time_us, _)| *time_us);
        Refunds { due, next: 0 }
    }

    fn due(&mut self, now_us: u64) -> Option<Refund> {
        let (time_us, refund) = *self.due.get(self.next)?;
        if time_us > now_us {
            return None;
        }
        self.next += 1;
        Some(refund)
    }
}
