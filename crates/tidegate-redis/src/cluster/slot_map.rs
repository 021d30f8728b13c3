//! The reply to `CLUSTER SLOTS`: ranges of slots and their owners.
//!
//! ```text
//!   [ [first, last, [host, port, id, …], [replica], …], … ]
//! ```
//!
//! The host is the one that the nodes announce, according to `cluster-preferred-endpoint-type`. It is null, empty or
//! `?` if the node does not know it.

use std::ops::Range;

use tidegate_core::StoreErrorKind as Kind;

use super::slot::SLOTS;
use crate::fault::{Fault, Target, known_host};
use crate::reply::Reply;

/// A range of slots, with the addresses of their owner and of its replicas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct SlotRange {
    pub(super) slots: Range<usize>,
    pub(super) owner: Target,
    /// The id of the owner, which is unique among all clusters. Empty if the reply has none.
    pub(super) owner_id: String,
    pub(super) replicas: Vec<Target>,
}

/// Parses the reply.
///
/// # Errors
/// Returns a fault if the reply is an error or malformed, or if the node knows no owner of any slot, because it has not
/// joined a cluster.
pub(super) fn parse(reply: &Reply) -> Result<Vec<SlotRange>, Fault> {
    let Reply::List(ranges) = reply else { return Err(malformed()) };
    let ranges = ranges.iter().map(range).collect::<Option<Vec<_>>>().ok_or_else(malformed)?;
    if ranges.is_empty() {
        return Err(Fault::new(Kind::Unavailable, "the node knows no owner of any slot"));
    }
    Ok(ranges)
}

fn range(reply: &Reply) -> Option<SlotRange> {
    let [Reply::Integer(first), Reply::Integer(last), nodes @ ..] = reply.items() else { return None };
    let slots = usize::try_from(*first).ok()?..usize::try_from(*last).ok()?.checked_add(1)?;
    let owner_id = nodes.first().and_then(|owner| owner.items().get(2)?.as_text()).unwrap_or_default().to_owned();
    let mut nodes = nodes.iter().map(address);
    let owner = nodes.next()??;
    let replicas = nodes.collect::<Option<_>>()?;
    (slots.start < slots.end && slots.end <= SLOTS).then_some(SlotRange { slots, owner, owner_id, replicas })
}

fn address(reply: &Reply) -> Option<Target> {
    let [host, Reply::Integer(port), ..] = reply.items() else { return None };
    let host = match host {
        Reply::Nil => None,
        host => known_host(host.as_text()?),
    };
    let port = u16::try_from(*port).ok().filter(|&port| port > 0)?;
    Some(Target { host, port })
}

/// Creates the fault of a reply that is not a list of slot ranges.
fn malformed() -> Fault {
    Fault::new(Kind::Protocol, "the reply to CLUSTER SLOTS is malformed")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Reply {
        Reply::Text(text.into())
    }

    fn range_of(first: i64, last: i64, host: Reply, port: i64) -> Reply {
        let owner = Reply::List(vec![host, Reply::Integer(port), text("id"), Reply::List(Vec::new())]);
        Reply::List(vec![Reply::Integer(first), Reply::Integer(last), owner.clone(), owner])
    }

    #[test]
    fn ranges_have_owners_with_or_without_a_host() {
        let reply = Reply::List(vec![
            range_of(0, 5460, text("10.0.0.1"), 7000),
            range_of(5461, 5461, Reply::Nil, 7001),
            range_of(5462, 16383, text("?"), 7002),
        ]);
        let range = |slots, host: Option<&str>, port| {
            let owner = Target { host: host.map(str::to_owned), port };
            SlotRange { slots, owner: owner.clone(), owner_id: "id".into(), replicas: vec![owner] }
        };
        let expected = vec![
            range(0..5461, Some("10.0.0.1"), 7000),
            range(5461..5462, None, 7001),
            range(5462..16_384, None, 7002),
        ];
        assert_eq!(parse(&reply), Ok(expected));
    }

    #[test]
    fn malformed_reply_is_a_fault() {
        let owner = |host: Reply, port: i64| range_of(0, 1, host, port);
        for range in [
            Reply::Nil,
            Reply::List(Vec::new()),
            Reply::List(vec![Reply::Integer(0), Reply::Integer(1)]),
            range_of(-1, 1, text("h"), 1),
            range_of(2, 1, text("h"), 1),
            range_of(0, 16_384, text("h"), 1),
            range_of(0, i64::MAX, text("h"), 1),
            owner(text("h"), 0),
            owner(text("h"), 65_536),
            owner(Reply::Integer(7), 1),
            owner(Reply::Text(vec![0xff]), 1),
        ] {
            let reply = Reply::List(vec![range.clone()]);
            assert_eq!(parse(&reply).unwrap_err().kind, Kind::Protocol, "{range:?}");
        }
        assert_eq!(parse(&text("OK")).unwrap_err().kind, Kind::Protocol);
        assert_eq!(parse(&Reply::List(Vec::new())).unwrap_err().kind, Kind::Unavailable);
    }
}
