//! Parses commands: checks, resets, described requests, and commands about the connection.
//!
//! | command | effect |
//! |---|---|
//! | `TIDEGATE.CHECK key limit [key limit ...] [COST n] [RECEIPT]` | a check; replies allowed, quota, remaining, retry_after_ms, reset_after_ms |
//! | `TIDEGATE.REFUND receipt [USED n \| STATUS n]` | corrects the charge of an admitted check, once |
//! | `TIDEGATE.WAIT key limit [key limit ...] TIMEOUT ms [COST n] [RECEIPT]` | a check that waits until it is admitted |
//! | `TIDEGATE.PEEK key limit` | a check of cost 0 |
//! | `TIDEGATE.RESET key limit` | deletes the counter |
//! | `TIDEGATE.REQUEST method path peer [name value ...]` | decides a request by the rules; replies with the response to send |
//! | `CL.THROTTLE key max_burst count period [quantity]` | a check of a token bucket; replies as redis-cell does: limited, limit, remaining, retry_after, reset_after in seconds |
//! | `PING` `ECHO` `HELLO` `AUTH` `SELECT 0` `CLIENT` `COMMAND` `INFO` `QUIT` | connection setup, which clients send by themselves |
//!
//! redis-cell counts `max_burst` beyond the first request, so the capacity is `max_burst + 1`. Seconds are rounded up:
//! a client that waits 0 s would be denied again. `docs/cl-throttle.md` has examples of the replies.

use std::net::IpAddr;
use std::sync::LazyLock;
use std::time::Duration;

use http::StatusCode;
use tidegate::engine::Ending;
use tidegate::receipt::Settlement;
use tidegate::{Cost, Demand};

use super::check::{LimitCache, PendingCheck, ReplyFormat, explicit, parse_check, parse_throttle, parse_wait};
use super::frame::Args;
use super::request::parse_request;

/// A parsed command. Keys and texts are borrowed from the buffer in which it arrived.
pub(crate) enum RespCommand<'b> {
    /// Its demands were appended to the list that the caller passed.
    Check(PendingCheck),
    /// Waits until the check is admitted. Its demands were appended to the list that the caller passed.
    Wait {
        check: PendingCheck,
        timeout: Duration,
    },
    Reset {
        demand: Demand<'b>,
    },
    /// A receipt, and how its charge is corrected.
    Refund {
        receipt: &'b [u8],
        settlement: Settlement,
    },
    /// A described request and the address of its peer, to be decided by the rules.
    Request(Box<http::Request<()>>, IpAddr),
    /// A command about the connection, whose reply is always this one.
    Fixed(FixedReply<'b>),
    ClientId,
    Hello {
        protocol: Option<&'b [u8]>,
        password: Option<&'b [u8]>,
    },
    Auth {
        password: &'b [u8],
    },
    Quit,
    /// A blank line or an empty array, which gets no reply.
    Nothing,
    /// Not a command of this listener.
    Unknown,
}

/// The reply to a command that only clients of Redis need, to set up a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FixedReply<'b> {
    Simple(&'static str),
    Bulk(&'b [u8]),
    Integer(i64),
    Null,
    EmptyArray,
    EmptyMap,
}

/// The reply to `SELECT` and other commands that have no effect.
const OK: FixedReply<'_> = FixedReply::Simple("OK");
/// The reply to `INFO`.
const INFO: &str =
    concat!("# Server\r\nserver_name:tidegate\r\ntidegate_version:", env!("CARGO_PKG_VERSION"), "\r\nloading:0\r\n");

/// Parses the command in `buffer` whose arguments [`parse`](super::frame::parse) has found. `Err` is the error reply.
///
/// `buffer` must be the one that was parsed into `args`. A command without arguments is [`RespCommand::Nothing`], and
/// one with an unknown name [`RespCommand::Unknown`], not an error. Limits are taken from the cache `limits`, or parsed
/// and stored there. The demands of a check are appended to `demands`, which is otherwise unchanged.
pub(crate) fn parse_command<'b>(
    buffer: &'b [u8],
    args: &Args,
    limits: &mut LimitCache,
    demands: &mut Vec<Demand<'b>>,
) -> Result<RespCommand<'b>, String> {
    let Some(name) = args.get(buffer, 0) else { return Ok(RespCommand::Nothing) };
    // Clients send upper case, so the exact comparison mostly succeeds.
    let is = |expected: &str| name == expected.as_bytes() || name.eq_ignore_ascii_case(expected.as_bytes());
    let one = |format| RespCommand::Check(PendingCheck { limits: 1, format, has_receipt: false });
    if is("TIDEGATE.CHECK") {
        return parse_check(buffer, args, limits, demands).map(RespCommand::Check);
    }
    if is("CL.THROTTLE") {
        demands.push(parse_throttle(buffer, args, limits)?);
        return Ok(one(ReplyFormat::RedisCell));
    }
    if is("TIDEGATE.PEEK") {
        demands.push(key_and_limit(buffer, args, limits, "TIDEGATE.PEEK key limit")?.cost(Cost::PEEK));
        return Ok(one(ReplyFormat::Tidegate));
    }
    if is("TIDEGATE.WAIT") {
        let (check, timeout) = parse_wait(buffer, args, limits, demands)?;
        return Ok(RespCommand::Wait { check, timeout });
    }
    if is("TIDEGATE.REFUND") {
        return parse_refund(buffer, args);
    }
    if is("TIDEGATE.REQUEST") {
        let (request, peer) = parse_request(buffer, args)?;
        return Ok(RespCommand::Request(Box::new(request), peer));
    }
    if is("TIDEGATE.RESET") {
        let demand = key_and_limit(buffer, args, limits, "TIDEGATE.RESET key limit")?;
        return Ok(RespCommand::Reset { demand });
    }
    connection_command(name, buffer, args)
}

/// Parses `TIDEGATE.REFUND receipt [USED n | STATUS n]`. `Err` is the error reply.
fn parse_refund<'b>(buffer: &'b [u8], args: &Args) -> Result<RespCommand<'b>, String> {
    let arg = |index| args.get(buffer, index);
    let word = arg(2).map(<[u8]>::to_ascii_uppercase);
    let (Some(receipt), 2 | 4) = (arg(1), args.len()) else { return Err(usage(REFUND_USAGE)) };
    let settlement = match (word.as_deref(), arg(3)) {
        (None, _) => Settlement::Refund,
        (Some(b"USED"), Some(used)) => Settlement::Used(Cost::new(number(used, "USED", u32::MAX)?)),
        (Some(b"STATUS"), Some(status)) => {
            let status = StatusCode::from_bytes(status).ok().filter(|status| status.as_u16() < 600);
            Settlement::Ended(Ending::of(status.ok_or("ERR STATUS must be an HTTP status from 100 to 599")?))
        }
        _ => return Err(usage(REFUND_USAGE)),
    };
    Ok(RespCommand::Refund { receipt, settlement })
}

/// Parses the arguments of a command that has exactly a key and a limit. `Err` is the error reply.
fn key_and_limit<'b>(
    buffer: &'b [u8],
    args: &Args,
    limits: &mut LimitCache,
    expected: &str,
) -> Result<Demand<'b>, String> {
    let (Some(key), Some(limit), 3) = (args.get(buffer, 1), args.get(buffer, 2), args.len()) else {
        return Err(usage(expected));
    };
    explicit(key, limits.parse_one(limit)?)
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

/// The names of all commands.
pub(crate) const COMMANDS: [&str; 16] = [
    "TIDEGATE.CHECK",
    "TIDEGATE.REFUND",
    "TIDEGATE.WAIT",
    "TIDEGATE.REQUEST",
    "TIDEGATE.PEEK",
    "TIDEGATE.RESET",
    "CL.THROTTLE",
    "PING",
    "ECHO",
    "HELLO",
    "AUTH",
    "SELECT",
    "CLIENT",
    "COMMAND",
    "INFO",
    "QUIT",
];

const REFUND_USAGE: &str = "TIDEGATE.REFUND receipt [USED n | STATUS n]";

/// The error reply to [`RespCommand::Unknown`].
pub(crate) static UNKNOWN: LazyLock<String> =
    LazyLock::new(|| format!("ERR unknown command; expected one of {}", COMMANDS.join(", ")));

/// Returns the error reply to a command with missing or surplus arguments.
pub(super) fn usage(usage: &str) -> String {
    format!("ERR wrong arguments; expected {usage}")
}

/// Parses a whole number from 0 to `max`. `Err` is the error reply, in which `what` names the number.
pub(super) fn number(text: &[u8], what: &str, max: u32) -> Result<u32, String> {
    let digit = |value: u64, byte: &u8| byte.is_ascii_digit().then(|| value * 10 + u64::from(byte - b'0'));
    let value = match text.len() {
        // Ten digits fit into 64 bits.
        1..=10 => text.iter().try_fold(0, digit).and_then(|value| u32::try_from(value).ok()),
        _ => None,
    };
    let value = value.filter(|value| *value <= max);
    value.ok_or_else(|| format!("ERR {what} must be a whole number from 0 to {max}"))
}

/// Parses a command about the connection. Returns [`RespCommand::Unknown`] if there is no such command.
///
/// `Err` is the error reply to invalid arguments.
fn connection_command<'b>(name: &[u8], buffer: &'b [u8], args: &Args) -> Result<RespCommand<'b>, String> {
    let arg = |index| args.get(buffer, index);
    let word = |index| arg(index).map(<[u8]>::to_ascii_uppercase);
    let mut upper = [0_u8; 16];
    // The name of every command about the connection is shorter.
    let Some(upper) = upper.get_mut(..name.len()) else { return Ok(RespCommand::Unknown) };
    upper.copy_from_slice(name);
    upper.make_ascii_uppercase();
    let fixed = match (&*upper, args.len()) {
        (b"PING", 1..=2) => arg(1).map_or(FixedReply::Simple("PONG"), FixedReply::Bulk),
        (b"ECHO", 2) => FixedReply::Bulk(arg(1).unwrap_or_default()),
        (b"HELLO", _) => return hello(buffer, args),
        (b"AUTH", length @ 2..=3) => {
            return Ok(RespCommand::Auth { password: arg(length - 1).unwrap_or_default() });
        }
        (b"SELECT", 2) if arg(1) == Some(b"0") => OK,
        (b"SELECT", 2) => return Err("ERR only database 0 is supported".to_owned()),
        (b"CLIENT", 2..) => match word(1).as_deref() {
            Some(b"ID") => return Ok(RespCommand::ClientId),
            Some(b"GETNAME") => FixedReply::Null,
            Some(b"SETINFO" | b"SETNAME" | b"NO-EVICT" | b"NO-TOUCH") => OK,
            Some(b"REPLY") => match (word(2).as_deref(), args.len()) {
                (Some(b"ON"), 3) => OK,
                // A client that expects no replies would take each reply for that to another command.
                _ => return Err("ERR only CLIENT REPLY ON is supported".to_owned()),
            },
            _ => return Err("ERR expected CLIENT ID, GETNAME, SETNAME or SETINFO".to_owned()),
        },
        (b"COMMAND", 1..) => match word(1).as_deref() {
            Some(b"COUNT") => FixedReply::Integer(COMMANDS.len() as i64),
            Some(b"DOCS") => FixedReply::EmptyMap,
            _ => FixedReply::EmptyArray,
        },
        (b"INFO", _) => FixedReply::Bulk(INFO.as_bytes()),
        (b"QUIT", _) => return Ok(RespCommand::Quit),
        (b"PING" | b"ECHO" | b"AUTH" | b"SELECT" | b"CLIENT", _) => {
            return Err("ERR wrong number of arguments".to_owned());
        }
        _ => return Ok(RespCommand::Unknown),
    };
    Ok(RespCommand::Fixed(fixed))
}

/// Parses `HELLO [version [AUTH user password] [SETNAME name]]`. User and name are ignored. `Err` is the error reply.
fn hello<'b>(buffer: &'b [u8], args: &Args) -> Result<RespCommand<'b>, String> {
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
    Ok(RespCommand::Hello { protocol: arg(1), password })
}
