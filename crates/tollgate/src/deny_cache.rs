//! Denials that are remembered for as long as they are certainly true.
//!
//! A client that is denied usually asks again at once. The store has already said when that could succeed: not before
//! `retry_after`. Until then every further denial of the same cost on the same counter is known, and asking the store
//! for it is waste.
//!
//! **Exact.** The store decides at some moment between the send and the receipt of its answer, and the wait counts from that moment.
//! A denial is remembered until *send time* + `retry_after`, which is never too long. The wait that a remembered denial reports ends at
//! *receipt time* + `retry_after`, which is never too short: a client that waits so long is admitted. So is `next_after`, and `reset_after`.
//!
//! ```text
//!   sent ├───────── decided ────┤ received
//!        denied here until sent + retry_after ┤        │ the client is told to come at received + retry_after
//! ```
//!
//! An admission that left nothing is as good as a denial of one unit until `next_after`. A remembered denial is given only for the very cost that
//! the store spoke of, because for a larger one the wait is longer by an amount that only the store knows.
//!
//! **At most a second.** A reset, a grant or a lifted ban elsewhere ends a denial early. So a denial is forgotten
//! after a second, even if it says to wait for an hour: one call a second and key is what a hammering client costs.
//!
//! **Not for everything.** Where a refund can free units early, or a denial itself is charged (`count_denied`),
//! the store's word does not last, and nothing is remembered. A changed limit is another entry. Of a ban it is known whose it is only
//! if the check has one subject; else nothing is remembered, or one subject's ban would be held against another.
//!
//! **The other lines** of a multi-limit answer repeat the store's last word, which is kept for each counter by itself:
//!
//! ```text
//!   denials:  global 1000/min ─▶ cost 1, until 12:00:05            found first, or nothing is looked for further
//!   words:    user:1 100/min ─▶ 93 left │ user:2 100/min ─▶ 100 left │ …
//! ```
//!
//! So a full limit that many subjects share is asked for once a second, not once for each of them. The price is age: what a check
//! of other limits took from a counter since is not seen here, so a word is repeated for ten seconds. Where it would refuse, it is a
//! denial and lasts as long as one. If nothing is known of one of the lines, the store is asked.

use smallvec::SmallVec;
use tollgate_core::{Check, Decision, Demand, LimitStatus, LimitStatuses, Source, Timestamp, Wait};

use crate::ttl_cache::{Expire, Id, TtlCache};

/// No denial is remembered longer.
const REMEMBERED_US_MAX: u64 = 1_000_000;
/// No line beside a denial is repeated longer.
const REPEATED_US_MAX: u64 = 10_000_000;
/// Counters with a denial, and counters with a last word; some tens of megabytes at the very most.
const COUNTERS_MAX: usize = 65_536;
/// Different costs remembered per counter.
const DENIALS_MAX: usize = 4;

#[derive(Debug)]
pub(crate) struct DenyCache {
    denials: TtlCache<Denials>,
    words: TtlCache<LastWord>,
}

impl Default for DenyCache {
    fn default() -> Self {
        DenyCache { denials: TtlCache::new(COUNTERS_MAX), words: TtlCache::new(COUNTERS_MAX) }
    }
}

/// The denials of a counter under one version of its limit, each of another cost.
#[derive(Debug, Default)]
struct Denials(SmallVec<[Denial; 1]>);

#[derive(Clone, Copy, Debug)]
struct Denial {
    forget_at: Timestamp,
    word: LastWord,
}

/// What the store last said of a counter.
#[derive(Clone, Copy, Debug)]
struct LastWord {
    line: LimitStatus,
    /// The source of the store's decision: [`Source::Ban`] if a ban denied the request.
    source: Source,
    call: CallSpan,
}

/// When the store was asked and when its answer was received. It decided in between.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallSpan {
    pub(crate) sent: Timestamp,
    pub(crate) received: Timestamp,
}

impl DenyCache {
    /// The denial that the store would give, if it is certain.
    pub(crate) fn recall(&self, check: &Check<'_>, now: Timestamp) -> Option<Decision> {
        let demands = check.demands();
        let ids: SmallVec<[Id; 4]> = demands.iter().map(|demand| self.id(demand)).collect();
        let denied = |(demand, &id): (&Demand<'_>, &Id)| {
            self.denials.look(id, |denials| denials.line_of(demand.cost.units(), now)).flatten()
        };
        let denied: SmallVec<[Option<(LimitStatus, Source)>; 4]> = demands.iter().zip(&ids).map(denied).collect();
        if denied.iter().all(Option::is_none) {
            return None;
        }
        let is_ban = denied.iter().flatten().any(|(_, source)| *source == Source::Ban);
        let last_word = |demand, id| self.words.look(id, |word| word.speaking_of(demand, now)).flatten();
        let lines = demands.iter().zip(&ids).zip(&denied);
        let lines: Option<LimitStatuses> = lines
            .map(|((demand, &id), denied)| denied.map(|(line, _)| line).or_else(|| last_word(demand, id)))
            .collect();
        let source = if is_ban { Source::Ban } else { Source::DenyCache };
        Some(Decision { at: now, source, limits: lines? })
    }

    /// Learns from the store's answer to a check.
    pub(crate) fn learn(&self, check: &Check<'_>, decision: &Decision, call: CallSpan) {
        let (demands, lines) = (check.demands(), &decision.limits);
        let allowed = decision.allowed();
        if !lines.iter().any(|line| denied_by(line, allowed).is_some()) {
            return;
        }
        let source = decision.source;
        let is_ban = source == Source::Ban;
        if is_ban && has_several_subjects(check) {
            return;
        }
        for (demand, line) in demands.iter().zip(lines) {
            let id = self.id(demand);
            if let Some(line) = denied_by(line, allowed) {
                self.denials.add(id, call.sent, |denials| denials.remember(LastWord { line, source, call }));
            }
            // A ban hides what the counters hold.
            if !is_ban {
                self.words.put(id, LastWord { line: *line, source, call }, call.sent);
            }
        }
    }

    /// Forgets what is known of a counter, under this version of its limit.
    pub(crate) fn forget(&self, demand: &Demand<'_>) {
        let id = self.id(demand);
        self.denials.forget(id);
        self.words.forget(id);
    }

    fn id(&self, demand: &Demand<'_>) -> Id {
        self.denials.id((&demand.key, &demand.limit))
    }
}

/// The denial that a line is, or is as good as, in an answer that admitted the request or not.
fn denied_by(line: &LimitStatus, allowed: bool) -> Option<LimitStatus> {
    match line.allowed {
        // A peek is refused by a ban at most, and together with what takes something.
        _ if line.cost == 0 => None,
        false => Some(*line),
        true if allowed && line.remaining == 0 => {
            Some(LimitStatus { allowed: false, cost: 1, retry_after: line.next_after, ..*line })
        }
        true => None,
    }
}

fn has_several_subjects(check: &Check<'_>) -> bool {
    check.demands().windows(2).any(|pair| pair[0].key.subject() != pair[1].key.subject())
}

/// How long after the send a refusal with this wait is certain.
fn refused_for_us(wait: Wait) -> u64 {
    // "Never" is as true in a second as it is now; it is forgotten by the same clock.
    wait.as_micros().map_or(REMEMBERED_US_MAX, |us| us.min(REMEMBERED_US_MAX))
}

impl Denials {
    fn remember(&mut self, word: LastWord) {
        let sent = word.call.sent;
        let forget_at = sent.plus_micros(refused_for_us(word.line.retry_after));
        self.0.retain(|other| other.word.line.cost != word.line.cost && other.forget_at > sent);
        self.0.truncate(DENIALS_MAX - 1);
        self.0.push(Denial { forget_at, word });
    }

    /// Returns the denial of this cost as it stands now and the source of the store's decision, if there is one.
    fn line_of(&self, cost: u32, now: Timestamp) -> Option<(LimitStatus, Source)> {
        let is_known = |denial: &&Denial| denial.word.age_us(now).is_some() && now < denial.forget_at;
        let denial = self.0.iter().filter(is_known).find(|denial| denial.word.line.cost == cost)?;
        Some((denial.word.at(now), denial.word.source))
    }
}

impl Expire for Denials {
    fn is_expired(&self, now: Timestamp) -> bool {
        self.0.iter().all(|denial| denial.forget_at <= now)
    }
}

impl Expire for LastWord {
    /// Earlier than it loses its meaning: where there is no room, the latest are worth more.
    fn is_expired(&self, now: Timestamp) -> bool {
        self.age_us(now).is_none_or(|age_us| age_us >= REMEMBERED_US_MAX)
    }
}

impl LastWord {
    /// How long ago it was asked for. By a clock that was set back, what was learned later has not been said yet.
    fn age_us(&self, now: Timestamp) -> Option<u64> {
        now.as_micros().checked_sub(self.call.sent.as_micros())
    }

    /// The line as it stands now: every wait is shorter by what has passed since the answer was received.
    fn at(&self, now: Timestamp) -> LimitStatus {
        let passed_us = now.as_micros().saturating_sub(self.call.received.as_micros());
        let shorter = |wait: Wait| wait.as_micros().map_or(wait, |us| Wait::from_micros(us.saturating_sub(passed_us)));
        LimitStatus {
            retry_after: shorter(self.line.retry_after),
            next_after: shorter(self.line.next_after),
            reset_after: shorter(self.line.reset_after),
            ..self.line
        }
    }

    /// The line for another demand on the same counter. `None` where it is too old, or would be a refusal of which nothing is known any more.
    fn speaking_of(&self, demand: &Demand<'_>, now: Timestamp) -> Option<LimitStatus> {
        let cost = demand.cost.units();
        let line = LimitStatus { cost, allowed: cost <= self.line.remaining, ..self.at(now) };
        let age_us = self.age_us(now)?;
        let (age_us_max, retry_after) = match (line.allowed, self.line.allowed) {
            (true, _) if cost == 0 && line.remaining == 0 => (REPEATED_US_MAX, line.next_after),
            (true, true) => (REPEATED_US_MAX, line.retry_after),
            (true, false) => (REPEATED_US_MAX, Wait::ZERO),
            (false, false) if self.line.cost == cost => (refused_for_us(self.line.retry_after), line.retry_after),
            (false, true) if cost == 1 => (refused_for_us(self.line.next_after), line.next_after),
            (false, _) => return None,
        };
        (age_us < age_us_max).then_some(LimitStatus { retry_after, ..line })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;
    use tollgate_core::{Clock, Key, Limit, ManualClock, MemoryStore};

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
        Demand::new(limit.parse::<Limit>().unwrap(), Key::new(subject).unwrap())
    }

    /// A call that took no time.
    fn at(now: Timestamp) -> CallSpan {
        CallSpan { sent: now, received: now }
    }

    fn store() -> (MemoryStore, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::new(START));
        (MemoryStore::builder().clock(clock.clone()).build(), clock)
    }

    #[test]
    fn a_denial_is_recalled_until_its_retry_after_with_the_wait_that_is_left() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/500ms", "a");
        let check = Check::one(&demand);
        assert!(cache.recall(&check, START).is_none());
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = cache.recall(&check, START.plus_micros(499_999)).expect("an admission that left nothing");
        assert_eq!((recalled.allowed(), recalled.source), (false, Source::DenyCache));
        assert_eq!(recalled.retry_after(), Wait::from_micros(1));
        assert!(cache.recall(&check, START.plus_micros(500_000)).is_none());
    }

    #[test]
    fn a_denial_ends_by_the_send_and_the_reported_wait_by_the_receipt() {
        let (store, clock) = store();
        let cache = DenyCache::default();
        let both = [demand("1/500ms", "a"), demand("1/300ms", "b"), demand("9/500ms", "c")];
        let check = Check::new(&both).unwrap();
        let (decided, received) = (START.plus_micros(20_000), START.plus_micros(30_000));
        clock.set(decided);
        cache.learn(&check, &store.check(&check), CallSpan { sent: START, received });
        let now = START.plus_micros(100_000);
        let recalled = cache.recall(&check, now).unwrap();
        let waits = |wait: fn(&LimitStatus) -> Wait| recalled.limits.iter().map(wait).collect::<Vec<_>>();
        let until = |us: u64| Wait::from_micros(30_000 + us - 100_000);
        assert_eq!(waits(|line| line.retry_after), [until(500_000), until(300_000), Wait::ZERO]);
        assert_eq!(waits(|line| line.next_after), [until(500_000), until(300_000), until(500_000)]);
        assert_eq!(waits(|line| line.reset_after), [until(500_000), until(300_000), until(500_000)]);
        for (line, demand) in recalled.limits.iter().zip(&both).filter(|(line, _)| !line.allowed) {
            clock.set(now.plus_micros(line.retry_after.as_micros().unwrap()));
            assert!(store.check(&Check::one(demand)).allowed(), "a client that waits as told is admitted: {demand:?}");
        }
        assert!(cache.recall(&check, START.plus_micros(299_999)).is_some());
        assert!(cache.recall(&check, START.plus_micros(300_000)).is_none(), "b may be free again");
        assert!(cache.recall(&Check::one(&both[0]), START.plus_micros(499_999)).is_some());
        assert!(cache.recall(&Check::one(&both[0]), START.plus_micros(500_000)).is_none(), "a may be free again");
    }

    #[test]
    fn no_denial_is_remembered_longer_than_a_second() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/h", "a");
        let check = Check::one(&demand);
        store.check(&check);
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = cache.recall(&check, START.plus_micros(999_999)).unwrap();
        assert_eq!(recalled.retry_after(), Wait::from_micros(3_600_000_000 - 999_999));
        assert!(cache.recall(&check, START.plus_micros(1_000_000)).is_none());
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_make_a_denial_last() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/h", "a");
        let check = Check::one(&demand);
        store.check(&check);
        cache.learn(&check, &store.check(&check), at(START));
        assert!(cache.recall(&check, START).is_some());
        assert!(cache.recall(&check, Timestamp::from_micros(START.as_micros() - 1)).is_none());
    }

    #[test]
    fn only_the_cost_that_the_store_spoke_of_is_recalled() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (five, six, one) = (demand("10/min", "a").cost(5), demand("10/min", "a").cost(6), demand("10/min", "a"));
        store.check(&Check::one(&six));
        cache.learn(&Check::one(&five), &store.check(&Check::one(&five)), at(START));
        assert!(cache.recall(&Check::one(&five), START).is_some());
        assert!(cache.recall(&Check::one(&six), START).is_none());
        assert!(cache.recall(&Check::one(&one), START).is_none());
    }

    #[test]
    fn another_version_of_the_limit_and_a_reset_ask_the_store() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (old, new) = (demand("1/min", "a"), demand("2/min", "a"));
        cache.learn(&Check::one(&old), &store.check(&Check::one(&old)), at(START));
        assert!(cache.recall(&Check::one(&new), START).is_none());
        assert!(cache.recall(&Check::one(&old), START).is_some());
        cache.forget(&old);
        assert!(cache.recall(&Check::one(&old), START).is_none());
    }

    #[test]
    fn the_other_lines_repeat_the_last_word_and_are_never_invented() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (minute, day) = (demand("1/min", "a"), demand("9/day", "a"));
        let both = [minute, day];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = cache.recall(&check, START).unwrap();
        assert_eq!((recalled.limits[0].allowed, recalled.limits[1].allowed), (false, true));
        assert_eq!(recalled.limits[1].remaining, 8);
        let other = [minute, demand("9/day", "b")];
        assert!(cache.recall(&Check::new(&other).unwrap(), START).is_none());
    }

    #[test]
    fn another_line_is_refused_only_for_as_long_as_the_store_said() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let both = [demand("1/h", "a"), demand("1/100ms", "b")];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(START));
        let recalled = cache.recall(&check, START.plus_micros(99_999)).unwrap();
        assert_eq!((recalled.limits[1].allowed, recalled.limits[1].retry_after), (false, Wait::from_micros(1)));
        assert!(cache.recall(&check, START.plus_micros(100_000)).is_none(), "b may be free again");
        let dearer = [both[0], both[1].cost(2)];
        assert!(cache.recall(&Check::new(&dearer).unwrap(), START).is_none(), "nothing was said of two units of b");
    }

    #[test]
    fn a_refusal_of_another_line_is_forgotten_after_a_second_too() {
        let (store, clock) = store();
        let cache = DenyCache::default();
        let ask = |check: &Check<'_>| {
            let now = clock.now();
            let recalled = cache.recall(check, now);
            recalled.unwrap_or_else(|| {
                let decision = store.check(check);
                cache.learn(check, &decision, at(now));
                decision
            })
        };
        let (often, daily) = (demand("1/10s", "a"), demand("5/day", "b"));
        let both = [often, daily];
        store.check(&Check::one(&daily.cost(5)));
        assert!(ask(&Check::one(&often)).allowed());
        assert!(!ask(&Check::new(&both).unwrap()).allowed());
        clock.advance(Duration::from_secs(5));
        // On another node, so nobody here is told.
        store.reset(&daily);
        clock.advance(Duration::from_secs(5));
        assert!(ask(&Check::one(&often)).allowed());
        clock.advance(Duration::from_millis(100));
        let denied = ask(&Check::new(&both).unwrap());
        assert_eq!((denied.allowed(), denied.limits[1].allowed), (false, true));
        assert_eq!(denied.retry_after(), Wait::from_micros(9_900_000));
    }

    #[test]
    fn a_word_of_another_line_is_repeated_for_ten_seconds() {
        let cache = DenyCache::default();
        let (store, clock) = store();
        let both = [demand("1/min", "shared"), demand("9/day", "a")];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), at(clock.now()));
        // Others keep the denial known.
        for (seconds, is_known) in [(5, true), (9, true), (10, false)] {
            let now = START.plus_micros(seconds * 1_000_000);
            clock.set(now);
            cache.learn(&Check::one(&both[0]), &store.check(&Check::one(&both[0])), at(now));
            assert_eq!(cache.recall(&check, now).is_some(), is_known, "{seconds}");
        }
    }

    #[test]
    fn a_flood_of_denied_keys_stays_within_the_bound() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        for n in 0..200_000 {
            let subject = n.to_string();
            let demand = demand("1/h", &subject);
            cache.learn(&Check::one(&demand), &store.check(&Check::one(&demand)), at(START));
        }
        assert_eq!((cache.denials.len(), cache.words.len()), (COUNTERS_MAX, COUNTERS_MAX));
        let (subject, later) = ("late".to_owned(), START.plus_micros(REMEMBERED_US_MAX));
        let demand = demand("1/h", &subject);
        cache.learn(&Check::one(&demand), &store.check(&Check::one(&demand)), at(later));
        assert!(cache.recall(&Check::one(&demand), later).is_some(), "what was forgotten makes room");
    }
}
