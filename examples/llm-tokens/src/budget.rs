//! The token budget of each customer: tokens are reserved before the work and settled after it.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, Response};
use tidegate::answer::{Policies, Policy};
use tidegate::{Check, CheckOptions, Cost, Decision, Demand, Key, Limit, Limiter};

/// A token budget per minute and per day. Clones share it and are cheap.
#[derive(Clone)]
pub(crate) struct Budget(Arc<Inner>);

struct Inner {
    limiter: Limiter,
    limits: [Limit; 2],
    policies: Policies,
}

/// Tokens reserved for work in progress. [Settle](Reservation::settle) it when the work is done.
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

    /// Reserves this many tokens on both limits, or on none. The error is the response to send.
    pub(crate) async fn reserve(
        &self,
        customer: &'static str,
        tokens: u32,
        request: &HeaderMap,
    ) -> Result<Reservation, Response<Body>> {
        let Inner { limiter, policies, .. } = &*self.0;
        let demands = self.demands(customer, tokens);
        let check = Check::new(&demands).expect("two windows are two counters");
        // Unused tokens are refunded, so denials must not be cached.
        let options = CheckOptions { refundable: true, ..CheckOptions::default() };
        match limiter.check_with(&check, options).await {
            Ok(decision) if decision.allowed() => Ok(Reservation { budget: self.clone(), customer, tokens, decision }),
            Ok(denied) => Err(policies.refuse(&denied, request).map(Body::from)),
            Err(_unavailable) => Err(policies.unavailable(request).map(Body::from)),
        }
    }

    /// Writes the rate-limit headers with the customer's remaining tokens. Writes none if the store does not answer.
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
    /// Corrects the charge to the tokens actually used: refunds unused ones, or charges the missing ones.
    pub(crate) async fn settle(self, used: u32) {
        let demands = self.budget.demands(self.customer, self.tokens);
        let check = Check::new(&demands).expect("two windows are two counters");
        if let Err(error) = self.budget.0.limiter.settle(&check, &self.decision, Cost::new(used)).await {
            // If the call was not executed, the estimate stays charged until its window ends.
            eprintln!("cannot settle a reservation; its estimate may stay charged: {error}");
        }
    }
}
