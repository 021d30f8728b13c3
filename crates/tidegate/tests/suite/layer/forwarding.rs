//! Neither the order nor the letter case of headers changes the address that is counted.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tidegate::Limiter;
use tidegate::engine::Engine;
use tidegate::layer::RateLimitLayer;
use tidegate_testkit::conformance::Random;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::site::rules;

const RULES: &str = r#"
trusted_proxies = ["127.0.0.0/8"]

[[rules]]
name = "all"
by = ["ip"]
limits = ["2/h"]
"#;

async fn status(address: SocketAddr, headers: &str) -> u16 {
    let mut connection = TcpStream::connect(address).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await.unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn order_and_case_of_headers_do_not_change_the_address() {
    let layer = RateLimitLayer::axum(Engine::new(Limiter::memory(), rules(RULES)));
    let app = Router::new().route("/", get(|| async {})).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });

    let mut random = Random::new(1);
    let mut admitted = 0;
    for number in 0..200 {
        let forgery = format!("6.6.6.{number}");
        // Headers forged by the client, and the header of the proxy somewhere after the client's own.
        let mut lines = vec![
            ("x-real-ip", forgery.clone()),
            ("forwarded", format!("for={forgery}")),
            ("cf-connecting-ip", forgery.clone()),
        ];
        for own in [forgery, "198.51.100.7".to_owned()] {
            let after = lines.iter().rposition(|(name, _)| *name == "x-forwarded-for").map_or(0, |place| place + 1);
            let place = after + random.below((lines.len() - after + 1) as u64) as usize;
            lines.insert(place, ("x-forwarded-for", own));
        }
        let with_random_case = |name: &str, random: &mut Random| -> String {
            name.chars().map(|letter| if random.below(2) == 0 { letter.to_ascii_uppercase() } else { letter }).collect()
        };
        let headers: String =
            lines.iter().map(|(name, value)| format!("{}: {value}\r\n", with_random_case(name, &mut random))).collect();
        admitted += u32::from(status(address, &headers).await == 200);
    }
    assert_eq!(admitted, 2);
    assert_eq!(status(address, "X-Forwarded-For: 198.51.100.8\r\n").await, 200, "another client");
}
