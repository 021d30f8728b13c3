use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::watch;
use tollgate::{Limiter, ManualClock, Timestamp};

use super::*;
use crate::accept::{Closing, ShutdownStage};
use crate::browser::BrowserPolicy;
use crate::budget::{Budget, Receiving};

const GOOD: &str = r#"{"key":"user:42","limit":"10/min"}"#;

fn post(headers: &str, body: &str) -> String {
    format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

const IDLE: Duration = Duration::from_secs(60);

/// A listener whose clock stands still.
fn listener() -> Arc<HttpListener> {
    let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_700_000_000_000_000)));
    let browsers = BrowserPolicy { origins: vec!["https://ops.example".parse().unwrap()], ..BrowserPolicy::default() };
    Arc::new(HttpListener::new(Limiter::builder().clock(clock).build()).with_browsers(browsers))
}

/// A connection to a listener of its own, and the sender that closes it.
fn connect() -> (DuplexStream, watch::Sender<ShutdownStage>) {
    connect_to(listener())
}

fn connect_to(door: Arc<HttpListener>) -> (DuplexStream, watch::Sender<ShutdownStage>) {
    let (tell, context) = Context::alone();
    let (client, server) = tokio::io::duplex(1 << 20);
    tokio::spawn(async move { drop(door.serve(server, IDLE, context).await) });
    (client, tell)
}

/// What is answered to these pieces, each sent when the one before was taken, and then nothing more. Without dates.
async fn answers(pieces: &[&str]) -> String {
    answers_of(listener(), pieces).await
}

async fn answers_of(door: Arc<HttpListener>, pieces: &[&str]) -> String {
    let (mut client, _open) = connect_to(door);
    for piece in pieces {
        client.write_all(piece.as_bytes()).await.unwrap();
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }
    client.shutdown().await.unwrap();
    let mut said = String::new();
    client.read_to_string(&mut said).await.unwrap();
    let (dates, lines): (Vec<&str>, Vec<&str>) = said.split("\r\n").partition(|line| line.starts_with("date: "));
    assert!(dates.iter().all(|date| date.ends_with(" GMT")), "{dates:?}");
    assert_eq!(dates.len(), said.matches("HTTP/1.").count(), "every answer has a date: {said}");
    lines.join("\r\n")
}

#[tokio::test]
async fn both_ways_give_the_same_answer() {
    for (body, status) in [
        (GOOD, "200 OK"),
        (r#"{"key":"a","limit":"1/h","cost":2}"#, "429 Too Many Requests"),
        (r#"{"checks":[{"key":"a","limit":"1/s"},{"key":"a","limit":"9/day"}]}"#, "200 OK"),
        (r#"{"request":{"method":"GET","path":"/","peer":"::1"}}"#, "400 Bad Request"),
        ("nonsense", "400 Bad Request"),
        ("", "400 Bad Request"),
    ] {
        let usual_way = answers(&[&post("", body)]).await;
        assert!(usual_way.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{usual_way}");
        // Harmless, and not usual.
        assert_eq!(usual_way, answers(&[&post("connection: keep-alive, te\r\n", body)]).await);
    }
}

/// Both ways, because a rule that holds on one of them only is no rule.
#[tokio::test]
async fn a_page_of_another_site_may_not_ask_by_either_way() {
    for (headers, is_let_in) in [
        ("", true),
        ("origin: http://x\r\n", true),
        ("Origin: HTTPS://X\r\nSec-Fetch-Site: same-origin\r\n", true),
        ("sec-fetch-site: none\r\n", true),
        ("origin: https://ops.example\r\n", true),
        ("origin: https://OPS.example\r\nsec-fetch-site: cross-site\r\n", true),
        ("origin: http://ops.example\r\n", false),
        ("origin: https://ops.example:8443\r\n", false),
        ("origin: https://ops.example.attacker.example\r\n", false),
        ("origin: https://attacker.example\r\n", false),
        ("origin: http://x.attacker.example\r\n", false),
        ("origin: http://x:81\r\n", false),
        ("origin: x\r\n", false),
        ("origin: null\r\n", false),
        ("origin:\r\n", false),
        ("origin: \u{e9}\r\n", false),
        ("ORIGIN: http://x\r\norigin: https://attacker.example\r\n", false),
        ("origin: https://ops.example\r\norigin: https://attacker.example\r\n", false),
        ("origin: https://ops.example, https://attacker.example\r\n", false),
        ("origin: https://attacker.example\r\nsec-fetch-site: same-origin\r\n", false),
        ("SEC-FETCH-SITE: cross-site\r\n", false),
        ("sec-fetch-site: same-site\r\n", false),
        ("sec-fetch-site: CROSS-SITE\r\n", false),
        ("sec-fetch-site: none\r\nsec-fetch-site: cross-site\r\n", false),
        ("origin: http://x\r\nsec-fetch-site: cross-site\r\n", false),
        ("sec-fetch-site: a word of the future\r\n", false),
    ] {
        let usual_way = answers(&[&post(headers, GOOD)]).await;
        // Harmless, and not usual.
        let by_hyper = format!("{headers}connection: keep-alive, te\r\n");
        assert_eq!(usual_way, answers(&[&post(&by_hyper, GOOD)]).await, "{headers}");
        let told = if is_let_in { "HTTP/1.1 200 OK\r\n" } else { "HTTP/1.1 403 Forbidden\r\n" };
        assert!(usual_way.starts_with(told), "{headers}: {usual_way}");
        // What is refused was not counted.
        let door = listener();
        answers_of(door.clone(), &[&post(headers, GOOD)]).await;
        let left = if is_let_in { "\"remaining\":8" } else { "\"remaining\":9" };
        assert!(answers_of(door, &[&post("", GOOD)]).await.contains(left), "{headers}");
        // What changes nothing may be read by anybody, as a link on another site does.
        let page = format!("GET /openapi.json HTTP/1.1\r\nhost: x\r\n{headers}\r\n");
        assert!(answers(&[&page]).await.starts_with("HTTP/1.1 200 OK\r\n"), "{headers}");
    }
}

#[tokio::test]
async fn wherever_a_request_is_cut_its_answer_is_the_same() {
    let request = post("user-agent: test\r\n", GOOD);
    let whole = answers(&[&request]).await;
    for (at, _) in request.char_indices().skip(1) {
        let (one, other) = request.split_at(at);
        assert_eq!(answers(&[one, other]).await, whole, "cut at {at}");
    }
}

#[tokio::test]
async fn whatever_comes_together_is_answered_in_order() {
    let ask = post("", GOOD);
    let other = "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n";
    let said = answers(&[&format!("{ask}{ask}{other}{ask}")]).await;
    let statuses: Vec<&str> =
        said.split("\r\n").filter_map(|line| line.rsplit_once("HTTP/1.1 ")).map(|(_, status)| &status[..3]).collect();
    assert_eq!(statuses, ["200", "200", "405", "200"]);
    let remaining: Vec<&str> = said.split("\"remaining\":").skip(1).map(|rest| &rest[..1]).collect();
    assert_eq!(remaining, ["9", "8", "7"], "{said}");
}

#[test]
fn only_what_needs_no_judgement_is_usual() {
    let usual_ones = [
        post("", GOOD),
        post("", ""),
        post("Connection: Keep-Alive\r\nX-Other: yes\r\n", GOOD),
        post("", GOOD).replace("content-length", "CONTENT-Length"),
        post("", GOOD) + "what follows",
    ];
    for request in usual_ones {
        let body = usual(request.as_bytes()).unwrap_or_else(|| panic!("{request}"));
        assert_eq!(body.start, request.find("\r\n\r\n").unwrap() + 4);
        assert!(["", GOOD].contains(&&request[body]), "{request}");
    }
    let good = post("", GOOD);
    for request in [
        good[..40].to_owned(),
        good.replace("POST", "PUT"),
        good.replace("/v1/check", "/v1/check?x"),
        good.replace("/v1/check", "http://x/v1/check"),
        good.replace("HTTP/1.1", "HTTP/1.0"),
        good.replace("content-length", "x-length"),
        good.replace("content-length: 34", "content-length: +34"),
        good.replace("content-length: 34", "content-length: 0x22"),
        good.replace("content-length: 34", "content-length: 34, 34"),
        good.replace("content-length: 34", "content-length: 00000000000000000000034"),
        good.replace("content-length: 34", "content-length:"),
        good.replace("content-length:", "content-length :"),
        post("content-length: 34\r\n", GOOD),
        post("content-length: 33\r\n", GOOD),
        post("transfer-encoding: chunked\r\n", GOOD),
        post("Transfer-Encoding: identity\r\n", GOOD),
        post("connection: close\r\n", GOOD),
        post("connection: keep-alive, upgrade\r\n", GOOD),
        post("upgrade: h2c\r\n", GOOD),
        post("expect: 100-continue\r\n", GOOD),
        post("Origin: http://x\r\n", GOOD),
        post("Sec-Fetch-Site: none\r\n", GOOD),
        post(" folded: line\r\n", GOOD),
        post("no colon\r\n", GOOD),
        post(&"x: y\r\n".repeat(HEADERS_MAX), GOOD),
        "nonsense\r\n\r\n".to_owned(),
        String::new(),
    ] {
        assert_eq!(usual(request.as_bytes()), None, "{request}");
    }
}

/// A general HTTP server is not set up for a request that is not whole, and not for a usual one at all.
#[tokio::test(start_paused = true)]
async fn a_usual_request_is_usual_however_it_is_cut() {
    let request = post("", GOOD);
    let head = request.len() - GOOD.len();
    for cuts in [vec![], vec![head], vec![1], vec![head - 1], vec![head + 1], vec![head, head + 1], vec![2, head - 3]] {
        let door = HttpListener::new(Limiter::memory());
        let (mut client, mut server) = tokio::io::duplex(1 << 20);
        let serving = tokio::spawn(async move {
            let (_open, mut context) = Context::alone();
            serve_alone(&door, &mut server, &mut context).await.unwrap()
        });
        for _ in 0..2 {
            let mut from = 0;
            for &to in cuts.iter().chain([&request.len()]) {
                client.write_all(&request.as_bytes()[from..to]).await.unwrap();
                tokio::time::sleep(Duration::from_millis(500)).await;
                from = to;
            }
        }
        client.shutdown().await.unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).await.unwrap();
        assert_eq!(said.matches("HTTP/1.1 200 OK").count(), 2, "cut at {cuts:?}: {said}");
        assert_eq!(serving.await.unwrap(), None, "cut at {cuts:?}");
    }
}

/// Serves a connection until it ends or goes to hyper.
async fn serve_alone(
    door: &HttpListener,
    server: &mut DuplexStream,
    context: &mut Context,
) -> std::io::Result<Option<BytesMut>> {
    serve(Some(door), &|request| door.answer(request), server, IDLE, context).await
}

/// hyper gets a connection only if it cannot be told where a request ends.
#[tokio::test(start_paused = true)]
async fn a_request_goes_to_hyper_alone_if_its_end_can_be_told() {
    let close = post("connection: close\r\n", GOOD);
    let chunked = format!(
        "POST /v1/check HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n10\r\n{}\r\n{:X}\r\n{}\r\n0\r\n\r\n",
        &GOOD[..16],
        GOOD.len() - 16,
        &GOOD[16..]
    );
    let get = "GET /docs HTTP/1.1\r\nhost: x\r\n\r\n";
    let upgrade = post("connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: x\r\n", GOOD);
    let chunk = |body: &str| format!("POST /v1/check HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n{body}");
    for (sent, answers, goes_to_hyper) in [
        (close[..20].to_owned(), 0, false),
        (close[..close.len() - 1].to_owned(), 0, false),
        (close.clone(), 1, false),
        (get.repeat(3), 3, false),
        (upgrade, 1, false),
        (chunked.repeat(2) + &post("", GOOD), 3, false),
        (chunked[..chunked.len() - 1].to_owned(), 0, false),
        (chunk("5"), 0, false),
        (chunk("5\r"), 0, false),
        (chunk("5\r\nabc"), 0, false),
        (chunk("5\r\nabcde\r"), 0, false),
        (chunk("5;x=y\r\nabcde\r\n0\r\n\r\n"), 0, true),
        (chunk("0\r\ntrailer: x\r\n\r\n"), 0, true),
        (chunk("123456789\r\n"), 0, true),
        (chunk("fffff\r\n"), 0, true),
        (chunk("\r\n"), 0, true),
        (chunk("x"), 0, true),
        ("POST /v1/check HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n".to_owned(), 0, true),
        (post("transfer-encoding: chunked\r\n", GOOD), 0, true),
        (post("expect: 100-continue\r\n", GOOD), 0, true),
        ("POST /v1/check HTTP/1.1\r\ncontent-length: 600000\r\n\r\n".to_owned(), 0, true),
        ("nonsense\r\n".to_owned(), 0, true),
    ] {
        let door = HttpListener::new(Limiter::memory());
        let (mut client, mut server) = tokio::io::duplex(1 << 20);
        let (_open, mut context) = Context::alone();
        client.write_all(sent.as_bytes()).await.unwrap();
        let served = tokio::time::timeout(IDLE / 20, serve_alone(&door, &mut server, &mut context)).await;
        let begun = served.map_or(None, Result::unwrap);
        assert_eq!(begun.as_ref().map(|begun| &begun[..]), goes_to_hyper.then_some(sent.as_bytes()), "{sent}");
        drop(server);
        let mut said = Vec::new();
        client.read_to_end(&mut said).await.unwrap();
        let said = String::from_utf8_lossy(&said);
        assert_eq!(said.matches("HTTP/1.1 200 OK").count(), answers, "{sent}: {said}");
    }
}

/// A client that has left needs no answer, and keeps no place.
#[tokio::test]
async fn a_connection_ends_when_its_client_leaves_before_the_answer() {
    for request in ["GET /slow HTTP/1.1\r\n\r\n", "GET /slow HTTP/1.1\r\n\r\nGET /slow HTTP/1.1\r\nhal"] {
        let (mut client, mut server) = tokio::io::duplex(1 << 20);
        let (_open, mut context) = Context::alone();
        client.write_all(request.as_bytes()).await.unwrap();
        let never = |_: Request<RequestBody>| std::future::pending();
        let serving = serve(None, &never, &mut server, IDLE, &mut context);
        let leaving = async {
            tokio::task::yield_now().await;
            drop(client);
        };
        let (served, ()) = tokio::join!(serving, leaving);
        assert_eq!(served.unwrap(), None);
    }
}

#[tokio::test]
async fn a_connection_goes_on_after_hyper_has_answered_and_ends_if_hyper_says_so() {
    let ask = post("", GOOD);
    let get = "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n";
    for (first, goes_on) in [
        (get.to_owned(), true),
        (ask.replace("/v1/check", "/v1/other"), false),
        (get.replace("host: x", "connection: close"), false),
        (get.replace("HTTP/1.1", "HTTP/1.0"), false),
        (get.replace("HTTP/1.1", "HTTP/1.0").replace("host: x", "connection: keep-alive"), true),
        ("HEAD /docs HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(), true),
    ] {
        let said = answers(&[&first, &ask]).await;
        assert_eq!(said.matches("\"remaining\":9").count(), usize::from(goes_on), "{first}: {said}");
        let says_close = said.to_ascii_lowercase().contains("\r\nconnection: close\r\n");
        assert_eq!(says_close, !goes_on && !first.contains("HTTP/1.0"), "{first}: {said}");
    }
}

/// The oldest unfinished request gives way, and small ones do not notice.
#[tokio::test(start_paused = true)]
async fn unfinished_requests_are_bounded_in_bytes_for_all_connections_together() {
    const LARGE: usize = 50_000;
    let evictions = Arc::new(AtomicU64::new(0));
    // Five of them, and what hyper needs for two.
    let budget = Budget::new(5 * LARGE + 90_000, evictions.clone());
    let (_open, closing) = Closing::channel();
    let connect = || {
        let (client, server) = tokio::io::duplex(1 << 20);
        let context = Context { closing: closing.clone(), receiving: Receiving::new(budget.clone()), place: None };
        let door = Arc::new(HttpListener::new(Limiter::memory()));
        tokio::spawn(async move { drop(door.serve(server, IDLE, context).await) });
        client
    };
    let body = format!("{}{GOOD}", " ".repeat(LARGE));
    let large = |headers: &str| post(headers, &body);
    let half = |headers: &str| large(headers)[..LARGE].to_owned();
    let mut all = Vec::new();
    // By the short way and by the long one.
    for headers in ["", "", "", "expect: 100-continue\r\n", "", "expect: 100-continue\r\n", ""] {
        let mut client = connect();
        client.write_all(half(headers).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
        all.push(client);
        let mut small = connect();
        small.write_all(post("", GOOD).as_bytes()).await.unwrap();
        small.read_exact(&mut [0; 15]).await.unwrap();
    }
    assert_eq!(evictions.load(Ordering::Relaxed), 2);
    for (index, mut client) in all.into_iter().enumerate() {
        let _ = client.write_all(&large("").as_bytes()[LARGE..]).await;
        client.shutdown().await.unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).await.unwrap();
        match index {
            0 | 1 => assert!(said.starts_with("HTTP/1.1 503 ") && said.contains("\r\nconnection: close\r\n"), "{said}"),
            2 | 4 | 6 => assert!(said.starts_with("HTTP/1.1 200 "), "{index}: {said}"),
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_begun_is_heard_to_its_end_and_not_for_ever() {
    let request = post("", GOOD);
    let head = request.len() - GOOD.len();
    // Who has begun when the doors close is heard to the end.
    let (mut client, tell) = connect();
    client.write_all(&request.as_bytes()[..head]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    tell.send(ShutdownStage::Closing).unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    client.write_all(GOOD.as_bytes()).await.unwrap();
    let mut said = String::new();
    client.read_to_string(&mut said).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 200 "), "{said}");

    let (mut client, _open) = connect();
    client.write_all(&request.as_bytes()[..head]).await.unwrap();
    let asked = tokio::time::Instant::now();
    let mut said = String::new();
    client.read_to_string(&mut said).await.unwrap();
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    assert!(asked.elapsed() <= Duration::from_secs(11), "{:?}", asked.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_silent_connection_ends_and_so_does_one_when_the_doors_close() {
    let mut heard = [0; 9];
    let (mut client, _open) = connect();
    client.write_all(post("", GOOD).as_bytes()).await.unwrap();
    client.read_exact(&mut heard).await.unwrap();
    let mut rest = String::new();
    tokio::time::sleep(Duration::from_secs(50)).await;
    client.write_all(post("", GOOD).as_bytes()).await.unwrap();
    let asked = tokio::time::Instant::now();
    client.read_to_string(&mut rest).await.unwrap();
    assert!(rest.contains("\"remaining\":8"), "{rest}");
    assert_eq!(asked.elapsed().as_secs(), 60, "silence ends it, from the last question on");

    let (mut client, tell) = connect();
    client.write_all(post("", GOOD).as_bytes()).await.unwrap();
    client.read_exact(&mut heard).await.unwrap();
    tell.send(ShutdownStage::Closing).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(59), client.read_to_string(&mut rest)).await;
    ended.expect("the closing ends it").unwrap();
    assert_eq!(&heard, b"HTTP/1.1 ");
}

#[tokio::test(start_paused = true)]
async fn once_it_leaves_whatever_was_asked_together_is_answered_and_the_last_answer_says_so() {
    let other = "GET /v1/check HTTP/1.1\r\nhost: x\r\n\r\n";
    for (asked, statuses) in
        [(post("", GOOD) + &post("", GOOD), ["200", "200"]), (post("", GOOD) + other, ["200", "405"])]
    {
        let (mut client, tell) = connect();
        tell.send(ShutdownStage::Leaving).unwrap();
        tokio::time::sleep(IDLE / 2).await;
        client.write_all(asked.as_bytes()).await.unwrap();
        let mut said = String::new();
        let ended = tokio::time::timeout(IDLE / 4, client.read_to_string(&mut said)).await;
        ended.expect("it ends with its answer").unwrap();
        let answers: Vec<&str> = said.split("HTTP/1.1 ").skip(1).collect();
        assert_eq!(answers.iter().map(|answer| &answer[..3]).collect::<Vec<_>>(), statuses, "{said}");
        let are_last: Vec<bool> = answers.iter().map(|answer| answer.contains("\r\nconnection: close\r\n")).collect();
        assert_eq!(are_last, [false, true], "{said}");
    }
}
