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
///
/// A client that says a little now and then is never silent. What must be complete at some time has a deadline besides.
pub(crate) struct Patience {
    idle: Duration,
    timer: Pin<Box<Sleep>>,
    heard_at: Instant,
    deadline: Option<Instant>,
}

impl Patience {
    pub(crate) fn new(idle: Duration) -> Patience {
        let heard_at = Instant::now();
        let timer = Box::pin(tokio::time::sleep_until(heard_at + idle));
        Patience { idle, timer, heard_at, deadline: None }
    }

    /// When something was last heard.
    pub(crate) fn heard_at(&self) -> Instant {
        self.heard_at
    }

    /// Waits no longer than until then, whatever is heard.
    pub(crate) fn until(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
        if let Some(deadline) = deadline.filter(|deadline| *deadline < self.timer.deadline()) {
            self.timer.as_mut().reset(deadline);
        }
    }

    /// Reads what has come. False when the client has left, was silent for too long or took too long.
    pub(crate) async fn hear<S>(&mut self, stream: &mut S, buffer: &mut BytesMut) -> io::Result<bool>
    where
        S: AsyncRead + Unpin,
    {
        loop {
            let mut reading = pin!(stream.read_buf(buffer));
            let read = poll_fn(|cx| match reading.as_mut().poll(cx) {
                Poll::Ready(read) => Poll::Ready(Some(read)),
                Poll::Pending => self.timer.as_mut().poll(cx).map(|()| None),
            });
            if let Some(read) = read.await {
                self.heard_at = Instant::now();
                let is_late = self.deadline.is_some_and(|deadline| deadline <= self.heard_at);
                return Ok(read? > 0 && !is_late);
            }
            let silent = self.heard_at + self.idle;
            let until = self.deadline.map_or(silent, |deadline| deadline.min(silent));
            if self.timer.deadline() >= until {
                return Ok(false);
            }
            self.timer.as_mut().reset(until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_never_stops_talking_is_not_heard_beyond_the_deadline() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let (mut patience, mut buffer) = (Patience::new(Duration::from_secs(60)), BytesMut::new());
        patience.until(Some(Instant::now() + Duration::from_secs(10)));
        for is_heard in [true, false] {
            client.write_all(b"PING\r\n").await.unwrap();
            assert_eq!(patience.hear(&mut server, &mut buffer).await.unwrap(), is_heard);
            tokio::time::advance(Duration::from_secs(10)).await;
        }
    }
}
