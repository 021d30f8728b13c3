//! The field `response` of a check by rules: what the Tower layer would send for the request, to be relayed.

use std::borrow::Cow;

use bytes::Bytes;
use http::header::HeaderName;
use http::{HeaderMap, HeaderValue, Response};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

/// The response to a refused request, or the headers to add to the response to an admitted one.
#[derive(Serialize)]
pub(super) struct RelayedResponse<'r> {
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    headers: HeaderObject<'r>,
    /// All formats of bodies are UTF-8. Other bytes would be replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<Cow<'r, str>>,
}

impl<'r> RelayedResponse<'r> {
    /// Creates the whole response to a refused request.
    pub(super) fn of(response: &'r Response<Bytes>) -> RelayedResponse<'r> {
        RelayedResponse {
            status: Some(response.status().as_u16()),
            headers: HeaderObject(response.headers()),
            body: Some(String::from_utf8_lossy(response.body())),
        }
    }

    /// Creates the headers to add to the response to an admitted request.
    pub(super) fn headers(headers: &'r HeaderMap) -> RelayedResponse<'r> {
        RelayedResponse { status: None, headers: HeaderObject(headers), body: None }
    }
}

/// Headers that serialize to an object of values by lower-case name. Values of one name are joined by a comma and a space.
struct HeaderObject<'r>(&'r HeaderMap);

impl Serialize for HeaderObject<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(Some(self.0.keys_len()))?;
        for name in self.0.keys() {
            object.serialize_entry(name.as_str(), &self.joined(name))?;
        }
        object.end()
    }
}

impl HeaderObject<'_> {
    fn joined(&self, name: &HeaderName) -> String {
        let values = self.0.get_all(name).iter().map(HeaderValue::as_bytes);
        String::from_utf8_lossy(&values.collect::<Vec<_>>().join(&b", "[..])).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_of_one_header_are_joined_and_names_are_in_lower_case() {
        let mut response = Response::new(Bytes::from_static("é\n".as_bytes()));
        *response.status_mut() = http::StatusCode::TOO_MANY_REQUESTS;
        for (name, value) in [("Vary", "a"), ("X-One", "1"), ("VARY", "b, c")] {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            response.headers_mut().append(name, HeaderValue::from_static(value));
        }
        let headers = json!({ "vary": "a, b, c", "x-one": "1" });
        let relayed = serde_json::to_value(RelayedResponse::of(&response)).unwrap();
        assert_eq!(relayed, json!({ "status": 429, "headers": headers, "body": "é\n" }));
        let added = serde_json::to_value(RelayedResponse::headers(response.headers())).unwrap();
        assert_eq!(added, json!({ "headers": headers }));
    }
}
