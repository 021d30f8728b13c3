//! Encodes checks, refunds and redemptions as calls of the script.
//!
//! A step is encoded by the calling task before it enters the queue; the worker only concatenates steps. Two steps are
//! the same check exactly if their bytes are equal. The worker merges equal steps into one with a repeat count.

use smallvec::SmallVec;
use tidegate_core::algorithm::PastCharge;
use tidegate_core::{Check, Cost, Decision, Demand, Limit, Redemption, Scope, Timestamp};

use crate::key::{Prefix, SubjectKeys};
use crate::worker::Sharing;

/// One check, refund or redemption, encoded as keys and arguments of the script.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Step {
    /// Bulk strings: the ban keys or the key of the receipt, then a key per limit.
    keys: Vec<u8>,
    /// The length of the ban keys, or of the key of the receipt, in `keys`, in bytes.
    bytes_before_counters: usize,
    /// The number of keys, with the ban keys or the key of the receipt.
    key_count: usize,
    /// Bulk strings: the arguments after the head.
    arguments: Vec<u8>,
    argument_count: usize,
    /// The number of ban keys.
    ban_count: usize,
    /// The receipt of a redemption: the time at which it expires, and its number in its block. `None` for a check or a
    /// refund.
    receipt: Option<(Timestamp, u64)>,
    /// The quota and cost of each limit, which the reply does not repeat.
    pub(crate) asked: SmallVec<[QuotaAndCost; 2]>,
}

/// The quota of one limit of a step, and the units that the step charges or gives back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QuotaAndCost {
    pub(crate) quota: u32,
    pub(crate) cost: u32,
}

impl Step {
    /// Encodes a check. With `reads_bans`, the script also reads the ban on each subject, unless all costs are 0.
    pub(crate) fn check(check: &Check<'_>, prefix: &Prefix, reads_bans: bool) -> Step {
        let mut step = Step::empty();
        let mut subjects: SmallVec<[(&[u8], SubjectKeys); 2]> = SmallVec::new();
        for subject in check.demands().iter().map(|demand| demand.key.subject()) {
            if subjects.iter().all(|(known, _)| *known != subject) {
                subjects.push((subject, prefix.of_subject(subject)));
            }
        }
        if reads_bans && check.charges() {
            subjects.iter_mut().for_each(|(_, keys)| step.push_key(keys.ban()));
            (step.ban_count, step.bytes_before_counters) = (subjects.len(), step.keys.len());
        }
        for demand in check.demands() {
            let of_subject = subjects.iter_mut().filter(|(subject, _)| *subject == demand.key.subject());
            of_subject.for_each(|(_, keys)| step.push_key(keys.counter(demand)));
            step.push_argument(&limit_line(demand));
            step.asked.push(QuotaAndCost { quota: demand.limit.quota(), cost: demand.cost.units() });
        }
        step
    }

    /// Encodes the refund of `decision`, which must be the decision of `check`.
    ///
    /// Limits with cost 0 are left out. Returns `None` if no limit is left, or if the decision is a denial.
    pub(crate) fn refund(check: &Check<'_>, decision: &Decision, prefix: &Prefix) -> Option<Step> {
        let mut step = Step::empty();
        step.push_refund(check, decision, prefix);
        (!step.asked.is_empty()).then_some(step)
    }

    /// Encodes a redemption. Limits with cost 0 are left out.
    pub(crate) fn redemption(redemption: &Redemption<'_>, prefix: &Prefix) -> Step {
        let (key, number) = prefix.receipt(redemption.subject, redemption.id);
        let mut step = Step { receipt: Some((redemption.until, number)), ..Step::empty() };
        step.push_key(&key);
        step.bytes_before_counters = step.keys.len();
        if let Some((check, decision)) = &redemption.refund {
            step.push_refund(check, decision, prefix);
        }
        for demand in redemption.charged_demands().filter(|demand| demand.cost != Cost::PEEK) {
            step.push_correction(&demand, "charge", prefix);
        }
        step
    }

    fn empty() -> Step {
        Step {
            keys: Vec::with_capacity(96),
            bytes_before_counters: 0,
            key_count: 0,
            arguments: Vec::with_capacity(64),
            argument_count: 0,
            ban_count: 0,
            receipt: None,
            asked: SmallVec::new(),
        }
    }

    /// Appends each limit of which `decision` charged units. Appends nothing if the decision is a denial.
    fn push_refund(&mut self, check: &Check<'_>, decision: &Decision, prefix: &Prefix) {
        if !decision.allowed() {
            return;
        }
        for (demand, status) in check.demands().iter().zip(&decision.limits) {
            if let Some(receipt) = PastCharge::of(decision.at, status) {
                let PastCharge { at, reset_after_us, refunded_before, .. } = receipt;
                let charged = format!("{} {reset_after_us} {refunded_before}", at.as_micros());
                self.push_correction(&demand.cost(receipt.units), &charged, prefix);
            }
        }
    }

    /// Appends a limit of a refund or redemption, with the line that follows its limit line.
    fn push_correction(&mut self, demand: &Demand<'_>, second_line: &str, prefix: &Prefix) {
        self.push_key(&prefix.counter(demand));
        self.push_argument(&limit_line(demand));
        self.push_argument(second_line);
        self.asked.push(QuotaAndCost { quota: demand.limit.quota(), cost: demand.cost.units() });
    }

    fn push_key(&mut self, key: &str) {
        push_bulk(&mut self.keys, key.as_bytes());
        self.key_count += 1;
    }

    fn push_argument(&mut self, argument: &str) {
        push_bulk(&mut self.arguments, argument.as_bytes());
        self.argument_count += 1;
    }

    /// Returns the encoded keys of the counters, without the ban keys or the key of the receipt.
    ///
    /// Steps with one limit each may be sorted by this: they affect each other only if they use the same counter, and a
    /// stable sort keeps the order of those. Ban keys are left out, because not every step on a counter reads them.
    pub(crate) fn counter_keys(&self) -> &[u8] {
        &self.keys[self.bytes_before_counters..]
    }

    /// Returns whether the step is a redemption.
    pub(crate) fn is_redemption(&self) -> bool {
        self.receipt.is_some()
    }

    /// Returns whether the step has exactly one limit.
    pub(crate) fn has_one_limit(&self) -> bool {
        self.asked.len() == 1
    }

    /// Returns whether the step must be sent with its [head](Step::head).
    ///
    /// A check of one limit without ban keys, decided once, is its limit line alone.
    fn needs_head(&self, verb: &str, repeat: usize) -> bool {
        verb != "check" || repeat > 1 || self.ban_count > 0 || !self.has_one_limit()
    }

    /// Returns the first argument of the step, such as `check 2 1 5` or `refund 2`.
    ///
    /// The numbers of a check are those of its limits and ban keys, and `repeat`. The numbers of a refund are that of its
    /// limits and, in a redemption, the time at which the receipt expires and its number in its block; `repeat` is
    /// ignored.
    fn head(&self, verb: &str, repeat: usize) -> String {
        match (verb, self.receipt) {
            ("check", _) => format!("check {} {} {repeat}", self.asked.len(), self.ban_count),
            (verb, None) => format!("{verb} {}", self.asked.len()),
            (verb, Some((until, number))) => format!("{verb} {} {} {number}", self.asked.len(), until.as_micros()),
        }
    }
}

/// Encodes a limit and its cost as a *limit line* of the script, such as `sliding 100 60000000 1 window=fixed`.
///
/// The numbers are the quota, the window in microseconds, and the cost. Options follow only where they differ from the
/// default. `window=fixed` marks a key of [`Scope::Explicit`], whose window cannot change.
fn limit_line(demand: &Demand<'_>) -> String {
    let limit: &Limit = &demand.limit;
    let (quota, window_us) = (limit.quota(), limit.window_us());
    let mut line = format!("{} {quota} {window_us} {}", limit.algorithm().as_str(), demand.cost.units());
    for (option, capacity) in [("burst", limit.burst()), ("queue", limit.queue())] {
        if let Some(capacity) = capacity.filter(|&capacity| capacity != quota) {
            line.push_str(&format!(" {option}={capacity}"));
        }
    }
    if limit.count_denied() {
        line.push_str(" count_denied=1");
    }
    if demand.key.scope() == Scope::Explicit {
        line.push_str(" window=fixed");
    }
    line
}

/// How a call refers to the script: by its SHA-1 or by its source.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Script<'a> {
    /// The SHA-1 in hex, for `EVALSHA`. The server must have the script cached.
    Sha(&'a str),
    /// The source, for `EVAL`. The server then caches the script.
    Source(&'a str),
}

/// Encodes a call of the script, an `EVALSHA` or `EVAL` command, that runs each step the given number of times.
///
/// `verb` is `check` or `refund`, and must be that of all steps. A refund always runs once. The script decides at the
/// time `now`, or by the server's clock if `None`.
///
/// Keys that share a call by [`Sharing::Node`] are passed as arguments, before the others. They may be in any slots that
/// the node owns. Otherwise they are passed as keys. Then in a cluster, all of them must be in one slot, and a node that
/// does not own it redirects the call.
pub(crate) fn encode_call(
    script: Script<'_>,
    now: Option<Timestamp>,
    verb: &str,
    steps: &[(&Step, usize)],
    sharing: Sharing,
) -> Vec<u8> {
    let passes_arguments = sharing == Sharing::Node;
    let key_count: usize = steps.iter().map(|(step, _)| step.key_count).sum();
    let argument_count: usize =
        steps.iter().map(|(step, repeat)| usize::from(step.needs_head(verb, *repeat)) + step.argument_count).sum();
    let bytes: usize = steps.iter().map(|(step, _)| step.keys.len() + step.arguments.len() + 32).sum();
    let (command, script) = match script {
        Script::Sha(sha) => ("EVALSHA", sha),
        Script::Source(text) => ("EVAL", text),
    };
    let mut out = Vec::with_capacity(bytes + script.len() + 96);
    push_length(&mut out, b'*', 3 + usize::from(passes_arguments) + key_count + 1 + argument_count);
    push_bulk(&mut out, command.as_bytes());
    push_bulk(&mut out, script.as_bytes());
    if passes_arguments {
        push_bulk(&mut out, b"0");
        push_bulk(&mut out, format!("keys {key_count}").as_bytes());
    } else {
        push_bulk(&mut out, itoa::Buffer::new().format(key_count).as_bytes());
    }
    for (step, _) in steps {
        out.extend_from_slice(&step.keys);
    }
    match now {
        Some(now) => push_bulk(&mut out, itoa::Buffer::new().format(now.as_micros()).as_bytes()),
        None => push_bulk(&mut out, b""),
    }
    for &(step, repeat) in steps {
        if step.needs_head(verb, repeat) {
            push_bulk(&mut out, step.head(verb, repeat).as_bytes());
        }
        out.extend_from_slice(&step.arguments);
    }
    out
}

/// Appends a command, given by its name and its arguments, to `out`: a RESP list of bulk strings.
pub(crate) fn push_command(out: &mut Vec<u8>, parts: &[impl AsRef<[u8]>]) {
    push_length(out, b'*', parts.len());
    for part in parts {
        push_bulk(out, part.as_ref());
    }
}

/// Appends `bytes` as a RESP bulk string.
fn push_bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    push_length(out, b'$', bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Appends the line with which a list (`*`) or a bulk string (`$`) begins: `kind`, the length, CRLF.
fn push_length(out: &mut Vec<u8>, kind: u8, length: usize) {
    out.push(kind);
    out.extend_from_slice(itoa::Buffer::new().format(length).as_bytes());
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::{Key, LimitStatus, ReceiptId, Source, Wait};

    fn line_of(limit: &str, cost: u32) -> String {
        let demand = Demand::new(limit.parse().unwrap(), Key::new("k").unwrap()).cost(Cost::new(cost));
        limit_line(&demand)
    }

    #[test]
    fn limit_line_has_all_fields_of_the_script_contract() {
        assert_eq!(line_of("100/min", 1), "sliding 100 60000000 1 window=fixed");
        assert_eq!(line_of("100/s token-bucket burst=20", 3), "token-bucket 100 1000000 3 burst=20 window=fixed");
        assert_eq!(line_of("7/500ms leaky-bucket queue=9", 0), "leaky-bucket 7 500000 0 queue=9 window=fixed");
        let rule = Key::scoped("k", Scope::rule("r", "l")).unwrap();
        let limit: Limit = "5/h fixed-window".parse::<Limit>().unwrap().with_count_denied(true);
        assert_eq!(limit_line(&Demand::new(limit, rule)), "fixed-window 5 3600000000 1 count_denied=1");
    }

    #[test]
    fn call_is_one_command_with_all_keys_first() {
        let demand = Demand::new("2/s".parse().unwrap(), Key::new("k").unwrap());
        let step = Step::check(&Check::one(&demand), &Prefix::new("p").unwrap(), true);
        let (sha, now) = (Script::Sha("sha"), Some(Timestamp::from_micros(7)));
        let call = encode_call(sha, now, "check", &[(&step, 3)], Sharing::Slot(0));
        let words: Vec<&str> = std::str::from_utf8(&call).unwrap().split("\r\n").skip(2).step_by(2).collect();
        let keys = ["p:tg2:{k}:ban", "p:tg2:{k}:sliding:1000000"];
        let expected =
            ["EVALSHA", "sha", "2", keys[0], keys[1], "7", "check 1 1 3", "sliding 2 1000000 1 window=fixed"];
        assert_eq!(words, expected);
        assert!(call.starts_with(b"*8\r\n"));
        let call = encode_call(sha, now, "check", &[(&step, 3)], Sharing::Node);
        let words: Vec<&str> = std::str::from_utf8(&call).unwrap().split("\r\n").skip(2).step_by(2).collect();
        assert_eq!(words, [&["EVALSHA", "sha", "0", "keys 2"], &expected[3..]].concat());
        assert!(call.starts_with(b"*9\r\n"));
    }

    #[test]
    fn redemption_has_the_key_of_its_receipt_first_and_two_lines_per_limit() {
        let demand = |limit: &str| Demand::new(limit.parse().unwrap(), Key::new("k").unwrap());
        let (unused, over) = (demand("9/s").cost(5), [demand("7/s token-bucket").cost(2), demand("7/min").cost(0)]);
        let (refund, charge) = (Check::one(&unused), Check::new(&over).unwrap());
        let (prefix, id) = (Prefix::new("p").unwrap(), ReceiptId::new(0xab, 1_027));
        let status = LimitStatus {
            allowed: true,
            cost: 3,
            quota: 9,
            remaining: 4,
            retry_after: Wait::ZERO,
            next_after: Wait::ZERO,
            reset_after: Wait::from_micros(1_000_000),
            late_us: 0,
            refunded_before: 41,
        };
        let limits = [status].into_iter().collect();
        let decision = Decision::new(Timestamp::from_micros(5), Source::Store, limits);
        let marks = Redemption::new(id, b"k", Timestamp::from_micros(77));
        let both = Step::redemption(&marks.refund(refund, &decision).charge(charge), &prefix);
        let only_marks = Step::redemption(&marks, &prefix);
        let call = encode_call(Script::Sha("sha"), None, "refund", &[(&both, 1), (&only_marks, 1)], Sharing::Slot(0));
        let words: Vec<&str> = std::str::from_utf8(&call).unwrap().split("\r\n").skip(2).step_by(2).collect();
        let receipt = "p:tg2:{k}:receipts:00000000000000ab:1";
        let keys = [receipt, "p:tg2:{k}:sliding:1000000", "p:tg2:{k}:token-bucket:1000000", receipt];
        let lines = ["sliding 9 1000000 3 window=fixed", "token-bucket 7 1000000 2 count_denied=1 window=fixed"];
        let arguments = ["", "refund 2 77 3", lines[0], "5 1000000 41", lines[1], "charge", "refund 0 77 3"];
        assert_eq!(words, [&["EVALSHA", "sha", "4"][..], &keys, &arguments].concat());
    }
}
