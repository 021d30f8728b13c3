//! Other spellings of a path, a host or a method neither evade a rule nor become exempt.

use proptest::prelude::*;
use proptest::sample::select;

use crate::config::{Config, Format};
use crate::rules::{RequestView, RuleSet};

fn rules() -> RuleSet {
    let text = r#"
        exempt = { paths = ["/health", "/static/*"] }
        [[rules]]
        name = "login"
        match = { methods = ["POST"], path = "/account/login", host = "api.example.com" }
        by = ["ip"]
        limits = ["5/min"]
        [[rules]]
        name = "files"
        match = { path = "/files/{name}" }
        by = ["ip"]
        limits = ["5/min"]
    "#;
    Config::from_text(text, Format::Toml).unwrap().rules
}

fn names(rules: &RuleSet, method: &str, host: &str, path: &str) -> Vec<String> {
    let method = http::Method::from_bytes(method.as_bytes()).unwrap();
    let mut headers = http::HeaderMap::new();
    headers.insert("host", host.parse().unwrap());
    let matched = rules.matching(&RequestView::new(&method, path, &headers));
    matched.iter().map(|rule| rule.name().to_string()).collect()
}

/// A change of the spelling of a path.
#[derive(Clone, Copy, Debug)]
enum Disguise {
    Escape(usize),
    EscapeTwice(usize),
    DoubleSlash(usize),
    Dot(usize),
    DotDot(usize),
    Backslash(usize),
    Parameter(usize),
    TrailingSlash,
    Query,
    /// Appends an escaped character that ends the path once it is decoded.
    End(usize),
    TrailingDot(usize),
    Authority,
}

/// Applies a change to a path.
fn put_on(disguise: Disguise, path: &str) -> String {
    let slashes: Vec<usize> = path.match_indices('/').map(|(at, _)| at).collect();
    let slash = |number: usize| slashes[number % slashes.len()];
    let insert = |at: usize, text: &str| format!("{}{text}{}", &path[..at], &path[at..]);
    let escape = |number: usize, twice: bool| {
        // The first slash stays.
        let at = 1 + number % (path.len() - 1);
        let byte = path.as_bytes()[at];
        if byte == b'%' || (at > 0 && path.as_bytes()[..at].ends_with(b"%")) {
            return path.to_owned();
        }
        let percent = if twice { "%25" } else { "%" };
        format!("{}{percent}{byte:02x}{}", &path[..at], &path[at + 1..])
    };
    match disguise {
        Disguise::Escape(number) => escape(number, false),
        Disguise::EscapeTwice(number) => escape(number, true),
        Disguise::DoubleSlash(number) => insert(slash(number), "/"),
        Disguise::Dot(number) => insert(slash(number), "/."),
        Disguise::DotDot(number) => insert(slash(number), "/x/.."),
        Disguise::Backslash(number) => match slash(number) {
            0 => path.to_owned(),
            at => format!("{}\\{}", &path[..at], &path[at + 1..]),
        },
        Disguise::Parameter(number) => match slash(number) {
            0 => format!("{path};v=1"),
            at => insert(at, ";v=1"),
        },
        Disguise::TrailingSlash => format!("{path}/"),
        Disguise::Query => format!("{path}?a=/../b"),
        Disguise::End(number) => {
            let ends = ["%3Fx", "%3fx=1", "%23x", "%00", "%20", "%09x", "%0d%0ax", "%20x", "%253Fx"];
            format!("{path}{}", ends[number % ends.len()])
        }
        Disguise::TrailingDot(number) => {
            let at = if slash(number) == 0 { path.len() } else { slash(number) };
            // With one more dot, `.` and `..` would be other paths.
            if ends_with_dots(&path[..at]) {
                path.to_owned()
            } else {
                insert(at, if at == path.len() { "%2e" } else { "." })
            }
        }
        Disguise::Authority => format!("//host{path}"),
    }
}

/// Returns whether the last segment of a path consists of dots. Dots and separators may be escaped, also twice.
fn ends_with_dots(path: &str) -> bool {
    let decoded = path.to_ascii_lowercase().replace("%25", "%");
    let decoded = decoded.replace("%2e", ".").replace("%2f", "/").replace("%5c", "/").replace('\\', "/");
    let segment = decoded.rsplit('/').next().unwrap_or_default();
    !segment.is_empty() && segment.bytes().all(|byte| byte == b'.')
}

fn disguise() -> impl Strategy<Value = Disguise> {
    prop_oneof![
        (0..64_usize).prop_map(Disguise::Escape),
        (0..64_usize).prop_map(Disguise::EscapeTwice),
        (0..64_usize).prop_map(Disguise::DoubleSlash),
        (0..64_usize).prop_map(Disguise::Dot),
        (0..64_usize).prop_map(Disguise::DotDot),
        (0..64_usize).prop_map(Disguise::Backslash),
        (0..64_usize).prop_map(Disguise::Parameter),
        Just(Disguise::TrailingSlash),
        Just(Disguise::Query),
        (0..64_usize).prop_map(Disguise::End),
        (0..64_usize).prop_map(Disguise::TrailingDot),
        Just(Disguise::Authority),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn other_spellings_of_a_path_do_not_evade_its_rule(
        disguises in prop::collection::vec(disguise(), 1..4),
        method in select(vec!["POST", "post", "Post"]),
        host in select(vec![
            "api.example.com", "API.EXAMPLE.COM", "api.example.com:8443", "api.example.com.", "user@api.example.com:80",
            "api.example.com.:80", "api.example.com:80@other", "user:secret@api.example.com",
        ]),
    ) {
        // A host goes before the path and a query after it, so they are added last.
        let mut disguises = disguises;
        disguises.sort_by_key(|one| match one {
            Disguise::Authority => 1,
            Disguise::Query => 2,
            _ => 0,
        });
        let path = disguises.into_iter().fold("/account/login".to_owned(), |path, one| put_on(one, &path));
        let found = names(&rules(), method, host, &path);
        prop_assert!(found.contains(&"login".to_owned()), "{path} {found:?}");
    }
}

#[test]
fn other_spellings_of_a_limited_path_are_not_exempt() {
    let rules = rules();
    for path in [
        "/health/../files/a",
        "/static/../files/a",
        "/static/%2e%2e/files/a",
        "/static/..%2ffiles%2fa",
        "/static/..;/files/a",
        "/static/..;%2Fstatic/files/a",
        "/static/..;x%252Fy/files/a",
        "/static//../../files/a",
        "/static/%252e%252e/files/a",
        "/static\\..\\files\\a",
        "/health/..//files/a",
    ] {
        assert_eq!(names(&rules, "GET", "x", path), ["files"], "{path}");
    }
}

#[test]
fn parameters_with_an_escaped_slash_do_not_evade_a_rule() {
    for path in
        ["/account/login;a%2Fb", "/account;a%2Fb/login", "/account/login%3Ba%252Fb", "/x;a%2Fb/../account/login"]
    {
        assert_eq!(names(&rules(), "POST", "api.example.com", path), ["login"], "{path}");
    }
    assert_eq!(names(&rules(), "GET", "x", "/files;v=1/a%2Fb"), ["files"]);
}

#[test]
fn dot_dot_after_an_empty_segment_does_not_evade_a_rule() {
    for path in ["/account//../login", "/account/x/..//../login", "/account/%2F../login", "/account//%2e%2e/login"] {
        assert_eq!(names(&rules(), "POST", "api.example.com", path), ["login"], "{path}");
    }
}

#[test]
fn ambiguous_paths_of_a_client_share_one_counter() {
    let text =
        "[[rules]]\nname = \"login\"\nmatch = { path = \"/api/login\" }\nby = [\"ip\", \"path\"]\nlimits = [\"5/min\"]";
    let rules = Config::from_text(text, Format::Toml).unwrap().rules;
    let headers = http::HeaderMap::new();
    let subject = |path: &str| {
        let view = RequestView::new(&http::Method::GET, path, &headers);
        assert_eq!(rules.matching(&view).indices(), [0], "{path}");
        let (peer, now) = ([203, 0, 113, 9].into(), tidegate_core::Timestamp::ZERO);
        let identity = rules.identifier().identify(&view, peer, &rules, now);
        identity.subject(rules.rules()[0].by()).to_string()
    };
    assert_eq!(subject("/api/login"), "ip:203.0.113.9&path:/api/login");
    assert_eq!(subject("/./api/log%69n/"), "ip:203.0.113.9&path:/api/login");
    for number in 0..3 {
        for path in [
            format!("/{number}%2Fx/../api/login"),
            format!("/api/login;%2F{number}"),
            format!("/api/{number}%2F/../login"),
            format!("//{number}/api/login"),
            format!("/{number}%3F/../api/login"),
        ] {
            assert_eq!(subject(&path), "ip:203.0.113.9&path:!203.0.113.9", "{path}");
        }
    }
}

#[test]
fn method_override_header_is_read_only_if_it_is_configured() {
    let rules = |setting: &str| {
        let rule = "[[rules]]\nname = 'delete'\nmatch = { methods = ['DELETE'] }\nby = ['ip']\nlimits = ['5/min']";
        Config::from_text(&format!("{setting}\n{rule}"), Format::Toml).unwrap().rules
    };
    let applies = |rules: &RuleSet, method: &str, value: &str| {
        let request = http::Request::builder().method(method).uri("/").header("x-http-method-override", value).body(());
        !rules.matching(&RequestView::of(&request.unwrap())).is_empty()
    };
    let (unset, set) = (rules(""), rules("method_override_headers = ['X-HTTP-Method-Override']"));
    assert!(!applies(&unset, "POST", "DELETE"));
    assert!(applies(&set, "POST", "DELETE") && applies(&set, "POST", " delete ") && applies(&set, "GET", "DELETE"));
    assert!(applies(&set, "DELETE", "GET"), "the method of the request is matched, too");
    assert!(!applies(&set, "POST", "PUT") && !applies(&set, "POST", "DELETED"));
}

#[test]
fn exempt_paths_match_no_rule() {
    let rules = rules();
    for path in ["/health", "/health/", "/static/app.js", "/static/a/b", "/heal%74h"] {
        assert!(names(&rules, "GET", "x", path).is_empty(), "{path}");
    }
    for path in ["/files/a%2Fb", "//files/a%2Fb", "/x/../files/a%2Fb", "/files/./a%5Cb"] {
        assert_eq!(
            names(&rules, "GET", "x", path),
            ["files"],
            "{path} is one segment for a server that splits before it decodes"
        );
    }
}

#[test]
fn request_with_several_hosts_matches_the_rules_of_each() {
    let rules = rules();
    let request = http::Request::post("https://harmless.example/account/login")
        .header("host", "harmless.example")
        .header("host", "api.example.com")
        .body(())
        .unwrap();
    assert_eq!(rules.matching(&RequestView::of(&request)).indices(), [0]);
    let request = http::Request::post("https://user@api.example.com:443/account/login").body(()).unwrap();
    assert_eq!(rules.matching(&RequestView::of(&request)).indices(), [0]);
}

#[test]
fn exempt_path_is_exempt_from_a_rule_without_conditions() {
    let text = "exempt = { paths = [\"/health\"] }\n[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"5/min\"]";
    let rules = Config::from_text(text, Format::Toml).unwrap().rules;
    assert_eq!(names(&rules, "GET", "example.com", "/health"), [""; 0]);
    assert_eq!(names(&rules, "GET", "example.com", "/health/../admin"), ["all"]);
}
