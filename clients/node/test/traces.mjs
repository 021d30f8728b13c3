// Replays the traces of the shared vectors on a limiter.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { FORMS } from "./harness.mjs";

export const vectors = JSON.parse(readFileSync(new URL("../../vectors.json", import.meta.url), "utf8"));

/**
 * Replays all traces with this Redis client and compares every decision.
 *
 * The number of the trace is appended to its keys, so that the counters of a cluster are in many slots. A cluster rejects
 * checks of several keys, and a trace ends there.
 */
export async function replayTraces(client, { prefix = "traces", isCluster = false } = {}) {
  const { RedisLimiter } = FORMS.esm;
  let nowUs = 0;
  const limiter = new RedisLimiter(client, { onError: "throw", deadlineMs: 30_000, prefix, nowUs: () => nowUs });
  for (const [index, trace] of vectors.traces.entries()) {
    const keyOf = (hex) => Buffer.concat([Buffer.from(hex, "hex"), Buffer.from(`:${index}`)]);
    const decisions = [];
    for (const [at, step] of trace.steps.entries()) {
      nowUs = step.at_us;
      if (step.check === undefined) {
        if (step.refund !== undefined) await limiter.refund(decisions[step.refund]);
        else await limiter.reset(keyOf(step.reset.key_hex), step.reset.limit);
        decisions.push(undefined);
        continue;
      }
      const demands = step.check.map(({ key_hex, ...rest }) => ({ key: keyOf(key_hex), ...rest }));
      const where = `${trace.name}, step ${at}`;
      if (isCluster && new Set(step.check.map(({ key_hex }) => key_hex)).size > 1) {
        await assert.rejects(limiter.checkAll(demands), { name: "InvalidInputError", message: /use one key per check/ }, where);
        break;
      }
      const decision = await limiter.checkAll(demands);
      decisions.push(decision);
      assert.equal(decision.allowed, step.allowed, where);
      assert.deepEqual(decision.limits.map(inMicroseconds), step.limits, where);
    }
  }
}

function inMicroseconds({ allowed, remaining, retryAfter, nextAfter, resetAfter }) {
  const us = (seconds) => (seconds === null ? -1 : Math.round(seconds * 1e6));
  return {
    allowed,
    remaining,
    retry_after_us: us(retryAfter),
    next_after_us: us(nextAfter),
    reset_after_us: us(resetAfter),
  };
}
