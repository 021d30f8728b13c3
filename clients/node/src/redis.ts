/** The limiter that runs the Lua script on the application's own Redis client. */
import { policyNames } from "./answer.js";
import { checkDeadline, startDeadline } from "./deadline.js";
import { createDecision, takeCharges, type Decision, type LimitStatus } from "./decision.js";
import { demandsOf, parseDemands, type Demand, type ParsedDemand } from "./demand.js";
import { InvalidInputError, UnavailableError } from "./errors.js";
import { FailurePolicy, type FailureOptions } from "./failure.js";
import { KeyBuilder, type Key } from "./key.js";
import { limitLine } from "./limit.js";
import type { CheckOptions, Limiter } from "./limiter.js";
import { connectionOf, type RedisClient, type RedisConnection } from "./redis-client.js";
import { replyError } from "./redis-error.js";
import { SCRIPT, SCRIPT_SHA1 } from "./script.js";

/** Options of {@link RedisLimiter}. */
export interface RedisLimiterOptions extends FailureOptions {
  /** The deadline of a call in milliseconds. Defaults to 25. */
  deadlineMs?: number;
  /** The first part of every key. Defaults to `tidegate`, as everywhere in Tidegate. */
  prefix?: string;
  /** @internal Returns the time in microseconds at which the script decides. Defaults to the clock of Redis. */
  nowUs?: () => number;
}

/** The data of an admission that a refund needs. */
class Charges {
  constructor(
    readonly limiter: RedisLimiter,
    readonly demands: readonly ParsedDemand[],
    readonly atUs: number,
    /** The units that were refunded on each counter before. */
    readonly refunded: readonly number[],
  ) {}
}

const BAN_SECONDS_MAX = 10 * 365 * 86_400;

/**
 * A limiter on Redis or Valkey, with the application's own client: ioredis (`Redis`, `Cluster`) or node-redis
 * (`createClient`, `createClientPool`, `createCluster`).
 *
 * Counters are shared with every other Tidegate client on the same Redis and prefix. Each call has a deadline. If Redis
 * does not answer, `onError` determines the answer. A call that timed out may have been executed and is never repeated.
 *
 * ```ts
 * const limiter = new RedisLimiter(new Redis());
 * const decision = await limiter.check("user:42", ["10/min", "1000/day"]);
 * ```
 */
export class RedisLimiter implements Limiter {
  readonly #redis: RedisConnection;
  readonly #keys: KeyBuilder;
  readonly #deadlineMs: number;
  readonly #failures: FailurePolicy;
  readonly #nowUs: (() => number) | undefined;

  /** @throws {InvalidInputError} if the client is not a supported Redis client, or an option is invalid. */
  constructor(client: RedisClient, options: RedisLimiterOptions = {}) {
    this.#redis = connectionOf(client);
    this.#keys = new KeyBuilder(options.prefix ?? "tidegate");
    this.#deadlineMs = checkDeadline("deadlineMs", options.deadlineMs ?? 25);
    this.#failures = new FailurePolicy("Redis", options);
    this.#nowUs = options.nowUs;
  }

  /** Decides whether `key` may use units of one or several limits: all are charged, or none. */
  async check(key: Key, limits: string | readonly string[], options: CheckOptions = {}): Promise<Decision> {
    return this.checkAll(demandsOf(key, limits, options.cost));
  }

  /**
   * Decides several (key, limit, cost) together: all are charged, or none.
   *
   * On a Cluster all of them must have the same key, because the script runs on one node.
   */
  async checkAll(demands: readonly Demand[]): Promise<Decision> {
    const parsed = parseDemands(demands);
    const bans = parsed.some(({ cost }) => cost > 0) ? unique(parsed.map(({ key }) => this.#keys.ban(key))) : [];
    const keys = [...bans, ...parsed.map(({ key, limit }) => this.#keys.counter(key, limit))];
    const lines = parsed.map(({ limit, cost }) => limitLine(limit, cost));
    try {
      const reply = await this.#run(keys, [`check ${parsed.length} ${bans.length}`, ...lines]);
      const decision = this.#decisionOf(reply, parsed);
      this.#failures.succeeded();
      return decision;
    } catch (error) {
      return this.#failures.decide(error);
    }
  }

  /** Returns the status of the limits without charging anything. A ban is not considered. */
  async peek(key: Key, limits: string | readonly string[]): Promise<Decision> {
    return this.check(key, limits, { cost: 0 });
  }

  /**
   * Gives back the units that an admission of this limiter charged, at most once per decision.
   *
   * Returns whether units were given back: `false` for a denial, a second call, or if Redis did not answer and
   * `onError` is not `throw`.
   */
  async refund(decision: Decision): Promise<boolean> {
    // They are taken before the call, because it may be executed even if it fails.
    const isOurs = (charges: unknown): charges is Charges => charges instanceof Charges && charges.limiter === this;
    const charges = takeCharges(decision, isOurs);
    if (!charges) return false;
    const [keys, lines]: [string[], string[]] = [[], []];
    charges.demands.forEach(({ key, limit, cost }, index) => {
      const resetAfter = decision.limits[index]?.resetAfter ?? null;
      if (cost === 0 || resetAfter === null) return;
      keys.push(this.#keys.counter(key, limit));
      lines.push(limitLine(limit, cost), `${charges.atUs} ${Math.round(resetAfter * 1e6)} ${charges.refunded[index]}`);
    });
    if (keys.length === 0) return false;
    return this.#attempt(async () => {
      const reply = await this.#run(keys, [`refund ${keys.length}`, ...lines]);
      if (reply[1] !== 1) throw malformed();
      return true;
    });
  }

  /** Deletes the counters of a key for these limits. Returns whether Redis did so. */
  async reset(key: Key, limits: string | readonly string[]): Promise<boolean> {
    const demands = parseDemands(demandsOf(key, limits, undefined));
    const keys = demands.map(({ limit }) => this.#keys.counter(key, limit));
    return this.#attempt(async () => {
      await this.#within(() => this.#redis.del(keys));
      return true;
    });
  }

  /**
   * Bans a key: its checks are refused until the ban ends or is lifted. Returns whether Redis stored the ban.
   *
   * Without `seconds` the ban has no end.
   */
  async ban(key: Key, options: { seconds?: number } = {}): Promise<boolean> {
    const { seconds } = options;
    if (seconds !== undefined && !(seconds > 0 && seconds <= BAN_SECONDS_MAX)) {
      throw new InvalidInputError(`a ban must last up to ${BAN_SECONDS_MAX} seconds, found ${String(seconds)}`);
    }
    const banKey = this.#keys.ban(key);
    return this.#attempt(async () => {
      const ttlMs = seconds === undefined ? undefined : Math.ceil(seconds * 1_000);
      await this.#within(() => this.#redis.set(banKey, "1", ttlMs));
      return true;
    });
  }

  /** Lifts the ban of a key. Returns whether the key was banned. */
  async unban(key: Key): Promise<boolean> {
    const banKey = this.#keys.ban(key);
    return this.#attempt(async () => (await this.#within(() => this.#redis.del([banKey]))) === 1);
  }

  /** Runs a command whose answer is not a decision. Returns `false` if it fails and `onError` is not `throw`. */
  async #attempt(command: () => Promise<boolean>): Promise<boolean> {
    try {
      const result = await command();
      this.#failures.succeeded();
      return result;
    } catch (error) {
      this.#failures.report(error);
      return false;
    }
  }

  /** Runs the script within the deadline and returns the numbers of its reply. */
  async #run(keys: string[], step: string[]): Promise<number[]> {
    const args = [this.#nowUs ? String(this.#nowUs()) : "", ...step];
    const reply = await this.#within(async () => {
      try {
        return await this.#redis.evalSha(SCRIPT_SHA1, keys, args);
      } catch (error) {
        // A server that does not know the script has not executed anything.
        if (!isNoScript(error)) throw error;
        return this.#redis.eval(SCRIPT, keys, args);
      }
    });
    if (!Array.isArray(reply) || reply.length < 2) throw malformed();
    return reply.map((value: unknown) => {
      const number = typeof value === "number" ? value : Number(value);
      if (!Number.isSafeInteger(number)) throw malformed();
      return number;
    });
  }

  /** Runs a command as soon as the client is connected, within the deadline. */
  #within<T>(command: () => Promise<T>): Promise<T> {
    return new Promise<T>((resolve, reject) => {
      const stop = startDeadline(this.#deadlineMs, () => {
        stopWaiting();
        reject(new UnavailableError("timeout", `Redis did not answer within ${this.#deadlineMs} ms`));
      });
      const stopWaiting = this.#redis.whenReady((isReady) => {
        const result = isReady ? start(command) : Promise.reject(new Error("the client is not connected"));
        result.then(resolve, (error: unknown) => reject(replyError(error))).finally(stop);
      });
    });
  }

  #decisionOf(reply: number[], demands: readonly ParsedDemand[]): Decision {
    const [atUs, results, ...numbers] = reply as [number, number, ...number[]];
    if (results === 0 && numbers.length === 1) {
      const ban = numbers[0]!;
      return createDecision({
        allowed: false,
        source: "store",
        limits: [],
        reason: "banned",
        refusedFor: ban < 0 ? null : ban / 1e6,
        atUs,
      });
    }
    if (results !== 1 || numbers.length !== 6 * demands.length) throw malformed();
    const names = policyNames(demands.map(({ limit }) => limit.windowUs));
    const limits = demands.map((demand, index) => statusOf(demand, names[index]!, numbers.slice(6 * index, 6 * index + 6)));
    const allowed = limits.every((status) => status.allowed);
    const refunded = demands.map((_, index) => numbers[6 * index + 5]!);
    const charges = allowed ? new Charges(this, demands, atUs, refunded) : undefined;
    return createDecision({ allowed, source: "store", limits, atUs, charges });
  }
}

function statusOf(demand: ParsedDemand, name: string, numbers: number[]): LimitStatus {
  const [allowed, remaining, retryAfter, nextAfter, resetAfter, refunded] = numbers as [
    number,
    number,
    number,
    number,
    number,
    number,
  ];
  if ((allowed !== 0 && allowed !== 1) || remaining < 0 || refunded < 0) throw malformed();
  return {
    name,
    allowed: allowed === 1,
    quota: demand.limit.quota,
    window: demand.limit.windowUs / 1e6,
    remaining,
    retryAfter: secondsOf(retryAfter),
    nextAfter: secondsOf(nextAfter),
    resetAfter: secondsOf(resetAfter),
    cost: demand.cost,
    costMax: demand.limit.costMax,
  };
}

/** Converts a wait of the script, in microseconds or -1 for never, to seconds. */
function secondsOf(us: number): number | null {
  if (us < -1) throw malformed();
  return us === -1 ? null : us / 1e6;
}

function malformed(): UnavailableError {
  return new UnavailableError("protocol", "the reply of the script on Redis is malformed");
}

function isNoScript(error: unknown): boolean {
  return error instanceof Error && error.message.startsWith("NOSCRIPT");
}

/** Calls a function of the Redis client, which may throw instead of returning a rejected promise. */
async function start<T>(command: () => Promise<T>): Promise<T> {
  return command();
}

function unique(keys: string[]): string[] {
  return [...new Set(keys)];
}
