//! Checks of several limits, malformed commands, and the settings of the configuration.

use std::sync::atomic::AtomicUsize;

use serde_json::json;
use tidegate::{Decision, LimitStatus, StoreFuture};

use super::*;

/// A store in memory that counts the calls and the checks.
struct CountingStore {
    inner: MemoryStore,
    calls: AtomicUsize,
    checks: AtomicUsize,
}

impl Store for CountingStore {
    fn decide<'a>(&'a self, checks: &'a [Check<'a>]) -> StoreFuture<'a, Vec<Decision>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.checks.fetch_add(checks.len(), Ordering::Relaxed);
        self.inner.decide(checks)
    }

    fn refund<'a>(&'a self, check: &'a Check<'a>, decision: &'a Decision) -> StoreFuture<'a, ()> {
        Store::refund(&self.inner, check, decision)
    }

    fn reset<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, ()> {
        Store::reset(&self.inner, demand)
    }

    fn inspect<'a>(&'a self, demand: &'a Demand<'a>) -> StoreFuture<'a, LimitStatus> {
        Store::inspect(&self.inner, demand)
    }
}

#[tokio::test]
async fn several_limits_are_decided_together_and_a_denial_charges_none() {
    let mut connection = open(RespOptions::default());
    let check = ["TIDEGATE.CHECK", "user:42", "2/min", "user:42", "9/h", "all", "3/h", "cost", "2"];
    let reply = connection.call(&check).await;
    assert_eq!(reply, json!([1, [1, 2, 0, 0, 60_000], [1, 9, 7, 0, 3_600_000], [1, 3, 1, 0, 3_600_000]]));
    let reply = connection.call(&check).await;
    let expected = json!([0, [0, 2, 0, 60_000, 60_000], [1, 9, 7, 0, 3_600_000], [0, 3, 1, 3_600_000, 3_600_000]]);
    assert_eq!(reply, expected);
    assert_eq!(connection.remaining("all", "3/h").await, 1);
    // One pair is answered with five numbers, and the first key may have the name of an option.
    assert_eq!(connection.call(&["TIDEGATE.CHECK", "COST", "2/min"]).await, json!([1, 2, 1, 0, 60_000]));
}

#[tokio::test]
async fn a_check_can_have_32_limits() {
    let mut connection = open(RespOptions::default());
    let pairs = |count: usize| (0..count).flat_map(|n| [format!("k{n}"), "5/min".to_owned()]);
    let command = |count| std::iter::once("TIDEGATE.CHECK".to_owned()).chain(pairs(count)).collect::<Vec<_>>();
    let reply = connection.call(&command(32)).await;
    assert_eq!(reply.as_array().unwrap().len(), 33);
    assert!(reply.as_array().unwrap()[1..].iter().all(|status| *status == json!([1, 5, 4, 0, 60_000])), "{reply}");
    let expected = "-ERR a check can have at most 32 limits; this one has 33";
    assert_eq!(connection.call(&command(33)).await, expected);
    assert_eq!(connection.remaining("k0", "5/min").await, 4);
}

#[tokio::test]
async fn pipelined_checks_of_several_limits_are_one_call_to_the_store() {
    let store = Arc::new(CountingStore {
        inner: MemoryStore::builder().clock(clock()).build(),
        calls: AtomicUsize::new(0),
        checks: AtomicUsize::new(0),
    });
    let mut connection = open_with(RespOptions::default(), |builder| builder.store(store.clone()));
    let pipeline = "TIDEGATE.CHECK a 90/min\r\nTIDEGATE.CHECK a 90/min b 9/h\r\nCL.THROTTLE c 2 3 60\r\n".repeat(20);
    connection.client.write_all(pipeline.as_bytes()).await.unwrap();
    let mut admitted = 0;
    for _ in 0..20 {
        receive(&mut connection.client).await;
        admitted += receive(&mut connection.client).await[0].as_i64().unwrap();
        receive(&mut connection.client).await;
    }
    assert_eq!(admitted, 9);
    assert_eq!((store.calls.load(Ordering::Relaxed), store.checks.load(Ordering::Relaxed)), (1, 60));
}

/// Replies to a check that no counter decided: units left, and the time until all are available, are not known.
#[tokio::test]
async fn uncounted_admissions_claim_no_quota() {
    let off: (&str, Option<Arc<dyn Store>>) = ("kill_switch = true", None);
    let failing: (&str, Option<Arc<dyn Store>>) = ("on_failure = \"allow\"", Some(Arc::new(UnreachableStore)));
    for (text, store) in [off, failing] {
        let mut connection = open_with_config(text, store);
        let commands = [
            ("TIDEGATE.CHECK a 5/min", json!([1, 5, -1, 0, -1])),
            ("TIDEGATE.CHECK a 5/min COST 9", json!([1, 5, -1, 0, -1])),
            ("TIDEGATE.PEEK a 5/min", json!([1, 5, -1, 0, -1])),
            ("TIDEGATE.CHECK a 5/min b 7/h", json!([1, [1, 5, -1, 0, -1], [1, 7, -1, 0, -1]])),
            ("CL.THROTTLE a 4 1 60", json!([0, 5, -1, -1, -1])),
            ("TIDEGATE.WAIT a 5/min TIMEOUT 60000 COST 9", json!([1, 5, -1, 0, -1])),
        ];
        for (command, expected) in &commands {
            connection.client.write_all(format!("{command}\r\n").as_bytes()).await.unwrap();
            assert_eq!(receive(&mut connection.client).await, *expected, "{text}: {command}");
        }
        let pipeline: String = commands.iter().map(|(command, _)| format!("{command}\r\n")).collect();
        connection.client.write_all(pipeline.as_bytes()).await.unwrap();
        for (command, expected) in &commands {
            assert_eq!(receive(&mut connection.client).await, *expected, "{text}: {command}, pipelined");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn on_failure_deny_is_an_error_without_the_store() {
    let mut connection = open_with_config("on_failure = \"deny\"", Some(Arc::new(UnreachableStore)));
    for command in [
        "TIDEGATE.CHECK a 5/min",
        "TIDEGATE.CHECK a 5/min b 7/h",
        "CL.THROTTLE a 4 1 60",
        "TIDEGATE.WAIT a 5/min TIMEOUT 9",
    ] {
        connection.client.write_all(format!("{command}\r\n").as_bytes()).await.unwrap();
        let reply = receive(&mut connection.client).await;
        assert!(reply.as_str().is_some_and(|reply| reply.starts_with("-UNAVAILABLE ")), "{command}: {reply}");
    }
}

#[tokio::test]
async fn a_ban_is_answered_with_the_time_until_it_ends() {
    let mut connection = open(RespOptions::default());
    let limiter = connection.listener.decider.limiter().clone();
    limiter.ban(b"minute", Some(Duration::from_secs(60))).await.unwrap();
    limiter.ban(b"good", None).await.unwrap();
    for (command, expected) in [
        ("TIDEGATE.CHECK minute 5/h", json!([0, 5, 0, 60_000, 60_000])),
        ("TIDEGATE.CHECK other 5/h minute 5/h", json!([0, [0, 5, 0, 60_000, 60_000], [0, 5, 0, 60_000, 60_000]])),
        ("CL.THROTTLE minute 4 1 1", json!([1, 5, 0, 60, 60])),
        ("TIDEGATE.CHECK good 5/h", json!([0, 5, 0, -1, -1])),
        ("CL.THROTTLE good 4 1 1", json!([1, 5, 0, -1, -1])),
        ("TIDEGATE.WAIT good 5/h TIMEOUT 60000", json!([0, 5, 0, -1, -1])),
    ] {
        connection.client.write_all(format!("{command}\r\n").as_bytes()).await.unwrap();
        assert_eq!(receive(&mut connection.client).await, expected, "{command}");
    }
}

#[tokio::test]
async fn malformed_commands_say_what_is_expected_and_charge_nothing() {
    let mut connection = open_with_config("[[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"2/h\"]", None);
    let longest = vec![b'k'; 64 * 1024];
    let too_long = vec![b'k'; 64 * 1024 + 1];
    let check_usage = "expected TIDEGATE.CHECK key limit [key limit ...] [COST n] [RECEIPT]";
    let wait_usage = "expected TIDEGATE.WAIT key limit [key limit ...] TIMEOUT ms [COST n] [RECEIPT]";
    let refund_usage = "expected TIDEGATE.REFUND receipt [USED n | STATUS n]";
    let request_usage = "expected TIDEGATE.REQUEST method path peer [name value ...]";
    let table: Vec<(Vec<&[u8]>, &str)> = vec![
        (vec![b"TIDEGATE.CHECK"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"k"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"COST"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"COST", b"1", b"COST", b"1"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"COST", b"1", b"k", b"5/h"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"RECEIPT"], "receipts need a secret"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"RECEIPT", b"RECEIPT"], check_usage),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"TIMEOUT", b"9", b"receipt"], "receipts need a secret"),
        (vec![b"TIDEGATE.REFUND"], refund_usage),
        (vec![b"TIDEGATE.REFUND", b"AQx", b"USED"], refund_usage),
        (vec![b"TIDEGATE.REFUND", b"AQx", b"UNITS", b"1"], refund_usage),
        (vec![b"TIDEGATE.REFUND", b"AQx", b"USED", b"1", b"STATUS", b"200"], refund_usage),
        (vec![b"TIDEGATE.REFUND", b"AQx", b"USED", b"-1"], "USED must be a whole number from 0 to 4294967295"),
        (vec![b"TIDEGATE.REFUND", b"AQx", b"STATUS", b"600"], "STATUS must be an HTTP status from 100 to 599"),
        (vec![b"TIDEGATE.REFUND", b"AQx"], "receipts need a secret"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"RECEIPT", b"5/h"], check_usage),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"TIMEOUT", b"9"], "(pair 2)"),
        (
            vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"COST", b"4294967296"],
            "cost must be a whole number from 0 to 4294967295",
        ),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"COST", b"1e3"], "cost must be a whole number"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"COST", b""], "cost must be a whole number"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"k", b"9/min"], "use the same counter"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", b"l", b"9/fortnight"], "(pair 2)"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/\xff"], "limit: expected text such as 10/min"),
        (vec![b"TIDEGATE.CHECK", b"k", &longest], "limit"),
        (vec![b"TIDEGATE.CHECK", &too_long, b"5/min"], "65536"),
        (vec![b"TIDEGATE.CHECK", b"k", b"5/min", &too_long, b"5/min"], "65536"),
        (vec![b"TIDEGATE.RESET", &too_long, b"5/min"], "65536"),
        (vec![b"CL.THROTTLE", &too_long, b"1", b"1", b"1"], "65536"),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min"], wait_usage),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"COST", b"1"], wait_usage),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"TIMEOUT"], wait_usage),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"TIMEOUT", b"1", b"TIMEOUT", b"1"], wait_usage),
        (
            vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"TIMEOUT", b"60001"],
            "TIMEOUT in milliseconds must be a whole number from 0 to 60000",
        ),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"TIMEOUT", b"99999999999999999999"], "from 0 to 60000"),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"TIMEOUT", b"-1"], "from 0 to 60000"),
        (vec![b"TIDEGATE.WAIT", b"k", b"5/min", b"k", b"6/min", b"TIMEOUT", b"1"], "use the same counter"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/"], request_usage),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"203.0.113.9", b"accept"], request_usage),
        (
            vec![b"TIDEGATE.REQUEST", b"G T", b"/", b"203.0.113.9"],
            "method: invalid HTTP method; expected one such as GET",
        ),
        (vec![b"TIDEGATE.REQUEST", b"", b"/", b"203.0.113.9"], "method: "),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"path", b"203.0.113.9"], "path: expected a path such as /shorten?x=1"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"http://x/", b"203.0.113.9"], "path: expected a path"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/a#b", b"203.0.113.9"], "path: expected a path"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/a b", b"203.0.113.9"], "path: invalid uri character"),
        (vec![b"TIDEGATE.REQUEST", b"GET", &longest, b"203.0.113.9"], "path: "),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"localhost"], "peer: expected an IP address such as 203.0.113.9"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"203.0.113.9:80"], "peer: expected an IP address"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"\xff"], "peer: expected an IP address"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"::1", b"a b", b""], "headers: `a b` is not a header name"),
        (vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"::1", b"a\r\nb", b""], "is not a header name"),
        (
            vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"::1", b"a", b"x\r\ny: z"],
            "the value of `a` contains a control character",
        ),
        (
            vec![b"TIDEGATE.REQUEST", b"GET", b"/", b"::1", b"a", &longest],
            "headers can have at most 65536 bytes in total",
        ),
    ];
    for (command, phrase) in &table {
        let reply = connection.call(command).await;
        let reply = reply.as_str().unwrap_or_else(|| panic!("{:?}: {reply}", command[0]));
        assert!(reply.starts_with("-ERR ") && reply.contains(phrase) && reply.len() < 1_000, "{phrase}: {reply}");
    }
    let mut many_headers = vec![b"TIDEGATE.REQUEST".to_vec(), b"GET".to_vec(), b"/".to_vec(), b"203.0.113.9".to_vec()];
    many_headers.extend((0..2 * 257).map(|n| format!("x{n}").into_bytes()));
    assert_eq!(connection.call(&many_headers).await, "-ERR headers can have at most 256 entries");
    assert_eq!(connection.call(&many_headers[..4 + 2 * 256]).await[1], 200);

    assert_eq!(connection.remaining("k", "5/min").await, 5);
    assert_eq!(connection.call(&[b"TIDEGATE.CHECK", &longest[..], b"5/min"]).await[2], 4);
    assert_eq!(connection.call(&["PING"]).await, "+PONG");
}
