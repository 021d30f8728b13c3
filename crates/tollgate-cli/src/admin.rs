//! A running instance, asked through its admin door.

use std::time::Duration;

use bytes::Bytes;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Uri};
use http_body_util::Full;
use serde_json::Value;
use tollgate_server::Token;

use crate::arguments::AdminChoice;
use crate::{Failure, client, secrets};

/// Somebody is looking at it.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

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
        if !client::is_web(&url) || url.path() != "/" {
            return Err(Failure::AdminUrl);
        }
        let token = secrets::admin_token(choice.admin_token_file.as_deref())?.ok_or(Failure::AdminTokenMissing)?;
        Ok(Some(Admin { url, token }))
    }

    /// Asks, and waits for a JSON answer. Whatever is not a success is a failure with what the instance said.
    pub(crate) async fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        let mut bearer =
            HeaderValue::try_from(format!("Bearer {}", self.token.reveal())).map_err(|_| Failure::AdminUrl)?;
        bearer.set_sensitive(true);
        let body = body.map(ToString::to_string).unwrap_or_default();
        let request = Request::builder().method(method).uri(path).header(AUTHORIZATION, bearer);
        let request = request.body(Full::new(Bytes::from(body))).map_err(Failure::Request)?;
        let answered = tokio::time::timeout(ANSWER_WITHIN, client::send(&self.url, request)).await;
        let answered = answered.unwrap_or_else(|_| Err("it did not answer in time".to_owned()));
        let (status, text) = answered.map_err(|why| {
            let place = self.url.authority().map(ToString::to_string).unwrap_or_default();
            Failure::AdminUnreachable { place, why }
        })?;
        let answer: Value = serde_json::from_slice(&text).unwrap_or_default();
        if !status.is_success() {
            let said = answer["message"].as_str().unwrap_or("no reason was given").to_owned();
            return Err(Failure::AdminRefused { status: status.as_u16(), said });
        }
        Ok(answer)
    }
}
