//! docs/runbooks.md: every command of the page, run in order against an instance on Redis.
//!
//! Each section has its own instance, and starts with the symptom that it describes. The commands are run by bash as
//! they stand, with the addresses and the directory of the test in place of those of the page. Their output must be
//! that of the page, except for times.

use std::process::Command;

use tempfile::TempDir;
use tidegate_testkit::poll::eventually;
use tidegate_testkit::server::Server;

use crate::console::{Step, fences, is_as_shown, steps};
use tidegate_testkit::program::{Serving, TOKEN};

const PAGE: &str = include_str!("../../../../docs/runbooks.md");
/// What the page calls the directory of the configuration, the admin listener and Redis.
const DIRECTORY: &str = "/etc/tidegate";
const ADMIN: &str = "127.0.0.1:9180";
const REDIS: &str = "127.0.0.1:6379";
/// A command that needs systemd. The test restarts its Redis instead.
const RESTART: &str = "sudo systemctl restart redis-server";
/// Commands that change nothing. They are repeated until they print what the page shows, because a reload or a lost
/// connection takes a moment.
const READING: [&str; 3] = ["tidegate explain ", "tidegate inspect ", "curl -s $ADMIN/"];

/// A request of `acme`, whose key the page has as a digest.
const OF_ACME: &str =
    r#"{"request":{"method":"GET","path":"/api/items","peer":"203.0.113.9","headers":{"x-api-key":"key-of-acme"}}}"#;
const OF_AN_ADDRESS: &str = r#"{"request":{"method":"GET","path":"/api/items","peer":"203.0.113.9"}}"#;
const OF_AN_ATTACKER: &str = r#"{"request":{"method":"POST","path":"/login","peer":"198.51.100.7"}}"#;

/// Returns the text of the section with this title.
fn section(title: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("\n## {title}\n")).unwrap_or_else(|| panic!("no section {title}"));
    rest.split("\n## ").next().unwrap()
}

/// Returns the code blocks of a text in this language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    fences(text).filter(|(found, _)| *found == language).map(|(_, block)| block).collect()
}

/// Returns the commands of a section, with the output of each.
fn commands(text: &str) -> Vec<Step> {
    let steps: Vec<Step> = blocks(text, "console").iter().flat_map(|block| steps(block)).collect();
    assert!(!steps.is_empty(), "{text}");
    steps
}

/// A Redis and an instance with the configuration of the page.
struct Site {
    dir: TempDir,
    redis: Server,
    serving: Serving,
    /// The page's `export` commands.
    exports: String,
}

impl Site {
    /// Starts both. `setting` is a further line of the configuration.
    fn start(setting: &str) -> Site {
        let dir = tempfile::tempdir().unwrap();
        let beginning = section("Before you start");
        let files = blocks(beginning, "toml");
        assert_eq!(files.len(), 2);
        for file in files {
            let name = file.lines().next().unwrap().strip_prefix(&format!("# {DIRECTORY}/")).expect("a file name");
            let setting = if name == "tidegate.toml" { setting } else { "" };
            std::fs::write(dir.path().join(name), format!("{setting}\n{file}")).unwrap();
        }
        std::fs::write(dir.path().join("admin-token"), format!("{TOKEN}\n")).unwrap();
        let redis = Server::redis();
        let config = dir.path().join("tidegate.toml");
        let serving = Serving::start(&["--config", config.to_str().unwrap(), "--store", &redis.url()]);
        serving.until("/readyz", |answer| answer.status == 200);
        let mut site = Site { dir, redis, serving, exports: String::new() };
        for step in commands(beginning) {
            assert!(step.command.starts_with("export ") && step.output.is_empty(), "{step:?}");
            site.exports += &format!("{}\n", step.command);
        }
        site
    }

    /// Returns the names of the page and what they are in the test.
    fn names(&self) -> [(&str, String); 3] {
        let dir = self.dir.path().to_str().unwrap().to_owned();
        [(DIRECTORY, dir), (ADMIN, self.serving.admin.clone()), (REDIS, self.redis.addr().to_string())]
    }

    /// Runs a command in bash. Returns standard output and standard error, in the order in which they were written.
    fn run(&self, command: &str) -> String {
        let script = format!("exec 2>&1\n{}{command}", self.exports);
        let script = self.names().iter().fold(script, |script, (page, test)| script.replace(page, test));
        let binaries = std::path::Path::new(env!("CARGO_BIN_EXE_tidegate")).parent().unwrap();
        let path = format!("{}:{}", binaries.display(), std::env::var("PATH").unwrap());
        let output = Command::new("bash").args(["-c", &script]).env("PATH", path).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        self.names().iter().fold(said, |said, (page, test)| said.replace(test, page))
    }

    /// Runs the commands of a section in order.
    fn follow(&self, title: &str) {
        for Step { command, output } in commands(section(title)) {
            if command == RESTART {
                self.redis.restart();
                continue;
            }
            let run = || self.run(&command);
            let is_expected = |printed: &String| is_as_shown(&output, printed);
            let printed = if READING.iter().any(|prefix| command.starts_with(prefix)) {
                eventually(&format!("$ {command}\n{output}"), run, is_expected)
            } else {
                run()
            };
            assert!(is_expected(&printed), "{title}: $ {command}\n{printed}\nThe page shows:\n{output}");
        }
    }

    /// Sends a check until it is denied.
    fn exhaust(&self, body: &str) {
        let denied = (0..1000).any(|_| self.serving.check(body).status == 429);
        assert!(denied, "never denied: {body}");
    }

    fn send(&self, count: usize, body: &str, status: u16) {
        for _ in 0..count {
            let answer = self.serving.check(body);
            assert_eq!(answer.status, status, "{answer:?}");
        }
    }
}

/// A deadline that Redis meets on a busy machine, so that it decides every request.
const LONG_DEADLINE: &str = "deadline = '1s'";

#[test]
fn a_customer_says_they_are_blocked() {
    let site = Site::start(LONG_DEADLINE);
    site.exhaust(OF_ACME);
    site.follow("A customer says they are blocked");
    site.send(1, OF_ACME, 200);
}

#[test]
fn we_are_under_attack() {
    let site = Site::start(LONG_DEADLINE);
    site.send(5, OF_AN_ATTACKER, 200);
    site.send(20, OF_AN_ATTACKER, 429);
    site.follow("We are under attack");
}

#[test]
fn raise_a_limit_for_one_customer() {
    let site = Site::start(LONG_DEADLINE);
    site.exhaust(OF_ACME);
    site.follow("Raise a limit for one customer");
}

#[test]
fn redis_is_gone() {
    let site = Site::start("");
    site.redis.kill9();
    site.send(3, OF_AN_ADDRESS, 200);
    site.send(2, OF_AN_ATTACKER, 503);
    site.follow("Redis is down");
}

#[test]
fn redis_hangs_or_is_slow() {
    let site = Site::start("");
    site.redis.stop();
    let opened = |metrics: &String| !metrics.contains("\ntidegate_breaker_opened_total 0\n");
    let ask = || {
        site.send(1, OF_AN_ATTACKER, 503);
        site.serving.visit("/metrics").body
    };
    eventually("the breaker opens", ask, opened);
    site.follow("Redis hangs or is slow");
}

#[test]
fn every_section_is_tested_and_listed() {
    let source = include_str!("runbooks.rs");
    let titles: Vec<&str> = PAGE.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    assert!(titles.len() >= 6, "{titles:?}");
    for title in titles.iter().filter(|title| **title != "Before you start") {
        assert!(source.contains(&format!("site.follow(\"{title}\")")), "{title} is not tested");
        let anchor = title.to_lowercase().replace(' ', "-");
        assert!(PAGE.contains(&format!("- [{title}](#{anchor})\n")), "{title} is not in the list");
        for part in ["**Symptom.**", "**Diagnosis.**", "**Undo.**"] {
            assert_eq!(section(title).matches(part).count(), 1, "{title}: {part}");
        }
    }
}
