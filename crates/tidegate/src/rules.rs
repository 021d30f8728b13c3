//! Compiled rules: find the limits that a request must pass, in time that does not grow with the number of rules.
//!
//! A [`RuleSet`] is compiled from a [`Config`](crate::config::Config) or from [`Rules`] in code, and never changes. A
//! reload compiles another one and replaces the whole set.
//!
//! ```text
//!   request  ─▶ RuleSet::matching ─▶ rules, in the order of the file        matcher.rs, host.rs, path.rs, trie.rs
//!   identity ─▶ Facts::ban, exemption                                       facts.rs, lists.rs
//!            └▶ Facts::plan ─▶ CompiledRule::policies ─▶ limits            plan.rs, rule.rs
//! ```
//!
//! ```
//! use tidegate::config::{Config, Format};
//! use tidegate::rules::RequestView;
//!
//! let loaded = Config::from_text(
//!     r#"
//!     [[rules]]
//!     name = "everything"
//!     limits = ["600/min"]
//!
//!     [[rules]]
//!     name = "shorten"
//!     match = { methods = ["POST"], path = "/shorten" }
//!     limits = ["10/min", "100/day"]
//!     "#,
//!     Format::Toml,
//! )?;
//! let rules = loaded.rules;
//!
//! let request = http::Request::post("/shorten/").body(())?;
//! let names: Vec<&str> = rules.matching(&RequestView::of(&request)).iter().map(|rule| &**rule.name()).collect();
//! assert_eq!(names, ["everything", "shorten"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Servers differ in how they decode and normalize a path, so one path may be read in several ways, its *readings*:
//! `a/b` and `a%2Fb` for `/a%2Fb`. **A rule applies if it matches any reading of the path. An exemption applies only if
//! it matches all of them.** So another spelling of a path does not evade a rule. `path.rs` has the details.

mod builder;
mod client_bans;
pub(crate) mod comparisons;
mod facts;
#[cfg(any(fuzzing, test))]
pub mod fuzz;
pub(crate) mod host;
#[cfg(feature = "redis")]
mod key_hash;
mod key_lookup;
pub(crate) mod lists;
mod lookup_cache;
mod lookups;
pub(crate) mod matcher;
pub(crate) mod method;
mod own_limits;
pub(crate) mod path;
pub(crate) mod pattern;
mod plan;
#[cfg(feature = "redis")]
mod plan_hash;
mod request;
mod rule;
mod set;
pub(crate) mod trie;

#[cfg(test)]
mod tests;

pub use builder::{Ban, JwtSettings, LimitText, ListedKey, Plan, Rule, Rules, SecretSource};
pub use client_bans::{ClientBan, ClientBans};
pub use facts::{CallerPlan, Exemption, Facts, MatchedBan, PlanSource};
#[cfg(feature = "redis")]
pub use key_hash::{GroupNameError, KeyChange, KeyHash, KeyHashError, KeyList};
pub use key_lookup::{KeyFuture, KeyLookup};
pub use lists::CompiledBan;
pub(crate) use lookup_cache::WarningGate;
pub use lookup_cache::{LookupError, LookupStats};
pub use lookups::{KeyNameError, Lookups};
pub(crate) use matcher::Indices;
pub use own_limits::{OwnLimits, OwnLimitsError};
pub(crate) use plan::{CompiledKey, LimitSetId};
pub use plan::{CompiledPlan, LimitSet, PlanFuture, PlanLookup, PlanQuestion};
#[cfg(feature = "redis")]
pub use plan_hash::PlanHash;
#[cfg(feature = "tower")]
pub(crate) use request::FindUri;
pub use request::RequestView;
pub use rule::CompiledRule;
pub(crate) use rule::{Overlaps, RuleLimits};
pub(crate) use set::SetParts;
pub use set::{KeyProblem, Matched, RuleSet};
pub use tidegate_config::{Charge, Mode};
