//! Denials that are remembered for as long as they are certainly true.
//!
//! A client that is denied usually asks again at once. The store has already said when that could succeed: not before
//! `retry_after`. Until then every further denial of the same cost on the same counter is known, and asking the store
//! for it is waste.
//!
//! **Exact.** A denial is remembered until *send time* + `retry_after`. The store decided at or after the send, so it said
//! "denied until" a moment that is no earlier. An admission that left nothing is as good as a denial of one unit until
//! `next_after`. The remembered answer tells the true remaining wait; it is given only for the very cost that
//! the store spoke of, because for a larger one the wait is longer by an amount that only the store knows.
//!
//! **At most a second.** A reset, a grant or a lifted ban elsewhere ends a denial early. So a denial is forgotten
//! after a second, even if it says to wait for an hour: one call a second and key is what a hammering client costs.
//!
//! **Not for everything.** Where a refund can free units early, or a denial itself is charged (`count_denied`),
//! the store's word does not last, and nothing is remembered. A changed limit is another entry.
//!
//! The other lines of a multi-limit answer repeat the store's last word. If it never spoke of one of them together
//! with the refusing one, or if its word would refuse that line too but no longer holds, the store is asked.

use std::hash::{BuildHasher, Hash, Hasher};

use foldhash::quality::RandomState;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;
use tollgate_core::{Check, Decision, Demand, Line, Lines, Source, Timestamp, Wait};

/// No denial is remembered longer.
const REMEMBERED_US_MAX: u64 = 1_000_000;
const SHARDS: usize = 16;
/// Entries per shard; 65,536 in all, some tens of megabytes at the very most.
const SHARD_ENTRIES_MAX: usize = 4_096;
/// A full shard is searched for forgotten entries no more often than this; in between newcomers are not remembered.
const SWEEP_EVERY_US: u64 = 100_000;
/// Different costs remembered per counter, and other counters' lines beside it.
const DENIALS_MAX: usize = 4;
const LINES_MAX: usize = 8;

/// A counter under one version of its limit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct CounterId(u64, u64);

#[derive(Debug, Default)]
pub(crate) struct DenyCache {
    shards: [Mutex<Shard>; SHARDS],
    hashers: [RandomState; 2],
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashMap<CounterId, Entry, RandomState>,
    /// When a full shard was last searched for what is forgotten.
    swept: Timestamp,
}

#[derive(Debug, Default)]
struct Entry {
    denials: SmallVec<[Denial; 1]>,
    lines: SmallVec<[LastWord; 2]>,
}

#[derive(Clone, Copy, Debug)]
struct Denial {
    cost: u32,
    forget_at: Timestamp,
    line: LastWord,
}

/// What the store last said of a counter, and when it was asked.
#[derive(Clone, Copy, Debug)]
struct LastWord {
    counter: CounterId,
    line: Line,
    sent: Timestamp,
}

impl DenyCache {
    /// The denial that the store would give, if it is certain.
    pub(crate) fn recall(&self, check: &Check<'_>, now: Timestamp) -> Option<Decision> {
        let demands = check.demands();
        let ids: SmallVec<[CounterId; 4]> = demands.iter().map(|demand| self.id(demand)).collect();
        for (demand, &id) in demands.iter().zip(&ids) {
            let shard = self.shard(id).lock();
            let Some(entry) = shard.entries.get(&id) else { continue };
            let Some(denial) = entry.denial(demand.cost.units(), now) else { continue };
            let line_of = |(demand, &other): (&Demand<'_>, &CounterId)| {
                if other == id {
                    return Some(denial.line.at(now));
                }
                let last_word = entry.lines.iter().find(|last_word| last_word.counter == other)?;
                last_word.speaking_of(demand, now)
            };
            let lines: Option<Lines> = demands.iter().zip(&ids).map(line_of).collect();
            if let Some(lines) = lines {
                return Some(Decision { at: now, source: Source::DenyCache, lines });
            }
        }
        None
    }

    /// Learns from an answer of the store to a check that was sent at `sent`.
    pub(crate) fn learn(&self, check: &Check<'_>, decision: &Decision, sent: Timestamp) {
        let demands = check.demands();
        let allowed = decision.allowed();
        let is_worth_it = |line: &Line| !line.allowed || (allowed && line.remaining == 0);
        if !decision.lines.iter().any(is_worth_it) {
            return;
        }
        let last_word = |(demand, line): (&Demand<'_>, &Line)| LastWord { counter: self.id(demand), line: *line, sent };
        let words: SmallVec<[LastWord; 4]> = demands.iter().zip(&decision.lines).map(last_word).collect();
        for word in &words {
            let line = word.line;
            let denied = if !line.allowed {
                Some((line.cost, line.retry_after))
            } else if allowed && line.remaining == 0 && line.cost > 0 {
                Some((1, line.next_after))
            } else {
                None
            };
            if let Some((cost, wait)) = denied {
                let line = Line { allowed: false, cost, retry_after: wait, ..line };
                self.remember(LastWord { line, ..*word }, &words);
            }
        }
    }

    /// Forgets what is known of a counter, under this version of its limit.
    pub(crate) fn forget(&self, demand: &Demand<'_>) {
        let id = self.id(demand);
        self.shard(id).lock().entries.remove(&id);
    }

    fn remember(&self, word: LastWord, words: &[LastWord]) {
        // "Never" is as true in a second as it is now; it is forgotten by the same clock.
        let wait_us = word.line.retry_after.as_micros().unwrap_or(REMEMBERED_US_MAX);
        let forget_at = word.sent.plus_micros(wait_us.min(REMEMBERED_US_MAX));
        let mut shard = self.shard(word.counter).lock();
        if !shard.has_room_for(word.counter, word.sent) {
            return;
        }
        let entry = shard.entries.entry(word.counter).or_default();
        let denial = Denial { cost: word.line.cost, forget_at, line: word };
        entry.denials.retain(|other| other.cost != denial.cost && other.forget_at > word.sent);
        entry.denials.truncate(DENIALS_MAX - 1);
        entry.denials.push(denial);
        for word in words {
            entry.lines.retain(|other| other.counter != word.counter);
            if entry.lines.len() == LINES_MAX {
                entry.lines.remove(0);
            }
            entry.lines.push(*word);
        }
    }

    fn id(&self, demand: &Demand<'_>) -> CounterId {
        let [first, second] = self.hashers.each_ref().map(|hasher| {
            let mut hasher = hasher.build_hasher();
            demand.key.hash(&mut hasher);
            demand.limit.hash(&mut hasher);
            hasher.finish()
        });
        CounterId(first, second)
    }

    fn shard(&self, id: CounterId) -> &Mutex<Shard> {
        &self.shards[id.1 as usize % SHARDS]
    }
}

impl Shard {
    fn has_room_for(&mut self, counter: CounterId, now: Timestamp) -> bool {
        let is_full = |shard: &Shard| shard.entries.len() >= SHARD_ENTRIES_MAX;
        if !is_full(self) || self.entries.contains_key(&counter) {
            return true;
        }
        if now >= self.swept.plus_micros(SWEEP_EVERY_US) {
            self.swept = now;
            self.entries.retain(|_, entry| entry.denials.iter().any(|denial| denial.forget_at > now));
        }
        !is_full(self)
    }
}

impl Entry {
    fn denial(&self, cost: u32, now: Timestamp) -> Option<&Denial> {
        // By a clock that was set back, what was learned later has not been said yet.
        let is_known = |denial: &&Denial| denial.line.sent <= now && now < denial.forget_at;
        self.denials.iter().filter(is_known).find(|denial| denial.cost == cost)
    }
}

impl LastWord {
    /// The line as it stands now: every wait is shorter by what has passed since it was asked for.
    fn at(&self, now: Timestamp) -> Line {
        let passed_us = now.as_micros().saturating_sub(self.sent.as_micros());
        let shorter = |wait: Wait| wait.as_micros().map_or(wait, |us| Wait::from_micros(us.saturating_sub(passed_us)));
        Line {
            retry_after: shorter(self.line.retry_after),
            next_after: shorter(self.line.next_after),
            reset_after: shorter(self.line.reset_after),
            ..self.line
        }
    }

    /// The line for another demand on the same counter. `None` where it would be a refusal of which nothing is known any more.
    fn speaking_of(&self, demand: &Demand<'_>, now: Timestamp) -> Option<Line> {
        let cost = demand.cost.units();
        let line = Line { cost, allowed: cost <= self.line.remaining, ..self.at(now) };
        let retry_after = match (line.allowed, self.line.allowed) {
            (true, _) if cost == 0 && line.remaining == 0 => line.next_after,
            (true, true) => line.retry_after,
            (true, false) => Wait::ZERO,
            (false, false) if self.line.cost == cost => line.retry_after,
            (false, true) if cost == 1 => line.next_after,
            (false, _) => return None,
        };
        (line.allowed || retry_after > Wait::ZERO).then_some(Line { retry_after, ..line })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tollgate_core::{Key, Limit, ManualClock, MemoryStore};

    const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);

    fn demand<'a>(limit: &str, subject: &'a str) -> Demand<'a> {
        Demand::new(limit.parse::<Limit>().unwrap(), Key::new(subject).unwrap())
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
        cache.learn(&check, &store.check(&check), START);
        let recalled = cache.recall(&check, START.plus_micros(499_999)).expect("an admission that left nothing");
        assert_eq!((recalled.allowed(), recalled.source), (false, Source::DenyCache));
        assert_eq!(recalled.retry_after(), Wait::from_micros(1));
        assert!(cache.recall(&check, START.plus_micros(500_000)).is_none());
    }

    #[test]
    fn no_denial_is_remembered_longer_than_a_second() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let demand = demand("1/h", "a");
        let check = Check::one(&demand);
        store.check(&check);
        cache.learn(&check, &store.check(&check), START);
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
        cache.learn(&check, &store.check(&check), START);
        assert!(cache.recall(&check, START).is_some());
        assert!(cache.recall(&check, Timestamp::from_micros(START.as_micros() - 1)).is_none());
    }

    #[test]
    fn only_the_cost_that_the_store_spoke_of_is_recalled() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (five, six, one) = (demand("10/min", "a").cost(5), demand("10/min", "a").cost(6), demand("10/min", "a"));
        store.check(&Check::one(&six));
        cache.learn(&Check::one(&five), &store.check(&Check::one(&five)), START);
        assert!(cache.recall(&Check::one(&five), START).is_some());
        assert!(cache.recall(&Check::one(&six), START).is_none());
        assert!(cache.recall(&Check::one(&one), START).is_none());
    }

    #[test]
    fn another_version_of_the_limit_and_a_reset_ask_the_store() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let (old, new) = (demand("1/min", "a"), demand("2/min", "a"));
        cache.learn(&Check::one(&old), &store.check(&Check::one(&old)), START);
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
        cache.learn(&check, &store.check(&check), START);
        let recalled = cache.recall(&check, START).unwrap();
        assert_eq!((recalled.lines[0].allowed, recalled.lines[1].allowed), (false, true));
        assert_eq!(recalled.lines[1].remaining, 8);
        let other = [minute, demand("9/day", "b")];
        assert!(cache.recall(&Check::new(&other).unwrap(), START).is_none());
    }

    #[test]
    fn another_line_is_refused_only_for_as_long_as_the_store_said() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        let both = [demand("1/h", "a"), demand("1/100ms", "b")];
        let check = Check::new(&both).unwrap();
        cache.learn(&check, &store.check(&check), START);
        let recalled = cache.recall(&check, START.plus_micros(99_999)).unwrap();
        assert_eq!((recalled.lines[1].allowed, recalled.lines[1].retry_after), (false, Wait::from_micros(1)));
        assert!(cache.recall(&check, START.plus_micros(100_000)).is_none(), "b may be free again");
        let dearer = [both[0], both[1].cost(2)];
        assert!(cache.recall(&Check::new(&dearer).unwrap(), START).is_none(), "nothing was said of two units of b");
    }

    #[test]
    fn a_flood_of_denied_keys_stays_within_the_bound() {
        let (store, _clock) = store();
        let cache = DenyCache::default();
        for n in 0..200_000 {
            let subject = n.to_string();
            let demand = demand("1/h", &subject);
            cache.learn(&Check::one(&demand), &store.check(&Check::one(&demand)), START);
        }
        let entries: usize = cache.shards.iter().map(|shard| shard.lock().entries.len()).sum();
        assert_eq!(entries, SHARDS * SHARD_ENTRIES_MAX);
        let (subject, later) = ("late".to_owned(), START.plus_micros(REMEMBERED_US_MAX));
        let demand = demand("1/h", &subject);
        cache.learn(&Check::one(&demand), &store.check(&Check::one(&demand)), later);
        assert!(cache.recall(&Check::one(&demand), later).is_some(), "what was forgotten makes room");
    }
}
