//! Prints how wrong `sliding-counter` is, for several kinds of traffic: `cargo run -p tidegate-testkit --example
//! accuracy`.

use tidegate_core::{Limit, LimitTextError};
use tidegate_testkit::conformance::accuracy::{Population, Verdicts, adversarial, judge, on_off, poisson};
use tidegate_testkit::conformance::{InMemory, Random};

const WINDOWS: u64 = 2_000;

fn main() -> Result<(), LimitTextError> {
    for text in ["10/min sliding-counter", "100/min sliding-counter", "1000/min sliding-counter"] {
        let limit: Limit = text.parse()?;
        println!("{limit}");
        for rate in [0.5, 0.8, 0.9, 1.0, 1.1, 1.5, 2.0, 5.0, 10.0] {
            let verdicts = judge(&limit, "one", poisson(&limit, rate, WINDOWS, Random::new(1)), &mut InMemory::new());
            print(&format!("one client, {rate} × the quota"), &limit, verdicts);
        }
        for rate in [0.9, 2.0, 5.0] {
            let verdicts = judge(&limit, "one", on_off(&limit, rate, WINDOWS, Random::new(2)), &mut InMemory::new());
            print(&format!("on and off, {rate} × while on"), &limit, verdicts);
        }
        let verdicts = judge(&limit, "one", adversarial(&limit, WINDOWS), &mut InMemory::new());
        print("adversarial", &limit, verdicts);
        for exponent in [0.7, 0.8, 1.0] {
            for (clients, busiest) in [(10_000, 0.8), (10_000, 1.0), (10_000, 1.2), (10_000, 2.0), (10_000, 5.0)] {
                let population = Population { clients, busiest, exponent };
                let verdicts = population.judge(&limit, 60, 3, &mut InMemory::new());
                print(&format!("{clients} clients, {busiest} × / n^{exponent}"), &limit, verdicts);
            }
        }
    }
    Ok(())
}

fn print(traffic: &str, limit: &Limit, verdicts: Verdicts) {
    let percent = |part: u64| 100.0 * part as f64 / verdicts.requests as f64;
    println!(
        "  {traffic:32} {:9} requests, wrong {:6.3} % (over {:6.3} %, early {:6.3} %), at most {:.2} × the quota in a window",
        verdicts.requests,
        100.0 * verdicts.wrong(),
        percent(verdicts.over),
        percent(verdicts.early),
        verdicts.most_in_a_window as f64 / f64::from(limit.quota()),
    );
}
