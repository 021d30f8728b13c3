//! Checks of the server: its version, and settings with which it would lose counters.

use tidegate_core::StoreError;

use crate::reply::Reply;

const REDIS_MIN: (u32, u32) = (7, 0);
const VALKEY_MIN: (u32, u32) = (7, 2);

/// The server of a store, as [`RedisStore::check_server`](crate::RedisStore::check_server) found it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ServerReport {
    /// `Redis` or `Valkey`.
    pub name: &'static str,
    /// The version that the server reports.
    pub version: String,
    /// What the operator should change in the server's configuration, one message each. Empty if nothing.
    pub warnings: Vec<String>,
}

/// The error of [`RedisStore::check_server`](crate::RedisStore::check_server).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerCheckError {
    /// The server is too old for the script: below Redis 7.0 or Valkey 7.2.
    #[error("{name} {version} is too old; Tidegate needs at least Redis {}.{} or Valkey {}.{}", REDIS_MIN.0, REDIS_MIN.1, VALKEY_MIN.0, VALKEY_MIN.1)]
    TooOld {
        /// `Redis` or `Valkey`.
        name: &'static str,
        /// The version that the server reports.
        version: String,
    },
    /// The reply to `INFO` has no version, or one that is not in the form `major.minor`.
    #[error("the server does not report its version; Tidegate needs at least Redis {}.{} or Valkey {}.{}", REDIS_MIN.0, REDIS_MIN.1, VALKEY_MIN.0, VALKEY_MIN.1)]
    Unknown,
    /// The command `INFO` failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// How the server evicts keys when its memory is full. A field that the server does not report is `None`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Eviction {
    /// The `maxmemory-policy`.
    pub policy: Option<String>,
    /// The number of keys evicted since the server started.
    pub evicted_keys: Option<u64>,
}

impl Eviction {
    /// Parses the reply to `INFO memory stats`. A field that is missing or invalid becomes `None`.
    pub(crate) fn read(info: &Reply) -> Eviction {
        let info = info.as_text().unwrap_or_default();
        Eviction {
            policy: field(info, "maxmemory_policy").map(str::to_owned),
            evicted_keys: field(info, "evicted_keys").and_then(|count| count.parse().ok()),
        }
    }

    /// Combines the reports of several servers: the sum of the evicted keys, and a policy other than `noeviction` if any
    /// server has one. A field that any server does not report is `None`, unless such a policy is known.
    pub(crate) fn sum(servers: Vec<Eviction>) -> Eviction {
        let evicting =
            servers.iter().find(|server| server.policy.as_deref().is_some_and(|policy| policy != "noeviction"));
        let unknown = servers.iter().find(|server| server.policy.is_none());
        let policy = evicting.or(unknown).or(servers.first()).and_then(|server| server.policy.clone());
        let evicted_keys = servers.iter().map(|server| server.evicted_keys).sum();
        Eviction { policy, evicted_keys }
    }
}

/// Combines the replies of all servers to `INFO`, each with its name, into one report. With one server, it is that of
/// the server.
///
/// The version is that of all servers, or a list of those that occur. Warnings and errors name their server.
///
/// # Errors
/// Returns the first error. Without a server, returns [`ServerCheckError::Unknown`].
pub(crate) fn combine(infos: Vec<(String, Result<Reply, StoreError>)>) -> Result<ServerReport, ServerCheckError> {
    let is_one = infos.len() == 1;
    let mut combined: Option<ServerReport> = None;
    for (server, info) in infos {
        let mut report = report(&info?).map_err(|error| match error {
            ServerCheckError::TooOld { name, version } if !is_one => {
                ServerCheckError::TooOld { name, version: format!("{version} on {server}") }
            }
            error => error,
        })?;
        if !is_one {
            report.warnings.iter_mut().for_each(|warning| *warning = format!("{server}: {warning}"));
        }
        match &mut combined {
            None => combined = Some(report),
            Some(combined) => {
                combined.warnings.append(&mut report.warnings);
                if !combined.version.split(", ").any(|version| version == report.version) {
                    combined.version.push_str(", ");
                    combined.version.push_str(&report.version);
                }
            }
        }
    }
    combined.ok_or(ServerCheckError::Unknown)
}

/// Returns the value of the line `name:value` in a reply to `INFO`, or `None` if there is no such line.
fn field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    let value = info.lines().find_map(|line| line.split_once(':').filter(|(key, _)| *key == name));
    value.map(|(_, value)| value.trim())
}

/// Creates the report from the reply to `INFO`.
///
/// The report has a warning if `maxmemory_policy` is not `noeviction`, or is missing.
///
/// # Errors
/// Returns an error if `info` has no valid version, or the version is too old.
pub(crate) fn report(info: &Reply) -> Result<ServerReport, ServerCheckError> {
    let info = info.as_text().unwrap_or_default();
    // Valkey reports both; its redis_version is the one that it is compatible with.
    let (name, version, minimum) = match (field(info, "valkey_version"), field(info, "redis_version")) {
        (Some(version), _) => ("Valkey", version, VALKEY_MIN),
        (None, Some(version)) => ("Redis", version, REDIS_MIN),
        (None, None) => return Err(ServerCheckError::Unknown),
    };
    let mut numbers = version.split('.').map(|part| part.parse::<u32>().ok());
    let (Some(Some(major)), Some(Some(minor))) = (numbers.next(), numbers.next()) else {
        return Err(ServerCheckError::Unknown);
    };
    if (major, minor) < minimum {
        return Err(ServerCheckError::TooOld { name, version: version.into() });
    }
    Ok(ServerReport { name, version: version.into(), warnings: warnings(field(info, "maxmemory_policy")) })
}

fn warnings(policy: Option<&str>) -> Vec<String> {
    match policy {
        Some("noeviction") => Vec::new(),
        Some(policy) => vec![format!(
            "maxmemory-policy is {policy}: when memory is full, the server evicts counters, which then start again at zero; \
             set it to noeviction"
        )],
        None => {
            vec!["maxmemory-policy is unknown, because INFO does not report it; it should be noeviction".into()]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(text: &str) -> Reply {
        Reply::Text(text.replace('\n', "\r\n").into_bytes())
    }

    #[test]
    fn report_has_the_name_and_version_of_the_server() {
        let redis = report(&info("# Server\nredis_version:7.0.15\nos:x\nmaxmemory_policy:noeviction")).unwrap();
        assert_eq!((redis.name, redis.version.as_str(), redis.warnings.len()), ("Redis", "7.0.15", 0));
        let valkey = info("# Server\nredis_version:7.2.4\nserver_name:valkey\nvalkey_version:9.1.2");
        let valkey = report(&valkey).unwrap();
        assert_eq!((valkey.name, valkey.version.as_str()), ("Valkey", "9.1.2"));
    }

    #[test]
    fn too_old_server_is_an_error_with_its_version() {
        let old = report(&info("redis_version:6.2.14")).unwrap_err().to_string();
        assert!(old.contains("Redis 6.2.14 is too old") && old.contains("Redis 7.0"), "{old}");
        let old = report(&info("redis_version:7.2.4\nvalkey_version:7.1.0")).unwrap_err().to_string();
        assert!(old.contains("Valkey 7.1.0 is too old"), "{old}");
        assert!(matches!(report(&info("hello")), Err(ServerCheckError::Unknown)));
        assert!(matches!(report(&info("redis_version:seven")), Err(ServerCheckError::Unknown)));
    }

    #[test]
    fn eviction_is_parsed_and_missing_fields_are_none() {
        let reply = info("# Memory\nmaxmemory:0\nmaxmemory_policy:allkeys-lru\n# Stats\nevicted_keys:17\n");
        let expected = Eviction { policy: Some("allkeys-lru".into()), evicted_keys: Some(17) };
        assert_eq!(Eviction::read(&reply), expected);
        assert_eq!(Eviction::read(&info("evicted_keys:many")), Eviction::default());
    }

    #[test]
    fn policy_that_evicts_counters_gives_a_warning() {
        for name in ["allkeys-lru", "volatile-ttl", "allkeys-random", "volatile-lfu"] {
            let report = report(&info(&format!("redis_version:7.0.15\nmaxmemory_policy:{name}"))).unwrap();
            assert!(report.warnings[0].contains(name) && report.warnings[0].contains("noeviction"));
        }
        assert_eq!(report(&info("redis_version:7.0.15")).unwrap().warnings.len(), 1);
    }
}
