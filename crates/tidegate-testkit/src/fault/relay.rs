//! Forwarding of connections: a task per connection, a pump per direction.
//!
//! A pump is a reader and a writer with a queue between them. The reader adds to each chunk the time at which it is
//! due. The writer waits for that time and then applies the fault that is set *then*. The task runs both pumps and
//! watches the fault: on a fault that closes connections, it drops everything at once.

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
use super::gauge::{Gauge, OpenGuard};

const CHUNK_BYTES: usize = 16 * 1024;
/// Maximum number of chunks queued in one direction. A faster sender is slowed down by TCP's back-pressure.
const CHUNKS_WAITING_MAX: usize = 1_024;
/// Pause between two slices. Without it the kernel would deliver them to the receiver as one.
const SLICE_PAUSE: Duration = Duration::from_millis(1);

/// The fault that the owner of the proxy has set, with the number of that change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FaultState {
    /// The fault; `None` ends the proxy.
    pub(crate) fault: Option<Fault>,
    /// The number of changes so far.
    pub(crate) change: u64,
}

/// Receives the current fault and its changes.
pub(crate) type FaultReceiver = watch::Receiver<FaultState>;

/// Accepts connections and forwards them to `upstream`, with the current fault. Returns when the fault becomes `None`,
/// which closes all connections.
///
/// `listener` must be in non-blocking mode.
pub(super) async fn accept(listener: TcpListener, upstream: SocketAddr, mut faults: FaultReceiver, gauge: Arc<Gauge>) {
    let backlog = listener.try_clone().expect("a second handle of the listener");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener inside a runtime");
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = faults.changed() => {
                let state = *faults.borrow_and_update();
                if state.fault.is_none() {
                    return;
                }
                // The change applies to all connections opened before it. Some may still be in the kernel's backlog.
                while let Ok((client, _)) = backlog.accept() {
                    if client.set_nonblocking(true).is_ok() && let Ok(client) = TcpStream::from_std(client) {
                        connections.spawn(connection(client, upstream, faults.clone(), gauge.count_accepted()));
                    }
                }
                gauge.mark_applied(state.change);
            }
            // Accepting fails if the client has closed again or no file descriptor is left. The next one may succeed.
            Ok((client, _)) = listener.accept() => {
                connections.spawn(connection(client, upstream, faults.clone(), gauge.count_accepted()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Forwards one connection until it ends or a fault closes it.
///
/// `open` counts the connection. It is dropped last, so that the sockets are closed when the count falls.
async fn connection(mut client: TcpStream, upstream: SocketAddr, faults: FaultReceiver, open: OpenGuard) {
    let mut closing_faults = faults.clone();
    tokio::select! {
        biased;
        fault = closing_fault(&mut closing_faults) => {
            if fault == Fault::Reset {
                reset_on_close(&client);
            }
        }
        _ = relay(&mut client, upstream, &faults, open.gauge()) => {}
    }
    drop(client);
    drop(open);
}

/// Waits for a fault that closes connections, and returns it: [`Fault::Cut`] or [`Fault::Reset`]. The end of the proxy
/// counts as [`Fault::Cut`].
async fn closing_fault(faults: &mut FaultReceiver) -> Fault {
    fault_when(faults, |fault| matches!(fault, Fault::Cut | Fault::Reset)).await
}

/// Makes a later close of the socket send RST instead of FIN, by a linger time of zero.
fn reset_on_close(client: &TcpStream) {
    SockRef::from(client).set_linger(Some(Duration::ZERO)).expect("a TCP socket");
}

async fn relay(client: &mut TcpStream, upstream: SocketAddr, faults: &FaultReceiver, gauge: &Gauge) -> io::Result<()> {
    let mut server = TcpStream::connect(upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_reader, client_writer) = client.split();
    let (server_reader, server_writer) = server.split();
    tokio::try_join!(
        pump(client_reader, server_writer, faults.clone(), |bytes| gauge.count_up(bytes)),
        pump(server_reader, client_writer, faults.clone(), |bytes| gauge.count_down(bytes)),
    )?;
    Ok(())
}

/// Forwards bytes between two in-memory streams, with the current fault, until both directions end, one of them fails,
/// or a fault closes connections.
pub(crate) async fn relay_streams(client: DuplexStream, server: DuplexStream, faults: FaultReceiver) {
    let mut closing_faults = faults.clone();
    let (client_reader, client_writer) = io::split(client);
    let (server_reader, server_writer) = io::split(server);
    let relay = async {
        tokio::try_join!(
            pump(client_reader, server_writer, faults.clone(), |_| {}),
            pump(server_reader, client_writer, faults.clone(), |_| {}),
        )
    };
    tokio::select! {
        biased;
        _ = closing_fault(&mut closing_faults) => {}
        _ = relay => {}
    }
}

/// Forwards one direction until its stream ends, with the current fault. Calls `count` with the bytes of each write.
///
/// Returns `Ok` at the end of the stream: the other direction continues. An error ends the whole connection.
async fn pump(
    reader: impl AsyncRead + Unpin,
    writer: impl AsyncWrite + Unpin,
    faults: FaultReceiver,
    count: impl Fn(usize),
) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel(CHUNKS_WAITING_MAX);
    tokio::try_join!(read(reader, sender, faults.clone()), write(receiver, writer, faults, count))?;
    Ok(())
}

struct Chunk {
    due: Instant,
    bytes: Vec<u8>,
}

async fn read(
    mut reader: impl AsyncRead + Unpin,
    chunks: mpsc::Sender<Chunk>,
    faults: FaultReceiver,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let count = reader.read(&mut buffer).await?;
        let delay = match faults.borrow().fault {
            Some(Fault::Delay(delay)) => delay,
            _ => Duration::ZERO,
        };
        // An empty chunk is the end of the stream. It is delayed like all others.
        let chunk = Chunk { due: Instant::now() + delay, bytes: buffer[..count].to_vec() };
        if chunks.send(chunk).await.is_err() || count == 0 {
            return Ok(());
        }
    }
}

async fn write(
    mut chunks: mpsc::Receiver<Chunk>,
    mut writer: impl AsyncWrite + Unpin,
    mut faults: FaultReceiver,
    count: impl Fn(usize),
) -> io::Result<()> {
    while let Some(Chunk { due, bytes }) = chunks.recv().await {
        sleep_until(due).await;
        match fault_when(&mut faults, |fault| fault != Fault::Hold).await {
            Fault::Blackhole => return discard(chunks, faults).await,
            _ if bytes.is_empty() => writer.shutdown().await?,
            Fault::Slice(size) => {
                for slice in bytes.chunks(size.max(1)) {
                    count(slice.len());
                    writer.write_all(slice).await?;
                    sleep(SLICE_PAUSE).await;
                }
            }
            _ => {
                // Count before sending, so that bytes are counted when they are received.
                count(bytes.len());
                writer.write_all(&bytes).await?;
            }
        }
    }
    Ok(())
}

/// Discards all chunks while the fault is [`Fault::Blackhole`], then returns an error, which closes the connection.
async fn discard(mut chunks: mpsc::Receiver<Chunk>, mut faults: FaultReceiver) -> io::Result<()> {
    tokio::select! {
        _ = fault_when(&mut faults, |fault| fault != Fault::Blackhole) => {}
        // At the end of the stream, keep waiting for the end of the fault.
        () = async { while chunks.recv().await.is_some() {} std::future::pending().await } => {}
    }
    Err(io::Error::new(io::ErrorKind::ConnectionAborted, "bytes of this connection were discarded"))
}

/// Waits until the fault is one for which `condition` is true, and returns it. The end of the proxy counts as
/// [`Fault::Cut`].
async fn fault_when(faults: &mut FaultReceiver, condition: impl Fn(Fault) -> bool) -> Fault {
    let state = faults.wait_for(|state| condition(state.fault.unwrap_or(Fault::Cut))).await;
    state.ok().and_then(|state| state.fault).unwrap_or(Fault::Cut)
}
