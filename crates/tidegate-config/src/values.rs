//! The settings that are written as one of a few names, each declared once.

/// Declares enums whose variants have names. From a declaration follow how a field of the type is read, its JSON schema,
/// and `as_str`, `Display` and `FromStr`.
///
/// A text after the name of the enum says what its names are, for messages. With `default`, a field of the type may be
/// absent.
macro_rules! choices {
    ($(
        $(#[$about:meta])*
        pub enum $type:ident $what:literal $(default $default:ident)? {$(
            $(#[doc = $about_variant:literal])*
            $variant:ident = $name:literal,
        )*}
    )*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $type {$(
            $(#[doc = $about_variant])*
            $variant,
        )*}

        tidegate_core::__names! {
            $what $type { $($variant = $name,)* }
        }

        impl $crate::read::Named for $type {
            const NAMES: &'static [(&'static str, $type)] = $type::NAMES;

            $(fn absent() -> Option<$type> {
                Some($type::$default)
            })?
        }

        $(impl Default for $type {
            fn default() -> $type {
                $type::$default
            }
        })?

        #[cfg(feature = "schema")]
        impl schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $crate::schema::named::<$type>(generator)
            }
        }
    )*};
}

choices! {
/// Whether a rule denies requests (`enforce`, the default), only counts them (`shadow`), or is ignored (`off`).
pub enum Mode "mode" default Enforce {
    /// The rule denies requests that exceed its limits.
    Enforce = "enforce",
    /// The limits of the rule never deny a request, and no header shows them.
    ///
    /// The rule is decided after all enforced rules have admitted a request, and charged if its limits would have
    /// admitted it too. Its decisions are counted: `Engine::rule_stats`.
    Shadow = "shadow",
    /// The rule is ignored.
    Off = "off",
}

/// Which requests a rule charges: all (`always`, the default), or only those whose response is a failure (`on_failure`)
/// or a success (`on_success`).
///
/// Units are always charged at the start of a request, and refunded at its end if its response is not to be charged.
/// A response with a status of 400 or above or a `grpc-status` other than 0, and an error of the service, is a failure. Without
/// a response (the client disconnected, or the service panicked) the charge is kept.
#[non_exhaustive]
pub enum Charge "charge" default Always {
    /// Every request is charged.
    Always = "always",
    /// Only failed requests are charged, for example failed logins: a success refunds.
    OnFailure = "on_failure",
    /// Only successful requests are charged: a failure refunds.
    OnSuccess = "on_success",
}

/// A style of rate-limit headers, `x`, `ietf` or `draft-6`: which headers report the limits of a request, and how.
#[non_exhaustive]
pub enum Style "header style" {
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset` (Unix seconds) of the most restrictive limit.
    X = "x",
    /// `RateLimit` and `RateLimit-Policy` with all limits, as structured fields (the IETF draft, version 11).
    Ietf = "ietf",
    /// `RateLimit-Limit`, `-Remaining` and `-Reset` (seconds from now) of the most restrictive limit, and
    /// `RateLimit-Policy` with all limits (the IETF draft, version 6).
    Draft6 = "draft-6",
}

/// A format of the body of a refusal that has a name.
pub enum BodyName "body format" {
    /// JSON, or a problem document if the client prefers it.
    Json = "json",
    /// An RFC 9457 problem document.
    Problem = "problem",
    /// Plain text.
    Text = "text",
}

/// Which API keys identify a caller.
#[non_exhaustive]
pub enum ApiKeys "choice of API keys" default Known {
    /// Only keys that a `KeySource` knows. The default.
    Known = "known",
    /// All keys. For services whose upstream refuses unknown keys itself.
    Any = "any",
}

/// Whether pseudonyms change every day. Defaults to daily.
pub enum Rotate "rotation" default Daily {
    /// Pseudonyms change at midnight UTC.
    Daily = "daily",
    /// Pseudonyms never change.
    Never = "never",
}

/// The kind of subject that is banned.
pub enum BanKind "kind of ban" {
    /// A network.
    Ip = "ip",
    /// An API key.
    ApiKey = "api_key",
    /// A user.
    User = "user",
}

/// The signature algorithm of tokens.
pub enum JwtAlgorithm "signature algorithm" {
    /// HMAC-SHA-256 with a shared secret.
    Hs256 = "HS256",
    /// RSA with SHA-256.
    Rs256 = "RS256",
    /// ECDSA with SHA-256 on the curve P-256.
    Es256 = "ES256",
}

/// The store of a rule, if it is not the store of the file.
pub enum RuleStore "store of a rule" {
    /// Process memory. The rule is a shield, which is decided before all other rules.
    Memory = "memory",
}

/// What the URLs of a store name.
pub enum StoreKind "kind of store" default Server {
    /// One server that holds all keys.
    Server = "server",
    /// Some nodes of a Redis Cluster.
    Cluster = "cluster",
    /// Sentinels, which name the master.
    Sentinel = "sentinel",
}

/// The minimum version of TLS.
pub enum TlsMinVersion "version of TLS" default Tls12 {
    /// TLS 1.2.
    Tls12 = "1.2",
    /// TLS 1.3.
    Tls13 = "1.3",
}

/// The format of the gateway's access log.
pub enum AccessLog "format of the access log" default Off {
    /// There is no access log.
    Off = "off",
    /// A JSON object per line.
    Json = "json",
    /// The combined log format.
    Combined = "combined",
}
}

impl Charge {
    /// Returns whether units are refunded after some responses: `false` only for `Always`.
    pub const fn is_refundable(self) -> bool {
        !matches!(self, Charge::Always)
    }

    /// Returns whether the units of a request are refunded, given whether its response was a success.
    ///
    /// `OnFailure` refunds successes, `OnSuccess` refunds failures, `Always` refunds nothing.
    pub const fn refunds(self, succeeded: bool) -> bool {
        match self {
            Charge::Always => false,
            Charge::OnFailure => succeeded,
            Charge::OnSuccess => !succeeded,
        }
    }
}

impl Style {
    /// All styles.
    pub const ALL: [Style; 3] = [Style::X, Style::Ietf, Style::Draft6];
}
