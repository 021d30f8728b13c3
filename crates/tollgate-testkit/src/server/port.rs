//! A port that stays ours while its server is down.
//!
//! The usual trick, binding port 0, gives a port from the range that the kernel also uses for outgoing connections.
//! While a killed server is down, any connection of any test may then be given that port and keep the server from
//! coming back; a client that keeps dialling it can even be given it as its own source and end up connected to
//! itself. So ports come from below that range, where only listeners go.

use std::net::{Ipv4Addr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// Above what well-known services use.
const FIRST: u32 = 10_240;
/// Below 32,768, where outgoing ports start, by 10,000: a cluster node listens there too.
const COUNT: u32 = 22_700 - FIRST;

/// A port of 127.0.0.1 on which nobody listens at this moment.
pub(super) fn free() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Test processes run side by side: each walks from a place of its own. 7,919 is prime and no divisor of COUNT.
    let first = process::id().wrapping_mul(7_919);
    (0..COUNT)
        .map(|_| FIRST + first.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % COUNT)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|&port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok())
        .expect("a free port on 127.0.0.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_on_which_somebody_listens_is_not_given() {
        let given = free();
        assert!(u32::from(given) >= FIRST && u32::from(given) + 10_000 < 32_768);
        // The ports that would be given next, as far as they can be had.
        let listeners: Vec<TcpListener> =
            (1..=20).filter_map(|next| TcpListener::bind((Ipv4Addr::LOCALHOST, given + next)).ok()).collect();
        let taken: Vec<u16> = listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        for _ in 0..20 {
            let given = free();
            assert!(!taken.contains(&given), "{given} of {taken:?}");
        }
    }
}
