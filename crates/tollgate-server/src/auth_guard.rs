//! Slows down clients that guess the RESP password or the admin token.
//!
//! ```text
//!   failed attempts of an address   1 … 5    6      7      8     …    12      13 and more
//!   each further answer waits         0    10 ms  20 ms  40 ms  …   640 ms      1 s
//! ```
//!
//! **Every attempt of that address waits**, right or wrong: if only wrong ones did, an answer that does not come at once would
//! be a wrong one, and nobody would wait for it. A correct password still works; it is answered late for as long as the
//! penalty holds, which is 60 s from the last failure. Connections that are authenticated already are not affected.
//!
//! **Few wait at once.** The delay alone would let an address guess once a second on each of its connections. So at most 16
//! attempts of an address wait at the same time, which is 16 guesses a second in all. Further ones are refused without looking
//! at the password.
//!
//! **Bounded.** Addresses (networks of 64 bits in IPv6, where a client has that many to choose from) are hashed into a table of
//! fixed size. Two that meet in it share a delay of at most a second, which is not worth remembering whole addresses for.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::log_limit::LogLimit;

/// Failed attempts of an address that are answered at once: typing errors, a deployment with the old password.
const FREE_FAILURES: u32 = 5;
const FIRST_DELAY: Duration = Duration::from_millis(10);
const DELAY_MAX: Duration = Duration::from_secs(1);
/// Failures are forgotten when none was added for this long.
const PENALTY: Duration = Duration::from_secs(60);
/// Attempts of one address that wait at the same time.
const WAITING_MAX: u32 = 16;
/// 24 bytes each.
const SLOTS: usize = 4_096;

/// Delays authentication attempts by the failures of their address.
#[derive(Debug)]
pub(crate) struct AuthGuard {
    seeds: RandomState,
    slots: Mutex<Box<[Slot]>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    failures: u32,
    waiting: u32,
    failed_at: Option<Instant>,
}

/// The result of an authentication attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    Right,
    Wrong,
    /// Too many attempts of this address wait already; the secret was not looked at.
    Refused,
}

/// Counts the failed attempts at one listener, and logs some of them.
#[derive(Debug, Default)]
pub(crate) struct AuthFailures {
    wrong: AtomicU64,
    refused: AtomicU64,
    log: LogLimit,
}

impl AuthFailures {
    /// Returns how many attempts were wrong, and how many were refused unseen.
    pub(crate) fn read(&self) -> [u64; 2] {
        [&self.wrong, &self.refused].map(|count| count.load(Ordering::Relaxed))
    }

    fn add(&self, listener: &'static str, address: IpAddr, count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(unlogged) = self.log.admit() {
            tracing::warn!(listener, %address, unlogged, "authentication failed");
        }
    }
}

impl Default for AuthGuard {
    fn default() -> Self {
        AuthGuard { seeds: RandomState::new(), slots: Mutex::new(vec![Slot::default(); SLOTS].into()) }
    }
}

impl AuthGuard {
    /// Looks at a secret that a client at `address` gave, and returns when the answer may be sent.
    pub(crate) async fn attempt(
        &self,
        listener: &'static str,
        address: IpAddr,
        failures: &AuthFailures,
        is_right: impl FnOnce() -> bool,
    ) -> Attempt {
        let address = address.to_canonical();
        let slot = self.slot_of(address);
        let Some(waiting) = self.enter(slot) else {
            failures.add(listener, address, &failures.refused);
            return Attempt::Refused;
        };
        let is_right = is_right();
        if !is_right {
            failures.add(listener, address, &failures.wrong);
        }
        let delay = self.delay(slot, is_right);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        drop(waiting);
        if is_right { Attempt::Right } else { Attempt::Wrong }
    }

    fn slot_of(&self, address: IpAddr) -> usize {
        let network = match address {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        };
        self.seeds.hash_one((address.is_ipv4(), network)) as usize % SLOTS
    }

    /// Takes one of the slot's places for attempts that wait, until the value is dropped. `None` if all are taken.
    fn enter(&self, slot: usize) -> Option<Waiting<'_>> {
        let waiting = &mut self.slots.lock()[slot].waiting;
        if *waiting >= WAITING_MAX {
            return None;
        }
        *waiting += 1;
        Some(Waiting { guard: self, slot })
    }

    /// Counts a failure, and returns how long the answer waits.
    fn delay(&self, slot: usize, is_right: bool) -> Duration {
        let now = Instant::now();
        let slot = &mut self.slots.lock()[slot];
        if slot.failed_at.is_none_or(|failed_at| now - failed_at >= PENALTY) {
            slot.failures = 0;
        }
        if !is_right {
            slot.failures = slot.failures.saturating_add(1);
            slot.failed_at = Some(now);
        }
        match slot.failures.checked_sub(FREE_FAILURES + 1) {
            None => Duration::ZERO,
            Some(doublings) => DELAY_MAX.min(FIRST_DELAY * (1 << doublings.min(16))),
        }
    }
}

struct Waiting<'g> {
    guard: &'g AuthGuard,
    slot: usize,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.guard.slots.lock()[self.slot].waiting -= 1;
    }
}

/// The address of a connection whose socket does not tell it any more.
pub(crate) const UNKNOWN_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    async fn took(guard: &AuthGuard, address: &str, is_right: bool) -> (Attempt, Duration) {
        let began = Instant::now();
        let failures = AuthFailures::default();
        let attempt = guard.attempt("test", address.parse().unwrap(), &failures, || is_right).await;
        (attempt, began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn answers_slow_down_by_address_up_to_a_second_and_a_correct_secret_still_works() {
        let guard = AuthGuard::default();
        let mut delays_ms = Vec::new();
        for _ in 0..16 {
            let (attempt, delay) = took(&guard, "203.0.113.9", false).await;
            assert_eq!(attempt, Attempt::Wrong);
            delays_ms.push(delay.as_millis());
        }
        // tokio's timer counts in milliseconds, and rounds up.
        let expected = [0, 0, 0, 0, 0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000, 1_000];
        let is_near = |(took, expected): (&u128, u128)| (expected..=expected + 1).contains(took);
        assert!(delays_ms.iter().zip(expected).all(is_near), "{delays_ms:?}");
        let (attempt, delay) = took(&guard, "::ffff:203.0.113.9", true).await;
        assert_eq!(attempt, Attempt::Right, "the same address, written differently");
        assert!(delay >= DELAY_MAX, "{delay:?}");
        // A success takes nothing back: else a guesser who shares an address with a client would be forgiven all the time.
        assert!(took(&guard, "203.0.113.9", false).await.1 >= DELAY_MAX);
        assert_eq!(took(&guard, "198.51.100.7", false).await, (Attempt::Wrong, Duration::ZERO), "another address");
        tokio::time::advance(PENALTY).await;
        assert_eq!(took(&guard, "203.0.113.9", true).await, (Attempt::Right, Duration::ZERO));
        assert_eq!(took(&guard, "203.0.113.9", false).await, (Attempt::Wrong, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_of_64_bits_is_one_client() {
        let guard = AuthGuard::default();
        for host in 0..20 {
            took(&guard, &format!("2001:db8::{host:x}"), false).await;
        }
        assert!(took(&guard, "2001:db8::ffff:1", true).await.1 >= DELAY_MAX);
        assert_eq!(took(&guard, "2001:db8:0:1::1", true).await.1, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_guesses_no_faster_with_more_connections() {
        let (guard, failures) = (Arc::new(AuthGuard::default()), Arc::new(AuthFailures::default()));
        for _ in 0..20 {
            took(&guard, "203.0.113.9", false).await;
        }
        let began = Instant::now();
        let clients = (0..1_000).map(|_| {
            let (guard, failures) = (guard.clone(), failures.clone());
            tokio::spawn(async move {
                for _ in 0..1_000 {
                    if began.elapsed() >= Duration::from_secs(10) {
                        break;
                    }
                    let address = "203.0.113.9".parse().unwrap();
                    if guard.attempt("test", address, &failures, || false).await == Attempt::Refused {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.unwrap();
        }
        let [wrong, refused] = failures.read();
        assert!((100..=16 * 12).contains(&wrong), "{wrong} guesses in ten seconds");
        assert!(refused > 10_000, "{refused}");
        assert!(guard.slots.lock().iter().all(|slot| slot.waiting == 0), "every place is given back");
    }
}
