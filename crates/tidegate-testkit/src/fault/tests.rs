use super::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

/// A server that echoes all bytes and records the length of each read.
struct Echo {
    addr: SocketAddr,
    reads: Arc<std::sync::Mutex<Vec<usize>>>,
}

impl Echo {
    fn start() -> Echo {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let reads = Arc::<std::sync::Mutex<Vec<usize>>>::default();
        let seen = Arc::clone(&reads);
        // The thread is not joined. It ends with the test process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, seen) = (stream.unwrap(), Arc::clone(&seen));
                thread::spawn(move || {
                    let mut buffer = [0; 64 * 1024];
                    while let Ok(count @ 1..) = stream.read(&mut buffer) {
                        seen.lock().unwrap().push(count);
                        if stream.write_all(&buffer[..count]).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Echo { addr, reads }
    }
}

fn connect(proxy: &Proxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

fn echoed(stream: &mut TcpStream, text: &str) -> std::io::Result<String> {
    stream.write_all(text.as_bytes())?;
    received(stream, text.len())
}

fn received(stream: &mut TcpStream, bytes: usize) -> std::io::Result<String> {
    let mut answer = vec![0; bytes];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8(answer).unwrap())
}

/// Returns whether nothing arrives within 50 ms.
fn silent(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let silent = stream.peek(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    silent
}

#[test]
fn passes_bytes_both_ways_and_counts_them() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let (mut first, mut second) = (connect(&proxy), connect(&proxy));
    assert_eq!(echoed(&mut first, "hello").unwrap(), "hello");
    assert_eq!(echoed(&mut second, "you").unwrap(), "you");
    assert_eq!((proxy.connections(), proxy.open()), (2, 2));
    assert_eq!((proxy.bytes_up(), proxy.bytes_down()), (8, 8));
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}", proxy.port()));
}

#[test]
fn a_megabyte_arrives_in_order_under_changing_faults() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let mut stream = connect(&proxy);
    let sent: Vec<u8> = (0..1_000_000_u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut received = vec![0; sent.len()];
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut writer = stream.try_clone().unwrap();
        scope.spawn(|| {
            let faults =
                [Fault::Delay(Duration::from_millis(3)), Fault::Pass, Fault::Slice(4_000), Fault::Hold, Fault::Pass];
            for fault in faults.into_iter().cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                proxy.set(fault);
                thread::yield_now();
            }
            proxy.set(Fault::Pass);
        });
        let sent = &sent;
        scope.spawn(move || writer.write_all(sent).unwrap());
        stream.read_exact(&mut received).unwrap();
        done.store(true, Ordering::Relaxed);
    });
    assert!(received == sent);
}

#[test]
fn the_end_of_one_direction_leaves_the_other_open() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let mut stream = connect(&proxy);
    stream.write_all(b"last words").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "last words");
    proxy.gauge.wait_until_none_open();
}

#[test]
fn delay_makes_bytes_later_and_keeps_the_connection() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let mut stream = connect(&proxy);
    // Longer than the test may take: nothing arrives before the delay is over.
    proxy.set(Fault::Delay(Duration::from_secs(3_600)));
    stream.write_all(b"late").unwrap();
    assert!(silent(&mut stream));
    let mut other = connect(&proxy);
    proxy.set(Fault::Delay(Duration::from_millis(1)));
    assert_eq!(echoed(&mut other, "soon").unwrap(), "soon");
    assert_eq!(echo.reads.lock().unwrap().iter().sum::<usize>(), 4, "the delayed bytes have not arrived");
}

#[test]
fn held_bytes_arrive_when_the_fault_ends() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let mut stream = connect(&proxy);
    assert_eq!(echoed(&mut stream, "before").unwrap(), "before");
    proxy.set(Fault::Hold);
    stream.write_all(b"during").unwrap();
    assert!(silent(&mut stream));
    proxy.set(Fault::Pass);
    assert_eq!(received(&mut stream, 6).unwrap(), "during");
}

#[test]
fn a_blackhole_drops_replies_and_closes_only_the_connections_that_lost_bytes() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let (mut quiet, mut robbed) = (connect(&proxy), connect(&proxy));
    for stream in [&mut quiet, &mut robbed] {
        assert_eq!(echoed(stream, "x").unwrap(), "x");
    }
    proxy.set(Fault::Blackhole);
    let mut newcomer = connect(&proxy);
    robbed.write_all(b"lost").unwrap();
    newcomer.write_all(b"lost").unwrap();
    assert!(silent(&mut robbed) && silent(&mut newcomer));
    assert_eq!((proxy.open(), proxy.bytes_up()), (3, 2));
    proxy.set(Fault::Pass);
    for stream in [&mut robbed, &mut newcomer] {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
    }
    assert_eq!(echoed(&mut quiet, "still here").unwrap(), "still here");
}

#[test]
fn cut_closes_open_and_new_connections_until_the_fault_changes() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let mut before = connect(&proxy);
    assert_eq!(echoed(&mut before, "x").unwrap(), "x");
    proxy.set(Fault::Cut);
    assert_eq!(proxy.open(), 0);
    assert_eq!(before.read(&mut [0]).unwrap(), 0, "closed");
    assert_eq!(connect(&proxy).read(&mut [0]).unwrap(), 0, "closed");
    proxy.set(Fault::Pass);
    assert_eq!(echoed(&mut connect(&proxy), "again").unwrap(), "again");
}

#[test]
fn cut_closes_connections_that_were_opened_before_but_not_accepted_yet() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    for _ in 0..200 {
        let mut stream = connect(&proxy);
        proxy.set(Fault::Cut);
        proxy.set(Fault::Pass);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "closed");
    }
}

#[test]
fn reset_closes_connections_with_rst() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    let mut before = connect(&proxy);
    assert_eq!(echoed(&mut before, "x").unwrap(), "x");
    proxy.set(Fault::Reset);
    assert_eq!(before.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let during = TcpStream::connect(proxy.addr()).and_then(|mut stream| stream.read(&mut [0]));
    assert_eq!(during.unwrap_err().kind(), ErrorKind::ConnectionReset);
    proxy.set(Fault::Pass);
    assert_eq!(echoed(&mut connect(&proxy), "again").unwrap(), "again");
}

#[test]
fn sliced_bytes_arrive_complete() {
    let echo = Echo::start();
    let proxy = Proxy::start(echo.addr);
    for size in [2, 0] {
        proxy.set(Fault::Slice(size));
        assert_eq!(echoed(&mut connect(&proxy), "0123456789").unwrap(), "0123456789");
    }
}

/// In memory and in virtual time, since a kernel may join the slices of a slow reader.
#[tokio::test(start_paused = true)]
async fn slices_have_the_given_size() {
    let state = relay::FaultState { fault: Some(Fault::Slice(3)), change: 0 };
    let (_sender, faults) = watch::channel(state);
    let ((mut client, near), (far, mut server)) = (duplex(64), duplex(64));
    tokio::spawn(relay::relay_streams(near, far, faults));
    client.write_all(b"0123456789").await.unwrap();
    for slice in ["012", "345", "678", "9"] {
        let mut received = [0; 64];
        let count = server.read(&mut received).await.unwrap();
        assert_eq!(received[..count], *slice.as_bytes());
    }
}

#[test]
fn an_upstream_that_refuses_closes_the_client() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let proxy = Proxy::start(unused);
    assert_eq!(connect(&proxy).read(&mut [0]).unwrap(), 0, "closed");
    assert_eq!(proxy.connections(), 1);
}

#[test]
fn dropping_closes_everything_under_every_fault() {
    let faults =
        [Fault::Pass, Fault::Hold, Fault::Blackhole, Fault::Delay(Duration::from_secs(3_600)), Fault::Slice(1)];
    for fault in faults {
        let echo = Echo::start();
        let proxy = Proxy::start(echo.addr);
        let mut stream = connect(&proxy);
        assert_eq!(echoed(&mut stream, "x").unwrap(), "x");
        proxy.set(fault);
        stream.write_all(b"unanswered").unwrap();
        let gauge = Arc::clone(&proxy.gauge);
        drop(proxy);
        assert_eq!(Arc::strong_count(&gauge), 1, "something of the proxy outlives it: {fault:?}");
        // Unread bytes make the kernel send RST, so an error is a valid end. A read timeout is not.
        let end = stream.read_to_end(&mut Vec::new());
        assert!(!end.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "{fault:?}");
    }
}

#[test]
fn it_can_be_dropped_inside_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let echo = Echo::start();
    runtime.block_on(async { drop(Proxy::start(echo.addr)) });
}
