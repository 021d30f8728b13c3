//! Secrets of the command: read from files or the environment, never from arguments, which `ps` would show.

use std::env::VarError;
use std::path::Path;

use tidegate_server::{ListenerKind, ListenerSecret, ReceiptSecret, SecretError};

use crate::Failure;

/// Maximum size of a file with a secret, since reading a device might never end.
const FILE_BYTES_MAX: u64 = 64 * 1024;
const RECEIPT_SECRET_VARIABLE: &str = "TIDEGATE_RECEIPT_SECRET";
/// Minimum length of the receipt secret in bytes, as in a configuration.
const RECEIPT_SECRET_BYTES_MIN: usize = 16;

/// Reads the secret that clients of a listener must send, from `file`, else from the environment variable of the
/// listener.
///
/// Returns `None` if the listener has no secret, or if there is no file and the variable is not set or empty.
///
/// # Errors
/// If the file cannot be read, or the text is not UTF-8, or not a valid secret: a token with fewer than 16 characters,
/// or an empty password.
pub(crate) fn of_listener(kind: &ListenerKind, file: Option<&Path>) -> Result<Option<ListenerSecret>, Failure> {
    let Some(secret) = &kind.secret else { return Ok(None) };
    let Some((place, text)) = read_secret(file, secret.variable)? else { return Ok(None) };
    secret.form.parse(&text).map(Some).map_err(|error| match error {
        SecretError::Empty => Failure::PasswordMissing { place, option: secret.option },
        error => Failure::Token { place, error },
    })
}

/// Reads the URL of the store from `file`. White space around it is removed.
///
/// # Errors
/// If the file cannot be read, is not UTF-8, or contains no URL.
pub(crate) fn store_url(file: &Path) -> Result<String, Failure> {
    match read_file(file)?.trim() {
        "" => Err(Failure::StoreUrlMissing { file: file.to_owned() }),
        url => Ok(url.to_owned()),
    }
}

/// Reads the secret of receipts from `file`, else from `TIDEGATE_RECEIPT_SECRET`.
///
/// White space at the end is removed. Returns `None` if there is no file and the variable is not set or empty.
///
/// # Errors
/// If the file cannot be read, or the text is not UTF-8 or has fewer than 16 bytes.
pub(crate) fn receipt_secret(file: Option<&Path>) -> Result<Option<ReceiptSecret>, Failure> {
    let Some((place, text)) = read_secret(file, RECEIPT_SECRET_VARIABLE)? else { return Ok(None) };
    match text.trim_end() {
        secret if secret.len() < RECEIPT_SECRET_BYTES_MIN => {
            Err(Failure::ReceiptSecretShort { place, bytes: secret.len(), bytes_min: RECEIPT_SECRET_BYTES_MIN })
        }
        secret => Ok(Some(ReceiptSecret::new(secret.as_bytes()))),
    }
}

/// Returns the argument with `***@` in place of the user and the password of a URL.
///
/// The argument may not be a valid URL, so everything between the scheme and the last `@` is masked.
pub(crate) fn mask_user(argument: &str) -> String {
    let Some((before, host)) = argument.rsplit_once('@') else { return argument.to_owned() };
    let scheme = before.find("://").map_or("", |end| &before[..end + 3]);
    format!("{scheme}***@{host}")
}

/// Reads a secret from the file, else from the environment variable.
///
/// Returns its place for messages (the name of the file, or `$` and the name of the variable) and its text. Returns
/// `None` if there is no file and the variable is not set or empty.
///
/// # Errors
/// If the file cannot be read or is larger than [`FILE_BYTES_MAX`], or the text is not UTF-8.
fn read_secret(file: Option<&Path>, variable: &str) -> Result<Option<(String, String)>, Failure> {
    if let Some(file) = file {
        return Ok(Some((file.display().to_string(), read_file(file)?)));
    }
    match std::env::var(variable) {
        Ok(text) if !text.is_empty() => Ok(Some((format!("${variable}"), text))),
        Ok(_) | Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => Err(Failure::NotText { variable: variable.to_owned() }),
    }
}

/// Reads the text of a file.
///
/// # Errors
/// If the file cannot be read, is larger than [`FILE_BYTES_MAX`], or is not UTF-8.
fn read_file(file: &Path) -> Result<String, Failure> {
    let read = tidegate::config::complete::read(file, FILE_BYTES_MAX);
    let text = read.and_then(|(bytes, _)| String::from_utf8(bytes).map_err(std::io::Error::other));
    text.map_err(|error| Failure::Unreadable { file: file.to_owned(), error })
}

#[cfg(test)]
mod tests {
    use super::mask_user;

    #[test]
    fn user_and_password_of_a_url_are_masked() {
        for (argument, masked) in [
            ("http://user:planted@host:80/path", "http://***@host:80/path"),
            ("http://:planted@host", "http://***@host"),
            ("http://user:planted@planted/planted@host", "http://***@host"),
            ("user:planted@host", "***@host"),
            ("planted@", "***@"),
            ("http://host/path", "http://host/path"),
            ("", ""),
        ] {
            assert_eq!(mask_user(argument), masked);
        }
    }
}
