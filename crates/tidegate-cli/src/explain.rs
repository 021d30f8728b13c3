//! `tidegate explain`: shows which rules would apply to a request, and why.

use std::path::Path;
use std::sync::Arc;

use http::Request;
use serde_json::{Value, json, to_value};
use tidegate::rules::{ClientBans, RequestView};
use tidegate::{Clock, SystemClock, Wait};
use tidegate_server::{ExplainQuery, Explanation, format_wait};

use crate::admin::{ask_or, with_query};
use crate::arguments::Explain;
use crate::output::{items, print_report, text};
use crate::store::{check_server, with_command_deadline};
use crate::{Failure, configuration};

/// Runs `tidegate explain`: prints which rules apply to a request, by the rules of a running instance or a
/// configuration file.
///
/// Changes no counter. `--json` prints one line of JSON, else the text of [`format_explanation`].
///
/// # Errors
/// If a header or the request is invalid, the instance does not answer, the file is invalid, or the output cannot
/// be written.
pub(crate) async fn explain(arguments: Explain) -> Result<(), Failure> {
    let headers = headers(&arguments.headers)?;
    let body = json!({ "request": {
        "method": arguments.method, "path": arguments.path, "headers": headers, "peer": arguments.peer,
    } });
    let reveal = if arguments.reveal { "true" } else { "false" };
    let path = with_query("/v1/explain", &[("reveal", Some(reveal)), ("client", arguments.client.as_deref())]);
    let explanation = ask_or(&arguments.admin, ("POST", &path, Some(&body)), async || match &arguments.config {
        Some(file) => compute(file, &arguments, &headers).await,
        None => Err(Failure::NoRules),
    })
    .await?;
    print_report(&explanation, arguments.json, format_explanation)
}

/// Computes the explanation from a configuration file, as JSON. Prints the file's warnings to standard error.
///
/// Remaining units, and plans and API keys in a Redis hash, are read from the Redis store that `--store`, `--store-file`,
/// `TIDEGATE_STORE` or `REDIS_URL` names, else from that of the file. With counters in memory, there are none to read.
async fn compute(file: &Path, arguments: &Explain, headers: &[(String, String)]) -> Result<Value, Failure> {
    let loaded = configuration::load(file, &configuration::loader(&arguments.store)?)?;
    if !arguments.path.starts_with('/') {
        return Err(Failure::RequestPath);
    }
    let mut request = Request::builder().method(&*arguments.method).uri(&*arguments.path);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(()).map_err(Failure::Request)?;
    let settings = with_command_deadline(&loaded.settings);
    let store = settings.redis()?;
    if let Some(store) = &store {
        // A store that does not answer is reported in the explanation.
        let _ = check_server(store).await?;
    }
    let reads_counters = store.is_some();
    let (limiter, lookups) = settings.limiter_on(store);
    let (limiter, now) = (limiter.announce(false).build(), SystemClock::new().now());
    // If the store does not answer, the explanation says so when it reads the counters.
    let bans = if reads_counters { limiter.listed_bans().await.ok() } else { None };
    let bans = bans.map(|listing| ClientBans::new(&listing, now)).unwrap_or_default();
    let query = ExplainQuery {
        request: &RequestView::of(&request),
        peer: arguments.peer,
        client: arguments.client.as_deref(),
        bans: Arc::new(bans),
        now,
        is_revealing: arguments.reveal,
    };
    let mut explanation = Explanation::new(&loaded, &lookups, query).await.map_err(Failure::Counters)?;
    if reads_counters {
        explanation.read_counters(&limiter).await;
    }
    Ok(to_value(&explanation)?)
}

/// Parses `--header` options: `NAME: VALUE`, or `@FILE` with one such header per line. Returns pairs of name and value.
///
/// Reads the files. Blank lines are skipped. Whether names and values are valid in HTTP is not checked.
///
/// # Errors
/// If a header has no colon, or a file cannot be read.
fn headers(given: &[String]) -> Result<Vec<(String, String)>, Failure> {
    let mut headers = Vec::new();
    for text in given {
        match text.strip_prefix('@') {
            None => headers.push(header(text)?),
            Some(file) => {
                let lines = std::fs::read_to_string(file);
                let lines = lines.map_err(|error| Failure::Unreadable { file: file.into(), error })?;
                for line in lines.lines().filter(|line| !line.trim().is_empty()) {
                    headers.push(header(line)?);
                }
            }
        }
    }
    Ok(headers)
}

/// Splits `NAME: VALUE` at the first colon and removes spaces around both parts. Returns an error if there is no colon.
fn header(text: &str) -> Result<(String, String), Failure> {
    let (name, value) = text.split_once(':').ok_or(Failure::Header)?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// Formats the JSON of an explanation as indented lines: the caller, the plan, the rules that apply, then the others.
fn format_explanation(explanation: &Value) -> String {
    let mut lines = format!("{} {}\n", text(&explanation["method"]), text(&explanation["path"]));
    let mut line = |label: &str, rest: String| lines += &format!("  {label:<8} {rest}\n");
    let known = explanation["key_name"].as_str().map(|name| format!(" ({name})")).unwrap_or_default();
    line("caller", format!("identified by {}{known}", text(&explanation["caller"])));
    for (label, field) in
        [("key", "key_lookup"), ("ignored", "key_problem"), ("token", "token_refused"), ("refused", "banned")]
    {
        if let Some(reason) = explanation[field].as_str() {
            line(label, reason.to_owned());
        }
    }
    if let Some(because) = explanation["verdict"]["because"].as_str() {
        let verdict = match explanation["verdict"]["allowed"].as_bool() {
            Some(true) => "allowed",
            Some(false) => "refused",
            None => "unknown",
        };
        line("verdict", format!("{verdict}: {because}"));
    }
    if let Some(what) = explanation["exempt"].as_str() {
        line("exempt", format!("by its {what}: nothing is counted"));
    }
    if explanation["kill_switch"] == true {
        line("note", "the kill switch is on: nothing is limited".to_owned());
    }
    if let Some(plan) = explanation["plan"].as_object() {
        line("plan", format!("{} ({})", text(&plan["name"]), text(&plan["source"])));
    }
    if let Some(reason) = explanation["counters_unknown"].as_str() {
        line("unknown", format!("remaining units: {reason}"));
    }
    let (applying, others): (Vec<&Value>, Vec<&Value>) =
        items(&explanation["rules"]).partition(|rule| rule["applies"] == true);
    if applying.is_empty() {
        line("applies", "no rule".to_owned());
    }
    for rule in applying {
        let shield = if rule["shield"] == true { ", shield" } else { "" };
        let (name, mode, counts) = (text(&rule["name"]), text(&rule["mode"]), text(&rule["counts"]));
        line("applies", format!("{name} ({mode}{shield}), counts {counts}, costs {}", rule["cost"]));
        for absent in items(&rule["absent"]).map(text) {
            line("", format!("  {absent}, so the client's address is counted instead"));
        }
        for limit in items(&rule["limits"]) {
            let left = &limit["remaining"];
            let left = match (limit["would_allow"].as_bool(), limit["retry_after_ms"].as_u64()) {
                (None, _) => String::new(),
                (Some(true), _) => format!(", {left} left"),
                (Some(false), Some(ms)) => {
                    let wait = format_wait(Wait::from_micros(ms.saturating_mul(1_000)));
                    format!(", {left} left: denied for {wait}")
                }
                (Some(false), None) => format!(", {left} left: this cost never fits"),
            };
            line("", format!("  {}: {}{left}", text(&limit["name"]), text(&limit["limit"])));
        }
    }
    for rule in others {
        let because: Vec<&str> = items(&rule["because"]).map(text).collect();
        line("skipped", format!("{}: {}", text(&rule["name"]), because.join("; ")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_header_is_named() {
        let rule = json!({
            "name": "tenants", "mode": "enforce", "applies": true, "cost": 1,
            "counts": "header:x-tenant:!***", "absent": ["the request has no header x-tenant"],
        });
        let expected = "  applies  tenants (enforce), counts header:x-tenant:!***, costs 1\n             \
                        the request has no header x-tenant, so the client's address is counted instead\n";
        let formatted = format_explanation(&json!({ "rules": [rule] }));
        assert!(formatted.contains(expected), "{formatted}");
    }

    #[test]
    fn remaining_units_are_shown_with_the_verdict_of_the_limit() {
        for (would_allow, retry_after_ms, expected) in [
            (json!(true), json!(0), "main: 8/h, 3 left\n"),
            (json!(false), json!(3_600_000), "main: 8/h, 3 left: denied for 1h\n"),
            (json!(false), Value::Null, "main: 8/h, 3 left: this cost never fits\n"),
            (Value::Null, Value::Null, "main: 8/h\n"),
        ] {
            let limit = json!({
                "name": "main", "limit": "8/h", "remaining": 3,
                "would_allow": would_allow, "retry_after_ms": retry_after_ms,
            });
            let explanation = json!({ "rules": [{ "name": "all", "applies": true, "cost": 5, "limits": [limit] }] });
            assert!(format_explanation(&explanation).contains(expected), "{}", format_explanation(&explanation));
        }
        let unknown = json!({ "counters_unknown": "cannot reach the store redis://h:1: connection refused" });
        assert!(
            format_explanation(&unknown)
                .contains("unknown  remaining units: cannot reach the store redis://h:1: connection refused\n")
        );
    }
}
