/** The client of `tidegate serve` over HTTP. */
import { Agent as HttpAgent, request as httpRequest, type IncomingMessage } from "node:http";
import { Agent as HttpsAgent, request as httpsRequest } from "node:https";

import { checkDeadline, startDeadline } from "./deadline.js";
import {
  createDecision,
  type Decision,
  type DecisionFields,
  type Ending,
  type LimitStatus,
  type Reason,
  type Source,
} from "./decision.js";
import { demandsOf, parseDemands, type Demand } from "./demand.js";
import { InvalidInputError, UnavailableError, quoted } from "./errors.js";
import { FailurePolicy, type FailureOptions } from "./failure.js";
import { keyText, type Key } from "./key.js";
import type { CheckOptions, Limiter } from "./limiter.js";
import { Slots } from "./slots.js";

/** Options of {@link Tidegate}. */
export interface TidegateOptions extends FailureOptions {
  /** The deadline of a call in milliseconds, including connecting. Defaults to 50. */
  deadlineMs?: number;
  /** The bearer token of the service, if it requires one. */
  token?: string;
  /** The maximum number of connections, which are kept alive. Defaults to 32. */
  maxConnections?: number;
}

/** Options of a check by the service. */
export interface ServiceCheckOptions extends CheckOptions {
  /** Whether the decision carries a receipt, with which {@link Tidegate.refund} gives units back. Defaults to `false`. */
  receipt?: boolean;
}

/** Options of {@link Tidegate.wait}. */
export interface WaitOptions extends ServiceCheckOptions {
  /** The longest wait in milliseconds, 0 to 60000. If it is longer, the check is denied at once. Defaults to 10000. */
  maxWaitMs?: number;
}

/** A request to be decided by the rules of the service. */
export interface RequestDescription {
  method: string;
  /** The path, with or without a query. */
  path: string;
  /** The headers, as an object or as pairs; pairs keep repeated headers. Defaults to none. */
  headers?: Readonly<Record<string, string | readonly string[] | undefined>> | readonly (readonly [string, string])[];
  /** The address of the peer of the connection. */
  peer: string;
}

/** Options of {@link Tidegate.refund}. */
export interface RefundOptions {
  /** The units that were actually used; the rest is given back. Defaults to 0. */
  used?: number;
  /** The status of the response, for a decision by rules: gives back what the rules say for this outcome. */
  status?: number;
}

const DEFAULT_URL = "http://127.0.0.1:8080";
const RESPONSE_BYTES_MAX = 1024 * 1024;
const WAIT_MS_MAX = 60_000;
/** Idle connections are closed before the service closes them, so that no request is sent on a closing connection. */
const IDLE_MS = 4_000;
const SOURCES: readonly Source[] = ["store", "deny_cache", "local", "none"];
const RATE_LIMIT_HEADERS = [
  "cache-control",
  "retry-after",
  "x-ratelimit-limit",
  "x-ratelimit-remaining",
  "x-ratelimit-reset",
  "ratelimit",
  "ratelimit-policy",
  "ratelimit-limit",
  "ratelimit-remaining",
  "ratelimit-reset",
];

interface Answer {
  status: number;
  headers: IncomingMessage["headers"];
  body: Record<string, unknown>;
}

/**
 * A client of the Tidegate service.
 *
 * Connections are kept alive, and each call has a deadline. If the service does not answer, `onError` determines the
 * answer. A malformed limit, key, cost or request is always thrown as an {@link InvalidInputError}.
 *
 * ```ts
 * const tidegate = new Tidegate("http://127.0.0.1:8080");
 * const decision = await tidegate.check("user:42", ["10/min", "1000/day"]);
 * ```
 */
export class Tidegate implements Limiter {
  readonly #url: URL;
  readonly #name: string;
  readonly #agent: HttpAgent;
  readonly #slots: Slots;
  readonly #deadlineMs: number;
  readonly #headers: Record<string, string>;
  readonly #failures: FailurePolicy;

  /** @throws {InvalidInputError} if the URL or an option is invalid. */
  constructor(url: string | URL = DEFAULT_URL, options: TidegateOptions = {}) {
    this.#url = parseUrl(url);
    this.#name = `the service ${this.#url.origin}`;
    this.#deadlineMs = checkDeadline("deadlineMs", options.deadlineMs ?? 50);
    const maxConnections = options.maxConnections ?? 32;
    if (!Number.isInteger(maxConnections) || maxConnections < 1) {
      throw new InvalidInputError(`maxConnections must be a whole number from 1, found ${String(maxConnections)}`);
    }
    const Agent = this.#url.protocol === "https:" ? HttpsAgent : HttpAgent;
    this.#agent = new Agent({ keepAlive: true, maxSockets: maxConnections, timeout: IDLE_MS, scheduling: "lifo" });
    this.#slots = new Slots(maxConnections);
    this.#headers = { "content-type": "application/json" };
    if (options.token !== undefined) {
      if (typeof options.token !== "string" || !/^[!-~]+$/.test(options.token)) {
        throw new InvalidInputError("token must be printable ASCII text without spaces");
      }
      this.#headers["authorization"] = `Bearer ${options.token}`;
    }
    this.#failures = new FailurePolicy(this.#name, options);
  }

  /** Decides whether `key` may use units of one or several limits: all are charged, or none. */
  async check(key: Key, limits: string | readonly string[], options: ServiceCheckOptions = {}): Promise<Decision> {
    return this.checkAll(demandsOf(key, limits, options.cost), options);
  }

  /** Decides several (key, limit, cost) together: all are charged, or none. */
  async checkAll(demands: readonly Demand[], options: Omit<ServiceCheckOptions, "cost"> = {}): Promise<Decision> {
    return this.#decide(explicitBody(demands, options), this.#deadlineMs);
  }

  /** Returns the status of the limits without charging anything. */
  async peek(key: Key, limits: string | readonly string[]): Promise<Decision> {
    return this.check(key, limits, { cost: 0 });
  }

  /**
   * Decides as {@link Tidegate.check}, but waits in the service until the units are available.
   *
   * If that would take longer than `maxWaitMs`, the check is denied and nothing is charged.
   */
  async wait(key: Key, limits: string | readonly string[], options: WaitOptions = {}): Promise<Decision> {
    const maxWaitMs = options.maxWaitMs ?? 10_000;
    if (!Number.isInteger(maxWaitMs) || maxWaitMs < 0 || maxWaitMs > WAIT_MS_MAX) {
      throw new InvalidInputError(
        `maxWaitMs must be a whole number from 0 to ${WAIT_MS_MAX}, found ${String(maxWaitMs)}`,
      );
    }
    const body = { ...explicitBody(demandsOf(key, limits, options.cost), options), wait_ms: maxWaitMs };
    return this.#decide(body, this.#deadlineMs + maxWaitMs);
  }

  /** Decides a request by the rules of the service. A refusal carries the response to relay. */
  async checkRequest(request: RequestDescription, options: { receipt?: boolean } = {}): Promise<Decision> {
    const { method, path, peer } = request;
    for (const [name, value] of Object.entries({ method, path, peer })) {
      if (typeof value !== "string") throw new InvalidInputError(`the ${name} of a request must be text`);
    }
    const headers = headerPairs(request.headers);
    const body = { request: { method, path, headers, peer }, ...(options.receipt && { receipt: true }) };
    return this.#decide(body, this.#deadlineMs);
  }

  /**
   * Gives back the units of an admission, at most once.
   *
   * Returns whether units were given back: `false` if the receipt was used before or has expired, if there is none, or
   * if the service did not answer and `onError` is not `throw`.
   */
  async refund(decision: Decision | string, options: RefundOptions = {}): Promise<boolean> {
    const receipt = typeof decision === "string" ? decision : decision.receipt;
    if (receipt === undefined) return false;
    const { used, status } = options;
    const body = { receipt, ...(used !== undefined && { used }), ...(status !== undefined && { status }) };
    try {
      const answer = await this.#post("/v1/refund", body, this.#deadlineMs);
      if (answer.status !== 200) throw this.#errorOf(answer);
      this.#failures.succeeded();
      return answer.body["applied"] === true;
    } catch (error) {
      this.#failures.report(error);
      return false;
    }
  }

  /** Closes the idle connections. Later calls open new ones. */
  close(): void {
    this.#agent.destroy();
  }

  async #decide(body: unknown, deadlineMs: number): Promise<Decision> {
    try {
      const answer = await this.#post("/v1/check", body, deadlineMs);
      const decision = this.#decisionOf(answer);
      this.#failures.succeeded();
      return decision;
    } catch (error) {
      return this.#failures.decide(error);
    }
  }

  #decisionOf(answer: Answer): Decision {
    const { status, body } = answer;
    if (typeof body["allowed"] !== "boolean" || ![200, 403, 414, 429, 503].includes(status)) throw this.#errorOf(answer);
    if (!Array.isArray(body["limits"])) throw this.#malformed();
    const fields: DecisionFields = {
      allowed: body["allowed"],
      source: SOURCES.find((source) => source === body["source"]) ?? "none",
      limits: body["limits"].map((entry) => this.#statusOf(entry)),
      headers: rateLimitHeadersOf(answer.headers),
    };
    if (!fields.allowed) {
      const reasons: Record<number, Reason> = { 403: "banned", 414: "path_too_long", 503: "unavailable" };
      fields.reason = reasons[status] ?? "rate_limited";
      if (fields.reason !== "rate_limited") fields.refusedFor = this.#seconds(body["retry_after_ms"] ?? null);
      if (typeof body["message"] === "string") fields.message = body["message"];
    }
    if (typeof body["receipt"] === "string") fields.receipt = body["receipt"];
    if (Array.isArray(body["refund_on"])) fields.refundOn = body["refund_on"] as Ending[];
    this.#addResponse(fields, body["response"]);
    return createDecision(fields);
  }

  /** Adds the response of a decision by rules: the refusal to relay, or the headers of an admission. */
  #addResponse(fields: DecisionFields, response: unknown): void {
    if (!isObject(response)) return;
    const headers: Record<string, string> = {};
    for (const [name, value] of Object.entries(isObject(response["headers"]) ? response["headers"] : {})) {
      headers[name.toLowerCase()] = String(value);
    }
    fields.headers = headers;
    if (fields.allowed) return;
    const { status, body } = response;
    if (!Number.isInteger(status) || (body !== undefined && typeof body !== "string")) throw this.#malformed();
    fields.response = { status: status as number, headers, body: body ?? "" };
  }

  #statusOf(entry: unknown): LimitStatus {
    if (!isObject(entry)) throw this.#malformed();
    const { name, allowed, quota, window_ms, remaining, rule } = entry;
    if (typeof name !== "string" || typeof allowed !== "boolean") throw this.#malformed();
    for (const value of [quota, window_ms, remaining]) if (typeof value !== "number") throw this.#malformed();
    return {
      name,
      allowed,
      quota: quota as number,
      window: (window_ms as number) / 1_000,
      remaining: remaining as number,
      retryAfter: this.#seconds(entry["retry_after_ms"]),
      nextAfter: this.#seconds(entry["next_after_ms"]),
      resetAfter: this.#seconds(entry["reset_after_ms"]),
      ...(typeof rule === "string" && { rule }),
    };
  }

  #seconds(ms: unknown): number | null {
    if (ms === null) return null;
    if (typeof ms !== "number") throw this.#malformed();
    return ms / 1_000;
  }

  #malformed(): UnavailableError {
    return new UnavailableError("protocol", `${this.#name}: the answer is not in the form that Tidegate sends`);
  }

  #errorOf({ status, body }: Answer): Error {
    const message = typeof body["message"] === "string" ? body["message"].slice(0, 500) : "";
    if (status === 400 || status === 413) return new InvalidInputError(`${this.#name} rejected the call: ${message}`);
    if (status === 401 || status === 403) return new UnavailableError("forbidden", `${this.#name} rejects the token`);
    if (status >= 500 || status === 409) {
      return new UnavailableError("unavailable", `${this.#name} cannot decide (status ${status})`);
    }
    return new UnavailableError("protocol", `${this.#name} answered with status ${status}`);
  }

  /** Sends a request and reads the answer, within the deadline, which includes waiting for a free connection. */
  #post(path: string, body: unknown, deadlineMs: number): Promise<Answer> {
    const bytes = Buffer.from(JSON.stringify(body));
    return new Promise((resolve, reject) => {
      const abort = new AbortController();
      let isDone = false;
      const finish = (settle: () => void) => {
        if (isDone) return;
        isDone = true;
        stopDeadline();
        release();
        settle();
      };
      const stopDeadline = startDeadline(deadlineMs, () => {
        const error = new UnavailableError("timeout", `${this.#name} did not answer within ${deadlineMs} ms`);
        finish(() => reject(error));
        abort.abort();
      });
      const release = this.#slots.acquire(() => {
        this.#send(path, bytes, abort.signal, (error, answer) => {
          finish(() => (answer ? resolve(answer) : reject(error)));
        });
      });
    });
  }

  #send(path: string, bytes: Buffer, signal: AbortSignal, done: (error?: Error, answer?: Answer) => void): void {
    const fail = (cause: unknown) => {
      const reason = (cause as NodeJS.ErrnoException | null)?.code ?? "connection failed";
      done(new UnavailableError("unreachable", `cannot reach ${this.#name}: ${reason}`, { cause }));
    };
    const send = this.#url.protocol === "https:" ? httpsRequest : httpRequest;
    const target = new URL(this.#url.pathname.replace(/\/$/, "") + path, this.#url);
    const headers = { ...this.#headers, "content-length": bytes.length };
    const request = send(target, { method: "POST", agent: this.#agent, headers, signal }, (response) => {
      const chunks: Buffer[] = [];
      let size = 0;
      response.on("data", (chunk: Buffer) => {
        size += chunk.length;
        if (size > RESPONSE_BYTES_MAX) response.destroy(new Error("the answer is too large"));
        else chunks.push(chunk);
      });
      response.on("error", fail);
      response.on("end", () => {
        const answer = { status: response.statusCode ?? 0, headers: response.headers, body: parseObject(chunks) };
        done(undefined, answer);
      });
    });
    request.on("error", fail);
    request.end(bytes);
  }
}

function parseUrl(url: string | URL): URL {
  const expected = "expected the URL of the service, such as http://127.0.0.1:8080";
  let parsed: URL;
  try {
    parsed = new URL(url);
  } catch (cause) {
    throw new InvalidInputError(expected, { cause });
  }
  if (parsed.protocol !== "http:" && parsed.protocol !== "https:") {
    throw new InvalidInputError(`${expected}; found ${quoted(parsed.protocol)}`);
  }
  if (parsed.username !== "" || parsed.password !== "") {
    throw new InvalidInputError("the URL of the service must not contain a user or a password; use the option token");
  }
  return parsed;
}

function explicitBody(demands: readonly Demand[], options: { receipt?: boolean }): Record<string, unknown> {
  const checks = parseDemands(demands).map(({ key, text, cost }) => ({ key: keyText(key), limit: text, cost }));
  return { ...(checks.length === 1 ? checks[0] : { checks }), ...(options.receipt && { receipt: true }) };
}

function headerPairs(headers: RequestDescription["headers"]): [string, string][] {
  const pairs: [string, string][] = [];
  const entries = Array.isArray(headers) ? headers : Object.entries(headers ?? {});
  for (const [name, value] of entries as [string, string | string[] | undefined][]) {
    for (const line of Array.isArray(value) ? value : [value]) if (line !== undefined) pairs.push([name, String(line)]);
  }
  return pairs;
}

function rateLimitHeadersOf(headers: IncomingMessage["headers"]): Record<string, string> {
  const found = RATE_LIMIT_HEADERS.flatMap((name) => (headers[name] === undefined ? [] : [[name, String(headers[name])]]));
  return Object.fromEntries(found) as Record<string, string>;
}

function parseObject(chunks: Buffer[]): Record<string, unknown> {
  try {
    const value: unknown = JSON.parse(Buffer.concat(chunks).toString());
    return isObject(value) ? value : {};
  } catch {
    return {};
  }
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
