//! Notices that a file has changed, waits until it is complete, and reads it again.
//!
//! **Problem.** A file is seldom changed by writing into it. Editors write another file and rename it over the first.
//! Kubernetes mounts a directory in which everything is a symbolic link, and replaces the link that all others lead
//! through:
//!
//! ```text
//!   tidegate.toml ──▶ ..data/tidegate.toml        ..data ──▶ ..2025_01_01/   (before)
//!                                                 ..data ──▶ ..2025_01_02/   (after: the file itself was not touched)
//! ```
//!
//! **Idea.** Every two seconds, the stamps of the files (device, inode, size, times) are compared with those when the
//! files were last read. A stamp is that of the file to which the path leads now, so a renamed file and a replaced link
//! are changes like any other. With the feature `notify`, events of the operating system cause a check at once
//! (`watch/events.rs`). An event only causes a check, so events about other files cost nothing, and the kind of an
//! event does not matter.
//!
//! **Complete files.** In the middle of a change a file is truncated or missing. Before anything is read, all files
//! must have been unchanged for 100 ms, and none may be open in a process that has written to it, as far as the
//! operating system reports that. A file that never stops changing is read after five seconds; the source then decides
//! whether its content may replace the one in use.
//!
//! **One report per content.** A broken file that is written again with the same content, or replaced by a copy, is
//! read again but not reported again.
//!
//! [`FileWatch`] does this for any [`FileSource`]: crate `tidegate` has one for a configuration file, to which the server
//! adds its certificate.

#[cfg(all(feature = "notify", unix))]
mod events;
#[cfg(not(all(feature = "notify", unix)))]
mod no_events;

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::time::Instant;

#[cfg(all(feature = "notify", unix))]
use self::events::{Events, Watches};
#[cfg(not(all(feature = "notify", unix)))]
use self::no_events::{Events, Watches};
use super::complete;

/// The time for which files must be unchanged to count as complete.
const STABLE: Duration = Duration::from_millis(100);
/// The time after which files are read although they keep changing.
const STABLE_WAIT_MAX: Duration = Duration::from_secs(5);
/// The interval between two checks without an event.
const POLL_EVERY: Duration = Duration::from_secs(2);

/// A set of files whose contents are in use, and which a [`FileWatch`] reads again.
pub trait FileSource: Send + Sync + 'static {
    /// The new contents.
    type Loaded: Send + 'static;
    /// The reason why the contents cannot be used.
    type Error: Send + 'static;

    /// Returns the paths of the files to watch: those in use, and those that rejected contents refer to. A path may
    /// occur twice.
    fn files(&self) -> Vec<PathBuf>;

    /// Returns the [stamps](stamp) that the files in use had when they were read.
    fn stamps(&self) -> Stamps;

    /// Reads the files again, and puts the contents that are valid into use. May block: it is called on a thread for
    /// blocking work.
    ///
    /// Also returns the [stamps](stamp) of the files that this call has read and put into use.
    fn read(&self) -> (Result<Self::Loaded, Self::Error>, Stamps);

    /// Returns the error for a [`read`](Self::read) that panicked.
    fn panicked() -> Self::Error;

    /// Reports the result of a reload, for example in a log.
    ///
    /// Called after each reload, except if a change of the files caused it and they were rejected with the same
    /// contents the last time.
    fn report(&self, result: &Result<Self::Loaded, Self::Error>);
}

/// Reloads the files of a [`FileSource`], on request and when they change. Clones share their state.
pub struct FileWatch<S>(Arc<Inner<S>>);

struct Inner<S> {
    source: S,
    /// Held during a reload, so that there is one at a time.
    turn: tokio::sync::Mutex<()>,
    /// The stamps of the files when they were last read.
    seen: Mutex<Stamps>,
    /// The digest of the files, if the last reload failed.
    rejected: Mutex<Option<ContentDigest>>,
    events: Arc<Events>,
    poll_every: Duration,
    watch_ended: AtomicBool,
}

/// The digest of the contents of all files.
type ContentDigest = [u8; 32];

impl<S> Clone for FileWatch<S> {
    fn clone(&self) -> Self {
        FileWatch(self.0.clone())
    }
}

impl<S: FileSource> FileWatch<S> {
    /// Creates a watch for the files of `source`. [`watch`](Self::watch) starts it.
    pub fn new(source: S) -> FileWatch<S> {
        FileWatch(Arc::new(Inner {
            seen: Mutex::new(source.stamps()),
            source,
            turn: Default::default(),
            rejected: Mutex::default(),
            events: Arc::default(),
            poll_every: POLL_EVERY,
            watch_ended: AtomicBool::new(false),
        }))
    }

    /// Returns the source.
    pub fn source(&self) -> &S {
        &self.0.source
    }

    /// Replaces the source with the result of `change`. Does nothing if there are clones: `change` is not called.
    #[must_use]
    pub fn map(self, change: impl FnOnce(S) -> S) -> FileWatch<S> {
        self.with(|inner| {
            let source = change(inner.source);
            Inner { seen: Mutex::new(source.stamps()), source, ..inner }
        })
    }

    /// Sets the interval at which [`watch`](Self::watch) checks the files without an event. Defaults to 2 s. At least
    /// 100 ms pass between two checks.
    ///
    /// Does nothing if there are clones.
    #[must_use]
    pub fn poll_every(self, interval: Duration) -> FileWatch<S> {
        self.with(|inner| Inner { poll_every: interval, ..inner })
    }

    /// Applies `change` to the state, unless there are clones.
    fn with(self, change: impl FnOnce(Inner<S>) -> Inner<S>) -> FileWatch<S> {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => FileWatch(Arc::new(change(inner))),
            Err(shared) => FileWatch(shared),
        }
    }

    /// Reads the files again, whether they have changed or not.
    ///
    /// Waits first until the files have been unchanged for 100 ms, for five seconds at most. Reloads run one at a time.
    /// If the future is dropped after its first poll, the reload still completes.
    ///
    /// # Errors
    /// Returns the error of [`FileSource::read`], or [`FileSource::panicked`] if it panics.
    ///
    /// # Panics
    /// Panics outside a tokio runtime.
    pub async fn reload(&self) -> Result<S::Loaded, S::Error> {
        let inner = self.0.clone();
        let reloading = tokio::spawn(async move {
            let _turn = inner.turn.lock().await;
            inner.reload_in_turn(Trigger::Request).await
        });
        reloading.await.unwrap_or_else(|_| Err(S::panicked()))
    }

    /// Returns a future that reads the files again whenever one of them changes.
    ///
    /// The future never completes, except if the source has no files: then it completes at once.
    ///
    /// Changes since the files were last read are noticed, even those before the first poll. This call itself blocks
    /// for a moment, because it looks up the files. If the future is dropped after its first poll,
    /// [`watch_ended`](Self::watch_ended) returns true. If it is dropped during a reload, the files may still be put
    /// into use, but the result is not reported.
    ///
    /// # Panics
    /// The future panics if it is polled outside a tokio runtime with a timer.
    pub fn watch(self) -> impl Future<Output = ()> + Send + 'static {
        let files = self.0.source.files();
        let watches = Watches::new(self.0.events.clone(), &files);
        async move {
            if !files.is_empty() {
                let _guard = WatchGuard(&self.0.watch_ended);
                self.0.reload_on_change(watches).await;
            }
        }
    }

    /// Returns whether a future of [`watch`](Self::watch) has been dropped after its first poll.
    pub fn watch_ended(&self) -> bool {
        self.0.watch_ended.load(Ordering::Relaxed)
    }
}

/// A guard held by the future that watches the files. Sets the flag when it is dropped.
struct WatchGuard<'w>(&'w AtomicBool);

impl Drop for WatchGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What causes a reload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trigger {
    /// A call of [`FileWatch::reload`].
    Request,
    /// A changed file.
    Change,
}

impl<S: FileSource> Inner<S> {
    /// Checks the files after each event and at intervals, and reloads if one has changed. Never returns.
    async fn reload_on_change(self: &Arc<Self>, mut watches: Watches) {
        loop {
            let _ = tokio::time::timeout(self.poll_every, self.events.changed()).await;
            watches = self.follow(watches).await;
            // A failure is reported by the source.
            match self.reload_if_changed().await {
                true => watches = self.follow(watches).await,
                // At most ten checks a second in a directory in which other programs write all the time.
                false => tokio::time::sleep(STABLE).await,
            }
        }
    }

    /// Sets the watches that the files need now, on a thread for blocking work: a network file system may block.
    async fn follow(self: &Arc<Self>, mut watches: Watches) -> Watches {
        let files = self.source.files();
        let followed = tokio::task::spawn_blocking(move || {
            watches.follow(&files);
            watches
        });
        followed.await.expect("watching files does not panic")
    }

    /// Reloads if a file has changed since it was last read. Returns whether one has.
    ///
    /// If the future is dropped while the files are read, they are still put into use, but the result is not reported.
    async fn reload_if_changed(self: &Arc<Self>) -> bool {
        let _turn = self.turn.lock().await;
        let is_changed = !self.is_unchanged().await;
        if is_changed {
            let _ = self.reload_in_turn(Trigger::Change).await;
        }
        is_changed
    }

    /// Waits until the files are stable, reads them and reports the result. The caller must hold `turn`.
    async fn reload_in_turn(self: &Arc<Self>, trigger: Trigger) -> Result<S::Loaded, S::Error> {
        let mut seen = self.wait_until_stable().await;
        let inner = self.clone();
        // Files are read on a thread where waiting for a disk delays nothing else.
        let read = tokio::task::spawn_blocking(move || inner.source.read()).await;
        let (result, stamps) = read.unwrap_or_else(|_| (Err(S::panicked()), Stamps::new()));
        seen.extend(stamps);
        // A file that is named for the first time and is missing has not changed until it exists.
        for (file, stamp) in self.stamps().await.into_iter().filter(|(_, stamp)| stamp.is_none()) {
            seen.entry(file).or_insert(stamp);
        }
        *self.seen.lock() = seen;
        let rejected = if result.is_err() { Some(self.content().await) } else { None };
        let is_known = rejected.is_some() && *self.rejected.lock() == rejected;
        *self.rejected.lock() = rejected;
        if trigger == Trigger::Request || !is_known {
            self.source.report(&result);
        }
        result
    }

    /// Waits until all files were unchanged for 100 ms and none is being written. Returns their [stamps](Stamp).
    ///
    /// Does not wait longer than about five seconds.
    async fn wait_until_stable(&self) -> Stamps {
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
    async fn is_unchanged(&self) -> bool {
        let found = self.stamps().await;
        let seen = self.seen.lock();
        found.iter().all(|(file, stamp)| seen.get(file) == Some(stamp))
    }

    /// Returns the current [stamps](Stamp) of all files.
    async fn stamps(&self) -> Stamps {
        let files = self.source.files();
        // A network file system may block.
        tokio::task::spawn_blocking(move || stamps(files)).await.expect("reading metadata does not panic")
    }

    /// Returns the digest of the current contents of all files.
    async fn content(&self) -> ContentDigest {
        let files = self.source.files();
        tokio::task::spawn_blocking(move || digest(files)).await.expect("reading files does not panic")
    }
}

/// The device, inode, size and times of a file, by which a change of its content is noticed. `None` if there is no
/// file.
///
/// On systems other than Unix, only the size and the times of modification and creation.
pub type Stamp = Option<[i128; 7]>;
/// The stamps of files, by path.
pub type Stamps = BTreeMap<PathBuf, Stamp>;

/// Returns the [`Stamp`] of a file with this metadata. It is always `Some`.
#[cfg(unix)]
pub fn stamp(data: &Metadata) -> Stamp {
    use std::os::unix::fs::MetadataExt;

    let [dev, ino, size] = [data.dev(), data.ino(), data.size()].map(i128::from);
    let [mtime, mtime_nsec, ctime, ctime_nsec] =
        [data.mtime(), data.mtime_nsec(), data.ctime(), data.ctime_nsec()].map(i128::from);
    Some([dev, ino, size, mtime, mtime_nsec, ctime, ctime_nsec])
}

/// Returns the [`Stamp`] of a file with this metadata. It is always `Some`.
#[cfg(not(unix))]
pub fn stamp(data: &Metadata) -> Stamp {
    let nanoseconds = |time: std::io::Result<std::time::SystemTime>| {
        let since = time.ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        since.map_or(0, |since| since.as_nanos() as i128)
    };
    Some([0, 0, data.len().into(), nanoseconds(data.modified()), 0, nanoseconds(data.created()), 0])
}

/// Returns the current stamps of the files.
fn stamps(files: Vec<PathBuf>) -> Stamps {
    let stamp_of = |file: &PathBuf| std::fs::metadata(file).ok().as_ref().and_then(stamp);
    files.into_iter().map(|file| (file.clone(), stamp_of(&file))).collect()
}

/// Returns a digest of the paths and contents of files. For a file that cannot be read, the
/// text of the error takes the place of the content.
fn digest(mut files: Vec<PathBuf>) -> ContentDigest {
    files.sort();
    files.dedup();
    let mut digest = Sha256::new();
    for path in files {
        // Opening a pipe would block until there is a writer.
        let content = match std::fs::metadata(&path).map(|metadata| metadata.is_file()) {
            Ok(true) => complete::read(&path, complete::BYTES_MAX).map(|(bytes, _)| bytes),
            Ok(false) => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        let content = content.unwrap_or_else(|error| error.to_string().into_bytes());
        for part in [path.as_os_str().as_encoded_bytes(), &content] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
    }
    digest.finalize().into()
}

#[cfg(test)]
#[cfg(all(feature = "notify", unix))]
mod tests;
