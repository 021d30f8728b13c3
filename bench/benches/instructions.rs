//! Instructions per check on a hot key, counted by callgrind: the same on every run of one build, however busy the
//! machine is.
//!
//! This program runs itself under valgrind, which counts only inside [`counted`].
//! `cargo bench -p tollgate-bench --bench instructions`

use std::process::{Command, Stdio};
use std::time::Duration;

use tollgate_bench::contestant::{Contestant, GovernorText, Terms, Throttlecrab, Tollgate, TollgateTwoLimits};
use tollgate_bench::measure::print_table;
use tollgate_bench::traffic::{self, Request};
use tollgate_core::Algorithm;

const WARM_UP: usize = 5_000;
const CHECKS: usize = 50_000;

const ADMITTED: Terms = Terms { quota: 1_000_000, window: Duration::from_millis(1) };
const TWO_LIMITS: &str = "two sliding limits";
const DENIED: Terms = Terms { quota: 100, window: Duration::from_secs(60) };

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, contestant, verdict] = &arguments[..] {
        let terms = if verdict == "admitted" { ADMITTED } else { DENIED };
        make_checks(contestant, terms);
        return;
    }
    let names =
        Algorithm::ALL.iter().map(|algorithm| algorithm.as_str()).chain([TWO_LIMITS, "governor", "throttlecrab"]);
    // sliding-log keeps an entry per admission: nothing hot is ever all admitted by it.
    let rows: Vec<Vec<String>> = names
        .map(|name| {
            let per_check = |verdict| instructions_per_check(name, verdict).to_string();
            let admitted = if name == "sliding-log" { "-".into() } else { per_check("admitted") };
            vec![name.to_owned(), admitted, per_check("denied")]
        })
        .collect();
    print_table(&["instructions per check", "admitted", "denied"], &rows);
}

fn make_checks(contestant: &str, terms: Terms) {
    let contestant: Box<dyn Contestant> = match contestant {
        "governor" => Box::new(GovernorText::new(terms)),
        "throttlecrab" => Box::new(Throttlecrab::new(terms)),
        TWO_LIMITS => Box::new(TollgateTwoLimits::new(terms)),
        name => Box::new(Tollgate::new(terms, name.parse().expect("an algorithm"))),
    };
    let requests = traffic::hot(1_024);
    std::hint::black_box(contestant.run(&requests, WARM_UP));
    std::hint::black_box(counted(&*contestant, &requests));
}

/// Named to callgrind, hence neither inlined nor mangled beyond recognition.
#[inline(never)]
fn counted(contestant: &dyn Contestant, requests: &[Request]) -> usize {
    contestant.run(requests, CHECKS)
}

fn instructions_per_check(contestant: &str, verdict: &str) -> u64 {
    let program = std::env::current_exe().expect("this program has a path");
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=instructions::counted*"])
        .arg(program)
        .args([contestant, verdict])
        .stdin(Stdio::null())
        .output()
        .expect("valgrind is needed to count instructions: install the package valgrind");
    let report = String::from_utf8_lossy(&run.stderr);
    let collected = report.lines().find_map(|line| line.split_once("Collected :")).map(|(_, count)| count.trim());
    let collected: Option<u64> = collected.and_then(|count| count.parse().ok()).filter(|&count| count > 0);
    collected.unwrap_or_else(|| panic!("valgrind did not count:\n{report}")) / CHECKS as u64
}
