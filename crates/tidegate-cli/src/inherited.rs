//! Listening sockets that the process inherits, as systemd passes them (`LISTEN_FDS`).
//!
//! A socket that the process binds itself is closed when the process exits. Until the next process has bound the
//! address again, connections are refused. A socket that another process holds stays open: while no process accepts,
//! connections wait in its queue. So a restart refuses no connection. With a supervisor that starts the new process
//! before it stops the old one, no connection waits either: both accept from the same queue.
//!
//! Sockets are matched with listeners by address, so that no order or name has to be kept in two places: a listener
//! whose address is that of an inherited socket uses it, and the others are bound as usual. A socket that no listener
//! uses is an error, because its clients would wait forever.

use std::net::SocketAddr;

use listenfd::ListenFd;
use tokio::net::TcpListener;

use crate::Failure;

/// The inherited sockets that no listener uses yet.
pub(crate) struct InheritedSockets(Vec<(SocketAddr, std::net::TcpListener)>);

impl InheritedSockets {
    /// Takes the sockets passed to this process with `LISTEN_FDS`. Without this variable, there are none.
    ///
    /// Must be called once, before other threads are started, because it removes the variable from the environment.
    ///
    /// # Errors
    /// If a descriptor is not a TCP socket.
    pub(crate) fn from_env() -> Result<InheritedSockets, Failure> {
        let mut descriptors = ListenFd::from_env();
        let sockets = (0..descriptors.len()).map(|index| {
            let socket = descriptors.take_tcp_listener(index)?;
            let socket = socket.ok_or(std::io::ErrorKind::NotFound)?;
            socket.set_nonblocking(true)?;
            Ok((socket.local_addr()?, socket))
        });
        sockets.collect::<std::io::Result<_>>().map(InheritedSockets).map_err(Failure::InheritedSocket)
    }

    /// Takes the socket with one of these addresses. Returns `None` if there is none.
    ///
    /// # Errors
    /// If the runtime cannot register the socket.
    pub(crate) fn take(&mut self, addresses: &[SocketAddr]) -> std::io::Result<Option<TcpListener>> {
        let Some(index) = self.0.iter().position(|(address, _)| addresses.contains(address)) else { return Ok(None) };
        TcpListener::from_std(self.0.swap_remove(index).1).map(Some)
    }

    /// Verifies that all sockets were taken.
    ///
    /// # Errors
    /// If any sockets are left. The error lists their addresses.
    pub(crate) fn verify_all_taken(&self) -> Result<(), Failure> {
        if self.0.is_empty() {
            return Ok(());
        }
        let addresses: Vec<String> = self.0.iter().map(|(address, _)| address.to_string()).collect();
        Err(Failure::UnusedSockets { addresses: addresses.join(", ") })
    }
}
