//! The commands `ban` and `unban`, on a store or a running instance.

use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::json;
use tidegate::Key;
use tidegate_server::is_masked_subject;

use crate::admin::Admin;
use crate::arguments::{Ban, Unban};
use crate::{Failure, output};

/// Runs `tidegate ban`: bans a subject for the duration of `--for`, else until it is unbanned, and prints that.
///
/// # Errors
/// If the options are invalid, the subject is masked or too long, the instance or the store does not answer or has no
/// room for another ban, the store is the memory store, or the output cannot be written.
pub(crate) async fn ban(arguments: Ban) -> Result<(), Failure> {
    let Ban { subject, duration, .. } = &arguments;
    check_subject(subject)?;
    match Admin::from_options(&arguments.admin)? {
        Some(admin) => drop(admin.send("PUT", &ban_path(subject, *duration), None).await?),
        None => arguments.counters.shared_limiter()?.ban(subject.as_bytes(), *duration).await?,
    }
    let ms = duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    match (arguments.json, duration) {
        (true, _) => output::print_line(json!({ "subject": subject, "banned": true, "retry_after_ms": ms })),
        (false, Some(duration)) => {
            output::print_line(format_args!("{subject} is banned for {}", humantime::format_duration(*duration)))
        }
        (false, None) => output::print_line(format_args!("{subject} is banned permanently")),
    }
}

/// Runs `tidegate unban`: lifts the ban on a subject, and prints whether there was one. A subject without a ban is not
/// an error.
///
/// # Errors
/// As [`ban()`].
pub(crate) async fn unban(arguments: Unban) -> Result<(), Failure> {
    let subject = &arguments.subject;
    check_subject(subject)?;
    let was_banned = match Admin::from_options(&arguments.admin)? {
        Some(admin) => admin.send("DELETE", &ban_path(subject, None), None).await?["was_banned"] == true,
        None => arguments.counters.shared_limiter()?.unban(subject.as_bytes()).await?,
    };
    match (arguments.json, was_banned) {
        (true, _) => output::print_line(json!({ "subject": subject, "banned": false, "was_banned": was_banned })),
        (false, true) => output::print_line(format_args!("{subject} is no longer banned")),
        (false, false) => output::print_line(format_args!("{subject} was not banned")),
    }
}

/// Returns an error for a subject that is too long for a key, or masked (`ip:***`), as `explain` without `--reveal`
/// prints it.
fn check_subject(subject: &str) -> Result<(), Failure> {
    Key::new(subject)?;
    match is_masked_subject(subject) {
        true => Err(Failure::MaskedSubject),
        false => Ok(()),
    }
}

/// Returns the path and query of a ban in the admin API, such as `/v1/bans?subject=user%3A42&for=60000ms`.
fn ban_path(subject: &str, duration: Option<Duration>) -> String {
    let mut path = format!("/v1/bans?subject={}", utf8_percent_encode(subject, NON_ALPHANUMERIC));
    if let Some(duration) = duration {
        path += &format!("&for={}ms", duration.as_millis());
    }
    path
}
