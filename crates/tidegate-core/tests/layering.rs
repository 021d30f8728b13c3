//! The modules of this crate depend on each other in one direction only.

#![allow(clippy::unwrap_used)] // a step that fails fails its test

use std::fs;
use std::path::{Path, PathBuf};

/// Each module with the modules that it may import. A module may always import itself.
/// `__names` is the macro of the module `names`.
const LAYERS: [(&str, &[&str]); 13] = [
    ("names", &["NameError"]),
    ("io_reason", &[]),
    ("time", &[]),
    ("limit", &["__names", "time"]),
    ("key", &["limit"]),
    ("check", &["key", "limit"]),
    ("decision", &["__names", "check", "time"]),
    ("algorithm", &["check", "decision", "limit", "time"]),
    ("redemption", &["check", "decision", "time"]),
    ("ban_list", &["decision", "time"]),
    ("preview", &["check", "decision", "key", "limit"]),
    ("store", &["__names", "ban_list", "check", "decision", "preview", "redemption"]),
    ("memory", &["algorithm", "ban_list", "check", "decision", "key", "limit", "redemption", "store", "time"]),
];

/// Returns all Rust files under a directory.
fn rust_files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] });
    files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Returns the modules of this crate that a source text imports or names, outside comments and tests.
fn imports(source: &str) -> Vec<&str> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or(source);
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or(line));
    let after_crate = lines.flat_map(|line| line.split("crate::").skip(1));
    after_crate.map(|rest| rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap_or(rest)).collect()
}

#[test]
fn modules_import_only_what_is_below_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut checked = 0;
    for path in rust_files(&root) {
        let inside = path.strip_prefix(&root).unwrap().with_extension("");
        let mut parts = inside.iter().map(|part| part.to_str().unwrap());
        let module = parts.next().unwrap();
        if module == "lib" || parts.any(|part| part.ends_with("tests")) {
            continue;
        }
        let (_, allowed) = LAYERS.iter().find(|(name, _)| *name == module).unwrap_or_else(|| panic!("{module} is new"));
        let source = fs::read_to_string(&path).unwrap();
        for import in imports(&source) {
            assert!(import == module || allowed.contains(&import), "{} imports {import}", path.display());
        }
        checked += 1;
    }
    assert!(checked >= 20, "{checked} files");
}

#[test]
fn imports_are_found_in_code_and_not_in_comments_or_tests() {
    let source = "//! crate::memory\nuse crate::key::Key;\nfn f() { crate::limit::g() } // crate::store\n#[cfg(test)]\nmod tests {\n    use crate::memory;\n}";
    assert_eq!(imports(source), ["key", "limit"]);
}
