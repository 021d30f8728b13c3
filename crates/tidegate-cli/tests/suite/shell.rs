//! What a shell uses of the command: completions and man pages.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use tidegate_testkit::program::command;

fn tidegate(arguments: &[&str]) -> Output {
    command().args(arguments).output().unwrap()
}

/// Returns what a command that succeeds prints.
fn printed(arguments: &[&str]) -> String {
    let output = tidegate(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the commands that `tidegate --help` lists.
fn commands() -> Vec<String> {
    let help = printed(&["--help"]);
    let (_, list) = help.split_once("Commands:\n").unwrap();
    let list = list.split("\n\n").next().unwrap();
    // A description that does not fit into a line is continued with a deeper indentation.
    let names = list.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<String> = names.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect();
    assert!(names.contains(&"serve".to_owned()) && names.len() > 10, "{names:?}");
    names.into_iter().filter(|name| name != "help").collect()
}

/// Returns the options, such as `--config`, that the help of a command describes.
fn options(command: &str) -> BTreeSet<String> {
    let help = printed(&[command, "--help"]);
    let words = help.split(|character: char| character != '-' && !character.is_ascii_alphanumeric());
    let options = words.filter(|word| word.starts_with("--") && word.len() > 2);
    options.map(str::to_owned).collect()
}

/// Returns what bash proposes for the last of these words.
fn proposals(words: &[&str]) -> Vec<String> {
    let script = r#"
        source <("$TIDEGATE" completions bash)
        complete -p tidegate >&2
        COMP_WORDS=("$@")
        COMP_CWORD=$(($# - 1))
        _tidegate tidegate "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-euc", script, "bash"]).args(words).env("TIDEGATE", env!("CARGO_BIN_EXE_tidegate"));
    let output = bash.output().unwrap();
    let registered = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && registered.contains("-F _tidegate"), "{words:?}: {registered}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_options_and_values() {
    let all = proposals(&["tidegate", ""]);
    for command in commands() {
        assert!(all.contains(&command), "{command}: {all:?}");
    }
    assert_eq!(proposals(&["tidegate", "exp"]), ["explain"]);
    assert_eq!(proposals(&["tidegate", "inspect", "--admin-t"]), ["--admin-token-file"]);
    assert_eq!(proposals(&["tidegate", "completions", "po"]), ["powershell"]);
    assert_eq!(proposals(&["tidegate", "serve", "--log", ""]), ["text", "json"]);
}

/// The text of a page as a reader sees it, as far as words are concerned.
fn unescaped(roff: &str) -> String {
    roff.replace("\\-", "-").replace("\\*(Aq", "'").replace("\\fB", "").replace("\\fI", "").replace("\\fR", "")
}

#[test]
fn a_man_page_describes_every_command_and_option() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("share/man1");
    let written = printed(&["man", "--dir", pages.to_str().unwrap()]);
    let commands = commands();
    let expected: Vec<String> =
        ["tidegate.1".to_owned()].into_iter().chain(commands.iter().map(|name| format!("tidegate-{name}.1"))).collect();
    let paths: Vec<String> = expected.iter().map(|name| pages.join(name).display().to_string()).collect();
    assert_eq!(written.lines().collect::<Vec<_>>(), paths);
    assert_eq!(std::fs::read_dir(&pages).unwrap().count(), paths.len());

    let read = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    let overview = unescaped(&read("tidegate.1"));
    let version = printed(&["--version"]);
    assert!(overview.contains(&format!(".TH TIDEGATE 1 \"\" \"{}\" \"Tidegate\"\n", version.trim())), "{overview}");
    for command in &commands {
        assert!(overview.contains(&format!("tidegate-{command}(1)")), "{command}");
        let roff = read(&format!("tidegate-{command}.1"));
        assert!(roff.is_ascii(), "{roff}");
        let page = unescaped(&roff);
        assert!(page.contains(&format!(".TH TIDEGATE-{} 1 ", command.to_uppercase())), "{page}");
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "SEE ALSO"] {
            let heading = format!(".SH {section}\n");
            let quoted = format!(".SH \"{section}\"\n");
            assert!(page.contains(&heading) || page.contains(&quoted), "{command} has no {section}: {page}");
        }
        for option in options(command) {
            assert!(page.contains(&option), "{command} {option}: {page}");
        }
        // Examples keep their lines.
        let (_, examples) = page.split_once(".SH EXAMPLES\n.nf\n").unwrap();
        let examples = examples.split_once("\n.fi\n").unwrap().0;
        let help = printed(&[command, "--help"]);
        for example in examples.lines() {
            assert!(help.lines().any(|line| line.trim() == example), "{example}");
        }
    }

    // Standard output has the same pages, in the same order.
    let all: String = expected.iter().map(|name| read(name)).collect();
    assert_eq!(printed(&["man"]), all);
}

#[test]
fn man_pages_that_cannot_be_written_are_an_error_that_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let output = tidegate(&["man", "--dir", file.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
    assert!(said.contains(&format!("cannot write {}: ", file.display())), "{said}");
}
