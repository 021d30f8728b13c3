//! The shutdown signal of listeners and connections.

use std::time::Duration;

use tokio::sync::watch;

/// How long an idle connection stays open after its listener has stopped accepting. A client that sends requests more
/// often than this receives its last response together with the end of the connection. A client that sends less often
/// may be sending a request at the moment of the end, and then sees that request unanswered.
const IDLE_GRACE: Duration = Duration::from_millis(500);

/// Shutdown stage of a group of listeners. Stages follow each other in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ShutdownStage {
    /// Connections are accepted and served.
    Open,
    /// Connections are accepted and served, and each response asks the client to disconnect if the protocol can say so.
    Draining,
    /// No connection is accepted. Requests that have arrived are answered, then their connections end.
    Closing,
}

/// The receiving end of the shutdown signal. Clones see the same stage.
#[derive(Clone)]
pub(crate) struct Shutdown(watch::Receiver<ShutdownStage>);

impl Shutdown {
    /// Creates a signal in stage [`ShutdownStage::Open`], and the sender that sets its stage.
    ///
    /// Dropping the sender has the effect of [`ShutdownStage::Closing`].
    pub(crate) fn channel() -> (watch::Sender<ShutdownStage>, Shutdown) {
        let (sender, receiver) = watch::channel(ShutdownStage::Open);
        (sender, Shutdown(receiver))
    }

    /// Returns whether the stage is `Draining` or `Closing`, or the sender was dropped.
    ///
    /// The next response is then to be the last of its connection.
    ///
    /// Called for every response. Takes no lock: it only asks whether the stage was ever set, because this value never
    /// marks a change as seen.
    pub(crate) fn is_draining(&self) -> bool {
        self.0.has_changed().unwrap_or(true)
    }

    /// Returns whether the stage is `Closing`, or the sender was dropped.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_draining() && (*self.0.borrow() == ShutdownStage::Closing || self.0.has_changed().is_err())
    }

    /// Completes when the stage is `Closing`, or the sender is dropped.
    pub(crate) async fn closing(mut self) {
        // An error means that the sender was dropped.
        let _ = self.0.wait_for(|stage| *stage == ShutdownStage::Closing).await;
    }

    /// Completes when idle connections must end: half a second after [`closing`](Self::closing) completes.
    pub(crate) async fn idle_grace_over(self) {
        self.closing().await;
        tokio::time::sleep(IDLE_GRACE).await;
    }
}
