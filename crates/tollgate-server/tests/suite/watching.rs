//! Files that change in ways that a watch can lose sight of, and reloads that nobody waits for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use serde_json::json;
use tollgate::config::Loader;

use crate::site::{PATIENCE, Site};

fn rules(quota: u32) -> String {
    format!("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [{{ name = \"main\", limit = \"{quota}/h\" }}]\n")
}

/// The quota in force. Asking costs nothing that another test could miss.
fn quota(site: &Site) -> u64 {
    let question = json!({ "request": { "method": "GET", "path": "/", "peer": "203.0.113.9" } });
    site.check(&question).json()["limits"][0]["quota"].as_u64().unwrap()
}

#[test]
fn a_directory_that_takes_the_place_of_another_is_watched_like_the_first() {
    let site = Site::start(&rules(2));
    assert_eq!(quota(&site), 2);
    for (version, quota_of_version) in [(1, 10), (2, 20)] {
        std::fs::create_dir(site.file("next")).unwrap();
        site.write("next/tollgate.toml", &rules(quota_of_version));
        // One after the other, before anybody has looked.
        std::fs::rename(site.file("etc"), site.file(&format!("old-{version}"))).unwrap();
        std::fs::rename(site.file("next"), site.file("etc")).unwrap();
        site.until_reloaded("ok", 2 * version - 1);
        assert_eq!(quota(&site), u64::from(quota_of_version));
        site.write("etc/tollgate.toml", &rules(quota_of_version + 1));
        site.until_reloaded("ok", 2 * version);
        assert_eq!(quota(&site), u64::from(quota_of_version) + 1, "and what is written later is seen");
    }
}

#[test]
fn a_file_that_was_missing_is_read_as_soon_as_it_is_there_wherever_that_is() {
    for missing in ["keys.toml", "../secrets/keys.toml"] {
        let site = Site::start(&rules(2));
        site.write("etc/tollgate.toml", &format!("keys_file = \"{missing}\"\n{}", rules(3)));
        site.until_reloaded("failed", 1);
        assert_eq!(quota(&site), 2, "the old rules are in force");
        std::fs::create_dir_all(site.file("secrets")).unwrap();
        site.write(&format!("etc/{missing}"), "[[keys]]\nkey = \"planted-key\"\n");
        site.until_reloaded("ok", 1);
        assert_eq!(quota(&site), 3, "{missing}");
    }
}

/// Rules whose reading asks the environment.
fn secret_rules(quota: u32) -> String {
    format!("anonymize = {{ secret_env = \"PLANTED\" }}\n{}", rules(quota))
}

fn secret() -> Option<String> {
    Some("a secret that is long enough for everybody".to_owned())
}

#[test]
fn a_reload_whose_asker_has_left_is_finished_counted_and_told() {
    let (gate, (begin, begun)) = (Arc::new(Mutex::new(())), mpsc::channel());
    let site = Site::start_with(&secret_rules(2), |setup| {
        let gate = gate.clone();
        setup.loader = Loader::new().environment(move |_| {
            begin.send(()).unwrap();
            drop(gate.lock().unwrap());
            secret()
        });
    });
    site.end_watching();
    site.write("etc/tollgate.toml", &secret_rules(3));
    begun.try_iter().count();
    for reloads in 1..=3 {
        let closed = gate.lock().unwrap();
        let asker = site.ask_to_reload();
        begun.recv_timeout(PATIENCE).expect("the file is being read");
        drop(asker);
        // The listener notices that the client has hung up: only the connection of this request is open.
        site.until("/metrics", |answer| answer.body.contains("tollgate_connections{door=\"admin\"} 1\n"));
        drop(closed);
        site.until_reloaded("ok", reloads);
    }
    assert_eq!(quota(&site), 3);
}

#[test]
fn a_panic_while_reading_is_told_as_what_it_is_and_changes_nothing() {
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
    site.write("etc/tollgate.toml", &secret_rules(3));
    let told = site.operate("POST", "/v1/reload", "");
    assert_eq!(told.status, 500, "{told:?}");
    assert!(told.body.contains("a defect"), "{told:?}");
    site.until_reloaded("failed", 1);
    assert_eq!(quota(&site), 2);
    is_broken.store(false, Ordering::Relaxed);
    assert_eq!(site.operate("POST", "/v1/reload", "").status, 200, "and the next one is read");
    assert_eq!(quota(&site), 3);
}
