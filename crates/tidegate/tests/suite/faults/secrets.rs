//! URLs of stores: which are accepted, and that their passwords are never shown.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::{Check, Demand, Key, Limiter, OnFailure};
use tidegate_redis::RedisStore;
use tidegate_testkit::server::{Brand, Config, Server};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const PASSWORD: &str = "xyzzy-plugh-93";
const ACCEPTED: &str = "redis://[user:password@]host[:port][/database]";

fn assert_hidden(shown: &str) {
    assert!(!shown.contains(PASSWORD) && !shown.contains("plugh"), "{shown}");
}

fn assert_hidden_in(error: &impl std::error::Error) {
    assert_hidden(&format!("{error} {error:?} {error:#?}"));
    let mut source = error.source();
    while let Some(error) = source {
        assert_hidden(&format!("{error} {error:?}"));
        source = error.source();
    }
}

#[tokio::test]
async fn error_for_an_invalid_url_lists_the_accepted_forms_or_suggests_one() {
    let urls = [
        "",
        "memorys",
        "localhost:6379",
        "http://HERE@localhost",
        "redis+carrier-pigeon://localhost",
        "redis:/localhost",
        "redis://",
        "redis://u:HERE@",
        "redis://localhost:0",
        "redis://localhost:65536",
        "redis://localhost:HERE",
        "redis://u:HERE@localhost/-1",
        "redis://u:HERE@localhost/99999999999",
        "redis://localhost/HERE",
        "redis://u:HERE@localhost/1/2",
        "redis://u:HERE%zz@localhost",
        "redis://u:HERE@local host",
        "redis://[::1",
    ];
    for url in urls {
        let url = url.replace("HERE", PASSWORD);
        let error = Limiter::builder().url(&url).err().unwrap_or_else(|| panic!("{url} is no store"));
        let text = error.to_string();
        let is_suggestion = text.contains("did you mean redis://localhost:6379?");
        assert_eq!(is_suggestion, url == "localhost:6379", "{text}");
        assert!(is_suggestion || (text.contains(ACCEPTED) && text.contains("`memory`")), "{text}");
        assert_hidden_in(&error);
        let builder = RedisStore::builder(&url);
        assert_hidden(&format!("{builder:?}"));
        assert_hidden_in(&builder.build().unwrap_err());
    }
}

#[tokio::test]
async fn error_for_a_missing_database_says_so() {
    let server = Server::redis();
    let store = RedisStore::builder(format!("{}/9999", server.url())).build().unwrap();
    let error = store.command(&["PING"]).await.unwrap_err();
    assert!(error.to_string().contains("does not have this database"), "{error}");
}

/// Collects all log events and spans, at every level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl Visit for Log {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        writeln!(self.0.lock().unwrap(), "{field}={value:?}").unwrap();
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        attributes.record(&mut self.clone());
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, values: &Record<'_>) {
        values.record(&mut self.clone());
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        event.record(&mut self.clone());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn password_is_in_no_log_no_error_and_no_debug_output() {
    let log = Log::default();
    // For this thread. The runtime of this test has no other.
    let _guard = tracing::subscriber::set_default(log.clone());
    let server = Config::new(Brand::Redis).set("user", &format!("ann on >{PASSWORD} ~* +@all")).start();
    let addr = server.addr();
    let urls = [
        format!("redis://ann:{PASSWORD}@{addr}"),
        format!("redis://bob:{PASSWORD}@{addr}"),
        format!("redis://:{PASSWORD}@{addr}"),
        format!("redis://ann:{PASSWORD}@{addr}/9999"),
        format!("redis://ann:{PASSWORD}@127.0.0.1:1"),
    ];
    let mut decided = 0;
    for url in urls {
        let builder = Limiter::builder().url(&url).unwrap().on_failure(OnFailure::Deny);
        let limiter = builder.deadline(Duration::from_secs(5)).build();
        let demand = Demand::new("1000/h".parse().unwrap(), Key::new("k").unwrap());
        for _ in 0..6 {
            match limiter.check(&Check::one(&demand)).await {
                Ok(_) => decided += 1,
                Err(error) => assert_hidden_in(&error),
            }
            if let Err(error) = limiter.inspect(&demand).await {
                assert_hidden_in(&error);
            }
        }
        assert_hidden(&format!("{limiter:?} {limiter:#?} {:?}", limiter.stats()));
        let store = RedisStore::builder(&url).build().unwrap();
        if let Err(error) = store.check_server().await {
            assert_hidden_in(&error);
        }
        assert_hidden(&format!("{store:?} {store:#?} {:?} {:?}", RedisStore::builder(&url), store.stats()));
    }
    assert_eq!(decided, 6, "one of the URLs is right");
    let logged = log.0.lock().unwrap().clone();
    assert!(logged.contains("the store is not called until a probe succeeds"), "something was logged: {logged}");
    assert_hidden(&logged);
}
