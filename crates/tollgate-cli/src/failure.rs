//! Errors of the command, as reports for the terminal.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;

use miette::{Diagnostic, MietteHandlerOpts};

/// An error that ends a command with exit code 2. Its message is printed to standard error and contains no secret.
#[derive(Debug, thiserror::Error, Diagnostic)]
pub(crate) enum Failure {
    #[error(transparent)]
    Store(#[from] tollgate::StoreUrlError),
    /// A configuration that cannot be used. The report underlines the place of each error in the file.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Configuration(tollgate::config::Report),
    #[error(transparent)]
    #[diagnostic(help("check that the store is running, and that --store (or $TOLLGATE_STORE, $REDIS_URL) is right"))]
    StoreFailed(#[from] tollgate::StoreError),
    #[error(transparent)]
    #[diagnostic(help("check that the store is running, and that --store (or $TOLLGATE_STORE, $REDIS_URL) is right"))]
    Unavailable(#[from] tollgate::Unavailable),
    #[error(transparent)]
    Key(#[from] tollgate::KeyError),
    #[error(transparent)]
    Limit(#[from] tollgate::LimitTextError),
    #[error("cannot read {}: {error}", .file.display())]
    #[diagnostic(help("check the name and the permissions of the file"))]
    Unreadable { file: PathBuf, error: std::io::Error },
    #[error("{place}: {error}")]
    Token { place: String, error: tollgate_server::AdminTokenError },
    #[error("{place} contains no password for Redis clients")]
    #[diagnostic(help(
        "write the password into this file, or omit --resp-password-file to accept clients without a password"
    ))]
    PasswordMissing { place: String },
    #[error("${variable} is not valid UTF-8")]
    #[diagnostic(help("a secret in the environment must be UTF-8; encode other bytes as hex or base64"))]
    NotText { variable: String },
    #[error(transparent)]
    Tls(#[from] tollgate_server::CertificateError),
    #[error("the admin listener on {address} is reachable from other machines and needs a token")]
    #[diagnostic(help("set $TOLLGATE_ADMIN_TOKEN or --admin-token-file FILE, or listen on 127.0.0.1"))]
    AdminExposed { address: SocketAddr },
    #[error("cannot listen on {address} for {listener}: {error}")]
    #[diagnostic(help(
        "choose another address with --{listener} ADDRESS, or disable this listener with --{listener} off"
    ))]
    Listen { listener: &'static str, address: String, error: std::io::Error },
    #[error("invalid --admin URL: expected http or https, without user and password, such as http://127.0.0.1:9090")]
    #[diagnostic(help(
        "give the admin token in $TOLLGATE_ADMIN_TOKEN or with --admin-token-file FILE, not in the URL"
    ))]
    AdminUrl,
    #[error("the admin endpoint requires a token, and none was given")]
    #[diagnostic(help(
        "set $TOLLGATE_ADMIN_TOKEN or --admin-token-file FILE; without these, `tollgate serve` generates a token and prints it"
    ))]
    AdminTokenMissing,
    #[error("cannot reach the admin endpoint {url}: {reason}")]
    #[diagnostic(help("check that the instance is running, and that --admin is the URL of its admin listener"))]
    AdminUnreachable { url: String, reason: String },
    #[error("the admin endpoint responded with status {status}: {message}")]
    AdminRefused { status: u16, message: String },
    #[error("invalid request: {0}")]
    #[diagnostic(help("expected METHOD PATH, such as POST /shorten"))]
    Request(http::Error),
    #[error("invalid header: expected `NAME: VALUE`, or @FILE with one such header per line")]
    Header,
    #[error("there are no rules to explain")]
    #[diagnostic(help("give a configuration with --config FILE, or a running instance with --admin URL"))]
    NoRules,
    #[error("the memory store is empty in every new command, so there are no counters and no bans in it")]
    #[diagnostic(help("give the store with --store URL or --config FILE, or a running instance with --admin URL"))]
    NothingCounted,
    #[error("no store was given, and the memory store is empty in every new command: every check would be allowed")]
    #[diagnostic(help(
        "give the store with --store URL or --config FILE, or --store memory to check without counters of others"
    ))]
    NothingKept,
    /// A query of counters that selects none.
    #[error("{0}")]
    Counters(String),
    #[error("--rule needs the configuration with that rule")]
    #[diagnostic(help("give it with --config FILE, or a running instance with --admin URL"))]
    RuleWithoutConfiguration,
    #[error("the subject is masked (***), so it identifies no client")]
    #[diagnostic(help("give the subject that `tollgate explain --reveal` prints, such as ip:203.0.113.9"))]
    MaskedSubject,
    #[cfg(feature = "otlp")]
    #[error("invalid --otlp URL: expected http or https, without user and password, such as http://127.0.0.1:4318")]
    OtlpUrl,
    #[error("cannot write the output: {0}")]
    Output(std::io::Error),
    #[error("cannot start: {0}")]
    Runtime(#[from] std::io::Error),
}

impl From<tollgate_server::CounterError> for Failure {
    fn from(error: tollgate_server::CounterError) -> Failure {
        match error {
            tollgate_server::CounterError::Store(error) => Failure::StoreFailed(error),
            other => Failure::Counters(other.to_string()),
        }
    }
}

/// Sets the format of error reports: in colour if standard error is a terminal, and without wrapped lines, so that
/// messages can be searched for.
pub(crate) fn set_up_reports() {
    let is_terminal = std::io::stderr().is_terminal();
    // This fails only if a hook is already set, which is not the case.
    let _ = miette::set_hook(Box::new(move |_| {
        Box::new(MietteHandlerOpts::new().color(is_terminal).terminal_links(false).wrap_lines(false).build())
    }));
}
