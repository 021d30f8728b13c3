//! The byte streams that listeners serve: plain or encrypted.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;
use tokio_rustls::server::TlsStream;

use crate::tls::HandshakeStream;

/// The connection of a client: plain TCP, or TLS after its handshake.
pub(crate) enum ClientStream {
    Plain(TcpStream),
    Tls(Box<TlsStream<HandshakeStream>>),
}

/// A stream that can send its last bytes and its end in one packet.
pub(crate) trait Cork {
    /// Makes the operating system hold back written bytes until they fill a packet or the stream is shut down.
    ///
    /// Does nothing by default, and on systems other than Linux and Android.
    fn cork(&self) {}
}

impl Cork for ClientStream {
    fn cork(&self) {
        let socket = match self {
            ClientStream::Plain(stream) => stream,
            ClientStream::Tls(stream) => stream.get_ref().0.socket(),
        };
        // If this fails, the end follows in a packet of its own.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let _ = SockRef::from(socket).set_tcp_cork(true);
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = socket;
    }
}

#[cfg(test)]
impl Cork for tokio::io::DuplexStream {}

impl ClientStream {
    /// Returns the port on which the connection was accepted, or 0 if it is unknown.
    pub(crate) fn local_port(&self) -> u16 {
        let socket = match self {
            ClientStream::Plain(stream) => stream,
            ClientStream::Tls(stream) => stream.get_ref().0.socket(),
        };
        socket.local_addr().map_or(0, |address| address.port())
    }

    fn read_half(&mut self) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        Pin::new(match self {
            ClientStream::Plain(stream) => stream,
            ClientStream::Tls(stream) => stream,
        })
    }

    fn write_half(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        Pin::new(match self {
            ClientStream::Plain(stream) => stream,
            ClientStream::Tls(stream) => stream,
        })
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.read_half().poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientStream {
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
            ClientStream::Plain(stream) => stream.is_write_vectored(),
            ClientStream::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_half().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write_half().poll_shutdown(cx)
    }
}

/// A stream whose writes fail with `TimedOut` when the other end accepts no bytes for the time limit.
///
/// Reads have no limit.
///
/// The timer starts when a write, flush or shutdown has to wait, and is dropped when the stream completes one, with
/// success or an error. After a timeout the timer stays, so a later operation that has to wait fails at once.
pub(crate) struct WriteTimeout<S> {
    stream: S,
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    pub(crate) fn new(stream: S, limit: Duration) -> WriteTimeout<S> {
        WriteTimeout { stream, limit, timer: None }
    }

    /// Returns the underlying stream.
    pub(crate) fn get_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    fn with_timer<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.limit)));
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.with_timer(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.with_timer(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.with_timer(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.with_timer(cx, shut)
    }
}
