//! Properties of identities and configurations that must hold for any input.
//!
//! Each function is a whole fuzz target of `fuzz/`: it takes the fuzzer's bytes and panics if a property does not hold.
//! The target for paths is in `rules/fuzz.rs`. Compiled only for fuzzing (`--cfg fuzzing`) and for tests, which replay
//! the corpus.

use std::net::{IpAddr, Ipv4Addr};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderValue};
use miette::NarratableReportHandler;
use sha2::Sha256;
use tidegate_core::Timestamp;

use crate::config::{Format, Loader, Severity};
use crate::identity::{ForwardingHeader, Networks, TokenVerifier, TrustedProxies};

const PROXY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 7));
/// The most lines of one header that are tried.
const LINES_MAX: usize = 200;

/// Checks that no content of a forwarding header changes a client's address: a peer that is not a trusted proxy is the
/// client itself, and behind a trusted proxy the client is the address that the proxy has appended.
///
/// # Panics
/// If a client gets another address.
pub fn forwarded(bytes: &[u8]) {
    let lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').take(LINES_MAX).collect();
    for (header, entry) in
        [(ForwardingHeader::x_forwarded_for(), "198.51.100.7"), (ForwardingHeader::forwarded(), "for=198.51.100.7")]
    {
        let said = |lines: &[Vec<u8>]| {
            let values = lines.iter().filter_map(|line| HeaderValue::from_bytes(line).ok());
            values.map(|value| (header.name().clone(), value)).collect::<HeaderMap>()
        };
        let ours: Networks = "10.0.0.0/8".parse().expect("a network");
        let proxies = TrustedProxies::new(ours, header.clone());
        let sent: Vec<Vec<u8>> = lines.iter().map(|line| line.to_vec()).collect();
        assert_eq!(proxies.client_address(CLIENT, &said(&sent)), CLIENT, "a stranger");
        proxies.client_address(PROXY, &said(&sent));

        let in_a_line_of_its_own = [&sent[..], &[entry.into()]].concat();
        assert_eq!(proxies.client_address(PROXY, &said(&in_a_line_of_its_own)), CLIENT, "by {in_a_line_of_its_own:?}");
        let Some((last, before)) = sent.split_last() else { continue };
        let behind_the_last = [before, &[[last.as_slice(), b", ", entry.as_bytes()].concat()]].concat();
        if HeaderValue::from_bytes(last).is_ok() {
            assert_eq!(proxies.client_address(PROXY, &said(&behind_the_last)), CLIENT, "by {behind_the_last:?}");
        }
    }
}

/// Checks that a token with a wrong signature is rejected, and that an accepted one has exactly the claims it carries.
///
/// # Panics
/// If a property does not hold.
pub fn token(bytes: &[u8]) {
    const SECRET: &[u8] = b"a secret of more than thirty-two bytes";
    let now = Timestamp::from_micros(1_770_120_000_000_000);
    let verifier = TokenVerifier::hs256(SECRET).expect("a long secret").with_plan_claim("plan");
    assert!(verifier.verify(bytes, now).is_err(), "nobody else knows the secret");

    let [head, claims] = [br#"{"alg":"HS256"}"#, bytes].map(|part| URL_SAFE_NO_PAD.encode(part));
    let signed = format!("{head}.{claims}");
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET).expect("HMAC takes a key of any length");
    mac.update(signed.as_bytes());
    let token = format!("{signed}.{}", URL_SAFE_NO_PAD.encode(mac.finalize().into_bytes()));
    if let Ok(user) = verifier.verify(token.as_bytes(), now) {
        let claims: serde_json::Value = serde_json::from_slice(bytes).expect("claims are JSON");
        assert_eq!(claims["sub"], *user.subject);
        assert!(!user.subject.is_empty() && claims["exp"].is_number(), "{claims}");
    }
}

/// Checks that a text either loads, or fails with a report that can be rendered, contains an error, and points only to
/// places inside the text.
///
/// # Panics
/// If a property does not hold.
pub fn configuration(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let loader = Loader::new().environment(|_| None).directory("no such directory");
    for format in [Format::Toml, Format::Yaml] {
        let findings = match loader.load_text("fuzzed", text, format) {
            Ok(loaded) => {
                assert!(loaded.findings.iter().all(|finding| finding.severity() != Severity::Error));
                loaded.findings
            }
            Err(report) => {
                assert!(report.errors() > 0, "{report}");
                report.findings().to_vec()
            }
        };
        for finding in findings {
            let mut shown = String::new();
            let rendered = NarratableReportHandler::new().render_report(&mut shown, &finding);
            assert!(rendered.is_ok(), "{finding:?}");
            if let Some((name, line, column)) = finding.place() {
                let lines = text.split('\n').count();
                assert!(
                    name != "fuzzed" || (1..=lines).contains(&line) && column >= 1,
                    "{line}:{column} of {lines} lines"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_testkit::fuzz::replay;

    #[test]
    fn corpus_of_forwarding_headers_holds() {
        replay("forwarded", super::forwarded);
    }

    #[test]
    fn corpus_of_tokens_holds() {
        replay("token", super::token);
    }

    #[test]
    fn corpus_of_configurations_holds() {
        replay("configuration", super::configuration);
    }
}
