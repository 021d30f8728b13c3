//! The amount of memory for counters in this process, and its division.
//!
//! Defaults to an eighth of the memory that the process may use, and at most 1 GiB, which holds some 20 million
//! counters. The process may use the memory of the machine or, if that is less, the limit of its control group, such as
//! a container or a systemd unit. Three quarters are for the counters of limits; with a shared store these are the
//! local shares. One quarter is for those of shield rules.

use std::path::Path;

/// The default if the memory that the process may use is unknown.
const FALLBACK_BYTES: usize = 256 << 20;
/// The minimum of the default, for machines with less than 128 MiB.
const DEFAULT_BYTES_MIN: usize = 16 << 20;
/// The maximum of the default. A store has 256 tables and grows each under a lock; with more memory that takes
/// milliseconds.
const DEFAULT_BYTES_MAX: usize = 1 << 30;

/// The maximum bytes of the two memory stores in a process: for counters of limits, and for those of shield rules.
pub(super) struct Share {
    pub(super) limits_bytes: usize,
    pub(super) shield_bytes: usize,
}

impl Share {
    /// Divides `bytes`: a quarter, rounded down, for shield rules and the rest for limits.
    pub(super) fn divide(bytes: usize) -> Share {
        let shield_bytes = bytes / 4;
        Share { limits_bytes: bytes - shield_bytes, shield_bytes }
    }
}

/// Returns the default of `--memory` in bytes: an eighth of the memory that this process may use, from 16 MiB to 1 GiB.
///
/// Returns 256 MiB if that memory is unknown.
pub(super) fn default_bytes() -> usize {
    let usable = usable_bytes(Path::new("/")).unwrap_or(8 * FALLBACK_BYTES);
    (usable / 8).clamp(DEFAULT_BYTES_MIN, DEFAULT_BYTES_MAX)
}

/// Returns the bytes of memory that this process may use: the least of the machine's memory and the limits of the
/// process's control groups and their parents. Returns `None` if none of them can be read.
///
/// `root` is the directory with `proc` and `sys`: `/`, except in tests.
fn usable_bytes(root: &Path) -> Option<usize> {
    let read = |path: String| std::fs::read_to_string(root.join(path)).ok();
    let machine = read("proc/meminfo".to_owned()).and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
    });
    // A line per hierarchy: its number, its controllers (none for version 2), and the path of the group.
    let groups = read("proc/self/cgroup".to_owned()).unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let (hierarchy, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ => ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        };
        let is_of_memory = controllers.is_empty() || controllers.split(',').any(|one| one == "memory");
        // The limit of a parent group applies too. In a container the path may be that of the host, which does not
        // exist there.
        let above = Path::new(path).ancestors().map(|group| group.to_string_lossy().into_owned());
        let files = above.map(move |group| format!("{hierarchy}/{}/{file}", group.trim_matches('/')));
        files.filter(move |_| is_of_memory).collect::<Vec<_>>()
    });
    // Without a limit: "max", or a number larger than any memory.
    let limits = limits.filter_map(|file| read(file)?.trim().parse().ok());
    limits.chain(machine).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usable(files: &[(&str, &str)]) -> Option<usize> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        usable_bytes(root.path())
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal:       16384 kB\nMemFree:          100 kB\n");

    #[test]
    fn the_smallest_limit_of_machine_and_control_groups_applies() {
        assert_eq!(usable(&[]), None);
        assert_eq!(usable(&[("proc/meminfo", "nonsense\n")]), None);
        assert_eq!(usable(&[MACHINE]), Some(16 << 20));
        let group = ("proc/self/cgroup", "0::/system.slice/tidegate.service\n");
        assert_eq!(usable(&[MACHINE, group]), Some(16 << 20));
        for (file, text, bytes) in [
            ("sys/fs/cgroup/system.slice/tidegate.service/memory.max", "1048576\n", 1 << 20),
            ("sys/fs/cgroup/system.slice/memory.max", "2097152\n", 2 << 20),
            ("sys/fs/cgroup/memory.max", "3145728\n", 3 << 20),
            ("sys/fs/cgroup/system.slice/memory.max", "max\n", 16 << 20),
            ("sys/fs/cgroup/other/memory.max", "1048576\n", 16 << 20),
            ("sys/fs/cgroup/memory.max", "99999999999\n", 16 << 20),
        ] {
            assert_eq!(usable(&[MACHINE, group, (file, text)]), Some(bytes), "{file} {text}");
        }
        let first_version = ("proc/self/cgroup", "12:cpu,cpuacct:/a\n9:memory:/docker/0123\n0::/\n");
        let limit = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1048576\n");
        assert_eq!(usable(&[MACHINE, first_version, limit]), Some(1 << 20));
        let without = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(usable(&[MACHINE, first_version, without]), Some(16 << 20));
    }

    #[test]
    fn all_memory_is_divided() {
        let Share { limits_bytes, shield_bytes } = Share::divide(1_000_001);
        assert_eq!((limits_bytes, shield_bytes), (750_001, 250_000));
        assert!((DEFAULT_BYTES_MIN..=DEFAULT_BYTES_MAX).contains(&default_bytes()));
    }
}
