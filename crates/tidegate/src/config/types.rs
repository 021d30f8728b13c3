//! The tables of a configuration file, as written: their values are checked when they are compiled.
//!
//! Strings with a grammar of their own (limits, times, networks, patterns) stay strings here, so that all invalid ones
//! are reported together, by the step that compiles them.

use std::collections::BTreeMap;

use tidegate_core::Algorithm;

use super::forms::{
    AnonymizeEntry, BodyEntry, HeaderTest, LimitEntry, Limits, OneOrMany, OptionalList, Secret, StoreEntry, StoreUrl,
    TimeText,
};
use super::read::{Named, tables};
use super::span::Spanned;
use crate::answer::{BodyFormat, Style};
use crate::failure::OnFailure;
use crate::identity::{ApiKeys, Rotate};
use crate::rules::{Charge, Mode};

/// The settings, plans, keys and rules of a configuration file, as written. The layer and the server use the same
/// files.
///
/// A file is loaded by `Config::load` or a `Loader`, which check and compile it.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
#[cfg_attr(feature = "schema", schemars(title = "Tidegate configuration"))]
pub struct Config {
    /// The expected number of rules and keys. A file with a different number, for example because it was truncated, is
    /// rejected.
    pub(crate) expect: Option<Spanned<Expect>>,
    /// The store for the counters: `memory`, a `redis://`, `redis+cluster://` or `redis+sentinel://` URL, with `rediss`
    /// for TLS, or a table with URLs, credentials and TLS.
    pub(crate) store: Option<Spanned<StoreEntry>>,
    /// The prefix of every key in the store. Defaults to `tidegate`.
    pub(crate) prefix: Option<Spanned<String>>,
    /// The number of instances that share the quotas while the store is unavailable. Defaults to the number of instances
    /// that share the store.
    pub(crate) instances: Option<Spanned<u32>>,
    /// The deadline for a decision by the store. Defaults to `25ms`.
    pub(crate) deadline: Option<Spanned<TimeText>>,
    /// How requests are decided while the store is unavailable: `local`, `allow` or `deny`. Defaults to `local`.
    pub(crate) on_failure: OnFailure,
    /// The header fields that report the limits. Defaults to `x` and `ietf`.
    pub(crate) headers: Option<Spanned<Vec<Style>>>,
    /// The format of the body of a refusal: `json`, `problem`, `text`, or a table with a template. Defaults to `json`, for
    /// shields to `text`.
    pub(crate) body: Option<BodyEntry>,
    /// Whether browsers may read the header fields that report the limits (`Access-Control-Expose-Headers`). Defaults
    /// to no.
    pub(crate) expose_headers: bool,
    /// Whether every enforced rule is in shadow mode instead: it counts requests but denies none. Defaults to no.
    pub(crate) shadow: Spanned<bool>,
    /// Whether nothing is limited, no ban applies and paths of any length are accepted. Defaults to no.
    pub(crate) kill_switch: Spanned<bool>,

    /// The maximum length of a path in bytes, without its query; a request with a longer one is rejected with 414.
    /// Defaults to 8192.
    pub(crate) path_bytes_max: Option<Spanned<u32>>,
    /// Headers in which a request may name another method, such as `x-http-method-override`. Rules then match that
    /// method as well as the request's own. Defaults to none.
    pub(crate) method_override_headers: OneOrMany<Spanned<String>>,

    /// Networks of the proxies that may report the client's address. Defaults to none.
    pub(crate) trusted_proxies: OneOrMany<Spanned<String>>,
    /// The header in which trusted proxies report the client's address. Defaults to `x-forwarded-for`.
    pub(crate) forwarding_header: Option<Spanned<String>>,
    /// The number of bits of an IPv6 address that identify a client. Defaults to 64.
    pub(crate) ipv6_prefix: Option<Spanned<u8>>,
    /// The header that contains a request's API key. Defaults to `x-api-key`.
    pub(crate) api_key_header: Option<Spanned<String>>,
    /// The API keys that identify a caller: those that are listed (`known`) or all (`any`). Defaults to `known`.
    pub(crate) api_keys: ApiKeys,
    /// Whether addresses, keys and other values of callers are stored as pseudonyms: `true`, `false` or a table.
    /// Defaults to `false`.
    pub(crate) anonymize: Spanned<AnonymizeEntry>,
    /// The settings for verifying users' tokens (JWT). Without them, tokens are ignored.
    pub(crate) jwt: Option<Spanned<Jwt>>,

    /// The secret with which `tidegate serve` encrypts receipts: at least 16 bytes, the same on all instances.
    pub(crate) receipt_secret: Option<Spanned<Secret>>,
    /// The name of the environment variable that holds the receipt secret.
    pub(crate) receipt_secret_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the receipt secret.
    pub(crate) receipt_secret_file: Option<Spanned<String>>,

    /// Requests that are never limited. The bans of this file still apply to them.
    pub(crate) exempt: Exempt,
    /// Networks, API keys and users whose requests are refused with 403.
    pub(crate) bans: Vec<Spanned<BanEntry>>,
    /// Named sets of limits. `default` is for callers without another plan, `anonymous` for callers without an
    /// identity.
    pub(crate) plans: BTreeMap<Spanned<String>, PlanTable>,
    /// API keys, with the plan or the limits of each.
    pub(crate) keys: OptionalList<Spanned<ApiKeyTable>>,
    /// A file with more keys, in a list `keys`. A relative path is relative to the directory of this file.
    pub(crate) keys_file: Option<Spanned<String>>,
    /// Further sources of API keys: a Redis hash.
    pub(crate) key_sources: KeySources,
    /// Further sources of a caller's plan: its address, a header, a Redis hash.
    pub(crate) plan_sources: PlanSources,
    /// The listener of the gateway, and bounds on what a client may send to it.
    pub(crate) gateway: GatewayTable,
    /// The services to which the gateway forwards requests. A reload without any fails unless the file has
    /// `upstreams = []`.
    pub(crate) upstreams: OptionalList<Spanned<UpstreamTable>>,
    /// Which requests are limited, and how. A reload without any rules fails unless the file has `rules = []`.
    pub(crate) rules: OptionalList<Spanned<RuleTable>>,
}

/// The store, written as a table: where it is, and how to connect to it. The files are read again at each connect.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct StoreTable {
    /// The URL of the server, or those of some nodes of the cluster, or of the Sentinels: `redis://host:port`, or
    /// `rediss://host:port` for TLS.
    pub(crate) urls: Option<Spanned<OneOrMany<Spanned<StoreUrl>>>>,
    /// What the URLs name: one `server`, nodes of a `cluster`, or the Sentinels of a master (`sentinel`). Defaults to
    /// the kind in the scheme of the URLs, else to `server`.
    pub(crate) kind: Option<Spanned<StoreKind>>,
    /// The name under which the Sentinels watch the master. Only with `kind = "sentinel"`.
    pub(crate) master: Option<Spanned<String>>,
    /// The number of replicas that must have acknowledged a decision before it is returned. If too few have within half
    /// the deadline, the failure policy applies. Defaults to 0.
    pub(crate) replicas: Option<Spanned<u32>>,
    /// Whether checks of different hash slots share a call to a node, for servers that accept keys that a script does
    /// not declare. Only with `kind = "cluster"`. Defaults to `false`.
    pub(crate) calls_across_slots: Option<Spanned<bool>>,
    /// The name of the user. Defaults to the server's default user.
    pub(crate) username: Option<Spanned<String>>,
    /// The name of the environment variable that holds the name of the user.
    pub(crate) username_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the name of the user.
    pub(crate) username_file: Option<Spanned<String>>,
    /// The name of the environment variable that holds the password.
    pub(crate) password_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the password.
    pub(crate) password_file: Option<Spanned<String>>,
    /// The name of the user of the Sentinels, which is separate from that of the master. Only with `kind = "sentinel"`.
    /// Defaults to the Sentinels' default user.
    pub(crate) sentinel_username: Option<Spanned<String>>,
    /// The name of the environment variable that holds the name of the user of the Sentinels. Only with
    /// `kind = "sentinel"`.
    pub(crate) sentinel_username_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the name of the user of the Sentinels. Only with `kind = "sentinel"`.
    pub(crate) sentinel_username_file: Option<Spanned<String>>,
    /// The name of the environment variable that holds the password of the Sentinels. Only with `kind = "sentinel"`.
    pub(crate) sentinel_password_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the password of the Sentinels. Only with `kind = "sentinel"`.
    pub(crate) sentinel_password_file: Option<Spanned<String>>,
    /// How TLS is used. Only with `rediss://` URLs.
    pub(crate) tls: Option<Spanned<StoreTlsTable>>,
}

/// How connections to the store use TLS.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct StoreTlsTable {
    /// A PEM file with the certificate authorities to trust. Defaults to the system's.
    pub(crate) ca_file: Option<Spanned<String>>,
    /// A PEM file with the client certificate. Requires `key_file`.
    pub(crate) cert_file: Option<Spanned<String>>,
    /// A PEM file with the private key of the client certificate.
    pub(crate) key_file: Option<Spanned<String>>,
    /// The name for which the certificates of the servers must be valid. Defaults to the host of each connection.
    pub(crate) server_name: Option<Spanned<String>>,
    /// The minimum version of TLS: `1.2` or `1.3`. Defaults to `1.2`.
    pub(crate) min_version: TlsMinVersion,
}

/// What the URLs of a store name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum StoreKind {
    /// One server that holds all keys.
    #[default]
    Server,
    /// Some nodes of a Redis Cluster.
    Cluster,
    /// Sentinels, which name the master.
    Sentinel,
}

impl StoreKind {
    /// Returns the name in a file, and in the scheme of a URL.
    pub(crate) fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// The minimum version of TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum TlsMinVersion {
    #[default]
    Tls12,
    Tls13,
}

/// The listener of the gateway.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct GatewayTable {
    /// The address on which the gateway listens, `HOST:PORT`.
    pub(crate) listen: Option<Spanned<String>>,
    /// Whether connections from `trusted_proxies` begin with a PROXY protocol header, which names the client. Defaults to
    /// false.
    pub(crate) proxy_protocol: Option<Spanned<bool>>,
    /// The format of the access log: `off`, `json` or `combined`. Defaults to `off`.
    pub(crate) access_log: AccessLog,
    /// The most bytes of a request line and all headers together. Defaults to 32768.
    pub(crate) header_bytes_max: Option<Spanned<u32>>,
    /// The most headers of a request. Defaults to 100.
    pub(crate) headers_max: Option<Spanned<u32>>,
    /// The most bytes of a URI, with its query. Defaults to 16384.
    pub(crate) uri_bytes_max: Option<Spanned<u32>>,
    /// The most concurrent requests of an HTTP/2 connection. Defaults to 100.
    pub(crate) streams_max: Option<Spanned<u32>>,
    /// The most connections of one client address, except those of trusted proxies. Defaults to 1000.
    pub(crate) connections_per_address: Option<Spanned<u32>>,
    /// How long a client may take for the next bytes of a request body. Defaults to `30s`.
    pub(crate) body_timeout: Option<Spanned<TimeText>>,
    /// The fewest bytes per second that a client must send of a request body or accept of a response body. Defaults to
    /// 240; 0 means no minimum.
    pub(crate) body_rate_min: Option<Spanned<u32>>,
    /// Whether headers whose names contain underscores are forwarded. Many servers cannot tell `X_Api_Key` from
    /// `X-Api-Key`, and the rules see only the latter. Defaults to false.
    pub(crate) underscores_in_headers: Option<bool>,
}

/// An upstream: a service behind the gateway.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct UpstreamTable {
    /// The name, for metrics and logs.
    pub(crate) name: Spanned<String>,
    /// The URLs of its servers, such as `http://127.0.0.1:3000`. Requests are distributed over them in turn.
    pub(crate) servers: Spanned<OneOrMany<Spanned<String>>>,
    /// Which requests are forwarded to it. Defaults to all that no other upstream matches.
    #[cfg_attr(feature = "schema", schemars(default, rename = "match"))]
    pub(crate) matches: Spanned<UpstreamMatch>,
    /// The most requests that it handles at the same time. Defaults to 1000.
    pub(crate) max_concurrent: Option<Spanned<u32>>,
    /// The most requests of one client address among `max_concurrent`, except those of trusted proxies. Defaults to a
    /// quarter of `max_concurrent`.
    pub(crate) max_concurrent_per_address: Option<Spanned<u32>>,
    /// The most requests that wait while it handles `max_concurrent`. Defaults to 100.
    pub(crate) queue: Option<Spanned<u32>>,
    /// The most idle connections that are kept open to each server. Defaults to 64.
    pub(crate) idle_connections: Option<Spanned<u32>>,
    /// Whether the client's `Host` is forwarded, instead of the host of the server's URL. Defaults to true.
    pub(crate) preserve_host: Option<bool>,
    /// A PEM file with the certificate authorities of servers with `https`. Defaults to the system's.
    pub(crate) ca_file: Option<Spanned<String>>,
    /// The timeouts of requests to it.
    #[cfg_attr(feature = "schema", schemars(default))]
    pub(crate) timeouts: TimeoutsTable,
}

/// Which requests an upstream gets. The most specific host wins, then the longest path.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct UpstreamMatch {
    /// Any of these hosts: `api.example.com`, `*.example.com`.
    pub(crate) host: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// A prefix of the path, such as `/api`: matches `/api` and everything below it.
    pub(crate) path: Option<Spanned<String>>,
}

/// The timeouts of requests to an upstream.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct TimeoutsTable {
    /// The time to connect to a server. Defaults to `3s`.
    pub(crate) connect: Option<Spanned<TimeText>>,
    /// The time from the end of a request to the head of its response. Defaults to `60s`.
    pub(crate) header: Option<Spanned<TimeText>>,
    /// The time without a byte of a response body that is sent or accepted, or of a tunnel. Defaults to `60s`.
    pub(crate) idle: Option<Spanned<TimeText>>,
    /// The time for a whole request and its response. Defaults to `1h`.
    pub(crate) total: Option<Spanned<TimeText>>,
    /// The time in the queue. Defaults to `1s`.
    pub(crate) queue: Option<Spanned<TimeText>>,
}

/// The format of the gateway's access log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum AccessLog {
    /// There is no access log.
    #[default]
    Off,
    /// A JSON object per line.
    Json,
    /// The combined log format.
    Combined,
}

/// The expected number of rules and keys. A different number is an error; an absent number is not checked.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct Expect {
    /// The number of rules.
    pub(crate) rules: Option<Spanned<u32>>,
    /// The number of keys, including those of the keys file.
    pub(crate) keys: Option<Spanned<u32>>,
}

/// A rule: which requests it matches, by which subject they are counted, and against which limits.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct RuleTable {
    /// The name. It is used in metrics and logs and is part of the counters' keys, so a renamed rule starts with new
    /// counters.
    pub(crate) name: Spanned<String>,
    /// Which requests the rule matches. Defaults to all.
    #[cfg_attr(feature = "schema", schemars(default, rename = "match"))]
    pub(crate) matches: Spanned<MatchTable>,
    /// The subjects by which requests are counted, in combination. Defaults to `caller`, or `ip` for a shield.
    pub(crate) by: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// A list of limits, or `plan` for the limits of the caller's plan.
    pub(crate) limits: Spanned<Limits>,
    /// Whether the rule denies (`enforce`), only counts (`shadow`), or is ignored (`off`). Defaults to `enforce`.
    #[cfg_attr(feature = "schema", schemars(default))]
    pub(crate) mode: Mode,
    /// How this rule decides while the store is unavailable. Defaults to the `on_failure` of the file.
    pub(crate) on_failure: Option<OnFailure>,
    /// Which requests are charged, by their outcome. Defaults to `always`.
    #[cfg_attr(feature = "schema", schemars(default))]
    pub(crate) charge: Spanned<Charge>,
    /// The units that a request costs, unless the request sets its own cost. Defaults to 1.
    pub(crate) cost: Option<Spanned<u32>>,
    /// The header fields that report this rule's limits. Defaults to the `headers` of the file.
    pub(crate) headers: Option<Spanned<Vec<Style>>>,
    /// The format of the body of a refusal. Defaults to the `body` of the file.
    pub(crate) body: Option<BodyEntry>,
    /// `memory` makes the rule a shield, which is decided in process memory before everything else.
    pub(crate) store: Option<Spanned<RuleStore>>,
}

/// The body of a refusal, written as a template.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct TemplateTable {
    /// The body with placeholders, such as `{"wait":{retry_after}}`.
    pub(crate) template: Spanned<String>,
    /// The content type of the body, for which values are escaped. Defaults to `application/json`.
    pub(crate) content_type: Option<Spanned<String>>,
}

/// The conditions of a rule. A request matches if it meets all of them; one that is absent is met by every request.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct MatchTable {
    /// Any of these methods. `GET` also matches `HEAD`.
    pub(crate) methods: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Any of these paths: `/shorten`, `/users/{id}`, `/api/*`.
    pub(crate) path: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Any of these hosts: `api.example.com`, `*.example.com`.
    pub(crate) host: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Callers in any of these groups. A caller has the groups of its API key.
    pub(crate) groups: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// All of these headers: `true` if it must be present, or the string that it must equal.
    pub(crate) headers: BTreeMap<Spanned<String>, HeaderTest>,
}

/// A limit, written as a table: either `limit` alone, or `quota` and `window` with their options; and a name.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct LimitTable {
    /// The name, which clients see and which is part of the counter's key. Defaults to a name derived from the window.
    pub(crate) name: Option<Spanned<String>>,
    /// The whole limit as a string.
    pub(crate) limit: Option<Spanned<String>>,
    /// The units per window.
    pub(crate) quota: Option<Spanned<u64>>,
    /// The window, such as `10s`.
    pub(crate) window: Option<Spanned<TimeText>>,
    /// The algorithm. Defaults to `sliding`.
    #[cfg_attr(feature = "schema", schemars(schema_with = "super::schema::algorithm"))]
    pub(crate) algorithm: Option<Spanned<Algorithm>>,
    /// The capacity of a `token-bucket`.
    pub(crate) burst: Option<Spanned<u64>>,
    /// The number of units that may wait in a `leaky-bucket`.
    pub(crate) queue: Option<Spanned<u64>>,
    /// Whether denied requests are charged too. Defaults to no.
    pub(crate) count_denied: Option<Spanned<bool>>,
}

/// A plan: the limits of its callers in rules with `limits = "plan"`.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct PlanTable {
    /// The limits.
    pub(crate) limits: Spanned<OneOrMany<Spanned<LimitEntry>>>,
    /// The URL at which a refused client can get a larger plan.
    pub(crate) upgrade_url: Option<Spanned<String>>,
}

/// An API key, given by exactly one of `key` and `sha256`, and the plan or the limits of its owner.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct ApiKeyTable {
    /// The key itself.
    pub(crate) key: Option<Spanned<Secret>>,
    /// The SHA-256 digest of the key in hexadecimal, so that the file does not contain the key.
    pub(crate) sha256: Option<Spanned<Secret>>,
    /// The name of the key's owner, for reports and explanations.
    pub(crate) name: Option<String>,
    /// The plan. Defaults to the one that `plan_sources` or the token determines, else `default`.
    pub(crate) plan: Option<Spanned<String>>,
    /// The limits of this key, instead of those of its plan.
    pub(crate) limits: Option<Spanned<OneOrMany<Spanned<LimitEntry>>>>,
    /// The groups of the key's owner, to which rules can apply by `match.groups`.
    pub(crate) groups: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Whether requests with this key are never limited.
    pub(crate) exempt: bool,
}

/// Sources of API keys, besides this file and the keys file, which take precedence.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct KeySources {
    /// A Redis hash in the store that maps API keys to their attributes. A field is `api_key:` followed by the key's
    /// SHA-256; its value is a JSON object with the optional fields `name`, `plan`, `limits`, `groups` and `exempt`. A
    /// change takes effect within about a second.
    pub(crate) redis_hash: Option<Spanned<String>>,
}

/// Sources of a caller's plan, besides the API keys and the token's claim.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct PlanSources {
    /// Plans by address. The first entry that contains the client's address applies.
    pub(crate) addresses: Vec<AddressPlan>,
    /// A header that names the plan. Ignored unless a trusted proxy sent the request.
    pub(crate) header: Option<Spanned<String>>,
    /// A Redis hash in the store that maps callers to the names of their plans. A field is `api_key:` followed by the
    /// key's SHA-256, `user:` followed by the user, or `caller:` followed by the caller that the application sets. A
    /// change takes effect within about a second.
    pub(crate) redis_hash: Option<Spanned<String>>,
}

/// The plan of all clients in some networks.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct AddressPlan {
    /// The networks.
    pub(crate) networks: OneOrMany<Spanned<String>>,
    /// The plan.
    pub(crate) plan: Spanned<String>,
}

/// The settings for verifying users' tokens (JWT). The key is given in exactly one of three fields.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct Jwt {
    /// The only algorithm that is accepted.
    pub(crate) algorithm: JwtAlgorithm,
    /// The secret (HS256) or the public key as PEM (RS256, ES256).
    pub(crate) key: Option<Spanned<Secret>>,
    /// The name of the environment variable that holds the key.
    pub(crate) key_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the key.
    pub(crate) key_file: Option<Spanned<String>>,
    /// The claim that names the plan.
    pub(crate) plan_claim: Option<String>,
    /// The issuer that a token must name.
    pub(crate) issuer: Option<String>,
    /// The audience that a token must name.
    pub(crate) audience: Option<String>,
}

/// The settings of pseudonyms. The secret is given in exactly one of three fields; with counters in memory it is
/// optional.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct Anonymize {
    /// The secret that all instances share, of at least 16 bytes.
    pub(crate) secret: Option<Spanned<Secret>>,
    /// The name of the environment variable that holds the secret.
    pub(crate) secret_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the secret.
    pub(crate) secret_file: Option<Spanned<String>>,
    /// When the pseudonyms change. Defaults to `daily`.
    pub(crate) rotate: Rotate,
}

/// Requests that are never limited: by client address, by API key or by path.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(default, deny_unknown_fields))]
pub(crate) struct Exempt {
    /// Networks of clients.
    pub(crate) addresses: OneOrMany<Spanned<String>>,
    /// API keys: the key itself, or `sha256:` followed by its digest.
    pub(crate) keys: Vec<Spanned<Secret>>,
    /// Path patterns.
    pub(crate) paths: OneOrMany<Spanned<String>>,
}

/// A ban: a network, an API key or a user whose requests are refused, until the ban ends.
///
/// There is no `for = "1h"`: a file has no start time to count from, and each reload would start the ban again.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(deny_unknown_fields))]
pub(crate) struct BanEntry {
    /// The kind of `value`.
    pub(crate) by: BanKind,
    /// The network, the key (or `sha256:` followed by its digest), or the user.
    pub(crate) value: Spanned<Secret>,
    /// The end of the ban in UTC, such as `2030-01-31T12:00:00Z`. Defaults to no end.
    pub(crate) until: Option<Spanned<String>>,
    /// The reason, for operators.
    pub(crate) reason: Option<String>,
}

/// The store of a rule, if it is not the store of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RuleStore {
    /// Process memory. The rule is a shield, which is decided before all other rules.
    Memory,
}

/// The signature algorithm of tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum JwtAlgorithm {
    /// HMAC-SHA-256 with a shared secret.
    Hs256,
    /// RSA with SHA-256.
    Rs256,
    /// ECDSA with SHA-256 on the curve P-256.
    Es256,
}

/// The kind of subject that is banned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BanKind {
    /// A network.
    Ip,
    /// An API key.
    ApiKey,
    /// A user.
    User,
}

tables! {
    Config {
        expect, store, prefix, instances, deadline, on_failure, headers, body, expose_headers, shadow, kill_switch,
        path_bytes_max, method_override_headers, trusted_proxies, forwarding_header, ipv6_prefix, api_key_header,
        api_keys, anonymize, jwt, receipt_secret, receipt_secret_env, receipt_secret_file, exempt, bans, plans, keys, keys_file, key_sources, plan_sources, gateway,
        upstreams, rules,
    }
    StoreTable {
        urls, kind, master, replicas, calls_across_slots, username, username_env, username_file, password_env, password_file,
        sentinel_username, sentinel_username_env, sentinel_username_file, sentinel_password_env, sentinel_password_file, tls,
    }
    StoreTlsTable { ca_file, cert_file, key_file, server_name, min_version }
    Expect { rules, keys }
    GatewayTable {
        listen, proxy_protocol, access_log, header_bytes_max, headers_max, uri_bytes_max, streams_max,
        connections_per_address, body_timeout, body_rate_min, underscores_in_headers,
    }
    UpstreamTable {
        name, servers: required, matches as "match", max_concurrent, max_concurrent_per_address, queue, idle_connections, preserve_host, ca_file,
        timeouts,
    }
    UpstreamMatch { host, path }
    TimeoutsTable { connect, header, idle, total, queue }
    RuleTable { name, matches as "match", by, limits, mode, on_failure, charge, cost, headers, body, store }
    MatchTable { methods, path, host, groups, headers }
    TemplateTable { template, content_type }
    LimitTable { name, limit, quota, window, algorithm, burst, queue, count_denied }
    PlanTable { limits: required, upgrade_url }
    ApiKeyTable { key, sha256, name, plan, limits, groups, exempt }
    KeySources { redis_hash }
    PlanSources { addresses, header, redis_hash }
    AddressPlan { networks: required, plan }
    Jwt { algorithm, key, key_env, key_file, plan_claim, issuer, audience }
    Anonymize { secret, secret_env, secret_file, rotate }
    Exempt { addresses, keys, paths }
    BanEntry { by, value, until, reason }
}

/// Implements [`Named`] for enums. A field of a type that is marked `default` may be absent.
macro_rules! named {
    (@absent) => {};
    (@absent default) => {
        fn absent() -> Option<Self> {
            Some(Self::default())
        }
    };
    ($($type:ident $($absent:ident)? { $($name:literal => $variant:ident,)* })*) => {$(
        impl Named for $type {
            const NAMES: &'static [(&'static str, $type)] = &[$(($name, $type::$variant),)*];

            named!(@absent $($absent)?);
        }
    )*};
}

named! {
    OnFailure default { "local" => Local, "allow" => Allow, "deny" => Deny, }
    Style { "x" => X, "ietf" => Ietf, "draft-6" => Draft6, }
    ApiKeys default { "known" => Known, "any" => Any, }
    Rotate default { "daily" => Daily, "never" => Never, }
    Mode default { "enforce" => Enforce, "shadow" => Shadow, "off" => Off, }
    Charge default { "always" => Always, "on_failure" => OnFailure, "on_success" => OnSuccess, }
    BodyFormat { "json" => Json, "problem" => Problem, "text" => Text, }
    Algorithm {
        "sliding" => Sliding,
        "sliding-log" => SlidingLog,
        "sliding-counter" => SlidingCounter,
        "fixed-window" => FixedWindow,
        "token-bucket" => TokenBucket,
        "leaky-bucket" => LeakyBucket,
    }
    RuleStore { "memory" => Memory, }
    StoreKind { "server" => Server, "cluster" => Cluster, "sentinel" => Sentinel, }
    TlsMinVersion default { "1.2" => Tls12, "1.3" => Tls13, }
    AccessLog default { "off" => Off, "json" => Json, "combined" => Combined, }
    JwtAlgorithm { "HS256" => Hs256, "RS256" => Rs256, "ES256" => Es256, }
    BanKind { "ip" => Ip, "api_key" => ApiKey, "user" => User, }
}
