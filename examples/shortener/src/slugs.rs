//! Which slug stands for which URL: in memory, and on Redis where instances share them.
//!
//! Every link that this instance made or followed lately is in its memory, with or without Redis, so a link that is
//! in use is followed whatever Redis does. The memory is bounded: the oldest links leave it. With Redis they are
//! found there again; without it they are gone, which is why memory alone is for trying things out.
//!
//! On Redis a slug is set only if it is free (`NX`), so that two instances never overwrite each other's, and it expires:
//! a wave of spam goes away by itself.
//!
//! **While Redis is away** links are still made. They work on the instance that made them, which keeps each until a task has
//! brought it to Redis. That place is bounded, too, and nothing leaves it early: when it is full, no link is promised.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tollgate::redis::{RedisStore, Reply};

/// 62^7 are 3.5 million million: a guess hardly ever meets a link.
const SLUG_LENGTH: usize = 7;
/// With URLs of the longest kind, 20 MB.
const IN_MEMORY_MAX: usize = 10_000;
/// As many again, for those that Redis does not have yet.
const UNSAVED_MAX: usize = 10_000;
/// A year.
const TTL_SECONDS: &str = "31536000";
/// How often Redis is tried while it is away.
const RETRY_EVERY: Duration = Duration::from_secs(1);
/// Draws before giving up. A second one is already hard to see.
const DRAWS_MAX: usize = 8;

/// All links. Clones share them.
#[derive(Clone)]
pub(crate) struct Slugs(Arc<Inner>);

struct Inner {
    memory: Mutex<Memory>,
    redis: Option<SlugStore>,
    /// Told when there is something to save.
    has_unsaved: Notify,
}

/// Slugs on Redis, and how long anybody waits for it.
struct SlugStore {
    redis: RedisStore,
    deadline: Duration,
}

#[derive(Clone)]
struct Link {
    slug: String,
    url: Arc<str>,
}

/// Redis does not answer, and only it would know.
#[derive(Debug)]
pub(crate) struct Away;

/// Why no link was made.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum NotMade {
    /// One drawn slug after the other was taken.
    NoFreeSlug,
    /// Redis is away, and there is no place to keep another link for it.
    NoPlace,
}

impl Slugs {
    /// Links in the memory of this process.
    pub(crate) fn in_memory() -> Slugs {
        Slugs::new(None)
    }

    /// Links on Redis, shared with other instances.
    pub(crate) fn on_redis(redis: RedisStore, deadline: Duration) -> Slugs {
        let slugs = Slugs::new(Some(SlugStore { redis, deadline }));
        tokio::spawn(save_later(slugs.clone()));
        slugs
    }

    fn new(redis: Option<SlugStore>) -> Slugs {
        Slugs(Arc::new(Inner { memory: Mutex::default(), redis, has_unsaved: Notify::new() }))
    }

    /// Makes a link that will be found, here at once and wherever Redis is shared as soon as it can be asked.
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
            tracing::warn!("{UNSAVED_MAX} links wait for Redis, and no more are made until it is back");
        }
        Err(NotMade::NoPlace)
    }

    /// How many links are promised that Redis does not have yet.
    pub(crate) fn unsaved(&self) -> usize {
        self.0.memory.lock().unsaved.len()
    }

    /// The URL behind a slug.
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

/// Links that are known without asking.
#[derive(Default)]
struct Memory {
    urls: HashMap<String, Arc<str>>,
    oldest_first: VecDeque<String>,
    /// Promised, and not on Redis yet.
    unsaved: BTreeMap<String, Arc<str>>,
    /// Links that were not made, since there was no place to keep them, from when Redis went away.
    refused: u64,
}

impl Memory {
    fn get(&self, slug: &str) -> Option<&Arc<str>> {
        self.urls.get(slug).or_else(|| self.unsaved.get(slug))
    }

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

    /// Keeps a link until Redis has it. If there is no place: how many have met none.
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

/// Brings what was made while Redis was away to Redis, once it is back.
async fn save_later(slugs: Slugs) {
    let Inner { memory, redis: Some(store), has_unsaved } = &*slugs.0 else { return };
    loop {
        has_unsaved.notified().await;
        if memory.lock().unsaved.is_empty() {
            continue;
        }
        tracing::warn!("Redis is away: links are made without a limit, and work on this instance alone");
        let saved = save_all(memory, store).await;
        let refused = std::mem::take(&mut memory.lock().refused);
        tracing::info!(saved, refused, "Redis is back, and has the links that were made meanwhile");
    }
}

/// How many there were. Each is found here until it is found there.
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
            tracing::error!("a link that was made meanwhile is lost: another instance has given its slug away");
        }
    }
}

impl SlugStore {
    async fn get(&self, slug: &str) -> Result<Option<Arc<str>>, Away> {
        let reply = self.ask(&["GET", &key(slug)]).await?;
        Ok(reply.as_text().map(Into::into))
    }

    /// Whether the slug stands for this URL from now on. It does so already if a call was executed whose answer came too late.
    async fn set(&self, link: &Link) -> Result<bool, Away> {
        let before = self.ask(&["SET", &key(&link.slug), &link.url, "NX", "GET", "EX", TTL_SECONDS]).await?;
        Ok(before == Reply::Nil || before.as_text() == Some(&*link.url))
    }

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

    /// Nobody listens on the port of a listener that is gone.
    fn redis_that_is_away() -> RedisStore {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        RedisStore::builder(format!("redis://{free}")).build().unwrap()
    }

    #[tokio::test]
    async fn what_waits_for_redis_is_never_forgotten_and_what_has_no_place_is_never_promised() {
        let slugs = Slugs::on_redis(redis_that_is_away(), Duration::from_millis(25));
        let mut made = Vec::new();
        for _ in 0..UNSAVED_MAX {
            made.push(slugs.add("https://example.com/").await.unwrap());
        }
        for refused in 1..=3 {
            assert_eq!(slugs.add("https://example.com/").await, Err(NotMade::NoPlace));
            assert_eq!((slugs.unsaved(), slugs.0.memory.lock().refused), (UNSAVED_MAX, refused));
        }
        // Others that are followed meanwhile push none of them out.
        for n in 0..=IN_MEMORY_MAX {
            slugs.0.memory.lock().keep(&Link { slug: format!("{n:07}"), url: "https://example.com/".into() });
        }
        for slug in &made {
            assert!(slugs.find(slug).await.unwrap().is_some(), "{slug}");
        }
    }

    #[tokio::test]
    async fn a_slug_is_set_once_and_for_the_same_url_again() {
        let redis = tollgate_testkit::server::Server::redis();
        let store = RedisStore::builder(redis.url()).build().unwrap();
        let store = SlugStore { redis: store, deadline: Duration::from_secs(10) };
        let link = |url: &str| Link { slug: "abcdefg".to_owned(), url: url.into() };
        assert!(store.set(&link("https://example.com/")).await.unwrap());
        assert!(store.set(&link("https://example.com/")).await.unwrap(), "an answer that came too late");
        assert!(!store.set(&link("https://example.com/other")).await.unwrap(), "another instance's");
        assert_eq!(store.get("abcdefg").await.unwrap().as_deref(), Some("https://example.com/"));
    }

    #[tokio::test]
    async fn the_memory_is_bounded_and_the_oldest_leave_it() {
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
