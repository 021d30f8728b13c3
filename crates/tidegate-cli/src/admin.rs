//! A client of the admin API of a running instance.

use std::time::Duration;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::Full;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tidegate_server::ListenerSecret;
use tidegate_server::listeners::admin::ADMIN;

use crate::arguments::AdminChoice;
use crate::{Failure, client, secrets};

/// Timeout of a request. It is longer than between services, since a person waits for the result.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The admin API of a running instance: its URL and its token.
pub(crate) struct Admin {
    url: Uri,
    token: ListenerSecret,
}

/// Sends a request to the instance of `--admin` and returns the JSON body of its response. Without that option, returns
/// what `local` returns.
///
/// # Errors
/// See [`Admin::from_options`] and [`Admin::send`]. Also if `local` fails.
pub(crate) async fn ask_or(
    choice: &AdminChoice,
    (method, path, body): (&str, &str, Option<&Value>),
    local: impl AsyncFnOnce() -> Result<Value, Failure>,
) -> Result<Value, Failure> {
    match Admin::from_options(choice)? {
        Some(admin) => admin.send(method, path, body).await,
        None => local().await,
    }
}

/// Encodes a text for a path or a query.
pub(crate) fn encode(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Returns a path with a query, such as `/v1/keys?key=user%3A42&limit=10%2Fmin`. Parameters that are `None` are left out.
pub(crate) fn with_query(path: &str, parameters: &[(&str, Option<&str>)]) -> String {
    let present = parameters.iter().filter_map(|(name, value)| Some(format!("{name}={}", encode((*value)?))));
    format!("{path}?{}", present.collect::<Vec<_>>().join("&"))
}

impl Admin {
    /// Returns the instance at the URL of `--admin`, or `None` without that option. Does not connect.
    ///
    /// Reads the token from the file of `--admin-token-file`, else from `TIDEGATE_ADMIN_TOKEN`.
    ///
    /// # Errors
    /// If the URL is not `http` or `https`, has a user, password or path, or the token is missing or invalid.
    pub(crate) fn from_options(choice: &AdminChoice) -> Result<Option<Admin>, Failure> {
        let Some(url) = &choice.admin else { return Ok(None) };
        let url = client::http_url("admin", url, Failure::AdminUrl)?;
        if url.path() != "/" {
            return Err(Failure::AdminUrl);
        }
        let token = secrets::of_listener(&ADMIN, choice.admin_token_file.as_deref())?;
        let token = token.ok_or(Failure::AdminTokenMissing)?;
        Ok(Some(Admin { url, token }))
    }

    /// Sends a request with the token and returns the JSON body of the response.
    ///
    /// `path` may have a query. Without `body`, the body of the request is empty.
    ///
    /// # Errors
    /// If `method` or `path` is invalid, there is no response within [`RESPONSE_TIMEOUT`], or its status is not 2xx. In
    /// the last case the error contains the message of the response. The error is [`Failure::AdminTokenWrong`] if the
    /// status is 401. It is [`Failure::NotAdmin`] if the status is 404, because an admin listener has all paths that
    /// commands use, or if the body is not JSON. It is [`Failure::UnknownKey`] if the instance knows no API key of the
    /// name in the path.
    pub(crate) async fn send(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        let mut bearer =
            HeaderValue::try_from(format!("Bearer {}", self.token.reveal())).map_err(|_| Failure::AdminUrl)?;
        bearer.set_sensitive(true);
        let body = body.map(ToString::to_string).unwrap_or_default();
        let request = Request::builder().method(method).uri(path).header(AUTHORIZATION, bearer);
        let request = request.body(Full::new(Bytes::from(body))).map_err(Failure::Request)?;
        let response = tokio::time::timeout(RESPONSE_TIMEOUT, client::send(&self.url, request)).await;
        let response = response.unwrap_or_else(|_| Err("timed out".to_owned()));
        let url = || self.url.to_string().trim_end_matches('/').to_owned();
        let (status, text) = response.map_err(|reason| Failure::AdminUnreachable { url: url(), reason })?;
        let body: Option<Value> = serde_json::from_slice(&text).ok();
        if let Some(message) = body.as_ref().filter(|body| body["error"] == "unknown_key") {
            return Err(Failure::UnknownKey { message: message["message"].as_str().unwrap_or_default().to_owned() });
        }
        if status == StatusCode::NOT_FOUND {
            let reason = format!("it responded with status {}", status.as_u16());
            return Err(Failure::NotAdmin { url: url(), reason });
        }
        let not_json = || Failure::NotAdmin { url: url(), reason: "its response is not JSON".to_owned() };
        let body = body.ok_or_else(not_json)?;
        if status == StatusCode::UNAUTHORIZED {
            return Err(Failure::AdminTokenWrong { url: url() });
        }
        if !status.is_success() {
            let message = body["message"].as_str().unwrap_or("the response has no message").to_owned();
            return Err(Failure::AdminRefused { status: status.as_u16(), message });
        }
        Ok(body)
    }
}
