//! Parses checks, and writes the replies to them.
//!
//! ```text
//!   TIDEGATE.CHECK key limit [key limit ...] [COST n] [RECEIPT]
//!   TIDEGATE.WAIT  key limit [key limit ...] TIMEOUT ms [COST n] [RECEIPT]
//!                  1   2      3   4          first odd place that holds the name of an option
//! ```
//!
//! **Pairs and options.** The arguments are pairs of a key and a limit, so keys are at the odd places. The options begin
//! at the first odd place, after the first pair, that holds the name of one. So only the first key can be named `COST`
//! or `RECEIPT`. An option with a wrong name is parsed as a key, and its value is then not a valid limit, which is an
//! error.
//!
//! **A flat list.** A batch has one list of demands, and one [`PendingCheck`] per check with the number of its demands. So
//! a check of several limits needs no list of its own, and the list of a single check is the only one that it allocates.

use std::time::Duration;

use smallvec::SmallVec;
use tidegate::{
    Algorithm, Check, CheckError, Cost, DEMANDS_MAX, Decision, Demand, Key, Limit, LimitError, LimitStatus, Scope,
    ScopeName,
};

use super::command::{number, usage};
use super::frame::Args;
use super::reply::Replies;
use crate::listeners::http::request::WAIT_MS_MAX;

/// The scope of `CL.THROTTLE`: like redis-cell, it has one counter per key, whatever the limit.
const THROTTLE: ScopeName = ScopeName::new("throttle");
const THROTTLE_USAGE: &str = "CL.THROTTLE key max_burst count period [quantity]";
/// The number in a reply to a check that was admitted and counted nowhere, in place of one that is not known.
const UNKNOWN_NUMBER: i64 = -1;

/// The format of the reply to a check: five numbers for each limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplyFormat {
    /// `TIDEGATE.*`: allowed (1 or 0), quota, remaining, `retry_after` and `reset_after` in milliseconds, rounded up.
    /// -1 means never.
    ///
    /// The reply to a check of several limits is an array: whether the whole check is allowed, then the five numbers of
    /// each limit as an array.
    Tidegate,
    /// `CL.THROTTLE`: limited (1 or 0), capacity, remaining, `retry_after` and `reset_after` in seconds, rounded up, as
    /// redis-cell. A `retry_after` of -1 means that the check was allowed, or never will be.
    RedisCell,
}

/// A parsed check, whose demands are in a list that it shares with others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingCheck {
    /// The number of its demands, from 1 to 32. The demands use different counters.
    pub(crate) limits: usize,
    pub(crate) format: ReplyFormat,
    /// Whether the reply has a receipt as its last element.
    pub(crate) has_receipt: bool,
}

/// The last element of the reply to a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LastElement<'r> {
    /// The numbers of the last limit: no receipt was requested.
    Numbers,
    /// A receipt, or null if nothing was charged.
    Receipt(Option<&'r str>),
}

/// The checks of a batch that are not decided yet. All of them ask for a receipt, or none.
#[derive(Default)]
pub(crate) struct PendingChecks<'b> {
    /// The demands of all checks, in order.
    pub(crate) demands: Vec<Demand<'b>>,
    /// Inline for short pipelines, so that a single check does not allocate a second list.
    pub(crate) checks: SmallVec<[PendingCheck; 8]>,
}

impl<'b> PendingChecks<'b> {
    /// Creates an empty list with room for `capacity` demands.
    pub(crate) fn with_capacity(capacity: usize) -> PendingChecks<'b> {
        PendingChecks { demands: Vec::with_capacity(capacity), checks: SmallVec::new() }
    }

    /// Returns each check with its demands, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PendingCheck, Check<'_>)> {
        let mut rest = &self.demands[..];
        self.checks.iter().map(move |pending| {
            let (demands, others) = rest.split_at(pending.limits);
            rest = others;
            (*pending, Check::of_distinct(demands))
        })
    }

    /// Returns whether the checks ask for receipts. `false` if there are none.
    pub(crate) fn have_receipts(&self) -> bool {
        self.checks.first().is_some_and(|check| check.has_receipt)
    }

    /// Removes all checks.
    pub(crate) fn clear(&mut self) {
        self.demands.clear();
        self.checks.clear();
    }
}

/// A command whose arguments are pairs of a key and a limit, and options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PairCommand {
    Check,
    Wait,
}

impl PairCommand {
    fn usage(self) -> &'static str {
        match self {
            PairCommand::Check => "TIDEGATE.CHECK key limit [key limit ...] [COST n] [RECEIPT]",
            PairCommand::Wait => "TIDEGATE.WAIT key limit [key limit ...] TIMEOUT ms [COST n] [RECEIPT]",
        }
    }

    /// Returns whether `word` is the name of an option, and so ends the pairs.
    fn has_option(self, word: &[u8]) -> bool {
        let names: &[&str] = match self {
            PairCommand::Check => &["COST", "RECEIPT"],
            PairCommand::Wait => &["COST", "RECEIPT", "TIMEOUT"],
        };
        names.iter().any(|name| word.eq_ignore_ascii_case(name.as_bytes()))
    }
}

/// The options after the pairs.
#[derive(Clone, Copy, Default, Debug)]
struct PairOptions {
    cost: Option<Cost>,
    timeout: Option<Duration>,
    has_receipt: bool,
}

/// Parses `TIDEGATE.CHECK` and appends its demands to `demands`.
///
/// `Err` is the error reply. Nothing is appended then.
pub(super) fn parse_check<'b>(
    buffer: &'b [u8],
    args: &Args,
    limits: &mut LimitCache,
    demands: &mut Vec<Demand<'b>>,
) -> Result<PendingCheck, String> {
    parse_pairs(PairCommand::Check, buffer, args, limits, demands).map(|(check, _)| check)
}

/// Parses `TIDEGATE.WAIT` and appends its demands to `demands`. Also returns the longest time to wait.
///
/// `Err` is the error reply. Nothing is appended then.
pub(super) fn parse_wait<'b>(
    buffer: &'b [u8],
    args: &Args,
    limits: &mut LimitCache,
    demands: &mut Vec<Demand<'b>>,
) -> Result<(PendingCheck, Duration), String> {
    let before = demands.len();
    let (check, options) = parse_pairs(PairCommand::Wait, buffer, args, limits, demands)?;
    match options.timeout {
        Some(timeout) => Ok((check, timeout)),
        None => {
            demands.truncate(before);
            Err(usage(PairCommand::Wait.usage()))
        }
    }
}

fn parse_pairs<'b>(
    command: PairCommand,
    buffer: &'b [u8],
    args: &Args,
    limits: &mut LimitCache,
    demands: &mut Vec<Demand<'b>>,
) -> Result<(PendingCheck, PairOptions), String> {
    let arg = |index| args.get(buffer, index);
    let mut pairs_end = 3;
    while arg(pairs_end).is_some_and(|word| !command.has_option(word)) {
        pairs_end += 2;
    }
    // The last pair has no limit, or there is none at all.
    if pairs_end > args.len() {
        return Err(usage(command.usage()));
    }
    let count = pairs_end / 2;
    if count > DEMANDS_MAX {
        return Err(format!("ERR {}", CheckError::TooMany { count }));
    }
    let options = parse_options(command, buffer, args, pairs_end)?;
    let before = demands.len();
    let mut append = || {
        for index in 0..count {
            let (Some(key), Some(limit)) = (arg(2 * index + 1), arg(2 * index + 2)) else { break };
            let named = |error: String| if count == 1 { error } else { format!("{error} (pair {})", index + 1) };
            let demand = limits.parse(limit, index).and_then(|limit| explicit(key, limit)).map_err(named)?;
            demands.push(demand.cost(options.cost.unwrap_or_default()));
        }
        Check::new(&demands[before..]).map_err(|error| format!("ERR {error}"))?;
        Ok(())
    };
    if let Err(error) = append() {
        demands.truncate(before);
        return Err(error);
    }
    let has_receipt = options.has_receipt;
    Ok((PendingCheck { limits: count, format: ReplyFormat::Tidegate, has_receipt }, options))
}

/// Parses the options from the argument `at` on. `Err` is the error reply.
fn parse_options(command: PairCommand, buffer: &[u8], args: &Args, mut at: usize) -> Result<PairOptions, String> {
    let arg = |index| args.get(buffer, index);
    let mut options = PairOptions::default();
    while let Some(word) = arg(at) {
        let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
        match arg(at + 1) {
            Some(cost) if is("COST") && options.cost.is_none() => {
                options.cost = Some(Cost::new(number(cost, "cost", u32::MAX)?));
            }
            Some(ms) if is("TIMEOUT") && command == PairCommand::Wait && options.timeout.is_none() => {
                let ms = number(ms, "TIMEOUT in milliseconds", WAIT_MS_MAX)?;
                options.timeout = Some(Duration::from_millis(ms.into()));
            }
            _ if is("RECEIPT") && !options.has_receipt => {
                options.has_receipt = true;
                at += 1;
                continue;
            }
            _ => return Err(usage(command.usage())),
        }
        at += 2;
    }
    Ok(options)
}

/// Creates a demand for one unit of `limit` on the counter of `key`. `Err` is the error reply.
pub(super) fn explicit(key: &[u8], limit: Limit) -> Result<Demand<'_>, String> {
    key_in(key, Scope::Explicit).map(|key| Demand::new(limit, key))
}

/// Creates a key in a scope. `Err` is the error reply to an empty key, or one that is too long.
fn key_in<'k>(key: &'k [u8], scope: Scope<'k>) -> Result<Key<'k>, String> {
    if key.is_empty() {
        Err("ERR a key must not be empty".to_owned())
    } else {
        Key::scoped(key, scope).map_err(|error| format!("ERR {error}"))
    }
}

/// Parses `CL.THROTTLE key max_burst count period [quantity]`. `Err` is the error reply.
pub(super) fn parse_throttle<'b>(buffer: &'b [u8], args: &Args, limits: &mut LimitCache) -> Result<Demand<'b>, String> {
    let arg = |index| args.get(buffer, index);
    let (Some(key), Some(max_burst), Some(count), Some(period), 5..=6) = (arg(1), arg(2), arg(3), arg(4), args.len())
    else {
        return Err(usage(THROTTLE_USAGE));
    };
    let max_burst = number(max_burst, "max_burst", u32::MAX)?;
    let count = number(count, "count", u32::MAX)?;
    let period_s = number(period, "period", u32::MAX)?;
    let quantity = arg(5).map_or(Ok(1), |quantity| number(quantity, "quantity", u32::MAX))?;
    let limit = limits.throttle(Throttle { max_burst, count, period_s })?;
    let key = key_in(key, Scope::Named(THROTTLE))?;
    Ok(Demand::new(limit, key).cost(quantity))
}

/// The limits that a connection used last: as text, and of `CL.THROTTLE`.
///
/// A client that repeats them does not cause them to be parsed again.
#[derive(Debug, Default)]
pub(crate) struct LimitCache {
    /// One entry for each of the first pairs of a check.
    texts: [CachedLimit; CACHED_PAIRS],
    throttle: Option<(Throttle, Limit)>,
}

#[derive(Debug, Default)]
struct CachedLimit {
    text: Vec<u8>,
    limit: Option<Limit>,
}

/// The number of pairs of a check whose limits are cached. Limits of later pairs replace those of earlier ones.
const CACHED_PAIRS: usize = 2;

/// The most bytes of a limit text that is cached. It stays allocated as long as the connection.
const CACHED_TEXT_BYTES_MAX: usize = 256;

/// The arguments of `CL.THROTTLE` that define its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Throttle {
    max_burst: u32,
    count: u32,
    period_s: u32,
}

impl Throttle {
    fn limit(self) -> Result<Limit, String> {
        let limit = Limit::new(self.count.into(), Duration::from_secs(self.period_s.into()));
        limit
            .and_then(|limit| limit.with_algorithm(Algorithm::TokenBucket))
            .and_then(|limit| limit.with_burst(u64::from(self.max_burst) + 1))
            .map_err(|error| match error {
                LimitError::Quota { max, .. } => format!("ERR count must be from 1 to {max}"),
                LimitError::Window { .. } => "ERR period must be from 1 to 34560000 seconds".to_owned(),
                // The capacity is one more.
                LimitError::Capacity { .. } => "ERR max_burst must be from 0 to 9999999".to_owned(),
                other => format!("ERR {THROTTLE_USAGE}: {other}"),
            })
    }
}

impl LimitCache {
    fn throttle(&mut self, numbers: Throttle) -> Result<Limit, String> {
        match self.throttle {
            Some((known, limit)) if known == numbers => Ok(limit),
            _ => {
                let limit = numbers.limit()?;
                self.throttle = Some((numbers, limit));
                Ok(limit)
            }
        }
    }

    /// Parses the limit of the pair at `index` of a check, counted from 0.
    fn parse(&mut self, text: &[u8], index: usize) -> Result<Limit, String> {
        let cached = &mut self.texts[index % CACHED_PAIRS];
        if let Some(limit) = cached.limit.filter(|_| cached.text == text) {
            return Ok(limit);
        }
        let readable = std::str::from_utf8(text).map_err(|_| "ERR limit: expected text such as 10/min".to_owned())?;
        let limit: Limit = readable.parse().map_err(|error| format!("ERR limit: {error}"))?;
        if text.len() > CACHED_TEXT_BYTES_MAX {
            return Ok(limit);
        }
        cached.text.clear();
        cached.text.extend_from_slice(text);
        cached.limit = Some(limit);
        Ok(limit)
    }

    /// Parses the only limit of a command. `Err` is the error reply.
    pub(super) fn parse_one(&mut self, text: &[u8]) -> Result<Limit, String> {
        self.parse(text, 0)
    }
}

/// Appends the reply to a check: five numbers in this format for each limit, and `last`.
///
/// If the check was admitted without counting it, the numbers that are not known are -1.
pub(crate) fn reply(
    decision: &Decision,
    check: &Check<'_>,
    format: ReplyFormat,
    last: LastElement<'_>,
    replies: &mut Replies,
) {
    let demands = check.demands();
    let numbers = |index: usize, demand: &Demand<'_>| match (format, decision.limits.get(index)) {
        (ReplyFormat::Tidegate, Some(status)) => tidegate_numbers(status),
        (ReplyFormat::Tidegate, None) => [1, demand.limit.quota().into(), UNKNOWN_NUMBER, 0, UNKNOWN_NUMBER],
        (ReplyFormat::RedisCell, Some(status)) => redis_cell_numbers(status, demand),
        (ReplyFormat::RedisCell, None) => [0, demand.limit.cost_max().into(), UNKNOWN_NUMBER, -1, UNKNOWN_NUMBER],
    };
    match (demands, last) {
        ([demand], LastElement::Numbers) => replies.decision(numbers(0, demand)),
        ([demand], LastElement::Receipt(_)) => {
            let numbers = numbers(0, demand);
            replies.array(numbers.len() + 1);
            numbers.into_iter().for_each(|number| replies.integer(number));
        }
        (demands, last) => {
            replies.array(1 + demands.len() + usize::from(last != LastElement::Numbers));
            replies.integer(decision.allowed().into());
            demands.iter().enumerate().for_each(|(index, demand)| replies.decision(numbers(index, demand)));
        }
    }
    match last {
        LastElement::Numbers => {}
        LastElement::Receipt(Some(receipt)) => replies.bulk(receipt.as_bytes()),
        LastElement::Receipt(None) => replies.null(),
    }
}

fn tidegate_numbers(status: &LimitStatus) -> [i64; 5] {
    let ms = |wait: tidegate::Wait| wait.as_millis_ceil().map_or(-1, saturating);
    [
        i64::from(status.allowed),
        status.quota.into(),
        status.remaining.into(),
        ms(status.retry_after),
        ms(status.reset_after),
    ]
}

fn redis_cell_numbers(status: &LimitStatus, demand: &Demand<'_>) -> [i64; 5] {
    let secs = |wait: tidegate::Wait| wait.as_secs_ceil().map_or(-1, saturating);
    let retry_after = if status.allowed { -1 } else { secs(status.retry_after) };
    let capacity = demand.limit.cost_max().into();
    [i64::from(!status.allowed), capacity, status.remaining.into(), retry_after, secs(status.reset_after)]
}

/// Returns a number of a reply. One that is too large becomes the largest.
pub(super) fn saturating(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
