//! The text that is printed at the start: the address of each listener, and a command to try it.

use std::fmt::Write as _;
use std::io::Write as _;

use tollgate_server::{Listeners, Token};

/// The token of the admin API.
pub(super) enum AdminToken<'t> {
    /// The operator gave it. It is not printed.
    Given,
    /// It was generated. It is printed once, at the start.
    Generated(&'t Token),
}

/// What is printed at the start.
pub(super) struct Announcement<'a> {
    pub(super) listeners: &'a Listeners,
    pub(super) is_shared: bool,
    pub(super) is_encrypted: bool,
    pub(super) token: AdminToken<'a>,
    /// Why there is no admin listener although it was not turned off.
    pub(super) admin_disabled: Option<String>,
}

impl Announcement<'_> {
    /// Prints the text to standard output. Ignores errors of writing, such as a closed pipe.
    ///
    /// # Errors
    /// If the address of a listener cannot be determined.
    pub(super) fn print(&self) -> std::io::Result<()> {
        let text = self.text()?;
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        Ok(())
    }

    fn text(&self) -> std::io::Result<String> {
        let kind = if self.is_shared { "on Redis" } else { "in memory" };
        let mut text = format!("tollgate {} serves, counters {kind}\n", env!("CARGO_PKG_VERSION"));
        let mut line = |listener: &str, rest: std::fmt::Arguments<'_>| {
            writeln!(text, "  {listener:<5} {rest}").expect("writing to memory does not fail");
        };
        if let Some(listener) = &self.listeners.http {
            let address = listener.local_addr()?;
            let scheme = if self.is_encrypted { "https" } else { "http" };
            let check = r#"{"key":"user:42","limit":"10/min"}"#;
            line("http", format_args!("{address}   try: curl -d '{check}' {scheme}://{address}/v1/check"));
        }
        if let Some(listener) = &self.listeners.resp {
            let address = listener.local_addr()?;
            let (ip, port) = (address.ip(), address.port());
            let tls = if self.is_encrypted { " --tls" } else { "" };
            line(
                "resp",
                format_args!("{address}   try: redis-cli -h {ip} -p {port}{tls} TOLLGATE.CHECK user:42 10/min"),
            );
        }
        if let Some(listener) = &self.listeners.admin {
            let address = listener.local_addr()?;
            let is_local = tollgate_server::is_loopback(address.ip());
            let scheme = if self.is_encrypted && !is_local { "https" } else { "http" };
            let token = match self.token {
                AdminToken::Given => "$TOLLGATE_ADMIN_TOKEN",
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
        Ok(text)
    }
}
