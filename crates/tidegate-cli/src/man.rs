//! `tidegate man`: the help texts as man pages, one for each command.

use std::io::{Result, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::arguments::Arguments;
use crate::{Failure, output};

/// A man page: its file name, such as `tidegate-serve.1`, and its text as roff.
struct Page {
    name: String,
    roff: String,
}

/// Runs `tidegate man`: prints all pages one after the other, or writes each to a file in `dir` and prints the paths.
///
/// # Errors
/// If the directory cannot be created, or a page cannot be written.
pub(crate) fn man(dir: Option<&Path>) -> std::result::Result<(), Failure> {
    let pages = pages().map_err(Failure::Output)?;
    let Some(dir) = dir else {
        return output::print(pages.into_iter().map(|page| page.roff).collect::<String>());
    };
    std::fs::create_dir_all(dir).map_err(|error| Failure::Unwritable { file: dir.to_owned(), error })?;
    for page in pages {
        let file = dir.join(page.name);
        std::fs::write(&file, page.roff).map_err(|error| Failure::Unwritable { file: file.clone(), error })?;
        output::print_line(file.display())?;
    }
    Ok(())
}

/// Returns the page of `tidegate`, and then those of its commands in the order of the help.
fn pages() -> Result<Vec<Page>> {
    let command = Arguments::command().disable_help_subcommand(true);
    let mut command = command.subcommand_value_name("COMMAND").subcommand_help_heading("COMMANDS");
    command.build();
    let version = format!("tidegate {}", command.get_version().unwrap_or_default());
    let commands = [&command].into_iter().chain(command.get_subcommands());
    commands.map(|command| page(command, &version)).collect()
}

fn page(command: &Command, version: &str) -> Result<Page> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let man = Man::new(command.clone());
    let mut roff = Vec::new();
    // `Man::render_title` omits an empty date, so that the version would be printed in its place.
    writeln!(roff, r#".TH {} 1 "" "{version}" "Tidegate""#, name.to_uppercase().replace('-', r"\-"))?;
    man.render_name_section(&mut roff)?;
    man.render_synopsis_section(&mut roff)?;
    man.render_description_section(&mut roff)?;
    man.render_options_section(&mut roff)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut roff)?;
    }
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    render_after_help(&help, &mut roff)?;
    if name != "tidegate" {
        let mut also = Roff::new();
        also.control("SH", ["SEE ALSO"]).text([bold("tidegate"), roman("(1)")]);
        also.to_writer(&mut roff)?;
    }
    // roff without a preprocessor for encodings reads ASCII.
    Ok(Page { name: format!("{name}.1"), roff: String::from_utf8_lossy(&roff).replace('…', "...") })
}

/// Renders the text after the help: indented lines as examples, which keep their lines, and other lines as notes.
fn render_after_help(help: &str, roff: &mut dyn Write) -> Result<()> {
    let lines = help.lines().filter(|line| !line.is_empty() && !["Example:", "Examples:"].contains(line));
    let (examples, notes): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with(' '));
    let mut sections = Roff::new();
    if !notes.is_empty() {
        sections.control("SH", ["NOTES"]);
    }
    for note in notes {
        sections.text([roman(note)]);
    }
    if !examples.is_empty() {
        sections.control("SH", ["EXAMPLES"]).control("nf", []);
        for example in examples {
            sections.text([roman(example.trim())]);
        }
        sections.control("fi", []);
    }
    sections.to_writer(roff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines_and_notes_are_filled() {
        let mut roff = Vec::new();
        render_after_help("Example:\n  tidegate a\n  .tidegate b\n\nA note.", &mut roff).unwrap();
        let text = String::from_utf8(roff).unwrap();
        let (notes, examples) = text.split_once(".SH EXAMPLES\n").unwrap();
        assert!(notes.contains(".SH NOTES\nA note.\n"), "{text}");
        // A dot at the start of a line would be a request of roff.
        assert_eq!(examples, ".nf\ntidegate a\n\\&.tidegate b\n.fi\n");
    }
}
