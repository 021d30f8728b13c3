/** Rate limits that really slide, decided by the Tidegate service or by its script on Redis. */
export { addressSubject, addressText, parseAddress, TrustedProxies, type Address } from "./address.js";
export { refusalResponse } from "./answer.js";
export type { Decision, Ending, LimitStatus, Reason, RefusalResponse, Source } from "./decision.js";
export type { Demand } from "./demand.js";
export { InvalidInputError, TidegateError, UnavailableError, type ErrorCode } from "./errors.js";
export type { FailureOptions, Logger, OnError } from "./failure.js";
export { KeyBuilder, STATE_VERSION, type Key } from "./key.js";
export { limitLine, parseLimit, type Algorithm, type Limit } from "./limit.js";
export type { CheckOptions, Limiter } from "./limiter.js";
export type { ExplicitOptions, RateLimitOptions, RulesOptions } from "./middleware.js";
export { RedisLimiter, type RedisLimiterOptions } from "./redis.js";
export type { RedisClient } from "./redis-client.js";
export { SCRIPT, SCRIPT_SHA1 } from "./script.js";
export {
  Tidegate,
  type RefundOptions,
  type RequestDescription,
  type ServiceCheckOptions,
  type TidegateOptions,
  type WaitOptions,
} from "./service.js";
