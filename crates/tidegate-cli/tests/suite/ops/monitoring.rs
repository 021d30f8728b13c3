//! The alert rules and the dashboard, with a real Prometheus that scrapes the real binary.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

use super::{output_text, path, read, succeed, tool, yaml};
use tidegate_testkit::program::{PATIENCE, Serving};

const ALERTS: &str = "ops/prometheus/alerts.yaml";
const ALERT_TESTS: &str = "ops/prometheus/alerts_test.yaml";
const SCRAPE_CONFIG: &str = "ops/prometheus/prometheus.yaml";
const DASHBOARD: &str = "ops/grafana/tidegate.json";

/// A rule of each kind: a shield, one that denies, and one in shadow mode. With the long deadline, a busy machine makes
/// no decisions without the store.
const RULES: &str = r#"
instances = 1
deadline = "1s"
[[rules]]
name = "shield"
store = "memory"
by = ["ip"]
limits = ["1000000/s"]
[[rules]]
name = "login"
match = { path = "/login" }
by = ["ip"]
limits = ["2/h"]
[[rules]]
name = "trial"
match = { path = "/login" }
by = ["ip"]
limits = ["1/h"]
mode = "shadow"
"#;

const LOGIN: &str = r#"{"request":{"method":"POST","path":"/login","peer":"203.0.113.9"}}"#;
const EXPLICIT: &str = r#"{"key":"user:42","limit":"1/h"}"#;

/// A running instance with [`RULES`] on a Redis server.
struct Site {
    serving: Serving,
    redis: Server,
    dir: TempDir,
}

impl Site {
    fn start() -> Site {
        let (redis, dir) = (Server::redis(), tempfile::tempdir().unwrap());
        let file = dir.path().join("tidegate.toml");
        std::fs::write(&file, RULES).unwrap();
        let serving = Serving::start(&["--config", file.to_str().unwrap(), "--store", &redis.url()]);
        Site { serving, redis, dir }
    }

    /// Sends admitted and denied requests to every listener.
    fn send_traffic(&self) {
        (0..5).for_each(|_| drop(self.serving.check(LOGIN)));
        (0..5).for_each(|_| drop(self.serving.check(EXPLICIT)));
        let mut connection = self.serving.connect();
        (0..5).for_each(|_| drop(connection.call(&["TIDEGATE.CHECK", "user:42", "1/h"]).unwrap()));
        self.serving.visit("/readyz");
    }
}

/// A running Prometheus, with its files in a temporary directory. Dropping it kills the process.
struct Prometheus {
    child: Child,
    address: String,
    log: Arc<Mutex<String>>,
    _dir: TempDir,
}

impl Prometheus {
    /// Starts Prometheus with the scrape configuration and the alert rules of the repository.
    ///
    /// It scrapes the instance with the admin listener at `target`, and evaluates the rules, once a second.
    fn start(target: &str) -> Prometheus {
        let dir = tempfile::tempdir().unwrap();
        let mut config = yaml(SCRAPE_CONFIG).remove(0);
        let interval = "1s";
        config["global"] =
            json!({"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval});
        config["rule_files"] = json!([path(ALERTS).canonicalize().unwrap()]);
        config["scrape_configs"][0]["static_configs"] = json!([{"targets": [target]}]);
        let file = dir.path().join("prometheus.yaml");
        std::fs::write(&file, config.to_string()).unwrap(); // JSON is YAML
        let mut command = tool("prometheus");
        command.arg(format!("--config.file={}", file.display()));
        command.arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()));
        command.arg("--web.listen-address=127.0.0.1:0");
        let started = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child =
            started.unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup.sh installs prometheus"));
        let log = Arc::new(Mutex::new(String::new()));
        let (sender, lines) = mpsc::channel();
        let (pipe, kept) = (child.stderr.take().unwrap(), log.clone());
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                kept.lock().unwrap().push_str(&(line.clone() + "\n"));
                let _ = sender.send(line);
            }
        });
        // Dropped on a panic, so that the process ends.
        let mut prometheus = Prometheus { child, address: String::new(), log, _dir: dir };
        prometheus.address = loop {
            let line = lines.recv_timeout(PATIENCE).expect("Prometheus prints its address");
            let listening = line.split_once("Listening on").and_then(|(_, rest)| rest.split_once("address="));
            if let Some((_, rest)) = listening {
                break rest.split_whitespace().next().unwrap().to_owned();
            }
        };
        eventually("Prometheus is ready", || prometheus.get("/-/ready", &[]), |answer| answer.contains("is Ready"));
        prometheus
    }

    /// Returns the body of a GET request with these parameters, whatever its status.
    fn get(&self, path: &str, parameters: &[(&str, &str)]) -> String {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--max-time", "30", "--get"]);
        for (name, value) in parameters {
            curl.args(["--data-urlencode", &format!("{name}={value}")]);
        }
        succeed(curl.arg(format!("http://{}{path}", self.address)))
    }

    /// Returns the data of an API response. Panics if it is an error.
    fn api(&self, path: &str, parameters: &[(&str, &str)]) -> Value {
        let body = self.get(path, parameters);
        let mut answer: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
        assert_eq!(answer["status"], "success", "{path} {parameters:?}: {answer}");
        answer["data"].take()
    }

    /// Evaluates an expression. Returns the labels and the value of each result.
    fn query(&self, expression: &str) -> Vec<(Value, f64)> {
        let mut data = self.api("/api/v1/query", &[("query", expression)]);
        assert_eq!(data["resultType"], "vector", "{expression}");
        let results = data["result"].as_array_mut().unwrap();
        let sample = |result: &mut Value| {
            let value = result["value"][1].as_str().and_then(|value| value.parse().ok()).expect("a number");
            (result["metric"].take(), value)
        };
        results.iter_mut().map(sample).collect()
    }

    /// Waits until an expression has a result that is a number, and returns all results.
    fn query_until_there_is_a_number(&self, expression: &str) -> Vec<(Value, f64)> {
        let is_number = |results: &Vec<(Value, f64)>| results.iter().any(|(_, value)| value.is_finite());
        eventually(expression, || self.query(expression), is_number)
    }

    /// Returns the names of the alerts that are pending or firing.
    fn active_alerts(&self) -> BTreeSet<String> {
        let data = self.api("/api/v1/alerts", &[]);
        let names = data["alerts"].as_array().unwrap().iter().map(|alert| alert["labels"]["alertname"].as_str());
        names.map(|name| name.unwrap().to_owned()).collect()
    }

    fn wait_for_alerts(&self, names: &[&str]) {
        let has_all = |active: &BTreeSet<String>| names.iter().all(|name| active.contains(*name));
        eventually(&format!("alerts {names:?}"), || self.active_alerts(), has_all);
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("--- log of prometheus ---\n{}---", self.log.lock().unwrap());
        }
    }
}

/// Returns the selectors of an expression, such as `up{job="tidegate"}`: the names of metrics with their braces.
fn selectors(expression: &str) -> Vec<String> {
    let is_in_name = |character: char| character.is_ascii_alphanumeric() || "_:".contains(character);
    let mut selectors = Vec::new();
    let mut rest = expression;
    while let Some(start) = rest.find(is_in_name) {
        rest = &rest[start..];
        let (name, after) = rest.split_at(rest.find(|character| !is_in_name(character)).unwrap_or(rest.len()));
        let braces = after.strip_prefix('{').map_or(0, |inner| 2 + inner.find('}').expect("a closing brace"));
        if name == "up" || name.starts_with("tidegate_") || name.starts_with("rule:") {
            selectors.push(format!("{name}{}", &after[..braces]));
        }
        // The words in braces are labels and their values.
        rest = &after[braces..];
    }
    selectors
}

/// Returns the label names between `{{` and `}}` in a legend.
fn labels_in_legend(legend: &str) -> Vec<&str> {
    legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap().trim()).collect()
}

/// Returns the label names in the `by (…)` clauses of an expression, except `le`, which `histogram_quantile` removes.
fn labels_in_grouping(expression: &str) -> Vec<&str> {
    let clauses = expression.split("by (").skip(1).map(|rest| rest.split(')').next().unwrap());
    clauses.flat_map(|clause| clause.split(',')).map(str::trim).filter(|label| *label != "le").collect()
}

#[test]
fn selectors_and_labels_of_expressions_are_found() {
    let expression =
        r#"sum by (le, listener) (rate(tidegate_x_total{a="b (c)",d=~"up"}[5m])) / up unless rule:x:rate5m > 1"#;
    assert_eq!(selectors(expression), [r#"tidegate_x_total{a="b (c)",d=~"up"}"#, "up", "rule:x:rate5m"]);
    assert_eq!(labels_in_grouping(expression), ["listener"]);
    assert_eq!(labels_in_legend("{{listener}} of {{ kind }}"), ["listener", "kind"]);
}

#[test]
fn promtool_accepts_the_alert_rules_and_the_scrape_configuration() {
    succeed(tool("promtool").args(["check", "rules", "--lint=all", "--lint-fatal"]).arg(path(ALERTS)));
    succeed(tool("promtool").args(["check", "config", "--lint-fatal"]).arg(path(SCRAPE_CONFIG)));
}

#[test]
fn each_alert_is_raised_and_not_raised_in_a_unit_test() {
    succeed(tool("promtool").args(["test", "rules"]).arg(path(ALERT_TESTS)));
    let (rules, tests) = (yaml(ALERTS).remove(0), yaml(ALERT_TESTS).remove(0));
    let rules = rules["groups"].as_array().unwrap().iter().flat_map(|group| group["rules"].as_array().unwrap());
    let alerts: BTreeSet<&str> = rules.filter_map(|rule| rule["alert"].as_str()).collect();
    let tests = tests["tests"].as_array().unwrap().iter().flat_map(|test| test["alert_rule_test"].as_array().unwrap());
    let tested = tests.map(|test| {
        (test["alertname"].as_str().unwrap(), test["exp_alerts"].as_array().is_some_and(|alerts| !alerts.is_empty()))
    });
    let tested: BTreeSet<(&str, bool)> = tested.collect();
    let expected: BTreeSet<(&str, bool)> = alerts.iter().flat_map(|alert| [(*alert, false), (*alert, true)]).collect();
    assert_eq!(tested, expected);
}

/// `promtool check metrics` checks names, units and help texts, in the format that a client gets by default.
#[test]
fn promtool_accepts_the_metrics_of_a_running_instance() {
    let site = Site::start();
    site.send_traffic();
    let metrics = site.serving.visit("/metrics").body;
    assert!(metrics.contains("tidegate_decisions_total{rule=\"login\""), "{metrics}");
    let mut promtool = tool("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn().unwrap();
    child.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output_text(&output).is_empty(), "{}\n{}", output.status, output_text(&output));
}

#[test]
fn every_query_of_the_dashboard_and_every_alert_works_on_a_real_scrape() {
    let mut site = Site::start();
    let prometheus = Prometheus::start(&site.serving.admin);
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        // Rates and durations need requests between two scrapes.
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                site.send_traffic();
            }
        });
        let checks = || {
            every_panel_has_data(&prometheus, &dashboard);
            every_variable_has_values(&prometheus, &dashboard);
            every_alert_is_evaluated(&prometheus);
            prometheus.wait_for_alerts(&["TidegateRejectionSpike"]);
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(checks));
        is_done.store(true, Ordering::Relaxed);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });

    let faults =
        ["TidegateBreakerOpen", "TidegateDegraded", "TidegateNotReady", "TidegateReloadFailed", "TidegateInstanceDown"];
    let has_none = |active: &BTreeSet<String>| faults.iter().all(|alert| !active.contains(*alert));
    eventually("no alerts while nothing is broken", || prometheus.active_alerts(), has_none);
    site.redis.kill9();
    std::fs::write(site.dir.path().join("tidegate.toml"), "not a configuration").unwrap();
    let has_alerts = |active: &BTreeSet<String>| faults[..4].iter().all(|alert| active.contains(*alert));
    let send_and_read = || {
        site.serving.check(EXPLICIT);
        prometheus.active_alerts()
    };
    eventually("alerts of a broken instance", send_and_read, has_alerts);
    site.serving.child.kill().unwrap();
    prometheus.wait_for_alerts(&["TidegateInstanceDown"]);
}

/// Each query of each panel has a result, and the labels that it groups by and shows in its legend.
fn every_panel_has_data(prometheus: &Prometheus, dashboard: &Value) {
    let targets = dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| {
        let targets = panel["targets"].as_array().map_or(&[][..], Vec::as_slice);
        assert_eq!(targets.is_empty(), panel["type"] == "row", "{panel}");
        targets.iter().map(|target| (panel["title"].as_str().unwrap(), target))
    });
    let mut count = 0;
    for (title, target) in targets {
        let (expression, legend) = (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap());
        assert!(expression.contains(r#"job=~"$job",instance=~"$instance""#), "{title} ignores the variables");
        let query = expression.replace("$__rate_interval", "1m").replace("$job", "tidegate").replace("$instance", ".*");
        assert!(!query.contains('$'), "{title}: unknown variable: {query}");
        let results = prometheus.query_until_there_is_a_number(&query);
        for label in labels_in_grouping(&query).into_iter().chain(labels_in_legend(legend)) {
            assert!(results.iter().any(|(labels, _)| labels.get(label).is_some()), "{title}: no {label}: {results:?}");
        }
        count += 1;
    }
    assert!(count >= 20, "{count} queries");
}

/// The variables that are queries, all of the form `label_values(SELECTOR, LABEL)`, have values.
fn every_variable_has_values(prometheus: &Prometheus, dashboard: &Value) {
    let variables = dashboard["templating"]["list"].as_array().unwrap().iter();
    let queries = variables.filter(|variable| variable["type"] == "query").map(|variable| &variable["query"]["query"]);
    let queries: Vec<&str> = queries.map(|query| query.as_str().unwrap()).collect();
    assert_eq!(queries.len(), 2);
    for query in queries {
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')')).expect("label_values");
        let (selector, label) = inner.rsplit_once(", ").unwrap();
        let results = prometheus.query_until_there_is_a_number(&selector.replace("$job", ".*"));
        assert!(results.iter().all(|(labels, _)| labels.get(label).is_some()), "{query}: {results:?}");
    }
}

/// Prometheus evaluates each rule without an error, and each metric in its expression exists.
fn every_alert_is_evaluated(prometheus: &Prometheus) {
    let rules = || {
        let data = prometheus.api("/api/v1/rules", &[]);
        let groups = data["groups"].as_array().unwrap().clone();
        groups.into_iter().flat_map(|mut group| group["rules"].as_array_mut().unwrap().split_off(0)).collect::<Vec<_>>()
    };
    let is_evaluated = |rules: &Vec<Value>| rules.iter().all(|rule| rule["health"] != "unknown");
    let rules = eventually("all rules are evaluated", rules, is_evaluated);
    let written = yaml(ALERTS).remove(0)["groups"][0]["rules"].as_array().unwrap().len();
    assert_eq!(rules.len(), written);
    for rule in rules {
        assert_eq!(rule["health"], "ok", "{rule}");
        let expression = rule["query"].as_str().unwrap();
        prometheus.query(expression);
        let selectors = selectors(expression);
        assert!(!selectors.is_empty(), "{expression}");
        for selector in selectors {
            prometheus.query_until_there_is_a_number(&selector);
        }
    }
}
