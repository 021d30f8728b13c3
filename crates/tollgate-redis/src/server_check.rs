//! Which server answers, and whether it will keep its promises.

use tollgate_core::StoreError;

use crate::reply::Reply;

const REDIS_MIN: (u32, u32) = (7, 0);
const VALKEY_MIN: (u32, u32) = (7, 2);

/// What was found at the start.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ServerReport {
    /// `Redis` or `Valkey`.
    pub name: &'static str,
    /// Its version, as it says it.
    pub version: String,
    /// What should be changed: each a sentence for an operator.
    pub warnings: Vec<String>,
}

/// Why this server will not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerCheckError {
    /// It lacks what the script needs.
    #[error("{name} {version} is too old; Tollgate needs Redis {}.{} or Valkey {}.{} at least", REDIS_MIN.0, REDIS_MIN.1, VALKEY_MIN.0, VALKEY_MIN.1)]
    TooOld {
        /// `Redis` or `Valkey`.
        name: &'static str,
        /// Its version, as it says it.
        version: String,
    },
    /// It does not say which version it has.
    #[error("the server does not say its version; Tollgate needs Redis {}.{} or Valkey {}.{} at least", REDIS_MIN.0, REDIS_MIN.1, VALKEY_MIN.0, VALKEY_MIN.1)]
    Unknown,
    /// It did not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether a server forgets keys when its memory is full. What it does not say is `None`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Eviction {
    /// Its `maxmemory-policy`.
    pub policy: Option<String>,
    /// How many keys it has evicted since it started.
    pub evicted_keys: Option<u64>,
}

impl Eviction {
    /// Reads the reply to `INFO memory stats`.
    pub(crate) fn read(info: &Reply) -> Eviction {
        let info = info.as_text().unwrap_or_default();
        Eviction {
            policy: field(info, "maxmemory_policy").map(str::to_owned),
            evicted_keys: field(info, "evicted_keys").and_then(|count| count.parse().ok()),
        }
    }
}

/// Returns a field of a reply to `INFO`.
fn field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    let value = info.lines().find_map(|line| line.split_once(':').filter(|(key, _)| *key == name));
    value.map(|(_, value)| value.trim())
}

/// The report on a server that answered `INFO server` and perhaps `CONFIG GET maxmemory-policy`.
pub(crate) fn report(info: &Reply, policy: Option<&Reply>) -> Result<ServerReport, ServerCheckError> {
    let info = info.as_text().unwrap_or_default();
    // Valkey says both, its redis_version being the one it is compatible with.
    let (name, version, least) = match (field(info, "valkey_version"), field(info, "redis_version")) {
        (Some(version), _) => ("Valkey", version, VALKEY_MIN),
        (None, Some(version)) => ("Redis", version, REDIS_MIN),
        (None, None) => return Err(ServerCheckError::Unknown),
    };
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else {
        return Err(ServerCheckError::Unknown);
    };
    if (major, minor) < least {
        return Err(ServerCheckError::TooOld { name, version: version.into() });
    }
    Ok(ServerReport { name, version: version.into(), warnings: warnings(policy) })
}

fn warnings(policy: Option<&Reply>) -> Vec<String> {
    let policy = match policy {
        Some(Reply::List(pair)) => pair.get(1).and_then(Reply::as_text),
        _ => None,
    };
    match policy {
        Some("noeviction") => Vec::new(),
        Some(policy) => vec![format!(
            "maxmemory-policy is {policy}: when memory is full the server forgets counters, and whoever was at a limit starts \
             afresh; set it to noeviction"
        )],
        None => {
            vec!["maxmemory-policy is unknown, because the server does not let us ask; it should be noeviction".into()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Reply {
        Reply::Text(text.replace('\n', "\r\n").into_bytes())
    }

    fn policy(name: &str) -> Reply {
        Reply::List(vec![Reply::Text(b"maxmemory-policy".to_vec()), Reply::Text(name.into())])
    }

    #[test]
    fn servers_are_named_with_their_own_version() {
        let redis = report(&info("# Server\nredis_version:7.0.15\nos:x"), Some(&policy("noeviction"))).unwrap();
        assert_eq!((redis.name, redis.version.as_str(), redis.warnings.len()), ("Redis", "7.0.15", 0));
        let valkey = info("# Server\nredis_version:7.2.4\nserver_name:valkey\nvalkey_version:9.1.2");
        let valkey = report(&valkey, Some(&policy("noeviction"))).unwrap();
        assert_eq!((valkey.name, valkey.version.as_str()), ("Valkey", "9.1.2"));
    }

    #[test]
    fn a_server_that_is_too_old_is_refused_by_name() {
        let old = report(&info("redis_version:6.2.14"), None).unwrap_err().to_string();
        assert!(old.contains("Redis 6.2.14 is too old") && old.contains("Redis 7.0"), "{old}");
        let old = report(&info("redis_version:7.2.4\nvalkey_version:7.1.0"), None).unwrap_err().to_string();
        assert!(old.contains("Valkey 7.1.0 is too old"), "{old}");
        assert!(matches!(report(&info("hello"), None), Err(ServerCheckError::Unknown)));
        assert!(matches!(report(&info("redis_version:seven"), None), Err(ServerCheckError::Unknown)));
    }

    #[test]
    fn what_a_server_evicts_is_read_and_what_it_hides_is_unknown() {
        let said = info("# Memory\nmaxmemory:0\nmaxmemory_policy:allkeys-lru\n# Stats\nevicted_keys:17\n");
        let expected = Eviction { policy: Some("allkeys-lru".into()), evicted_keys: Some(17) };
        assert_eq!(Eviction::read(&said), expected);
        assert_eq!(Eviction::read(&info("evicted_keys:many")), Eviction::default());
    }

    #[test]
    fn a_policy_that_forgets_counters_is_warned_of() {
        for name in ["allkeys-lru", "volatile-ttl", "allkeys-random", "volatile-lfu"] {
            let report = report(&info("redis_version:7.0.15"), Some(&policy(name))).unwrap();
            assert!(report.warnings[0].contains(name) && report.warnings[0].contains("noeviction"));
        }
        assert_eq!(report(&info("redis_version:7.0.15"), None).unwrap().warnings.len(), 1);
    }
}
