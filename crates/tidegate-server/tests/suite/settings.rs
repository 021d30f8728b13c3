//! Every setting of docs/configuration.toml at every endpoint.
//!
//! Each row of [`rows`] has a configuration without the setting and one with it, and says at which endpoints it applies.
//! Where it applies, the answers to the same requests differ. Where it does not, they are equal, and the row says why.
//! The endpoints that decide by rules must agree with each other in both cases.

use std::collections::BTreeSet;

use serde_json::json;
use tidegate::config::Loader;
use tidegate_testkit::server::Server;

use crate::deployment::{ClientRequest, Deployment, RULE_ENDPOINTS, StoreKind, load};

const CONFIGURATION: &str = include_str!("../../../../docs/configuration.toml");
const RULE: &str = "[[rules]]\nname = \"r\"\nlimits = [\"2/min\"]\n";
const PLAN_RULE: &str = "[[rules]]\nname = \"r\"\nlimits = \"plan\"\n";
/// A known API key, its digest, and a file that lists it.
const KEY: &str = "planted";
const KEY_SHA256: &str = "372eb3774802a8d97badd0f3afdabbf7a17ef8a1f900b394db99a460b893406c";
const KEYS: &str = "[[keys]]\nkey = \"planted\"\n";
/// A token for the user `alice`, signed with [`JWT`]'s key, until the year 2100.
const TOKEN: &str = "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJhbGljZSIsImV4cCI6NDEwMjQ0NDgwMH0.DvdDttFvdgTOXtC2L5P1zfs2bIMtiEwN3al4EAHYyf8";
const JWT: &str = "[jwt]\nalgorithm = \"HS256\"\nkey = \"0123456789abcdef0123456789abcdef\"\n";

const NO_RECEIPT: &str = "it is used only for checks with a receipt";
const ONLY_GATEWAY: &str = "only the gateway forwards requests";
const AT_LOAD: &str = "it is checked when the file is loaded";
const NO_HEADERS: Effect = Effect::None("a RESP reply has no headers");
const NO_BODY: Effect = Effect::Reported("its response body is the decision");
const NO_CALLER: Effect = Effect::None("a check that names its key has no caller");
const NO_RULE: Effect = Effect::None("no rule decides a check that names its limit");
const NO_REQUEST: Effect = Effect::None("a check that names its key has no method and no path");

/// Whether a setting has an effect at an endpoint.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Effect {
    Applies,
    /// It does not apply, for this reason.
    None(&'static str),
    /// It does not apply, for this reason, although an operator may expect it: the start of the service reports it.
    Reported(&'static str),
}

/// Where the counters of a row are.
#[derive(Clone, Copy, PartialEq, Debug)]
enum CounterStore {
    In(StoreKind),
    /// In the Redis that the configuration names. The transcript has the names of its keys.
    OnRedis,
}

/// A setting, and what it changes.
struct Row {
    /// The name in the configuration: `on_failure`, or `rules.on_failure` for a setting of a rule.
    setting: &'static str,
    without: String,
    with: String,
    counters: CounterStore,
    requests: Vec<ClientRequest>,
    explicit: Effect,
    resp: Effect,
    /// The endpoints by rules at which the setting has no effect, each with the reason.
    exceptions: Vec<(&'static str, &'static str)>,
}

impl Row {
    /// A top-level setting that applies at every endpoint, in memory, with three equal requests. `text` sets it.
    fn top(setting: &'static str, text: &str) -> Row {
        Row::of(setting, RULE, &format!("{text}\n{RULE}"))
    }

    /// A setting of a rule, which explicit checks do not have. `text` sets it.
    fn rule(setting: &'static str, text: &str) -> Row {
        Row::of(setting, RULE, &format!("{RULE}{text}\n")).explicit(NO_RULE, NO_RULE)
    }

    fn of(setting: &'static str, without: &str, with: &str) -> Row {
        Row {
            setting,
            without: without.to_owned(),
            with: with.to_owned(),
            counters: CounterStore::In(StoreKind::Memory),
            requests: vec![ClientRequest::get("/"); 3],
            explicit: Effect::Applies,
            resp: Effect::Applies,
            exceptions: Vec::new(),
        }
    }

    /// Puts `text` before both configurations.
    fn given(self, text: &str) -> Row {
        Row { without: format!("{text}\n{}", self.without), with: format!("{text}\n{}", self.with), ..self }
    }

    fn on(self, counters: CounterStore) -> Row {
        Row { counters, ..self }
    }

    fn without_store(self) -> Row {
        self.on(CounterStore::In(StoreKind::Unreachable))
    }

    fn requests(self, requests: impl IntoIterator<Item = ClientRequest>) -> Row {
        Row { requests: requests.into_iter().collect(), ..self }
    }

    /// Two requests without a header and one with it. With the setting, the last one is another caller.
    fn third_with(self, name: &'static str, value: &'static str) -> Row {
        let get = || ClientRequest::get("/");
        self.requests([get(), get(), get().header(name, value)])
    }

    fn explicit(self, explicit: Effect, resp: Effect) -> Row {
        Row { explicit, resp, ..self }
    }

    /// Says that the setting applies at these endpoints by rules, and at no others, for this reason.
    fn only_at(self, endpoints: &[&str], reason: &'static str) -> Row {
        let others = RULE_ENDPOINTS.iter().filter(|endpoint| !endpoints.contains(&endpoint.name));
        Row { exceptions: others.map(|endpoint| (endpoint.name, reason)).collect(), ..self }
    }
}

/// Returns one row per setting. `redis` is the URL of a server.
fn rows(redis: &str) -> Vec<Row> {
    let get = || ClientRequest::get("/");
    let reported = |reason| (Effect::Reported(reason), Effect::Reported(reason));
    let [no_address, no_key, no_path, no_mode] = [
        reported("the file bans addresses, API keys and users, which such a check does not have"),
        reported("the key of such a check is stored as it is given"),
        reported("such a check has no path"),
        reported("shadow is a mode of rules"),
    ];
    let forwarded =
        |name: &'static str| ["198.51.100.1", "198.51.100.2", "198.51.100.3"].map(|from| get().header(name, from));
    let on_redis = format!("deadline = \"10s\"\nstore = \"{redis}\"");
    vec![
        Row::top("expect", "expect = { rules = 1 }")
            .only_at(&[], AT_LOAD)
            .explicit(Effect::None(AT_LOAD), Effect::None(AT_LOAD)),
        Row::top("store", &format!("store = \"{redis}\"")).given("deadline = \"10s\"").on(CounterStore::OnRedis),
        Row::top("prefix", "prefix = \"other\"").given(&on_redis).on(CounterStore::OnRedis),
        Row::top("instances", "instances = 2").without_store(),
        Row::top("deadline", "deadline = \"10s\"")
            .given("on_failure = \"deny\"")
            .on(CounterStore::In(StoreKind::Slow))
            .requests([get()]),
        Row::top("on_failure", "on_failure = \"allow\"").without_store(),
        Row::top("headers", "headers = [\"draft-6\"]").explicit(Effect::Applies, NO_HEADERS),
        Row::top("body", "body = \"text\"").explicit(NO_BODY, NO_BODY),
        Row::top("expose_headers", "expose_headers = true").explicit(Effect::Applies, NO_HEADERS),
        Row::top("shadow", "shadow = true").explicit(no_mode.0, no_mode.1),
        Row::top("kill_switch", "kill_switch = true"),
        Row::top("path_bytes_max", "path_bytes_max = 4")
            .requests([ClientRequest::get("/longer")])
            .explicit(no_path.0, no_path.1),
        Row::of(
            "method_override_headers",
            &format!("{RULE}match = {{ methods = [\"POST\"] }}\n"),
            &format!("method_override_headers = [\"x-method\"]\n{RULE}match = {{ methods = [\"POST\"] }}\n"),
        )
        .requests([get().header("x-method", "POST")])
        .explicit(NO_REQUEST, NO_REQUEST),
        Row::top("trusted_proxies", "trusted_proxies = [\"203.0.113.0/24\"]")
            .requests(forwarded("x-forwarded-for"))
            .explicit(NO_CALLER, NO_CALLER),
        Row::top("forwarding_header", "forwarding_header = \"x-real-ip\"")
            .given("trusted_proxies = [\"203.0.113.0/24\"]")
            .requests(forwarded("x-real-ip"))
            .explicit(NO_CALLER, NO_CALLER),
        Row::top("ipv6_prefix", "ipv6_prefix = 128")
            .requests(["2001:db8::1", "2001:db8::2", "2001:db8::3"].map(|peer| get().peer(peer)))
            .explicit(NO_CALLER, NO_CALLER),
        Row::of("api_key_header", &format!("{KEYS}{RULE}"), &format!("api_key_header = \"x-token\"\n{KEYS}{RULE}"))
            .third_with("x-token", KEY)
            .explicit(NO_CALLER, NO_CALLER),
        Row::top("api_keys", "api_keys = \"any\"").third_with("x-api-key", "unknown").explicit(NO_CALLER, NO_CALLER),
        Row::top("anonymize", "anonymize = { secret = \"0123456789abcdef\" }")
            .given(&on_redis)
            .on(CounterStore::OnRedis)
            .explicit(no_key.0, no_key.1),
        Row::top("receipt_secret_env", "receipt_secret = \"0123456789abcdef\"")
            .only_at(&[], NO_RECEIPT)
            .explicit(Effect::None(NO_RECEIPT), Effect::None(NO_RECEIPT)),
        Row::top("jwt", JWT).third_with("authorization", TOKEN).explicit(NO_CALLER, NO_CALLER),
        Row::top("exempt", "[exempt]\npaths = [\"/\"]").explicit(no_path.0, no_path.1),
        Row::top("bans", "[[bans]]\nby = \"ip\"\nvalue = \"203.0.113.9\"").explicit(no_address.0, no_address.1),
        Row::top("gateway", "[gateway]\naccess_log = \"json\"")
            .only_at(&[], ONLY_GATEWAY)
            .explicit(Effect::None(ONLY_GATEWAY), Effect::None(ONLY_GATEWAY)),
        Row::top("upstreams", "[[upstreams]]\nname = \"web\"\nservers = [\"http://127.0.0.1:3000\"]")
            .only_at(&[], ONLY_GATEWAY)
            .explicit(Effect::None(ONLY_GATEWAY), Effect::None(ONLY_GATEWAY)),
        Row::of("plans", PLAN_RULE, &format!("[plans.anonymous]\nlimits = [\"1/min\"]\n{PLAN_RULE}"))
            .given("[plans.default]\nlimits = [\"2/min\"]")
            .explicit(NO_CALLER, NO_CALLER),
        Row::top("keys", KEYS).third_with("x-api-key", KEY).explicit(NO_CALLER, NO_CALLER),
        Row::top("keys_file", "keys_file = \"keys.toml\"").third_with("x-api-key", KEY).explicit(NO_CALLER, NO_CALLER),
        Row::top("key_sources", "[key_sources]\nredis_hash = \"hash-of-keys\"")
            .given(&on_redis)
            .on(CounterStore::OnRedis)
            .third_with("x-api-key", KEY)
            .explicit(NO_CALLER, NO_CALLER),
        Row::of(
            "plan_sources",
            PLAN_RULE,
            &format!(
                "[plan_sources]\naddresses = [{{ networks = [\"203.0.113.0/24\"], plan = \"small\" }}]\n{PLAN_RULE}"
            ),
        )
        .given("[plans.default]\nlimits = [\"2/min\"]\n[plans.small]\nlimits = [\"1/min\"]")
        .explicit(NO_CALLER, NO_CALLER),
        Row::of("rules", "", RULE).explicit(NO_RULE, NO_RULE),
        Row::of("rules.name", RULE, &RULE.replace("\"r\"", "\"other\"")).explicit(NO_RULE, NO_RULE),
        Row::rule("rules.match", "match = { path = \"/elsewhere\" }"),
        Row::rule("rules.by", "by = [\"global\"]")
            .requests(["198.51.100.1", "198.51.100.2", "198.51.100.3"].map(|peer| get().peer(peer))),
        Row::of("rules.limits", RULE, &RULE.replace("2/min", "1/h")).explicit(NO_RULE, NO_RULE),
        Row::rule("rules.mode", "mode = \"shadow\""),
        Row::rule("rules.on_failure", "on_failure = \"allow\"").without_store(),
        Row::rule("rules.charge", "charge = \"on_failure\"").only_at(
            &["the layer"],
            "the service learns the outcome only from a receipt, which these requests do not have",
        ),
        Row::rule("rules.cost", "cost = 2"),
        Row::rule("rules.headers", "headers = []"),
        Row::rule("rules.body", "body = \"text\""),
        Row::rule("rules.store", "store = \"memory\""),
    ]
}

/// Returns the settings that the configuration file shows, also those that are commented out: `on_failure`, and
/// `rules.on_failure` for a setting of a rule.
fn settings_of(configuration: &str) -> BTreeSet<String> {
    let is_name = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
    };
    let mut settings = BTreeSet::new();
    let mut table: Option<String> = None;
    for line in configuration.lines().map(|line| line.strip_prefix("# ").unwrap_or(line)) {
        if let Some(name) = line.strip_prefix('[') {
            let name = name.trim_start_matches('[').split([']', '.']).next().unwrap();
            settings.insert(name.to_owned());
            table = Some(name.to_owned());
        } else if let Some((name, _)) = line.split_once(" = ").filter(|(name, _)| is_name(name)) {
            match table.as_deref() {
                None => settings.insert(name.to_owned()),
                Some("rules") => settings.insert(format!("rules.{name}")),
                Some(_) => false,
            };
        }
    }
    settings
}

/// The answers of all endpoints to a row's requests with one configuration.
struct Transcripts {
    /// In the order of [`RULE_ENDPOINTS`].
    by_rules: Vec<Vec<String>>,
    explicit: Vec<String>,
    resp: Vec<String>,
}

struct Walk {
    redis: Server,
    loader: Loader,
    _directory: tempfile::TempDir,
}

impl Walk {
    fn new() -> Walk {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("keys.toml"), KEYS).unwrap();
        let loader = Loader::new().directory(directory.path());
        Walk { redis: Server::redis(), loader, _directory: directory }
    }

    /// Starts a deployment and returns the answers, and for counters on Redis also the names of all keys.
    fn record(&self, row: &Row, text: &str, ask: impl Fn(&Deployment) -> Vec<String>) -> Vec<String> {
        let kind = match row.counters {
            CounterStore::In(kind) => kind,
            CounterStore::OnRedis => {
                self.redis.command(&["FLUSHALL"]);
                self.redis.command(&["HSET", "hash-of-keys", &format!("api_key:{KEY_SHA256}"), "{}"]);
                StoreKind::Memory
            }
        };
        let mut transcript = ask(&Deployment::start(load(&self.loader, text), kind));
        if row.counters == CounterStore::OnRedis {
            let keys = self.redis.command(&["KEYS", "*:{*"]);
            let mut keys: Vec<String> = keys.items().iter().map(|key| format!("{key:?}")).collect();
            keys.sort_unstable();
            transcript.extend(keys);
        }
        transcript
    }

    fn ask_all(&self, row: &Row, text: &str) -> Transcripts {
        let by_rules = RULE_ENDPOINTS.iter().map(|endpoint| {
            let ask = |at: &Deployment| {
                row.requests.iter().map(|request| format!("{:?}", (endpoint.ask)(at, request))).collect()
            };
            self.record(row, text, ask)
        });
        let explicit = json!({ "key": "ip:203.0.113.9", "limit": "2/min" });
        Transcripts {
            by_rules: by_rules.collect(),
            explicit: self.record(row, text, |at| (0..3).map(|_| format!("{:?}", at.post(&explicit))).collect()),
            resp: self.record(row, text, |at| {
                (0..3).map(|_| at.command(&["TIDEGATE.CHECK", "ip:203.0.113.9", "2/min"])).collect()
            }),
        }
    }
}

#[test]
fn every_setting_of_the_configuration_has_a_row() {
    let rows: BTreeSet<String> = rows("redis://127.0.0.1").iter().map(|row| row.setting.to_owned()).collect();
    assert_eq!(rows, settings_of(CONFIGURATION), "a setting without a row, or a row without a setting");
    let added = CONFIGURATION.replace("kill_switch = false", "kill_switch = false\nnew_switch = true");
    assert!(settings_of(&added).contains("new_switch"), "a setting that is added is found");
}

#[test]
fn every_setting_has_its_effect_at_every_endpoint_or_a_reason_why_not() {
    let walk = Walk::new();
    for row in rows(&walk.redis.url()) {
        let [without, with] = [&row.without, &row.with].map(|text| walk.ask_all(&row, text));
        let setting = row.setting;
        let compare = |endpoint: &str, effect: Effect, without: &[String], with: &[String]| match effect {
            Effect::Applies => assert_ne!(without, with, "{setting} has no effect at {endpoint}"),
            Effect::None(reason) | Effect::Reported(reason) => {
                assert_eq!(without, with, "{setting} has an effect at {endpoint}, although {reason}");
            }
        };
        for (at, endpoint) in RULE_ENDPOINTS.iter().enumerate() {
            let exception = row.exceptions.iter().find(|(name, _)| *name == endpoint.name);
            let effect = exception.map_or(Effect::Applies, |(_, reason)| Effect::None(reason));
            compare(endpoint.name, effect, &without.by_rules[at], &with.by_rules[at]);
            if row.exceptions.is_empty() {
                assert_eq!(with.by_rules[0], with.by_rules[at], "{setting} at {}", endpoint.name);
            }
            assert_eq!(without.by_rules[0], without.by_rules[at], "without {setting} at {}", endpoint.name);
        }
        compare("/v1/check", row.explicit, &without.explicit, &with.explicit);
        compare("TIDEGATE.CHECK", row.resp, &without.resp, &with.resp);

        let is_reported = |text: &str| load(&walk.loader, text).settings_for_requests_only().contains(&setting);
        let must_report = matches!(row.explicit, Effect::Reported(_)) || matches!(row.resp, Effect::Reported(_));
        assert_eq!((is_reported(&row.without), is_reported(&row.with)), (false, must_report), "{setting}");
    }
}

#[test]
fn file_with_another_number_of_rules_than_expected_is_refused() {
    let report =
        Loader::new().load_text("tidegate.toml", &format!("expect = {{ rules = 2 }}\n{RULE}"), tidegate::Format::Toml);
    assert!(report.is_err());
}
