//! Signals: TERM and INT shut down, either of them again exits at once, HUP reloads the configuration.

use tidegate_server::Reloader;
use tokio::signal::unix::{Signal, SignalKind, signal};

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

    /// Completes at the first SIGTERM or SIGINT, and logs it. Until then, reloads the configuration on every SIGHUP, in
    /// tasks that are not waited for.
    ///
    /// Spawns a task that exits the process with code 1 at a second SIGTERM or SIGINT.
    pub(super) async fn until_shutdown(mut self, reloader: Reloader) {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => break,
                _ = self.terminate.recv() => break,
                _ = self.hangup.recv() => {
                    // In a task, so that other signals are received meanwhile. The reloader logs the outcome.
                    let reloader = reloader.clone();
                    tokio::spawn(async move {
                        if let Err(error) = reloader.reload().await {
                            tracing::debug!(%error, "cannot reload on SIGHUP");
                        }
                    });
                }
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
