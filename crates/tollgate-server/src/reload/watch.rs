//! Noticing that a file changed.
//!
//! **Problem.** A file is seldom changed by writing into it. Editors write another and rename it over the first. Kubernetes mounts a
//! directory in which everything is a symbolic link, and swaps the one that all others lead through:
//!
//! ```text
//!   tollgate.toml ──▶ ..data/tollgate.toml        ..data ──▶ ..2025_01_01/   (before)
//!                                                 ..data ──▶ ..2025_01_02/   (after: no file of ours was touched)
//! ```
//!
//! Whoever watches the file itself goes on watching the one that is gone.
//!
//! **Idea.** Watch directories: the one that the file is in, and on the way there each one that holds a symbolic link. An event in
//! any of them means *look*, and looking means comparing what the files are now (device, inode, size, times) with what they
//! were. So events about other files cost nothing, and it does not matter which kind of event came.
//!
//! **Watched anew each time.** A watch stays with the directory that it was set on, not with the name. Where one directory takes the place of
//! another, the old watch hears nothing more of ours, so after each event all of them are set again before anything is compared.
//!
//! **A file that is not there yet** is watched as well: one that a configuration names which could not be used for want of it.
//!
//! **Quiet first.** A change is a burst of events, and in the middle of it a file may be empty, which is a valid configuration
//! without rules. So nothing is read before the directories have been quiet for a moment, or have been restless for too long.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tollgate::{Clock, SystemClock, Timestamp};

use super::Reloader;

/// No event for so long: the change is complete.
const QUIET: Duration = Duration::from_millis(100);
/// After so many waits for quiet the files are read all the same.
const WAITS_FOR_QUIET_MAX: u32 = 20;
/// Symbolic links that are followed on the way to one file, as many as the system follows.
const LINKS_MAX: usize = 40;

/// Reads again whenever a file changes. Ends only if nothing can be watched, which is logged: SIGHUP still works then.
pub(super) fn watch(reloader: Reloader) -> impl Future<Output = ()> + Send + 'static {
    let changed = Arc::new(Notify::new());
    let files = reloader.files();
    let watches = (!files.is_empty()).then(|| Watches::new(changed.clone(), &files));
    let seen = stamps(&files);
    async move {
        match watches {
            Some(Ok(watches)) => {
                let _listening = Listening(reloader.clone());
                look_whenever(changed, watches, seen, reloader).await;
            }
            Some(Err(error)) => tracing::warn!(%error, "files cannot be watched; tell of changes with SIGHUP"),
            None => {}
        }
    }
}

/// Somebody listens for changes. If it ends, that is remembered.
struct Listening(Reloader);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.0.is_deaf.store(true, Ordering::Relaxed);
    }
}

async fn look_whenever(
    changed: Arc<Notify>,
    mut watches: Watches,
    mut seen: BTreeMap<PathBuf, Stamp>,
    reloader: Reloader,
) {
    loop {
        changed.notified().await;
        for _ in 0..WAITS_FOR_QUIET_MAX {
            if tokio::time::timeout(QUIET, changed.notified()).await.is_err() {
                break;
            }
        }
        // Links may lead elsewhere now, whatever became of the files.
        watches.follow(&reloader.files());
        let found = stamps(&reloader.files());
        if found.iter().any(|(file, stamp)| seen.get(file) != Some(stamp)) {
            let began = SystemClock::new().now();
            // A failure is told by the reloader itself.
            let _ = reloader.reload().await;
            // The configuration may name other files than before. Of those that it named already, what counts is what
            // they were before they were read.
            watches.follow(&reloader.files());
            let files = reloader.files();
            seen = stamps(&files);
            // One that is named for the first time may have changed after it was read and before anybody watched.
            seen.retain(|file, stamp| found.contains_key(file) || !is_younger(stamp, began));
            seen.extend(found);
            // What changed since then is still to be read, and while the watches were set anew nobody may have heard of it.
            if stamps(&files).iter().any(|(file, stamp)| seen.get(file) != Some(stamp)) {
                changed.notify_one();
            }
        }
    }
}

/// Whether a file may have changed since then, by the file system's clock, which goes in steps.
fn is_younger(stamp: &Stamp, since: Timestamp) -> bool {
    const STEP_US: i128 = 50_000;
    let Some((.., ctime, ctime_nsec)) = stamp else { return false };
    let changed_us = i128::from(*ctime) * 1_000_000 + i128::from(*ctime_nsec) / 1_000;
    changed_us + STEP_US >= i128::from(since.as_micros())
}

struct Watches {
    watcher: RecommendedWatcher,
    directories: BTreeSet<PathBuf>,
}

impl Watches {
    fn new(changed: Arc<Notify>, files: &[PathBuf]) -> notify::Result<Watches> {
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading is no change; an error (too many events, say) may be one.
            let is_reading = event.is_ok_and(|event| match event.kind {
                EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
                EventKind::Access(_) => true,
                _ => false,
            });
            if !is_reading {
                changed.notify_one();
            }
        })?;
        let mut watches = Watches { watcher, directories: BTreeSet::new() };
        watches.follow(files);
        Ok(watches)
    }

    /// Watches what these files depend on, as it is now, and nothing else. What happens meanwhile may go unheard.
    fn follow(&mut self, files: &[PathBuf]) {
        for before in std::mem::take(&mut self.directories) {
            // It may be gone, and its watch with it.
            let _ = self.watcher.unwatch(&before);
        }
        let needed: BTreeSet<PathBuf> = files.iter().flat_map(|file| directories(file)).collect();
        for directory in needed {
            match self.watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.directories.insert(directory)),
                Err(error) => tracing::warn!(directory = %directory.display(), %error, "cannot be watched"),
            }
        }
    }
}

/// The directories in which a change can make `file` another one: its own, and those of all links on the way.
fn directories(file: &Path) -> BTreeSet<PathBuf> {
    let mut directories = BTreeSet::new();
    let Ok(absolute) = std::path::absolute(file) else { return directories };
    let mut real = PathBuf::from("/");
    let mut names: VecDeque<OsString> = names(&absolute).collect();
    let mut links = 0;
    while let Some(name) = names.pop_front() {
        if name == ".." {
            real.pop();
            continue;
        }
        let next = real.join(&name);
        match std::fs::read_link(&next) {
            Ok(target) if links < LINKS_MAX => {
                links += 1;
                directories.insert(real.clone());
                if target.is_absolute() {
                    real = PathBuf::from("/");
                }
                let rest = std::mem::take(&mut names);
                names = self::names(&target).chain(rest).collect();
            }
            _ if next.is_dir() => real = next,
            // The file itself, or the place where it is missing.
            _ => {
                directories.insert(real);
                return directories;
            }
        }
    }
    directories
}

fn names(path: &Path) -> impl Iterator<Item = OsString> + '_ {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    })
}

/// What tells one content of a file from another without reading it; `None` where there is no file.
type Stamp = Option<(u64, u64, u64, i64, i64, i64, i64)>;

fn stamps(files: &[PathBuf]) -> BTreeMap<PathBuf, Stamp> {
    let stamp = |file: &PathBuf| {
        let data = std::fs::metadata(file).ok()?;
        Some((data.dev(), data.ino(), data.size(), data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()))
    };
    files.iter().map(|file| (file.clone(), stamp(file))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_directory_that_holds_a_link_on_the_way_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("mount/..first")).unwrap();
        std::fs::write(root.join("mount/..first/tollgate.toml"), "").unwrap();
        symlink("..first", root.join("mount/..data")).unwrap();
        symlink("..data/tollgate.toml", root.join("mount/tollgate.toml")).unwrap();
        symlink(root.join("mount"), root.join("etc")).unwrap();
        let expected: BTreeSet<PathBuf> = ["", "mount", "mount/..first"].map(|name| root.join(name)).into();
        assert_eq!(directories(&root.join("etc/tollgate.toml")), expected);
        let missing: BTreeSet<PathBuf> = [root.join("mount")].into();
        assert_eq!(directories(&root.join("mount/absent.toml")), missing);
    }

    #[test]
    fn a_circle_of_links_ends() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        symlink("b", root.join("a")).unwrap();
        symlink("a", root.join("b")).unwrap();
        assert_eq!(directories(&root.join("a")), BTreeSet::from([root]));
    }
}
