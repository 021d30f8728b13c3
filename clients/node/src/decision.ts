/** The answer to a check. */
import { rateLimitHeaders } from "./answer.js";
import type { TidegateError } from "./errors.js";

/** Where a decision comes from. `none`: nothing decided, and `onError` determined the answer. */
export type Source = "store" | "deny_cache" | "local" | "none";

/** The reason for a refusal. */
export type Reason = "rate_limited" | "banned" | "unavailable" | "path_too_long";

/** The outcome of a request, by its status: `failure` for 400 to 599, else `success`. */
export type Ending = "success" | "failure";

/** The status of one limit of a decision. Times are in seconds, exact to the microsecond on Redis. */
export interface LimitStatus {
  /** The name that headers show, such as `per-minute`. */
  readonly name: string;
  /** Whether this limit admits the request. */
  readonly allowed: boolean;
  /** The units per window. */
  readonly quota: number;
  /** The window in seconds. */
  readonly window: number;
  /** The units left. */
  readonly remaining: number;
  /** The time until the request would be admitted; `null` if never. On an admission: the time to wait (leaky-bucket). */
  readonly retryAfter: number | null;
  /** The time until one more unit is available; `null` if never. */
  readonly nextAfter: number | null;
  /** The time until all units are available; `null` if never. */
  readonly resetAfter: number | null;
  /** The charged units, if known. */
  readonly cost?: number;
  /** The largest cost that the limit can ever admit, if known. */
  readonly costMax?: number;
  /** The rule that the limit belongs to, of a decision by rules. */
  readonly rule?: string;
}

/** The response to relay for a request that the rules refused. */
export interface RefusalResponse {
  readonly status: number;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: string;
}

/** The parts from which a decision is created. */
export interface DecisionFields {
  allowed: boolean;
  source: Source;
  limits: readonly LimitStatus[];
  reason?: Reason;
  /** The time until a ban ends or the store may be available again, in seconds; `null` for a ban without an end. */
  refusedFor?: number | null;
  /** The time of the decision in Unix microseconds. */
  atUs?: number;
  headers?: Readonly<Record<string, string>>;
  message?: string;
  receipt?: string;
  refundOn?: readonly Ending[];
  response?: RefusalResponse;
  error?: TidegateError;
  /** What a refund needs, for the limiter that made the decision. */
  charges?: unknown;
}

/** The answer to a check: whether the request may proceed, and the status of each limit, in the order given. */
export interface Decision {
  /** Whether the request may proceed. */
  readonly allowed: boolean;
  /** Where the decision comes from. */
  readonly source: Source;
  /** The status of each limit, in the order given. Empty for a ban, and if nothing was decided. */
  readonly limits: readonly LimitStatus[];
  /** The reason for a refusal; `null` for an admission. */
  readonly reason: Reason | null;
  /**
   * The time in seconds until the request would be admitted; `null` if never.
   *
   * 0 for an admission, except for `leaky-bucket`: then it is the time to wait before proceeding.
   */
  readonly retryAfter: number | null;
  /** The quota of the most restrictive limit; `null` without limits. */
  readonly limit: number | null;
  /** The units left in the most restrictive limit; `null` without limits. */
  readonly remaining: number | null;
  /** The time in seconds until the most restrictive limit is whole again; `null` if never, or without limits. */
  readonly resetAfter: number | null;
  /** The rate-limit headers of a response, on a refusal also `retry-after` and `cache-control`. Names in lower case. */
  readonly headers: Readonly<Record<string, string>>;
  /** The proof of the admission, for `refund`. Only from the service, and only if it was asked for. */
  readonly receipt?: string;
  /** The outcomes for which the rules give units back. Only in a decision by rules with a receipt. */
  readonly refundOn?: readonly Ending[];
  /** The message of a refusal, if the service wrote one. */
  readonly message?: string;
  /** The response to relay. Only in a refusal by rules. */
  readonly response?: RefusalResponse;
  /** The error that prevented a decision. */
  readonly error?: TidegateError;
}

/** The implementation of a decision. */
class ComputedDecision implements Decision {
  readonly allowed: boolean;
  readonly source: Source;
  readonly limits: readonly LimitStatus[];
  readonly reason: Reason | null;
  readonly retryAfter: number | null;
  readonly limit: number | null;
  readonly remaining: number | null;
  readonly resetAfter: number | null;
  readonly receipt?: string;
  readonly refundOn?: readonly Ending[];
  readonly message?: string;
  readonly response?: RefusalResponse;
  readonly error?: TidegateError;
  readonly #atUs: number | undefined;
  #headers: Readonly<Record<string, string>> | undefined;
  #charges: unknown;

  constructor(fields: DecisionFields) {
    const strict = strictest(fields.limits);
    this.allowed = fields.allowed;
    this.source = fields.source;
    this.limits = fields.limits;
    this.reason = fields.allowed ? null : (fields.reason ?? "rate_limited");
    this.retryAfter = fields.refusedFor !== undefined ? fields.refusedFor : longestWait(fields);
    this.limit = strict?.quota ?? null;
    this.remaining = strict?.remaining ?? null;
    this.resetAfter = strict?.resetAfter ?? null;
    if (fields.receipt !== undefined) this.receipt = fields.receipt;
    if (fields.refundOn !== undefined) this.refundOn = fields.refundOn;
    if (fields.message !== undefined) this.message = fields.message;
    if (fields.response !== undefined) this.response = fields.response;
    if (fields.error !== undefined) this.error = fields.error;
    this.#atUs = fields.atUs;
    this.#headers = fields.headers;
    this.#charges = fields.charges;
  }

  get headers(): Readonly<Record<string, string>> {
    return (this.#headers ??= rateLimitHeaders(this, this.#atUs));
  }

  static takeCharges<C>(decision: object, isExpected: (charges: unknown) => charges is C): C | undefined {
    const charges = #charges in decision ? decision.#charges : undefined;
    if (!isExpected(charges)) return undefined;
    (decision as ComputedDecision).#charges = undefined;
    return charges;
  }
}

/** Creates a decision. Its headers are computed when they are first read. */
export function createDecision(fields: DecisionFields): Decision {
  return new ComputedDecision(fields);
}

/** Takes the charges out of a decision if `isExpected` accepts them, so that a second call returns `undefined`. */
export function takeCharges<C>(decision: Decision, isExpected: (charges: unknown) => charges is C): C | undefined {
  return ComputedDecision.takeCharges(decision, isExpected);
}

/** Returns the longest wait of the limits that determine the answer: of those that denied, or else of all. */
function longestWait({ allowed, limits }: DecisionFields): number | null {
  let longest = 0;
  for (const status of limits) {
    if (status.allowed !== allowed) continue;
    if (status.retryAfter === null) return null;
    longest = Math.max(longest, status.retryAfter);
  }
  return longest;
}

/**
 * Returns the status that restricts the client most; the first on a tie.
 *
 * A denial is stricter than an admission. Of denials, the longest wait is the strictest. Of admissions, it is the
 * smallest fraction of the quota.
 */
export function strictest<S extends LimitStatus>(limits: readonly S[]): S | undefined {
  return limits.length === 0 ? undefined : limits.reduce((found, next) => (isStricter(next, found) ? next : found));
}

function isStricter(one: LimitStatus, other: LimitStatus): boolean {
  if (one.allowed !== other.allowed) return !one.allowed;
  if (!one.allowed) return (one.retryAfter ?? Infinity) > (other.retryAfter ?? Infinity);
  return one.remaining * other.quota < other.remaining * one.quota;
}
