//! The doors: each translates a protocol into checks and decisions back into the protocol, and does nothing else.

pub mod http;
pub mod resp;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt};
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

/// How long a door waits for a client to say something: `idle`, and at the latest twice as long.
///
/// One timer lives as long as the connection and is only set again when it rings, because setting one for each read would
/// cost as much as a check. When it rings and something was heard since, it is set again.
pub(crate) struct Patience {
    idle: Duration,
    silence: Pin<Box<Sleep>>,
    heard: bool,
}

impl Patience {
    pub(crate) fn new(idle: Duration) -> Patience {
        Patience { idle, silence: Box::pin(tokio::time::sleep(idle)), heard: false }
    }

    /// Reads what has come. False when the client has left or was silent for too long.
    pub(crate) async fn hear<S>(&mut self, stream: &mut S, buffer: &mut BytesMut) -> std::io::Result<bool>
    where
        S: AsyncRead + Unpin,
    {
        loop {
            let mut reading = pin!(stream.read_buf(buffer));
            let read = poll_fn(|cx| match reading.as_mut().poll(cx) {
                Poll::Ready(read) => Poll::Ready(Some(read)),
                Poll::Pending => self.silence.as_mut().poll(cx).map(|()| None),
            });
            match read.await {
                Some(read) => {
                    self.heard = true;
                    return Ok(read? > 0);
                }
                None if !self.heard => return Ok(false),
                None => {
                    self.heard = false;
                    self.silence.as_mut().reset(Instant::now() + self.idle);
                }
            }
        }
    }
}
