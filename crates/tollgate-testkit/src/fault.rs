//! A network that misbehaves on demand: a TCP proxy on 127.0.0.1 whose fault is switched while it runs.
//!
//! A killed or stopped server shows how a *process* fails. What lies between fails in other ways: bytes come late, in
//! crumbs, not at all, or the connection is torn down with a reset. The kernel's own tools for this need privileges that
//! a test run may not have; a proxy in front of the server needs none.
//!
//! ```text
//!   client ──► 127.0.0.1:port ──[ fault ]──► upstream
//!          ◄──                 ──[ fault ]◄──
//! ```
//!
//! **Order.** Bytes of one direction are never reordered, whatever the faults that follow each other: each chunk is
//! stamped with the time at which it may go on, and waits for those before it.
//!
//! **Lost bytes.** A stream with a hole in it does not exist in TCP: a reply that follows swallowed ones would be
//! taken for an answer to something else, which no network can cause. So a connection that lost bytes to
//! [`Fault::Blackhole`] is closed when that fault ends; one that lost none goes on.
//!
//! **Switching is done when it returns.** [`Proxy::set`] waits until the proxy has seen the change and has taken up
//! everyone who connected before it; with [`Fault::Cut`] or [`Fault::Reset`] also until all these are closed. A test need
//! not guess when.
//!
//! **One thread.** The proxy has a runtime of its own on a thread of its own, ended and joined on drop, so it works
//! the same in blocking and in asynchronous tests, and a test that starves its own runtime does not starve the
//! network.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::watch;

use gauge::Gauge;
use relay::Wish;

mod gauge;
pub(crate) mod relay;
#[cfg(test)]
mod tests;

/// What the network does to what passes through it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing.
    #[default]
    Pass,
    /// Every byte arrives this much later, in each direction.
    Delay(Duration),
    /// Bytes wait, and arrive when the fault ends: a partition that heals, replies that come too late.
    Hold,
    /// Bytes vanish: connections open, and nothing is ever answered.
    Blackhole,
    /// Connections are closed, those that are open and those that come.
    Cut,
    /// The same, by RST: what was on its way to the client is lost, and reading fails instead of ending.
    Reset,
    /// At most this many bytes at a time, so that frames arrive in crumbs. At least 1.
    Slice(usize),
}

/// A proxy in front of one upstream.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    wish: watch::Sender<Wish>,
    gauge: Arc<Gauge>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and passes everything on to `upstream`, which need not be up.
    ///
    /// # Panics
    /// When no socket or thread can be had.
    pub fn start(upstream: SocketAddr) -> Proxy {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port on 127.0.0.1");
        listener.set_nonblocking(true).expect("a non-blocking socket");
        let addr = listener.local_addr().expect("a bound socket");
        let (wish, wishes) = watch::channel(Wish { fault: Some(Fault::Pass), turn: 0 });
        let gauge = Arc::new(Gauge::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let accept = relay::accept(listener, upstream, wishes, Arc::clone(&gauge));
        let thread = thread::Builder::new().name("fault proxy".into()).spawn(move || runtime.block_on(accept));
        Proxy { addr, wish, gauge, thread: Some(thread.expect("a thread")) }
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The port where clients connect.
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// `redis://127.0.0.1:PORT` of the proxy.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Switches the fault, for the connections that are open and for those to come.
    pub fn set(&self, fault: Fault) {
        let mut turn = 0;
        self.wish.send_modify(|wish| {
            turn = wish.turn + 1;
            *wish = Wish { fault: Some(fault), turn };
        });
        self.gauge.wait_until_seen(turn);
        if matches!(fault, Fault::Cut | Fault::Reset) {
            self.gauge.wait_until_none_open();
        }
    }

    /// How many connections were ever accepted, those that were closed at once included.
    pub fn connections(&self) -> u64 {
        self.gauge.accepted()
    }

    /// How many connections are open to the upstream, or on the way there.
    pub fn open(&self) -> u64 {
        self.gauge.open()
    }

    /// Bytes that were sent on to the upstream.
    pub fn bytes_up(&self) -> u64 {
        self.gauge.bytes_up()
    }

    /// Bytes that were sent on to the clients.
    pub fn bytes_down(&self) -> u64 {
        self.gauge.bytes_down()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.wish.send_modify(|wish| wish.fault = None);
        if let Some(thread) = self.thread.take() {
            // It failed only if it panicked, and then its message has been printed.
            let _ = thread.join();
        }
    }
}
