//! `GET /openapi.json`: a description of a listener's HTTP API for programs. `GET /docs`: the same for people.
//!
//! The HTTP listener and the admin listener have a document each, because their addresses and their tokens differ. The
//! documents are written by hand: `openapi/http.json` and `openapi/admin.json`. The tests compare them with the
//! listeners: every documented status is provoked, every response is validated against its schema, and every field of a
//! schema must have occurred. A 500, which only a bug in Tidegate causes, is not documented.

mod page;

use std::sync::OnceLock;

use bytes::Bytes;
use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use http::{HeaderValue, Response};
use serde_json::Value;

/// The API of a listener: an OpenAPI document, and its page.
pub(crate) struct Api {
    document: &'static str,
    page: OnceLock<Bytes>,
}

/// The API of the HTTP listener.
pub(crate) static HTTP: Api = Api::new(include_str!("openapi/http.json"));
/// The API of the admin listener.
pub(crate) static ADMIN: Api = Api::new(include_str!("openapi/admin.json"));

/// What a browser may load and do on the page: only its own inline style.
const PAGE_POLICY: &str =
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

impl Api {
    const fn new(document: &'static str) -> Api {
        Api { document, page: OnceLock::new() }
    }

    /// Returns the response of `/openapi.json`: the OpenAPI document as JSON.
    pub(crate) fn document_response(&self) -> Response<Bytes> {
        with_type(Bytes::from_static(self.document.as_bytes()), "application/json")
    }

    /// Returns the response of `/docs`: the OpenAPI document as an HTML page, which is created once.
    pub(crate) fn page_response(&self) -> Response<Bytes> {
        let page = self.page.get_or_init(|| Bytes::from(page::render(&self.parsed())));
        let mut response = with_type(page.clone(), "text/html; charset=utf-8");
        response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
        response
    }

    /// Returns the OpenAPI document.
    fn parsed(&self) -> Value {
        serde_json::from_str(self.document).unwrap_or_default()
    }
}

fn with_type(body: Bytes, content_type: &'static str) -> Response<Bytes> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Returns what `value` refers to in the document, or `value` itself if it is not a reference.
fn resolve<'d>(document: &'d Value, value: &'d Value) -> &'d Value {
    let pointer = value["$ref"].as_str().and_then(|reference| reference.strip_prefix('#'));
    pointer.and_then(|pointer| document.pointer(pointer)).unwrap_or(value)
}

#[cfg(test)]
mod tests;
