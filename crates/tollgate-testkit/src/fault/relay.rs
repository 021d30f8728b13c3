//! One connection through the proxy: a task per connection, a pump per direction.
//!
//! A pump is a reader and a writer with a queue between them. The reader stamps what it reads; the writer holds each
//! chunk until its stamp is due and does to it what the fault of *that* moment says. The task watches both pumps
//! and the fault: when the fault says that the connection must go, it drops everything at once.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{self, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::Fault;
use super::gauge::{Gauge, Open};

const CHUNK_BYTES: usize = 16 * 1024;
/// Chunks that may wait in one direction; a sender that is faster feels TCP's own back-pressure.
const CHUNKS_WAITING_MAX: usize = 1_024;
/// Between two slices, or the kernel would hand them to the receiver as one.
const SLICE_PAUSE: Duration = Duration::from_millis(1);

/// What the owner of the proxy wants; no fault at all asks it to end. Each change is another turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish {
    pub(crate) fault: Option<Fault>,
    pub(crate) turn: u64,
}

pub(crate) type Wishes = watch::Receiver<Wish>;

/// Accepts until asked to end. All connections end with it.
pub(super) async fn accept(listener: TcpListener, upstream: SocketAddr, mut wishes: Wishes, gauge: Arc<Gauge>) {
    let backlog = listener.try_clone().expect("a second handle of the listener");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener inside a runtime");
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = wishes.changed() => {
                let wish = *wishes.borrow_and_update();
                if wish.fault.is_none() {
                    return;
                }
                // Who has connected before a change is subject to it, and the kernel may still have him waiting.
                while let Ok((client, _)) = backlog.accept() {
                    if client.set_nonblocking(true).is_ok() && let Ok(client) = TcpStream::from_std(client) {
                        connections.spawn(connection(client, upstream, wishes.clone(), gauge.count_accepted()));
                    }
                }
                gauge.see_turn(wish.turn);
            }
            // It fails when the client has gone again, or when we are out of sockets: the next one may do better.
            Ok((client, _)) = listener.accept() => {
                connections.spawn(connection(client, upstream, wishes.clone(), gauge.count_accepted()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// `open` counts the connection and is dropped last: who waits for the count may rely on closed sockets.
async fn connection(mut client: TcpStream, upstream: SocketAddr, wishes: Wishes, open: Open) {
    let mut fatal_wishes = wishes.clone();
    tokio::select! {
        biased;
        fatal = fatal(&mut fatal_wishes) => {
            if fatal == Fault::Reset {
                reset_on_close(&client);
            }
        }
        _ = relay(&mut client, upstream, &wishes, open.gauge()) => {}
    }
    drop(client);
    drop(open);
}

/// Waits for a fault that ends connections.
async fn fatal(wishes: &mut Wishes) -> Fault {
    fault_when(wishes, |fault| matches!(fault, Fault::Cut | Fault::Reset)).await
}

/// Closing a socket that lingers for no time sends RST instead of FIN.
fn reset_on_close(client: &TcpStream) {
    SockRef::from(client).set_linger(Some(Duration::ZERO)).expect("a TCP socket");
}

async fn relay(client: &mut TcpStream, upstream: SocketAddr, wishes: &Wishes, gauge: &Gauge) -> io::Result<()> {
    let mut server = TcpStream::connect(upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_reader, client_writer) = client.split();
    let (server_reader, server_writer) = server.split();
    tokio::try_join!(
        pump(client_reader, server_writer, wishes.clone(), |bytes| gauge.count_up(bytes)),
        pump(server_reader, client_writer, wishes.clone(), |bytes| gauge.count_down(bytes)),
    )?;
    Ok(())
}

/// Relays between two in-memory streams until one of them ends or the fault ends them.
pub(crate) async fn relay_streams(client: DuplexStream, server: DuplexStream, wishes: Wishes) {
    let mut fatal_wishes = wishes.clone();
    let (client_reader, client_writer) = io::split(client);
    let (server_reader, server_writer) = io::split(server);
    let relay = async {
        tokio::try_join!(
            pump(client_reader, server_writer, wishes.clone(), |_| {}),
            pump(server_reader, client_writer, wishes.clone(), |_| {}),
        )
    };
    tokio::select! {
        biased;
        _ = fatal(&mut fatal_wishes) => {}
        _ = relay => {}
    }
}

/// One direction. `Err` ends the connection, `Ok` only this direction: the other may still have something to say.
async fn pump(
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin,
    wishes: Wishes,
    count: impl Fn(usize),
) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel(CHUNKS_WAITING_MAX);
    tokio::try_join!(read(reader, sender, wishes.clone()), write(receiver, writer, wishes, count))?;
    Ok(())
}

struct Chunk {
    due: Instant,
    bytes: Vec<u8>,
}

async fn read(mut reader: impl AsyncRead + Unpin, chunks: mpsc::Sender<Chunk>, wishes: Wishes) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let count = reader.read(&mut buffer).await?;
        let delay = match wishes.borrow().fault {
            Some(Fault::Delay(delay)) => delay,
            _ => Duration::ZERO,
        };
        // No bytes are the end of the stream, which is as late as the rest of it.
        let chunk = Chunk { due: Instant::now() + delay, bytes: buffer[..count].to_vec() };
        if chunks.send(chunk).await.is_err() || count == 0 {
            return Ok(());
        }
    }
}

async fn write(
    mut chunks: mpsc::Receiver<Chunk>,
    mut writer: impl AsyncWrite + Unpin,
    mut wishes: Wishes,
    count: impl Fn(usize),
) -> io::Result<()> {
    while let Some(Chunk { due, bytes }) = chunks.recv().await {
        sleep_until(due).await;
        match fault_when(&mut wishes, |fault| fault != Fault::Hold).await {
            Fault::Blackhole => return swallow(chunks, wishes).await,
            _ if bytes.is_empty() => writer.shutdown().await?,
            Fault::Slice(size) => {
                for slice in bytes.chunks(size.max(1)) {
                    count(slice.len());
                    writer.write_all(slice).await?;
                    sleep(SLICE_PAUSE).await;
                }
            }
            _ => {
                // Before they are sent: who has received them must find them counted.
                count(bytes.len());
                writer.write_all(&bytes).await?;
            }
        }
    }
    Ok(())
}

/// A direction that has lost bytes loses the rest too, until the fault ends, and with it the connection.
async fn swallow(mut chunks: mpsc::Receiver<Chunk>, mut wishes: Wishes) -> io::Result<()> {
    tokio::select! {
        _ = fault_when(&mut wishes, |fault| fault != Fault::Blackhole) => {}
        // After the end of the stream there is nothing left to lose, but the hole stays.
        () = async { while chunks.recv().await.is_some() {} std::future::pending().await } => {}
    }
    Err(io::Error::new(io::ErrorKind::ConnectionAborted, "bytes of this connection were swallowed"))
}

/// Waits until the fault is such; the end of the proxy is like [`Fault::Cut`].
async fn fault_when(wishes: &mut Wishes, such: impl Fn(Fault) -> bool) -> Fault {
    let wish = wishes.wait_for(|wish| such(wish.fault.unwrap_or(Fault::Cut))).await;
    wish.ok().and_then(|wish| wish.fault).unwrap_or(Fault::Cut)
}
