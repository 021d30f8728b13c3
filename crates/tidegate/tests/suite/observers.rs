//! What observers see of requests that the limiter does not decide: shields, bans, exemptions, reloads.

use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use http::Request;
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::observe::{BannedRequest, DecidedCheck, ExemptRequest, Observer, ShieldRefusal};
use tidegate::rules::{Ban, ListedKey, RequestView, RuleSet};
use tidegate::{Limiter, ManualClock, MemoryStore, Rule, Rules, Scope, Subject, Timestamp};

const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
const HERE: [u8; 4] = [203, 0, 113, 9];

/// Notes each event as a line.
#[derive(Default)]
struct Events(Mutex<Vec<String>>);

impl Events {
    fn add(&self, event: String) {
        self.0.lock().unwrap().push(event);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Observer for Events {
    fn decided(&self, decided: &DecidedCheck<'_>) {
        self.add(format!("decided {}", decided.result.is_ok_and(|decision| decision.allowed())));
    }

    fn shield_refused(&self, refused: &ShieldRefusal<'_>) {
        for demand in refused.check.demands() {
            let Scope::Rule(scope) = demand.key.scope() else { panic!("a shield is a rule") };
            let subject = String::from_utf8_lossy(demand.key.subject());
            let retry_after = refused.decision.map(|decision| decision.retry_after());
            self.add(format!("shield {} {} {subject} {retry_after:?}", scope.rule(), demand.limit));
        }
    }

    fn banned(&self, request: &BannedRequest) {
        self.add(format!("banned {} {:?} {:?}", request.address, request.by, request.remaining));
    }

    fn exempted(&self, request: &ExemptRequest) {
        self.add(format!("exempt {} {:?}", request.address, request.by));
    }

    fn reloaded(&self, rules: &RuleSet) {
        self.add(format!("reloaded {}", rules.rules().len()));
    }
}

struct Site {
    engine: Engine,
    events: Arc<Events>,
}

impl Site {
    fn new(rules: Rules) -> Site {
        let (clock, events) = (Arc::new(ManualClock::new(START)), Arc::new(Events::default()));
        let memory = MemoryStore::builder().clock(clock.clone()).build();
        let limiter = Limiter::builder().memory(memory).clock(clock.clone()).observer(events.clone()).build();
        let engine = Engine::on_clock(limiter, rules.build().unwrap(), Vec::new(), clock);
        Site { engine, events }
    }

    /// Sends a request, and returns whether it was admitted and the events that it caused.
    async fn send(&self, path: &str, key: Option<&str>, peer: [u8; 4]) -> (bool, Vec<String>) {
        let mut request = Request::get(path);
        if let Some(key) = key {
            request = request.header("x-api-key", key);
        }
        let request = request.body(()).unwrap();
        let outcome = self.engine.check(&RequestView::of(&request), peer.into(), RequestOptions::default()).await;
        (matches!(outcome, Outcome::Admitted(_)), self.events.take())
    }
}

fn all() -> Rule {
    Rule::new("all").by(Subject::Ip).limit("1/min")
}

#[tokio::test]
async fn a_refusal_by_a_shield_is_observed_and_an_admission_is_not() {
    let shield = Rule::new("shield").shield().limit("1/s");
    let trial = Rule::new("trial").shield().limit("1/h").mode(tidegate::rules::Mode::Shadow);
    let site = Site::new(Rules::new().rule(shield).rule(trial).rule(Rule::new("all").by(Subject::Ip).limit("9/min")));
    assert_eq!(site.send("/", None, HERE).await, (true, vec!["decided true".to_owned()]));
    let refused = vec!["shield shield 1/s ip:203.0.113.9 Some(1s)".to_owned()];
    assert_eq!(site.send("/", None, HERE).await, (false, refused));
}

#[tokio::test]
async fn a_ban_is_observed_with_its_kind_and_the_time_until_it_ends() {
    let end = UNIX_EPOCH + Duration::from_micros(START.as_micros()) + Duration::from_secs(60);
    let rules = Rules::new().ban(Ban::network("203.0.113.0/24").until(end)).ban(Ban::api_key("stolen-key")).rule(all());
    let site = Site::new(rules);
    let by_address = vec!["banned 203.0.113.9 Address 60s".to_owned()];
    assert_eq!(site.send("/", None, HERE).await, (false, by_address));
    let by_key = vec!["banned 192.0.2.1 Caller never".to_owned()];
    assert_eq!(site.send("/", Some("stolen-key"), [192, 0, 2, 1]).await, (false, by_key));
    assert_eq!(site.send("/", None, [192, 0, 2, 1]).await, (true, vec!["decided true".to_owned()]));
}

#[tokio::test]
async fn an_exemption_is_observed_only_if_a_rule_matches() {
    let rules = Rules::new()
        .exempt_paths(["/health"])
        .exempt_addresses(["203.0.113.0/24"])
        .key(ListedKey::new("our-own-key").exempt())
        .rule(all().path("/v1/*").path("/health"));
    let site = Site::new(rules);
    let elsewhere = [192, 0, 2, 1];
    let exempt = |event: &str| (true, vec![event.to_owned()]);
    assert_eq!(site.send("/health", None, elsewhere).await, exempt("exempt 192.0.2.1 Path"));
    assert_eq!(site.send("/v1/a", None, HERE).await, exempt("exempt 203.0.113.9 Caller"));
    assert_eq!(site.send("/v1/a", Some("our-own-key"), elsewhere).await, exempt("exempt 192.0.2.1 Caller"));
    assert_eq!(site.send("/v2/a", None, HERE).await, (true, vec![]), "no rule matches");
    assert_eq!(site.send("/v1/a", None, elsewhere).await, exempt("decided true"));
}

#[tokio::test]
async fn an_exempt_request_is_reported_as_exempt_where_a_shield_is_full() {
    let site = Site::new(Rules::new().exempt_paths(["/health"]).rule(Rule::new("shield").shield().limit("1/min")));
    assert_eq!(site.send("/", None, HERE).await, (true, vec![]));
    assert_eq!(site.send("/health", None, HERE).await, (true, vec!["exempt 203.0.113.9 Path".to_owned()]));
}

#[tokio::test]
async fn a_reload_is_observed_after_the_new_rules_are_in_use() {
    let site = Site::new(Rules::new().rule(all()));
    site.engine.reload(Rules::new().rule(all()).rule(Rule::new("more").limit("9/min")).build().unwrap());
    assert_eq!(site.events.take(), ["reloaded 2"]);
    assert_eq!(site.engine.rule_stats().len(), 2);
}

#[tokio::test]
async fn an_observer_that_panics_changes_no_refusal() {
    struct Panics;
    impl Observer for Panics {
        fn banned(&self, _: &BannedRequest) {
            panic!("planted");
        }
        fn reloaded(&self, _: &RuleSet) {
            panic!("planted");
        }
    }
    let rules = Rules::new().ban(Ban::network("203.0.113.9")).rule(all()).build().unwrap();
    let engine = Engine::new(Limiter::builder().observer(Arc::new(Panics)).build(), rules.clone());
    engine.reload(rules);
    let request = Request::get("/").body(()).unwrap();
    for _ in 0..2 {
        let outcome = engine.check(&RequestView::of(&request), HERE.into(), RequestOptions::default()).await;
        assert!(matches!(outcome, Outcome::Refused(refusal) if refusal.verdict().http() == 403));
    }
}
