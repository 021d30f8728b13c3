//! Reloads: which configurations may replace the active one, and which findings a reload has.

use std::path::{Path, PathBuf};

use super::{load, load_yaml};
use crate::config::{Code, Format, Loaded, Loader, PartKind, Report};

const RULE: &str = "[[rules]]\nname = 'all'\nlimits = ['10/min']\n";

fn reload(running: &str, text: &str) -> Result<Loaded, Report> {
    load(text)?.into_replacement_of(&load(running).unwrap())
}

fn errors(running: &str, text: &str) -> Vec<Code> {
    let report = reload(running, text).expect_err(text);
    report
        .findings()
        .iter()
        .map(|finding| finding.code())
        .filter(|code| !matches!(code, Code::Removed | Code::NoRules))
        .collect()
}

/// Returns the removed parts, as `kind name`.
fn removed(loaded: &Loaded) -> Vec<String> {
    loaded.changes.removed.iter().map(|part| format!("{} {}", part.kind.as_str(), part.name)).collect()
}

#[test]
fn a_reload_without_rules_fails_unless_the_file_has_an_empty_list() {
    for text in ["store = 'memory'\n", "[plans.default]\nlimits = ['1/s']\n"] {
        assert!(errors(RULE, text).contains(&Code::RulesGone), "{text}");
    }
    assert_eq!(errors(RULE, ""), [Code::FileCutOff]);
    assert_eq!(errors("store = 'memory'\n", " \n"), [Code::FileCutOff], "although there were no rules");
    assert_eq!(errors(RULE, "# tidegate.toml\n"), [Code::RulesGone]);

    let emptied = reload(RULE, "rules = []\n").unwrap();
    assert_eq!(removed(&emptied), ["rule all"]);
    assert!(emptied.findings.iter().any(|finding| finding.code() == Code::Removed));
    assert!(reload("", "").is_ok() && reload("", RULE).is_ok() && reload("# nothing\n", "# still nothing\n").is_ok());
    // `rules:` without a value is not an empty list.
    assert!(load_yaml("rules:\n").is_err());
}

#[test]
fn a_reload_without_keys_fails_unless_the_file_has_an_empty_list() {
    let running = format!("[[keys]]\nkey = 'planted'\nname = 'acme'\n{RULE}");
    assert_eq!(errors(&running, RULE), [Code::KeysGone]);
    assert_eq!(removed(&reload(&running, &format!("keys = []\n{RULE}")).unwrap()), ["key acme"]);
}

#[test]
fn a_reload_cannot_remove_an_expectation() {
    let running = format!("expect = {{ rules = 1, keys = 0 }}\n{RULE}");
    assert_eq!(errors(&running, RULE), [Code::ExpectationGone, Code::ExpectationGone]);
    assert_eq!(errors(&running, &format!("expect.rules = 1\n{RULE}")), [Code::ExpectationGone]);
    let two =
        format!("expect = {{ rules = 2, keys = 0 }}\n{RULE}[[rules]]\nname = 'more'\nby = 'ip'\nlimits = ['1/s']\n");
    assert!(reload(&running, &two).is_ok(), "another number is an edit");
    assert!(reload(RULE, &running).is_ok());
}

#[test]
fn with_an_expectation_the_beginning_of_the_active_file_is_refused() {
    let running = format!("expect.rules = 1\n{RULE}cost = 10\n# the end\n");
    let cut = running.strip_suffix("cost = 10\n# the end\n").unwrap();
    assert_eq!(errors(&running, cut), [Code::FileCutOff]);
    assert!(reload(&running, &format!("{cut}# on purpose\n")).is_ok());
    assert!(reload(&running, running.strip_suffix("# the end\n").unwrap()).is_ok(), "nothing is missing");
    assert!(reload(&running, &running).unwrap().changes.is_empty());
}

#[test]
fn removed_parts_are_named() {
    let plan = "[plans.default]\nlimits = ['1/s']\n";
    let by_plan = "[[rules]]\nname = 'all'\nlimits = 'plan'\n";
    for (running, text, expected) in [
        (format!("{RULE}[[rules]]\nname = 'b'\nby = 'ip'\nlimits = ['1/s']\n"), RULE.to_owned(), &["rule b"][..]),
        (
            "[[rules]]\nname='a'\nlimits=['1/s', '9/min', '8/min']\n".into(),
            "[[rules]]\nname='a'\nlimits=['2/s', '9/min']\n".into(),
            &["limit min of rule a"],
        ),
        (
            "[[rules]]\nname='a'\nlimits=[{ name = 'x', quota = 1, window = '1s', count_denied = true }]\n".into(),
            "[[rules]]\nname='a'\nlimits=[{ name = 'x', quota = 1, window = '1s' }]\n".into(),
            &["setting count_denied of limit x of rule a"],
        ),
        (
            format!(
                "{RULE}by = ['ip', 'path']\ncost = 2\nmode = 'shadow'\nmatch = {{ methods = ['GET'], path = ['/a', '/b'] }}\n"
            ),
            format!("{RULE}by = ['ip']\nmatch = {{ path = ['/a', '/c'] }}\n"),
            &[
                "setting match.methods of rule all",
                "setting match.path of rule all",
                "setting by of rule all",
                "setting mode of rule all",
                "setting cost of rule all",
            ],
        ),
        (
            format!(
                "{plan}[plans.pro]\nlimits = ['9/s', '99/day']\nupgrade_url = 'https://e'\n[plans.x]\nlimits = ['1/s']\n{by_plan}"
            ),
            format!("{plan}[plans.pro]\nlimits = ['9/s']\n{by_plan}"),
            &["limit day of plan pro", "setting upgrade_url of plan pro", "plan x"],
        ),
        (
            format!("{plan}{by_plan}[[keys]]\nkey='k'\nname='acme'\nplan='default'\nexempt=true\n[[keys]]\nkey='l'\n"),
            format!("{plan}{by_plan}[[keys]]\nkey='k'\nname='acme'\n"),
            &["setting plan of key acme", "setting exempt of key acme", "key (unnamed)"],
        ),
        (
            format!(
                "exempt = {{ addresses = '192.0.2.7', keys = ['planted'], paths = ['/a', '/b'] }}\n{RULE}[[bans]]\nby = 'ip'\nvalue = '192.0.2.9'\n"
            ),
            format!("exempt = {{ paths = '/b' }}\n{RULE}"),
            &["exemption an address", "exemption a key", "exemption path /a", "ban by ip"],
        ),
        (
            format!(
                "trusted_proxies = ['192.0.2.0/24', '198.51.100.0/24']\non_failure = 'deny'\ndeadline = '9ms'\n{RULE}"
            ),
            format!("trusted_proxies = ['198.51.100.0/24']\n{RULE}"),
            &["setting deadline", "setting on_failure", "setting trusted_proxies"],
        ),
        (format!("{RULE}cost = 2\n"), format!("{RULE}cost = 3\n"), &[]),
    ] {
        let loaded = reload(&running, &text).unwrap();
        assert_eq!(removed(&loaded), expected, "{text}");
        assert!(!loaded.changes.is_empty());
        let output = format!("{:?} {:?}", loaded.findings, loaded.changes);
        assert!(!["planted", "192.0.2", "198.51"].iter().any(|secret| output.contains(secret)), "{output}");
    }
}

#[test]
fn a_warning_names_ten_parts_and_counts_the_others() {
    let many: String = (0..25).map(|n| format!("[[bans]]\nby = 'user'\nvalue = 'u{n}'\n")).collect();
    let loaded = reload(&format!("{RULE}{many}"), RULE).unwrap();
    let warning = loaded.findings.iter().find(|finding| finding.code() == Code::Removed).unwrap();
    assert!(warning.message().starts_with("25 bans removed: by user, "), "{warning:?}");
    assert!(warning.message().ends_with(" and 15 more"), "{warning:?}");
    assert_eq!(loaded.changes.removed_of(PartKind::Ban).count(), 25);
}

const YAML: &str = "
store: redis://h
instances: 2
trusted_proxies:
  - 10.0.0.0/8
  - '::1'
plans:
  default:
    limits:
      - 60/min
      - name: daily
        quota: 1000
        window: 1day
  anonymous:
    limits: 100/min token-bucket burst=20
keys:
  - key: first
    name: acme
  - key: second
    exempt: true
rules:
  - name: api
    limits: plan
    match:
      methods: [GET, POST]
      path:
        - /v1/*
        - /v2/*
  - name: login
    by:
      - ip
      - path
    match:
      path: /login
      headers:
        x-tenant: true
        x-kind: full
    limits:
      - 50/min
      - name: slow
        quota: 100
        window: 1day
        algorithm: token-bucket
        burst: 250
        count_denied: true
    cost: 10
    on_failure: deny
";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the configurations of the reference, the examples and the guide.
fn real_configurations() -> Vec<(String, Format)> {
    let read = |name: &str| std::fs::read_to_string(repository().join(name)).unwrap();
    let mut texts = vec![
        (super::example::complete_example(), Format::Toml),
        (read("examples/login/tidegate.toml"), Format::Toml),
        (read("examples/plans/tidegate.toml"), Format::Toml),
        (YAML.to_owned(), Format::Yaml),
    ];
    for page in std::fs::read_dir(repository().join("docs/guide")).unwrap() {
        let page = std::fs::read_to_string(page.unwrap().path()).unwrap();
        let blocks = page.split("\n```toml\n").skip(1).map(|rest| rest.split("```").next().unwrap().to_owned());
        let blocks = blocks.filter(|text| !text.starts_with("# keys.toml"));
        texts.extend(blocks.map(|text| (text, Format::Toml)));
    }
    assert!(texts.len() > 10);
    // Tests that need `expect` add it themselves.
    texts.iter_mut().for_each(|(text, _)| *text = without_expectation(text));
    texts
}

fn without_expectation(text: &str) -> String {
    text.split_inclusive('\n').filter(|line| !line.starts_with("expect = ")).collect()
}

fn real_loader() -> Loader {
    Loader::new().environment(|_| Some("0123456789abcdef".repeat(2))).directory(repository().join("examples/plans"))
}

/// Reloads from every beginning of a text. Calls `accepted` with each that is accepted and differs from the whole text.
fn cut_everywhere(running: &str, whole: &str, format: Format, mut accepted: impl FnMut(&str, Loaded)) {
    let load = |text: &str| real_loader().load_text("cut", text, format);
    let whole_loaded = load(whole).unwrap_or_else(|report| panic!("{report:?}\n{whole}"));
    let running = load(running).unwrap();
    for end in (0..whole.len()).filter(|end| whole.is_char_boundary(*end)) {
        let Ok(loaded) = load(&whole[..end]).and_then(|loaded| loaded.into_replacement_of(&running)) else { continue };
        let is_same = loaded.document.config == whole_loaded.document.config;
        if !is_same {
            accepted(&whole[..end], loaded);
        }
    }
}

#[test]
fn each_usable_beginning_of_a_real_configuration_has_a_warning() {
    for (text, format) in real_configurations() {
        cut_everywhere(&text, &text, format, |cut, loaded| {
            let is_warning = |code: Code| matches!(code, Code::Removed | Code::LineEndGone);
            let has_warning = loaded.findings.iter().any(|finding| is_warning(finding.code()));
            assert!(has_warning, "there is no warning about a file that ends here:\n{cut}");
            assert!(!loaded.rules.rules().is_empty(), "there are no rules:\n{cut}");
        });
    }
}

/// Returns the text with `expect` at its beginning, and with `expect` at its end.
fn with_expectations(text: &str, format: Format) -> [String; 2] {
    let loaded = real_loader().load_text("whole", text, format).unwrap();
    let (rules, keys) =
        (loaded.document.config.rules.len(), loaded.document.config.keys.len() + loaded.document.keys_file.keys.len());
    let end = if text.ends_with('\n') { "" } else { "\n" };
    if format == Format::Toml {
        [
            format!("expect = {{ rules = {rules}, keys = {keys} }}\n{text}{end}"),
            format!("{text}{end}[expect]\nrules = {rules}\nkeys = {keys}\n"),
        ]
    } else {
        [
            format!("expect: {{ rules: {rules}, keys: {keys} }}\n{text}{end}"),
            format!("{text}{end}expect:\n  rules: {rules}\n  keys: {keys}\n"),
        ]
    }
}

#[test]
fn with_an_expectation_no_beginning_of_a_real_configuration_is_used() {
    for (text, format) in real_configurations() {
        for whole in with_expectations(&text, format) {
            cut_everywhere(&whole, &whole, format, |cut, _| panic!("this was used:\n{cut}"));
        }
    }
}

#[test]
fn with_an_expectation_no_beginning_of_a_new_version_is_used() {
    for (text, format) in real_configurations() {
        let comment = "# an older version\n".to_owned() + &text;
        let [old_first, old_last] = with_expectations(&comment, format);
        let [first, last] = with_expectations(&text, format);
        cut_everywhere(&old_last, &last, format, |cut, _| panic!("this was used:\n{cut}"));
        // If `expect` comes first, lines after the last `limits` may be missing, but no rule and no key is.
        cut_everywhere(&old_first, &first, format, |cut, loaded| {
            assert!(cut.ends_with('\n'), "{cut}");
            let removed = loaded.changes.removed_of(PartKind::Rule).chain(loaded.changes.removed_of(PartKind::Key));
            assert_eq!(removed.count(), 0, "{cut}");
        });
    }
}

#[test]
fn beginning_of_a_keys_file_has_a_warning_and_is_refused_with_an_expectation() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read_to_string(repository().join("examples/plans").join(name)).unwrap();
    let [file, keys_file] = ["tidegate.toml", "keys.toml"].map(|name| dir.path().join(name));
    let (text, keys) = (read("tidegate.toml"), read("keys.toml") + "exempt = true\n");
    for (text, is_expected) in [(text.clone(), false), (with_expectations(&text, Format::Toml)[0].clone(), true)] {
        std::fs::write(&file, text).unwrap();
        std::fs::write(&keys_file, &keys).unwrap();
        let running = real_loader().load(&file).unwrap();
        let entries = |loaded: &Loaded| loaded.document.keys_file.keys.clone();
        for end in 0..keys.len() {
            std::fs::write(&keys_file, &keys[..end]).unwrap();
            let Ok(loaded) = real_loader().reload(&file, &running) else { continue };
            if entries(&loaded) == entries(&running) {
                continue;
            }
            let cut = &keys[..end];
            assert!(!is_expected, "this was used:\n{cut}");
            let is_warning = |code: Code| matches!(code, Code::Removed | Code::LineEndGone);
            assert!(loaded.findings.iter().any(|finding| is_warning(finding.code())), "there is no warning:\n{cut}");
        }
    }
}

#[test]
fn a_truncated_secret_is_refused_and_another_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let [file, salt] = ["tidegate.toml", "salt"].map(|name| dir.path().join(name));
    let secret = "planted-planted-planted-planted-planted";
    std::fs::write(&file, format!("{RULE}[anonymize]\nsecret_file = 'salt'\n")).unwrap();
    std::fs::write(&salt, secret).unwrap();
    let running = Loader::new().load(&file).unwrap();
    for end in 0..secret.len() {
        std::fs::write(&salt, &secret[..end]).unwrap();
        let report = Loader::new().reload(&file, &running).unwrap_err();
        assert!(!format!("{report:?}").contains("planted"), "{report:?}");
    }
    std::fs::write(&salt, "another-another-another-another").unwrap();
    assert!(Loader::new().reload(&file, &running).is_ok());
}

#[test]
fn every_file_that_is_read_is_watched_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    let secret = "planted-planted-planted-planted-planted";
    for (name, text) in [("keys.toml", "keys = []\n"), ("salt", secret), ("receipts", secret), ("jwt", secret)] {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let names = "keys_file = 'keys.toml'\nreceipt_secret_file = 'receipts'\nanonymize = { secret_file = 'salt' }\n\
                 jwt = { algorithm = 'HS256', key_file = 'jwt' }\n";
    std::fs::write(&file, format!("{names}{RULE}")).unwrap();
    let loaded = Loader::new().load(&file).unwrap();
    let mut read: Vec<&PathBuf> = loaded.files[1..].iter().map(|(file, _)| file).collect();
    let mut named: Vec<&PathBuf> = loaded.referenced_files.iter().collect();
    assert_eq!(read.len(), 4);
    read.sort();
    named.sort();
    assert_eq!(named, read);
    assert_eq!(Loader::new().referenced_files(&file), loaded.referenced_files);
}

#[test]
fn a_file_that_is_not_regular_is_read_up_to_a_limit_and_not_reloaded() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
    let error = crate::config::complete::read(&file, 1_000).unwrap_err().to_string();
    assert_eq!(error, "it has more than 1000 bytes");
    let report = Loader::new().reload(&file, &load(RULE).unwrap()).unwrap_err();
    assert!(report.to_string().contains("not a regular file"), "{report}");
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, RULE).unwrap();
    assert_eq!(crate::config::complete::read(&file, RULE.len() as u64).unwrap().0, RULE.as_bytes());
}
