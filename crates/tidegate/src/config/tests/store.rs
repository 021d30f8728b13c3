//! `store` as a table: URLs, credentials and TLS.

use std::fs;
use std::path::Path;

use tidegate_config::Secret;

use super::{findings, load, load_yaml, loader, underlined};
use crate::config::compile::store::SecretPlace;
use crate::config::{Code, Format, Loader, Severity};

fn url(text: &str) -> String {
    let loaded = load(text).unwrap_or_else(|report| panic!("{text}: {report:?}"));
    loaded.settings.store.expect("a store").text()
}

#[test]
fn urls_of_a_table_become_one_address() {
    for (table, expected) in [
        ("urls = 'redis://h'", "redis://h:6379"),
        ("urls = ['rediss://u:p@h:7000/3']", "rediss://h:7000/3"),
        ("kind = 'server'\nurls = ['redis://h']", "redis://h:6379"),
        ("kind = 'cluster'\nurls = ['redis://a:1', 'redis://b/']", "redis+cluster://a:1,b:6379"),
        ("kind = 'cluster'\nurls = ['rediss://u:p@a', 'rediss://u:p@[::1]:2']", "rediss+cluster://a:6379,[::1]:2"),
        ("urls = ['redis+cluster://a,b', 'redis+cluster://c']", "redis+cluster://a:6379,b:6379,c:6379"),
        ("urls = ['redis+sentinel://a,b/main/3']", "redis+sentinel://a:26379,b:26379/main/3"),
        (
            "kind = 'sentinel'\nurls = ['redis://a:1', 'redis://b']\nmaster = 'main'",
            "redis+sentinel://a:1,b:26379/main",
        ),
        ("kind = 'sentinel'\nurls = 'rediss://u:p@a'\nmaster = 'main'", "rediss+sentinel://a:26379/main"),
    ] {
        assert_eq!(url(&format!("[store]\n{table}")), expected, "{table}");
    }
    for (login, is_given) in [("u:p@", true), (":p@", true), ("", false)] {
        let text = format!("[store]\nkind = 'cluster'\nurls = ['redis://{login}a', 'redis://{login}b']");
        assert_eq!(load(&text).unwrap().settings.store.unwrap().has_login(), is_given, "{text}");
    }
    let yaml = load_yaml("store:\n  kind: cluster\n  urls: [redis://a, redis://b]\n").unwrap();
    assert_eq!(yaml.settings.store.unwrap().text(), "redis+cluster://a:6379,b:6379");
}

#[test]
fn invalid_table_has_a_finding_at_its_place() {
    for (table, code, expected) in [
        ("urls = ['redis://h']\nurl = 'x'", Code::UnknownField, "url"),
        ("urls = []", Code::InvalidStore, "[]"),
        ("kind = 'cluster'", Code::MissingField, "[store]"),
        ("kind = 'sharded'\nurls = ['redis://h']", Code::InvalidValue, "'sharded'"),
        ("urls = ['mysql://h']", Code::InvalidStore, "'mysql://h'"),
        ("urls = ['memory']", Code::InvalidStore, "'memory'"),
        ("urls = ['redis://a', 'redis://b']", Code::InvalidStore, "'redis://b'"),
        ("kind = 'server'\nurls = ['redis+cluster://a']", Code::InvalidStore, "'redis+cluster://a'"),
        ("kind = 'cluster'\nurls = ['redis://a', 'rediss://b']", Code::InvalidStore, "'rediss://b'"),
        ("kind = 'cluster'\nurls = ['redis://u:p@a', 'redis://b']", Code::InvalidStore, "'redis://b'"),
        ("kind = 'cluster'\nurls = ['redis://a/1']", Code::InvalidStore, "['redis://a/1']"),
        ("kind = 'sentinel'\nurls = ['redis://a', 'redis://b']", Code::InvalidStore, "['redis://a', 'redis://b']"),
        ("kind = 'sentinel'\nurls = ['redis://a']\nmaster = ''", Code::InvalidStore, "['redis://a']"),
        ("urls = ['redis://a']\nmaster = 'main'", Code::InvalidStore, "'main'"),
        ("urls = ['redis+sentinel://a/main']\nmaster = 'main'", Code::InvalidStore, "'redis+sentinel://a/main'"),
        ("kind = 'sentinel'\nurls = ['redis://a/main', 'redis://b']", Code::InvalidStore, "'redis://a/main'"),
        ("urls = ['redis://a']\nsentinel_username = 'u'", Code::InvalidStore, "'u'"),
        ("urls = ['redis://a']\nsentinel_username_env = 'U'", Code::InvalidStore, "'U'"),
        ("urls = ['redis+cluster://a']\nsentinel_username_file = 'u'", Code::InvalidStore, "'u'"),
        ("urls = ['redis+cluster://a']\nsentinel_password_env = 'P'", Code::InvalidStore, "'P'"),
        ("urls = ['redis://a']\nsentinel_password_file = 'p'", Code::InvalidStore, "'p'"),
        ("urls = 'redis+sentinel://a/m'\nsentinel_password_file = 'p'", Code::FileUnreadable, "'p'"),
        ("urls = 'redis+sentinel://a/m'\nsentinel_password_env = 'NO_SUCH'", Code::SecretMissing, "'NO_SUCH'"),
        (
            "urls = 'redis+sentinel://a/m'\nsentinel_password_env = 'A'\nsentinel_password_file = 'p'",
            Code::SecretMissing,
            "'A'",
        ),
        ("urls = 'redis+sentinel://a/m'\nsentinel_username = 'u'", Code::SecretMissing, "'u'"),
        (
            "urls = 'redis+sentinel://a/m'\nsentinel_username = ''\nsentinel_password_env = 'A'",
            Code::SecretMissing,
            "''",
        ),
        ("urls = ['redis://a']\ncalls_across_slots = true", Code::InvalidStore, "true"),
        ("urls = ['redis://a']\nreplicas = -1", Code::InvalidValue, "-1"),
        ("urls = ['redis://h']\ntls = { server_name = 'h' }", Code::InvalidStore, "{ server_name = 'h' }"),
        ("urls = ['rediss://h']\ntls = { min_version = '1.1' }", Code::InvalidValue, "'1.1'"),
        (
            "urls = ['rediss://h']\ntls = { server_name = 'not a name' }",
            Code::InvalidStore,
            "{ server_name = 'not a name' }",
        ),
        ("urls = ['rediss://h']\ntls = { ca_file = 'ca.pem' }", Code::FileUnreadable, "'ca.pem'"),
        ("urls = ['rediss://h']\ntls = { key_file = 'k' }", Code::InvalidStore, "'k'"),
        ("urls = ['redis://h']\npassword_file = 'p'", Code::FileUnreadable, "'p'"),
        ("urls = ['redis://h']\npassword_env = 'NO_SUCH'", Code::SecretMissing, "'NO_SUCH'"),
        ("urls = ['redis://h']\npassword_env = 'A'\npassword_file = 'p'", Code::SecretMissing, "'A'"),
        ("urls = ['redis://h']\nusername = 'u'", Code::SecretMissing, "'u'"),
        ("urls = ['redis://h']\nusername = ''\npassword_env = 'A'", Code::SecretMissing, "''"),
        ("urls = ['redis://:p@h']\npassword_file = 'p'", Code::SecretMissing, "'redis://:p@h'"),
        ("urls = 5", Code::WrongType, "5"),
    ] {
        let text = format!("instances = 1\n[store]\n{table}");
        let found = findings(&text);
        let finding = found.iter().find(|finding| finding.code() == code && underlined(&text, finding) == expected);
        assert!(finding.is_some(), "{} at {expected} in {text}: {found:?}", code.as_str());
        assert!(load(&text).is_err(), "{text}");
    }
}

#[test]
fn mixed_list_is_an_error_that_says_what_is_accepted() {
    for (table, place, mixed) in [
        ("urls = ['redis+sentinel://a/main', 'redis://b']", "'redis://b'", "redis+sentinel:// and redis://"),
        (
            "urls = ['redis://b', 'redis+sentinel://a/main']",
            "'redis+sentinel://a/main'",
            "redis:// and redis+sentinel://",
        ),
        ("urls = ['redis+cluster://a', 'redis://b']", "'redis://b'", "redis+cluster:// and redis://"),
        (
            "kind = 'cluster'\nurls = ['rediss://a', 'rediss+cluster://b']",
            "'rediss+cluster://b'",
            "rediss:// and rediss+cluster://",
        ),
        (
            "urls = ['redis+sentinel://a/m', 'redis+cluster://b']",
            "'redis+cluster://b'",
            "redis+sentinel:// and redis+cluster://",
        ),
    ] {
        let text = format!("rules = []\ninstances = 1\n[store]\n{table}");
        let found = load(&text).unwrap_err().into_findings();
        let found: Vec<_> = found.into_iter().filter(|finding| finding.severity() == Severity::Error).collect();
        let [finding] = &found[..] else { panic!("{text}: {found:?}") };
        assert_eq!((finding.code(), underlined(&text, finding)), (Code::InvalidStore, place), "{text}");
        assert_eq!(finding.message(), format!("the list mixes {mixed} URLs"), "{text}");
        let help = miette::Diagnostic::help(finding).expect("a help").to_string();
        assert!(help.contains("`kind`") && help.contains("`master`"), "{help}");
    }
}

#[test]
fn reports_show_no_password() {
    for table in [
        "urls = ['redis://:planted@h', 'rediss://:planted@h']",
        "urls = ['redis://u:planted@h:xx']",
        "urls = ['redis://h']\npassword_env = 'planted secret'",
        "urls = ['redis://h']\npassword = 'planted'",
        "urls = ['redis+sentinel://h/main']\nsentinel_password_env = 'planted secret'",
        "urls = ['redis+sentinel://h/main']\nsentinel_password = 'planted'",
    ] {
        let text = format!("[store]\n{table}");
        let report = load(&text).unwrap_err();
        assert!(!format!("{report:?} {report}").contains("planted"), "{report:?}");
        for finding in report.findings() {
            let report = format!("{:?}", miette::Report::new(finding.clone()));
            assert!(!report.contains("planted"), "{report}");
        }
    }
    let settings = load("[store]\nurls = ['redis://:planted@h']").unwrap().settings;
    assert!(!format!("{settings:?}").contains("planted"));
}

fn in_directory(directory: &Path) -> Loader {
    loader().directory(directory).environment(|name| (name == "STORE_PASSWORD").then(|| "planted".to_owned()))
}

#[test]
fn files_are_relative_to_the_configuration_and_checked_at_the_start_only() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[store]\nurls = ['redis://h']\nusername = 'u'\npassword_file = 'password'";
    let password = dir.path().join("password");
    let load = |loader: &Loader| loader.load_text("tidegate.toml", text, Format::Toml);
    fs::write(&password, "\n").unwrap();
    let report = load(&in_directory(dir.path())).unwrap_err();
    assert!(report.findings().iter().any(|finding| finding.message().contains("is empty")), "{report:?}");
    fs::write(&password, "planted\n").unwrap();
    let settings = load(&in_directory(dir.path())).unwrap().settings;
    assert!(format!("{settings:?}").contains(&password.display().to_string()));

    // The store reads it at each connect, so a reload of the rules does not depend on it.
    let file = dir.path().join("tidegate.toml");
    fs::write(&file, format!("{text}\n")).unwrap();
    let running = in_directory(dir.path()).load(&file).unwrap();
    fs::remove_file(&password).unwrap();
    assert!(in_directory(dir.path()).load(&file).is_err());
    assert!(in_directory(dir.path()).reload(&file, &running).is_ok());
}

#[test]
fn store_of_the_loader_overrides_the_urls_and_keeps_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("password"), "planted").unwrap();
    let text = "[store]\nkind = 'cluster'\nurls = ['redis://a', 'redis://b']\npassword_file = 'password'";
    let load = |loader: Loader, text: &str| loader.load_text("tidegate.toml", text, Format::Toml).unwrap().settings;
    let given = load(in_directory(dir.path()).store("redis://c"), text);
    assert_eq!(given.store.as_ref().unwrap().text(), "redis://c");
    assert!(given.access.server.password.is_some());
    let with_login = load(in_directory(dir.path()).store("redis://:own@c"), text);
    assert!(with_login.access.server.password.is_none());
    // The URLs may then be left out.
    let without_urls = load(in_directory(dir.path()).store("redis://c"), "[store]\npassword_file = 'password'");
    assert!(without_urls.access.server.password.is_some());
}

#[test]
fn variables_of_the_loader_are_used_if_nothing_else_has_a_password() {
    let load = |variables: (&str, &str), text: &str| {
        let loader = in_directory(Path::new("/nonexistent")).store_credentials_env(variables.0, variables.1);
        loader.load_text("tidegate.toml", text, Format::Toml).unwrap().settings.access.server
    };
    let names = ("STORE_USER", "STORE_PASSWORD");
    let plain = load(names, "store = 'redis://h'");
    assert!(plain.password.is_some() && plain.username.is_none());
    assert!(load(names, "store = 'redis://:p@h'").password.is_none());
    assert!(load(("X", "Y"), "store = 'redis://h'").password.is_none());
    let named = load(names, "[store]\nurls = 'redis://h'\nusername = 'u'");
    assert!(named.password.is_some() && named.username.is_some());
}

#[test]
fn credentials_of_sentinels_are_those_of_the_table_or_else_of_the_environment() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("password"), "planted\n").unwrap();
    let load = |variables: &'static [&str], table: &str| {
        let text = format!("[store]\nurls = ['redis+sentinel://:planted@a/main']\n{table}");
        let loader = loader().directory(dir.path());
        let loader = loader.environment(|name| variables.contains(&name).then(|| "planted".to_owned()));
        let settings = loader.load_text("tidegate.toml", &text, Format::Toml).unwrap().settings;
        assert!(!format!("{settings:?}").contains("planted"), "{settings:?}");
        (settings.access.sentinel.username, settings.access.sentinel.password)
    };
    let env = |name: &str| Some(SecretPlace::Env(name.to_owned()));
    let file = Some(SecretPlace::File(dir.path().join("password")));
    let own = |name: &str| Some(SecretPlace::Text(Secret::new(name)));
    let [both, password]: [&[&str]; 2] =
        [&["TIDEGATE_SENTINEL_USERNAME", "TIDEGATE_SENTINEL_PASSWORD", "W"], &["TIDEGATE_SENTINEL_PASSWORD"]];
    assert_eq!(load(&[], ""), (None, None));
    assert_eq!(load(both, ""), (env("TIDEGATE_SENTINEL_USERNAME"), env("TIDEGATE_SENTINEL_PASSWORD")));
    assert_eq!(load(password, "sentinel_username = 'watch'"), (own("watch"), env("TIDEGATE_SENTINEL_PASSWORD")));
    assert_eq!(load(both, "sentinel_password_file = 'password'"), (None, file.clone()));
    let table = "sentinel_username_file = 'password'\nsentinel_password_env = 'W'";
    assert_eq!(load(both, table), (file, env("W")));
}
