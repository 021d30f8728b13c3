//! Listeners with rules, for tests.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::{Limiter, ManualClock, Store, Timestamp};
pub(crate) use tidegate_testkit::unreachable::UnreachableStore;

use super::HttpListener;

pub(crate) const IDLE: Duration = Duration::from_secs(60);
/// The address of the clients.
pub(crate) const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9));

/// Returns a clock that stands still, at a time in 2023.
pub(crate) fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)))
}

/// Every kind of answer that rules can give: bans with and without an end, exemptions, plans, costs, shields, shadow
/// mode, header sets, body formats and failure policies.
pub(crate) const RULES: &str = r#"
path_bytes_max = 64
headers = ["x", "draft-6"]
[exempt]
paths = ["/health"]
[[bans]]
by = "ip"
value = "198.51.100.7"
reason = "scraping"
[[bans]]
by = "ip"
value = "198.51.100.8"
until = "2099-01-01T00:00:00Z"
[plans.anonymous]
limits = ["2/h"]
[plans.default]
limits = ["2/h"]
[plans.pro]
limits = ["3/h", "5/day"]
upgrade_url = "https://example.com/upgrade"
[[keys]]
key = "planted-pro"
plan = "pro"
[[rules]]
name = "json"
match = { path = "/json" }
by = ["ip"]
limits = ["1/h"]
on_failure = "deny"
headers = ["ietf", "x"]
[[rules]]
name = "problem"
match = { path = "/problem" }
by = ["ip"]
limits = ["1/h"]
on_failure = "deny"
body = "problem"
[[rules]]
name = "text"
match = { path = "/text" }
by = ["ip"]
limits = ["1/h"]
on_failure = "deny"
body = "text"
[[rules]]
name = "local"
match = { path = "/local" }
by = ["ip"]
limits = ["1/h"]
[[rules]]
name = "allow"
match = { path = "/allow" }
by = ["ip"]
limits = ["1/h"]
on_failure = "allow"
[[rules]]
name = "costly"
match = { path = "/costly" }
by = ["ip"]
cost = 5
limits = ["8/h", "7/min"]
[[rules]]
name = "plan"
match = { path = "/plan" }
limits = "plan"
[[rules]]
name = "shadow"
match = { path = "/shadow" }
mode = "shadow"
by = ["ip"]
limits = ["1/h"]
[[rules]]
name = "shield"
match = { path = "/shield" }
charge = "on_success"
store = "memory"
by = ["ip"]
limits = ["1/h"]
"#;

/// Returns a listener with [`RULES`] whose clock stands still. Counters are in memory if there is no store.
pub(crate) fn listener_with_rules(store: Option<Arc<dyn Store>>) -> Arc<HttpListener> {
    listener_with_config(RULES, store)
}

/// Returns a listener with the rules of a configuration in TOML, whose clock stands still. Counters are in memory if
/// there is no store.
pub(crate) fn listener_with_config(text: &str, store: Option<Arc<dyn Store>>) -> Arc<HttpListener> {
    Arc::new(HttpListener::new(engine_with_config(text, store), IDLE))
}

/// Returns an engine with the rules of a configuration in TOML, whose clock stands still. Counters are in memory if there
/// is no store.
pub(crate) fn engine_with_config(text: &str, store: Option<Arc<dyn Store>>) -> Engine {
    let clock = clock();
    let builder = Limiter::builder().clock(clock.clone());
    let limiter = match store {
        Some(store) => builder.store(store),
        None => builder,
    };
    let limiter = limiter.build();
    let loaded = Config::from_text(text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"));
    Engine::on_clock(limiter, loaded.rules, Vec::new(), clock)
}

/// Returns a request body that describes a GET request, to be decided by rules. `headers` is JSON.
pub(crate) fn described(path: &str, peer: &str, headers: &str) -> String {
    format!(r#"{{"request":{{"method":"GET","path":"{path}","peer":"{peer}","headers":{headers}}}}}"#)
}
