//! Counts comparisons and lookups, in tests only.
//!
//! Tests use the count to show that the cost of matching a request does not grow with the number of rules.

#[cfg(test)]
thread_local! {
    static COUNT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts one comparison or lookup. Does nothing outside tests.
#[inline]
pub(crate) fn count() {
    #[cfg(test)]
    COUNT.with(|count| count.set(count.get() + 1));
}

/// Returns the number of comparisons and lookups that this thread has counted, and sets it to zero.
#[cfg(test)]
pub(crate) fn take() -> u64 {
    COUNT.with(|count| count.replace(0))
}
