//! A running nginx, Caddy or Traefik with the configuration in `ops/`.

use std::fmt;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use tidegate_testkit::poll::poll;
use tidegate_testkit::server::free_port;

use crate::ops::{read, tool};

/// The proxies and the forms of their configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Nginx,
    Caddy,
    CaddyWithHeaders,
    Traefik,
}

impl Kind {
    pub(super) const ALL: [Kind; 4] = [Kind::Nginx, Kind::Caddy, Kind::CaddyWithHeaders, Kind::Traefik];

    /// Returns the configuration in `ops/`.
    pub(super) fn config(self) -> String {
        read(match self {
            Kind::Nginx => "ops/nginx/tidegate.conf",
            Kind::Caddy => "ops/caddy/tidegate.caddyfile",
            Kind::CaddyWithHeaders => "ops/caddy/tidegate-headers.caddyfile",
            Kind::Traefik => "ops/traefik/dynamic.yaml",
        })
    }

    /// Returns whether admitted responses have the rate-limit headers.
    pub(super) fn adds_headers(self) -> bool {
        match self {
            Kind::Nginx | Kind::CaddyWithHeaders => true,
            Kind::Caddy | Kind::Traefik => false,
        }
    }

    /// Returns the status that visitors get while Tidegate cannot be reached.
    pub(super) fn status_without_tidegate(self) -> u16 {
        match self {
            Kind::Nginx | Kind::Traefik => 500,
            Kind::Caddy | Kind::CaddyWithHeaders => 502,
        }
    }

    /// Writes the files of the proxy into `dir`, and returns its command. `config` must have the addresses in use.
    fn command(self, dir: &Path, config: &str, port: u16) -> Command {
        match self {
            Kind::Nginx => {
                let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
                let temporary = temporary.map(|what| format!("{what}_temp_path {what};\n")).concat();
                let config = replace(config, "listen 80;", &format!("listen 127.0.0.1:{port};"));
                let config = format!(
                    "daemon off; master_process off; pid pid; error_log stderr;\nevents {{ }}\n\
                     http {{ access_log off;\n{temporary}{config} }}\n"
                );
                std::fs::write(dir.join("nginx.conf"), config).unwrap();
                let mut nginx = tool("nginx");
                nginx.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "stderr"]);
                nginx
            }
            Kind::Caddy | Kind::CaddyWithHeaders => {
                let options = "{\n\tadmin off\n\tauto_https off\n\tpersist_config off\n\tdefault_bind 127.0.0.1\n}\n";
                let config = replace(config, "\n:80 {", &format!("\n:{port} {{"));
                std::fs::write(dir.join("Caddyfile"), format!("{options}{config}")).unwrap();
                let mut caddy = tool("caddy");
                caddy.args(["run", "--config", "Caddyfile", "--adapter", "caddyfile"]);
                caddy
            }
            Kind::Traefik => {
                let entry = read("ops/traefik/traefik.yaml");
                let entry = replace(&entry, "address: :80", &format!("address: 127.0.0.1:{port}"));
                let options = "global:\n  checkNewVersion: false\n";
                std::fs::write(dir.join("traefik.yaml"), format!("{options}{entry}")).unwrap();
                std::fs::write(dir.join("dynamic.yaml"), config).unwrap();
                let mut traefik = tool("traefik");
                traefik.arg("--configFile=traefik.yaml");
                traefik
            }
        }
    }
}

/// Replaces the only occurrence of `from`.
fn replace(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from:?} in {text}");
    text.replace(from, to)
}

/// A running proxy. Dropping it kills the process; if the test has failed, its log is printed.
pub(super) struct Proxy {
    pub(super) kind: Kind,
    pub(super) address: String,
    child: Child,
    dir: TempDir,
}

impl Proxy {
    /// Starts a proxy with this configuration, in front of Tidegate and the application at these addresses.
    pub(super) fn start(kind: Kind, config: &str, tidegate: &str, application: &str) -> Proxy {
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let config = replace(config, "127.0.0.1:8080", tidegate);
        let config = replace(&config, "127.0.0.1:3000", application);
        let mut command = kind.command(dir.path(), &config, port);
        command.current_dir(dir.path()).env("HOME", dir.path());
        for variable in ["XDG_DATA_HOME", "XDG_CONFIG_HOME"] {
            command.env(variable, dir.path());
        }
        let log = File::create(dir.path().join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let started = command.spawn();
        let child = started.unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup.sh installs it"));
        Proxy { kind, address: format!("127.0.0.1:{port}"), child, dir }
    }

    /// Waits until `holds` returns `true`.
    ///
    /// # Panics
    /// If that takes too long. The log of the proxy is then printed.
    pub(super) fn wait_until(&self, holds: impl FnMut() -> bool) {
        assert!(poll(holds), "{self} is not ready");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            eprintln!("--- log of {self} ---\n{log}---");
        }
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}
