use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use http::HeaderValue;
use proptest::prelude::*;

use super::super::{ForwardingHeader, KeyTable, Networks, Rotate};
use super::*;

const TOKEN_SECRET: &[u8] = b"planted-token-secret-0123456789abcdef";
const NOW: Timestamp = Timestamp::from_micros(1_770_120_000_000_000);

fn token_for(subject: &str) -> String {
    let message = format!(
        "{}.{}",
        URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256"}"#),
        URL_SAFE_NO_PAD.encode(format!(r#"{{"sub":"{subject}","plan":"pro","exp":9999999999}}"#))
    );
    let mut mac = <Hmac<sha2::Sha256>>::new_from_slice(TOKEN_SECRET).unwrap();
    mac.update(message.as_bytes());
    format!("{message}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()))
}

fn keys() -> KeyTable {
    let mut keys = KeyTable::new();
    keys.insert(KeyDigest::of("known-key"), KnownKey::new().plan("pro"));
    keys
}

fn tokens() -> TokenVerifier {
    TokenVerifier::hs256(TOKEN_SECRET).unwrap().with_plan_claim("plan")
}

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_str(value).unwrap());
    }
    headers
}

const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9));

fn view(headers: &HeaderMap) -> RequestView<'_> {
    RequestView::new(&http::Method::POST, "/shorten", headers)
}

fn subject(identifier: &Identifier, by: &[&str], lines: &[(&'static str, &str)]) -> String {
    let by = Subjects::parse(by.iter().copied()).unwrap();
    identifier.identify(&view(&headers(lines)), PEER, &keys(), NOW).subject(&by).to_string()
}

fn digest_of(secret: &str) -> String {
    let digest = KeyDigest::of(secret);
    digest.as_bytes()[..16].iter().fold("#".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

#[test]
fn caller_is_the_known_key_else_the_user_else_the_address() {
    let identifier = Identifier::new().with_tokens(tokens());
    let bearer = format!("Bearer {}", token_for("42"));
    let forged = format!("Bearer {}x", token_for("42"));
    let key = format!("api_key:{}", digest_of("known-key"));
    for (lines, expected) in [
        (&[][..], "ip:203.0.113.9"),
        (&[("x-api-key", "known-key")], key.as_str()),
        (&[("authorization", "Bearer known-key")], &key),
        (&[("x-api-key", "known-key"), ("authorization", &bearer)], &key),
        (&[("authorization", &bearer)], "user:42"),
        (&[("x-api-key", "invented"), ("authorization", &bearer)], "user:42"),
        (&[("x-api-key", "invented")], "ip:203.0.113.9"),
        (&[("x-api-key", "invented"), ("authorization", "Bearer known-key")], "ip:203.0.113.9"),
        (&[("x-api-key", "known-key"), ("x-api-key", "invented")], "ip:203.0.113.9"),
        (&[("authorization", &forged)], "ip:203.0.113.9"),
        (&[("authorization", "Bearer invented")], "ip:203.0.113.9"),
    ] {
        assert_eq!(subject(&identifier, &["caller"], lines), expected, "{lines:?}");
    }
    // Without a verifier, tokens are ignored.
    assert_eq!(subject(&Identifier::new(), &["caller"], &[("authorization", &bearer)]), "ip:203.0.113.9");
}

#[test]
fn ten_thousand_invented_keys_are_one_caller() {
    let identifier = Identifier::new();
    let by = Subjects::default();
    let table = keys();
    for number in 0..10_000 {
        let headers = headers(&[("x-api-key", &format!("invented-{number}"))]);
        let view = view(&headers);
        let identity = identifier.identify(&view, PEER, &table, NOW);
        assert!(matches!(identity.caller(), Caller::Address(_)));
        assert_eq!(identity.subject(&by).as_bytes(), b"ip:203.0.113.9");
    }
}

#[test]
fn unknown_key_identifies_a_caller_only_with_api_keys_any() {
    let any = Identifier::new().with_api_keys(ApiKeys::Any);
    let invented = format!("api_key:{}", digest_of("invented"));
    assert_eq!(subject(&any, &["caller"], &[("x-api-key", "invented")]), invented);
    assert_eq!(subject(&any, &["caller"], &[("authorization", "Bearer invented")]), invented);
    // A token changes with every login. While tokens are verified, its user counts, and a forged token is ignored.
    let verified = any.with_tokens(tokens());
    let bearer = format!("Bearer {}", token_for("42"));
    assert_eq!(subject(&verified, &["caller"], &[("authorization", &bearer)]), "user:42");
    assert_eq!(subject(&verified, &["caller"], &[("authorization", "Bearer a.b.c")]), "ip:203.0.113.9");
    assert_eq!(subject(&verified, &["caller"], &[("authorization", "Bearer invented")]), invented);
}

#[test]
fn key_and_user_carry_their_plan() {
    let identifier = Identifier::new().with_tokens(tokens());
    let (table, headers) =
        (keys(), headers(&[("x-api-key", "known-key"), ("authorization", &format!("Bearer {}", token_for("42")))]));
    let view = view(&headers);
    let identity = identifier.identify(&view, PEER, &table, NOW);
    let Caller::ApiKey(digest, known) = identity.caller() else { panic!("{:?}", identity.caller()) };
    assert_eq!((digest, known.plan.as_deref()), (KeyDigest::of("known-key"), Some("pro")));
    assert_eq!(identity.user().unwrap().plan.as_deref(), Some("pro"));
}

#[test]
fn several_kinds_are_counted_together() {
    let lines = [("x-tenant", "acme"), ("cookie", "device=abc"), ("x-api-key", "known-key")];
    let identifier = Identifier::new();
    let device = digest_of("abc");
    for (by, expected) in [
        (&["ip", "header:X-Tenant"][..], "ip:203.0.113.9&header:x-tenant:acme".to_owned()),
        (&["header:x-tenant", "ip"], "header:x-tenant:acme&ip:203.0.113.9".to_owned()),
        (&["ip", "user", "cookie:device"], format!("ip:203.0.113.9&user:!203.0.113.9&cookie:device:{device}")),
        (&["path", "api_key"], format!("path:/shorten&api_key:{}", digest_of("known-key"))),
        (&["global"], "global".to_owned()),
    ] {
        assert_eq!(subject(&identifier, by, &lines), expected);
    }
}

#[test]
fn missing_part_is_replaced_by_the_marked_address() {
    let identifier = Identifier::new();
    for (by, expected) in [
        ("header:x-tenant", "header:x-tenant:!203.0.113.9"),
        ("cookie:device", "cookie:device:!203.0.113.9"),
        ("user", "user:!203.0.113.9"),
        ("api_key", "api_key:!203.0.113.9"),
    ] {
        assert_eq!(subject(&identifier, &[by], &[]), expected);
        assert_eq!(
            subject(&identifier, &[by], &[("x-tenant", ""), ("cookie", "device="), ("x-api-key", "invented")]),
            expected
        );
    }
    // A value that looks like the substitute is escaped, so it cannot be confused with it.
    assert_eq!(
        subject(&identifier, &["header:x-tenant"], &[("x-tenant", "!203.0.113.9")]),
        "header:x-tenant:%21203.0.113.9"
    );
    assert_eq!(
        subject(&identifier, &["header:x-tenant"], &[("x-tenant", "a"), ("x-tenant", "b")]),
        "header:x-tenant:!203.0.113.9"
    );
}

#[test]
fn trusted_header_is_read_only_from_trusted_peers() {
    let proxies = TrustedProxies::new("203.0.113.0/24".parse().unwrap(), ForwardingHeader::default());
    let (name, table) = (HeaderName::from_static("x-plan"), keys());
    let headers = headers(&[("x-plan", "enterprise")]);
    let trusting = Identifier::new().with_proxies(proxies);
    assert_eq!(trusting.identify(&view(&headers), PEER, &table, NOW).trusted_header(&name), Some(&b"enterprise"[..]));
    assert_eq!(Identifier::new().identify(&view(&headers), PEER, &table, NOW).trusted_header(&name), None);
}

#[test]
fn key_is_looked_up_at_most_once_and_only_if_needed() {
    let lookups = AtomicUsize::new(0);
    let source = |_: &ApiKey<'_>| {
        lookups.fetch_add(1, Ordering::Relaxed);
        Some(KnownKey::default())
    };
    let headers = headers(&[("x-api-key", "known-key")]);
    let identifier = Identifier::new();
    let view = view(&headers);
    let identity = identifier.identify(&view, PEER, &source, NOW);
    identity.subject(&Subjects::parse(["ip", "path"]).unwrap());
    assert_eq!(lookups.load(Ordering::Relaxed), 0);
    identity.subject(&Subjects::parse(["caller", "api_key"]).unwrap());
    identity.caller();
    assert_eq!(lookups.load(Ordering::Relaxed), 1);
}

#[test]
fn anonymized_subjects_contain_no_values_and_change_at_midnight() {
    let identifier = Identifier::new()
        .with_tokens(tokens())
        .with_anonymizer(Anonymizer::new(b"0123456789abcdef0123456789abcdef", Rotate::Daily).unwrap());
    let by = Subjects::parse(["ip", "user", "header:x-tenant", "path"]).unwrap();
    let headers = headers(&[("x-tenant", "acme"), ("authorization", &format!("Bearer {}", token_for("alice")))]);
    let table = keys();
    let at = |now: Timestamp| identifier.identify(&view(&headers), PEER, &table, now).subject(&by).to_string();
    let noon = at(NOW);
    assert!(noon.starts_with("ip:~1e03323d34f0e2b3ca107d409cad3466&user:~"), "{noon}");
    assert!(noon.ends_with("&path:/shorten"), "{noon}");
    assert!(!noon.contains("203.0.113") && !noon.contains("alice") && !noon.contains("acme"), "{noon}");
    let midnight = Timestamp::from_micros(20_488 * 86_400_000_000);
    assert_eq!(at(midnight.minus_micros(1)), noon);
    assert_ne!(at(midnight), noon);
}

#[test]
fn planted_secrets_appear_in_no_debug_output_and_no_subject() {
    let token = token_for("42");
    let planted =
        ["known-key", "planted-token-secret", "planted-salt", "planted-cookie", "planted-basic", token.as_str()];
    let identifier = Identifier::new()
        .with_tokens(tokens())
        .with_anonymizer(Anonymizer::new(b"planted-salt-secret", Rotate::Daily).unwrap());
    let table = keys();
    let headers = headers(&[
        ("x-api-key", "known-key"),
        ("authorization", &format!("Bearer {token}")),
        ("cookie", "session=planted-cookie"),
        ("proxy-authorization", "planted-basic"),
    ]);
    let key = identifier.read_api_key(&headers).unwrap();
    let salt = Anonymizer::new(b"planted-salt-secret", Rotate::Daily).unwrap().salt(NOW);
    let view = view(&headers);
    let identity = identifier.identify(&view, PEER, &table, NOW);
    let by = Subjects::parse([
        "caller",
        "user",
        "cookie:session",
        "header:authorization",
        "header:proxy-authorization",
        "header:cookie",
        "header:x-api-key",
    ])
    .unwrap();
    let subject = identity.subject(&by);
    let plain = Identifier::new().with_tokens(tokens());
    let plain_subject = plain.identify(&view, PEER, &table, NOW).subject(&by);
    let printed = [
        format!("{identifier:#?} {identifier:?}"),
        format!("{identity:#?} {:?} {:?} {:?}", identity.caller(), identity.user(), identity.token()),
        format!("{key:?} {:?} {table:?} {salt:?}", key.digest()),
        format!("{subject:?} {subject} {plain_subject:?} {plain_subject}"),
        format!("{:?}", TokenVerifier::hs256(b"planted-token-secret")),
        format!("{:?}", Anonymizer::new(b"planted-salt", Rotate::Never)),
        format!("{:?}", "known-key".parse::<KeyDigest>()),
    ];
    for text in printed {
        for secret in planted {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
}

#[test]
fn configured_key_header_is_written_as_a_digest() {
    let identifier = Identifier::new().with_api_key_header(HeaderName::from_static("x-token"));
    let by = ["header:x-token", "api_key"];
    let known = digest_of("known-key");
    assert_eq!(
        subject(&identifier, &by, &[("x-token", "known-key")]),
        format!("header:x-token:{known}&api_key:{known}")
    );
    assert_eq!(subject(&identifier, &["api_key"], &[("x-api-key", "known-key")]), "api_key:!203.0.113.9");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn client_without_known_key_or_token_is_counted_by_its_socket_address(
        peer in any::<[u8; 4]>(),
        lines in prop::collection::vec((
            prop::sample::select(vec![
                "x-forwarded-for", "forwarded", "x-real-ip", "x-api-key", "authorization", "cookie", "x-tenant", "via",
            ]),
            prop_oneof![
                Just("known-kez".to_owned()), Just("Bearer a.b.c".to_owned()), Just("6.6.6.6".to_owned()),
                Just("for=6.6.6.6".to_owned()), Just("Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.".to_owned()), "[ -~]{0,40}",
            ],
        ), 0..8),
    ) {
        let proxies = TrustedProxies::new("10.0.0.0/8".parse().unwrap(), ForwardingHeader::default());
        let identifier = Identifier::new().with_proxies(proxies).with_tokens(tokens());
        let peer = IpAddr::from(peer);
        prop_assume!(!identifier.proxies().trusts(peer));
        let mut headers = HeaderMap::new();
        for (name, value) in &lines {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let table = keys();
        let view = view(&headers);
        let identity = identifier.identify(&view, peer, &table, NOW);
        prop_assert_eq!(identity.address(), peer);
        prop_assert_eq!(identity.subject(&Subjects::default()).to_string(), format!("ip:{peer}"));
    }
}

#[test]
fn with_trusted_proxies_a_header_from_another_peer_is_ignored() {
    let proxies = TrustedProxies::new(Networks::parse(["10.0.0.0/8"]).unwrap(), ForwardingHeader::x_forwarded_for());
    let identifier = Identifier::new().with_proxies(proxies);
    let lines = headers(&[("x-tenant", "7"), ("x-forwarded-for", "198.51.100.1")]);
    let by = Subjects::parse(["header:x-tenant"]).unwrap();
    let subject = |identifier: &Identifier, peer: &str| {
        identifier.identify(&view(&lines), peer.parse().unwrap(), &keys(), NOW).subject(&by).to_string()
    };
    assert_eq!(subject(&identifier, "10.0.0.1"), "header:x-tenant:7");
    assert_eq!(subject(&identifier, "203.0.113.9"), "header:x-tenant:!203.0.113.9", "the header is treated as missing");
    // Without trusted proxies, headers are always read. The configuration check warns about such a rule.
    assert_eq!(subject(&Identifier::new(), "203.0.113.9"), "header:x-tenant:7");
}

#[test]
fn stored_subject_is_the_subject_that_an_anonymizer_writes() {
    let plain = Identifier::new().with_tokens(tokens());
    let anonymizer = Anonymizer::new(b"planted-secret-of-32-characters!", Rotate::Daily).unwrap();
    let anonymous = plain.clone().with_anonymizer(anonymizer);
    let token = format!("Bearer {}", token_for("a&b:c"));
    let lines = [("x-api-key", "known-key"), ("authorization", &*token), ("x-tenant", "t:1~!"), ("cookie", "device=d")];
    for by in [
        &["caller"][..],
        &["ip"],
        &["api_key"],
        &["user"],
        &["header:x-tenant", "ip"],
        &["cookie:device", "path"],
        &["header:absent", "cookie:absent", "user"],
        &["global"],
    ] {
        let stored = subject(&anonymous, by, &lines);
        assert_eq!(anonymous.stored_subject(&subject(&plain, by, &lines), NOW), stored, "{by:?}");
        assert_eq!(anonymous.stored_subject(&stored, NOW), stored, "{by:?}: a pseudonym stays");
        assert_eq!(plain.stored_subject(&stored, NOW), stored, "{by:?}: nothing is anonymized");
    }
}

#[test]
fn key_that_is_set_replaces_the_one_in_the_headers() {
    let (identifier, keys) = (Identifier::new(), keys());
    let headers = headers(&[("x-api-key", "known-key")]);
    let view = view(&headers);
    let identity = identifier.identify(&view, PEER, &keys, NOW);
    let digest = KeyDigest::of("another");
    let identity = identity.with_api_key(digest, KnownKey::new());
    assert_eq!(identity.api_key(), Some((digest, &KnownKey::new())));
    assert!(identity.sent_key_digests().any(|shown| shown == digest));
    assert_eq!(identity.subject(&Subjects::default()).to_string(), format!("api_key:{}", digest_of("another")));
}
