//! Limits the slots of each client address, so that one client cannot take all connections of a listener, or all requests
//! of an upstream.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate::identity::{AddressKey, AddressPrefixes};

/// The number of slots that each client address has taken. An IPv6 address is counted by its /64 network.
///
/// An address without slots takes no memory.
#[derive(Debug, Default)]
pub(crate) struct AddressSlots {
    open: Mutex<HashMap<AddressKey, usize>>,
}

impl AddressSlots {
    /// Takes a slot for the client at `address`. The slot is free again when it is dropped.
    ///
    /// Returns `None` if the address has `max` slots or more.
    pub(crate) fn take(self: &Arc<Self>, address: IpAddr, max: usize) -> Option<AddressSlot> {
        let key = AddressPrefixes::default().key(address);
        let mut open = self.open.lock();
        let count = open.get(&key).copied().unwrap_or(0);
        if count >= max {
            return None;
        }
        open.insert(key, count + 1);
        Some(AddressSlot { key, slots: self.clone() })
    }
}

/// The slot of one connection or request.
#[derive(Debug)]
pub(crate) struct AddressSlot {
    key: AddressKey,
    slots: Arc<AddressSlots>,
}

impl Drop for AddressSlot {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = self.slots.open.lock().entry(self.key) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_its_own_slots_and_gets_them_back() {
        let slots = Arc::new(AddressSlots::default());
        let take = |address: &str| slots.take(address.parse().unwrap(), 2);
        let held = [take("203.0.113.9"), take("::ffff:203.0.113.9"), take("2001:db8::1"), take("2001:db8::2")];
        assert!(held.iter().all(Option::is_some));
        assert!(take("203.0.113.9").is_none() && take("2001:db8::3").is_none(), "both have two connections");
        assert!(take("203.0.113.10").is_some() && take("2001:db8:0:1::1").is_some(), "other clients");
        drop(held);
        assert!(slots.open.lock().is_empty());
        assert!(take("203.0.113.9").is_some());
    }
}
