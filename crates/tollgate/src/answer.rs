//! What a client is told: a decision as HTTP headers, a status and a body.
//!
//! A limiter that only says 429 makes its clients guess. They need to know how much is left *before* they are
//! refused, which limit it was, and when to come back; and what they are told must be true. So one module turns a
//! [`Decision`](tollgate_core::Decision) into HTTP, and everything that speaks HTTP uses it.
//!
//! ```text
//!   before any request                    per request
//!   ┌────────┐                            ┌──────────┐
//!   │ Policy │ name, limit, plan, style   │ Decision │ one line per policy
//!   └───┬────┘                            └────┬─────┘
//!       ▼             write_headers            │
//!   ┌──────────┐ ◀─────────────────────────────┤─▶ headers, on every response
//!   │ Policies │      refuse                   └─▶ 429, Retry-After, body
//!   └──────────┘      unavailable ───────────────▶ 503
//! ```
//!
//! ```
//! use http::HeaderMap;
//! use tollgate::answer::{Policies, Policy};
//! use tollgate::{Check, Demand, Key, Limit, MemoryStore};
//!
//! let limit: Limit = "2/min".parse()?;
//! let policies = Policies::new([Policy::of(limit).with_plan("free")]);
//!
//! let store = MemoryStore::new();
//! let demand = Demand::new(limit, Key::new("user:42")?);
//! let decision = store.check(&Check::one(&demand));
//!
//! let mut headers = HeaderMap::new();
//! policies.write_headers(&decision, &mut headers);
//! assert_eq!(headers["ratelimit-policy"], r#""per-minute";q=2;w=60"#);
//! assert_eq!(headers["ratelimit"], r#""per-minute";r=1;t=60"#);
//! assert_eq!(headers["x-ratelimit-remaining"], "1");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! **The numbers.** Every wait is exact to the microsecond until it is rendered, and is then rounded up, once: a
//! client that waits as told is never early. `t` is when one more unit comes back, or for the line that refused,
//! when this request would pass. `X-RateLimit-Reset` is the decision's own time plus `t`, added before rounding: two
//! clocks added together, or a rounded sum, would let the same instant wobble by a second between requests.
//! A request that can never pass (it costs more than the limit holds) has no `Retry-After`, no `t` and no
//! `X-RateLimit-Reset`; `draft-6` demands its reset, which is then when one more unit comes back.
//!
//! **Which limit.** The styles with room for one limit show the most restrictive: of the refusing lines the one with
//! the longest wait, else the one with the smallest part of its quota left; of equals the first. `ietf` lists all.
//!
//! **The quota** shown is the policy's, also while the store is away and this node grants only its share of it:
//! `remaining` says what is really left.
//!
//! **What is rendered when.** A policy's texts are made with the policy, joined once in [`Policies`], and only
//! cloned per request. What remains per request is digits.
//!
//! **Why no structured-field library here?** The only strings are names of `[a-z0-9-]+`, which need no escape, and the
//! only numbers are integers far below 10^15. The tests parse everything back with a real one.
//!
//! [`Verdict`] is the table from verdicts and errors to HTTP, gRPC and RESP.

mod accept;
mod body;
pub mod grpc;
mod policies;
mod policy;
mod refusal;
mod strictest;
mod style;
mod verdict;

#[cfg(test)]
mod tests;

pub use body::{Body, CustomFormat, Format};
pub use policies::Policies;
pub use policy::{Policy, PolicyNameError};
pub use refusal::Refusal;
pub use style::{Style, StyleError, Styles};
pub use verdict::{GrpcCode, Verdict};
