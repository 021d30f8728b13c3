//! The user and the password of a store, or of its Sentinels, from its URL, from files or from environment variables.
//!
//! Files are read at each connect, so a rotated password is used without a restart. No `Debug` output and no error
//! contains a user or a password.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate_core::{__io_reason as reason, StoreErrorKind as Kind};

use crate::fault::Fault;
use crate::url::Endpoint;

/// The largest file with a user or a password that is read.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Where a user name or a password is read from.
///
/// For [`RedisStoreBuilder::username_from`](crate::RedisStoreBuilder::username_from),
/// [`RedisStoreBuilder::password_from`](crate::RedisStoreBuilder::password_from), and their counterparts for Sentinels.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CredentialSource {
    /// The secret itself.
    Text(String),
    /// A file, which is read at each connect. Line breaks at its end are not part of the secret.
    File(PathBuf),
    /// The name of an environment variable. Line breaks at the end of its value are not part of the secret.
    Env(String),
}

/// The error of a user name or a password that cannot be read, or of a user name without a password.
///
/// The message names the file or the variable, and does not contain the secret.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}")]
pub struct CredentialsError {
    problem: String,
}

/// Where the user and the password are read from, if not from the URL.
#[derive(Clone, Debug)]
pub(crate) struct Credentials {
    /// The servers that the credentials are for, for errors.
    owner: &'static str,
    pub(crate) username: Option<CredentialSource>,
    pub(crate) password: Option<CredentialSource>,
}

/// The arguments of `AUTH`.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Login {
    /// The user; `None` for the server's default user.
    pub(crate) user: Option<String>,
    pub(crate) password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Debug for CredentialSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CredentialSource::Text(_) => f.write_str("Text(***)"),
            CredentialSource::File(file) => f.debug_tuple("File").field(file).finish(),
            CredentialSource::Env(name) => f.debug_tuple("Env").field(name).finish(),
        }
    }
}

impl CredentialSource {
    /// Reads the secret: the text, or the content of the file or the variable without line breaks at its end.
    ///
    /// `what` is the kind of secret and `owner` the server that it is for, for errors.
    ///
    /// # Errors
    /// Returns an error if the file or the variable does not exist, cannot be read, is empty, or is not UTF-8, or if
    /// the file is larger than 64 KiB.
    fn read(&self, what: &str, owner: &str) -> Result<String, CredentialsError> {
        let (place, text) = match self {
            CredentialSource::Text(text) => return Ok(text.clone()),
            CredentialSource::File(file) => {
                let bytes = read_bounded(file, FILE_BYTES_MAX);
                (file.display().to_string(), bytes.and_then(|bytes| String::from_utf8(bytes).map_err(not_text)))
            }
            CredentialSource::Env(name) => {
                let value = std::env::var(name).map_err(|error| match error {
                    std::env::VarError::NotPresent => io::Error::other("it is not set"),
                    std::env::VarError::NotUnicode(_) => not_text(error),
                });
                (format!("${name}"), value)
            }
        };
        let problem =
            |why: &str| CredentialsError { problem: format!("cannot read the {what} of {owner} from {place}: {why}") };
        let text = text.map_err(|error| problem(&reason(&error)))?;
        match text.trim_end_matches(['\r', '\n']) {
            "" => Err(problem("it is empty")),
            text => Ok(text.to_owned()),
        }
    }
}

impl Credentials {
    /// Creates credentials without sources: those of the URL are used, which has none for Sentinels. `owner` are the
    /// servers, for errors.
    pub(crate) fn of(owner: &'static str) -> Credentials {
        Credentials { owner, username: None, password: None }
    }

    /// Reads the user and the password of a server. Those of the URL are used where no source is set.
    ///
    /// Returns `None` to connect without authentication. Blocks while it reads files.
    ///
    /// # Errors
    /// Returns an error if a source cannot be read, or there is a user without a password.
    pub(crate) fn read(&self, endpoint: &Endpoint) -> Result<Option<Login>, CredentialsError> {
        let read = |source: &Option<CredentialSource>, what, from_url: &Option<String>| match source {
            Some(source) => source.read(what, self.owner).map(Some),
            None => Ok(from_url.clone()),
        };
        let user = read(&self.username, "user name", &endpoint.user)?;
        match (user, read(&self.password, "password", &endpoint.password)?) {
            (user, Some(password)) => Ok(Some(Login { user, password })),
            (None, None) => Ok(None),
            (Some(_), None) => {
                let problem = format!("a user name is set for {}, but no password", self.owner);
                Err(CredentialsError { problem })
            }
        }
    }

    /// Reads the user and the password like [`Credentials::read`], without blocking the runtime.
    ///
    /// # Errors
    /// Returns a fault of the kind `Forbidden` if they cannot be read.
    pub(crate) async fn login(self: &Arc<Self>, endpoint: &Endpoint) -> Result<Option<Login>, Fault> {
        let read = if self.username.is_some() || self.password.is_some() {
            let (credentials, endpoint) = (self.clone(), endpoint.clone());
            let read = tokio::task::spawn_blocking(move || credentials.read(&endpoint)).await;
            let failed = || format!("the credentials of {} could not be read", self.owner);
            read.map_err(|_| Fault::new(Kind::Forbidden, failed()))?
        } else {
            self.read(endpoint)
        };
        read.map_err(|error| Fault::new(Kind::Forbidden, error.problem))
    }
}

fn not_text<E>(_: E) -> io::Error {
    io::Error::other("it is not UTF-8 text")
}

/// Reads a whole file of at most `bytes_max` bytes.
///
/// # Errors
/// Returns an error if the file cannot be read or is larger. Without this limit, reading a device might never end.
pub(crate) fn read_bounded(file: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(file)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::Error::other(format!("it has more than {bytes_max} bytes")));
    }
    Ok(bytes)
}
