//! `/readyz` reports tasks that have ended unexpectedly.

use serde_json::json;

use crate::site::Site;

const RULES: &str = "[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"2/h\"]\n";

#[test]
fn an_instance_whose_listener_has_ended_is_not_ready_and_names_it() {
    let site = Site::start(RULES);
    let ready = site.operate("GET", "/readyz", "");
    assert_eq!((ready.status, &ready.json()["ended"]), (200, &json!([])), "{ready:?}");

    // More connections than a semaphore can hold: the task of the listener panics.
    let broken = Site::start_with(RULES, |setup| setup.bounds.connections = usize::MAX);
    let answer = broken.until("/readyz", |answer| answer.status == 503);
    assert_eq!(answer.json()["ended"], json!(["http"]), "{answer:?}");
    assert!(broken.operate("GET", "/metrics", "").body.contains("tidegate_ready 0\n"));
}

#[test]
fn an_instance_whose_file_watch_has_ended_is_not_ready() {
    let site = Site::start(RULES);
    site.write("etc/tidegate.toml", &RULES.replace('2', "3"));
    site.until_reloaded("ok", 1);
    assert_eq!(site.operate("GET", "/readyz", "").status, 200);
    site.end_watching();
    let answer = site.until("/readyz", |answer| answer.status == 503);
    assert_eq!(answer.json()["ended"], json!(["file watch"]), "{answer:?}");
}
