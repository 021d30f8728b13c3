//! A configuration in force at every endpoint, on a clock that stands still: the layer in process, and the listeners on
//! free ports.
//!
//! Requests are decided by rules at the [`RULE_ENDPOINTS`], all of which must give the same answer. Checks that name
//! their key and limit are decided over HTTP and RESP.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};
use serde_json::{Value, json};
use tidegate::config::{Loaded, Loader};
use tidegate::engine::Engine;
use tidegate::gateway::GatewaySettings;
use tidegate::layer::RateLimitLayer;
use tidegate::{
    Check, Decision, Demand, LimitStatus, Limiter, ManualClock, MemoryStore, Store, StoreFuture, Timestamp,
};
use tidegate_server::listeners::gateway::GATEWAY;
use tidegate_server::listeners::http::HTTP;
use tidegate_server::listeners::resp::RESP;
use tidegate_server::{Gateway, ServerOptions, run};
use tidegate_testkit::http::{HttpClient, HttpResponse};
use tidegate_testkit::server::Connection;
use tidegate_testkit::unreachable::UnreachableStore;
use tokio::runtime::{Builder, Runtime};
use tower::{Layer, ServiceExt, service_fn};

use crate::http_subject::exchange;
use crate::site::listen;

/// How long [`StoreKind::Slow`] takes: longer than the default deadline of 25 ms.
const SLOW: Duration = Duration::from_millis(200);

/// A request as a client sends it.
#[derive(Clone, Debug)]
pub(crate) struct ClientRequest {
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) headers: Vec<(&'static str, &'static str)>,
    pub(crate) peer: &'static str,
}

impl ClientRequest {
    pub(crate) fn get(path: impl Into<String>) -> ClientRequest {
        ClientRequest { method: "GET", path: path.into(), headers: Vec::new(), peer: "203.0.113.9" }
    }

    pub(crate) fn header(mut self, name: &'static str, value: &'static str) -> ClientRequest {
        self.headers.push((name, value));
        self
    }

    pub(crate) fn peer(self, peer: &'static str) -> ClientRequest {
        ClientRequest { peer, ..self }
    }
}

/// The response that reaches the client. An admitted request gets 200 without a body from the service.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ClientResponse {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl ClientResponse {
    /// Takes what the endpoints have in common from a response: all but its date and length.
    fn new(mut response: HttpResponse) -> ClientResponse {
        response.headers.retain(|name, _| !["date", "content-length"].contains(&&**name));
        ClientResponse { status: response.status, headers: response.headers, body: response.body }
    }
}

/// An endpoint that decides requests by rules.
pub(crate) struct RuleEndpoint {
    pub(crate) name: &'static str,
    pub(crate) ask: fn(&Deployment, &ClientRequest) -> ClientResponse,
}

/// All endpoints that decide requests by rules. They must give the same answers.
pub(crate) const RULE_ENDPOINTS: [RuleEndpoint; 3] = [
    RuleEndpoint { name: "the layer", ask: Deployment::ask_layer },
    RuleEndpoint { name: "/v1/check by rules", ask: Deployment::ask_check },
    RuleEndpoint { name: "TIDEGATE.REQUEST", ask: Deployment::ask_resp },
];

/// The store of a deployment whose configuration names none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StoreKind {
    /// Process memory.
    Memory,
    /// A shared store that cannot be reached.
    Unreachable,
    /// A shared store that answers after 200 ms.
    Slow,
}

/// Listeners and a layer with the same configuration, which share their counters.
pub(crate) struct Deployment {
    engine: Engine,
    http: SocketAddr,
    resp: SocketAddr,
    gateway: SocketAddr,
    clock: Arc<ManualClock>,
    runtime: Runtime,
}

/// The header of a request with the status that the service behind an endpoint responds with. Defaults to 200.
pub(crate) const STATUS_HEADER: &str = "x-status";

/// Loads a configuration in TOML. Panics with the report if it is invalid.
pub(crate) fn load(loader: &Loader, text: &str) -> Loaded {
    let loaded = loader.load_text("tidegate.toml", text, tidegate::Format::Toml);
    loaded.unwrap_or_else(|report| panic!("{report:?}\n{text}"))
}

impl Deployment {
    /// Starts the listeners. The counters are in the store that the configuration names, else in one of this kind.
    pub(crate) fn start(loaded: Loaded, kind: StoreKind) -> Deployment {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let context = runtime.enter();
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
        let redis = loaded.settings.redis_builder();
        let redis = redis.map(|builder| builder.clock_override(clock.clone()).build().unwrap());
        let is_shared = redis.is_some();
        let (builder, lookups) = loaded.settings.limiter_on(redis);
        let builder = match kind {
            _ if is_shared => builder,
            StoreKind::Memory => builder,
            StoreKind::Unreachable => builder.store(Arc::new(UnreachableStore)),
            StoreKind::Slow => builder.store(Arc::new(SlowStore(MemoryStore::builder().clock(clock.clone()).build()))),
        };
        let limiter: Limiter = builder.clock(clock.clone()).build();
        let engine = Engine::on_clock(limiter, loaded.rules, lookups, clock.clone());
        let ((http, http_at), (resp, resp_at), (gateway, gateway_at)) = (listen(), listen(), listen());
        let (upstream, upstream_at) = listen();
        tokio::spawn(answer_all(upstream));
        let servers = vec![format!("http://{upstream_at}").parse().unwrap()];
        let forwarding = Gateway::new(&GatewaySettings::default().with_servers(servers)).unwrap();
        let listeners = [(&HTTP, http), (&RESP, resp), (&GATEWAY, gateway)];
        let options = ServerOptions::new(engine.clone()).gateway(forwarding).threads(std::num::NonZeroUsize::MIN);
        tokio::spawn(run(listeners, options, std::future::pending()));
        drop(context);
        Deployment { engine, http: http_at, resp: resp_at, gateway: gateway_at, clock, runtime }
    }

    /// Moves the clock forward.
    pub(crate) fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    /// Sends a request to a service behind the layer.
    pub(crate) fn ask_layer(&self, asked: &ClientRequest) -> ClientResponse {
        let layer = RateLimitLayer::new(self.engine.clone(), |extensions| extensions.get::<IpAddr>().copied());
        let service = service_fn(|request: http::Request<()>| async move {
            let mut response = Response::new(Bytes::new());
            if let Some(status) = request.headers().get(STATUS_HEADER) {
                *response.status_mut() = http::StatusCode::from_bytes(status.as_bytes()).unwrap();
            }
            Ok::<_, Infallible>(response)
        });
        let mut request = http::Request::builder().method(asked.method).uri(&asked.path);
        request = request.extension(asked.peer.parse::<IpAddr>().unwrap());
        for (name, value) in &asked.headers {
            request = request.header(*name, *value);
        }
        let responding = layer.layer(service).oneshot(request.body(()).unwrap());
        let response = self.runtime.block_on(responding).unwrap();
        ClientResponse {
            status: response.status().as_u16(),
            headers: joined(response.headers()),
            body: String::from_utf8(response.body().to_vec()).unwrap(),
        }
    }

    /// Describes a request to `/v1/check`, and relays the response.
    fn ask_check(&self, asked: &ClientRequest) -> ClientResponse {
        let request = json!({ "request": {
            "method": asked.method, "path": asked.path, "headers": asked.headers, "peer": asked.peer,
        } });
        let (status, _, body) = self.post(&request);
        let response = &body["response"];
        let headers = response["headers"].as_object().unwrap_or_else(|| panic!("{body}"));
        let headers = headers.iter().map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned())).collect();
        if body["allowed"] == true {
            assert_eq!((status, response.as_object().unwrap().len()), (200, 1), "only headers to add: {body}");
            return ClientResponse { status, headers, body: String::new() };
        }
        let relayed = response["status"].as_u64().unwrap() as u16;
        assert!(status == relayed || headers.contains_key("grpc-status"), "{status}: {body}");
        ClientResponse { status: relayed, headers, body: response["body"].as_str().unwrap().to_owned() }
    }

    /// Describes a request to `TIDEGATE.REQUEST`, and relays the response.
    fn ask_resp(&self, asked: &ClientRequest) -> ClientResponse {
        let mut command = vec!["TIDEGATE.REQUEST", asked.method, &asked.path, asked.peer];
        command.extend(asked.headers.iter().flat_map(|(name, value)| [name, value]));
        let reply = Connection::open(self.resp).unwrap().call(&command).unwrap();
        let [allowed, status, .., pairs, body] = reply.items() else { panic!("{reply:?}") };
        let mut headers = BTreeMap::<String, String>::new();
        for pair in pairs.items() {
            let [name, value] = pair.items() else { panic!("{reply:?}") };
            let joined = headers.entry(name.text()).or_default();
            *joined = if joined.is_empty() { value.text() } else { format!("{joined}, {}", value.text()) };
        }
        let (status, body) = (status.integer().try_into().unwrap(), body.text());
        assert!(allowed.integer() == 0 || (status, &*body) == (200, ""), "only headers to add: {reply:?}");
        ClientResponse { status, headers, body }
    }

    /// Asks `/v1/forward-auth` as a reverse proxy on this machine does, which the configuration must trust.
    pub(crate) fn ask_forward_auth(&self, asked: &ClientRequest) -> ClientResponse {
        let visitor: String = asked.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let request = format!(
            "GET /v1/forward-auth?deny=200 HTTP/1.1\r\nhost: tidegate\r\nx-forwarded-method: {}\r\nx-forwarded-uri: {}\r\n\
             x-forwarded-host: example.com\r\nx-forwarded-for: {}\r\n{visitor}\r\n",
            asked.method, asked.path, asked.peer
        );
        ClientResponse::new(exchange(&mut HttpClient::open(self.http), &request))
    }

    /// Sends a request through the gateway, as a reverse proxy on this machine does, which the configuration must trust.
    pub(crate) fn ask_gateway(&self, asked: &ClientRequest) -> ClientResponse {
        let visitor: String = asked.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let request = format!(
            "{} {} HTTP/1.1\r\nhost: example.com\r\nx-forwarded-for: {}\r\n{visitor}\r\n",
            asked.method, asked.path, asked.peer
        );
        ClientResponse::new(exchange(&mut HttpClient::open(self.gateway), &request))
    }

    /// Posts a body to `/v1/check`. Returns the status, headers without the date, and the body of the response.
    pub(crate) fn post(&self, body: &Value) -> (u16, BTreeMap<String, String>, Value) {
        let mut response = HttpClient::open(self.http).ask("POST", "/v1/check", &[], &body.to_string());
        response.headers.remove("date");
        let body = response.json();
        (response.status, response.headers, body)
    }

    /// Sends a command to the RESP listener. Returns the reply as text.
    pub(crate) fn command(&self, parts: &[&str]) -> String {
        format!("{:?}", Connection::open(self.resp).unwrap().call(parts).unwrap())
    }
}

/// Answers every request without a body, as the service behind the gateway.
async fn answer_all(socket: tokio::net::TcpListener) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    while let Ok((mut stream, _)) = socket.accept().await {
        tokio::spawn(async move {
            let mut head = Vec::new();
            while stream.read_buf(&mut head).await.is_ok_and(|count| count > 0) {
                if head.ends_with(b"\r\n\r\n") {
                    let text = String::from_utf8(std::mem::take(&mut head)).unwrap();
                    let status = text.lines().find_map(|line| line.strip_prefix(&format!("{STATUS_HEADER}: ")));
                    let response = format!("HTTP/1.1 {} X\r\ncontent-length: 0\r\n\r\n", status.unwrap_or("200"));
                    let _ = stream.write_all(response.as_bytes()).await;
                }
            }
        });
    }
}

/// Returns headers by name, with the values of one name joined.
fn joined(headers: &HeaderMap) -> BTreeMap<String, String> {
    let values = |name| headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect::<Vec<_>>();
    headers.keys().map(|name| (name.as_str().to_owned(), values(name).join(", "))).collect()
}

struct SlowStore(MemoryStore);

impl Store for SlowStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        Box::pin(async move {
            tokio::time::sleep(SLOW).await;
            self.0.decide(checks).await
        })
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Store::refund(&self.0, check, decision)
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.0, demand)
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.0, demand)
    }
}
