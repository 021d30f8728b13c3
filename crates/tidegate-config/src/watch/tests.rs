use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::events::tests::{closed, written};
use super::*;

fn text(quota: u32) -> String {
    format!("quota {quota}\n# This line makes the file longer.\n")
}

/// A source that accepts a file with a quota in its first line.
struct Quota {
    file: PathBuf,
    /// The quota in use, and the stamps of its file.
    in_use: Mutex<(String, Stamps)>,
    /// The number of successful and failed reloads.
    reported: Mutex<(u32, u32)>,
}

impl Quota {
    fn load(&self) -> Result<(), String> {
        let (bytes, metadata) = complete::read(&self.file, complete::BYTES_MAX).map_err(|error| error.to_string())?;
        let text = String::from_utf8(bytes).unwrap();
        let quota = text.lines().next().and_then(|line| line.strip_prefix("quota ")).ok_or("no quota")?;
        *self.in_use.lock() = (quota.to_owned(), [(self.file.clone(), stamp(&metadata))].into());
        Ok(())
    }
}

impl FileSource for Quota {
    type Loaded = ();
    type Error = String;

    fn files(&self) -> Vec<PathBuf> {
        vec![self.file.clone()]
    }

    fn stamps(&self) -> Stamps {
        self.in_use.lock().1.clone()
    }

    fn read(&self) -> (Result<(), String>, Stamps) {
        match self.load() {
            Ok(()) => (Ok(()), self.stamps()),
            error => (error, Stamps::new()),
        }
    }

    fn panicked() -> String {
        "panicked".to_owned()
    }

    fn report(&self, result: &Result<(), String>) {
        let mut reported = self.reported.lock();
        match result {
            Ok(()) => reported.0 += 1,
            Err(_) => reported.1 += 1,
        }
    }
}

/// A file and its watch.
struct Site {
    /// Deleted when it is dropped.
    _dir: TempDir,
    file: PathBuf,
    watch: FileWatch<Quota>,
}

impl Site {
    fn new() -> Site {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().canonicalize().unwrap().join("tidegate.toml");
        std::fs::write(&file, text(1)).unwrap();
        Site::of(dir, file)
    }

    fn of(dir: TempDir, file: PathBuf) -> Site {
        let source = Quota { file: file.clone(), in_use: Mutex::default(), reported: Mutex::default() };
        source.load().unwrap();
        Site { _dir: dir, file, watch: FileWatch::new(source) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.file.with_file_name(name)
    }

    fn write(&self, content: &str) {
        std::fs::write(&self.file, content).unwrap();
    }

    /// Writes another file and renames it over the first.
    fn rename_over(&self, content: &str) {
        let other = self.path("other");
        std::fs::write(&other, content).unwrap();
        std::fs::rename(&other, &self.file).unwrap();
    }

    fn quota(&self) -> String {
        self.watch.source().in_use.lock().0.clone()
    }

    fn reported(&self) -> (u32, u32) {
        *self.watch.source().reported.lock()
    }

    /// Polls the files, without events.
    fn poll(&self) -> tokio::task::JoinHandle<()> {
        let inner = self.watch.0.clone();
        tokio::spawn(async move { inner.reload_on_change(Watches::none(inner.events.clone())).await })
    }

    /// Waits for these numbers of successful and failed reloads. Time is virtual: it passes when nothing else is left
    /// to do.
    async fn until(&self, expected: (u32, u32)) {
        let waiting = async {
            while self.reported() != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(600), waiting).await;
        waited.unwrap_or_else(|_| panic!("expected {expected:?}, found {:?}", self.reported()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_change_is_noticed_without_an_event() {
    let site = Site::new();
    let watching = site.poll();
    for changed in 2..5 {
        site.write(&text(changed));
        let began = Instant::now();
        site.until((changed - 1, 0)).await;
        assert_eq!(site.quota(), changed.to_string());
        assert!(began.elapsed() <= POLL_EVERY + Duration::from_secs(1), "{:?}", began.elapsed());
    }
    // Unchanged files are not read again.
    tokio::time::sleep(POLL_EVERY * 10).await;
    assert_eq!(site.reported(), (3, 0));
    watching.abort();
}

/// Each way in which files are replaced, once with events and once without.
#[tokio::test(start_paused = true)]
async fn a_replaced_file_is_read_again() {
    for has_events in [false, true] {
        let site = Site::new();
        let watching = if has_events { tokio::spawn(site.watch.clone().watch()) } else { site.poll() };
        site.rename_over(&text(2));
        site.until((1, 0)).await;
        assert_eq!(site.quota(), "2");

        // Missing until it is noticed, then there again.
        std::fs::remove_file(&site.file).unwrap();
        site.until((1, 1)).await;
        assert_eq!(site.quota(), "2");
        site.write(&text(3));
        site.until((2, 1)).await;
        assert_eq!(site.quota(), "3");
        watching.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_replaced_link_on_the_way_to_the_file_is_a_change() {
    for has_events in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for quota in [1, 2] {
            std::fs::create_dir(root.join(format!("..{quota}"))).unwrap();
            std::fs::write(root.join(format!("..{quota}/tidegate.toml")), text(quota)).unwrap();
        }
        symlink("..1", root.join("..data")).unwrap();
        symlink("..data/tidegate.toml", root.join("tidegate.toml")).unwrap();
        let site = Site::of(dir, root.join("tidegate.toml"));
        let watching = if has_events { tokio::spawn(site.watch.clone().watch()) } else { site.poll() };
        symlink("..2", root.join("..next")).unwrap();
        std::fs::rename(root.join("..next"), root.join("..data")).unwrap();
        site.until((1, 0)).await;
        assert_eq!(site.quota(), "2");
        watching.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_broken_file_is_reported_once_for_each_content() {
    let site = Site::new();
    let watching = site.poll();
    site.write("limitz = 1\n");
    site.until((0, 1)).await;
    for _ in 0..3 {
        site.write("limitz = 1\n");
        tokio::time::sleep(POLL_EVERY * 2).await;
        site.rename_over("limitz = 1\n");
        tokio::time::sleep(POLL_EVERY * 2).await;
    }
    assert_eq!((site.reported(), site.quota()), ((0, 1), "1".to_owned()));
    site.write("limitz = 2\n");
    site.until((0, 2)).await;
    // A reload that was requested is always reported.
    assert_eq!(site.watch.reload().await, Err("no quota".to_owned()));
    assert_eq!(site.reported(), (0, 3));
    site.write(&text(2));
    site.until((1, 3)).await;
    assert_eq!(site.quota(), "2");
    // It was usable in between, so the same error is news.
    site.write("limitz = 2\n");
    site.until((1, 4)).await;
    watching.abort();
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_being_written_is_read_after_it_is_closed() {
    let site = Site::new();
    let events = &site.watch.0.events;
    events.watch_for([site.file.clone()].into());
    site.write("# half a file");
    events.handle(written(&site.file));
    let reloading = tokio::spawn({
        let watch = site.watch.clone();
        async move { watch.reload().await.map(|_| ()) }
    });
    tokio::time::sleep(STABLE_WAIT_MAX - Duration::from_secs(1)).await;
    assert_eq!(site.reported(), (0, 0), "it is still being written");
    site.write(&text(2));
    events.handle(closed(&site.file));
    reloading.await.unwrap().unwrap();
    assert_eq!(site.quota(), "2");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_never_closed_is_read_after_five_seconds() {
    let site = Site::new();
    site.watch.0.events.watch_for([site.file.clone()].into());
    site.write("# half a file\n");
    site.watch.0.events.handle(written(&site.file));
    let began = Instant::now();
    assert_eq!(site.watch.reload().await, Err("no quota".to_owned()));
    assert!(began.elapsed() >= STABLE_WAIT_MAX && began.elapsed() <= STABLE_WAIT_MAX * 2, "{:?}", began.elapsed());
    assert_eq!(site.quota(), "1");
}

#[tokio::test(start_paused = true)]
async fn a_file_that_grows_is_read_after_it_has_stopped() {
    let site = Site::new();
    let (file, whole) = (site.file.clone(), text(2));
    let growing = tokio::spawn(async move {
        let mut pieces = (0..=whole.len()).step_by(7).map(|end| &whole[..end]).chain([whole.as_str()]);
        for piece in pieces.by_ref() {
            std::fs::write(&file, piece).unwrap();
            tokio::time::sleep(STABLE / 2).await;
        }
    });
    site.watch.reload().await.unwrap();
    assert!(growing.is_finished(), "it was read while it grew");
    assert_eq!(site.quota(), "2");
}

#[test]
fn a_digest_is_that_of_names_and_contents() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let write = |name: &str, content: &str| std::fs::write(path(name), content).unwrap();
    let digest_of = |names: &[&str]| digest(names.iter().map(|name| path(name)).collect());
    write("a", "1");
    write("b", "2");
    let both = digest_of(&["a", "b"]);
    assert_eq!(digest_of(&["b", "a", "a"]), both);
    write("b", "2");
    assert_eq!(digest_of(&["a", "b"]), both);
    let others = [digest_of(&["a"]), digest_of(&["a", "missing"]), digest_of(&["a", "b", "missing"])];
    write("b", "3");
    let changed = digest_of(&["a", "b"]);
    for (index, other) in others.iter().chain([&changed]).enumerate() {
        assert_ne!(*other, both, "{index}");
    }
}
