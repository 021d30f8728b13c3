//! Callers: plans, keys, bans, tokens, secrets.

use std::time::SystemTime;

use super::rule::LimitText;
use crate::config::{JwtAlgorithm, Secret};

/// A named set of limits that belongs to a caller. Rules with `limits_from_plan` use it.
///
/// ```
/// use tollgate::rules::{Plan, Rule, Rules};
///
/// let rules = Rules::new()
///     .plan(Plan::new("default").limit("60/min").upgrade_url("https://example.com/plans"))
///     .plan(Plan::new("anonymous").limit("30/min"))
///     .rule(Rule::new("api").limits_from_plan());
/// assert!(rules.build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "a plan has no effect until it is added to `Rules`"]
pub struct Plan {
    pub(super) name: String,
    pub(super) limits: Vec<(Option<String>, LimitText)>,
    pub(super) upgrade_url: Option<String>,
}

impl Plan {
    /// Creates a plan without limits. At least one must be added.
    pub fn new(name: impl Into<String>) -> Plan {
        Plan { name: name.into(), limits: Vec::new(), upgrade_url: None }
    }

    /// Adds a limit, named after its window, such as `per-minute`.
    pub fn limit(mut self, limit: impl Into<LimitText>) -> Plan {
        self.limits.push((None, limit.into()));
        self
    }

    /// Adds a limit with a name, which is part of the counter's name and appears in headers: 1 to 64 of `a-z0-9-`.
    pub fn named_limit(mut self, name: impl Into<String>, limit: impl Into<LimitText>) -> Plan {
        self.limits.push((Some(name.into()), limit.into()));
        self
    }

    /// Sets the URL where a refused client can get a larger plan. Refusals contain it.
    pub fn upgrade_url(mut self, url: impl Into<String>) -> Plan {
        self.upgrade_url = Some(url.into());
        self
    }
}

/// An API key that the rules know, with its plan or limits of its own.
///
/// ```
/// use tollgate::rules::{ListedKey, Plan, Rule, Rules};
///
/// let rules = Rules::new()
///     .plan(Plan::new("default").limit("60/min"))
///     .plan(Plan::new("pro").limit("600/min"))
///     .key(ListedKey::new("a-key-for-tests").name("acme").plan("pro"))
///     .rule(Rule::new("api").limits_from_plan());
/// assert!(rules.build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "a key has no effect until it is added to `Rules`"]
pub struct ListedKey {
    pub(super) key: Result<Secret, Secret>,
    pub(super) name: Option<String>,
    pub(super) plan: Option<String>,
    pub(super) limits: Vec<(Option<String>, LimitText)>,
    pub(super) is_exempt: bool,
}

impl ListedKey {
    /// Creates an entry for a key.
    pub fn new(key: impl Into<String>) -> ListedKey {
        ListedKey::of(Ok(Secret::new(key)))
    }

    /// Creates an entry for the key with this SHA-256 digest in hexadecimal.
    pub fn sha256(digest: impl Into<String>) -> ListedKey {
        ListedKey::of(Err(Secret::new(digest)))
    }

    fn of(key: Result<Secret, Secret>) -> ListedKey {
        ListedKey { key, name: None, plan: None, limits: Vec::new(), is_exempt: false }
    }

    /// Sets the name of the key's owner, for people.
    pub fn name(mut self, name: impl Into<String>) -> ListedKey {
        self.name = Some(name.into());
        self
    }

    /// Sets the plan. Defaults to the plan of the address, header or token, else `default`.
    pub fn plan(mut self, plan: impl Into<String>) -> ListedKey {
        self.plan = Some(plan.into());
        self
    }

    /// Adds a limit of the key's own. The key's own limits replace those of its plan.
    pub fn limit(mut self, limit: impl Into<LimitText>) -> ListedKey {
        self.limits.push((None, limit.into()));
        self
    }

    /// Adds a limit of the key's own with a name: 1 to 64 of `a-z0-9-`.
    pub fn named_limit(mut self, name: impl Into<String>, limit: impl Into<LimitText>) -> ListedKey {
        self.limits.push((Some(name.into()), limit.into()));
        self
    }

    /// Exempts the key from all rules.
    pub fn exempt(mut self) -> ListedKey {
        self.is_exempt = true;
        self
    }
}

/// A network, an API key or a user whose requests are refused with 403.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tollgate::rules::{Ban, Rules};
///
/// let tomorrow = SystemTime::now() + Duration::from_secs(24 * 60 * 60);
/// let rules = Rules::new().ban(Ban::network("203.0.113.0/24").until(tomorrow).reason("scraping"));
/// assert!(rules.build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "a ban has no effect until it is added to `Rules`"]
pub struct Ban {
    pub(super) banned: Banned,
    pub(super) until: Option<SystemTime>,
    pub(super) reason: Option<String>,
}

/// What a [`Ban`] bans.
#[derive(Clone, Debug)]
pub(super) enum Banned {
    Network(String),
    ApiKey(Secret),
    User(String),
}

impl Ban {
    /// Bans a network, such as `203.0.113.0/24`, or a single address.
    pub fn network(network: impl Into<String>) -> Ban {
        Ban::of(Banned::Network(network.into()))
    }

    /// Bans an API key, given as it is or as `sha256:` and its digest in hexadecimal.
    pub fn api_key(key: impl Into<String>) -> Ban {
        Ban::of(Banned::ApiKey(Secret::new(key)))
    }

    /// Bans a user: the subject of verified tokens.
    pub fn user(user: impl Into<String>) -> Ban {
        Ban::of(Banned::User(user.into()))
    }

    fn of(banned: Banned) -> Ban {
        Ban { banned, until: None, reason: None }
    }

    /// Sets when the ban ends. Defaults to never.
    pub fn until(mut self, until: SystemTime) -> Ban {
        self.until = Some(until);
        self
    }

    /// Sets the reason, for people. Clients do not see it.
    pub fn reason(mut self, reason: impl Into<String>) -> Ban {
        self.reason = Some(reason.into());
        self
    }
}

/// Where a secret comes from. Environment and file are read when the rules are built.
#[derive(Clone, Debug)]
pub struct SecretSource(pub(super) Source);

/// The cases of a [`SecretSource`].
#[derive(Clone, Debug)]
pub(super) enum Source {
    Text(Secret),
    Variable(Secret),
    File(String),
}

impl SecretSource {
    /// Uses this text.
    pub fn text(secret: impl Into<String>) -> SecretSource {
        SecretSource(Source::Text(Secret::new(secret)))
    }

    /// Reads the secret from an environment variable. Building fails if it is not set or empty.
    pub fn env(name: impl Into<String>) -> SecretSource {
        SecretSource(Source::Variable(Secret::new(name)))
    }

    /// Reads the secret from a file, without trailing white space. Building fails if it cannot be read.
    pub fn file(path: impl Into<String>) -> SecretSource {
        SecretSource(Source::File(path.into()))
    }
}

/// How JSON web tokens are verified.
///
/// ```
/// use tollgate::rules::{JwtSettings, Rule, Rules, SecretSource};
/// use tollgate::Subject;
///
/// let secret = SecretSource::text("a secret of more than thirty-two bytes");
/// let rules = Rules::new()
///     .jwt(JwtSettings::hs256(secret).issuer("https://login.example.com").plan_claim("plan"))
///     .rule(Rule::new("export").by(Subject::User).limit("10/hour"));
/// assert!(rules.build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "settings have no effect until they are added to `Rules`"]
pub struct JwtSettings {
    pub(super) algorithm: JwtAlgorithm,
    pub(super) key: SecretSource,
    pub(super) plan_claim: Option<String>,
    pub(super) issuer: Option<String>,
    pub(super) audience: Option<String>,
}

impl JwtSettings {
    /// Accepts tokens signed with HMAC-SHA-256 and this secret of at least 32 bytes, and no others.
    pub fn hs256(secret: SecretSource) -> JwtSettings {
        JwtSettings::of(JwtAlgorithm::Hs256, secret)
    }

    /// Accepts tokens signed with RSA and SHA-256 for this public key in PEM, and no others.
    pub fn rs256(public_key: SecretSource) -> JwtSettings {
        JwtSettings::of(JwtAlgorithm::Rs256, public_key)
    }

    /// Accepts tokens signed with ECDSA on P-256 for this public key in PEM, and no others.
    pub fn es256(public_key: SecretSource) -> JwtSettings {
        JwtSettings::of(JwtAlgorithm::Es256, public_key)
    }

    fn of(algorithm: JwtAlgorithm, key: SecretSource) -> JwtSettings {
        JwtSettings { algorithm, key, plan_claim: None, issuer: None, audience: None }
    }

    /// Sets the claim that names the user's plan. Defaults to none.
    pub fn plan_claim(mut self, claim: impl Into<String>) -> JwtSettings {
        self.plan_claim = Some(claim.into());
        self
    }

    /// Sets the issuer that tokens must name. Defaults to any.
    pub fn issuer(mut self, issuer: impl Into<String>) -> JwtSettings {
        self.issuer = Some(issuer.into());
        self
    }

    /// Sets the audience that tokens must name. Defaults to any.
    pub fn audience(mut self, audience: impl Into<String>) -> JwtSettings {
        self.audience = Some(audience.into());
        self
    }
}
