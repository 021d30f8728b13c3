//! Reports as they are printed, and that they show no secret.

use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, NarratableReportHandler};

use super::{load, load_yaml};
use crate::config::{Code, Format, Severity};

fn drawn(report: &dyn Diagnostic) -> String {
    let mut text = String::new();
    let theme = GraphicalTheme::unicode_nocolor();
    GraphicalReportHandler::new_themed(theme)
        .with_width(100)
        .with_links(false)
        .render_report(&mut text, report)
        .unwrap();
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

#[test]
fn a_misspelt_field_is_underlined_with_the_nearest_spelling() {
    let report = load("[[rules]]\nname = \"shorten\"\nlimts = [\"10/min\"]\n").unwrap_err();
    assert_eq!(
        drawn(&report.findings()[0]),
        r#"unknown-field

  × unknown field `limts`
   ╭─[tidegate.toml:3:1]
 2 │ name = "shorten"
 3 │ limts = ["******"]
   · ──┬──
   ·   ╰── here
   ╰────
  help: did you mean `limits`?"#
    );
}

#[test]
fn a_quota_of_zero_is_underlined_within_its_limit() {
    let report = load_yaml("rules:\n  - name: shorten\n    limits: [100/day, 0/min]\n").unwrap_err();
    assert_eq!(
        drawn(&report.findings()[0]),
        r#"invalid-limit

  × expected a quota from 1 to 10000000 in digits
   ╭─[tidegate.yaml:3:23]
 2 │   - name: shorten
 3 │     limits: [100/day, 0/min]
   ·                       ┬
   ·                       ╰── here
   ╰────
  help: QUOTA/WINDOW [ALGORITHM] [option=value …], for example 10/min or 100/min token-bucket
        burst=20"#
    );
}

#[test]
fn a_warning_is_printed_as_a_warning() {
    let loaded = load("trusted_proxies = [\"0.0.0.0/0\"]\n[[rules]]\nname = \"all\"\nlimits = [\"10/min\"]\n").unwrap();
    assert_eq!(
        drawn(&loaded.findings[0]),
        r#"all-proxies-trusted

  ⚠ every address is trusted as a proxy, so every client can choose its own address
   ╭─[tidegate.toml:1:20]
 1 │ trusted_proxies = ["0.0.0.0/0"]
   ·                    ─────┬─────
   ·                         ╰── here
 2 │ [[rules]]
   ╰────
  help: list only the networks of your own proxies"#
    );
}

#[test]
fn all_errors_of_reading_and_of_checking_are_in_one_report() {
    let report = load("deadline = \"soon\"\n[[rules]]\nname = \"a\"\nlimits = [10]\n").unwrap_err();
    let shown = report.to_string();
    assert!(
        shown.starts_with("tidegate.toml is invalid: 2 errors, the first: invalid-time: expected a time"),
        "{shown}"
    );
    assert!(shown.ends_with(" (tidegate.toml:1:12)") && !shown.contains('\n'), "{shown}");
    let report = load("[[rules]]\nname = \"a\"\nlimits = [10]\n").unwrap_err();
    let shown = report.to_string();
    assert!(shown.starts_with("tidegate.toml is invalid: 1 error: wrong-type: expected a limit: "), "{shown}");
    assert!(shown.ends_with(", found a number (tidegate.toml:3:11)"), "{shown}");
    let report = load("deadline = \"soon\"\n[[rules]]\nname = \"a\"\nlimits = [\"10\"]\n").unwrap_err();
    let mut text = String::new();
    NarratableReportHandler::new().render_report(&mut text, &report).unwrap();
    for part in
        ["expected a time", "diagnostic code: invalid-time", "expected a / between", "diagnostic code: invalid-limit"]
    {
        assert!(text.contains(part), "{text}");
    }
}

/// Each case: a file, and the message and the help of its only error.
#[test]
fn help_says_how_to_write_a_list_and_a_time() {
    for (text, message, help) in [
        (
            "[rules]\nname = \"a\"\nlimits = [\"1/s\"]\n",
            "expected a list, found a table",
            "write [[rules]], with two brackets, before each entry of the list",
        ),
        (
            "[plan_sources.addresses]\nplan = \"a\"\n",
            "expected a list, found a table",
            "write [[plan_sources.addresses]], with two brackets, before each entry of the list",
        ),
        (
            "rules = { name = \"a\" }\n",
            "expected a list, found a table",
            "write a list: [{ … }] in TOML, or entries that begin with `-` in YAML",
        ),
        ("deadline = 25\n", "this time has no unit", "write it with a unit and in quotes, such as \"25ms\" or \"25s\""),
        (
            "deadline = \"25\"\n",
            "this time has no unit",
            "write it with a unit and in quotes, such as \"25ms\" or \"25s\"",
        ),
        (
            "[[rules]]\nname = \"a\"\nlimits = [{ quota = 10, window = 60 }]\n",
            "this time has no unit",
            "write it with a unit and in quotes, such as \"60ms\" or \"60s\"",
        ),
    ] {
        let report = load(text).unwrap_err();
        let errors = report.findings().iter().filter(|finding| finding.severity() == Severity::Error);
        let shown: Vec<_> = errors.map(|finding| (finding.message(), finding.help_text())).collect();
        assert_eq!(shown, [(message, Some(help))], "{text}");
    }
}

/// A file with 17 errors of different kinds, several of them in one table.
const BROKEN: &str = r#"deadline = "soon"
instances = "three"
[[bans]]
by = "ip"
value = 5
until = "yesterday"
[plans.default]
limits = ["0/min"]
upgradeurl = "x"
[[keys]]
sha256 = "xx"
plann = "default"
[[rules]]
limits = ["0/min"]
by = ["usre"]
[[rules]]
name = "two words"
limits = [5, "10/fortnight"]
match = { path = "nope", methodz = "GET" }
[anonymize]
secret_env = "NO_SUCH"
"#;

#[test]
fn an_error_in_a_table_hides_no_other_error_of_that_table() {
    let report = load(BROKEN).unwrap_err();
    let found: Vec<(&str, usize)> =
        report.findings().iter().map(|finding| (finding.code().as_str(), finding.place().unwrap().1)).collect();
    assert_eq!(
        found,
        [
            ("invalid-time", 1),
            ("wrong-type", 2),
            ("wrong-type", 5),
            ("invalid-time", 6),
            ("invalid-limit", 8),
            ("unknown-field", 9),
            ("invalid-key", 11),
            ("unknown-field", 12),
            ("missing-field", 13),
            ("invalid-limit", 14),
            ("invalid-subject", 15),
            ("invalid-name", 17),
            ("wrong-type", 18),
            ("invalid-limit", 18),
            ("invalid-path", 19),
            ("unknown-field", 19),
            ("secret-missing", 21),
        ]
    );
}

#[test]
fn a_value_that_cannot_be_read_causes_no_second_error() {
    for text in [
        "[[rules]]\nlimits = ['1/s']\n[[rules]]\nlimits = ['1/s']\n",
        "[[rules]]\nname = 'a'\nlimitz = ['1/s']\n",
        "[[rules]]\nname = 'a'\nlimits = [5]\n",
        "[[rules]]\nname = 'a'\nlimits = [{ quotta = 1, window = '1s' }]\n",
        "[[rules]]\nname = 'a'\nlimits = [{ quota = '1', window = '1s' }]\n",
        "[[rules]]\nname = 'a'\nby = [5]\nlimits = ['1/s']\n",
        "[[rules]]\nname = 'a'\nstore = 'memory'\nby = 5\nlimits = ['1/s']\n",
        "[plans.default]\nlimit = '1/s'\n[[rules]]\nname = 'a'\nlimits = 'plan'\n",
        "[[keys]]\nkey = 5\n",
        "[[keys]]\nkye = 'k'\n",
        "[jwt]\nalgorithm = 'HS256'\nkey = 5\n",
        "store = 'redis://h'\ninstances = 1\n[anonymize]\nsecret = 5\n",
        "[[bans]]\nby = 'ip'\nvalue = 5\n",
        "[[bans]]\nby = 'ipp'\nvalue = 'k'\n",
        "plan_sources.addresses = [{ networks = 5, plan = 'x' }]\n",
        "expect.rules = 1\n[[rules]]\nname = 5\nlimits = ['1/s']\n",
    ] {
        let report = load(text).unwrap_err();
        let per_line = if text.matches("[[rules]]").count() == 2 { 2 } else { 1 };
        assert_eq!(report.findings().len(), per_line, "{text}: {report:?}");
    }
    // Rules whose conditions cannot be read match everything, and would have too many limits together.
    let rule = |number: usize| format!("[[rules]]\nname = 'r{number}'\nmatch = 5\nlimits = ['1/s', '9/min']\n");
    let report = load(&(0..20).map(rule).collect::<String>()).unwrap_err();
    assert_eq!(report.findings().len(), 20, "{report:?}");
}

#[test]
fn an_unset_variable_is_to_be_set() {
    for (text, message, help) in [
        ("[anonymize]\nsecret_env = 'SALT'\n", "the environment variable `SALT` is not set", "`export SALT=…`"),
        (
            "[jwt]\nalgorithm = 'HS256'\nkey_env = 'JWT'\n",
            "the environment variable `JWT` is not set",
            "`export JWT=…`",
        ),
        ("[anonymize]\nsecret_env = 'a secret'\n", "that `secret_env` names is not set", "set that variable"),
        ("[jwt]\nalgorithm = 'HS256'\n", "is required", "add `key`, `key_env` or `key_file`"),
        ("[anonymize]\nsecret_env = 'A'\nsecret_file = 'b'\n", "given in several ways", "keep only one of `secret`"),
    ] {
        let report = load(text).unwrap_err();
        let finding = report.findings().iter().find(|finding| finding.code() == Code::SecretMissing).unwrap();
        let said = finding.help_text().unwrap();
        assert!(finding.message().contains(message) && said.contains(help), "{finding:?} {said}");
        assert!(!said.contains("a secret"), "{said}");
    }
}

#[test]
fn errors_in_the_keys_file_are_reported_together_with_those_of_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "[[keys]]\nsha256 = 'xx'\nplann = 'x'\n[[keys]]\nkey = 'k'\nlimits = [5, '0/s']\n";
    std::fs::write(dir.path().join("keys.toml"), keys).unwrap();
    let loader = super::loader().directory(dir.path());
    let text = "expect.keys = 9\nkeys_file = 'keys.toml'\ndeadline = 'soon'\n";
    let report = loader.load_text("tidegate.toml", text, Format::Toml).unwrap_err();
    let errors = report.findings().iter().filter(|finding| finding.severity() == Severity::Error);
    let mut found: Vec<&str> = errors.map(|finding| finding.code().as_str()).collect();
    found.sort_unstable();
    assert_eq!(found, ["invalid-key", "invalid-limit", "invalid-time", "unknown-field", "wrong-type"]);
}

#[test]
fn no_report_shows_a_secret() {
    let secrets = "store = 'redis://user:planted@h'\ninstances = 2\n[anonymize]\nsecret = 'planted-planted'\n\
                   [jwt]\nalgorithm = 'HS256'\nkey = 'planted'\n[exempt]\nkeys = ['sha256:planted']\n\
                   [[bans]]\nby = 'api_key'\nvalue = 'sha256:planted'\nuntil = 'x'\n[[keys]]\nkey = 'planted'\nplan = 'x'\n";
    let broken = [
        secrets.to_owned(),
        format!("{secrets}unknown = 1\n"),
        format!("{secrets}secrets = 'planted'\n"),
        format!("{secrets}key = 'planted\n"),
        secrets.replace("key = 'planted'", "key = ['planted']"),
        secrets.replace("secret = 'planted-planted'", "secrte = 'planted-planted'"),
        secrets.replace("key = 'planted'", "key = 777000777"),
        // Passwords with characters that end a string elsewhere.
        "store = \"redis://:it's-planted@db/0\"\ninstances = 0\n".to_owned(),
        "store = \"redis://:as planted@db/0\"\ninstances = 0\n".to_owned(),
        "# store = \"redis://:it's-planted@db/0\"\ninstances = 0\n".to_owned(),
        "store = \"redis://:it's-planted@db/0\"\ninstances = \n".to_owned(),
        "store = \"redis://:planted\\u0040db/0\"\ninstances = 0\n".to_owned(),
        // Stores that are not URLs.
        "store = 'app:planted@db:6379'\n".to_owned(),
        "store = 'redis:/:planted@db'\n".to_owned(),
        "stoer = 'app:planted@db:6379'\n".to_owned(),
        "store = 'app:planted@db:6379'\ninstances = \n".to_owned(),
        "store = 'app:planted@db:6379\n".to_owned(),
        "# store = 'app:planted@db:6379'\ninstances = 0\n".to_owned(),
        // Keys and URLs in place of fields.
        "'redis://:planted@db' = 1\n".to_owned(),
        "'redis://:planted@db' = \n".to_owned(),
        "[keys]\nplanted = { plan = 'pro' }\n".to_owned(),
        "[keys.planted]\nplan = 'pro'\n".to_owned(),
        "keys.planted = 'pro'\n".to_owned(),
        "keys = { planted = 'pro' }\n".to_owned(),
        "[[keys]]\nplanted = 'pro'\n".to_owned(),
        "[keys]\nplanted = \n".to_owned(),
        "[keys.planted]\nplan = \n".to_owned(),
        // A secret in place of the name of its variable.
        "store = 'redis://h'\ninstances = 1\n[anonymize]\nsecret_env = 'planted!'\n".to_owned(),
        "store = 'redis://h'\ninstances = 1\n[anonymize]\nsecret_env = 'planted'\n".to_owned(),
        "[jwt]\nalgorithm = 'HS256'\nkey_env = 'planted'\n".to_owned(),
        "[jwt]\nalgorithm = 'HS256'\nkey_env = 'planted'\nissuer = \n".to_owned(),
    ];
    for text in broken {
        let report = load(&text).unwrap_err();
        let shown = format!("{}{report:?}{report}", drawn(&report));
        assert!(!shown.contains("planted") && !shown.contains("777000"), "{shown}");
        for finding in report.findings() {
            assert!(!drawn(finding).contains("planted"), "{}", drawn(finding));
        }
    }
}

#[test]
fn no_report_about_yaml_shows_a_secret() {
    for text in [
        "store: redis://:it's-planted@db/0\ninstances: 0\n",
        "store: 'app:planted@db:6379'\n",
        "store:\n  app:planted@db:6379\ninstances: 0\n",
        "store: >-\n  app:planted@db:6379\ninstances: [\n",
        "keys:\n  planted: pro\n",
        "keys:\n  - planted: pro\n",
        "keys: { planted: { plan: pro } }\n",
        "anonymize: { secret_env: planted }\nstore: redis://h\ninstances: 1\n",
    ] {
        let report = load_yaml(text).unwrap_err();
        let shown = format!("{}{report:?}{report}", drawn(&report));
        assert!(!shown.contains("planted"), "{shown}");
    }
}

#[test]
fn a_report_shows_values_that_are_not_secret() {
    for (text, shown) in [
        ("store = 'redis://u:pw@db.example/x'\ninstances = 1\n", "redis://****@db.example/x"),
        ("[anonymize]\nsecret_env = 'NO_SUCH'\n", "the environment variable `NO_SUCH` is not set"),
        ("[[keys]]\nkye = 'k'\n", "unknown field `kye`"),
        ("[[keys]]\nplam = 'free'\n", "unknown field `plam`"),
        ("[[keys]]\nid = 'k'\n", "accepted here: key, sha256"),
        ("[[bans]]\nby = 'ip'\nvalue = 'x'\nreason = 'ask me@example.com'\n", "me@example.com"),
    ] {
        let report = load(text).unwrap_err();
        assert!(drawn(&report).contains(shown), "{}", drawn(&report));
    }
}

#[test]
fn a_syntax_error_in_yaml_has_its_line() {
    for (text, line) in
        [("rules:\n  - name: a\n   b: c\n", 3), ("é: [1\n", 1), ("a: 1\na: 2\n", 2), ("store: \"x\n", 1)]
    {
        let report = load_yaml(text).unwrap_err();
        let finding = &report.findings()[0];
        assert_eq!(finding.code(), crate::config::Code::Syntax, "{text}: {report:?}");
        assert_eq!(finding.place().map(|(_, line, _)| line), Some(line), "{text}: {report:?}");
    }
}

#[test]
fn toml_and_yaml_give_the_same_errors_at_the_same_values() {
    let toml = "prefix = 7\ninstances = -1\napi_keys = 'some'\nshadow = 'yes'\nexempt.paths = [1, '/x', 2]\nexempt.adresses = 'x'\n\
                [anonymize]\nsecret = 5\nrotate = 'hourly'\n[plans.free]\nlimit = '1/s'\n[plans.pro]\n\
                [[rules]]\nname = 'a'\nlimits = ['1/s', { quotta = 1 }]\nmode = 'of'\n[[rules]]\nlimits = 'plan'\nzzz = 1\n\
                [[rules]]\nname = 'b'\nmatch.path = 'x'\nlimits = '0/s'\nby = ['user', 'usre']\n\
                [[keys]]\nkey = 5\nplan = []\n[[keys]]\nkey = ' k'\n";
    let yaml = "
prefix: 7
instances: -1
api_keys: some
shadow: 'yes'
exempt:
  paths: [1, /x, 2]
  adresses: x
anonymize:
  secret: 5
  rotate: hourly
plans:
  free:
    limit: 1/s
  pro: {}
rules:
  - name: a
    limits: [1/s, { quotta: 1 }]
    mode: of
  - limits: plan
    zzz: 1
  - name: b
    match: { path: x }
    limits: 0/s
    by: [user, usre]
keys:
  - key: 5
    plan: []
  - key: ' k'
";
    use crate::config::Code::{
        InvalidKey, InvalidLimit, InvalidPath, InvalidSubject, InvalidValue, MissingField, UnknownField, WrongType,
    };
    let expected = [
        (WrongType, "7"),
        (InvalidValue, "-1"),
        (InvalidValue, "some"),
        (WrongType, "yes"),
        (WrongType, "1"),
        (WrongType, "2"),
        (UnknownField, "adresses"),
        (WrongType, "5"),
        (InvalidValue, "hourly"),
        (UnknownField, "limit"),
        (MissingField, "pro"),
        (UnknownField, "quotta"),
        (InvalidValue, "of"),
        (MissingField, "rule"),
        (UnknownField, "zzz"),
        (InvalidPath, "x"),
        (InvalidLimit, "0"),
        (InvalidSubject, "usre"),
        (WrongType, "5"),
        (WrongType, "[]"),
        (InvalidKey, " k"),
    ];
    for (text, report) in [(toml, load(toml).unwrap_err()), (yaml, load_yaml(yaml).unwrap_err())] {
        let found: Vec<_> = report.findings().iter().map(|finding| (finding.code(), finding.span().unwrap())).collect();
        let codes: Vec<_> = found.iter().map(|(code, _)| *code).collect();
        assert_eq!(codes, expected.map(|(code, _)| code), "{report:?}");
        for ((code, span), (_, part)) in found.iter().zip(expected).filter(|((code, _), _)| *code != MissingField) {
            let underlined = text[span.start..span.end].trim_matches(['\'', '"']);
            // Only the start of a list is known in YAML.
            assert!(underlined == part || part.starts_with(underlined), "{code:?}: {underlined} instead of {part}");
        }
    }
}

#[test]
fn a_file_that_cannot_be_parsed_is_reported_by_line_and_column_and_not_quoted() {
    for (report, place) in [
        (load("store = 'memory'\nprefix = = 'planted'\n").unwrap_err(), "tidegate.toml, line 2, column 10"),
        (load("prefix = 'é' 'planted'\n").unwrap_err(), "tidegate.toml, line 1, column 14"),
        (load_yaml("rules:\n  - name: planted\n   b: c\n").unwrap_err(), "tidegate.yaml, line 3, column 4"),
        (load_yaml("prefix: &planted x\nstore: *plante\n").unwrap_err(), "tidegate.yaml, line 2, column 8"),
        (load_yaml("[planted]: planted\n").unwrap_err(), "tidegate.yaml, line 1, column 1"),
        (load_yaml("prefix: !planted x\n? {planted: 1}\n: 2\n").unwrap_err(), "tidegate.yaml, line 2, column"),
    ] {
        let shown = drawn(&report).replace("\n  │ ", " ");
        assert!(shown.contains("expected") || shown.contains("unknown anchor"), "{shown}");
        assert!(shown.contains(place) && !shown.contains("plante") && !shown.contains('╭'), "{place}: {shown}");
        assert!(!format!("{report:?} {report}").contains("plante"), "{report:?}");
    }
}

#[test]
fn hostile_files_are_refused_without_harm() {
    let deep = format!("a = {}1{}", "[".repeat(5_000), "]".repeat(5_000));
    assert!(load(&deep).is_err());
    let deep = format!("a: {}1{}", "[".repeat(5_000), "]".repeat(5_000));
    assert!(load_yaml(&deep).is_err());
    let laughs = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n\
                  d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n";
    assert!(load_yaml(laughs).is_err());
    assert!(load("a = 99999999999999999999").is_err());
    assert!(load_yaml("instances: 99999999999999999999").is_err());
    assert!(load("\u{feff}store = 'memory'").is_ok());
}

#[test]
fn unknown_placeholder_is_underlined_within_its_template() {
    let text =
        "body = { template = '{\"wait\":{retry_afer},\"x\":{nothing}}' }\n[[rules]]\nname = 'a'\nlimits = ['1/s']\n";
    let report = load(text).unwrap_err();
    assert_eq!(
        drawn(&report.findings()[0]),
        r#"invalid-value

  × unknown placeholder `{retry_afer}`
   ╭─[tidegate.toml:1:30]
 1 │ body = { template = '{"wait":{retry_afer},"x":{nothing}}' }
   ·                              ──────┬─────
   ·                                    ╰── here
 2 │ [[rules]]
   ╰────
  help: did you mean {retry_after}?"#
    );
    assert_eq!(report.findings()[1].to_string(), "unknown placeholder `{nothing}`");
    assert_eq!(report.findings().len(), 2, "all of them are reported");
}

#[test]
fn mistakes_in_templates_are_reported_with_what_is_expected() {
    for (body, phrase) in [
        ("{ template = 'Too many requests' }", "the template is not valid JSON"),
        ("{ template = 'x', content_type = 'image/png' }", "expected a content type of JSON, HTML, XML or text"),
        ("{ content_type = 'text/plain' }", "missing field `template`"),
        ("{ template = '1', contenttype = 'text/plain' }", "unknown field `contenttype`"),
        ("3", "expected one of json, problem, text, or a table with a template"),
        ("'jsno'", "expected one of json, problem, text"),
    ] {
        for at in ["", "[[rules]]\nname = 'a'\nlimits = ['1/s']\n"] {
            let rules = if at.is_empty() { "[[rules]]\nname = 'a'\nlimits = ['1/s']\n" } else { "" };
            let report = load(&format!("{at}body = {body}\n{rules}")).unwrap_err();
            assert!(report.findings()[0].to_string().contains(phrase), "{body}: {report}");
        }
    }
    for (template, phrase) in [
        ("x".repeat(500_000), "at most 16384 bytes"),
        ("{plan}".repeat(101), "at most 100 placeholders"),
        ("x".repeat(1 << 20), "at most 16384 bytes"),
        ("{plan}".repeat(10_000), "at most 16384 bytes"),
    ] {
        let text = format!("body = {{ template = '{template}', content_type = 'text/plain' }}\n");
        let report = load(&format!("{text}[[rules]]\nname = 'a'\nlimits = ['1/s']\n")).unwrap_err();
        assert!(report.findings()[0].to_string().contains(phrase), "{phrase}: {}", report.findings()[0]);
    }
}
