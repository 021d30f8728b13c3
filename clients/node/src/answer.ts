/** Renders a decision as HTTP: the headers of every response, and the default response of a refusal. */
import { strictest, type Decision, type LimitStatus, type RefusalResponse } from "./decision.js";
import { periodInWords } from "./limit.js";

/**
 * Returns the rate-limit headers of a decision: the styles `x` and `ietf`, and on a refusal `retry-after` and
 * `cache-control`.
 *
 * A wait is rounded up once. `x-ratelimit-reset` is the time of the decision plus the wait, added before rounding.
 */
export function rateLimitHeaders(decision: Decision, atUs: number | undefined): Record<string, string> {
  const headers: Record<string, string> = {};
  if (!decision.allowed) {
    headers["cache-control"] = "no-store";
    const seconds = secondsToWait(decision.retryAfter);
    if (seconds !== null) headers["retry-after"] = String(seconds);
  }
  const shown = strictest(decision.limits);
  if (!shown || decision.reason === "banned") return headers;
  headers["x-ratelimit-limit"] = String(shown.quota);
  headers["x-ratelimit-remaining"] = String(shown.remaining);
  const wait = untilNext(shown);
  if (wait !== null && atUs !== undefined) {
    headers["x-ratelimit-reset"] = String(Math.ceil((atUs + Math.round(wait * 1e6)) / 1e6));
  }
  headers["ratelimit"] = decision.limits.map(ietfStatus).join(", ");
  headers["ratelimit-policy"] = decision.limits.map(ietfPolicy).join(", ");
  return headers;
}

const JSON_TYPE = "application/json";
const PROBLEM_TYPE = "application/problem+json";
const PROBLEM_TYPES = "https://iana.org/assignments/http-problem-types#";

/**
 * Returns the default response of a refusal: 429, 403 for a ban, or 503 if nothing was decided.
 *
 * The body is JSON, or an RFC 9457 problem document if `accept`, the lines of the request's `Accept`, asks for
 * `application/problem+json`.
 */
export function refusalResponse(decision: Decision, accept: string | readonly string[] = []): RefusalResponse {
  if (decision.response) return decision.response;
  const message = decision.message ?? refusalMessage(decision);
  const status = { rate_limited: 429, banned: 403, unavailable: 503, path_too_long: 414 }[
    decision.reason ?? "rate_limited"
  ];
  const isProblem = asksForProblem(typeof accept === "string" ? [accept] : accept);
  const body = isProblem
    ? { ...problemFields(decision, status), detail: message, ...violatedPolicies(decision), ...limitFields(decision) }
    : { error: decision.reason, message, ...limitFields(decision) };
  return {
    status,
    headers: { "content-type": isProblem ? PROBLEM_TYPE : JSON_TYPE, ...decision.headers },
    body: JSON.stringify(body),
  };
}

/**
 * Returns whether the lines of an `Accept` header ask for `application/problem+json`: they must name it, with a weight
 * above 0 and not below that of `application/json`.
 */
export function asksForProblem(accept: readonly string[]): boolean {
  let [problem, json] = [0, 0];
  for (const range of accept.join(",").split(",")) {
    const [name, ...parameters] = range.split(";");
    const type = name!.trim().toLowerCase();
    if (type === PROBLEM_TYPE) problem = Math.max(problem, weightOf(parameters));
    if (type === JSON_TYPE) json = Math.max(json, weightOf(parameters));
  }
  return problem > 0 && problem >= json;
}

/** Returns the weight in the parameters of a media type: 1 without `q`, 0 if its value is invalid. */
function weightOf(parameters: readonly string[]): number {
  for (const parameter of parameters) {
    const weight = /^\s*q\s*=(.*)$/is.exec(parameter)?.[1]?.trim();
    if (weight !== undefined) return /^[01](\.[0-9]{0,3})?$/.test(weight) ? Math.min(1, Number(weight)) : 0;
  }
  return 1;
}

function problemFields({ reason }: Decision, status: number): Record<string, unknown> {
  return reason === "unavailable"
    ? { type: `${PROBLEM_TYPES}temporary-reduced-capacity`, title: "The rate limiter is temporarily unavailable", status }
    : { type: `${PROBLEM_TYPES}quota-exceeded`, title: "Quota exceeded", status };
}

function violatedPolicies(decision: Decision): Record<string, unknown> {
  const names = refusing(decision).map((status) => status.name);
  return names.length > 0 ? { "violated-policies": names } : {};
}

function limitFields(decision: Decision): Record<string, unknown> {
  const shown = decision.reason === "rate_limited" ? strictest(refusing(decision)) : undefined;
  return {
    ...(shown && { limit: shown.quota }),
    retry_after: secondsToWait(decision.retryAfter),
    retry_after_ms: decision.retryAfter === null ? null : Math.max(1, Math.ceil(toUs(decision.retryAfter) / 1e3)),
    ...(shown && { policy: shown.name }),
  };
}

function refusing(decision: Decision): LimitStatus[] {
  return decision.limits.filter((status) => !status.allowed);
}

function refusalMessage(decision: Decision): string {
  if (decision.reason === "unavailable") return "the rate limiter is temporarily unavailable; try again shortly";
  if (decision.reason === "banned") return "this caller is banned";
  const shown = strictest(refusing(decision));
  if (!shown) return "too many requests";
  const limit = `${shown.quota} ${periodInWords(toUs(shown.window))}`;
  const seconds = secondsToWait(decision.retryAfter);
  if (seconds === null) {
    const [cost, costMax] = [shown.cost ?? "too much", shown.costMax ?? shown.quota];
    return `a request that costs ${cost} can never pass: the limit is ${limit}, at most ${costMax} at once`;
  }
  return `the limit of ${limit} has been reached; try again in ${seconds} second${seconds === 1 ? "" : "s"}`;
}

/** Returns a wait in whole seconds, rounded up, at least 1; `null` for never. */
function secondsToWait(wait: number | null): number | null {
  return wait === null ? null : Math.max(1, Math.ceil(wait));
}

/** Converts seconds to whole microseconds, which is exact for every wait and window. */
function toUs(seconds: number): number {
  return Math.round(seconds * 1e6);
}

/** Returns the wait that headers show: until the request would pass if it was denied, else until one more unit. */
function untilNext(status: LimitStatus): number | null {
  return status.allowed ? status.nextAfter : status.retryAfter;
}

function ietfStatus(status: LimitStatus): string {
  const wait = untilNext(status);
  return `"${status.name}";r=${status.remaining}${wait === null ? "" : `;t=${Math.ceil(wait)}`}`;
}

function ietfPolicy(status: LimitStatus): string {
  return `"${status.name}";q=${status.quota}${Number.isInteger(status.window) ? `;w=${status.window}` : ""}`;
}

/**
 * Returns the names that headers show for limits with these windows: `per-minute`.
 *
 * A name that an earlier limit has gets a number: `per-minute-2`.
 */
export function policyNames(windowsUs: readonly number[]): string[] {
  const names = windowsUs.map((windowUs) => periodInWords(windowUs).replaceAll(" ", "-"));
  names.forEach((name, index) => {
    if (!names.slice(0, index).includes(name)) return;
    let number = 2;
    while (names.includes(`${name}-${number}`)) number++;
    names[index] = `${name}-${number}`;
  });
  return names;
}
