// A worker of the mixed run: one of the Node clients, alongside those of the other languages. The parent,
// crates/tidegate-cli/tests/suite/mixed.rs, describes the arguments, the input and the records.
import { createWriteStream } from "node:fs";
import { once } from "node:events";
import { Redis } from "ioredis";
import { createClient } from "redis";

import { RedisLimiter, Tidegate } from "tidegate";

const CALLERS = 8;
const work = JSON.parse(process.argv[2]);
const records = createWriteStream(work.records);
const options = { deadlineMs: 60_000, onError: "throw" };

/** Returns the client, and a function that closes it. */
async function open() {
  const url = `redis://127.0.0.1:${work.redis_port}`;
  switch (work.client) {
    case "service": {
      const tidegate = new Tidegate(work.service, options);
      return [tidegate, () => tidegate.close()];
    }
    case "ioredis": {
      const redis = new Redis(url);
      return [new RedisLimiter(redis, options), () => redis.disconnect()];
    }
    case "node-redis": {
      const redis = await createClient({ url }).connect();
      return [new RedisLimiter(redis, options), () => redis.close()];
    }
    default:
      throw new Error(`unknown client: ${work.client}`);
  }
}

/** A linear congruential generator, so that a run can be repeated. */
let state = work.seed;
function below(bound) {
  state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
  return Math.floor((state / 2 ** 32) * bound);
}

const [client, close] = await open();
console.log("ready");
await once(process.stdin, "data");
let isOver = false;
process.stdin.once("end", () => (isOver = true)).resume();

let made = 0;
async function call() {
  while (!isOver) {
    const [counter, cost] = [below(work.keys), [1, 1, 1, 2, 3][below(5)]];
    const limits = [work.limits[counter % work.limits.length], work.journal];
    // Node reads the wall clock in milliseconds: the call lies between the start of one and the end of another.
    const sentUs = Date.now() * 1_000;
    const decision = await client.check(`client-${counter}`, limits, { cost });
    const receivedUs = Date.now() * 1_000 + 999;
    const [status, journal] = decision.limits;
    const retryAfterUs = Math.round(status.retryAfter * 1e6);
    const allowed = decision.allowed ? 1 : 0;
    records.write(
      `${sentUs} ${receivedUs} ${counter} ${cost} ${allowed} ${status.remaining} ${retryAfterUs} ${journal.remaining} ${decision.source}\n`,
    );
    if (++made === work.checks) console.log("made");
  }
}
await Promise.all(Array.from({ length: CALLERS }, call));
close();
records.end();
await once(records, "close");
