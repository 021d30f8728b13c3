/** Middleware for Hono. */
import type { Context, MiddlewareHandler } from "hono";

import type { Decision } from "./decision.js";
import { createGate, headerPairs, type RateLimitOptions } from "./middleware.js";
import { isAborted } from "./node-response.js";

export type { ExplicitOptions, RateLimitOptions, RulesOptions } from "./middleware.js";

declare module "hono" {
  interface ContextVariableMap {
    /** The decision of the rate limiter on this request. */
    tidegate: Decision;
  }
}

/** Returns the address of the peer. Needed on runtimes other than Node. */
export type PeerOf = (context: Context) => string | undefined;

/** The request of `@hono/node-server`. */
interface NodeBindings {
  incoming?: {
    socket?: { remoteAddress?: string };
    rawHeaders?: string[];
    complete?: boolean;
    readableAborted?: boolean;
  };
}

/**
 * Creates middleware that limits requests: with limits in code, or by the rules of the service.
 *
 * The decision is `c.get("tidegate")`. Rate-limit headers are on every response. The peer's address is that of
 * `@hono/node-server`; on another runtime pass `peer`, for example
 * `(c) => getConnInfo(c).remote.address`.
 *
 * ```ts
 * app.post("/shorten", rateLimit({ limiter, limit: "10/min" }), shorten);
 * app.use(rateLimit({ tidegate }));
 * ```
 *
 * @throws {InvalidInputError} if an option is invalid.
 */
export function rateLimit(options: RateLimitOptions<Context> & { peer?: PeerOf }): MiddlewareHandler {
  const peerOf: PeerOf = options?.peer ?? ((context) => nodeRequest(context)?.socket?.remoteAddress);
  const gate = createGate<Context>(options, (context) => ({
    method: context.req.method,
    path: pathOf(context.req.url),
    peer: peerOf(context),
    headers: headerPairs(nodeRequest(context)?.rawHeaders ?? [...context.req.raw.headers].flat()),
  }));
  return async function tidegateRateLimit(context, next) {
    const outcome = await gate(context);
    context.set("tidegate", outcome.decision);
    if (outcome.refusal) {
      const { status, headers, body } = outcome.refusal;
      return new Response(body, { status, headers });
    }
    await next();
    for (const [name, value] of Object.entries(outcome.headers)) context.header(name, value);
    if (!hasAborted(context)) outcome.finish(context.res.status);
    return undefined;
  };
}

/** Returns whether the client disconnected before the end of its body, if the runtime reports it. */
function hasAborted(context: Context): boolean {
  const { complete = true, readableAborted = false } = nodeRequest(context) ?? {};
  return context.req.raw.signal?.aborted === true || isAborted({ complete, readableAborted }, context.res.status);
}

function nodeRequest(context: Context): NodeBindings["incoming"] {
  return (context.env as NodeBindings | undefined)?.incoming;
}

/** Returns the path and the query of a URL. */
function pathOf(url: string): string {
  const { pathname, search } = new URL(url);
  return pathname + search;
}
