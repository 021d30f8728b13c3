use std::collections::BTreeSet;
use std::sync::Arc;

use http::Request;
use serde::Serialize;
use serde_json::{Value, json};
use tidegate::config::Loader;
use tidegate::engine::{Engine, RequestOptions};
use tidegate::rules::{KeyHash, Lookups};
use tidegate::{Limiter, Store};
use tokio::task::JoinSet;

use super::{ADMIN_DOCUMENT, Fields, Received, assert_documented, exchange, resolve, validate};
use crate::explain::{Explanation, VerdictExplanation};
use crate::listener::ServerState;
use crate::listeners::admin::api_keys::KeyReport;
use crate::listeners::admin::keys::{CounterReport, ResetReport, SkippedRule};
use crate::listeners::admin::{ADMIN, AdminListener, api_keys};
use crate::listeners::http::connection;
use crate::listeners::http::test_support::{IDLE, PEER, RULES, UnreachableStore, described};
use crate::readiness::{NodeBody, Readiness};
use crate::reload::Reloader;
use crate::run::ServerOptions;
use crate::secret::SecretForm;

const ENOUGH: usize = 1 << 20;
const TOKEN: &str = "a-token-for-tests-only";

/// The admin listener of an instance.
struct Instance {
    dir: tempfile::TempDir,
    state: ServerState,
    listener: Arc<AdminListener>,
}

impl Instance {
    /// Creates an instance with rules. Counters are in memory if there is no store.
    fn new(store: Option<Arc<dyn Store>>) -> Instance {
        let limiter = match &store {
            Some(store) => Limiter::builder().store(store.clone()).build(),
            None => Limiter::memory(),
        };
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, RULES).unwrap();
        let loader = Loader::new();
        let loaded = loader.load(&file).unwrap_or_else(|report| panic!("{report:?}"));
        let engine = Engine::new(limiter.clone(), loaded.rules.clone());
        let reloader = Reloader::rules(&file, loader, loaded, engine.clone());
        let readiness = Readiness::new(limiter, store, reloader.clone());
        let options = ServerOptions::new(engine).readiness(readiness).reloader(reloader);
        Instance::start(dir, options)
    }

    /// Creates an instance whose API keys are in the hash `keys` of a Redis server. Counters are in memory.
    fn with_key_hash(url: &str) -> Instance {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, RULES).unwrap();
        let loader = Loader::new();
        let loaded = loader.load(&file).unwrap_or_else(|report| panic!("{report:?}"));
        let store = tidegate_redis::RedisStore::builder(url).build().unwrap();
        let lookups = Lookups::new().key(KeyHash::new(store, "keys"));
        let engine = Engine::with_lookups(Limiter::memory(), loaded.rules.clone(), lookups);
        let reloader = Reloader::rules(&file, loader, loaded, engine.clone());
        Instance::start(dir, ServerOptions::new(engine).reloader(reloader))
    }

    /// Creates an instance whose store does not answer.
    fn without_store() -> Instance {
        Instance::new(Some(Arc::new(UnreachableStore)))
    }

    /// Creates an instance without a configuration.
    fn without_rules() -> Instance {
        Instance::start(tempfile::tempdir().unwrap(), ServerOptions::new(Limiter::memory()))
    }

    fn start(dir: tempfile::TempDir, options: ServerOptions) -> Instance {
        let state = options.secret(&ADMIN, SecretForm::Token.parse(TOKEN).unwrap()).into_shared();
        let listener = Arc::new(AdminListener::build(&state));
        Instance { dir, state, listener }
    }

    fn write(&self, rules: &str) {
        std::fs::write(self.dir.path().join("tidegate.toml"), rules).unwrap();
    }

    async fn send(&self, request: &str) -> Received {
        send(self.listener.clone(), ENOUGH, request).await
    }
}

async fn send(listener: Arc<AdminListener>, receive_bytes: usize, request: &str) -> Received {
    let serve = |server, context| async move {
        let handler = |request| listener.answer(request, PEER);
        drop(connection::serve(server, IDLE, context, None, handler).await);
    };
    exchange(receive_bytes, request, serve).await
}

/// Returns a request with the token.
fn ask(operation: &str, body: &str) -> String {
    request(operation, &format!("host: x\r\nauthorization: Bearer {TOKEN}\r\n"), body)
}

/// Returns the request with its length given twice. hyper reads such a request even before it is complete.
fn with_two_lengths(request: &str) -> String {
    let length = request.lines().find(|line| line.starts_with("content-length")).unwrap();
    request.replacen("host: x", length, 1)
}

/// Returns a request. `operation` is the method and the target.
fn request(operation: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("{operation} HTTP/1.1\r\n{headers}content-length: {length}\r\nconnection: close\r\n\r\n{body}")
}

/// Adds the fields of a body that a listener with counters in memory, without lookups, does not send. It must match its
/// schema.
fn add_body(schema: &str, body: &impl Serialize, fields: &mut Fields) {
    let (schema, body) = (&ADMIN_DOCUMENT["components"]["schemas"][schema], serde_json::to_value(body).unwrap());
    fields.extend(validate(&ADMIN_DOCUMENT, schema, &body).unwrap_or_else(|error| panic!("{error}")));
}

/// Provokes every response that a request to any path can get.
async fn common_responses(operation: &str, body: &str) -> Vec<Received> {
    let instance = Instance::new(None);
    let (_, target) = operation.split_once(' ').unwrap();
    let mut all = Vec::new();
    let head = request(operation, "host: x\r\n", "incomplete").replace("incomplete", "");
    for request in [
        head,
        ask(operation, body),
        ask(&format!("OPTIONS {target}"), body),
        request(operation, "host: x\r\n", body),
        request(operation, "host: x\r\norigin: https://attacker.example\r\n", body),
        request(operation, "host: attacker.example\r\n", body),
        request(operation, &format!("host: x\r\nlarge: {}\r\n", "x".repeat(100_000)), body),
    ] {
        all.push(instance.send(&request).await);
    }
    let unfinished = format!("{operation} HTTP/1.1\r\nhost: x\r\nlarge: {}", "x".repeat(20_000));
    all.push(send(instance.listener.clone(), 1, &unfinished).await);
    // At once, so that more attempts wait than the listener allows.
    let mut guesses = JoinSet::new();
    for _ in 0..40 {
        let guess = request(operation, "host: x\r\nauthorization: Bearer a-wrong-token\r\n", body);
        let listener = instance.listener.clone();
        guesses.spawn(async move { send(listener, ENOUGH, &guess).await });
    }
    all.extend(guesses.join_all().await);
    all
}

/// Asserts that the document and the listener agree on the responses of an operation, such as `GET /v1/keys?key=a`.
///
/// `own` are responses to requests of this operation, besides those that every path can give. Adds the fields of the
/// bodies to `fields`.
async fn assert_operation(operation: &str, body: &str, own: Vec<Received>, fields: &mut Fields) {
    let (method, target) = operation.split_once(' ').unwrap();
    let path = target.split('?').next().unwrap().replacen("/v1/keys/acme", "/v1/keys/{name}", 1);
    let mut received = common_responses(operation, body).await;
    received.extend(own);
    let described = &ADMIN_DOCUMENT["paths"][path][method.to_lowercase()];
    assert_documented(&ADMIN_DOCUMENT, &described["responses"], received, fields);
    assert_eq!(described["security"].is_array(), described["responses"]["401"].is_object(), "{operation}");
}

#[tokio::test(start_paused = true)]
async fn responses_without_a_token_match_the_document() {
    let mut fields = Fields::default();
    let instance = Instance::new(None);
    assert_operation("GET /healthz", "", Vec::new(), &mut fields).await;
    let open_metrics = "host: x\r\naccept: application/openmetrics-text\r\n";
    let open_metrics = instance.send(&request("GET /metrics", open_metrics, "")).await;
    assert_operation("GET /metrics", "", vec![open_metrics], &mut fields).await;

    instance.state.readiness.note_eviction(Some("allkeys-lru"), Some(1));
    instance.write("[[rules]]\nname = 1\n");
    assert_eq!(instance.send(&ask("POST /v1/reload", "")).await.status, "422");
    let degraded = instance.send(&ask("GET /readyz", "")).await;
    assert!(degraded.body.contains("failed_at") && degraded.body.contains("allkeys-lru"), "{degraded:?}");
    let unready = Instance::without_store().send(&ask("GET /readyz", "")).await;
    assert_eq!(unready.status, "503", "{unready:?}");
    assert_operation("GET /readyz", "", vec![degraded, unready], &mut fields).await;
    let mut of_cluster = instance.state.readiness.body();
    of_cluster.store.nodes.push(NodeBody { address: "a:1".to_owned(), reachable: true, breaker: "closed" });
    add_body("Readiness", &of_cluster, &mut fields);
    fields.assert_complete(&ADMIN_DOCUMENT);
}

#[tokio::test(start_paused = true)]
async fn responses_about_rules_match_the_document() {
    let mut fields = Fields::default();
    let instance = Instance::new(None);
    let request = Request::builder().uri("/json").body(()).unwrap();
    assert!(instance.state.decider.rules().is_some());
    for _ in 0..2 {
        drop(instance.state.decider.check_request(&request, PEER, RequestOptions::default()).await);
    }
    let rules = instance.send(&ask("GET /v1/rules", "")).await;
    assert!(rules.body.contains("times"), "{rules:?}");
    let none = Instance::without_rules().send(&ask("GET /v1/rules", "")).await;
    assert_operation("GET /v1/rules", "", vec![rules, none], &mut fields).await;
    fields.assert_complete(&ADMIN_DOCUMENT);
}

#[tokio::test(start_paused = true)]
async fn responses_about_counters_match_the_document() {
    let mut fields = Fields::default();
    for method in ["GET", "DELETE"] {
        let (instance, explicit) = (Instance::new(None), format!("{method} /v1/keys?key=a&limit=1/min"));
        let mut own = Vec::new();
        for (query, status) in [
            ("?key=203.0.113.9&rule=json", "200"),
            ("?key=198.51.100.7&rule=json", "200"),
            ("?key=planted-pro&rule=plan", "200"),
            ("?key=203.0.113.9&rule=shield", "200"),
            ("", if method == "GET" { "409" } else { "400" }),
            ("?limit=1/s", "400"),
            ("?key=a&rule=unknown", "400"),
        ] {
            let response = instance.send(&ask(&format!("{method} /v1/keys{query}"), "")).await;
            assert_eq!(response.status, status, "{query}: {response:?}");
            own.push(response);
        }
        own.push(Instance::without_store().send(&ask(&explicit, "")).await);
        assert_operation(&explicit, "", own, &mut fields).await;
    }
    let skipped = || vec![SkippedRule { rule: "tenant".to_owned(), because: "it counts by header".to_owned() }];
    let of_cluster = CounterReport {
        key: "ip:203.0.113.9".to_owned(),
        plan: None,
        banned: None,
        node: Some("a:1".to_owned()),
        slot: Some(1),
        counters: Vec::new(),
        skipped: skipped(),
    };
    add_body("CounterReport", &of_cluster, &mut fields);
    let reset = ResetReport { key: "ip:203.0.113.9".to_owned(), reset: true, counters: 1, skipped: skipped() };
    add_body("ResetReport", &reset, &mut fields);
    fields.assert_complete(&ADMIN_DOCUMENT);
}

/// Sends real requests about keys in a real Redis, in real time, and then the requests to every path in virtual time.
#[test]
fn responses_about_api_keys_match_the_document() {
    let mut fields = Fields::default();
    let redis = tidegate_testkit::server::Server::redis();
    let field = "api_key:8f7b38aafc1e6e66b995f86495e2c8432612de068b89cb8c2ac78a9413b92c7c";
    redis.command(&["HSET", "keys", field, r#"{"name": "acme", "limits": ["9/h"]}"#]);
    // A port on which nothing listens, since its listener is dropped.
    let unreachable = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let real_time = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let paused = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    for (operation, body) in [
        ("GET /v1/keys/acme", ""),
        ("PATCH /v1/keys/acme", r#"{"plan": null, "limits": ["8/h"]}"#),
        ("PUT /v1/keys/acme/plan", r#"{"plan": "pro"}"#),
        ("PUT /v1/keys/acme/limits", r#"{"limits": ["8/h"]}"#),
        ("DELETE /v1/keys/acme/plan", ""),
        ("DELETE /v1/keys/acme/limits", ""),
        ("GET /v1/keys", ""),
    ] {
        let mut own = real_time.block_on(async {
            let instance = Instance::with_key_hash(&redis.url());
            let broken = Instance::with_key_hash(&format!("redis://127.0.0.1:{unreachable}"));
            let without = Instance::new(None);
            let mut own = Vec::new();
            for (instance, operation, body, status) in [
                (&instance, operation.to_owned(), body, "200"),
                (&instance, operation.replace("acme", "nobody"), body, "404"),
                (&instance, format!("{operation}?other=1"), body, "400"),
                (&instance, operation.to_owned(), "no JSON", "400"),
                (&without, operation.to_owned(), body, "409"),
                (&broken, operation.to_owned(), body, "503"),
            ] {
                let response = instance.send(&ask(&operation, body)).await;
                // Not every operation has a body or a name.
                let is_other =
                    (status == "400" && body == "no JSON") || (status == "404" && operation.ends_with("keys"));
                assert!(response.status == status || is_other, "{operation} {body}: {response:?}");
                own.push(response);
            }
            own
        });
        paused().block_on(async {
            if !body.is_empty() {
                let instance = Instance::new(None);
                let incomplete = ask(operation, body).trim_end_matches('}').to_owned();
                let read_by_hyper = with_two_lengths(&incomplete);
                let too_long = ask(operation, &" ".repeat(20_000));
                for (request, status) in [(incomplete, "408"), (read_by_hyper, "408"), (too_long, "413")] {
                    let response = instance.send(&request).await;
                    assert_eq!(response.status, status, "{operation}: {response:?}");
                    own.push(response);
                }
            }
            assert_operation(operation, body, own, &mut fields).await;
        });
    }
    let ignored = KeyReport {
        name: None,
        plan: None,
        limits: None,
        groups: Vec::new(),
        exempt: false,
        problem: Some("there is no plan `gold`".to_owned()),
        field: "api_key:8f7b38aa*".to_owned(),
    };
    add_body("ApiKey", &ignored, &mut fields);
    fields.assert_complete(&ADMIN_DOCUMENT);
}

#[tokio::test(start_paused = true)]
async fn responses_about_bans_match_the_document() {
    let mut fields = Fields::default();
    let (instance, broken, full) = (Instance::new(None), Instance::without_store(), Instance::new(None));
    for number in 0..tidegate::BAN_LIST_MAX {
        assert!(full.state.options.engine.limiter().list_ban(&format!("user:{number}"), None).await.unwrap());
    }
    for method in ["PUT", "GET", "DELETE"] {
        let mut own = Vec::new();
        for query in
            ["client=203.0.113.0/24", "client=203.0.113.9", "client=198.51.100.7", "client=other", "key=other", ""]
        {
            own.push(instance.send(&ask(&format!("{method} /v1/bans?{query}"), "")).await);
        }
        let operation = format!("{method} /v1/bans?key=a");
        own.push(broken.send(&ask(&operation, "")).await);
        if method == "PUT" {
            own.push(full.send(&ask(&operation, "")).await);
            assert!(own.iter().any(|response| response.status == "409"), "{own:?}");
        }
        assert_operation(&operation, "", own, &mut fields).await;
        let for_an_hour = instance.send(&ask("PUT /v1/bans?key=other&for=1h", "")).await;
        assert!(for_an_hour.body.contains("3600000"), "{for_an_hour:?}");
    }
    fields.assert_complete(&ADMIN_DOCUMENT);
}

#[tokio::test(start_paused = true)]
async fn explanations_match_the_document() {
    let mut fields = Fields::default();
    let (instance, visitor) = (Instance::new(None), "203.0.113.9");
    let explain = |query: &str, body: &str| ask(&format!("POST /v1/explain{query}"), body);
    let body = described("/json", visitor, "{}");
    let mut own = Vec::new();
    for (status, request) in [
        ("200", explain("?reveal=true", &body)),
        ("200", explain("", &described("/health", visitor, "{}"))),
        ("200", explain("", &described("/json", "198.51.100.7", "{}"))),
        ("200", explain("", &described("/plan", visitor, r#"{"x-api-key":"planted-pro"}"#))),
        ("200", explain("", &described("/shield", visitor, "{}"))),
        ("400", explain("?reveal=maybe", &body)),
        ("400", explain("", "{}")),
        ("408", explain("", &body).trim_end_matches('}').to_owned()),
        ("408", with_two_lengths(&explain("", &body)).trim_end_matches('}').to_owned()),
        ("413", explain("", &" ".repeat(300_000))),
    ] {
        let response = instance.send(&request).await;
        assert_eq!(response.status, status, "{request:.200}: {response:?}");
        own.push(response);
    }
    own.push(Instance::without_store().send(&explain("", &body)).await);
    own.push(Instance::without_rules().send(&explain("", &body)).await);
    assert_operation("POST /v1/explain", &body, own, &mut fields).await;
    let with_key = Explanation {
        method: "GET".to_owned(),
        path: "/".to_owned(),
        caller: "api_key",
        key_name: Some("acme".to_owned()),
        groups: Vec::new(),
        key_lookup: Some("found in the Redis hash keys".to_owned()),
        key_problem: Some("there is no plan `gold`".to_owned()),
        token_refused: Some("it has expired".to_owned()),
        kill_switch: false,
        banned: None,
        exempt: None,
        plan: None,
        counters_unknown: None,
        verdict: VerdictExplanation { allowed: Some(true), because: "no rule applies".to_owned() },
        rules: Vec::new(),
    };
    add_body("Explanation", &with_key, &mut fields);
    fields.assert_complete(&ADMIN_DOCUMENT);
}

#[tokio::test(start_paused = true)]
async fn responses_to_reloads_match_the_document() {
    let mut fields = Fields::default();
    let (instance, reload) = (Instance::new(None), ask("POST /v1/reload", ""));
    let mut own = Vec::new();
    let fewer =
        RULES.replace("name = \"local\"", "name = \"renamed\"").replace("limits = [\"8/h\"", "limits = [\"9/h\"");
    for (rules, status) in [(&*fewer, "200"), ("[[rules]]\nname = 1\n", "422")] {
        instance.write(rules);
        let response = instance.send(&reload).await;
        assert_eq!(response.status, status, "{response:?}");
        own.push(response);
    }
    let removed: Value = serde_json::from_str(&own[0].body).unwrap();
    assert!(removed["removed"].to_string().contains("local"), "{removed}");
    own.push(Instance::without_rules().send(&reload).await);
    assert_operation("POST /v1/reload", "", own, &mut fields).await;
    fields.assert_complete(&ADMIN_DOCUMENT);
}

/// The document lists exactly the paths and the methods that the listener accepts. HEAD is accepted where GET is.
#[tokio::test(start_paused = true)]
async fn the_listener_accepts_the_documented_methods_and_no_others() {
    let instance = Instance::new(None);
    let paths = ADMIN_DOCUMENT["paths"].as_object().unwrap();
    for (path, operations) in paths {
        let mut documented: BTreeSet<String> =
            operations.as_object().unwrap().keys().map(|name| name.to_uppercase()).collect();
        if documented.contains("GET") {
            documented.insert("HEAD".to_owned());
        }
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            let response = instance.send(&ask(&format!("{method} {path}"), "")).await;
            assert_eq!(response.status != "405", documented.contains(method), "{method} {path}");
            if let Some((_, allow)) = response.headers.iter().find(|(name, _)| name == "allow") {
                assert_eq!(allow.split(", ").map(str::to_owned).collect::<BTreeSet<_>>(), documented, "{path}");
            }
        }
    }
    let unknown = instance.send(&ask("GET /v1/other", "")).await;
    assert_eq!(unknown.status, "404");
    assert!(paths.keys().all(|path| unknown.body.contains(path)), "{unknown:?}");
}

/// The listener knows every documented parameter, requires those that the document requires, and accepts no others.
#[tokio::test(start_paused = true)]
async fn the_listener_accepts_the_documented_parameters_and_no_others() {
    let instance = Instance::new(None);
    let paths = ADMIN_DOCUMENT["paths"].as_object().unwrap();
    let operations = paths.iter().flat_map(|(path, operations)| {
        operations.as_object().unwrap().iter().map(move |(method, operation)| (method.to_uppercase(), path, operation))
    });
    let mut tested = 0;
    for (method, path, operation) in operations {
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        let parameters: Vec<&Value> = parameters
            .map(|parameter| resolve(&ADMIN_DOCUMENT, parameter))
            .filter(|parameter| parameter["in"] == "query")
            .collect();
        if parameters.is_empty() {
            continue;
        }
        let query = |parameters: &[&Value]| {
            let pair = |parameter: &&Value| {
                let value = parameter["example"].as_str().unwrap().replace(' ', "+");
                format!("{}={value}", parameter["name"].as_str().unwrap())
            };
            parameters.iter().map(pair).collect::<Vec<_>>().join("&")
        };
        let send = async |query: String| {
            let request = ask(&format!("{method} {path}?{query}"), &described("/json", "203.0.113.9", "{}"));
            instance.send(&request).await
        };
        let all = parameters.clone();
        let known = send(query(&all)).await;
        assert!(!known.body.contains("unknown parameter"), "{method} {path}: {known:?}");
        let unknown = send(query(&all) + "&other=1").await;
        assert!(unknown.status == "400" && unknown.body.contains("unknown parameter"), "{method} {path}: {unknown:?}");
        for missing in parameters.iter().copied().filter(|parameter| parameter["required"] == true) {
            let others: Vec<&Value> = all.iter().copied().filter(|parameter| *parameter != missing).collect();
            assert_eq!(send(query(&others)).await.status, "400", "{method} {path} without {missing}");
        }
        tested += 1;
    }
    assert_eq!(tested, 6);
}

/// A body of a change is accepted exactly if it is valid, apart from the contents of limits.
#[test]
fn changes_of_keys_are_accepted_exactly_if_they_are_valid() {
    let mut fields = Fields::default();
    let operations = [("patch", None), ("put", Some("plan")), ("put", Some("limits")), ("put", Some("groups"))];
    for (method, part) in operations {
        let path = part.map_or("/v1/keys/{name}".to_owned(), |part| format!("/v1/keys/{{name}}/{part}"));
        let content = &ADMIN_DOCUMENT["paths"][path][method]["requestBody"]["content"]["application/json"];
        let empty = if part.is_none() { json!({}) } else { json!({ "other": 1 }) };
        for body in [
            content["example"].clone(),
            empty,
            json!({ "plan": "pro" }),
            json!({ "plan": 5 }),
            json!({ "limits": ["5000/h"] }),
            json!({ "limits": "5000/h" }),
            json!({ "groups": ["partners"] }),
            json!({ "groups": "partners" }),
            json!({ "groups": [5] }),
            json!({ "plan": null, "limits": null, "groups": null }),
            json!({ "plan": "pro", "limits": ["5000/h"] }),
            json!({ "plann": "pro" }),
            json!(["pro"]),
        ] {
            let validated = validate(&ADMIN_DOCUMENT, &content["schema"], &body);
            let parsed = api_keys::parse(body.to_string().as_bytes(), part);
            assert_eq!(validated.is_ok(), parsed.is_ok(), "{part:?} {body}: {validated:?}, {parsed:?}");
            fields.extend(validated.unwrap_or_default());
        }
        assert!(validate(&ADMIN_DOCUMENT, &content["schema"], &content["example"]).is_ok(), "{part:?}");
    }
    fields.assert_complete(&ADMIN_DOCUMENT);
}

/// Orchestrators and browsers have no token, and the document contains nothing about the instance except its version.
#[tokio::test(start_paused = true)]
async fn the_document_and_its_page_are_served_without_a_token() {
    let instance = Instance::new(None);
    let get = async |path: &str| instance.send(&request(&format!("GET {path}"), "host: x\r\n", "")).await;
    let served = get("/openapi.json").await;
    assert_eq!(served.status, "200");
    assert_eq!(serde_json::from_str::<Value>(&served.body).unwrap(), *ADMIN_DOCUMENT);
    let page = get("/docs").await;
    assert!(page.status == "200" && page.body.contains("/v1/reload"), "{page:?}");
    for path in ["/openapi.json", "/docs"] {
        assert_eq!(instance.send(&ask(&format!("POST {path}"), "")).await.status, "405");
        let foreign = request(&format!("GET {path}"), "host: attacker.example\r\n", "");
        assert_eq!(instance.send(&foreign).await.status, "421");
    }
}
