//! The manifests of the crates that are published: what crates.io and docs.rs show of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value};

/// The categories of crates.io that are used here. It refuses a crate with an unknown one.
const CATEGORIES: [&str; 9] = [
    "algorithms",
    "asynchronous",
    "command-line-utilities",
    "concurrency",
    "config",
    "database",
    "network-programming",
    "web-programming",
    "web-programming::http-server",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(manifest: &Path) -> Table {
    let text = fs::read_to_string(manifest).unwrap_or_else(|error| panic!("{}: {error}", manifest.display()));
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", manifest.display()))
}

/// Returns each published crate: its directory and its manifest.
fn published() -> Vec<(PathBuf, Table)> {
    let directories = fs::read_dir(repository().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let crates = directories.map(|directory| (directory.clone(), read(&directory.join("Cargo.toml"))));
    crates.filter(|(_, manifest)| manifest["package"].get("publish") != Some(&Value::Boolean(false))).collect()
}

fn words<'a>(package: &'a Value, field: &str) -> Vec<&'a str> {
    package[field].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

#[test]
fn published_crates_have_what_crates_io_shows() {
    let crates = published();
    assert_eq!(crates.len(), 6, "{:?}", crates.iter().map(|(directory, _)| directory).collect::<Vec<_>>());
    let workspace = read(&repository().join("Cargo.toml"));
    for (directory, manifest) in &crates {
        let (name, package) = (directory.display(), &manifest["package"]);
        for field in ["version", "edition", "rust-version", "license", "readme"] {
            assert_eq!(package[field]["workspace"], Value::Boolean(true), "{name}: {field}");
            assert!(workspace["workspace"]["package"][field].is_str(), "{field}");
        }
        let description = package["description"].as_str().unwrap();
        assert!((20..=200).contains(&description.len()) && description.ends_with('.'), "{name}: {description}");
        let keywords = words(package, "keywords");
        assert!((1..=5).contains(&keywords.len()), "{name}: {keywords:?}");
        for keyword in keywords {
            let is_allowed = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-';
            assert!((1..=20).contains(&keyword.len()) && keyword.chars().all(is_allowed), "{name}: {keyword}");
        }
        let categories = words(package, "categories");
        assert!((1..=5).contains(&categories.len()), "{name}: {categories:?}");
        assert!(categories.iter().all(|category| CATEGORIES.contains(category)), "{name}: {categories:?}");
        for licence in ["LICENSE-MIT", "LICENSE-APACHE"] {
            assert!(fs::read(directory.join(licence)).is_ok_and(|text| !text.is_empty()), "{name}: {licence}");
        }
    }
}

#[test]
fn docs_rs_builds_crates_with_features_with_all_of_them() {
    let with_library = published().into_iter().filter(|(directory, _)| directory.join("src/lib.rs").exists());
    let with_features = with_library.filter(|(_, manifest)| manifest.contains_key("features"));
    let mut checked = 0;
    for (directory, manifest) in with_features {
        let docs = manifest["package"].get("metadata").and_then(|metadata| metadata.get("docs"));
        let all = docs.and_then(|docs| docs["rs"].get("all-features")).and_then(Value::as_bool);
        assert_eq!(all, Some(true), "{}", directory.display());
        checked += 1;
    }
    assert_eq!(checked, 3, "tidegate, tidegate-config and tidegate-redis");
}

#[test]
fn default_features_of_the_library_are_few() {
    let manifest = read(&repository().join("crates/tidegate/Cargo.toml"));
    assert_eq!(words(&manifest["features"], "default"), ["redis", "rules"]);
    let config = read(&repository().join("crates/tidegate-config/Cargo.toml"));
    assert!(config["features"].get("default").is_none());
    for (manifest, heavy) in
        [(&manifest, &["pem", "ring", "spki", "axum", "tidegate-config"][..]), (&config, &["serde-saphyr", "schemars"])]
    {
        for heavy in heavy {
            assert_eq!(manifest["dependencies"][heavy]["optional"], Value::Boolean(true), "{heavy}");
        }
    }
}

/// The name is written in two parts, so that this file does not contain it.
#[test]
fn no_file_of_the_repository_contains_the_former_name_of_the_project() {
    let former = ["toll", "gate"].concat();
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(repository()).output().expect("git");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).expect("file names are UTF-8");
    let files: Vec<&str> = listed.split_terminator('\0').collect();
    assert!(files.contains(&"Cargo.toml"), "{files:?}");
    let contains = |bytes: &[u8]| String::from_utf8_lossy(bytes).to_ascii_lowercase().contains(&former);
    let has_name = |file: &&str| {
        let path = repository().join(file);
        // A link may lead out of the repository, and a listed file may be deleted. The path of either counts.
        let is_file = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file());
        contains(file.as_bytes()) || is_file && contains(&fs::read(&path).expect(file))
    };
    let found: Vec<&str> = files.into_iter().filter(has_name).collect();
    assert!(found.is_empty(), "these files contain the name: {found:#?}");
}
