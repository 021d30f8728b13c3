//! Unsafe deployments: the configuration file of a running service is rewritten in many ways, some of which leave it
//! incomplete for a while.
//!
//! A client that has exhausted its limit keeps sending requests. It must never be admitted, whatever the file contains,
//! and each complete version must come into force.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate::{Clock, SystemClock};
use tidegate_testkit::conformance::Random;
use tidegate_testkit::poll::eventually;

use crate::campaign::{random, record, scale};
use tidegate_testkit::http::HttpClient;
use tidegate_testkit::program::{BindMount, Serving};

const SCENARIO: &str = "reloads";
const EXHAUSTED: &str = r#"{"request":{"method":"GET","path":"/","peer":"203.0.113.9"}}"#;

/// Returns a complete configuration with a rule that must hold and a rule whose quota is the number of the version.
///
/// `expect` is at the beginning or at the end.
fn version(number: u64, random: &mut Random) -> String {
    let rules = format!(
        "[[rules]]\nname = \"filler\"\nmatch = {{ path = \"/filler\" }}\nlimits = [\"9/min\"]\n\n\
         [[rules]]\nname = \"version\"\nmatch = {{ path = \"/version\" }}\nby = [\"ip\"]\nlimits = [\"{number}/h\"]\n\n\
         [[rules]]\nname = \"all\"\nby = [\"ip\"]\nlimits = [\"2/h\"]\n"
    );
    match random.below(2) {
        0 => format!("expect = {{ rules = 3, keys = 0 }}\n{rules}"),
        _ => format!("{rules}\n[expect]\nrules = 3\nkeys = 0\n"),
    }
}

/// Returns the version in force, from a check for an address that was not used before.
fn version_in_force(serving: &Serving) -> Option<u64> {
    static PEERS: AtomicU64 = AtomicU64::new(1);
    let [.., a, b, c] = PEERS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let question = format!(r#"{{"request":{{"method":"GET","path":"/version","peer":"10.{a}.{b}.{c}"}}}}"#);
    let body = serving.check(&question).body;
    let quotas = body.split("\"quota\":").skip(1).filter_map(|rest| rest.split([',', '}']).next()?.parse::<u64>().ok());
    quotas.max()
}

/// Returns the beginning of the text, up to a random place.
fn cut<'t>(text: &'t str, random: &mut Random) -> &'t [u8] {
    &text.as_bytes()[..random.below(text.len() as u64) as usize]
}

/// Sleeps for up to 300 ms, sometimes longer than a file has to be unchanged before it is read.
fn pause(random: &mut Random) {
    thread::sleep(Duration::from_millis(random.below(4) * 100));
}

/// A way to rewrite a file. Each leaves the file complete.
type Rewrite = fn(&Path, &str, &mut Random);

const IN_PLACE: [(&str, Rewrite); 3] = [
    ("truncated, then complete", |file, text, random| {
        fs::write(file, cut(text, random)).unwrap();
        pause(random);
        fs::write(file, text).unwrap();
    }),
    ("in pieces", |file, text, random| {
        let mut writer = File::create(file).unwrap();
        for piece in text.as_bytes().chunks(40 + random.below(100) as usize) {
            writer.write_all(piece).unwrap();
            pause(random);
        }
    }),
    ("emptied, then complete", |file, text, random| {
        File::create(file).unwrap();
        pause(random);
        fs::write(file, text).unwrap();
    }),
];

const BY_NAME: [(&str, Rewrite); 4] = [
    ("renamed over", |file, text, _| rename_over(file, text.as_bytes())),
    ("truncated and renamed over, then complete", |file, text, random| {
        rename_over(file, cut(text, random));
        pause(random);
        rename_over(file, text.as_bytes());
    }),
    ("deleted and created", |file, text, random| {
        fs::remove_file(file).unwrap();
        pause(random);
        let mut writer = File::create(file).unwrap();
        let half = cut(text, random).len();
        writer.write_all(&text.as_bytes()[..half]).unwrap();
        pause(random);
        writer.write_all(&text.as_bytes()[half..]).unwrap();
    }),
    ("moved away and back", |file, text, random| {
        let away = file.with_extension("away");
        fs::rename(file, &away).unwrap();
        pause(random);
        fs::write(&away, text).unwrap();
        fs::rename(&away, file).unwrap();
    }),
];

/// Writes another file and renames it to this one.
fn rename_over(file: &Path, text: &[u8]) {
    let draft = file.with_extension("draft");
    fs::write(&draft, text).unwrap();
    fs::rename(&draft, file).unwrap();
}

/// Updates a file as Kubernetes updates a ConfigMap: the file is a link through `..data`, which is replaced.
///
/// Sometimes an incomplete file is installed first.
fn swap_links(file: &Path, text: &str, random: &mut Random) {
    static VERSIONS: AtomicU64 = AtomicU64::new(0);
    let mount = file.parent().unwrap();
    let half = cut(text, random);
    let steps: &[&[u8]] = if random.below(2) == 0 { &[half, text.as_bytes()] } else { &[text.as_bytes()] };
    for text in steps {
        let name = format!("..{}", VERSIONS.fetch_add(1, Ordering::Relaxed));
        fs::create_dir(mount.join(&name)).unwrap();
        fs::write(mount.join(&name).join("tidegate.toml"), text).unwrap();
        symlink(&name, mount.join("..data_tmp")).unwrap();
        fs::rename(mount.join("..data_tmp"), mount.join("..data")).unwrap();
        pause(random);
    }
}

/// Rewrites the file `written`, which the service reads as `read`, many times and waits for each version.
fn rewrite(what: &str, read: &Path, written: &Path, ways: &[(&str, Rewrite)], random: &mut Random) {
    let serving = Serving::start(&["--config", read.to_str().unwrap()]);
    while serving.check(EXHAUSTED).status != 429 {}
    let (asked, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let (clock, mut longest_us) = (SystemClock::new(), 0);
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut client = HttpClient::open(&serving.http);
            while !is_over.load(Ordering::Relaxed) {
                let answer = client.ask("POST", "/v1/check", &[], EXHAUSTED);
                assert_eq!(answer.status, 429, "the limit is not enforced: {answer:?}");
                asked.fetch_add(1, Ordering::Relaxed);
            }
        });
        for number in 0..scale(10, 150) {
            // Larger than the quotas of the other rules.
            let number = 1_000 + number;
            let (way, rewrite) = ways[random.below(ways.len() as u64) as usize];
            rewrite(written, &version(number, random), random);
            let began = clock.now();
            eventually(
                way,
                || (version_in_force(&serving), client.is_finished()),
                |(in_force, is_ended)| *in_force == Some(number) || *is_ended,
            );
            longest_us = longest_us.max(clock.now().as_micros() - began.as_micros());
            if client.is_finished() {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = client.join() {
            std::panic::resume_unwind(panic);
        }
    });
    eventually(
        "the last reload has succeeded",
        || serving.visit("/readyz").body,
        |body| body.contains("\"result\":\"ok\""),
    );
    let metrics = serving.visit("/metrics").body;
    let count = |result: &str| {
        let line = format!("tidegate_reloads_total{{result=\"{result}\"}} ");
        metrics.split(&line).nth(1).and_then(|rest| rest.lines().next()).unwrap_or_default().to_owned()
    };
    record(SCENARIO, &format!("{what}: decisions, all refused"), asked.load(Ordering::Relaxed));
    record(SCENARIO, &format!("{what}: reloads done"), count("ok"));
    record(SCENARIO, &format!("{what}: reloads refused"), count("failed"));
    record(SCENARIO, &format!("{what}: longest until a version was in force"), format!("{} ms", longest_us / 1_000));
}

/// Creates a directory with a first version of the file.
fn site(random: &mut Random) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    fs::write(&file, version(999, random)).unwrap();
    (dir, file)
}

#[test]
fn limit_is_enforced_while_the_file_is_rewritten() {
    let mut random = random(SCENARIO);
    let (_dir, file) = site(&mut random);
    rewrite("a file", &file, &file, &[&IN_PLACE[..], &BY_NAME].concat(), &mut random);
}

#[test]
fn limit_is_enforced_while_links_are_swapped() {
    let mut random = random(SCENARIO);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tidegate.toml");
    swap_links(&file, &version(999, &mut random), &mut random);
    symlink("..data/tidegate.toml", &file).unwrap();
    rewrite("links", &file, &file, &[("links swapped", swap_links)], &mut random);
}

#[test]
fn limit_is_enforced_while_a_bind_mounted_file_is_rewritten() {
    let mut random = random(SCENARIO);
    let (_outside, source) = site(&mut random);
    let (_inside, target) = site(&mut random);
    let Some(_mount) = BindMount::new(&source, &target) else {
        record(SCENARIO, "a bind mount", "not shown: this process may not mount");
        return;
    };
    rewrite("a bind mount", &target, &source, &IN_PLACE, &mut random);
}
