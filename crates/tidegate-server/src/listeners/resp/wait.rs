//! `TIDEGATE.WAIT`: holds the reply until a check is admitted.
//!
//! The command blocks its connection, as `BLPOP` of Redis does. Replies to earlier commands are sent before it waits, and
//! commands behind it stay in the buffer until it is answered. Meanwhile the stream is read, up to 16 KiB, because a client
//! that disconnects must leave the queue at once: the check behind it is the next to be admitted. A client that ends only
//! its own direction of the connection is treated as disconnected.
//!
//! A wait ends early in two more cases. When the listener has been closing for half a second, the command gets an error, and
//! the client can wait at another instance. And a command of more than 4 KiB is accounted for like one that is not complete,
//! so it may be evicted by others.
//!
//! Nothing is charged when a wait ends early, with two exceptions: a call to the store may be in progress, and a leaky
//! bucket has charged once its delay has begun.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use bytes::BytesMut;
use tidegate::{Check, Decision, Unavailable};
use tokio::io::{AsyncRead, AsyncWrite};

use super::RespConnection;
use super::command::{RespCommand, parse_command};
use super::frame::{Args, parse};
use crate::listeners::io::{poll_end, send_last};
use crate::stream::Cork;

/// The error reply to a command that waits when the listener closes.
const CLOSING: &str = "UNAVAILABLE this instance is shutting down; send the command to another instance";

/// The reason why a wait is over.
enum WaitEnd {
    Decided(Result<Decision, Unavailable>),
    Disconnected,
    Closing,
    Evicted,
    /// Not over: more bytes have arrived than are accounted for.
    Received,
}

impl<S: AsyncRead + AsyncWrite + Cork + Unpin> RespConnection<S> {
    /// Removes the `TIDEGATE.WAIT` of `length` bytes at the front of the buffer, waits, and appends its reply.
    ///
    /// Bytes that arrive meanwhile are appended to the buffer.
    ///
    /// Returns false if the connection has ended: the client has disconnected, the listener has closed, or the command was
    /// evicted from the receive budget.
    ///
    /// # Errors
    /// If the connection breaks, or the client does not accept the last replies within the idle time.
    pub(super) async fn wait(&mut self, length: usize, buffer: &mut BytesMut) -> std::io::Result<bool> {
        let frame = buffer.split_to(length);
        let (mut args, mut demands) = (Args::default(), Vec::new());
        // The caller has found a complete wait of this length.
        let Ok(Some(_)) = parse(&frame, &mut args) else { return Ok(true) };
        let parsed = parse_command(&frame, &args, &mut self.client.limits, &mut demands);
        let Ok(RespCommand::Wait { check: pending, timeout }) = parsed else { return Ok(true) };
        let check = Check::of_distinct(&demands);
        let listener = self.listener.clone();
        if let Err(unavailable) = self.check_receipt(pending, &demands) {
            self.replies.error(&unavailable);
            return Ok(true);
        }
        let resolver = listener.decider.engine().explicit();
        let mut decided = pin!(listener.decider.wait(&resolver, &check, timeout, pending.has_receipt));
        let mut closing = pin!(self.context.shutdown.clone().idle_grace_over());
        let end = loop {
            let held = length + buffer.len();
            if !self.context.receiving.hold(held).await {
                break WaitEnd::Evicted;
            }
            let mut evicted = pin!(self.context.receiving.evicted());
            let stream = &mut self.stream;
            let waiting = poll_fn(|cx| {
                if let Poll::Ready(decided) = decided.as_mut().poll(cx) {
                    return Poll::Ready(Ok(WaitEnd::Decided(decided)));
                }
                if closing.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ok(WaitEnd::Closing));
                }
                if evicted.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ok(WaitEnd::Evicted));
                }
                match poll_end(stream, cx, buffer) {
                    Poll::Pending if length + buffer.len() > held => Poll::Ready(Ok(WaitEnd::Received)),
                    ended => ended.map_ok(|()| WaitEnd::Disconnected),
                }
            });
            match waiting.await? {
                WaitEnd::Received => {}
                end => break end,
            }
        };
        match end {
            WaitEnd::Decided(answer) => {
                self.reply(&check, pending, &answer);
                return Ok(true);
            }
            WaitEnd::Disconnected | WaitEnd::Received => {}
            WaitEnd::Closing => {
                self.replies.error(CLOSING);
                send_last(&mut self.stream, self.replies.as_bytes(), self.listener.options.idle).await?;
            }
            WaitEnd::Evicted => self.drop_command(buffer).await?,
        }
        Ok(false)
    }
}
