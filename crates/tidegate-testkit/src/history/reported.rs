//! Verification of decisions whose callers do not know the store's time, such as clients in other languages.
//!
//! Every check of such a run has a second limit, the *journal* of its counter: a `sliding-log` that is never used up and
//! whose window is longer than the run. It gives the store's view of the run:
//!
//! ```text
//!   journal in the store      10:00:00.100  10:00:00.250  10:00:00.250  10:00:00.300     the time of every unit
//!                                   1             2             3             4
//!   admission, 3 units in the journal so far: decided at 10:00:00.250
//!   denial, 3 units in the journal so far:    decided from 10:00:00.250 to 10:00:00.300
//! ```
//!
//! **Admissions.** The units of an answer in the journal are its place in the order of all admissions. So the admissions
//! must cover the journal without a gap and without overlap: a gap is a unit that no caller received, an overlap is an
//! admission that was not charged. The journal also gives the time of each admission. With that time, it is verified
//! like every other answer of the store.
//!
//! **Denials** change nothing, so the store keeps no time of them. The callers' clock must be the store's (all processes
//! are on one machine); then the store decided between sending and receiving. The state of a counter is constant between
//! two events, which are a charge and the expiry of a charge. A denial must agree with one of the states during its
//! call, in everything: there was no room, and `remaining`, the units in the journal and `retry_after` are those of
//! one instant of that state. A denial that may come from the deny cache only needs an instant without room, because it
//! repeats an earlier answer.

use tidegate_core::Source;

use super::{Answer, Counter, Report, Violation};

/// A decision of one counter as its caller received it, without the store's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reported {
    /// The store's clock, read by the caller, before it sent the check, in microseconds.
    pub sent_us: u64,
    /// The store's clock, read by the caller, after it received the decision, in microseconds.
    pub received_us: u64,
    /// The units of the check.
    pub cost: u32,
    /// The verdict of the limit, which is that of the check: the journal never denies.
    pub allowed: bool,
    /// The remaining units of the limit.
    pub remaining: u32,
    /// The wait of the limit in microseconds.
    pub retry_after_us: u64,
    /// The unit to which the caller or the protocol has rounded up `retry_after_us`: 1 if it is exact.
    pub rounded_up_to_us: u64,
    /// The units in the journal after the decision: the journal's quota minus its remaining units.
    pub journal_units: u64,
    /// The source of the decision; `None` if the protocol does not report it.
    pub source: Option<Source>,
}

/// An entry of a journal: the store's time in microseconds, and the units that were admitted then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JournalEntry {
    /// The store's time.
    pub at_us: u64,
    /// The units.
    pub units: u64,
}

/// Verifies the reported decisions of a counter against its journal, and adds violations to `report`, as well as the
/// number of denials.
///
/// Appends the admissions to the answers of the counter, with the store's time, and does not count or verify them
/// further. `number` is the index of the counter.
pub(super) fn verify(number: usize, counter: &mut Counter, report: &mut Report) {
    if counter.reported.is_empty() && counter.journal.is_empty() {
        return;
    }
    let (denials, admissions) = split(std::mem::take(&mut counter.reported));
    let charges = match_admissions(number, counter, admissions, report);
    let quota = u64::from(counter.limit.quota());
    let states = States::new(charges, counter.limit.window_us(), quota);
    for denial in denials {
        let is_cached = denial.source == Some(Source::DenyCache);
        *if is_cached { &mut report.cached } else { &mut report.refused } += 1;
        let (counter, sent_us, cost) = (number, denial.sent_us, u64::from(denial.cost));
        let during = states.during(denial.sent_us, denial.received_us);
        let counted = during.iter().map(|state| state.total).max().unwrap_or(0);
        if counted + cost <= quota {
            report.add(Violation::UnjustifiedDenial { counter, at_us: sent_us, cost, counted });
        } else if denial.source == Some(Source::Store) && !during.iter().any(|state| states.explains(state, &denial)) {
            report.add(Violation::InconsistentDenial { counter, sent_us, remaining: denial.remaining.into() });
        }
    }
}

/// Returns the denials and the admissions, the latter in the order of the journal.
fn split(reported: Vec<Reported>) -> (Vec<Reported>, Vec<Reported>) {
    let (mut admissions, denials): (Vec<_>, Vec<_>) = reported.into_iter().partition(|reported| reported.allowed);
    admissions.sort_unstable_by_key(|admission| (admission.journal_units, admission.cost));
    (denials, admissions)
}

/// Finds the units of each admission in the journal, and appends it to the answers of the counter.
///
/// Returns the charges of the counter in the order of the store: the admissions, and the units that no admission covers.
fn match_admissions(
    number: usize,
    counter: &mut Counter,
    admissions: Vec<Reported>,
    report: &mut Report,
) -> Vec<JournalEntry> {
    let mut journal = Cursor { entries: &counter.journal, taken: 0 };
    let total: u64 = counter.journal.iter().map(|entry| entry.units).sum();
    let mut charges = Vec::new();
    let mut matched = 0;
    for admission in admissions {
        let (sent_us, units) = (admission.sent_us, u64::from(admission.cost));
        let begin = admission.journal_units.saturating_sub(units);
        if begin < matched || admission.journal_units > total || units > admission.journal_units {
            report.add(Violation::NotInJournal { counter: number, sent_us, units });
            continue;
        }
        for entry in journal.take(begin - matched) {
            report.add(Violation::NotReported { counter: number, at_us: entry.at_us, units: entry.units });
            charges.push(entry);
        }
        matched = admission.journal_units;
        let entries = journal.take(units);
        // A check is decided at one instant.
        let [entry] = entries[..] else {
            report.add(Violation::NotInJournal { counter: number, sent_us, units });
            charges.extend(entries);
            continue;
        };
        if !(admission.sent_us..=admission.received_us).contains(&entry.at_us) {
            report.add(Violation::OutsideOfCall { counter: number, sent_us, at_us: entry.at_us });
        }
        charges.push(entry);
        counter.answers.push(Answer {
            sent_us,
            received_us: admission.received_us,
            at_us: entry.at_us,
            cost: admission.cost,
            remaining: admission.remaining,
            retry_after_us: Some(admission.retry_after_us),
            next_after_us: 0,
            allowed: true,
            admitted: true,
            source: Source::Store,
        });
    }
    for entry in journal.take(total - matched) {
        report.add(Violation::NotReported { counter: number, at_us: entry.at_us, units: entry.units });
        charges.push(entry);
    }
    charges
}

/// A position in a journal.
struct Cursor<'a> {
    entries: &'a [JournalEntry],
    /// The units of the first entry that are before the position.
    taken: u64,
}

impl Cursor<'_> {
    /// Returns the next units, as entries, and moves behind them. There must be as many.
    fn take(&mut self, mut units: u64) -> Vec<JournalEntry> {
        let mut taken = Vec::new();
        while units > 0 {
            let first = self.entries[0];
            let part = units.min(first.units - self.taken);
            taken.push(JournalEntry { at_us: first.at_us, units: part });
            units -= part;
            self.taken += part;
            if self.taken == first.units {
                (self.entries, self.taken) = (&self.entries[1..], 0);
            }
        }
        taken
    }
}

/// All states of a counter in a run, in the order of time.
struct States {
    charges: Vec<JournalEntry>,
    window_us: u64,
    quota: u64,
    states: Vec<State>,
}

/// The state of a counter between two events, which holds from `from_us` to `to_us`, both included.
///
/// A charge may come before or after a denial of the same microsecond, so both states include that microsecond.
struct State {
    from_us: u64,
    to_us: u64,
    /// The units that count.
    total: u64,
    /// The units admitted since the start of the run.
    admitted: u64,
    /// The index of the first charge that counts.
    first: usize,
}

impl States {
    fn new(charges: Vec<JournalEntry>, window_us: u64, quota: u64) -> States {
        let mut states = Vec::new();
        let mut state = State { from_us: 0, to_us: 0, total: 0, admitted: 0, first: 0 };
        let mut next = 0;
        loop {
            let charge = charges.get(next);
            let expiry_us = (state.first < next).then(|| charges[state.first].at_us + window_us);
            // A unit does not count any more in the microsecond in which its window ends.
            let expires = expiry_us.filter(|&expiry_us| charge.is_none_or(|charge| expiry_us <= charge.at_us));
            let (event_us, to_us) = match (expires, charge) {
                (Some(expiry_us), _) => (expiry_us, expiry_us - 1),
                (None, Some(charge)) => (charge.at_us, charge.at_us),
                (None, None) => (u64::MAX, u64::MAX),
            };
            if state.from_us <= to_us {
                states.push(State { to_us, ..state });
            }
            state.from_us = event_us;
            match (expires, charge) {
                (Some(_), _) => {
                    state.total -= charges[state.first].units;
                    state.first += 1;
                }
                (None, Some(charge)) => {
                    state.total += charge.units;
                    state.admitted += charge.units;
                    next += 1;
                }
                (None, None) => return States { charges, window_us, quota, states },
            }
        }
    }

    /// Returns the states of which at least one microsecond lies in this interval, both ends included.
    fn during(&self, from_us: u64, to_us: u64) -> &[State] {
        let begin = self.states.partition_point(|state| state.to_us < from_us);
        let end = self.states.partition_point(|state| state.from_us <= to_us);
        &self.states[begin.min(end)..end]
    }

    /// Returns whether the store, in this state and during the call, would have answered exactly this denial.
    fn explains(&self, state: &State, denial: &Reported) -> bool {
        let cost = u64::from(denial.cost);
        let Some(room) = self.quota.checked_sub(cost) else { return false };
        let Some(excess) = state.total.checked_sub(room).filter(|excess| *excess > 0) else { return false };
        if self.quota.saturating_sub(state.total) != u64::from(denial.remaining)
            || state.admitted != denial.journal_units
        {
            return false;
        }
        let mut freed = 0;
        let last = self.charges[state.first..].iter().find(|charge| {
            freed += charge.units;
            freed >= excess
        });
        let fits_us = last.expect("the charges of a state add up to its total").at_us + self.window_us;
        // The wait before rounding ends at `fits_us`, so this is when the store decided.
        let earliest_us = fits_us.saturating_sub(denial.retry_after_us);
        let latest_us = earliest_us + denial.rounded_up_to_us - 1;
        let from_us = earliest_us.max(state.from_us).max(denial.sent_us);
        let to_us = latest_us.min(state.to_us).min(denial.received_us);
        from_us <= to_us
    }
}
