//! Reads a file that may be a pipe, a device, or a file that is being written.

use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The maximum size of a configuration file, a keys file or a secret file, in bytes.
pub(crate) const BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Reads a whole file. Returns its bytes, and its metadata from before the read.
///
/// # Errors
/// If the file cannot be read, has more than `bytes_max` bytes (a device may never end), or is a regular file whose
/// size or modification time changed during the read.
pub fn read(path: &Path, bytes_max: u64) -> Result<(Vec<u8>, Metadata)> {
    let file = File::open(path)?;
    let before = file.metadata()?;
    let mut bytes = Vec::new();
    (&file).take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("it has more than {bytes_max} bytes")));
    }
    let after = file.metadata()?;
    let is_same = before.len() == after.len() && before.modified().ok() == after.modified().ok();
    if before.is_file() && !(is_same && bytes.len() as u64 == before.len()) {
        return Err(Error::new(ErrorKind::ResourceBusy, "it changed while it was read"));
    }
    Ok((bytes, before))
}
