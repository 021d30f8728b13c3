//! File descriptors: as many as the system allows, and enough of them kept for the admin listener.
//!
//! Each connection takes one. When a process has none left, it can neither accept a connection nor open a file, and an orchestrator that
//! gets no answer from `/healthz` restarts it, which helps nobody. So the listeners are given no more connections than
//! there are descriptors, and what the process itself needs is set apart first.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tollgate_server::Bounds;

/// What the process needs besides connections: the runtimes, the listeners, logs, the store's connections, files that are read
/// again, and connections that are being refused.
const OWN: usize = 64;

/// Raises the soft limit to the hard one and returns it; `None` if there is no limit.
pub(super) fn raise_limit() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    let current = if current != maximum && setrlimit(Resource::Nofile, raised).is_ok() { maximum } else { current };
    current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns bounds whose connections fit into `limit` descriptors, with `listeners` beside that of the operator. The admin listener keeps its
/// connections, the others get what is left; each gets one at least.
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
            "the limit of open files (ulimit -n) is too low for --connections; each listener lets in fewer"
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
        assert_eq!(fitted(Some(1_024), 0), (896, 64), "no listener but the operator's");
    }
}
