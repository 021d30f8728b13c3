//! Selection of a port that stays free while its server is down.
//!
//! Binding port 0 would give a port from the range that the kernel also uses for outgoing connections. While a killed
//! server is down, an outgoing connection of another test could get that port, and the server could not start again. A
//! client that keeps connecting to the port could even get it as its own source port and be connected to itself. So
//! ports are chosen below that range, where only listeners are.

use std::net::{Ipv4Addr, TcpListener};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// The first port: above those of well-known services.
const FIRST: u32 = 10_240;
/// The number of ports.
///
/// The last one is more than 10,000 below 32,768, where outgoing ports start: a cluster node also listens on its
/// port + 10,000.
const COUNT: u32 = 22_700 - FIRST;

/// Returns a port of 127.0.0.1 below 22,700 on which no process listens at the moment. It is not reserved.
///
/// # Panics
/// If all of them are in use.
pub fn free() -> u16 {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Test processes run in parallel, so each starts its search elsewhere. 7,919 is prime and does not divide COUNT.
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
    fn a_port_with_a_listener_is_not_returned() {
        let given = free();
        assert!(u32::from(given) >= FIRST && u32::from(given) + 10_000 < 32_768);
        // Occupies the ports that would be returned next, as far as they are free.
        let listeners: Vec<TcpListener> =
            (1..=20).filter_map(|next| TcpListener::bind((Ipv4Addr::LOCALHOST, given + next)).ok()).collect();
        let taken: Vec<u16> = listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        for _ in 0..20 {
            let given = free();
            assert!(!taken.contains(&given), "{given} of {taken:?}");
        }
    }
}
