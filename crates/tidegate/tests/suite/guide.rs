//! The guide: its configurations load, its links exist, and all its pages are in the index and compiled as doctests.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use tidegate::config::{Config, Format, Loader};
use tidegate::engine::{Engine, Outcome, RequestOptions};
use tidegate::rules::RequestView;
use tidegate::{Limiter, ManualClock};

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
            .environment(|name| (name == "TIDEGATE_SALT").then(|| "a secret for tests".to_owned()));
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

/// The table of templates on page 5: each gives the body beside it, to a caller who has to wait 30 seconds.
#[tokio::test]
async fn templates_of_the_guide_give_the_bodies_beside_them() {
    let (_, page) = pages().into_iter().find(|(name, _)| name.starts_with("05-")).unwrap();
    let (_, table) = page.split_once("| body | template |\n|---|---|\n").unwrap();
    let rows: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() >= 5, "{rows:?}");
    for row in rows {
        // The code spans: the body, the template, and the content type if it is not JSON.
        let spans: Vec<&str> = row.split('`').skip(1).step_by(2).collect();
        let content_type = spans.get(2).map(|span| format!(", {span}")).unwrap_or_default();
        let text = format!(
            "body = {{ template = '{}'{content_type} }}\n[plans.default]\nlimits = ['1/s']\n[plans.free]\nlimits = ['1/30s']\n\
             upgrade_url = 'https://example.com/plans'\n[[keys]]\nkey = 'planted'\nplan = 'free'\n\
             [[rules]]\nname = 'api'\nlimits = 'plan'\n",
            spans[1]
        );
        let clock = Arc::new(ManualClock::default());
        let limiter = Limiter::builder().clock(clock.clone()).build();
        let rules = Config::from_text(&text, Format::Toml).unwrap_or_else(|report| panic!("{report:?}")).rules;
        let engine = Engine::on_clock(limiter, rules, Vec::new(), clock);
        let request = http::Request::get("/").header("x-api-key", "planted").body(()).unwrap();
        let view = RequestView::of(&request);
        let check = || engine.check(&view, [203, 0, 113, 9].into(), RequestOptions::default());
        assert!(matches!(check().await, Outcome::Admitted(_)));
        let Outcome::Refused(refusal) = check().await else { panic!("{row} is not refused") };
        let response = refusal.response_to(request.headers());
        assert_eq!(std::str::from_utf8(response.body()).unwrap(), spans[0]);
    }
}
