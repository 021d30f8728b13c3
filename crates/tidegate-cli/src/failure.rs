//! Errors of the command, as reports for the terminal.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;

use miette::{Diagnostic, MietteHandlerOpts};
use tidegate::{__io_reason, StoreErrorKind};
use tidegate_server::SecretKind;

/// An error that ends a command with exit code 2. Its message is printed to standard error and contains no secret.
#[derive(Debug, thiserror::Error, Diagnostic)]
pub(crate) enum Failure {
    #[error(transparent)]
    Store(#[from] tidegate::StoreUrlError),
    /// An invalid configuration. The report shows all errors, each with its place in the file.
    #[error("{}", .0.summary())]
    #[diagnostic(transparent)]
    Configuration(tidegate::config::Report),
    #[error(transparent)]
    #[diagnostic(help(
        "check that the store is running and that its URL is correct (--store, --store-file, $TIDEGATE_STORE, $REDIS_URL, or `store` in the configuration file)"
    ))]
    StoreFailed(tidegate::StoreError),
    #[error(transparent)]
    #[diagnostic(help(
        "check that the store is running and that its URL is correct (--store, --store-file, $TIDEGATE_STORE, $REDIS_URL, or `store` in the configuration file)"
    ))]
    Unavailable(tidegate::Unavailable),
    /// A server that can never be used as the store, such as a node of a cluster. The message names its address.
    #[error("{0}")]
    #[diagnostic(help("specify another server with --store URL (or $TIDEGATE_STORE, $REDIS_URL)"))]
    StoreUnsupported(String),
    #[error(transparent)]
    Key(#[from] tidegate::KeyError),
    #[error(transparent)]
    Limit(#[from] tidegate::LimitTextError),
    #[error("cannot read {}: {}", .file.display(), __io_reason(.error))]
    #[diagnostic(help("check the file's name and permissions"))]
    Unreadable { file: PathBuf, error: std::io::Error },
    #[error("cannot write {}: {}", .file.display(), __io_reason(.error))]
    #[diagnostic(help("specify a directory that you can write to"))]
    Unwritable { file: PathBuf, error: std::io::Error },
    #[error("{place}: {error}")]
    Token { place: String, error: tidegate_server::SecretError },
    #[error("{} contains no store URL", .file.display())]
    #[diagnostic(help("write the URL to this file, such as redis://:PASSWORD@127.0.0.1:6379"))]
    StoreUrlMissing { file: PathBuf },
    #[error("{place} contains no password for Redis clients")]
    #[diagnostic(help("write the password to this file, or omit --{option} to accept clients without a password"))]
    PasswordMissing { place: String, option: &'static str },
    #[error("{place}: the receipt secret must be at least {bytes_min} bytes long; this one has {bytes}")]
    #[diagnostic(help("generate one, for example with `openssl rand -hex 32`"))]
    ReceiptSecretShort { place: String, bytes: usize, bytes_min: usize },
    #[error("${variable} is not valid UTF-8")]
    #[diagnostic(help("a secret in the environment must be UTF-8; encode other bytes as hex or base64"))]
    NotText { variable: String },
    #[error(transparent)]
    Tls(#[from] tidegate_server::CertificateError),
    #[error(transparent)]
    #[diagnostic(help(
        "expected in `ca_file` of an upstream: a PEM file with the certificate of its authority; without `ca_file`, the CA certificates of the operating system are used (package ca-certificates)"
    ))]
    Upstream(#[from] tidegate_server::UpstreamError),
    #[error("the gateway has no upstream to forward requests to")]
    #[diagnostic(help(
        "name one with --upstream URL, such as http://127.0.0.1:3000, or list them in the configuration file as [[upstreams]]"
    ))]
    NoUpstream,
    #[error("upstreams are given both by --upstream and by [[upstreams]] in the configuration file")]
    #[diagnostic(help("remove --upstream, or remove [[upstreams]] from the file"))]
    UpstreamsTwice,
    /// A listener that other machines can reach without a secret, which `--insecure` would allow.
    #[error("the {listener} listener on {address} is reachable from other machines and requires no {}", .secret.form.as_str())]
    #[diagnostic(help(
        "set ${} or --{} FILE, listen on 127.0.0.1, or accept every client with --insecure", .secret.variable, .secret.option
    ))]
    Exposed { listener: &'static str, address: SocketAddr, secret: SecretKind },
    /// A listener of the operator that other machines can reach without a secret, which is never allowed.
    #[error("the {listener} listener on {address} is reachable from other machines and needs a {}", .secret.form.as_str())]
    #[diagnostic(help("set ${} or --{} FILE, or listen on 127.0.0.1", .secret.variable, .secret.option))]
    OperatorExposed { listener: &'static str, address: SocketAddr, secret: SecretKind },
    #[error("cannot open the {listener} listener on {address}: {}", __io_reason(.error))]
    #[diagnostic(help("choose another address with --{option} ADDRESS, or disable this listener with --{option} off"))]
    Listen { listener: &'static str, option: &'static str, address: String, error: std::io::Error },
    #[error("cannot use a socket passed with LISTEN_FDS: {}", __io_reason(.0))]
    #[diagnostic(help(
        "each inherited descriptor must be a TCP socket: in a systemd socket unit, ListenStream=HOST:PORT"
    ))]
    InheritedSocket(std::io::Error),
    #[error("no listener uses the inherited socket {addresses}")]
    #[diagnostic(help("set a listener's address to that of the socket, or remove the socket from the socket unit"))]
    UnusedSockets { addresses: String },
    #[error("every listener is off, so there is nothing to serve{reasons}")]
    #[diagnostic(help("set an address for at least one listener, for example with --http or --admin"))]
    NothingToServe {
        /// Why listeners are off that were not disabled, each as ` (NAME: REASON)`.
        reasons: String,
    },
    #[error("invalid --{option} URL: the scheme is missing; did you mean {url}?")]
    SchemeMissing { option: &'static str, url: String },
    #[error(
        "invalid --admin URL: expected http://HOST:PORT or https://HOST:PORT without a user or password, such as http://127.0.0.1:9180"
    )]
    #[diagnostic(help(
        "pass the admin token in $TIDEGATE_ADMIN_TOKEN or with --admin-token-file FILE, not in the URL"
    ))]
    AdminUrl,
    #[error("the admin API requires a token, but none was given")]
    #[diagnostic(help(
        "set $TIDEGATE_ADMIN_TOKEN or --admin-token-file FILE; without these, `tidegate serve` generates a token and prints it"
    ))]
    AdminTokenMissing,
    #[error("the admin listener {url} does not accept the token: it is wrong")]
    #[diagnostic(help(
        "use the token of that instance: the one in its $TIDEGATE_ADMIN_TOKEN or --admin-token-file, or else the one that `tidegate serve` printed when it started"
    ))]
    AdminTokenWrong { url: String },
    /// No API key has the name that was given. `tidegate key` then exits with 1.
    #[error("{message}")]
    UnknownKey { message: String },
    /// An API key that cannot be shown or changed. The message says why, and what is accepted.
    #[error("{0}")]
    KeyNotChanged(String),
    #[error("cannot reach the admin listener {url}: {reason}")]
    #[diagnostic(help("check that the instance is running, and that --admin is the URL of its admin listener"))]
    AdminUnreachable { url: String, reason: String },
    #[error("{url} is not an admin listener: {reason}")]
    #[diagnostic(help(
        "use the address on the `admin` line that `tidegate serve` prints (default: http://127.0.0.1:9180)"
    ))]
    NotAdmin { url: String, reason: String },
    #[error("the admin listener responded with status {status}: {message}")]
    AdminRefused { status: u16, message: String },
    #[error("invalid request: {0}")]
    #[diagnostic(help("expected METHOD PATH, such as POST /shorten"))]
    Request(http::Error),
    #[error("invalid request: the path must begin with /")]
    #[diagnostic(help("expected METHOD PATH, such as POST /shorten"))]
    RequestPath,
    #[error("invalid header: expected `NAME: VALUE`, or @FILE with one such header per line")]
    Header,
    #[error("there are no rules to explain")]
    #[diagnostic(help("specify a configuration with --config FILE, or a running instance with --admin URL"))]
    NoRules,
    #[error("no shared store was given; in-memory counters and bans exist only in the process that created them")]
    #[diagnostic(help("specify a store with --store URL or --config FILE, or a running instance with --admin URL"))]
    NothingCounted,
    #[error("no store was given, and the memory store starts empty for every command, so every check would be allowed")]
    #[diagnostic(help(
        "specify a store with --store URL or --config FILE, or use --store memory to check against empty counters"
    ))]
    NothingKept,
    /// A query of counters that selects none.
    #[error("{0}")]
    Counters(String),
    #[error("--rule requires the configuration that defines the rule")]
    #[diagnostic(help("specify the configuration with --config FILE, or a running instance with --admin URL"))]
    RuleWithoutConfiguration,
    #[error("the rules that count this client are not known")]
    #[diagnostic(help(
        "specify the configuration with --config FILE, or a running instance with --admin URL; for the counter of explicit checks, name their limit, such as 10/min"
    ))]
    ClientWithoutConfiguration,
    #[cfg(feature = "otlp")]
    #[error(
        "invalid --otlp URL: expected http://HOST:PORT or https://HOST:PORT without a user or password, such as http://127.0.0.1:4318"
    )]
    OtlpUrl,
    #[error("cannot write the output: {}", __io_reason(.0))]
    Output(std::io::Error),
    #[error("cannot start: {}", __io_reason(.0))]
    Runtime(#[from] std::io::Error),
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Failure {
        Failure::Runtime(error.into())
    }
}

impl From<tidegate_server::KeyEditError> for Failure {
    fn from(error: tidegate_server::KeyEditError) -> Failure {
        use tidegate::rules::KeyHashError;
        use tidegate_server::KeyEditError;
        match error {
            KeyEditError::Unknown { .. } => Failure::UnknownKey { message: error.to_string() },
            KeyEditError::Hash(KeyHashError::Store(error)) => error.into(),
            error => Failure::KeyNotChanged(error.to_string()),
        }
    }
}

impl From<tidegate::StoreError> for Failure {
    fn from(error: tidegate::StoreError) -> Failure {
        match error.kind() {
            StoreErrorKind::Unsupported => Failure::StoreUnsupported(error.to_string()),
            _ => Failure::StoreFailed(error),
        }
    }
}

impl From<tidegate::Unavailable> for Failure {
    fn from(error: tidegate::Unavailable) -> Failure {
        match error.kind() {
            StoreErrorKind::Unsupported => Failure::StoreUnsupported(error.to_string()),
            _ => Failure::Unavailable(error),
        }
    }
}

impl From<tidegate_server::CounterError> for Failure {
    fn from(error: tidegate_server::CounterError) -> Failure {
        match error {
            tidegate_server::CounterError::Store(error) => error.into(),
            other => Failure::Counters(other.to_string()),
        }
    }
}

/// Sets the format of error reports: in colour if [`has_colour`], and without wrapped lines, so that messages can be
/// searched for. On a terminal without capabilities (`TERM=dumb`), reports are in ASCII.
pub(crate) fn set_up_reports() {
    let (term, no_color) = (std::env::var_os("TERM"), std::env::var_os("NO_COLOR"));
    let has_colour = has_colour(std::io::stderr().is_terminal(), term.as_deref(), no_color.as_deref());
    let is_dumb = term.as_deref() == Some(OsStr::new(DUMB));
    // This fails only if a hook is already set, which is not the case.
    let _ = miette::set_hook(Box::new(move |_| {
        let options = MietteHandlerOpts::new().color(has_colour).terminal_links(false).wrap_lines(false);
        Box::new(if is_dumb { options.unicode(false) } else { options }.build())
    }));
}

/// The value of `TERM` for a terminal that understands no control sequences.
const DUMB: &str = "dumb";

/// Returns whether reports are in colour: on a terminal that is not `dumb`, unless `NO_COLOR` is set and not empty.
fn has_colour(is_terminal: bool, term: Option<&OsStr>, no_color: Option<&OsStr>) -> bool {
    is_terminal && term != Some(OsStr::new(DUMB)) && no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_in_colour_on_a_terminal_that_can_show_it_unless_no_color_is_set() {
        for (is_terminal, term, no_color, expected) in [
            (true, Some("xterm"), None, true),
            (true, None, None, true),
            (true, Some("xterm"), Some(""), true),
            (true, Some("xterm"), Some("1"), false),
            (true, Some("dumb"), None, false),
            (false, Some("xterm"), None, false),
        ] {
            let [term, no_color] = [term, no_color].map(|value| value.map(OsStr::new));
            assert_eq!(has_colour(is_terminal, term, no_color), expected, "{term:?} {no_color:?}");
        }
    }
}
