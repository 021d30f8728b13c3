//! Reading the configuration again while the doors are open, in every way that files change.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

mod serving;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serving::{Client, Serving};

fn rules(quota: u32) -> String {
    format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [{{ name = \"main\", limit = \"{quota}/h\" }}]\n")
}

fn asked(peer: &str) -> String {
    format!(r#"{{"request":{{"method":"GET","path":"/","peer":"{peer}"}}}}"#)
}

/// The quota in force, asked on behalf of somebody who has never asked.
fn quota(serving: &Serving) -> Option<u32> {
    static PEERS: AtomicU64 = AtomicU64::new(1);
    let peer = format!("10.0.0.{}", PEERS.fetch_add(1, Ordering::Relaxed) % 250);
    let body = serving.check(&asked(&peer)).body;
    body.split("\"quota\":").nth(1)?.split(',').next()?.parse().ok()
}

fn reloads(serving: &Serving, result: &str) -> u64 {
    let text = serving.visit("/metrics").body;
    let line = format!("tollgate_reloads_total{{result=\"{result}\"}} ");
    text.split(&line).nth(1).unwrap().lines().next().unwrap().parse().unwrap()
}

struct Site {
    dir: tempfile::TempDir,
    serving: Serving,
}

impl Site {
    fn start() -> Site {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tollgate.toml"), rules(2)).unwrap();
        let serving = Serving::start(&["--config", dir.path().join("tollgate.toml").to_str().unwrap()]);
        Site { dir, serving }
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("tollgate.toml")
    }
}

#[test]
fn a_file_that_is_written_into_is_read_again() {
    let site = Site::start();
    assert_eq!(quota(&site.serving), Some(2));
    std::fs::write(site.file(), rules(3)).unwrap();
    site.serving.hear("was read again");
    assert_eq!(quota(&site.serving), Some(3));
}

#[test]
fn a_file_that_another_is_renamed_over_is_read_again_and_so_is_the_next() {
    let site = Site::start();
    for renamed in 3..6 {
        let draft = site.dir.path().join(".tollgate.toml.swp");
        std::fs::write(&draft, rules(renamed)).unwrap();
        std::fs::rename(&draft, site.file()).unwrap();
        site.serving.hear("was read again");
        assert_eq!(quota(&site.serving), Some(renamed));
    }
}

/// What Kubernetes makes of a ConfigMap: the file is a link through `..data`, which is swapped.
fn swap_in(mount: &Path, version: &str, text: &str) {
    std::fs::create_dir(mount.join(version)).unwrap();
    std::fs::write(mount.join(version).join("tollgate.toml"), text).unwrap();
    symlink(version, mount.join("..data_tmp")).unwrap();
    std::fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
}

#[test]
fn a_directory_whose_links_are_swapped_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    swap_in(dir.path(), "..1", &rules(2));
    symlink("..data/tollgate.toml", dir.path().join("tollgate.toml")).unwrap();
    let serving = Serving::start(&["--config", dir.path().join("tollgate.toml").to_str().unwrap()]);
    assert_eq!(quota(&serving), Some(2));
    for version in 3..6 {
        swap_in(dir.path(), &format!("..{version}"), &rules(version));
        serving.hear("was read again");
        assert_eq!(quota(&serving), Some(version));
    }
}

#[test]
fn a_broken_file_changes_nothing_and_is_told_everywhere_until_it_is_mended() {
    let site = Site::start();
    let statuses: Vec<u16> = (0..3).map(|_| site.serving.check(&asked("203.0.113.9")).status).collect();
    assert_eq!(statuses, [200, 200, 429]);
    std::fs::write(site.file(), rules(0) + "[jwt]\nalgorithm = \"HS256\"\nkey = \"planted-secret\"\n").unwrap();
    let told = site.serving.until("/readyz", |answer| answer.body.contains("\"failed\""));
    assert_eq!(told.status, 200, "the old rules are in force, so it is ready: {told:?}");
    assert!(told.body.contains("1 to 10000000") && told.body.contains("\"line\":4"), "{told:?}");
    let log = site.serving.hear("the old rules stay in force");
    for place in [&told.body, &log] {
        assert!(!place.contains("planted"), "{place}");
    }
    let metrics = site.serving.visit("/metrics").body;
    assert!(metrics.contains("tollgate_reload_failed 1\n"), "{metrics}");
    assert_eq!([reloads(&site.serving, "ok"), reloads(&site.serving, "failed")], [0, 1]);
    assert_eq!(quota(&site.serving), Some(2));
    assert_eq!(site.serving.check(&asked("203.0.113.9")).status, 429, "and what was used stays used");

    let refused = site.serving.operate("POST", "/v1/reload");
    assert_eq!(refused.status, 422);
    assert!(refused.body.contains("\"reloaded\":false") && refused.body.contains("invalid-limit"), "{refused:?}");

    std::fs::write(site.file(), rules(3)).unwrap();
    site.serving.until("/readyz", |answer| answer.body.contains("\"ok\""));
    assert!(site.serving.visit("/metrics").body.contains("tollgate_reload_failed 0\n"));
    assert_eq!(site.serving.check(&asked("203.0.113.9")).status, 200, "two of three were used");
    assert_eq!(site.serving.check(&asked("203.0.113.9")).status, 429);
}

#[test]
fn it_is_also_read_again_at_a_signal_and_at_the_operators_word() {
    let site = Site::start();
    site.serving.signal("HUP");
    site.serving.hear("was read again");
    let told = site.serving.operate("POST", "/v1/reload");
    assert_eq!((told.status, told.body.contains("\"rules\":1")), (200, true), "{told:?}");
    site.serving.hear("was read again");
    assert_eq!(reloads(&site.serving, "ok"), 2);
}

#[test]
fn a_keys_file_is_watched_too_and_from_when_it_is_named() {
    let site = Site::start();
    let plans = "keys_file = \"keys.toml\"\n[plans.default]\nlimits = [\"2/h\"]\n[plans.pro]\nlimits = [\"7/h\"]\n";
    let by_plan = format!("{plans}[[rules]]\nname = \"all\"\nlimits = \"plan\"\n");
    let keys = |plan: &str| format!("[[keys]]\nkey = \"planted-key\"\nplan = \"{plan}\"\n");
    std::fs::write(site.dir.path().join("keys.toml"), keys("default")).unwrap();
    std::fs::write(site.file(), by_plan).unwrap();
    site.serving.hear("was read again");
    let question = r#"{"request":{"method":"GET","path":"/","headers":{"x-api-key":"planted-key"},"peer":"::1"}}"#;
    assert!(site.serving.check(question).body.contains("\"quota\":2"));
    std::fs::write(site.dir.path().join("keys.toml"), keys("pro")).unwrap();
    site.serving.hear("was read again");
    assert!(site.serving.check(question).body.contains("\"quota\":7"));
}

#[test]
fn reloading_under_load_loses_no_decision_and_resets_no_counter() {
    const CONNECTIONS: u64 = 4;
    const QUESTIONS: u64 = 1_500;
    const QUOTA: u64 = 2_000;
    let site = Site::start();
    let text = |extra: &str| rules(QUOTA as u32) + &rules(1_000_000).replace("all", extra);
    std::fs::write(site.file(), text("first")).unwrap();
    site.serving.hear("was read again");

    let (admitted, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let reloaded = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Client::open(&site.serving.http);
                    for _ in 0..QUESTIONS {
                        match client.ask("POST", "/v1/check", &[], &asked("203.0.113.9")).status {
                            200 => admitted.fetch_add(1, Ordering::Relaxed),
                            429 => 0,
                            status => panic!("neither yes nor no: {status}"),
                        };
                    }
                })
            })
            .collect();
        let reloading = scope.spawn(|| {
            let mut reloaded = 0;
            for extra in ["second", "first"].into_iter().cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                let draft = site.dir.path().join("draft");
                std::fs::write(&draft, text(extra)).unwrap();
                std::fs::rename(&draft, site.file()).unwrap();
                assert_eq!(site.serving.operate("POST", "/v1/reload").status, 200);
                reloaded += 1;
            }
            reloaded
        });
        asking.into_iter().for_each(|asking| asking.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
        reloading.join().unwrap()
    });
    assert!(reloaded > 3, "reloaded {reloaded} times: too few to have shown anything");
    assert_eq!(admitted.load(Ordering::Relaxed), QUOTA, "over {reloaded} reloads");
    let metrics = site.serving.visit("/metrics").body;
    for (verdict, times) in [("allow", QUOTA), ("deny", CONNECTIONS * QUESTIONS - QUOTA)] {
        let line = format!(
            "tollgate_decisions_total{{rule=\"all\",verdict=\"{verdict}\",source=\"store\",mode=\"enforce\"}} {times}\n"
        );
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
}
