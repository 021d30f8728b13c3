//! Callers: plans, keys, bans, tokens, secrets.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_config::{ApiKeyTable, BanEntry, BanKind, Jwt, JwtAlgorithm, PlanTable, Secret, Spanned};

use super::rule::{LimitText, add_text, limit_entry};

/// A named set of limits that callers have. Rules with [`limits_from_plan`](super::Rule::limits_from_plan) apply it.
///
/// ```
/// use tidegate::rules::{Plan, Rule, Rules};
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
    pub(super) table: PlanTable,
}

impl Plan {
    /// Creates a plan without limits. At least one must be added, or building the rules fails.
    ///
    /// The name has 1 to 64 letters, digits, `-`, `_` and `.`. The plans `default` and `anonymous` are those of callers
    /// without another plan; see [`Rules::plan`](super::Rules::plan).
    pub fn new(name: impl Into<String>) -> Plan {
        Plan { name: name.into(), table: PlanTable::default() }
    }

    /// Adds a limit, such as `60/min`. Building the rules fails if the text is not a limit.
    ///
    /// Its name is derived from its window: `per-minute`, or `per-minute-2` if that name is taken. The name is part of
    /// the counter's name, so a limit whose window changes starts with a new counter. Clients see it in headers and in
    /// the bodies of refusals. [`named_limit`](Plan::named_limit) sets another.
    pub fn limit(mut self, limit: impl Into<LimitText>) -> Plan {
        self.table.limits.0.push(limit_entry(None, limit.into()).into());
        self
    }

    /// Adds a limit with a name of 1 to 64 characters `a-z`, `0-9` and `-`, which no other limit of the plan has.
    ///
    /// Building the rules fails if the text is not a limit, or if the name is invalid or taken.
    ///
    /// The name is part of the counter's name, and clients see it in headers and in the bodies of refusals.
    pub fn named_limit(mut self, name: impl Into<String>, limit: impl Into<LimitText>) -> Plan {
        self.table.limits.0.push(limit_entry(Some(name.into()), limit.into()).into());
        self
    }

    /// Sets the URL where a client can upgrade its plan. It appears in the bodies of refusals. Defaults to none.
    pub fn upgrade_url(mut self, url: impl Into<String>) -> Plan {
        self.table.upgrade_url = Some(url.into().into());
        self
    }
}

/// A known API key: it identifies a caller, and may have a plan, limits of its own or an exemption.
///
/// ```
/// use tidegate::rules::{ListedKey, Plan, Rule, Rules};
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
pub struct ListedKey(pub(super) ApiKeyTable);

impl ListedKey {
    /// Creates an entry for a key in plain text: 1 to 1,024 visible ASCII characters.
    pub fn new(key: impl Into<String>) -> ListedKey {
        ListedKey(ApiKeyTable { key: Some(Secret::new(key).into()), ..ApiKeyTable::default() })
    }

    /// Creates an entry for the key with this SHA-256 digest: 64 hexadecimal digits, as `printf %s KEY | sha256sum`
    /// prints.
    pub fn sha256(digest: impl Into<String>) -> ListedKey {
        ListedKey(ApiKeyTable { sha256: Some(Secret::new(digest).into()), ..ApiKeyTable::default() })
    }

    /// Sets the name of the key's owner, for error messages and [`RuleSet::key`](crate::rules::RuleSet::key).
    pub fn name(mut self, name: impl Into<String>) -> ListedKey {
        self.0.name = Some(name.into());
        self
    }

    /// Sets the plan of callers with this key. Building fails if there is no such plan.
    ///
    /// Defaults to the plan that the client's address, a trusted header, the token or a lookup determines, else
    /// `default`.
    pub fn plan(mut self, plan: impl Into<String>) -> ListedKey {
        self.0.plan = Some(plan.into().into());
        self
    }

    /// Adds a limit of the key's own. All own limits together replace those of the key's plan.
    ///
    /// Building the rules fails if the text is not a limit. The limit is named after its window, such as `per-minute`,
    /// or `per-minute-2` if that name is taken. The name is part of the counter's name. Own limits apply only in rules
    /// with [`limits_from_plan`](super::Rule::limits_from_plan).
    pub fn limit(mut self, limit: impl Into<LimitText>) -> ListedKey {
        self.0.limits.get_or_insert_default().0.push(limit_entry(None, limit.into()).into());
        self
    }

    /// Adds a limit of the key's own with a name of 1 to 64 characters `a-z`, `0-9` and `-`, unique among its own
    /// limits.
    ///
    /// All own limits together replace those of the key's plan, in rules with
    /// [`limits_from_plan`](super::Rule::limits_from_plan). Building the rules fails if the text is not a limit, or if
    /// the name is invalid or taken.
    pub fn named_limit(mut self, name: impl Into<String>, limit: impl Into<LimitText>) -> ListedKey {
        self.0.limits.get_or_insert_default().0.push(limit_entry(Some(name.into()), limit.into()).into());
        self
    }

    /// Adds a group of the key's owner: 1 to 64 letters, digits, `-`, `_` and `.`. A key may have several.
    ///
    /// A rule with [`group`](super::Rule::group) applies only to callers in one of its groups. Building the rules fails
    /// if the name is invalid.
    pub fn group(mut self, group: impl Into<String>) -> ListedKey {
        add_text(&mut self.0.groups, group);
        self
    }

    /// Exempts callers with this key from all rules. Bans that are added by [`Rules::ban`](super::Rules::ban) still
    /// apply.
    pub fn exempt(mut self) -> ListedKey {
        self.0.exempt = true;
        self
    }
}

/// A ban on a network, an API key or a user, whose requests are refused with 403. Permanent unless it has an end.
///
/// It also applies to exempt requests and to those that no rule matches, but not while the
/// [kill switch](super::Rules::kill_switch) is on.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tidegate::rules::{Ban, Rules};
///
/// let tomorrow = SystemTime::now() + Duration::from_secs(24 * 60 * 60);
/// let rules = Rules::new().ban(Ban::network("203.0.113.0/24").until(tomorrow).reason("scraping"));
/// assert!(rules.build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "a ban has no effect until it is added to `Rules`"]
pub struct Ban(pub(super) BanEntry);

impl Ban {
    /// Creates a ban on all clients in a network, such as `203.0.113.0/24`, or on a single address.
    pub fn network(network: impl Into<String>) -> Ban {
        Ban::of(BanKind::Ip, network)
    }

    /// Creates a ban on an API key, given in plain text, or as `sha256:` and its SHA-256 in hexadecimal.
    ///
    /// The key need not be known. A request is refused if it has the key in any API key header or bearer token.
    pub fn api_key(key: impl Into<String>) -> Ban {
        Ban::of(BanKind::ApiKey, key)
    }

    /// Creates a ban on a user: the subject (`sub`) of a verified JSON web token.
    pub fn user(user: impl Into<String>) -> Ban {
        Ban::of(BanKind::User, user)
    }

    fn of(by: BanKind, value: impl Into<String>) -> Ban {
        Ban(BanEntry { by, value: Secret::new(value).into(), until: None, reason: None })
    }

    /// Sets when the ban ends. By default it is permanent.
    ///
    /// With a time in the past, the ban has no effect. A time after the year 9999 is replaced by the end of that year.
    pub fn until(mut self, until: SystemTime) -> Ban {
        self.0.until = Some(rfc3339(until).into());
        self
    }

    /// Sets the reason, which [`CompiledBan::reason`](crate::rules::CompiledBan::reason) returns. Clients do not see
    /// it.
    pub fn reason(mut self, reason: impl Into<String>) -> Ban {
        self.0.reason = Some(reason.into());
        self
    }
}

/// A secret or key, or where to read it when the rules are built: an environment variable or a file.
#[derive(Clone, Debug)]
pub struct SecretSource(SecretSourceKind);

/// The three cases of a [`SecretSource`].
#[derive(Clone, Debug)]
enum SecretSourceKind {
    /// The secret itself.
    Text(Secret),
    /// The name of an environment variable. Kept as a secret, in case the secret itself was given by mistake.
    Variable(Secret),
    /// The path of a file.
    File(String),
}

/// The three fields of a table that can give a secret: the text, the name of a variable, and the path of a file.
type FieldsOfSecret = (Option<Spanned<Secret>>, Option<Spanned<Secret>>, Option<Spanned<String>>);

impl SecretSource {
    /// Uses this text as the secret.
    pub fn text(secret: impl Into<String>) -> SecretSource {
        SecretSource(SecretSourceKind::Text(Secret::new(secret)))
    }

    /// Reads the secret from the environment variable with this name. Building the rules fails if it is unset or empty.
    pub fn env(name: impl Into<String>) -> SecretSource {
        SecretSource(SecretSourceKind::Variable(Secret::new(name)))
    }

    /// Reads the secret from a file, without trailing white space. Building the rules fails if the file cannot be read.
    ///
    /// A relative path is relative to the current directory, or to
    /// [`Loader::directory`](crate::config::Loader::directory).
    pub fn file(path: impl Into<String>) -> SecretSource {
        SecretSource(SecretSourceKind::File(path.into()))
    }

    /// Returns the fields of a table that give the secret, of which exactly one is `Some`.
    pub(super) fn into_fields(self) -> FieldsOfSecret {
        match self.0 {
            SecretSourceKind::Text(text) => (Some(text.into()), None, None),
            SecretSourceKind::Variable(name) => (None, Some(name.into()), None),
            SecretSourceKind::File(path) => (None, None, Some(path.into())),
        }
    }
}

/// How JSON web tokens are verified: algorithm, key, and required claims.
///
/// ```
/// use tidegate::rules::{JwtSettings, Rule, Rules, SecretSource};
/// use tidegate::Subject;
///
/// let secret = SecretSource::text("a secret of more than thirty-two bytes");
/// let rules = Rules::new()
///     .jwt(JwtSettings::hs256(secret).issuer("https://login.example.com").plan_claim("plan"))
///     .rule(Rule::new("export").by(Subject::User).limit("10/hour"));
/// assert!(rules.build().is_ok());
/// ```
#[derive(Clone, Debug)]
#[must_use = "settings have no effect until they are added to `Rules`"]
pub struct JwtSettings(pub(super) Jwt);

impl JwtSettings {
    /// Accepts only tokens that are signed with HMAC-SHA-256 (HS256) and this secret of at least 32 bytes.
    pub fn hs256(secret: SecretSource) -> JwtSettings {
        JwtSettings::of(JwtAlgorithm::Hs256, secret)
    }

    /// Accepts only tokens that this RSA public key verifies (RS256). The key has at least 2,048 bits and is in PEM.
    pub fn rs256(public_key: SecretSource) -> JwtSettings {
        JwtSettings::of(JwtAlgorithm::Rs256, public_key)
    }

    /// Accepts only tokens that this public key on the curve P-256 verifies (ES256). The key is in PEM.
    pub fn es256(public_key: SecretSource) -> JwtSettings {
        JwtSettings::of(JwtAlgorithm::Es256, public_key)
    }

    fn of(algorithm: JwtAlgorithm, key: SecretSource) -> JwtSettings {
        let (key, key_env, key_file) = key.into_fields();
        JwtSettings(Jwt { algorithm, key, key_env, key_file, plan_claim: None, issuer: None, audience: None })
    }

    /// Sets the claim of a token that names the user's plan. By default tokens determine no plan.
    pub fn plan_claim(mut self, claim: impl Into<String>) -> JwtSettings {
        self.0.plan_claim = Some(claim.into());
        self
    }

    /// Requires that the claim `iss` of a token is `issuer`. By default it is not checked.
    pub fn issuer(mut self, issuer: impl Into<String>) -> JwtSettings {
        self.0.issuer = Some(issuer.into());
        self
    }

    /// Requires that the claim `aud` of a token is or contains `audience`. By default it is not checked.
    pub fn audience(mut self, audience: impl Into<String>) -> JwtSettings {
        self.0.audience = Some(audience.into());
        self
    }
}

/// The last second that RFC 3339 can express: 9999-12-31T23:59:59Z.
const RFC3339_SECS_MAX: u64 = 253_402_300_799;

/// Formats an instant as RFC 3339. One before 1970 or after 9999 becomes the first or last second of these years.
fn rfc3339(instant: SystemTime) -> String {
    let since_epoch = instant.duration_since(UNIX_EPOCH).unwrap_or_default();
    let expressible = since_epoch.min(Duration::from_secs(RFC3339_SECS_MAX));
    humantime::format_rfc3339(UNIX_EPOCH + expressible).to_string()
}
