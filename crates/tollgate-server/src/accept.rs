//! Letting connections in: never more than there are places, none that dawdles over its handshake, and none after the doors
//! have begun to close.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::crew::Crew;
use crate::readiness::Attended;
use crate::stream::Stream;
use crate::tls::Tls;

/// After a failure to accept (no file descriptors left, say) the door rests for so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A client that takes longer to agree on a cipher is not served.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(10);
/// How long the word that there is no place may take to be said.
const REFUSAL_WITHIN: Duration = Duration::from_millis(10);

/// What a door counts of its connections.
#[derive(Debug, Default)]
pub(crate) struct DoorCounts {
    open: AtomicU64,
    accepted: AtomicU64,
    refused: AtomicU64,
}

impl DoorCounts {
    /// Open now, accepted ever, refused ever for want of a place.
    pub(crate) fn read(&self) -> [u64; 3] {
        [&self.open, &self.accepted, &self.refused].map(|count| count.load(Ordering::Relaxed))
    }
}

/// How a door lets clients in.
pub(crate) struct Gate {
    /// For logs.
    pub(crate) door: &'static str,
    pub(crate) places: usize,
    pub(crate) grace: Duration,
    /// What a client is told for whom there is no place. Not said over TLS, where it would be noise.
    pub(crate) refusal: &'static [u8],
    pub(crate) tls: Option<Tls>,
    pub(crate) counts: Arc<DoorCounts>,
    /// Who serves those who are in.
    pub(crate) crew: Arc<Crew>,
    /// Goes with the door, whatever ends it.
    pub(crate) _attended: Attended,
}

/// How far the doors are on their way to being closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Open,
    /// Everybody is served, and told not to ask here again where the protocol has a word for it.
    Leaving,
    /// Nobody new is let in, and what has arrived is answered last.
    Closing,
}

/// What a door knows about its closing.
#[derive(Clone)]
pub(crate) struct Closing(watch::Receiver<Stage>);

impl Closing {
    /// The sender tells the stage. Its going away is closing too.
    pub(crate) fn channel() -> (watch::Sender<Stage>, Closing) {
        let (tell, stage) = watch::channel(Stage::Open);
        (tell, Closing(stage))
    }

    /// Whether an answer should be the last on its connection. Asked for each: looking whether anything was told since the doors
    /// opened locks nothing, and this value never takes note of it.
    pub(crate) fn is_leaving(&self) -> bool {
        self.0.has_changed().unwrap_or(true)
    }

    pub(crate) async fn begun(mut self) {
        // An error means that the sender is gone.
        let _ = self.0.wait_for(|stage| *stage == Stage::Closing).await;
    }
}

/// Lets connections in until the doors close, then waits for them.
pub(crate) async fn accept<F, S>(listener: TcpListener, gate: Gate, closing: Closing, serve: S)
where
    F: Future<Output = ()> + Send + 'static,
    S: Fn(Stream, Closing) -> F + Clone + Send + 'static,
{
    let places = Arc::new(Semaphore::new(gate.places));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = closing.clone().begun() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(door = gate.door, %error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let Ok(place) = places.clone().try_acquire_owned() else {
            gate.counts.refused.fetch_add(1, Ordering::Relaxed);
            refuse(stream, &gate).await;
            continue;
        };
        let Ok(stream) = stream.into_std() else { continue };
        let (serve, tls, closing) = (serve.clone(), gate.tls.clone(), closing.clone());
        let open = Open::new(gate.counts.clone());
        gate.crew.serve(move || async move {
            if let Ok(stream) = TcpStream::from_std(stream)
                && let Some(stream) = handshake(stream, tls).await
            {
                serve(stream, closing).await;
            }
            drop((open, place));
        });
    }
    drop(listener);
    let everybody = places.acquire_many(u32::try_from(gate.places).unwrap_or(u32::MAX));
    if tokio::time::timeout(gate.grace, everybody).await.is_err() {
        tracing::warn!(door = gate.door, "some connections did not finish in time and were dropped");
    }
}

/// Counts a connection for as long as it is there.
struct Open(Arc<DoorCounts>);

impl Open {
    fn new(counts: Arc<DoorCounts>) -> Open {
        counts.accepted.fetch_add(1, Ordering::Relaxed);
        counts.open.fetch_add(1, Ordering::Relaxed);
        Open(counts)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn handshake(stream: TcpStream, tls: Option<Tls>) -> Option<Stream> {
    let Some(tls) = tls else { return Some(Stream::Plain(stream)) };
    match tokio::time::timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await {
        Ok(Ok(stream)) => Some(Stream::Tls(Box::new(stream))),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a TLS handshake failed");
            None
        }
        Err(_) => {
            tracing::debug!("a TLS handshake took too long");
            None
        }
    }
}

/// Says that there is no place, if that can be said without waiting.
async fn refuse(mut stream: TcpStream, gate: &Gate) {
    if gate.tls.is_none() {
        let _ = tokio::time::timeout(REFUSAL_WITHIN, stream.write_all(gate.refusal)).await;
    }
}
