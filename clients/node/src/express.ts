/** Middleware for Express, and for everything with the signature `(req, res, next)`. */
import type { NextFunction, Request, Response } from "express";

import type { Decision } from "./decision.js";
import { createGate, headerPairs, type RateLimitOptions } from "./middleware.js";
import { whenAnswered } from "./node-response.js";

export type { ExplicitOptions, RateLimitOptions, RulesOptions } from "./middleware.js";

declare global {
  // eslint-disable-next-line @typescript-eslint/no-namespace
  namespace Express {
    interface Request {
      /** The decision of the rate limiter on this request. */
      tidegate?: Decision;
    }
  }
}

/**
 * Creates middleware that limits requests: with limits in code, or by the rules of the service.
 *
 * The decision is `req.tidegate`. Rate-limit headers are on every response.
 *
 * ```ts
 * app.post("/shorten", rateLimit({ limiter, limit: "10/min" }), shorten);
 * app.use(rateLimit({ tidegate }));
 * ```
 *
 * @throws {InvalidInputError} if an option is invalid.
 */
export function rateLimit(options: RateLimitOptions<Request>) {
  const gate = createGate<Request>(options, (request) => ({
    method: request.method,
    path: request.originalUrl ?? request.url,
    peer: request.socket.remoteAddress,
    headers: headerPairs(request.rawHeaders),
  }));
  return function tidegateRateLimit(request: Request, response: Response, next: NextFunction): void {
    gate(request).then((outcome) => {
      request.tidegate = outcome.decision;
      if (outcome.refusal) {
        const { status, headers, body } = outcome.refusal;
        response.statusCode = status;
        for (const [name, value] of Object.entries(headers)) response.setHeader(name, value);
        response.end(body);
        return;
      }
      for (const [name, value] of Object.entries(outcome.headers)) response.setHeader(name, value);
      whenAnswered(response, outcome.finish);
      next();
    }, next);
  };
}
