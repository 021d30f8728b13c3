//! Properties of paths that must hold for any input. Compiled only for fuzzing and for tests.

use super::path::{Readings, canonical, readings};

/// Checks that a path has at least one reading and no two equal ones, and that its canonical form does not change if it
/// is made canonical again or is spelled differently. Ignores input that is not UTF-8.
///
/// # Panics
/// If one of these properties does not hold.
pub fn any_path(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    if let Readings::Each(readings) = readings(path) {
        assert!(!readings.is_empty(), "{path:?}");
        assert!((1..readings.len()).all(|n| !readings[..n].contains(&readings[n])), "two equal readings: {readings:?}");
    }
    let Some(counted) = canonical(path) else { return };
    assert_eq!(canonical(&counted).as_deref(), Some(&*counted), "{path:?} is counted as {counted:?}");
    let escaped = escape_all(&counted);
    assert_eq!(canonical(&escaped).as_deref(), Some(&*counted), "{path:?} is counted as {counted:?}, not {escaped:?}");
}

/// Returns another spelling of a path: every byte but `/` is percent-encoded, and every slash but the first is doubled.
fn escape_all(path: &str) -> String {
    let escape = |(index, byte): (usize, u8)| match byte {
        b'/' if index > 0 => "//".to_owned(),
        b'/' => "/".to_owned(),
        _ => format!("%{byte:02x}"),
    };
    path.bytes().enumerate().map(escape).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn corpus_of_paths_holds() {
        tidegate_testkit::fuzz::replay("path", super::any_path);
    }
}
