//! `store` as a table: a Redis user with few permissions, a password that is rotated, and TLS with client certificates.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::path::Path;
use std::process::{Command, Output};

use tidegate_testkit::certificates::{Authority, Identity};
use tidegate_testkit::server::{Brand, Cluster, Config, SentinelGroup, Server};

use tidegate_testkit::program::{Serving, command, ended};

const PASSWORD: &str = "planted-password";
const LISTENERS: [&str; 7] = ["serve", "--http", "127.0.0.1:0", "--resp", "off", "--admin", "off"];
const RULES: &str = r#"
prefix = "shop"
# Long enough that no decision is local on a busy machine.
deadline = "10s"
instances = 1
receipt_secret = "0123456789abcdef"
plan_sources.redis_hash = "shop-plans"
key_sources.redis_hash = "shop-keys"
[plans.default]
limits = ["5/h"]
[plans.pro]
limits = ["1000000/h", "1000000/h token-bucket", "1000000/h sliding-counter"]
[[rules]]
name = "all"
by = "api_key"
limits = "plan"
"#;

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Returns the rules of the user that `tidegate script --acl` prints for a configuration file.
fn printed_rules(file: &str) -> String {
    let output = command().args(["script", "--acl", "--config", file]).output().unwrap();
    let printed = text(&output);
    let rules = printed.strip_prefix("ACL SETUSER tidegate reset on >PASSWORD ").unwrap_or_else(|| panic!("{printed}"));
    assert!(rules.ends_with("~shop:tg2:* %R~shop-plans ~shop-keys\n"), "{printed}");
    rules.trim_end().to_owned()
}

#[test]
fn page_shows_the_permissions_that_the_command_prints() {
    let output = command().args(["script", "--acl"]).output().unwrap();
    let page = include_str!("../../../../docs/running.md");
    assert!(page.lines().any(|line| line == text(&output).trim_end()), "docs/running.md lacks: {}", text(&output));
}

/// Writes a configuration file with this table for the store, and a file with the password beside it.
fn write(dir: &Path, table: &str) -> String {
    let file = dir.join("tidegate.toml");
    std::fs::write(
        &file,
        format!("{RULES}\n[store]\nusername = \"tidegate\"\npassword_file = \"password\"\n{table}\n"),
    )
    .unwrap();
    std::fs::write(dir.join("password"), format!("{PASSWORD}\n")).unwrap();
    file.to_str().unwrap().to_owned()
}

fn run(arguments: &[&str], file: &str) -> (Option<i32>, String) {
    let output = command().args(arguments).args(["--config", file]).output().unwrap();
    (output.status.code(), text(&output))
}

/// Runs the service and every command that uses the store, and returns everything that they print.
fn use_everything(file: &str, add_hash_fields: impl Fn(&str, &str, &str)) -> String {
    // The digest of the API key `k`.
    let field = "api_key:8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a";
    add_hash_fields("shop-keys", field, "{\"name\":\"acme\"}");
    add_hash_fields("shop-plans", field, "pro");
    let serving = Serving::start_as(Serving::command(), &["--config", file]);
    serving.until("/readyz", |answer| answer.status == 200);
    let request =
        r#"{"request":{"method":"GET","path":"/","headers":{"x-api-key":"k"},"peer":"203.0.113.9"},"receipt":true}"#;
    let answer = serving.check(request);
    assert!(answer.body.contains(r#""source":"store""#) && answer.body.contains("1000000"), "{answer:?}");
    assert!(!serving.output().contains("may not"), "{}", serving.output());
    let mut printed = serving.output() + &serving.visit("/metrics").body + &serving.visit("/readyz").body;
    for (arguments, code) in [
        (&["check", "user:42", "10/h"][..], 0),
        (&["check", "user:42", "10/h leaky-bucket", "--json"], 0),
        (&["inspect", "user:42", "10/h"], 0),
        (&["explain", "GET", "/", "--peer", "203.0.113.9", "-H", "x-api-key: k"], 0),
        (&["inspect", "k", "--rule", "all"], 0),
        (&["ban", "--key", "user:42", "--for", "1h"], 0),
        (&["check", "user:42", "10/h"], 1),
        (&["unban", "--key", "user:42"], 0),
        // By the name of its owner, which only the hash of keys has.
        (&["ban", "acme", "--for", "1h"], 0),
        (&["ban", "--list"], 0),
        (&["unban", "acme"], 0),
        (&["unban", "acme"], 1),
        (&["reset", "user:42", "10/h"], 0),
        (&["reset", "user:42", "10/h"], 1),
    ] {
        let (exit, output) = run(arguments, file);
        assert_eq!(exit, Some(code), "{arguments:?}: {output}");
        printed += &output;
    }
    printed + &serving.output()
}

#[test]
fn printed_user_suffices_for_the_service_and_every_command() {
    for brand in Brand::ALL {
        let dir = tempfile::tempdir().unwrap();
        let rules = printed_rules(&write(dir.path(), "urls = \"redis://h\""));
        let server = Config::new(brand).only_user("tidegate", PASSWORD, &rules).start();
        let file = write(dir.path(), &format!("urls = [\"{}\"]", server.url()));
        let set = |hash: &str, field: &str, value: &str| drop(server.command(&["HSET", hash, field, value]));
        let printed = use_everything(&file, set);
        assert!(!printed.contains(PASSWORD) && printed.contains("connected to the store"), "{brand}: {printed}");
    }
}

#[test]
fn printed_user_suffices_on_a_cluster_and_inspect_names_the_node() {
    let dir = tempfile::tempdir().unwrap();
    let rules = printed_rules(&write(dir.path(), "urls = \"redis://h\""));
    let cluster = Cluster::with(&Config::new(Brand::Redis).only_user("tidegate", PASSWORD, &rules));
    let urls: Vec<String> = cluster.nodes()[..2].iter().map(|node| format!("\"{}\"", node.url())).collect();
    let file = write(dir.path(), &format!("kind = \"cluster\"\nurls = [{}]", urls.join(", ")));
    let set = |hash: &str, field: &str, value: &str| {
        let owner = cluster.owner_of(cluster.slot_of(hash));
        owner.command(&["HSET", hash, field, value]);
    };
    let printed = use_everything(&file, set);
    assert!(!printed.contains(PASSWORD), "{printed}");

    let slot = cluster.slot_of("{user:42}");
    let node = cluster.owner_of(slot).url();
    assert!(printed.contains(&format!("  node         {node} (slot {slot})\n")), "{printed}");
    run(&["check", "user:42", "10/h"], &file);
    let (_, json) = run(&["inspect", "user:42", "10/h", "--json"], &file);
    assert!(json.contains(&format!("\"node\":\"{node}\"")) && json.contains(&format!("\"slot\":{slot}")), "{json}");
}

#[test]
fn printed_user_suffices_with_sentinels_and_a_failover_is_followed() {
    for brand in Brand::ALL {
        let dir = tempfile::tempdir().unwrap();
        let rules = printed_rules(&write(dir.path(), "urls = \"redis://h\""));
        let config = Config::new(brand).only_user("tidegate", PASSWORD, &rules);
        let group = SentinelGroup::with(&config, 1, Some("planted-sentinel-password"));
        std::fs::write(dir.path().join("sentinel-password"), "planted-sentinel-password\n").unwrap();
        let urls: Vec<String> =
            group.sentinels()[..2].iter().map(|sentinel| format!("\"{}\"", sentinel.url())).collect();
        let table = format!("kind = \"sentinel\"\nmaster = \"main\"\nurls = [{}]", urls.join(", "));
        let file = write(dir.path(), &format!("{table}\nsentinel_password_file = \"sentinel-password\""));
        let set = |hash: &str, field: &str, value: &str| drop(group.master().command(&["HSET", hash, field, value]));
        let mut printed = use_everything(&file, set);
        let serving = Serving::start_as(Serving::command(), &["--config", &file]);
        serving.until("/readyz", |answer| answer.status == 200);
        let failovers = |count: u32| {
            let line = format!("tidegate_store_failovers_total {count}\n");
            serving.until("/metrics", |answer| answer.body.contains(&line)).body
        };
        failovers(0);
        group.fail_over();
        printed += &failovers(1);
        let logged = serving.wait_for_log("the Sentinels have named another master");
        assert!(group.servers().iter().all(|server| logged.contains(&server.url())), "{brand}: {logged}");
        let answered = tidegate_testkit::poll::poll(|| {
            serving.check(r#"{"key":"user:43","limit":"1000000/h"}"#).body.contains(r#""source":"store""#)
        });
        assert!(answered, "{brand}: {}", serving.output());
        let (code, output) = run(&["check", "user:43", "10/h"], &file);
        assert_eq!(code, Some(0), "{brand}: {output}");
        assert!(group.servers()[1].script_calls() > 0, "{brand}");
        printed += &(output + &serving.output());

        // Without the password of the Sentinels.
        let file = write(dir.path(), &table);
        let (code, output) = run(&["check", "user:43", "10/h"], &file);
        assert!(code == Some(2) && output.contains("Sentinel 127.0.0.1:"), "{brand}: {output}");
        assert!(output.contains("requires a password"), "{brand}: {output}");
        assert!(!(printed + &output).contains("planted"), "{brand}: {output}");
    }
}

/// The user is created before its password is stored, and may exist with other passwords and permissions.
#[test]
fn printed_command_needs_no_secrets_and_replaces_an_existing_user() {
    let dir = tempfile::tempdir().unwrap();
    let tls = "tls = { ca_file = \"missing\", cert_file = \"missing\", key_file = \"missing\" }";
    let sentinels = "kind = \"sentinel\"\nmaster = \"main\"\nsentinel_password_env = \"UNSET_IN_TESTS\"";
    let file = write(dir.path(), &format!("urls = \"rediss://h\"\n{sentinels}\n{tls}"));
    std::fs::remove_file(dir.path().join("password")).unwrap();
    let rules = printed_rules(&file);
    // The password may also be in the environment of the service.
    let text = std::fs::read_to_string(&file).unwrap().replace("password_file = \"password\"\n", "");
    std::fs::write(&file, text).unwrap();
    assert_eq!(printed_rules(&file), rules);

    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let set = |password: &str| {
            let printed = format!("SETUSER tidegate reset on >{password} {rules}");
            let command: Vec<&str> = std::iter::once("ACL").chain(printed.split(' ')).collect();
            assert_eq!(server.command(&command).text(), "OK", "{brand}");
        };
        let accepts = |password: &str| {
            let mut connection = server.connect().unwrap();
            connection.call(&["AUTH", "tidegate", password]).unwrap().error().is_none()
        };
        let before = ["ACL", "SETUSER", "tidegate", "on", "nopass", ">old", "~*", "&*", "+@all", "(~* +flushall)"];
        assert_eq!(server.command(&before).text(), "OK", "{brand}");
        set("first");
        let created = server.command(&["ACL", "GETUSER", "tidegate"]);
        set("first");
        assert_eq!(server.command(&["ACL", "GETUSER", "tidegate"]), created, "{brand}");
        assert_eq!([accepts("old"), accepts("first")], [false, true], "{brand}");
        let mut open = server.connect().unwrap();
        assert!(open.call(&["AUTH", "tidegate", "first"]).unwrap().error().is_none(), "{brand}");
        set("second");
        assert_eq!([accepts("first"), accepts("second")], [false, true], "{brand}");
        // An open connection stays in use.
        assert_eq!(open.call(&["TIME"]).unwrap().items().len(), 2, "{brand}");
        assert!(open.call(&["FLUSHALL"]).unwrap().error().is_some(), "{brand}");
        // The rules alone leave the passwords.
        let widened = ["ACL", "SETUSER", "tidegate", "allkeys", "(~* +flushall)"];
        assert_eq!(server.command(&widened).text(), "OK", "{brand}");
        let command: Vec<&str> = ["ACL", "SETUSER", "tidegate"].into_iter().chain(rules.split(' ')).collect();
        assert_eq!(server.command(&command).text(), "OK", "{brand}");
        assert!(accepts("second"), "{brand}");
        let mut connection = server.connect().unwrap();
        connection.call(&["AUTH", "tidegate", "second"]).unwrap();
        assert!(connection.call(&["FLUSHALL"]).unwrap().error().is_some(), "{brand}");
    }
}

/// Changes the password of the user on the server, and closes its connections.
fn rotate(server: &Server, password: &str) {
    server.command(&["ACL", "SETUSER", "tidegate", "resetpass", &format!(">{password}")]);
    server.command(&["CLIENT", "KILL", "USER", "tidegate"]);
}

#[test]
fn rotated_password_needs_no_restart_and_is_never_logged() {
    let dir = tempfile::tempdir().unwrap();
    let server = Config::new(Brand::Redis).only_user("tidegate", PASSWORD, "~* +@all").start();
    let file = write(dir.path(), &format!("urls = [\"{}\"]", server.url()));
    let mut command = Serving::command();
    command.env("TIDEGATE_LOG", "trace");
    let serving = Serving::start_as(command, &["--config", &file]);
    serving.until("/readyz", |answer| answer.status == 200);
    rotate(&server, "planted-next-password");
    let down = serving.until("/readyz", |answer| answer.status == 503);
    let explicit = r#"{"key":"user:42","limit":"1000000/h"}"#;
    assert!(serving.check(explicit).body.contains(r#""source":"local""#));
    serving.wait_for_log("the server rejects the user or the password");
    std::fs::write(dir.path().join("password"), "planted-next-password").unwrap();
    serving.until("/readyz", |answer| answer.status == 200);
    let answered = tidegate_testkit::poll::poll(|| serving.check(explicit).body.contains(r#""source":"store""#));
    assert!(answered, "{}", serving.output());
    let seen = [serving.output(), down.body, serving.visit("/metrics").body, serving.operate("GET", "/v1/rules").body];
    assert!(seen.iter().all(|text| !text.contains("planted")), "{seen:?}");
}

#[test]
fn user_and_password_may_be_in_the_environment() {
    let server = Config::new(Brand::Redis).only_user("tidegate", PASSWORD, "~* +@all").start();
    let check = |variables: &[(&str, &str)], url: &str| {
        let mut command: Command = command();
        command.envs(variables.iter().copied()).args(["check", "user:42", "10/h", "--store", url]);
        let output = command.output().unwrap();
        (output.status.code(), text(&output))
    };
    let both = [("TIDEGATE_STORE_USERNAME", "tidegate"), ("TIDEGATE_STORE_PASSWORD", PASSWORD)];
    assert_eq!(check(&both, &server.url()).0, Some(0));
    let (code, output) = check(&both[1..], &server.url());
    assert!(code == Some(2) && output.contains("rejects the user or the password"), "{output}");
    // Those of the URL come first.
    let (code, output) = check(&both, &format!("redis://tidegate:planted-other@{}", server.addr()));
    assert!(code == Some(2) && !output.contains("planted"), "{output}");
}

#[test]
fn table_with_tls_is_used_by_the_service_and_commands() {
    let authority = Authority::new();
    let server = Config::new(Brand::Redis)
        .tls(&authority, &authority.issue(&["redis.example"]))
        .only_user("tidegate", PASSWORD, "~* +@all")
        .start();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(authority.file(), dir.path().join("ca.pem")).unwrap();
    let Identity { cert_file, key_file } = authority.issue(&["client"]);
    std::fs::copy(cert_file, dir.path().join("client.pem")).unwrap();
    std::fs::copy(key_file, dir.path().join("client.key")).unwrap();
    let table = |tls: &str| format!("urls = [\"rediss://127.0.0.1:{}\"]\ntls = {{ {tls} }}", server.tls_port());
    let whole = "ca_file = \"ca.pem\", cert_file = \"client.pem\", key_file = \"client.key\", \
                 server_name = \"redis.example\", min_version = \"1.3\"";
    let file = write(dir.path(), &table(whole));
    assert_eq!(command().args(["validate", &file]).output().unwrap().status.code(), Some(0));
    let serving = Serving::start_as(Serving::command(), &["--config", &file]);
    serving.until("/readyz", |answer| answer.status == 200);
    assert_eq!(run(&["check", "user:42", "10/h"], &file).0, Some(0));

    // Without the name, the certificate is not valid for the address.
    let unnamed = whole.replace("server_name = \"redis.example\", ", "");
    let file = write(dir.path(), &table(&unnamed));
    let (code, output) = run(&["check", "user:42", "10/h"], &file);
    assert!(code == Some(2) && output.contains("certificate is not valid for 127.0.0.1"), "{output}");
    // --store replaces the URLs, and the rest of the table applies.
    let url = format!("rediss://localhost:{}", server.tls_port());
    let (code, output) = run(&["check", "user:42", "10/h", "--store", &url], &file);
    assert!(code == Some(2) && output.contains("certificate is not valid for localhost"), "{output}");

    for (tls, expected) in [
        (whole.replace("client.key", "missing.key"), "missing.key: no such file or directory"),
        (whole.replace("\"client.pem\"", "\"ca.pem\""), "the key does not belong to the certificate"),
        (whole.replace("\"1.3\"", "\"1.1\""), "expected one of 1.2, 1.3"),
        (whole.replace(", key_file = \"client.key\"", ""), "needs both `cert_file` and `key_file`"),
    ] {
        let file = write(dir.path(), &table(&tls));
        for output in [
            ended(command().args(LISTENERS).args(["--config", &file])),
            command().args(["validate", &file]).output().unwrap(),
        ] {
            let error = text(&output);
            assert_eq!(output.status.code(), Some(2), "{error}");
            // Long lines of a report are wrapped.
            let error = error.split_whitespace().collect::<Vec<_>>().join(" ").replace(" │ ", " ");
            assert!(error.contains(expected), "no {expected:?} in {error}");
        }
    }
}
