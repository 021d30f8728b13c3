//! Opens connections to servers: TCP, and TLS with the certificate authorities of the system or of the configuration.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tidegate::gateway::ServerUrl;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use super::pool::Sender;
use super::upstream::UpstreamError;

/// The maximum number of bytes buffered from a server. A response with a longer head is an error.
const RESPONSE_BUFFER_BYTES: usize = 128 * 1024;

/// Opens connections to one server.
#[derive(Clone)]
pub(super) struct Connector {
    url: ServerUrl,
    tls: Option<(TlsConnector, ServerName<'static>)>,
}

/// The reason why no connection could be opened. No part of the request was sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("cannot connect within {0:?}")]
    Timeout(Duration),
    #[error("cannot connect: {}", tidegate::__io_reason(.0))]
    Io(#[from] io::Error),
    #[error("cannot connect: {0}")]
    Handshake(#[from] hyper::Error),
}

/// The TLS configuration of an upstream whose servers have the scheme `https`.
#[derive(Clone)]
pub(super) struct ClientTls(Arc<ClientConfig>);

impl ClientTls {
    /// Creates a configuration that accepts certificates of these authorities, or of the system's if `authorities` is
    /// `None`.
    ///
    /// # Errors
    /// If there is no authority, or one of those given is malformed.
    pub(super) fn new(upstream: &str, authorities: Option<&str>) -> Result<ClientTls, UpstreamError> {
        let mut roots = RootCertStore::empty();
        match authorities {
            Some(pem) => {
                for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                    let added = certificate.map_err(|error| format!("the PEM text is malformed: {error}")).and_then(
                        |certificate| {
                            roots.add(certificate).map_err(|error| format!("a certificate is malformed: {error}"))
                        },
                    );
                    added.map_err(|reason| UpstreamError::Authorities { upstream: upstream.to_owned(), reason })?;
                }
            }
            None => {
                let native = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(native.certs);
            }
        }
        if roots.is_empty() {
            let reason = "no certificate was found".to_owned();
            return Err(UpstreamError::Authorities { upstream: upstream.to_owned(), reason });
        }
        let failed = |error: tokio_rustls::rustls::Error| UpstreamError::Authorities {
            upstream: upstream.to_owned(),
            reason: error.to_string(),
        };
        let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(ClientTls(Arc::new(config)))
    }
}

impl Connector {
    /// Creates a connector to the server with this URL. `tls` is used if its scheme is `https`.
    ///
    /// # Errors
    /// If the scheme is `https` and the host is not a valid name for a certificate.
    pub(super) fn new(upstream: &str, url: ServerUrl, tls: Option<&ClientTls>) -> Result<Connector, UpstreamError> {
        let tls = match tls.filter(|_| url.is_tls()) {
            Some(ClientTls(config)) => {
                let name = ServerName::try_from(url.host().to_owned()).map_err(|error| UpstreamError::Name {
                    upstream: upstream.to_owned(),
                    host: url.host().to_owned(),
                    reason: error.to_string(),
                })?;
                Some((TlsConnector::from(config.clone()), name))
            }
            None => None,
        };
        Ok(Connector { url, tls })
    }

    /// Opens a connection and starts the task that drives it, on the current runtime.
    ///
    /// # Errors
    /// If the server cannot be reached or its certificate is not accepted, or this takes longer than `timeout`.
    pub(super) async fn connect(&self, timeout: Duration) -> Result<Sender, ConnectError> {
        let connecting = async {
            let stream = TcpStream::connect((self.url.host(), self.url.port())).await?;
            let _ = stream.set_nodelay(true);
            match &self.tls {
                Some((tls, name)) => {
                    // Boxed because the future is large, and plain connections do not need it.
                    let stream = Box::pin(tls.connect(name.clone(), stream)).await?;
                    handshake(TokioIo::new(stream)).await
                }
                None => handshake(TokioIo::new(stream)).await,
            }
        };
        tokio::time::timeout(timeout, connecting).await.map_err(|_| ConnectError::Timeout(timeout))?
    }
}

async fn handshake<S>(io: TokioIo<S>) -> Result<Sender, ConnectError>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let (sender, connection) = http1::Builder::new().max_buf_size(RESPONSE_BUFFER_BYTES).handshake(io).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "connection to an upstream failed");
        }
    });
    Ok(sender)
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("url", &self.url).finish_non_exhaustive()
    }
}
