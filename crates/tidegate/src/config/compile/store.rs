//! Compiles `store`: a URL, or a table with URLs, credentials and TLS.

use std::path::PathBuf;

use tidegate_config::{
    Code, Finding, Secret, Span, Spanned, StoreEntry, StoreKind, StoreTable, StoreTlsTable, StoreUrl, TlsMinVersion,
};
#[cfg(feature = "redis")]
use tidegate_redis::StoreAddress;

use super::Compiler;
use super::callers::looks_like_variable;
use super::settings::MEMORY;

/// The environment variables with the user name and the password of the Sentinels.
const SENTINEL_USERNAME: &str = "TIDEGATE_SENTINEL_USERNAME";
const SENTINEL_PASSWORD: &str = "TIDEGATE_SENTINEL_PASSWORD";

/// The accepted forms of a list of URLs.
const LIST_HELP: &str = "use redis:// or rediss:// for all URLs of a list, with the kind in `kind`, and for Sentinels with the \
    name of the master in `master`; or write one redis+cluster://host:port,… or redis+sentinel://host:port,…/NAME URL";

/// Where the counters are.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum StorePlace {
    /// In the memory of this process.
    Memory,
    /// In the store at this URL, which may contain a password.
    Url(Secret),
    /// In the store that the URLs of a table name.
    Address(StoreAddress),
}

impl StorePlace {
    /// Returns the place that a URL or `memory` names. The URL is not checked.
    fn of(text: &Secret) -> StorePlace {
        if text.reveal() == MEMORY { StorePlace::Memory } else { StorePlace::Url(text.clone()) }
    }

    /// Returns the URL or `memory`; of the URLs of a table, without the user and the password.
    #[cfg(all(test, feature = "redis"))]
    pub(crate) fn text(&self) -> String {
        match self {
            StorePlace::Memory => MEMORY.to_owned(),
            StorePlace::Url(url) => url.reveal().to_owned(),
            StorePlace::Address(address) => address.to_string(),
        }
    }

    /// Returns whether the URL has a user or a password.
    pub(crate) fn has_login(&self) -> bool {
        match self {
            StorePlace::Memory => false,
            StorePlace::Url(url) => UrlParts::of(url.reveal()).is_some_and(|parts| parts.login.is_some()),
            StorePlace::Address(address) => address.has_password(),
        }
    }

    fn is_sentinel(&self) -> bool {
        match self {
            StorePlace::Memory => false,
            StorePlace::Url(url) => {
                UrlParts::of(url.reveal()).is_some_and(|parts| parts.kind == Some(StoreKind::Sentinel))
            }
            StorePlace::Address(address) => address.kind() == kind_of_address(StoreKind::Sentinel),
        }
    }
}

#[cfg(feature = "redis")]
fn kind_of_address(kind: StoreKind) -> tidegate_redis::StoreKind {
    match kind {
        StoreKind::Server => tidegate_redis::StoreKind::Server,
        StoreKind::Cluster => tidegate_redis::StoreKind::Cluster,
        StoreKind::Sentinel => tidegate_redis::StoreKind::Sentinel,
    }
}

#[cfg(not(feature = "redis"))]
fn kind_of_address(kind: StoreKind) -> StoreKind {
    kind
}

/// The URLs of a table in a program without Redis, which does not parse them.
#[cfg(not(feature = "redis"))]
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct StoreAddress {
    kind: StoreKind,
    urls: Vec<Secret>,
    master: Option<String>,
}

#[cfg(not(feature = "redis"))]
impl StoreAddress {
    fn of_list(kind: StoreKind, urls: &[&str], master: Option<&str>) -> Result<StoreAddress, std::convert::Infallible> {
        let urls = urls.iter().map(|url| Secret::new(*url)).collect();
        Ok(StoreAddress { kind, urls, master: master.map(str::to_owned) })
    }

    fn kind(&self) -> StoreKind {
        self.kind
    }

    fn has_password(&self) -> bool {
        self.urls.first().is_some_and(|url| url.reveal().contains('@'))
    }
}

/// The settings of a store other than its URL. Files are read again at each connect.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(not(feature = "redis"), allow(dead_code))] // without Redis there is no store to connect to
pub(crate) struct StoreAccess {
    /// The credentials of the servers with the keys.
    pub(crate) server: LoginPlaces,
    /// The credentials of the Sentinels.
    pub(crate) sentinel: LoginPlaces,
    tls: Option<StoreTls>,
    /// The number of replicas that must have acknowledged a decision.
    replicas: u32,
    calls_across_slots: bool,
}

/// Where a user name and a password are read from.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct LoginPlaces {
    pub(crate) username: Option<SecretPlace>,
    pub(crate) password: Option<SecretPlace>,
}

/// Where a user name or a password is read from.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
pub(crate) enum SecretPlace {
    /// In the configuration itself.
    Text(Secret),
    /// In the environment variable with this name.
    Env(String),
    File(PathBuf),
}

#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(not(feature = "redis"), allow(dead_code))]
struct StoreTls {
    ca_file: Option<PathBuf>,
    /// The files of the certificate and of the key.
    client: Option<(PathBuf, PathBuf)>,
    server_name: Option<String>,
    min_version: TlsMinVersion,
}

#[cfg(feature = "redis")]
impl StoreAccess {
    /// Sets the credentials and the options of a store whose decisions have this deadline.
    pub(crate) fn apply(
        &self,
        builder: tidegate_redis::RedisStoreBuilder,
        deadline: std::time::Duration,
    ) -> tidegate_redis::RedisStoreBuilder {
        use tidegate_redis::CredentialSource;
        let mut builder = builder.replicas(self.replicas, deadline / 2).calls_across_slots(self.calls_across_slots);
        let source = |place: &SecretPlace| match place {
            SecretPlace::Text(text) => CredentialSource::Text(text.reveal().to_owned()),
            SecretPlace::Env(name) => CredentialSource::Env(name.clone()),
            SecretPlace::File(file) => CredentialSource::File(file.clone()),
        };
        if let Some(username) = &self.server.username {
            builder = builder.username_from(source(username));
        }
        if let Some(password) = &self.server.password {
            builder = builder.password_from(source(password));
        }
        if let Some(username) = &self.sentinel.username {
            builder = builder.sentinel_username_from(source(username));
        }
        if let Some(password) = &self.sentinel.password {
            builder = builder.sentinel_password_from(source(password));
        }
        match &self.tls {
            Some(tls) => builder.tls(tls.options()),
            None => builder,
        }
    }
}

#[cfg(feature = "redis")]
impl StoreTls {
    fn options(&self) -> tidegate_redis::TlsOptions {
        let mut options = tidegate_redis::TlsOptions::new().min_version(match self.min_version {
            TlsMinVersion::Tls12 => tidegate_redis::TlsVersion::Tls12,
            TlsMinVersion::Tls13 => tidegate_redis::TlsVersion::Tls13,
        });
        if let Some(file) = &self.ca_file {
            options = options.ca_file(file);
        }
        if let Some((cert, key)) = &self.client {
            options = options.client_certificate(cert, key);
        }
        match &self.server_name {
            Some(name) => options.server_name(name),
            None => options,
        }
    }

    /// Checks the files and the server name.
    ///
    /// # Errors
    /// Returns why they cannot be used.
    fn check(&self) -> Result<(), String> {
        self.options().check().map_err(|error| error.to_string())
    }
}

#[cfg(not(feature = "redis"))]
impl StoreTls {
    /// Returns `Ok`: a program without Redis cannot check the files.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// The fields of `[store]` with the user name and the password of the servers, or those of the Sentinels.
struct LoginFields<'t> {
    /// The servers that the credentials are for, for messages.
    owner: &'static str,
    /// The prefix of the names of the fields.
    prefix: &'static str,
    username: &'t Option<Spanned<String>>,
    username_env: &'t Option<Spanned<Secret>>,
    username_file: &'t Option<Spanned<String>>,
    password_env: &'t Option<Spanned<Secret>>,
    password_file: &'t Option<Spanned<String>>,
}

impl LoginFields<'_> {
    fn of_server(table: &StoreTable) -> LoginFields<'_> {
        LoginFields {
            owner: "the store",
            prefix: "",
            username: &table.username,
            username_env: &table.username_env,
            username_file: &table.username_file,
            password_env: &table.password_env,
            password_file: &table.password_file,
        }
    }

    fn of_sentinels(table: &StoreTable) -> LoginFields<'_> {
        LoginFields {
            owner: "the Sentinels",
            prefix: "sentinel_",
            username: &table.sentinel_username,
            username_env: &table.sentinel_username_env,
            username_file: &table.sentinel_username_file,
            password_env: &table.sentinel_password_env,
            password_file: &table.sentinel_password_file,
        }
    }

    /// Returns the names, without their prefix, and the spans of the fields that are set, the user name first.
    fn present(&self) -> impl Iterator<Item = (&'static str, Span)> {
        let text = |field: &Option<Spanned<String>>| field.as_ref().map(Spanned::span);
        let secret = |field: &Option<Spanned<Secret>>| field.as_ref().map(Spanned::span);
        let fields = [
            ("username", text(self.username)),
            ("username_env", secret(self.username_env)),
            ("username_file", text(self.username_file)),
            ("password_env", secret(self.password_env)),
            ("password_file", text(self.password_file)),
        ];
        fields.into_iter().filter_map(|(name, span)| Some((name, span?)))
    }
}

impl Compiler<'_> {
    /// Compiles `store`. Returns where it is, `None` if the file does not say, and how to connect to it.
    ///
    /// A store of the loader overrides the URLs of the file, and a user or a password in its URL overrides those of the
    /// file. If neither has a password, the loader's environment variables are used, if they are set. For Sentinels,
    /// these are `TIDEGATE_SENTINEL_USERNAME` and `TIDEGATE_SENTINEL_PASSWORD`. Adds an error for each invalid value of
    /// the file, even if it is overridden.
    pub(super) fn store(&mut self, store: Option<&Spanned<StoreEntry>>) -> (Option<StorePlace>, StoreAccess) {
        let (written, mut access) = match store.map(|store| (&**store, store)) {
            None => (None, StoreAccess::default()),
            Some((StoreEntry::Url(url), store)) => {
                if let Err(problem) = super::settings::check_url(url.0.reveal()) {
                    let help = "or `memory`, for counters in this process only";
                    self.note(Finding::new(Code::InvalidStore, problem).help(help).at(store.span()));
                }
                (Some(StorePlace::of(&url.0)), StoreAccess::default())
            }
            Some((StoreEntry::Table(table), store)) => {
                let place = self.store_place(table, store);
                (place, self.store_access(table))
            }
        };
        let place = self.loader.store_override().map(StorePlace::of).or(written);
        let has_login = place.as_ref().is_some_and(StorePlace::has_login);
        if self.loader.store_override().is_some() && has_login {
            access.server = LoginPlaces::default();
        }
        if !has_login && let Some((username, password)) = self.loader.store_credentials() {
            access.server = self.or_variables(access.server, username, password);
        }
        access.sentinel = self.or_variables(access.sentinel, SENTINEL_USERNAME, SENTINEL_PASSWORD);
        if let (Some(StoreEntry::Table(table)), Some(place)) = (store.map(|store| &**store), &place)
            && self.loader.checks_store_access()
        {
            if access.server.password.is_none() && !has_login {
                self.check_no_username(&LoginFields::of_server(table));
            }
            if access.sentinel.password.is_none() && place.is_sentinel() {
                self.check_no_username(&LoginFields::of_sentinels(table));
            }
        }
        (place, access)
    }

    /// Returns the places unchanged if they have a password. Otherwise adds the password, and the user name if there is
    /// none, from environment variables that are set.
    fn or_variables(&self, login: LoginPlaces, username: &str, password: &str) -> LoginPlaces {
        if login.password.is_some() {
            return login;
        }
        let place = |name: &str| self.loader.variable(name).map(|_| SecretPlace::Env(name.to_owned()));
        LoginPlaces { username: login.username.or_else(|| place(username)), password: place(password) }
    }

    /// Adds an error if the table has a user name, because there is no password.
    fn check_no_username(&mut self, fields: &LoginFields<'_>) {
        let LoginFields { owner, prefix, password_env: None, password_file: None, .. } = fields else { return };
        if let Some((_, span)) = fields.present().next() {
            let message = format!("a user name is set for {owner}, but no password");
            let help = format!("add `{prefix}password_file` or `{prefix}password_env`");
            self.note(Finding::new(Code::SecretMissing, message).help(help).at(span));
        }
    }

    /// Combines the URLs of a table. Returns `None` and adds errors if they are invalid or do not fit together. Also
    /// returns `None` if they are missing and the loader has a store.
    fn store_place(&mut self, table: &StoreTable, store: &Spanned<StoreEntry>) -> Option<StorePlace> {
        let urls = match &table.urls {
            Some(urls) if !urls.is_empty() => urls,
            Some(urls) => {
                let finding = Finding::new(Code::InvalidStore, "`urls` must have at least one URL");
                self.note(finding.help("for example urls = [\"redis://127.0.0.1:6379\"]").at(urls.span()));
                return None;
            }
            None if self.loader.store_override().is_some() => return None,
            None => {
                let finding = Finding::new(Code::MissingField, "missing field `urls`");
                self.note(finding.help("add `urls` to this table").at(store.span()));
                return None;
            }
        };
        let mut is_valid = true;
        let mut fail = |compiler: &mut Self, message: String, help: &str, url: &Spanned<StoreUrl>| {
            is_valid = false;
            compiler.note(Finding::new(Code::InvalidStore, message).help(help).at(url.span()));
        };
        let kind = table.kind.as_deref().copied();
        let (mut parts, mut is_mixed): (Vec<UrlParts<'_>>, bool) = (Vec::new(), false);
        for url in urls.iter() {
            let text = url.0.reveal();
            if let Err(problem) = super::settings::check_url(text) {
                fail(self, problem, "one server or node for each URL", url);
                continue;
            }
            let Some(part) = UrlParts::of(text) else {
                fail(self, "`memory` is not a URL".into(), "write `store = \"memory\"` instead of the table", url);
                continue;
            };
            match parts.first() {
                Some(first) if first.kind != part.kind => {
                    is_mixed = true;
                    let message = format!("the list mixes {} and {} URLs", first.scheme(), part.scheme());
                    fail(self, message, LIST_HELP, url);
                }
                Some(first) if first.is_tls != part.is_tls => {
                    let message = "some URLs use TLS (rediss://) and others do not";
                    fail(self, message.into(), "use redis:// or rediss:// for all of them", url);
                }
                Some(first) if first.login != part.login => {
                    let message = "the URLs have different users or passwords";
                    fail(
                        self,
                        message.into(),
                        "all nodes must accept the same user: use `username` and `password_file`",
                        url,
                    );
                }
                _ => {}
            }
            if let (Some(kind), Some(other)) = (kind, part.kind)
                && kind != other
            {
                let (kind, other) = (kind.as_str(), other.as_str());
                let message = format!("`kind` is {kind:?}, but the scheme of the URL is that of a {other}");
                fail(self, message, "write redis:// or rediss://, and the kind in `kind`", url);
            }
            parts.push(part);
        }
        let kind = kind.or_else(|| parts.iter().find_map(|part| part.kind)).unwrap_or_default();
        if kind == StoreKind::Sentinel && !is_mixed && (table.master.is_some() || parts.len() > 1) {
            for url in urls.iter().filter(|url| UrlParts::of(url.0.reveal()).is_some_and(|part| part.has_path())) {
                fail(
                    self,
                    "the URL of a Sentinel has a path, but the name of the master belongs in `master`".into(),
                    LIST_HELP,
                    url,
                );
            }
        }
        if kind == StoreKind::Server
            && let Some(second) = urls.get(1)
        {
            let help = "for a Redis Cluster, add kind = \"cluster\"; for Sentinels, kind = \"sentinel\"";
            fail(self, "a server has one URL".into(), help, second);
        }
        let master = table.master.as_ref().map(|master| ("master".to_owned(), master.span()));
        let across = table.calls_across_slots.as_ref().map(|across| ("calls_across_slots".to_owned(), across.span()));
        let sentinels = LoginFields::of_sentinels(table);
        let logins = sentinels.present().map(|(name, span)| (format!("{}{name}", sentinels.prefix), span));
        let for_sentinels = master.into_iter().chain(logins).map(|field| (field, StoreKind::Sentinel));
        for ((field, span), required) in for_sentinels.chain(across.map(|field| (field, StoreKind::Cluster))) {
            if kind != required {
                let message = format!("`{field}` has no effect, because the store is a {}", kind.as_str());
                let help = format!("remove it, or add kind = \"{}\"", required.as_str());
                self.note(Finding::new(Code::InvalidStore, message).help(help).at(span));
            }
        }
        if let (Some(tls), Some(false)) = (&table.tls, parts.first().map(|first| first.is_tls)) {
            let finding = Finding::new(Code::InvalidStore, "`tls` has no effect, because the URLs do not use TLS");
            self.note(finding.help("use rediss:// in `urls`, or remove `tls`").at(tls.span()));
        }
        if let (Some(login), Some(url)) = (parts.first().and_then(|first| first.login), urls.first())
            && !login.is_empty()
            && (table.password_env.is_some() || table.password_file.is_some())
        {
            let finding = Finding::new(Code::SecretMissing, "the password of the store is given in several ways");
            self.note(finding.help("remove user and password from the URL").at(url.span()));
        }
        if !is_valid {
            return None;
        }
        let texts: Vec<&str> = urls.iter().map(|url| url.0.reveal()).collect();
        let master = table.master.as_ref().map(|master| master.as_str());
        let address = StoreAddress::of_list(kind_of_address(kind), &texts, master);
        self.accept(address, Code::InvalidStore, urls.span()).map(StorePlace::Address)
    }

    fn store_access(&mut self, table: &StoreTable) -> StoreAccess {
        let (replicas, calls_across_slots) = (table.replicas.as_deref(), table.calls_across_slots.as_deref());
        StoreAccess {
            server: self.login_places(&LoginFields::of_server(table)),
            sentinel: self.login_places(&LoginFields::of_sentinels(table)),
            tls: table.tls.as_ref().map(|tls| self.store_tls(tls)),
            replicas: replicas.copied().unwrap_or_default(),
            calls_across_slots: calls_across_slots.copied().unwrap_or_default(),
        }
    }

    fn login_places(&mut self, fields: &LoginFields<'_>) -> LoginPlaces {
        let LoginFields { owner, username, username_env, username_file, password_env, password_file, .. } = *fields;
        let text = username.as_ref().map(|name| Spanned::new(Secret::new(name.as_str()), name.span()));
        LoginPlaces {
            username: self.secret_place(&format!("user name of {owner}"), [&text, username_env], username_file),
            password: self.secret_place(&format!("password of {owner}"), [&None, password_env], password_file),
        }
    }

    /// Returns where the user name or the password is. Adds an error and returns `None` if it is given in several ways,
    /// is empty, or cannot be read.
    fn secret_place(
        &mut self,
        what: &str,
        [text, variable]: [&Option<Spanned<Secret>>; 2],
        file: &Option<Spanned<String>>,
    ) -> Option<SecretPlace> {
        let fail = |compiler: &mut Self, message: String, span: Span| {
            compiler.note(Finding::new(Code::SecretMissing, message).at(span));
            None
        };
        match (text, variable, file) {
            (None, None, None) => None,
            (Some(text), None, None) if text.reveal().is_empty() => {
                fail(self, format!("the {what} is empty"), text.span())
            }
            (Some(text), None, None) => Some(SecretPlace::Text((**text).clone())),
            (None, Some(name), None) if !self.loader.checks_store_access() => {
                Some(SecretPlace::Env(name.reveal().to_owned()))
            }
            (None, Some(name), None) => match self.loader.variable(name.reveal()) {
                Some(_) => Some(SecretPlace::Env(name.reveal().to_owned())),
                // A user may have written the secret itself instead of the name of its variable.
                None if looks_like_variable(name.reveal()) => {
                    fail(self, format!("the environment variable `{}` is not set", name.reveal()), name.span())
                }
                None => fail(self, format!("the environment variable with the {what} is not set"), name.span()),
            },
            (None, None, Some(name)) => {
                let path = self.loader.path(name);
                if !self.loader.checks_store_files() {
                    return Some(SecretPlace::File(path));
                }
                match self.loader.read_text(&path) {
                    Ok((text, _)) if text.trim_end_matches(['\r', '\n']).is_empty() => {
                        fail(self, format!("the {what} is empty: {}", path.display()), name.span())
                    }
                    Ok(_) => Some(SecretPlace::File(path)),
                    Err(finding) => {
                        self.note(finding.at(name.span()));
                        None
                    }
                }
            }
            _ => {
                let spans = [text.as_ref().map(Spanned::span), variable.as_ref().map(Spanned::span)];
                let span = spans.into_iter().flatten().next().unwrap_or_default();
                fail(self, format!("the {what} is given in several ways"), span)
            }
        }
    }

    fn store_tls(&mut self, table: &Spanned<StoreTlsTable>) -> StoreTls {
        let StoreTlsTable { ca_file, cert_file, key_file, server_name, min_version } = &**table;
        let mut is_readable = self.loader.checks_store_files();
        for file in [ca_file, cert_file, key_file].into_iter().flatten() {
            if self.loader.checks_store_files()
                && let Err(finding) = self.loader.read_text(&self.loader.path(file))
            {
                is_readable = false;
                self.note(finding.at(file.span()));
            }
        }
        let client = match (cert_file, key_file) {
            (Some(cert), Some(key)) => Some((self.loader.path(cert), self.loader.path(key))),
            (None, None) => None,
            (Some(only), None) | (None, Some(only)) => {
                let message = "a client certificate needs both `cert_file` and `key_file`";
                self.note(Finding::new(Code::InvalidStore, message).at(only.span()));
                None
            }
        };
        let tls = StoreTls {
            ca_file: ca_file.as_ref().map(|file| self.loader.path(file)),
            client,
            server_name: server_name.as_ref().map(|name| name.to_string()),
            min_version: *min_version,
        };
        if is_readable && let Err(problem) = tls.check() {
            self.note(Finding::new(Code::InvalidStore, problem).at(table.span()));
        }
        tls
    }
}

/// The parts of a valid URL of a store.
struct UrlParts<'u> {
    is_tls: bool,
    /// The kind that the scheme names; `None` for `redis` and `rediss`.
    kind: Option<StoreKind>,
    /// The part before the last `@`, which may be a user and a password.
    login: Option<&'u str>,
    /// The hosts, the ports and the database.
    place: &'u str,
}

impl UrlParts<'_> {
    /// Splits a URL. Returns `None` for `memory`.
    fn of(url: &str) -> Option<UrlParts<'_>> {
        let (scheme, rest) = url.split_once("://")?;
        let (base, kind) = match scheme.split_once('+') {
            Some((base, kind)) => (base, kind.parse().ok()),
            None => (scheme, None),
        };
        let (login, place) = match rest.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, rest),
        };
        Some(UrlParts { is_tls: base == "rediss", kind, login, place })
    }

    /// Returns whether something follows the hosts: a database, or the name of a master.
    fn has_path(&self) -> bool {
        self.place.trim_end_matches('/').contains('/')
    }

    /// Returns the scheme, such as `redis+cluster://`.
    fn scheme(&self) -> String {
        let base = if self.is_tls { "rediss" } else { "redis" };
        self.kind.map_or_else(|| format!("{base}://"), |kind| format!("{base}+{}://", kind.as_str()))
    }
}
