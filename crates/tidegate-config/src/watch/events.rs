//! Events of the operating system about files, which cause a check of the files at once.
//!
//! **Problem.** A watch on a file alone does not notice that the file is replaced by another. A watch on its directory
//! alone misses writes to a bind-mounted file, as in containers, because they happen in another directory. And a
//! network file system reports nothing.
//!
//! **Idea.** The file itself is watched, and its directory, and on the way there each directory that holds a symbolic
//! link. The regular checks find what no event reports.
//!
//! **Watches are renewed.** A watch stays with the file or directory that it was set on, not with the name. So before
//! each check, watches whose name now leads elsewhere are set again. A file that does not exist yet is watched for as
//! well, if a rejected configuration names it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// The maximum number of symbolic links that are followed on the way to one file, as on Linux.
const LINKS_MAX: usize = 40;

/// The state that events of the operating system update: whether a check is due, and which files are being written.
#[derive(Default)]
pub(super) struct Events {
    changed: Notify,
    writing: Mutex<OpenFiles>,
}

/// The watched files, and those of them that are open in a process that has written to them.
#[derive(Default)]
struct OpenFiles {
    /// The canonical paths of the files to watch.
    watched: BTreeSet<PathBuf>,
    open: BTreeSet<PathBuf>,
}

impl Events {
    /// Waits until an event has requested a check of the files.
    pub(super) async fn changed(&self) {
        self.changed.notified().await
    }

    /// Handles an event of the operating system.
    ///
    /// Updates which files are being written, and requests a check of the files unless the event is only a read access.
    pub(super) fn handle(&self, event: notify::Result<notify::Event>) {
        let Ok(event) = event else {
            // For example, the queue has overflowed: something may have changed.
            self.changed.notify_one();
            return;
        };
        let is_written = matches!(event.kind, EventKind::Modify(ModifyKind::Data(_)));
        let is_closed = matches!(event.kind, EventKind::Access(AccessKind::Close(AccessMode::Write)));
        let is_another =
            matches!(event.kind, EventKind::Create(_) | EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_)));
        let mut writing = self.writing.lock();
        for path in event.paths {
            if is_written && writing.watched.contains(&path) {
                writing.open.insert(path);
            } else if is_closed || is_another {
                writing.open.remove(&path);
            }
        }
        // Reading a file does not change it.
        if is_closed || !matches!(event.kind, EventKind::Access(_)) {
            self.changed.notify_one();
        }
    }

    /// Returns whether a watched file is open in a process that has written to it.
    pub(super) fn is_writing(&self) -> bool {
        !self.writing.lock().open.is_empty()
    }

    /// Sets the files whose writes are tracked, by canonical path. Forgets writes to other files.
    pub(super) fn watch_for(&self, files: BTreeSet<PathBuf>) {
        let mut writing = self.writing.lock();
        writing.open.retain(|file| files.contains(file));
        writing.watched = files;
    }
}

/// The watches that are set on files and directories in the operating system.
pub(super) struct Watches {
    /// `None` if the system provides no watches. Then changes are noticed by the regular checks.
    watcher: Option<RecommendedWatcher>,
    events: Arc<Events>,
    /// The watched paths, with device and inode when the watch was set.
    watched: BTreeMap<PathBuf, (u64, u64)>,
    /// The paths that could not be watched at the last attempt.
    unwatchable: BTreeSet<PathBuf>,
}

impl Watches {
    /// Sets the watches that these files need. `events` handles their events. Logs a warning if the system provides no
    /// watches.
    pub(super) fn new(events: Arc<Events>, files: &[PathBuf]) -> Watches {
        let handler = events.clone();
        let watcher = notify::recommended_watcher(move |event| handler.handle(event));
        let watcher =
            watcher.inspect_err(|error| tracing::warn!(%error, "cannot watch files; polling them instead")).ok();
        let mut watches = Watches { watcher, events, watched: BTreeMap::new(), unwatchable: BTreeSet::new() };
        watches.follow(files);
        watches
    }

    /// Creates an instance that sets no watches, as [`new`](Watches::new) does if the system provides none.
    #[cfg(test)]
    pub(super) fn none(events: Arc<Events>) -> Watches {
        Watches { watcher: None, events, watched: BTreeMap::new(), unwatchable: BTreeSet::new() }
    }

    /// Sets the watches that these files need now, and removes all others.
    ///
    /// Also sets the files whose writes are tracked. Logs a warning for each path that cannot be watched and could be before. Blocks. A
    /// change during this call may cause no event.
    pub(super) fn follow(&mut self, files: &[PathBuf]) {
        let real: BTreeSet<PathBuf> = files.iter().filter_map(|file| file.canonicalize().ok()).collect();
        let needed: BTreeSet<PathBuf> = files.iter().flat_map(|file| directories(file)).chain(real.clone()).collect();
        self.events.watch_for(real);
        let identity =
            |path: &PathBuf| Some((path.clone(), std::fs::metadata(path).ok().map(|at| (at.dev(), at.ino()))?));
        let needed: BTreeMap<PathBuf, (u64, u64)> = needed.iter().filter_map(identity).collect();
        let Some(watcher) = &mut self.watcher else { return };
        for (path, at) in &self.watched {
            if needed.get(path) != Some(at) {
                // The path may not exist any more, and its watch neither.
                let _ = watcher.unwatch(path);
            }
        }
        let (before, known) = (std::mem::take(&mut self.watched), std::mem::take(&mut self.unwatchable));
        for (path, at) in needed {
            if before.get(&path) == Some(&at) {
                self.watched.insert(path, at);
                continue;
            }
            match watcher.watch(&path, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.watched.insert(path, at)),
                Err(error) => {
                    if !known.contains(&path) {
                        tracing::warn!(path = %path.display(), %error, "cannot watch this file; polling it instead");
                    }
                    self.unwatchable.insert(path);
                }
            }
        }
    }
}

/// Returns the directories in which a change can make the path `file` lead to another file.
///
/// These are the directory of the file itself, and those of all symbolic links on the way. If a part of the path is
/// missing, the directory in which it would be is included.
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
            // The file itself, or the directory in which it is missing.
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

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn every_directory_that_holds_a_link_on_the_way_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("mount/..first")).unwrap();
        std::fs::write(root.join("mount/..first/tidegate.toml"), "").unwrap();
        symlink("..first", root.join("mount/..data")).unwrap();
        symlink("..data/tidegate.toml", root.join("mount/tidegate.toml")).unwrap();
        symlink(root.join("mount"), root.join("etc")).unwrap();
        let expected: BTreeSet<PathBuf> = ["", "mount", "mount/..first"].map(|name| root.join(name)).into();
        assert_eq!(directories(&root.join("etc/tidegate.toml")), expected);
        let missing: BTreeSet<PathBuf> = [root.join("mount")].into();
        assert_eq!(directories(&root.join("mount/absent.toml")), missing);
    }

    #[test]
    fn a_cycle_of_links_is_not_followed_forever() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        symlink("b", root.join("a")).unwrap();
        symlink("a", root.join("b")).unwrap();
        assert_eq!(directories(&root.join("a")), BTreeSet::from([root]));
    }

    fn event(kind: EventKind, file: &Path) -> notify::Result<notify::Event> {
        Ok(notify::Event::new(kind).add_path(file.to_owned()))
    }

    pub(in super::super) fn written(file: &Path) -> notify::Result<notify::Event> {
        event(EventKind::Modify(ModifyKind::Data(notify::event::DataChange::Any)), file)
    }

    pub(in super::super) fn closed(file: &Path) -> notify::Result<notify::Event> {
        event(EventKind::Access(AccessKind::Close(AccessMode::Write)), file)
    }

    #[test]
    fn only_watched_files_count_as_being_written() {
        let events = Events::default();
        let (ours, other) = (Path::new("/etc/tidegate.toml"), Path::new("/etc/other.log"));
        events.watch_for([ours.to_owned()].into());
        events.handle(written(other));
        assert!(!events.is_writing());
        events.handle(written(ours));
        assert!(events.is_writing());
        events.handle(event(EventKind::Modify(ModifyKind::Name(notify::event::RenameMode::To)), ours));
        assert!(!events.is_writing(), "another file was renamed over it");
        events.handle(written(ours));
        events.watch_for([other.to_owned()].into());
        assert!(!events.is_writing(), "the file is no longer watched");
    }
}
