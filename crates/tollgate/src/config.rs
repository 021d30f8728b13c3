//! The configuration file: TOML or YAML, checked as a whole, with the place of whatever is wrong.
//!
//! ```text
//!   file ─▶ tree ─▶ Config ─▶ RuleSet + Settings + findings         or a Report
//!           toml.rs  read.rs   compile/, lint.rs                     finding.rs, source.rs, mask.rs
//!           yaml.rs  types.rs
//! ```
//!
//! The same file drives the layer and the server. `docs/configuration.toml` is an example with everything in
//! it, `docs/findings.md` explains every finding.
//!
//! ```
//! use tollgate::config::{Code, Config, Format};
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
//! # Ok::<(), tollgate::config::Report>(())
//! ```
//!
//! **All or nothing.** A file with an error is not used at all, and all of its errors are told at once (those of the reading
//! one by one: what cannot be read cannot be checked). A broken reload therefore changes nothing.
//!
//! **No surprise by zero or by absence.** 0 is an error and never *no limit*; a misspelt field is an error and never ignored.
//!
//! **No secret in a report.** Reports show lines of the file; secrets in them are masked (`mask.rs`).

mod changes;
mod compile;
mod conditions;
#[doc(hidden)]
pub mod file;
mod finding;
pub(crate) mod forms;
mod lint;
mod load;
mod mask;
mod read;
mod reload;
#[cfg(feature = "schema")]
mod schema;
mod source;
pub(crate) mod span;
mod toml;
mod tree;
pub(crate) mod types;
#[cfg(feature = "yaml")]
mod yaml;

#[cfg(test)]
mod tests;

pub use changes::{Changes, Part, PartKind};
pub use compile::Settings;
pub use conditions::RuleConditions;
pub use finding::{Code, Finding, Report, Severity};
pub use forms::Secret;
pub use load::{Format, Loaded, Loader};
pub use span::Span;
pub use types::Config;
