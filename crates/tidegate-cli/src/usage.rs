//! Tips for arguments that are not accepted: what to write instead.

use tidegate::Limit;

/// The maximum number of words of a limit.
const LIMIT_WORDS_MAX: usize = 6;

/// Options of other programs, and what they are here: the commands (all if there are none), the options, and the tip, in
/// which `{address}` is replaced by the address that the option's value probably means.
const OTHER_OPTIONS: [(&[&str], &[&str], &str); 4] = [
    (
        &["serve"],
        &["--port", "-p", "--host", "--bind", "--listen", "--addr", "--address"],
        "the address of the HTTP listener is set by --http ADDRESS, such as --http {address}",
    ),
    (
        &["gateway"],
        &["--port", "-p", "--host", "--bind", "--http", "--addr", "--address"],
        "the address of the gateway is set by --listen ADDRESS, such as --listen {address}",
    ),
    (&[], &["--redis", "--redis-url"], "the store is set by --store URL, such as --store redis://127.0.0.1:6379"),
    (&[], &["-c", "-f", "--config-file"], "the configuration file is set by --config FILE"),
];

/// Returns what to write instead of the argument `refused`, which is unknown or has an invalid value. Returns `None` if
/// that is not known.
///
/// `arguments` are the arguments of the command, its name first. The tip repeats arguments only if together they are a
/// limit, or if one is a port.
pub(crate) fn tip(refused: &str, arguments: &[String]) -> Option<String> {
    let index =
        arguments.iter().position(|argument| argument.split('=').next() == Some(refused) || argument == refused)?;
    other_option(refused, index, arguments).or_else(|| unquoted_limit(index, arguments))
}

/// Returns the tip for an option that another program has.
fn other_option(refused: &str, index: usize, arguments: &[String]) -> Option<String> {
    let command = arguments.first()?.as_str();
    let applies = |commands: &[&str]| commands.is_empty() || commands.contains(&command);
    let (_, _, tip) =
        OTHER_OPTIONS.into_iter().find(|(commands, options, _)| applies(commands) && options.contains(&refused))?;
    let value = arguments[index].split_once('=').map(|(_, value)| value.to_owned());
    let port = value.or_else(|| arguments.get(index + 1).cloned()).and_then(|value| value.parse::<u16>().ok());
    Some(tip.replace("{address}", &format!("127.0.0.1:{}", port.unwrap_or(8080))))
}

/// Returns the tip for a limit of several words without quotes, of which the argument at `index` is the first or the second
/// word.
fn unquoted_limit(index: usize, arguments: &[String]) -> Option<String> {
    [Some(index), index.checked_sub(1)].into_iter().flatten().find_map(|start| {
        let words: Vec<&str> = arguments[start..].iter().take(LIMIT_WORDS_MAX).map(String::as_str).collect();
        let first = words.first()?.split_once("--limit=").map_or(words[0], |(_, limit)| limit);
        (2..=words.len()).rev().find_map(|count| {
            let text = [&[first], &words[1..count]].concat().join(" ");
            match text.parse::<Limit>() {
                Ok(_) => Some(format!("a limit with spaces is one argument, so quote it: '{text}'")),
                Err(error) => error.meant().map(|limit| format!("did you mean '{limit}'?")),
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tip_says_what_to_write_instead() {
        for (line, refused, expected) in [
            ("check k 10/min sliding", "sliding", "quote it: '10/min sliding'"),
            ("check k 10/min sliding --store memory", "sliding", "quote it: '10/min sliding'"),
            ("check k 9/s token-bucket burst=20", "token-bucket", "quote it: '9/s token-bucket burst=20'"),
            ("check k 10 per minute", "10", "did you mean '10/min'?"),
            ("check k 10 per minute", "per", "did you mean '10/min'?"),
            ("check k 10 / 5min fixed-window", "/", "did you mean '10/5min fixed-window'?"),
            ("gateway --limit=10/min sliding-log", "sliding-log", "quote it: '10/min sliding-log'"),
            ("serve --port 8080", "--port", "--http ADDRESS, such as --http 127.0.0.1:8080"),
            ("serve --port=9000", "--port", "such as --http 127.0.0.1:9000"),
            ("serve -p", "-p", "such as --http 127.0.0.1:8080"),
            ("gateway --port 9000", "--port", "--listen ADDRESS, such as --listen 127.0.0.1:9000"),
            ("check k 1/s --redis localhost", "--redis", "--store URL, such as --store redis://127.0.0.1:6379"),
        ] {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let tip = tip(refused, &arguments).unwrap_or_else(|| panic!("{line}"));
            assert!(tip.ends_with(expected), "{line}: {tip}");
        }
        for (line, refused) in [
            ("check k 10/min quickly", "quickly"),
            ("check k 10/min --cost 1 more", "more"),
            ("validate --port 8080", "--port"),
            ("serve", "--port"),
        ] {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(tip(refused, &arguments), None, "{line}");
        }
    }
}
