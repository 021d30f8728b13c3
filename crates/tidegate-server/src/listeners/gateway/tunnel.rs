//! Tunnels: connections that a client and an upstream have upgraded to another protocol, such as WebSocket.
//!
//! After the upstream's 101 response, bytes are copied in both directions until both have ended, or no byte was sent
//! for the idle timeout. The tunnel runs in the task of the client's connection, so it occupies the connection's slot
//! until it ends.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};

use crate::listener::BoxError;
use crate::metrics::InFlightGauge;

/// An upgrade that both sides have agreed on.
pub(super) struct Tunnel {
    pub(super) client: OnUpgrade,
    pub(super) upstream: OnUpgrade,
    pub(super) idle: Duration,
    pub(super) gauge: InFlightGauge,
}

impl Tunnel {
    /// Copies bytes in both directions until both have ended.
    ///
    /// # Errors
    /// If an upgrade fails, a connection breaks, or no byte is sent for the idle timeout.
    pub(super) async fn run(self) -> Result<(), BoxError> {
        let (client, upstream) = (self.client.await?, self.upstream.await?);
        let bytes = Arc::new(AtomicU64::new(0));
        let mut client = Counted { stream: TokioIo::new(client), bytes: bytes.clone() };
        let mut upstream = Counted { stream: TokioIo::new(upstream), bytes: bytes.clone() };
        let copied = tokio::select! {
            copied = copy_bidirectional(&mut client, &mut upstream) => copied.map(drop).map_err(BoxError::from),
            () = idle(&bytes, self.idle) => Err("the tunnel was idle for too long".into()),
        };
        drop(self.gauge);
        copied
    }
}

/// Completes when `bytes` has not changed for `limit`. May complete up to `limit` late.
async fn idle(bytes: &AtomicU64, limit: Duration) {
    loop {
        let before = bytes.load(Ordering::Relaxed);
        tokio::time::sleep(limit).await;
        if bytes.load(Ordering::Relaxed) == before {
            return;
        }
    }
}

/// A stream that counts the bytes it receives.
struct Counted<S> {
    stream: S,
    bytes: Arc<AtomicU64>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
        self.bytes.fetch_add((buf.filled().len() - before) as u64, Ordering::Relaxed);
        Poll::Ready(read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
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
