//! Counts the comparisons of a match, in tests only: that a thousand rules do not cost a thousand is a promise.

#[cfg(test)]
thread_local! {
    static COUNT: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// One comparison or lookup.
#[inline]
pub(crate) fn count() {
    #[cfg(test)]
    COUNT.with(|count| count.set(count.get() + 1));
}

/// How many since last asked, on this thread.
#[cfg(test)]
pub(crate) fn take() -> u64 {
    COUNT.with(|count| count.replace(0))
}
