//! Receipts through the real binary: two instances on one Redis refund exactly once, over HTTP and RESP.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::sync::atomic::{AtomicI64, Ordering};

use serde_json::{Value, json};
use tidegate_testkit::conformance::Random;
use tidegate_testkit::server::{Connection, Reply, Server};

use crate::instances::start_with_long_deadline;
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::Serving;

const SECRET: &str = "a-receipt-secret-for-tests";
const LIMIT: &str = "1000000/day sliding-counter";
/// Admissions with a receipt, in all threads together.
const ENDINGS: usize = 10_000;
const THREADS: usize = 8;

/// Starts two instances on this Redis with a receipt secret.
fn two_instances(redis: &Server, dir: &tempfile::TempDir) -> (tempfile::TempDir, Vec<Serving>) {
    let file = dir.path().join("receipt-secret");
    std::fs::write(&file, SECRET).unwrap();
    start_with_long_deadline(redis, 2, &["--receipt-secret-file", file.to_str().unwrap()])
}

/// A client of one instance, over HTTP or RESP.
enum ReceiptClient {
    Http(HttpClient),
    Resp(Connection),
}

impl ReceiptClient {
    fn new(serving: &Serving, is_http: bool) -> ReceiptClient {
        if is_http {
            ReceiptClient::Http(HttpClient::open(&serving.http))
        } else {
            ReceiptClient::Resp(serving.connect())
        }
    }

    /// Charges `cost` units to `key`, and returns the receipt.
    fn charge(&mut self, key: &str, cost: u32) -> String {
        match self {
            ReceiptClient::Http(client) => {
                let check = json!({"key": key, "limit": LIMIT, "cost": cost, "receipt": true});
                let answer = client.ask("POST", "/v1/check", &[], &check.to_string());
                let body: Value = serde_json::from_str(&answer.body).unwrap();
                body["receipt"].as_str().unwrap_or_else(|| panic!("{body}")).to_owned()
            }
            ReceiptClient::Resp(connection) => {
                let cost = cost.to_string();
                let reply = connection.call(&["TIDEGATE.CHECK", key, LIMIT, "COST", &cost, "RECEIPT"]).unwrap();
                reply.items().last().unwrap().text()
            }
        }
    }

    /// Redeems a receipt, and returns whether it was applied, or the error.
    fn redeem(&mut self, receipt: &str, used: Option<u32>) -> Result<bool, String> {
        match self {
            ReceiptClient::Http(client) => {
                let mut body = json!({"receipt": receipt});
                if let Some(used) = used {
                    body["used"] = json!(used);
                }
                let answer = client.ask("POST", "/v1/refund", &[], &body.to_string());
                let body: Value = serde_json::from_str(&answer.body).unwrap();
                body["applied"].as_bool().ok_or_else(|| format!("{} {body}", answer.status))
            }
            ReceiptClient::Resp(connection) => {
                let used = used.map(|used| used.to_string());
                let mut command = vec!["TIDEGATE.REFUND", receipt];
                command.extend(used.iter().flat_map(|used| ["USED", used]));
                match connection.call(&command).unwrap() {
                    Reply::Integer(applied) => Ok(applied == 1),
                    other => Err(format!("{other:?}")),
                }
            }
        }
    }
}

/// Changes one character of a receipt, or cuts it.
fn forged(receipt: &str, random: &mut Random) -> String {
    let at = random.below(receipt.len() as u64) as usize;
    match random.below(3) {
        0 => receipt[..at].to_owned(),
        _ => {
            let other = if receipt.as_bytes()[at] == b'A' { "B" } else { "A" };
            format!("{}{other}{}", &receipt[..at], &receipt[at + 1..])
        }
    }
}

#[test]
fn ten_thousand_random_endings_over_two_instances_leave_exactly_what_was_used() {
    let (redis, dir) = (Server::redis(), tempfile::tempdir().unwrap());
    let (_config, instances) = two_instances(&redis, &dir);
    let keys: Vec<String> = (0..20).map(|number| format!("user:{number}")).collect();
    let used: Vec<AtomicI64> = keys.iter().map(|_| AtomicI64::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (instances, keys, used) = (&instances, &keys, &used);
            scope.spawn(move || {
                let mut random = Random::new(thread as u64 + 1);
                let mut clients: Vec<ReceiptClient> =
                    (0..4).map(|number| ReceiptClient::new(&instances[number / 2], number % 2 == 0)).collect();
                for _ in 0..ENDINGS / THREADS {
                    let key = random.below(keys.len() as u64) as usize;
                    let cost = 1 + random.below(9) as u32;
                    let receipt = clients[random.below(4) as usize].charge(&keys[key], cost);
                    let redeemer = random.below(4) as usize;
                    let final_cost = match random.below(6) {
                        // The request stays charged.
                        0 => cost,
                        1 => {
                            assert_eq!(clients[redeemer].redeem(&receipt, None), Ok(true));
                            0
                        }
                        2 => {
                            let used = random.below(20) as u32;
                            assert_eq!(clients[redeemer].redeem(&receipt, Some(used)), Ok(true));
                            assert_eq!(clients[3 - redeemer].redeem(&receipt, None), Ok(false), "used before");
                            used
                        }
                        3 => {
                            let forged = forged(&receipt, &mut random);
                            let error = clients[redeemer].redeem(&forged, None).unwrap_err();
                            assert!(error.contains("not a receipt"), "{error}");
                            cost
                        }
                        // Two instances at the same time, over HTTP and over RESP.
                        _ => {
                            let (first, second) = clients.split_at_mut(2);
                            let (first, second) = (&mut first[redeemer % 2], &mut second[redeemer / 2]);
                            let applied = std::thread::scope(|scope| {
                                let other = scope.spawn(|| second.redeem(&receipt, None).unwrap());
                                [first.redeem(&receipt, None).unwrap(), other.join().unwrap()]
                            });
                            assert!(applied[0] != applied[1], "{applied:?}");
                            0
                        }
                    };
                    used[key].fetch_add(final_cost.into(), Ordering::Relaxed);
                }
            });
        }
    });
    let mut connection = instances[0].connect();
    for (key, used) in keys.iter().zip(used) {
        let reply = connection.call(&["TIDEGATE.PEEK", key, LIMIT]).unwrap();
        assert_eq!(reply.items()[2].integer(), 1_000_000 - used.into_inner(), "{key}");
    }
}

#[test]
fn receipts_on_redis_need_a_secret_and_those_of_another_deployment_are_rejected() {
    let (redis, dir) = (Server::redis(), tempfile::tempdir().unwrap());
    let (_config, without) = start_with_long_deadline(&redis, 1, &[]);
    let check = json!({"key": "a", "limit": "10/min", "receipt": true}).to_string();
    let mut client = HttpClient::open(&without[0].http);
    let answer = client.ask("POST", "/v1/check", &[], &check);
    assert_eq!(answer.status, 400);
    assert!(
        answer.body.contains("receipt_secret_env") && answer.body.contains("TIDEGATE_RECEIPT_SECRET"),
        "{}",
        answer.body
    );
    let refused = without[0].connect().call(&["TIDEGATE.CHECK", "a", "10/min", "RECEIPT"]).unwrap();
    assert!(format!("{refused:?}").contains("receipt_secret_env"), "{refused:?}");
    let left = without[0].connect().call(&["TIDEGATE.PEEK", "a", "10/min"]).unwrap();
    assert_eq!(left.items()[2].integer(), 10, "nothing was charged");

    let (_config, with) = two_instances(&redis, &dir);
    let receipt = ReceiptClient::new(&with[0], true).charge("a", 4);
    let other = dir.path().join("other-secret");
    std::fs::write(&other, "another-receipt-secret").unwrap();
    let (_config, others) = start_with_long_deadline(&redis, 1, &["--receipt-secret-file", other.to_str().unwrap()]);
    for is_http in [true, false] {
        let error = ReceiptClient::new(&others[0], is_http).redeem(&receipt, None).unwrap_err();
        assert!(error.contains("issued under another receipt secret"), "{error}");
    }
    assert_eq!(ReceiptClient::new(&with[1], false).redeem(&receipt, None), Ok(true));
}

#[test]
fn receipt_of_counters_in_memory_is_redeemed_by_its_issuer_only() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("receipt-secret");
    std::fs::write(&file, SECRET).unwrap();
    let arguments = ["--receipt-secret-file", file.to_str().unwrap()];
    let (issuer, other) = (Serving::start(&arguments), Serving::start(&arguments));
    let receipt = ReceiptClient::new(&issuer, true).charge("a", 4);
    let error = ReceiptClient::new(&other, true).redeem(&receipt, None).unwrap_err();
    assert!(error.starts_with("409 ") && error.contains("other_instance"), "{error}");
    let error = ReceiptClient::new(&other, false).redeem(&receipt, None).unwrap_err();
    assert!(error.contains("OTHERINSTANCE"), "{error}");
    assert_eq!(ReceiptClient::new(&issuer, false).redeem(&receipt, None), Ok(true));
    assert_eq!(ReceiptClient::new(&issuer, true).redeem(&receipt, None), Ok(false));
}

const LOGIN: &str = r#"
[[rules]]
name = "login"
match = { methods = ["POST"], path = "/login" }
by = ["ip"]
limits = ["5/min"]
charge = "on_failure"
"#;

#[test]
fn rule_that_charges_failures_gets_its_units_back_after_a_success() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    std::fs::write(&file, LOGIN).unwrap();
    let serving = Serving::start(&["--config", file.to_str().unwrap()]);
    assert!(!serving.output().contains("stays charged"), "{}", serving.output());
    let mut client = HttpClient::open(&serving.http);
    let request = json!({"method": "POST", "path": "/login", "headers": [], "peer": "203.0.113.9"});
    let mut ask = |receipt: bool| {
        let check = json!({"request": request, "receipt": receipt}).to_string();
        let answer = client.ask("POST", "/v1/check", &[], &check);
        serde_json::from_str::<Value>(&answer.body).unwrap()
    };
    // Successful logins cost nothing, failed ones one unit each.
    let mut refunds = HttpClient::open(&serving.http);
    let mut left = 5;
    for status in [200, 401, 204, 303, 500, 403, 200] {
        let admitted = ask(true);
        assert_eq!(admitted["refund_on"], json!(["success"]), "{admitted}");
        assert_eq!(admitted["limits"][0]["remaining"], json!(left - 1), "before {status}");
        let refund = json!({"receipt": admitted["receipt"], "status": status}).to_string();
        let answer = refunds.ask("POST", "/v1/refund", &[], &refund);
        assert_eq!((answer.status, &*answer.body), (200, r#"{"applied":true}"#));
        let answer = refunds.ask("POST", "/v1/refund", &[], &refund);
        assert_eq!(&*answer.body, r#"{"applied":false,"reason":"already_used"}"#);
        left -= i32::from(status >= 400);
    }
    let without = ask(false);
    assert_eq!((&without["receipt"], &without["limits"][0]["remaining"]), (&Value::Null, &json!(1)));
}
