//! Which slug stands for which URL: in memory, and on Redis where instances share them.
//!
//! Every link that this instance made or followed lately is in its memory, with or without Redis, so a link that is
//! in use is followed whatever Redis does. The memory is bounded: the oldest links leave it. With Redis they are
//! found there again; without it they are gone, which is why memory alone is for trying things out.
//!
//! On Redis a slug is set only if it is free (`NX`), so that two instances never overwrite each other's, and it expires:
//! a wave of spam goes away by itself.
//!
//! **While Redis is away** links are still made. They work on the instance that made them, and a task brings them to Redis
//! when it is back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::mpsc;
use tollgate::redis::{RedisStore, Reply};

/// 62^7 are 3.5 million million: a guess hardly ever meets a link.
const SLUG_LENGTH: usize = 7;
/// With URLs of the longest kind, 20 MB.
const IN_MEMORY_MAX: usize = 10_000;
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
    redis: Option<Redis>,
}

struct Redis {
    store: SlugStore,
    unsaved: mpsc::Sender<Link>,
}

/// Slugs on Redis, and how long anybody waits for it.
#[derive(Clone)]
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

impl Slugs {
    /// Links in the memory of this process.
    pub(crate) fn in_memory() -> Slugs {
        Slugs(Arc::new(Inner { memory: Mutex::default(), redis: None }))
    }

    /// Links on Redis, shared with other instances.
    pub(crate) fn on_redis(redis: RedisStore, deadline: Duration) -> Slugs {
        let store = SlugStore { redis, deadline };
        let (unsaved, links) = mpsc::channel(IN_MEMORY_MAX);
        tokio::spawn(save_later(store.clone(), links));
        Slugs(Arc::new(Inner { memory: Mutex::default(), redis: Some(Redis { store, unsaved }) }))
    }

    /// Makes a link. None only if one drawn slug after the other was taken.
    pub(crate) async fn add(&self, url: &str) -> Option<String> {
        for _ in 0..DRAWS_MAX {
            let link = Link { slug: draw(), url: url.into() };
            if self.0.memory.lock().urls.contains_key(&link.slug) || !self.save(&link).await {
                continue;
            }
            self.0.memory.lock().keep(&link);
            return Some(link.slug);
        }
        None
    }

    /// The URL behind a slug.
    pub(crate) async fn find(&self, slug: &str) -> Result<Option<Arc<str>>, Away> {
        if slug.len() != SLUG_LENGTH || !slug.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Ok(None);
        }
        if let Some(url) = self.0.memory.lock().urls.get(slug) {
            return Ok(Some(url.clone()));
        }
        let Some(redis) = &self.0.redis else { return Ok(None) };
        let url = redis.store.get(slug).await?;
        if let Some(url) = &url {
            self.0.memory.lock().keep(&Link { slug: slug.to_owned(), url: url.clone() });
        }
        Ok(url)
    }

    /// False if the slug is taken.
    async fn save(&self, link: &Link) -> bool {
        let Some(redis) = &self.0.redis else { return true };
        match redis.store.set(link).await {
            Ok(is_new) => is_new,
            Err(Away) => {
                // If even the list of the unsaved is full, the link stays on this instance.
                let _ = redis.unsaved.try_send(link.clone());
                true
            }
        }
    }
}

/// Links that are known without asking.
#[derive(Default)]
struct Memory {
    urls: HashMap<String, Arc<str>>,
    oldest_first: VecDeque<String>,
}

impl Memory {
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
}

/// Brings what was made while Redis was away to Redis, once it is back.
async fn save_later(store: SlugStore, mut unsaved: mpsc::Receiver<Link>) {
    while let Some(mut link) = unsaved.recv().await {
        tracing::warn!("Redis is away: links are made without a limit, and work on this instance alone");
        let mut saved = 0_u64;
        loop {
            // A slug that is taken is ours: a call that came too late for its answer may have set it.
            while store.set(&link).await.is_err() {
                tokio::time::sleep(RETRY_EVERY).await;
            }
            saved += 1;
            match unsaved.try_recv() {
                Ok(next) => link = next,
                Err(_) => break,
            }
        }
        tracing::info!(saved, "Redis is back, and has the links that were made meanwhile");
    }
}

impl SlugStore {
    async fn get(&self, slug: &str) -> Result<Option<Arc<str>>, Away> {
        let reply = self.ask(&["GET", &key(slug)]).await?;
        Ok(reply.as_text().map(Into::into))
    }

    /// Whether the slug was free.
    async fn set(&self, link: &Link) -> Result<bool, Away> {
        let reply = self.ask(&["SET", &key(&link.slug), &link.url, "NX", "EX", TTL_SECONDS]).await?;
        Ok(reply != Reply::Nil)
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
