//! The end of an encrypted connection is said inside it: whoever hears only the socket close cannot tell it from a cut.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
use tollgate::Limiter;
use tollgate_server::listeners::resp::RespOptions;
use tollgate_server::{BoundListeners, Listeners, Tls, run};

/// A client inside, of whom the door has heard, and the word to end.
async fn inside(idle: Duration) -> (TlsStream<TcpStream>, oneshot::Sender<()>) {
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
    let doors = BoundListeners::new(Limiter::memory())
        .resp(RespOptions { idle, ..RespOptions::default() })
        .tls(Tls::read(&certificate_file, &key_file).unwrap());
    let (end, told_to_end) = oneshot::channel();
    let listeners = Listeners { resp: Some(listener), ..Listeners::default() };
    tokio::spawn(run(listeners, doors, async move { drop(told_to_end.await) }));

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
async fn a_silent_redis_client_is_told_that_the_connection_ends() {
    let (mut client, _end) = inside(Duration::from_millis(50)).await;
    assert_eq!(client.read(&mut [0]).await.expect("an end, not a cut"), 0);
}

#[tokio::test]
async fn a_redis_client_is_told_when_the_doors_close() {
    let (mut client, end) = inside(Duration::from_secs(300)).await;
    end.send(()).unwrap();
    assert_eq!(client.read(&mut [0]).await.expect("an end, not a cut"), 0);
}
