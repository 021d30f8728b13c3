//! Reloads of the configuration while the service runs, for every way in which files change.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

fn rules(quota: u32) -> String {
    format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [{{ name = \"main\", limit = \"{quota}/h\" }}]\n")
}

fn request_from(peer: &str) -> String {
    format!(r#"{{"request":{{"method":"GET","path":"/","peer":"{peer}"}}}}"#)
}

/// Returns the quota in force, from a check of an address that was not used before.
fn quota(serving: &Serving) -> Option<u32> {
    static PEERS: AtomicU64 = AtomicU64::new(1);
    let peer = format!("10.0.0.{}", PEERS.fetch_add(1, Ordering::Relaxed) % 250);
    let body = serving.check(&request_from(&peer)).body;
    body.split("\"quota\":").nth(1)?.split(',').next()?.parse().ok()
}

fn reloads(serving: &Serving, result: &str) -> u64 {
    let text = serving.visit("/metrics").body;
    let line = format!("tidegate_reloads_total{{result=\"{result}\"}} ");
    text.split(&line).nth(1).unwrap().lines().next().unwrap().parse().unwrap()
}

struct Site {
    dir: tempfile::TempDir,
    serving: Serving,
}

impl Site {
    fn start() -> Site {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tidegate.toml"), rules(2)).unwrap();
        let serving = Serving::start(&["--config", dir.path().join("tidegate.toml").to_str().unwrap()]);
        Site { dir, serving }
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("tidegate.toml")
    }
}

#[test]
fn a_file_that_is_written_in_place_is_reloaded() {
    let site = Site::start();
    assert_eq!(quota(&site.serving), Some(2));
    std::fs::write(site.file(), rules(3)).unwrap();
    site.serving.wait_for_log("was reloaded");
    assert_eq!(quota(&site.serving), Some(3));
}

#[test]
fn a_file_that_is_replaced_by_rename_is_reloaded_each_time() {
    let site = Site::start();
    for renamed in 3..6 {
        let draft = site.dir.path().join(".tidegate.toml.swp");
        std::fs::write(&draft, rules(renamed)).unwrap();
        std::fs::rename(&draft, site.file()).unwrap();
        site.serving.wait_for_log("was reloaded");
        assert_eq!(quota(&site.serving), Some(renamed));
    }
}

/// Replaces the file as Kubernetes updates a ConfigMap: it is a link through `..data`, which is swapped.
fn swap_in(mount: &Path, version: &str, text: &str) {
    std::fs::create_dir(mount.join(version)).unwrap();
    std::fs::write(mount.join(version).join("tidegate.toml"), text).unwrap();
    symlink(version, mount.join("..data_tmp")).unwrap();
    std::fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
}

#[test]
fn a_file_behind_swapped_symlinks_is_reloaded() {
    let dir = tempfile::tempdir().unwrap();
    swap_in(dir.path(), "..1", &rules(2));
    symlink("..data/tidegate.toml", dir.path().join("tidegate.toml")).unwrap();
    let serving = Serving::start(&["--config", dir.path().join("tidegate.toml").to_str().unwrap()]);
    assert_eq!(quota(&serving), Some(2));
    for version in 3..6 {
        swap_in(dir.path(), &format!("..{version}"), &rules(version));
        serving.wait_for_log("was reloaded");
        assert_eq!(quota(&serving), Some(version));
    }
}

#[test]
fn an_invalid_file_changes_nothing_and_is_reported_until_it_is_fixed() {
    let site = Site::start();
    let statuses: Vec<u16> = (0..3).map(|_| site.serving.check(&request_from("203.0.113.9")).status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    std::fs::write(site.file(), rules(0) + "[jwt]\nalgorithm = \"HS256\"\nkey = \"planted-secret\"\n").unwrap();
    let told = site.serving.until("/readyz", |answer| answer.body.contains("\"failed\""));
    assert_eq!(told.status, 200, "the old rules are in force, so it is ready: {told:?}");
    assert!(told.body.contains("1 to 10000000") && told.body.contains("\"line\":4"), "{told:?}");
    let log = site.serving.wait_for_log("the old rules stay in force");
    for place in [&told.body, &log] {
        assert!(!place.contains("planted"), "{place}");
    }
    let metrics = site.serving.visit("/metrics").body;
    assert!(metrics.contains("tidegate_reload_failed 1\n"), "{metrics}");
    assert_eq!([reloads(&site.serving, "ok"), reloads(&site.serving, "failed")], [0, 1]);
    assert_eq!(quota(&site.serving), Some(2));
    assert_eq!(site.serving.check(&request_from("203.0.113.9")).status, 429, "charged units stay charged");

    let refused = site.serving.operate("POST", "/v1/reload");
    assert_eq!(refused.status, 422);
    assert!(refused.body.contains("\"reloaded\":false") && refused.body.contains("invalid-limit"), "{refused:?}");

    std::fs::write(site.file(), rules(3)).unwrap();
    site.serving.until("/readyz", |answer| answer.body.contains("\"ok\""));
    assert!(site.serving.visit("/metrics").body.contains("tidegate_reload_failed 0\n"));
    assert_eq!(site.serving.check(&request_from("203.0.113.9")).status, 200, "two of three were used");
    assert_eq!(site.serving.check(&request_from("203.0.113.9")).status, 429);
}

#[test]
fn an_emptied_file_keeps_the_rules_in_force_and_is_reported_until_it_is_complete() {
    let site = Site::start();
    let refused = || site.serving.check(&request_from("203.0.113.9")).status == 429;
    while !refused() {}
    std::fs::write(site.file(), "").unwrap();
    let told = site.serving.until("/readyz", |answer| answer.body.contains("\"failed\""));
    assert!(told.body.contains("file-cut-off"), "{told:?}");
    assert!(refused(), "the limit is no longer enforced");
    assert!(site.serving.visit("/metrics").body.contains("tidegate_reload_failed 1\n"));
    site.serving.wait_for_log("the old rules stay in force");

    // A reload through the admin API rejects a truncated file, too.
    std::fs::write(site.file(), "store = \"memory\"\n").unwrap();
    assert_eq!(site.serving.operate("POST", "/v1/reload").status, 422);
    assert!(refused());
    let emptied = "rules = []\n";
    std::fs::write(site.file(), emptied).unwrap();
    let told = site.serving.operate("POST", "/v1/reload");
    assert_eq!((told.status, told.body.contains("\"rules\":0")), (200, true), "{told:?}");
    assert!(!refused(), "the file says explicitly that there are no rules");
}

#[test]
fn removed_parts_are_in_the_log_the_response_and_a_metric() {
    let site = Site::start();
    let bans = "[[bans]]\nby = \"user\"\nvalue = \"planted-user\"\n";
    let keys = "[[keys]]\nkey = \"planted-key\"\nname = \"acme\"\n[[keys]]\nkey = \"planted-other\"\n";
    let whole = rules(2) + &rules(9).replace("all", "login") + keys + bans;
    std::fs::write(site.file(), &whole).unwrap();
    site.serving.wait_for_log("was reloaded");
    let cut = whole.find("[[keys]]\nkey = \"planted-other").unwrap();
    std::fs::write(site.file(), whole[..cut].replace("name = \"login\"", "name = \"logout\"")).unwrap();
    let told = site.serving.operate("POST", "/v1/reload");
    // The watcher may have reloaded the file already. Then this reload removes nothing.
    let by_watcher = told.body.contains("\"removed\":[]");
    let named = r#""removed":[{"kind":"ban","name":"by user"},{"kind":"rule","name":"login"},{"kind":"key","name":"(unnamed)"}]"#;
    assert!(by_watcher || told.body.contains(named), "{told:?}");
    let log = site.serving.wait_for_log("1 rule removed: login");
    assert!(log.contains("WARN") && log.contains("code=\"removed\""), "{log}");
    site.serving.wait_for_log("1 key removed: (unnamed)");
    site.serving.wait_for_log("1 ban removed: by user");
    let metrics = site.serving.visit("/metrics").body;
    for (kind, count) in [("rule", 1), ("key", 1), ("ban", 1), ("limit", 0), ("plan", 0), ("certificate", 0)] {
        let line = format!("tidegate_reload_removed_total{{kind=\"{kind}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    assert!(!site.serving.output().contains("planted") && !told.body.contains("planted"));
}

#[test]
fn a_file_with_an_expectation_is_refused_when_it_is_cut_off_anywhere() {
    let site = Site::start();
    let whole = "expect = { rules = 2, keys = 0 }\n".to_owned() + &rules(2) + &rules(9).replace("all", "login");
    std::fs::write(site.file(), &whole).unwrap();
    site.serving.wait_for_log("was reloaded");
    for end in [0, 20, whole.find("[[rules]]").unwrap(), whole.rfind("[[rules]]").unwrap(), whole.len() - 10] {
        std::fs::write(site.file(), &whole[..end]).unwrap();
        let told = site.serving.operate("POST", "/v1/reload");
        assert_eq!(told.status, 422, "{told:?}");
        assert_eq!(quota(&site.serving), Some(2));
    }
    std::fs::write(site.file(), &whole).unwrap();
    assert_eq!(site.serving.operate("POST", "/v1/reload").status, 200);
}

/// The writer keeps the file open and pauses for longer than a file must be unchanged before it is reloaded.
#[test]
fn a_file_that_is_written_slowly_is_reloaded_once_after_it_is_closed() {
    let site = Site::start();
    let whole = rules(2) + &rules(3).replace("all", "login");
    let mut file = std::fs::File::create(site.file()).unwrap();
    for piece in whole.as_bytes().chunks(40) {
        std::io::Write::write_all(&mut file, piece).unwrap();
        // Not a wait for a condition: the writer is this slow.
        std::thread::sleep(std::time::Duration::from_millis(150));
        assert_eq!(quota(&site.serving), Some(2));
    }
    drop(file);
    site.serving.wait_for_log("was reloaded");
    assert_eq!([reloads(&site.serving, "ok"), reloads(&site.serving, "failed")], [1, 0]);
}

/// A container may mount a single file, which is written through another directory than the watched one.
#[test]
fn a_bind_mounted_file_is_reloaded() {
    let [outside, inside] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [source, mounted] = [&outside, &inside].map(|dir| dir.path().join("tidegate.toml"));
    std::fs::write(&source, rules(2)).unwrap();
    std::fs::write(&mounted, "").unwrap();
    let Some(_mount) = tidegate_testkit::program::BindMount::new(&source, &mounted) else {
        eprintln!("skipped: this process may not mount");
        return;
    };
    let serving = Serving::start(&["--config", mounted.to_str().unwrap()]);
    for version in 3..6 {
        std::fs::write(&source, rules(version)).unwrap();
        serving.wait_for_log("was reloaded");
        assert_eq!(quota(&serving), Some(version));
    }
}

#[test]
fn a_truncated_keys_file_is_refused_or_its_removed_keys_are_named() {
    let site = Site::start();
    let keys = "[[keys]]\nkey = \"planted-1\"\nname = \"first\"\n[[keys]]\nkey = \"planted-2\"\nname = \"second\"\n";
    let cut = keys.rfind("[[keys]]").unwrap();
    std::fs::write(site.dir.path().join("keys.toml"), keys).unwrap();
    std::fs::write(site.file(), "keys_file = \"keys.toml\"\n".to_owned() + &rules(2)).unwrap();
    site.serving.wait_for_log("was reloaded");
    std::fs::write(site.dir.path().join("keys.toml"), "").unwrap();
    site.serving.wait_for_log("the old rules stay in force");
    std::fs::write(site.dir.path().join("keys.toml"), &keys[..cut]).unwrap();
    site.serving.wait_for_log("1 key removed: second");
    let expecting = "expect.keys = 1\nkeys_file = \"keys.toml\"\n".to_owned() + &rules(2);
    std::fs::write(site.file(), expecting).unwrap();
    site.serving.wait_for_log("was reloaded");
    std::fs::write(site.dir.path().join("keys.toml"), keys).unwrap();
    let told = site.serving.until("/readyz", |answer| answer.body.contains("\"failed\""));
    assert!(told.body.contains("expected 1 key, found 2"), "{told:?}");
    assert!(!site.serving.output().contains("planted"));
}

#[test]
fn a_signal_and_the_admin_api_reload() {
    let site = Site::start();
    site.serving.signal("HUP");
    site.serving.wait_for_log("was reloaded");
    let told = site.serving.operate("POST", "/v1/reload");
    assert_eq!((told.status, told.body.contains("\"rules\":1")), (200, true), "{told:?}");
    site.serving.wait_for_log("was reloaded");
    assert_eq!(reloads(&site.serving, "ok"), 2);
}

#[test]
fn a_keys_file_is_watched_as_soon_as_the_configuration_names_it() {
    let site = Site::start();
    let plans = "keys_file = \"keys.toml\"\n[plans.default]\nlimits = [\"2/h\"]\n[plans.pro]\nlimits = [\"7/h\"]\n";
    let by_plan = format!("{plans}[[rules]]\nname = \"all\"\nlimits = \"plan\"\n");
    let keys = |plan: &str| format!("[[keys]]\nkey = \"planted-key\"\nplan = \"{plan}\"\n");
    std::fs::write(site.dir.path().join("keys.toml"), keys("default")).unwrap();
    std::fs::write(site.file(), by_plan).unwrap();
    site.serving.wait_for_log("was reloaded");
    let question = r#"{"request":{"method":"GET","path":"/","headers":{"x-api-key":"planted-key"},"peer":"::1"}}"#;
    assert!(site.serving.check(question).body.contains("\"quota\":2"));
    std::fs::write(site.dir.path().join("keys.toml"), keys("pro")).unwrap();
    site.serving.wait_for_log("was reloaded");
    assert!(site.serving.check(question).body.contains("\"quota\":7"));
}

#[test]
fn reloading_under_load_loses_no_decision_and_resets_no_counter() {
    const CONNECTIONS: u64 = 4;
    const CHECKS_MIN: u64 = 1_500;
    const RELOADS: u64 = 5;
    const QUOTA: u64 = 2_000;
    let site = Site::start();
    let text = |extra: &str| rules(QUOTA as u32) + &rules(1_000_000).replace("all", extra);
    std::fs::write(site.file(), text("first")).unwrap();
    site.serving.wait_for_log("was reloaded");

    let (admitted, refused, is_over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = HttpClient::open(&site.serving.http);
                    let is_over = || is_over.load(Ordering::Relaxed);
                    for _ in (0..).take_while(|number| *number < CHECKS_MIN || !is_over()) {
                        match client.ask("POST", "/v1/check", &[], &request_from("203.0.113.9")).status {
                            200 => admitted.fetch_add(1, Ordering::Relaxed),
                            429 => refused.fetch_add(1, Ordering::Relaxed),
                            status => panic!("neither 200 nor 429: {status}"),
                        };
                    }
                })
            })
            .collect();
        for extra in ["second", "first"].into_iter().cycle().take(RELOADS as usize) {
            let draft = site.dir.path().join("draft");
            std::fs::write(&draft, text(extra)).unwrap();
            std::fs::rename(&draft, site.file()).unwrap();
            assert_eq!(site.serving.operate("POST", "/v1/reload").status, 200);
        }
        is_over.store(true, Ordering::Relaxed);
        asking.into_iter().for_each(|asking| asking.join().unwrap());
    });
    assert_eq!(admitted.load(Ordering::Relaxed), QUOTA);
    assert!(reloads(&site.serving, "ok") > RELOADS);
    let metrics = site.serving.visit("/metrics").body;
    for (verdict, times) in [("allow", QUOTA), ("deny", refused.load(Ordering::Relaxed))] {
        let line = format!(
            "tidegate_decisions_total{{rule=\"all\",verdict=\"{verdict}\",source=\"store\",mode=\"enforce\"}} {times}\n"
        );
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
}
