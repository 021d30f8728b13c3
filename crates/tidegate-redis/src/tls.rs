//! TLS for `rediss://` URLs: trusted authorities, client certificates, and files that change at run time.
//!
//! Certificates are valid for weeks and a process runs for months. So the files are read at each connect, and changed
//! contents are used from then on. Open connections are not affected. A certificate and its key are two files, which
//! are replaced one after the other. While they do not match, or one of them cannot be used, the previous contents stay
//! in use, and a warning is logged.

use std::path::PathBuf;

/// How a store uses TLS: trusted authorities, client certificate, expected name and minimum version.
///
/// For [`RedisStoreBuilder::tls`](crate::RedisStoreBuilder::tls). The files are in PEM format. They are read when the
/// store is built and at each connect, so a renewed certificate is used without a restart. If a file that has changed
/// cannot be used, the store continues to use the previous contents, and logs a warning.
///
/// ```no_run
/// use tidegate_redis::{RedisStore, TlsOptions, TlsVersion};
///
/// # async fn example() -> Result<(), tidegate_redis::BuildError> {
/// let tls = TlsOptions::new()
///     .ca_file("/etc/tidegate/redis-ca.pem")
///     .client_certificate("/etc/tidegate/client.pem", "/etc/tidegate/client.key")
///     .min_version(TlsVersion::Tls13);
/// let store = RedisStore::builder("rediss://redis.internal:6379").tls(tls).build()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TlsOptions {
    ca_file: Option<PathBuf>,
    /// The files of the certificate chain and of its private key.
    client: Option<(PathBuf, PathBuf)>,
    server_name: Option<String>,
    min_version: TlsVersion,
}

/// A version of TLS.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
#[non_exhaustive]
pub enum TlsVersion {
    /// TLS 1.2.
    #[default]
    Tls12,
    /// TLS 1.3.
    Tls13,
}

impl TlsOptions {
    /// Creates the default options: the system's certificate authorities, no client certificate, TLS 1.2 or later.
    pub fn new() -> TlsOptions {
        TlsOptions::default()
    }

    /// Sets the file with the certificate authorities to trust, instead of the system's. Defaults to the system's.
    #[must_use]
    pub fn ca_file(mut self, file: impl Into<PathBuf>) -> TlsOptions {
        self.ca_file = Some(file.into());
        self
    }

    /// Sets the files of the certificate chain and the private key with which the store identifies itself. Defaults to
    /// none.
    ///
    /// Needed for a server with `tls-auth-clients yes`. The key must not be encrypted.
    #[must_use]
    pub fn client_certificate(mut self, cert_file: impl Into<PathBuf>, key_file: impl Into<PathBuf>) -> TlsOptions {
        self.client = Some((cert_file.into(), key_file.into()));
        self
    }

    /// Sets the DNS name or IP address for which the server's certificate must be valid. Defaults to the host that the
    /// store connects to.
    ///
    /// Applies to all nodes of a cluster, and to the Sentinels and the master, for example if they announce IP
    /// addresses that their certificates do not have.
    #[must_use]
    pub fn server_name(mut self, name: impl Into<String>) -> TlsOptions {
        self.server_name = Some(name.into());
        self
    }

    /// Sets the minimum version. Defaults to TLS 1.2.
    #[must_use]
    pub fn min_version(mut self, version: TlsVersion) -> TlsOptions {
        self.min_version = version;
        self
    }

    /// Checks that the files can be read and used, and that the server name is valid. Does not connect.
    ///
    /// # Errors
    /// Returns the error with which a store with these options could not be built. In a build without the feature
    /// `tls`, always returns an error.
    pub fn check(&self) -> Result<(), TlsError> {
        Tls::new(self.clone(), None).map(drop)
    }
}

/// The error of TLS options that a `rediss://` store cannot use.
///
/// A file of [`TlsOptions`] cannot be read or used, or the certificates given to
/// [`RedisStoreBuilder::trust`](crate::RedisStoreBuilder::trust) cannot. The message names the file, and does not
/// contain its contents. A failed TLS handshake is not a `TlsError`: decisions then fail with
/// [`StoreErrorKind::Unreachable`](tidegate_core::StoreErrorKind::Unreachable).
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}")]
pub struct TlsError {
    problem: String,
}

impl TlsError {
    fn new(problem: impl Into<String>) -> TlsError {
        TlsError { problem: problem.into() }
    }
}

#[cfg(feature = "tls")]
pub(crate) use with_rustls::{Tls, reason};
#[cfg(not(feature = "tls"))]
pub(crate) use without::{Tls, reason};

#[cfg(feature = "tls")]
mod with_rustls {
    use std::io;
    use std::path::Path;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tidegate_core::{__io_reason, StoreErrorKind as Kind};
    use tokio::net::TcpStream;
    use tokio::time::{Instant, timeout_at};
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::pki_types::pem::PemObject;
    use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    use tokio_rustls::rustls::{
        AlertDescription, CertificateError, ClientConfig, Error, PeerIncompatible, RootCertStore,
        SupportedProtocolVersion, crypto, version,
    };

    use super::{TlsError, TlsOptions, TlsVersion};
    use crate::connection::Stream;
    use crate::credentials::read_bounded;
    use crate::fault::Fault;

    /// The largest file that is read. A bundle of all public certificate authorities has about 250 kB.
    const FILE_BYTES_MAX: u64 = 1 << 20;

    /// The TLS configuration of a store, used by each of its connections.
    pub(crate) struct Tls {
        options: TlsOptions,
        /// Certificate authorities to trust besides those of the options, in PEM format.
        trusted_pem: Option<Vec<u8>>,
        current: Mutex<Material>,
    }

    /// The contents of the files, and the configuration that was created from them.
    struct Material {
        files: Files,
        config: Arc<ClientConfig>,
        /// The problem of newer files that was last logged; `None` if there is none.
        logged: Option<TlsError>,
    }

    /// The contents of the files of [`TlsOptions`]; `None` for a file that is not configured.
    #[derive(Clone, PartialEq, Eq)]
    struct Files {
        authorities: Option<Vec<u8>>,
        client: Option<(Vec<u8>, Vec<u8>)>,
    }

    impl Tls {
        /// Reads the files and creates a configuration. `trusted_pem` are certificate authorities to trust besides
        /// those of the options.
        ///
        /// Without a file for authorities, reads those of the system, and skips those that are missing or invalid.
        ///
        /// # Errors
        /// Returns an error if a file cannot be read or used, the key does not match the certificate, `trusted_pem` has
        /// no valid certificate authority, or the server name is invalid.
        pub(crate) fn new(options: TlsOptions, trusted_pem: Option<Vec<u8>>) -> Result<Arc<Tls>, TlsError> {
            if let Some(name) = &options.server_name {
                ServerName::try_from(name.as_str()).map_err(|_| {
                    TlsError::new(format!("the TLS server name {name:?} is neither a DNS name nor an IP address"))
                })?;
            }
            let files = Files::read(&options)?;
            let config = Arc::new(configure(&options, &files, trusted_pem.as_deref())?);
            let current = Mutex::new(Material { files, config, logged: None });
            Ok(Arc::new(Tls { options, trusted_pem, current }))
        }

        /// Performs the TLS handshake on `tcp` with what the files contain now, and verifies that the server's
        /// certificate is valid for the configured name, or for `host`.
        ///
        /// # Errors
        /// Returns a fault of the kind `Unreachable` if the handshake or the verification fails or does not complete
        /// by `until`, or if `host` is neither a DNS name nor an IP address.
        pub(crate) async fn wrap(
            self: &Arc<Self>,
            tcp: TcpStream,
            host: &str,
            until: Instant,
        ) -> Result<Box<dyn Stream>, Fault> {
            let fault = |message: String| Fault::new(Kind::Unreachable, message);
            let config = if self.options.ca_file.is_some() || self.options.client.is_some() {
                let tls = self.clone();
                tokio::task::spawn_blocking(move || tls.current_config()).await
            } else {
                Ok(self.current.lock().config.clone())
            };
            let config = config.map_err(|_| fault("the files for TLS could not be read".into()))?;
            let name = self.options.server_name.as_deref().unwrap_or(host);
            let server_name = ServerName::try_from(name.to_owned())
                .map_err(|_| fault("the host is not a valid name for a TLS certificate".into()))?;
            let handshake = TlsConnector::from(config).connect(server_name, tcp);
            let stream = timeout_at(until, handshake).await.map_err(|_| {
                fault("the server does not answer the TLS handshake; is this a port without TLS (redis instead of rediss)?".into())
            })?;
            let stream =
                stream.map_err(|error| fault(format!("the TLS handshake failed: {}", reason_for(&error, name))))?;
            Ok(Box::new(stream))
        }

        /// Returns whether the store has a client certificate.
        pub(crate) fn has_client_certificate(&self) -> bool {
            self.options.client.is_some()
        }

        /// Reads the files, and returns the configuration that they define. Blocks.
        ///
        /// If they cannot be used, returns the configuration in use, and logs a warning, once for each problem.
        fn current_config(&self) -> Arc<ClientConfig> {
            let mut current = self.current.lock();
            let changed = Files::read(&self.options).and_then(|files| {
                if files == current.files {
                    return Ok(None);
                }
                let config = configure(&self.options, &files, self.trusted_pem.as_deref())?;
                Ok(Some((files, Arc::new(config))))
            });
            match changed {
                Ok(changed) => {
                    current.logged = None;
                    if let Some((files, config)) = changed {
                        (current.files, current.config) = (files, config);
                    }
                }
                Err(error) => {
                    if current.logged.as_ref() != Some(&error) {
                        tracing::warn!(%error, "the changed files for TLS to the store cannot be used; the previous ones stay in use");
                        current.logged = Some(error);
                    }
                }
            }
            current.config.clone()
        }
    }

    impl Files {
        fn read(options: &TlsOptions) -> Result<Files, TlsError> {
            let read = |file: &Path| {
                read_bounded(file, FILE_BYTES_MAX)
                    .map_err(|error| TlsError::new(format!("cannot read {}: {}", file.display(), __io_reason(&error))))
            };
            let authorities = options.ca_file.as_deref().map(read).transpose()?;
            let client = options.client.as_ref().map(|(cert, key)| Ok((read(cert)?, read(key)?))).transpose()?;
            Ok(Files { authorities, client })
        }
    }

    /// Creates the client configuration of the options, with the contents of their files.
    fn configure(options: &TlsOptions, files: &Files, trusted_pem: Option<&[u8]>) -> Result<ClientConfig, TlsError> {
        let mut roots = RootCertStore::empty();
        match (&options.ca_file, &files.authorities) {
            (Some(file), Some(pem)) => add_authorities(&mut roots, pem, &file.display().to_string())?,
            // Those in `trusted_pem` may be enough.
            _ => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
        }
        if let Some(pem) = trusted_pem {
            add_authorities(&mut roots, pem, "the trusted certificates")?;
        }
        let versions: &[&SupportedProtocolVersion] = match options.min_version {
            TlsVersion::Tls12 => &[&version::TLS12, &version::TLS13],
            TlsVersion::Tls13 => &[&version::TLS13],
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_protocol_versions(versions)
            .map_err(|_| TlsError::new("TLS cannot be configured"))?
            .with_root_certificates(roots);
        let (Some((cert_file, key_file)), Some((cert, key))) = (&options.client, &files.client) else {
            return Ok(builder.with_no_client_auth());
        };
        let chain = certificates(cert, &cert_file.display().to_string())?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| {
            TlsError::new(format!(
                "{} contains no private key; expected PEM: -----BEGIN PRIVATE KEY----- (not encrypted)",
                key_file.display()
            ))
        })?;
        builder.with_client_auth_cert(chain, key).map_err(|error| {
            TlsError::new(format!(
                "the certificate in {} and the key in {} cannot be used together: {}",
                cert_file.display(),
                key_file.display(),
                match error {
                    Error::InconsistentKeys(_) => "the key does not belong to the certificate".to_owned(),
                    error => error.to_string(),
                }
            ))
        })
    }

    fn add_authorities(roots: &mut RootCertStore, pem: &[u8], place: &str) -> Result<(), TlsError> {
        for certificate in certificates(pem, place)? {
            roots.add(certificate).map_err(|_| {
                TlsError::new(format!(
                    "{place}: a certificate in the PEM text cannot be used as a certificate authority"
                ))
            })?;
        }
        Ok(())
    }

    /// Returns the certificates in a PEM text: at least one. `place` is where it comes from, for errors.
    fn certificates(pem: &[u8], place: &str) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let decoded: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
        let certificates = decoded
            .map_err(|_| TlsError::new(format!("{place}: a certificate cannot be decoded; expected PEM format")))?;
        if certificates.is_empty() {
            let expected = "expected PEM: -----BEGIN CERTIFICATE-----";
            return Err(TlsError::new(format!("{place}: no certificate was found; {expected}")));
        }
        Ok(certificates)
    }

    /// Returns the reason of an I/O error on a stream, in words for an operator if it is an error of TLS.
    pub(crate) fn reason(error: &io::Error) -> String {
        reason_for(error, "this host")
    }

    /// Returns the reason of an I/O error on a stream to a server whose certificate must be valid for `name`.
    fn reason_for(error: &io::Error, name: &str) -> String {
        let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
            return match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    "the server closed the connection; is this a port without TLS (redis instead of rediss)?".into()
                }
                _ => __io_reason(error),
            };
        };
        match tls {
            Error::InvalidCertificate(certificate) => certificate_reason(certificate, name),
            Error::AlertReceived(AlertDescription::CertificateRequired) => {
                "the server requires a client certificate".into()
            }
            Error::AlertReceived(
                AlertDescription::BadCertificate
                | AlertDescription::UnknownCA
                | AlertDescription::CertificateExpired
                | AlertDescription::CertificateUnknown
                | AlertDescription::CertificateRevoked
                | AlertDescription::UnsupportedCertificate
                | AlertDescription::AccessDenied,
            ) => format!("the server rejects the client certificate ({tls})"),
            Error::AlertReceived(AlertDescription::HandshakeFailure) => {
                "the server rejects the handshake; it may require a client certificate".into()
            }
            Error::AlertReceived(AlertDescription::ProtocolVersion)
            | Error::PeerIncompatible(PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig) => {
                "the server does not support the required version of TLS".into()
            }
            Error::InvalidMessage(_) => {
                "the server's answer is not TLS; is this a port without TLS (redis instead of rediss)?".into()
            }
            other => other.to_string(),
        }
    }

    fn certificate_reason(error: &CertificateError, name: &str) -> String {
        match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "the server's certificate has expired".into()
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                "the server's certificate is not valid yet; check the clocks".into()
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                format!("the server's certificate is not valid for {name}")
            }
            // A bad signature: the authority has the name of a trusted one, but another key.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                "the server's certificate is self-signed, or issued by a certificate authority \
                                                that is not trusted"
                    .into()
            }
            other => format!("the server's certificate is invalid: {other}"),
        }
    }
}

#[cfg(not(feature = "tls"))]
mod without {
    use std::io;
    use std::sync::Arc;

    use tidegate_core::__io_reason;
    use tokio::net::TcpStream;
    use tokio::time::Instant;

    use super::{TlsError, TlsOptions};
    use crate::connection::Stream;
    use crate::fault::Fault;

    /// A type without values, for builds without the feature `tls`.
    ///
    /// In such a build, [`StoreAddress::parse`](crate::url::StoreAddress::parse) rejects `rediss://` URLs, so no store uses
    /// TLS.
    pub(crate) enum Tls {}

    impl Tls {
        /// Returns an error: this build does not support TLS. No store calls it, because `rediss://` URLs are rejected
        /// before.
        pub(crate) fn new(_: TlsOptions, _: Option<Vec<u8>>) -> Result<Arc<Tls>, TlsError> {
            Err(TlsError::new("this build does not support TLS"))
        }

        /// Never runs, because there is no `Tls` value.
        pub(crate) async fn wrap(
            self: &Arc<Self>,
            _: TcpStream,
            _: &str,
            _: Instant,
        ) -> Result<Box<dyn Stream>, Fault> {
            match **self {}
        }

        /// Never runs, because there is no `Tls` value.
        pub(crate) fn has_client_certificate(&self) -> bool {
            match *self {}
        }
    }

    /// Returns the reason of an I/O error on a stream.
    pub(crate) fn reason(error: &io::Error) -> String {
        __io_reason(error)
    }
}
