//! Client identity: addresses, API keys, users, and the subject under which a request is counted.
//!
//! The rule of this module: **a client cannot choose its own identity.** Everything that a client can write freely (a
//! forwarding header, an invented key, an unsigned token, a second copy of a header) is ignored. In case of doubt the
//! request is counted by the address that is known for certain. So a client may share a budget with others, but never
//! gets a second one.
//!
//! | what is determined | how | where |
//! |---|---|---|
//! | client address | [`TrustedProxies`] walks one header from the right | `proxies.rs`, `forwarded.rs` |
//! | counted network | [`AddressPrefixes`] truncates an address to a network | `address.rs` |
//! | API key | [`KeySource`] finds it by its digest; an unknown key is ignored | `api_key.rs` |
//! | user | `TokenVerifier` checks a JWT; the key decides the algorithm, never the token | `jwt.rs` |
//! | subject | [`Identity::subject`] encodes the parts without collisions | `subject.rs` |
//! | stored value | [`Anonymizer`] replaces values with HMAC pseudonyms that change at midnight | `anonymize.rs` |
//!
//! The module is pure: it does no I/O, reads no clock (time is an argument) and is not asynchronous. An
//! [`Engine`](crate::engine::Engine), and so the layer and the server, knows the keys of its rules (`keys`,
//! `keys_file`), and asks a [`KeyLookup`](crate::rules::KeyLookup) about others. An application that calls
//! [`Identifier::identify`] itself does the same with [`Identity::unknown_api_key`] and [`Identity::with_api_key`]. If
//! the upstream verifies keys, use [`ApiKeys::Any`].
//!
//! No `Debug` output and no error of this module shows a key, a token or a secret.

mod address;
mod anonymize;
mod api_key;
mod forwarded;
mod identifier;
#[cfg(feature = "jwt")]
mod jwt;
mod networks;
mod prefix_table;
mod proxies;
mod single_value;
mod subject;
mod subject_kind;
mod user;

pub use address::{AddressKey, AddressPrefixes, PrefixError};
pub use anonymize::{Anonymizer, Pseudonym, Salt, SecretError};
pub use api_key::{API_KEY_BYTES_MAX, ApiKey, KeySource, KeyTable, KnownKey};
pub use identifier::{Caller, Identifier, Identity};
#[cfg(feature = "jwt")]
pub use jwt::{TokenKeyError, TokenVerifier};
pub use networks::{NetworkError, Networks};
pub(crate) use prefix_table::PrefixTable;
pub use proxies::{ForwardingHeader, ForwardingHeaderError, TrustedProxies};
pub use subject::SubjectKey;
pub use subject_kind::{Subject, SubjectError, Subjects};
pub use tidegate_config::{ApiKeys, KeyDigest, KeyDigestError, Rotate};
pub use user::{TOKEN_BYTES_MAX, TokenError, User};
