//! Configuration files: TOML or YAML, checked as a whole, with the place of every error.
//!
//! ```text
//!   file ─▶ tables             ─▶ RuleSet + Settings + findings         or a Report
//!           (tidegate-config)     compile/, lint.rs
//! ```
//!
//! The layer and the server use the same files. `docs/configuration.toml` is an example with every field,
//! `docs/findings.md` explains every finding. To build rules in code, see [`Rules`](crate::rules::Rules).
//!
//! ```
//! use tidegate::config::{Code, Config, Format};
//!
//! let loaded = Config::from_text(
//!     r#"
//!     [[rules]]
//!     name = "shorten"
//!     match = { methods = ["POST"], path = "/shorten" }
//!     by = ["ip"]
//!     limits = ["10/min", "100/day"]
//!     "#,
//!     Format::Toml,
//! )?;
//! assert_eq!(&**loaded.rules.rules()[0].name(), "shorten");
//! assert!(loaded.findings.is_empty());
//!
//! let report = Config::from_text("[[rules]]\nname = 'a'\nlimitz = ['10/min']", Format::Toml).unwrap_err();
//! let finding = &report.findings()[0];
//! assert_eq!(finding.code(), Code::UnknownField);
//! assert_eq!(finding.help_text(), Some("did you mean `limits`?"));
//! assert_eq!(finding.place(), Some(("configuration", 3, 1)));
//! # Ok::<(), tidegate::config::Report>(())
//! ```
//!
//! **All or nothing.** A file with an error is not used at all, and all of its errors are reported at once. An invalid
//! reload changes nothing.
//!
//! **Strict.** 0 is an error and never means *no limit*; an unknown field is an error and never ignored.
//!
//! **No secrets in reports.** Reports quote lines of the file with all secrets masked. A file that cannot be parsed is
//! not quoted.

mod compile;
mod lint;
mod load;
#[doc(hidden)] // for the server's own files
pub mod watch;

#[cfg(test)]
pub(crate) mod tests;

pub use compile::Settings;
#[cfg(feature = "redis")]
pub(crate) use compile::limits_from_json;
pub(crate) use compile::{Compiler, Setting, is_limit_name, limit_names};
pub use load::{Config, Loaded, Loader};
#[doc(hidden)] // for the server's and the command's own files
pub use tidegate_config::complete;
pub use tidegate_config::{Changes, Code, CodeError, Finding, Format, Part, PartKind, Report, Secret, Severity, Span};
pub use watch::RulesWatcher;
