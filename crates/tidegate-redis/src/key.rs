//! The names of the keys in Redis, which clients in every language must construct alike.
//!
//! ```text
//!   tidegate:tg2:{user:42}:sliding:60000000
//!   prefix   │    subject  scope
//!            state version; two versions can run side by side during a deploy
//! ```
//!
//! **The hash tag is the subject**, so that all limits of one subject are in one slot of a Cluster and can be decided
//! together. The hash tag is the text between the first `{` and the next `}`. A brace in a subject could choose the
//! slot, so braces are escaped, and a prefix must not contain any.
//!
//! **Nothing collides.** Within a part, every byte that is not printable ASCII, and `%`, `{`, `}` and space, becomes
//! `%` and two upper-case hex digits. In the parts of a scope so does `:`, because it separates them. A part whose
//! escaped form is longer than 128 bytes becomes `%h` and the SHA-256 of the original part in hex. An empty part
//! becomes `%e`. Neither can be an escape, because those have two upper-case hex digits.
//!
//! | scope | text |
//! |---|---|
//! | explicit | algorithm `:` window in µs |
//! | rule | `rule:` rule `:` limit `:` state machine (`log`, `pair`, `bucket`) |
//! | named | name `:` state machine; `throttle` is the name of `CL.THROTTLE`, `probe` that of [`Demand::probe`] |
//! | a ban on the subject | `ban` |
//! | a block of used receipts | `receipts:` stream in 16 lower-case hex digits `:` number of the block |
//!
//! Two keys have no subject: `tidegate:tg2:instances`, the set of the instances that share the store, and
//! `tidegate:tg2:bans`, the ban list.
//!
//! A name has only `a` to `z` and `-`, so no named scope has the text of another scope: an explicit one ends with
//! digits, one of a rule has three separators, a block of receipts has two, and a ban has none.
//!
//! `docs/redis-state.md` documents the layout for other languages, and `tests/key-vectors.tsv` has examples for all of
//! it.

use std::fmt::Write;

use sha2::{Digest, Sha256};
use tidegate_core::{Demand, Limit, ReceiptId, Scope, StateMachine};

use crate::acl::escape_pattern;
use crate::cluster::slot::slot_of_tag;

/// The maximum length of an escaped part; a longer part is hashed. Short enough for a list of keys to be read, long
/// enough for an address, an e-mail address or a token identifier.
const PART_BYTES_MAX: usize = 128;
const PREFIX_BYTES_MAX: usize = 64;
/// The number of receipts in a block, which is one key. A key with one used receipt takes at most 320 bytes on Redis 7.0,
/// 160 more than a key without a block would, and a full one 0.42 bytes per receipt. With 4,096, they are 800 and 0.29.
const BLOCK_RECEIPTS: u64 = 1_024;

/// The start of every key of a store: the configured prefix, the version of the state, and the `{` of the hash tag.
///
/// With the prefix `tidegate` it is `tidegate:tg2:{`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Prefix(String);

/// The keys of one subject, whose common start, such as `tidegate:tg2:{user:42}:`, is determined once.
pub(crate) struct SubjectKeys {
    key: String,
    start_bytes: usize,
}

/// The error of a key prefix that is empty, too long, or has characters that would break the layout of the keys.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "a key prefix must be 1 to {PREFIX_BYTES_MAX} printable ASCII characters without braces or spaces, found {got:?}"
)]
pub struct PrefixError {
    got: String,
}

impl Prefix {
    /// Creates the start of all keys from the configured prefix.
    ///
    /// # Errors
    /// Returns an error unless the prefix is 1 to 64 printable ASCII characters without braces and spaces.
    pub(crate) fn new(prefix: &str) -> Result<Prefix, PrefixError> {
        let is_plain = prefix.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'{' | b'}'));
        if prefix.is_empty() || prefix.len() > PREFIX_BYTES_MAX || !is_plain {
            return Err(PrefixError { got: prefix.into() });
        }
        Ok(Prefix(format!("{prefix}:tg2:{{")))
    }

    /// Returns the pattern of all keys, for the rules of a Redis user: `tidegate:tg2:*`.
    pub(crate) fn key_pattern(&self) -> String {
        escape_pattern(self.0.trim_end_matches('{')) + "*"
    }

    /// Returns the Redis key of the counter that `demand` charges, such as `tidegate:tg2:{user:42}:sliding:60000000`.
    pub(crate) fn counter(&self, demand: &Demand<'_>) -> String {
        self.of_subject(demand.key.subject()).counter(demand).to_owned()
    }

    /// Returns the Redis key of a subject's ban, such as `tidegate:tg2:{user:42}:ban`.
    pub(crate) fn ban(&self, subject: &[u8]) -> String {
        self.of_subject(subject).ban().to_owned()
    }

    /// Returns the Redis key of the ban list, such as `tidegate:tg2:bans`. It has no hash tag, because no counter is
    /// decided together with it.
    pub(crate) fn ban_list(&self) -> String {
        self.0.trim_end_matches('{').to_owned() + "bans"
    }

    /// Returns the place of a used receipt: the Redis key of its block, such as
    /// `tidegate:tg2:{user:42}:receipts:000000000000000f:0`, beside the counters of the subject, and its number in it.
    ///
    /// The receipt is used while the bit with this number is set.
    pub(crate) fn receipt(&self, subject: &[u8], id: ReceiptId) -> (String, u64) {
        let SubjectKeys { mut key, .. } = self.of_subject(subject);
        let (block, number) = (id.sequence() / BLOCK_RECEIPTS, id.sequence() % BLOCK_RECEIPTS);
        // Writing to a String cannot fail.
        let _ = write!(key, "receipts:{:016x}:{block}", id.stream());
        (key, number)
    }

    /// Returns the Redis key of the instances that share the store, such as `tidegate:tg2:instances`.
    ///
    /// It has no hash tag, so different prefixes have their instances in different slots.
    pub(crate) fn instances(&self) -> String {
        format!("{}instances", self.0.trim_end_matches('{'))
    }

    /// Returns the hash slot of all keys of a subject, which does not depend on the prefix.
    pub(crate) fn slot(subject: &[u8]) -> u16 {
        let mut tag = String::with_capacity(subject.len());
        push_part(&mut tag, subject, false);
        slot_of_tag(tag.as_bytes())
    }

    /// Returns the keys of a subject.
    pub(crate) fn of_subject(&self, subject: &[u8]) -> SubjectKeys {
        let mut key = String::with_capacity(self.0.len() + subject.len() + 32);
        key.push_str(&self.0);
        push_part(&mut key, subject, false);
        key.push_str("}:");
        SubjectKeys { start_bytes: key.len(), key }
    }
}

impl SubjectKeys {
    /// Returns the Redis key of the counter that `demand` charges, whose subject must be this one.
    ///
    /// The key has the subject and the scope. In [`Scope::Explicit`] it also has the algorithm and the window, in other
    /// scopes the state machine. Quota and cost are not part of it.
    pub(crate) fn counter(&mut self, demand: &Demand<'_>) -> &str {
        let (key, limit) = (&mut self.key, &demand.limit);
        key.truncate(self.start_bytes);
        match demand.key.scope() {
            Scope::Rule(scope) => {
                key.push_str("rule:");
                push_part(key, scope.rule().as_bytes(), true);
                key.push(':');
                push_part(key, scope.limit().as_bytes(), true);
                key.push(':');
                key.push_str(machine_name(limit));
            }
            Scope::Named(name) => {
                key.push_str(name.as_str());
                key.push(':');
                key.push_str(machine_name(limit));
            }
            Scope::Explicit => {
                key.push_str(limit.algorithm().as_str());
                key.push(':');
                key.push_str(itoa::Buffer::new().format(limit.window_us()));
            }
        }
        key
    }

    /// Returns the Redis key of the subject's ban. The subject is banned while this key exists, whatever its value.
    pub(crate) fn ban(&mut self) -> &str {
        self.key.truncate(self.start_bytes);
        self.key.push_str("ban");
        &self.key
    }
}

/// Returns the name of the limit's state machine in keys: `log`, `pair` or `bucket`.
fn machine_name(limit: &Limit) -> &'static str {
    match StateMachine::of(limit) {
        StateMachine::Log => "log",
        StateMachine::Pair => "pair",
        StateMachine::Bucket => "bucket",
    }
}

/// Appends a part to a key: escaped, or `%h` and its SHA-256 if that is longer than 128 bytes, or `%e` if it is empty.
///
/// With `is_in_scope`, `:` is escaped as well.
fn push_part(key: &mut String, part: &[u8], is_in_scope: bool) {
    let is_literal =
        |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'%' | b'{' | b'}') && !(byte == b':' && is_in_scope);
    let escaped_bytes: usize = part.iter().map(|&byte| if is_literal(byte) { 1 } else { 3 }).sum();
    if part.is_empty() {
        key.push_str("%e");
    } else if escaped_bytes > PART_BYTES_MAX {
        key.push_str("%h");
        for byte in Sha256::digest(part) {
            // Writing to a String cannot fail.
            let _ = write!(key, "{byte:02x}");
        }
    } else {
        for &byte in part {
            if is_literal(byte) {
                key.push(char::from(byte));
            } else {
                let _ = write!(key, "%{byte:02X}");
            }
        }
    }
}

#[cfg(test)]
mod tests;
