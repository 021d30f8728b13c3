//! Clients of the gateway whose requests are refunded, in whichever order the upstream responds to them.
//!
//! A unit is a request that the upstream holds until the client wants it to be refunded or kept. Units that are held at the
//! end of a sequence are kept.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use tidegate::{Demand, Timestamp};
use tidegate_testkit::conformance::net_use::{RefundImplementation, keeps_the_limit_in_real_time};
use tidegate_testkit::server::Server;

use crate::campaign::{random, record, scale};
use tidegate_testkit::http::upstream::{Upstream, reply};
use tidegate_testkit::http::{HttpClient, HttpResponse};
use tidegate_testkit::program::GatewayProcess;
use tidegate_testkit::program::PATIENCE;

/// One limit of each algorithm. All units are available again after 400 ms without a request, or 20 ms for the leaky bucket,
/// which delays requests by up to that time.
const LIMITS: [&str; 6] = [
    "20/s token-bucket burst=8",
    "400/s leaky-bucket queue=7",
    "8/400ms",
    "8/400ms sliding-log",
    "8/400ms sliding-counter",
    "8/400ms fixed-window",
];
/// The values of `charge`, with the statuses after which the units are kept and refunded.
const CHARGES: [(&str, u16, u16); 2] = [("on_success", 200, 404), ("on_failure", 404, 200)];

enum Event {
    /// The request is at the upstream.
    Arrived,
    /// The client has received the response.
    Answered(HttpClient, HttpResponse),
}

/// The requests that have not arrived at the upstream, by path. The upstream sends the event and receives the status.
type Expected = Mutex<HashMap<String, (Sender<Event>, Receiver<u16>)>>;

/// A request that was sent and whose response was not received.
struct InFlight {
    events: Receiver<Event>,
    status: Sender<u16>,
    /// The status that is sent when this is dropped, unless another one was sent.
    kept: u16,
}

impl InFlight {
    fn event(&self) -> Event {
        self.events.recv_timeout(PATIENCE).expect("the request arrives or is answered")
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let _ = self.status.send(self.kept);
    }
}

struct RefundClient<'g> {
    gateway: &'g GatewayProcess,
    expected: &'g Expected,
    /// The start of the paths of its requests, which selects the rule.
    path: String,
    /// The number of requests so far.
    sent: usize,
    kept: u16,
    refunded: u16,
    connections: Vec<HttpClient>,
}

impl RefundClient<'_> {
    fn connect(&self) -> HttpClient {
        let stream = self.gateway.connect();
        let client = HttpClient::on(stream.try_clone().unwrap());
        // The upstream may hold a request for longer than a client usually waits.
        stream.set_read_timeout(None).unwrap();
        client
    }

    fn send(&mut self) -> InFlight {
        let path = format!("{}/{}", self.path, self.sent);
        self.sent += 1;
        let (event, events) = channel();
        let (status, statuses) = channel();
        self.expected.lock().unwrap().insert(path.clone(), (event.clone(), statuses));
        let mut client = self.connections.pop().unwrap_or_else(|| self.connect());
        std::thread::spawn(move || {
            client.send("GET", &path, &[], "");
            // At the end of the test, the gateway is killed.
            if let Some(answer) = client.receive() {
                let _ = event.send(Event::Answered(client, answer));
            }
        });
        InFlight { events, status, kept: self.kept }
    }

    /// Sends requests at once, and returns those that arrive at the upstream. The others are denied.
    fn admitted(&mut self, count: u32) -> Vec<InFlight> {
        let requests: Vec<InFlight> = (0..count).map(|_| self.send()).collect();
        requests.into_iter().filter(|request| self.is_admitted(request)).collect()
    }

    fn is_admitted(&mut self, request: &InFlight) -> bool {
        match request.event() {
            Event::Arrived => true,
            Event::Answered(client, answer) => {
                assert_eq!(answer.status, 429, "{answer:?}");
                self.connections.push(client);
                false
            }
        }
    }

    /// Lets the upstream respond to requests with these statuses, all at once, and returns the responses.
    fn end(&mut self, requests: &[(InFlight, u16)]) -> Vec<HttpResponse> {
        for (request, status) in requests {
            request.status.send(*status).unwrap();
        }
        let mut answers = Vec::new();
        for (request, status) in requests {
            let Event::Answered(client, answer) = request.event() else { panic!("a request arrived twice") };
            assert_eq!(answer.status, *status, "{answer:?}");
            self.connections.push(client);
            answers.push(answer);
        }
        answers
    }

    fn end_all(&mut self, requests: Vec<InFlight>, status: u16) -> Vec<HttpResponse> {
        self.end(&requests.into_iter().map(|request| (request, status)).collect::<Vec<_>>())
    }
}

impl RefundImplementation for RefundClient<'_> {
    type Charge = Vec<InFlight>;

    /// Sends a request that is refunded, because the gateway reports what is left only in responses.
    fn remaining(&mut self, _: Timestamp, _: &Demand<'_>) -> u32 {
        let requests = self.admitted(1);
        let answers = self.end_all(requests, self.refunded);
        answers.first().map_or(0, |answer| answer.headers["x-ratelimit-remaining"].parse::<u32>().unwrap() + 1)
    }

    /// Sends a request for each unit. If one of them is denied, the others are refunded.
    fn charge(&mut self, _: Timestamp, demand: &Demand<'_>) -> Option<Vec<InFlight>> {
        let requests = self.admitted(demand.cost.units());
        if requests.len() == demand.cost.units() as usize {
            return Some(requests);
        }
        self.end_all(requests, self.refunded);
        None
    }

    fn refund(&mut self, _: Timestamp, _: &Demand<'_>, charge: Vec<InFlight>, units: u32) {
        let status = |index| if index < units as usize { self.refunded } else { self.kept };
        let requests = charge.into_iter().enumerate().map(|(index, request)| (request, status(index)));
        let requests: Vec<_> = requests.rev().collect();
        self.end(&requests);
    }
}

/// Each client has a rule of its own. In the long form, each rule has two clients.
fn refunds_keep_the_limit(scenario: &str, arguments: &[&str], charges: &[(&str, u16, u16)]) {
    let expected: Arc<Expected> = Arc::default();
    let upstream = Upstream::start({
        let expected = expected.clone();
        move |request, stream| {
            let (event, statuses) = expected.lock().unwrap().remove(request.path()).expect("an expected request");
            event.send(Event::Arrived).is_ok()
                && statuses.recv().is_ok_and(|status| reply(stream, &format!("{status} X"), "", b""))
        }
    });
    let rules: Vec<_> = charges.iter().flat_map(|charge| LIMITS.map(|limit| (*charge, limit))).enumerate().collect();
    let mut configuration = format!(
        "deadline = '20s'\n[[upstreams]]\nname = 'web'\nservers = ['{}']\nmax_concurrent = 100000\n\
         max_concurrent_per_address = 100000\ntimeouts = {{ header = '1h', total = '1h' }}\n",
        upstream.url()
    );
    for (number, ((charge, ..), limit)) in &rules {
        configuration += &format!(
            "[[rules]]\nname = 'rule-{number}'\nmatch = {{ path = '/{number}/*' }}\nby = ['ip']\nlimits = ['{limit}']\n\
             charge = '{charge}'\n"
        );
    }
    let gateway = GatewayProcess::configured(&configuration, arguments);
    gateway.until("/readyz", |answer| answer.status == 200);
    let seed = random(scenario).below(1 << 32);
    std::thread::scope(|scope| {
        for (number, ((charge, kept, refunded), limit)) in rules {
            let client = |nth: usize| RefundClient {
                gateway: &gateway,
                expected: &expected,
                path: format!("/{number}/{nth}"),
                sent: 0,
                kept,
                refunded,
                connections: Vec::new(),
            };
            let clients: Vec<_> = (0..scale(1, 2)).map(client).collect();
            scope.spawn(move || {
                let limit_text = limit.parse().unwrap();
                let net_use = keeps_the_limit_in_real_time(&limit_text, "client", scale(1, 20), seed, clients)
                    .unwrap_or_else(|violation| panic!("{charge}: {violation}"));
                record(scenario, &format!("{limit}, {charge}"), net_use);
            });
        }
    });
}

#[test]
fn refunds_in_any_order_keep_the_limit_in_memory() {
    refunds_keep_the_limit("gateway, refunds in memory", &[], &CHARGES[..scale(1, 2)]);
}

#[test]
fn refunds_in_any_order_keep_the_limit_on_redis() {
    let redis = Server::redis();
    let arguments = ["--store", &redis.url()];
    refunds_keep_the_limit("gateway, refunds on Redis", &arguments, &CHARGES[scale(1, 0)..]);
}
