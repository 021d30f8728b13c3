//! The text of a configuration, and the tables that are read from it.

use std::path::Path;
use std::sync::Arc;

use super::finding::{Code, Finding};
use super::forms::{AnonymizeEntry, LimitEntry, OneOrMany, Secret};
use super::mask::mask;
use super::read::{FieldValue, ReadResult, Reader};
use super::source::ConfigSource;
use super::span::Spanned;
use super::table::{Table, ValueNames};
use super::toml;
use super::tree::{Node, SyntaxError};
use super::types::{ApiKeyTable, ConfigTable};
#[cfg(feature = "yaml")]
use super::yaml;

/// The format of a configuration file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Format {
    /// TOML, for files that end in `.toml`.
    Toml,
    /// YAML, for files that end in `.yaml` or `.yml`.
    Yaml,
}

impl Format {
    /// Returns the format for the extension of a file name (`toml`, `yaml` or `yml`, in any case), or `None` for
    /// another extension or none. The file is not read.
    pub fn of(path: &Path) -> Option<Format> {
        match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
            "toml" => Some(Format::Toml),
            "yaml" | "yml" => Some(Format::Yaml),
            _ => None,
        }
    }
}

/// A configuration as written: its tables, and the texts of all files that it consists of. A reload compares it with the
/// one in use.
#[derive(Clone, Debug)]
pub struct Document {
    /// The tables of the configuration file.
    pub config: ConfigTable,
    /// The text to which the spans of the tables refer.
    pub source: Arc<ConfigSource>,
    /// The content of the keys file.
    pub keys_file: KeysFile,
    /// The secrets that were read from files, each with the name of its file as written in the configuration.
    pub secret_files: Vec<(String, Secret)>,
}

impl Document {
    /// Returns the secret that was read from the file with this name, or `None` if there is no such file.
    pub(crate) fn secret_file(&self, name: &str) -> Option<&Secret> {
        self.secret_files.iter().find(|(file, _)| file == name).map(|(_, secret)| secret)
    }
}

/// The content of a keys file. Empty if the configuration names none, or one that has an error.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct KeysFile {
    /// The keys.
    pub keys: Vec<Spanned<ApiKeyTable>>,
    /// The text of the file, to compare with that of a reload.
    pub text: Secret,
    /// Whether every value of the file could be read.
    pub is_whole: bool,
}

impl FieldValue for KeysFile {
    fn from_node(node: &Node, reader: &mut Reader<'_>) -> Option<KeysFile> {
        let fields = reader.table(node, &["keys"])?;
        let keys = reader.field(&fields, "keys", None)?;
        Some(KeysFile { keys, ..KeysFile::default() })
    }
}

impl KeysFile {
    /// Parses the text of a keys file, whose name is `name` in findings.
    ///
    /// Returns its content as far as it can be read, or `None` if it cannot be parsed; the source to which its spans
    /// refer; and all errors, in the order of the text.
    pub fn read(name: &str, text: &str, format: Format) -> (Option<KeysFile>, Arc<ConfigSource>, Vec<Finding>) {
        let (file, source, errors) = read::<KeysFile>(name, text, format);
        let is_whole = errors.is_empty();
        (file.map(|file| KeysFile { text: Secret::new(text), is_whole, ..file }), source, errors)
    }
}

impl ConfigTable {
    /// Parses the text of a configuration file, whose name is `name` in findings.
    ///
    /// Returns its tables; the source to which their spans refer; and all errors, in the order of the text. If there are
    /// errors, the tables may still be `Some`: they have the parts that could be read, so that these can be checked too.
    /// They are `None` if the text cannot be parsed, or if a required part is missing.
    pub fn read(name: &str, text: &str, format: Format) -> (Option<ConfigTable>, Arc<ConfigSource>, Vec<Finding>) {
        read(name, text, format)
    }

    /// Names all values of a configuration that was built in code, for findings. Returns it with these names as its
    /// source.
    pub fn with_names(mut self) -> (ConfigTable, Arc<ConfigSource>) {
        let mut names = ValueNames::default();
        self.name_values("", &mut names);
        (self, Arc::new(ConfigSource::of_values("the rules", names.0)))
    }

    /// Returns the names of the keys file, of the files with secrets and of those with certificate authorities, as
    /// written in the configuration.
    pub fn named_files(&self) -> impl Iterator<Item = &str> {
        let jwt = self.jwt.as_ref().and_then(|jwt| jwt.key_file.as_ref());
        let secret = match &*self.anonymize {
            AnonymizeEntry::On(anonymize) => anonymize.secret_file.as_ref(),
            AnonymizeEntry::Off => None,
        };
        let authorities = self.upstreams.iter().filter_map(|upstream| upstream.ca_file.as_ref());
        self.keys_file.iter().chain(jwt).chain(secret).chain(authorities).map(|name| name.as_str())
    }

    /// Returns the names of the settings of the file that are set, but have no effect on a check that names its key and
    /// limit, in alphabetical order.
    pub fn settings_for_requests_only(&self) -> Vec<&'static str> {
        let mut settings = self.set_for_requests_only();
        settings.sort_unstable();
        settings
    }
}

/// Reads a list of limits from JSON, in the forms of a configuration file: a text or a table, or a list of them. Also
/// returns the errors. Limits with an error are left out.
pub fn limits_from_json(json: &serde_json::Value) -> (OneOrMany<Spanned<LimitEntry>>, Vec<Finding>) {
    let mut reader = Reader::new("");
    let list = OneOrMany::from_node(&Node::from_json(json), &mut reader);
    (list.unwrap_or_default(), reader.finish().errors)
}

/// Parses a text and reads a value of type `T` from it; see [`ConfigTable::read`].
fn read<T: FieldValue>(name: &str, text: &str, format: Format) -> (Option<T>, Arc<ConfigSource>, Vec<Finding>) {
    let parsed = match format {
        Format::Toml => toml::parse(text),
        #[cfg(feature = "yaml")]
        Format::Yaml => yaml::parse(text),
        #[cfg(not(feature = "yaml"))]
        Format::Yaml => {
            let finding =
                Finding::new(Code::UnknownFormat, format!("{name}: this program was built without YAML support"));
            let finding = finding.help("write it as TOML, or build with the feature `yaml`");
            return (None, Arc::new(ConfigSource::unquoted(name, text)), vec![finding]);
        }
    };
    let (value, source, mut errors) = match parsed {
        Ok(root) => {
            let mut reader = Reader::new(text);
            let value = T::from_node(&root, &mut reader);
            let ReadResult { errors, shown, partly_read } = reader.finish();
            (value, ConfigSource::masked(name, text, mask(text, &root, &shown), partly_read), errors)
        }
        Err(errors) => {
            let finding = |error: SyntaxError| Finding::new(Code::Syntax, error.message).at(error.span);
            (None, ConfigSource::unquoted(name, text), errors.into_iter().map(finding).collect())
        }
    };
    let source = Arc::new(source);
    errors = errors.into_iter().map(|finding| finding.located(&source)).collect();
    errors.sort_by_key(|finding| finding.span().unwrap_or_default());
    (value, source, errors)
}
