//! The configuration as it is written. Everything here may still be wrong: compiling it says what is.
//!
//! Texts with a grammar of their own (limits, times, networks, patterns) stay texts here, so that all
//! that are wrong are reported together and not one per attempt.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::forms::{AnonymizeEntry, HeaderTest, LimitEntry, Limits, OneOrMany, OptionalList, Secret};
use super::span::Spanned;
use crate::answer::Style;
use crate::failure::OnFailure;
use crate::identity::{ApiKeys, Rotate};

/// A configuration file: the same for the layer and the server.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
#[cfg_attr(feature = "schema", schemars(title = "Tollgate configuration"))]
pub struct Config {
    /// How many rules and keys there are. A file with another number of them, because it was cut off say, is not used.
    pub expect: Option<Spanned<Expect>>,
    /// Where counters live: `memory`, or a `redis://` or `rediss://` URL.
    pub store: Option<Spanned<Secret>>,
    /// What every key in the store begins with; `tollgate` unless said.
    pub prefix: Option<Spanned<String>>,
    /// How many nodes share the quotas while the store is away.
    pub instances: Option<Spanned<u32>>,
    /// No decision waits longer for the store; `25ms` unless said.
    pub deadline: Option<Spanned<String>>,
    /// What happens when the store does not answer; `local` unless said.
    pub on_failure: OnFailureWord,
    /// Which headers tell the numbers; `x` and `ietf` unless said.
    pub headers: Option<Spanned<Vec<StyleWord>>>,
    /// Whether browsers may read those headers (`Access-Control-Expose-Headers`).
    pub expose_headers: bool,
    /// Whether every rule is in shadow mode: counted, and nothing refused.
    pub shadow: Spanned<bool>,
    /// Whether limiting is off altogether.
    pub kill_switch: Spanned<bool>,

    /// The most bytes that a path may have, without its query; a request with a longer one is refused with 414. Defaults to 8192.
    pub path_bytes_max: Option<Spanned<u32>>,
    /// Headers in which a request may name another method, which rules then read as well as its own, such as
    /// `x-http-method-override`. Defaults to none.
    pub method_override_headers: OneOrMany<Spanned<String>>,

    /// Networks of the proxies whose word about the client's address is taken; nobody unless said.
    pub trusted_proxies: OneOrMany<Spanned<String>>,
    /// The one header in which they give it; `x-forwarded-for` unless said.
    pub forwarding_header: Option<Spanned<String>>,
    /// How many bits of an IPv6 address are one client; 64 unless said.
    pub ipv6_prefix: Option<Spanned<u8>>,
    /// The header in which a request shows its API key; `x-api-key` unless said.
    pub api_key_header: Option<Spanned<String>>,
    /// Which API keys are an identity: those that are listed (`known`) or all (`any`).
    pub api_keys: ApiKeysWord,
    /// Whether addresses and keys are stored as pseudonyms.
    pub anonymize: Spanned<AnonymizeEntry>,
    /// How users' tokens are verified.
    pub jwt: Option<Spanned<Jwt>>,

    /// Who and what is never limited.
    pub exempt: Exempt,
    /// Who is always refused.
    pub bans: Vec<Spanned<BanEntry>>,
    /// Named sets of limits. `default` is for callers without another, `anonymous` for those without identity.
    pub plans: BTreeMap<Spanned<String>, PlanTable>,
    /// API keys, and what each may do.
    pub keys: OptionalList<Spanned<ApiKeyTable>>,
    /// A file with more of them, as a list `keys`; relative to this file.
    pub keys_file: Option<Spanned<String>>,
    /// Where else a caller's plan comes from.
    pub plan_sources: PlanSources,
    /// Which requests are limited, and how. A reload that has none any more fails unless it says `rules = []`.
    pub rules: OptionalList<Spanned<RuleTable>>,
}

/// How many rules and keys a configuration has. What is left out is not checked.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Expect {
    /// The number of rules.
    pub rules: Option<Spanned<u32>>,
    /// The number of keys, those of the keys file included.
    pub keys: Option<Spanned<u32>>,
}

/// A rule: which requests, counted by which subject, against which limits.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RuleTable {
    /// The name: in metrics and logs, and part of the counter's name, so a renamed rule begins anew.
    pub name: Spanned<String>,
    /// Which requests; all unless said.
    #[serde(default, rename = "match")]
    pub matches: Spanned<MatchTable>,
    /// What is counted, all together; `caller` unless said.
    #[serde(default)]
    pub by: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// A list of limits, or `plan`: those of the caller's plan.
    pub limits: Spanned<Limits>,
    /// Whether it refuses (`enforce`), only counts (`shadow`), or neither (`off`).
    #[serde(default)]
    pub mode: ModeWord,
    /// What happens when the store does not answer, for this rule.
    #[serde(default)]
    pub on_failure: Option<OnFailureWord>,
    /// Whether a request's units are given back by how it ends.
    #[serde(default)]
    pub charge: Spanned<ChargeWord>,
    /// The units that a request takes; 1 unless said.
    #[serde(default)]
    pub cost: Option<Spanned<u32>>,
    /// Which headers tell this rule's numbers.
    #[serde(default)]
    pub headers: Option<Spanned<Vec<StyleWord>>>,
    /// What the body of its refusals is.
    #[serde(default)]
    pub body: Option<BodyWord>,
    /// `memory`: a shield, decided in process before everything else.
    #[serde(default)]
    pub store: Option<Spanned<RuleStoreWord>>,
}

/// Which requests a rule is for. What is not said matches everything.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MatchTable {
    /// Any of these methods. `GET` means `HEAD` too.
    pub methods: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Any of these paths: `/shorten`, `/users/{id}`, `/api/*`.
    pub path: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Any of these hosts: `api.example.com`, `*.example.com`.
    pub host: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// All of these headers: `true` for *is there*, or the text it must equal.
    pub headers: BTreeMap<Spanned<String>, HeaderTest>,
}

/// A limit as a table: either `limit`, or `quota` and `window` and what belongs to them.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct LimitTable {
    /// The name that clients see, and part of the counter's; after the window unless said.
    pub name: Option<Spanned<String>>,
    /// The whole limit as a text.
    pub limit: Option<Spanned<String>>,
    /// The units per window.
    pub quota: Option<Spanned<u64>>,
    /// The window, such as `10s`.
    pub window: Option<Spanned<String>>,
    /// How it counts; `sliding` unless said.
    pub algorithm: Option<Spanned<AlgorithmWord>>,
    /// The capacity of a `token-bucket`.
    pub burst: Option<Spanned<u64>>,
    /// How many units may wait in a `leaky-bucket`.
    pub queue: Option<Spanned<u64>>,
    /// Whether refused requests are charged too.
    pub count_denied: Option<Spanned<bool>>,
}

/// A plan: a named set of limits that belongs to a caller.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct PlanTable {
    /// Its limits.
    pub limits: Spanned<OneOrMany<Spanned<LimitEntry>>>,
    /// Where a refused client can get a larger plan.
    #[serde(default)]
    pub upgrade_url: Option<Spanned<String>>,
}

/// An API key and what it may do. Either `key` or `sha256` says which.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ApiKeyTable {
    /// The key itself.
    pub key: Option<Spanned<Secret>>,
    /// Its SHA-256 digest in hexadecimal, so that the file holds no key.
    pub sha256: Option<Spanned<String>>,
    /// Whose it is; for people.
    pub name: Option<String>,
    /// The plan; `default` unless said.
    pub plan: Option<Spanned<String>>,
    /// Limits of its own, instead of the plan's.
    pub limits: Option<Spanned<OneOrMany<Spanned<LimitEntry>>>>,
    /// Whether it is never limited.
    pub exempt: bool,
}

/// Where a caller's plan comes from, beside the keys and the token's claim.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct PlanSources {
    /// Plans by address.
    pub addresses: Vec<AddressPlan>,
    /// A header that names the plan. Only believed from a trusted proxy.
    pub header: Option<Spanned<String>>,
    /// A Redis hash, on the store, from callers to the names of their plans: field `api_key:` and the key's SHA-256, or `user:` and the
    /// user. A change is seen within a second.
    pub redis_hash: Option<Spanned<String>>,
}

/// The plan of everybody in some networks.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct AddressPlan {
    /// The networks.
    pub networks: OneOrMany<Spanned<String>>,
    /// Their plan.
    pub plan: Spanned<String>,
}

/// How users' tokens (JWT) are verified.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Jwt {
    /// The one algorithm that is accepted.
    pub algorithm: JwtAlgorithmWord,
    /// The secret (HS256) or the public key as PEM (RS256, ES256).
    #[serde(default)]
    pub key: Option<Spanned<Secret>>,
    /// The environment variable that holds it.
    #[serde(default)]
    pub key_env: Option<Spanned<String>>,
    /// The file that holds it.
    #[serde(default)]
    pub key_file: Option<Spanned<String>>,
    /// The claim that names the plan.
    #[serde(default)]
    pub plan_claim: Option<String>,
    /// The issuer that a token must name.
    #[serde(default)]
    pub issuer: Option<String>,
    /// The audience that a token must name.
    #[serde(default)]
    pub audience: Option<String>,
}

/// How pseudonyms are made. The secret is given in one of three ways.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Anonymize {
    /// The secret that all nodes share.
    pub secret: Option<Spanned<Secret>>,
    /// The environment variable that holds it.
    pub secret_env: Option<Spanned<String>>,
    /// The file that holds it.
    pub secret_file: Option<Spanned<String>>,
    /// When the pseudonyms change; `daily` unless said.
    pub rotate: RotateWord,
}

/// Who and what is never limited.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Exempt {
    /// Networks.
    pub addresses: OneOrMany<Spanned<String>>,
    /// API keys, as they are or as `sha256:` and their digest.
    pub keys: Vec<Spanned<Secret>>,
    /// Path patterns.
    pub paths: OneOrMany<Spanned<String>>,
}

/// Somebody who is always refused.
///
/// There is no `for = "1h"`: a file has no moment from which to count, and each reload would begin anew.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct BanEntry {
    /// What is banned.
    pub by: BanWord,
    /// Which one: a network, a key (or `sha256:` and its digest), or a user.
    pub value: Spanned<Secret>,
    /// Until when, in UTC, such as `2030-01-31T12:00:00Z`; for good unless said.
    #[serde(default)]
    pub until: Option<Spanned<String>>,
    /// Why; for people.
    #[serde(default)]
    pub reason: Option<String>,
}

/// Declares an enum of words, each of which means something in the library.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident => $meaning:ty { $($(#[$attr:meta])* $variant:ident = $word:literal => $value:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum $name {
            $(#[doc = concat!("`", $word, "`")] #[serde(rename = $word)] $(#[$attr])* $variant,)*
        }

        impl From<$name> for $meaning {
            fn from(word: $name) -> $meaning {
                match word { $($name::$variant => $value,)* }
            }
        }
    };
}

words! {
    /// What happens when the store does not answer.
    OnFailureWord => OnFailure {
        #[default] Local = "local" => OnFailure::Local,
        Allow = "allow" => OnFailure::Allow,
        Deny = "deny" => OnFailure::Deny,
    }
}

words! {
    /// A family of headers.
    StyleWord => Style {
        #[default] X = "x" => Style::X,
        Ietf = "ietf" => Style::Ietf,
        Draft6 = "draft-6" => Style::Draft6,
    }
}

words! {
    /// Which API keys are an identity.
    ApiKeysWord => ApiKeys {
        #[default] Known = "known" => ApiKeys::Known,
        Any = "any" => ApiKeys::Any,
    }
}

words! {
    /// When pseudonyms change.
    RotateWord => Rotate {
        #[default] Daily = "daily" => Rotate::Daily,
        Never = "never" => Rotate::Never,
    }
}

words! {
    /// Whether a rule refuses.
    ModeWord => crate::rules::Mode {
        #[default] Enforce = "enforce" => crate::rules::Mode::Enforce,
        Shadow = "shadow" => crate::rules::Mode::Shadow,
        Off = "off" => crate::rules::Mode::Off,
    }
}

words! {
    /// Whether units are given back by how a request ends.
    ChargeWord => crate::rules::Charge {
        #[default] Always = "always" => crate::rules::Charge::Always,
        OnFailure = "on_failure" => crate::rules::Charge::OnFailure,
        OnSuccess = "on_success" => crate::rules::Charge::OnSuccess,
    }
}

words! {
    /// The body of a refusal.
    BodyWord => crate::answer::BodyFormat {
        #[default] Json = "json" => crate::answer::BodyFormat::Json,
        Problem = "problem" => crate::answer::BodyFormat::Problem,
        Text = "text" => crate::answer::BodyFormat::Text,
    }
}

words! {
    /// How a limit counts.
    AlgorithmWord => tollgate_core::Algorithm {
        #[default] Sliding = "sliding" => tollgate_core::Algorithm::Sliding,
        SlidingLog = "sliding-log" => tollgate_core::Algorithm::SlidingLog,
        SlidingCounter = "sliding-counter" => tollgate_core::Algorithm::SlidingCounter,
        FixedWindow = "fixed-window" => tollgate_core::Algorithm::FixedWindow,
        TokenBucket = "token-bucket" => tollgate_core::Algorithm::TokenBucket,
        LeakyBucket = "leaky-bucket" => tollgate_core::Algorithm::LeakyBucket,
    }
}

/// Where a rule counts, if not in the store of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum RuleStoreWord {
    /// In process memory, before everything else: a shield.
    Memory,
}

/// The algorithms of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "UPPERCASE")]
pub enum JwtAlgorithmWord {
    /// HMAC with a shared secret.
    Hs256,
    /// RSA.
    Rs256,
    /// ECDSA on P-256.
    Es256,
}

/// What can be banned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BanWord {
    /// A network.
    Ip,
    /// An API key.
    ApiKey,
    /// A user.
    User,
}
