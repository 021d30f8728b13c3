//! Files that change in ways that a watch can lose sight of.

use serde_json::json;

use crate::site::Site;

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
