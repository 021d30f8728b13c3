//! What is printed at the start: where the doors are, and a line to try each.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;

use tollgate_server::Token;

/// What is said about the admin door's token.
pub(super) enum TokenWord<'t> {
    /// The operator knows it.
    Given,
    /// Only we do: this is the one time that it is printed.
    Made(&'t Token),
}

/// The addresses of the open listeners.
pub(super) struct Addresses {
    pub(super) http: Option<SocketAddr>,
    pub(super) resp: Option<SocketAddr>,
    pub(super) admin: Option<SocketAddr>,
}

pub(super) struct Announcement<'a> {
    pub(super) addresses: Addresses,
    pub(super) is_shared: bool,
    pub(super) is_encrypted: bool,
    pub(super) token: TokenWord<'a>,
    /// Why there is no admin door though nobody closed it.
    pub(super) admin_closed: Option<String>,
}

impl Announcement<'_> {
    /// Prints it, in one piece: whoever reads it may stop reading anywhere, and we go on.
    pub(super) fn print(&self) {
        let text = self.text();
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    fn text(&self) -> String {
        let kind = if self.is_shared { "on Redis" } else { "in memory" };
        let mut text = format!("tollgate {} serves, counters {kind}\n", env!("CARGO_PKG_VERSION"));
        let mut line = |door: &str, rest: std::fmt::Arguments<'_>| {
            writeln!(text, "  {door:<5} {rest}").expect("writing to memory does not fail");
        };
        if let Some(address) = self.addresses.http {
            let scheme = if self.is_encrypted { "https" } else { "http" };
            let question = r#"{"key":"user:42","limit":"10/min"}"#;
            line("http", format_args!("{address}   try: curl -d '{question}' {scheme}://{address}/v1/check"));
        }
        if let Some(address) = self.addresses.resp {
            let (ip, port) = (address.ip(), address.port());
            let tls = if self.is_encrypted { " --tls" } else { "" };
            line(
                "resp",
                format_args!("{address}   try: redis-cli -h {ip} -p {port}{tls} TOLLGATE.CHECK user:42 10/min"),
            );
        }
        if let Some(address) = self.addresses.admin {
            let is_local = tollgate_server::is_loopback(address.ip());
            let scheme = if self.is_encrypted && !is_local { "https" } else { "http" };
            let token = match self.token {
                TokenWord::Given => "$TOLLGATE_ADMIN_TOKEN",
                TokenWord::Made(token) => token.reveal(),
            };
            let quote = if matches!(self.token, TokenWord::Given) { '"' } else { '\'' };
            line(
                "admin",
                format_args!(
                    "{address}   try: curl -H {quote}Authorization: Bearer {token}{quote} {scheme}://{address}/v1/rules"
                ),
            );
        }
        if let Some(why) = &self.admin_closed {
            line("admin", format_args!("closed: {why}; choose another address with --admin ADDRESS"));
        }
        text
    }
}
