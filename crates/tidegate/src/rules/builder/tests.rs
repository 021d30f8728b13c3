//! Rules in code are the rules of a file: the same compiled set, the same decisions, the same errors.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, Request};
use tidegate_core::{Limit, ManualClock, MemoryStore, Timestamp};

use super::*;
use crate::answer::{Body, BodyFormat, BodyTemplate};
use crate::config::tests::example::{EXAMPLE_VARIABLES, complete_example};
use crate::config::{Code, Finding, Format, Severity};
use crate::engine::{Engine, Outcome, RequestOptions};
use crate::failure::OnFailure;
use crate::identity::{ApiKeys, Subject};
use crate::limiter::Limiter;
use crate::rules::{Charge, Mode, RequestView, SetParts};

const NOW_US: u64 = 1_794_000_000_000_000;

fn loader() -> Loader {
    let variable = |name: &str| EXAMPLE_VARIABLES.contains(&name).then(|| "0123456789abcdef".repeat(2));
    Loader::new().environment(variable)
}

fn header(name: &'static str) -> Subject {
    Subject::Header(HeaderName::from_static(name))
}

/// The rules of `docs/configuration.toml`.
fn example() -> Rules {
    let spread = Limit::new(600, Duration::from_secs(3600)).unwrap();
    let spread = spread.with_algorithm(tidegate_core::Algorithm::LeakyBucket).unwrap().with_queue(50).unwrap();
    let login = BodyTemplate::new(r#"{"code":"too_many_logins","wait":{retry_after}}"#, "application/json").unwrap();
    Rules::new()
        .store("redis://127.0.0.1:6379/0")
        .prefix("tidegate")
        .instances(3)
        .deadline(Duration::from_millis(25))
        .on_failure(OnFailure::Local)
        .headers([Style::X, Style::Ietf])
        .body(BodyFormat::Json)
        .expose_headers(true)
        .shadow(false)
        .kill_switch(false)
        .path_bytes_max(8192)
        .method_override_headers(["x-http-method-override"])
        .trusted_proxies(["10.0.0.0/8", "fd00::/8"])
        .forwarding_header("x-forwarded-for")
        .ipv6_prefix(64)
        .api_key_header("x-api-key")
        .api_keys(ApiKeys::Known)
        .anonymize_with(SecretSource::env("TIDEGATE_SALT"), Rotate::Daily)
        .receipt_secret(SecretSource::env("TIDEGATE_RECEIPT_SECRET"))
        .jwt(
            JwtSettings::hs256(SecretSource::env("TIDEGATE_JWT_KEY"))
                .plan_claim("plan")
                .issuer("https://login.example.com")
                .audience("api"),
        )
        .exempt_addresses(["10.9.0.0/16"])
        .exempt_keys(["sha256:7d1a54127b222502f5b79b5fb0803061152a44f92b37e23c6527baf665d4da9a"])
        .exempt_paths(["/health", "/static/*"])
        // 2030-01-31T12:00:00Z
        .ban(Ban::network("203.0.113.0/24").until(UNIX_EPOCH + Duration::from_secs(1_896_091_200)).reason("scraping"))
        .plan(Plan::new("anonymous").limit("30/min"))
        .plan(Plan::new("default").limit("60/min").limit("10000/day").upgrade_url("https://example.com/plans"))
        .plan(Plan::new("pro").limit("600/min").limit("100000/day"))
        .plan(Plan::new("partner").limit("6000/min").limit("1000000/day"))
        .address_plan(["198.51.100.0/24"], "partner")
        .plan_header("x-plan")
        .plan_hash("tidegate:plans")
        .key_hash("tidegate:keys")
        .key(
            ListedKey::sha256("4e738ca5563c06cfd0018299933d58db1dd8bf97f6973dc99bf6cdc64b5550bd")
                .name("acme")
                .plan("pro")
                .limit("900/min")
                .limit("200000/day")
                .group("partners"),
        )
        .key(ListedKey::new("a-key-for-tests").plan("default"))
        .rule(Rule::new("shield").shield().by(Subject::Ip).limit("50/s").body(BodyFormat::Text))
        .rule(
            Rule::new("api")
                .host("api.example.com")
                .host("*.api.example.com")
                .path("/v1/*")
                .path("/v2/*")
                .by(Subject::Caller)
                .limits_from_plan()
                .body(BodyFormat::Problem),
        )
        .rule(
            Rule::new("login")
                .post("/account/{tenant}/login")
                .by(Subject::Ip)
                .by(Subject::Cookie("device".into()))
                .limit("5/min")
                .limit("50/day")
                .charge(Charge::OnFailure)
                .on_failure(OnFailure::Deny)
                .body(BodyFormat::Template(login)),
        )
        .rule(
            Rule::new("export")
                .path("/v1/export")
                .header("x-tenant")
                .header_equals("x-kind", "full")
                .cost(10)
                .headers([Style::X])
                .limit("100/min token-bucket burst=20")
                .named_limit("daily", "2000/day sliding-counter")
                .named_limit("spread", spread)
                .named_limit("hard", "40/10s token-bucket burst=40 count_denied=true"),
        )
        .rule(Rule::new("partner-reports").path("/v1/reports/*").group("partners").limit("20/min"))
        .rule(
            Rule::new("login-trial")
                .method(http::Method::POST)
                .path("/account/{tenant}/login")
                .by(Subject::Ip)
                .by(Subject::Cookie("device".into()))
                .limit("3/min")
                .mode(Mode::Shadow),
        )
}

/// Returns all compiled parts as text that can be compared, without secrets and closures.
fn describe(loaded: &Loaded) -> Vec<String> {
    // No `..`, so that a new field must be added here.
    let SetParts {
        rules,
        matcher,
        shields,
        identifier,
        plans,
        plan_of_limit_set,
        default,
        anonymous,
        keys,
        exempts_keys,
        address_plans,
        plan_header,
        exempt,
        bans,
        has_groups,
        needs_limit_set,
        plan_cost_max,
        path_bytes_max,
        is_off,
        exposes_headers,
        styles,
        on_failure,
        is_configured: _,
    } = loaded.rules.parts();
    let compiled = format!(
        "{rules:#?}\n{matcher:#?}\n{shields:#?}\n{identifier:#?}\n{plans:#?}\n{plan_of_limit_set:#?}\n{default:#?}\n\
         {anonymous:#?}\n{keys:#?}\n{exempts_keys}\n{address_plans:#?}\n{plan_header:#?}\n{exempt:#?}\n{bans:#?}\n\
         {has_groups}\n{needs_limit_set}\n{plan_cost_max:?}\n{path_bytes_max}\n{is_off}\n{exposes_headers}\n{styles:?}\n{on_failure:?}\n{:#?}\n{:?}\n{:?}",
        loaded.settings,
        loaded.settings.store.as_ref().map(|store| store.text()),
        loaded.settings.receipt_secret.as_ref().map(Secret::reveal),
    );
    // Maps print their entries in any order.
    let mut lines: Vec<String> = compiled.lines().map(str::to_owned).collect();
    lines.sort_unstable();
    lines
}

fn from_file() -> Loaded {
    loader()
        .load_text("configuration.toml", &complete_example(), Format::Toml)
        .unwrap_or_else(|report| panic!("{report:?}"))
}

fn from_code(rules: Rules) -> Loaded {
    rules.compile_with(&loader()).unwrap_or_else(|report| panic!("{report:?}"))
}

#[test]
fn the_example_in_code_compiles_to_the_same_as_the_file() {
    let (file, code) = (from_file(), from_code(example()));
    assert_eq!(describe(&code), describe(&file));
    let found = |loaded: &Loaded| loaded.findings.iter().map(Finding::code).collect::<Vec<_>>();
    assert_eq!(found(&code), found(&file));
}

#[test]
fn every_setting_of_the_builder_changes_the_compiled_set() {
    let same = describe(&from_code(example()));
    type Change = fn(Rules) -> Rules;
    let everything: Vec<(&str, Change)> = vec![
        ("store", |rules| rules.store("redis://127.0.0.1:6380/0")),
        ("prefix", |rules| rules.prefix("other")),
        ("instances", |rules| rules.instances(4)),
        ("deadline", |rules| rules.deadline(Duration::from_millis(26))),
        ("on_failure", |rules| rules.on_failure(OnFailure::Allow)),
        ("headers", |rules| rules.headers([Style::X])),
        ("body", |rules| rules.body(BodyFormat::Problem)),
        ("expose_headers", |rules| rules.expose_headers(false)),
        ("shadow", |rules| rules.shadow(true)),
        ("kill_switch", |rules| rules.kill_switch(true)),
        ("path_bytes_max", |rules| rules.path_bytes_max(100)),
        ("method_override_headers", |rules| rules.method_override_headers(["x-method"])),
        ("trusted_proxies", |rules| rules.trusted_proxies(["192.0.2.1"])),
        ("forwarding_header", |rules| rules.forwarding_header("forwarded")),
        ("ipv6_prefix", |rules| rules.ipv6_prefix(56)),
        ("api_key_header", |rules| rules.api_key_header("x-key")),
        ("api_keys", |rules| rules.api_keys(ApiKeys::Any)),
        ("receipt_secret", |rules| rules.receipt_secret(SecretSource::text("sixteen bytes or more"))),
        ("anonymize_with", |rules| rules.anonymize_with(SecretSource::env("TIDEGATE_SALT"), Rotate::Never)),
        ("jwt", |rules| rules.jwt(JwtSettings::hs256(SecretSource::env("TIDEGATE_JWT_KEY")))),
        ("exempt_addresses", |rules| rules.exempt_addresses(["192.0.2.1"])),
        ("exempt_keys", |rules| rules.exempt_keys(["another-key"])),
        ("exempt_paths", |rules| rules.exempt_paths(["/ready"])),
        ("ban a network", |rules| rules.ban(Ban::network("192.0.2.1"))),
        ("ban a key", |rules| rules.ban(Ban::api_key("another-key"))),
        ("ban a user", |rules| rules.ban(Ban::user("eve"))),
        ("plan", |rules| rules.plan(Plan::new("pro").limit("601/min"))),
        ("a plan's limit by name", |rules| rules.plan(Plan::new("pro").named_limit("m", "600/min"))),
        ("upgrade_url", |rules| rules.plan(Plan::new("default").limit("60/min").limit("10000/day"))),
        ("address_plan", |rules| rules.address_plan(["192.0.2.1"], "pro")),
        ("plan_header", |rules| rules.plan_header("x-other")),
        ("plan_hash", |rules| rules.plan_hash("other")),
        ("key_hash", |rules| rules.key_hash("other")),
        ("key", |rules| rules.key(ListedKey::new("another-key"))),
        ("a key's group", |rules| rules.key(ListedKey::new("another-key").group("beta"))),
        ("an exempt key", |rules| rules.key(ListedKey::new("another-key").exempt())),
        ("a key's own limit", |rules| rules.key(ListedKey::new("k").named_limit("mine", "1/s"))),
    ];
    for (setting, change) in everything {
        assert!(describe(&from_code(change(example()))) != same, "{setting} changed nothing");
    }
    let rule = || Rule::new("more").get("/more").limit("7/min");
    let of_rule = |rule: Rule| describe(&from_code(example().rule(rule)));
    let same = of_rule(rule());
    type RuleChange = fn(Rule) -> Rule;
    let everything: Vec<(&str, RuleChange)> = vec![
        ("get", |rule| rule.get("/other")),
        ("post", |rule| rule.post("/more")),
        ("put", |rule| rule.put("/more")),
        ("patch", |rule| rule.patch("/more")),
        ("delete", |rule| rule.delete("/more")),
        ("method", |rule| rule.method("PURGE")),
        ("path", |rule| rule.path("/other")),
        ("host", |rule| rule.host("example.com")),
        ("group", |rule| rule.group("partners")),
        ("header", |rule| rule.header("x-tenant")),
        ("header_equals", |rule| rule.header_equals("x-tenant", "a")),
        ("by", |rule| rule.by(Subject::Global)),
        ("by a header", |rule| rule.by(header("x-tenant"))),
        ("limit", |rule| rule.limit("8/day")),
        ("named_limit", |rule| rule.named_limit("mine", "8/day")),
        ("mode", |rule| rule.mode(Mode::Off)),
        ("on_failure", |rule| rule.on_failure(OnFailure::Deny)),
        ("charge", |rule| rule.charge(Charge::OnSuccess)),
        ("cost", |rule| rule.cost(2)),
        ("headers", |rule| rule.headers([Style::Draft6])),
        ("body", |rule| rule.body(BodyFormat::Text)),
        ("a template", |rule| rule.body(BodyFormat::Template(BodyTemplate::new("no", "text/plain").unwrap()))),
        ("a custom body", |rule| rule.body(BodyFormat::custom(|_| Body::new("text/plain", "no")))),
        ("shield", |rule| rule.shield()),
    ];
    for (setting, change) in everything {
        assert!(of_rule(change(rule())) != same, "{setting} changed nothing");
    }
    assert!(of_rule(Rule::new("more").get("/more").limits_from_plan()) != same, "limits_from_plan changed nothing");
}

/// Creates an engine with its own counters and a clock that stands still.
fn engine(loaded: &Loaded) -> Engine {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(NOW_US)));
    let memory = MemoryStore::builder().clock(clock.clone()).build();
    let limiter = Limiter::builder().memory(memory).clock(clock.clone()).build();
    Engine::on_clock(limiter, loaded.rules.clone(), Vec::new(), clock)
}

#[tokio::test]
async fn the_example_in_code_decides_like_the_file() {
    let (file, code) = (from_file(), from_code(example()));
    let (by_file, by_code) = (engine(&file), engine(&code));
    let requests = [
        ("GET", "http://api.example.com/v1/items", &[][..], "192.0.2.7"),
        ("GET", "http://api.example.com/v1/items", &[("x-api-key", "a-key-for-tests")], "192.0.2.7"),
        ("GET", "http://api.example.com/v1/items", &[("x-api-key", "s3cr3t")], "192.0.2.7"),
        ("GET", "http://eu.api.example.com/v2/items", &[("x-plan", "pro")], "10.0.0.1"),
        ("GET", "http://api.example.com/v1/items", &[], "198.51.100.9"),
        ("POST", "http://example.com/account/acme/login", &[("cookie", "device=1")], "192.0.2.7"),
        ("POST", "http://example.com/account/acme/login", &[], "192.0.2.8"),
        ("GET", "http://x.org/v1/export", &[("x-tenant", "a"), ("x-kind", "full")], "192.0.2.7"),
        ("GET", "http://x.org/v1/export", &[("x-tenant", "a"), ("x-kind", "half")], "192.0.2.7"),
        ("GET", "http://example.com/health", &[], "192.0.2.7"),
        ("GET", "http://example.com/", &[], "203.0.113.5"),
        ("GET", "http://example.com/", &[("x-forwarded-for", "203.0.113.5")], "10.0.0.1"),
        ("GET", "http://example.com/", &[], "10.9.0.1"),
    ];
    let mut refused = 0;
    for _ in 0..80 {
        for (method, uri, headers, peer) in requests {
            let mut request = Request::builder().method(method).uri(uri);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(()).unwrap();
            let (view, peer) = (RequestView::of(&request), peer.parse().unwrap());
            let by_file = outcome(by_file.check(&view, peer, RequestOptions::default()).await, request.headers());
            let by_code = outcome(by_code.check(&view, peer, RequestOptions::default()).await, request.headers());
            assert_eq!(by_code, by_file, "{method} {uri} {headers:?} {peer}");
            refused += usize::from(by_file.starts_with("refused"));

            let subjects = |loaded: &Loaded| {
                let rules = &loaded.rules;
                let identity = rules.identifier().identify(&view, peer, rules, Timestamp::from_micros(NOW_US));
                let matched = rules.matching(&view);
                matched.iter().map(|rule| identity.subject(rule.by()).to_string()).collect::<Vec<_>>()
            };
            assert_eq!(subjects(&code), subjects(&file), "{method} {uri} {headers:?} {peer}");
        }
    }
    assert!((100..1000).contains(&refused), "{refused} of 1040 were refused");
}

fn outcome(outcome: Outcome, request: &HeaderMap) -> String {
    match outcome {
        Outcome::Admitted(permit) => {
            let mut headers = HeaderMap::new();
            permit.write_headers(&mut headers);
            permit.keep();
            format!("passed {headers:?}")
        }
        Outcome::Refused(refusal) => format!("refused {:?}", refusal.response(request)),
    }
}

/// Returns the errors of invalid rules, each with its help.
fn messages(rules: Rules) -> Vec<String> {
    let report = rules.compile_with(&Loader::new().environment(|_| None)).unwrap_err();
    report
        .findings()
        .iter()
        .filter(|finding| finding.severity() == Severity::Error)
        .map(|finding| match finding.help_text() {
            Some(help) => format!("{}; {help}", finding.message()),
            None => finding.message().to_owned(),
        })
        .collect()
}

#[test]
fn all_errors_are_reported_at_once_and_name_their_rule() {
    let rules = Rules::new()
        .trusted_proxies(["10.0.0.0/8", "10.1.2.3/8"])
        .ban(Ban::network("nowhere"))
        .plan(Plan::new("default").limit("60/min").limit("1/parsec"))
        .key(ListedKey::new("k").name("acme").plan("defualt"))
        .rule(Rule::new("a").path("shorten").limit("10/min"))
        .rule(Rule::new("b").limit("0/min"))
        .rule(Rule::new("b").limit("1/min"))
        .rule(Rule::new("c"))
        .rule(Rule::new("d").by(Subject::Cookie("a=b".into())).limit("1/min"))
        .rule(Rule::new("e").shield().by(Subject::User).limit("1/min"))
        .rule(Rule::new("f").limit("5/min").cost(6))
        .rule(Rule::new("g").limits_from_plan().limit("5/min"));
    let messages = messages(rules);
    for (name, expected) in [
        ("trusted_proxies `10.1.2.3/8`: ", "10.0.0.0/8"),
        ("ban 1: ", "networks and addresses have the form"),
        ("plan `default`, limit `1/parsec`: ", "for example 10/min"),
        ("key `acme`, plan: ", "did you mean `default`?"),
        ("rule `a`, path `shorten`: ", "write `/shorten`"),
        ("rule `b`, limit `0/min`: ", "a quota from 1 to 10000000"),
        ("rule `b`: two rules are named `b`", "give each rule its own"),
        ("rule `c`, limits: ", "at least one limit"),
        ("rule `d`, by `cookie:a=b`: ", "expected a cookie name"),
        ("rule `e`, by: ", "a shield counts by address"),
        ("rule `f`, cost: ", "which allows at most 5"),
        ("rule `g`, limits_from_plan: ", "cannot be combined with other limits"),
    ] {
        let found = messages.iter().find(|message| message.starts_with(name));
        assert!(found.is_some_and(|message| message.contains(expected)), "{name}{expected}: {messages:#?}");
    }
    assert_eq!(messages.len(), 12, "{messages:#?}");
}

/// The remedies name methods of the builder, and no field of a configuration file.
#[test]
fn errors_speak_of_the_builder() {
    let rules = Rules::new()
        .key(ListedKey::new("").name("acme"))
        .key(ListedKey::new("k").plan("gold"))
        .path_bytes_max(0)
        .instances(0)
        .rule(Rule::new("a"))
        .rule(Rule::new("b").limit("5/min").cost(0))
        .rule(Rule::new("c").shield().by(Subject::User).limit("1/min"))
        .rule(Rule::new("d").shield().limit("1/min leaky-bucket"))
        .rule(Rule::new("e").limits_from_plan())
        .rule(Rule::new("f").limits_from_plan().limit("5/min"))
        .rule(Rule::new("g").limits_from_plan().shield());
    let mut found = messages(rules);
    found.extend(messages(Rules::new().plan(Plan::new("default")).rule(Rule::new("h").limits_from_plan())));
    found.sort();
    let mut expected = [
        "instances: the number of instances must be at least 1; set it to the number of instances that share the quotas",
        "key 2, plan: there is no plan `gold`; add it to the rules with `plan(Plan::new(\"gold\").limit(…))`",
        "key `acme`: the key is empty; pass the key to `ListedKey::new`, or its digest to `ListedKey::sha256`",
        "path_bytes_max: the maximum length of a path must be from 1 to 65534 bytes",
        "plan `default`, limits: a plan needs at least one limit; add one, for example with `limit(\"60/min\")`; to leave \
         callers unlimited, exempt their keys",
        "rule `a`, limits: a rule needs at least one limit; add one, for example with `limit(\"10/min\")`",
        "rule `b`, cost: a cost of 0 would count nothing; leave `cost` out for 1, or turn the rule off with \
         `mode(Mode::Off)`",
        "rule `c`, by: a shield counts by address, because it is decided before callers are identified; count by \
         `Subject::Ip`, or leave `shield` out",
        "rule `d`, limit `1/min leaky-bucket`: a shield never delays a request, so a leaky bucket has no effect; use \
         `token-bucket` for bursts, or leave `shield` out",
        "rule `e`, limits: this rule takes its limits from plans, but there are none; add one to the rules, for example \
         with `plan(Plan::new(\"default\").limit(\"60/min\"))`",
        "rule `f`, limits_from_plan: the limits of plans cannot be combined with other limits; call either \
         `limits_from_plan` or `limit`",
        "rule `g`, limits: a shield needs its own limits, not those of plans; add a limit with `limit` instead of \
         `limits_from_plan`, or leave `shield` out",
        "rule `g`, limits: this rule takes its limits from plans, but there are none; add one to the rules, for example \
         with `plan(Plan::new(\"default\").limit(\"60/min\"))`",
    ];
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn an_error_names_no_secret() {
    const PLANTED: &str = "planted secret";
    let rules = Rules::new()
        .store(format!("rediss://user:{PLANTED}@[host"))
        .exempt_keys([format!(" {PLANTED}")])
        .ban(Ban::api_key(format!(" {PLANTED}")))
        .key(ListedKey::new(format!(" {PLANTED}")))
        .anonymize_with(SecretSource::text("planted"), Rotate::Daily)
        .jwt(JwtSettings::hs256(SecretSource::text("planted")))
        .rule(Rule::new("a").header_equals("x-a", format!(" {PLANTED}")).limit("1/min"));
    let printed = format!("{rules:?}");
    let report = rules.build().unwrap_err();
    assert_eq!(report.errors(), 7, "one for each of them: {report:?}");
    for text in [printed, format!("{report:?}"), format!("{report}")] {
        assert!(!text.contains("planted"), "{text}");
    }
}

#[test]
fn a_warning_names_its_rule() {
    let rules = Rules::new().rule(Rule::new("tenant").by(header("x-tenant")).limit("1/min"));
    let findings = rules.compile().unwrap().findings;
    let finding = findings.iter().find(|finding| finding.code() == Code::SubjectChosenByClient).unwrap();
    assert!(finding.message().starts_with("rule `tenant`, by: "), "{finding:?}");
}

#[tokio::test]
async fn a_custom_body_is_that_of_its_rule_alone() {
    let page = BodyFormat::custom(|refusal| Body::new("text/html", format!("<p>{}</p>", refusal.message())));
    let loaded = Rules::new()
        .rule(Rule::new("page").path("/page").limit("1/min").body(page))
        .rule(Rule::new("api").path("/api").limit("1/min"))
        .compile()
        .unwrap();
    let engine = engine(&loaded);
    let mut types = Vec::new();
    for path in ["/page", "/page", "/api", "/api"] {
        let request = Request::get(path).body(()).unwrap();
        let peer = [192, 0, 2, 7].into();
        let outcome = engine.check(&RequestView::of(&request), peer, RequestOptions::default()).await;
        if let Outcome::Refused(refusal) = outcome {
            types.push(refusal.response(request.headers()).headers()["content-type"].clone());
        }
    }
    assert_eq!(types, ["text/html", "application/json"]);
}
