use super::*;
use crate::config::{toml, yaml};

const TOML: &str = r#"
store = "redis://user:hunter2/@@db.example/0"
[exempt]
keys = ["planted-a", 'sha256:planted']
[anonymize]
secret = "plänted-b"
[jwt]
key = """
-----BEGIN PUBLIC KEY-----
plantedc
-----END PUBLIC KEY-----"""
[[keys]]
key = "planted-d"
plan = "free"
[[bans]]
by = "api_key"
value = "planted-e"
[[rules]]
match = { path = "/x", headers = { x-internal = "planted-f" } }
"#;

#[test]
fn no_secret_of_a_parsed_file_is_shown_and_no_byte_moves() {
    let masked = by_tree(TOML, &toml::parse(TOML).unwrap());
    assert!(!masked.contains("lanted") && !masked.contains("hunter2"), "{masked}");
    assert_eq!(masked.len(), TOML.len());
    assert!(masked.contains("redis://**************@db.example/0") && masked.contains(r#"plan = "free""#), "{masked}");
    let yaml =
        "jwt:\n  key: |\n    -----BEGIN\n    planted\nkeys:\n  - { key: planted, plan: free }\nsecrte: planted\n";
    let masked = by_tree(yaml, &yaml::parse(yaml).unwrap());
    assert!(!masked.contains("planted") && masked.contains("plan: free"), "{masked}");
}

/// Whatever is wrong with a file, no report about it shows a secret.
#[test]
fn what_may_be_a_key_in_the_wrong_place_is_not_shown() {
    for text in [
        "[[keys]]\nKey = 'planted'",
        "[[keys]]\nkeyy = 'planted'\nplan = 'free'",
        "[[keys]]\napi_key = 'planted'",
        "[[keys]]\nid = 'planted'\nnested = { x = ['planted'] }",
        "[[kesy]]\nkey = 'planted'",
        "[keys]\nacme = 'planted'",
        "api_key = 'planted'",
        "[[bans]]\nby = 'api-key'\nvalue = 'planted'",
        "[[bans]]\nby = 'API_KEY'\nvalue = 'planted'",
        "[[bans]]\nvalue = 'planted'",
        "[[bans]]\nby = 'api_key'\nvaleu = 'planted'",
        "exempt.keys = 'planted'",
        "exempt.kyes = 'planted'",
    ] {
        for masked in [by_tree(text, &toml::parse(text).unwrap()), by_looks(text)] {
            assert!(!masked.contains("planted") && masked.len() == text.len(), "{masked}");
        }
    }
    for text in
        ["[[bans]]\nby = 'ip'\nvalue = '10.0.0.1'", "[[bans]]\nby = 'user'\nvalue = 'eve'", "[[keys]]\nname = 'acme'"]
    {
        assert_eq!(by_tree(text, &toml::parse(text).unwrap()), text);
    }
}

#[test]
fn what_belongs_to_a_secret_on_the_lines_below_is_not_shown_in_a_broken_file() {
    for (text, shown) in [
        ("[exempt]\nkeys = [\n  \"planted\",\n  'plan]ted',\n  'planted'\n]\nlimits = [10/min]\n", "[10/min]"),
        ("exempt = { keys = [ 'a]b',\n  'planted' ] }\nlimits = [10/min]\n", "[10/min]"),
        ("[jwt]\nkey = '''\nplanted = [x]: planted\n'''\ndeadline = 5\n", "deadline = 5"),
        ("[jwt]\nkey = 'abc\nplanted = [x]: planted'\ndeadline = 5\n", "deadline = 5"),
        ("[[keys]] # mine\nid = 'planted'\nplan = 'free'\n", "plan = 'free'"),
        ("[rules.match.headers]\nx-a = 'planted'\n[[rules]]\nname = 'a'\n", "name = 'a'"),
        ("keys:\n  - planted\n  - 'planted': x\nstore: memory\n", "store: memory"),
        ("exempt:\n  keys:\n  - planted\n\n  - planted planted\n  paths: [/x]\n", "paths: [/x]"),
        ("jwt:\n  key: |\n    planted: a planted\n    planted = /x\n  issuer: me\n", "issuer: me"),
        ("keys:\n  - key: >-\n      planted planted\n    plan: free\n", "plan: free"),
        ("rules:\n  - match:\n      headers:\n        x-a: planted\n    name: a\n", "name: a"),
    ] {
        let masked = by_looks(text);
        assert!(!masked.contains("planted") && !masked.contains("ted'"), "{masked}");
        assert!(masked.contains(shown) && masked.len() == text.len(), "{masked}");
    }
}

#[test]
fn a_broken_file_shows_no_line_that_looks_like_a_secret() {
    let broken = format!("{TOML}\nlimits = [10/min]\nsecret: planted-g\n");
    let masked = by_looks(&broken);
    assert!(!masked.contains("lanted") && !masked.contains("hunter2"), "{masked}");
    assert!(masked.contains("limits = [10/min]") && masked.contains("plan = \"free\""), "{masked}");
    assert_eq!(masked.len(), broken.len());
}
