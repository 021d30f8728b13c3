/** The part of the middleware that all frameworks share. */
import { addressSubject, parseAddress, TrustedProxies } from "./address.js";
import { refusalResponse } from "./answer.js";
import type { Decision, Ending, RefusalResponse } from "./decision.js";
import { InvalidInputError } from "./errors.js";
import type { Key } from "./key.js";
import { parseLimit } from "./limit.js";
import type { Limiter } from "./limiter.js";
import { Tidegate } from "./service.js";

/** Options of middleware with limits in code. `Request` is the request type of the framework. */
export interface ExplicitOptions<Request> {
  /** The limiter: a `RedisLimiter`, or a `Tidegate`. */
  limiter: Limiter;
  /** One or several limits, for example `10/min`. All are charged, or none. */
  limit: string | readonly string[];
  /** Returns what is counted. Defaults to the client's address; IPv6 addresses are counted by their /64. */
  key?: (request: Request) => Key | Promise<Key>;
  /** Returns the units to charge, or the number itself. Defaults to 1. */
  cost?: number | ((request: Request) => number | Promise<number>);
  /** The proxies whose forwarding header is trusted, as addresses and networks. Defaults to none. */
  trustedProxies?: readonly string[];
  /** The header in which the trusted proxies report the client's address. Defaults to `X-Forwarded-For`. */
  forwardingHeader?: string;
  /** The outcome of a request for which its units are given back. Defaults to none. */
  refundOn?: Ending;
  tidegate?: undefined;
}

/** Options of middleware with rules in the service. */
export interface RulesOptions {
  /** The service, whose rules decide. A refusal is relayed as it is. */
  tidegate: Tidegate;
  limiter?: undefined;
}

/** Options of the middleware of a framework. */
export type RateLimitOptions<Request> = ExplicitOptions<Request> | RulesOptions;

/** The request of a framework, in the form that a decision needs. */
export interface IncomingRequest {
  readonly method: string;
  readonly path: string;
  /** The address of the peer, if it is known. */
  readonly peer: string | undefined;
  /** The headers, as pairs; repeated headers are kept. */
  readonly headers: readonly (readonly [string, string])[];
}

/** The outcome of a check: continue with these headers and call `finish` with the response's status, or refuse. */
export type Outcome =
  | {
      readonly decision: Decision;
      readonly refusal: null;
      readonly headers: Readonly<Record<string, string>>;
      /** Gives units back if the request's outcome requires it. Call it at most once. */
      readonly finish: (status: number) => void;
    }
  | { readonly decision: Decision; readonly refusal: RefusalResponse };

/** Creates the function that decides requests. Throws an `InvalidInputError` if an option is invalid. */
export function createGate<Request>(
  options: RateLimitOptions<Request>,
  describe: (request: Request) => IncomingRequest,
): (request: Request) => Promise<Outcome> {
  if (options?.tidegate !== undefined) return gateByRules(options.tidegate, describe);
  return gateByLimits(options, describe);
}

function gateByRules<Request>(tidegate: Tidegate, describe: (request: Request) => IncomingRequest) {
  if (typeof tidegate?.checkRequest !== "function") throw new InvalidInputError("tidegate must be a Tidegate");
  return async (request: Request): Promise<Outcome> => {
    const { method, path, headers, peer } = describe(request);
    const described = { method, path: originForm(path), headers, peer: requirePeer(peer) };
    const decision = await tidegate.checkRequest(described, { receipt: true });
    return outcomeOf(decision, () => headers, (status) => {
      if (decision.refundOn?.includes(endingOf(status))) void ignoreErrors(tidegate.refund(decision, { status }));
    });
  };
}

function gateByLimits<Request>(options: ExplicitOptions<Request>, describe: (request: Request) => IncomingRequest) {
  const { limiter, limit, cost, refundOn } = options ?? {};
  if (typeof limiter?.check !== "function") {
    throw new InvalidInputError("rateLimit needs a limiter and a limit, or a tidegate");
  }
  for (const text of typeof limit === "string" ? [limit] : (limit ?? [])) parseLimit(text);
  if (limit === undefined || limit.length === 0) throw new InvalidInputError("rateLimit needs a limit such as 10/min");
  if (refundOn !== undefined && refundOn !== "success" && refundOn !== "failure") {
    throw new InvalidInputError('refundOn must be "success" or "failure"');
  }
  const proxies = new TrustedProxies(options.trustedProxies, options.forwardingHeader);
  const keyOf = options.key ?? ((request: Request) => clientSubject(describe(request), proxies));
  return async (request: Request): Promise<Outcome> => {
    const key = await keyOf(request);
    const units = typeof cost === "function" ? await cost(request) : cost;
    const decision = await limiter.check(key, limit, {
      ...(units !== undefined && { cost: units }),
      ...(refundOn !== undefined && { receipt: true }),
    });
    return outcomeOf(decision, () => describe(request).headers, (status) => {
      if (endingOf(status) === refundOn) void ignoreErrors(limiter.refund(decision));
    });
  };
}

/** Builds the outcome of a decision. An admission by a `leaky-bucket` is delayed here. */
async function outcomeOf(
  decision: Decision,
  headersOf: () => IncomingRequest["headers"],
  finish: (status: number) => void,
): Promise<Outcome> {
  if (!decision.allowed) {
    const accept = headersOf().flatMap(([name, value]) => (name.toLowerCase() === "accept" ? [value] : []));
    return { decision, refusal: refusalResponse(decision, accept) };
  }
  const delayMs = Math.ceil((decision.retryAfter ?? 0) * 1_000);
  if (delayMs > 0) await new Promise((resolve) => setTimeout(resolve, delayMs));
  return { decision, refusal: null, headers: decision.headers, finish };
}

/** Returns the subject of the client's address. */
function clientSubject(request: IncomingRequest, proxies: TrustedProxies): string {
  const peer = parseAddress(requirePeer(request.peer));
  if (!peer) throw new InvalidInputError("the peer of the connection has no IP address; pass key");
  const lines = request.headers.flatMap(([name, value]) => (name.toLowerCase() === proxies.header ? [value] : []));
  return addressSubject(proxies.clientAddress(peer, lines));
}

function requirePeer(peer: string | undefined): string {
  if (peer === undefined) {
    throw new InvalidInputError("the address of the client is unknown: the connection is closed or a Unix socket; pass key");
  }
  // A zone names an interface of this machine.
  return peer.replace(/%.*$/s, "");
}

/** Returns the path and query of a request target, which a client may also send as a URL, with a fragment, or as `*`. */
function originForm(target: string): string {
  const path = target.replace(/^[a-z][a-z0-9+.-]*:\/\/[^/?#]*/i, "").replace(/#.*$/s, "");
  return path.startsWith("/") ? path : `/${path.replace(/^\*$/, "")}`;
}

function endingOf(status: number): Ending {
  return status >= 400 && status <= 599 ? "failure" : "success";
}

/** Ignores the error of a refund: the response has been sent. The limiter logs it unless `onError` is `throw`. */
async function ignoreErrors(refund: Promise<unknown>): Promise<void> {
  await refund.catch(() => {});
}

/** Converts Node's flat list of header names and values to pairs. */
export function headerPairs(rawHeaders: readonly string[]): [string, string][] {
  const pairs: [string, string][] = [];
  for (let index = 0; index + 1 < rawHeaders.length; index += 2) pairs.push([rawHeaders[index]!, rawHeaders[index + 1]!]);
  return pairs;
}
