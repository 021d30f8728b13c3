//! The service as a user runs it: the real binary, over real sockets, in memory and on a real Redis.
#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

/// A long deadline, for tests with exact counts: on a busy machine a decision may take longer than the default.
const LONG_DEADLINE: (&str, &str) = ("REDIS_DEADLINE_MS", "10000");

/// A running service on a free port, which is killed when dropped.
struct Service {
    child: Child,
    address: String,
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}: ")))?;
        line.split_once(": ").map(|(_, value)| value)
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the remaining tokens per minute and per day, from the header.
    fn left(&self) -> [u32; 2] {
        let header = self.header("ratelimit").unwrap_or_else(|| panic!("{self:?}"));
        let left = |policy: &str| policy.split("r=").nth(1)?.split(';').next()?.parse().ok();
        let all: Vec<u32> = header.split(", ").filter_map(left).collect();
        all.try_into().unwrap()
    }
}

fn command(variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-tokens"));
    // Without the environment variables of the test process.
    command.env_clear().env("LISTEN", "127.0.0.1:0").envs(variables.iter().copied());
    command
}

impl Service {
    fn start(variables: &[(&str, &str)]) -> Service {
        let mut child = command(variables).stdout(Stdio::piped()).spawn().expect("the binary runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").expect("it prints its address").to_owned();
        Service { child, address }
    }

    /// Sends a request and returns the connection, without waiting for the response.
    fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        write!(stream, "{head}host: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        stream
    }

    fn exchange(&self, head: &str, body: &str) -> Answer {
        let mut stream = self.send(head, body);
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_owned(), body: body.to_owned() }
    }

    fn complete(&self, key: &str, prompt: &str, max_tokens: u32) -> Answer {
        let (head, body) = completion(key, prompt, max_tokens);
        self.exchange(&head, &body)
    }

    fn left(&self, key: &str) -> [u32; 2] {
        self.exchange(&format!("GET /v1/budget HTTP/1.1\r\nx-api-key: {key}\r\n"), "").left()
    }
}

fn completion(key: &str, prompt: &str, max_tokens: u32) -> (String, String) {
    let head = format!("POST /v1/complete HTTP/1.1\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n");
    (head, json!({ "prompt": prompt, "max_tokens": max_tokens }).to_string())
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn charges_the_used_tokens(service: &Service) {
    // Reserved are 5 tokens for twenty letters and 500 for the longest completion. Used are 4 + 4 words.
    let answer = service.complete("demo-key", "one two three fourth", 500);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["text"], "fourth three two one");
    let usage = json!({ "prompt_tokens": 4, "completion_tokens": 4, "reserved_tokens": 505 });
    assert_eq!(answer.json()["usage"], usage);
    assert_eq!(answer.left(), [992, 4_992], "unused tokens are refunded");

    // Short words are more tokens than estimated from their letters: 25 + 1 reserved, 50 + 1 used.
    let short = "a ".repeat(50);
    let answer = service.complete("demo-key", &short, 1);
    assert_eq!(answer.json()["usage"]["reserved_tokens"], 26);
    assert_eq!(answer.left(), [941, 4_941], "missing tokens are charged, too");
}

fn refuses_a_request_that_does_not_fit(service: &Service) {
    let refused = service.complete("demo-key", "one more", 940);
    assert_eq!((refused.status, refused.left()), (429, [941, 4_941]), "{refused:?}");
    assert_eq!(refused.json()["policy"], "per-minute");
    assert!(refused.header("retry-after").is_some_and(|seconds| (1..=60).contains(&seconds.parse().unwrap())));
    assert_eq!(service.complete("demo-key", "one more", 939).status, 200, "a smaller request is served");
    assert_eq!(service.left("other-key"), [1_000, 5_000], "other customers are not affected");
    let never = service.complete("other-key", "one more", 2_000);
    assert_eq!((never.status, never.header("retry-after")), (429, None), "it never fits, so there is no wait");
}

#[test]
fn tokens_are_reserved_and_settled_in_memory() {
    let service = Service::start(&[("TOKENS_PER_MINUTE", "1000"), ("TOKENS_PER_DAY", "5000")]);
    charges_the_used_tokens(&service);
    refuses_a_request_that_does_not_fit(&service);
}

#[test]
fn tokens_are_reserved_and_settled_on_redis_for_all_instances() {
    let redis = Server::redis();
    let url = redis.url();
    let variables =
        [LONG_DEADLINE, ("TIDEGATE_STORE", &*url), ("TOKENS_PER_MINUTE", "1000"), ("TOKENS_PER_DAY", "5000")];
    let instances = [Service::start(&variables), Service::start(&variables)];
    charges_the_used_tokens(&instances[0]);
    assert_eq!(instances[1].left("demo-key"), [941, 4_941]);
    refuses_a_request_that_does_not_fit(&instances[1]);
}

#[test]
fn usage_beyond_the_limit_uses_it_up() {
    let service = Service::start(&[("TOKENS_PER_MINUTE", "100"), ("TOKENS_PER_DAY", "5000")]);
    // 100 reserved, 199 used: the limit per minute is used up, and the limit per day is charged with all of them.
    let answer = service.complete("demo-key", &"a ".repeat(198), 1);
    assert_eq!((answer.status, answer.left()), (200, [0, 4_801]), "{answer:?}");
    assert_eq!(service.complete("demo-key", "", 1).status, 429);
}

#[test]
fn an_invalid_request_is_rejected_with_what_is_accepted_and_costs_nothing() {
    let service = Service::start(&[]);
    for (key, max_tokens, status, phrase) in [
        ("stranger", 10, 401, "x-api-key"),
        ("demo-key", 0, 400, "1 to 4096, got 0"),
        ("demo-key", 5_000, 400, "1 to 4096"),
    ] {
        let answer = service.complete(key, "hello", max_tokens);
        assert_eq!(answer.status, status, "{answer:?}");
        assert!(answer.json()["message"].as_str().unwrap().contains(phrase), "{answer:?}");
    }
    let head = "POST /v1/complete HTTP/1.1\r\nx-api-key: demo-key\r\ncontent-type: application/json\r\n";
    assert_eq!(service.exchange(head, r#"{"prompt":"a","max_tokens":1,"model":"x"}"#).status, 422);
    assert_eq!(service.left("demo-key"), [2_000, 20_000]);
}

#[test]
fn a_client_that_disconnects_during_the_reservation_is_charged_the_used_tokens() {
    let redis = Server::redis();
    let proxy = Proxy::start(redis.addr());
    let slow = Service::start(&[LONG_DEADLINE, ("TIDEGATE_STORE", &proxy.url())]);
    let quick = Service::start(&[LONG_DEADLINE, ("TIDEGATE_STORE", &redis.url())]);
    assert_eq!(slow.left("demo-key"), [2_000, 20_000]);
    let (head, body) = completion("demo-key", "word", 100);
    for (minute, day) in [(1_998, 19_998), (1_996, 19_996), (1_994, 19_994)] {
        // Long enough to disconnect meanwhile, and far below the deadline.
        proxy.set(Fault::Delay(Duration::from_millis(40)));
        let before = proxy.bytes_up();
        let waiting = slow.send(&head, &body);
        eventually(
            "the reservation is sent to Redis, and its reply is delayed",
            || proxy.bytes_up(),
            |up| *up > before,
        );
        drop(waiting);
        // Bytes in transit keep their delay; later ones are not delayed.
        proxy.set(Fault::Pass);
        eventually(
            "one word of the prompt and one of the completion are charged",
            || quick.left("demo-key"),
            |left| *left == [minute, day],
        );
    }
}

#[test]
fn while_redis_is_down_each_instance_grants_its_share() {
    let redis = Server::redis();
    let url = redis.url();
    let variables = [("TIDEGATE_STORE", &*url), ("INSTANCES", "2")];
    let instances = [Service::start(&variables), Service::start(&variables)];
    assert_eq!(instances[0].left("demo-key"), [2_000, 20_000]);
    redis.kill9();
    for instance in &instances {
        eventually("half of the budgets", || instance.left("demo-key"), |left| *left == [1_000, 10_000]);
        assert_eq!(instance.complete("demo-key", "word", 1_000).status, 429, "1 + 1000 are more than half");
        assert_eq!(instance.complete("demo-key", "word", 999).status, 200);
    }
}

#[test]
fn an_invalid_environment_variable_is_rejected_at_the_start() {
    for (name, value, expected) in [
        ("INSTANCES", "0", "INSTANCES: expected 1 to 10000, got \"0\""),
        ("INSTANCES", "two", "INSTANCES: expected 1 to 10000, got \"two\""),
        ("REDIS_DEADLINE_MS", "60000", "REDIS_DEADLINE_MS: expected 1 to 10000, got \"60000\""),
        ("TOKENS_PER_MINUTE", "0", "TOKENS_PER_MINUTE: "),
        ("TOKENS_PER_DAY", "many", "TOKENS_PER_DAY: "),
        ("TIDEGATE_STORE", "http://127.0.0.1", "TIDEGATE_STORE: "),
    ] {
        let output = command(&[(name, value)]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}={value}: {said}");
        assert!(said.starts_with("llm-tokens: ") && said.contains(expected), "{name}={value}: {said}");
    }
}
