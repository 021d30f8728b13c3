//! What should go on and does not is told where orchestrators ask.

use serde_json::json;

use crate::site::Site;

const RULES: &str = "[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"2/h\"]\n";

#[test]
fn an_instance_whose_door_has_ended_is_not_ready_and_says_which() {
    let site = Site::start(RULES);
    let ready = site.operate("GET", "/readyz", "");
    assert_eq!((ready.status, &ready.json()["ended"]), (200, &json!([])), "{ready:?}");

    // More places than there can be: the task that lets clients in does not get beyond its first step.
    let broken = Site::start_with(RULES, |setup| setup.bounds.connections = usize::MAX);
    let told = broken.until("/readyz", |answer| answer.status == 503);
    assert_eq!(told.json()["ended"], json!(["http"]), "{told:?}");
    assert!(broken.operate("GET", "/metrics", "").body.contains("tollgate_ready 0\n"));
}

#[test]
fn an_instance_that_does_not_watch_its_files_any_more_is_not_ready_and_says_so() {
    let site = Site::start(RULES);
    site.write("etc/tollgate.toml", &RULES.replace('2', "3"));
    site.until_reloaded("ok", 1);
    assert_eq!(site.operate("GET", "/readyz", "").status, 200);
    site.end_watching();
    let told = site.until("/readyz", |answer| answer.status == 503);
    assert_eq!(told.json()["ended"], json!(["file watch"]), "{told:?}");
}
