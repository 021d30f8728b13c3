//! Access to the admin listener besides the token: web pages, unknown names in `Host`, and clients that guess tokens.

use tidegate_server::WebOrigin;

use tidegate_testkit::program::TOKEN;

use crate::site::Site;

const RULES: &str = "[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"5/h\"]\n";

fn site() -> Site {
    Site::start_with(RULES, |setup| {
        setup.origins = vec!["https://ops.example".parse::<WebOrigin>().unwrap()];
        setup.admin_hosts = vec!["gate.example".to_owned()];
    })
}

/// Returns the samples of a metric.
fn samples(site: &Site, metric: &str) -> Vec<String> {
    let text = site.operate("GET", "/metrics", "").body;
    text.lines().filter(|line| line.starts_with(metric)).map(str::to_owned).collect()
}

#[test]
fn web_pages_and_unknown_hosts_are_rejected_on_every_path_except_healthz() {
    let site = site();
    for (headers, status) in [
        ("host: 127.0.0.1:9180", 200),
        ("host: [::1]:9180", 200),
        ("host: localhost:9180", 200),
        ("host: tidegate:9180", 200),
        ("host: gate.example", 200),
        ("host: attacker.example:9180", 421),
        ("host: 127.0.0.1.attacker.example", 421),
        ("host: attacker.example\r\norigin: http://attacker.example\r\nsec-fetch-site: same-origin", 421),
        ("host: localhost:9180\r\norigin: http://localhost:9180\r\nsec-fetch-site: same-origin", 200),
        ("host: localhost:9180\r\nsec-fetch-site: none", 200),
        ("host: localhost:9180\r\norigin: https://ops.example\r\nsec-fetch-site: cross-site", 200),
        ("host: localhost:9180\r\norigin: https://attacker.example", 403),
        ("host: localhost:9180\r\norigin: http://localhost:3000", 403),
        ("host: localhost:9180\r\norigin: null", 403),
        ("host: localhost:9180\r\nsec-fetch-site: cross-site", 403),
        ("host: localhost:9180\r\nsec-fetch-site: same-site", 403),
    ] {
        for (method, path) in [("GET", "/metrics"), ("GET", "/readyz"), ("GET", "/v1/rules"), ("POST", "/v1/reload")] {
            let headers = format!("{headers}\r\nauthorization: Bearer {TOKEN}\r\n");
            let answer = site.ask_admin(method, path, &headers);
            assert_eq!(answer.status, status, "{method} {path} {headers}: {answer:?}");
        }
        // It discloses only that the process is alive.
        assert_eq!(site.ask_admin("GET", "/healthz", &format!("{headers}\r\n")).status, 200, "{headers}");
    }
    let rejected = samples(&site, "tidegate_requests_rejected_total");
    let admin = |reason: &str, times: u32| {
        format!("tidegate_requests_rejected_total{{listener=\"admin\",reason=\"{reason}\"}} {times}")
    };
    assert!(rejected.contains(&admin("host", 3 * 4)), "{rejected:?}");
    assert!(rejected.contains(&admin("origin", 5 * 4)), "{rejected:?}");
}

#[test]
fn wrong_tokens_are_counted_and_delayed_and_the_right_one_still_works() {
    let site = site();
    let wrong = "host: x\r\nauthorization: Bearer a-token-that-is-not-it\r\n";
    for _ in 0..8 {
        assert_eq!(site.ask_admin("GET", "/v1/rules", wrong).status, 401);
    }
    // A request without a token is not a guess.
    assert_eq!(site.ask_admin("GET", "/v1/rules", "host: x\r\n").status, 401);
    assert_eq!(site.operate("GET", "/v1/rules", "").status, 200);
    let failures = samples(&site, "tidegate_auth_failures_total");
    assert!(
        failures.contains(&"tidegate_auth_failures_total{listener=\"admin\",result=\"wrong\"} 8".to_owned()),
        "{failures:?}"
    );

    // Of many at once, few are checked, and the others are refused.
    let clients: Vec<u16> = std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..40).map(|_| scope.spawn(|| site.ask_admin("GET", "/v1/rules", wrong).status)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    assert!(clients.iter().all(|status| [401, 429].contains(status)), "{clients:?}");
    assert!(clients.contains(&401), "{clients:?}");
    assert_eq!(site.operate("GET", "/v1/rules", "").status, 200);
}
