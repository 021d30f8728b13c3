//! A running instance, asked through its admin door.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderValue, Request, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};
use tollgate_server::Token;

use crate::arguments::AdminChoice;
use crate::{Failure, secrets};

/// Somebody is looking at it.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The port of an admin door, unless the URL says another.
const PORT: u16 = 9090;

/// The admin door of a running instance.
pub(crate) struct Admin {
    url: Uri,
    token: Token,
}

impl Admin {
    /// The instance that was chosen, if one was.
    pub(crate) fn chosen(choice: &AdminChoice) -> Result<Option<Admin>, Failure> {
        let Some(url) = &choice.admin else { return Ok(None) };
        let url: Uri = url.parse().map_err(|_| Failure::AdminUrl)?;
        if !matches!(url.scheme_str(), Some("http" | "https")) || url.host().is_none() || url.path() != "/" {
            return Err(Failure::AdminUrl);
        }
        let token = secrets::admin_token(choice.admin_token_file.as_deref())?.ok_or(Failure::AdminTokenMissing)?;
        Ok(Some(Admin { url, token }))
    }

    /// Asks, and waits for a JSON answer. Whatever is not a success is a failure with what the instance said.
    pub(crate) async fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        let answered = tokio::time::timeout(ANSWER_WITHIN, self.exchange(method, path, body)).await;
        let (status, text) = answered.map_err(|_| self.unreachable("it did not answer in time"))??;
        let answer: Value = serde_json::from_slice(&text).unwrap_or_default();
        if !status.is_success() {
            let said = answer["message"].as_str().unwrap_or("no reason was given").to_owned();
            return Err(Failure::AdminRefused { status: status.as_u16(), said });
        }
        Ok(answer)
    }

    async fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(http::StatusCode, Bytes), Failure> {
        let host = self.url.host().unwrap_or_default();
        let port = self.url.port_u16().unwrap_or(PORT);
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((bare, port)).await.map_err(|error| self.unreachable(&error.to_string()))?;
        let body = body.map(ToString::to_string).unwrap_or_default();
        let mut bearer =
            HeaderValue::try_from(format!("Bearer {}", self.token.reveal())).map_err(|_| Failure::AdminUrl)?;
        bearer.set_sensitive(true);
        let request = Request::builder().method(method).uri(path).header(HOST, host).header(AUTHORIZATION, bearer);
        let request =
            request.body(Full::new(Bytes::from(body))).map_err(|error| self.unreachable(&error.to_string()))?;
        match self.url.scheme_str() {
            Some("https") => {
                let name = ServerName::try_from(bare.to_owned()).map_err(|_| Failure::AdminUrl)?;
                let stream = connector().connect(name, stream).await;
                self.send(stream.map_err(|error| self.unreachable(&error.to_string()))?, request).await
            }
            _ => self.send(stream, request).await,
        }
    }

    async fn send<S>(&self, stream: S, request: Request<Full<Bytes>>) -> Result<(http::StatusCode, Bytes), Failure>
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    {
        let broken = |error: &dyn std::fmt::Display| self.unreachable(&error.to_string());
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| broken(&error))?;
        tokio::spawn(connection);
        let response = sender.send_request(request).await.map_err(|error| broken(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        Ok((status, body.map_err(|error| broken(&error))?.to_bytes()))
    }

    fn unreachable(&self, why: &str) -> Failure {
        let place = format!("{}:{}", self.url.host().unwrap_or_default(), self.url.port_u16().unwrap_or(PORT));
        Failure::AdminUnreachable { place, why: why.to_owned() }
    }
}

/// Trusts what this machine trusts; `SSL_CERT_FILE` names others.
fn connector() -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has the default versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}
