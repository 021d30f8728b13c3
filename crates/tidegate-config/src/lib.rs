//! The settings of Tidegate: the tables of a configuration file, each setting declared once.
//!
//! ```text
//!   file ─▶ tree ─▶ ConfigTable                                      or findings, each with its place
//!           toml.rs  read.rs, table.rs                               finding.rs, source.rs, mask.rs
//!           yaml.rs  types.rs, forms.rs, values.rs
//!
//!   Document, before and after a reload ─▶ Changes, and findings about truncated files
//!                                          changes.rs, complete.rs
//! ```
//!
//! This crate reads what is written in a file. Crate `tidegate` determines what it means: it compiles the tables to rules
//! and settings, and has the documented interface, which re-exports the types that are of use to applications. The
//! other items of this crate are for crate `tidegate` and may change in any version.

mod changes;
pub mod complete;
mod document;
mod finding;
mod forms;
mod key_digest;
mod mask;
mod read;
#[cfg(feature = "schema")]
mod schema;
mod source;
mod span;
mod style;
mod suggest;
mod table;
mod toml;
mod tree;
mod types;
mod values;
pub mod watch;
#[cfg(feature = "yaml")]
mod yaml;

pub use changes::{Changes, Part, PartKind};
pub use document::{Document, Format, KeysFile, limits_from_json};
pub use finding::{Code, CodeError, Finding, Report, Severity};
pub use forms::{
    AnonymizeEntry, BodyEntry, BodyInCode, HeaderTest, LimitEntry, Limits, OneOrMany, OptionalList, Secret, StoreEntry,
    StoreUrl, TimeText,
};
pub use key_digest::{KeyDigest, KeyDigestError};
#[cfg(feature = "schema")]
pub use schemars::Schema;
pub use source::ConfigSource;
pub use span::{Span, Spanned};
pub use style::{IetfDraft, StyleError, Styles};
pub use suggest::nearest;
pub use table::IntoField;
pub use types::{
    AddressPlan, Anonymize, ApiKeyTable, BanEntry, ConfigTable, Exempt, Expect, GatewayTable, Jwt, KeySources,
    LimitTable, MatchTable, PlanSources, PlanTable, RuleTable, StoreTable, StoreTlsTable, TemplateTable, TimeoutsTable,
    UpstreamMatch, UpstreamTable,
};
pub use values::{
    AccessLog, ApiKeys, BanKind, BodyName, Charge, JwtAlgorithm, Mode, Rotate, RuleStore, StoreKind, Style,
    TlsMinVersion,
};
