//! TLS on the doors: one certificate for all of them, read anew with every reload.
//!
//! A certificate lives for weeks and a connection to a limiter for months, so what is read at the start is not what is
//! shown for ever: [`Tls::read_again`] swaps it, whole or not at all, and connections that are open stay as they are.
//!
//! Certificate and key are two files, which are replaced one after the other. In between they do not match, or one of them
//! is half written: then the old pair stays in use until both can be used.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ServerConfig, crypto};
use tokio_rustls::server::TlsStream;

/// What a client may send before the handshake is done. A client hello with a post-quantum key share and a session ticket has
/// 2 to 4 KiB; without this bound one handshake message may have 64 KiB, all of which is held until it is complete.
const HANDSHAKE_BYTES_MAX: usize = 8 * 1024;

/// A certificate and its key, in use.
#[derive(Clone)]
pub struct Tls(Arc<Inner>);

struct Inner {
    certificate: PathBuf,
    key: PathBuf,
    pair: ArcSwap<Pair>,
}

/// What was read from the two files.
struct Pair {
    config: Arc<ServerConfig>,
    /// How many certificates the chain has.
    certificates: usize,
    /// Of the certificate's file and of the key's, when they were read.
    metadata: [Metadata; 2],
}

/// A larger file is not read: a chain of certificates has some kilobytes.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// Why a certificate cannot be shown. It names the file and nothing of what stands in it.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{} cannot be read: {error}", .file.display())]
    Unreadable {
        /// Which one.
        file: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// There is no certificate in the file.
    #[error("{} holds no certificate; expected PEM: -----BEGIN CERTIFICATE-----", .0.display())]
    NoCertificate(PathBuf),
    /// There is no private key in the file.
    #[error("{} holds no private key; expected PEM: -----BEGIN PRIVATE KEY----- (not encrypted)", .0.display())]
    NoKey(PathBuf),
    /// The two do not belong together, or one of them makes no sense.
    #[error("the certificate in {} and the key in {} cannot be used together: {reason}", .certificate.display(), .key.display())]
    Mismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong with them.
        reason: String,
    },
}

impl Tls {
    /// Reads a certificate chain and its private key, both as PEM.
    ///
    /// # Errors
    /// When they cannot be read or do not belong together.
    pub fn read(certificate: &Path, key: &Path) -> Result<Tls, TlsError> {
        let pair = ArcSwap::from_pointee(Pair::read(certificate, key)?);
        Ok(Tls(Arc::new(Inner { certificate: certificate.to_owned(), key: key.to_owned(), pair })))
    }

    /// Reads the same files again. Connections made from here on are shown what they say. Returns by how many
    /// certificates the chain is shorter than before, which is a sign of half a file.
    ///
    /// # Errors
    /// When they cannot be used; what was shown so far is then shown on.
    pub fn read_again(&self) -> Result<usize, TlsError> {
        let pair = Pair::read(&self.0.certificate, &self.0.key)?;
        let now = pair.certificates;
        let before = self.0.pair.swap(Arc::new(pair)).certificates;
        if now < before {
            let file = self.0.certificate.display();
            tracing::warn!(%file, before, now, "the certificate chain is shorter than before; check that the file is whole");
        }
        Ok(before.saturating_sub(now))
    }

    /// The files that it was read from.
    pub fn files(&self) -> [&Path; 2] {
        [&self.0.certificate, &self.0.key]
    }

    /// The files and their metadata when they were last read with success.
    pub(crate) fn files_read(&self) -> Vec<(PathBuf, Metadata)> {
        let pair = self.0.pair.load();
        self.files().into_iter().map(Path::to_owned).zip(pair.metadata.iter().cloned()).collect()
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<HandshakeStream>> {
        // Until the client says something, the connection needs no state of TLS.
        stream.readable().await?;
        let stream = HandshakeStream { stream, bytes_left: HANDSHAKE_BYTES_MAX };
        let mut stream = TlsAcceptor::from(self.0.pair.load().config.clone()).accept(stream).await?;
        stream.get_mut().0.bytes_left = usize::MAX;
        Ok(stream)
    }
}

/// A connection on which a client can send a bounded number of bytes during its handshake.
pub(crate) struct HandshakeStream {
    stream: TcpStream,
    bytes_left: usize,
}

impl HandshakeStream {
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
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(self.bytes_left.min(buf.remaining())));
        let read = Pin::new(&mut self.stream).poll_read(cx, &mut part);
        let count = part.filled().len();
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

impl Pair {
    fn read(certificate: &Path, key: &Path) -> Result<Pair, TlsError> {
        let read = |file: &Path| {
            let read = tollgate::config::file::read(file, FILE_BYTES_MAX);
            read.map_err(|error| TlsError::Unreadable { file: file.to_owned(), error })
        };
        let ((certificate_pem, certificate_data), (key_pem, key_data)) = (read(certificate)?, read(key)?);
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(&certificate_pem)
            .collect::<Result<_, _>>()
            .map_err(|_| TlsError::NoCertificate(certificate.to_owned()))?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate(certificate.to_owned()));
        }
        let certificates = chain.len();
        let private = PrivateKeyDer::from_pem_slice(&key_pem).map_err(|_| TlsError::NoKey(key.to_owned()))?;
        let mismatch = |error: tokio_rustls::rustls::Error| TlsError::Mismatch {
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
        Ok(Pair { config: Arc::new(config), certificates, metadata: [certificate_data, key_data] })
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("certificate", &self.0.certificate).finish_non_exhaustive()
    }
}
