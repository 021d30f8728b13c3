//! Settings of a configuration file, as the limiter uses them.

use std::time::Duration;

use tidegate::config::{Format, Loader, Settings};
use tidegate::{Check, Demand, Key, Source};
use tidegate_testkit::fault::{Fault, Proxy};
use tidegate_testkit::server::Server;

fn settings(url: &str, file: &str) -> Settings {
    let file = format!("{file}\n[[rules]]\nname = 'all'\nlimits = ['100/min']");
    Loader::new().store(url).load_text("tidegate.toml", &file, Format::Toml).unwrap().settings
}

#[tokio::test]
async fn store_prefix_deadline_instances_and_on_failure_of_a_file_are_used() {
    let redis = Server::redis();
    // So long a deadline that a busy machine makes no decision local.
    let local = settings(&redis.url(), "prefix = 'shop'\ndeadline = '10s'\ninstances = 3").limiter().unwrap().build();
    let deny = settings(&redis.url(), "deadline = '1ms'\non_failure = 'deny'").limiter().unwrap().build();
    let demand = Demand::new("9/h".parse().unwrap(), Key::new("user:42").unwrap());
    let check = Check::one(&demand);

    assert_eq!(local.check(&check).await.unwrap().limits[0].remaining, 8);
    let keys = redis.command(&["KEYS", "*user:42*"]);
    assert!(!keys.items().is_empty() && keys.items().iter().all(|key| key.text().starts_with("shop:")), "{keys:?}");

    redis.stop();
    // Tokio's clock advances to the next timer, since the stopped server sends nothing.
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    assert!(deny.check(&check).await.is_err(), "on_failure = deny");
    // Tokio rounds timers up to whole milliseconds of its own clock.
    assert!((1..=2).contains(&begun.elapsed().as_millis()), "the deadline: {:?}", begun.elapsed());
    tokio::time::resume();
    redis.cont();
    redis.kill9();
    let decision = local.check(&check).await.unwrap();
    assert_eq!((decision.source, decision.limits[0].quota), (Source::Local, 3), "a third of nine");
}

#[tokio::test(flavor = "multi_thread")]
async fn store_is_waited_for_as_long_as_a_long_deadline_says() {
    let redis = Server::redis();
    let proxy = Proxy::start(redis.addr());
    let limiter = settings(&proxy.url(), "deadline = '30s'").limiter().unwrap().build();
    let demand = Demand::new("9/h".parse().unwrap(), Key::new("user:42").unwrap());
    let check = Check::one(&demand);
    assert_eq!(limiter.check(&check).await.unwrap().source, Source::Store, "connected");
    // Longer than the default timeout of a call.
    proxy.set(Fault::Delay(Duration::from_millis(400)));
    let decision = limiter.check(&check).await.unwrap();
    assert_eq!((decision.source, decision.limits[0].remaining), (Source::Store, 7));
}

#[tokio::test]
async fn invalid_store_url_is_an_error_without_its_password_and_memory_is_a_store() {
    let refused = settings("http://:hunter2@127.0.0.1", "").limiter().err().unwrap().to_string();
    assert!(refused.contains("redis://") && !refused.contains("hunter2"), "{refused}");
    let demand = Demand::new("9/h".parse().unwrap(), Key::new("user:42").unwrap());
    let memory = settings("memory", "").limiter().unwrap().build();
    assert_eq!(memory.check(&Check::one(&demand)).await.unwrap().source, Source::Store);
}
