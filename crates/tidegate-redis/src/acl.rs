//! The permissions that a store needs from its Redis user, and the command that a user may not run.
//!
//! A script runs its commands as the user that calls it, so the user needs those too. `AUTH` and `HELLO` need no
//! permission.

use crate::fault::SCRIPT_POSITION;
use crate::key::{Prefix, PrefixError};
use crate::{INSTANCES_SCRIPT, SCRIPT};

/// The commands that run the scripts.
const CALLS: &[&str] = &["evalsha", "eval", "script|load"];
/// The commands with which the scripts read their keys. They catch the errors of these.
const READS: &[&str] = &["get", "pttl", "lindex", "llen", "lrange", "zscore"];
/// The other commands of the scripts.
const OTHERS: &[&str] = &[
    "time",
    "set",
    "setbit",
    "del",
    "pexpire",
    "pexpireat",
    "lpush",
    "lrem",
    "lset",
    "ltrim",
    "rpush",
    "zadd",
    "zcard",
    "zrangebyscore",
    "zrem",
    "zremrangebyscore",
];
/// The commands that prepare and check a connection, find and follow the nodes of a cluster, and wait for replicas.
const CONNECTION: &[&str] = &["client|setname", "role", "select", "info", "cluster|slots", "asking", "wait"];
/// The commands that read and change the ban list. `HGET` also reads Redis hashes of plans and API keys.
const BAN_LIST: &[&str] = &["hget", "hgetall", "hset", "hdel", "persist"];
/// The command with which an operator lists the API keys of a hash. `HSET` changes one.
const KEY_HASH: &str = "hscan";

/// Returns the rules of a Redis user that may do what a store needs, and nothing else.
///
/// They are the arguments of `ACL SETUSER` after the name of the user and its password: the commands, the pattern of
/// the keys with `prefix`, and the permissions to read the Redis hash of plans, and to read and change that of API keys.
/// A running instance changes it only for its operator (`PUT /v1/keys/NAME/limits`, `tidegate key set --admin`). They
/// replace earlier permissions of the user, and do not change its passwords. They suffice on one server, on a cluster,
/// and on a master that Sentinels watch, but are not those of a user of the Sentinels.
///
/// ```
/// let rules = tidegate_redis::acl_rules("tidegate", Some("plans"), Some("keys"))?;
/// assert!(rules.starts_with("clearselectors resetkeys resetchannels -@all +evalsha "));
/// assert!(rules.ends_with(" +hscan ~tidegate:tg2:* %R~plans ~keys"));
/// # Ok::<(), tidegate_redis::PrefixError>(())
/// ```
///
/// # Errors
/// Returns an error if the prefix is not one that a store accepts.
pub fn acl_rules(prefix: &str, plan_hash: Option<&str>, key_hash: Option<&str>) -> Result<String, PrefixError> {
    let mut rules = String::from("clearselectors resetkeys resetchannels -@all");
    let of_keys = key_hash.map(|_| &KEY_HASH);
    for command in CALLS.iter().chain(READS).chain(OTHERS).chain(BAN_LIST).chain(CONNECTION).chain(of_keys) {
        rules.push_str(" +");
        rules.push_str(command);
    }
    rules.push_str(" ~");
    rules.push_str(&Prefix::new(prefix)?.key_pattern());
    for (access, hash) in [(" %R~", plan_hash), (" ~", key_hash)] {
        if let Some(hash) = hash {
            rules.push_str(access);
            rules.push_str(&escape_pattern(hash));
        }
    }
    Ok(rules)
}

/// Escapes the characters of a name that have a special meaning in a key pattern.
pub(crate) fn escape_pattern(name: &str) -> String {
    let mut pattern = String::with_capacity(name.len());
    for letter in name.chars() {
        if "*?[]\\^".contains(letter) {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern
}

/// Returns the command that a user may not run, in upper case, from the error reply of the server.
///
/// Newer servers quote it. Redis 7.0 does not if the script runs it, but reports the line of the script, except for
/// commands whose errors the script catches. Returns `None` if the reply is not about a command.
pub(crate) fn denied_command(reply: &str) -> Option<String> {
    // The last match, because the name of the user comes before it and may contain the same text.
    let quoted = reply.rsplit_once("to run the '").and_then(|(_, rest)| rest.split('\'').next());
    if let Some(name) = quoted.filter(|name| is_command(name)) {
        return Some(name.replace('|', " ").to_uppercase());
    }
    if !reply.contains("can't run this command") {
        return None;
    }
    let Some(position) = reply.split(SCRIPT_POSITION).nth(1) else {
        return Some(format!("one of {}", READS.join(", ").to_uppercase()));
    };
    let digits: String = position.chars().take_while(char::is_ascii_digit).collect();
    let index = digits.parse::<usize>().ok()?.checked_sub(1)?;
    // The reply does not say which script. The first lines of SCRIPT, as many as the other one has, run no command.
    let of_instances = INSTANCES_SCRIPT.lines().nth(index).map(commands_in).filter(|names| !names.is_empty());
    let names = of_instances.or_else(|| SCRIPT.lines().nth(index).map(commands_in))?;
    match names.as_slice() {
        // The name of the command is in a variable. Calls without a given time run PEXPIREAT.
        [] => Some("PEXPIREAT".to_owned()),
        names => Some(names.join(" or ")),
    }
}

fn is_command(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 40
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"|-_.".contains(&byte))
}

/// Returns the commands that a line of a script runs.
fn commands_in(line: &str) -> Vec<&str> {
    let runs = line.split("call('").skip(1).chain(line.split("try('").skip(1));
    runs.filter_map(|rest| rest.split('\'').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_of_the_scripts_is_allowed_and_no_other() {
        let lines = SCRIPT.lines().chain(INSTANCES_SCRIPT.lines());
        let mut used: Vec<String> = lines.flat_map(commands_in).map(str::to_lowercase).collect();
        // In a variable.
        used.extend(["pexpireat".to_owned(), "pexpire".to_owned()]);
        used.sort_unstable();
        used.dedup();
        let mut allowed = [READS, OTHERS].concat();
        allowed.sort_unstable();
        assert_eq!(used, allowed);
        let mut first = SCRIPT.lines().take(INSTANCES_SCRIPT.lines().count());
        assert!(first.all(|line| commands_in(line).is_empty()), "a line number tells which script has failed");
        assert_eq!(SCRIPT.matches("call(command").count(), 2, "a command in a variable");
    }

    #[test]
    fn every_command_of_the_ban_list_is_allowed() {
        let rules = acl_rules("tidegate", None, None).unwrap();
        let used: Vec<&str> = include_str!("../lua/bans.lua").lines().flat_map(commands_in).collect();
        assert!(used.len() > BAN_LIST.len(), "{used:?}");
        for command in used {
            assert!(rules.contains(&format!(" +{} ", command.to_lowercase())), "{command}");
        }
    }

    #[test]
    fn rules_have_the_pattern_of_the_prefix_and_access_to_hashes() {
        assert!(acl_rules("shop", None, None).unwrap().ends_with(" +asking +wait ~shop:tg2:*"));
        let starred = acl_rules("a*[b]", Some("pl?ns"), None).unwrap();
        assert!(starred.ends_with(" +wait ~a\\*\\[b\\]:tg2:* %R~pl\\?ns"), "{starred}");
        let keys = acl_rules("shop", None, Some("ke*s")).unwrap();
        assert!(keys.ends_with(" +wait +hscan ~shop:tg2:* ~ke\\*s"), "{keys}");
        assert!(acl_rules("a b", None, None).is_err());
    }

    #[test]
    fn denied_command_is_quoted_or_found_by_its_line() {
        let line = 1 + SCRIPT.lines().position(|line| line.contains("call('TIME')")).unwrap();
        let zadd = 1 + INSTANCES_SCRIPT.lines().position(|line| line.contains("call('ZADD'")).unwrap();
        let expiry = 1 + SCRIPT.lines().position(|line| line.contains("call(command")).unwrap();
        let old = "ERR The user executing the script can't run this command or subcommand";
        for (reply, command) in [
            (
                "NOPERM this user has no permissions to run the 'cluster|slots' command".to_owned(),
                Some("CLUSTER SLOTS"),
            ),
            (
                "ERR ACL failure in script: User t has no permissions to run the 'rpush' command".to_owned(),
                Some("RPUSH"),
            ),
            (format!("{old} script: 61ea05, on @user_script:{line}."), Some("TIME")),
            (format!("{old} script: 61ea05, on @user_script:{expiry}."), Some("PEXPIREAT")),
            (format!("{old} script: 0c0f2e, on @user_script:{zadd}."), Some("ZADD")),
            (old.to_owned(), Some("one of GET, PTTL, LINDEX, LLEN, LRANGE, ZSCORE")),
            ("NOPERM No permissions to access a key".to_owned(), None),
            ("NOPERM User o'brien' has no permissions to run the 'get' command".to_owned(), Some("GET")),
        ] {
            assert_eq!(denied_command(&reply).as_deref(), command, "{reply}");
        }
    }
}
