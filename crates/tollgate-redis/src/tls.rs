//! TLS for `rediss://` URLs: rustls, with the system's trusted certificates and those that the operator adds.

#[cfg(feature = "tls")]
pub(crate) use with_rustls::Tls;

/// The error of certificate authorities that a `rediss://` store cannot use.
///
/// They are given to [`RedisStoreBuilder::trust`](crate::RedisStoreBuilder::trust). The text contains no certificate,
/// or one that cannot be decoded or is not a valid certificate authority. A failed TLS handshake is not a `TlsError`:
/// decisions then fail with [`StoreErrorKind::Unreachable`](tollgate_core::StoreErrorKind::Unreachable).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; expected certificates in PEM format")]
pub struct TlsError {
    problem: &'static str,
}

#[cfg(feature = "tls")]
mod with_rustls {
    use std::sync::Arc;

    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
    use tollgate_core::{__io_reason as reason, StoreErrorKind as Kind};

    use super::TlsError;
    use crate::connection::Stream;
    use crate::fault::Fault;

    /// The TLS client configuration of a store, used by each of its connections.
    #[derive(Clone)]
    pub(crate) struct Tls(TlsConnector);

    impl Tls {
        /// Creates a configuration that trusts the system's certificate authorities and those in `extra_pem`.
        ///
        /// Reads the system's certificates from disk, and skips those that are missing or invalid.
        ///
        /// # Errors
        /// Returns an error if `extra_pem` is given and contains no certificate, one that cannot be decoded, or one
        /// that is not a valid certificate authority.
        pub(crate) fn new(extra_pem: Option<&[u8]>) -> Result<Tls, TlsError> {
            let mut roots = RootCertStore::empty();
            // Those in `extra_pem` may be enough.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if let Some(pem) = extra_pem {
                let before = roots.len();
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate =
                        certificate.map_err(|_| TlsError { problem: "a certificate cannot be decoded" })?;
                    roots
                        .add(certificate)
                        .map_err(|_| TlsError { problem: "a certificate cannot be used as a certificate authority" })?;
                }
                if roots.len() == before {
                    return Err(TlsError { problem: "no certificate was found" });
                }
            }
            let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|_| TlsError { problem: "TLS cannot be configured" })?
                .with_root_certificates(roots)
                .with_no_client_auth();
            Ok(Tls(TlsConnector::from(Arc::new(config))))
        }

        /// Performs the TLS handshake on `tcp` and verifies that the server's certificate is valid for `host`.
        ///
        /// # Errors
        /// Returns a fault of the kind `Unreachable` if the handshake or the verification fails, or if `host` is
        /// neither a DNS name nor an IP address.
        pub(crate) async fn wrap(&self, tcp: TcpStream, host: &str) -> Result<Box<dyn Stream>, Fault> {
            let fault = |message: String| Fault::new(Kind::Unreachable, message);
            let name = ServerName::try_from(host.to_owned())
                .map_err(|_| fault("the host is not a valid name for a TLS certificate".into()))?;
            let stream = self.0.connect(name, tcp).await;
            Ok(Box::new(stream.map_err(|error| fault(format!("the TLS handshake failed: {}", reason(&error))))?))
        }
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use tokio::net::TcpStream;

    use super::TlsError;
    use crate::connection::Stream;
    use crate::fault::Fault;

    /// A type without values, for builds without the feature `tls`.
    ///
    /// In such a build, [`Endpoint::parse`](crate::url::Endpoint::parse) rejects `rediss://` URLs, so no store uses
    /// TLS.
    #[derive(Clone)]
    pub(crate) enum Tls {}

    impl Tls {
        /// Returns an error: this build does not support TLS. No caller gets here, because `rediss://` URLs are rejected before.
        pub(crate) fn new(_: Option<&[u8]>) -> Result<Tls, TlsError> {
            Err(TlsError { problem: "this build does not support TLS" })
        }

        /// Never runs, because there is no `Tls` value.
        pub(crate) async fn wrap(&self, _: TcpStream, _: &str) -> Result<Box<dyn Stream>, Fault> {
            match *self {}
        }
    }
}
#[cfg(not(feature = "tls"))]
pub(crate) use without::Tls;
