//! Compiles the settings of the gateway: its listener, its upstreams and their routes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidegate_config::{AccessLog, Code, ConfigTable, Finding, GatewayTable, Spanned, TimeText, UpstreamTable};

use super::Compiler;
use crate::gateway::{
    AccessLogFormat, GatewayBounds, GatewaySettings, PathPrefix, REQUESTS_MAX, Route, Routes, ServerUrl,
    UpstreamSettings, UpstreamTimeouts,
};

const NAME_BYTES_MAX: usize = 64;
/// The maximum number of servers of an upstream.
const SERVERS_MAX: usize = 256;
/// The line that begins a certificate in a PEM file.
const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";

/// The value of a setting, compiled from a field of a table.
pub(crate) trait Setting<Field, Range>: Sized {
    /// Returns the value of a field. Adds an error and returns `None` if it is invalid. Returns `None` if it is absent.
    fn compile(field: &Field, range: Range, compiler: &mut Compiler<'_>) -> Option<Self>;
}

impl Setting<Option<bool>, ()> for bool {
    fn compile(field: &Option<bool>, _: (), _: &mut Compiler<'_>) -> Option<bool> {
        *field
    }
}

impl Setting<Option<Spanned<TimeText>>, ()> for Duration {
    fn compile(field: &Option<Spanned<TimeText>>, _: (), compiler: &mut Compiler<'_>) -> Option<Duration> {
        compiler.time(field.as_ref()?)
    }
}

impl Setting<Option<Spanned<u32>>, (u32, u32)> for u32 {
    fn compile(field: &Option<Spanned<u32>>, range: (u32, u32), compiler: &mut Compiler<'_>) -> Option<u32> {
        compiler.number(field.as_ref()?, range)
    }
}

impl Setting<Option<Spanned<u32>>, (u32, u32)> for usize {
    fn compile(field: &Option<Spanned<u32>>, range: (u32, u32), compiler: &mut Compiler<'_>) -> Option<usize> {
        compiler.number(field.as_ref()?, range).map(|number| number as usize)
    }
}

impl Compiler<'_> {
    /// Compiles the tables `[gateway]` and `[[upstreams]]`. Adds an error for each invalid value.
    pub(super) fn gateway(&mut self, config: &ConfigTable) -> GatewaySettings {
        let table = &config.gateway;
        let (mut upstreams, mut routes) = (Vec::new(), Vec::new());
        let mut names: HashMap<&str, ()> = HashMap::new();
        for entry in &config.upstreams {
            if names.insert(&entry.name, ()).is_some() {
                let message = format!("two upstreams have the name `{}`", *entry.name);
                let help = "rename one; to add a server to an upstream, add it to its `servers`";
                self.note(Finding::new(Code::DuplicateUpstream, message).help(help).at(entry.name.span()));
            }
            upstreams.push(self.upstream(entry));
            routes.push(self.route(entry));
        }
        let (routes, conflicts) = Routes::new(routes);
        for conflict in conflicts {
            let (first, second) = (&config.upstreams[conflict.first], &config.upstreams[conflict.second]);
            let message = format!("`{}` and `{}` match the same requests", *first.name, *second.name);
            let help = "change the `match` of one; only one upstream, the default, can omit `match`";
            let span = if second.matches.span().is_unknown() { second.name.span() } else { second.matches.span() };
            self.note(Finding::new(Code::DuplicateRoute, message).help(help).at(span));
        }
        if let Some(listen) = &table.listen
            && upstreams.is_empty()
        {
            let help = "add [[upstreams]] with `name` and `servers`, such as [\"http://127.0.0.1:3000\"]";
            let message = "the gateway has no upstream to forward requests to";
            self.note(Finding::new(Code::NoUpstream, message).help(help).at(listen.span()));
        }
        GatewaySettings {
            listen: table.listen.as_ref().and_then(|text| self.listen(text)),
            proxy_protocol: self.proxy_protocol(table, !config.trusted_proxies.is_empty()),
            access_log: match table.access_log {
                AccessLog::Off => None,
                AccessLog::Json => Some(AccessLogFormat::Json),
                AccessLog::Combined => Some(AccessLogFormat::Combined),
            },
            bounds: GatewayBounds::compile(table, self),
            upstreams,
            routes,
        }
    }

    fn listen(&mut self, text: &Spanned<String>) -> Option<String> {
        let is_address = text.rsplit_once(':').is_some_and(|(host, port)| {
            let is_bracketed = host.starts_with('[') && host.ends_with(']');
            !host.is_empty() && (is_bracketed || !host.contains(':')) && port.parse::<u16>().is_ok()
        });
        if !is_address {
            let help = "for example 127.0.0.1:8000 for this machine only, or 0.0.0.0:8000 for all networks";
            self.note(Finding::new(Code::InvalidValue, "expected HOST:PORT").help(help).at(text.span()));
        }
        is_address.then(|| text.to_string())
    }

    /// Returns whether the PROXY protocol is used. Adds an error if it is and there are no trusted proxies.
    fn proxy_protocol(&mut self, table: &GatewayTable, has_proxies: bool) -> bool {
        let Some(setting) = table.proxy_protocol.as_ref().filter(|setting| ***setting) else { return false };
        if !has_proxies {
            let message = "a PROXY protocol header is accepted only from trusted_proxies, and there are none";
            let help = "set trusted_proxies to the networks of the balancers, such as [\"10.0.0.0/8\"]";
            self.note(Finding::new(Code::InvalidValue, message).help(help).at(setting.span()));
        }
        true
    }

    /// Returns a number in a range, or adds an error and returns `None`.
    fn number(&mut self, value: &Spanned<u32>, (min, max): (u32, u32)) -> Option<u32> {
        if (min..=max).contains(value) {
            return Some(**value);
        }
        let message = format!("expected a number from {min} to {max}");
        self.note(Finding::new(Code::InvalidValue, message).at(value.span()));
        None
    }

    fn upstream(&mut self, table: &UpstreamTable) -> UpstreamSettings {
        let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if table.name.is_empty() || table.name.len() > NAME_BYTES_MAX || !table.name.bytes().all(is_name_byte) {
            let message = format!("the name of an upstream must be 1 to {NAME_BYTES_MAX} letters, digits or - _ .");
            self.note(Finding::new(Code::InvalidName, message).at(table.name.span()));
        }
        let servers: Vec<ServerUrl> = table.servers.iter().filter_map(|url| self.server(url)).collect();
        if table.servers.is_empty() || table.servers.len() > SERVERS_MAX {
            let message = format!("an upstream must have 1 to {SERVERS_MAX} servers");
            let help = "for example servers = [\"http://127.0.0.1:3000\"]";
            self.note(Finding::new(Code::InvalidUpstream, message).help(help).at(table.servers.span()));
        }
        if let Some(file) = &table.ca_file
            && !servers.is_empty()
            && servers.iter().all(|url| !url.is_tls())
        {
            let message = "no server of this upstream has the scheme https, so `ca_file` is never used";
            self.note(Finding::new(Code::InvalidUpstream, message).help("remove `ca_file`").at(file.span()));
        }
        let mut settings = UpstreamSettings::new(table.name.as_str(), servers);
        let mut number = |value: &Option<Spanned<u32>>, min: u32, set: &mut usize| {
            if let Some(value) = Setting::compile(value, (min, REQUESTS_MAX), self) {
                *set = value;
            }
        };
        number(&table.max_concurrent, 1, &mut settings.max_concurrent);
        let mut share = settings.share_of_address();
        number(&table.max_concurrent_per_address, 1, &mut share);
        settings.max_concurrent_per_address = table.max_concurrent_per_address.as_ref().map(|_| share);
        number(&table.queue, 0, &mut settings.queue);
        number(&table.idle_connections, 0, &mut settings.idle_connections);
        settings.preserve_host = table.preserve_host.unwrap_or(settings.preserve_host);
        settings.authorities = table.ca_file.as_ref().and_then(|file| self.authorities(file));
        // A file that cannot be read has an error already.
        if settings.authorities.is_some() == table.ca_file.is_some()
            && let Err(problem) = self.loader.check_upstream(&settings)
        {
            let finding = Finding::new(Code::InvalidUpstream, problem);
            self.note(match &table.ca_file {
                Some(file) => finding.at(file.span()),
                None => {
                    let help = "without `ca_file`, the certificate authorities of the operating system are used (package ca-certificates)";
                    finding.help(help).at(table.servers.span())
                }
            });
        }
        settings.timeouts = UpstreamTimeouts::compile(&table.timeouts, self);
        settings
    }

    fn server(&mut self, url: &Spanned<String>) -> Option<ServerUrl> {
        self.accept(url.parse::<ServerUrl>(), Code::InvalidUpstream, url.span())
    }

    /// Reads a file with certificate authorities. Adds an error and returns `None` if it has none.
    fn authorities(&mut self, name: &Spanned<String>) -> Option<Arc<str>> {
        let path = self.loader.path(name);
        match self.loader.read_text(&path) {
            Ok((text, metadata)) => {
                self.files.push((path, metadata));
                if !text.contains(CERTIFICATE) {
                    let message = format!("{} contains no certificate; expected PEM: {CERTIFICATE}", **name);
                    self.note(Finding::new(Code::InvalidUpstream, message).at(name.span()));
                    return None;
                }
                Some(text.into())
            }
            Err(finding) => {
                self.note(finding.at(name.span()));
                None
            }
        }
    }

    fn route(&mut self, table: &UpstreamTable) -> Route {
        let hosts = table.matches.host.as_ref().map(|list| list.0.clone()).unwrap_or_default();
        let prefix = table.matches.path.as_ref().and_then(|text| {
            let invalid = |help| Finding::new(Code::InvalidPath, "invalid prefix").help(help).at(text.span());
            PathPrefix::parse(text).map_err(|help| self.note(invalid(help))).ok()
        });
        Route { prefix: prefix.unwrap_or_default(), hosts: hosts.iter().filter_map(|text| self.host(text)).collect() }
    }
}
