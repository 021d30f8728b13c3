//! The gateway in front of real services, under load, and on Redis.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tidegate_testkit::poll::{eventually, poll};
use tidegate_testkit::server::{Server, free_port};

use super::protocols::Certificates;
use crate::newcomer::build_example;
use crate::ops::tool;
use tidegate_testkit::http::upstream::Upstream;
use tidegate_testkit::program::GatewayProcess;

/// A server in another process. Dropping it kills the process.
struct Service {
    child: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Service {
    /// Starts the service that `command` returns for a directory and a port, and waits until it accepts connections.
    fn start(command: impl FnOnce(&std::path::Path, u16) -> Command) -> Service {
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let mut command = command(dir.path(), port);
        command.current_dir(dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child =
            command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/setup.sh installs it"));
        let service = Service { child, address: format!("127.0.0.1:{port}"), _dir: dir };
        assert!(poll(|| TcpStream::connect(&service.address).is_ok()), "{command:?} does not listen");
        service
    }

    fn nginx() -> Service {
        Service::start(|dir, port| {
            let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
            let temporary = temporary.map(|what| format!("{what}_temp_path {what};\n")).concat();
            let config = format!(
                "daemon off; master_process off; pid pid; error_log stderr;\nevents {{ }}\nhttp {{ access_log off;\n{temporary}\
                 server {{ listen 127.0.0.1:{port};\n\
                 location / {{ return 200 \"$request_method $host $http_x_forwarded_for $http_x_real_ip\"; }} }} }}\n"
            );
            std::fs::write(dir.join("nginx.conf"), config).unwrap();
            let mut nginx = tool("nginx");
            nginx.arg("-p").arg(dir).args(["-c", "nginx.conf", "-e", "stderr"]);
            nginx
        })
    }

    fn shortener() -> Service {
        build_example("shortener");
        Service::start(|_, port| {
            let binary = std::path::Path::new(env!("CARGO_BIN_EXE_tidegate")).with_file_name("shortener");
            let mut shortener = Command::new(binary);
            shortener.env_remove("REDIS_URL").env("RATE_LIMIT_MAX", "1000").env("PORT", port.to_string());
            shortener
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn nginx_is_protected_by_limits_plans_bans_and_a_shield() {
    let nginx = Service::nginx();
    let configuration = format!(
        "[gateway]\n[[upstreams]]\nname = 'nginx'\nservers = ['http://{}']\n\
         [plans.default]\nlimits = ['1/h']\n[plans.anonymous]\nlimits = ['2/h']\n[plans.pro]\nlimits = ['3/h']\n\
         [[keys]]\nkey = 'planted-pro'\nplan = 'pro'\n[[keys]]\nkey = 'planted-banned'\n\
         [[bans]]\nby = 'api_key'\nvalue = 'planted-banned'\n\
         [[rules]]\nname = 'plans'\nmatch = {{ path = '/api/*' }}\nlimits = 'plan'\n\
         [[rules]]\nname = 'shield'\nmatch = {{ path = '/shielded' }}\nstore = 'memory'\nby = ['ip']\nlimits = ['1/h']\n",
        nginx.address
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let ask = |path: &str, key: Option<&str>| {
        let headers: Vec<(&str, &str)> = key.iter().map(|key| ("x-api-key", *key)).collect();
        gateway.client().ask("GET", path, &headers, "")
    };
    let first = ask("/api/x", None);
    assert_eq!((first.status, first.body.as_str()), (200, "GET x 127.0.0.1 127.0.0.1"), "{first:?}");
    assert_eq!(first.headers["ratelimit-policy"], "\"per-hour\";q=2;w=3600");
    assert_eq!([0; 2].map(|_| ask("/api/x", None).status), [200, 429]);
    assert_eq!([0; 4].map(|_| ask("/api/x", Some("planted-pro")).status), [200, 200, 200, 429]);
    assert_eq!(ask("/api/x", Some("planted-banned")).status, 403);
    let shielded = [0; 2].map(|_| ask("/shielded", None));
    assert_eq!(shielded.each_ref().map(|answer| answer.status), [200, 429]);
    assert!(shielded[1].headers["content-type"].starts_with("text/plain"), "{shielded:?}");
    assert_eq!([0; 5].map(|_| ask("/elsewhere", None).status), [200; 5]);
}

#[test]
fn the_shortener_gets_what_the_rules_admit() {
    let shortener = Service::shortener();
    let configuration = format!(
        "[[upstreams]]\nname = 'shortener'\nservers = ['http://{}']\n\
         [[rules]]\nname = 'shorten'\nmatch = {{ methods = ['POST'], path = '/shorten' }}\nby = ['ip']\nlimits = ['2/h']\n",
        shortener.address
    );
    let gateway = GatewayProcess::configured(&configuration, &[]);
    let shorten = || {
        let json = [("content-type", "application/json")];
        gateway.client().ask("POST", "/shorten", &json, r#"{"url":"https://example.com/long"}"#)
    };
    let created = shorten();
    assert_eq!(created.status, 201, "{created:?}");
    let link: serde_json::Value = serde_json::from_str(&created.body).unwrap();
    let slug = link["slug"].as_str().unwrap_or_else(|| panic!("{link}"));
    assert_eq!([shorten().status, shorten().status], [201, 429]);
    for _ in 0..5 {
        let followed = gateway.get(&format!("/{slug}"));
        assert_eq!(followed.headers["location"], "https://example.com/long", "{followed:?}");
    }
}

#[test]
fn a_certificate_is_replaced_without_a_failed_request() {
    let (certificates, upstream) = (Certificates::new(), Upstream::hello());
    let gateway = certificates.gateway("127.0.0.1", &upstream);
    let authority = certificates.path("ca.pem");
    let (is_done, sent) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for option in ["--http1.1", "--http2"] {
            let (is_done, sent, authority, gateway) = (&is_done, &sent, &authority, &gateway);
            scope.spawn(move || {
                while !is_done.load(Ordering::SeqCst) {
                    let curl = ["-sS", option, "--cacert", authority.to_str().unwrap(), "-w", " %{http_code}"];
                    let output = Command::new("curl").args(curl).arg(gateway.url("https", "/")).output().unwrap();
                    let text = String::from_utf8_lossy(&output.stdout).into_owned();
                    assert_eq!(text, "hello 200", "{}", String::from_utf8_lossy(&output.stderr));
                    sent.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for round in 1..=3 {
            let before = sent.load(Ordering::SeqCst);
            certificates.renew("127.0.0.1");
            gateway.until("/metrics", |answer| {
                let reloads =
                    answer.body.lines().find_map(|line| line.strip_prefix("tidegate_reloads_total{result=\"ok\"} "));
                reloads.is_some_and(|count| count.parse::<u32>().unwrap() >= round)
            });
            eventually("requests are sent", || sent.load(Ordering::SeqCst), |count| *count > before + 5);
        }
        is_done.store(true, Ordering::SeqCst);
    });
}

/// Returns the number of commands that a server has executed, except `INFO`.
fn commands(redis: &Server) -> u64 {
    let stats = redis.command(&["INFO", "commandstats"]).text();
    let calls = |line: &str| line.split_once(":calls=")?.1.split_once(',')?.0.parse::<u64>().ok();
    stats.lines().filter(|line| !line.starts_with("cmdstat_info:")).filter_map(calls).sum()
}

#[test]
fn refusals_cost_no_redis_call_and_a_stopped_redis_does_not_stop_requests() {
    let (redis, upstream) = (Server::redis(), Upstream::hello());
    let configuration = format!(
        "instances = 1\ndeadline = '500ms'\n[[upstreams]]\nname = 'web'\nservers = ['{}']\n\
         [[rules]]\nname = 'few'\nmatch = {{ path = '/few' }}\nby = ['ip']\nlimits = ['2/h']\n\
         [[rules]]\nname = 'many'\nmatch = {{ path = '/many' }}\nby = ['ip']\nlimits = ['1000/h']\n",
        upstream.url()
    );
    let gateway = GatewayProcess::configured(&configuration, &["--store", &redis.url()]);
    gateway.until("/readyz", |answer| answer.status == 200);
    assert_eq!([0; 3].map(|_| gateway.get("/few").status), [200, 200, 429]);
    let (before, mut client) = (commands(&redis), gateway.client());
    let refused = (0..500).filter(|_| client.ask("GET", "/few", &[], "").status == 429).count();
    let cost = commands(&redis) - before;
    assert_eq!(refused, 500);
    // A cached denial lasts for a second at most.
    assert!(cost < 50, "{cost} commands for 500 refusals");
    assert_eq!(upstream.requests().len(), 2);

    redis.stop();
    let admitted = (0..20).filter(|_| gateway.get("/many").status == 200).count();
    let metrics = gateway.until("/metrics", |answer| answer.status == 200).body;
    redis.cont();
    assert_eq!(admitted, 20, "each rule's failure policy applies");
    let local = "tidegate_decisions_total{rule=\"many\",verdict=\"allow\",source=\"local\",mode=\"enforce\"} 20\n";
    assert!(metrics.contains(local) && metrics.contains("tidegate_degraded_total{policy=\"local\"} 20\n"), "{metrics}");
}
