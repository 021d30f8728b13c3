//! Who makes a request: addresses, API keys, users, and the subject that is counted.
//!
//! The rule of this module: **nobody chooses their own identity.** What a client can write freely (a forwarding
//! header, an invented key, an unsigned token, a second copy of a header) is not believed, and
//! where something is in doubt, the request is counted by the address that we know for sure. Erring
//! this way, a client can lose a budget of its own but never gain a second one.
//!
//! | question | answer | where |
//! |---|---|---|
//! | whose address? | [`TrustedProxies`] walks one header from the right | `proxies.rs`, `forwarded.rs` |
//! | one client or many? | [`AddressPrefixes`] cuts an address to the network that is counted | `address.rs` |
//! | whose key? | [`KeySource`] knows it by digest, or it is nobody's | `api_key.rs` |
//! | which user? | `TokenVerifier`: the key decides the algorithm, never the token | `jwt.rs` |
//! | counted as? | [`Identity::subject`] writes parts that cannot collide | `subject.rs` |
//! | stored as? | [`Anonymizer`]: HMAC pseudonyms that change at midnight | `anonymize.rs` |
//!
//! All of it is pure: no I/O, no clock (time is an argument), nothing asynchronous. A key source that has to be asked
//! over a network is asked first ([`Identifier::shown_key`]) and its answer passed in as a closure. This is for who calls
//! [`Identifier::identify`]; an [`Engine`](crate::engine::Engine), and so the layer and the server, knows the keys of its rules (`keys`,
//! `keys_file`) and no others. Keys that come and go are a new rule set for [`Engine::reload`](crate::engine::Engine::reload); keys that the upstream
//! checks are [`ApiKeys::Any`].
//!
//! Deliberately absent: a `Debug` or an error that shows a key, a token or a secret.

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
pub(crate) mod suggest;
mod user;

pub use address::{AddressKey, AddressPrefixes, PrefixError};
pub use anonymize::{Anonymizer, Pseudonym, Rotate, Salt, SecretError};
pub use api_key::{API_KEY_BYTES_MAX, ApiKey, ApiKeys, KeyDigest, KeyDigestError, KeySource, KeyTable, KnownKey};
pub use identifier::{Caller, Identifier, Identity, Origin};
#[cfg(feature = "jwt")]
pub use jwt::{TokenKeyError, TokenVerifier};
pub use networks::{NetworkError, Networks};
pub(crate) use prefix_table::PrefixTable;
pub use proxies::{ForwardingHeader, ForwardingHeaderError, TrustedProxies};
pub use subject::SubjectKey;
pub use subject_kind::{Subject, SubjectError, Subjects};
pub use user::{TOKEN_BYTES_MAX, TokenError, User};
