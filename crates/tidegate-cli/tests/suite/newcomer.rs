//! A newcomer: runs every command of the README and the guide in a fresh directory, in the order of the pages, and
//! compares what it prints with what the page prints.
//!
//! Each fenced block of a page is one of these, and anything else fails the test:
//!
//! | block | here |
//! |---|---|
//! | `console` | Each line `$ COMMAND` is run by a shell. The lines below it are its output, see `console/output.rs`. |
//! | a block whose first line is a comment with a file name | Written to that file. |
//! | `rust` | Compiled by the doctests of crate `tidegate` (`src/guide.rs`), as it stands. |
//! | `toml` | Loaded by `tests/suite/guide.rs` of crate `tidegate`. |
//! | `LANGUAGE,before`, on page 11 | The code of another library. Not run. |
//!
//! Differences from what a reader does, all of which are in `shell.rs`: ports that the pages print are replaced by free
//! ones, Rust programs wait longer for Redis, `tidegate` is the binary under test, `cargo` uses the crates of this
//! workspace's lock file, offline, and `pip`, `npm` and `go` use the packages that `scripts/setup.sh` has installed. The
//! commands in [`NOT_RUN`] are not run, nor are those of Go if it is not installed.
//!
//! `TIDEGATE_GUIDE_PAGES=07,11` runs only these pages of the guide, for those who write them.

mod page;
mod shell;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use page::{Block, Page};
use shell::Shell;
pub(crate) use shell::build_example;

use crate::console::Step;

/// How a command begins that is not run, how it is checked instead, and why.
type NotRun = (&'static str, fn(&str) -> bool, &'static str);

const NOT_RUN: [NotRun; 1] = [(
    "cargo install --locked --path ",
    installs_the_command,
    "compiles the binary under test once more, optimised, and installs it for the user; the path is its package",
)];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn installs_the_command(command: &str) -> bool {
    let path = command.split_whitespace().last().unwrap();
    repository().join(path) == Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize().unwrap()
}

fn readme() -> Page {
    Page::read(&repository().join("README.md"))
}

/// Returns the pages of the guide, in the order in which a newcomer reads them.
fn guide() -> Vec<Page> {
    let directory = repository().join("docs/guide");
    let mut pages: Vec<PathBuf> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|page| !page.ends_with("README.md"));
    pages.sort();
    assert!(pages.len() >= 8, "{pages:?}");
    [directory.join("README.md")].iter().chain(&pages).map(|path| Page::read(path)).collect()
}

fn pages() -> impl Iterator<Item = Page> {
    guide().into_iter().chain([readme()])
}

#[test]
fn every_command_of_the_readme_prints_what_it_shows() {
    assert!(follow(&[readme()]) >= 5, "do the pages use another fence?");
}

#[test]
fn every_command_of_the_guide_prints_what_it_shows() {
    if let Ok(numbers) = std::env::var("TIDEGATE_GUIDE_PAGES") {
        let mut pages = guide();
        pages.retain(|page| numbers.split(',').any(|number| page.name.starts_with(number)));
        assert!(follow(&pages) > 0, "no page has one of the numbers {numbers}");
        return;
    }
    shell::build_example("plans");
    assert!(follow(&guide()) > 40, "do the pages use another fence?");
}

/// Runs the commands of these pages in a fresh directory, and returns their number.
fn follow(pages: &[Page]) -> usize {
    let directory = tempfile::tempdir().unwrap();
    let mut shell = Shell::start(directory.path());
    if !pages.iter().flat_map(Page::commands).any(|command| command.starts_with("cargo new hello")) {
        let project = Step { command: "mkdir hello && cd hello".to_owned(), output: String::new() };
        shell.run("the project of page 2", &project);
    }
    let mut commands = 0;
    for page in pages {
        for block in &page.blocks {
            match block {
                Block::Console(steps) => {
                    for step in steps.iter().filter(|step| is_run(&step.command)) {
                        shell.run(&page.name, step);
                        commands += 1;
                    }
                }
                Block::File { name, text, .. } => shell.write(name, text),
                Block::Rust(_) | Block::Toml | Block::Before => {}
            }
        }
        shell.stop_jobs();
    }
    commands
}

fn is_run(command: &str) -> bool {
    let is_missing = command.starts_with("go ") && shell::go().is_none();
    !is_missing && !NOT_RUN.iter().any(|(prefix, ..)| command.starts_with(prefix))
}

#[test]
fn commands_that_are_not_run_are_valid() {
    let mut used = BTreeSet::new();
    for page in pages() {
        for command in page.commands() {
            let Some((prefix, check, reason)) = NOT_RUN.iter().find(|(prefix, ..)| command.starts_with(prefix)) else {
                continue;
            };
            assert!(check(command), "{}: `{command}` would fail; it is not run here: {reason}", page.name);
            used.insert(*prefix);
        }
    }
    assert_eq!(used.len(), NOT_RUN.len(), "the pages have only {used:?}");
}

#[test]
fn texts_that_are_replaced_in_programs_exist() {
    for (shown, _) in shell::PATIENT {
        let is_written = |block: &Block| matches!(block, Block::File { text, .. } if text.contains(shown));
        assert!(pages().any(|page| page.blocks.iter().any(is_written)), "no program has `{shown}`");
    }
}

#[test]
fn rust_blocks_are_complete_programs() {
    let mut programs = 0;
    for page in pages() {
        for code in page.programs() {
            programs += 1;
            let at = format!("{}:\n{code}", page.name);
            assert!(code.contains("fn main()"), "not a program, in {at}");
            let hidden = code.lines().find(|line| *line == "#" || line.starts_with("# "));
            assert_eq!(hidden, None, "a line that a rendered page does not show, in {at}");
            assert!(!code.contains("testkit"), "test scaffolding, in {at}");
        }
    }
    assert!(programs > 15, "only {programs} programs found");
}

/// A program that compiles here may use a crate that the reader's project does not have.
#[test]
fn each_page_adds_the_crates_that_its_programs_use() {
    let locked = shell::locked_versions();
    for page in pages() {
        let added: BTreeSet<String> = page.commands().flat_map(shell::added_crates).collect();
        for code in page.programs() {
            let used = page::path_roots(code)
                .filter(|root| locked.contains_key(&root.replace('_', "-")) || locked.contains_key(*root));
            for used in used {
                let is_added = added.iter().any(|name| name.replace('-', "_") == used);
                assert!(is_added, "{} has no `cargo add {used}`, which this program needs:\n{code}", page.name);
            }
        }
    }
}

#[test]
fn a_failing_command_and_a_wrong_output_are_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let step = |command: &str, output: &str| Step { command: command.to_owned(), output: output.to_owned() };
    let mut shell = Shell::start(directory.path());
    shell.run("page", &step("mkdir made && cd made", ""));
    shell.run("page", &step("pwd | grep -o made", "made\n"));
    shell.write("src/a file", "with $HOME and 'quotes'\n");
    shell.run("page", &step("cat 'src/a file'", "with $HOME and 'quotes'\n"));
    for (command, output) in [("false", ""), ("echo one", "two\n"), ("echo one", "one\ntwo\n")] {
        assert!(shell.try_run(&step(command, output)).is_err(), "{command} {output}");
    }
    assert!(shell.try_run(&step("tidegate serve --http off --resp off --admin off &", "is running\n")).is_err());
}
