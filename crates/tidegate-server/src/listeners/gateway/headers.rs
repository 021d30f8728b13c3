//! Which headers are forwarded, in both directions.
//!
//! | headers | of a request | of a response |
//! |---|---|---|
//! | of one connection (`Connection` and those it names, which `validate.rs` restricts, `Keep-Alive`, `TE`, `Transfer-Encoding`, `Upgrade`, …) | dropped; `TE: trailers` and a supported upgrade are set again | dropped |
//! | `X-Forwarded-*`, `Forwarded` | from a trusted proxy kept, and extended if a list; otherwise replaced | – |
//! | `X-Real-IP` | replaced | – |
//! | another `forwarding_header`, such as `CF-Connecting-IP` | kept if sent by a trusted proxy, otherwise dropped | – |
//! | names with underscores (`X_Api_Key`) | dropped: CGI, WSGI and PHP cannot tell them apart from `X-Api-Key`, which the rules saw; with `underscores_in_headers` kept, except for the headers above | – |
//! | rate limits (`RateLimit`, `X-RateLimit-…`) | dropped | kept, unless a rule writes its own |
//! | `Expect` | dropped: the gateway answers it | – |
//!
//! The upstream must be able to trust what it receives. So no header that identifies the client is forwarded from a
//! client that is not a trusted proxy, not even in trailers.

use std::fmt::Write as _;
use std::net::IpAddr;

use http::header::{CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Version};
use smallvec::SmallVec;
use tidegate::identity::TrustedProxies;

use super::connection::GatewayClient;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Headers that belong to one connection.
const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    HeaderName::from_static("http2-settings"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Names of headers that identify the client, spelled with dashes. Those that begin with `x-forwarded-` are not listed.
const FORWARDING: [&str; 2] = ["forwarded", "x-real-ip"];

/// Returns the protocol to which a request asks to upgrade its connection, if the gateway can forward the upgrade.
///
/// Returns `None` for HTTP/2, and for an upgrade to `h2c`: requests in such a tunnel would bypass the rules.
pub(super) fn upgrade_of(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    let mut lines = headers.get_all(UPGRADE).iter();
    let protocol = lines.next().filter(|_| version == Version::HTTP_11)?;
    let names = protocol.to_str().ok()?;
    let is_http2 = names.split(',').any(|name| name.trim().to_ascii_lowercase().starts_with("h2"));
    let asks = connection_options(headers).any(|option| option.eq_ignore_ascii_case("upgrade"));
    (asks && !is_http2 && lines.next().is_none()).then(|| protocol.clone())
}

/// Returns whether the `Upgrade` header of a 101 response names exactly one of the protocols in `asked`.
pub(super) fn names_protocol(asked: &HeaderValue, response: &HeaderMap) -> bool {
    let mut lines = response.get_all(UPGRADE).iter();
    let (Some(protocol), None) = (lines.next(), lines.next()) else { return false };
    let protocol = protocol.as_bytes().trim_ascii();
    let mut asked = asked.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    !protocol.is_empty() && asked.any(|name| name.eq_ignore_ascii_case(protocol))
}

/// Changes the headers of a client's request into those of the request to the upstream: removes those of the connection,
/// and sets `Forwarded`, `X-Forwarded-*` and `Host`.
///
/// `upgrade` is the protocol of an upgrade that is forwarded. Names with underscores are kept if `keeps_underscores`.
pub(super) fn to_upstream(
    head: &mut Parts,
    client: &GatewayClient,
    proxies: &TrustedProxies,
    keeps_underscores: bool,
    upgrade: Option<HeaderValue>,
) {
    let peer = client.peer().ip().to_canonical();
    let is_trusted = proxies.trusts(peer);
    let address = proxies.client_address(peer, &head.headers);
    let host = match head.uri.authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => head.headers.get(HOST).cloned(),
    };
    let headers = &mut head.headers;
    let wants_trailers = list(headers, &TE).any(|option| option.eq_ignore_ascii_case("trailers"));
    let named = named_by_connection(headers);
    remove_where(headers, |name| {
        is_hop_by_hop(name, &named)
            || *name == EXPECT
            || is_rate_limit(name)
            || has_dropped_underscore(name, keeps_underscores, proxies.header().name())
            || !is_trusted && (is_forwarding(name) || name == proxies.header().name())
    });
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    if let Some(protocol) = upgrade {
        headers.insert(UPGRADE, protocol);
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    }
    join_cookies(headers);
    forward(headers, client, peer, address, host.as_ref());
    if let Some(host) = host.filter(|_| head.uri.authority().is_some()) {
        headers.insert(HOST, host);
    }
}

/// Writes the headers that identify the client and how it connected.
///
/// A forwarding header that is still present was sent by a trusted proxy, and is extended if it is a list.
fn forward(headers: &mut HeaderMap, client: &GatewayClient, peer: IpAddr, address: IpAddr, host: Option<&HeaderValue>) {
    // If the proxy sent no list, the client is added first, as the proxy would have done.
    let mut text = entries(headers, &X_FORWARDED_FOR);
    if text.is_empty() && address == peer {
        headers.insert(X_FORWARDED_FOR, client.address().clone());
    } else {
        if text.is_empty() {
            let _ = write!(text, "{address}, ");
        }
        text.push_str(client.address_text());
        insert(headers, X_FORWARDED_FOR, text);
    }

    let mut text = entries(headers, &FORWARDED);
    text.reserve(96);
    if text.is_empty() && address != peer {
        write_node(&mut text, address, &address.to_string());
        text.push_str(", ");
    }
    write_node(&mut text, peer, client.address_text());
    if let Some(host) = host.and_then(|host| host.to_str().ok()) {
        let quote = if host.contains([':', '[']) { "\"" } else { "" };
        text.extend([";host=", quote, host, quote]);
    }
    text.extend([";proto=", client.scheme()]);
    insert(headers, FORWARDED, text);

    if address == peer {
        headers.insert(X_REAL_IP, client.address().clone());
    } else {
        insert(headers, X_REAL_IP, address.to_string());
    }
    headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static(client.scheme()));
    headers.entry(X_FORWARDED_PORT).or_insert_with(|| client.port().clone());
    if let Some(host) = host {
        headers.entry(X_FORWARDED_HOST).or_insert_with(|| host.clone());
    }
}

/// Returns the entries of all lines of a header, each followed by a comma.
fn entries(headers: &HeaderMap, name: &HeaderName) -> String {
    let mut text = String::new();
    for line in
        headers.get_all(name).iter().filter_map(|line| line.to_str().ok()).filter(|line| !line.trim().is_empty())
    {
        text.extend([line, ", "]);
    }
    text
}

/// Writes `for=ADDRESS`, as in RFC 7239. `shown` is the address as text.
fn write_node(text: &mut String, address: IpAddr, shown: &str) {
    match address {
        IpAddr::V4(_) => text.extend(["for=", shown]),
        IpAddr::V6(_) => text.extend(["for=\"[", shown, "]\""]),
    }
}

/// Sets a header to a text of visible ASCII characters.
fn insert(headers: &mut HeaderMap, name: HeaderName, text: String) {
    if let Ok(value) = HeaderValue::try_from(text) {
        headers.insert(name, value);
    }
}

/// Joins the lines of `Cookie`: HTTP/2 clients may split them, and HTTP/1.1 servers expect a single line.
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(COOKIE).iter().nth(1).is_none() {
        return;
    }
    let lines: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if let Ok(joined) = HeaderValue::from_bytes(&lines.join(&b"; "[..])) {
        headers.insert(COOKIE, joined);
    }
}

/// Changes the headers of an upstream's response into those of the response to the client.
///
/// `replaces_limits` is whether a rule writes its own rate-limit headers. Those of the upstream are then removed.
pub(super) fn to_client(headers: &mut HeaderMap, replaces_limits: bool) {
    let named = named_by_connection(headers);
    remove_where(headers, |name| is_hop_by_hop(name, &named) || replaces_limits && is_rate_limit(name));
}

/// Returns the trailers of a request without the fields that a client must not set.
///
/// `forwarding_header` is the header in which trusted proxies report the client's address. Names with underscores are
/// kept if `keeps_underscores`.
pub(super) fn request_trailers(
    mut trailers: HeaderMap,
    forwarding_header: &HeaderName,
    keeps_underscores: bool,
) -> HeaderMap {
    remove_where(&mut trailers, |name| {
        is_rate_limit(name)
            || has_dropped_underscore(name, keeps_underscores, forwarding_header)
            || is_forwarding(name)
            || name == forwarding_header
            || is_hop_by_hop(name, &[])
    });
    trailers
}

/// Returns whether the framing of a response is contradictory, so that clients may disagree about where its body ends.
pub(super) fn is_contradictory(headers: &HeaderMap) -> bool {
    let mut lengths = headers.get_all(CONTENT_LENGTH).iter().map(HeaderValue::as_bytes);
    let first = lengths.next();
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let is_chunked = match codings.next() {
        Some(coding) => {
            if !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") || codings.next().is_some() {
                return true;
            }
            true
        }
        None => false,
    };
    let is_number = |length: &[u8]| !length.is_empty() && length.iter().all(u8::is_ascii_digit);
    first.is_some_and(|first| is_chunked || !is_number(first)) || lengths.any(|length| Some(length) != first)
}

/// Removes the headers for whose name `is_dropped` returns `true`.
fn remove_where(headers: &mut HeaderMap, is_dropped: impl Fn(&HeaderName) -> bool) {
    let dropped: SmallVec<[HeaderName; 4]> = headers.keys().filter(|name| is_dropped(name)).cloned().collect();
    for name in dropped {
        headers.remove(name);
    }
}

/// Returns whether a header belongs to the connection on which it was received. `named` has the headers that
/// `Connection` names.
fn is_hop_by_hop(name: &HeaderName, named: &[HeaderName]) -> bool {
    HOP_BY_HOP.contains(name) || named.contains(name)
}

/// Returns whether `Connection` names a header of the request that does not belong to the connection anyway.
///
/// Such a header would be removed after the rules have used it.
pub(super) fn removes_headers(headers: &HeaderMap) -> bool {
    connection_options(headers).any(|option| match HeaderName::from_bytes(option.as_bytes()) {
        Ok(name) => !HOP_BY_HOP.contains(&name) && headers.contains_key(&name),
        Err(_) => false,
    })
}

/// Returns the headers that `Connection` names, except those for framing and host.
fn named_by_connection(headers: &HeaderMap) -> SmallVec<[HeaderName; 4]> {
    connection_options(headers)
        .filter_map(|option| HeaderName::from_bytes(option.as_bytes()).ok())
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
        .collect()
}

fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    list(headers, &CONNECTION)
}

/// Iterates over the entries of a header that is a list, across its lines.
fn list<'h>(headers: &'h HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'h str> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

/// Returns whether a header reports a rate limit.
fn is_rate_limit(name: &HeaderName) -> bool {
    let name = name.as_str();
    let name = name.strip_prefix("x-").unwrap_or(name);
    let rest = name.strip_prefix("ratelimit").or_else(|| name.strip_prefix("rate-limit"));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Returns whether a header identifies the client or how it connected.
fn is_forwarding(name: &HeaderName) -> bool {
    let name = name.as_str();
    name.starts_with("x-forwarded-") || FORWARDING.contains(&name)
}

/// Returns whether a header is dropped because its name has an underscore.
///
/// If `keeps_underscores`, these are only rate-limit headers, forwarding headers and those that determine where a
/// request begins and ends.
fn has_dropped_underscore(name: &HeaderName, keeps_underscores: bool, forwarding_header: &HeaderName) -> bool {
    if !name.as_str().contains('_') {
        return false;
    }
    if !keeps_underscores {
        return true;
    }
    let Ok(name) = HeaderName::from_bytes(name.as_str().replace('_', "-").as_bytes()) else { return true };
    let is_framing = HOP_BY_HOP.contains(&name) || name == HOST || name == CONTENT_LENGTH;
    is_framing || is_forwarding(&name) || is_rate_limit(&name) || name == forwarding_header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&str, &str)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        let mut map = HeaderMap::new();
        for (name, value) in lines.iter().map(line) {
            map.append::<HeaderName>(name, value);
        }
        map
    }

    fn shown(headers: &HeaderMap) -> Vec<String> {
        let mut lines: Vec<String> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        lines.sort();
        lines
    }

    fn forwarded(peer: &str, trusted: &str, lines: &[(&str, &str)]) -> Vec<String> {
        let mut head = http::Request::get("/").body(()).unwrap().into_parts().0;
        head.headers = headers(lines);
        let proxies = TrustedProxies::new(trusted.parse().unwrap(), Default::default());
        let client = GatewayClient::of_test(format!("{peer}:4711").parse().unwrap());
        to_upstream(&mut head, &client, &proxies, false, None);
        shown(&head.headers)
    }

    #[test]
    fn names_with_underscores_are_dropped_unless_they_are_allowed() {
        let sent = [("x_api_key", "a"), ("x-kept", "b"), ("_", "c"), ("cf_connecting_ip", "d"), ("x_real_ip", "e")];
        let header: HeaderName = "cf-connecting-ip".parse().unwrap();
        let names = |keeps_underscores| {
            let kept = request_trailers(headers(&sent), &header, keeps_underscores);
            let mut names: Vec<String> = kept.keys().map(HeaderName::to_string).collect();
            names.sort();
            names
        };
        assert_eq!(names(false), ["x-kept"]);
        assert_eq!(names(true), ["_", "x-kept", "x_api_key"]);
        assert!(forwarded("203.0.113.9", "10.0.0.0/8", &sent).iter().all(|line| !line.contains('_')));
    }

    #[test]
    fn a_101_response_must_name_a_protocol_that_was_asked_for() {
        let names = |asked: &str, lines: &[(&str, &str)]| names_protocol(&asked.parse().unwrap(), &headers(lines));
        assert!(names("websocket", &[("upgrade", "WebSocket")]));
        assert!(names("a, b/2", &[("upgrade", "b/2 ")]));
        for lines in [&[][..], &[("upgrade", "")], &[("upgrade", "c")], &[("upgrade", "a"), ("upgrade", "b/2")]] {
            assert!(!names("a, b/2,", lines), "{lines:?}");
        }
    }

    #[test]
    fn connection_may_name_only_headers_of_the_connection() {
        let removes = |connection: &str| {
            removes_headers(&headers(&[("x-api-key", "a"), ("te", "trailers"), ("connection", connection)]))
        };
        for accepted in ["close", "keep-alive, TE", "upgrade, http2-settings", "x-absent", "", ",", "keep-alive,,te"] {
            assert!(!removes(accepted), "{accepted}");
        }
        for rejected in ["x-api-key", "close, X-API-Key", "close,x-api-key ,te"] {
            assert!(removes(rejected), "{rejected}");
        }
        assert!(removes_headers(&headers(&[("cookie", "a"), ("connection", "close"), ("connection", "cookie")])));
    }

    #[test]
    fn a_client_cannot_report_its_own_address() {
        let expected = [
            "forwarded: for=203.0.113.9;host=a.test;proto=http",
            "host: a.test",
            "x-forwarded-for: 203.0.113.9",
            "x-forwarded-host: a.test",
            "x-forwarded-port: 8000",
            "x-forwarded-proto: http",
            "x-real-ip: 203.0.113.9",
        ];
        let sent = [
            ("host", "a.test"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-proto", "https"),
            ("X-Forwarded-Anything", "6.6.6.6"),
            ("x_forwarded_for", "6.6.6.6"),
            ("X_Forwarded-For", "6.6.6.6"),
            ("forwarded", "for=6.6.6.6"),
            ("x-real-ip", "6.6.6.6"),
            ("x_real_ip", "6.6.6.6"),
            ("x-ratelimit-remaining", "1000"),
            ("ratelimit", "x"),
            ("x_ratelimit_limit", "1000"),
        ];
        assert_eq!(forwarded("203.0.113.9", "10.0.0.0/8", &sent), expected);
        assert_eq!(forwarded("203.0.113.9", "10.0.0.0/8", &[("host", "a.test")]), expected);
    }

    #[test]
    fn the_lists_of_a_trusted_proxy_are_extended() {
        let sent = [
            ("host", "a.test"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x-forwarded-for", "198.51.100.7"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "www.test"),
            ("x_forwarded_for", "6.6.6.6"),
        ];
        let expected = [
            "forwarded: for=198.51.100.7, for=10.0.0.1;host=a.test;proto=http",
            "host: a.test",
            "x-forwarded-for: 6.6.6.6, 198.51.100.7, 10.0.0.1",
            "x-forwarded-host: www.test",
            "x-forwarded-port: 8000",
            "x-forwarded-proto: https",
            "x-real-ip: 198.51.100.7",
        ];
        assert_eq!(forwarded("10.0.0.1", "10.0.0.0/8", &sent), expected);
    }

    #[test]
    fn ipv6_addresses_and_ports_are_quoted_in_forwarded() {
        let lines = forwarded("[2001:db8::1]", "10.0.0.0/8", &[("host", "a.test:80")]);
        assert!(
            lines.contains(&r#"forwarded: for="[2001:db8::1]";host="a.test:80";proto=http"#.to_owned()),
            "{lines:?}"
        );
        let lines = forwarded("[::ffff:203.0.113.9]", "10.0.0.0/8", &[("host", "a.test")]);
        assert!(lines.contains(&"x-real-ip: 203.0.113.9".to_owned()), "{lines:?}");
    }

    #[test]
    fn headers_of_the_connection_are_not_forwarded() {
        let sent = [
            ("host", "a"),
            ("connection", "close, X-Hop, host, content-length"),
            ("connection", "x-other"),
            ("x-hop", "1"),
            ("x-other", "1"),
            ("content-length", "0"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "Basic eA=="),
            ("te", "trailers, deflate"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("expect", "100-continue"),
            ("trailer", "x-sum"),
            ("cookie", "a=1"),
            ("cookie", "b=2"),
        ];
        let lines = forwarded("203.0.113.9", "10.0.0.0/8", &sent);
        let others: Vec<&str> = lines.iter().map(String::as_str).filter(|line| !line.contains("forwarded")).collect();
        let expected = [
            "connection: te",
            "content-length: 0",
            "cookie: a=1; b=2",
            "host: a",
            "te: trailers",
            "trailer: x-sum",
            "x-real-ip: 203.0.113.9",
        ];
        assert_eq!(others, expected);
    }

    #[test]
    fn an_upgrade_is_forwarded_unless_its_requests_would_not_be_decided() {
        for (version, lines, expected) in [
            (Version::HTTP_11, &[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")][..], true),
            (Version::HTTP_11, &[("connection", "upgrade"), ("upgrade", "h2c")], false),
            (Version::HTTP_11, &[("connection", "upgrade"), ("upgrade", "websocket, H2C")], false),
            (Version::HTTP_11, &[("connection", "upgrade"), ("upgrade", "a"), ("upgrade", "b")], false),
            (Version::HTTP_11, &[("upgrade", "websocket")], false),
            (Version::HTTP_11, &[("connection", "upgrade")], false),
            (Version::HTTP_10, &[("connection", "upgrade"), ("upgrade", "websocket")], false),
            (Version::HTTP_2, &[("connection", "upgrade"), ("upgrade", "websocket")], false),
        ] {
            assert_eq!(upgrade_of(version, &headers(lines)).is_some(), expected, "{version:?} {lines:?}");
        }
    }

    #[test]
    fn the_limits_of_an_upstream_are_replaced_only_by_those_of_a_rule() {
        let sent = [("ratelimit", "a"), ("x-rate-limit-limit", "1"), ("x-ratelimit-reset", "2"), ("x-rateless", "3")];
        let mut kept = headers(&sent);
        to_client(&mut kept, false);
        assert_eq!(kept.len(), 4);
        to_client(&mut kept, true);
        assert_eq!(shown(&kept), ["x-rateless: 3"]);
    }

    #[test]
    fn responses_with_two_framings_are_contradictory() {
        for (lines, expected) in [
            (&[][..], false),
            (&[("content-length", "5")], false),
            (&[("content-length", "5"), ("content-length", "5")], false),
            (&[("transfer-encoding", "Chunked")], false),
            (&[("content-length", "5"), ("content-length", "6")], true),
            (&[("content-length", "5"), ("transfer-encoding", "chunked")], true),
            (&[("content-length", "+5")], true),
            (&[("content-length", "")], true),
            (&[("transfer-encoding", "gzip, chunked")], true),
            (&[("transfer-encoding", "identity")], true),
            (&[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")], true),
        ] {
            assert_eq!(is_contradictory(&headers(lines)), expected, "{lines:?}");
        }
    }

    #[test]
    fn trailers_of_a_client_cannot_report_its_address() {
        let trailers = headers(&[
            ("x-sum", "1"),
            ("x-forwarded-for", "6.6.6.6"),
            ("x_real_ip", "6.6.6.6"),
            ("cf-connecting-ip", "6.6.6.6"),
            ("te", "x"),
        ]);
        let forwarding_header = HeaderName::from_static("cf-connecting-ip");
        assert_eq!(shown(&request_trailers(trailers, &forwarding_header, false)), ["x-sum: 1"]);
    }
}
