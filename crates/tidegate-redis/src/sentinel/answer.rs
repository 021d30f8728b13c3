//! The replies of a Sentinel, and the faults for servers that are not Sentinels.

use tidegate_core::StoreErrorKind as Kind;

use super::SWITCH_MASTER;
use crate::fault::Fault;
use crate::reply::Reply;

/// The maximum number of names that an error lists.
const NAMES_MAX: usize = 8;

/// What a Sentinel knows about a master.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct MasterAnswer {
    /// The host and the port of the master. During a failover, those of the promoted replica.
    pub(super) master: (String, u16),
    /// The configuration epoch, which is higher after each failover; 0 if the Sentinel does not report it.
    pub(super) epoch: u64,
    /// The hosts and ports of the other Sentinels of this master.
    pub(super) others: Vec<(String, u16)>,
}

impl MasterAnswer {
    /// Parses the replies to `SENTINEL GET-MASTER-ADDR-BY-NAME`, `SENTINEL MASTER` and `SENTINEL SENTINELS`.
    ///
    /// The epoch and the other Sentinels may be missing, because a restricted user may not be allowed to ask for them.
    ///
    /// # Errors
    /// Returns a fault if the first reply is an error, or is not an address.
    pub(super) fn parse(address: &Reply, master: &Reply, others: &Reply) -> Result<MasterAnswer, Fault> {
        if let Reply::Error(message) = address {
            return Err(rejected(message));
        }
        let malformed =
            || Fault::new(Kind::Protocol, "the reply to SENTINEL GET-MASTER-ADDR-BY-NAME is not an address");
        let [host, port] = address.items() else { return Err(malformed()) };
        let master_address = parse_address(host.as_text(), port.as_text()).ok_or_else(malformed)?;
        let epoch = master.field("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        let others = others.items().iter().filter_map(|other| parse_address(other.field("ip"), other.field("port")));
        Ok(MasterAnswer { master: master_address, epoch, others: others.collect() })
    }
}

/// Returns whether the reply confirms that the subscription has ended.
pub(super) fn is_unsubscribed(reply: &Reply) -> bool {
    reply.items().first().and_then(Reply::as_text) == Some("unsubscribe")
}

/// Returns whether the reply is a message that another server is now the master with this name.
pub(super) fn is_switch_of(reply: &Reply, name: &str) -> bool {
    let [kind, channel, text] = reply.items() else { return false };
    let is_message = kind.as_text() == Some("message") && channel.as_text() == Some(SWITCH_MASTER);
    // `name old-host old-port new-host new-port`
    is_message && text.as_text().and_then(|text| text.split(' ').next()) == Some(name)
}

/// Creates the fault for a Sentinel that does not know the name, given its reply to `SENTINEL MASTERS`.
pub(super) fn unknown_name(name: &str, masters: &Reply) -> Fault {
    let names: Vec<&str> = masters.items().iter().filter_map(|master| master.field("name")).take(NAMES_MAX).collect();
    let known = if names.is_empty() { String::new() } else { format!("; it watches {}", names.join(", ")) };
    Fault::new(Kind::Unsupported, format!("it does not watch a master named {name}{known}"))
}

/// Converts an error reply to `SENTINEL` or `SUBSCRIBE` to a fault.
pub(super) fn rejected(message: &str) -> Fault {
    if message.contains("unknown command") {
        return Fault::new(Kind::Unsupported, NOT_A_SENTINEL);
    }
    if message.starts_with("NOPERM") {
        return Fault::new(
            Kind::Forbidden,
            "the user lacks permission to run SENTINEL and to subscribe to +switch-master",
        );
    }
    Fault::of_reply(message)
}

/// The error message for a server that is not a Sentinel.
pub(crate) const NOT_A_SENTINEL: &str =
    "the server is not a Sentinel; a redis+sentinel:// URL lists Sentinels, usually with port 26379";

fn parse_address(host: Option<&str>, port: Option<&str>) -> Option<(String, u16)> {
    let host = host.filter(|host| !host.is_empty())?;
    let port = port?.parse().ok().filter(|&port| port > 0)?;
    Some((host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(items: &[&str]) -> Reply {
        Reply::List(items.iter().map(|item| Reply::Text((*item).into())).collect())
    }

    #[test]
    fn answer_has_the_address_the_epoch_and_the_other_sentinels() {
        let others = Reply::List(vec![list(&["ip", "10.0.0.2", "port", "26379"]), list(&["ip", "", "port", "1"])]);
        let answer = MasterAnswer::parse(&list(&["10.0.0.1", "6379"]), &list(&["config-epoch", "7"]), &others).unwrap();
        let master = ("10.0.0.1".to_owned(), 6379);
        let known = MasterAnswer { master: master.clone(), epoch: 7, others: vec![("10.0.0.2".into(), 26379)] };
        assert_eq!(answer, known);
        // A restricted user learns only the address.
        let denied = Reply::Error("NOPERM".into());
        let answer = MasterAnswer::parse(&list(&["10.0.0.1", "6379"]), &denied, &denied).unwrap();
        assert_eq!(answer, MasterAnswer { master, epoch: 0, others: Vec::new() });
    }

    #[test]
    fn reply_that_is_not_an_address_is_a_fault() {
        let none = Reply::Nil;
        for address in [
            Reply::Integer(1),
            Reply::Text("OK".into()),
            list(&[]),
            list(&["h"]),
            list(&["", "1"]),
            list(&["h", "0"]),
            list(&["h", "65536"]),
            list(&["h", "x"]),
            list(&["h", "1", "2"]),
            Reply::List(vec![Reply::Text(vec![0xff]), Reply::Text("1".into())]),
        ] {
            assert_eq!(MasterAnswer::parse(&address, &none, &none).unwrap_err().kind, Kind::Protocol, "{address:?}");
        }
        let fault =
            MasterAnswer::parse(&Reply::Error("ERR unknown command 'SENTINEL'".into()), &none, &none).unwrap_err();
        assert_eq!(fault.kind, Kind::Unsupported);
    }

    #[test]
    fn only_a_message_about_this_name_is_a_switch() {
        let message = |channel: &str, text: &str| list(&["message", channel, text]);
        assert!(is_switch_of(&message("+switch-master", "main 10.0.0.1 1 10.0.0.2 2"), "main"));
        assert!(!is_switch_of(&message("+switch-master", "main2 10.0.0.1 1 10.0.0.2 2"), "main"));
        assert!(!is_switch_of(&message("+sdown", "main 10.0.0.1 1"), "main"));
        assert!(!is_switch_of(&list(&["subscribe", "+switch-master", "main"]), "main"));
        assert!(!is_switch_of(&Reply::Nil, "main"));
    }
}
