/**
 * The text form of a limit: `QUOTA/WINDOW [ALGORITHM] [option=value …]`.
 *
 * The grammar and the bounds are those of the Rust library, so a limit means the same everywhere.
 */
import { InvalidInputError, quoted } from "./errors.js";

/** The name of an algorithm. */
export type Algorithm =
  | "sliding"
  | "sliding-log"
  | "sliding-counter"
  | "fixed-window"
  | "token-bucket"
  | "leaky-bucket";

/** A parsed limit: at most `quota` units per window, by an algorithm. */
export interface Limit {
  readonly algorithm: Algorithm;
  /** The units per window. */
  readonly quota: number;
  /** The window in microseconds. */
  readonly windowUs: number;
  /** The largest cost that can ever be admitted: the burst, the queue, or else the quota. */
  readonly costMax: number;
  /** Whether denied requests are charged too. */
  readonly countDenied: boolean;
}

const TEXT_BYTES_MAX = 256;
const QUOTA_MAX = 10_000_000;
const SLIDING_LOG_QUOTA_MAX = 100_000;
const WINDOW_US_MIN = 1_000;
const WINDOW_US_MAX = 400 * 86_400 * 1_000_000;
/** The number of parsed limits that are kept. A service has a handful. */
const CACHED_MAX = 1_000;

const ALGORITHMS: readonly Algorithm[] = [
  "sliding",
  "sliding-log",
  "sliding-counter",
  "fixed-window",
  "token-bucket",
  "leaky-bucket",
];

/** The names of each unit of time, and its microseconds. */
const UNITS = new Map<string, number>(
  (
    [
      [["week", "weeks", "w"], 604_800_000_000],
      [["day", "days", "d"], 86_400_000_000],
      [["h", "hr", "hour", "hours"], 3_600_000_000],
      [["min", "mins", "minute", "minutes", "m"], 60_000_000],
      [["s", "sec", "secs", "second", "seconds"], 1_000_000],
      [["ms"], 1_000],
      [["us", "µs"], 1],
    ] as const
  ).flatMap(([names, us]) => names.map((name) => [name, us] as const)),
);

const EXAMPLE = "for example 10/min or 100/min token-bucket burst=20";

const cached = new Map<string, Limit>();

/**
 * Parses a limit such as `10/min` or `100/min token-bucket burst=20`.
 *
 * @throws {InvalidInputError} if the text is not a limit. The message says what is expected.
 */
export function parseLimit(text: string): Limit {
  const known = cached.get(text);
  if (known) return known;
  const limit = parse(text);
  if (cached.size >= CACHED_MAX) cached.clear();
  cached.set(text, limit);
  return limit;
}

function parse(text: string): Limit {
  if (typeof text !== "string") throw fail(`expected a limit as text, ${EXAMPLE}`, text);
  try {
    return parseExactly(text);
  } catch (error) {
    const meant = error instanceof InvalidInputError ? limitMeant(text) : undefined;
    throw meant === undefined ? error : new InvalidInputError(`${(error as Error).message}; did you mean ${meant}?`);
  }
}

function parseExactly(text: string): Limit {
  const bytes = Buffer.byteLength(text);
  if (bytes > TEXT_BYTES_MAX) {
    throw new InvalidInputError(`a limit can have at most ${TEXT_BYTES_MAX} bytes, but this one has ${bytes}; ${EXAMPLE}`);
  }
  const words = split(text);
  const rate = words.shift();
  if (rate === undefined) throw new InvalidInputError(`expected QUOTA/WINDOW, found nothing; ${EXAMPLE}`);
  const { quota, windowUs } = parseRate(rate);

  let algorithm: Algorithm = "sliding";
  if (words[0] !== undefined && !words[0].includes("=")) {
    const word = words.shift() as string;
    const found = ALGORITHMS.find((name) => name === word);
    if (!found) throw fail(`unknown algorithm; expected one of ${ALGORITHMS.join(", ")}`, word);
    algorithm = found;
  }
  if (algorithm === "sliding-log" && quota > SLIDING_LOG_QUOTA_MAX) {
    throw fail(`a quota must be from 1 to ${SLIDING_LOG_QUOTA_MAX} for sliding-log`, rate);
  }
  const options = parseOptions(words, algorithm);
  return Object.freeze({
    algorithm,
    quota,
    windowUs,
    costMax: options.get("burst") ?? options.get("queue") ?? quota,
    countDenied: options.get("count_denied") === 1,
  });
}

/** Splits a text at ASCII white space. */
function split(text: string): string[] {
  return text.split(/[ \t\n\f\r]+/).filter((word) => word !== "");
}

/**
 * Returns the limit that a text in another common form means, as it must be written: `10/min` for `10 / min`, `10 per minute`
 * or `10/MIN`, and `10/90min` for `10/1.5h`. Returns `undefined` if the text has another form, or that limit would be invalid.
 */
function limitMeant(text: string): string | undefined {
  if (text.length > TEXT_BYTES_MAX) return undefined;
  const [quota, per, first, ...rest] = split(text.toLowerCase().replaceAll("/", " / "));
  if (first === undefined || (per !== "/" && per !== "per")) return undefined;
  const window = /^[0-9.]+$/.test(first) ? first + (rest.shift() ?? "") : first;
  const windowUs = fractionalWindowUs(window);
  if (windowUs === undefined) return undefined;
  const limit = [`${quota}/${windowText(windowUs)}`, ...rest].join(" ");
  try {
    parseExactly(limit);
  } catch {
    return undefined;
  }
  return limit;
}

/** Parses a window whose number may have a fraction, such as `1.5h`; `undefined` if it is not a whole number of microseconds. */
function fractionalWindowUs(window: string): number | undefined {
  const [, whole = "", fraction = "", unit = ""] = /^([0-9]*)(\.[0-9]{1,3})?([^0-9.]+)$/.exec(window) ?? [];
  const unitUs = UNITS.get(unit);
  if (unitUs === undefined || (whole === "" && fraction === "")) return unitUs;
  const fractionUs = (Number(fraction.slice(1)) * unitUs) / 10 ** Math.max(fraction.length - 1, 0);
  return Number.isInteger(fractionUs) ? Number(whole) * unitUs + fractionUs : undefined;
}

/** Returns a window in the largest unit that divides it: `min`, `90min`, `500ms`. */
function windowText(windowUs: number): string {
  const [unit, unitUs] = [...UNITS].find(([, us]) => us <= windowUs && windowUs % us === 0) ?? ["us", 1];
  return windowUs === unitUs ? unit : `${windowUs / unitUs}${unit}`;
}

function parseRate(rate: string): { quota: number; windowUs: number } {
  const slash = rate.indexOf("/");
  if (slash < 0) throw fail(`expected a / between quota and window; ${EXAMPLE}`, rate);
  const quota = digits(rate.slice(0, slash));
  if (quota === undefined || quota < 1 || quota > QUOTA_MAX) {
    throw fail(`expected a quota from 1 to ${QUOTA_MAX} in digits; ${EXAMPLE}`, rate.slice(0, slash));
  }
  const window = rate.slice(slash + 1);
  const unit = window.replace(/^[0-9]+/, "");
  if (unit === "") {
    throw fail("expected a window: a whole number and a unit, or a unit alone (500ms, 10s, min, day)", window);
  }
  if (/^\.[0-9]/.test(unit)) throw fail("expected a window in whole numbers, such as 90min", window);
  const unitUs = UNITS.get(unit);
  if (unitUs === undefined) throw fail("unknown unit of time; expected one of us, ms, s, min, h, day, week", unit);
  const count = unit.length === window.length ? 1 : Number(window.slice(0, window.length - unit.length));
  const windowUs = count * unitUs;
  if (!(windowUs >= WINDOW_US_MIN && windowUs <= WINDOW_US_MAX)) {
    const reason = windowUs > WINDOW_US_MAX ? ", the longest whose arithmetic is exact in Redis" : "";
    throw fail(`a window must be from 1ms to 400day${reason}`, window);
  }
  return { quota, windowUs };
}

function parseOptions(words: string[], algorithm: Algorithm): Map<string, number> {
  const options = new Map<string, number>();
  for (const word of words) {
    const equals = word.indexOf("=");
    const [name, value] = [word.slice(0, Math.max(equals, 0)), word.slice(equals + 1)];
    if (equals < 0 || !["burst", "queue", "count_denied"].includes(name)) {
      throw fail("unknown option; expected one of burst=N, queue=N, count_denied=true|false", word);
    }
    if (options.has(name)) throw fail("this option is given twice", word);
    if (name === "count_denied") {
      if (value !== "true" && value !== "false") throw fail("expected count_denied=true or count_denied=false", value);
      options.set(name, value === "true" ? 1 : 0);
      continue;
    }
    const capacity = digits(value);
    if (capacity === undefined || capacity < 1 || capacity > QUOTA_MAX) {
      throw fail(`expected ${name}=N with N from 1 to ${QUOTA_MAX}, in digits`, value);
    }
    const owner: Algorithm = name === "burst" ? "token-bucket" : "leaky-bucket";
    if (algorithm !== owner) throw fail(`${name} is an option of ${owner}, not of ${algorithm}`, word);
    options.set(name, capacity);
  }
  return options;
}

/** Parses a decimal number; `undefined` if the text is empty or has anything but digits. */
function digits(text: string): number | undefined {
  return /^[0-9]+$/.test(text) ? Number(text) : undefined;
}

function fail(expected: string, found: unknown): InvalidInputError {
  return new InvalidInputError(`limit: ${expected} (found ${quoted(found)})`);
}

/** Encodes a limit and its cost as a limit line of the script, such as `sliding 100 60000000 1 window=fixed`. */
export function limitLine(limit: Limit, cost: number): string {
  let line = `${limit.algorithm} ${limit.quota} ${limit.windowUs} ${cost}`;
  if (limit.costMax !== limit.quota) {
    line += ` ${limit.algorithm === "leaky-bucket" ? "queue" : "burst"}=${limit.costMax}`;
  }
  if (limit.countDenied) line += " count_denied=1";
  return `${line} window=fixed`;
}

const PERIODS = [
  [604_800_000_000, "week", "weeks"],
  [86_400_000_000, "day", "days"],
  [3_600_000_000, "hour", "hours"],
  [60_000_000, "minute", "minutes"],
  [1_000_000, "second", "seconds"],
  [1_000, "ms", "ms"],
  [1, "us", "us"],
] as const;

/** Returns a window in English, in the largest unit that divides it: `per minute`, `per 10 seconds`, `per 500 ms`. */
export function periodInWords(windowUs: number): string {
  for (const [unitUs, one, many] of PERIODS) {
    if (windowUs % unitUs === 0) return windowUs === unitUs ? `per ${one}` : `per ${windowUs / unitUs} ${many}`;
  }
  return `per ${windowUs} us`;
}
