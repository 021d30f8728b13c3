//! What can be said on the command line.
#![allow(rustdoc::broken_intra_doc_links)] // the comments are help texts, where brackets mean "may be left out"

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tollgate::Limit;

/// A rate limiter whose windows really slide.
#[derive(Parser, Debug)]
#[command(
    name = "tollgate",
    version,
    about,
    after_help = "Without a command it shows the boundary burst; start with: tollgate serve"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Decide for others, over HTTP and RESP
    #[command(
        args_override_self = true,
        after_help = "Example:\n  tollgate serve --config tollgate.toml --store redis://127.0.0.1:6379\n  curl -d '{\"key\":\"user:42\",\"limit\":\"10/min\"}' http://127.0.0.1:8080/v1/check"
    )]
    Serve(Box<Serve>),
    /// Read a configuration and say what is wrong or odd about it: exit 0 if it can be used, 2 if not
    #[command(after_help = "Example:\n  tollgate validate tollgate.toml --json")]
    Validate(Validate),
    /// Say what the rules would do with a request, and why
    #[command(
        after_help = "Example:\n  tollgate explain --config tollgate.toml POST /shorten --peer 203.0.113.9 -H 'x-api-key: KEY'\n  tollgate explain --admin http://127.0.0.1:9090 GET /api/items --peer 203.0.113.9"
    )]
    Explain(Explain),
    /// Decide once, and say so by the exit code: 0 allowed, 1 denied, 2 error
    #[command(after_help = "Example:\n  tollgate check user:42 10/min --cost 3 --store redis://127.0.0.1:6379")]
    Check(Check),
    /// Look at a counter without changing it
    #[command(
        after_help = "Example:\n  tollgate inspect user:42 10/min --store redis://127.0.0.1:6379\n  tollgate inspect user:42 10/min --config tollgate.toml\n  tollgate inspect ip:203.0.113.9 --rule shorten --admin http://127.0.0.1:9090"
    )]
    Inspect(Inspect),
    /// Forget a counter
    #[command(
        after_help = "Example:\n  tollgate reset user:42 10/min --store redis://127.0.0.1:6379\n  tollgate reset user:42 10/min --config tollgate.toml\n  tollgate reset ip:203.0.113.9 --rule shorten --admin http://127.0.0.1:9090"
    )]
    Reset(Inspect),
    /// Refuse all requests of a subject (HTTP 403), on all instances of the store
    #[command(
        after_help = "Example:\n  tollgate ban ip:203.0.113.9 --for 1h --store redis://127.0.0.1:6379\n  tollgate ban user:42 --config tollgate.toml\n  tollgate ban user:42 --admin http://127.0.0.1:9090\n\nSUBJECT is what a rule counts, as `tollgate explain --reveal` prints it after `counts`, or the key of explicit checks."
    )]
    Ban(Ban),
    /// Lift the ban of a subject
    #[command(
        after_help = "Example:\n  tollgate unban ip:203.0.113.9 --store redis://127.0.0.1:6379\n  tollgate unban user:42 --admin http://127.0.0.1:9090"
    )]
    Unban(Unban),
    /// Print the Lua script that decides on Redis, for any language
    #[command(after_help = "Example:\n  tollgate script\n  redis-cli SCRIPT LOAD \"$(tollgate script)\"")]
    Script,
    /// Show the same burst at a window's edge under fixed-window and under sliding
    #[command(after_help = "Example:\n  tollgate boundary")]
    Boundary,
    /// Print what makes a shell complete this command
    #[command(after_help = "Example:\n  tollgate completions bash\n  source <(tollgate completions bash)")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Where the counters are.
#[derive(Args, Debug)]
pub(crate) struct StoreChoice {
    /// memory, redis://[user:password@]host[:port][/database] or rediss://… [default: $TOLLGATE_STORE, else $REDIS_URL, else memory]
    #[arg(long, value_name = "URL")]
    pub(crate) store: Option<String>,
}

/// Where the counters are, and what their keys begin with.
#[derive(Args, Debug)]
pub(crate) struct CountersChoice {
    #[command(flatten)]
    pub(crate) store: StoreChoice,
    /// The configuration that says which store, unless --store does, and which prefix its keys have
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) store: StoreChoice,
    /// Where to answer POST /v1/check; `off` closes the door
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub(crate) http: String,
    /// Where to answer Redis clients; `off` closes the door
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6380")]
    pub(crate) resp: String,
    /// Where to answer the operator: metrics, health, keys, rules, reload; `off` closes the door [default: 127.0.0.1:9090]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) admin: Option<String>,
    /// A file with the token that opens the admin door [default: $TOLLGATE_ADMIN_TOKEN, else one is made and printed]
    #[arg(long, value_name = "FILE")]
    pub(crate) admin_token_file: Option<PathBuf>,
    /// A file with the password that Redis clients must give [default: $TOLLGATE_RESP_PASSWORD, else none]
    #[arg(long, value_name = "FILE")]
    pub(crate) resp_password_file: Option<PathBuf>,
    /// Encrypt the doors: the certificate chain as PEM. The admin door stays plain on loopback
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The origins of web pages that may send requests to http and admin, such as `https://ops.example` [default: none]
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) allow_origin: Vec<tollgate_server::WebOrigin>,
    /// Domain names under which the admin listener may be asked, besides addresses and names without a dot [default: none]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) admin_host: Vec<String>,
    /// Rules, plans and settings (.toml, .yaml); read again when it changes, and on SIGHUP
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The most memory for counters in this process, such as 512MiB or 2GB [default: an eighth of the machine's, at most 1GiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<usize>,
    /// How many threads serve connections [default: one for every two cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<std::num::NonZeroUsize>,
    /// How many instances share the quota while the store is away [default: as configured, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) instances: Option<u32>,
    /// Connections that each door lets in at once
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) connections: u32,
    /// A connection that is silent for so long is closed [default: 60s on http and admin, 300s on resp]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) idle: Option<Duration>,
    /// After SIGTERM: how long to go on serving while /readyz says that this instance is leaving
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time)]
    pub(crate) drain: Duration,
    /// Send a span per decision to the OpenTelemetry collector there, such as http://127.0.0.1:4318
    #[cfg(feature = "otlp")]
    #[arg(long, value_name = "URL")]
    pub(crate) otlp: Option<String>,
    /// How to write logs
    #[arg(long, value_name = "FORM", default_value = "text", value_parser = ["text", "json"])]
    pub(crate) log: String,
}

/// A time such as 500ms, 10s or 1min.
fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "expected a time such as 500ms, 10s or 1min".to_owned())
}

/// The smallest memory for counters that makes sense.
const MEMORY_BYTES_MIN: usize = 1 << 20;

/// Reads a number of bytes such as 512MiB, 2GB or 536870912.
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

/// A running instance, asked instead of a store.
#[derive(Args, Debug)]
pub(crate) struct AdminChoice {
    /// Ask the running instance whose admin door is there, such as http://127.0.0.1:9090
    #[arg(long, value_name = "URL", conflicts_with_all = ["store", "config"])]
    pub(crate) admin: Option<String>,
    /// A file with its token [default: $TOLLGATE_ADMIN_TOKEN]
    #[arg(long, value_name = "FILE", requires = "admin")]
    pub(crate) admin_token_file: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Validate {
    /// The configuration
    pub(crate) file: PathBuf,
    /// Print JSON instead of words
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// The request's method
    pub(crate) method: String,
    /// Its path, with the query if there is one
    pub(crate) path: String,
    /// The address at the other end of the socket on which it came
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) peer: std::net::IpAddr,
    /// A header, as `NAME: VALUE`; @FILE reads lines of them, so that a key need not stand here for all to see
    #[arg(short = 'H', long = "header", value_name = "HEADER")]
    pub(crate) headers: Vec<String>,
    /// The configuration whose rules are meant
    #[arg(long, value_name = "FILE", required_unless_present = "admin", conflicts_with = "admin")]
    pub(crate) config: Option<PathBuf>,
    /// Show whom the rules count, not only by what kind
    #[arg(long)]
    pub(crate) reveal: bool,
    /// Print JSON instead of words
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) store: StoreChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Check {
    /// Who is counted
    pub(crate) key: String,
    /// Against what: QUOTA/WINDOW [ALGORITHM] [option=value …]
    pub(crate) limit: Limit,
    /// How many units; 0 only looks
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cost: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Inspect {
    /// Who is counted; with --rule a subject, as `explain --reveal` shows it
    pub(crate) key: String,
    /// Against what: QUOTA/WINDOW [ALGORITHM] [option=value …]; with --rule the name of one of its limits
    #[arg(required_unless_present = "rule")]
    pub(crate) limit: Option<String>,
    /// The rule whose counters are meant
    #[arg(long, value_name = "NAME", requires = "admin")]
    pub(crate) rule: Option<String>,
    /// The caller's plan, for a rule that goes by plans
    #[arg(long, value_name = "NAME", requires = "rule")]
    pub(crate) plan: Option<String>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

#[derive(Args, Debug)]
pub(crate) struct Ban {
    /// The subject to ban, such as ip:203.0.113.9 or user:42
    pub(crate) subject: String,
    /// How long the ban lasts, such as 30s, 10min or 1h [default: for good]
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
    /// The subject whose ban is lifted, such as ip:203.0.113.9 or user:42
    pub(crate) subject: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) counters: CountersChoice,
    #[command(flatten)]
    pub(crate) admin: AdminChoice,
}

/// Parses the duration of a ban: at least one millisecond.
fn ban_time(text: &str) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(text).ok().filter(|duration| *duration >= Duration::from_millis(1));
    parsed.ok_or_else(|| "expected a time of at least 1ms, such as 30s, 10min or 1h".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// The words of a command line, as a shell takes them apart; quotes hold words together.
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
    fn the_arguments_make_sense() {
        Arguments::command().debug_assert();
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
    fn origins_and_hosts_are_lists() {
        let serve = |line: &str| match Arguments::try_parse_from(words(line)).unwrap().command {
            Some(Command::Serve(serve)) => serve,
            other => panic!("{other:?}"),
        };
        let both = serve("tollgate serve --allow-origin https://a.example,https://b.example --admin-host a.example");
        assert_eq!((both.allow_origin.len(), both.admin_host.len()), (2, 1));
        assert!(Arguments::try_parse_from(words("tollgate serve --allow-origin a.example")).is_err());
        assert_eq!(serve("tollgate serve").allow_origin, []);
    }

    #[test]
    fn every_example_in_a_help_text_is_a_command_that_can_be_given() {
        for command in Arguments::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples: Vec<&str> =
                help.lines().map(str::trim).filter(|line| line.starts_with("tollgate ")).collect();
            assert!(!examples.is_empty(), "{} has no example", command.get_name());
            for example in examples {
                let parsed = Arguments::try_parse_from(words(example));
                assert!(parsed.is_ok(), "{example}: {}", parsed.unwrap_err());
                assert_eq!(words(example)[1], command.get_name(), "{example}");
            }
        }
    }
}
