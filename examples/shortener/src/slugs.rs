//! Storage of links: in memory, and on Redis if several instances share them.
//!
//! The links that this instance has recently created or followed are in its memory, also with Redis. So links in use
//! work even if Redis is unavailable. The memory is bounded, and the oldest links are evicted. With Redis they are read
//! from there again. Without Redis they are lost, so memory alone is meant for trials.
//!
//! On Redis a slug is set only if it is free (`NX`), so that instances never overwrite each other's links. Links
//! expire, so that spam is removed after a while.
//!
//! **While Redis is unavailable**, links are still created. They work on the instance that created them, and a task
//! saves them to Redis later. The number of unsaved links is bounded, and none is evicted: at the bound no link is
//! created.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidegate::redis::{RedisStore, Reply};
use tokio::sync::Notify;

/// Length of a slug: 62^7 is 3.5 × 10^12, so that links are hard to guess.
const SLUG_LENGTH: usize = 7;
/// Maximum number of links in memory: 20 MB with the longest URLs.
const IN_MEMORY_MAX: usize = 10_000;
/// Maximum number of links that are not saved to Redis yet.
const UNSAVED_MAX: usize = 10_000;
/// Lifetime of a link on Redis: a year.
const TTL_SECONDS: &str = "31536000";
/// Pause between attempts to save links while Redis is unavailable.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of slugs to try for a new link. A second one is hardly ever needed.
const DRAWS_MAX: usize = 8;

/// The links. Clones share them.
#[derive(Clone)]
pub(crate) struct Slugs(Arc<Inner>);

struct Inner {
    memory: Mutex<Memory>,
    redis: Option<SlugStore>,
    /// Notified when there is a link to save.
    has_unsaved: Notify,
}

/// Links on Redis, with the deadline of a command.
struct SlugStore {
    redis: RedisStore,
    deadline: Duration,
}

#[derive(Clone)]
struct Link {
    slug: String,
    url: Arc<str>,
}

/// The error of a link command on Redis that failed or timed out.
#[derive(Debug)]
pub(crate) struct Away;

/// The reason why no link was created.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum NotMade {
    /// All random slugs were taken.
    NoFreeSlug,
    /// Redis is unavailable, and the maximum number of links is waiting for it.
    NoPlace,
}

impl Slugs {
    /// Creates a storage in process memory.
    pub(crate) fn in_memory() -> Slugs {
        Slugs::new(None)
    }

    /// Creates a storage on Redis, shared with other instances. Spawns a task that saves links after an outage.
    pub(crate) fn on_redis(redis: RedisStore, deadline: Duration) -> Slugs {
        let slugs = Slugs::new(Some(SlugStore { redis, deadline }));
        tokio::spawn(save_later(slugs.clone()));
        slugs
    }

    fn new(redis: Option<SlugStore>) -> Slugs {
        Slugs(Arc::new(Inner { memory: Mutex::default(), redis, has_unsaved: Notify::new() }))
    }

    /// Creates a link and returns its slug.
    ///
    /// The link works on this instance at once. If Redis is unavailable, it works on other instances once it is saved.
    pub(crate) async fn add(&self, url: &str) -> Result<String, NotMade> {
        for _ in 0..DRAWS_MAX {
            let link = Link { slug: draw(), url: url.into() };
            if self.0.memory.lock().get(&link.slug).is_some() {
                continue;
            }
            let saved = match &self.0.redis {
                Some(store) => store.set(&link).await,
                None => Ok(true),
            };
            match saved {
                Ok(true) => self.0.memory.lock().keep(&link),
                Ok(false) => continue,
                Err(Away) => self.keep_unsaved(&link)?,
            }
            return Ok(link.slug);
        }
        Err(NotMade::NoFreeSlug)
    }

    fn keep_unsaved(&self, link: &Link) -> Result<(), NotMade> {
        let is_first_refused = match self.0.memory.lock().keep_unsaved(link) {
            Ok(()) => {
                self.0.has_unsaved.notify_one();
                return Ok(());
            }
            Err(refused) => refused == 1,
        };
        if is_first_refused {
            tracing::warn!("{UNSAVED_MAX} links are waiting for Redis; no more are created until it is available");
        }
        Err(NotMade::NoPlace)
    }

    /// Returns the number of links that are not saved to Redis yet.
    pub(crate) fn unsaved(&self) -> usize {
        self.0.memory.lock().unsaved.len()
    }

    /// Returns the URL of a slug, or `None` if there is no such link.
    ///
    /// # Errors
    /// If the link is not in memory and Redis does not answer.
    pub(crate) async fn find(&self, slug: &str) -> Result<Option<Arc<str>>, Away> {
        if slug.len() != SLUG_LENGTH || !slug.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(None);
        }
        if let Some(url) = self.0.memory.lock().get(slug) {
            return Ok(Some(url.clone()));
        }
        let Some(store) = &self.0.redis else { return Ok(None) };
        let url = store.get(slug).await?;
        if let Some(url) = &url {
            self.0.memory.lock().keep(&Link { slug: slug.to_owned(), url: url.clone() });
        }
        Ok(url)
    }
}

/// The links in memory.
#[derive(Default)]
struct Memory {
    urls: HashMap<String, Arc<str>>,
    oldest_first: VecDeque<String>,
    /// Links that are not saved to Redis yet.
    unsaved: BTreeMap<String, Arc<str>>,
    /// The number of links that were not created in the current outage because too many were unsaved.
    refused: u64,
}

impl Memory {
    fn get(&self, slug: &str) -> Option<&Arc<str>> {
        self.urls.get(slug).or_else(|| self.unsaved.get(slug))
    }

    /// Adds a link, and evicts the oldest one if there are too many.
    fn keep(&mut self, link: &Link) {
        if self.urls.insert(link.slug.clone(), link.url.clone()).is_some() {
            return;
        }
        self.oldest_first.push_back(link.slug.clone());
        if self.oldest_first.len() > IN_MEMORY_MAX
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.urls.remove(&oldest);
        }
    }

    /// Adds an unsaved link. If there are too many, returns how many were refused in this outage.
    fn keep_unsaved(&mut self, link: &Link) -> Result<(), u64> {
        if self.unsaved.len() == UNSAVED_MAX {
            self.refused += 1;
            return Err(self.refused);
        }
        self.unsaved.insert(link.slug.clone(), link.url.clone());
        Ok(())
    }

    fn first_unsaved(&self) -> Option<Link> {
        let (slug, url) = self.unsaved.first_key_value()?;
        Some(Link { slug: slug.clone(), url: url.clone() })
    }
}

/// Saves the links that were created while Redis was unavailable. Runs forever.
async fn save_later(slugs: Slugs) {
    let Inner { memory, redis: Some(store), has_unsaved } = &*slugs.0 else { return };
    loop {
        has_unsaved.notified().await;
        if memory.lock().unsaved.is_empty() {
            continue;
        }
        tracing::warn!("Redis is unavailable: links are created without a limit and work on this instance only");
        let saved = save_all(memory, store).await;
        let refused = std::mem::take(&mut memory.lock().refused);
        tracing::info!(saved, refused, "Redis is available again: the links created meanwhile are saved");
    }
}

/// Saves all unsaved links and returns how many were saved. Retries until none is left.
async fn save_all(memory: &Mutex<Memory>, store: &SlugStore) -> u64 {
    let mut saved = 0;
    loop {
        let Some(link) = memory.lock().first_unsaved() else { return saved };
        let Ok(is_ours) = store.set(&link).await else {
            tokio::time::sleep(RETRY_EVERY).await;
            continue;
        };
        let mut memory = memory.lock();
        memory.unsaved.remove(&link.slug);
        if is_ours {
            memory.keep(&link);
            saved += 1;
        } else {
            tracing::error!("a link created while Redis was unavailable is lost: another instance uses its slug");
        }
    }
}

impl SlugStore {
    async fn get(&self, slug: &str) -> Result<Option<Arc<str>>, Away> {
        let reply = self.ask(&["GET", &key(slug)]).await?;
        Ok(reply.as_text().map(Into::into))
    }

    /// Saves a link. Returns `false` if the slug belongs to another URL.
    ///
    /// Returns `true` if the same link is already saved, since an earlier call may have timed out after it was
    /// executed.
    async fn set(&self, link: &Link) -> Result<bool, Away> {
        let before = self.ask(&["SET", &key(&link.slug), &link.url, "NX", "GET", "EX", TTL_SECONDS]).await?;
        Ok(before == Reply::Nil || before.as_text() == Some(&*link.url))
    }

    /// Sends a command and waits for its reply until the deadline.
    async fn ask(&self, command: &[&str]) -> Result<Reply, Away> {
        match tokio::time::timeout(self.deadline, self.redis.command(command)).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(_)) | Err(_) => Err(Away),
        }
    }
}

fn key(slug: &str) -> String {
    format!("shortener:slug:{slug}")
}

/// Returns a random slug.
fn draw() -> String {
    std::iter::repeat_with(fastrand::alphanumeric).take(SLUG_LENGTH).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_link_leads_to_its_url_and_nothing_else_does() {
        let slugs = Slugs::in_memory();
        let slug = slugs.add("https://example.com/").await.unwrap();
        assert_eq!(slugs.find(&slug).await.unwrap().as_deref(), Some("https://example.com/"));
        for unknown in ["", "0000000", "../../x", &slug[1..]] {
            assert_eq!(slugs.find(unknown).await.unwrap(), None, "{unknown:?}");
        }
    }

    /// Returns a store whose server does not exist: no process listens on the port of a closed listener.
    fn redis_that_is_away() -> RedisStore {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        RedisStore::builder(format!("redis://{free}")).build().unwrap()
    }

    #[tokio::test]
    async fn unsaved_links_are_never_evicted_and_none_is_created_beyond_the_bound() {
        let slugs = Slugs::on_redis(redis_that_is_away(), Duration::from_millis(25));
        let mut made = Vec::new();
        for _ in 0..UNSAVED_MAX {
            made.push(slugs.add("https://example.com/").await.unwrap());
        }
        for refused in 1..=3 {
            assert_eq!(slugs.add("https://example.com/").await, Err(NotMade::NoPlace));
            assert_eq!((slugs.unsaved(), slugs.0.memory.lock().refused), (UNSAVED_MAX, refused));
        }
        // Other links that are followed meanwhile evict none of them.
        for n in 0..=IN_MEMORY_MAX {
            slugs.0.memory.lock().keep(&Link { slug: format!("{n:07}"), url: "https://example.com/".into() });
        }
        for slug in &made {
            assert!(slugs.find(slug).await.unwrap().is_some(), "{slug}");
        }
    }

    #[tokio::test]
    async fn a_slug_is_set_once_and_for_the_same_url_again() {
        let redis = tidegate_testkit::server::Server::redis();
        let store = RedisStore::builder(redis.url()).build().unwrap();
        let store = SlugStore { redis: store, deadline: Duration::from_secs(10) };
        let link = |url: &str| Link { slug: "abcdefg".to_owned(), url: url.into() };
        assert!(store.set(&link("https://example.com/")).await.unwrap());
        assert!(store.set(&link("https://example.com/")).await.unwrap(), "the same link again");
        assert!(!store.set(&link("https://example.com/other")).await.unwrap(), "the slug of another link");
        assert_eq!(store.get("abcdefg").await.unwrap().as_deref(), Some("https://example.com/"));
    }

    #[tokio::test]
    async fn the_memory_is_bounded_and_evicts_the_oldest_links() {
        let slugs = Slugs::in_memory();
        let first = slugs.add("https://example.com/first").await.unwrap();
        let second = slugs.add("https://example.com/second").await.unwrap();
        for _ in 0..IN_MEMORY_MAX - 1 {
            slugs.add("https://example.com/").await.unwrap();
        }
        assert_eq!(slugs.find(&first).await.unwrap(), None);
        assert!(slugs.find(&second).await.unwrap().is_some());
        let memory = slugs.0.memory.lock();
        assert_eq!((memory.urls.len(), memory.oldest_first.len()), (IN_MEMORY_MAX, IN_MEMORY_MAX));
    }
}
