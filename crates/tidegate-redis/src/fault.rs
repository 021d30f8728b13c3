//! The failures of a call, and whether the call was executed.
//!
//! One table maps the first word of an error reply to a kind. Redis puts an error code there for this purpose. The rest
//! of the line may contain keys or addresses, so it is dropped.

use std::borrow::Cow;
use std::fmt;

use tidegate_core::{StoreError, StoreErrorKind as Kind};

use crate::acl::denied_command;
use crate::key::Prefix;

const REJECTED_PASSWORD: &str = "the server rejects the user or the password";
const NO_CLUSTER: &str =
    "the server is not a node of a cluster (`cluster-enabled no`); use a redis:// or rediss:// URL for a single server";
/// The error message if the user may not access a key. [`Fault::naming_keys`] adds the pattern.
const DENIED_KEY: &str = "the Redis user may not access a key of this call";
/// The text before the line number in errors of scripts.
pub(crate) const SCRIPT_POSITION: &str = "user_script:";

/// The failure of a call: its kind and the reason. Can be cloned, for every caller of a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// The reason. It does not name the server: [`Fault::into_error`] adds the address.
    pub(crate) message: Cow<'static, str>,
    /// Where or when to make the call again, as reported by a node of a cluster. `Some` means that the call was not
    /// executed.
    pub(crate) redirect: Option<Redirect>,
}

/// What to do with a call that a node of a cluster did not execute.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Redirect {
    /// `MOVED`: another node owns the slot from now on.
    Moved(Target),
    /// `ASK`: the slot is being moved, and this call must be made to the target node, after `ASKING`.
    Ask(Target),
    /// `TRYAGAIN`: the slot is being moved, and only some keys of the call are on the node.
    TryAgain,
    /// `CLUSTERDOWN` or `LOADING`: the node does not serve the slot at the moment.
    Later,
    /// A key that the call passes as an argument is not on the node. The call must be sent again with declared keys.
    NotLocal,
}

/// The address of a node, as another node announces it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Target {
    /// A name or an address; `None` means the host of the node that announces it.
    pub(crate) host: Option<String>,
    pub(crate) port: u16,
}

impl Redirect {
    /// Parses the words of an error reply of a node. Returns `None` if it is not a redirection, or is malformed.
    fn parse(word: &str, rest: &str) -> Option<Redirect> {
        let target = || {
            // `3999 10.0.0.1:6381`. The host may be an IPv6 address without brackets, and it may be missing or `?`.
            let (host, port) = rest.split(' ').nth(1)?.rsplit_once(':')?;
            let port = port.parse().ok().filter(|&port| port > 0)?;
            Some(Target { host: known_host(host), port })
        };
        match word {
            "MOVED" => target().map(Redirect::Moved),
            "ASK" => target().map(Redirect::Ask),
            "TRYAGAIN" => Some(Redirect::TryAgain),
            "CLUSTERDOWN" | "LOADING" => Some(Redirect::Later),
            _ => None,
        }
    }
}

/// Returns the host that a node announces, or `None` if it does not know its own: the text is empty or `?`.
pub(crate) fn known_host(host: &str) -> Option<String> {
    (!matches!(host, "" | "?")).then(|| host.to_owned())
}

/// Phrases in the errors of servers that do not execute a call across slots. Redis and Valkey return the first if a key
/// is on another node. Servers that accept only keys of one slot, or only declared keys, return the others.
const NOT_LOCAL: [&str; 3] = ["access a non local key", "do not hash to the same slot", "undeclared key"];

impl Fault {
    /// Creates a fault. The message must not contain a key, a client's address or a secret.
    pub(crate) fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Fault {
        Fault { kind, message: message.into(), redirect: None }
    }

    /// Converts an error reply, without its leading `-`, to a fault.
    ///
    /// The first word determines the kind; after `TIDEGATE_PARTLY`, the second one does, and after `ERR`, phrases in
    /// the text do. An unknown reply has the kind `Protocol`. The rest is not part of the message, because it may
    /// contain keys or addresses, except for the line number in an error of the script.
    pub(crate) fn of_reply(reply: &str) -> Fault {
        let word = reply.split(' ').next().unwrap_or_default();
        let (kind, message) = match word {
            "OOM" => (Kind::Unavailable, "the server has reached its maxmemory"),
            "LOADING" => (Kind::Unavailable, "the server is loading its data"),
            "READONLY" => (Kind::Unavailable, "the server is a read-only replica"),
            "BUSY" => (Kind::Unavailable, "the server is busy running another script"),
            "MASTERDOWN" => (Kind::Unavailable, "the server is a replica that has lost its connection to the master"),
            "MISCONF" => (Kind::Unavailable, "the server rejects writes because it cannot save its data"),
            "NOREPLICAS" => (Kind::Unavailable, "the server has fewer replicas than it requires for writes"),
            "CLUSTERDOWN" => (Kind::Unavailable, "the cluster does not serve this slot at the moment"),
            "TRYAGAIN" | "ASK" => {
                (Kind::Relocating, "the keys of this slot are being moved to another node of the cluster")
            }
            "MOVED" => (Kind::Unavailable, "the key is on another node of the cluster"),
            "NOAUTH" => (Kind::Forbidden, "the server requires a password"),
            "WRONGPASS" => (Kind::Forbidden, REJECTED_PASSWORD),
            "NOPERM" => return Fault::of_denial(reply),
            "CROSSSLOT" => (Kind::Forbidden, "the keys of one check are in different slots of the cluster"),
            "TIDEGATE_FOREIGN" => (Kind::Foreign, "a counter's key holds data that Tidegate did not write"),
            "TIDEGATE_PARTLY" => return Fault::of_reply(reply[word.len()..].trim_start()).in_part(),
            "TIDEGATE_INTERNAL" => return Fault::of_script(reply),
            "ERR" => return Fault::of_plain_error(reply),
            _ => (Kind::Protocol, "the server returned an unknown error"),
        };
        Fault { redirect: Redirect::parse(word, reply[word.len()..].trim_start()), ..Fault::new(kind, message) }
    }

    /// Converts an error reply with the code `ERR`, which Redis uses for errors without a code of their own.
    ///
    /// Phrases in the text determine the kind; `Protocol` if none is known.
    fn of_plain_error(reply: &str) -> Fault {
        if reply.contains("max number of clients") {
            Fault::new(Kind::Unavailable, "the server has reached its connection limit (maxclients)")
        } else if reply.contains("AUTH") && reply.contains("password configured") {
            Fault::new(Kind::Forbidden, "a password is set, but the server has none for this user")
        } else if reply.contains("AUTH") {
            Fault::new(Kind::Forbidden, REJECTED_PASSWORD)
        } else if reply.contains("cluster support disabled") {
            Fault::new(Kind::Unsupported, NO_CLUSTER)
        } else if NOT_LOCAL.iter().any(|phrase| reply.contains(phrase)) {
            let fault = Fault::new(Kind::Unavailable, "a key of the call is on another node of the cluster");
            Fault { redirect: Some(Redirect::NotLocal), ..fault }
        } else if reply.contains("DB index") || reply.contains("SELECT is not allowed") {
            Fault::new(Kind::Forbidden, "the server does not have this database")
        } else if reply.contains("ACL failure in script") || reply.contains("The user executing the script can't") {
            // The message depends on the version of Redis or Valkey.
            Fault::of_denial(reply)
        } else if reply.contains(SCRIPT_POSITION) {
            Fault::of_script(reply)
        } else {
            Fault::new(Kind::Protocol, "the server returned an unknown error")
        }
    }

    /// Converts an error reply about a missing permission. The message names the command that the user may not run.
    fn of_denial(reply: &str) -> Fault {
        let message: Cow<'static, str> = match denied_command(reply) {
            Some(command) => {
                format!("the Redis user may not run {command}; `tidegate script --acl` prints the rules that it needs")
                    .into()
            }
            None => DENIED_KEY.into(),
        };
        Fault::new(Kind::Forbidden, message)
    }

    /// Adds the pattern of the store's keys to the message if the user may not access a key.
    pub(crate) fn naming_keys(self, prefix: &Prefix) -> Fault {
        if self.message != DENIED_KEY {
            return self;
        }
        let pattern = prefix.key_pattern();
        let message = format!(
            "{DENIED_KEY}; the keys of the store need the rule ~{pattern}, as `tidegate script --acl` prints it"
        );
        Fault { message: message.into(), ..self }
    }

    /// Converts an error reply that reports a bug in the script to a fault of the kind `Script`.
    ///
    /// The message has the line of the script if the reply has it.
    fn of_script(reply: &str) -> Fault {
        let line = reply.split(SCRIPT_POSITION).nth(1).unwrap_or_default();
        let digits: String = line.chars().take_while(char::is_ascii_digit).take(6).collect();
        let place = if digits.is_empty() { String::new() } else { format!(" at line {digits}") };
        Fault::new(Kind::Script, format!("the Lua script failed{place}; this is a bug in Tidegate"))
    }

    /// Creates the fault for work that was not sent because the server is no longer the master.
    pub(crate) fn demoted() -> Fault {
        Fault::new(Kind::Unavailable, "the server is no longer the master")
    }

    /// Changes the kind as [`StoreErrorKind::in_part`](Kind::in_part) does.
    ///
    /// For the fault of a call of which another part may have been executed.
    fn in_part(self) -> Fault {
        Fault { kind: self.kind.in_part(), redirect: None, ..self }
    }

    /// Returns whether this is the fault of a `READONLY` reply: the server is a replica and must not be used any more.
    pub(crate) fn is_read_only(&self) -> bool {
        *self == Fault::of_reply("READONLY")
    }

    /// Returns whether the connection is broken or its state is unknown, so that it must be dropped at once.
    ///
    /// That is the kind `TimedOut`, `Interrupted`, `Unreachable` or `Protocol`.
    pub(crate) fn ends_connection(&self) -> bool {
        matches!(self.kind, Kind::TimedOut | Kind::Interrupted | Kind::Unreachable | Kind::Protocol)
    }

    /// Converts the fault to an error of the same kind whose message names the server, without user and password.
    pub(crate) fn into_error(self, server: &dyn fmt::Display) -> StoreError {
        let message = match self.kind {
            Kind::Unreachable => format!("cannot reach the store {server}: {}", self.message),
            _ => format!("store {server}: {}", self.message),
        };
        StoreError::new(self.kind, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::url::{Endpoint, StoreAddress};

    fn endpoint(url: &str) -> Endpoint {
        StoreAddress::parse(url).unwrap().server
    }

    #[test]
    fn redirections_name_a_node_and_are_not_executed() {
        let target = |host: Option<&str>, port| Target { host: host.map(str::to_owned), port };
        for (reply, redirect) in [
            ("MOVED 3999 10.0.0.1:6381", Some(Redirect::Moved(target(Some("10.0.0.1"), 6381)))),
            ("MOVED 3999 ::1:6381", Some(Redirect::Moved(target(Some("::1"), 6381)))),
            ("MOVED 3999 node-1.example.org:6381", Some(Redirect::Moved(target(Some("node-1.example.org"), 6381)))),
            ("MOVED 3999 :6381", Some(Redirect::Moved(target(None, 6381)))),
            ("ASK 3999 ?:6381", Some(Redirect::Ask(target(None, 6381)))),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Some(Redirect::TryAgain)),
            ("CLUSTERDOWN Hash slot not served", Some(Redirect::Later)),
            ("LOADING Redis is loading the dataset in memory", Some(Redirect::Later)),
            ("ERR Script attempted to access a non local key in a cluster node", Some(Redirect::NotLocal)),
            ("ERR Script attempted to access keys that do not hash to the same slot", Some(Redirect::NotLocal)),
            ("ERR script tried accessing undeclared key", Some(Redirect::NotLocal)),
            ("TIDEGATE_PARTLY ERR Script attempted to access a non local key in a cluster node", None),
            ("MOVED 3999", None),
            ("MOVED 3999 10.0.0.1:0", None),
            ("MOVED 3999 10.0.0.1:99999", None),
            ("TIDEGATE_PARTLY MOVED 3999 10.0.0.1:6381", None),
            ("READONLY You can't write against a read only replica.", None),
        ] {
            let fault = Fault::of_reply(reply);
            assert_eq!(fault.redirect, redirect, "{reply}");
            assert_eq!(fault.kind.is_unexecuted(), !reply.starts_with("TIDEGATE_PARTLY"), "{reply}");
        }
    }

    #[test]
    fn first_word_determines_the_kind_and_the_rest_is_dropped() {
        let cases = [
            ("OOM command not allowed when used memory > 'maxmemory'. script: abc", Kind::Unavailable),
            ("LOADING Redis is loading the dataset in memory", Kind::Unavailable),
            ("READONLY You can't write against a read only replica.", Kind::Unavailable),
            ("MOVED 1234 10.9.8.7:6379", Kind::Unavailable),
            ("ERR max number of clients reached", Kind::Unavailable),
            ("NOAUTH Authentication required.", Kind::Forbidden),
            ("WRONGPASS invalid username-password pair or user is disabled.", Kind::Forbidden),
            ("NOPERM No permissions to access a key", Kind::Forbidden),
            ("ERR DB index is out of range", Kind::Forbidden),
            ("ERR ACL failure in script: User ann has no permissions to run the 'set' command", Kind::Forbidden),
            ("ERR The user executing the script can't run this command or subcommand script: abc", Kind::Forbidden),
            ("TIDEGATE_FOREIGN the key holds another type", Kind::Foreign),
            ("TIDEGATE_PARTLY TIDEGATE_FOREIGN a list holds something else than numbers", Kind::ForeignInPart),
            ("TIDEGATE_PARTLY TIDEGATE_INTERNAL user_script:7: attempt to index a nil value", Kind::Script),
            ("TIDEGATE_PARTLY NOPERM No permissions to access a key", Kind::Interrupted),
            ("TIDEGATE_INTERNAL user_script:7: attempt to index a nil value", Kind::Script),
            ("ERR user_script:7: bad argument #1 to 'pack' script: abc, on @user_script:7.", Kind::Script),
            ("TIDEGATE_ARGUMENT a cost is 0 to 4294967295", Kind::Protocol),
            ("ERR something else about secret-key", Kind::Protocol),
            ("", Kind::Protocol),
        ];
        let endpoint = endpoint("redis://localhost");
        for (reply, kind) in cases {
            let error = Fault::of_reply(reply).into_error(&endpoint);
            assert_eq!(error.kind(), kind, "{reply}");
            assert!(!error.to_string().contains("10.9.8.7") && !error.to_string().contains("secret-key"), "{error}");
        }
    }

    #[test]
    fn missing_rejected_and_superfluous_passwords_have_messages_of_their_own() {
        for (reply, message) in [
            ("NOAUTH Authentication required.", "the server requires a password"),
            (
                "WRONGPASS invalid username-password pair or user is disabled.",
                "the server rejects the user or the password",
            ),
            (
                "ERR AUTH <password> called without any password configured for the default user. Are you sure?",
                "a password is set, but the server has none for this user",
            ),
        ] {
            assert_eq!(Fault::of_reply(reply), Fault::new(Kind::Forbidden, message), "{reply}");
        }
    }

    #[test]
    fn error_names_the_server_and_the_reason_once() {
        let endpoint = endpoint("redis://ann:hunter2@127.0.0.1:1");
        let error = Fault::new(Kind::Unreachable, "connection refused").into_error(&endpoint);
        assert_eq!(error.to_string(), "cannot reach the store redis://127.0.0.1:1: connection refused");
        let error = Fault::of_reply("TIDEGATE_INTERNAL user_script:417: attempt to index nil").into_error(&endpoint);
        let expected = "store redis://127.0.0.1:1: the Lua script failed at line 417; this is a bug in Tidegate";
        assert_eq!(error.to_string(), expected);
    }
}
