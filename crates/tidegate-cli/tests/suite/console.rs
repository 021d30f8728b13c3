//! Fenced blocks of Markdown pages, and the commands in their `console` blocks.

mod output;

pub(crate) use output::is_as_shown;

/// A command and the output that the page shows below it.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) command: String,
    pub(crate) output: String,
}

/// Returns the language and the text of each fenced block.
pub(crate) fn fences(text: &str) -> impl Iterator<Item = (&str, String)> {
    let mut lines = text.lines();
    std::iter::from_fn(move || {
        let language = lines.find_map(|line| line.strip_prefix("```"))?;
        let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        Some((language, text.join("\n") + "\n"))
    })
}

/// Returns the commands of a `console` block, each with its output. Lines that begin with `>` directly below a command
/// continue it, as in a shell. A comment at the end of a command is removed.
///
/// # Panics
/// If the block does not begin with a command.
pub(crate) fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for line in text.lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            let command = command.split(" # ").next().unwrap().trim_end();
            steps.push(Step { command: command.to_owned(), output: String::new() });
            continue;
        }
        let step = steps.last_mut().unwrap_or_else(|| panic!("a console block begins with no command:\n{text}"));
        match line.strip_prefix('>').filter(|_| step.output.is_empty()) {
            Some(more) => step.command += &format!("\n{}", more.strip_prefix(' ').unwrap_or_default()),
            None => step.output += &format!("{line}\n"),
        }
    }
    steps
}

#[test]
fn commands_are_continued_by_lines_directly_below_them() {
    let found = steps("$ cat <<END   # a comment\n> one\n>\n> END\none\n> not a command\n$ true\n");
    let shown: Vec<(&str, &str)> = found.iter().map(|step| (&*step.command, &*step.output)).collect();
    assert_eq!(shown, [("cat <<END\none\n\nEND", "one\n> not a command\n"), ("true", "")]);
}
