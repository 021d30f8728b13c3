//! Opens the listeners of a command, all in the same way: address, socket, secret.

use std::io::ErrorKind;
use std::net::SocketAddr;

use tidegate::gateway::GatewaySettings;
use tidegate_server::{ListenerKind, ListenerSecret, Role, is_loopback};
use tokio::net::{TcpListener, TcpSocket};

use crate::arguments::ListenerChoice;
use crate::inherited::InheritedSockets;
use crate::{Failure, secrets};

/// Maximum number of connections that wait to be accepted. A client beyond that retries after a second. Linux limits it
/// to 4,096.
const BACKLOG: u32 = 4_096;
/// The value of an address that disables the listener.
pub(super) const OFF: &str = "off";

/// A listener that is not disabled.
pub(super) struct OpenedListener {
    pub(super) kind: &'static ListenerKind,
    /// The option that sets its address, without dashes.
    pub(super) option: &'static str,
    /// The socket and its address, or the reason why there is none.
    pub(super) socket: Result<(TcpListener, SocketAddr), String>,
    /// The secret that clients must send.
    pub(super) secret: Option<ListenerSecret>,
    /// Whether the secret was generated, so that it must be printed.
    pub(super) is_generated: bool,
}

impl ListenerChoice {
    /// Returns the address, which may be `off`: that of the option, else that of the configuration, else the default.
    pub(super) fn address<'a>(&'a self, configured: &'a GatewaySettings) -> &'a str {
        let setting = || (self.kind.address_setting?.read)(configured);
        self.address.as_deref().or_else(setting).unwrap_or(self.default_address)
    }
}

impl OpenedListener {
    /// Opens a listener on `address`: takes the inherited socket with this address, or binds one. Reads its secret, or
    /// generates one for the operator.
    ///
    /// Returns `None` if the address is `off`. If the default address of an operator's listener is in use, returns a
    /// listener without a socket, so that a second instance on one machine starts without options.
    ///
    /// # Errors
    /// If the secret cannot be read or generated, the address cannot be bound, or it can be reached from other machines
    /// although no secret was given. `is_insecure` allows that for listeners of clients.
    pub(super) async fn open(
        choice: &ListenerChoice,
        address: &str,
        is_insecure: bool,
        inherited: &mut InheritedSockets,
    ) -> Result<Option<OpenedListener>, Failure> {
        let ListenerChoice { kind, option, .. } = *choice;
        let secret = secrets::of_listener(kind, choice.secret_file.as_deref())?;
        if address == OFF {
            return Ok(None);
        }
        let is_operator = kind.role == Role::Operator;
        let missing = kind.secret.filter(|_| secret.is_none());
        let socket = match bind(address, inherited).await {
            Ok(socket) => socket.local_addr().map(|bound| Ok((socket, bound)))?,
            Err(error) if is_operator && choice.address.is_none() && error.kind() == ErrorKind::AddrInUse => {
                Err(format!("{address} is in use"))
            }
            Err(error) => {
                return Err(Failure::Listen { listener: kind.name, option, address: address.to_owned(), error });
            }
        };
        if let (Ok((_, address)), Some(secret)) = (&socket, missing)
            && !is_loopback(address.ip())
        {
            match kind.role {
                Role::Operator => {
                    return Err(Failure::OperatorExposed { listener: kind.name, address: *address, secret });
                }
                Role::Service if !is_insecure => {
                    return Err(Failure::Exposed { listener: kind.name, address: *address, secret });
                }
                Role::Service => {}
            }
        }
        let is_generated = is_operator && missing.is_some();
        let secret = if is_generated {
            let failure = |error| Failure::Token { place: format!("--{option}"), error };
            Some(ListenerSecret::generate().map_err(failure)?)
        } else {
            secret
        };
        Ok(Some(OpenedListener { kind, option, socket, secret, is_generated }))
    }

    /// Returns the reason why there is no socket as ` (NAME: REASON)`, or `None` if there is one.
    pub(super) fn reason(&self) -> Option<String> {
        self.socket.as_ref().err().map(|reason| format!(" ({}: {reason})", self.kind.name))
    }

    /// Returns a command that tries the listener at this address.
    ///
    /// A secret that was given is read from its environment variable, so that it is not shown. `has_certificate` says
    /// whether the server has one.
    pub(super) fn example(&self, address: SocketAddr, has_certificate: bool) -> String {
        let is_encrypted = has_certificate && self.kind.encrypts(address);
        let scheme = if is_encrypted { "https" } else { "http" };
        let authorization = match (&self.secret, self.kind.secret) {
            (Some(secret), _) if self.is_generated => format!("-H 'Authorization: Bearer {}' ", secret.reveal()),
            (Some(_), Some(kind)) => format!("-H \"Authorization: Bearer ${}\" ", kind.variable),
            _ => String::new(),
        };
        let example = self.kind.example.replace("{url}", &format!("{scheme}://{address}"));
        let example = example.replace("{ip}", &address.ip().to_string()).replace("{port}", &address.port().to_string());
        example.replace("{tls}", if is_encrypted { " --tls" } else { "" }).replace("{auth}", &authorization)
    }
}

/// Returns the inherited socket of `HOST:PORT`, or binds one to the first of its addresses that can be bound, with a
/// queue of [`BACKLOG`] connections.
///
/// # Errors
/// If the host cannot be resolved or none of its addresses can be bound. The error is that of the last one.
async fn bind(address: &str, inherited: &mut InheritedSockets) -> std::io::Result<TcpListener> {
    let addresses: Vec<_> = tokio::net::lookup_host(address).await?.collect();
    if let Some(socket) = inherited.take(&addresses)? {
        return Ok(socket);
    }
    let mut failure = None;
    for address in addresses {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.unwrap_or_else(|| ErrorKind::AddrNotAvailable.into()))
}
