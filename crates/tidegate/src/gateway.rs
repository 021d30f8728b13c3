//! The settings of the gateway, `tidegate gateway`: its upstreams, and which requests go to which of them.
//!
//! A configuration file sets them in `[gateway]` and `[[upstreams]]`. This crate only parses and checks them, together
//! with the rules; `tidegate-server` applies them. So a file is always checked as a whole, wherever it is used.

mod routes;
mod server_url;

use std::sync::Arc;
use std::time::Duration;

use tidegate_config::{GatewayTable, TimeoutsTable};

pub use routes::Routes;
pub(crate) use routes::{PathPrefix, Route};
pub use server_url::{ServerUrl, ServerUrlError};

use crate::config::{Compiler, Setting};

/// The settings of a gateway: its listener, its upstreams and the routes to them.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct GatewaySettings {
    /// The address on which the gateway listens, `HOST:PORT`. `None` if the configuration has none.
    pub listen: Option<String>,
    /// Whether connections from trusted proxies begin with a PROXY protocol header, which contains the client's
    /// address.
    pub proxy_protocol: bool,
    /// The format of the access log, or `None` if there is no access log.
    pub access_log: Option<AccessLogFormat>,
    /// The limits on connections and requests of clients.
    pub bounds: GatewayBounds,
    /// The upstreams, in the order of the configuration.
    pub upstreams: Vec<UpstreamSettings>,
    /// The routes from requests to upstreams.
    pub routes: Routes,
}

impl GatewaySettings {
    /// Replaces all upstreams with one, named `upstream`, that gets all requests and distributes them over `servers`.
    #[must_use]
    pub fn with_servers(self, servers: Vec<ServerUrl>) -> GatewaySettings {
        let upstreams = vec![UpstreamSettings::new(ONLY_UPSTREAM, servers)];
        GatewaySettings { upstreams, routes: Routes::to_one(), ..self }
    }
}

/// The largest value of `connections_per_address`, `max_concurrent`, `queue` and `idle_connections`.
pub(crate) const REQUESTS_MAX: u32 = 1_000_000;
/// The largest value of `body_rate_min`, in bytes per second.
const RATE_MAX: u32 = 1_000_000;
/// The name of the upstream that `--upstream` defines.
const ONLY_UPSTREAM: &str = "upstream";

/// The format of an access log. Each request is one line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AccessLogFormat {
    /// A JSON object.
    Json,
    /// The combined log format of Apache and nginx, followed by the fields of the decision and the upstream.
    Combined,
}

/// Declares a struct of settings from the table that has them, each with its default and, for a number, its range.
macro_rules! settings_with_defaults {
    (@range) => { () };
    (@range $range:expr) => { $range };
    ($(
        $(#[$about:meta])*
        pub struct $name:ident of $table:ident {$(
            $(#[$about_field:meta])*
            pub $field:ident: $type:ty = $default:expr $(, in $range:expr)?;
        )*}
    )*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub struct $name {$(
            $(#[$about_field])*
            pub $field: $type,
        )*}

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: $default),* }
            }
        }

        impl $name {
            /// Compiles the fields of a table. One that is absent has its default, and so has an invalid one, for which
            /// this adds an error.
            pub(crate) fn compile(table: &$table, compiler: &mut Compiler<'_>) -> $name {
                let mut settings = $name::default();
                $(
                    let range = settings_with_defaults!(@range $($range)?);
                    if let Some(value) = Setting::compile(&table.$field, range, compiler) {
                        settings.$field = value;
                    }
                )*
                settings
            }
        }
    )*};
}

settings_with_defaults! {
/// The limits of a gateway on what one client may send.
pub struct GatewayBounds of GatewayTable {
    /// The maximum size of the request line and all headers together, in bytes. A larger request is answered with 431.
    /// Defaults to 32 KiB.
    pub header_bytes_max: usize = 32 * 1024, in (8_192, 1_048_576);
    /// The maximum number of headers of a request. A request with more is answered with 431. Defaults to 100.
    pub headers_max: usize = 100, in (1, 10_000);
    /// The maximum length of a URI with its query, in bytes. A request with a longer one is answered with 414. Defaults
    /// to 16 KiB.
    pub uri_bytes_max: usize = 16 * 1024, in (1, 65_534);
    /// The maximum number of concurrent requests on an HTTP/2 connection. Defaults to 100.
    pub streams_max: u32 = 100, in (1, 10_000);
    /// The maximum number of connections from one client address. Further ones are rejected. Does not apply to trusted
    /// proxies. An IPv6 address is counted by its /64 network. Defaults to 1,000.
    pub connections_per_address: usize = 1_000, in (1, REQUESTS_MAX);
    /// How long to wait for the next bytes of a request body before the request is answered with 408. Defaults to 30 s.
    pub body_timeout: Duration = Duration::from_secs(30);
    /// The minimum rate at which a client must send a request body and accept a response body, in bytes per second.
    /// Defaults to 240; 0 means no minimum.
    ///
    /// Only the time in which the gateway waits for the client counts. A client that is slower than this for longer than
    /// `body_timeout` (request) or `UpstreamTimeouts::idle` (response) is cut off.
    pub body_rate_min: u32 = 240, in (0, RATE_MAX);
    /// Whether headers whose names contain underscores are forwarded. Defaults to false: they are dropped.
    ///
    /// Many servers (CGI, WSGI, PHP) cannot tell `X_Api_Key` from `X-Api-Key`. The rules see only the latter, so a client
    /// could be counted by one key and use another.
    pub underscores_in_headers: bool = false;
}

/// The timeouts of requests to an upstream.
pub struct UpstreamTimeouts of TimeoutsTable {
    /// The time to connect to a server, TLS handshake included. Defaults to 3 s.
    pub connect: Duration = Duration::from_secs(3);
    /// The time from sending a request to the head of its response. Defaults to 60 s.
    pub header: Duration = Duration::from_secs(60);
    /// The time without a byte of a response body, because the server sends none or the client accepts none, or of a
    /// tunnel, after which it is aborted. Defaults to 60 s.
    pub idle: Duration = Duration::from_secs(60);
    /// The time from a request's arrival to the end of its response. Tunnels have no such limit. Defaults to 1 h.
    pub total: Duration = Duration::from_secs(3_600);
    /// The time that a request may wait in the queue. Defaults to 1 s.
    pub queue: Duration = Duration::from_secs(1);
}
}

/// The settings of an upstream: a service behind the gateway, with one or more servers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct UpstreamSettings {
    /// The name, for metrics and logs.
    pub name: Arc<str>,
    /// The servers, over which requests are distributed in turn. At least one.
    pub servers: Vec<ServerUrl>,
    /// The maximum number of concurrent requests to the upstream. Defaults to 1,000.
    pub max_concurrent: usize,
    /// The maximum number of requests of one client address among them, including those that wait. Further ones are
    /// answered with 429. Does not apply to trusted proxies. An IPv6 address is counted by its /64 network. Defaults to
    /// `None`: a quarter of `max_concurrent`, rounded up.
    pub max_concurrent_per_address: Option<usize>,
    /// The maximum number of requests that wait while the upstream has `max_concurrent` requests. Further ones are
    /// answered with 503. Defaults to 100.
    pub queue: usize,
    /// The maximum number of idle connections that are kept open to each server. Defaults to 64.
    pub idle_connections: usize,
    /// Whether the client's `Host` header is forwarded. If false, the host of the server's URL is sent. Defaults to
    /// true.
    pub preserve_host: bool,
    /// The PEM text of the certificate authorities that servers with `https://` are checked against. `None` means those
    /// of the operating system.
    pub authorities: Option<Arc<str>>,
    /// The timeouts of requests to the upstream.
    pub timeouts: UpstreamTimeouts,
}

impl UpstreamSettings {
    /// Creates settings with defaults for everything but the name and the servers.
    pub fn new(name: impl Into<Arc<str>>, servers: Vec<ServerUrl>) -> UpstreamSettings {
        UpstreamSettings {
            name: name.into(),
            servers,
            max_concurrent: 1_000,
            max_concurrent_per_address: None,
            queue: 100,
            idle_connections: 64,
            preserve_host: true,
            authorities: None,
            timeouts: UpstreamTimeouts::default(),
        }
    }

    /// Returns the maximum number of concurrent requests of one client address.
    pub fn share_of_address(&self) -> usize {
        self.max_concurrent_per_address.unwrap_or_else(|| self.max_concurrent.div_ceil(4))
    }
}
