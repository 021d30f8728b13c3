//! The trait that every store of counters implements.
//!
//! **Contract.** `decide` decides the checks of a batch in order, each all or nothing, by the store's own clock. A
//! denial is an `Ok`. After an `Err`, the checks may or may not have been charged, unless
//! [`StoreError::is_unexecuted`] is true. Only then may the caller retry; otherwise a failure policy must decide.
//! Dropping the future discards the decisions, but the checks may still be charged.
//!
//! **Atomicity.** A check is decided as if no other check ran at the same time. A store whose counters are on several
//! servers can guarantee this only for counters of one subject, and says so with [`Store::atomicity`].
//!
//! **Shards.** A store may have several servers, each with some of the counters. [`Store::locate`] returns the server of a
//! subject, so that a caller can watch the health of each server by itself: one that is down does not affect the counters
//! of the others.
//!
//! **Errors of a batch.** `decide` fails as a whole if the store cannot decide one of the checks, and the decisions of
//! the others are lost. `decide_each` returns one result per check. A caller that decides for several requests in one
//! call should use it.
//!
//! **Instances.** While the store does not answer, each instance that shares it enforces its part of a quota. So that
//! they know how many they are, instances announce themselves in the store at intervals, with [`Store::announce`].

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

#[cfg(doc)]
use crate::ban_list::BAN_LIST_MAX;
use crate::ban_list::{BAN_ENTRY_BYTES_MAX, BanListing};
use crate::check::{Check, DEMANDS_MAX, Demand};
use crate::decision::{Decision, LimitStatus, Wait};
use crate::preview::Preview;
use crate::redemption::{Redeemed, Redemption};

/// The future that a store returns. It is boxed, so that a store can be chosen at run time.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// A store of counters, in process memory or on a server, that decides checks by its own clock.
///
/// A denial is a decision, so it is `Ok`. After an error, the checks may or may not have been charged, unless
/// [`StoreError::is_unexecuted`] is true. Only then may the caller retry. Dropping a future discards its result, but
/// the checks may still be charged.
pub trait Store: Send + Sync {
    /// Decides the checks one after the other, and returns one decision per check, in the same order.
    ///
    /// Each check is charged as a whole or not at all; see [`Store::atomicity`]. A denied check charges only limits
    /// with `count_denied`. An error applies to the whole batch, although some of its checks may have been charged.
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>>;

    /// Decides the checks and returns one result per check, in the same order.
    ///
    /// An inner error concerns its own check alone; the outer error concerns all of them. The default implementation
    /// calls [`Store::decide`] and therefore returns no inner errors.
    fn decide_each<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Result<Decision, StoreError>>> {
        Box::pin(async move { Ok(self.decide(checks).await?.into_iter().map(Ok).collect()) })
    }

    /// Refunds the units that `decision` charged, as far as they still count.
    ///
    /// `check` must be the check that was decided, and `decision` the result of this store. A denied decision, or one
    /// without limit statuses, refunds nothing. The store does not detect a second refund of the same decision; the
    /// caller must refund at most once, or use [`Store::redeem`].
    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()>;

    /// Refunds and charges units as `redemption` says, unless its id was used before or is expired.
    ///
    /// Any number of callers may redeem one id, at the same time and on all instances that share the store: exactly one
    /// of them gets [`Redeemed::Done`]. The id is marked as used in the same step in which the units are refunded and
    /// charged. With [`Redeemed::AlreadyUsed`] and [`Redeemed::Expired`] nothing changes. After an error, the caller
    /// may call again with the same redemption, whatever the kind of the error. If the first call was executed, the
    /// second one returns `AlreadyUsed`.
    ///
    /// The default implementation returns an error of the kind [`StoreErrorKind::Forbidden`]: the store does not
    /// support receipts.
    fn redeem<'a>(&'a self, redemption: &'a Redemption<'a>) -> StoreFuture<'a, Redeemed> {
        let _ = redemption;
        let error = StoreError::new(StoreErrorKind::Forbidden, "this store does not support receipts");
        Box::pin(std::future::ready(Err(error)))
    }

    /// Deletes the counter of `demand`, as if its key had never been used.
    ///
    /// The cost is ignored. A ban on the subject stays.
    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()>;

    /// Returns the current status of the counter of `demand` without changing it.
    ///
    /// The cost is ignored: the status is that of a peek (cost 0), which is always allowed, even if the subject is
    /// banned.
    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus>;

    /// Returns the decision that a check would get at the moment, and charges nothing, not even limits with
    /// `count_denied`.
    ///
    /// Each status tells whether its limit alone has room for the cost, and has the units that are left without the
    /// charge. The decision is an admission if all limits have room; then [`Store::decide`] would admit the check.
    ///
    /// The default implementation decides a [`Preview`]. It returns an error of the kind [`StoreErrorKind::Protocol`] if
    /// the store returns the wrong number of results.
    fn preview<'a>(&'a self, check: &'a Check<'a>) -> StoreFuture<'a, Decision> {
        Box::pin(async move {
            let wrong_number =
                || StoreError::new(StoreErrorKind::Protocol, "the store returned the wrong number of results");
            if !check.charges() {
                // A peek, which no ban refuses.
                return self.decide(&[*check]).await?.pop().ok_or_else(wrong_number);
            }
            let previews: Vec<Preview<'_>> = check.demands().chunks(DEMANDS_MAX - 1).map(Preview::of).collect();
            let checks: Vec<Check<'_>> = previews.iter().map(Preview::check).collect();
            let denied = self.decide(&checks).await?;
            Preview::combine(check, &previews, &denied).ok_or_else(wrong_number)
        })
    }

    /// Returns what the store decides atomically: a whole check, or only the demands of one subject.
    ///
    /// The value must not change during the life of the store. The default implementation returns [`Atomicity::Check`].
    fn atomicity(&self) -> Atomicity {
        Atomicity::Check
    }

    /// Returns where the counters of `subject` are at the moment. Does no I/O.
    ///
    /// A store with [`Atomicity::Subject`] decides a check atomically if all its subjects are in one partition. The shard
    /// may change at any time, the partition of a subject never. A caller that knows the partition of a check passes it on
    /// with [`Check::in_partition`]. The default implementation returns the same location for all subjects, for a store on
    /// one server.
    fn locate(&self, subject: &[u8]) -> Location {
        let _ = subject;
        Location::default()
    }

    /// Returns the servers that hold counters at the moment. Does no I/O.
    ///
    /// The default implementation returns one shard with the address of the store.
    fn shards(&self) -> Vec<Shard> {
        vec![Shard { id: ShardId::default(), address: self.address() }]
    }

    /// Returns the number of times that another server has replaced the one with the counters since the store was
    /// built. Does no I/O.
    ///
    /// The default implementation returns 0, for a store whose servers do not change.
    fn failovers(&self) -> u64 {
        0
    }

    /// Makes a decision on a counter that is used for nothing else, and that is on the server `shard`.
    ///
    /// Completes without an error if the server can decide and write, or if it holds no counters any more. The default
    /// implementation decides [`Demand::probe`].
    fn probe(&self, shard: ShardId) -> StoreFuture<'_, ()> {
        let _ = shard;
        Box::pin(async {
            let demand = Demand::probe();
            let decisions = self.decide(&[Check::one(&demand)]).await?;
            match &decisions[..] {
                [decision] if decision.limits.len() == 1 => Ok(()),
                _ => Err(StoreError::new(StoreErrorKind::Protocol, "the store returned the wrong number of results")),
            }
        })
    }

    /// Bans `subject` for `duration`, or permanently if `None`. A new ban replaces an earlier one of the subject.
    ///
    /// Until the ban ends, every check that counts the subject is refused with [`Decision::ban`] set, on every instance
    /// that shares the store and reads bans, and nothing is charged. A check whose costs are all 0 is not refused. The
    /// default implementation returns an error of the kind [`StoreErrorKind::Forbidden`]: the store does not support
    /// bans.
    fn ban<'a>(&'a self, subject: &'a [u8], duration: Option<Duration>) -> StoreFuture<'a, ()> {
        let _ = (subject, duration);
        Box::pin(std::future::ready(Err(StoreError::without_bans())))
    }

    /// Lifts the ban on `subject`. Returns whether it was banned.
    ///
    /// The default implementation returns an error of the kind [`StoreErrorKind::Forbidden`].
    fn unban<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, bool> {
        let _ = subject;
        Box::pin(std::future::ready(Err(StoreError::without_bans())))
    }

    /// Returns the time until the ban on `subject` ends, [`Wait::NEVER`] if it is permanent, or `None` if there is
    /// none.
    ///
    /// The default implementation returns an error of the kind [`StoreErrorKind::Forbidden`].
    fn ban_of<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, Option<Wait>> {
        let _ = subject;
        Box::pin(std::future::ready(Err(StoreError::without_bans())))
    }

    /// Adds an entry to the ban list for `duration`, or permanently if `None`. Replaces an earlier entry with this text.
    ///
    /// The ban list is one list for all instances that share the store. Unlike [`Store::ban`], an entry refuses nothing
    /// by itself: the engines read the list and match their requests with it. What an entry means is up to them.
    ///
    /// Returns `false`, and changes nothing, if the list already has [`BAN_LIST_MAX`] other entries. An entry has at most
    /// [`BAN_ENTRY_BYTES_MAX`] bytes; a longer one is an error of the kind [`StoreErrorKind::Forbidden`]. The default
    /// implementation returns such an error, too: the store does not support bans.
    fn list_ban<'a>(&'a self, entry: &'a str, duration: Option<Duration>) -> StoreFuture<'a, bool> {
        let _ = (entry, duration);
        Box::pin(std::future::ready(Err(StoreError::without_bans())))
    }

    /// Removes an entry from the ban list. Returns whether the list had it and it had not ended.
    ///
    /// The default implementation returns an error of the kind [`StoreErrorKind::Forbidden`].
    fn unlist_ban<'a>(&'a self, entry: &'a str) -> StoreFuture<'a, bool> {
        let _ = entry;
        Box::pin(std::future::ready(Err(StoreError::without_bans())))
    }

    /// Returns the ban list, or `None` if its version is `known`, the [version](BanListing::version) of an earlier
    /// result.
    ///
    /// The default implementation returns an empty list.
    fn listed_bans(&self, known: Option<u64>) -> StoreFuture<'_, Option<BanListing>> {
        let listing = BanListing::default();
        Box::pin(std::future::ready(Ok((known != Some(listing.version)).then_some(listing))))
    }

    /// Announces the instance `id`, for `lifetime` from now on by the store's clock, and counts the live instances.
    ///
    /// An instance is live until its lifetime has passed since its last announcement, or until it is
    /// [withdrawn](Store::withdraw). The caller repeats the announcement several times within the lifetime. Resolves to
    /// `None` if the store does not count instances; the caller need not call again.
    ///
    /// The default implementation returns `None`.
    fn announce(&self, id: InstanceId, lifetime: Duration) -> StoreFuture<'_, Option<LiveInstances>> {
        let _ = (id, lifetime);
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Removes the instance `id` from the live instances. Does nothing if it is not one of them.
    ///
    /// The default implementation does nothing.
    fn withdraw(&self, id: InstanceId) -> StoreFuture<'_, ()> {
        let _ = id;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Returns for how long the oldest call to the server `shard` has been waiting for its reply, or the store has been
    /// trying to connect to it. Does no I/O.
    ///
    /// `None` if no call is waiting, or if the store does not know. The default implementation returns `None`.
    fn unanswered_for(&self, shard: ShardId) -> Option<Duration> {
        let _ = shard;
        None
    }

    /// Returns the address of the store for messages to operators, such as `redis://127.0.0.1:6379`. It must not
    /// contain a user or a password.
    ///
    /// The default implementation returns `None`, for a store without an address.
    fn address(&self) -> Option<String> {
        None
    }

    /// Completes when all answers that have already arrived have been delivered to their callers.
    ///
    /// Does not wait for answers that have not arrived. A caller awaits this after its deadline and then polls its call
    /// once more: on a busy machine an answer may have arrived while the task that delivers it has not run. Use a
    /// timeout, because that task may still not run.
    ///
    /// The default implementation does nothing. That is correct for a store without a task of its own.
    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}

/// What a [`Store`] decides atomically: a whole check, or only the demands of one subject.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Atomicity {
    /// A check. It is charged as a whole or not at all, whatever subjects its demands name, and no other check sees a
    /// state in between.
    Check,
    /// The demands of a check that name the same subject.
    ///
    /// A check with one subject is decided as with [`Atomicity::Check`]. The store may reject a check with several
    /// subjects with [`StoreErrorKind::Forbidden`]. If it decides such a check, then:
    ///
    /// - it never admits more than a quota, and a denied check keeps no charge;
    /// - other checks may see units that a denied check has not refunded yet, and be denied because of them;
    /// - after an error, a part of the check may stay charged.
    Subject,
}

/// Where the counters of a subject are. See [`Store::locate`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub struct Location {
    /// The counters that can be decided together: a hash slot of a cluster, for example.
    pub partition: u32,
    /// The server that holds the partition at the moment.
    pub shard: ShardId,
}

impl Location {
    /// Creates a location.
    pub const fn new(partition: u32, shard: ShardId) -> Location {
        Location { partition, shard }
    }
}

/// The id of a server of a store, unique while the store lives. 0 for the only server of a store, and for counters whose
/// server is not known.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ShardId(u32);

impl ShardId {
    /// Creates an id.
    pub const fn new(id: u32) -> ShardId {
        ShardId(id)
    }

    /// Returns the number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// The id of an instance that shares a store with others: 64 random bits, chosen when the instance starts.
///
/// `Display` shows 16 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct InstanceId(u64);

impl InstanceId {
    /// Creates an id from 64 random bits.
    pub const fn new(id: u64) -> InstanceId {
        InstanceId(id)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The instances that share a store. See [`Store::announce`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LiveInstances {
    /// The number of live instances, including the one that was announced.
    pub count: u32,
    /// Whether the announced instance was live before this announcement.
    ///
    /// If it is `false` for an instance that has announced itself within its lifetime, the store has lost its
    /// instances, and others may be missing from the count until they announce themselves again.
    pub was_live: bool,
}

impl LiveInstances {
    /// Creates the result of an announcement.
    pub const fn new(count: u32, was_live: bool) -> LiveInstances {
        LiveInstances { count, was_live }
    }
}

/// A server of a store. See [`Store::shards`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Shard {
    /// The id that [`Store::locate`] returns for the subjects on this server.
    pub id: ShardId,
    /// The address for messages to operators, such as `redis://127.0.0.1:6379`, without user and password.
    pub address: Option<String>,
}

impl Shard {
    /// Creates the description of a server.
    pub const fn new(id: ShardId, address: Option<String>) -> Shard {
        Shard { id, address }
    }
}

/// The error of a store that could not execute a request, did not answer, or sent an unusable answer.
///
/// Its [kind](StoreError::kind) tells whether the request may have been executed.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// The kind of a [`StoreError`], which determines how a caller may react.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store cannot be reached. Nothing was executed.
    Unreachable,
    /// The store did not answer in time. The call may have been executed.
    TimedOut,
    /// The connection broke after the call was sent, or one of several calls of a request failed. The call, or another
    /// call of the request, may have been executed.
    Interrupted,
    /// The store is reachable but does not serve the request at the moment, for example because it is loading,
    /// read-only or out of memory, or because too many callers wait. Nothing was executed.
    Unavailable,
    /// The counters of the request are being moved from one server of the store to another, and cannot be decided at the
    /// moment. Nothing was executed. The servers are well: other counters are not affected.
    Relocating,
    /// The store rejects the credentials or the command, or does not support the request. Nothing was executed.
    Forbidden,
    /// The server is of a kind that cannot hold the counters of this store, such as a node of a cluster behind the URL
    /// of a single server. Nothing was executed. Retries fail until the store or the server is configured otherwise.
    Unsupported,
    /// A counter's key holds data that Tidegate did not write. Nothing was executed.
    Foreign,
    /// A counter's key holds data that Tidegate did not write. Other checks of the same call, or other calls of the
    /// same request, may have been executed.
    ForeignInPart,
    /// The store sent an invalid or unknown reply. The call may have been executed.
    Protocol,
    /// The store's own program, such as a script on the server, failed with an internal error: a bug in Tidegate. The
    /// call may have been executed.
    Script,
}

crate::__names! {
    "kind of store error" StoreErrorKind {
        Unreachable = "unreachable",
        TimedOut = "timed_out",
        Interrupted = "interrupted",
        Unavailable = "unavailable",
        Relocating = "relocating",
        Forbidden = "forbidden",
        Unsupported = "unsupported",
        Foreign = "foreign",
        ForeignInPart = "foreign_in_part",
        Protocol = "protocol",
        Script = "script",
    }
}

/// The failure policy: how a check is decided when the store does not answer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum OnFailure {
    /// Decides with this instance's share of the quota, counted in process memory. Admits the request uncounted if the
    /// memory store panics.
    #[default]
    Local,
    /// Admits the request as far as this limit is concerned. Nothing is counted, and the decision has no status for it.
    Allow,
    /// Refuses the request as unavailable, whatever the policies of its other limits are.
    Deny,
}

crate::__names! {
    "failure policy" OnFailure {
        Local = "local",
        Allow = "allow",
        Deny = "deny",
    }
}

impl StoreErrorKind {
    /// Returns whether certainly nothing was executed, so that a retry cannot charge twice.
    ///
    /// `true` for `Unreachable`, `Unavailable`, `Relocating`, `Forbidden`, `Unsupported` and `Foreign`.
    pub const fn is_unexecuted(self) -> bool {
        match self {
            StoreErrorKind::Unreachable
            | StoreErrorKind::Unavailable
            | StoreErrorKind::Relocating
            | StoreErrorKind::Forbidden
            | StoreErrorKind::Unsupported
            | StoreErrorKind::Foreign => true,
            StoreErrorKind::TimedOut
            | StoreErrorKind::Interrupted
            | StoreErrorKind::ForeignInPart
            | StoreErrorKind::Protocol
            | StoreErrorKind::Script => false,
        }
    }

    /// Returns the kind of a failure after which another part of the request may have been executed.
    ///
    /// [`StoreErrorKind::Foreign`] becomes [`StoreErrorKind::ForeignInPart`]; the other kinds that guarantee that
    /// nothing was executed become [`StoreErrorKind::Interrupted`]. The remaining kinds stay as they are.
    #[must_use]
    pub const fn in_part(self) -> StoreErrorKind {
        match self {
            StoreErrorKind::Foreign => StoreErrorKind::ForeignInPart,
            kind if kind.is_unexecuted() => StoreErrorKind::Interrupted,
            kind => kind,
        }
    }
}

impl StoreError {
    /// Creates an error. The message must not contain a key, a client's address or a secret.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> StoreError {
        StoreError { kind, message: message.into(), source: None }
    }

    /// Creates the error of a store that does not implement bans.
    fn without_bans() -> StoreError {
        StoreError::new(StoreErrorKind::Forbidden, "this store has no bans")
    }

    /// Checks that an entry of a ban list has at most [`BAN_ENTRY_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// Returns an error of the kind [`StoreErrorKind::Forbidden`] if it is longer.
    #[doc(hidden)] // for the implementations of `Store::list_ban`
    pub fn check_ban_entry(entry: &str) -> Result<(), StoreError> {
        if entry.len() <= BAN_ENTRY_BYTES_MAX {
            return Ok(());
        }
        let message = format!("an entry of the ban list has at most {BAN_ENTRY_BYTES_MAX} bytes");
        Err(StoreError::new(StoreErrorKind::Forbidden, message))
    }

    /// Sets the underlying error, which [`Error::source`](std::error::Error::source) returns.
    #[must_use]
    pub fn with_source(self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
        StoreError { source: Some(source.into()), ..self }
    }

    /// Returns the kind of the failure, which tells whether the request may have been executed.
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Returns whether certainly nothing was executed, so that a retry cannot charge twice.
    pub const fn is_unexecuted(&self) -> bool {
        self.kind.is_unexecuted()
    }

    /// Converts the error of one call into the error of a request that made several calls.
    ///
    /// Another of the calls may have been executed, so [`StoreError::is_unexecuted`] of the result is always `false`.
    /// The kind changes as in [`StoreErrorKind::in_part`]. If it changes, the message says so; the source stays.
    #[must_use]
    pub fn in_part(self) -> StoreError {
        let kind = self.kind.in_part();
        if kind == self.kind {
            return self;
        }
        let message = format!("{}; other parts of the request may have been executed", self.message);
        StoreError { kind, message, ..self }
    }

    /// Returns whether the failure may go away without intervention.
    ///
    /// `true` for the kinds `Unreachable`, `TimedOut`, `Interrupted`, `Unavailable` and `Relocating`.
    pub const fn is_transient(&self) -> bool {
        use StoreErrorKind as Kind;
        match self.kind {
            Kind::Unreachable | Kind::TimedOut | Kind::Interrupted | Kind::Unavailable | Kind::Relocating => true,
            Kind::Forbidden
            | Kind::Unsupported
            | Kind::Foreign
            | Kind::ForeignInPart
            | Kind::Protocol
            | Kind::Script => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_part_is_never_unexecuted_and_keeps_the_message() {
        use StoreErrorKind as Kind;
        for (kind, in_part) in [
            (Kind::Unreachable, Kind::Interrupted),
            (Kind::TimedOut, Kind::TimedOut),
            (Kind::Interrupted, Kind::Interrupted),
            (Kind::Unavailable, Kind::Interrupted),
            (Kind::Relocating, Kind::Interrupted),
            (Kind::Forbidden, Kind::Interrupted),
            (Kind::Unsupported, Kind::Interrupted),
            (Kind::Foreign, Kind::ForeignInPart),
            (Kind::ForeignInPart, Kind::ForeignInPart),
            (Kind::Protocol, Kind::Protocol),
            (Kind::Script, Kind::Script),
        ] {
            let error = StoreError::new(kind, "original message").in_part();
            assert_eq!(error.kind(), in_part, "{kind:?}");
            assert!(!error.is_unexecuted(), "{kind:?}");
            let report = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
            let report: String = report.map(|error| format!("{error}\n")).collect();
            assert_eq!(report.matches("original message").count(), 1, "{report}");
        }
    }
}
