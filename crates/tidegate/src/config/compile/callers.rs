//! Compiles how callers are identified: proxies, keys, tokens, pseudonyms; and exemptions and bans.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate_config::{
    Anonymize, AnonymizeEntry, BanKind, Code, ConfigTable, Finding, OneOrMany, Secret, Span, Spanned,
};
use tidegate_core::Timestamp;

use super::{Compiler, Settings};
use crate::identity::{AddressPrefixes, Anonymizer, ForwardingHeader, Identifier, KeyDigest, Networks, TrustedProxies};
use crate::rules::CompiledBan;
use crate::rules::lists::{BanList, ExemptList};
use crate::rules::method::MethodSet;
use crate::rules::pattern::Pattern;
use crate::rules::trie::{Candidate, Trie};

impl Compiler<'_> {
    /// Builds the identifier of callers: trusted proxies, API keys, tokens and pseudonyms.
    ///
    /// Reads the key for tokens and the secret for pseudonyms from environment variables or files, if they are given
    /// so. Adds an error for each invalid value and continues without it: an invalid network is left out and the others
    /// are kept, and any other value has its default.
    pub(super) fn identifier(&mut self, config: &ConfigTable, settings: &Settings) -> Identifier {
        let networks = self.networks(&config.trusted_proxies);
        let header = config.forwarding_header.as_ref().and_then(|name| {
            let parsed = name.parse::<ForwardingHeader>();
            self.accept(parsed, Code::InvalidHeader, name.span())
        });
        let mut identifier = Identifier::new()
            .with_proxies(TrustedProxies::new(networks, header.unwrap_or_default()))
            .with_api_keys(config.api_keys);
        if let Some(bits) = &config.ipv6_prefix
            && let Some(prefixes) = self.accept(AddressPrefixes::new(32, **bits), Code::InvalidNetwork, bits.span())
        {
            identifier = identifier.with_prefixes(prefixes);
        }
        if let Some(name) = config.api_key_header.as_ref().and_then(|name| self.header_name(name)) {
            identifier = identifier.with_api_key_header(name);
        }
        if let Some(jwt) = &config.jwt {
            identifier = self.with_tokens(identifier, jwt);
        }
        if let AnonymizeEntry::On(table) = &*config.anonymize
            && let Some(anonymizer) = self.anonymizer(table, config.anonymize.span(), settings)
        {
            identifier = identifier.with_anonymizer(anonymizer);
        }
        identifier
    }

    /// Parses a list of networks. Adds an error for each text that is not a network, and leaves it out.
    pub(super) fn networks(&mut self, texts: &OneOrMany<Spanned<String>>) -> Networks {
        let is_network = |text: &&Spanned<String>| {
            let parsed = Networks::parse([text.as_str()]);
            self.accept(parsed, Code::InvalidNetwork, text.span()).is_some()
        };
        let valid: Vec<&str> = texts.iter().filter(is_network).map(|text| text.as_str()).collect();
        Networks::parse(valid).unwrap_or_default()
    }

    fn anonymizer(&mut self, table: &Anonymize, span: Span, settings: &Settings) -> Option<Anonymizer> {
        let fields = SecretFields { text: &table.secret, variable: &table.secret_env, file: &table.secret_file };
        let names = ["secret", "secret_env", "secret_file"];
        let is_optional = !settings.is_shared() && fields.are_all_absent();
        let (secret, span) = if is_optional {
            (Secret::new(process_secret()), span)
        } else {
            self.secret("a secret for anonymize", names, fields, span)?
        };
        let anonymizer = Anonymizer::new(secret.reveal().as_bytes(), table.rotate);
        self.accept(anonymizer, Code::InvalidValue, span)
    }

    /// Returns a secret, and the span of the field that gives it: the text itself, the name of an environment variable,
    /// or the name of a file, whose trailing white space is removed.
    ///
    /// Adds an error and returns `None` if none or several of the fields are present, the variable is not set, or the
    /// file cannot be read. `names` are the names of the three fields, in this order. `what` is the subject of the
    /// message, such as `a key for JWT`. `span` is used if the error is about no single field. A file that was read is
    /// recorded, with the secret, for the comparison in a reload.
    pub(super) fn secret(
        &mut self,
        what: &str,
        names: [&str; 3],
        fields: SecretFields<'_>,
        span: Span,
    ) -> Option<(Secret, Span)> {
        let fail = |compiler: &mut Self, message: String, help: String, at: Span| {
            compiler.note(Finding::new(Code::SecretMissing, message).help(help).at(at));
            None
        };
        let [in_file, in_variable, in_other_file] = names;
        match (fields.text, fields.variable, fields.file) {
            (Some(text), None, None) => Some(((**text).clone(), text.span())),
            (None, Some(name), None) => match self.loader.variable(name.reveal()) {
                Some(value) => Some((Secret::new(value), name.span())),
                None => {
                    // A user may have written the secret itself instead of the name of its variable.
                    let (message, help) = if looks_like_variable(name.reveal()) {
                        let variable = name.reveal();
                        let help =
                            format!("set it to a value that is not empty, for example with `export {variable}=…`");
                        (format!("the environment variable `{variable}` is not set"), help)
                    } else {
                        let help = format!(
                            "`{in_variable}` is the name of a variable, such as TIDEGATE_SECRET: set that variable; \
                                 for the value itself, use `{in_file}`"
                        );
                        (format!("the environment variable that `{in_variable}` names is not set"), help)
                    };
                    fail(self, message, help, name.span())
                }
            },
            (None, None, Some(name)) => match self.loader.read_text(&self.loader.path(name)) {
                Ok((text, metadata)) => {
                    let secret = Secret::new(text.trim_end());
                    self.files.push((self.loader.path(name), metadata));
                    self.secret_files.push((name.to_string(), secret.clone()));
                    Some((secret, name.span()))
                }
                Err(finding) => {
                    self.note(finding.at(name.span()));
                    None
                }
            },
            (None, None, None) => {
                let help = format!("add `{in_file}`, `{in_variable}` or `{in_other_file}`");
                fail(self, format!("{what} is required"), help, span)
            }
            _ => {
                let help = format!("keep only one of `{in_file}`, `{in_variable}` and `{in_other_file}`");
                fail(self, format!("{what} is given in several ways"), help, span)
            }
        }
    }

    /// Compiles the exempt addresses and paths. Returns them, and the patterns of the paths for the lints.
    ///
    /// Adds an error for each invalid entry and leaves it out. Exempt keys are compiled by [`Compiler::keys`].
    pub(super) fn exempt(&mut self, config: &ConfigTable) -> (ExemptList, Vec<Pattern>) {
        let patterns: Vec<Pattern> = config.exempt.paths.iter().filter_map(|text| self.pattern(text)).collect();
        let mut paths = Trie::default();
        for pattern in &patterns {
            paths.insert(pattern, Candidate { rule: 0, methods: MethodSet::ALL });
        }
        (ExemptList { addresses: self.networks(&config.exempt.addresses), paths }, patterns)
    }

    /// Compiles the bans on networks, API keys and users. Adds an error for each invalid value.
    ///
    /// A ban on an invalid network is left out. One with an invalid end is compiled as permanent.
    pub(super) fn bans(&mut self, config: &ConfigTable) -> BanList {
        let (mut bans, mut banned_networks) = (BanList::default(), Vec::new());
        for entry in &config.bans {
            let until = entry.until.as_ref().and_then(|text| self.instant(text));
            let ban = CompiledBan { until, reason: entry.reason.as_deref().map(Box::from) };
            let (value, span) = (entry.value.reveal(), entry.value.span());
            match entry.by {
                BanKind::Ip => {
                    let networks = Networks::parse([value]);
                    if let Some(networks) = self.accept(networks, Code::InvalidNetwork, span) {
                        banned_networks.extend(networks.iter().map(|network| (network, ban.clone())));
                    }
                }
                BanKind::ApiKey => bans.add_key(self.key_or_digest(&entry.value), ban),
                BanKind::User => bans.add_user(value, ban),
            }
        }
        bans.set_networks(banned_networks);
        bans
    }

    /// Returns the digest of an API key that is written as the key itself, or as `sha256:` and its digest.
    ///
    /// Adds an error if no request can carry the key or the digest is invalid. The result is then the digest of the
    /// text.
    pub(super) fn key_or_digest(&mut self, text: &Spanned<Secret>) -> KeyDigest {
        let key = text.reveal();
        if !key.starts_with("sha256:") {
            let source = self.source.clone();
            self.check_key(text, &source);
            return KeyDigest::of(key);
        }
        let digest = key.parse::<KeyDigest>();
        self.accept(digest, Code::InvalidKey, text.span()).unwrap_or_else(|| KeyDigest::of(key))
    }

    fn instant(&mut self, text: &Spanned<String>) -> Option<Timestamp> {
        let time: Option<SystemTime> = humantime::parse_rfc3339_weak(text).ok();
        let since_epoch = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        if since_epoch.is_none() {
            let message = "expected a date and time in UTC, such as 2030-01-31T12:00:00Z";
            self.note(Finding::new(Code::InvalidTime, message).at(text.span()));
        }
        let us = u64::try_from(since_epoch?.as_micros()).unwrap_or(u64::MAX);
        Some(Timestamp::from_micros(us))
    }
}

/// The three fields in which a secret can be given: its text, the name of an environment variable, or the name of a
/// file.
#[derive(Clone, Copy)]
pub(super) struct SecretFields<'c> {
    pub(super) text: &'c Option<Spanned<Secret>>,
    pub(super) variable: &'c Option<Spanned<Secret>>,
    pub(super) file: &'c Option<Spanned<String>>,
}

impl SecretFields<'_> {
    /// Returns whether the secret is given in none of the fields.
    pub(super) fn are_all_absent(&self) -> bool {
        self.text.is_none() && self.variable.is_none() && self.file.is_none()
    }
}

/// Returns whether a message may quote a text as the name of an environment variable, because it is hardly a secret.
///
/// That is so if it has at most 64 characters, all of them uppercase letters, digits and underscores, and does not
/// begin with a digit.
pub(super) fn looks_like_variable(name: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    name.len() <= 64 && !name.starts_with(|first: char| first.is_ascii_digit()) && name.bytes().all(is_name_byte)
}

/// Returns a random secret of 64 characters, which is created by the first call and stays the same until the process
/// ends.
///
/// It is for pseudonyms of counters in memory. If a reload changed it, all pseudonyms would change, and every counter
/// would start again.
fn process_secret() -> &'static str {
    use std::hash::{BuildHasher, RandomState};
    static SECRET: OnceLock<String> = OnceLock::new();
    SECRET.get_or_init(|| {
        // The standard library's hasher is SipHash with random keys from the operating system.
        let words = (0_u8..4).map(|number| RandomState::new().hash_one(number));
        words.map(|word| format!("{word:016x}")).collect()
    })
}
