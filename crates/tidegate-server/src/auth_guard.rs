//! Slows down clients that guess the RESP password, the HTTP token or the admin token.
//!
//! ```text
//!   failed attempts of an address   1 … 5    6      7      8     …    12      13 and more
//!   delay of each further answer      0    10 ms  20 ms  40 ms  …   640 ms      1 s
//! ```
//!
//! **Every attempt of that address waits**, right or wrong. If only wrong ones did, an attacker would take a missing
//! answer for a wrong one and not wait for it. A correct password still works; it is answered late until 60 s after the
//! last failure. Connections that are authenticated already are not affected.
//!
//! **Few wait at once.** The delay alone would let an address guess once a second on each of its connections. So at
//! most 16 attempts of an address wait at the same time, which is 16 guesses a second in all. Further ones are refused
//! without checking the password.
//!
//! **Bounded.** Addresses (in IPv6 /64 networks, because a client can choose the rest) are hashed into a table of fixed
//! size. Two addresses in one slot share a delay of at most a second, which does not justify storing whole addresses.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::log_limit::LogLimit;

/// The failed attempts of an address that are answered without delay: typing errors, a deployment with the old
/// password.
const FREE_FAILURES: u32 = 5;
const FIRST_DELAY: Duration = Duration::from_millis(10);
const DELAY_MAX: Duration = Duration::from_secs(1);
/// The time after the last failure for which failures count.
const PENALTY: Duration = Duration::from_secs(60);
/// The most attempts of one address that wait at the same time.
const WAITING_MAX: u32 = 16;
/// The size of the table, in slots of 24 bytes.
const SLOTS: usize = 4_096;

/// A guard against guessed secrets: delays authentication attempts by the recent failures of the client's address.
#[derive(Debug)]
pub(crate) struct AuthGuard {
    seeds: RandomState,
    slots: Mutex<Box<[AddressSlot]>>,
}

/// The recent attempts of all addresses that hash to one slot.
#[derive(Clone, Copy, Debug, Default)]
struct AddressSlot {
    failures: u32,
    /// The attempts whose answer is being delayed.
    waiting: u32,
    failed_at: Option<Instant>,
}

/// The result of an authentication attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// The secret is correct.
    Right,
    /// The secret is wrong.
    Wrong,
    /// Too many attempts of this address wait already. The secret was not checked.
    Refused,
}

/// The counters of failed attempts at one listener. A failure is logged unless one was logged in the last ten seconds.
#[derive(Debug, Default)]
pub(crate) struct AuthFailures {
    wrong: AtomicU64,
    refused: AtomicU64,
    log: LogLimit,
}

impl AuthFailures {
    /// Returns how many attempts had a wrong secret, and how many were refused without checking the secret.
    pub(crate) fn read(&self) -> [u64; 2] {
        [&self.wrong, &self.refused].map(|count| count.load(Ordering::Relaxed))
    }

    fn add(&self, listener: &'static str, address: IpAddr, count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = self.log.admit() {
            tracing::warn!(listener, %address, suppressed, "authentication failed");
        }
    }
}

impl Default for AuthGuard {
    fn default() -> Self {
        AuthGuard { seeds: RandomState::new(), slots: Mutex::new(vec![AddressSlot::default(); SLOTS].into()) }
    }
}

impl AuthGuard {
    /// Checks a secret by calling `is_right`, and returns the result after the delay for `address`.
    ///
    /// There is no delay up to five failures of the address, this attempt included. With the sixth it is 10 ms, doubled
    /// by each further failure up to 1 s. Failures are forgotten 60 s after the last one. A correct secret is delayed
    /// as well, and does not reset them. IPv6 addresses of one /64 network count as one address, and rarely two
    /// unrelated addresses do, because they are hashed.
    ///
    /// If 16 attempts of the address are waiting already, returns [`Attempt::Refused`] at once, without calling
    /// `is_right`. Wrong and refused attempts are counted in `failures`; some are logged with the name of `listener`.
    /// If the future is dropped during the delay, a failure stays counted.
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

    /// Returns whether an [`attempt`](Self::attempt) with the correct secret would be answered at once.
    ///
    /// That is so for up to five failures of `address`, and fewer than 16 attempts that wait. Also false if the failures
    /// are older than 60 s and no attempt was made since.
    pub(crate) fn is_immediate(&self, address: IpAddr) -> bool {
        let slot = self.slots.lock()[self.slot_of(address.to_canonical())];
        slot.failures <= FREE_FAILURES && slot.waiting < WAITING_MAX
    }

    fn slot_of(&self, address: IpAddr) -> usize {
        let network = match address {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        };
        self.seeds.hash_one((address.is_ipv4(), network)) as usize % SLOTS
    }

    /// Counts an attempt as waiting until the returned value is dropped.
    ///
    /// Returns `None` if 16 attempts of this slot are waiting already.
    fn enter(&self, slot: usize) -> Option<WaitingAttempt<'_>> {
        let waiting = &mut self.slots.lock()[slot].waiting;
        if *waiting >= WAITING_MAX {
            return None;
        }
        *waiting += 1;
        Some(WaitingAttempt { guard: self, slot })
    }

    /// Returns the delay before an attempt of this slot is answered. If `is_right` is false, counts a failure first.
    ///
    /// Forgets the failures of the slot if the last one is 60 s old.
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

/// A guard that counts an attempt as waiting until it is dropped.
struct WaitingAttempt<'g> {
    guard: &'g AuthGuard,
    slot: usize,
}

impl Drop for WaitingAttempt<'_> {
    fn drop(&mut self) {
        self.guard.slots.lock()[self.slot].waiting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// The longest delay. tokio's timer counts in milliseconds, and rounds up.
    const LONGEST: std::ops::RangeInclusive<Duration> = DELAY_MAX..=Duration::from_millis(1_001);

    /// Makes an attempt, and returns its result and how long it took.
    async fn attempt(guard: &AuthGuard, address: &str, is_right: bool) -> (Attempt, Duration) {
        let began = Instant::now();
        let failures = AuthFailures::default();
        let result = guard.attempt("test", address.parse().unwrap(), &failures, || is_right).await;
        (result, began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_delayed_by_address_up_to_a_second_and_a_correct_secret_still_works() {
        let guard = AuthGuard::default();
        let mut delays_ms = Vec::new();
        for _ in 0..16 {
            let (result, delay) = attempt(&guard, "203.0.113.9", false).await;
            assert_eq!(result, Attempt::Wrong);
            delays_ms.push(delay.as_millis());
        }
        let expected = [0, 0, 0, 0, 0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000, 1_000, 1_000];
        let is_near = |(took, expected): (&u128, u128)| (expected..=expected + 1).contains(took);
        assert!(delays_ms.iter().zip(expected).all(is_near), "{delays_ms:?}");
        let (result, delay) = attempt(&guard, "::ffff:203.0.113.9", true).await;
        assert_eq!(result, Attempt::Right, "the same address, written differently");
        assert!(LONGEST.contains(&delay), "{delay:?}");
        // A success does not reset the failures: else a client at the same address would reset those of an attacker.
        assert!(LONGEST.contains(&attempt(&guard, "203.0.113.9", false).await.1));
        assert_eq!(attempt(&guard, "198.51.100.7", false).await, (Attempt::Wrong, Duration::ZERO), "another address");
        tokio::time::advance(PENALTY).await;
        assert_eq!(attempt(&guard, "203.0.113.9", true).await, (Attempt::Right, Duration::ZERO));
        assert_eq!(attempt(&guard, "203.0.113.9", false).await, (Attempt::Wrong, Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn an_ipv6_network_of_64_bits_counts_as_one_address() {
        let guard = AuthGuard::default();
        for host in 0..20 {
            attempt(&guard, &format!("2001:db8::{host:x}"), false).await;
        }
        assert!(LONGEST.contains(&attempt(&guard, "2001:db8::ffff:1", true).await.1));
        assert_eq!(attempt(&guard, "2001:db8:0:1::1", true).await.1, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn more_connections_of_an_address_do_not_allow_more_guesses() {
        let (guard, failures) = (Arc::new(AuthGuard::default()), Arc::new(AuthFailures::default()));
        for _ in 0..20 {
            attempt(&guard, "203.0.113.9", false).await;
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
        assert!(guard.slots.lock().iter().all(|slot| slot.waiting == 0), "no attempt is left waiting");
    }
}
