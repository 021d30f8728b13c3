/** What happens when a check cannot be decided, and what is logged about it. */
import { createDecision, type Decision } from "./decision.js";
import { InvalidInputError, TidegateError, UnavailableError, quoted } from "./errors.js";

/**
 * What a check returns if no decision was made: `allow` lets the request pass, `deny` refuses it with 503, `throw`
 * throws the error.
 */
export type OnError = "allow" | "deny" | "throw";

/** A function that logs a message. `error` is absent if the message reports the recovery. */
export type Logger = (message: string, error?: TidegateError) => void;

/** Options of every limiter. */
export interface FailureOptions {
  /** What a check returns if no decision was made. Defaults to `allow`. */
  onError?: OnError;
  /** Logs failures that are not thrown, at most once a second, and the recovery. Defaults to `console.warn`. */
  logger?: Logger;
}

const LOG_EVERY_MS = 1_000;
/** The time after which a caller refused by `deny` may try again, in seconds. */
const DENIED_RETRY_AFTER = 1;
/** The effect of each `onError` in log messages; `null` if nothing is logged, because the caller gets the error. */
const EFFECT: Record<OnError, string | null> = {
  allow: "requests pass without a limit",
  deny: "requests are refused with 503",
  throw: null,
};

/** Applies `onError` to failed calls, and logs them. */
export class FailurePolicy {
  readonly #target: string;
  readonly #onError: OnError;
  readonly #logger: Logger;
  #loggedAtMs = -Infinity;
  #unlogged = 0;
  #hasFailed = false;

  /** `target` names what is called, for messages: `the service http://127.0.0.1:8080`. */
  constructor(target: string, options: FailureOptions) {
    const onError = options.onError ?? "allow";
    if (!Object.hasOwn(EFFECT, onError)) {
      throw new InvalidInputError(`onError must be "allow", "deny" or "throw", found ${quoted(onError)}`);
    }
    if (options.logger !== undefined && typeof options.logger !== "function") {
      throw new InvalidInputError("logger must be a function that takes a message");
    }
    this.#target = target;
    this.#onError = onError;
    this.#logger = options.logger ?? ((message) => console.warn(message));
  }

  /** Returns the decision for a call that failed, or throws the error. The caller's mistakes are always thrown. */
  decide(error: unknown): Decision {
    const failure = this.report(error);
    if (this.#onError === "allow") return createDecision({ allowed: true, source: "none", limits: [], error: failure });
    return createDecision({
      allowed: false,
      source: "none",
      limits: [],
      reason: "unavailable",
      refusedFor: DENIED_RETRY_AFTER,
      error: failure,
    });
  }

  /** Logs the error of a failed call and returns it, or throws it if `onError` is `throw` or the caller caused it. */
  report(error: unknown): TidegateError {
    if (error instanceof InvalidInputError) throw error;
    const failure =
      error instanceof TidegateError
        ? error
        : new UnavailableError("protocol", `${this.#target}: an unexpected error`, { cause: error });
    const effect = EFFECT[this.#onError];
    if (effect === null) throw failure;
    this.#log(failure, effect);
    return failure;
  }

  /** Logs the recovery if a failure was logged before. */
  succeeded(): void {
    if (!this.#hasFailed) return;
    this.#hasFailed = false;
    this.#write(`tidegate: ${this.#target} answers again`);
  }

  #log(failure: TidegateError, effect: string): void {
    const nowMs = performance.now();
    if (nowMs - this.#loggedAtMs < LOG_EVERY_MS) {
      this.#unlogged++;
      return;
    }
    const more = this.#unlogged > 0 ? ` (and ${this.#unlogged} more failures since the last message)` : "";
    [this.#loggedAtMs, this.#unlogged, this.#hasFailed] = [nowMs, 0, true];
    this.#write(`tidegate: ${failure.message}; ${effect}${more}`, failure);
  }

  /** Calls the logger. Its own errors must not fail a request. */
  #write(message: string, failure?: TidegateError): void {
    try {
      this.#logger(message, failure);
    } catch {
      // There is no place left to report this.
    }
  }
}
