//! `rediss://`: rustls, with the certificates that this machine trusts, and those that the operator adds.

#[cfg(feature = "tls")]
pub(crate) use with_rustls::Tls;

/// The certificates that were given are none.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; accepted are certificates in PEM form")]
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
    use tollgate_core::StoreErrorKind as Kind;

    use super::TlsError;
    use crate::connection::Stream;
    use crate::fault::Fault;

    /// What a connection needs to be encrypted, worked out once.
    #[derive(Clone)]
    pub(crate) struct Tls(TlsConnector);

    impl Tls {
        /// Trusts what the machine trusts, and the authorities in `extra_pem`.
        pub(crate) fn new(extra_pem: Option<&[u8]>) -> Result<Tls, TlsError> {
            let mut roots = RootCertStore::empty();
            // A machine without certificates, or with a broken one, may still be enough with those that are given.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if let Some(pem) = extra_pem {
                let before = roots.len();
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate = certificate.map_err(|_| TlsError { problem: "a certificate is not readable" })?;
                    roots.add(certificate).map_err(|_| TlsError { problem: "a certificate is no authority's" })?;
                }
                if roots.len() == before {
                    return Err(TlsError { problem: "there is no certificate in what was given" });
                }
            }
            let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|_| TlsError { problem: "TLS is not available" })?
                .with_root_certificates(roots)
                .with_no_client_auth();
            Ok(Tls(TlsConnector::from(Arc::new(config))))
        }

        pub(crate) async fn wrap(&self, tcp: TcpStream, host: &str) -> Result<Box<dyn Stream>, Fault> {
            let fault = |message| Fault::new(Kind::Unreachable, message);
            let name = ServerName::try_from(host.to_owned()).map_err(|_| fault("the host is no name for TLS"))?;
            let stream = self.0.connect(name, tcp).await;
            Ok(Box::new(stream.map_err(|_| fault("the server's certificate or TLS handshake was refused"))?))
        }
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use tokio::net::TcpStream;

    use super::TlsError;
    use crate::connection::Stream;
    use crate::fault::Fault;

    /// Cannot be made: a `rediss://` URL is refused without the feature `tls`.
    #[derive(Clone)]
    pub(crate) enum Tls {}

    impl Tls {
        pub(crate) fn new(_: Option<&[u8]>) -> Result<Tls, TlsError> {
            Err(TlsError { problem: "this build has no TLS" })
        }

        pub(crate) async fn wrap(&self, _: TcpStream, _: &str) -> Result<Box<dyn Stream>, Fault> {
            match *self {}
        }
    }
}
#[cfg(not(feature = "tls"))]
pub(crate) use without::Tls;
