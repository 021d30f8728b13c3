// Storage of links: on Redis, which several instances share, and in memory.
//
// The links that this instance has recently created or followed are in its memory. So links in use work even if Redis is
// unavailable. The memory is bounded, and the oldest links are evicted.
//
// On Redis a slug is set only if it is free (`NX`), so that instances never overwrite each other's links. Links expire,
// so that spam is removed after a while.
//
// While Redis is unavailable, links are still created. They work on the instance that created them, and are saved to
// Redis later. The number of unsaved links is bounded, and none is evicted: at the bound no link is created.
import { randomInt } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { log } from "./log.js";

/** Length of a slug: 62^7 is 3.5 × 10^12, so that links are hard to guess. */
const SLUG_LENGTH = 7;
const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const IN_MEMORY_MAX = 10_000;
const UNSAVED_MAX = 10_000;
/** Lifetime of a link on Redis: a year. */
const TTL_SECONDS = 31_536_000;
const RETRY_EVERY_MS = 1_000;
/** Maximum number of slugs to try for a new link. A second one is hardly ever needed. */
const DRAWS_MAX = 8;

/** The error of a link command on Redis that failed or timed out. */
export class Away extends Error {}
/** The error of a link that was not created because all random slugs were taken. */
export class NoFreeSlug extends Error {}
/** The error of a link that was not created because too many are waiting for Redis. */
export class NoPlace extends Error {}

export class Slugs {
  #redis;
  #deadlineMs;
  /** The links in memory, oldest first. */
  #urls = new Map();
  /** The links that are not saved to Redis yet. */
  #unsaved = new Map();
  /** The number of links that were not created in the current outage because too many were unsaved. */
  #refused = 0;
  #isSaving = false;

  constructor(redis, deadlineMs) {
    this.#redis = redis;
    this.#deadlineMs = deadlineMs;
  }

  /** Returns the number of links that are not saved to Redis yet. */
  get unsaved() {
    return this.#unsaved.size;
  }

  /** Creates a link and returns its slug. Throws `NoFreeSlug` or `NoPlace`. */
  async add(url) {
    for (let draw = 0; draw < DRAWS_MAX; draw++) {
      const slug = randomSlug();
      if (this.#urls.has(slug) || this.#unsaved.has(slug)) continue;
      try {
        if (!(await this.#save(slug, url))) continue;
        this.#keep(slug, url);
      } catch (error) {
        if (!(error instanceof Away)) throw error;
        this.#keepUnsaved(slug, url);
      }
      return slug;
    }
    throw new NoFreeSlug();
  }

  /** Returns the URL of a slug, or `undefined` if there is no such link. Throws `Away` if that is unknown. */
  async find(slug) {
    if (!/^[0-9A-Za-z]{7}$/.test(slug)) return undefined;
    const known = this.#urls.get(slug) ?? this.#unsaved.get(slug);
    if (known !== undefined) return known;
    const url = (await this.#within(() => this.#redis.get(key(slug)))) ?? undefined;
    if (url !== undefined) this.#keep(slug, url);
    return url;
  }

  #keep(slug, url) {
    this.#urls.set(slug, url);
    if (this.#urls.size > IN_MEMORY_MAX) this.#urls.delete(this.#urls.keys().next().value);
  }

  #keepUnsaved(slug, url) {
    if (this.#unsaved.size === UNSAVED_MAX) {
      if (this.#refused++ === 0) {
        log("WARN", `${UNSAVED_MAX} links are waiting for Redis; no more are created until it is available`);
      }
      throw new NoPlace();
    }
    this.#unsaved.set(slug, url);
    if (!this.#isSaving) void this.#saveLater();
  }

  /** Saves the links that were created while Redis was unavailable. Retries until none is left. */
  async #saveLater() {
    this.#isSaving = true;
    log("WARN", "Redis is unavailable: links are created without a limit and work on this instance only");
    let saved = 0;
    while (this.#unsaved.size > 0) {
      const [slug, url] = this.#unsaved.entries().next().value;
      try {
        const isOurs = await this.#save(slug, url);
        this.#unsaved.delete(slug);
        if (isOurs) {
          this.#keep(slug, url);
          saved++;
        } else {
          log("ERROR", "a link created while Redis was unavailable is lost: another instance uses its slug");
        }
      } catch {
        await sleep(RETRY_EVERY_MS);
      }
    }
    const refused = this.#refused;
    [this.#refused, this.#isSaving] = [0, false];
    log("INFO", `Redis is available again: the links created meanwhile are saved saved=${saved} refused=${refused}`);
  }

  /**
   * Saves a link. Returns `false` if the slug belongs to another URL.
   *
   * Returns `true` if the same link is already saved, since an earlier call may have timed out after it was executed.
   */
  async #save(slug, url) {
    const before = await this.#within(() => this.#redis.set(key(slug), url, "EX", TTL_SECONDS, "NX", "GET"));
    return before === null || before === url;
  }

  /** Runs a command until the deadline. Throws `Away` if it fails or times out. */
  async #within(command) {
    const deadline = new AbortController();
    const timedOut = sleep(this.#deadlineMs, undefined, { signal: deadline.signal }).then(() => {
      throw new Away();
    });
    try {
      return await Promise.race([command(), timedOut]);
    } catch {
      throw new Away();
    } finally {
      deadline.abort();
    }
  }
}

function key(slug) {
  return `shortener:slug:${slug}`;
}

function randomSlug() {
  return Array.from({ length: SLUG_LENGTH }, () => ALPHABET[randomInt(ALPHABET.length)]).join("");
}
