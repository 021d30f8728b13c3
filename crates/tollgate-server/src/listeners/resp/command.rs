//! Parses commands: checks, resets, and commands about the connection.
//!
//! | command | effect |
//! |---|---|
//! | `TOLLGATE.CHECK key limit [COST n]` | a check; replies allowed, quota, remaining, retry_after_ms, reset_after_ms |
//! | `TOLLGATE.PEEK key limit` | a check of cost 0 |
//! | `TOLLGATE.RESET key limit` | deletes the counter |
//! | `CL.THROTTLE key max_burst count period [quantity]` | a check of a token bucket; replies as redis-cell does: limited, limit, remaining, retry_after, reset_after in seconds |
//! | `PING` `ECHO` `HELLO` `AUTH` `SELECT 0` `CLIENT` `COMMAND` `INFO` `QUIT` | connection setup, which clients send by themselves |
//!
//! redis-cell counts `max_burst` beyond the first request, so the capacity is `max_burst + 1`. Seconds are rounded up:
//! a client that waits 0 s would be denied again. `docs/cl-throttle.md` has examples of the replies.

use std::time::Duration;

use tollgate::{Algorithm, Cost, Decision, Demand, Key, Limit, LimitError, LimitStatus, Scope, ScopeName};

use super::frame::Args;
use super::reply::Replies;

/// The scope of `CL.THROTTLE`: like redis-cell, it has one counter per key, whatever the limit.
const THROTTLE: ScopeName = ScopeName::new("throttle");

/// A parsed command. Keys and texts are borrowed from the buffer in which it arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RespCommand<'b> {
    Check {
        demand: Demand<'b>,
        format: ReplyFormat,
    },
    Reset {
        demand: Demand<'b>,
    },
    Connection(ConnectionCommand<'b>),
    /// A blank line or an empty array, which gets no reply.
    Nothing,
    /// Not a command of this listener.
    Unknown,
}

/// The format of the reply to a check, which is an array of five numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReplyFormat {
    /// `TOLLGATE.*`: allowed (1 or 0), quota, remaining, `retry_after` and `reset_after` in milliseconds, rounded up.
    /// -1 means never.
    Tollgate,
    /// `CL.THROTTLE`: limited (1 or 0), capacity, remaining, `retry_after` and `reset_after` in seconds, rounded up, as
    /// redis-cell. A `retry_after` of -1 means that the check was allowed, or never will be.
    RedisCell,
}

/// Commands about the connection itself.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ConnectionCommand<'b> {
    Ping(Option<&'b [u8]>),
    Echo(&'b [u8]),
    Hello { protocol: Option<&'b [u8]>, password: Option<&'b [u8]> },
    Auth { password: &'b [u8] },
    Select,
    ClientOk,
    ClientId,
    ClientGetName,
    CommandCount,
    CommandList,
    CommandDocs,
    Info,
    Quit,
}

/// The last limit of each kind that a connection used: as text, and of `CL.THROTTLE`.
///
/// A client that repeats it does not cause it to be parsed again.
#[derive(Debug, Default)]
pub(crate) struct LimitCache {
    text: Vec<u8>,
    limit: Option<Limit>,
    throttle: Option<(Throttle, Limit)>,
}

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

    fn parse(&mut self, text: &[u8]) -> Result<Limit, String> {
        if let Some(limit) = self.limit.filter(|_| self.text == text) {
            return Ok(limit);
        }
        let readable = std::str::from_utf8(text).map_err(|_| "ERR limit: expected text such as 10/min".to_owned())?;
        let limit: Limit = readable.parse().map_err(|error| format!("ERR limit: {error}"))?;
        if text.len() > CACHED_TEXT_BYTES_MAX {
            return Ok(limit);
        }
        self.text.clear();
        self.text.extend_from_slice(text);
        self.limit = Some(limit);
        Ok(limit)
    }
}

/// Parses the command in `buffer` whose arguments [`parse`](super::frame::parse) has found. `Err` is the error reply.
///
/// `buffer` must be the one that was parsed into `args`. A command without arguments is [`RespCommand::Nothing`], and
/// one with an unknown name [`RespCommand::Unknown`], not an error. Limits are taken from the cache `limits`, or parsed
/// and stored there.
pub(crate) fn parse_command<'b>(
    buffer: &'b [u8],
    args: &Args,
    limits: &mut LimitCache,
) -> Result<RespCommand<'b>, String> {
    let Some(name) = args.get(buffer, 0) else { return Ok(RespCommand::Nothing) };
    let arg = |index| args.get(buffer, index);
    // Clients send upper case, so the exact comparison mostly succeeds.
    let is = |expected: &str| name == expected.as_bytes() || name.eq_ignore_ascii_case(expected.as_bytes());
    if is("TOLLGATE.CHECK") {
        let (Some(key), Some(limit)) = (arg(1), arg(2)) else { return Err(usage(CHECK_USAGE)) };
        let cost = match (arg(3), arg(4), args.len()) {
            (None, ..) => Cost::ONE,
            (Some(word), Some(cost), 5) if word.eq_ignore_ascii_case(b"COST") => Cost::new(number(cost, "cost")?),
            _ => return Err(usage(CHECK_USAGE)),
        };
        let demand = explicit(key, limits.parse(limit)?)?.cost(cost);
        return Ok(RespCommand::Check { demand, format: ReplyFormat::Tollgate });
    }
    if is("CL.THROTTLE") {
        return throttle(buffer, args, limits);
    }
    if is("TOLLGATE.PEEK") {
        let (Some(key), Some(limit), 3) = (arg(1), arg(2), args.len()) else {
            return Err(usage("TOLLGATE.PEEK key limit"));
        };
        let demand = explicit(key, limits.parse(limit)?)?.cost(Cost::PEEK);
        return Ok(RespCommand::Check { demand, format: ReplyFormat::Tollgate });
    }
    if is("TOLLGATE.RESET") {
        let (Some(key), Some(limit), 3) = (arg(1), arg(2), args.len()) else {
            return Err(usage("TOLLGATE.RESET key limit"));
        };
        return Ok(RespCommand::Reset { demand: explicit(key, limits.parse(limit)?)? });
    }
    connection_command(name, buffer, args).map(|command| command.map_or(RespCommand::Unknown, RespCommand::Connection))
}

/// Returns whether an unknown inline command is the request line of an HTTP request, or its `Host` header.
///
/// It is if its first word is an HTTP method or `Host:`, or its last one begins with `HTTP/`. A browser sends one of
/// them first when a web page makes it send a request to this port.
pub(crate) fn is_http(buffer: &[u8], args: &Args) -> bool {
    const METHODS: [&[u8]; 9] =
        [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"CONNECT", b"TRACE"];
    let first = args.get(buffer, 0).unwrap_or_default();
    let last = args.get(buffer, args.len().saturating_sub(1)).unwrap_or_default();
    METHODS.iter().any(|method| method.eq_ignore_ascii_case(first))
        || first.eq_ignore_ascii_case(b"Host:")
        || last.starts_with(b"HTTP/")
}

/// The error reply to [`RespCommand::Unknown`].
pub(crate) const UNKNOWN: &str = "ERR unknown command; expected TOLLGATE.CHECK, TOLLGATE.PEEK, TOLLGATE.RESET, CL.THROTTLE, PING, ECHO, HELLO, AUTH, SELECT, CLIENT, COMMAND, INFO or QUIT";
const CHECK_USAGE: &str = "TOLLGATE.CHECK key limit [COST n]";
const THROTTLE_USAGE: &str = "CL.THROTTLE key max_burst count period [quantity]";

fn usage(usage: &str) -> String {
    format!("ERR wrong arguments, expected {usage}")
}

fn explicit(key: &[u8], limit: Limit) -> Result<Demand<'_>, String> {
    let key = Key::new(key).map_err(|error| format!("ERR {error}"))?;
    Ok(Demand::new(limit, key))
}

fn throttle<'b>(buffer: &'b [u8], args: &Args, limits: &mut LimitCache) -> Result<RespCommand<'b>, String> {
    let arg = |index| args.get(buffer, index);
    let (Some(key), Some(max_burst), Some(count), Some(period), 5..=6) = (arg(1), arg(2), arg(3), arg(4), args.len())
    else {
        return Err(usage(THROTTLE_USAGE));
    };
    let max_burst = number(max_burst, "max_burst")?;
    let count = number(count, "count")?;
    let period_s = number(period, "period")?;
    let quantity = arg(5).map_or(Ok(1), |quantity| number(quantity, "quantity"))?;
    let limit = limits.throttle(Throttle { max_burst, count, period_s })?;
    let key = Key::scoped(key, Scope::Named(THROTTLE)).map_err(|error| format!("ERR {error}"))?;
    Ok(RespCommand::Check { demand: Demand::new(limit, key).cost(quantity), format: ReplyFormat::RedisCell })
}

fn number(text: &[u8], what: &str) -> Result<u32, String> {
    let digit = |value: u64, byte: &u8| byte.is_ascii_digit().then(|| value * 10 + u64::from(byte - b'0'));
    let value = match text.len() {
        // Ten digits fit into 64 bits.
        1..=10 => text.iter().try_fold(0, digit).and_then(|value| u32::try_from(value).ok()),
        _ => None,
    };
    value.ok_or_else(|| format!("ERR {what} must be a whole number from 0 to {}", u32::MAX))
}

/// Parses a command about the connection. Returns `None` if there is no such command.
///
/// `Err` is the error reply to invalid arguments.
fn connection_command<'b>(name: &[u8], buffer: &'b [u8], args: &Args) -> Result<Option<ConnectionCommand<'b>>, String> {
    let arg = |index| args.get(buffer, index);
    let word = |index| arg(index).map(<[u8]>::to_ascii_uppercase);
    let mut upper = [0_u8; 16];
    let known = name.len() <= upper.len();
    if known {
        upper[..name.len()].copy_from_slice(name);
        upper.make_ascii_uppercase();
    }
    match (&upper[..name.len().min(upper.len())], args.len()) {
        (b"PING", 1..=2) => Ok(ConnectionCommand::Ping(arg(1))),
        (b"ECHO", 2) => Ok(ConnectionCommand::Echo(arg(1).unwrap_or_default())),
        (b"HELLO", _) => hello(buffer, args),
        (b"AUTH", 2) => Ok(ConnectionCommand::Auth { password: arg(1).unwrap_or_default() }),
        (b"AUTH", 3) => Ok(ConnectionCommand::Auth { password: arg(2).unwrap_or_default() }),
        (b"SELECT", 2) if arg(1) == Some(b"0") => Ok(ConnectionCommand::Select),
        (b"SELECT", 2) => Err("ERR only database 0 is supported".to_owned()),
        (b"CLIENT", 2..) => match word(1).as_deref() {
            Some(b"ID") => Ok(ConnectionCommand::ClientId),
            Some(b"GETNAME") => Ok(ConnectionCommand::ClientGetName),
            Some(b"SETINFO" | b"SETNAME" | b"NO-EVICT" | b"NO-TOUCH") => Ok(ConnectionCommand::ClientOk),
            Some(b"REPLY") => match (word(2).as_deref(), args.len()) {
                (Some(b"ON"), 3) => Ok(ConnectionCommand::ClientOk),
                // A client that expects no replies would take each reply for that to another command.
                _ => Err("ERR only CLIENT REPLY ON is supported".to_owned()),
            },
            _ => Err("ERR expected CLIENT ID, GETNAME, SETNAME or SETINFO".to_owned()),
        },
        (b"COMMAND", 1) => Ok(ConnectionCommand::CommandList),
        (b"COMMAND", 2..) => match word(1).as_deref() {
            Some(b"COUNT") => Ok(ConnectionCommand::CommandCount),
            Some(b"DOCS") => Ok(ConnectionCommand::CommandDocs),
            _ => Ok(ConnectionCommand::CommandList),
        },
        (b"INFO", _) => Ok(ConnectionCommand::Info),
        (b"QUIT", _) => Ok(ConnectionCommand::Quit),
        (b"PING" | b"ECHO" | b"AUTH" | b"SELECT" | b"CLIENT", _) if known => {
            Err("ERR wrong number of arguments".to_owned())
        }
        _ => return Ok(None),
    }
    .map(Some)
}

/// Parses `HELLO [version [AUTH user password] [SETNAME name]]`. User and name are ignored. `Err` is the error reply.
fn hello<'b>(buffer: &'b [u8], args: &Args) -> Result<ConnectionCommand<'b>, String> {
    let arg = |index| args.get(buffer, index);
    let (mut index, mut password) = (2, None);
    while let Some(word) = arg(index) {
        let taken = if word.eq_ignore_ascii_case(b"AUTH") {
            password = arg(index + 2);
            3
        } else {
            2
        };
        let known = word.eq_ignore_ascii_case(b"AUTH") || word.eq_ignore_ascii_case(b"SETNAME");
        if !known || arg(index + taken - 1).is_none() {
            return Err(usage("HELLO [2|3 [AUTH user password] [SETNAME name]]"));
        }
        index += taken;
    }
    Ok(ConnectionCommand::Hello { protocol: arg(1), password })
}

/// Appends the reply to a check with the single demand `demand`: five numbers in this format.
///
/// Appends an `UNAVAILABLE` error if the decision has no limit status, because no counter was read.
pub(crate) fn reply(decision: &Decision, demand: &Demand<'_>, format: ReplyFormat, replies: &mut Replies) {
    let Some(status) = decision.limits.first() else {
        replies.error("UNAVAILABLE the store did not answer");
        return;
    };
    replies.decision(match format {
        ReplyFormat::Tollgate => tollgate_numbers(status),
        ReplyFormat::RedisCell => redis_cell_numbers(status, demand),
    });
}

fn tollgate_numbers(status: &LimitStatus) -> [i64; 5] {
    let ms = |wait: tollgate::Wait| wait.as_millis_ceil().map_or(-1, saturating);
    [
        i64::from(status.allowed),
        status.quota.into(),
        status.remaining.into(),
        ms(status.retry_after),
        ms(status.reset_after),
    ]
}

fn redis_cell_numbers(status: &LimitStatus, demand: &Demand<'_>) -> [i64; 5] {
    let secs = |wait: tollgate::Wait| wait.as_secs_ceil().map_or(-1, saturating);
    let retry_after = if status.allowed { -1 } else { secs(status.retry_after) };
    let capacity = demand.limit.cost_max().into();
    [i64::from(!status.allowed), capacity, status.remaining.into(), retry_after, secs(status.reset_after)]
}

fn saturating(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
