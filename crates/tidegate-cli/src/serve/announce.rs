//! The text that the service prints at the start: the address of each listener, and a command to try it.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;

use tidegate_server::Token;

/// The origin of the admin token, which decides whether it is printed.
pub(super) enum AdminToken<'t> {
    /// The operator set the token. It is not printed.
    Given,
    /// The token was generated. It is printed at the start, and nowhere else.
    Generated(&'t Token),
}

/// The bound address of each listener; `None` if there is no such listener.
pub(super) struct Addresses {
    pub(super) http: Option<SocketAddr>,
    pub(super) resp: Option<SocketAddr>,
    pub(super) gateway: Option<SocketAddr>,
    pub(super) admin: Option<SocketAddr>,
}

/// The text that is printed at the start: the version, where counters are, and each listener with a command to try it.
pub(super) struct Announcement<'a> {
    pub(super) addresses: Addresses,
    /// Whether counters are in Redis.
    pub(super) is_shared: bool,
    /// Whether a TLS certificate was given.
    pub(super) is_encrypted: bool,
    /// Whether checks over HTTP need a token.
    pub(super) needs_http_token: bool,
    pub(super) token: AdminToken<'a>,
    /// The reason why there is no admin listener; `None` if there is one or `--admin off` was given.
    pub(super) admin_disabled: Option<String>,
}

impl Announcement<'_> {
    /// Prints the text to standard output. Errors of writing, such as a closed pipe, are ignored.
    pub(super) fn print(&self) {
        let text = self.text();
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    fn text(&self) -> String {
        let kind = if self.is_shared { "in Redis" } else { "in memory" };
        let mut text = format!("tidegate {} is running, counters {kind}\n", env!("CARGO_PKG_VERSION"));
        let mut line = |listener: &str, rest: std::fmt::Arguments<'_>| {
            writeln!(text, "  {listener:<5} {rest}").expect("writing to memory does not fail");
        };
        if let Some(address) = self.addresses.http {
            let scheme = if self.is_encrypted { "https" } else { "http" };
            let check = r#"{"key":"user:42","limit":"10/min"}"#;
            let token = if self.needs_http_token { "-H \"Authorization: Bearer $TIDEGATE_HTTP_TOKEN\" " } else { "" };
            line("http", format_args!("{address}   try: curl {token}-d '{check}' {scheme}://{address}/v1/check"));
        }
        if let Some(address) = self.addresses.resp {
            let (ip, port) = (address.ip(), address.port());
            let tls = if self.is_encrypted { " --tls" } else { "" };
            line(
                "resp",
                format_args!("{address}   try: redis-cli -h {ip} -p {port}{tls} TIDEGATE.CHECK user:42 10/min"),
            );
        }
        if let Some(address) = self.addresses.gateway {
            let scheme = if self.is_encrypted { "https" } else { "http" };
            line("gateway", format_args!("{address}   try: curl -i {scheme}://{address}/"));
        }
        if let Some(address) = self.addresses.admin {
            let is_local = tidegate_server::is_loopback(address.ip());
            let scheme = if self.is_encrypted && !is_local { "https" } else { "http" };
            let token = match self.token {
                AdminToken::Given => "$TIDEGATE_ADMIN_TOKEN",
                AdminToken::Generated(token) => token.reveal(),
            };
            let quote = if matches!(self.token, AdminToken::Given) { '"' } else { '\'' };
            line(
                "admin",
                format_args!(
                    "{address}   try: curl -H {quote}Authorization: Bearer {token}{quote} {scheme}://{address}/v1/rules"
                ),
            );
        }
        if let Some(reason) = &self.admin_disabled {
            line("admin", format_args!("off: {reason}; choose another address with --admin ADDRESS"));
        }
        text
    }
}
