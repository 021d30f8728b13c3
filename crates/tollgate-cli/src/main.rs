//! The `tollgate` command.
//!
//! Without arguments it shows what the product is about: the same burst at a window's edge under a fixed
//! window and under a sliding one.

mod boundary;

use std::process::ExitCode;

const USAGE: &str = "usage: tollgate

Shows the same burst at a window's edge under fixed-window and under sliding, as a timeline.";

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        None => {
            print!("{}", boundary::picture());
            ExitCode::SUCCESS
        }
        Some(argument) if argument == "--help" || argument == "-h" => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Some(argument) => {
            eprintln!("tollgate: unknown argument {argument:?}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}
