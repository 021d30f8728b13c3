//! `TIDEGATE.REQUEST`, compared with `POST /v1/check` by rules.

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use serde_json::json;

use super::*;
use crate::listeners::http::HttpListener;
use crate::listeners::http::test_support::{RULES, listener_with_config};

/// Returns the body of the response to `POST /v1/check`.
async fn ask_http(listener: &HttpListener, path: &str, peer: &str, headers: &[(&str, &str)]) -> Value {
    let body = json!({"request": {"method": "GET", "path": path, "peer": peer, "headers": headers}});
    let request = Request::post("/v1/check").body(Full::new(Bytes::from(body.to_string()))).unwrap();
    let response = listener.answer(request).await.into_body().collect().await.unwrap();
    serde_json::from_slice(&response.to_bytes()).unwrap()
}

/// Returns the reply to `TIDEGATE.REQUEST` in the form of the response to `POST /v1/check`: the fields `allowed`,
/// `retry_after_ms`, `rule`, `plan` and `response`.
async fn ask_resp(connection: &mut Transcript, path: &str, peer: &str, headers: &[(&str, &str)]) -> Value {
    let mut command = vec!["TIDEGATE.REQUEST", "GET", path, peer];
    command.extend(headers.iter().flat_map(|(name, value)| [name, value]));
    let reply = connection.call(&command).await;
    assert_eq!(reply.as_array().map(Vec::len), Some(7), "{reply}");
    let mut joined = serde_json::Map::new();
    for pair in reply[5].as_array().unwrap() {
        let (name, value) = (pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
        let before = joined.get(name).and_then(Value::as_str).map(|before| format!("{before}, "));
        joined.insert(name.to_owned(), (before.unwrap_or_default() + value).into());
    }
    let response = if reply[0] == 1 {
        assert_eq!((&reply[1], &reply[6]), (&json!(200), &json!("")), "{reply}");
        json!({ "headers": joined })
    } else {
        json!({ "status": reply[1], "headers": joined, "body": reply[6] })
    };
    let never = if reply[2] == -1 { Value::Null } else { reply[2].clone() };
    json!({ "allowed": reply[0] == 1, "retry_after_ms": never, "rule": reply[3], "plan": reply[4], "response": response })
}

/// The rules have every kind of answer.
#[tokio::test]
async fn the_reply_is_what_a_check_by_rules_over_http_gives() {
    let long_path = format!("/{}", "x".repeat(64));
    let paths = [
        "/json", "/problem", "/text", "/local", "/allow", "/costly", "/plan", "/shadow", "/shield", "/health", "/none",
        &long_path,
    ];
    let headers: [&[(&str, &str)]; 4] = [
        &[],
        &[("x-api-key", "planted-pro")],
        &[("accept", "text/html"), ("Accept", "application/problem+json")],
        &[("content-type", "application/grpc")],
    ];
    let peers = ["203.0.113.9", "198.51.100.7", "198.51.100.8", "2001:db8::1"];
    let mut statuses = std::collections::BTreeSet::new();
    for store in [None, Some(Arc::new(UnreachableStore) as Arc<dyn Store>)] {
        let http = listener_with_config(RULES, store.clone());
        let mut connection = open_with_config(RULES, store);
        for (path, headers, peer) in paths
            .iter()
            .flat_map(|path| headers.iter().flat_map(move |headers| peers.map(|peer| (path, headers, peer))))
        {
            for _ in 0..3 {
                let expected = ask_http(&http, path, peer, headers).await;
                let reply = ask_resp(&mut connection, path, peer, headers).await;
                let shown = format!("{path} {headers:?} {peer}");
                for field in ["allowed", "response"] {
                    assert_eq!(reply[field], expected[field], "{shown}");
                }
                if reply["allowed"] == false {
                    for field in ["retry_after_ms", "rule", "plan"] {
                        assert_eq!(reply[field], expected[field], "{field} of {shown}");
                    }
                    statuses.insert(reply["response"]["status"].as_u64().unwrap());
                }
            }
        }
    }
    // gRPC has its status in a header, and 200 as that of HTTP.
    assert_eq!(statuses.into_iter().collect::<Vec<_>>(), [200, 403, 414, 429, 503]);
}

#[tokio::test]
async fn a_refused_request_is_answered_with_the_response_to_send() {
    let rules = "[plans.default]\nlimits = [\"1/h\"]\n[[rules]]\nname = \"api\"\nby = [\"ip\"]\nlimits = [\"1/min\"]\nbody = \"text\"\n";
    let mut connection = open_with_config(rules, None);
    let request = ["TIDEGATE.REQUEST", "POST", "/login?next=/", "203.0.113.9", "User-Agent", "caf\u{e9}"];
    let admitted = connection.call(&request).await;
    assert_eq!(admitted[0], 1);
    assert!(admitted[5].as_array().unwrap().iter().any(|pair| pair[0].as_str().unwrap().contains("ratelimit")));
    let refused = connection.call(&request).await;
    let [allowed, status, retry_after_ms, rule, plan, headers, body] = &refused.as_array().unwrap()[..] else {
        panic!("{refused}")
    };
    assert_eq!(json!([allowed, status, retry_after_ms, rule, plan]), json!([0, 429, 60_000, "api", null]));
    assert_eq!(*body, "the limit of 1 per minute has been reached; try again in 60 seconds\n");
    let pairs = headers.as_array().unwrap();
    assert!(pairs.contains(&json!(["retry-after", "60"])), "{headers}");
    assert!(pairs.contains(&json!(["content-type", "text/plain; charset=utf-8"])), "{headers}");
}

#[tokio::test]
async fn the_delay_of_a_leaky_bucket_is_in_the_reply() {
    let rules = "[[rules]]\nname = \"slow\"\nby = [\"ip\"]\nlimits = [\"1/s leaky-bucket queue=5\"]\n";
    let mut connection = open_with_config(rules, None);
    for delay_ms in [0, 1_000, 2_000] {
        let reply = connection.call(&["TIDEGATE.REQUEST", "GET", "/", "203.0.113.9"]).await;
        assert_eq!(json!([reply[0], reply[1], reply[2]]), json!([1, 200, delay_ms]));
    }
}

#[tokio::test]
async fn the_kill_switch_admits_requests() {
    let rules = "kill_switch = true\n[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"1/h\"]\n";
    let mut connection = open_with_config(rules, None);
    for _ in 0..3 {
        let reply = connection.call(&["TIDEGATE.REQUEST", "GET", "/", "203.0.113.9"]).await;
        assert_eq!(reply, json!([1, 200, 0, null, null, [], ""]));
    }
}

#[tokio::test]
async fn without_rules_a_request_is_an_error() {
    let mut connection = open(RespOptions::default());
    let reply = connection.call(&["TIDEGATE.REQUEST", "GET", "/", "203.0.113.9"]).await;
    assert!(reply.as_str().unwrap().starts_with("-ERR this instance has no rules; "), "{reply}");
}
