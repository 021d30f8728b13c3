//! The public API as a list: every path that a user can import from `tidegate` and `tidegate-core`.
//!
//! Each crate has the list in `exports.txt`. A change of the API changes the list, and so is seen in a review.
//! `TIDEGATE_WRITE_EXPORTS=1 cargo test --test suite exports` writes it anew.
//!
//! The paths are read from the sources: from `lib.rs`, and from each public module that it declares. rustfmt puts items
//! of a module at the beginning of a line, so that no parser of Rust is needed. Methods are not in the list.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Keywords before the name of an item.
const ITEMS: [&str; 9] = ["struct", "enum", "union", "trait", "fn", "const", "static", "type", "macro_rules!"];

#[test]
fn exports_of_tidegate_are_listed() {
    assert_listed("tidegate", Path::new(env!("CARGO_MANIFEST_DIR")));
}

#[test]
fn exports_of_tidegate_core_are_listed() {
    assert_listed("tidegate_core", Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tidegate-core")));
}

fn assert_listed(name: &str, root: &Path) {
    let mut found = BTreeSet::new();
    add_module(&root.join("src/lib.rs"), &root.join("src"), name, &[], &mut found);
    assert!(found.len() > 20, "only {found:?}: are the sources written differently?");
    let list = root.join("exports.txt");
    if std::env::var_os("TIDEGATE_WRITE_EXPORTS").is_some() {
        let text: String = found.iter().map(|line| format!("{line}\n")).collect();
        fs::write(&list, text).unwrap();
    }
    let listed = fs::read_to_string(&list).unwrap();
    let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
    let added: Vec<&String> = found.difference(&listed).collect();
    let removed: Vec<&String> = listed.difference(&found).collect();
    assert!(
        added.is_empty() && removed.is_empty(),
        "the exports of {name} differ from {}\nadded: {added:#?}\nremoved: {removed:#?}\n\
         if that is intended, run `TIDEGATE_WRITE_EXPORTS=1 cargo test -p tidegate --test suite exports`",
        list.display()
    );
}

/// Adds the exports of the module in `file`, whose own modules are in `directory`.
fn add_module(file: &Path, directory: &Path, path: &str, features: &[String], found: &mut BTreeSet<String>) {
    for export in exports(&fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))) {
        let mut needed = features.to_vec();
        needed.extend(export.features.into_iter().filter(|feature| !features.contains(feature)));
        let inner = format!("{path}::{}", export.name);
        let note = if needed.is_empty() { String::new() } else { format!(" ({})", needed.join(", ")) };
        found.insert(format!("{inner}{note}"));
        if export.is_module {
            let file: PathBuf = directory.join(format!("{}.rs", export.name));
            add_module(&file, &directory.join(&export.name), &inner, &needed, found);
        }
    }
}

#[derive(PartialEq, Debug)]
struct Export {
    name: String,
    features: Vec<String>,
    is_module: bool,
}

/// Returns the public items of a module's source. Those for tests and for fuzzing are left out.
fn exports(source: &str) -> Vec<Export> {
    let (mut exports, mut attributes) = (Vec::new(), String::new());
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        let mut item = line.split(" // ").next().unwrap_or(line).to_owned();
        let is_attribute = line.starts_with("#[");
        if is_attribute || line.starts_with("pub use ") {
            let end = if is_attribute { "]" } else { ";" };
            while !item.trim_end().ends_with(end) {
                item.push_str(lines.next().expect("an attribute or a use has an end").trim());
            }
        }
        match item.as_str() {
            attribute if is_attribute => attributes.push_str(attribute),
            comment if comment.starts_with("//") => {}
            item => {
                let attributes = std::mem::take(&mut attributes);
                if attributes.contains("cfg(test)") || attributes.contains("fuzzing") {
                    continue;
                }
                let Some(item) = item.strip_prefix("pub ").or_else(|| {
                    item.starts_with("macro_rules!").then_some(item).filter(|_| attributes.contains("macro_export"))
                }) else {
                    continue;
                };
                let is_module = item.starts_with("mod ");
                let export = |name| Export { name, features: features(&attributes), is_module };
                exports.extend(names(item).into_iter().map(export));
            }
        }
    }
    exports
}

/// Returns the names that an item exports, without its `pub`.
fn names(item: &str) -> Vec<String> {
    if let Some(tree) = item.strip_prefix("use ") {
        return leaves(tree.trim_end_matches(';'));
    }
    if let Some(module) = item.strip_prefix("mod ") {
        return vec![module.strip_suffix(';').expect("a public module has a file of its own").to_owned()];
    }
    let mut words = item.split_whitespace();
    let keyword = |word: &&str| ITEMS.contains(word);
    // `const fn name` has two keywords: the name follows the last.
    let mut name = words.by_ref().skip_while(|word| !keyword(word)).find(|word| !keyword(word));
    let name = name.take().unwrap_or_else(|| panic!("no name in {item:?}"));
    let end = name.find(|letter: char| !(letter.is_alphanumeric() || letter == '_')).unwrap_or(name.len());
    vec![name[..end].to_owned()]
}

/// Returns the names of a use tree such as `a::{B, C as D, e::F}`.
fn leaves(tree: &str) -> Vec<String> {
    if let Some((_, list)) = tree.split_once('{') {
        let list = list.strip_suffix('}').unwrap_or_else(|| panic!("no end in {tree:?}"));
        let (mut depth, mut parts) = (0, vec![String::new()]);
        for letter in list.chars() {
            depth += i32::from(letter == '{') - i32::from(letter == '}');
            match letter {
                ',' if depth == 0 => parts.push(String::new()),
                letter => parts.last_mut().unwrap().push(letter),
            }
        }
        return parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty()).flat_map(leaves).collect();
    }
    let name = tree.rsplit(" as ").next().unwrap().rsplit("::").next().unwrap().trim();
    assert!(name != "*" && name != "self", "{tree:?} exports names that cannot be listed");
    vec![name.to_owned()]
}

fn features(attributes: &str) -> Vec<String> {
    attributes.split("feature = \"").skip(1).map(|rest| rest.split('"').next().unwrap().to_owned()).collect()
}

#[test]
fn types_that_the_guide_imports_are_at_the_crate_root() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let listed = fs::read_to_string(root.join("exports.txt")).unwrap();
    let at_root: BTreeSet<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
    let repository = root.join("../..");
    let guide = fs::read_dir(repository.join("docs/guide")).unwrap().map(|page| page.unwrap().path());
    let mut imported = BTreeSet::new();
    for page in guide.chain([repository.join("README.md")]) {
        let text = fs::read_to_string(&page).unwrap();
        let imports = text.lines().filter_map(|line| line.strip_prefix("use tidegate::")?.strip_suffix(';'));
        imported.extend(imports.flat_map(leaves));
    }
    assert!(imported.len() > 20, "only {imported:?}: are imports written differently?");
    let missing: Vec<&String> =
        imported.iter().filter(|name| !at_root.contains(format!("tidegate::{name}").as_str())).collect();
    assert!(missing.is_empty(), "not at the root of the crate: {missing:?}");
}

#[test]
fn every_form_of_an_export_is_read() {
    let source = r#"
//! pub struct Documented;
pub use a::{
    B, C as D,
    e::{F, G},
};
pub use tidegate_redis as redis;
#[cfg(all(feature = "x", feature = "y"))]
#[derive(
    Clone,
)]
pub struct Generic<T>(T);
pub(crate) struct Private;
    pub fn method() {}
pub const fn function() {}
pub const CONSTANT: u32 = 1;
pub async fn later<T>() {}
#[cfg(any(fuzzing, test))]
pub mod fuzz;
#[cfg(feature = "z")] // A comment.
// A comment.
pub mod inner;
#[macro_export]
macro_rules! exported {
}
macro_rules! private {
}
pub trait Plain: Send {
"#;
    let found = exports(source);
    let names: Vec<&str> = found.iter().map(|export| export.name.as_str()).collect();
    let expected =
        ["B", "D", "F", "G", "redis", "Generic", "function", "CONSTANT", "later", "inner", "exported", "Plain"];
    assert_eq!(names, expected);
    let of = |name: &str| found.iter().find(|export| export.name == name).unwrap();
    assert_eq!((of("Generic").features.join(" "), of("inner").features.join(" ")), ("x y".into(), "z".into()));
    assert!(of("inner").is_module && of("redis").features.is_empty());
}
