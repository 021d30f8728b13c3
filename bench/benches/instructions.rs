//! Instructions per check of a single key, counted by callgrind. The count is the same in every run of one build,
//! whatever else the machine does.
//!
//! The program starts itself under valgrind, which counts only inside [`counted`].
//!
//! `cargo bench -p tidegate-bench --bench instructions`

use std::process::{Command, Stdio};
use std::time::Duration;

use tidegate_bench::contestant::{Contestant, GovernorText, LimitSpec, Throttlecrab, Tidegate, TidegateTwoLimits};
use tidegate_bench::measure::print_table;
use tidegate_bench::traffic::{self, Request};
use tidegate_core::Algorithm;

const WARM_UP: usize = 5_000;
const CHECKS: usize = 50_000;

const ADMITTED: LimitSpec = LimitSpec { quota: 1_000_000, window: Duration::from_millis(1) };
const TWO_LIMITS: &str = "two sliding limits";
const DENIED: LimitSpec = LimitSpec { quota: 100, window: Duration::from_secs(60) };

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, contestant, verdict] = &arguments[..] {
        let spec = if verdict == "admitted" { ADMITTED } else { DENIED };
        make_checks(contestant, spec);
        return;
    }
    let names =
        Algorithm::ALL.iter().map(|algorithm| algorithm.as_str()).chain([TWO_LIMITS, "governor", "throttlecrab"]);
    // The quota of ADMITTED is above the maximum of sliding-log.
    let rows: Vec<Vec<String>> = names
        .map(|name| {
            let per_check = |verdict| instructions_per_check(name, verdict).to_string();
            let admitted = if name == "sliding-log" { "-".into() } else { per_check("admitted") };
            vec![name.to_owned(), admitted, per_check("denied")]
        })
        .collect();
    print_table(&["instructions per check", "admitted", "denied"], &rows);
}

/// Warms up, and then makes [`CHECKS`] checks, which callgrind counts.
fn make_checks(contestant: &str, spec: LimitSpec) {
    let contestant: Box<dyn Contestant> = match contestant {
        "governor" => Box::new(GovernorText::new(spec)),
        "throttlecrab" => Box::new(Throttlecrab::new(spec)),
        TWO_LIMITS => Box::new(TidegateTwoLimits::new(spec)),
        name => Box::new(Tidegate::new(spec, name.parse().expect("an algorithm"))),
    };
    let requests = traffic::hot(1_024);
    std::hint::black_box(contestant.run(&requests, WARM_UP));
    std::hint::black_box(counted(&*contestant, &requests));
}

/// Makes the checks whose instructions are counted. Not inlined, because callgrind finds it by name.
#[inline(never)]
fn counted(contestant: &dyn Contestant, requests: &[Request]) -> usize {
    contestant.run(requests, CHECKS)
}

/// Runs this program under callgrind with one contestant; `verdict` is `admitted` or `denied`.
fn instructions_per_check(contestant: &str, verdict: &str) -> u64 {
    let program = std::env::current_exe().expect("the path of this program");
    let run = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=instructions::counted*"])
        .arg(program)
        .args([contestant, verdict])
        .stdin(Stdio::null())
        .output()
        .expect("valgrind (install the package valgrind)");
    let report = String::from_utf8_lossy(&run.stderr);
    let collected = report.lines().find_map(|line| line.split_once("Collected :")).map(|(_, count)| count.trim());
    let collected: Option<u64> = collected.and_then(|count| count.parse().ok()).filter(|&count| count > 0);
    collected.unwrap_or_else(|| panic!("no instruction count in the report of valgrind:\n{report}")) / CHECKS as u64
}
