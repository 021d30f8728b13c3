//! Sequences of requests, generated before a measurement so that only checks are timed.
//!
//! The requests lie in memory in the order in which they are made, each with a string of its own. In a service the key
//! has just been read from a request, so its bytes are in the cache and its counter usually is not.

/// The number of distinct keys in [`uniform`] and [`zipf`].
pub const KEYS: usize = 1_000_000;

/// The key of one request, in both forms that contestants take.
#[derive(Clone, Debug)]
pub struct Request {
    /// The key as text, as in a service.
    pub text: String,
    /// The key as a number, for the variant of governor with integer keys.
    pub number: u64,
}

/// Returns a request with the key `user:{number}`, padded with zeros to at least six digits.
pub fn request(number: usize) -> Request {
    Request { text: format!("user:{number:06}"), number: number as u64 }
}

/// Returns `count` requests with the same key.
pub fn hot(count: usize) -> Vec<Request> {
    vec![request(42); count]
}

/// Returns `count` requests with random keys out of [`KEYS`], all equally likely. The same seed gives the same requests.
pub fn uniform(count: usize, seed: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| request(random.usize(..KEYS))).collect()
}

/// Returns `count` requests with random keys out of [`KEYS`], by Zipf's law: the n-th most frequent key is 1/n times as
/// frequent as the first. The same seed gives the same requests.
pub fn zipf(count: usize, seed: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut sum = 0.0;
    let cumulative: Vec<f64> = (1..=KEYS)
        .map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        })
        .collect();
    (0..count)
        .map(|_| {
            let point = random.f64() * sum;
            request(cumulative.partition_point(|&up_to| up_to < point).min(KEYS - 1))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_zipf_key_is_twice_as_frequent_as_the_second() {
        let requests = zipf(200_000, 1);
        let count = |number| requests.iter().filter(|request| request.number == number).count() as f64;
        let ratio = count(0) / count(1);
        assert!((1.8..2.2).contains(&ratio), "{ratio}");
    }
}
