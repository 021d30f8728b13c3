//! Compiles how callers are identified: proxies, keys, tokens, pseudonyms; and exemptions and bans.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use tollgate_core::Timestamp;

use super::{Compiler, Settings};
use crate::config::finding::{Code, Finding};
use crate::config::forms::{AnonymizeEntry, OneOrMany, Secret};
use crate::config::span::{Span, Spanned};
use crate::config::types::{Anonymize, BanKind, Config};
use crate::identity::{AddressPrefixes, Anonymizer, ForwardingHeader, Identifier, KeyDigest, Networks, TrustedProxies};
use crate::rules::CompiledBan;
use crate::rules::lists::{BanList, ExemptList};
use crate::rules::method::MethodSet;
use crate::rules::pattern::Pattern;
use crate::rules::trie::{Candidate, Trie};

impl Compiler<'_> {
    /// Compiles the identification of callers.
    pub(super) fn identifier(&mut self, config: &Config, settings: &Settings) -> Identifier {
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

    /// Parses a list of networks. Invalid ones are noted and left out.
    pub(super) fn networks(&mut self, texts: &OneOrMany<Spanned<String>>) -> Networks {
        let is_network = |text: &&Spanned<String>| {
            let parsed = Networks::parse([text.as_str()]);
            self.accept(parsed, Code::InvalidNetwork, text.span()).is_some()
        };
        let valid: Vec<&str> = texts.iter().filter(is_network).map(|text| text.as_str()).collect();
        Networks::parse(valid).unwrap_or_default()
    }

    fn anonymizer(&mut self, table: &Anonymize, span: Span, settings: &Settings) -> Option<Anonymizer> {
        let ways = Ways { text: &table.secret, variable: &table.secret_env, file: &table.secret_file };
        let names = ["secret", "secret_env", "secret_file"];
        let is_optional = !settings.is_shared() && ways.are_all_absent();
        let (secret, span) = match is_optional {
            true => (Secret::new(process_secret()), span),
            false => self.secret("a secret for anonymize", names, ways, span)?,
        };
        let anonymizer = Anonymizer::new(secret.reveal().as_bytes(), table.rotate);
        self.accept(anonymizer, Code::InvalidValue, span)
    }

    /// Returns a secret that is given in exactly one of three ways, and its place. Otherwise notes an error and returns `None`.
    ///
    /// `names` are the names of the fields, `what` is the secret in messages.
    pub(super) fn secret(
        &mut self,
        what: &str,
        names: [&str; 3],
        ways: Ways<'_>,
        span: Span,
    ) -> Option<(Secret, Span)> {
        let fail = |compiler: &mut Self, code: Code, message: String, at: Span| {
            let help = format!("give it as one of {}", names.join(", "));
            compiler.note(Finding::new(code, message).help(help).at(at));
            None
        };
        match (ways.text, ways.variable, ways.file) {
            (Some(text), None, None) => Some(((**text).clone(), text.span())),
            (None, Some(name), None) => match self.loader.variable(name.reveal()) {
                Some(value) => Some((Secret::new(value), name.span())),
                None => {
                    // The secret itself may stand in place of the name of its variable.
                    let message = match is_variable(name.reveal()) {
                        true => format!("the environment variable `{}` is not set", name.reveal()),
                        false => format!("the environment variable that `{}` names is not set", names[1]),
                    };
                    fail(self, Code::SecretMissing, message, name.span())
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
            (None, None, None) => fail(self, Code::SecretMissing, format!("{what} is required"), span),
            _ => fail(self, Code::SecretMissing, format!("{what} is given in several ways"), span),
        }
    }

    /// Compiles the exempt lists, and returns the exempt path patterns for lints.
    pub(super) fn exempt(&mut self, config: &Config) -> (ExemptList, Vec<Pattern>) {
        let patterns: Vec<Pattern> = config.exempt.paths.iter().filter_map(|text| self.pattern(text)).collect();
        let mut paths = Trie::default();
        for pattern in &patterns {
            paths.insert(pattern, Candidate { rule: 0, methods: MethodSet::ALL });
        }
        (ExemptList { addresses: self.networks(&config.exempt.addresses), paths }, patterns)
    }

    /// Compiles the bans.
    pub(super) fn bans(&mut self, config: &Config) -> BanList {
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

    /// Parses a key, or `sha256:` and the digest of one.
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
            let message = "expected an instant in UTC, such as 2030-01-31T12:00:00Z";
            self.note(Finding::new(Code::InvalidTime, message).at(text.span()));
        }
        let us = u64::try_from(since_epoch?.as_micros()).unwrap_or(u64::MAX);
        Some(Timestamp::from_micros(us))
    }
}

/// The fields in which a secret can be given: the text, an environment variable, a file.
#[derive(Clone, Copy)]
pub(super) struct Ways<'c> {
    pub(super) text: &'c Option<Spanned<Secret>>,
    pub(super) variable: &'c Option<Spanned<Secret>>,
    pub(super) file: &'c Option<Spanned<String>>,
}

impl Ways<'_> {
    fn are_all_absent(&self) -> bool {
        self.text.is_none() && self.variable.is_none() && self.file.is_none()
    }
}

/// Returns whether a text looks like the name of an environment variable, and so is not a secret: at most 64 uppercase
/// letters, digits and underscores, the first of them not a digit.
fn is_variable(name: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    name.len() <= 64 && !name.starts_with(|first: char| first.is_ascii_digit()) && name.bytes().all(is_name_byte)
}

/// Returns a random secret for counters in this process. It is the same for the whole process: a reload must not change the
/// pseudonyms, or every counter would start again.
fn process_secret() -> &'static str {
    use std::hash::{BuildHasher, RandomState};
    static SECRET: OnceLock<String> = OnceLock::new();
    SECRET.get_or_init(|| {
        // The standard library's hasher is SipHash with random keys from the operating system.
        let words = (0_u8..4).map(|number| RandomState::new().hash_one(number));
        words.map(|word| format!("{word:016x}")).collect()
    })
}
