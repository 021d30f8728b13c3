//! The commands of `tidegate key`: show and change API keys in the Redis hash of the configuration, on its store or
//! through a running instance.

use serde_json::{Map, Value, from_value, json, to_value};
use tidegate_server::{KeyChangeRequest, KeyEditError, KeyEditor};

use crate::admin::{ask_or, encode};
use crate::arguments::{KeyCommand, KeyOptions};
use crate::output::{items, print_report, text};
use crate::store::OperatorStore;
use crate::{Failure, configuration, output};

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
    let method = if change.is_some() { "PATCH" } else { "GET" };
    let path = format!("/v1/keys/{}", encode(&name));
    let report = ask_or(&options.admin, (method, &path, change.as_ref()), async || {
        let store = open(&options)?;
        let editor = editor(&store)?;
        let report = match &change {
            None => editor.show(&name).await?,
            Some(change) => editor.change(&name, &from_value::<KeyChangeRequest>(change.clone())?).await?,
        };
        Ok(to_value(report)?)
    })
    .await?;
    print_report(&report, options.json, format_key)
}

async fn list(options: &KeyOptions) -> Result<(), Failure> {
    let report = ask_or(&options.admin, ("GET", "/v1/keys", None), async || {
        let store = open(options)?;
        Ok(to_value(editor(&store)?.list().await?)?)
    })
    .await?;
    print_report(&report, options.json, |report| {
        let mut lines: String = items(&report["keys"]).map(format_key).collect();
        match (report["has_more"] == true, items(&report["keys"]).count()) {
            (true, count) => lines += &format!("… and more: only {count} keys are shown\n"),
            (false, 0) => lines += "the Redis hash has no API keys\n",
            (false, _) => {}
        }
        lines
    })
}

/// Loads the configuration of `--config`, prints its warnings, and opens its store or that of `--store`.
///
/// # Errors
/// If the configuration or the store cannot be used, the configuration has no hash of keys, or the store is the memory
/// store.
fn open(options: &KeyOptions) -> Result<OperatorStore, Failure> {
    let file = options.config.as_deref().ok_or(Failure::NoRules)?;
    let loaded = configuration::load(file, &configuration::loader(&options.store)?)?;
    if loaded.settings.key_hash.is_none() {
        return Err(KeyEditError::NoHash.into());
    }
    OperatorStore::of(loaded)
}

/// Returns the editor of the keys in a store.
fn editor(store: &OperatorStore) -> Result<KeyEditor<'_>, Failure> {
    let loaded = store.loaded.as_ref().ok_or(Failure::NoRules)?;
    Ok(KeyEditor { loaded, lookups: &store.lookups })
}

/// Formats a key as its name and a line per attribute that it has.
fn format_key(key: &Value) -> String {
    let mut lines = format!("{}\n", key["name"].as_str().unwrap_or("(no name)"));
    let mut line = |label: &str, text: &str| lines += &format!("  {label:<8} {text}\n");
    line("plan", key["plan"].as_str().unwrap_or("none: that of another source, else default"));
    for limit in items(&key["limits"]) {
        line("limit", &format!("{} ({})", text(&limit["limit"]), text(&limit["name"])));
    }
    let groups: Vec<&str> = items(&key["groups"]).map(text).collect();
    if !groups.is_empty() {
        line("groups", &groups.join(", "));
    }
    if key["exempt"] == true {
        line("exempt", "requests with this key are never limited");
    }
    if let Some(problem) = key["problem"].as_str() {
        line("ignored", problem);
    }
    line("field", text(&key["field"]));
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
