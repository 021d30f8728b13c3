//! A service behind the layer, called in process, with a manual clock; and a parser of its headers.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use sfv::{BareItem, ListEntry, Parser};
use tidegate::config::{Config, Format};
use tidegate::engine::Engine;
use tidegate::layer::{RateLimit, RateLimitLayer};
use tidegate::rules::{PlanLookup, RuleSet};
use tidegate::{Decision, Limiter, ManualClock, MemoryStore, Timestamp};
pub(crate) use tidegate_testkit::unreachable::UnreachableStore;
use tower::{Layer, ServiceExt, service_fn};

/// The address of the client, unless a test passes another one.
pub(crate) const PEER: [u8; 4] = [203, 0, 113, 9];

/// A layer with its engine and clock.
pub(crate) struct Site {
    pub(crate) engine: Engine,
    pub(crate) clock: Arc<ManualClock>,
    layer: RateLimitLayer,
}

/// Compiles rules from TOML. Panics with the report if the text is invalid.
pub(crate) fn rules(text: &str) -> RuleSet {
    Config::from_text(text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules
}

impl Site {
    pub(crate) fn new(text: &str) -> Site {
        Site::with_lookups(text, Vec::new())
    }

    pub(crate) fn with_lookups(text: &str, lookups: Vec<Arc<dyn PlanLookup>>) -> Site {
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
        let memory = MemoryStore::builder().clock(clock.clone()).build();
        let limiter = Limiter::builder().memory(memory).clock(clock.clone()).build();
        let engine = Engine::on_clock(limiter, rules(text), lookups, clock.clone());
        let layer = RateLimitLayer::new(engine.clone(), |extensions| extensions.get::<IpAddr>().copied());
        Site { engine, clock, layer }
    }

    pub(crate) fn layered(self, configure: impl FnOnce(RateLimitLayer) -> RateLimitLayer) -> Site {
        Site { layer: configure(self.layer), ..self }
    }

    /// Wraps `inner` with the layer.
    pub(crate) fn layered_over<S>(&self, inner: S) -> RateLimit<S> {
        self.layer.layer(inner)
    }

    /// Sends a POST. The handler answers 200, with the `remaining` of the decision in its extensions as the body.
    pub(crate) async fn send(&self, path: &str, headers: &[(&str, &str)], peer: [u8; 4]) -> Response<Bytes> {
        let mut request = Request::post(path).extension(IpAddr::from(peer));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let handler = service_fn(|request: Request<()>| async move {
            let decision = request.extensions().get::<Decision>();
            let remaining = decision.and_then(|decision| decision.limits.first()).map(|line| line.remaining);
            Ok::<_, Infallible>(Response::new(Bytes::from(format!("{remaining:?}"))))
        });
        self.layer.layer(handler).oneshot(request.body(()).unwrap()).await.unwrap()
    }

    /// Sends a POST and returns the status of the response.
    pub(crate) async fn status(&self, path: &str, headers: &[(&str, &str)], peer: [u8; 4]) -> u16 {
        self.send(path, headers, peer).await.status().as_u16()
    }
}

/// One policy of a `RateLimit` header.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PolicyStatus {
    pub(crate) name: String,
    pub(crate) remaining: i64,
    pub(crate) next_secs: Option<i64>,
}

/// Parses a `RateLimit` header with a parser of structured fields.
pub(crate) fn parse_ratelimit(ratelimit: &str) -> Vec<PolicyStatus> {
    let number = |value: &BareItem| match value {
        BareItem::Integer(number) => i64::from(*number),
        other => panic!("{other:?} is not an integer in {ratelimit}"),
    };
    let list = Parser::new(ratelimit).parse::<sfv::List>().unwrap();
    let policy = |entry: &ListEntry| match entry {
        ListEntry::Item(item) => PolicyStatus {
            name: item.bare_item.as_string().expect("a name").as_str().to_owned(),
            remaining: number(&item.params["r"]),
            next_secs: item.params.get("t").map(number),
        },
        ListEntry::InnerList(_) => panic!("{ratelimit} is not a list of items"),
    };
    list.iter().map(policy).collect()
}

/// Parses the `RateLimit` header of a response.
pub(crate) fn policies_of(response: &Response<Bytes>) -> Vec<PolicyStatus> {
    parse_ratelimit(response.headers()["ratelimit"].to_str().unwrap())
}
