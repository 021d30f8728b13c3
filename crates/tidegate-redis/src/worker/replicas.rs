//! Waiting for replicas: how many must acknowledge a call before its results are returned.

use std::num::NonZeroU32;
use std::time::Duration;

use tidegate_core::StoreErrorKind as Kind;

use crate::fault::Fault;
use crate::reply::Reply;
use crate::request::push_command;

/// The number of replicas that must acknowledge a call, and how long the server waits for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Replicas {
    pub(crate) count: NonZeroU32,
    /// Whole milliseconds, at least one: for `WAIT`, 0 means forever.
    pub(crate) timeout_ms: u64,
}

impl Replicas {
    /// Returns `None` if the count is 0. The timeout is at least 1 ms.
    pub(crate) fn new(count: u32, timeout: Duration) -> Option<Replicas> {
        let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        NonZeroU32::new(count).map(|count| Replicas { count, timeout_ms })
    }

    /// Returns the command `WAIT`, encoded.
    pub(super) fn command(self) -> Vec<u8> {
        let mut command = Vec::with_capacity(48);
        push_command(&mut command, &["WAIT", &self.count.to_string(), &self.timeout_ms.to_string()]);
        command
    }

    /// Returns the fault of calls that too few replicas have acknowledged, or `None` if enough have.
    ///
    /// The calls were executed, so the kind is `TimedOut`, or that of an error reply [in part](Kind::in_part).
    pub(super) fn missing(self, reply: &Reply) -> Option<Fault> {
        match reply {
            Reply::Integer(count) if *count >= i64::from(self.count.get()) => None,
            Reply::Integer(count) => {
                let Replicas { count: wanted, timeout_ms } = self;
                let message =
                    format!("{count} of {wanted} replicas have acknowledged the write within {timeout_ms} ms");
                Some(Fault::new(Kind::TimedOut, message))
            }
            Reply::Error(message) => {
                let fault = Fault::of_reply(message);
                Some(Fault { kind: fault.kind.in_part(), redirect: None, ..fault })
            }
            _ => Some(Fault::new(Kind::Protocol, "the reply to WAIT is not a number")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enough_replicas_must_have_acknowledged() {
        let replicas = Replicas::new(2, Duration::from_micros(1)).unwrap();
        assert_eq!(replicas.command(), b"*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$1\r\n1\r\n");
        assert_eq!(replicas.missing(&Reply::Integer(2)), None);
        assert_eq!(replicas.missing(&Reply::Integer(3)), None);
        let fault = replicas.missing(&Reply::Integer(1)).unwrap();
        assert_eq!((fault.kind, fault.kind.is_unexecuted()), (Kind::TimedOut, false));
        assert_eq!(fault.message, "1 of 2 replicas have acknowledged the write within 1 ms");
        let fault = replicas.missing(&Reply::Error("NOPERM this user has no permissions".into())).unwrap();
        assert!(!fault.kind.is_unexecuted(), "{fault:?}");
        assert_eq!(Replicas::new(0, Duration::ZERO), None);
    }
}
