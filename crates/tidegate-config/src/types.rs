//! The tables of a configuration file, as written: their values are checked when they are compiled.
//!
//! Each setting is declared once, in the form that `table.rs` describes.
//!
//! Strings with a grammar of their own (limits, times, networks, patterns) stay strings here, so that all invalid ones
//! are reported together, by the step that compiles them.

use std::collections::BTreeMap;

use tidegate_core::{Algorithm, OnFailure};

use crate::changes::Changes;
use crate::forms::{
    AnonymizeEntry, BodyEntry, HeaderTest, LimitEntry, Limits, OneOrMany, OptionalList, Secret, StoreEntry, StoreUrl,
    TimeText,
};
use crate::read::Named;
use crate::span::Spanned;
use crate::table::tables;
use crate::values::{
    AccessLog, ApiKeys, BanKind, Charge, JwtAlgorithm, Mode, Rotate, RuleStore, StoreKind, Style, TlsMinVersion,
};

tables! {
/// The settings, plans, keys and rules of a configuration file, as written. The layer and the server use the same
/// files.
///
/// A file is loaded by `Config::load` or a `Loader`, which check and compile it.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default, title = "Tidegate configuration"))]
pub struct ConfigTable setters __setters {
    /// The expected number of rules and keys. A file with a different number, for example because it was truncated, is
    /// rejected.
    expect: Option<Spanned<Expect>> [unlisted],
    /// The store for the counters: `memory`, a `redis://`, `redis+cluster://` or `redis+sentinel://` URL, with `rediss`
    /// for TLS, or a table with URLs, credentials and TLS.
    store: Option<Spanned<StoreEntry>> [restart],
    /// The prefix of every key in the store. Defaults to `tidegate`.
    prefix: Option<Spanned<String>> [restart],
    /// The number of instances that share the quotas while the store is unavailable. Defaults to the number of instances
    /// that share the store.
    instances: Option<Spanned<u32>> [restart] { set: u32, "At least 1. Ignored by [`Engine::new`](crate::engine::Engine::new), which uses the limiter that it is given." },
    /// The deadline for a decision by the store. Defaults to `25ms`.
    deadline: Option<Spanned<TimeText>> [restart],
    /// How requests are decided while the store is unavailable: `local`, `allow` or `deny`. Defaults to `local`.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::named::<OnFailure>"))]
    on_failure: OnFailure { set: OnFailure, "A rule may have [its own](crate::rules::Rule::on_failure)." },
    /// The header fields that report the limits. Defaults to `x` and `ietf`.
    headers: Option<Spanned<Vec<Style>>>,
    /// The format of the body of a refusal: `json`, `problem`, `text`, or a table with a template. Defaults to `json`, for
    /// shields to `text`.
    body: Option<BodyEntry> [requests_only],
    /// Whether browsers may read the header fields that report the limits (`Access-Control-Expose-Headers`). Defaults
    /// to no.
    expose_headers: bool { set: bool },
    /// Whether every enforced rule is in shadow mode instead: it counts requests but denies none. Defaults to no.
    shadow: Spanned<bool> [requests_only] { set: bool, "Bans and the maximum length of a path still apply." },
    /// Whether nothing is limited, no ban applies and paths of any length are accepted. Defaults to no.
    kill_switch: Spanned<bool> { set: bool, "An engine then does not consider bans in the store either, and charges and counts nothing." },

    /// The maximum length of a path in bytes, without its query; a request with a longer one is rejected with 414.
    /// Defaults to 8192.
    path_bytes_max: Option<Spanned<u32>> [requests_only] { set: u32, "From 1 to 65,534." },
    /// Headers in which a request may name another method, such as `x-http-method-override`. Rules then match that
    /// method as well as the request's own. Defaults to none.
    method_override_headers: OneOrMany<Spanned<String>>,

    /// Networks of the proxies that may report the client's address. Defaults to none.
    trusted_proxies: OneOrMany<Spanned<String>>,
    /// The header in which trusted proxies report the client's address. Defaults to `x-forwarded-for`.
    forwarding_header: Option<Spanned<String>>,
    /// The number of bits of an IPv6 address that identify a client. Defaults to 64.
    ipv6_prefix: Option<Spanned<u8>> { set: u8, "From 1 to 128. IPv6 clients whose addresses agree in these bits share their counters." },
    /// The header that contains a request's API key. Defaults to `x-api-key`.
    api_key_header: Option<Spanned<String>>,
    /// The API keys that identify a caller: those that are listed (`known`) or all (`any`). Defaults to `known`.
    api_keys: ApiKeys { set: ApiKeys, "A caller with a key that does not identify it is counted by user or address." },
    /// Whether addresses, keys and other values of callers are stored as pseudonyms: `true`, `false` or a table.
    /// Defaults to `false`.
    anonymize: Spanned<AnonymizeEntry> [requests_only],
    /// The settings for verifying users' tokens (JWT). Without them, tokens are ignored.
    jwt: Option<Spanned<Jwt>>,

    /// The secret with which `tidegate serve` encrypts receipts: at least 16 bytes, the same on all instances.
    receipt_secret: Option<Spanned<Secret>> [restart],
    /// The name of the environment variable that holds the receipt secret.
    receipt_secret_env: Option<Spanned<Secret>> [restart, in_code("receipt_secret")],
    /// The name of the file that holds the receipt secret.
    receipt_secret_file: Option<Spanned<String>> [restart, in_code("receipt_secret")],

    /// Requests that are never limited. The bans of this file still apply to them.
    exempt: Exempt [requests_only, in_code("")] { changes: Changes::exempt },
    /// Networks, API keys and users whose requests are refused with 403.
    bans: Vec<Spanned<BanEntry>> [requests_only] { changes: Changes::bans },
    /// Named sets of limits. `default` is for callers without another plan, `anonymous` for callers without an
    /// identity.
    plans: BTreeMap<Spanned<String>, PlanTable> [in_code("plan")] { changes: Changes::plans },
    /// API keys, with the plan or the limits of each.
    keys: OptionalList<Spanned<ApiKeyTable>> [unlisted],
    /// A file with more keys, in a list `keys`. A relative path is relative to the directory of this file.
    keys_file: Option<Spanned<String>>,
    /// Further sources of API keys: a Redis hash.
    key_sources: KeySources [in_code("")],
    /// Further sources of a caller's plan: its address, a header, a Redis hash.
    plan_sources: PlanSources [in_code("")],
    /// The listener of the gateway, and bounds on what a client may send to it.
    gateway: GatewayTable [restart],
    /// The services to which the gateway forwards requests. A reload without any fails unless the file has
    /// `upstreams = []`.
    upstreams: OptionalList<Spanned<UpstreamTable>> { changes: Changes::upstreams },
    /// Which requests are limited, and how. A reload without any rules fails unless the file has `rules = []`.
    rules: OptionalList<Spanned<RuleTable>> { changes: Changes::rules },
}

/// The store, written as a table: where it is, and how to connect to it. The files are read again at each connect.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct StoreTable {
    /// The URL of the server, or those of some nodes of the cluster, or of the Sentinels: `redis://host:port`, or
    /// `rediss://host:port` for TLS.
    urls: Option<Spanned<OneOrMany<Spanned<StoreUrl>>>>,
    /// What the URLs name: one `server`, nodes of a `cluster`, or the Sentinels of a master (`sentinel`). Defaults to
    /// the kind in the scheme of the URLs, else to `server`.
    kind: Option<Spanned<StoreKind>>,
    /// The name under which the Sentinels watch the master. Only with `kind = "sentinel"`.
    master: Option<Spanned<String>>,
    /// The number of replicas that must have acknowledged a decision before it is returned. If too few have within half
    /// the deadline, the failure policy applies. Defaults to 0.
    replicas: Option<Spanned<u32>>,
    /// Whether checks of different hash slots share a call to a node, for servers that accept keys that a script does
    /// not declare. Only with `kind = "cluster"`. Defaults to `false`.
    calls_across_slots: Option<Spanned<bool>>,
    /// The name of the user. Defaults to the server's default user.
    username: Option<Spanned<String>>,
    /// The name of the environment variable that holds the name of the user.
    username_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the name of the user.
    username_file: Option<Spanned<String>>,
    /// The name of the environment variable that holds the password.
    password_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the password.
    password_file: Option<Spanned<String>>,
    /// The name of the user of the Sentinels, which is separate from that of the master. Only with `kind = "sentinel"`.
    /// Defaults to the Sentinels' default user.
    sentinel_username: Option<Spanned<String>>,
    /// The name of the environment variable that holds the name of the user of the Sentinels. Only with
    /// `kind = "sentinel"`.
    sentinel_username_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the name of the user of the Sentinels. Only with `kind = "sentinel"`.
    sentinel_username_file: Option<Spanned<String>>,
    /// The name of the environment variable that holds the password of the Sentinels. Only with `kind = "sentinel"`.
    sentinel_password_env: Option<Spanned<Secret>>,
    /// The name of the file that holds the password of the Sentinels. Only with `kind = "sentinel"`.
    sentinel_password_file: Option<Spanned<String>>,
    /// How TLS is used. Only with `rediss://` URLs.
    tls: Option<Spanned<StoreTlsTable>>,
}

/// How connections to the store use TLS.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct StoreTlsTable {
    /// A PEM file with the certificate authorities to trust. Defaults to the system's.
    ca_file: Option<Spanned<String>>,
    /// A PEM file with the client certificate. Requires `key_file`.
    cert_file: Option<Spanned<String>>,
    /// A PEM file with the private key of the client certificate.
    key_file: Option<Spanned<String>>,
    /// The name for which the certificates of the servers must be valid. Defaults to the host of each connection.
    server_name: Option<Spanned<String>>,
    /// The minimum version of TLS: `1.2` or `1.3`. Defaults to `1.2`.
    min_version: TlsMinVersion,
}

/// The listener of the gateway.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct GatewayTable {
    /// The address on which the gateway listens, `HOST:PORT`.
    listen: Option<Spanned<String>>,
    /// Whether connections from `trusted_proxies` begin with a PROXY protocol header, which names the client. Defaults to
    /// false.
    proxy_protocol: Option<Spanned<bool>>,
    /// The format of the access log: `off`, `json` or `combined`. Defaults to `off`.
    access_log: AccessLog,
    /// The most bytes of a request line and all headers together. Defaults to 32768.
    header_bytes_max: Option<Spanned<u32>>,
    /// The most headers of a request. Defaults to 100.
    headers_max: Option<Spanned<u32>>,
    /// The most bytes of a URI, with its query. Defaults to 16384.
    uri_bytes_max: Option<Spanned<u32>>,
    /// The most concurrent requests of an HTTP/2 connection. Defaults to 100.
    streams_max: Option<Spanned<u32>>,
    /// The most connections of one client address, except those of trusted proxies. Defaults to 1000.
    connections_per_address: Option<Spanned<u32>>,
    /// How long a client may take for the next bytes of a request body. Defaults to `30s`.
    body_timeout: Option<Spanned<TimeText>>,
    /// The fewest bytes per second that a client must send of a request body or accept of a response body. Defaults to
    /// 240; 0 means no minimum.
    body_rate_min: Option<Spanned<u32>>,
    /// Whether headers whose names contain underscores are forwarded. Many servers cannot tell `X_Api_Key` from
    /// `X-Api-Key`, and the rules see only the latter. Defaults to false.
    underscores_in_headers: Option<bool>,
}

/// An upstream: a service behind the gateway.
pub struct UpstreamTable {
    /// The name, for metrics and logs.
    name: Spanned<String>,
    /// The URLs of its servers, such as `http://127.0.0.1:3000`. Requests are distributed over them in turn.
    servers: Spanned<OneOrMany<Spanned<String>>> [required],
    /// Which requests are forwarded to it. Defaults to all that no other upstream matches.
    #[cfg_attr(feature = "schema", schemars(default))]
    matches as "match": Spanned<UpstreamMatch>,
    /// The most requests that it handles at the same time. Defaults to 1000.
    max_concurrent: Option<Spanned<u32>>,
    /// The most requests of one client address among `max_concurrent`, except those of trusted proxies. Defaults to a
    /// quarter of `max_concurrent`.
    max_concurrent_per_address: Option<Spanned<u32>>,
    /// The most requests that wait while it handles `max_concurrent`. Defaults to 100.
    queue: Option<Spanned<u32>>,
    /// The most idle connections that are kept open to each server. Defaults to 64.
    idle_connections: Option<Spanned<u32>>,
    /// Whether the client's `Host` is forwarded, instead of the host of the server's URL. Defaults to true.
    preserve_host: Option<bool>,
    /// A PEM file with the certificate authorities of servers with `https`. Defaults to the system's.
    ca_file: Option<Spanned<String>>,
    /// The timeouts of requests to it.
    #[cfg_attr(feature = "schema", schemars(default))]
    timeouts: TimeoutsTable,
}

/// Which requests an upstream gets. The most specific host wins, then the longest path.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct UpstreamMatch {
    /// Any of these hosts: `api.example.com`, `*.example.com`.
    host: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// A prefix of the path, such as `/api`: matches `/api` and everything below it.
    path: Option<Spanned<String>>,
}

/// The timeouts of requests to an upstream.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct TimeoutsTable {
    /// The time to connect to a server. Defaults to `3s`.
    connect: Option<Spanned<TimeText>>,
    /// The time from the end of a request to the head of its response. Defaults to `60s`.
    header: Option<Spanned<TimeText>>,
    /// The time without a byte of a response body that is sent or accepted, or of a tunnel. Defaults to `60s`.
    idle: Option<Spanned<TimeText>>,
    /// The time for a whole request and its response. Defaults to `1h`.
    total: Option<Spanned<TimeText>>,
    /// The time in the queue. Defaults to `1s`.
    queue: Option<Spanned<TimeText>>,
}

/// The expected number of rules and keys. A different number is an error; an absent number is not checked.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct Expect {
    /// The number of rules.
    rules: Option<Spanned<u32>>,
    /// The number of keys, including those of the keys file.
    keys: Option<Spanned<u32>>,
}

/// A rule: which requests it matches, by which subject they are counted, and against which limits.
#[derive(Default)]
pub struct RuleTable named rule_in_code {
    /// The name. It is used in metrics and logs and is part of the counters' keys, so a renamed rule starts with new
    /// counters.
    name: Spanned<String> [unlisted, in_code("")],
    /// Which requests the rule matches. Defaults to all.
    #[cfg_attr(feature = "schema", schemars(default))]
    matches as "match": Spanned<MatchTable> [in_code("")],
    /// The subjects by which requests are counted, in combination. Defaults to `caller`, or `ip` for a shield.
    by: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// A list of limits, or `plan` for the limits of the caller's plan.
    limits: Spanned<Limits>,
    /// Whether the rule denies (`enforce`), only counts (`shadow`), or is ignored (`off`). Defaults to `enforce`.
    #[cfg_attr(feature = "schema", schemars(default))]
    mode: Mode,
    /// How this rule decides while the store is unavailable. Defaults to the `on_failure` of the file.
    #[cfg_attr(feature = "schema", schemars(default, schema_with = "crate::schema::named::<OnFailure>"))]
    on_failure: Option<OnFailure>,
    /// Which requests are charged, by their outcome. Defaults to `always`.
    #[cfg_attr(feature = "schema", schemars(default))]
    charge: Spanned<Charge>,
    /// The units that a request costs, unless the request sets its own cost. Defaults to 1.
    cost: Option<Spanned<u32>>,
    /// The header fields that report this rule's limits. Defaults to the `headers` of the file.
    headers: Option<Spanned<Vec<Style>>>,
    /// The format of the body of a refusal. Defaults to the `body` of the file.
    body: Option<BodyEntry>,
    /// `memory` makes the rule a shield, which is decided in process memory before everything else.
    store: Option<Spanned<RuleStore>> [in_code("shield")],
}

/// The body of a refusal, written as a template.
pub struct TemplateTable {
    /// The body with placeholders, such as `{"wait":{retry_after}}`.
    template: Spanned<String>,
    /// The content type of the body, for which values are escaped. Defaults to `application/json`.
    content_type: Option<Spanned<String>>,
}

/// The conditions of a rule. A request matches if it meets all of them; one that is absent is met by every request.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct MatchTable {
    /// Any of these methods. `GET` also matches `HEAD`.
    methods: Option<Spanned<OneOrMany<Spanned<String>>>> [in_code("method")],
    /// Any of these paths: `/shorten`, `/users/{id}`, `/api/*`.
    path: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Any of these hosts: `api.example.com`, `*.example.com`.
    host: Option<Spanned<OneOrMany<Spanned<String>>>>,
    /// Callers in any of these groups. A caller has the groups of its API key.
    groups: Option<Spanned<OneOrMany<Spanned<String>>>> [in_code("group")],
    /// All of these headers: `true` if it must be present, or the string that it must equal.
    headers: BTreeMap<Spanned<String>, HeaderTest> [in_code("header")],
}

/// A limit, written as a table: either `limit` alone, or `quota` and `window` with their options; and a name.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct LimitTable {
    /// The name, which clients see and which is part of the counter's key. Defaults to a name derived from the window.
    name: Option<Spanned<String>> [unlisted, in_code("")],
    /// The whole limit as a string.
    limit: Option<Spanned<String>> [unlisted, in_code("")],
    /// The units per window.
    quota: Option<Spanned<u64>> [unlisted],
    /// The window, such as `10s`.
    window: Option<Spanned<TimeText>> [unlisted],
    /// The algorithm. Defaults to `sliding`.
    #[cfg_attr(feature = "schema", schemars(schema_with = "crate::schema::named::<Algorithm>"))]
    algorithm: Option<Spanned<Algorithm>>,
    /// The capacity of a `token-bucket`.
    burst: Option<Spanned<u64>>,
    /// The number of units that may wait in a `leaky-bucket`.
    queue: Option<Spanned<u64>>,
    /// Whether denied requests are charged too. Defaults to no.
    count_denied: Option<Spanned<bool>>,
}

/// A plan: the limits of its callers in rules with `limits = "plan"`.
#[derive(Default)]
pub struct PlanTable {
    /// The limits.
    limits: Spanned<OneOrMany<Spanned<LimitEntry>>> [required],
    /// The URL at which a refused client can get a larger plan.
    upgrade_url: Option<Spanned<String>>,
}

/// An API key, given by exactly one of `key` and `sha256`, and the plan or the limits of its owner.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct ApiKeyTable named key_in_code {
    /// The key itself.
    key: Option<Spanned<Secret>> [unlisted, in_code("")],
    /// The SHA-256 digest of the key in hexadecimal, so that the file does not contain the key.
    sha256: Option<Spanned<Secret>> [unlisted, in_code("")],
    /// The name of the key's owner, for reports and explanations.
    name: Option<String> [unlisted],
    /// The plan. Defaults to the one that `plan_sources` or the token determines, else `default`.
    plan: Option<Spanned<String>>,
    /// The limits of this key, instead of those of its plan.
    limits: Option<Spanned<OneOrMany<Spanned<LimitEntry>>>>,
    /// The groups of the key's owner, to which rules can apply by `match.groups`.
    groups: Option<Spanned<OneOrMany<Spanned<String>>>> [in_code("group")],
    /// Whether requests with this key are never limited.
    exempt: bool,
}

/// Sources of API keys, besides this file and the keys file, which take precedence.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct KeySources {
    /// A Redis hash in the store that maps API keys to their attributes. A field is `api_key:` followed by the key's
    /// SHA-256; its value is a JSON object with the optional fields `name`, `plan`, `limits`, `groups` and `exempt`. A
    /// change takes effect within about a second.
    redis_hash: Option<Spanned<String>> [restart, in_code("key_hash")],
}

/// Sources of a caller's plan, besides the API keys and the token's claim.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct PlanSources {
    /// Plans by address. The first entry that contains the client's address applies.
    addresses: Vec<AddressPlan> [in_code("address_plan")],
    /// A header that names the plan. Ignored unless a trusted proxy sent the request.
    header: Option<Spanned<String>> [in_code("plan_header")],
    /// A Redis hash in the store that maps callers to the names of their plans. A field is `api_key:` followed by the
    /// key's SHA-256, `user:` followed by the user, or `caller:` followed by the caller that the application sets. A
    /// change takes effect within about a second.
    redis_hash: Option<Spanned<String>> [restart, in_code("plan_hash")],
}

/// The plan of all clients in some networks.
pub struct AddressPlan {
    /// The networks.
    networks: OneOrMany<Spanned<String>> [required, in_code("")],
    /// The plan.
    plan: Spanned<String> [in_code("")],
}

/// The settings for verifying users' tokens (JWT). The key is given in exactly one of three fields.
pub struct Jwt {
    /// The only algorithm that is accepted.
    algorithm: JwtAlgorithm [unlisted],
    /// The secret (HS256) or the public key as PEM (RS256, ES256).
    key: Option<Spanned<Secret>> [unlisted],
    /// The name of the environment variable that holds the key.
    key_env: Option<Spanned<Secret>> [unlisted, in_code("key")],
    /// The name of the file that holds the key.
    key_file: Option<Spanned<String>> [unlisted, in_code("key")],
    /// The claim that names the plan.
    plan_claim: Option<String>,
    /// The issuer that a token must name.
    issuer: Option<String>,
    /// The audience that a token must name.
    audience: Option<String>,
}

/// The settings of pseudonyms. The secret is given in exactly one of three fields; with counters in memory it is
/// optional.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct Anonymize {
    /// The secret that all instances share, of at least 16 bytes.
    secret: Option<Spanned<Secret>>,
    /// The name of the environment variable that holds the secret.
    secret_env: Option<Spanned<Secret>> [in_code("secret")],
    /// The name of the file that holds the secret.
    secret_file: Option<Spanned<String>> [in_code("secret")],
    /// When the pseudonyms change. Defaults to `daily`.
    rotate: Rotate,
}

/// Requests that are never limited: by client address, by API key or by path.
#[derive(Default)]
#[cfg_attr(feature = "schema", schemars(default))]
pub struct Exempt {
    /// Networks of clients.
    addresses: OneOrMany<Spanned<String>> [in_code("exempt address")],
    /// API keys: the key itself, or `sha256:` followed by its digest.
    keys: Vec<Spanned<Secret>> [in_code("exempt key")],
    /// Path patterns.
    paths: OneOrMany<Spanned<String>> [in_code("exempt path")],
}

/// A ban: a network, an API key or a user whose requests are refused, until the ban ends.
///
/// There is no `for = "1h"`: a file has no start time to count from, and each reload would start the ban again.
pub struct BanEntry named ban_in_code {
    /// The kind of `value`.
    by: BanKind,
    /// The network, the key (or `sha256:` followed by its digest), or the user.
    value: Spanned<Secret> [in_code("")],
    /// The end of the ban in UTC, such as `2030-01-31T12:00:00Z`. Defaults to no end.
    until: Option<Spanned<String>>,
    /// The reason, for operators.
    reason: Option<String>,
}
}

/// These are declared in a crate that reads no files.
impl Named for Algorithm {
    const NAMES: &'static [(&'static str, Algorithm)] = Algorithm::NAMES;
}

impl Named for OnFailure {
    const NAMES: &'static [(&'static str, OnFailure)] = OnFailure::NAMES;

    fn absent() -> Option<OnFailure> {
        Some(OnFailure::default())
    }
}

/// Returns the name of a rule that is built in code, for findings.
fn rule_in_code(rule: &RuleTable, _index: usize) -> String {
    format!("rule `{}`", *rule.name)
}

/// Returns the name of a key that is given in code, for findings: that of its owner, or its number.
fn key_in_code(key: &ApiKeyTable, index: usize) -> String {
    key.name.as_ref().map_or_else(|| format!("key {}", index + 1), |name| format!("key `{name}`"))
}

/// Returns the number of a ban that is given in code, for findings.
fn ban_in_code(_ban: &BanEntry, index: usize) -> String {
    format!("ban {}", index + 1)
}
