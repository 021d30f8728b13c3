//! Comparison of what a command printed with what the page shows.
//!
//! In the text of a page, `…` stands for anything; a line of only `…` for any number of lines. Times differ from run to
//! run: a number after one of [`TIMES`] is not compared. Nor is white space at the end: many bodies end without a line
//! end. Everything else must be equal.

/// What precedes a time: fields of headers and bodies, texts, and the output of the clients on the pages.
const TIMES: [&str; 17] = [
    "x-ratelimit-reset: ",
    "retry-after: ",
    ";t=",
    "\"retry_after\":",
    "\"retry_after_ms\":",
    "\"next_after_ms\":",
    "\"reset_after_ms\":",
    "try again in ",
    "retry after  ",
    "more after   ",
    "reset after  ",
    "is banned in the store for ",
    "denied for ",
    "denies it for ",
    "(False, '",
    "wait: '",
    "[false,0,",
];

/// Returns whether a command that printed `actual` did what a page with the output `shown` says.
pub(crate) fn is_as_shown(shown: &str, actual: &str) -> bool {
    let (shown, actual) = (normalized(shown), normalized(actual));
    // A line of `…` includes its end, so that it can stand for no line.
    let shown = format!("\n{shown}").replace("\n…\n", "\n…");
    let actual = format!("\n{actual}");
    let parts: Vec<&str> = shown.split('…').collect();
    let [first, middle @ .., last] = &parts[..] else { return shown == actual };
    let Some(mut rest) = actual.strip_prefix(first) else { return false };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Returns the text without times and carriage returns, and with one line end at its end.
fn normalized(text: &str) -> String {
    let mut text = text.replace('\r', "").trim_end().to_owned() + "\n";
    for before in TIMES {
        let mut parts = text.split(before);
        let first = parts.next().unwrap().to_owned();
        text = parts.fold(first, |text, part| {
            let rest = after_time(part);
            text + before + if rest.len() < part.len() { "TIME" } else { "" } + rest
        });
    }
    text
}

/// Returns the text after a number, or after a time such as `59m 50s` or `1day 2h`.
fn after_time(text: &str) -> &str {
    let after_number = text.trim_start_matches(|letter: char| letter.is_ascii_digit() || letter == '.');
    if after_number.len() == text.len() {
        return text;
    }
    let units = ["days", "day", "ms", "h", "m", "s"];
    let after_unit = units.iter().find_map(|unit| after_number.strip_prefix(unit)).unwrap_or(after_number);
    match after_unit.strip_prefix(' ') {
        Some(next) if next.starts_with(|letter: char| letter.is_ascii_digit()) => after_time(next),
        _ => after_unit,
    }
}

#[test]
fn times_and_what_is_left_out_are_not_compared() {
    for (shown, actual, is_same) in [
        ("one\n", "one\n", true),
        ("one\n", "two\n", false),
        ("one\n", "one", true),
        ("one\n", "one two", false),
        ("one\n", "one\ntwo\n", false),
        ("", "one\n", false),
        ("one\n…\n", "one\ntwo\nthree\n", true),
        ("one\n…\n", "one\n", true),
        ("one\n…\nfour\n", "one\ntwo\nfour\n", true),
        ("one\n…\nfour\n", "one\nfour\n", true),
        ("one\n…\nfour\n", "one\ntwo\n", false),
        ("{\"allowed\":true,…}\n", "{\"allowed\":true,\"source\":\"store\"}\n", true),
        ("{\"allowed\":true,…}\n", "{\"allowed\":false,\"source\":\"store\"}\n", false),
        ("retry-after: 60\n", "retry-after: 57\r\n", true),
        ("retry-after: 60\n", "retry-after: \n", false),
        ("retry-after: 60\n", "retry-later: 60\n", false),
        ("x-ratelimit-limit: 10\n", "x-ratelimit-limit: 11\n", false),
        ("\"api\";r=0;t=60, \"day\";r=9;t=86400\n", "\"api\";r=0;t=59, \"day\";r=9;t=86399\n", true),
        ("\"api\";r=0;t=60, \"day\";r=9;t=86400\n", "\"api\";r=1;t=60, \"day\";r=9;t=86400\n", false),
        ("try again in 59.9s\n", "try again in 1.25s\n", true),
        ("retry after  59m 50s\n", "retry after  0s\n", true),
        ("is banned in the store for 1h\n", "is banned in the store for 59m 59s\n", true),
        ("is banned in the store for 1h\n", "is banned in the store permanently\n", false),
        ("0 of 100, 20/s\n", "1 of 100, 20/s\n", false),
    ] {
        assert_eq!(is_as_shown(shown, actual), is_same, "{shown:?} {actual:?}");
    }
}
