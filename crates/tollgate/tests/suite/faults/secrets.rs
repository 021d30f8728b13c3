//! What a URL may be, and that its password is seen nowhere.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollgate::{Check, Demand, Key, Limiter, OnFailure};
use tollgate_redis::RedisStore;
use tollgate_testkit::server::{Brand, Config, Server};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const PASSWORD: &str = "xyzzy-plugh-93";
const ACCEPTED: &str = "redis://[user:password@]host[:port][/database]";

fn assert_silent(shown: &str) {
    assert!(!shown.contains(PASSWORD) && !shown.contains("plugh"), "{shown}");
}

fn assert_error_silent(error: &impl std::error::Error) {
    assert_silent(&format!("{error} {error:?} {error:#?}"));
    let mut source = error.source();
    while let Some(error) = source {
        assert_silent(&format!("{error} {error:?}"));
        source = error.source();
    }
}

#[tokio::test]
async fn a_url_that_names_no_store_says_what_is_accepted() {
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
        assert!(error.to_string().contains(ACCEPTED) && error.to_string().contains("`memory`"), "{error}");
        assert_error_silent(&error);
        let builder = RedisStore::builder(&url);
        assert_silent(&format!("{builder:?}"));
        assert_error_silent(&builder.build().unwrap_err());
    }
}

#[tokio::test]
async fn a_database_that_the_server_does_not_have_is_named_as_the_fault() {
    let server = Server::redis();
    let store = RedisStore::builder(format!("{}/9999", server.url())).build().unwrap();
    let error = store.command(&["PING"]).await.unwrap_err();
    assert!(error.to_string().contains("does not have this database"), "{error}");
}

/// Everything that is logged, at any level.
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
async fn a_planted_password_is_in_no_log_no_error_and_no_debug_output() {
    let log = Log::default();
    // For this thread, on which everything here runs.
    let _guard = tracing::subscriber::set_default(log.clone());
    let server = Config::new(Brand::Redis).set("user", &format!("ann on >{PASSWORD} ~* +@all")).start();
    let addr = server.addr();
    let places = [
        format!("redis://ann:{PASSWORD}@{addr}"),
        format!("redis://bob:{PASSWORD}@{addr}"),
        format!("redis://:{PASSWORD}@{addr}"),
        format!("redis://ann:{PASSWORD}@{addr}/9999"),
        format!("redis://ann:{PASSWORD}@127.0.0.1:1"),
    ];
    let mut answered = 0;
    for url in places {
        let builder = Limiter::builder().url(&url).unwrap().on_failure(OnFailure::Deny);
        let limiter = builder.deadline(Duration::from_secs(5)).build();
        let demand = Demand::new("1000/h".parse().unwrap(), Key::new("k").unwrap());
        for _ in 0..6 {
            match limiter.check(&Check::one(&demand)).await {
                Ok(_) => answered += 1,
                Err(error) => assert_error_silent(&error),
            }
            if let Err(error) = limiter.inspect(&demand).await {
                assert_error_silent(&error);
            }
        }
        assert_silent(&format!("{limiter:?} {limiter:#?} {:?}", limiter.stats()));
        let store = RedisStore::builder(&url).build().unwrap();
        if let Err(error) = store.check_server().await {
            assert_error_silent(&error);
        }
        assert_silent(&format!("{store:?} {store:#?} {:?} {:?}", RedisStore::builder(&url), store.stats()));
    }
    assert_eq!(answered, 6, "one of them lets us in");
    let logged = log.0.lock().unwrap().clone();
    assert!(logged.contains("the store is not asked until a probe succeeds"), "something was logged: {logged}");
    assert_silent(&logged);
}
