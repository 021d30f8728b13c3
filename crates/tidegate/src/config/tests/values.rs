//! The values of a file in the compiled rules.

use std::time::Duration;

use tidegate_config::ConfigTable;

use super::{load, load_yaml};
use crate::answer::{BodyFormat, Style};
use crate::rules::{Charge, CompiledRule, Mode};
use crate::{Cost, OnFailure};

fn only_rule(text: &str) -> CompiledRule {
    let loaded = load(text).unwrap_or_else(|report| panic!("{report:?}"));
    loaded.rules.rules()[0].clone()
}

fn limits(rule: &CompiledRule) -> Vec<String> {
    let limit_set = load("[plans]\n").unwrap().rules.default_limit_set(true);
    rule.policies(&limit_set).iter().map(|policy| format!("{}={}", policy.name(), policy.limit())).collect()
}

#[test]
fn an_empty_file_is_a_configuration_with_the_defaults() {
    for loaded in [load("").unwrap(), load_yaml("").unwrap(), load_yaml("# nothing\n").unwrap()] {
        assert_eq!(loaded.document.config, ConfigTable::default());
        let settings = loaded.settings;
        assert_eq!((settings.prefix.as_str(), settings.deadline), ("tidegate", Duration::from_millis(25)));
        assert_eq!((settings.on_failure, settings.instances), (OnFailure::Local, None));
        assert!(!settings.is_shared() && loaded.rules.rules().is_empty());
    }
}

#[test]
fn fields_of_a_rule_are_read_and_have_defaults() {
    let rule = only_rule("[[rules]]\nname = 'a'\nlimits = ['10/min']");
    assert_eq!((rule.mode(), rule.charge(), rule.cost()), (Mode::Enforce, Charge::Always, Cost::ONE));
    assert_eq!((rule.on_failure(), rule.is_shield(), rule.is_by_plan()), (OnFailure::Local, false, false));
    assert_eq!(rule.by().iter().map(ToString::to_string).collect::<Vec<_>>(), ["caller"]);

    let rule = only_rule(
        "on_failure = 'allow'\n[[rules]]\nname = 'a'\nby = ['ip', 'user']\nmode = 'shadow'\non_failure = 'deny'\n\
         charge = 'on_failure'\ncost = 3\nheaders = ['draft-6']\nbody = 'problem'\nlimits = '10/min'",
    );
    assert_eq!((rule.mode(), rule.charge(), rule.cost()), (Mode::Shadow, Charge::OnFailure, Cost::new(3)));
    assert_eq!(rule.on_failure(), OnFailure::Deny);
    let limit_set = load("").unwrap().rules.default_limit_set(true);
    let policy = &rule.policies(&limit_set)[0];
    assert!(policy.styles().contains(Style::Draft6) && !policy.styles().contains(Style::X));
    assert_eq!(policy.format().as_str(), "problem");
}

#[test]
fn limits_are_named_after_their_windows_with_different_names() {
    let rule = only_rule(
        "[[rules]]\nname = 'a'\nlimits = ['9/min', '5/s', '90/h', '900/day', '3/10s', '2/500ms', '8/min token-bucket', \
         { limit = '7/min fixed-window' }, { name = 'per-minute-2', quota = 6, window = '1min', algorithm = 'sliding-counter' }]",
    );
    assert_eq!(
        limits(&rule),
        [
            "per-minute=9/min",
            "per-second=5/s",
            "per-hour=90/h",
            "per-day=900/day",
            "per-10-seconds=3/10s",
            "per-500-ms=2/500ms",
            "per-minute-3=8/min token-bucket",
            "per-minute-4=7/min fixed-window",
            "per-minute-2=6/min sliding-counter",
        ]
    );
}

/// Returns the names of all limits of a file, as clients see them. Those of several plans are all included.
fn names(text: &str) -> Vec<String> {
    let loaded = load(text).unwrap_or_else(|report| panic!("{text}: {report:?}"));
    let names = loaded.rules.rules().iter().flat_map(|rule| rule.policies_of_all());
    names.map(|policy| policy.name().to_owned()).collect()
}

#[test]
fn equal_names_are_qualified_by_the_rule_where_one_request_can_match_both() {
    let two = |one: &str, other: &str| {
        format!(
            "[[rules]]\nname = 'api'\n{one}\nlimits = ['100/min', '1000/h']\n\
             [[rules]]\nname = 'search'\n{other}\nlimits = ['7/min', '5/s']\n"
        )
    };
    let plain = ["per-minute", "per-hour", "per-minute", "per-second"];
    let qualified = ["api.per-minute", "per-hour", "search.per-minute", "per-second"];
    for (one, other, expected) in [
        ("", "match.path = '/search'", qualified),
        ("match.path = '/a/{x}'", "match.path = ['/b', '/{y}/c']", qualified),
        ("match.path = '/a'", "match.path = '/search'", plain),
        ("match.methods = 'GET'", "match.methods = 'POST'", plain),
        ("match.methods = ['GET', 'PUT']", "match.methods = ['PUT', 'POST']", qualified),
        ("match.host = 'a.example'", "match.host = 'b.example'", plain),
        ("match.host = '*.example'", "match.host = ['x.test', 'b.example']", qualified),
        ("match.headers = { x = '1' }", "match.headers = { x = '2' }", plain),
        ("match.headers = { x = '1' }", "match.headers = { x = true, y = '2' }", qualified),
        // Clients see no limits of these.
        ("", "mode = 'shadow'", plain),
        ("mode = 'off'", "", plain),
        ("", "match.path = []", plain),
        // A client is refused by either of them.
        ("store = 'memory'", "", qualified),
    ] {
        assert_eq!(names(&two(one, other)), expected, "{one} / {other}");
    }
    let methods = two("match.methods = 'GET'", "match.methods = 'POST'");
    assert_eq!(names(&format!("method_override_headers = 'x-method'\n{methods}")), qualified);
    assert_eq!(names(&format!("shadow = true\n{}", two("", ""))), qualified, "while all rules are in shadow mode");
    let plans = "[plans.default]\nlimits = ['9/min']\n[plans.pro]\nlimits = ['90/min', '900/h']\n\
                 [[rules]]\nname = 'by-plan'\nlimits = 'plan'\n[[rules]]\nname = 'own'\nlimits = ['5/h']\n";
    assert_eq!(names(plans), ["per-minute", "per-minute", "by-plan.per-hour", "own.per-hour"]);
}

#[test]
fn a_qualified_name_is_not_part_of_the_counters_key() {
    let text = "[[rules]]\nname = 'a.b'\nlimits = ['1/s']\n[[rules]]\nname = 'a'\nlimits = ['1/s']\n";
    let loaded = load(text).unwrap();
    let policies: Vec<_> = loaded.rules.rules().iter().flat_map(|rule| rule.policies_of_all()).collect();
    let named: Vec<_> = policies.iter().map(|policy| (policy.name(), policy.rule(), policy.limit_name())).collect();
    assert_eq!(named, [("a.b.per-second", Some("a.b"), "per-second"), ("a.per-second", Some("a"), "per-second")]);
}

#[test]
fn a_limit_may_be_a_table() {
    let rule = only_rule(
        "[[rules]]\nname = 'a'\nlimits = [{ quota = 100, window = '1min', algorithm = 'token-bucket', burst = 20 }, \
         { name = 'queue', quota = 10, window = '2s', algorithm = 'leaky-bucket', queue = 5, count_denied = true }]",
    );
    assert_eq!(
        limits(&rule),
        ["per-minute=100/min token-bucket burst=20", "queue=10/2s leaky-bucket queue=5 count_denied=true"]
    );
}

#[test]
fn shadow_for_all_puts_every_enforced_rule_in_shadow_mode() {
    let text =
        "shadow = true\n[[rules]]\nname = 'a'\nlimits = ['1/s']\n[[rules]]\nname = 'b'\nmode = 'off'\nlimits = ['2/s']";
    let modes: Vec<Mode> = load(text).unwrap().rules.rules().iter().map(CompiledRule::mode).collect();
    assert_eq!(modes, [Mode::Shadow, Mode::Off]);
}

#[test]
fn a_rule_that_is_off_matches_nothing() {
    let loaded = load("[[rules]]\nname = 'a'\nmode = 'off'\nlimits = ['1/s']").unwrap();
    let request = http::Request::get("/").body(()).unwrap();
    assert!(loaded.rules.matching(&crate::rules::RequestView::of(&request)).is_empty());
    assert_eq!(loaded.rules.rules().len(), 1);
}

#[test]
fn a_method_override_header_meets_the_condition_on_methods() {
    let loaded = load(
        "method_override_headers = 'x-method'\n[[rules]]\nname = 'a'\nlimits = ['1/s']\n\
         match = { methods = ['DELETE'], path = '/a' }",
    )
    .unwrap();
    let request = http::Request::post("/b").header("x-method", "DELETE").body(()).unwrap();
    assert_eq!(loaded.unmet_conditions(0, &crate::rules::RequestView::of(&request)), ["the path does not match /a"]);
}

#[test]
fn a_shield_counts_by_address_and_answers_in_text() {
    let rule = only_rule("[[rules]]\nname = 'shield'\nstore = 'memory'\nlimits = ['50/s']");
    assert!(rule.is_shield());
    assert_eq!(rule.by().iter().map(ToString::to_string).collect::<Vec<_>>(), ["ip"]);
    let limit_set = load("").unwrap().rules.default_limit_set(true);
    assert_eq!(rule.policies(&limit_set)[0].format().as_str(), "text");
}

#[test]
fn charge_refunds_by_outcome() {
    for (charge, after_success, after_failure) in
        [(Charge::Always, false, false), (Charge::OnFailure, true, false), (Charge::OnSuccess, false, true)]
    {
        assert_eq!((charge.refunds(true), charge.refunds(false)), (after_success, after_failure), "{charge:?}");
        assert_eq!(charge.is_refundable(), after_success || after_failure);
    }
}

#[test]
fn yaml_and_toml_are_equivalent() {
    let toml = r#"
        store = "memory"
        deadline = "50ms"
        trusted_proxies = ["10.0.0.0/8", "::1"]
        shadow = false
        [plans.default]
        limits = ["60/min", { name = "daily", quota = 1000, window = "1day" }]
        [[rules]]
        name = "login"
        match = { methods = ["POST"], path = "/login", headers = { x-tenant = true } }
        by = ["ip", "cookie:device"]
        limits = "plan"
        charge = "on_failure"
    "#;
    let yaml = "
store: memory
deadline: 50ms
trusted_proxies: [10.0.0.0/8, '::1']
shadow: false
plans:
  default:
    limits:
      - 60/min
      - { name: daily, quota: 1000, window: 1day }
rules:
  - name: login
    match:
      methods: [POST]
      path: /login
      headers: { x-tenant: true }
    by: [ip, 'cookie:device']
    limits: plan
    charge: on_failure
";
    assert_eq!(load(toml).unwrap().document.config, load_yaml(yaml).unwrap().document.config);
}

#[test]
fn keys_and_secrets_are_read_from_files_and_variables() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    write("keys.yaml", "keys:\n  - { key: k1, plan: default, name: acme }\n  - { sha256: 'c0ffee' }\n");
    write("salt", "a secret of sixteen bytes or more\n");
    write(
        "tidegate.toml",
        "keys_file = 'keys.yaml'\nanonymize = { secret_file = 'salt' }\n[jwt]\nalgorithm = 'HS256'\nkey_env = 'JWT'\n\
         [plans]\ndefault.limits = '1/s'\nanonymous.limits = '1/s'\n[[rules]]\nname = 'a'\nlimits = 'plan'",
    );
    let loader = super::Loader::new().environment(|name| (name == "JWT").then(|| "j".repeat(32)));
    let report = loader.load(directory.path().join("tidegate.toml")).unwrap_err();
    let [finding] = report.findings() else { panic!("{report:?}") };
    assert_eq!(finding.code(), crate::config::Code::InvalidKey);
    let (file, line, column) = finding.place().unwrap();
    assert!(file.ends_with("keys.yaml") && (line, column) == (3, 15), "{finding:?}");

    write("keys.yaml", "keys:\n  - { key: k1, plan: default, name: acme }\n");
    let loaded = loader.load(directory.path().join("tidegate.toml")).unwrap();
    let entry = loaded.rules.key(&crate::identity::KeyDigest::of("k1")).unwrap();
    assert_eq!((entry.name.as_deref(), entry.plan.as_deref()), (Some("acme"), Some("default")));
}

#[test]
fn a_reload_keeps_the_pseudonyms() {
    let text = "anonymize = { rotate = 'never' }\n[[rules]]\nname = 'a'\nby = 'ip'\nlimits = ['1/s']";
    let subject = || {
        let loaded = load(text).unwrap();
        let headers = http::HeaderMap::new();
        let request = crate::rules::RequestView::new(&http::Method::GET, "/", &headers);
        let (peer, now) = ([203, 0, 113, 9].into(), crate::Timestamp::ZERO);
        let identity = loaded.rules.identifier().identify(&request, peer, &loaded.rules, now);
        identity.subject(loaded.rules.rules()[0].by())
    };
    assert_eq!(subject(), subject());
    assert!(subject().to_string().starts_with("ip:~"));
}

#[test]
fn the_value_of_a_header_condition_is_not_printed() {
    let text = "[[rules]]\nname = 'a'\nmatch.headers = { x-internal = 'planted', x-other = true }\nlimits = ['1/s']";
    let loaded = load(text).unwrap();
    for printed in
        [format!("{loaded:?}"), format!("{:#?}", loaded.document.config), format!("{:?}", loaded.rules.rules())]
    {
        assert!(!printed.contains("planted"), "{printed}");
    }
    let test = &loaded.document.config.rules[0].matches.headers;
    assert_eq!(format!("{:?}", test.values().collect::<Vec<_>>()), "[Equals(***), Present]");
}

#[test]
fn styles_and_formats_are_written_by_their_names() {
    let policy = |more: &str| {
        let rule = only_rule(&format!("[[rules]]\nname = 'a'\nlimits = ['1/s']\n{more}"));
        rule.policies_of_all().next().unwrap().clone()
    };
    for style in Style::ALL {
        let styles = policy(&format!("headers = ['{style}']")).styles();
        assert_eq!(Style::ALL.into_iter().filter(|each| styles.contains(*each)).collect::<Vec<_>>(), [style]);
    }
    for format in [BodyFormat::Json, BodyFormat::Problem, BodyFormat::Text] {
        assert_eq!(policy(&format!("body = '{}'", format.as_str())).format().as_str(), format.as_str());
    }
}

#[test]
fn body_of_the_file_is_that_of_rules_without_their_own() {
    let formats = |settings: &str| -> Vec<String> {
        let rules = "[[rules]]\nname = 'shield'\nstore = 'memory'\nlimits = ['9/s']\n\
                     [[rules]]\nname = 'api'\nlimits = ['1/s']\n\
                     [[rules]]\nname = 'own'\nlimits = ['2/s']\nbody = { template = 'no', content_type = 'text/plain' }\n";
        let loaded = load(&format!("{settings}\n{rules}")).unwrap();
        let policy = |rule: &CompiledRule| rule.policies_of_all().next().unwrap().format().as_str().to_owned();
        loaded.rules.rules().iter().map(policy).collect()
    };
    assert_eq!(formats(""), ["text", "json", "template"]);
    assert_eq!(formats("body = 'problem'"), ["problem", "problem", "template"]);
    assert_eq!(formats("body = { template = '{\"wait\":{retry_after}}' }"), ["template", "template", "template"]);
}
