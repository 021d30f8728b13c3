//! TLS for the listeners: one certificate for all of them, read again with every reload.
//!
//! A certificate is valid for weeks and a process runs for months. So a reload replaces the pair of certificate and key at
//! run time. Open connections are not affected.
//!
//! Certificate and key are two files, which are replaced one after the other. In between they do not match, or one of
//! them is half written: then the old pair stays in use until both can be used.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use tidegate::config::watch::{Stamps, stamp};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};
use tokio_rustls::server::TlsStream;

/// The bytes that a client may send before the handshake is done. A client hello with a post-quantum key share and a
/// session ticket has 2 to 4 KiB. Without this bound one handshake message may have 64 KiB, all of which is held until
/// it is complete.
const HANDSHAKE_BYTES_MAX: usize = 8 * 1024;

/// A TLS certificate chain and its private key, read from two files.
///
/// Clones share the pair, also after a reload.
#[derive(Clone)]
pub struct Tls(Arc<Inner>);

struct Inner {
    certificate: PathBuf,
    key: PathBuf,
    pair: ArcSwap<CertificatePair>,
}

/// The usable contents of the two files, and their metadata.
pub(crate) struct CertificatePair {
    config: Arc<ServerConfig>,
    /// The configuration of listeners with [`Alpn::Http`]: `config` with the application protocols `h2` and `http/1.1`.
    http_config: Arc<ServerConfig>,
    /// The number of certificates in the chain.
    certificates: usize,
    /// The metadata of the certificate's file and of the key's file, when they were read.
    metadata: [Metadata; 2],
}

/// The application protocols that a listener offers in the TLS handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Alpn {
    /// None.
    None,
    /// `h2` and `http/1.1`.
    Http,
}

/// The largest file that is read. A chain of certificates has some kilobytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// The reason why a certificate or a key cannot be used. Names the files, and nothing of their contents.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("cannot read {}: {}", .file.display(), tidegate::__io_reason(.error))]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The reason from the operating system.
        error: std::io::Error,
    },
    /// The file contains no certificate.
    #[error("{} contains no certificate; expected PEM: -----BEGIN CERTIFICATE-----", .0.display())]
    NoCertificate(PathBuf),
    /// The file contains no private key.
    #[error("{} contains no private key; expected PEM: -----BEGIN PRIVATE KEY----- (not encrypted)", .0.display())]
    NoKey(PathBuf),
    /// The key does not belong to the certificate, or one of them is malformed.
    #[error("the certificate in {} and the key in {} cannot be used together: {reason}", .certificate.display(), .key.display())]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The reason from the TLS library.
        reason: String,
    },
}

impl Tls {
    /// Reads a certificate chain and its private key, both as PEM.
    ///
    /// # Errors
    /// If a file cannot be read or is larger than 1 MiB, contains no certificate or key, or the two do not belong
    /// together.
    pub fn read(certificate: &Path, key: &Path) -> Result<Tls, CertificateError> {
        let pair = ArcSwap::from_pointee(CertificatePair::read(certificate, key)?);
        Ok(Tls(Arc::new(Inner { certificate: certificate.to_owned(), key: key.to_owned(), pair })))
    }

    /// Reads the files again. Changes nothing. Blocks while it reads.
    ///
    /// # Errors
    /// If the new pair cannot be used.
    pub(crate) fn prepare(&self) -> Result<CertificatePair, CertificateError> {
        CertificatePair::read(&self.0.certificate, &self.0.key)
    }

    /// Uses a pair of [`prepare`](Tls::prepare) for handshakes from now on.
    ///
    /// Returns by how many certificates the chain is shorter than before, 0 if it is not. A shorter chain may mean that
    /// the file is truncated, so a warning is logged.
    pub(crate) fn commit(&self, pair: CertificatePair) -> usize {
        let now = pair.certificates;
        let before = self.0.pair.swap(Arc::new(pair)).certificates;
        if now < before {
            let file = self.0.certificate.display();
            tracing::warn!(%file, before, now, "the certificate chain is shorter than before; check that the file is complete");
        }
        before.saturating_sub(now)
    }

    /// Returns the paths of the certificate's file and of the key's file.
    pub fn files(&self) -> [&Path; 2] {
        [&self.0.certificate, &self.0.key]
    }

    /// Returns the [stamps](stamp) that the two files had when the pair in use was read from them.
    pub(crate) fn stamps(&self) -> Stamps {
        let pair = self.0.pair.load();
        self.files().into_iter().map(Path::to_owned).zip(pair.metadata.iter().map(stamp)).collect()
    }

    /// Waits for the first bytes of the client and performs the TLS handshake, in which it offers the protocols of
    /// `alpn`. Has no timeout.
    ///
    /// # Errors
    /// If the handshake fails, or the client sends more than 8 KiB before it is done.
    pub(crate) async fn accept(&self, stream: TcpStream, alpn: Alpn) -> io::Result<TlsStream<HandshakeStream>> {
        // Until the client sends something, the connection needs no TLS state.
        stream.readable().await?;
        let stream = HandshakeStream { stream, bytes_left: HANDSHAKE_BYTES_MAX };
        let config = {
            let pair = self.0.pair.load();
            match alpn {
                Alpn::None => pair.config.clone(),
                Alpn::Http => pair.http_config.clone(),
            }
        };
        let mut stream = TlsAcceptor::from(config).accept(stream).await?;
        stream.get_mut().0.bytes_left = usize::MAX;
        Ok(stream)
    }
}

/// A TCP stream from which at most `bytes_left` bytes can be read, which bounds the TLS handshake.
///
/// Reading more fails with `InvalidData`. After the handshake there is no limit.
pub(crate) struct HandshakeStream {
    stream: TcpStream,
    /// `usize::MAX`, after the handshake, means no limit.
    bytes_left: usize,
}

impl HandshakeStream {
    /// Returns the underlying TCP stream.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.stream
    }
}

impl AsyncRead for HandshakeStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.bytes_left == usize::MAX {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        if self.bytes_left == 0 {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "the TLS handshake is too long")));
        }
        let mut bounded = ReadBuf::new(buf.initialize_unfilled_to(self.bytes_left.min(buf.remaining())));
        let read = Pin::new(&mut self.stream).poll_read(cx, &mut bounded);
        let count = bounded.filled().len();
        buf.advance(count);
        self.bytes_left -= count;
        read
    }
}

impl AsyncWrite for HandshakeStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl CertificatePair {
    fn read(certificate: &Path, key: &Path) -> Result<CertificatePair, CertificateError> {
        let read = |file: &Path| {
            let read = tidegate::config::complete::read(file, FILE_BYTES_MAX);
            read.map_err(|error| CertificateError::Unreadable { file: file.to_owned(), error })
        };
        let ((certificate_pem, certificate_data), (key_pem, key_data)) = (read(certificate)?, read(key)?);
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&certificate_pem)
            .collect::<Result<_, _>>()
            .map_err(|_| CertificateError::NoCertificate(certificate.to_owned()))?;
        if chain.is_empty() {
            return Err(CertificateError::NoCertificate(certificate.to_owned()));
        }
        let certificates = chain.len();
        let private = PrivateKeyDer::from_pem_slice(&key_pem).map_err(|_| CertificateError::NoKey(key.to_owned()))?;
        let mismatch = |error: tokio_rustls::rustls::Error| CertificateError::Mismatch {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            reason: error.to_string(),
        };
        let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(mismatch)?
            .with_no_client_auth()
            .with_single_cert(chain, private)
            .map_err(mismatch)?;
        let mut http_config = config.clone();
        http_config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let metadata = [certificate_data, key_data];
        Ok(CertificatePair { config: Arc::new(config), http_config: Arc::new(http_config), certificates, metadata })
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.0.certificate).finish_non_exhaustive()
    }
}
