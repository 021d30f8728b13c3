//! The order and case of headers does not change the address that is counted.
//!
//! A client behind a trusted proxy forges every header that could contain an address. The proxy appends the client's
//! real address. The requests list the headers in all orders that keep lines of the same name in sequence, in any case.
//! All of them come from one client with a quota of two. `crates/tidegate/tests/suite/layer/forwarding.rs` sends the
//! same requests to the layer.

use tidegate_testkit::conformance::Random;

use crate::campaign::{random, record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

const SCENARIO: &str = "headers";
const RULES: &str = r#"
trusted_proxies = ["10.0.0.0/8"]

[[rules]]
name = "all"
by = ["ip"]
limits = ["2/h"]
"#;

/// Returns all orders of these lines that keep lines of the same name in sequence.
fn orders(lines: &[(String, String)]) -> Vec<Vec<(String, String)>> {
    if lines.is_empty() {
        return vec![Vec::new()];
    }
    let is_first_of_its_name = |index: &usize| !lines[..*index].iter().any(|(name, _)| *name == lines[*index].0);
    let firsts = (0..lines.len()).filter(is_first_of_its_name);
    let with_first = |first: usize| {
        let mut rest = lines.to_vec();
        let line = rest.remove(first);
        orders(&rest).into_iter().map(move |order| [vec![line.clone()], order].concat())
    };
    firsts.flat_map(with_first).collect()
}

/// Returns the name with each letter in upper or lower case at random.
fn in_some_case(name: &str, random: &mut Random) -> String {
    name.chars().map(|letter| if random.below(2) == 0 { letter.to_ascii_uppercase() } else { letter }).collect()
}

#[test]
fn order_and_case_of_described_headers_do_not_change_the_address() {
    let mut random = random(SCENARIO);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, RULES).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    let mut client = HttpClient::open(&serving.http);
    let mut ask = |headers: serde_json::Value| {
        let described = serde_json::json!({ "method": "GET", "path": "/", "headers": headers, "peer": "10.0.0.1" });
        client.ask("POST", "/v1/check", &[], &serde_json::json!({ "request": described }).to_string())
    };

    let (mut admitted, mut denied, mut forged) = (0, 0, 0_u32);
    for _ in 0..scale(2, 50) {
        let orders = {
            forged += 1;
            let forgery = format!("6.6.{}.{}", forged / 256, forged % 256);
            let line = |name: &str, value: String| (name.to_owned(), value);
            orders(&[
                line("x-forwarded-for", forgery.clone()),
                line("x-forwarded-for", "198.51.100.7".to_owned()),
                line("x-real-ip", forgery.clone()),
                line("forwarded", format!("for={forgery}")),
                line("cf-connecting-ip", forgery.clone()),
                line("true-client-ip", forgery),
            ])
        };
        for order in orders {
            let pairs: Vec<_> =
                order.iter().map(|(name, value)| [in_some_case(name, &mut random), value.clone()]).collect();
            match ask(serde_json::json!(pairs)).status {
                200 => admitted += 1,
                429 => denied += 1,
                status => panic!("{status} for {pairs:?}"),
            }
            // An object has no order, so names that differ only in case are rejected.
            let object: serde_json::Map<_, _> =
                pairs.iter().map(|[name, value]| (name.clone(), value.clone().into())).collect();
            let names: std::collections::BTreeSet<String> =
                object.keys().map(|name| name.to_ascii_lowercase()).collect();
            if names.len() < object.len() {
                let answer = ask(object.into());
                assert!(answer.status == 400 && answer.body.contains("names are case-insensitive"), "{answer:?}");
            }
        }
    }
    record(SCENARIO, "permutations", admitted + denied);
    assert_eq!(admitted, 2, "{denied} were denied");
    // Both addresses in one line, as proxies write them.
    assert_eq!(ask(serde_json::json!({ "X-Forwarded-For": "6.6.6.6, 198.51.100.7" })).status, 429);
    assert_eq!(ask(serde_json::json!({ "X-Forwarded-For": "198.51.100.8" })).status, 200, "another client");
}
