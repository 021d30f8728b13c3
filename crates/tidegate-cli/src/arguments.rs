//! Arguments of the command line. The doc comments of commands and fields are their `--help` texts.
#![allow(rustdoc::broken_intra_doc_links)] // in a help text, brackets mark optional parts and defaults

mod listeners;

use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tidegate::Limit;

pub(crate) use self::listeners::{ListenerChoice, ListenerOptions};

/// The headings of the options in the help of `tidegate serve` and `tidegate gateway`.
const LISTENERS: &str = "Listeners";
const FORWARDING: &str = "Forwarding";
const CONFIGURATION: &str = "Configuration";
const STORE: &str = "Store";
const SECRETS: &str = "Secrets";
const TLS: &str = "TLS";
const ACCESS: &str = "Access from browsers and by name";
const CONNECTIONS: &str = "Connections and threads";
const LOGS: &str = "Logs and traces";

/// The long help of a limit.
macro_rules! limit_help {
    ($first:literal) => {
        concat!(
            $first,
            "\n\n\
             QUOTA is a number of units from 1 to 10000000. WINDOW is a whole number and a unit, or a unit alone, from 1ms to \
             400day. The units are us, ms, s, min, h, day and week. Quote a limit that has spaces.\n\n\
             Algorithms:\n\
             \x20 sliding          never more than QUOTA in any trailing window [default]\n\
             \x20 sliding-log      as sliding, and exact above a quota of 1000; QUOTA is at most 100000\n\
             \x20 sliding-counter  approximate, in constant memory: two weighted counters\n\
             \x20 fixed-window     one counter per window, so up to twice QUOTA across a boundary\n\
             \x20 token-bucket     an average rate with bursts\n\
             \x20 leaky-bucket     evenly spaced requests: each admission carries the time to wait\n\n\
             Options:\n\
             \x20 burst=N                  capacity of a token-bucket [default: QUOTA]\n\
             \x20 queue=N                  units that may wait in a leaky-bucket [default: QUOTA]\n\
             \x20 count_denied=true|false  whether denied requests are charged too [default: false]\n\n\
             Examples:\n\
             \x20 10/min\n\
             \x20 600/10s\n\
             \x20 '5000/day sliding-log'\n\
             \x20 '100/min token-bucket burst=20'"
        )
    };
}

/// A distributed rate limiter with true sliding windows
#[derive(Parser, Debug)]
#[command(name = "tidegate", version, after_help = "Examples:\n  tidegate serve\n  tidegate validate tidegate.toml")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run the rate-limit service (HTTP and RESP)
    #[command(
        args_override_self = true,
        mut_arg("insecure", |arg| arg.help(listeners::insecure_help())),
        mut_arg("store", |arg| arg.help(store_help("Store for the counters", true, "`store` in the configuration file, else memory"))),
        after_help = "Examples:\n  tidegate serve --config tidegate.toml --store redis://127.0.0.1:6379\n  curl -d '{\"key\":\"user:42\",\"limit\":\"10/min\"}' http://127.0.0.1:8080/v1/check\n\nExit codes: 0 after SIGTERM or SIGINT, 2 if it cannot start"
    )]
    Serve(Box<Serve>),
    /// Run a reverse proxy that forwards requests to a service and refuses those over the limit
    #[command(
        mut_arg("store", |arg| arg.help(store_help("Store for the counters", true, "`store` in the configuration file, else memory"))),
        after_help = "Examples:\n  tidegate gateway --upstream http://127.0.0.1:3000 --limit 100/min\n  tidegate gateway --config tidegate.toml --listen 0.0.0.0:443 --tls-cert cert.pem --tls-key key.pem\n\nExit codes: 0 after SIGTERM or SIGINT, 2 if it cannot start"
    )]
    Gateway(Box<GatewayArguments>),
    /// Check a configuration file, and the files and variables that it names: exit 0 if it is valid, 2 if not
    #[command(
        mut_arg("store", |arg| arg.help(store_help("Store to use instead of the one in the file", true, "`store` in the file"))),
        after_help = "Examples:\n  tidegate validate tidegate.toml --json\n  tidegate validate tidegate.toml --deny-warnings\n\nExit codes: 0 if `tidegate serve` and `tidegate gateway` accept the file, 1 if it has warnings and --deny-warnings is given, 2 if it has an error or cannot be read"
    )]
    Validate(Validate),
    /// Show which rules apply to a request, and why
    #[command(
        mut_arg("store", |arg| arg.help(store_help("Store to read counters, plans and keys from", true, "`store` in the configuration file"))),
        after_help = "Examples:\n  tidegate explain --config tidegate.toml POST /shorten --client 203.0.113.9\n  tidegate explain --config tidegate.toml POST /shorten --peer 203.0.113.9 -H 'x-api-key: KEY'\n  tidegate explain --admin http://127.0.0.1:9180 GET /api/items --client acme\n\nCLIENT is an address, an API key or the name of one, or user:ID. Exit code: 0 if the rules were explained, 2 on error.\n\nWith --config, remaining units are read from the Redis store in the file, unless --store, --store-file, $TIDEGATE_STORE or $REDIS_URL names another one. With --store memory, none are read."
    )]
    Explain(Explain),
    /// Check a key against a limit once: exit 0 if allowed, 1 if denied, 2 on error
    #[command(
        mut_arg("store", |arg| arg.help(store_help("Store for the counters", true, "`store` in the configuration file"))),
        after_help = "Examples:\n  tidegate check user:42 10/min --cost 3 --store redis://127.0.0.1:6379\n  tidegate check user:42 10/min --store memory\n\nA store is required: --store, --config, $TIDEGATE_STORE or $REDIS_URL. With --store memory, every command starts with empty counters, so every check whose cost fits within the limit is allowed.\n\nExit codes: 0 if the check is allowed, 1 if it is denied, 2 on an error"
    )]
    Check(CheckArguments),
    /// Show the counters of a client or a key without changing them: exit 0 if one exists, 1 if not, 2 on error
    #[command(
        after_help = "Examples:\n  tidegate inspect acme --admin http://127.0.0.1:9180\n  tidegate inspect 203.0.113.9 --rule shorten --config tidegate.toml\n  tidegate inspect user:42 10/min --store redis://127.0.0.1:6379\n\nWithout LIMIT, KEY is a client: an address, a network that is counted as one client, an API key or the name of one, user:ID, or a subject as `tidegate explain --reveal` prints it. Its counters in all rules are shown, with its plan and its ban, or those of one rule with --rule."
    )]
    Inspect(Inspect),
    /// Delete the counters of a client or a key: exit 0 if one existed, 1 if not, 2 on error
    #[command(
        after_help = "Examples:\n  tidegate reset acme --rule api --admin http://127.0.0.1:9180\n  tidegate reset 203.0.113.9 --config tidegate.toml\n  tidegate reset user:42 10/min --store redis://127.0.0.1:6379\n\nWithout LIMIT, KEY is a client: an address, a network that is counted as one client, an API key or the name of one, user:ID, or a subject as `tidegate explain --reveal` prints it. Its counters in all rules are deleted, or those of one rule with --rule. Counters that it shares with other clients are kept."
    )]
    Reset(Inspect),
    /// Refuse all requests of a client (HTTP 403) on all instances that share the store, or list the bans: exit 0 if
    /// done, 2 on error
    #[command(
        after_help = "Examples:\n  tidegate ban 203.0.113.9 --for 1h --config tidegate.toml\n  tidegate ban acme --admin http://127.0.0.1:9180\n  tidegate ban --key user:42 --for 10min --store redis://127.0.0.1:6379\n  tidegate ban --list --admin http://127.0.0.1:9180\n\nCLIENT is an address, a network (CIDR), an API key or the name of one, user:ID, or a subject that a rule counts, as `tidegate explain --reveal` prints it. An IPv6 address is banned with its /64, or `ipv6_prefix` of the configuration. API keys are known only with --config or --admin. Without these, CLIENT is also the key of explicit checks, which name a key and a limit; and an address is stored as it is, even if the configuration has `anonymize`."
    )]
    Ban(BanArguments),
    /// Lift the ban on a client: exit 0 if it was banned, 1 if not, 2 on error
    #[command(
        after_help = "Examples:\n  tidegate unban 203.0.113.9 --config tidegate.toml\n  tidegate unban acme --admin http://127.0.0.1:9180\n\nCLIENT has the same forms as for `tidegate ban`, or is one that `tidegate ban --list` prints."
    )]
    Unban(Unban),
    /// Show and change API keys in the Redis hash of the configuration: their plans, own limits and groups
    #[command(
        after_help = "Examples:\n  tidegate key set acme --limit 5000/h --config tidegate.toml\n  tidegate key set acme --plan pro --admin http://127.0.0.1:9180\n  tidegate key unset acme --limits --config tidegate.toml\n\nThe hash is `redis_hash` in `[key_sources]` of the configuration file. A change is in force on all instances within a second."
    )]
    Key {
        #[command(subcommand)]
        command: KeyCommand,
    },
    /// Print the Lua script that makes the decisions in Redis, or the permissions of a Redis user that may run it
    #[command(
        after_help = "Examples:\n  tidegate script\n  redis-cli SCRIPT LOAD \"$(tidegate script)\"\n  tidegate script --acl --config tidegate.toml\n\nExit codes: 0, or 2 on an error"
    )]
    Script {
        /// Print the command that creates a Redis user with the permissions that Tidegate needs, instead of the script
        #[arg(long)]
        acl: bool,
        /// Configuration file; sets the key prefix, and the Redis hashes of plans and API keys
        #[arg(long, value_name = "FILE", requires = "acl")]
        config: Option<PathBuf>,
    },
    /// Show how fixed-window and sliding limits handle a burst at a minute boundary
    #[command(after_help = "Example:\n  tidegate boundary\n\nExit codes: 0, or 2 on an error")]
    Boundary,
    /// Print a completion script for a shell
    #[command(
        after_help = "Examples:\n  tidegate completions bash\n  source <(tidegate completions bash)\n\nExit codes: 0, or 2 on an error"
    )]
    Completions {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Print the man pages of all commands, or write each to a file
    #[command(
        after_help = "Examples:\n  tidegate man | man -l -\n  tidegate man --dir ~/.local/share/man/man1\n\nExit codes: 0, or 2 on an error"
    )]
    Man {
        /// Directory to write one file per command to, such as tidegate-serve.1; created if missing
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
}

/// Parses a number of threads from 1 to 1024.
fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let number = text.parse().ok().filter(|number: &NonZeroUsize| number.get() <= 1024);
    number.ok_or_else(|| "expected a number from 1 to 1024".to_owned())
}

/// Returns the help text of `--store`. `fallback` is the default if neither environment variable is set.
fn store_help(purpose: &str, accepts_memory: bool, fallback: &str) -> String {
    let memory = if accepts_memory { "memory, " } else { "" };
    format!(
        "{purpose}: {memory}redis://[user:password@]host[:port][/database], redis+cluster://[user:password@]host[:port],… for a \
         Redis Cluster, redis+sentinel://[user:password@]host[:port],…/NAME for Sentinels, or rediss://… for TLS [default: $TIDEGATE_STORE, else $REDIS_URL, else {fallback}]"
    )
}

/// The options `--store` and `--store-file`. [`StoreChoice::url`] falls back to the environment.
#[derive(Args, Debug)]
pub(crate) struct StoreChoice {
    /// Store with the counters: redis://[user:password@]host[:port][/database], redis+cluster://[user:password@]host[:port],…
    /// for a Redis Cluster, redis+sentinel://[user:password@]host[:port],…/NAME for Sentinels, or rediss://… for TLS
    /// [default: $TIDEGATE_STORE, else $REDIS_URL, else `store` in the configuration file]
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
    /// File with the URL of the store; keeps a password out of the process list
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    pub(crate) store_file: Option<PathBuf>,
}

/// The options `--store` and `--config` of a command that reads or changes counters.
#[derive(Args, Debug)]
pub(crate) struct CountersChoice {
    #[command(flatten)]
    pub(crate) store: StoreChoice,
    /// Configuration file; sets the key prefix, and the store unless --store, $TIDEGATE_STORE or $REDIS_URL does
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) listeners: ListenerOptions<false>,
    /// File with the secret that encrypts receipts; must be the same on all instances [default:
    /// $TIDEGATE_RECEIPT_SECRET, else `receipt_secret` in the configuration file, else random if counters are in
    /// memory]
    #[arg(help_heading = SECRETS, long, value_name = "FILE")]
    pub(crate) receipt_secret_file: Option<PathBuf>,
    /// Allow listeners without a secret on addresses that other machines can reach
    #[arg(help_heading = SECRETS, long)]
    pub(crate) insecure: bool,
    #[command(flatten)]
    pub(crate) service: ServiceOptions,
}

#[derive(Args, Debug)]
pub(crate) struct GatewayArguments {
    /// URL of the service to forward requests to, such as http://127.0.0.1:3000; if repeated, requests are distributed
    /// over the servers in turn [default: `[[upstreams]]` in the configuration file]
    #[arg(help_heading = FORWARDING, long = "upstream", value_name = "URL")]
    pub(crate) upstreams: Vec<tidegate::gateway::ServerUrl>,
    /// Limit for each client address: QUOTA/WINDOW [ALGORITHM] [option=value …]; for other rules, use --config
    #[arg(
        help_heading = FORWARDING,
        long,
        value_name = "LIMIT",
        conflicts_with = "config",
        long_help = limit_help!("Limit for each client address: QUOTA/WINDOW [ALGORITHM] [option=value …]; for other rules, use --config")
    )]
    pub(crate) limit: Option<Limit>,
    /// Address on which to accept requests [default: `listen` of `[gateway]` in the configuration file, else
    /// 127.0.0.1:8000]
    #[arg(help_heading = LISTENERS, long, value_name = "ADDRESS", value_parser = listener_address)]
    pub(crate) listen: Option<String>,
    #[command(flatten)]
    pub(crate) service: ServiceOptions,
}

/// The options that `tidegate serve` and `tidegate gateway` share.
#[derive(Args, Debug)]
pub(crate) struct ServiceOptions {
    #[command(flatten, next_help_heading = STORE)]
    pub(crate) store: StoreChoice,
    #[command(flatten)]
    pub(crate) operator_listeners: ListenerOptions<true>,
    /// PEM file with the certificate chain; enables TLS on every listener, except an admin listener on a loopback
    /// address
    #[arg(help_heading = TLS, long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the certificate
    #[arg(help_heading = TLS, long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Origins of web pages that may send requests to the HTTP and admin listeners, such as `https://ops.example`,
    /// separated by commas [default: none]
    #[arg(help_heading = ACCESS, long, value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) allow_origin: Vec<tidegate_server::WebOrigin>,
    /// Domain names that the admin listener accepts in the Host header, separated by commas; IP addresses and names
    /// without a dot are always accepted [default: none]
    #[arg(help_heading = ACCESS, long, value_name = "NAME", value_delimiter = ',', value_parser = host_name)]
    pub(crate) admin_host: Vec<String>,
    /// Configuration file with rules, plans and settings (.toml, .yaml or .yml); reloaded when it changes and on SIGHUP
    #[arg(help_heading = CONFIGURATION, long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Maximum memory for counters in this process, such as 512MiB or 2GB [default: an eighth of the memory of the
    /// machine or container, at most 1GiB]
    #[arg(help_heading = STORE, long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<usize>,
    /// Number of threads that serve connections [default: one for every two cores]
    #[arg(help_heading = CONNECTIONS, long, value_name = "N", allow_negative_numbers = true, value_parser = threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Number of instances that share the quotas while the store is unavailable [default: `instances` in the
    /// configuration file, else the number of instances that share the store]
    #[arg(help_heading = STORE, long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) instances: Option<u32>,
    /// Maximum number of connections to each listener, except the admin listener
    #[arg(help_heading = CONNECTIONS, long, value_name = "N", allow_negative_numbers = true, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) connections: u32,
    /// Time after which an idle connection is closed; at most 10s on the admin listener [default: 60s for HTTP, 300s
    /// for RESP]
    #[arg(help_heading = CONNECTIONS, long, value_name = "TIME", value_parser = time)]
    pub(crate) idle: Option<Duration>,
    /// Time to keep serving after SIGTERM or SIGINT, while /readyz reports that the instance is shutting down
    #[arg(help_heading = CONNECTIONS, long, value_name = "TIME", default_value = "1s", value_parser = time)]
    pub(crate) drain: Duration,
    /// URL of an OpenTelemetry collector that receives a span for each decision, such as http://127.0.0.1:4318
    #[cfg(feature = "otlp")]
    #[arg(help_heading = LOGS, long, value_name = "URL")]
    pub(crate) otlp: Option<String>,
    /// Format of the logs on standard error
    #[arg(help_heading = LOGS, long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    pub(crate) log: String,
}

/// Checks the address of a listener: HOST:PORT, with brackets around an IPv6 address, or `off`.
///
/// The host is not resolved. The error says which form is expected.
fn listener_address(text: &str) -> Result<String, String> {
    let is_address = text.rsplit_once(':').is_some_and(|(host, port)| {
        let is_bracketed = host.starts_with('[') && host.ends_with(']');
        !host.is_empty() && (is_bracketed || !host.contains(':')) && port.parse::<u16>().is_ok()
    });
    if is_address || text == "off" {
        Ok(text.to_owned())
    } else {
        let port = text.trim_start_matches(':').parse::<u16>().map_or("PORT".to_owned(), |port| port.to_string());
        Err(format!(
            "expected HOST:PORT, such as 127.0.0.1:{port} for this machine only or 0.0.0.0:{port} for all networks, or off"
        ))
    }
}

/// Checks a host that a `Host` header may name: a domain name or an IP address, without scheme and port.
///
/// An IPv6 address may be in brackets, which are removed. The error says which form is expected.
fn host_name(text: &str) -> Result<String, String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if bare.unwrap_or(text).parse::<IpAddr>().is_ok_and(|address| bare.is_none() || address.is_ipv6()) {
        return Ok(bare.unwrap_or(text).to_owned());
    }
    let is_label = |label: &str| {
        let is_label_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        (1..=63).contains(&label.len())
            && label.bytes().all(is_label_byte)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // The last label of a domain name is never a number, so `1.2.3` is a mistyped address.
    let has_numeric_end = |name: &str| name.rsplit('.').next().is_some_and(|last| last.parse::<u64>().is_ok());
    let is_name = |name: &str| name.len() <= 253 && name.split('.').all(is_label) && !has_numeric_end(name);
    if is_name(text) {
        return Ok(text.to_owned());
    }
    let without_scheme = text.split_once("://").map_or(text, |(_, rest)| rest);
    let meant = without_scheme.split(['/', ':']).next().filter(|name| *name != text && is_name(name));
    let meant = meant.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
    Err(format!("expected a domain name or an IP address without scheme and port, such as ops.example{meant}"))
}

/// Parses a time such as 500ms, 10s or 1min, zero included. The error says which form is expected.
fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "expected a time such as 500ms, 10s or 1min".to_owned())
}

/// The smallest value of `--memory`.
const MEMORY_BYTES_MIN: usize = 1 << 20;

/// Parses a number of bytes such as 512MiB, 2GB or 536870912.
///
/// The number is an integer. The unit is B, kB, MB, GB, TB (powers of 1,000) or KiB, MiB, GiB, TiB (powers of 1,024),
/// in upper or lower case. Without one the number is in bytes. Returns an error below [`MEMORY_BYTES_MIN`].
fn size(text: &str) -> Result<usize, String> {
    let expected = || "expected a size of at least 1MiB, such as 512MiB, 2GB or 536870912".to_owned();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit: usize = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(expected()),
    };
    let bytes = number.parse::<usize>().ok().and_then(|number| number.checked_mul(unit));
    bytes.filter(|bytes| *bytes >= MEMORY_BYTES_MIN).ok_or_else(expected)
}

/// The options `--admin` and `--admin-token-file` of a command that can use a running instance instead of a store.
#[derive(Args, Debug)]
pub(crate) struct AdminChoice {
    /// URL of a running instance's admin listener, such as http://127.0.0.1:9180
    #[arg(long, value_name = "URL", conflicts_with_all = ["store", "store_file", "config"])]
    pub(crate) admin: Option<String>,
    /// File with the token for the instance's admin API [default: $TIDEGATE_ADMIN_TOKEN]
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub(crate) admin_token_file: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Validate {
    /// Configuration file
    pub(crate) file: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with 1 if the file is valid but has warnings; advice does not count
    #[arg(long)]
    pub(crate) deny_warnings: bool,
    #[command(flatten)]
    pub(crate) store: StoreChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// Method of the request, such as POST
    pub(crate) method: String,
    /// Path and query of the request, such as /shorten
    pub(crate) path: String,
    /// Remote IP address of the request's connection
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) peer: IpAddr,
    /// Client that sends the request: an address, an API key or the name of one, or user:ID
    #[arg(long, value_name = "CLIENT", conflicts_with = "peer", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) client: Option<String>,
    /// Header of the request as `NAME: VALUE`, or @FILE to read one header per line, which keeps secrets out of the
    /// process list
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    pub(crate) headers: Vec<String>,
    /// Configuration file with the rules
    #[arg(long, value_name = "FILE", conflicts_with = "admin")]
    pub(crate) config: Option<PathBuf>,
    /// Show the counted subjects, such as ip:203.0.113.9, instead of ip:***
    #[arg(long)]
    pub(crate) reveal: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

#[derive(Args, Debug)]
pub(crate) struct CheckArguments {
    /// Key to count, such as user:42
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) key: String,
    /// Limit: QUOTA/WINDOW [ALGORITHM] [option=value …]
    #[arg(long_help = limit_help!("Limit: QUOTA/WINDOW [ALGORITHM] [option=value …]"))]
    pub(crate) limit: Limit,
    /// Cost of the check in units; 0 reads the counter and charges nothing
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) cost: u32,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Inspect {
    /// Key of the counter; with --rule, or without LIMIT, a client: an address, the name of an API key, an API key,
    /// user:ID, or a subject as `tidegate explain --reveal` prints it
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) key: String,
    /// Limit: QUOTA/WINDOW [ALGORITHM] [option=value …]; with --rule, the name of one of the rule's limits [default:
    /// all limits of the client]
    #[arg(
        long_help = limit_help!("Limit: QUOTA/WINDOW [ALGORITHM] [option=value …]; with --rule, the name of one of the rule's limits [default: all limits of the client]")
    )]
    pub(crate) limit: Option<String>,
    /// Use the counters of this rule, defined in the configuration file (--config) or by the instance (--admin)
    /// [default: all rules]
    #[arg(long, value_name = "NAME")]
    pub(crate) rule: Option<String>,
    /// Plan of the client, for a rule whose limits come from plans [default: the plan of the client's API key or
    /// address]
    #[arg(long, value_name = "NAME")]
    pub(crate) plan: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

#[derive(Subcommand, Debug)]
pub(crate) enum KeyCommand {
    /// Set the plan, the own limits or the groups of a key
    #[command(
        after_help = "Examples:\n  tidegate key set acme --plan pro --config tidegate.toml\n  tidegate key set acme --limit 100/min --limit 5000/day --admin http://127.0.0.1:9180"
    )]
    Set(KeySet),
    /// Remove the plan, the own limits or the groups of a key
    #[command(
        after_help = "Examples:\n  tidegate key unset acme --limits --config tidegate.toml\n  tidegate key unset acme --plan --limits --admin http://127.0.0.1:9180"
    )]
    Unset(KeyUnset),
    /// Print a key: its plan, its own limits, its groups, and what of its entry is ignored
    #[command(
        after_help = "Examples:\n  tidegate key show acme --config tidegate.toml\n  tidegate key show acme --json --admin http://127.0.0.1:9180"
    )]
    Show(KeyShow),
    /// Print the keys of the hash, sorted by name, at most 1,000
    #[command(
        after_help = "Examples:\n  tidegate key list --config tidegate.toml\n  tidegate key list --json --admin http://127.0.0.1:9180"
    )]
    List(KeyOptions),
}

#[derive(Args, Debug)]
pub(crate) struct KeySet {
    /// Name of the key's owner, as in the hash
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    /// Plan of the key
    #[arg(long, value_name = "PLAN", required_unless_present_any = ["limits", "groups"])]
    pub(crate) plan: Option<String>,
    /// Limit of the key, instead of those of its plan: QUOTA/WINDOW [ALGORITHM] [option=value …]; if repeated, all apply
    #[arg(long = "limit", value_name = "LIMIT")]
    pub(crate) limits: Vec<String>,
    /// Group of the key's owner, for rules with `match.groups`; if repeated, the owner is in all of them [replaces the
    /// groups of the key]
    #[arg(long = "group", value_name = "GROUP")]
    pub(crate) groups: Vec<String>,
    #[command(flatten)]
    pub(crate) options: KeyOptions,
}

#[derive(Args, Debug)]
pub(crate) struct KeyUnset {
    /// Name of the key's owner, as in the hash
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    /// Remove the plan
    #[arg(long, required_unless_present_any = ["limits", "groups"])]
    pub(crate) plan: bool,
    /// Remove all own limits
    #[arg(long)]
    pub(crate) limits: bool,
    /// Remove all groups
    #[arg(long)]
    pub(crate) groups: bool,
    #[command(flatten)]
    pub(crate) options: KeyOptions,
}

#[derive(Args, Debug)]
pub(crate) struct KeyShow {
    /// Name of the key's owner, as in the hash
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) options: KeyOptions,
}

/// The options that the commands of `tidegate key` share.
#[derive(Args, Debug)]
pub(crate) struct KeyOptions {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreChoice,
    /// Configuration file with the hash, the plans and the rules; sets the store unless --store, $TIDEGATE_STORE or
    /// $REDIS_URL does
    #[arg(long, value_name = "FILE", required_unless_present = "admin")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

#[derive(Args, Debug)]
pub(crate) struct BanArguments {
    /// Client to ban, such as 203.0.113.9, 2001:db8::/48, acme or user:42
    #[arg(required_unless_present_any = ["key", "list"], value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) client: Option<String>,
    /// Key of explicit checks to ban, instead of a client
    #[arg(long, value_name = "KEY", conflicts_with = "client", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) key: Option<String>,
    /// List all bans
    #[arg(long, conflicts_with_all = ["client", "key", "duration"])]
    pub(crate) list: bool,
    /// Duration of the ban, such as 30s, 10min or 1h [default: until `tidegate unban`]
    #[arg(long = "for", value_name = "TIME", value_parser = ban_time)]
    pub(crate) duration: Option<Duration>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Unban {
    /// Client to unban, such as 203.0.113.9, 2001:db8::/48, acme or user:42
    #[arg(required_unless_present = "key", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) client: Option<String>,
    /// Key of explicit checks to unban, instead of a client
    #[arg(long, value_name = "KEY", conflicts_with = "client", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) key: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

/// Parses the duration of a ban, such as 30s, 10min or 1h. Returns an error below one millisecond.
fn ban_time(text: &str) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(text).ok().filter(|duration| *duration >= Duration::from_millis(1));
    parsed.ok_or_else(|| "expected a time of at least 1ms, such as 30s, 10min or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Splits a command line at spaces, except within quotes, which are removed.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut quote) = (vec![String::new()], None);
        for character in line.chars() {
            match (character, quote) {
                ('\'' | '"', None) => quote = Some(character),
                (_, Some(open)) if character == open => quote = None,
                (' ', None) => words.push(String::new()),
                _ => words.last_mut().unwrap().push(character),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn number_of_threads_is_bounded() {
        assert_eq!(threads("1024").map(NonZeroUsize::get), Ok(1024));
        for text in ["0", "1025", "-1", "two", ""] {
            assert_eq!(threads(text).unwrap_err(), "expected a number from 1 to 1024");
        }
    }

    #[test]
    fn a_size_has_a_unit_or_is_in_bytes() {
        for (text, bytes) in [
            ("1048576", 1 << 20),
            ("1mib", 1 << 20),
            ("512MiB", 512 << 20),
            ("2GB", 2_000_000_000),
            ("2 GB", 2_000_000_000),
            ("3GiB", 3 << 30),
            ("2048KiB", 2 << 20),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in
            ["", "0", "1048575", "1023KiB", "MiB", "512M", "1.5GiB", "-1GiB", "99999999999TiB", "1 000MB", "half"]
        {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn address_of_a_listener_has_a_host_and_a_port() {
        for text in ["127.0.0.1:8080", "0.0.0.0:0", "[::1]:8080", "[::]:80", "localhost:8080", "off"] {
            assert_eq!(listener_address(text).as_deref(), Ok(text));
        }
        for text in ["", ":8080", "8080", "127.0.0.1", "::1:8080", "[::1]", "localhost:http", "localhost:65536", "OFF"]
        {
            let error = listener_address(text).unwrap_err();
            assert!(error.starts_with("expected HOST:PORT, such as 127.0.0.1:"), "{text}: {error}");
        }
        for text in [":8080", "8080"] {
            assert!(listener_address(text).unwrap_err().contains("127.0.0.1:8080 for this machine only"), "{text}");
        }
    }

    #[test]
    fn admin_host_is_a_name_or_an_address() {
        for text in ["ops.example", "OPS.example", "a-b.c_d.example", "xn--bcher-kva.example", "localhost", "10.0.0.5"]
        {
            assert_eq!(host_name(text).as_deref(), Ok(text));
        }
        assert_eq!(host_name("::1").as_deref(), Ok("::1"));
        assert_eq!(host_name("[2001:db8::1]").as_deref(), Ok("2001:db8::1"));
        let long = format!("{}.example", "a".repeat(64));
        for text in
            ["", ".", "*.example", "ops..example", "-a.example", "a b", "bücher.example", "1.2.3", "[10.0.0.5]", &long]
        {
            let error = host_name(text).unwrap_err();
            assert!(error.starts_with("expected a domain name or an IP address") && !error.contains('?'), "{error}");
        }
        for text in ["ops.example:9180", "https://ops.example", "http://ops.example:9180/", "ops.example/"] {
            let error = host_name(text).unwrap_err();
            assert!(error.ends_with("; did you mean ops.example?"), "{error}");
        }
    }

    #[test]
    fn origins_and_hosts_are_lists() {
        let serve = |line: &str| match Arguments::try_parse_from(words(line)).unwrap().command {
            Some(Command::Serve(serve)) => serve,
            other => panic!("{other:?}"),
        };
        let both = serve("tidegate serve --allow-origin https://a.example,https://b.example --admin-host a.example");
        assert_eq!((both.service.allow_origin.len(), both.service.admin_host.len()), (2, 1));
        assert!(Arguments::try_parse_from(words("tidegate serve --allow-origin a.example")).is_err());
        assert_eq!(serve("tidegate serve").service.allow_origin, []);
    }

    /// The long help of a limit has every algorithm, every option and examples that can be parsed.
    #[test]
    fn help_of_a_limit_is_complete() {
        for (command, argument) in [("check", "limit"), ("inspect", "limit"), ("reset", "limit"), ("gateway", "limit")]
        {
            let arguments = Arguments::command();
            let command = arguments.find_subcommand(command).unwrap();
            let argument = command.get_arguments().find(|each| each.get_id() == argument).unwrap();
            let help = argument.get_long_help().unwrap().to_string();
            for algorithm in tidegate::Algorithm::ALL {
                assert!(help.contains(&format!("\n  {} ", algorithm.as_str())), "{algorithm}: {help}");
            }
            for option in ["burst=N", "queue=N", "count_denied=true|false", "us, ms, s, min, h, day and week"] {
                assert!(help.contains(option), "{option}: {help}");
            }
            let (_, examples) = help.split_once("Examples:\n").unwrap();
            assert!(examples.lines().count() >= 4);
            for example in examples.lines() {
                example.trim().trim_matches('\'').parse::<Limit>().unwrap();
            }
        }
    }

    #[test]
    fn options_of_the_servers_have_headings() {
        for command in ["serve", "gateway"] {
            let arguments = Arguments::command();
            let command = arguments.find_subcommand(command).unwrap();
            for argument in command.get_arguments() {
                assert!(argument.get_help_heading().is_some(), "{}: {}", command.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn help_has_the_exit_codes() {
        for command in ["serve", "gateway", "validate", "check", "script", "boundary", "completions", "man"] {
            let arguments = Arguments::command();
            let help = arguments.find_subcommand(command).unwrap().get_after_help().map(ToString::to_string);
            assert!(help.as_ref().is_some_and(|help| help.contains("\n\nExit codes: 0")), "{command}: {help:?}");
        }
    }

    #[test]
    fn every_example_in_a_help_text_can_be_parsed() {
        for command in Arguments::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            // The first command of a pipe.
            let lines = help.lines().map(|line| line.split(" | ").next().unwrap_or(line).trim());
            let examples: Vec<&str> = lines.filter(|line| line.starts_with("tidegate ")).collect();
            assert!(!examples.is_empty(), "{} has no example", command.get_name());
            for example in examples {
                let parsed = Arguments::try_parse_from(words(example));
                assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
                assert_eq!(words(example)[1], command.get_name(), "{example}");
            }
        }
    }
}
