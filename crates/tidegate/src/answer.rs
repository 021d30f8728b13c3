//! Renders a decision as an HTTP status, headers and body.
//!
//! A client that receives nothing but a 429 has to guess. It needs the remaining quota *before* it is denied, the limit
//! that denied it, and the time to retry, and all of these must be correct. This module renders a
//! [`Decision`](tidegate_core::Decision) as HTTP for every HTTP endpoint.
//!
//! ```text
//!   before any request                    per request
//!   ┌────────┐                            ┌──────────┐
//!   │ Policy │ name, limit, plan, style   │ Decision │ one limit status per policy
//!   └───┬────┘                            └────┬─────┘
//!       ▼             write_headers            │
//!   ┌──────────┐ ◀─────────────────────────────┤─▶ headers, on every response
//!   │ Policies │      refuse                   └─▶ 429, Retry-After, body
//!   └──────────┘      unavailable ───────────────▶ 503
//! ```
//!
//! ```
//! use http::HeaderMap;
//! use tidegate::answer::{Policies, Policy};
//! use tidegate::{Check, Demand, Key, Limit, MemoryStore};
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
//! **Rounding.** Every wait is exact to the microsecond until it is rendered. It is then rounded up, once, so a client
//! that waits as long as the header says never retries too early. `t` is the time until one more unit is available, or,
//! for a limit that denied the request, the time until this request would pass. `X-RateLimit-Reset` is the decision's
//! time plus `t`, added before rounding. Adding rounded values, or the times of two clocks, would make the same instant
//! differ by a second between requests. A request that can never pass (it costs more than the limit holds) has no
//! `Retry-After`, no `t` and no `X-RateLimit-Reset`. `draft-6` requires a reset, so there it is the time until one more
//! unit is available.
//!
//! **Which limit.** Styles that show a single limit show the most restrictive one: of the limits that denied the
//! request, the one with the longest wait; if none denied it, the one with the smallest fraction of its quota left. On
//! a tie the first one is shown. `ietf` lists all limits.
//!
//! **Which quota.** Headers show the policy's full quota, even while the store is unavailable and this instance grants
//! only its share of it. `remaining` is what this instance can really grant.
//!
//! **Rendered once.** The constant parts are rendered when a [`Policy`] is built, joined when [`Policies`] is built,
//! and cloned per request. Only numbers are formatted per request.
//!
//! **Why no structured-field library?** The only strings are names of `[a-z0-9-]+`, which need no escaping, and the
//! only numbers are integers far below 10^15. The tests parse all output with a structured-field library.
//!
//! [`Verdict`] maps the outcome of a request to HTTP, gRPC and RESP.

mod accept;
mod body;
pub mod grpc;
mod policies;
mod policy;
mod refusal;
mod strictest;
mod template;
mod verdict;

#[cfg(test)]
mod tests;

pub use body::{Body, BodyFormat, CustomFormat, RefusalFields};
pub use policies::Policies;
pub(crate) use policy::is_rule_name;
pub use policy::{Policy, PolicyNameError, RuleNameError};
pub use refusal::RefusalDetails;
pub(crate) use template::placeholder_names;
pub use template::{BodyTemplate, TemplateError};
pub use tidegate_config::{Style, StyleError, Styles};
pub use verdict::{GrpcCode, Verdict};
