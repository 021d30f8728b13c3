/**
 * The names of the keys in Redis, which clients in every language construct alike.
 *
 *     tidegate:tg2:{user:42}:sliding:60000000
 *     prefix   │    subject  algorithm and window
 *              version of the state
 *
 * The subject is the hash tag, so all limits of one subject are in one slot of a Cluster. Bytes that could break the
 * layout are escaped, so no two subjects share a key.
 */
import { createHash } from "node:crypto";

import { InvalidInputError, quoted } from "./errors.js";
import type { Limit } from "./limit.js";

/** The version of the state in Redis that the embedded script reads and writes. */
export const STATE_VERSION = "tg2";

const SUBJECT_BYTES_MAX = 64 * 1024;
const PART_BYTES_MAX = 128;
const PREFIX_BYTES_MAX = 64;

/** What is counted: text, which is encoded as UTF-8, or bytes. At most 64 KiB. */
export type Key = string | Uint8Array;

/** Builds the keys of one prefix. */
export class KeyBuilder {
  readonly #start: string;

  /** @throws {InvalidInputError} unless the prefix is 1 to 64 printable ASCII characters without braces and spaces. */
  constructor(prefix: string) {
    if (typeof prefix !== "string" || !/^[!-z|~]+$/.test(prefix) || prefix.length > PREFIX_BYTES_MAX) {
      throw new InvalidInputError(
        `a key prefix must be 1 to ${PREFIX_BYTES_MAX} printable ASCII characters without braces or spaces, ` +
          `found ${quoted(prefix)}`,
      );
    }
    this.#start = `${prefix}:${STATE_VERSION}:{`;
  }

  /** Returns the key of the counter of a subject under a limit. */
  counter(key: Key, limit: Limit): string {
    return `${this.#start}${subjectPart(key)}}:${limit.algorithm}:${limit.windowUs}`;
  }

  /** Returns the key of the ban of a subject. The subject is banned while the key exists. */
  ban(key: Key): string {
    return `${this.#start}${subjectPart(key)}}:ban`;
  }
}

/** Returns the bytes of a key. */
export function keyBytes(key: Key): Uint8Array {
  if (typeof key === "string") {
    // A lone surrogate has no UTF-8 form. Encoding would replace it, and different keys would count together.
    if (/[\uD800-\uDFFF]/u.test(key)) throw new InvalidInputError("a key must be well-formed Unicode text or bytes");
  } else if (!(key instanceof Uint8Array)) {
    throw new InvalidInputError(`a key must be a string or a Uint8Array, found ${key === null ? "null" : typeof key}`);
  }
  const bytes = typeof key === "string" ? Buffer.from(key) : key;
  if (bytes.length > SUBJECT_BYTES_MAX) {
    throw new InvalidInputError(`a key can have at most ${SUBJECT_BYTES_MAX} bytes; this one has ${bytes.length}`);
  }
  return bytes;
}

/** Returns the key as text, for JSON. Fails if its bytes are not UTF-8. */
export function keyText(key: Key): string {
  const bytes = keyBytes(key);
  if (typeof key === "string") return key;
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch (cause) {
    throw new InvalidInputError("a key for the service must be UTF-8; RedisLimiter accepts any bytes", { cause });
  }
}

/** Escapes a subject. Longer than 128 bytes, it becomes `%h` and its SHA-256; an empty one becomes `%e`. */
function subjectPart(key: Key): string {
  if (typeof key === "string" && key.length <= PART_BYTES_MAX && /^[!-$&-z|~]+$/.test(key)) return key;
  const bytes = keyBytes(key);
  if (bytes.length === 0) return "%e";
  let part = "";
  for (const byte of bytes) {
    const isLiteral = byte >= 0x21 && byte <= 0x7e && byte !== 0x25 && byte !== 0x7b && byte !== 0x7d;
    part += isLiteral ? String.fromCharCode(byte) : `%${byte.toString(16).toUpperCase().padStart(2, "0")}`;
    if (part.length > PART_BYTES_MAX) return `%h${createHash("sha256").update(bytes).digest("hex")}`;
  }
  return part;
}
