//! The tokens of each customer: reserved before the work, settled after it.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, Response};
use tollgate::answer::{Policies, Policy};
use tollgate::{Check, CheckOptions, Cost, Decision, Demand, Key, Limit, Limiter};

/// Tokens per minute and per day. Cloning it is cheap.
#[derive(Clone)]
pub(crate) struct Budget(Arc<Inner>);

struct Inner {
    limiter: Limiter,
    limits: [Limit; 2],
    policies: Policies,
}

/// Tokens that were taken for work that is not done yet.
pub(crate) struct Reservation {
    budget: Budget,
    customer: &'static str,
    tokens: u32,
    decision: Decision,
}

impl Budget {
    pub(crate) fn new(limiter: Limiter, per_minute: Limit, per_day: Limit) -> Budget {
        let limits = [per_minute, per_day];
        let policies = Policies::new(limits.map(Policy::of));
        Budget(Arc::new(Inner { limiter, limits, policies }))
    }

    /// Takes so many tokens on every limit, or on none; then the refusal is ready to be sent.
    pub(crate) async fn reserve(
        &self,
        customer: &'static str,
        tokens: u32,
        request: &HeaderMap,
    ) -> Result<Reservation, Response<Body>> {
        let Inner { limiter, policies, .. } = &*self.0;
        let demands = self.demands(customer, tokens);
        let check = Check::new(&demands).expect("two windows are two counters");
        // Whatever is not used comes back, so no denial is remembered for longer than it is true.
        let options = CheckOptions { refundable: true, ..CheckOptions::default() };
        match limiter.check_with(&check, options).await {
            Ok(decision) if decision.allowed() => Ok(Reservation { budget: self.clone(), customer, tokens, decision }),
            Ok(denied) => Err(policies.refuse(&denied, request).map(Body::from)),
            Err(_unavailable) => Err(policies.unavailable(request).map(Body::from)),
        }
    }

    /// Writes what a customer has left.
    pub(crate) async fn write_headers(&self, customer: &str, headers: &mut HeaderMap) {
        let Inner { limiter, policies, .. } = &*self.0;
        let demands = self.demands(customer, 0);
        let check = Check::new(&demands).expect("two windows are two counters");
        if let Ok(decision) = limiter.check(&check).await {
            policies.write_headers(&decision, headers);
        }
    }

    fn demands<'c>(&self, customer: &'c str, tokens: u32) -> [Demand<'c>; 2] {
        let key = Key::new(customer).expect("a customer's name is short");
        self.0.limits.map(|limit| Demand::new(limit, key).cost(tokens))
    }
}

impl Reservation {
    /// Pays what was really used: the rest goes back, or what is missing is taken, too.
    pub(crate) async fn settle(self, used: u32) {
        let demands = self.budget.demands(self.customer, self.tokens);
        let check = Check::new(&demands).expect("two windows are two counters");
        if let Err(error) = self.budget.0.limiter.settle(&check, &self.decision, Cost::new(used)).await {
            // The estimate stays charged. It leaves with its window, so there is nothing to repair.
            eprintln!("a reservation was not settled: {error}");
        }
    }
}
