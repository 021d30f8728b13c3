//! The commands `ban` and `unban`, on a store or a running instance.

use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tidegate::Wait;
use tidegate_server::{BanQuery, format_wait, list_bans};

use crate::admin::Admin;
use crate::arguments::{Ban, CountersChoice, Unban};
use crate::store::OperatorStore;
use crate::{Failure, output};

/// Runs `tidegate ban`: bans a client for the duration of `--for`, else until it is unbanned, and prints which requests
/// are refused. With `--list`, prints all bans.
///
/// # Errors
/// If the options are invalid, the text names no client, no rule counts the subject, the instance or the store does not
/// answer or has no room for another ban, the store is the memory store, or the output cannot be written. Nothing is
/// banned then, except if the store failed.
pub(crate) async fn ban(arguments: Ban) -> Result<(), Failure> {
    let admin = Admin::from_options(&arguments.admin)?;
    let Some(query) = query(&arguments.client, &arguments.key) else {
        let report = match admin {
            Some(admin) => admin.send("GET", "/v1/bans", None).await?,
            None => {
                let bans = open(&arguments.counters)?;
                let rules = bans.loaded.as_ref().map(|loaded| &loaded.rules);
                serde_json::to_value(list_bans(&bans.limiter, rules).await?).map_err(not_json)?
            }
        };
        return if arguments.json { output::print_line(report) } else { output::print(format_list(&report)) };
    };
    let report = match admin {
        Some(admin) => admin.send("PUT", &ban_path(&query, arguments.duration), None).await?,
        None => {
            let bans = open(&arguments.counters)?;
            let report = query.ban(arguments.duration, &bans.limiter, bans.rules()).await?;
            serde_json::to_value(report).map_err(not_json)?
        }
    };
    if arguments.json {
        output::print_line(report)
    } else {
        let (client, effect) = (text(&report["client"]), text(&report["effect"]));
        output::print_line(format_args!("{client} is banned {}: {effect}", format_end(&report)))
    }
}

/// Runs `tidegate unban`: lifts the ban on a client, and prints whether there was one. Returns whether there was.
///
/// # Errors
/// If the options are invalid, the text names no client, the instance or the store does not answer, the store is the
/// memory store, or the output cannot be written.
pub(crate) async fn unban(arguments: Unban) -> Result<bool, Failure> {
    let Some(query) = query(&arguments.client, &arguments.key) else { return Ok(false) };
    let report = match Admin::from_options(&arguments.admin)? {
        Some(admin) => admin.send("DELETE", &ban_path(&query, None), None).await?,
        None => {
            let bans = open(&arguments.counters)?;
            serde_json::to_value(query.unban(&bans.limiter, bans.rules()).await?).map_err(not_json)?
        }
    };
    let was_banned = report["was_banned"] == true;
    let client = text(&report["client"]);
    let other = report["other_ban"].as_str().map(|other| format!(", but {other}")).unwrap_or_default();
    match (arguments.json, was_banned) {
        (true, _) => output::print_line(report)?,
        (false, true) => output::print_line(format_args!("{client} is no longer banned{other}"))?,
        (false, false) => output::print_line(format_args!("{client} was not banned{other}"))?,
    }
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

fn not_json(error: serde_json::Error) -> Failure {
    Failure::Runtime(error.into())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
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
    let bans: Vec<&Value> = report["bans"].as_array().into_iter().flatten().collect();
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
    let text = String::from_utf8_lossy(text);
    let mut path = format!("/v1/bans?{name}={}", utf8_percent_encode(&text, NON_ALPHANUMERIC));
    if let Some(duration) = duration {
        path += &format!("&for={}ms", duration.as_millis());
    }
    path
}
