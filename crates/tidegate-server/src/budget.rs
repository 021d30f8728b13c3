//! A budget that many connections share, in which a new reservation evicts the oldest one.
//!
//! Two things are bounded this way: the bytes that a listener holds of requests that are not complete, and the
//! connections of the admin listener. In both cases, rejecting the new reservation would let an attacker lock out all
//! other clients by keeping what it has: a half-sent body, a silent connection. An honest client needs its reservation
//! for milliseconds. So the oldest reservation is the one that is most likely not honest, and to evict an honest one an
//! attacker has to fill the whole budget in the time that one request takes to arrive.
//!
//! The reservation of a connection that is being served is *protected* and is never evicted. If all are protected, the
//! new reservation is rejected.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker, ready};

use bytes::BytesMut;
use parking_lot::Mutex;

use crate::listeners::io::READ_BYTES;

/// An amount (of bytes, or of connection slots) from which reservations are taken.
///
/// If too little is left for a new reservation, the oldest ones are evicted.
#[derive(Debug)]
pub(crate) struct EvictingBudget {
    max: usize,
    /// Counts evicted reservations. Several budgets may share it.
    evictions: Arc<AtomicU64>,
    state: Mutex<EvictingBudgetState>,
}

#[derive(Debug, Default)]
struct EvictingBudgetState {
    /// The sum of all reservations, including evicted ones that are not given back yet.
    used: usize,
    /// The part of `used` that belongs to evicted reservations.
    evicted: usize,
    /// The part of `used` that belongs to protected reservations.
    protected: usize,
    next_id: u64,
    /// Ordered by age, oldest first.
    holders: BTreeMap<u64, Holder>,
    /// The tasks that wait until something is given back.
    waiting: Vec<Waker>,
}

#[derive(Debug)]
struct Holder {
    amount: usize,
    status: HolderStatus,
    /// The task to wake when the reservation is evicted.
    waker: Option<Waker>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HolderStatus {
    Evictable,
    Protected,
    Evicted,
}

impl EvictingBudget {
    /// Creates a budget of `max` in all. Each eviction adds one to `evictions`.
    pub(crate) fn new(max: usize, evictions: Arc<AtomicU64>) -> Arc<EvictingBudget> {
        Arc::new(EvictingBudget { max, evictions, state: Mutex::default() })
    }

    /// Reserves `amount`, if necessary by evicting the oldest reservations that are not protected.
    ///
    /// Waits until the holders of evicted reservations drop them. If the future is dropped meanwhile, nothing is
    /// reserved, but the evictions stay.
    ///
    /// Returns `None` if `amount` does not fit beside the protected reservations, or if this reservation is itself
    /// evicted while it waits.
    pub(crate) async fn reserve(self: &Arc<EvictingBudget>, amount: usize) -> Option<Reservation> {
        let reservation = self.enter();
        poll_fn(|cx| reservation.poll_resize(cx, amount)).await.then_some(reservation)
    }

    /// Evicts the oldest reservation that is neither protected nor evicted already, if there is one.
    ///
    /// Does nothing if there is at most one reservation in all. Does not wait for its holder.
    pub(crate) fn evict_oldest(&self) {
        let mut state = self.state.lock();
        if state.holders.len() > 1 {
            self.evict(&mut state);
        }
    }

    /// Adds a reservation of amount zero, which is the youngest.
    fn enter(self: &Arc<EvictingBudget>) -> Reservation {
        let id = self.state.lock().add(Holder { amount: 0, status: HolderStatus::Evictable, waker: None });
        Reservation { budget: self.clone(), id: AtomicU64::new(id) }
    }

    /// Evicts the oldest reservations until `more` fits as soon as their holders have dropped them.
    ///
    /// The reservation that needs the room may be among them. Returns false, and evicts none, if `more` does not fit
    /// beside the protected reservations.
    fn make_room(&self, state: &mut EvictingBudgetState, more: usize) -> bool {
        if state.protected + more > self.max {
            return false;
        }
        while state.used - state.evicted + more > self.max {
            if !self.evict(state) {
                return false;
            }
        }
        true
    }

    /// Evicts the oldest evictable reservation: notifies its holder and counts the eviction.
    ///
    /// Returns false if there is none.
    fn evict(&self, state: &mut EvictingBudgetState) -> bool {
        let Some(holder) = state.holders.values_mut().find(|holder| holder.status == HolderStatus::Evictable) else {
            return false;
        };
        holder.status = HolderStatus::Evicted;
        holder.waker.take().into_iter().for_each(Waker::wake);
        state.evicted += holder.amount;
        // The evicted reservation may be waiting itself.
        state.wake();
        self.evictions.fetch_add(1, Ordering::Relaxed);
        true
    }
}

impl EvictingBudgetState {
    fn add(&mut self, holder: Holder) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.insert(id, holder);
        id
    }

    fn insert(&mut self, id: u64, holder: Holder) {
        self.used += holder.amount;
        if let Some(total) = self.total_of(holder.status) {
            *total += holder.amount;
        }
        self.holders.insert(id, holder);
    }

    fn remove(&mut self, id: u64) -> Option<Holder> {
        let holder = self.holders.remove(&id)?;
        self.used -= holder.amount;
        if let Some(total) = self.total_of(holder.status) {
            *total -= holder.amount;
        }
        Some(holder)
    }

    /// Returns the sum of all amounts with this status, for `Protected` and `Evicted`.
    ///
    /// `None` for `Evictable`, which has none.
    fn total_of(&mut self, status: HolderStatus) -> Option<&mut usize> {
        match status {
            HolderStatus::Evictable => None,
            HolderStatus::Protected => Some(&mut self.protected),
            HolderStatus::Evicted => Some(&mut self.evicted),
        }
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

/// An amount taken from an [`EvictingBudget`], given back when this value is dropped.
///
/// Eviction only notifies the holder, which is expected to drop the reservation. Until then its amount stays in use.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<EvictingBudget>,
    id: AtomicU64,
}

impl Reservation {
    /// Changes the reserved amount; the age stays the same. Ready with `true` if the new amount is reserved.
    ///
    /// Ready with `false` if there is no room for it or this reservation is evicted; the amount is then unchanged.
    /// Pending until the reservations that it evicts are given back.
    fn poll_resize(&self, cx: &mut Context<'_>, amount: usize) -> Poll<bool> {
        let (mut state, id) = (self.budget.state.lock(), self.id());
        let Some(holder) = state.holders.get(&id) else { return Poll::Ready(false) };
        let more = amount.saturating_sub(holder.amount);
        if holder.status == HolderStatus::Evicted || !self.budget.make_room(&mut state, more) {
            return Poll::Ready(false);
        }
        if state.used + more > self.budget.max {
            // Making room may have evicted this reservation.
            if state.holders.get(&id).is_some_and(|holder| holder.status == HolderStatus::Evicted) {
                return Poll::Ready(false);
            }
            state.waiting.push(cx.waker().clone());
            return Poll::Pending;
        }
        if let Some(holder) = state.remove(id) {
            let is_less = amount < holder.amount;
            state.insert(id, Holder { amount, ..holder });
            if is_less {
                state.wake();
            }
        }
        Poll::Ready(true)
    }

    /// Keeps this reservation from being evicted until [`unprotect`](Self::unprotect), and makes it the youngest.
    ///
    /// An evicted one stays evicted. Calls do not nest: one `unprotect` ends the protection.
    pub(crate) fn protect(&self) {
        self.become_youngest(HolderStatus::Protected);
    }

    /// Allows this reservation to be evicted again, and makes it the youngest. An evicted one stays evicted.
    pub(crate) fn unprotect(&self) {
        self.become_youngest(HolderStatus::Evictable);
    }

    fn become_youngest(&self, status: HolderStatus) {
        let mut state = self.budget.state.lock();
        if let Some(holder) = state.remove(self.id()) {
            let status = if holder.status == HolderStatus::Evicted { HolderStatus::Evicted } else { status };
            self.id.store(state.add(Holder { status, ..holder }), Ordering::Relaxed);
        }
    }

    /// Completes when this reservation is evicted, at once if it is evicted already.
    ///
    /// Only one task may wait for it.
    pub(crate) async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// Ready when this reservation is evicted. Otherwise, the task that called this last is woken by the eviction.
    fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.budget.state.lock().holders.get_mut(&self.id()) {
            Some(Holder { status: HolderStatus::Evictable | HolderStatus::Protected, waker, .. }) => {
                *waker = Some(cx.waker().clone());
                Poll::Pending
            }
            Some(Holder { status: HolderStatus::Evicted, .. }) | None => Poll::Ready(()),
        }
    }

    /// Returns whether this reservation is evicted, so that its holder should drop it.
    pub(crate) fn is_evicted(&self) -> bool {
        let state = self.budget.state.lock();
        state.holders.get(&self.id()).is_some_and(|holder| holder.status == HolderStatus::Evicted)
    }

    fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut state = self.budget.state.lock();
        state.remove(self.id());
        state.wake();
    }
}

/// The bytes of an unfinished request that need no reservation. A typical request has a few hundred.
const SMALL_BYTES: usize = 4 * 1024;

/// The account of the bytes that one connection holds of an incomplete request.
///
/// Above 4 KiB they are reserved in a budget that the connections of a listener share.
#[derive(Debug)]
pub(crate) struct Receiving {
    budget: Arc<EvictingBudget>,
    reservation: Option<Reservation>,
}

impl Receiving {
    /// Creates an account of zero bytes.
    pub(crate) fn new(budget: Arc<EvictingBudget>) -> Receiving {
        Receiving { budget, reservation: None }
    }

    /// Sets the account to `bytes` in all (not in addition), and waits until there is room for them.
    ///
    /// May evict older reservations of other connections. Up to 4 KiB always fit, and need no reservation. Returns
    /// false if there is no room or the reservation was evicted; the caller must then drop the request. If the future
    /// is dropped while it waits, the account keeps its former amount.
    pub(crate) async fn hold(&mut self, bytes: usize) -> bool {
        if bytes > SMALL_BYTES {
            // A client that sends as fast as it is read would otherwise delay the other connections of this thread.
            tokio::task::yield_now().await;
        }
        poll_fn(|cx| self.poll_hold(cx, bytes)).await
    }

    /// Sets the account to the memory of `buffer`, which contains the beginning of a request.
    ///
    /// That is its length up to 4 KiB. Beyond, it is its capacity, which is raised first if there is no room for the
    /// next read; so no memory is allocated that is not accounted for. This copies the bytes to a larger buffer.
    ///
    /// `announced` is the length of the whole request, or any number up to the length of the buffer if it is unknown.
    /// Returns false in the cases of [`hold`](Self::hold); the buffer is then unchanged.
    pub(crate) async fn hold_buffer(&mut self, buffer: &mut BytesMut, announced: usize) -> bool {
        let length = buffer.len();
        if length <= SMALL_BYTES {
            return self.hold(length).await;
        }
        // The announced length is trusted up to four times of what has arrived. In smaller steps a growing buffer would
        // leave freed blocks of many sizes behind, which only buffers of the same size can reuse.
        let most = 4 * length.max(READ_BYTES);
        let needed = if announced > length { announced.min(most) } else { most };
        let is_enough = buffer.capacity() >= needed.min(length + READ_BYTES);
        let capacity = if is_enough { buffer.capacity() } else { needed };
        if !self.hold(capacity).await {
            return false;
        }
        if !is_enough {
            let mut larger = BytesMut::with_capacity(capacity);
            larger.extend_from_slice(buffer);
            *buffer = larger;
        }
        true
    }

    /// Sets the account to `bytes` in all.
    ///
    /// Ready with `true` once there is room for them, and with `false` if there is no room or the reservation was
    /// evicted; the caller must then drop the request.
    pub(crate) fn poll_hold(&mut self, cx: &mut Context<'_>, bytes: usize) -> Poll<bool> {
        if bytes <= SMALL_BYTES {
            self.reservation = None;
            return Poll::Ready(true);
        }
        self.reservation.get_or_insert_with(|| self.budget.enter()).poll_resize(cx, bytes)
    }

    /// Calls `read`, which polls a stream for more of the request, once there is room for the `bytes` received so far.
    ///
    /// Ready with `QuotaExceeded` if there is no room, or the reservation is evicted while `read` is pending.
    pub(crate) fn poll_receive<T>(
        &mut self,
        cx: &mut Context<'_>,
        bytes: usize,
        read: impl FnOnce(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let evicted = || Poll::Ready(Err(io::ErrorKind::QuotaExceeded.into()));
        if !ready!(self.poll_hold(cx, bytes)) {
            return evicted();
        }
        match read(cx) {
            Poll::Pending if self.poll_evicted(cx).is_ready() => evicted(),
            read => read,
        }
    }

    /// Sets the account to zero, and gives the reservation back to the budget.
    pub(crate) fn release(&mut self) {
        self.reservation = None;
    }

    /// Completes when the reservation is evicted. Never completes if there is none, because 4 KiB or less are held.
    pub(crate) async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// Ready when the reservation is evicted. Never ready if there is none.
    fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.reservation.as_ref().map_or(Poll::Pending, |reservation| reservation.poll_evicted(cx))
    }

    /// Returns whether the reservation is evicted, so that the caller must drop the request. False if there is none.
    pub(crate) fn is_evicted(&self) -> bool {
        self.reservation.as_ref().is_some_and(Reservation::is_evicted)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    /// Polls a future once.
    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    fn resize(reservation: &Reservation, amount: usize) -> Option<bool> {
        now(poll_fn(|cx| reservation.poll_resize(cx, amount)))
    }

    /// Reserves without waiting.
    fn reserve(budget: &Arc<EvictingBudget>, amount: usize) -> Reservation {
        now(budget.reserve(amount)).flatten().unwrap()
    }

    #[test]
    fn the_oldest_reservation_is_evicted_and_a_protected_one_is_not() {
        let evictions = Arc::new(AtomicU64::new(0));
        let budget = EvictingBudget::new(10, evictions.clone());
        let [first, second, third] = [4, 4, 2].map(|amount| reserve(&budget, amount));
        first.protect();
        let mut fourth = pin!(budget.reserve(5));
        assert!(now(fourth.as_mut()).is_none(), "nothing is given back yet");
        assert_eq!([&first, &second, &third].map(Reservation::is_evicted), [false, true, true]);
        assert_eq!([&first, &second].map(|holder| now(holder.evicted())), [None, Some(())]);
        assert_eq!(resize(&second, 1), Some(false), "an evicted reservation stays evicted");
        drop(second);
        assert!(now(fourth.as_mut()).is_none(), "5 of 10 are still in use");
        drop(third);
        let fourth = now(fourth.as_mut()).flatten().unwrap();
        assert_eq!(evictions.load(Ordering::Relaxed), 2, "no further reservation is evicted while it waits");

        assert!(now(budget.reserve(7)).unwrap().is_none(), "4 are protected");
        assert!(!fourth.is_evicted(), "nothing is evicted if that makes not enough room");
        assert_eq!(resize(&fourth, 6), Some(true));
        assert_eq!(resize(&fourth, 7), Some(false), "there is no other reservation to evict");
        first.unprotect();
        assert!(now(budget.reserve(10)).is_none());
        assert!(first.is_evicted() && fourth.is_evicted());
    }

    #[test]
    fn a_resized_reservation_keeps_its_age_and_an_unprotected_one_becomes_the_youngest() {
        let budget = EvictingBudget::new(6, Arc::default());
        let [first, second] = [2, 2].map(|amount| reserve(&budget, amount));
        assert_eq!(resize(&first, 3), Some(true));
        assert!(now(budget.reserve(2)).is_none());
        assert_eq!([&first, &second].map(Reservation::is_evicted), [true, false]);
        drop(first);
        let third = reserve(&budget, 2);
        second.protect();
        second.unprotect();
        assert!(now(budget.reserve(4)).is_none());
        assert_eq!([&second, &third].map(Reservation::is_evicted), [false, true]);
    }

    #[test]
    fn small_requests_need_no_reservation() {
        let budget = EvictingBudget::new(3 * SMALL_BYTES, Arc::default());
        let mut all: Vec<Receiving> = (0..5).map(|_| Receiving::new(budget.clone())).collect();
        let hold = |receiving: &mut Receiving, bytes: usize| now(poll_fn(|cx| receiving.poll_hold(cx, bytes)));
        assert!(all.iter_mut().all(|receiving| hold(receiving, SMALL_BYTES) == Some(true)));
        assert_eq!(hold(&mut all[0], 2 * SMALL_BYTES), Some(true));
        assert_eq!(hold(&mut all[1], 2 * SMALL_BYTES), None, "the older large one is evicted");
        assert!(all[0].is_evicted());
        assert_eq!(hold(&mut all[0], 2 * SMALL_BYTES), Some(false));
        assert!(
            all[2..].iter_mut().all(|receiving| hold(receiving, SMALL_BYTES) == Some(true)),
            "small ones are not affected"
        );
        all[0].release();
        assert_eq!(hold(&mut all[1], 2 * SMALL_BYTES), Some(true));
        assert_eq!(hold(&mut all[2], 4 * SMALL_BYTES), Some(false), "more than the budget");
        assert!(!all[1].is_evicted());
    }
}
