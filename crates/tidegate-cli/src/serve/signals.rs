//! Signals: TERM and INT shut down, either of them again exits at once, HUP reloads the configuration.

use std::sync::Arc;

use tidegate_server::Reloader;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;

/// The installed handlers of SIGINT, SIGTERM and SIGHUP.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Installs the handlers. A signal that arrives earlier ends the process, so install them before listeners are
    /// announced.
    ///
    /// # Errors
    /// If the operating system rejects a handler.
    pub(super) fn install() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Completes at the first SIGTERM or SIGINT, and logs it. Until then, reloads the configuration on SIGHUP, in a task
    /// that is not waited for. All signals during a reload together cause one more reload after it.
    ///
    /// Spawns a task that exits the process with code 1 at a second SIGTERM or SIGINT.
    pub(super) async fn until_shutdown(mut self, reloader: Reloader) {
        // Holds at most one request.
        let requested = Arc::new(Notify::new());
        // In a task, so that other signals are received meanwhile. The reloader logs the outcome.
        tokio::spawn({
            let requested = requested.clone();
            async move {
                loop {
                    requested.notified().await;
                    if let Err(error) = reloader.reload().await {
                        tracing::debug!(%error, "cannot reload on SIGHUP");
                    }
                }
            }
        });
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => break,
                _ = self.terminate.recv() => break,
                _ = self.hangup.recv() => requested.notify_one(),
            }
        }
        tracing::info!("shutting down");
        tokio::spawn(async move {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
            }
            tracing::warn!("received a second signal; exiting immediately");
            std::process::exit(1);
        });
    }
}
