/** Hooks for Fastify. */
import type { FastifyReply, FastifyRequest } from "fastify";

import type { Decision } from "./decision.js";
import { createGate, headerPairs, type RateLimitOptions } from "./middleware.js";
import { whenAnswered } from "./node-response.js";

export type { ExplicitOptions, RateLimitOptions, RulesOptions } from "./middleware.js";

declare module "fastify" {
  interface FastifyRequest {
    /** The decision of the rate limiter on this request. */
    tidegate?: Decision;
  }
}

/**
 * Creates a hook that limits requests: with limits in code, or by the rules of the service.
 *
 * Use it as `onRequest`, or as `preHandler` if `key` needs what other hooks add. The decision is `request.tidegate`.
 * Rate-limit headers are on every response.
 *
 * ```ts
 * app.post("/shorten", { onRequest: rateLimit({ limiter, limit: "10/min" }) }, shorten);
 * app.addHook("onRequest", rateLimit({ tidegate }));
 * ```
 *
 * @throws {InvalidInputError} if an option is invalid.
 */
export function rateLimit(options: RateLimitOptions<FastifyRequest>) {
  const gate = createGate<FastifyRequest>(options, (request) => ({
    method: request.method,
    path: request.originalUrl,
    peer: request.socket.remoteAddress,
    headers: headerPairs(request.raw.rawHeaders),
  }));
  return async function tidegateRateLimit(request: FastifyRequest, reply: FastifyReply): Promise<unknown> {
    const outcome = await gate(request);
    request.tidegate = outcome.decision;
    if (outcome.refusal) {
      const { status, headers, body } = outcome.refusal;
      return reply.code(status).headers(headers).send(body);
    }
    reply.headers(outcome.headers);
    whenAnswered(reply.raw, outcome.finish);
    return undefined;
  };
}
