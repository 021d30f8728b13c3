// Many calls leave nothing behind: memory, connections, timers. TIDEGATE_LONG=1 makes 100,000 calls.
import assert from "node:assert/strict";
import { test } from "node:test";
import { runInNewContext } from "node:vm";
import { setFlagsFromString } from "node:v8";
import { Redis } from "ioredis";

import { ADMITTED, FORMS, RedisServer, closing, fakeService, json } from "./harness.mjs";

const CALLS = process.env.TIDEGATE_LONG === "1" ? 100_000 : 5_000;
const PARALLEL = 200;
/** Far below one object per call, above the noise of the collector. */
const GROWTH_BYTES_MAX = 3_000_000;

setFlagsFromString("--expose_gc");
const collect = runInNewContext("gc");

async function heapBytes() {
  for (let round = 0; round < 3; round++) {
    collect();
    await new Promise((resolve) => setImmediate(resolve));
  }
  return process.memoryUsage().heapUsed;
}

/** Asserts that the heap is as small after many calls as after a few hundred. */
async function assertNoLeak(call, calls = CALLS) {
  const round = () => Promise.all(Array.from({ length: PARALLEL }, call));
  for (let n = 0; n < 3; n++) await round();
  const before = await heapBytes();
  for (let n = 0; n < calls; n += PARALLEL) await round();
  const growth = (await heapBytes()) - before;
  assert.ok(growth < GROWTH_BYTES_MAX, `${growth} bytes after ${calls} calls`);
}

test(`service: ${CALLS} calls leave nothing behind`, async () => {
  const fake = await fakeService((_, response) => {
    fake.requests.length = 0;
    json(response, 200, ADMITTED);
  });
  const tidegate = new FORMS.esm.Tidegate(fake.url, { deadlineMs: 30_000, onError: "throw" });
  await assertNoLeak(() => tidegate.check("a", "10/min"));
  assert.ok(fake.connections <= 32, `${fake.connections} connections`);
  tidegate.close();
  fake.close();
});

test(`service: ${CALLS / 10} calls that time out leave nothing behind`, async () => {
  const fake = await fakeService(() => void (fake.requests.length = 0));
  const tidegate = new FORMS.esm.Tidegate(fake.url, { deadlineMs: 5, logger: () => {} });
  await assertNoLeak(() => tidegate.check("a", "10/min"), CALLS / 10);
  tidegate.close();
  fake.close();
});

test(`Redis: ${CALLS} calls leave nothing behind`, async () => {
  const server = await RedisServer.start();
  const redis = new Redis(server.port, "127.0.0.1");
  closing(() => redis.disconnect());
  const limiter = new FORMS.esm.RedisLimiter(redis, { deadlineMs: 30_000, onError: "throw" });
  let n = 0;
  await assertNoLeak(async () => {
    const decision = await limiter.check(`k${n++ % 100}`, "1000000/h");
    if (n % 10 === 0) await limiter.refund(decision);
  });
  redis.disconnect();
  await server.kill();
});

test(`Redis: ${CALLS} calls while it is away leave nothing behind`, async () => {
  const server = await RedisServer.start();
  const redis = new Redis(server.port, "127.0.0.1");
  closing(() => redis.disconnect());
  redis.on("error", () => {});
  const limiter = new FORMS.esm.RedisLimiter(redis, { logger: () => {} });
  await limiter.check("a", "1/h");
  await server.kill();
  await assertNoLeak(() => limiter.check("a", "1/h"));
  assert.ok(redis.listenerCount("ready") <= 1);
});
