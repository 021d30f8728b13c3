//! Tests of which logins are counted, with a manual clock.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::Request;
use tidegate::config::Config;
use tidegate::engine::Engine;
use tidegate::{Limiter, ManualClock, Timestamp};
use tower::ServiceExt;

use super::{CONFIGURATION, app};

const RIGHT: u16 = 204;
const WRONG: u16 = 401;
const REFUSED: u16 = 429;

/// The origin of a login: address, user and device.
#[derive(Clone, Copy)]
struct From {
    address: [u8; 4],
    user: &'static str,
    device: &'static str,
}

const ADA: From = From { address: [203, 0, 113, 9], user: "ada", device: "laptop" };

struct Service {
    app: Router,
    clock: Arc<ManualClock>,
}

impl Service {
    fn new() -> Service {
        let loaded = Config::load(CONFIGURATION).unwrap();
        assert!(loaded.findings.is_empty(), "{:?}", loaded.findings);
        let clock = Arc::new(ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000)));
        let limiter = Limiter::builder().clock(clock.clone()).build();
        let engine = Engine::on_clock(limiter, loaded.rules, Vec::new(), clock.clone());
        Service { app: app(engine), clock }
    }

    async fn login(&self, from: From, password: &str) -> u16 {
        let request = Request::post("/login")
            .header("x-user", from.user)
            .header("cookie", format!("theme=dark; device={}", from.device))
            .extension(ConnectInfo(SocketAddr::from((Ipv4Addr::from(from.address), 50_000))))
            .body(Body::from(password.to_owned()));
        self.app.clone().oneshot(request.unwrap()).await.unwrap().status().as_u16()
    }

    /// Makes several login attempts and returns their statuses.
    async fn logins<const N: usize>(&self, from: From, passwords: [&str; N]) -> [u16; N] {
        let mut statuses = [0; N];
        for (status, password) in statuses.iter_mut().zip(passwords) {
            *status = self.login(from, password).await;
        }
        statuses
    }
}

#[tokio::test]
async fn right_passwords_are_never_counted() {
    let service = Service::new();
    for _ in 0..1_000 {
        assert_eq!(service.login(ADA, "engine").await, RIGHT);
    }
    assert_eq!(service.logins(ADA, ["wrong"; 6]).await, [WRONG, WRONG, WRONG, WRONG, WRONG, REFUSED]);
}

#[tokio::test]
async fn after_too_many_wrong_passwords_the_right_one_is_denied_too() {
    let service = Service::new();
    assert_eq!(service.logins(ADA, ["wrong"; 7]).await, [WRONG, WRONG, WRONG, WRONG, WRONG, REFUSED, REFUSED]);
    assert_eq!(service.login(ADA, "engine").await, REFUSED, "else the status would reveal a right guess");
    service.clock.advance(Duration::from_secs(60));
    assert_eq!(service.login(ADA, "engine").await, RIGHT, "a minute later");
}

#[tokio::test]
async fn a_success_refunds_no_earlier_failures() {
    let service = Service::new();
    let passwords = ["wrong", "wrong", "engine", "wrong", "engine", "wrong", "engine", "wrong", "engine"];
    let statuses = [WRONG, WRONG, RIGHT, WRONG, RIGHT, WRONG, RIGHT, WRONG, REFUSED];
    assert_eq!(service.logins(ADA, passwords).await, statuses);
}

#[tokio::test]
async fn another_user_device_or_address_is_counted_separately() {
    let service = Service::new();
    service.logins(ADA, ["wrong"; 5]).await;
    assert_eq!(service.login(ADA, "engine").await, REFUSED);
    assert_eq!(service.login(From { user: "grace", ..ADA }, "compiler").await, RIGHT);
    assert_eq!(service.login(From { device: "phone", ..ADA }, "engine").await, RIGHT);
    assert_eq!(service.login(From { address: [203, 0, 113, 10], ..ADA }, "engine").await, RIGHT);
}

#[tokio::test]
async fn guesses_with_new_users_and_devices_are_limited_by_address() {
    const USERS: [&str; 10] = ["ada", "ben", "cem", "dan", "eva", "fay", "gil", "hal", "ida", "jan"];
    const DEVICES: [&str; 4] = ["one", "two", "three", "four"];
    let service = Service::new();
    let guesses = USERS.iter().flat_map(|user| DEVICES.iter().map(|device| From { user, device, ..ADA }));
    for (n, guess) in guesses.enumerate() {
        assert_eq!(service.login(guess, "wrong").await, if n < 30 { WRONG } else { REFUSED }, "guess {n}");
    }
    let elsewhere = From { address: [198, 51, 100, 7], ..ADA };
    assert_eq!(service.login(elsewhere, "engine").await, RIGHT, "the user can log in from another address");
}
