//! Notices that a file has changed, and waits until it is complete.
//!
//! **Problem.** A file is seldom changed by writing into it. Editors write another file and rename it over the first.
//! Kubernetes mounts a directory in which everything is a symbolic link, and replaces the link that all others lead
//! through:
//!
//! ```text
//!   tollgate.toml ──▶ ..data/tollgate.toml        ..data ──▶ ..2025_01_01/   (before)
//!                                                 ..data ──▶ ..2025_01_02/   (after: the file itself was not touched)
//! ```
//!
//! A watch on the file alone stays with the one that was replaced. A watch on its directory alone misses a file that is
//! bind-mounted, as containers do: it is written through another directory. And a network file system reports nothing.
//!
//! **Idea.** Three triggers, one decision. The file itself is watched, and its directory, and on the way there each
//! directory that holds a symbolic link. Besides, the files are checked every few seconds. Each trigger only causes a
//! check, which compares the stamps of the files (device, inode, size, times) with those when they were last read. So
//! events about other files cost nothing, and the kind of an event does not matter.
//!
//! **Watches are renewed.** A watch stays with the file or directory that it was set on, not with the name. So before
//! each check, watches whose name now leads elsewhere are set again. A file that does not exist yet is watched for as
//! well, if a rejected configuration names it.
//!
//! **Complete files.** In the middle of a change a file is truncated. Before a reload reads anything, all files must
//! have been unchanged for a moment, and none may be open in a process that has written to it, as far as the system
//! reports that. A file that never stops changing is read after five seconds; the loader then decides whether it may
//! replace the configuration in force.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::OsString;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::{Inner, Reloader};

/// The time for which files must be unchanged to count as complete.
const STABLE: Duration = Duration::from_millis(100);
/// The time after which files are read although they keep changing.
const STABLE_WAIT_MAX: Duration = Duration::from_secs(5);
/// The interval between two checks without an event.
pub(super) const POLL_EVERY: Duration = Duration::from_secs(2);
/// The most symbolic links that are followed on the way to one file, as many as the system follows.
const LINKS_MAX: usize = 40;

/// Starts to watch the files, and returns a future that reloads whenever one changes.
///
/// It completes at once if there are no files, and never otherwise. If it is dropped after its first poll, `/readyz`
/// reports that the file watch has ended.
pub(super) fn watch(reloader: Reloader) -> impl Future<Output = ()> + Send + 'static {
    let files = reloader.0.files();
    let watches = Watches::new(reloader.0.events.clone(), &files);
    async move {
        if !files.is_empty() {
            let _guard = WatchGuard(reloader.clone());
            reload_on_change(watches, reloader).await;
        }
    }
}

/// A guard held by the task that watches the files.
///
/// When it is dropped, `/readyz` reports that the file watch has ended.
struct WatchGuard(Reloader);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.0.0.watch_ended.store(true, Ordering::Relaxed);
    }
}

/// Checks the files after each event and at intervals, and reloads if one has changed. Never returns.
async fn reload_on_change(mut watches: Watches, reloader: Reloader) {
    let inner = &reloader.0;
    loop {
        let _ = tokio::time::timeout(inner.poll_every, inner.events.changed.notified()).await;
        let files = inner.files();
        let followed = tokio::task::spawn_blocking(move || {
            watches.follow(&files);
            watches
        });
        watches = followed.await.expect("watching files does not panic");
        // A failure is reported by the reload itself.
        match inner.clone().reload_if_changed().await {
            Some(_) => watches.follow(&inner.files()),
            // At most ten checks a second in a directory in which other programs write all the time.
            None => tokio::time::sleep(STABLE).await,
        }
    }
}

impl Inner {
    /// Waits until all files were unchanged for 100 ms and none is being written. Returns their [stamps](Stamp).
    ///
    /// Does not wait longer than about five seconds.
    pub(super) async fn wait_until_stable(&self) -> Stamps {
        let began = Instant::now();
        let mut found = self.stamps().await;
        loop {
            tokio::time::sleep(STABLE).await;
            let now = self.stamps().await;
            let is_stable = now == found && !self.events.is_writing();
            found = now;
            if is_stable || began.elapsed() >= STABLE_WAIT_MAX {
                return found;
            }
        }
    }

    /// Returns whether no file has changed since it was last read: the [stamps](Stamp) of all files are the same.
    pub(super) async fn is_unchanged(&self) -> bool {
        let found = self.stamps().await;
        let seen = self.seen.lock();
        found.iter().all(|(file, stamp)| seen.get(file) == Some(stamp))
    }

    /// Returns the current [stamps](Stamp) of all files.
    pub(super) async fn stamps(&self) -> Stamps {
        let files = self.files();
        // A network file system may block.
        tokio::task::spawn_blocking(move || stamps(&files)).await.expect("reading metadata does not panic")
    }
}

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
    /// Handles an event of the operating system.
    ///
    /// Updates which files are being written, and requests a check of the files unless the event is only a read access.
    fn handle(&self, event: notify::Result<notify::Event>) {
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
    fn is_writing(&self) -> bool {
        !self.writing.lock().open.is_empty()
    }

    /// Sets the files whose writes are tracked, by canonical path. Forgets writes to other files.
    fn watch_for(&self, files: BTreeSet<PathBuf>) {
        let mut writing = self.writing.lock();
        writing.open.retain(|file| files.contains(file));
        writing.watched = files;
    }
}

/// The watches that are set on files and directories in the operating system.
struct Watches {
    /// `None` if the system provides no watches. Then changes are noticed by the regular checks.
    watcher: Option<RecommendedWatcher>,
    events: Arc<Events>,
    /// The watched paths, with device and inode when the watch was set.
    watched: BTreeMap<PathBuf, (u64, u64)>,
}

impl Watches {
    fn new(events: Arc<Events>, files: &[PathBuf]) -> Watches {
        let handler = events.clone();
        let watcher = notify::recommended_watcher(move |event| handler.handle(event));
        let watcher =
            watcher.inspect_err(|error| tracing::warn!(%error, "cannot watch files; polling them instead")).ok();
        let mut watches = Watches { watcher, events, watched: BTreeMap::new() };
        watches.follow(files);
        watches
    }

    /// Sets the watches that these files need now, and removes all others.
    ///
    /// Also sets the files whose writes are tracked. Logs a warning for each path that cannot be watched. Blocks. A
    /// change during this call may cause no event.
    fn follow(&mut self, files: &[PathBuf]) {
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
        let before = std::mem::take(&mut self.watched);
        for (path, at) in needed {
            if before.get(&path) == Some(&at) {
                self.watched.insert(path, at);
                continue;
            }
            match watcher.watch(&path, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.watched.insert(path, at)),
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "cannot watch this file; polling it instead")
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

/// The device, inode, size and times of change of a file. They differ whenever its content does.
///
/// `None` if there is no file.
pub(crate) type Stamp = Option<[i128; 7]>;
/// The stamps of files, by path.
pub(crate) type Stamps = BTreeMap<PathBuf, Stamp>;

/// Returns the [`Stamp`] of a file with this metadata. It is always `Some`.
pub(crate) fn stamp(data: &Metadata) -> Stamp {
    let [dev, ino, size] = [data.dev(), data.ino(), data.size()].map(i128::from);
    let [mtime, mtime_nsec, ctime, ctime_nsec] =
        [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()].map(i128::from);
    Some([dev, ino, size, mtime, mtime_nsec, ctime, ctime_nsec])
}

fn stamps(files: &[PathBuf]) -> Stamps {
    let stamp_of = |file: &PathBuf| std::fs::metadata(file).ok().as_ref().and_then(stamp);
    files.iter().map(|file| (file.clone(), stamp_of(file))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tollgate::Limiter;
    use tollgate::config::Loader;
    use tollgate::engine::Engine;

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
    fn a_cycle_of_links_is_not_followed_forever() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        symlink("b", root.join("a")).unwrap();
        symlink("a", root.join("b")).unwrap();
        assert_eq!(directories(&root.join("a")), BTreeSet::from([root]));
    }

    fn rules(quota: u32) -> String {
        format!("[[rules]]\nname = 'all'\nby = 'ip'\nlimits = ['{quota}/h']\n")
    }

    /// Creates a configuration file and its reloader.
    fn site() -> (tempfile::TempDir, PathBuf, Reloader) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().canonicalize().unwrap().join("tollgate.toml");
        std::fs::write(&file, rules(1)).unwrap();
        let loaded = Loader::new().load(&file).unwrap();
        let engine = Engine::new(Limiter::memory(), loaded.rules.clone());
        let reloader = Reloader::rules(&file, Loader::new(), loaded, engine);
        (dir, file, reloader)
    }

    fn quota(reloader: &Reloader) -> String {
        let loaded = reloader.loaded().unwrap();
        loaded.rules.rules()[0].policies_of_all().map(|policy| policy.limit().to_string()).collect()
    }

    /// Waits for a condition. Time is virtual: it passes when nothing else is left to do.
    async fn until(what: &str, holds: impl Fn() -> bool) {
        let waiting = async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(600), waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    fn event(kind: EventKind, file: &Path) -> notify::Result<notify::Event> {
        Ok(notify::Event::new(kind).add_path(file.to_owned()))
    }

    fn written(file: &Path) -> notify::Result<notify::Event> {
        event(EventKind::Modify(ModifyKind::Data(notify::event::DataChange::Any)), file)
    }

    fn closed(file: &Path) -> notify::Result<notify::Event> {
        event(EventKind::Access(AccessKind::Close(AccessMode::Write)), file)
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_is_noticed_without_an_event() {
        let (_dir, file, reloader) = site();
        let watches = Watches { watcher: None, events: reloader.0.events.clone(), watched: BTreeMap::new() };
        let watching = tokio::spawn(reload_on_change(watches, reloader.clone()));
        for changed in 2..5 {
            std::fs::write(&file, rules(changed)).unwrap();
            let began = Instant::now();
            until("reloaded", || reloader.history().succeeded == u64::from(changed) - 1).await;
            assert_eq!(quota(&reloader), format!("{changed}/h"));
            assert!(began.elapsed() <= POLL_EVERY + Duration::from_secs(1), "{:?}", began.elapsed());
        }
        // Unchanged files are not read again.
        tokio::time::sleep(POLL_EVERY * 10).await;
        assert_eq!((reloader.history().succeeded, reloader.history().failed), (3, 0));
        watching.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_being_written_is_read_after_it_is_closed() {
        let (_dir, file, reloader) = site();
        reloader.0.events.watch_for([file.clone()].into());
        std::fs::write(&file, "# half a file").unwrap();
        reloader.0.events.handle(written(&file));
        let reloading = tokio::spawn({
            let reloader = reloader.clone();
            async move { reloader.reload().await.map(|_| ()) }
        });
        tokio::time::sleep(STABLE_WAIT_MAX - Duration::from_secs(1)).await;
        assert_eq!((reloader.history().succeeded, reloader.history().failed), (0, 0), "it is still being written");
        std::fs::write(&file, rules(2)).unwrap();
        reloader.0.events.handle(closed(&file));
        reloading.await.unwrap().unwrap();
        assert_eq!(quota(&reloader), "2/h");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_never_closed_is_read_after_five_seconds_and_rejected_if_truncated() {
        let (_dir, file, reloader) = site();
        reloader.0.events.watch_for([file.clone()].into());
        std::fs::write(&file, "# half a file\n").unwrap();
        reloader.0.events.handle(written(&file));
        let began = Instant::now();
        let error = reloader.reload().await.unwrap_err();
        assert!(error.to_string().contains("rules-gone"), "{error}");
        assert!(began.elapsed() >= STABLE_WAIT_MAX && began.elapsed() <= STABLE_WAIT_MAX * 2, "{:?}", began.elapsed());
        assert_eq!(quota(&reloader), "1/h");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_grows_is_read_after_it_has_stopped() {
        let (_dir, file, reloader) = site();
        let whole = rules(2);
        let growing = tokio::spawn(async move {
            let mut pieces = (0..=whole.len()).step_by(7).map(|end| &whole[..end]).chain([whole.as_str()]);
            for piece in pieces.by_ref() {
                std::fs::write(&file, piece).unwrap();
                tokio::time::sleep(STABLE / 2).await;
            }
        });
        reloader.reload().await.unwrap();
        assert!(growing.is_finished(), "it was read while it grew");
        assert_eq!(quota(&reloader), "2/h");
    }

    /// To open it would wait for a writer, and block every later reload.
    #[tokio::test(start_paused = true)]
    async fn a_pipe_in_place_of_the_file_is_rejected() {
        let (_dir, file, reloader) = site();
        std::fs::remove_file(&file).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
        let error = reloader.reload().await.unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
        assert_eq!(quota(&reloader), "1/h");
    }

    #[test]
    fn only_watched_files_count_as_being_written() {
        let events = Events::default();
        let (ours, other) = (Path::new("/etc/tollgate.toml"), Path::new("/etc/other.log"));
        events.watch_for([ours.to_owned()].into());
        events.handle(written(other));
        assert!(!events.is_writing());
        events.handle(written(ours));
        assert!(events.is_writing());
        events.handle(event(EventKind::Modify(ModifyKind::Name(notify::event::RenameMode::To)), ours));
        assert!(!events.is_writing(), "another file was renamed over it");
        events.handle(written(ours));
        events.watch_for([other.to_owned()].into());
        assert!(!events.is_writing(), "the file is not watched any more");
    }
}
