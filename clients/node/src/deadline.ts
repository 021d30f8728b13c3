/** Deadlines of calls. */
import { InvalidInputError } from "./errors.js";

const DEADLINE_MS_MAX = 600_000;

/** Validates a deadline in milliseconds. */
export function checkDeadline(name: string, deadlineMs: number): number {
  if (typeof deadlineMs !== "number" || !(deadlineMs > 0 && deadlineMs <= DEADLINE_MS_MAX)) {
    throw new InvalidInputError(`${name} must be above 0 and at most ${DEADLINE_MS_MAX} ms, found ${String(deadlineMs)}`);
  }
  return deadlineMs;
}

/**
 * Calls `expire` after `ms` milliseconds, unless the returned function is called before.
 *
 * If the event loop was blocked, an answer may have arrived before the timer runs. One more turn of the loop reads it.
 */
export function startDeadline(ms: number, expire: () => void): () => void {
  let immediate: NodeJS.Immediate | undefined;
  const timer = setTimeout(() => {
    immediate = setImmediate(expire);
  }, ms);
  return () => {
    clearTimeout(timer);
    if (immediate) clearImmediate(immediate);
  };
}
