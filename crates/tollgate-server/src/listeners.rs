//! The doors: each translates a protocol into checks and decisions back into the protocol, and does nothing else.

pub mod http;
pub mod resp;

use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::error::Elapsed;
use tokio::time::{Instant, Sleep};

use crate::stream::Cork;

/// What is read at once.
pub(crate) const READ_BYTES: usize = 16 * 1024;
/// What a connection keeps of a buffer between requests.
pub(crate) const KEPT_BYTES_MAX: usize = 4 * 1024;
/// How long a connection that we have ended waits for the client's end.
const LINGER: Duration = Duration::from_secs(1);

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

/// Sends the last answers and the end of the connection, in one packet if they fit, and then waits for the client's end.
///
/// A client that waits for its answer before it asks again thus never sends a request that nobody reads: when the answer is
/// there, so is the end.
pub(crate) async fn send_last<S>(stream: &mut S, answers: &[u8], limit: Duration) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Cork + Unpin,
{
    stream.cork();
    let sending = async {
        stream.write_all(answers).await?;
        stream.flush().await?;
        stream.shutdown().await
    };
    within(limit, sending).await.map_err(|_| io::ErrorKind::TimedOut)??;
    linger(stream).await;
    Ok(())
}

/// Ends a connection: sends its end and waits for the client's.
pub(crate) async fn finish<S>(stream: &mut S, limit: Duration) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    within(limit, stream.shutdown()).await.map_err(|_| io::ErrorKind::TimedOut)??;
    linger(stream).await;
    Ok(())
}

/// Reads what a client still sends after our end, and discards it, until the client ends the connection too or a second has passed.
///
/// To close a socket with unread bytes resets the connection, and a reset destroys answers that the client has not read yet.
pub(crate) async fn linger<S: AsyncRead + Unpin>(stream: &mut S) {
    let discarding = poll_fn(|cx| {
        loop {
            match ready!(poll_read(stream, cx, &mut |_| {})) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return Poll::Ready(()),
            }
        }
    });
    let _ = within(LINGER, discarding).await;
}

/// Reads once, without a buffer that outlives the call: a connection that waits holds no memory for what may come.
fn poll_read<S>(stream: &mut S, cx: &mut Context<'_>, take: &mut impl FnMut(&[u8])) -> Poll<io::Result<usize>>
where
    S: AsyncRead + Unpin,
{
    let mut bytes = [const { MaybeUninit::uninit() }; READ_BYTES];
    let mut read = ReadBuf::uninit(&mut bytes);
    ready!(Pin::new(stream).poll_read(cx, &mut read))?;
    take(read.filled());
    Poll::Ready(Ok(read.filled().len()))
}

/// Appends what can be read without waiting. Returns whether there was anything.
pub(crate) async fn read_waiting<S: AsyncRead + Unpin>(stream: &mut S, buffer: &mut BytesMut) -> io::Result<bool> {
    poll_fn(|cx| {
        Poll::Ready(match poll_read(stream, cx, &mut |bytes| buffer.extend_from_slice(bytes)) {
            Poll::Ready(read) => read.map(|count| count > 0),
            Poll::Pending => Ok(false),
        })
    })
    .await
}

/// Completes when the client ends the connection. What comes before that is appended, as much as is read at once.
pub(crate) async fn until_end<S: AsyncRead + Unpin>(stream: &mut S, buffer: &mut BytesMut) {
    poll_fn(|cx| {
        while buffer.len() < READ_BYTES {
            match ready!(poll_read(stream, cx, &mut |bytes| buffer.extend_from_slice(bytes))) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return Poll::Ready(()),
            }
        }
        Poll::Pending
    })
    .await;
}

/// Gives back the room of a buffer that held `bytes_before`, if that was much and some of it was consumed.
pub(crate) fn shrink(buffer: &mut BytesMut, bytes_before: usize) {
    if bytes_before > KEPT_BYTES_MAX && buffer.len() < bytes_before {
        *buffer = BytesMut::from(&buffer[..]);
    }
}

/// What came of waiting for a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadOutcome {
    /// More bytes.
    Bytes,
    /// The client's end.
    End,
    /// Nothing, for too long, or not all that was to come by the deadline.
    Late,
    /// Whatever was to interrupt the waiting came first.
    Interrupted,
}

/// How long a door waits for a client to say something.
///
/// One timer lives as long as the connection and is only set again when it rings, because setting one for each read would
/// cost as much as a check. When it rings and something was heard since, it is set to when that becomes too long ago.
///
/// A client that says a little now and then is never silent. What must be complete at some time has a deadline besides.
pub(crate) struct IdleTimeout {
    idle: Duration,
    timer: Pin<Box<Sleep>>,
    last_read_at: Instant,
    deadline: Option<Instant>,
}

impl IdleTimeout {
    pub(crate) fn new(idle: Duration) -> IdleTimeout {
        let last_read_at = Instant::now();
        let timer = Box::pin(tokio::time::sleep_until(last_read_at + idle));
        IdleTimeout { idle, timer, last_read_at, deadline: None }
    }

    /// When something was last heard.
    pub(crate) fn last_read_at(&self) -> Instant {
        self.last_read_at
    }

    /// Waits no longer than until then, whatever is heard.
    pub(crate) fn until(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
        if let Some(deadline) = deadline.filter(|deadline| *deadline < self.timer.deadline()) {
            self.timer.as_mut().reset(deadline);
        }
    }

    /// Appends what comes to `buffer`. Nothing is lost if `interrupt` comes first.
    pub(crate) async fn read<S, I>(
        &mut self,
        stream: &mut S,
        buffer: &mut BytesMut,
        mut interrupt: Pin<&mut I>,
    ) -> io::Result<ReadOutcome>
    where
        S: AsyncRead + Unpin,
        I: Future<Output = ()> + ?Sized,
    {
        loop {
            let heard = poll_fn(|cx| match poll_read(stream, cx, &mut |bytes| buffer.extend_from_slice(bytes)) {
                Poll::Ready(Ok(0)) => Poll::Ready(Ok(ReadOutcome::End)),
                Poll::Ready(read) => Poll::Ready(read.map(|_| ReadOutcome::Bytes)),
                Poll::Pending if interrupt.as_mut().poll(cx).is_ready() => Poll::Ready(Ok(ReadOutcome::Interrupted)),
                Poll::Pending => self.timer.as_mut().poll(cx).map(|()| Ok(ReadOutcome::Late)),
            });
            match heard.await? {
                ReadOutcome::Bytes => {
                    self.last_read_at = Instant::now();
                    let is_late = self.deadline.is_some_and(|deadline| deadline <= self.last_read_at);
                    return Ok(if is_late { ReadOutcome::Late } else { ReadOutcome::Bytes });
                }
                ReadOutcome::Late => {
                    let silent = self.last_read_at + self.idle;
                    let until = self.deadline.map_or(silent, |deadline| deadline.min(silent));
                    if self.timer.deadline() >= until {
                        return Ok(ReadOutcome::Late);
                    }
                    self.timer.as_mut().reset(until);
                }
                heard @ (ReadOutcome::End | ReadOutcome::Interrupted) => return Ok(heard),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_never_stops_talking_is_not_heard_beyond_the_deadline() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let (mut patience, mut buffer) = (IdleTimeout::new(Duration::from_secs(60)), BytesMut::new());
        patience.until(Some(Instant::now() + Duration::from_secs(10)));
        for expected in [ReadOutcome::Bytes, ReadOutcome::Late] {
            client.write_all(b"PING\r\n").await.unwrap();
            let heard = patience.read(&mut server, &mut buffer, pin!(std::future::pending())).await.unwrap();
            assert_eq!(heard, expected);
            tokio::time::advance(Duration::from_secs(10)).await;
        }
    }

    #[tokio::test]
    async fn what_arrived_before_an_interrupt_is_heard_first() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let (mut patience, mut buffer) = (IdleTimeout::new(Duration::from_secs(60)), BytesMut::new());
        client.write_all(b"PING").await.unwrap();
        for expected in [ReadOutcome::Bytes, ReadOutcome::Interrupted] {
            let interrupt = pin!(std::future::ready(()));
            assert_eq!(patience.read(&mut server, &mut buffer, interrupt).await.unwrap(), expected);
        }
        assert_eq!(buffer, "PING");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_lingers_until_the_client_ends_it_and_no_longer_than_its_time() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let start = Instant::now();
        let lingering = tokio::spawn(async move { finish(&mut server, Duration::from_secs(60)).await });
        client.write_all(&[b'x'; 1_000]).await.unwrap();
        drop(client);
        lingering.await.unwrap().unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);

        let (_client, mut server) = tokio::io::duplex(64);
        finish(&mut server, Duration::from_secs(60)).await.unwrap();
        assert_eq!(start.elapsed(), LINGER);
    }
}
