//! File descriptors: raises their limit, and reserves enough of them for the admin listener.
//!
//! Each connection takes one. A process without free descriptors can neither accept a connection nor open a file, and an
//! orchestrator whose request to `/healthz` fails restarts it, which does not help. So the connections of all listeners are
//! limited to the descriptors that remain after those for the process itself are reserved.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tollgate_server::Bounds;

/// Descriptors for everything but connections: runtimes, listeners, logs, connections to the store, reloaded files, and
/// connections that are being rejected.
const OWN: usize = 64;

/// Raises the soft limit of descriptors to the hard limit and returns it; `None` if there is no limit.
pub(super) fn raise_limit() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    let current = if current != maximum && setrlimit(Resource::Nofile, raised).is_ok() { maximum } else { current };
    current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns bounds whose connections fit into `limit` descriptors.
///
/// `listeners` is the number of listeners besides the admin listener. The admin listener keeps its connections, as far as an
/// eighth of the limit allows; the others share the rest. Each listener gets at least one.
pub(super) fn fit(bounds: Bounds, listeners: usize, limit: Option<usize>) -> Bounds {
    let Some(limit) = limit else { return bounds };
    let admin_connections = bounds.admin_connections.min(limit / 8).max(4);
    let left = limit.saturating_sub(OWN + admin_connections);
    let fitting = (left / listeners.max(1)).max(1);
    if fitting < bounds.connections {
        tracing::warn!(
            limit,
            wanted = bounds.connections,
            connections = fitting,
            "the limit of open files (ulimit -n) is too low for --connections; each listener accepts fewer connections"
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
