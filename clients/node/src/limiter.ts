import type { Decision } from "./decision.js";
import type { Key } from "./key.js";

/** Options of a check. */
export interface CheckOptions {
  /** The units to charge on each limit. 0 charges nothing. Defaults to 1. */
  cost?: number;
}

/** A limiter that middleware can use: the service, or the script on Redis. */
export interface Limiter {
  /** Decides whether `key` may use units of one or several limits: all are charged, or none. */
  check(key: Key, limits: string | readonly string[], options?: CheckOptions & { receipt?: boolean }): Promise<Decision>;
  /** Gives back the units of an admission, at most once. Returns whether units were given back. */
  refund(decision: Decision): Promise<boolean>;
}
