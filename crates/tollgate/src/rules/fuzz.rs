//! What must hold for any path whatever.

use super::path::{canonical, readings};

/// As written; then tidied, decoded and decoded out, with and without parameters, each tidied in two orders.
const READINGS_MAX: usize = 1 + 3 * 2 * 2;

/// The whole of a fuzz target: takes what the fuzzer invents as a path, and panics when something is wrong with it.
///
/// # Panics
/// When a path has no reading, too many or one twice, or when another spelling of what is counted is counted otherwise.
pub fn any_path(bytes: &[u8]) {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    let readings = readings(path);
    assert!((1..=READINGS_MAX).contains(&readings.len()), "{readings:?}");
    assert!((1..readings.len()).all(|n| !readings[..n].contains(&readings[n])), "one of them twice: {readings:?}");
    let Some(counted) = canonical(path) else { return };
    assert_eq!(canonical(&counted).as_deref(), Some(&*counted), "{path:?} is counted as {counted:?}");
    let spelt = spelt_otherwise(&counted);
    assert_eq!(canonical(&spelt).as_deref(), Some(&*counted), "{path:?} is counted as {counted:?}, but not {spelt:?}");
}

/// Everything escaped once more, and every slash doubled.
fn spelt_otherwise(path: &str) -> String {
    let spell = |byte: u8| match byte {
        b'/' => "//".to_owned(),
        _ => format!("%{byte:02x}"),
    };
    path.bytes().map(spell).collect()
}
