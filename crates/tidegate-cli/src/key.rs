//! The commands of `tidegate key`: show and change API keys in the Redis hash of the configuration, on its store or
//! through a running instance.

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};
use tidegate::config::Loaded;
use tidegate::rules::Lookups;
use tidegate_server::{KeyChangeRequest, KeyEditError, KeyEditor};

use crate::admin::Admin;
use crate::arguments::{KeyCommand, KeyOptions};
use crate::{Failure, configuration, output, store};

/// Runs `tidegate key`. Returns whether the key exists; if not, the reason is printed to standard error. `list` always
/// returns `true`.
///
/// # Errors
/// If the options or the change are invalid, several keys have the name, the configuration lists the key or has no hash,
/// the instance or the store does not answer, or the output cannot be written.
pub(crate) async fn key(command: KeyCommand) -> Result<bool, Failure> {
    match run(command).await {
        Ok(()) => Ok(true),
        Err(Failure::UnknownKey { message }) => {
            output::print_error(message);
            Ok(false)
        }
        Err(failure) => Err(failure),
    }
}

async fn run(command: KeyCommand) -> Result<(), Failure> {
    let (name, change, options) = match command {
        KeyCommand::List(options) => return list(&options).await,
        KeyCommand::Show(show) => (show.name, None, show.options),
        KeyCommand::Set(set) => {
            let limits = (!set.limits.is_empty()).then(|| json!(set.limits));
            let groups = (!set.groups.is_empty()).then(|| json!(set.groups));
            (set.name, Some([("plan", set.plan.map(Value::from)), ("limits", limits), ("groups", groups)]), set.options)
        }
        KeyCommand::Unset(unset) => {
            let removed = |is_removed: bool| is_removed.then_some(Value::Null);
            let fields = [("plan", unset.plan), ("limits", unset.limits), ("groups", unset.groups)];
            (unset.name, Some(fields.map(|(field, is_removed)| (field, removed(is_removed)))), unset.options)
        }
    };
    // The fields that are to be changed: null removes one.
    let change = change.map(|fields| {
        let present = fields.into_iter().filter_map(|(field, value)| Some((field.to_owned(), value?)));
        Value::Object(present.collect::<Map<String, Value>>())
    });
    let report = match Admin::from_options(&options.admin)? {
        Some(admin) => {
            let path = format!("/v1/keys/{}", utf8_percent_encode(&name, NON_ALPHANUMERIC));
            let method = if change.is_some() { "PATCH" } else { "GET" };
            admin.send(method, &path, change.as_ref()).await?
        }
        None => {
            let source = KeySource::open(&options)?;
            let runtime = |error: serde_json::Error| Failure::Runtime(error.into());
            let report = match change {
                None => source.editor().show(&name).await?,
                Some(change) => {
                    let change: KeyChangeRequest = serde_json::from_value(change).map_err(runtime)?;
                    source.editor().change(&name, &change).await?
                }
            };
            serde_json::to_value(report).map_err(runtime)?
        }
    };
    if options.json { output::print_line(report) } else { output::print(format_key(&report)) }
}

async fn list(options: &KeyOptions) -> Result<(), Failure> {
    let report = match Admin::from_options(&options.admin)? {
        Some(admin) => admin.send("GET", "/v1/keys", None).await?,
        None => {
            let list = KeySource::open(options)?.editor().list().await?;
            serde_json::to_value(list).map_err(|error| Failure::Runtime(error.into()))?
        }
    };
    if options.json {
        return output::print_line(report);
    }
    let keys = report["keys"].as_array().map(Vec::as_slice).unwrap_or_default();
    output::print(keys.iter().map(format_key).collect::<String>())?;
    match (report["has_more"] == true, keys.len()) {
        (true, count) => output::print_line(format_args!("… and more: only {count} keys are shown")),
        (false, 0) => output::print_line("the Redis hash has no API keys"),
        (false, _) => Ok(()),
    }
}

/// The configuration of `--config`, and the lookups on its store or that of `--store`.
struct KeySource {
    loaded: Loaded,
    lookups: Lookups,
}

impl KeySource {
    /// Loads the configuration and prints its warnings.
    ///
    /// # Errors
    /// If the configuration or the store cannot be used, or the store is the memory store.
    fn open(options: &KeyOptions) -> Result<KeySource, Failure> {
        let file = options.config.as_deref().ok_or(Failure::NoRules)?;
        let loaded = configuration::load(file, &configuration::loader(&options.store)?)?;
        if loaded.settings.key_hash.is_none() {
            return Err(KeyEditError::NoHash.into());
        }
        let (_, lookups) = store::limiter_and_lookups(&loaded.settings)?;
        Ok(KeySource { loaded, lookups })
    }

    fn editor(&self) -> KeyEditor<'_> {
        KeyEditor { loaded: &self.loaded, lookups: &self.lookups }
    }
}

/// Formats a key as its name and a line per attribute that it has.
fn format_key(key: &Value) -> String {
    let mut lines = format!("{}\n", key["name"].as_str().unwrap_or("(no name)"));
    let mut line = |label: &str, text: &str| lines += &format!("  {label:<8} {text}\n");
    line("plan", key["plan"].as_str().unwrap_or("none: that of another source, else default"));
    for limit in key["limits"].as_array().into_iter().flatten() {
        let (name, limit) = (limit["name"].as_str().unwrap_or_default(), limit["limit"].as_str().unwrap_or_default());
        line("limit", &format!("{limit} ({name})"));
    }
    let groups: Vec<&str> = key["groups"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !groups.is_empty() {
        line("groups", &groups.join(", "));
    }
    if key["exempt"] == true {
        line("exempt", "requests with this key are never limited");
    }
    if let Some(problem) = key["problem"].as_str() {
        line("ignored", problem);
    }
    line("field", key["field"].as_str().unwrap_or_default());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_printed_with_its_limits_and_what_is_ignored() {
        let key = json!({
            "name": "acme", "plan": "pro", "exempt": false, "problem": null, "field": "api_key:0123abcd*",
            "limits": [{ "name": "per-hour", "limit": "999/h" }], "groups": ["partners", "beta"],
        });
        let expected = "acme\n  plan     pro\n  limit    999/h (per-hour)\n  groups   partners, beta\n  field    api_key:0123abcd*\n";
        assert_eq!(format_key(&key), expected);
        let ignored = format_key(&json!({ "problem": "there is no plan `gold`", "exempt": true }));
        assert!(
            ignored.starts_with("(no name)\n") && ignored.contains("  ignored  there is no plan `gold`\n"),
            "{ignored}"
        );
        assert!(ignored.contains("  exempt   requests"), "{ignored}");
    }
}
