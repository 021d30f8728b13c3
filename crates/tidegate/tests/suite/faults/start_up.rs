//! The check of a server at start-up: its brand, its version and its eviction policy.

use tidegate_redis::{RedisStore, ServerCheckError};
use tidegate_testkit::server::{Brand, Config};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Serves connections as a fake server whose INFO reply is `info`.
///
/// It recognises the commands of the store's greeting and of the start-up check by one word each.
async fn serve_fake(listener: TcpListener, info: &'static str) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        tokio::spawn(answer(stream, info));
    }
}

async fn answer(mut stream: TcpStream, info: &'static str) {
    let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
    let mut received = Vec::new();
    while stream.read_buf(&mut received).await.is_ok_and(|count| count > 0) {
        // A complete request ends with a line break. The script contains none of these words as a line.
        if !received.ends_with(b"\r\n") {
            continue;
        }
        let text = String::from_utf8_lossy(&received).into_owned();
        received.clear();
        let mut reply = String::new();
        for word in text.split("\r\n") {
            match word {
                "HELLO" => reply.push_str("-ERR unknown command\r\n"),
                "SETNAME" => reply.push_str("+OK\r\n"),
                "ROLE" => reply.push_str("*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"),
                "LOAD" => reply.push_str(&bulk(&"a".repeat(40))),
                "INFO" => reply.push_str(&bulk(info)),
                "CONFIG" => reply.push_str(&format!("*2\r\n{}{}", bulk("maxmemory-policy"), bulk("noeviction"))),
                _ => {}
            }
        }
        if stream.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn check_fake(info: &'static str) -> Result<String, ServerCheckError> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let server = tokio::spawn(serve_fake(listener, info));
    let store = RedisStore::builder(url).build().unwrap();
    let report = store.check_server().await;
    server.abort();
    report.map(|report| format!("{} {}", report.name, report.version))
}

#[tokio::test]
async fn server_that_is_too_old_is_refused_with_its_name_and_version() {
    for (info, named) in [
        ("# Server\r\nredis_version:6.2.14\r\nos:Linux\r\n", "Redis 6.2.14"),
        ("# Server\r\nredis_version:5.0.7\r\n", "Redis 5.0.7"),
        ("# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.1.9\r\n", "Valkey 7.1.9"),
    ] {
        let error = check_fake(info).await.unwrap_err();
        assert!(matches!(error, ServerCheckError::TooOld { .. }), "{error:?}");
        let message = error.to_string();
        for phrase in [named, "too old", "Redis 7.0", "Valkey 7.2"] {
            assert!(message.contains(phrase), "{message}");
        }
    }
}

#[tokio::test]
async fn oldest_supported_versions_are_accepted_and_an_unknown_version_is_refused() {
    assert_eq!(check_fake("redis_version:7.0.0\r\n").await.unwrap(), "Redis 7.0.0");
    let valkey = "redis_version:7.2.4\r\nvalkey_version:7.2.0\r\n";
    assert_eq!(check_fake(valkey).await.unwrap(), "Valkey 7.2.0");
    assert!(matches!(check_fake("os:Linux\r\n").await, Err(ServerCheckError::Unknown)));
}

#[tokio::test]
async fn every_policy_that_evicts_counters_causes_a_warning() {
    for brand in Brand::ALL {
        let server = Config::new(brand).start();
        let store = RedisStore::builder(server.url()).build().unwrap();
        for policy in [
            "allkeys-lru",
            "allkeys-lfu",
            "allkeys-random",
            "volatile-lru",
            "volatile-lfu",
            "volatile-random",
            "volatile-ttl",
        ] {
            server.command(&["CONFIG", "SET", "maxmemory-policy", policy]);
            let report = store.check_server().await.unwrap();
            assert_eq!(report.name, brand.to_string());
            let info = server.command(&["INFO", "server"]).text();
            assert!(info.contains(&format!("_version:{}\r\n", report.version)), "{} is not in {info}", report.version);
            assert!(report.warnings.iter().any(|warning| warning.contains(policy)), "{:?}", report.warnings);
        }
        server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
        assert!(store.check_server().await.unwrap().warnings.is_empty());
    }
}
