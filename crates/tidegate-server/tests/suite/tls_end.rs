//! The end of a TLS connection is sent as close_notify. A client that only sees the socket close cannot distinguish it
//! from a truncation.

use std::sync::Arc;
use std::time::Duration;

use tidegate::Limiter;
use tidegate_server::listeners::resp::RESP;
use tidegate_server::{Bounds, ServerOptions, Tls, run};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

/// Connects a client to a listener with this idle timeout. Returns the client, which has received a reply, and the
/// sender that shuts the listener down.
async fn connect(idle: Duration) -> (TlsStream<TcpStream>, oneshot::Sender<()>) {
    let dir = tempfile::tempdir().unwrap();
    let (certificate_file, key_file) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    std::fs::write(&certificate_file, made.cert.pem()).unwrap();
    std::fs::write(&key_file, made.signing_key.serialize_pem()).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&certificate_file).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bounds = Bounds { resp_idle: idle, ..Bounds::default() };
    let options =
        ServerOptions::new(Limiter::memory()).bounds(bounds).tls(Tls::read(&certificate_file, &key_file).unwrap());
    let (end, ended) = oneshot::channel();
    tokio::spawn(run([(&RESP, listener)], options, async move { drop(ended.await) }));

    let stream = TcpStream::connect(address).await.unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut client = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
    client.write_all(b"PING\r\n").await.unwrap();
    let mut pong = [0; 7];
    client.read_exact(&mut pong).await.unwrap();
    assert_eq!(&pong, b"+PONG\r\n");
    (client, end)
}

#[tokio::test]
async fn an_idle_timeout_ends_tls_with_close_notify() {
    let (mut client, _end) = connect(Duration::from_millis(50)).await;
    assert_eq!(client.read(&mut [0]).await.expect("close_notify"), 0);
}

#[tokio::test]
async fn a_shutdown_ends_tls_with_close_notify() {
    let (mut client, end) = connect(Duration::from_secs(300)).await;
    end.send(()).unwrap();
    assert_eq!(client.read(&mut [0]).await.expect("close_notify"), 0);
}
