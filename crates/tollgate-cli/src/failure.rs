//! What went wrong, in words for the terminal.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;

use miette::{Diagnostic, MietteHandlerOpts};

/// What went wrong. None of these repeats a secret.
#[derive(Debug, thiserror::Error, Diagnostic)]
pub(crate) enum Failure {
    #[error("{0}")]
    Store(#[from] tollgate::StoreUrlError),
    /// Its findings underline the place in the file.
    #[error(transparent)]
    #[diagnostic(transparent)]
    Configuration(tollgate::config::Report),
    #[error("the store did not answer: {0}")]
    #[diagnostic(help("is it running, and is --store (or $TOLLGATE_STORE, $REDIS_URL) right?"))]
    Unanswered(#[from] tollgate::StoreError),
    #[error("{0}")]
    Unavailable(#[from] tollgate::Unavailable),
    #[error("{0}")]
    Key(#[from] tollgate::KeyError),
    #[error("{0}")]
    Limit(#[from] tollgate::LimitTextError),
    #[error("{} cannot be read: {error}", .file.display())]
    #[diagnostic(help("check the name, and who may read it"))]
    Unreadable { file: PathBuf, error: std::io::Error },
    #[error("{place}: {error}")]
    Token { place: String, error: tollgate_server::TokenError },
    #[error("{place} holds no password for Redis clients")]
    #[diagnostic(help("write one there, or leave out --resp-password-file to let in everybody who reaches the door"))]
    PasswordMissing { place: String },
    #[error("${variable} is no text")]
    #[diagnostic(help("a secret in the environment is UTF-8; give other bytes as hex or base64"))]
    NotText { variable: String },
    #[error("{0}")]
    Tls(#[from] tollgate_server::TlsError),
    #[error("the admin door on {address} can be reached from other machines, so it needs a token that you chose")]
    #[diagnostic(help("give it in $TOLLGATE_ADMIN_TOKEN or by --admin-token-file FILE, or listen on 127.0.0.1"))]
    AdminExposed { address: SocketAddr },
    #[error("cannot listen on {address} for {door}: {error}")]
    #[diagnostic(help("choose another with --{door} ADDRESS, or close the door with --{door} off"))]
    Listen { door: &'static str, address: String, error: std::io::Error },
    #[error("expected the address of an admin door, without user and password, such as http://127.0.0.1:9090")]
    #[diagnostic(help("the door opens with its token: $TOLLGATE_ADMIN_TOKEN or --admin-token-file FILE"))]
    AdminUrl,
    #[error("the admin door opens with a token, and none was given")]
    #[diagnostic(help(
        "give it in $TOLLGATE_ADMIN_TOKEN or by --admin-token-file FILE; serve prints it if it made one"
    ))]
    AdminTokenMissing,
    #[error("no answer from the admin door on {place}: {why}")]
    AdminUnreachable { place: String, why: String },
    #[error("the instance refused with {status}: {said}")]
    AdminRefused { status: u16, said: String },
    #[error("the request makes no sense: {0}")]
    #[diagnostic(help("expected METHOD PATH, such as POST /shorten"))]
    Request(http::Error),
    #[error("a header is given as `NAME: VALUE`, or as @FILE with lines of them")]
    Header,
    #[error("there are no rules to explain")]
    #[diagnostic(help("name a configuration with --config FILE, or a running instance with --admin URL"))]
    NoRules,
    #[error("the counters would be in the memory of this command, which has counted nothing")]
    #[diagnostic(help("name the store with --store URL or --config FILE, or a running instance with --admin URL"))]
    NothingCounted,
    #[cfg(feature = "otlp")]
    #[error(
        "expected the address of an OpenTelemetry collector, without user and password, such as http://127.0.0.1:4318"
    )]
    OtlpUrl,
    #[error("what was to be said could not be written: {0}")]
    Output(std::io::Error),
    #[error("cannot start: {0}")]
    Runtime(#[from] std::io::Error),
}

/// Reports go to standard error: in colour for people, and without breaking lines, so that they can be searched.
pub(crate) fn set_up_reports() {
    let is_terminal = std::io::stderr().is_terminal();
    // It can be set only once, and this is that time.
    let _ = miette::set_hook(Box::new(move |_| {
        Box::new(MietteHandlerOpts::new().color(is_terminal).terminal_links(false).wrap_lines(false).build())
    }));
}
