//! `TIDEGATE.WAIT` on two instances and one Redis: first come, first served, and never over the limit.
//!
//! Each wait has a second limit, a journal that is far from used up. Redis keeps a time for each unit of it, so after the run
//! it has the store's time of every admission. The units left in a reply say which of these times is that of the reply.

use std::io::Write;
use std::net::Shutdown;
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate::{Decision, Limit, LimitStatus, Source, Timestamp, Wait};
use tidegate_testkit::history::{Bounds, History};
use tidegate_testkit::server::{Connection, Reply, Server};

use crate::instances::start_with_long_deadline;
use tidegate_testkit::program::Serving;

const LIMIT: &str = "20/s";
const JOURNAL_QUOTA: i64 = 500;
const CLIENTS_PER_INSTANCE: usize = 110;

/// A client that waits.
struct Waiter {
    connection: Connection,
    sent_us: u64,
    /// Whether it disconnects while it waits.
    leaves: bool,
}

impl Waiter {
    /// Sends a wait to an instance with one thread, and returns when it is in the queue.
    ///
    /// The reply to the PING is sent just before the wait begins, and a single thread does nothing between the two.
    fn new(serving: &Serving, journal: &str, leaves: bool) -> Waiter {
        let mut connection = serving.connect();
        let commands = format!("PING\r\nTIDEGATE.WAIT hooks {LIMIT} {journal} {JOURNAL_QUOTA}/h TIMEOUT 60000\r\n");
        let sent_us = now_us();
        connection.try_clone_stream().unwrap().write_all(commands.as_bytes()).unwrap();
        assert_eq!(connection.receive().unwrap(), Reply::Simple("PONG".to_owned()));
        if leaves {
            connection.try_clone_stream().unwrap().shutdown(Shutdown::Write).unwrap();
        }
        Waiter { connection, sent_us, leaves }
    }

    /// Returns the number of this admission in the journal and the units left of the limit. `None` if the client left
    /// before it was admitted.
    fn receive(&mut self) -> Option<(usize, u32)> {
        let reply = match self.connection.receive() {
            Ok(reply) => reply,
            Err(error) => {
                assert!(self.leaves, "the reply is lost: {error}");
                return None;
            }
        };
        let [allowed, limit, journal] = reply.items() else { panic!("{reply:?}") };
        assert_eq!(allowed.integer(), 1, "{reply:?}");
        let place = JOURNAL_QUOTA - 1 - journal.items()[2].integer();
        Some((place.try_into().unwrap(), limit.items()[2].integer().try_into().unwrap()))
    }
}

#[test]
fn clients_of_two_instances_are_admitted_in_order_and_never_over_the_limit() {
    let redis = Server::redis();
    let (_dir, instances) = start_with_long_deadline(&redis, 2, &["--threads", "1"]);
    let journals = ["journal-0", "journal-1"];
    let mut waiters = [Vec::new(), Vec::new()];
    for n in 0..CLIENTS_PER_INSTANCE {
        for (instance, waiters) in waiters.iter_mut().enumerate() {
            // A client at the end of the queue leaves long before its turn.
            let leaves = n > CLIENTS_PER_INSTANCE / 2 && n % 5 == 0;
            waiters.push(Waiter::new(&instances[instance], journals[instance], leaves));
        }
    }
    let limit: Limit = LIMIT.parse().unwrap();
    let receive_all = |(instance, waiters): (usize, Vec<Waiter>)| {
        let mut history = History::new([limit]);
        let mut received = Vec::new();
        for mut waiter in waiters {
            let Some((place, remaining)) = waiter.receive() else { continue };
            assert_eq!(place, received.len(), "first come, first served on instance {instance}");
            received.push((waiter.sent_us, now_us(), remaining));
        }
        // Every unit of the journal has its reply, so a client that left was not charged.
        let key = format!("tidegate:tg2:{{{}}}:sliding:3600000000", journals[instance]);
        let times = redis.command(&["LRANGE", &key, "0", "-1"]);
        assert_eq!(times.items().len(), received.len(), "instance {instance}");
        for (time, (sent_us, received_us, remaining)) in times.items().iter().zip(received) {
            let at = Timestamp::from_micros(time.text().parse().unwrap());
            history.note(&[0], sent_us, received_us, &admission(limit, at, remaining));
        }
        history
    };
    let histories: Vec<History> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            waiters.into_iter().enumerate().map(|waiters| scope.spawn(|| receive_all(waiters))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut all = History::new([limit]);
    histories.into_iter().for_each(|history| all.merge(history));
    let report = all.verify(Bounds::default());
    report.expect_clean();
    let leaving = (CLIENTS_PER_INSTANCE / 2 + 1..CLIENTS_PER_INSTANCE).filter(|n| n % 5 == 0).count();
    let staying = 2 * (CLIENTS_PER_INSTANCE - leaving);
    assert!((staying as u64..2 * CLIENTS_PER_INSTANCE as u64).contains(&report.checks), "{report}");
}

/// Returns the wall time in microseconds. It is also the time of Redis, which is on this machine, so a correction of
/// the machine's clock moves both.
#[allow(clippy::disallowed_methods)] // compared with the clock of Redis
fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros().try_into().unwrap()
}

/// Returns an admission of one unit at this time. Only the fields that the history checker reads of it are known.
fn admission(limit: Limit, at: Timestamp, remaining: u32) -> Decision {
    let status = LimitStatus {
        allowed: true,
        cost: 1,
        quota: limit.quota(),
        remaining,
        retry_after: Wait::ZERO,
        next_after: Wait::ZERO,
        reset_after: Wait::from_micros(limit.window_us()),
        late_us: 0,
        refunded_before: 0,
    };
    Decision::new(at, Source::Store, std::iter::once(status).collect())
}
