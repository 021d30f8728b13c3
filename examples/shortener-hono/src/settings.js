// Settings from environment variables. An invalid value is rejected at the start, with what would be accepted.
import { parseLimit, TrustedProxies } from "tidegate";

/** Reads the settings. An empty variable counts as not set. Throws an error that names the variable. */
export function readSettings(environment) {
  const value = (name) => environment[name] || undefined;
  const deadlineExpected = "1 to 10000 milliseconds";
  const redisDeadlineMs = number("REDIS_DEADLINE_MS", value("REDIS_DEADLINE_MS"), 25, deadlineExpected);
  if (redisDeadlineMs < 1 || redisDeadlineMs > 10_000) {
    throw wrong("REDIS_DEADLINE_MS", `expected ${deadlineExpected}, got ${redisDeadlineMs}`);
  }
  const port = number("PORT", value("PORT"), 3000, "a port from 0 to 65535");
  if (port > 65_535) throw wrong("PORT", `expected a port from 0 to 65535, got ${JSON.stringify(value("PORT"))}`);
  return {
    port,
    redisDeadlineMs,
    publicUrl: value("PUBLIC_URL") && publicUrl(value("PUBLIC_URL")),
    redisUrl: redisUrl(value("REDIS_URL") ?? "redis://127.0.0.1:6379"),
    limit: limit(value("RATE_LIMIT_MAX"), value("RATE_LIMIT_WINDOW_MS")),
    trustedProxies: trustedProxies(value("TRUSTED_PROXIES") ?? ""),
  };
}

function wrong(variable, problem) {
  return new Error(`${variable}: ${problem}`);
}

function number(variable, text, otherwise, expected) {
  if (text === undefined) return otherwise;
  if (!/^[0-9]+$/.test(text)) throw wrong(variable, `expected ${expected}, got ${JSON.stringify(text)}`);
  return Number(text);
}

function limit(maxText, windowText) {
  const max = number("RATE_LIMIT_MAX", maxText, 10, "a whole number of links, for example 10");
  const expected = "a whole number of milliseconds, for example 60000";
  const windowMs = number("RATE_LIMIT_WINDOW_MS", windowText, 60_000, expected);
  if (!isLimit(`${max}/min`)) throw wrong("RATE_LIMIT_MAX", `a quota must be from 1 to 10000000, found ${max}`);
  const text = `${max}/${windowMs}ms`;
  if (!isLimit(text)) throw wrong("RATE_LIMIT_WINDOW_MS", `a window must be from 1ms to 400day, found ${windowMs}ms`);
  return text;
}

function isLimit(text) {
  try {
    return Boolean(parseLimit(text));
  } catch {
    return false;
  }
}

function trustedProxies(text) {
  const networks = text.split(/[, ]+/).filter((word) => word !== "");
  try {
    new TrustedProxies(networks);
  } catch (error) {
    throw wrong("TRUSTED_PROXIES", error.message);
  }
  return networks;
}

function publicUrl(text) {
  const url = URL.canParse(text) ? new URL(text) : undefined;
  const isWeb = url && /^https?:$/.test(url.protocol) && url.search === "" && url.hash === "";
  if (!isWeb) throw wrong("PUBLIC_URL", `expected an http or https URL, got ${JSON.stringify(text)}`);
  return url.href.replace(/\/+$/, "");
}

/** The URL may contain a password, so no message repeats it. */
function redisUrl(text) {
  const isRedis = URL.canParse(text) && /^rediss?:$/.test(new URL(text).protocol);
  if (!isRedis) throw wrong("REDIS_URL", "expected redis://HOST:PORT or rediss://HOST:PORT");
  return text;
}
