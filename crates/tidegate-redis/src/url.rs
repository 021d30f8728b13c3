//! The URL of a store: `redis://[user:password@]host[:port][/database]` for one server,
//! `redis+cluster://[user:password@]host[:port],host[:port],…` for a cluster, or
//! `redis+sentinel://[user:password@]host[:port],host[:port],…/NAME[/database]` for a master that Sentinels watch.
//!
//! The hosts in a cluster URL are asked for the topology at the start. All nodes must accept the same credentials. The
//! hosts in a Sentinel URL are Sentinels. The user and the password are those of the master and its replicas.
//!
//! `Display` and `Debug` output and error messages never contain the user or the password.

use std::fmt;

const PORT_DEFAULT: u16 = 6379;
const SENTINEL_PORT_DEFAULT: u16 = 26379;
/// The largest accepted database number. Redis has 16 databases by default.
const DATABASE_MAX: u32 = 65_535;

/// A server: address, database, credentials, and whether to use TLS.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// A name or an address; an IPv6 address has no brackets.
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: u32,
    /// The user name, decoded; `None` for the server's default user. Never without a password.
    pub(crate) user: Option<String>,
    /// The password, decoded; `None` to connect without authentication.
    pub(crate) password: Option<String>,
    /// Whether the scheme is `rediss`, `rediss+cluster` or `rediss+sentinel`.
    pub(crate) is_tls: bool,
}

/// An error for a store URL that is invalid, or that requires TLS in a build without the feature `tls`.
///
/// The message says what is wrong and what is accepted. It never contains the password.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; {}", .meant.as_deref().map_or(EXPECTED.to_owned(), |url| format!("did you mean {url}?")))]
pub struct UrlError {
    problem: String,
    /// The URL that is probably meant, without user and password.
    meant: Option<String>,
}

/// The forms of a URL, for messages.
const EXPECTED: &str = "expected redis://[user:password@]host[:port][/database], redis+cluster://[user:password@]host[:port],… for a \
    cluster, redis+sentinel://[user:password@]host[:port],…/NAME[/database] for Sentinels, or rediss://, rediss+cluster:// and \
    rediss+sentinel:// for TLS";

impl UrlError {
    fn new(problem: impl Into<String>) -> UrlError {
        UrlError { problem: problem.into(), meant: None }
    }

    /// Returns the URL that is probably meant, such as `redis://localhost:6379` for `localhost:6379`, without user and
    /// password. Returns `None` if it is not known. The message contains it.
    pub fn meant(&self) -> Option<&str> {
        self.meant.as_deref()
    }
}

/// What the hosts of a store's URL are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreKind {
    /// One server that holds all keys.
    Server,
    /// Some nodes of a cluster.
    Cluster,
    /// Some Sentinels, which know the master by a name.
    Sentinel,
}

/// The servers of a store, with their credentials and whether they use TLS; for
/// [`RedisStore::builder_for`](crate::RedisStore::builder_for).
///
/// Its `Display` and `Debug` output contains neither the user nor the password.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreAddress {
    pub(crate) kind: StoreKind,
    /// The server, the first node of the cluster, or, with the address of the first Sentinel, the credentials, the
    /// database and the TLS setting of the master.
    pub(crate) server: Endpoint,
    /// The host and the port of the server, or of each node or Sentinel that is asked at the start; at least one.
    addresses: Vec<(String, u16)>,
    /// The name under which the Sentinels know the master; else empty.
    pub(crate) master: String,
}

impl StoreAddress {
    /// Parses `redis://[user:password@]host[:port][/database]`, `redis+cluster://[user:password@]host[:port],…` or
    /// `redis+sentinel://[user:password@]host[:port],…/NAME[/database]`. The schemes `rediss`, `rediss+cluster` and
    /// `rediss+sentinel` use TLS.
    ///
    /// The port defaults to 6379, that of a Sentinel to 26379, and the database to 0. User and password may be
    /// percent-encoded.
    ///
    /// # Errors
    /// Returns an error if the scheme is unknown, a part is missing or invalid, or the scheme requires TLS and the
    /// feature `tls` is off.
    pub(crate) fn parse(url: &str) -> Result<StoreAddress, UrlError> {
        let parts = UrlParts::split(url)?;
        StoreAddress::of(parts.kind, &parts, &parts.addresses.split(',').collect::<Vec<_>>(), parts.path)
    }

    /// Combines URLs with one server, node or Sentinel each. `master` is the name under which Sentinels know the master.
    ///
    /// The kind in the schemes of the URLs is ignored. The credentials and the use of TLS are those of the first URL.
    /// Without `master`, the first path of a URL is the name of the master, or the database.
    ///
    /// # Errors
    /// Returns an error if there is no URL, or a part of one is missing, invalid or does not fit the kind; see
    /// [`RedisStore::builder`](crate::RedisStore::builder).
    pub fn of_list(kind: StoreKind, urls: &[&str], master: Option<&str>) -> Result<StoreAddress, UrlError> {
        let parts = urls.iter().map(|url| UrlParts::split(url)).collect::<Result<Vec<_>, _>>()?;
        let first = parts.first().ok_or_else(|| UrlError::new("there is no URL"))?;
        let addresses: Vec<&str> = parts.iter().flat_map(|url| url.addresses.split(',')).collect();
        let path = parts.iter().map(|url| url.path).find(|path| !path.is_empty()).unwrap_or_default();
        let path = master.unwrap_or_else(|| path.trim_end_matches('/'));
        StoreAddress::of(kind, first, &addresses, path)
    }

    /// Parses these hosts and this path for servers of this kind, with the credentials and the use of TLS of `url`.
    fn of(kind: StoreKind, url: &UrlParts<'_>, texts: &[&str], path: &str) -> Result<StoreAddress, UrlError> {
        let (is_tls, (user, password)) = (url.is_tls, parse_login(url.login)?);
        if kind == StoreKind::Server && texts.len() > 1 {
            return Err(UrlError::new(
                "a URL with several hosts must begin with redis+cluster://, redis+sentinel://, rediss+cluster:// or \
                 rediss+sentinel://",
            ));
        }
        let port_default = if kind == StoreKind::Sentinel { SENTINEL_PORT_DEFAULT } else { PORT_DEFAULT };
        let addresses = texts.iter().map(|text| parse_address(text, port_default)).collect::<Result<Vec<_>, _>>();
        let (master, database) = match kind {
            StoreKind::Server | StoreKind::Cluster => ("", path),
            StoreKind::Sentinel => path.split_once('/').unwrap_or((path, "")),
        };
        if kind == StoreKind::Sentinel && master.is_empty() {
            let problem = "the name of the master is missing after the Sentinels".to_owned();
            // Without the user and the password.
            let scheme = if is_tls { "rediss" } else { "redis" };
            let meant = addresses.is_ok().then(|| format!("{scheme}+sentinel://{}/NAME", texts.join(",")));
            return Err(UrlError { problem, meant });
        }
        let (master, database) = (parse_master_name(master)?, parse_database(database)?);
        if kind == StoreKind::Cluster && database != 0 {
            return Err(UrlError::new("a cluster has only database 0"));
        }
        let addresses = addresses?;
        let (host, port) = addresses[0].clone();
        Ok(StoreAddress { kind, server: Endpoint { host, port, database, user, password, is_tls }, addresses, master })
    }

    /// Returns what the hosts are.
    pub fn kind(&self) -> StoreKind {
        self.kind
    }

    /// Returns whether the URLs had a password.
    pub fn has_password(&self) -> bool {
        self.server.password.is_some()
    }

    /// Returns the server, or the nodes or the Sentinels that are asked at the start. The Sentinels have no credentials.
    pub(crate) fn endpoints(&self) -> Vec<Endpoint> {
        let template = match self.kind {
            StoreKind::Server | StoreKind::Cluster => self.server.clone(),
            StoreKind::Sentinel => Endpoint { database: 0, user: None, password: None, ..self.server.clone() },
        };
        self.addresses.iter().map(|(host, port)| template.at(host, *port)).collect()
    }
}

/// The parts of a URL. Hosts, path and credentials are not parsed yet.
struct UrlParts<'u> {
    kind: StoreKind,
    is_tls: bool,
    /// The part before the last `@`.
    login: Option<&'u str>,
    /// The hosts and their ports, separated by commas.
    addresses: &'u str,
    /// The part after the first `/`: a database, or the name of a master.
    path: &'u str,
}

impl<'u> UrlParts<'u> {
    fn split(url: &'u str) -> Result<UrlParts<'u>, UrlError> {
        let Some((scheme, rest)) = url.split_once("://") else {
            let meant = is_address(url).then(|| format!("redis://{url}"));
            return Err(UrlError { problem: "the store's URL has no scheme".to_owned(), meant });
        };
        let (is_tls, kind) = match scheme {
            "redis" => (false, StoreKind::Server),
            "redis+cluster" => (false, StoreKind::Cluster),
            "redis+sentinel" => (false, StoreKind::Sentinel),
            "rediss" | "rediss+cluster" | "rediss+sentinel" if !cfg!(feature = "tls") => {
                return Err(UrlError::new(format!("{scheme}:// needs the feature `tls`")));
            }
            "rediss" => (true, StoreKind::Server),
            "rediss+cluster" => (true, StoreKind::Cluster),
            "rediss+sentinel" => (true, StoreKind::Sentinel),
            // The message repeats the scheme only if it looks like one: otherwise it might contain a secret.
            other if other.len() <= 32 && other.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b)) => {
                return Err(UrlError::new(format!("unknown scheme {other:?}")));
            }
            _ => return Err(UrlError::new("unknown scheme")),
        };
        if kind != StoreKind::Server && rest.contains("://") {
            return Err(UrlError::new(
                "expected one URL; list the nodes of a cluster, or the Sentinels, after one scheme, separated by commas",
            ));
        }
        // The last `@` ends the password, which may itself contain one.
        let (login, place) = match rest.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, rest),
        };
        let (addresses, path) = place.split_once('/').unwrap_or((place, ""));
        Ok(UrlParts { kind, is_tls, login, addresses, path })
    }
}

/// Returns whether a text without a scheme is `host:port`. Any other text might be a secret, and is not repeated.
fn is_address(text: &str) -> bool {
    let is_host_byte = |byte: u8| byte.is_ascii_alphanumeric() || b".-[:]".contains(&byte);
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    has_port && text.bytes().all(is_host_byte) && parse_address(text, PORT_DEFAULT).is_ok()
}

/// Parses the name of a master: letters, digits, `.`, `-` and `_`, as in the configuration of a Sentinel.
fn parse_master_name(text: &str) -> Result<String, UrlError> {
    let is_valid = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    let problem = "the name of the master may have letters, digits, `.`, `-` and `_`";
    is_valid.then(|| text.to_owned()).ok_or_else(|| UrlError::new(problem))
}

/// Parses a database number from 0 to 65,535; an empty text is 0.
fn parse_database(text: &str) -> Result<u32, UrlError> {
    if text.is_empty() {
        return Ok(0);
    }
    let number = text.parse().ok().filter(|&number| number <= DATABASE_MAX);
    number.ok_or_else(|| UrlError::new(format!("the database must be a number from 0 to {DATABASE_MAX}")))
}

/// Parses `host[:port]` or `[IPv6][:port]`. Returns the host, without brackets, and the port or its default.
///
/// # Errors
/// Returns an error if the host is missing or has an invalid character, a bracket is not closed, or the port is not 1
/// to 65535.
fn parse_address(text: &str, port_default: u16) -> Result<(String, u16), UrlError> {
    let (host, port) = match text.strip_prefix('[') {
        Some(v6) => {
            let (host, rest) = v6.split_once(']').ok_or_else(|| UrlError::new("`[` without `]` in the host"))?;
            if !rest.is_empty() && !rest.starts_with(':') {
                return Err(UrlError::new("unexpected text between `]` and the port"));
            }
            (host, rest.strip_prefix(':'))
        }
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    if host.is_empty() {
        return Err(UrlError::new("the host is missing"));
    }
    if host.bytes().any(|byte| byte.is_ascii_whitespace() || byte.is_ascii_control() || b"?#".contains(&byte)) {
        return Err(UrlError::new("the host contains an invalid character"));
    }
    let port = match port {
        None => port_default,
        Some(port) => {
            let number = port.parse().ok().filter(|&port: &u16| port > 0);
            number.ok_or_else(|| UrlError::new("the port must be a number from 1 to 65535"))?
        }
    };
    Ok((host.into(), port))
}

/// Parses `user:password`, `:password`, or a password alone as older clients write it. Returns user and password.
///
/// Both are `None` if there is no text. An empty user is `None`. An empty password, or an invalid escape, is an error.
fn parse_login(text: Option<&str>) -> Result<(Option<String>, Option<String>), UrlError> {
    let Some(text) = text else {
        return Ok((None, None));
    };
    let (user, password) = text.split_once(':').unwrap_or(("", text));
    let user = unescape(user)?;
    let password = unescape(password)?;
    if password.is_empty() {
        return Err(UrlError::new("the password is missing before `@`"));
    }
    Ok(((!user.is_empty()).then_some(user), Some(password)))
}

/// Decodes percent-encoding. An incomplete escape, or a result that is not UTF-8, is an error.
fn unescape(text: &str) -> Result<String, UrlError> {
    let problem = || UrlError::new("a `%` in user or password must be followed by two hex digits");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, tail @ ..] = rest else { return Err(problem()) };
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or_else(problem);
        bytes.push((digit(*high)? * 16 + digit(*low)?) as u8);
        rest = tail;
    }
    String::from_utf8(bytes).map_err(|_| UrlError::new("user and password must be UTF-8"))
}

/// Formats the URL for error messages: without user and password.
impl fmt::Display for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            StoreKind::Server => return self.server.fmt(f),
            StoreKind::Cluster => "cluster",
            StoreKind::Sentinel => "sentinel",
        };
        let hosts: Vec<String> = self.endpoints().iter().map(Endpoint::address).collect();
        write!(f, "{}+{kind}://{}", self.server.scheme(), hosts.join(","))?;
        if self.kind == StoreKind::Sentinel {
            write!(f, "/{}", self.master)?;
        }
        if self.server.database == 0 { Ok(()) } else { write!(f, "/{}", self.server.database) }
    }
}

/// Formats the URL as [`fmt::Display`] does, with `***@` in place of the user and the password.
impl fmt::Debug for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_masked(f, &self.to_string(), self.has_password())
    }
}

impl Endpoint {
    /// Returns `host:port`, with brackets around an IPv6 address.
    pub(crate) fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    fn scheme(&self) -> &'static str {
        if self.is_tls { "rediss" } else { "redis" }
    }

    /// Returns the server at another address, with the same credentials.
    pub(crate) fn at(&self, host: &str, port: u16) -> Endpoint {
        Endpoint { host: host.to_owned(), port, ..self.clone() }
    }
}

/// Formats the URL for error messages: without user and password, and without the database if it is 0.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme(), self.address())?;
        if self.database == 0 { Ok(()) } else { write!(f, "/{}", self.database) }
    }
}

/// Formats the URL as [`fmt::Display`] does, with `***@` in place of the user and the password.
impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_masked(f, &self.to_string(), self.password.is_some())
    }
}

/// Writes a URL, with `***@` before the host if it has a password.
fn fmt_masked(f: &mut fmt::Formatter<'_>, url: &str, has_password: bool) -> fmt::Result {
    if has_password { f.write_str(&url.replacen("://", "://***@", 1)) } else { f.write_str(url) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(url: &str) -> Endpoint {
        let address = StoreAddress::parse(url).unwrap();
        assert_eq!((address.kind(), address.endpoints()), (StoreKind::Server, vec![address.server.clone()]));
        address.server
    }

    #[test]
    fn cluster_has_one_or_more_nodes_with_the_same_credentials() {
        let url = StoreAddress::parse("redis+cluster://ann:pw@10.0.0.1:7000,example.org,[::1]:7001/0").unwrap();
        assert_eq!(url.kind(), StoreKind::Cluster);
        let nodes = url.endpoints();
        let places: Vec<String> = nodes.iter().map(Endpoint::address).collect();
        assert_eq!(places, ["10.0.0.1:7000", "example.org:6379", "[::1]:7001"]);
        assert!(nodes.iter().all(|node| node.user.as_deref() == Some("ann") && node.password.as_deref() == Some("pw")));
    }

    #[test]
    fn sentinels_have_a_port_of_their_own_and_no_credentials() {
        let url = StoreAddress::parse("redis+sentinel://ann:pw@10.0.0.1:7000,example.org,[::1]/my-master.1/3").unwrap();
        assert_eq!(url.kind(), StoreKind::Sentinel);
        let sentinels = url.endpoints();
        let places: Vec<String> = sentinels.iter().map(Endpoint::address).collect();
        assert_eq!(places, ["10.0.0.1:7000", "example.org:26379", "[::1]:26379"]);
        assert!(sentinels.iter().all(|sentinel| sentinel.password.is_none() && sentinel.database == 0));
        assert_eq!((url.master.as_str(), url.server.database), ("my-master.1", 3));
        assert_eq!((url.server.user.as_deref(), url.server.password.as_deref()), (Some("ann"), Some("pw")));
    }

    #[test]
    fn urls_of_a_list_become_one_address_with_the_credentials_of_the_first() {
        let of = |kind, urls: &[&str], master| StoreAddress::of_list(kind, urls, master);
        let cluster = of(StoreKind::Cluster, &["redis://ann:pw@a:1", "redis://ann:pw@[::1]/"], None).unwrap();
        assert_eq!((cluster.kind(), cluster.has_password()), (StoreKind::Cluster, true));
        assert_eq!(cluster, StoreAddress::parse("redis+cluster://ann:pw@a:1,[::1]:6379").unwrap());
        let sentinels = of(StoreKind::Sentinel, &["redis://a:1", "redis://b"], Some("main/3")).unwrap();
        assert_eq!((sentinels.kind(), sentinels.has_password()), (StoreKind::Sentinel, false));
        assert_eq!(sentinels, StoreAddress::parse("redis+sentinel://a:1,b/main/3").unwrap());
        let server = of(StoreKind::Server, &["redis://h/2"], None).unwrap();
        assert_eq!((server.kind(), server.to_string().as_str()), (StoreKind::Server, "redis://h:6379/2"));
        for (kind, urls, problem) in [
            (StoreKind::Server, &[][..], "there is no URL"),
            (StoreKind::Server, &["redis://a", "redis://b"], "a URL with several hosts"),
            (StoreKind::Cluster, &["redis://:hunter2@a/1"], "a cluster has only database 0"),
            (StoreKind::Sentinel, &["redis://a"], "the name of the master is missing"),
        ] {
            let error = of(kind, urls, None).unwrap_err().to_string();
            assert!(error.starts_with(problem) && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn missing_parts_have_defaults() {
        let plain = endpoint("redis://example.org");
        assert_eq!((plain.host.as_str(), plain.port, plain.database, plain.is_tls), ("example.org", 6379, 0, false));
        assert_eq!((plain.user, plain.password), (None, None));
        let full = endpoint("redis://ann:s%40cret@10.0.0.1:7000/3");
        assert_eq!((full.port, full.database), (7000, 3));
        assert_eq!((full.user.as_deref(), full.password.as_deref()), (Some("ann"), Some("s@cret")));
        assert_eq!(endpoint("redis://:pw@h/").password.as_deref(), Some("pw"));
        assert_eq!(endpoint("redis://p@ss:w@h").password.as_deref(), Some("w"));
        assert_eq!(endpoint("redis://[::1]:7000").host, "::1");
        assert_eq!(endpoint("redis://[::1]").port, 6379);
    }

    #[test]
    fn error_says_what_is_accepted_and_hides_the_password() {
        let urls = [
            "",
            "localhost",
            "hunter2",
            "hunter2@localhost:6379",
            "hunter2:x",
            "http://hunter2@localhost",
            "redis+carrier-pigeon://localhost",
            "redis://",
            "redis://:hunter2@",
            "redis://hunter2:@localhost",
            "redis://localhost:0",
            "redis://localhost:65536",
            "redis://localhost:hunter2",
            "redis://localhost/hunter2",
            "redis://localhost/-1",
            "redis://localhost/99999999999",
            "redis://localhost/1/2",
            "redis://u:hunter2%zz@localhost",
            "redis://u:hunter2%4@localhost",
            "redis://u:hunter2@local host",
            "redis://[::1:6379",
            "redis://[::1]x",
            "redis://a,hunter2",
            "redis+cluster://",
            "redis+cluster://a,",
            "redis+cluster://a,b:0",
            "redis+cluster://a/1",
            "redis+cluster://a,redis://:hunter2@b",
            "redis+cluster://a,redis://b",
            "redis+sentinel://",
            "redis+sentinel:///main",
            "redis+sentinel://a,/main",
            "redis+sentinel://a/ma in",
            "redis+sentinel://a/main/x",
            "redis+sentinel://a/main/1/2",
            "redis+sentinel://:hunter2@a,redis://b/main",
            "redis+sentinel://a/main,redis+sentinel://:hunter2@b/main",
        ];
        for url in urls {
            let error = StoreAddress::parse(url).expect_err(url).to_string();
            assert!(error.contains("redis://[user:password@]host[:port][/database]"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn error_suggests_the_url_that_is_meant_without_the_password() {
        for (url, meant) in [
            ("localhost:6379", "redis://localhost:6379"),
            ("10.0.0.1:7000", "redis://10.0.0.1:7000"),
            ("[::1]:7000", "redis://[::1]:7000"),
            ("redis+sentinel://a", "redis+sentinel://a/NAME"),
            ("redis+sentinel://a/", "redis+sentinel://a/NAME"),
            ("redis+sentinel://u:hunter2@a:1,[::1]", "redis+sentinel://a:1,[::1]/NAME"),
        ] {
            let error = StoreAddress::parse(url).expect_err(url);
            assert_eq!(error.meant(), Some(meant));
            assert!(error.to_string().ends_with(&format!("; did you mean {meant}?")), "{error}");
        }
    }

    #[test]
    fn list_of_urls_is_an_error_about_the_list() {
        let one_url = "expected one URL; list the nodes of a cluster, or the Sentinels, after one scheme";
        let several = "a URL with several hosts must begin with redis+cluster://, redis+sentinel://";
        for (url, problem) in [
            ("redis+sentinel://a/main,redis://b", one_url),
            ("redis+sentinel://a,redis://b/main", one_url),
            ("redis+cluster://a,redis://b", one_url),
            ("redis+cluster://a,redis+sentinel://b/main", one_url),
            ("redis://a,redis+cluster://b", several),
            ("redis://a,b", several),
        ] {
            let error = StoreAddress::parse(url).expect_err(url).to_string();
            assert!(error.starts_with(problem), "{url}: {error}");
        }
    }

    #[test]
    fn formatted_url_has_no_user_and_no_password() {
        for (url, display, debug) in [
            ("redis://h", "redis://h:6379", "redis://h:6379"),
            ("redis://ann:hunter2@h/1", "redis://h:6379/1", "redis://***@h:6379/1"),
            ("redis://:hunter2@[::1]:7000", "redis://[::1]:7000", "redis://***@[::1]:7000"),
            ("redis+cluster://a,b:7", "redis+cluster://a:6379,b:7", "redis+cluster://a:6379,b:7"),
            ("rediss+cluster://:hunter2@[::1]", "rediss+cluster://[::1]:6379", "rediss+cluster://***@[::1]:6379"),
            ("redis+sentinel://a,b:7/main", "redis+sentinel://a:26379,b:7/main", "redis+sentinel://a:26379,b:7/main"),
            (
                "rediss+sentinel://:hunter2@a/main/3",
                "rediss+sentinel://a:26379/main/3",
                "rediss+sentinel://***@a:26379/main/3",
            ),
        ] {
            let url = StoreAddress::parse(url).unwrap();
            assert_eq!((url.to_string().as_str(), format!("{url:?}").as_str()), (display, debug));
        }
    }
}
