//! Which keys are asked for, in which order: prepared beforehand, so that only checks are timed.
//!
//! The requests stand in memory in the order in which they are made, each with a string of its own, because in a service
//! the key has just been read from a request: its bytes are near, its counter is not.

/// How many distinct keys the spread workloads have.
pub const KEYS: usize = 1_000_000;

/// One request's key, in both forms that contestants take.
#[derive(Clone, Debug)]
pub struct Request {
    /// As a service has it.
    pub text: String,
    /// For contestants that are handed a number.
    pub number: u64,
}

/// The request of user number `number`.
pub fn request(number: usize) -> Request {
    Request { text: format!("user:{number:06}"), number: number as u64 }
}

/// The same key, again and again.
pub fn hot(count: usize) -> Vec<Request> {
    vec![request(42); count]
}

/// Every key as likely as any other.
pub fn uniform(count: usize, seed: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| request(random.usize(..KEYS))).collect()
}

/// The n-th most frequent key is asked for 1/n times as often as the most frequent.
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
    fn the_most_frequent_zipf_key_is_asked_for_twice_as_often_as_the_second() {
        let requests = zipf(200_000, 1);
        let count = |number| requests.iter().filter(|request| request.number == number).count() as f64;
        let ratio = count(0) / count(1);
        assert!((1.8..2.2).contains(&ratio), "{ratio}");
    }
}
