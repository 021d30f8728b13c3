//! Commands of a service's own on the store's connection.

use std::time::Duration;

use tidegate_core::{Check, Demand, Key, Store, StoreErrorKind as Kind, Wait};
use tidegate_redis::{RedisStore, Reply};
use tidegate_testkit::server::{Brand, Config};

#[tokio::test]
async fn command_runs_on_the_connection_of_the_decisions() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
        let demand = Demand::new("1/h".parse().unwrap(), Key::new("user:42").unwrap());
        assert!(store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());

        let any_bytes: &[u8] = b"\r\n$5\r\n\0\xff";
        let set: [&[u8]; 4] = [b"SET", b"own", any_bytes, b"NX"];
        assert_eq!(store.command(&set).await.unwrap().as_text(), Some("OK"));
        assert_eq!(store.command(&set).await.unwrap(), Reply::Nil, "NX: the key exists");
        assert_eq!(store.command(&["GET", "own"]).await.unwrap(), Reply::Text(any_bytes.to_vec()));
        assert_eq!(store.command(&["DEL", "own", "other"]).await.unwrap(), Reply::Integer(1));

        assert!(!store.decide(&[Check::one(&demand)]).await.unwrap()[0].allowed());
        assert_eq!(store.stats().connects, 1);
    }
}

#[tokio::test]
async fn failed_command_leaves_the_connection_usable() {
    let server = Config::new(Brand::Redis).start();
    let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
    store.command(&["SET", "secret-key", "secret-value"]).await.unwrap();
    for wrong in [&["LPUSH", "secret-key", "x"][..], &["NO-SUCH-COMMAND", "secret-value"], &["GET"], &[]] {
        let error = store.command(wrong).await.unwrap_err();
        assert_eq!(error.kind(), Kind::Protocol, "{wrong:?}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    assert_eq!(store.command(&["GET", "secret-key"]).await.unwrap().as_text(), Some("secret-value"));
    assert_eq!(store.stats().connects, 1, "the connection is still good");

    server.kill9();
    let error = store.command(&["GET", "secret-key"]).await.unwrap_err();
    assert!(matches!(error.kind(), Kind::Unreachable | Kind::Interrupted | Kind::TimedOut), "{error:?}");
}

#[tokio::test]
async fn preview_charges_nothing_and_creates_no_key() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let builder = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10));
        let store = builder.bans(true).build().unwrap();
        let demands = ["3/h", "5/min token-bucket", "2/h fixed-window count_denied=true"]
            .map(|limit| Demand::new(limit.parse().unwrap(), Key::new("user:42").unwrap()));
        let used = store.decide(&[Check::new(&demands).unwrap()]).await.unwrap().remove(0);
        let costly = demands.map(|demand| demand.cost(2));
        let check = Check::new(&costly).unwrap();
        let preview = store.preview(&check).await.unwrap();
        let statuses: Vec<_> = preview.limits.iter().map(|status| (status.allowed, status.remaining)).collect();
        assert_eq!(statuses, [(true, 2), (true, 4), (false, 1)]);
        assert!(preview.retry_after() > Wait::ZERO);
        for (demand, status) in demands.iter().zip(&used.limits) {
            assert_eq!(store.inspect(demand).await.unwrap().remaining, status.remaining);
        }
        assert_eq!(store.command(&["DBSIZE"]).await.unwrap(), Reply::Integer(3), "one key per counter");
        store.ban(b"user:42", None).await.unwrap();
        assert_eq!(store.preview(&check).await.unwrap().ban, Some(Wait::NEVER));
    }
}

/// The key of a probe is one that no caller can name, and it is gone before the next one.
#[tokio::test]
async fn probe_writes_its_own_key_for_two_milliseconds() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let store = RedisStore::builder(server.url()).call_timeout(Duration::from_secs(10)).build().unwrap();
        store.command(&["PING"]).await.unwrap();
        let mut monitor = server.connect().unwrap();
        monitor.call(&["MONITOR"]).unwrap();
        let probe = Demand::probe();
        assert!(store.decide(&[Check::one(&probe)]).await.unwrap()[0].allowed());
        let written = loop {
            let line = monitor.receive().unwrap().text();
            if line.contains("\"SET\"") {
                break line;
            }
        };
        assert!(written.contains("\"tidegate:tg2:{tidegate}:probe:bucket\""), "{written}");
        assert!(written.ends_with("\"PX\" \"2\""), "{written}");
    }
}
