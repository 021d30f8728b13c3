//! The failures of a call, and whether the call was executed.
//!
//! One table maps the first word of an error reply to a kind. Redis puts an error code there for this purpose. The rest
//! of the line may contain keys or addresses, so it is dropped.

use std::borrow::Cow;

use tollgate_core::{StoreError, StoreErrorKind as Kind};

/// The failure of a call. It can be cloned for every caller of a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    message: Cow<'static, str>,
}

impl Fault {
    /// Creates a fault. The message must not contain a key, a client's address or a secret.
    pub(crate) fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Fault {
        Fault { kind, message: message.into() }
    }

    /// Converts an error reply, without its leading `-`, to a fault.
    pub(crate) fn of_reply(reply: &str) -> Fault {
        let word = reply.split(' ').next().unwrap_or_default();
        let (kind, message) = match word {
            "OOM" => (Kind::Unavailable, "the server has reached its maxmemory"),
            "LOADING" => (Kind::Unavailable, "the server is loading its data"),
            "READONLY" => (Kind::Unavailable, "the server is a read-only replica"),
            "BUSY" => (Kind::Unavailable, "the server is busy running another script"),
            "MASTERDOWN" => (Kind::Unavailable, "the server is a replica that has lost its master"),
            "MISCONF" => (Kind::Unavailable, "the server rejects writes because it cannot save its data"),
            "NOREPLICAS" => (Kind::Unavailable, "the server has fewer replicas than it requires for writes"),
            "CLUSTERDOWN" | "TRYAGAIN" => (Kind::Unavailable, "the cluster does not serve this slot at the moment"),
            "MOVED" | "ASK" => (Kind::Unavailable, "the key is on another node of the cluster"),
            "NOAUTH" | "WRONGPASS" => (Kind::Forbidden, "the server requires another user or password"),
            "NOPERM" => (Kind::Forbidden, "the Redis user lacks permission to run the script or to access its keys"),
            "CROSSSLOT" => (Kind::Forbidden, "the keys of one check are in different slots of the cluster"),
            "TOLLGATE_FOREIGN" => (Kind::Foreign, "a counter's key holds data that Tollgate did not write"),
            "TOLLGATE_PARTLY" => (
                Kind::ForeignInPart,
                "a counter's key holds data that Tollgate did not write; other checks of the call were decided",
            ),
            "ERR" => return Fault::of_plain_error(reply),
            _ => (Kind::Protocol, "the server returned an unknown error"),
        };
        Fault::new(kind, message)
    }

    /// Converts an error reply with the code `ERR`, which Redis uses for errors without a code of their own.
    fn of_plain_error(reply: &str) -> Fault {
        if reply.contains("max number of clients") {
            Fault::new(Kind::Unavailable, "the server has no connection left (maxclients)")
        } else if reply.contains("AUTH") {
            Fault::new(Kind::Forbidden, "the server requires another user or password")
        } else if reply.contains("DB index") || reply.contains("SELECT is not allowed") {
            Fault::new(Kind::Forbidden, "the server does not have this database")
        } else if reply.contains("ACL failure in script") || reply.contains("The user executing the script can't") {
            // The message depends on the version of Redis or Valkey.
            Fault::new(Kind::Forbidden, "the Redis user lacks permission to run the script or to access its keys")
        } else {
            Fault::new(Kind::Protocol, "the server returned an unknown error")
        }
    }

    /// Returns whether the connection must be dropped after this fault.
    ///
    /// `true` if its state is unknown, the server does not follow the protocol, or the server has become a replica.
    pub(crate) fn ends_connection(&self) -> bool {
        match self.kind {
            Kind::TimedOut | Kind::Interrupted | Kind::Unreachable | Kind::Protocol => true,
            _ => *self == Fault::of_reply("READONLY"),
        }
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> StoreError {
        StoreError::new(fault.kind, fault.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("TOLLGATE_FOREIGN the key holds another type", Kind::Foreign),
            ("TOLLGATE_PARTLY a list holds something else than numbers", Kind::ForeignInPart),
            ("TOLLGATE_ARGUMENT a cost is 0 to 4294967295", Kind::Protocol),
            ("ERR something else about secret-key", Kind::Protocol),
            ("", Kind::Protocol),
        ];
        for (reply, kind) in cases {
            let error = StoreError::from(Fault::of_reply(reply));
            assert_eq!(error.kind(), kind, "{reply}");
            assert!(!error.to_string().contains("10.9.8.7") && !error.to_string().contains("secret-key"), "{error}");
        }
    }
}
