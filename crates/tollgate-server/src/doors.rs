//! The doors: each translates a protocol into checks and decisions back into the protocol, and does nothing else.

pub mod http;
pub mod resp;

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, Sleep};

/// What the future gives, unless it takes longer. Mostly it is ready at once, and then no timer is made for it.
pub(crate) async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut future = pin!(future);
    match poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => tokio::time::timeout(limit, future).await,
    }
}

/// Sends answers to a client that takes them in time, after the other connections of this thread that are ready have been heard.
///
/// A write mostly wakes the client. Written one by one, between reading and deciding for others, answers wake a client for each
/// of them, and it sleeps again before the next is there; written together they find it awake. This is worth a tenth of an
/// answer as soon as there are two connections, and costs a lone one a look at who is ready.
pub(crate) async fn send<S>(stream: &mut S, answers: &[u8], limit: Duration) -> io::Result<()>
where
    S: AsyncWrite + Unpin,
{
    tokio::task::yield_now().await;
    let sending = async {
        stream.write_all(answers).await?;
        // What encrypts may still hold some of it back.
        stream.flush().await
    };
    within(limit, sending).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Tells a client that nothing more will come.
pub(crate) async fn part<S: AsyncWrite + Unpin>(stream: &mut S, limit: Duration) -> io::Result<()> {
    within(limit, stream.shutdown()).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// How long a door waits for a client to say something.
///
/// One timer lives as long as the connection and is only set again when it rings, because setting one for each read would
/// cost as much as a check. When it rings and something was heard since, it is set to when that becomes too long ago.
pub(crate) struct Patience {
    idle: Duration,
    silence: Pin<Box<Sleep>>,
    heard_at: Instant,
}

impl Patience {
    pub(crate) fn new(idle: Duration) -> Patience {
        let heard_at = Instant::now();
        Patience { idle, silence: Box::pin(tokio::time::sleep_until(heard_at + idle)), heard_at }
    }

    /// Reads what has come. False when the client has left or was silent for too long.
    pub(crate) async fn hear<S>(&mut self, stream: &mut S, buffer: &mut BytesMut) -> io::Result<bool>
    where
        S: AsyncRead + Unpin,
    {
        loop {
            let mut reading = pin!(stream.read_buf(buffer));
            let read = poll_fn(|cx| match reading.as_mut().poll(cx) {
                Poll::Ready(read) => Poll::Ready(Some(read)),
                Poll::Pending => self.silence.as_mut().poll(cx).map(|()| None),
            });
            if let Some(read) = read.await {
                self.heard_at = Instant::now();
                return Ok(read? > 0);
            }
            let until = self.heard_at + self.idle;
            if self.silence.deadline() >= until {
                return Ok(false);
            }
            self.silence.as_mut().reset(until);
        }
    }
}
