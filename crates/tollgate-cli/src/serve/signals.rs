//! What the process is told from outside: end (TERM, INT), end at once (either of them again), read again (HUP).

use tokio::signal::unix::{Signal, SignalKind, signal};
use tollgate_server::Reloader;

/// The signals, heard from the moment this exists.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Before anything is announced: whoever reads the announcement may signal at once, and must not end the process by it.
    pub(super) fn install() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Reads again on every HUP; ready when the process is to end. After that, being told again ends it at once.
    pub(super) async fn until_told_to_end(mut self, reloader: Reloader) {
        loop {
            tokio::select! {
                _ = self.interrupt.recv() => break,
                _ = self.terminate.recv() => break,
                _ = self.hangup.recv() => {
                    // What came of it is logged where it is done. Another signal is heard meanwhile.
                    let reloader = reloader.clone();
                    tokio::spawn(async move {
                        if let Err(error) = reloader.reload().await {
                            tracing::debug!(%error, "told to read again");
                        }
                    });
                }
            }
        }
        tracing::info!("closing the doors");
        tokio::spawn(async move {
            tokio::select! {
                _ = self.interrupt.recv() => {}
                _ = self.terminate.recv() => {}
            }
            tracing::warn!("told again: ending at once");
            std::process::exit(1);
        });
    }
}
