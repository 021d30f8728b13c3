//! A minimal HTTP client: one request per connection, with or without TLS.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tidegate::__io_reason;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use crate::Failure;

/// Maximum size of a response body.
const RESPONSE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Parses the URL that is the value of `option`: `http` or `https`, with a host, but without a user or password, which
/// would appear wherever the URL is printed.
///
/// # Errors
/// Returns `invalid` for any other text, but [`Failure::SchemeMissing`] if it would be such a URL after `http://`.
pub(crate) fn http_url(option: &'static str, text: &str, invalid: Failure) -> Result<Uri, Failure> {
    let parse = |text: &str| text.parse().ok().filter(is_http_url);
    if let Some(url) = parse(text) {
        return Ok(url);
    }
    let with_scheme = format!("http://{text}");
    let is_meant = !text.contains("://") && parse(&with_scheme).is_some();
    Err(if is_meant { Failure::SchemeMissing { option, url: with_scheme } } else { invalid })
}

/// Returns whether a URL is `http` or `https` and has a host, but no user or password.
fn is_http_url(url: &Uri) -> bool {
    let has_login = url.authority().is_some_and(|authority| authority.as_str().contains('@'));
    matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some() && !has_login
}

/// Opens a connection to the host of `url`, sends a request, and returns the status and the body of the response.
///
/// `url` must be one of [`http_url`]. The scheme, host and port are those of `url`, and its path is
/// ignored; the path and query are those of the request. The port defaults to 80, or 443 for `https`. `Host` is set.
/// There is no timeout, and redirects are not followed. For the certificates that `https` trusts see [`connector`].
///
/// # Errors
/// If the connection or the exchange fails, or the body exceeds 16 MiB. The message contains nothing of the request.
pub(crate) async fn send(url: &Uri, mut request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), String> {
    let is_encrypted = url.scheme_str() == Some("https");
    let host = url.host().unwrap_or_default();
    let port = url.port_u16().unwrap_or(if is_encrypted { 443 } else { 80 });
    if let Ok(host) = HeaderValue::try_from(url.authority().map_or(host, |authority| authority.as_str())) {
        request.headers_mut().insert(http::header::HOST, host);
    }
    // The request line has only the path, since the connection is to the host itself.
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).parse();
    *request.uri_mut() = path.map_err(|_| "invalid path".to_owned())?;

    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((bare, port)).await.map_err(|error| __io_reason(&error))?;
    if !is_encrypted {
        return exchange(stream, request).await;
    }
    let name = ServerName::try_from(bare.to_owned()).map_err(|_| "invalid host name for TLS".to_owned())?;
    let stream = connector().connect(name, stream).await.map_err(|error| __io_reason(&error))?;
    exchange(stream, request).await
}

/// Sends a request over an open connection and reads the response. Returns its status and its body.
///
/// Spawns a task that serves the connection.
///
/// # Errors
/// If the connection breaks, the response is malformed, or its body exceeds 16 MiB.
async fn exchange<S>(stream: S, request: Request<Full<Bytes>>) -> Result<(StatusCode, Bytes), String>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| error.to_string())?;
    tokio::spawn(connection);
    let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
    let status = response.status();
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    Ok((status, body.map_err(|error| error.to_string())?.to_bytes()))
}

/// Creates a TLS connector that trusts the system's root certificates, or those that `SSL_CERT_FILE` and `SSL_CERT_DIR`
/// name if one of them is set.
///
/// Reads these files each time. Certificates that cannot be read are left out; without any, every handshake fails.
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
