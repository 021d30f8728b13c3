//! The commands `ban` and `unban`, on a store or a running instance.

use std::time::Duration;

use serde_json::{Value, to_value};
use tidegate::Wait;
use tidegate_server::{BanQuery, format_wait, list_bans};

use crate::Failure;
use crate::admin::{ask_or, with_query};
use crate::arguments::{BanArguments, CountersChoice, Unban};
use crate::output::{items, print_report, text};
use crate::store::OperatorStore;

/// Runs `tidegate ban`: bans a client for the duration of `--for`, else until it is unbanned, and prints which requests
/// are refused. With `--list`, prints all bans.
///
/// # Errors
/// If the options are invalid, the text names no client, no rule counts the subject, the instance or the store does not
/// answer or has no room for another ban, the store is the memory store, or the output cannot be written. Nothing is
/// banned then, except if the store failed.
pub(crate) async fn ban(arguments: BanArguments) -> Result<(), Failure> {
    let Some(query) = query(&arguments.client, &arguments.key) else {
        let report = ask_or(&arguments.admin, ("GET", "/v1/bans", None), async || {
            let bans = open(&arguments.counters)?;
            let rules = bans.loaded.as_ref().map(|loaded| &loaded.rules);
            Ok(to_value(list_bans(&bans.limiter, rules).await?)?)
        })
        .await?;
        return print_report(&report, arguments.json, format_list);
    };
    let path = ban_path(&query, arguments.duration);
    let report = ask_or(&arguments.admin, ("PUT", &path, None), async || {
        let bans = open(&arguments.counters)?;
        Ok(to_value(query.ban(arguments.duration, &bans.limiter, bans.rules()).await?)?)
    })
    .await?;
    print_report(&report, arguments.json, |report| {
        format!("{} is banned {}: {}\n", text(&report["client"]), format_end(report), text(&report["effect"]))
    })
}

/// Runs `tidegate unban`: lifts the ban on a client, and prints whether there was one. Returns whether there was.
///
/// # Errors
/// If the options are invalid, the text names no client, the instance or the store does not answer, the store is the
/// memory store, or the output cannot be written.
pub(crate) async fn unban(arguments: Unban) -> Result<bool, Failure> {
    let Some(query) = query(&arguments.client, &arguments.key) else { return Ok(false) };
    let report = ask_or(&arguments.admin, ("DELETE", &ban_path(&query, None), None), async || {
        let bans = open(&arguments.counters)?;
        Ok(to_value(query.unban(&bans.limiter, bans.rules()).await?)?)
    })
    .await?;
    let was_banned = report["was_banned"] == true;
    print_report(&report, arguments.json, |report| {
        let verdict = if was_banned { "is no longer banned" } else { "was not banned" };
        let other = report["other_ban"].as_str().map(|other| format!(", but {other}")).unwrap_or_default();
        format!("{} {verdict}{other}\n", text(&report["client"]))
    })?;
    Ok(was_banned)
}

/// Opens the store that `--store` and `--config` choose, and the rules of `--config`, if it is given.
///
/// # Errors
/// See [`OperatorStore::open`].
fn open(counters: &CountersChoice) -> Result<OperatorStore, Failure> {
    match &counters.config {
        Some(file) => OperatorStore::open(file, &counters.store),
        None => OperatorStore::without_rules(counters),
    }
}

/// Returns the query for a client or a key, or `None` if neither is given.
fn query(client: &Option<String>, key: &Option<String>) -> Option<BanQuery> {
    let client = client.as_ref().map(|client| BanQuery::Client(client.clone().into_bytes()));
    client.or_else(|| key.as_ref().map(|key| BanQuery::Key(key.clone().into_bytes())))
}

/// Formats the end of a ban: `for 59m 50s`, or `permanently`.
fn format_end(ban: &Value) -> String {
    match ban["retry_after_ms"].as_u64() {
        Some(ms) => format!("for {}", format_wait(Wait::from_micros(ms.saturating_mul(1_000)))),
        None => "permanently".to_owned(),
    }
}

/// Formats the list of bans, one per line: the client, its kind and the end of the ban.
fn format_list(report: &Value) -> String {
    let bans: Vec<&Value> = items(&report["bans"]).collect();
    if bans.is_empty() {
        return "no bans\n".to_owned();
    }
    let width = bans.iter().map(|ban| text(&ban["client"]).chars().count()).max().unwrap_or_default();
    let line =
        |ban: &&Value| format!("{:width$}  {:<7}  {}\n", text(&ban["client"]), text(&ban["kind"]), format_end(ban));
    bans.iter().map(line).collect()
}

/// Returns the path and query of a ban in the admin API, such as `/v1/bans?client=user%3A42&for=60000ms`.
fn ban_path(query: &BanQuery, duration: Option<Duration>) -> String {
    let (name, text) = match query {
        BanQuery::Key(key) => ("key", key),
        BanQuery::Client(client) => ("client", client),
    };
    let duration = duration.map(|duration| format!("{}ms", duration.as_millis()));
    with_query("/v1/bans", &[(name, Some(&String::from_utf8_lossy(text))), ("for", duration.as_deref())])
}
