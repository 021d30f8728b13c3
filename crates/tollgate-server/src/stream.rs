//! A connection as the doors see it: plain or encrypted, and at its end when the doors close.

use std::future::Future;
use std::io::{self, IoSlice};
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;

/// A client's connection.
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// Returns the client's address; `None` if the socket is closed already.
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        let socket = match self {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => stream.get_ref().0,
        };
        socket.peer_addr().ok().map(|address| address.ip())
    }

    fn read_half(&mut self) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        Pin::new(match self {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => stream,
        })
    }

    fn write_half(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        Pin::new(match self {
            Stream::Plain(stream) => stream,
            Stream::Tls(stream) => stream,
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.read_half().poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.write_half().poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write_half().poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Stream::Plain(stream) => stream.is_write_vectored(),
            Stream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_half().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_half().poll_shutdown(cx)
    }
}

/// A connection on which nothing more is heard once the doors close: what has arrived is still read and answered, then it ends
/// as if the client had said that it is done. So a protocol needs no notion of its own of a shutdown.
pub(crate) struct UntilClosing<S, F> {
    stream: S,
    closing: F,
    is_closing: bool,
}

impl<S, F: Future<Output = ()> + Unpin> UntilClosing<S, F> {
    pub(crate) fn new(stream: S, closing: F) -> UntilClosing<S, F> {
        UntilClosing { stream, closing, is_closing: false }
    }
}

impl<S: AsyncRead + Unpin, F: Future<Output = ()> + Unpin> AsyncRead for UntilClosing<S, F> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if read.is_pending() {
            this.is_closing = this.is_closing || Pin::new(&mut this.closing).poll(cx).is_ready();
            if this.is_closing {
                return Poll::Ready(Ok(()));
            }
        }
        read
    }
}

impl<S: AsyncWrite + Unpin, F: Unpin> AsyncWrite for UntilClosing<S, F> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A connection of which something was read already: that comes first.
pub(crate) struct Begun<S> {
    read: BytesMut,
    stream: S,
}

impl<S> Begun<S> {
    pub(crate) fn new(read: BytesMut, stream: S) -> Begun<S> {
        Begun { read, stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.read.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let some = self.read.len().min(buf.remaining());
        buf.put_slice(&self.read.split_to(some));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A connection whose other end must go on reading: when nothing more of an answer can be sent for so long, it is given up.
/// A timer is only made when there is something to wait for.
pub(crate) struct WrittenWithin<S> {
    stream: S,
    limit: Duration,
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<S> WrittenWithin<S> {
    pub(crate) fn new(stream: S, limit: Duration) -> WrittenWithin<S> {
        WrittenWithin { stream, limit, stuck: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stuck = None;
            return written;
        }
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.limit)));
        stuck.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WrittenWithin<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WrittenWithin<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.watch(cx, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_arrived_before_the_closing_is_read_and_then_it_ends() {
        let (mut client, server) = tokio::io::duplex(64);
        let (close, closing) = oneshot::channel::<()>();
        let mut server = UntilClosing::new(server, Box::pin(async move { drop(closing.await) }));
        client.write_all(b"PING").await.unwrap();
        close.send(()).unwrap();
        let mut heard = String::new();
        let ended = tokio::time::timeout(std::time::Duration::from_secs(30), server.read_to_string(&mut heard)).await;
        ended.expect("it ends").unwrap();
        assert_eq!(heard, "PING");
        server.write_all(b"PONG").await.unwrap();
        let mut answer = [0; 4];
        client.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"PONG", "the answer still goes out");
    }
}
