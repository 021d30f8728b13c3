//! File descriptors: raises the process's limit of open files, and fits the connections of the listeners into it.
//!
//! Each connection takes one. A process without free descriptors can neither accept a connection nor open a file, and
//! an orchestrator whose request to `/healthz` fails restarts it, which does not help. So the connections of all
//! listeners are limited to the descriptors that remain after those for the process itself are reserved.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_server::Bounds;

/// Descriptors for everything but connections: runtimes, listeners, logs, connections to the store, reloaded files, and
/// connections that are being rejected.
const OWN: usize = 64;

/// Raises the process's soft limit of file descriptors to the hard limit.
///
/// Returns the limit that is then in force, which is the old one if it cannot be raised. `None` means unlimited.
pub(super) fn raise_limit() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    let current = if current != maximum && setrlimit(Resource::Nofile, raised).is_ok() { maximum } else { current };
    current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns `bounds` with connection limits that are lowered so that all connections fit into `limit` file descriptors;
/// `None` means unlimited, and changes nothing.
///
/// The admin listener gets at most an eighth of `limit`, but at least 4 connections: a lower limit in `bounds` is
/// raised to 4. [`OWN`] descriptors are reserved for the process. The other listeners, `listeners` in number, get equal
/// parts of the rest, and at least one connection each, even if that exceeds `limit`. Other limits that are low enough
/// stay as they are. Logs a warning if `connections` is lowered.
pub(super) fn fit(bounds: Bounds, listeners: usize, limit: Option<usize>) -> Bounds {
    let Some(limit) = limit else { return bounds };
    let admin_connections = bounds.admin_connections.min(limit / 8).max(4);
    let left = limit.saturating_sub(OWN + admin_connections);
    let fitting = (left / listeners.max(1)).max(1);
    if fitting < bounds.connections {
        tracing::warn!(
            open_files = limit,
            wanted = bounds.connections,
            accepted = fitting,
            "the open file limit (ulimit -n) is too low for this many connections on each listener; raise it, or lower --connections"
        );
    }
    Bounds { admin_connections, connections: bounds.connections.min(fitting), ..bounds }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_fit_into_the_descriptors() {
        let bounds = Bounds { connections: 10_000, ..Bounds::default() };
        let fitted = |limit, listeners| {
            let bounds = fit(bounds, listeners, limit);
            (bounds.connections, bounds.admin_connections)
        };
        assert_eq!(fitted(None, 2), (10_000, 64));
        assert_eq!(fitted(Some(1_048_576), 2), (10_000, 64));
        assert_eq!(fitted(Some(20_000), 2), (9_936, 64));
        assert_eq!(fitted(Some(20_000), 1), (10_000, 64));
        assert_eq!(fitted(Some(1_024), 2), (448, 64));
        assert_eq!(fitted(Some(128), 2), (24, 16));
        assert_eq!(fitted(Some(16), 2), (1, 4));
        assert_eq!(fitted(Some(1_024), 0), (896, 64), "only the admin listener");
    }
}
