//! Counts comparisons and lookups, in tests only. They show that the cost of a match does not grow with the rules.

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

/// Returns the number counted on this thread since the last call.
#[cfg(test)]
pub(crate) fn take() -> u64 {
    COUNT.with(|count| count.replace(0))
}
