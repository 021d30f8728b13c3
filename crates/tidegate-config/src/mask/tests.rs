use super::*;
use crate::read::{FieldValue, Reader};
use crate::tree::SyntaxError;
use crate::types::ConfigTable;
use crate::{toml, yaml};

const TOML: &str = r#"
store = "redis://user:hunter2/@@db.example/0" # hunter2
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
name = "first"
match = { path = "/x", headers = { x-internal = "planted-f" } }
[[rules]]
name = "second"
"#;

fn masked(text: &str, parse: impl Fn(&str) -> Result<Node, Vec<SyntaxError>>) -> String {
    let root = parse(text).unwrap();
    let mut reader = Reader::new(text);
    ConfigTable::from_node(&root, &mut reader);
    let masked = mask(text, &root, &reader.finish().shown);
    assert_eq!(masked.len(), text.len());
    masked
}

#[test]
fn no_secret_of_a_parsed_file_is_shown_and_no_byte_moves() {
    let shown = masked(TOML, toml::parse);
    assert!(!shown.contains("lanted") && !shown.contains("hunter2"), "{shown}");
    for part in [
        "redis://**************@db.example/0",
        r#"plan = "free""#,
        "[[bans]]",
        "by = \"api_key\"\nvalue = \"*********\"",
        "match = { path = \"/x\", headers = { x-internal = \"*********\" } }\n[[rules]]\nname = \"second\"",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    let yaml =
        "jwt:\n  key: |\n    -----BEGIN\n    planted\nkeys:\n  - { key: planted, plan: free }\nsecrte: planted\n";
    let shown = masked(yaml, yaml::parse);
    assert!(!shown.contains("planted") && shown.contains("plan: free"), "{shown}");
}

#[test]
fn no_secret_in_the_wrong_place_is_shown() {
    for text in [
        "[[keys]]\nKey = 'planted'",
        "[[keys]]\nkeyy = 'planted'\nplan = 'free'",
        "[[keys]]\napi_key = 'planted'",
        "[[keys]]\nid = 'planted'\nnested = { x = ['planted'] }",
        "[[keys]]\nkey = 'k'\n[[keys.planted]]\nx = 1\n[[keys.planted]]\nx = 2",
        "[[kesy]]\nkey = 'planted'",
        "[keys]\nacme = 'planted'",
        "[keys.planted]\nplan = 'free'",
        "['redis://:planted@db']\nplan = 'free'",
        "[plans.'redis://:planted@db']\nlimits = '1/s'",
        "api_key = 'planted'",
        "planted = 1",
        "prefix = ['planted']",
        "prefix = { planted = 'planted' }",
        "[[bans]]\nby = 'api-key'\nvalue = 'planted'",
        "[[bans]]\nby = 'API_KEY'\nvalue = 'planted'",
        "[[bans]]\nvalue = 'planted'",
        "[[bans]]\nby = 'api_key'\nvaleu = 'planted'",
        "exempt.keys = 'planted'",
        "exempt.kyes = 'planted'",
        "# key = 'planted'",
        "[[keys]]\nkey = 'k'\nkye = 'planted'",
        "prefix = 'x'\nprefx = 'planted'",
    ] {
        let shown = masked(text, toml::parse);
        assert!(!shown.contains("planted"), "{shown}");
    }
}

#[test]
fn a_value_that_is_no_secret_is_shown() {
    for text in [
        "[[keys]]\nname = 'acme'",
        "[[rules]]\nname = 'a'\nlimits = [{ quota = 1, window = '1s' }, '2/min']\n[[rules]]\nname = 'b'",
        "[plans.free]\nlimits = '1/s'\nupgrade_url = 'https://example.com/'",
        "[plan_sources]\nheader = 'x-plan'\naddresses = [{ networks = ['10.0.0.0/8'], plan = 'free' }]",
        "store = 'redis://db.example'\ninstances = 'three'",
    ] {
        assert_eq!(masked(text, toml::parse), text);
    }
}
