//! Reading from clients and writing to them, with time limits and without a buffer for idle connections.

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

/// The most bytes that one call reads.
pub(crate) const READ_BYTES: usize = 16 * 1024;
/// The capacity that a connection keeps of a buffer between requests.
pub(crate) const KEPT_BYTES_MAX: usize = 4 * 1024;
/// How long a connection that we have ended waits for the client's end.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// Returns the output of the future, or an error if it takes longer than `limit`; the future is then dropped.
///
/// Creates a timer only if the future is not ready at its first poll.
pub(crate) async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
    let mut future = pin!(future);
    match poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => tokio::time::timeout(limit, future).await,
    }
}

/// Writes and flushes `responses`, after the other tasks of this thread that are ready have run.
///
/// A write usually wakes the client. If responses are written between the reads and decisions of other connections, the
/// client sleeps again before the next one arrives, and each of them wakes it. Written together they find it awake.
/// With two or more connections this saves a tenth of the cost of a response. A single connection pays for one yield.
///
/// # Errors
/// `TimedOut` if the client does not accept all bytes within `limit`, or the error of the stream. Some bytes may have
/// been sent then.
pub(crate) async fn send<S>(stream: &mut S, responses: &[u8], limit: Duration) -> io::Result<()>
where
    S: AsyncWrite + Unpin,
{
    tokio::task::yield_now().await;
    let sending = async {
        stream.write_all(responses).await?;
        // A TLS stream may still hold some of it back.
        stream.flush().await
    };
    within(limit, sending).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Sends the last responses and the end of the connection, in one packet if they fit.
///
/// Then waits up to a second for the client to end the connection too.
///
/// A client that waits for its response before it sends again therefore never sends a request that is not read: the end
/// of the connection arrives with the response.
///
/// # Errors
/// `TimedOut` if the client does not accept all bytes within `limit`, or the error of the stream. Some bytes may have
/// been sent then.
pub(crate) async fn send_last<S>(stream: &mut S, responses: &[u8], limit: Duration) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Cork + Unpin,
{
    stream.cork();
    let sending = async {
        stream.write_all(responses).await?;
        stream.flush().await?;
        stream.shutdown().await
    };
    within(limit, sending).await.map_err(|_| io::ErrorKind::TimedOut)??;
    linger(stream).await;
    Ok(())
}

/// Sends the end of the connection, and waits up to a second for the client to end it too.
///
/// # Errors
/// `TimedOut` if the end cannot be sent within `limit`, or the error of the stream.
pub(crate) async fn close<S>(stream: &mut S, limit: Duration) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    within(limit, stream.shutdown()).await.map_err(|_| io::ErrorKind::TimedOut)??;
    linger(stream).await;
    Ok(())
}

/// Reads and discards bytes until the client ends the connection, it breaks, or a second has passed.
///
/// Called after the server has ended its direction of the connection.
///
/// Closing a socket with unread bytes resets the connection, and a reset destroys responses that the client has not
/// read.
async fn linger<S: AsyncRead + Unpin>(stream: &mut S) {
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

/// Reads once, up to 16 KiB, and passes the bytes to `take`.
///
/// Ready with their number, which is 0 at the end of the stream.
///
/// The buffer is on the stack, so an idle connection holds no memory for bytes that may arrive.
pub(crate) fn poll_read<S>(
    stream: &mut S,
    cx: &mut Context<'_>,
    take: &mut impl FnMut(&[u8]),
) -> Poll<io::Result<usize>>
where
    S: AsyncRead + Unpin,
{
    let mut bytes = [const { MaybeUninit::uninit() }; READ_BYTES];
    let mut read = ReadBuf::uninit(&mut bytes);
    ready!(Pin::new(stream).poll_read(cx, &mut read))?;
    take(read.filled());
    Poll::Ready(Ok(read.filled().len()))
}

/// Appends up to 16 KiB to `buffer` if they can be read without waiting.
///
/// Returns whether any bytes were read: false also at the end of the stream.
pub(crate) async fn read_waiting<S: AsyncRead + Unpin>(stream: &mut S, buffer: &mut BytesMut) -> io::Result<bool> {
    poll_fn(|cx| {
        Poll::Ready(match poll_read(stream, cx, &mut |bytes| buffer.extend_from_slice(bytes)) {
            Poll::Ready(read) => read.map(|count| count > 0),
            Poll::Pending => Ok(false),
        })
    })
    .await
}

/// Polls for the end of a connection: ready with `Ok` when the client ends it, and with an error when it breaks.
///
/// Bytes that arrive before that are appended to `buffer`. While the buffer has 16 KiB or more, nothing is read, and
/// the end is not noticed.
pub(crate) fn poll_end<S>(stream: &mut S, cx: &mut Context<'_>, buffer: &mut BytesMut) -> Poll<io::Result<()>>
where
    S: AsyncRead + Unpin,
{
    while buffer.len() < READ_BYTES {
        if ready!(poll_read(stream, cx, &mut |bytes| buffer.extend_from_slice(bytes)))? == 0 {
            return Poll::Ready(Ok(()));
        }
    }
    Poll::Pending
}

/// Frees the unused capacity of a buffer.
///
/// Does nothing unless `bytes_before`, the former length of the buffer, is more than 4 KiB, and some bytes were
/// consumed since.
pub(crate) fn shrink(buffer: &mut BytesMut, bytes_before: usize) {
    if bytes_before > KEPT_BYTES_MAX && buffer.len() < bytes_before {
        *buffer = BytesMut::from(&buffer[..]);
    }
}

/// The result of [`IdleTimeout::read`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadOutcome {
    /// More bytes were appended.
    Bytes,
    /// The client has ended the connection.
    End,
    /// The client sent nothing for the idle time, or the deadline has passed.
    TimedOut,
    /// The interrupt completed first.
    Interrupted,
}

/// A limit on the time for which a client may send nothing, and an optional deadline.
///
/// A client that sends single bytes now and then never exceeds the idle time. The deadline bounds the time for a whole
/// request.
///
/// There is one timer for the life of a connection, because setting one for each read would cost as much as a check.
/// When it fires although bytes were read since it was set, it is set again to the idle time after the last of them.
pub(crate) struct IdleTimeout {
    idle: Duration,
    timer: Pin<Box<Sleep>>,
    last_read_at: Instant,
    deadline: Option<Instant>,
}

impl IdleTimeout {
    /// Creates a limit of `idle` that starts now, without a deadline.
    pub(crate) fn new(idle: Duration) -> IdleTimeout {
        let last_read_at = Instant::now();
        let timer = Box::pin(tokio::time::sleep_until(last_read_at + idle));
        IdleTimeout { idle, timer, last_read_at, deadline: None }
    }

    /// Returns when bytes were last read, or when the idle time last started.
    pub(crate) fn last_read_at(&self) -> Instant {
        self.last_read_at
    }

    /// Starts the idle time again, after a request for which the client had to wait.
    pub(crate) fn restart(&mut self) {
        self.last_read_at = Instant::now();
    }

    /// Sets the time at which reading ends with [`ReadOutcome::TimedOut`] even if bytes arrive. `None` removes it.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
        if let Some(deadline) = deadline.filter(|deadline| *deadline < self.timer.deadline()) {
            self.timer.as_mut().reset(deadline);
        }
    }

    /// Waits for bytes and appends them to `buffer`.
    ///
    /// Stops waiting when the client ends the connection, a time limit is reached, or `interrupt` completes. Bytes that
    /// have arrived already are read before `interrupt` is polled.
    ///
    /// Bytes that arrive after the deadline are appended too, but the outcome is [`ReadOutcome::TimedOut`].
    ///
    /// # Errors
    /// If the connection breaks.
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
            let reading = poll_fn(|cx| match poll_read(stream, cx, &mut |bytes| buffer.extend_from_slice(bytes)) {
                Poll::Ready(Ok(0)) => Poll::Ready(Ok(ReadOutcome::End)),
                Poll::Ready(read) => Poll::Ready(read.map(|_| ReadOutcome::Bytes)),
                Poll::Pending if interrupt.as_mut().poll(cx).is_ready() => Poll::Ready(Ok(ReadOutcome::Interrupted)),
                Poll::Pending => self.timer.as_mut().poll(cx).map(|()| Ok(ReadOutcome::TimedOut)),
            });
            match reading.await? {
                ReadOutcome::Bytes => {
                    self.last_read_at = Instant::now();
                    let is_late = self.deadline.is_some_and(|deadline| deadline <= self.last_read_at);
                    return Ok(if is_late { ReadOutcome::TimedOut } else { ReadOutcome::Bytes });
                }
                ReadOutcome::TimedOut => {
                    let idle_until = self.last_read_at + self.idle;
                    let until = self.deadline.map_or(idle_until, |deadline| deadline.min(idle_until));
                    if self.timer.deadline() >= until {
                        return Ok(ReadOutcome::TimedOut);
                    }
                    self.timer.as_mut().reset(until);
                }
                outcome @ (ReadOutcome::End | ReadOutcome::Interrupted) => return Ok(outcome),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_keeps_sending_is_not_read_beyond_the_deadline() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let (mut timeout, mut buffer) = (IdleTimeout::new(Duration::from_secs(60)), BytesMut::new());
        timeout.set_deadline(Some(Instant::now() + Duration::from_secs(10)));
        for expected in [ReadOutcome::Bytes, ReadOutcome::TimedOut] {
            client.write_all(b"PING\r\n").await.unwrap();
            let outcome = timeout.read(&mut server, &mut buffer, pin!(std::future::pending())).await.unwrap();
            assert_eq!(outcome, expected);
            tokio::time::advance(Duration::from_secs(10)).await;
        }
    }

    #[tokio::test]
    async fn bytes_that_arrived_before_an_interrupt_are_read_first() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let (mut timeout, mut buffer) = (IdleTimeout::new(Duration::from_secs(60)), BytesMut::new());
        client.write_all(b"PING").await.unwrap();
        for expected in [ReadOutcome::Bytes, ReadOutcome::Interrupted] {
            let interrupt = pin!(std::future::ready(()));
            assert_eq!(timeout.read(&mut server, &mut buffer, interrupt).await.unwrap(), expected);
        }
        assert_eq!(buffer, "PING");
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_connection_lingers_until_the_client_ends_it_and_at_most_a_second() {
        let (mut client, mut server) = tokio::io::duplex(64);
        let start = Instant::now();
        let closing = tokio::spawn(async move { close(&mut server, Duration::from_secs(60)).await });
        client.write_all(&[b'x'; 1_000]).await.unwrap();
        drop(client);
        closing.await.unwrap().unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO);

        let (_client, mut server) = tokio::io::duplex(64);
        close(&mut server, Duration::from_secs(60)).await.unwrap();
        assert_eq!(start.elapsed(), LINGER);
    }
}
