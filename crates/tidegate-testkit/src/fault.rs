//! A fault-injecting TCP proxy on 127.0.0.1, whose fault can be changed while it runs.
//!
//! A killed or stopped server shows how a *process* fails. A network fails in other ways: bytes arrive late, in small
//! pieces or not at all, or the connection is reset. The kernel's tools for this need privileges that a test run may
//! not have. A proxy in front of the server needs none.
//!
//! ```text
//!   client ──► 127.0.0.1:port ──[ fault ]──► upstream
//!          ◄──                 ──[ fault ]◄──
//! ```
//!
//! **Order.** Bytes of one direction are never reordered, even if the fault changes. Each chunk has the time at which
//! it may be forwarded, and waits for the chunks before it.
//!
//! **Lost bytes.** TCP never delivers a stream with a gap. With a gap, a client would take a reply for the reply to
//! another request, which no network can cause. So a connection that lost bytes to [`Fault::Blackhole`] is closed when
//! that fault ends. A connection that lost none stays open.
//!
//! **A change is effective when [`Proxy::set`] returns.** It waits until the proxy has applied the change and accepted
//! all connections that clients opened before. With [`Fault::Cut`] or [`Fault::Reset`] it also waits until these are
//! closed. So tests need no sleeps.
//!
//! **One thread.** The proxy has its own runtime on its own thread, which is joined on drop. So it works in blocking
//! and in asynchronous tests alike, and a test that blocks its own runtime does not block the proxy.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::watch;

use gauge::Gauge;
use relay::FaultState;

mod gauge;
pub(crate) mod relay;
#[cfg(test)]
mod tests;

/// What the proxy does to connections and their bytes. Defaults to [`Fault::Pass`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Forwards everything unchanged.
    #[default]
    Pass,
    /// Forwards every byte this much later, in each direction.
    Delay(Duration),
    /// Holds all bytes and forwards them when the fault ends: a partition that heals, or late replies.
    Hold,
    /// Discards all bytes: connections open, and no reply arrives. Those that lost bytes are closed when the fault
    /// ends.
    Blackhole,
    /// Closes all open and all new connections.
    Cut,
    /// Closes all open and all new connections with RST: bytes in flight to the client are lost, and its reads fail.
    Reset,
    /// Forwards at most this many bytes at a time, so that frames arrive in pieces. Zero counts as 1.
    Slice(usize),
}

/// A TCP proxy in front of one upstream. Dropping it closes all connections and waits until its thread has ended.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    state: watch::Sender<FaultState>,
    gauge: Arc<Gauge>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy on a free port of 127.0.0.1 that forwards to `upstream`, with [`Fault::Pass`].
    ///
    /// The upstream need not be up. While it refuses connections, those of the clients are closed.
    ///
    /// # Panics
    /// If no socket or thread can be created.
    pub fn start(upstream: SocketAddr) -> Proxy {
        Proxy::start_on((Ipv4Addr::LOCALHOST, 0).into(), upstream)
    }

    /// Starts a proxy like [`Proxy::start`], on this address of the loopback network.
    ///
    /// # Panics
    /// If the address is in use, or no thread can be created.
    pub fn start_on(addr: SocketAddr, upstream: SocketAddr) -> Proxy {
        let listener = TcpListener::bind(addr).expect("a free port of the loopback network");
        listener.set_nonblocking(true).expect("a non-blocking socket");
        let addr = listener.local_addr().expect("a bound socket");
        let (state, receiver) = watch::channel(FaultState { fault: Some(Fault::Pass), change: 0 });
        let gauge = Arc::new(Gauge::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let accept = relay::accept(listener, upstream, receiver, Arc::clone(&gauge));
        let thread = thread::Builder::new().name("fault proxy".into()).spawn(move || runtime.block_on(accept));
        Proxy { addr, state, gauge, thread: Some(thread.expect("a thread")) }
    }

    /// Returns the address on which the proxy listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the port on which the proxy listens.
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Returns `redis://` with the address of the proxy.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Sets the fault for all open and all new connections, and waits until it is effective.
    ///
    /// # Panics
    /// If that takes longer than 10 seconds.
    pub fn set(&self, fault: Fault) {
        let mut change = 0;
        self.state.send_modify(|state| {
            change = state.change + 1;
            *state = FaultState { fault: Some(fault), change };
        });
        self.gauge.wait_until_applied(change);
        if matches!(fault, Fault::Cut | Fault::Reset) {
            self.gauge.wait_until_none_open();
        }
    }

    /// Returns the number of connections accepted so far, including those closed at once.
    pub fn connections(&self) -> u64 {
        self.gauge.accepted()
    }

    /// Returns the number of accepted connections that are not closed yet.
    pub fn open(&self) -> u64 {
        self.gauge.open()
    }

    /// Returns the number of bytes forwarded to the upstream. Discarded and held bytes do not count.
    pub fn bytes_up(&self) -> u64 {
        self.gauge.bytes_up()
    }

    /// Returns the number of bytes forwarded to clients. Discarded and held bytes do not count.
    pub fn bytes_down(&self) -> u64 {
        self.gauge.bytes_down()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.fault = None);
        if let Some(thread) = self.thread.take() {
            // Joining fails only after a panic, whose message has been printed.
            let _ = thread.join();
        }
    }
}
