use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;

use super::{FileWatch, Observed, RejectedRules, RulesWatcher};
use crate::config::Loader;
use crate::engine::Engine;
use crate::limiter::Limiter;

fn rules(quota: u32) -> String {
    format!("[[rules]]\nname = 'all'\nby = 'ip'\nlimits = ['{quota}/h']\n")
}

/// A configuration file, its watch, and the results that were reported.
struct Site {
    /// Deleted when it is dropped.
    _dir: TempDir,
    file: PathBuf,
    watch: FileWatch<Observed>,
    /// The number of successful and failed reloads.
    reported: Arc<Mutex<(u32, u32)>>,
}

impl Site {
    fn new() -> Site {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().canonicalize().unwrap().join("tidegate.toml");
        std::fs::write(&file, rules(1)).unwrap();
        Site::of(dir, file)
    }

    fn of(dir: TempDir, file: PathBuf) -> Site {
        let loaded = Loader::new().load(&file).unwrap();
        let engine = Engine::new(Limiter::memory(), loaded.rules.clone());
        let reported = Arc::new(Mutex::new((0, 0)));
        let counted = reported.clone();
        let watcher = RulesWatcher::new(&file, Loader::new(), loaded, engine).on_reload(move |result| {
            let mut counted = counted.lock();
            match result {
                Ok(_) => counted.0 += 1,
                Err(_) => counted.1 += 1,
            }
        });
        Site { _dir: dir, file, watch: watcher.0, reported }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.file.with_file_name(name)
    }

    fn write(&self, content: &str) {
        std::fs::write(&self.file, content).unwrap();
    }

    fn quota(&self) -> String {
        let loaded = self.watch.source().rules.loaded();
        loaded.rules.rules()[0].policies_of_all().map(|policy| policy.limit().to_string()).collect()
    }

    fn reported(&self) -> (u32, u32) {
        *self.reported.lock()
    }

    fn watch(&self) -> tokio::task::JoinHandle<()> {
        tokio::spawn(self.watch.clone().watch())
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

fn error_of(result: Result<Arc<crate::config::Loaded>, RejectedRules>) -> String {
    match result.unwrap_err() {
        RejectedRules::Invalid(report) => report.to_string(),
        RejectedRules::Panicked => "panicked".to_owned(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_changed_file_replaces_the_rules_and_a_broken_one_does_not() {
    let site = Site::new();
    let watching = site.watch();
    site.write(&rules(2));
    site.until((1, 0)).await;
    assert_eq!(site.quota(), "2/h");
    site.write("limitz = 1\n");
    site.until((1, 1)).await;
    assert_eq!(site.quota(), "2/h");
    watching.abort();
}

#[tokio::test(start_paused = true)]
async fn a_missing_file_that_a_rejected_configuration_names_is_read_when_it_appears() {
    let site = Site::new();
    let watching = site.watch();
    site.write(&format!("keys_file = 'keys.toml'\n{}", rules(2)));
    site.until((0, 1)).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(site.reported(), (0, 1));
    std::fs::write(site.path("keys.toml"), "[[keys]]\nkey = 'planted-key'\n").unwrap();
    site.until((1, 1)).await;
    assert_eq!(site.quota(), "2/h");
    watching.abort();
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_function_of_the_application_does_not_end_the_watch() {
    let site = Site::new();
    let watch = site.watch;
    let watch = FileWatch::map(watch, |mut observed| {
        observed.on_reload.insert(0, Box::new(|_| panic!("planted")));
        observed
    });
    let site = Site { watch, ..site };
    let watching = site.watch();
    for changed in 2..4 {
        site.write(&rules(changed));
        site.until((changed - 1, 0)).await;
    }
    watching.abort();
}

/// To open it would wait for a writer, and block every later reload.
#[tokio::test(start_paused = true)]
async fn a_pipe_in_place_of_the_file_is_rejected() {
    let site = Site::new();
    std::fs::remove_file(&site.file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&site.file).status().unwrap().success());
    let error = error_of(site.watch.reload().await);
    assert!(error.contains("not a regular file"), "{error}");
    assert_eq!(site.quota(), "1/h");
}

#[tokio::test(start_paused = true)]
async fn a_truncated_file_is_rejected() {
    let site = Site::new();
    site.write("# half a file\n");
    let error = error_of(site.watch.reload().await);
    assert!(error.contains("rules-gone"), "{error}");
    assert_eq!(site.quota(), "1/h");
}
