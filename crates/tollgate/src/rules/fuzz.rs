//! Properties of paths that must hold for any input. Compiled only for fuzzing and for tests.

use super::path::{Readings, canonical, readings};

/// Checks that a path has at least one reading and none twice, and that another spelling of the canonical path has the
/// same canonical path.
///
/// # Panics
/// If a property does not hold.
pub fn any_path(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    if let Readings::Each(readings) = readings(path) {
        assert!(!readings.is_empty(), "{path:?}");
        assert!((1..readings.len()).all(|n| !readings[..n].contains(&readings[n])), "one of them twice: {readings:?}");
    }
    let Some(counted) = canonical(path) else { return };
    assert_eq!(canonical(&counted).as_deref(), Some(&*counted), "{path:?} is counted as {counted:?}");
    let spelt = spelt_otherwise(&counted);
    assert_eq!(canonical(&spelt).as_deref(), Some(&*counted), "{path:?} is counted as {counted:?}, but not {spelt:?}");
}

/// Everything escaped once more, and every slash but the first doubled.
fn spelt_otherwise(path: &str) -> String {
    let spell = |(place, byte): (usize, u8)| match byte {
        b'/' if place > 0 => "//".to_owned(),
        b'/' => "/".to_owned(),
        _ => format!("%{byte:02x}"),
    };
    path.bytes().enumerate().map(spell).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn corpus_of_paths_holds() {
        tollgate_testkit::fuzz::replay("path", super::any_path);
    }
}
