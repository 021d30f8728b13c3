//! Pages and their fenced blocks.

use std::fs;
use std::path::Path;

use crate::console::{Step, fences, steps};

/// A page of Markdown.
pub(super) struct Page {
    pub(super) name: String,
    pub(super) blocks: Vec<Block>,
}

pub(super) enum Block {
    Console(Vec<Step>),
    /// A block whose first line is a comment with the name of a file.
    File {
        language: String,
        name: String,
        text: String,
    },
    Rust(String),
    Toml,
    /// The code of another library, before a migration.
    Before,
}

impl Page {
    pub(super) fn read(path: &Path) -> Page {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(path).unwrap();
        Page { blocks: fences(&text).map(|(language, text)| Block::new(&name, language, text)).collect(), name }
    }

    pub(super) fn commands(&self) -> impl Iterator<Item = &str> {
        let steps = self.blocks.iter().filter_map(|block| match block {
            Block::Console(steps) => Some(steps),
            Block::File { .. } | Block::Rust(_) | Block::Toml | Block::Before => None,
        });
        steps.flatten().map(|step| step.command.as_str())
    }

    /// Returns the Rust programs.
    pub(super) fn programs(&self) -> impl Iterator<Item = &str> {
        self.blocks.iter().filter_map(|block| match block {
            Block::File { language, text, .. } if language == "rust" => Some(text.as_str()),
            Block::Rust(text) => Some(text.as_str()),
            Block::Console(_) | Block::File { .. } | Block::Toml | Block::Before => None,
        })
    }
}

impl Block {
    fn new(page: &str, fence: &str, text: String) -> Block {
        let language = fence.strip_suffix(",no_run").unwrap_or(fence);
        if fence.ends_with(",before") {
            assert!(page.starts_with("11-"), "{page} has a block that no test runs:\n{text}");
            return Block::Before;
        }
        if language == "console" {
            return Block::Console(steps(&text));
        }
        match (file_name(&text), language) {
            (Some(name), _) => Block::File { language: language.to_owned(), name: name.to_owned(), text },
            (None, "rust") => {
                // A named file is run by the commands below it. A service would never end.
                let is_compiled = fence == "rust" || fence == "rust,no_run" && text.contains("axum::serve(");
                assert!(is_compiled, "{page} has a block of {fence:?} that no test runs:\n{text}");
                Block::Rust(text)
            }
            // `tests/suite/guide.rs` of crate `tidegate` loads those of the guide.
            (None, "toml") if page != "README.md" => Block::Toml,
            (None, _) => panic!("{page} has a block of {fence:?} that no test runs, compiles or loads:\n{text}"),
        }
    }
}

/// Returns the file name in the first line, which is a comment with nothing else.
fn file_name(text: &str) -> Option<&str> {
    let first = text.lines().next()?;
    let name = ["# ", "// ", "<?php // "].iter().find_map(|comment| first.strip_prefix(comment))?;
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "/._-".contains(letter);
    (name.contains('.') && name.chars().all(is_name)).then_some(name)
}

/// Returns the first name of each path in the code: `axum` in `axum::http::Request`.
pub(super) fn path_roots(code: &str) -> impl Iterator<Item = &str> {
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    code.match_indices("::").filter_map(move |(end, _)| {
        let before = &code[..end];
        let root = &before[before.trim_end_matches(is_name).len()..];
        (!root.is_empty() && !before[..end - root.len()].ends_with("::")).then_some(root)
    })
}
