//! Changes of files that a watch can miss, and reloads whose client has disconnected.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use serde_json::json;
use tidegate::config::Loader;

use tidegate_testkit::program::PATIENCE;

use crate::site::Site;

fn rules(quota: u32) -> String {
    format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [{{ name = \"main\", limit = \"{quota}/h\" }}]\n")
}

/// Returns the quota in force.
fn quota(site: &Site) -> u64 {
    let described = json!({ "request": { "method": "GET", "path": "/", "peer": "203.0.113.9" } });
    site.check(&described).json()["limits"][0]["quota"].as_u64().unwrap()
}

#[test]
fn a_directory_that_replaces_another_is_watched() {
    let site = Site::start(&rules(2));
    assert_eq!(quota(&site), 2);
    for (version, quota_of_version) in [(1, 10), (2, 20)] {
        std::fs::create_dir(site.file("next")).unwrap();
        site.write("next/tidegate.toml", &rules(quota_of_version));
        // One after the other, before the watch has checked.
        std::fs::rename(site.file("etc"), site.file(&format!("old-{version}"))).unwrap();
        std::fs::rename(site.file("next"), site.file("etc")).unwrap();
        site.until_reloaded("ok", 2 * version - 1);
        assert_eq!(quota(&site), u64::from(quota_of_version));
        site.write("etc/tidegate.toml", &rules(quota_of_version + 1));
        site.until_reloaded("ok", 2 * version);
        assert_eq!(quota(&site), u64::from(quota_of_version) + 1, "a later change is noticed too");
    }
}

#[test]
fn a_missing_file_is_read_when_it_appears_in_any_directory() {
    for missing in ["keys.toml", "../secrets/keys.toml"] {
        let site = Site::start(&rules(2));
        site.write("etc/tidegate.toml", &format!("keys_file = \"{missing}\"\n{}", rules(3)));
        site.until_reloaded("failed", 1);
        assert_eq!(quota(&site), 2, "the old rules are in force");
        std::fs::create_dir_all(site.file("secrets")).unwrap();
        site.write(&format!("etc/{missing}"), "[[keys]]\nkey = \"planted-key\"\n");
        site.until_reloaded("ok", 1);
        assert_eq!(quota(&site), 3, "{missing}");
    }
}

/// Returns rules whose loading reads the environment.
fn secret_rules(quota: u32) -> String {
    format!("anonymize = {{ secret_env = \"PLANTED\" }}\n{}", rules(quota))
}

fn secret() -> Option<String> {
    Some("a secret that is long enough".to_owned())
}

#[test]
fn a_reload_is_completed_and_counted_after_its_client_has_disconnected() {
    let (gate, (begin, started)) = (Arc::new(Mutex::new(())), mpsc::channel());
    let site = Site::start_with(&secret_rules(2), |setup| {
        let gate = gate.clone();
        setup.loader = Loader::new().environment(move |_| {
            begin.send(()).unwrap();
            drop(gate.lock().unwrap());
            secret()
        });
    });
    site.end_watching();
    site.write("etc/tidegate.toml", &secret_rules(3));
    started.try_iter().count();
    for reloads in 1..=3 {
        let closed = gate.lock().unwrap();
        let client = site.start_reload();
        started.recv_timeout(PATIENCE).expect("the file is being read");
        drop(client);
        // The listener has noticed the disconnect once only the connection of this request is open.
        site.until("/metrics", |answer| answer.body.contains("tidegate_connections{listener=\"admin\"} 1\n"));
        drop(closed);
        site.until_reloaded("ok", reloads);
    }
    assert_eq!(quota(&site), 3);
}

#[test]
fn a_panic_during_a_reload_is_reported_as_a_defect_and_changes_nothing() {
    let is_broken = Arc::new(AtomicBool::new(false));
    let site = Site::start_with(&secret_rules(2), |setup| {
        let is_broken = is_broken.clone();
        setup.loader = Loader::new().environment(move |_| {
            assert!(!is_broken.load(Ordering::Relaxed), "planted");
            secret()
        });
    });
    site.end_watching();
    is_broken.store(true, Ordering::Relaxed);
    site.write("etc/tidegate.toml", &secret_rules(3));
    let answer = site.operate("POST", "/v1/reload", "");
    assert_eq!(answer.status, 500, "{answer:?}");
    assert!(answer.body.contains("a bug"), "{answer:?}");
    site.until_reloaded("failed", 1);
    assert_eq!(quota(&site), 2);
    is_broken.store(false, Ordering::Relaxed);
    assert_eq!(site.operate("POST", "/v1/reload", "").status, 200, "the next reload succeeds");
    assert_eq!(quota(&site), 3);
}
