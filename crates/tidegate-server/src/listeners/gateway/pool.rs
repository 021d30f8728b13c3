//! The idle connections to a server.
//!
//! A server may close an idle connection at any time, even while a request is on its way. It is then unknown whether
//! the request was executed. So a request that must not be sent twice gets only a connection that was used a moment
//! ago, or a new one; a request that may be repeated gets any connection.
//!
//! The most recently used connection is used first, so that surplus connections expire and are closed.

use std::sync::Arc;
use std::time::Duration;

use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::body::RequestBody;

/// How long an idle connection is kept.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// The maximum idle time of a connection on which a request that must not be sent twice is sent. Servers typically
/// close idle connections after a few seconds, such as five.
const FRESH_MAX: Duration = Duration::from_secs(2);

/// The sending end of a connection. hyper's task drives the connection itself.
pub(super) type Sender = SendRequest<RequestBody>;

/// The idle connections to one server, up to a maximum.
#[derive(Debug)]
pub(super) struct Pool {
    /// Ordered by the time of their last use.
    idle: Mutex<Vec<IdleConnection>>,
    max: usize,
}

#[derive(Debug)]
struct IdleConnection {
    sender: Sender,
    since: Instant,
}

/// A connection that is in use, and the pool to which it belongs. Dropping it closes the connection.
pub(super) struct Lease {
    pub(super) sender: Sender,
    pool: Arc<Pool>,
    /// Whether the connection has been used before.
    pub(super) is_reused: bool,
}

impl Pool {
    /// Creates an empty pool, which keeps at most `max` connections.
    pub(super) fn new(max: usize) -> Arc<Pool> {
        Arc::new(Pool { idle: Mutex::default(), max })
    }

    /// Takes the most recently used connection that is still open, or returns `None` if there is none.
    ///
    /// If the request is not `repeatable`, only connections that were used within the last two seconds are considered.
    pub(super) fn take(self: &Arc<Self>, repeatable: bool) -> Option<Lease> {
        let mut idle = self.idle.lock();
        if idle.is_empty() {
            return None;
        }
        let (age_max, now) = (if repeatable { IDLE_MAX } else { FRESH_MAX }, Instant::now());
        idle.retain(|connection| !connection.sender.is_closed());
        let last = idle.iter().rposition(|connection| connection.sender.is_ready())?;
        if now.saturating_duration_since(idle[last].since) > age_max {
            return None;
        }
        let IdleConnection { sender, .. } = idle.remove(last);
        Some(Lease { sender, pool: self.clone(), is_reused: true })
    }

    /// Wraps a new connection as a lease of this pool.
    pub(super) fn lease(self: &Arc<Self>, sender: Sender) -> Lease {
        Lease { sender, pool: self.clone(), is_reused: false }
    }
}

impl Lease {
    /// Makes the connection available to other requests. The response must have been received completely.
    pub(super) fn give_back(self) {
        let Lease { sender, pool, .. } = self;
        if sender.is_closed() {
            return;
        }
        let now = Instant::now();
        let mut idle = pool.idle.lock();
        let old = idle.partition_point(|connection| now.saturating_duration_since(connection.since) > IDLE_MAX);
        idle.drain(..old);
        if idle.len() >= pool.max {
            idle.retain(|connection| !connection.sender.is_closed());
        }
        if idle.len() < pool.max {
            idle.push(IdleConnection { sender, since: now });
        }
    }
}
