use http::HeaderValue;
use proptest::prelude::*;

use super::*;

fn proxies(networks: &str, header: &str) -> TrustedProxies {
    TrustedProxies::new(networks.parse().unwrap(), header.parse().unwrap())
}

fn client(proxies: &TrustedProxies, peer: &str, lines: &[&[u8]]) -> String {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append(proxies.header().name(), HeaderValue::from_bytes(line).unwrap());
    }
    proxies.client_address(peer.parse().unwrap(), &headers).to_string()
}

#[test]
fn first_untrusted_entry_from_the_right_is_the_client() {
    let proxies = proxies("10.0.0.0/8 2001:db8:ffff::/48", "X-Forwarded-For");
    for (peer, lines, expected) in [
        // The peer is not trusted: no header is read.
        ("203.0.113.9", &[&b"6.6.6.6"[..]][..], "203.0.113.9"),
        ("::ffff:203.0.113.9", &[b"6.6.6.6"], "203.0.113.9"),
        ("2001:db8::9", &[b"6.6.6.6"], "2001:db8::9"),
        // The peer is trusted.
        ("10.0.0.1", &[b"203.0.113.9"], "203.0.113.9"),
        ("::ffff:10.0.0.1", &[b"203.0.113.9"], "203.0.113.9"),
        ("2001:db8:ffff::1", &[b"2001:db8::9"], "2001:db8::9"),
        ("10.0.0.1", &[b"::ffff:203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", &[b"6.6.6.6, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", &[b"6.6.6.6,203.0.113.9:4711 , 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", &[b"6.6.6.6, 203.0.113.9, [2001:db8:ffff::7]:80, ::ffff:10.0.0.2"], "203.0.113.9"),
        // All lines count, in order.
        ("10.0.0.1", &[b"6.6.6.6", b"203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", &[b"203.0.113.9", b"10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", &[b"6.6.6.6, 203.0.113.9", b"10.0.0.3, 10.0.0.2"], "203.0.113.9"),
        // An entry that is not an address ends the walk at the previous hop.
        ("10.0.0.1", &[b"6.6.6.6, unknown"], "10.0.0.1"),
        ("10.0.0.1", &[b"6.6.6.6, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", &[b"6.6.6.6, unknown, 203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", &[b"6.6.6.6, "], "10.0.0.1"),
        ("10.0.0.1", &[b"6.6.6.6,, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", &[b"6.6.6.6", b""], "10.0.0.1"),
        ("10.0.0.1", &[b"6.6.6.6", b"\xff", b"10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", &[b"6.6.6.6 10.0.0.2"], "10.0.0.1"),
        ("10.0.0.1", &[b"6.6.6.6; 10.0.0.2"], "10.0.0.1"),
        ("10.0.0.1", &[b"for=203.0.113.9"], "10.0.0.1"),
        // All entries are trusted: the leftmost one is the client.
        ("10.0.0.1", &[b"10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", &[], "10.0.0.1"),
    ] {
        assert_eq!(client(&proxies, peer, lines), expected, "{peer} {lines:?}");
    }
}

#[test]
fn forwarded_header_is_walked_from_the_right() {
    let proxies = proxies("10.0.0.0/8", "Forwarded");
    for (lines, expected) in [
        (&[&b"for=203.0.113.9"[..]][..], "203.0.113.9"),
        (&[b"For=\"203.0.113.9:4711\";proto=https;by=10.0.0.1"], "203.0.113.9"),
        (&[b"for=\"[2001:db8::9]:4711\""], "2001:db8::9"),
        (&[b"for=\"[::ffff:203.0.113.9]\""], "203.0.113.9"),
        (&[b"for=6.6.6.6, for=203.0.113.9, for=10.0.0.2;host=\"a,b\""], "203.0.113.9"),
        (&[b"for=6.6.6.6", b"FOR=203.0.113.9;proto=http", b"for=10.0.0.2"], "203.0.113.9"),
        (&[b"for=\"", b"for=203.0.113.9"], "203.0.113.9"),
        (&[b"for=\", for=203.0.113.9"], "203.0.113.9"),
        (&[b"for=6.6.6.6;x=\", for=203.0.113.9, for=10.0.0.2"], "203.0.113.9"),
        (&[b"for=6.6.6.6, for=_hidden"], "10.0.0.1"),
        (&[b"for=6.6.6.6, for=unknown, for=10.0.0.2"], "10.0.0.2"),
        (&[b"for=6.6.6.6, proto=http, for=10.0.0.2"], "10.0.0.2"),
        (&[b"for=6.6.6.6, for=10.0.0.3;for=203.0.113.9, for=10.0.0.2"], "10.0.0.2"),
        (&[b"203.0.113.9"], "10.0.0.1"),
    ] {
        assert_eq!(client(&proxies, "10.0.0.1", lines), expected, "{lines:?}");
    }
}

#[test]
fn only_the_one_named_header_is_read() {
    let proxies = proxies("10.0.0.0/8", "CF-Connecting-IP");
    let mut headers = HeaderMap::new();
    for name in ["x-forwarded-for", "x-real-ip", "true-client-ip", "x-client-ip", "x-cluster-client-ip"] {
        headers.insert(name, HeaderValue::from_static("6.6.6.6"));
    }
    headers.insert("forwarded", HeaderValue::from_static("for=6.6.6.6"));
    let peer = "10.0.0.1".parse().unwrap();
    assert_eq!(proxies.client_address(peer, &headers), peer);
    headers.insert("cf-connecting-ip", HeaderValue::from_static("2001:db8::9"));
    assert_eq!(proxies.client_address(peer, &headers).to_string(), "2001:db8::9");
}

#[test]
fn long_header_is_read_from_the_right_up_to_the_bounds() {
    let proxies = proxies("10.0.0.0/8", "X-Forwarded-For");
    let chain = |hops: usize| format!("203.0.113.9{}", ",10.0.0.2".repeat(hops));
    assert_eq!(client(&proxies, "10.0.0.1", &[chain(ENTRIES_MAX - 1).as_bytes()]), "203.0.113.9");
    assert_eq!(client(&proxies, "10.0.0.1", &[chain(ENTRIES_MAX).as_bytes()]), "10.0.0.2");
    assert_eq!(client(&proxies, "10.0.0.1", &vec![&b"10.0.0.2"[..]; 10_000]), "10.0.0.2");

    // Entries far to the left are not read: they cost nothing and change nothing.
    let long = format!("{},203.0.113.9", "6.6.6.6,".repeat(1_000_000));
    assert_eq!(client(&proxies, "10.0.0.1", &[long.as_bytes()]), "203.0.113.9");
    // An entry that the byte limit cuts in two is invalid, even if its second half looks like an entry.
    let forwarded = TrustedProxies::new(proxies.networks().clone(), ForwardingHeader::forwarded());
    let padded =
        |first: &str| format!("{first}for=203.0.113.9;x={}", "x".repeat(HEADER_BYTES_MAX - "for=203.0.113.9;x=".len()));
    assert_eq!(client(&forwarded, "10.0.0.1", &[padded("").as_bytes()]), "203.0.113.9");
    assert_eq!(client(&forwarded, "10.0.0.1", &[padded("z").as_bytes()]), "10.0.0.1");
    assert_eq!(
        client(
            &forwarded,
            "10.0.0.1",
            &[b"for=203.0.113.9", padded("").replace("203.0.113.9", "10.0.0.22").as_bytes()]
        ),
        "10.0.0.22"
    );
}

#[test]
fn error_names_the_accepted_forwarding_headers() {
    for (text, expected) in [
        ("X-Forwarded-For, X-Real-IP", "exactly one header"),
        ("", "expected a header name"),
        ("x forwarded for", "expected a header name"),
        ("X-Forward-For", "did you mean X-Forwarded-For?"),
        ("x_forwarded_for", "did you mean X-Forwarded-For?"),
        ("Forwarded-For", "did you mean X-Forwarded-For?"),
        ("Forwared", "did you mean Forwarded?"),
        ("X-Forwarded-Host", "contains no address"),
    ] {
        let message = text.parse::<ForwardingHeader>().unwrap_err().to_string();
        assert!(message.contains(expected), "{text:?}: {message}");
    }
    for name in ["X-Real-IP", "True-Client-IP", "CF-Connecting-IP", "Fly-Client-IP", "X-Client-IP", "X-Azure-ClientIP"]
    {
        assert_eq!(name.parse::<ForwardingHeader>().unwrap().name().as_str(), name.to_lowercase());
    }
}

/// Generates header values, many of which contain addresses and separators.
fn header_text() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"10.0.0.2".to_vec()),
        Just(b"6.6.6.6".to_vec()),
        Just(b"for=6.6.6.6".to_vec()),
        Just(b"for=\"".to_vec()),
        Just(b"unknown".to_vec()),
        Just(b"[2001:db8::1]:80".to_vec()),
        prop::sample::select(b",;=\"\\ \t[]%:".to_vec()).prop_map(|byte| vec![byte]),
        prop::collection::vec(prop_oneof![Just(b'\t'), 0x20..=0x7e_u8, 0x80..=0xff_u8], 0..12),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

fn header_lines() -> impl Strategy<Value = Vec<(&'static str, Vec<u8>)>> {
    let name =
        prop::sample::select(vec!["x-forwarded-for", "forwarded", "cf-connecting-ip", "x-real-ip", "via", "host"]);
    prop::collection::vec((name, header_text()), 0..6)
}

fn header_map(lines: &[(&'static str, Vec<u8>)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from),
        any::<[u8; 4]>().prop_map(|v4| IpAddr::from(std::net::Ipv4Addr::from(v4).to_ipv6_mapped())),
    ]
}

fn any_header() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["X-Forwarded-For", "Forwarded", "CF-Connecting-IP"])
}

/// Returns the entry that a proxy appends for its peer `client`.
fn written_by_proxy(header: &str, client: IpAddr, style: u8) -> String {
    let node = match (client, style % 3) {
        (IpAddr::V6(v6), 1) => format!("[{v6}]"),
        (IpAddr::V6(v6), 2) => format!("[{v6}]:4711"),
        (IpAddr::V4(v4), 2) => format!("{v4}:4711"),
        _ => client.to_string(),
    };
    match (header, style / 3 % 2) {
        ("Forwarded", 0) => format!("for=\"{node}\""),
        ("Forwarded", _) => format!("proto=https;host=\"a\\\",b\";For=\"{node}\""),
        _ => node,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn untrusted_peer_is_the_client_whatever_headers_it_sends(
        peer in any_address(), header in any_header(), lines in header_lines(), trusts_some in any::<bool>(),
    ) {
        let proxies = proxies(if trusts_some { "10.0.0.0/8 2001:db8::/32" } else { "" }, header);
        prop_assume!(!proxies.trusts(peer));
        prop_assert_eq!(proxies.client_address(peer, &header_map(&lines)), peer.to_canonical());
    }

    #[test]
    fn text_left_of_a_trusted_proxys_entry_never_changes_the_client(
        client in any_address(), header in any_header(), style in 0..6_u8, hops in 0..4_usize, lines in header_lines(),
        prefix in header_text(), is_own_line in any::<bool>(), is_prefixed in any::<bool>(),
    ) {
        let proxies = proxies("10.0.0.0/8", header);
        prop_assume!(!proxies.trusts(client));
        let mut written = written_by_proxy(header, client, style);
        for _ in 0..hops {
            written = format!("{written}, {}", written_by_proxy(header, "10.0.0.2".parse().unwrap(), style));
        }

        // The client's headers come first. The proxies' entries follow, on a line of their own or appended.
        let mut headers = header_map(&lines);
        let own = if is_prefixed && !is_own_line { [&prefix[..], b", ", written.as_bytes()].concat() } else { written.into_bytes() };
        if is_prefixed && is_own_line {
            headers.append(proxies.header().name(), HeaderValue::from_bytes(&prefix).unwrap());
        }
        headers.append(proxies.header().name(), HeaderValue::from_bytes(&own).unwrap());
        prop_assert_eq!(proxies.client_address("10.0.0.1".parse().unwrap(), &headers), client.to_canonical());
    }

    #[test]
    fn address_left_of_an_invalid_entry_is_never_the_client(
        left in header_text(), invalid in "[a-z_]{1,8}", hops in 0..4_usize,
    ) {
        let proxies = proxies("10.0.0.0/8", "X-Forwarded-For");
        let line = [&left[..], b",", invalid.as_bytes(), &b",10.0.0.2".repeat(hops)].concat();
        let expected = if hops == 0 { "10.0.0.1" } else { "10.0.0.2" };
        prop_assert_eq!(client(&proxies, "10.0.0.1", &[&line]), expected);
    }
}
