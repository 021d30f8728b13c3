//! The guide: its configurations load, its links exist, and all its pages are in the index and compiled as doctests.

use std::fs;
use std::path::PathBuf;

use tollgate::config::{Format, Loader};

/// Returns the name and text of each page, sorted by name.
fn pages() -> Vec<(String, String)> {
    let entries = fs::read_dir(guide()).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<(String, String)> = entries
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read_to_string(&path).unwrap()))
        .collect();
    pages.sort();
    assert!(pages.len() > 8, "eight pages and their index");
    pages
}

fn guide() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide"))
}

/// Returns the code blocks of a page in this language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let opening = format!("\n```{language}\n");
    page.split(&opening).skip(1).map(|rest| rest.split("\n```").next().unwrap().to_owned()).collect()
}

/// Returns the file name in the first line of a block, which is a comment, if it has one.
fn file_name(block: &str) -> Option<&str> {
    block.lines().next()?.strip_prefix("# ").filter(|name| name.ends_with(".toml") && !name.contains(' '))
}

#[test]
fn every_configuration_loads_without_findings() {
    let mut count = 0;
    for (name, page) in pages() {
        let directory = tempfile::tempdir().unwrap();
        let loader = Loader::new()
            .directory(directory.path())
            .environment(|name| (name == "TOLLGATE_SALT").then(|| "a secret for tests".to_owned()));
        let blocks = blocks(&page, "toml");
        for block in &blocks {
            if let Some(file) = file_name(block) {
                fs::write(directory.path().join(file), block).unwrap();
            }
        }
        for block in blocks.iter().filter(|block| file_name(block) != Some("keys.toml")) {
            let loaded = loader.load_text(&name, block, Format::Toml).unwrap_or_else(|report| panic!("{report:?}"));
            assert!(loaded.findings.is_empty(), "{:?}\n{block}", loaded.findings);
            assert!(!loaded.rules.rules().is_empty(), "{name} shows a configuration that limits nothing");
            count += 1;
        }
    }
    assert!(count >= 9, "only {count} configurations found; does the guide use another fence?");
}

#[test]
fn every_page_is_a_doctest_and_in_the_index() {
    let (doctests, pages) = (include_str!("../../src/guide.rs"), pages());
    let index = fs::read_to_string(guide().join("README.md")).unwrap();
    for (name, _) in pages.iter().filter(|(name, _)| name != "README.md") {
        assert!(doctests.contains(&format!("\"{name}\"")), "{name} is not in src/guide.rs");
        assert!(index.contains(&format!("]({name})")), "{name} is not in the index");
    }
}

#[test]
fn every_link_is_an_existing_file() {
    for (name, page) in pages() {
        let links = page.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
        for link in links.filter(|link| !link.starts_with("http")) {
            let file = link.split('#').next().unwrap();
            assert!(guide().join(file).exists(), "{name} links to {link}, which does not exist");
        }
    }
}
