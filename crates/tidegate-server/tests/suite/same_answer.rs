//! One request, one answer: every endpoint that decides by rules sends the client the same status, headers and body, for
//! every body format, plan, failure policy, ban and exemption.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tidegate::config::Loader;
use tidegate_testkit::conformance::{Random, traces_from_env};

use crate::deployment::{ClientRequest, Deployment, RULE_ENDPOINTS, STATUS_HEADER, StoreKind, load};

/// The body formats, as the value of `body`.
const FORMATS: [(&str, &str); 4] = [
    ("json", "\"json\""),
    ("problem", "\"problem\""),
    ("text", "\"text\""),
    ("template", r#"{ template = '{"code":"slow_down","plan":{plan},"wait":{retry_after},"text":"{message}"}' }"#),
];
const POLICIES: [&str; 3] = ["local", "allow", "deny"];
const API_KEY: &str = "x-api-key";

/// Returns a configuration with one rule per body format and failure policy, at `/FORMAT/POLICY`.
fn configuration() -> String {
    let mut text = r#"
expose_headers = true
path_bytes_max = 64
[exempt]
addresses = ["192.0.2.0/24"]
keys = ["planted-exempt"]
paths = ["/health"]
[[bans]]
by = "ip"
value = "198.51.100.7"
[[bans]]
by = "ip"
value = "198.51.100.8"
until = 2023-11-15T00:00:00Z
[[bans]]
by = "api_key"
value = "planted-banned"
[plans.anonymous]
limits = ["1/h"]
[plans.default]
limits = ["1/min"]
[plans.pro]
limits = ["1/s", "5/day sliding-log"]
upgrade_url = "https://example.com/upgrade"
[[keys]]
key = "planted-default"
[[keys]]
key = "planted-pro"
plan = "pro"
[[rules]]
name = "shield"
match = { path = "/shielded" }
store = "memory"
by = ["ip"]
limits = ["1/s"]
[[rules]]
name = "shadow"
match = { path = "/shadow" }
limits = ["1/s"]
mode = "shadow"
"#
    .to_owned();
    for (format, body) in FORMATS {
        for policy in POLICIES {
            text += &format!(
                "[[rules]]\nname = \"{format}-{policy}\"\nmatch = {{ path = \"/{format}/{policy}\" }}\nlimits = \"plan\"\n\
                 on_failure = \"{policy}\"\nbody = {body}\n"
            );
        }
    }
    text
}

/// Every combination of path, caller and accepted format, twice in a row, so that the second one is denied.
fn requests() -> Vec<ClientRequest> {
    let formats = FORMATS.iter().flat_map(|(format, _)| POLICIES.map(|policy| format!("/{format}/{policy}")));
    let others = ["/shielded", "/shadow", "/health", "/unmatched", &"/long".repeat(20)].map(str::to_owned);
    let callers: [fn(ClientRequest) -> ClientRequest; 8] = [
        |request| request,
        |request| request.header(API_KEY, "planted-default"),
        |request| request.header(API_KEY, "planted-pro"),
        |request| request.header(API_KEY, "planted-exempt"),
        |request| request.header(API_KEY, "planted-banned"),
        |request| request.peer("192.0.2.1"),
        |request| request.peer("198.51.100.7"),
        |request| request.peer("198.51.100.8"),
    ];
    let accepted: [fn(ClientRequest) -> ClientRequest; 3] = [
        |request| request,
        |request| request.header("accept", "application/problem+json"),
        |request| request.header("content-type", "application/grpc"),
    ];
    let mut requests = Vec::new();
    for path in formats.chain(others) {
        for caller in callers {
            for accepted in accepted {
                let request = accepted(caller(ClientRequest::get(path.clone())));
                requests.extend([request.clone(), request]);
            }
        }
    }
    requests
}

#[test]
fn every_endpoint_that_decides_by_rules_gives_the_same_answer() {
    let requests = requests();
    for kind in [StoreKind::Memory, StoreKind::Unreachable] {
        let deployments: Vec<Deployment> =
            RULE_ENDPOINTS.iter().map(|_| Deployment::start(load(&Loader::new(), &configuration()), kind)).collect();
        // Forward-auth needs a trusted proxy. None of the clients is one, so the other settings have the same effect.
        let trusting = format!("trusted_proxies = [\"127.0.0.1\"]\n{}", configuration());
        let behind_proxy = Deployment::start(load(&Loader::new(), &trusting), kind);
        let behind_gateway = Deployment::start(load(&Loader::new(), &trusting), kind);
        let mut seen = BTreeSet::new();
        for request in &requests {
            let answers: Vec<_> =
                RULE_ENDPOINTS.iter().zip(&deployments).map(|(endpoint, at)| (endpoint.ask)(at, request)).collect();
            for (endpoint, answer) in RULE_ENDPOINTS.iter().zip(&answers) {
                assert_eq!(answer, &answers[0], "{} and {}: {request:?}", RULE_ENDPOINTS[0].name, endpoint.name);
            }
            // A proxy would take the 200 of a gRPC refusal for an admission, so those differ.
            let proxied = behind_proxy.ask_forward_auth(request);
            if !request.headers.contains(&("content-type", "application/grpc")) {
                assert_eq!(proxied, answers[0], "{} and /v1/forward-auth: {request:?}", RULE_ENDPOINTS[0].name);
            }
            let forwarded = behind_gateway.ask_gateway(request);
            assert_eq!(forwarded, answers[0], "{} and the gateway: {request:?}", RULE_ENDPOINTS[0].name);
            let content_type = answers[0].headers.get("content-type").cloned().unwrap_or_default();
            seen.insert((answers[0].status, content_type));
        }
        // The combinations reach every kind of answer.
        let refusals: &[u16] = if kind == StoreKind::Memory { &[429, 403, 414] } else { &[429, 403, 414, 503] };
        let json = |status: &u16| (*status, "application/json".to_owned());
        assert!(refusals.iter().all(|status| seen.contains(&json(status))), "{seen:?}");
        for (status, content_type) in [
            (200, ""),
            (200, "application/grpc"),
            (429, "application/problem+json"),
            (429, "text/plain; charset=utf-8"),
        ] {
            assert!(seen.contains(&(status, content_type.to_owned())), "{status} {content_type}: {seen:?}");
        }
    }
}

/// Rules with several algorithms, costs, plans, and charges by outcome. A trace exhausts their quotas and waits until
/// they are restored.
const TRACE_RULES: &str = r#"
[plans.anonymous]
limits = ["3/s", "12/min sliding-log"]
[plans.default]
limits = ["5/s token-bucket burst=3", "40/min sliding-counter"]
[plans.pro]
limits = ["20/s fixed-window"]
[[keys]]
key = "planted-default"
[[keys]]
key = "planted-pro"
plan = "pro"
[[rules]]
name = "shield"
match = { path = "/shielded" }
store = "memory"
by = ["ip"]
limits = ["4/s"]
[[rules]]
name = "api"
match = { path = "/api/*" }
limits = "plan"
[[rules]]
name = "export"
match = { path = "/api/export" }
by = ["caller"]
cost = 3
limits = ["10/10s", "25/min token-bucket burst=7"]
[[rules]]
name = "login"
match = { methods = ["POST"], path = "/login" }
by = ["ip"]
limits = ["3/min"]
charge = "on_failure"
[[rules]]
name = "paid"
match = { path = "/paid" }
by = ["caller", "path"]
cost = 2
limits = ["5/10s sliding-counter"]
charge = "on_success"
[[rules]]
name = "trial"
match = { path = "/api/*" }
by = ["ip"]
limits = ["1/s"]
mode = "shadow"
"#;

fn random_request(random: &mut Random) -> ClientRequest {
    let mut one_of = |choices: &[&'static str]| choices[random.below(choices.len() as u64) as usize];
    let mut request =
        ClientRequest::get(one_of(&["/api/items", "/api/export", "/shielded", "/login", "/paid", "/other"]));
    request.method = one_of(&["GET", "POST"]);
    request = request.peer(one_of(&["203.0.113.9", "203.0.113.10", "198.51.100.7"]));
    match one_of(&["", "", "planted-default", "planted-pro", "unknown"]) {
        "" => {}
        key => request = request.header(API_KEY, key),
    }
    match one_of(&["", "", "404", "500"]) {
        "" => request,
        status => request.header(STATUS_HEADER, status),
    }
}

/// Each seed is a trace of 300 requests with random pauses. `make long` runs more seeds.
#[test]
fn random_trace_through_the_gateway_gets_the_answers_of_the_library() {
    let mut seen = BTreeMap::<u16, usize>::new();
    for seed in 0..traces_from_env(300) as u64 / 60 {
        let library = Deployment::start(load(&Loader::new(), TRACE_RULES), StoreKind::Memory);
        // The requests come from a proxy that is trusted, which names the clients.
        let trusting = format!("trusted_proxies = [\"127.0.0.1\"]\n{TRACE_RULES}");
        let gateway = Deployment::start(load(&Loader::new(), &trusting), StoreKind::Memory);
        let mut random = Random::new(seed);
        for number in 0..300 {
            let pause_ms = match random.below(10) {
                0..6 => 0,
                6..9 => random.below(400),
                _ => random.below(8_000),
            };
            for deployment in [&library, &gateway] {
                deployment.advance(Duration::from_millis(pause_ms));
            }
            let request = random_request(&mut random);
            let (expected, answer) = (library.ask_layer(&request), gateway.ask_gateway(&request));
            assert_eq!(answer, expected, "seed {seed}, request {number}: {request:?}");
            *seen.entry(answer.status).or_default() += 1;
        }
    }
    // The trace exhausts the quotas, and pauses restore them.
    assert!([200, 404, 429, 500].iter().all(|status| seen[status] > 100), "{seen:?}");
}
