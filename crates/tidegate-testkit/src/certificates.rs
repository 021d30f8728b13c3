//! Certificates for tests of TLS: an authority, and what it issues, as PEM files in a temporary directory.
//!
//! ```no_run
//! use tidegate_testkit::certificates::Authority;
//! use tidegate_testkit::server::{Brand, Config};
//!
//! let authority = Authority::new();
//! let server = Config::new(Brand::Redis).tls(&authority, &authority.issue(&["localhost"])).start();
//! println!("rediss://localhost:{}", server.tls_port());
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// A certificate authority of a test. Its files are removed when it is dropped.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
    file: PathBuf,
    issued: AtomicUsize,
}

/// The files of a certificate and of its private key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The certificate, as PEM.
    pub cert_file: PathBuf,
    /// The private key, as PEM.
    pub key_file: PathBuf,
}

impl Authority {
    /// Creates an authority with a key of its own.
    ///
    /// # Panics
    /// If the temporary directory cannot be written.
    #[allow(clippy::new_without_default)] // every authority is different
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        // By default all subjects have the same name, and OpenSSL takes a certificate whose issuer has its own name for
        // self-signed.
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, new_key()).expect("a certificate");
        let dir = TempDir::with_prefix("tidegate-").expect("a temporary directory");
        let file = dir.path().join("authority.pem");
        fs::write(&file, issuer.pem()).expect("a writable temporary directory");
        Authority { issuer, dir, file, issued: AtomicUsize::new(0) }
    }

    /// Returns the file with the certificate of the authority, as PEM.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the certificate of the authority, as PEM.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Issues a certificate for DNS names and IP addresses, valid now.
    pub fn issue(&self, names: &[&str]) -> Identity {
        self.sign(params(names))
    }

    /// Issues a certificate that expired in 2001.
    pub fn issue_expired(&self, names: &[&str]) -> Identity {
        let mut params = params(names);
        (params.not_before, params.not_after) = (date_time_ymd(2000, 1, 1), date_time_ymd(2001, 1, 1));
        self.sign(params)
    }

    /// Creates a certificate that no authority has issued: it is signed with its own key.
    pub fn self_signed(&self, names: &[&str]) -> Identity {
        let key = new_key();
        let certificate = params(names).self_signed(&key).expect("a certificate");
        self.write(&certificate.pem(), &key)
    }

    fn sign(&self, params: CertificateParams) -> Identity {
        let key = new_key();
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        self.write(&certificate.pem(), &key)
    }

    fn write(&self, certificate: &str, key: &KeyPair) -> Identity {
        let number = self.issued.fetch_add(1, Ordering::Relaxed);
        let file = |kind: &str, text: &str| {
            let path = self.dir.path().join(format!("{number}.{kind}"));
            fs::write(&path, text).expect("a writable temporary directory");
            path
        };
        Identity { cert_file: file("pem", certificate), key_file: file("key", &key.serialize_pem()) }
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    CertificateParams::new(names).expect("valid names")
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("a key")
}
