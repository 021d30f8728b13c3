//! The store on one Redis or Valkey server, on a cluster, or on the master that Sentinels name.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tidegate_core::{
    Atomicity, BAN_LIST_MAX, BanListing, Check, Cost, Decision, Demand, InstanceId, LimitStatus, ListedBan,
    LiveInstances, Location, Redeemed, Redemption, Shard, ShardId, Source, Store, StoreError, StoreErrorKind as Kind,
    StoreFuture, Timestamp, Wait,
};

use crate::builder::RedisStoreBuilder;
use crate::cluster::slot::{SLOTS, slot_of_key};
use crate::fault::Fault;
use crate::node::Node;
use crate::reply::Reply;
use crate::request::{Step, push_command};
use crate::router::Router;
use crate::url::{StoreAddress, UrlError};
use crate::worker::{CallScope, Job, STEPS_MAX};
use crate::{INSTANCES_SCRIPT, server_check};

/// The script that reads and changes the ban list.
const BAN_LIST_SCRIPT: &str = include_str!("../lua/bans.lua");
/// The longest ban, some 285 years: the script counts microseconds exactly up to 2^53.
const BAN_MS_MAX: u128 = (1 << 53) / 1_000;
/// The maximum number of subjects that are tried to find one on a certain node. More than 16,384 slots need to find each.
const PROBE_SUBJECTS_MAX: u32 = 200_000;
/// The maximum number of instances that are counted. The set then takes about 100 KB, and a call of its script less than
/// a millisecond, even if the clock was set back.
const INSTANCES_MAX: u32 = 1_000;
/// Replaces a field of a hash if it has the expected value. KEYS: the hash. ARGV: the field, the expected value, the new
/// value. Returns 1 if it was replaced, else 0.
const REPLACE_HASH_FIELD: &str = "\
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1";

/// A store of counters on Redis or Valkey: on one server, on the masters of a cluster, or on the master that Sentinels
/// name. Cloning is cheap, and clones share the connections.
///
/// Any number of tasks may use it at once. Checks that wait at the same moment are sent in one call, and the next call
/// is sent before the reply to the previous one arrives. So a check takes its own round trip and about two milliseconds
/// more, or longer if 32 batches are already in flight.
///
/// The store has no failure policy. The [kind](StoreError::kind) of an error tells whether the call may have been
/// executed; the caller decides what to do.
#[derive(Clone)]
pub struct RedisStore(pub(crate) Arc<Router>);

/// Counts of a [`RedisStore`] and its clones since the store was built.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct RedisStats {
    /// The number of requests sent to the server: calls of the script and commands. A request that is resent counts
    /// again. The commands that prepare a new connection do not count.
    pub calls: u64,
    /// The number of checks sent to the server, whatever their results. A check that is resent counts once.
    pub decisions: u64,
    /// The number of attempts to connect, including failed ones.
    pub connects: u64,
    /// The number of calls that the server rejected because it did not have the script cached. They were resent.
    pub scripts_sent: u64,
    /// The number of requests that a node of a cluster did not execute because it does not own the slot, does not serve
    /// it at the moment, or does not accept keys of several slots in one call, and of requests that the old master did
    /// not execute during a failover. They were sent again, unless their callers gave up.
    pub redirections: u64,
    /// The number of times that the Sentinels named another master than before.
    pub failovers: u64,
    /// The number of panics of the store's background tasks, which are restarted. Any panic is a bug in Tidegate.
    pub panics: u64,
}

impl RedisStore {
    /// Creates a builder with the default settings for the server, the cluster or the Sentinels at `url`.
    ///
    /// The form is `redis://[user:password@]host[:port][/database]` for one server. For a cluster it is
    /// `redis+cluster://[user:password@]host[:port],host[:port],…` with some of its nodes; the others are found through
    /// them. For a master that Sentinels watch under a name it is
    /// `redis+sentinel://[user:password@]host[:port],host[:port],…/NAME[/database]` with some of the Sentinels; user
    /// and password are those of the master. `rediss://`, `rediss+cluster://` and `rediss+sentinel://` use TLS. The
    /// port defaults to 6379, that of a Sentinel to 26379, and the database to 0. The URL is validated by
    /// [`RedisStoreBuilder::build`].
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(StoreAddress::parse(&url.into()))
    }

    /// Creates a builder like [`builder`](RedisStore::builder), for an address instead of a URL.
    pub fn builder_for(address: StoreAddress) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Ok(address))
    }

    /// Checks that `url` is valid for [`RedisStore::builder`]. Does not connect, and needs no tokio runtime.
    ///
    /// # Errors
    /// Returns an error if the URL is invalid, or if it requires TLS and this crate was built without the feature
    /// `tls`. The message says what is accepted and does not contain the password.
    pub fn check_url(url: &str) -> Result<(), UrlError> {
        StoreAddress::parse(url).map(drop)
    }

    /// Returns the counts of this store and its clones since the store was built. Does no I/O.
    pub fn stats(&self) -> RedisStats {
        *self.0.settings.stats.lock()
    }

    /// Asks each server for its name, its version and its `maxmemory-policy`. For the start of a service.
    ///
    /// The report has a warning if the policy is not `noeviction`, because an evicted counter starts again at zero, or
    /// if the server does not reveal its policy. On a cluster, all masters are asked, and a warning names the node.
    ///
    /// # Errors
    /// Returns an error if `INFO` fails, if its reply has no valid version, or if the version is below Redis 7.0 or
    /// Valkey 7.2. A server in cluster mode behind the URL of a single server is an error of the store with the kind
    /// [`StoreErrorKind::Unsupported`](tidegate_core::StoreErrorKind::Unsupported), unless the store makes
    /// [one call per slot](RedisStoreBuilder::one_subject_per_call).
    pub async fn check_server(&self) -> Result<server_check::ServerReport, server_check::ServerCheckError> {
        // All sections: Redis before 7.0 accepts the name of only one, and must be detected as too old.
        server_check::combine(self.ask_masters(&["INFO"]).await?)
    }

    /// Asks each server for its eviction policy and the number of evicted keys. An evicted counter starts again at zero.
    ///
    /// On a cluster, the number is that of all masters, and the policy is one other than `noeviction` if any master has
    /// one.
    ///
    /// # Errors
    /// Returns an error if `INFO` fails, for example because the server does not answer or the user may not run it. A
    /// field that is missing in the reply is no error but `None`.
    pub async fn eviction(&self) -> Result<server_check::Eviction, StoreError> {
        let infos = self.ask_masters(&["INFO", "memory", "stats"]).await?.into_iter();
        let evictions: Result<Vec<_>, StoreError> =
            infos.map(|(_, info)| info.map(|info| server_check::Eviction::read(&info))).collect();
        Ok(server_check::Eviction::sum(evictions?))
    }

    /// Sends a command to each server that holds keys. Returns the reply of each, with the URL of the server.
    ///
    /// # Errors
    /// Returns an error if the servers are not known, because no node of the cluster, or no Sentinel, answers.
    async fn ask_masters(&self, command: &[&str]) -> Result<Vec<(String, Result<Reply, StoreError>)>, StoreError> {
        let masters = self.0.masters().await?;
        let ask = async |node: &Arc<Node>| {
            let reply = node.command(command).await;
            (node.endpoint.to_string(), reply.map_err(|fault| fault.into_error(&node.endpoint)))
        };
        Ok(join_all(masters.iter().map(ask)).await)
    }

    /// Runs one command on the connection that decisions use, and returns its reply.
    ///
    /// `parts` are the name of the command and its arguments. A service that keeps some data beside its counters needs
    /// no second client. A string in the reply may have up to 1 MiB. The command is never resent. Decisions wait while
    /// it runs, so it must not be slow or blocking (`BLPOP`). It must not change the mode of the connection
    /// (`SUBSCRIBE`, `MULTI`, `SELECT`). If the future is dropped, a command that was not sent yet is not sent.
    ///
    /// On a cluster, the command is sent to the node that owns the slot of its first argument, which must be its key.
    ///
    /// ```no_run
    /// # async fn example(store: tidegate_redis::RedisStore) -> Result<(), tidegate_core::StoreError> {
    /// store.command(&["SET", "slug:abc", "https://example.com/", "EX", "3600"]).await?;
    /// assert_eq!(store.command(&["GET", "slug:abc"]).await?.as_text(), Some("https://example.com/"));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns an error if `parts` is empty, if the command cannot be sent (too many callers wait, or the server is not
    /// reachable), if there is no valid reply within the call timeout, or if the reply is an error.
    pub async fn command(&self, parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        if parts.is_empty() {
            // A server does not reply to an empty command, and the connection would wait for the reply.
            return Err(self.error(Fault::new(Kind::Protocol, "a command must have a name")));
        }
        self.run_command(parts.get(1).map_or(&[], |key| key.as_ref()), parts).await
    }

    /// Replaces the value of a field of a Redis hash by `value`, if it is still `expected`. Returns whether it was.
    ///
    /// Returns `false`, and writes nothing, if the field has another value or does not exist. Both steps are one call on
    /// the server, so no change of another writer is lost. The call is never resent. The store's key prefix is not added
    /// to `hash`.
    ///
    /// # Errors
    /// Returns an error in the cases of [`command`](RedisStore::command). After a timeout, the field may have been
    /// replaced.
    pub async fn replace_hash_field(
        &self,
        hash: &str,
        field: &str,
        expected: &[u8],
        value: &[u8],
    ) -> Result<bool, StoreError> {
        let parts = [b"EVAL", REPLACE_HASH_FIELD.as_bytes(), b"1", hash.as_bytes(), field.as_bytes(), expected, value];
        let reply = self.run_command(hash.as_bytes(), &parts).await?;
        Ok(reply == Reply::Integer(1))
    }

    /// Sends a command to the node that owns the slot of `key`, and returns its reply.
    ///
    /// # Errors
    /// If the node does not answer, or replies with an error.
    async fn run_command(&self, key: &[u8], parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        let slot = match self.0.call_scope {
            CallScope::Server => 0,
            CallScope::Slot | CallScope::Node => slot_of_key(key),
        };
        self.run_in_slot(slot, parts).await
    }

    /// Sends a command to the node that owns a slot, and returns its reply. Errors are those of
    /// [`run_command`](Self::run_command).
    async fn run_in_slot(&self, slot: u16, parts: &[impl AsRef<[u8]>]) -> Result<Reply, StoreError> {
        let mut request = Vec::new();
        push_command(&mut request, parts);
        self.0.run_alone(slot, |waiter| Job::Command(request.clone(), waiter)).await
    }

    /// Runs the script of the ban list with these arguments.
    async fn call_ban_list(&self, arguments: &[&str]) -> Result<Reply, StoreError> {
        let key = self.0.prefix.ban_list();
        let call = ["EVAL", BAN_LIST_SCRIPT, "1", &key];
        self.run_command(key.as_bytes(), &[&call[..], arguments].concat()).await
    }

    fn error(&self, fault: Fault) -> StoreError {
        self.0.error(fault)
    }

    /// Creates the error of a check or redemption whose subjects are in several hash slots.
    fn several_slots(&self) -> StoreError {
        const MESSAGE: &str = "the subjects are in different hash slots, and cannot be counted together in one call";
        self.error(Fault::new(Kind::Forbidden, MESSAGE))
    }

    /// Creates the error of a reply that does not have the expected form.
    fn malformed_reply(&self) -> StoreError {
        self.error(Fault::new(Kind::Protocol, "the server's reply is malformed"))
    }

    /// Returns the hash slot of a check, or `None` if its subjects are in several. It is the [partition](Check::partition)
    /// of the check if the caller has set that.
    fn slot_of(&self, check: &Check<'_>) -> Option<u16> {
        match check.partition() {
            Some(partition) => u16::try_from(partition).ok().filter(|&slot| usize::from(slot) < SLOTS),
            None => self.common_slot(check.demands().iter().map(|demand| demand.key.subject())),
        }
    }

    /// Returns the hash slot of the subjects, 0 without any, or `None` if they are in several.
    fn common_slot<'s>(&self, mut subjects: impl Iterator<Item = &'s [u8]>) -> Option<u16> {
        if self.0.call_scope == CallScope::Server {
            return Some(0);
        }
        let Some(first) = subjects.next() else { return Some(0) };
        let slot = self.0.slot(first);
        subjects.all(|subject| subject == first || self.0.slot(subject) == slot).then_some(slot)
    }

    /// Decides the checks of each hash slot in calls of their own, all slots at once. Returns one result per check, in
    /// the same order.
    ///
    /// A check of several slots fails with the kind `Forbidden` and is not sent. If a call fails as a whole, all checks of
    /// its slot fail with its error.
    ///
    /// # Errors
    /// Returns an error if all checks are in one slot, and a call failed as a whole.
    async fn decide_separately(&self, checks: &[Check<'_>]) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let slots: SmallVec<[Option<u16>; 2]> = checks.iter().map(|check| self.slot_of(check)).collect();
        if slots.windows(2).all(|pair| pair[0] == pair[1]) {
            return self.decide_in_slot(slots.first().copied().flatten(), checks).await;
        }
        let mut by_slot: Vec<usize> = (0..checks.len()).collect();
        by_slot.sort_by_key(|&index| slots[index]);
        let groups: Vec<&[usize]> = by_slot.chunk_by(|&one, &other| slots[one] == slots[other]).collect();
        let decide = async |group: &&[usize]| {
            let checks: Vec<Check<'_>> = group.iter().map(|&index| checks[index]).collect();
            self.decide_in_slot(slots[group[0]], &checks).await
        };
        let decided = join_all(groups.iter().map(decide)).await;
        let mut answers: Vec<Option<Result<Decision, StoreError>>> = checks.iter().map(|_| None).collect();
        for (group, decided) in groups.iter().zip(decided) {
            match decided {
                Ok(decided) => group.iter().zip(decided).for_each(|(&at, answer)| answers[at] = Some(answer)),
                Err(error) => {
                    let (kind, message) = (error.kind(), error.to_string());
                    group.iter().for_each(|&at| answers[at] = Some(Err(StoreError::new(kind, message.clone()))));
                }
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Decides checks of one hash slot in chunks of [`STEPS_MAX`], and returns one result per check, in the same order.
    ///
    /// A chunk is sent after the one before it was decided. While the slot is being moved, the checks of a chunk are sent
    /// one after the other. Without a slot, each check has subjects in several slots and fails.
    ///
    /// # Errors
    /// Returns the error of the first chunk that failed as a whole; later chunks are not sent. If an earlier chunk was
    /// decided, the error is [in part](StoreError::in_part).
    async fn decide_in_slot(
        &self,
        slot: Option<u16>,
        checks: &[Check<'_>],
    ) -> Result<Vec<Result<Decision, StoreError>>, StoreError> {
        let Some(slot) = slot else { return Ok(checks.iter().map(|_| Err(self.several_slots())).collect()) };
        let mut answers = Vec::with_capacity(checks.len());
        for chunk in checks.chunks(STEPS_MAX) {
            let step = |check| Step::check(check, &self.0.prefix, self.0.reads_bans);
            let job = |waiter| Job::Checks(chunk.iter().map(step).collect(), waiter);
            match self.0.run_checks(slot, job).await {
                Ok(decided) => {
                    answers.extend(decided.into_iter().map(|answer| answer.map_err(|fault| self.error(fault))))
                }
                Err(error) if error.kind() == Kind::Relocating => {
                    for check in chunk {
                        answers.push(self.decide_alone(slot, check).await);
                    }
                }
                // The chunks before this one were decided and charged.
                Err(error) => return Err(if answers.is_empty() { error } else { error.in_part() }),
            }
        }
        Ok(answers)
    }

    /// Decides a check whose hash slot is being moved: the bans of its subjects first, then its limits, in calls that name
    /// as few keys as possible.
    async fn decide_alone(&self, slot: u16, check: &Check<'_>) -> Result<Decision, StoreError> {
        if self.0.reads_bans && check.charges() {
            let mut longest = None;
            for (index, demand) in check.demands().iter().enumerate() {
                let subject = demand.key.subject();
                if check.demands()[..index].iter().all(|earlier| earlier.key.subject() != subject) {
                    longest = longest.max(self.ban_of(subject).await?);
                }
            }
            if let Some(ban) = longest {
                return Ok(Decision::banned(self.server_time(slot).await?, Source::Store, ban, check));
            }
        }
        let job = |waiter| Job::Checks(vec![Step::check(check, &self.0.prefix, false)], waiter);
        let decided = self.0.run_alone(slot, job).await?.pop().ok_or_else(|| self.malformed_reply())?;
        decided.map_err(|fault| self.error(fault))
    }

    /// Returns the time by which the owner of a slot decides.
    async fn server_time(&self, slot: u16) -> Result<Timestamp, StoreError> {
        if let Some(clock) = &self.0.settings.clock {
            return Ok(clock.now());
        }
        let reply = self.run_in_slot(slot, &["TIME"]).await?;
        let part = |index: usize| reply.items().get(index)?.as_text()?.parse::<u64>().ok();
        let (Some(seconds), Some(micros)) = (part(0), part(1)) else { return Err(self.malformed_reply()) };
        Ok(Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros)))
    }

    /// Decides the checks and returns one decision per check, in the same order.
    ///
    /// # Errors
    /// Returns the first error if a check cannot be decided. If another check was decided, the error is
    /// [in part](StoreError::in_part).
    async fn decide_all(&self, checks: &[Check<'_>]) -> Result<Vec<Decision>, StoreError> {
        let answers = self.decide_separately(checks).await?;
        let is_in_part = answers.iter().any(Result::is_ok);
        let decisions: Result<Vec<Decision>, StoreError> = answers.into_iter().collect();
        decisions.map_err(|error| if is_in_part { error.in_part() } else { error })
    }
}

/// Returns the version of the ban list in the reply to `HGET`: 0 without a list, or `None` if it is not a number.
fn version_of(reply: &Reply) -> Option<u64> {
    match reply {
        Reply::Nil => Some(0),
        reply => reply.as_text()?.parse().ok(),
    }
}

/// Returns the ban list in a reply of its script, or `None` if the reply has another form.
fn ban_listing(reply: &Reply) -> Option<BanListing> {
    let [version, now, Reply::List(fields)] = reply.items() else { return None };
    let number = |reply: &Reply| reply.as_text()?.parse::<u64>().ok();
    let (version, now) = (number(version)?, number(now)?);
    let mut bans = Vec::with_capacity(fields.len() / 2);
    for pair in fields.chunks_exact(2) {
        let (entry, end) = (pair[0].as_text()?, number(&pair[1])?);
        let remaining = match end {
            0 => Wait::NEVER,
            end => Wait::from_micros(end.saturating_sub(now).saturating_mul(1_000)),
        };
        if entry != "version" && remaining != Wait::ZERO {
            bans.push(ListedBan::new(entry, remaining));
        }
    }
    Some(BanListing::new(version, bans))
}

impl Store for RedisStore {
    fn atomicity(&self) -> Atomicity {
        match self.0.call_scope {
            CallScope::Server => Atomicity::Check,
            CallScope::Slot | CallScope::Node => Atomicity::Subject,
        }
    }

    fn locate(&self, subject: &[u8]) -> Location {
        self.0.locate(subject)
    }

    fn shards(&self) -> Vec<Shard> {
        let shard = |node: &Arc<Node>| Shard::new(node.id, Some(node.endpoint.to_string()));
        self.0.topology.known_masters().iter().map(shard).collect()
    }

    /// Returns the number of times that the Sentinels named another master than before. Always 0 for one server and for
    /// a cluster.
    fn failovers(&self) -> u64 {
        self.stats().failovers
    }

    /// Probes a server with a subject whose slot it owns. The shard 0 has the slots without a known owner: for it, finds
    /// out which servers hold keys. For a server that no longer holds keys, does nothing.
    fn probe(&self, shard: ShardId) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let topology = &self.0.topology;
            if topology.known_masters().iter().all(|master| master.id != shard) {
                if shard == ShardId::default() {
                    topology.refreshed().await.map_err(|fault| self.error(fault))?;
                }
                return Ok(());
            }
            let subjects = (0..PROBE_SUBJECTS_MAX).map(|number| format!("tidegate-{number}"));
            let mut subjects = std::iter::once("tidegate".to_owned()).chain(subjects);
            let on_shard = |subject: &String| self.0.locate(subject.as_bytes()).shard == shard;
            let Some(subject) = subjects.find(on_shard) else { return Ok(()) };
            let demand = Demand::probe_of(&subject);
            self.decide_all(&[Check::one(&demand)]).await.map(drop)
        })
    }

    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(self.decide_all(checks))
    }

    fn decide_each<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Result<Decision, StoreError>>> {
        Box::pin(self.decide_separately(checks))
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let Some(step) = Step::refund(check, decision, &self.0.prefix) else { return Ok(()) };
            let slot = self.slot_of(check).ok_or_else(|| self.several_slots())?;
            self.0.run_any(slot, |waiter| Job::Refund(step.clone(), waiter)).await.map(|_done| ())
        })
    }

    /// Gives units back and charges units as `redemption` says, unless its id was used before or is expired.
    ///
    /// The used id is a bit under a key with the redemption's subject, which lives until the ids of the key expire. On a cluster,
    /// and with [one call per slot](RedisStoreBuilder::one_subject_per_call), a redemption whose subjects are in several
    /// hash slots fails with the kind `Forbidden`.
    fn redeem<'a>(&'a self, redemption: &'a Redemption<'a>) -> StoreFuture<'a, Redeemed> {
        Box::pin(async move {
            let checks = [redemption.refund.map(|(check, _)| check), redemption.charge];
            let demands = checks.iter().flatten().flat_map(|check| check.demands());
            let subjects = demands.map(|demand| demand.key.subject()).chain([redemption.subject]);
            let slot = self.common_slot(subjects).ok_or_else(|| self.several_slots())?;
            let job = |waiter| Job::Refund(Step::redemption(redemption, &self.0.prefix), waiter);
            self.0.run_any(slot, job).await
        })
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Box::pin(async move { self.command(&["DEL", &self.0.prefix.counter(demand)]).await.map(drop) })
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Box::pin(async move {
            let peek = demand.cost(Cost::PEEK);
            let decisions = self.decide_all(&[Check::one(&peek)]).await?;
            let status = decisions.first().and_then(|decision| decision.limits.first().copied());
            status.ok_or_else(|| self.malformed_reply())
        })
    }

    /// Bans `subject` for `duration`, or permanently if `None`. A new ban replaces an earlier one of the subject.
    ///
    /// Stores that read bans ([`RedisStoreBuilder::bans`]) then refuse its checks. The duration is truncated to whole
    /// milliseconds; below one, it becomes one, and above 285 years, it becomes 285 years.
    fn ban<'a>(&'a self, subject: &'a [u8], duration: Option<Duration>) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let key = self.0.prefix.ban(subject);
            let ms = duration.map(|duration| duration.as_millis().clamp(1, BAN_MS_MAX).to_string());
            match &ms {
                Some(ms) => self.command(&["SET", &key, "1", "PX", ms]).await.map(drop),
                None => self.command(&["SET", &key, "1"]).await.map(drop),
            }
        })
    }

    fn unban<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            let reply = self.command(&["DEL", &self.0.prefix.ban(subject)]).await?;
            Ok(reply == Reply::Integer(1))
        })
    }

    fn ban_of<'a>(&'a self, subject: &'a [u8]) -> StoreFuture<'a, Option<Wait>> {
        Box::pin(async move {
            match self.command(&["PTTL", &self.0.prefix.ban(subject)]).await? {
                Reply::Integer(-2) => Ok(None),
                Reply::Integer(-1) => Ok(Some(Wait::NEVER)),
                Reply::Integer(ms) => {
                    let us = u64::try_from(ms).ok().and_then(|ms| ms.checked_mul(1_000));
                    Ok(Some(us.map_or(Wait::NEVER, Wait::from_micros)))
                }
                _ => Err(StoreError::new(Kind::Protocol, "the reply to PTTL is not a number")),
            }
        })
    }

    fn list_ban<'a>(&'a self, entry: &'a str, duration: Option<Duration>) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            StoreError::check_ban_entry(entry)?;
            let ms = duration.map_or(0, |duration| duration.as_millis().clamp(1, BAN_MS_MAX)).to_string();
            let reply = self.call_ban_list(&["add", entry, &ms, &BAN_LIST_MAX.to_string()]).await?;
            Ok(reply == Reply::Integer(1))
        })
    }

    fn unlist_ban<'a>(&'a self, entry: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { Ok(self.call_ban_list(&["remove", entry]).await? == Reply::Integer(1)) })
    }

    /// Reads the version of the list, in one small call, and the list only if that is not `known`.
    fn listed_bans(&self, known: Option<u64>) -> StoreFuture<'_, Option<BanListing>> {
        Box::pin(async move {
            if known.is_some() {
                let version = self.command(&["HGET", &self.0.prefix.ban_list(), "version"]).await?;
                if version_of(&version) == known {
                    return Ok(None);
                }
            }
            let reply = self.call_ban_list(&["read"]).await?;
            ban_listing(&reply).map(Some).ok_or_else(|| self.malformed_reply())
        })
    }

    /// Announces the instance in one sorted set per key prefix, and counts the live ones, in one call by the server's
    /// clock.
    ///
    /// The set has at most 1,000 instances. While it is full, further ones are not added to it, and the count is 1,000.
    /// The set expires with its newest announcement.
    fn announce(&self, id: InstanceId, lifetime: Duration) -> StoreFuture<'_, Option<LiveInstances>> {
        Box::pin(async move {
            let (key, id) = (self.0.prefix.instances(), id.to_string());
            let (lifetime_ms, size_max) = (lifetime.as_millis().max(1).to_string(), INSTANCES_MAX.to_string());
            let now = self.0.settings.clock.as_ref().map(|clock| clock.now().as_micros() / 1_000);
            let now_ms = now.map_or_else(String::new, |ms| ms.to_string());
            let call = ["EVAL", INSTANCES_SCRIPT, "1", &key, &id, &lifetime_ms, &size_max, &now_ms];
            let reply = self.run_command(key.as_bytes(), &call).await?;
            match *reply.items() {
                [Reply::Integer(count @ 1..), Reply::Integer(was_live)] => {
                    let count = u32::try_from(count).unwrap_or(u32::MAX);
                    Ok(Some(LiveInstances::new(count, was_live == 1)))
                }
                _ => Err(self.malformed_reply()),
            }
        })
    }

    fn withdraw(&self, id: InstanceId) -> StoreFuture<'_, ()> {
        Box::pin(async move { self.command(&["ZREM", &self.0.prefix.instances(), &id.to_string()]).await.map(drop) })
    }

    fn unanswered_for(&self, shard: ShardId) -> Option<Duration> {
        let nodes = self.0.topology.nodes();
        nodes.iter().find(|node| node.id == shard).and_then(|node| node.unanswered_for())
    }

    /// Returns the URL of the server, the cluster or the Sentinels, without user and password.
    fn address(&self) -> Option<String> {
        Some(self.0.address.to_string())
    }

    fn catch_up(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let nodes = self.0.topology.nodes();
            join_all(nodes.iter().map(|node| node.catch_up())).await;
        })
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RedisStore").field(&self.0.address).finish()
    }
}
