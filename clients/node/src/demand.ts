/** The input of a check: every (key, limit, cost) that one request must pass, decided together. */
import { InvalidInputError } from "./errors.js";
import { keyBytes, type Key } from "./key.js";
import { parseLimit, type Limit } from "./limit.js";

/** One limit that a request must pass. */
export interface Demand {
  /** What is counted. */
  key: Key;
  /** The limit, for example `10/min`. */
  limit: string;
  /** The units to charge. Defaults to 1. */
  cost?: number;
}

/** A validated demand. */
export interface ParsedDemand {
  readonly key: Key;
  readonly text: string;
  readonly limit: Limit;
  readonly cost: number;
}

const DEMANDS_MAX = 32;
const COST_MAX = 4_294_967_295;

/** Combines one key, one or several limits and one cost. */
export function demandsOf(key: Key, limits: string | readonly string[], cost: number | undefined): Demand[] {
  const list = typeof limits === "string" ? [limits] : limits;
  if (!Array.isArray(list)) throw new InvalidInputError("expected a limit such as 10/min, or a list of limits");
  return list.map((limit) => (cost === undefined ? { key, limit } : { key, limit, cost }));
}

/** Validates the demands of a check: 1 to 32, each on a counter of its own. */
export function parseDemands(demands: readonly Demand[]): ParsedDemand[] {
  if (!Array.isArray(demands) || demands.length === 0) {
    throw new InvalidInputError("a check needs at least one limit");
  }
  if (demands.length > DEMANDS_MAX) {
    throw new InvalidInputError(`a check can have at most ${DEMANDS_MAX} limits; this one has ${demands.length}`);
  }
  const parsed = demands.map(parseDemand);
  for (let second = 1; second < parsed.length; second++) {
    for (let first = 0; first < second; first++) {
      if (isSameCounter(parsed[first]!, parsed[second]!)) {
        throw new InvalidInputError(
          `limits ${first} and ${second} (counted from 0) use the same counter; merge them or give them different keys`,
        );
      }
    }
  }
  return parsed;
}

function parseDemand(demand: Demand): ParsedDemand {
  if (typeof demand !== "object" || demand === null) throw new InvalidInputError("expected {key, limit, cost}");
  const { key, limit: text, cost = 1 } = demand;
  keyBytes(key);
  if (!Number.isInteger(cost) || cost < 0 || cost > COST_MAX) {
    throw new InvalidInputError(`cost must be a whole number from 0 to ${COST_MAX}, found ${String(cost)}`);
  }
  return { key, text, limit: parseLimit(text), cost };
}

function isSameCounter(one: ParsedDemand, other: ParsedDemand): boolean {
  return (
    one.limit.algorithm === other.limit.algorithm &&
    one.limit.windowUs === other.limit.windowUs &&
    (one.key === other.key || Buffer.compare(keyBytes(one.key), keyBytes(other.key)) === 0)
  );
}
