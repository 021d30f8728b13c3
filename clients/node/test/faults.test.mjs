// The service and Redis killed, suspended, slow or never there: every call ends, `onError` decides, the log says so, and
// everything works again by itself.
import assert from "node:assert/strict";
import { after, describe, test } from "node:test";

import { ADMITTED, CLIENTS, FORMS, RedisServer, Service, eventually, fakeService, json, keepingLog } from "./harness.mjs";

const { RedisLimiter, Tidegate } = FORMS.esm;

/** Asserts the answer of each `onError` while nothing is decided. `limiterFor` creates a limiter with options. */
async function assertFailure(limiterFor, codes) {
  const { messages, logger } = keepingLog();
  const startedMs = performance.now();
  const allow = limiterFor({ logger });
  const passed = await Promise.all(Array.from({ length: 50 }, () => allow.check("secret-key", "1/h")));
  for (const decision of passed) {
    assert.deepEqual([decision.allowed, decision.source, decision.remaining], [true, "none", null]);
    assert.deepEqual(decision.headers, {}, "no quota is claimed");
    assert.ok(codes.includes(decision.error.code), decision.error.code);
  }
  assert.match(messages[0], /requests pass without a limit/);
  assert.ok(messages.length <= 1 + (performance.now() - startedMs) / 1_000, "at most once a second");
  assert.doesNotMatch(messages.join(), /secret-key/);

  const deny = limiterFor({ onError: "deny", logger });
  const refused = await deny.check("secret-key", "1/h");
  assert.deepEqual([refused.allowed, refused.reason, refused.retryAfter], [false, "unavailable", 1]);
  assert.deepEqual(refused.headers, { "cache-control": "no-store", "retry-after": "1" });

  await assert.rejects(limiterFor({ onError: "throw" }).check("secret-key", "1/h"), (error) => {
    assert.equal(error.name, "UnavailableError");
    assert.ok(codes.includes(error.code), error.code);
    return true;
  });
  assert.equal(await allow.refund(passed[0]), false);
}

describe("the service", () => {
  let service;
  after(() => service?.child.kill());

  test("killed, suspended and back", async () => {
    service = await Service.start(["--store", "memory"]);
    const limiters = [];
    const limiterFor = (options) => {
      limiters.push(new Tidegate(service.url, options));
      return limiters.at(-1);
    };
    const { messages, logger } = keepingLog();
    const healing = limiterFor({ logger });
    await eventually("a decision", async () => (await healing.check("k", "5/h")).source === "store");

    service.child.suspend();
    await assertFailure(limiterFor, ["timeout"]);
    await eventually("the client notices", async () => (await healing.check("k", "5/h")).source === "none");
    service.child.resume();
    await eventually("a decision", async () => (await healing.check("k", "1000/h")).source === "store");

    await service.child.kill();
    await assertFailure(limiterFor, ["unreachable", "timeout"]);
    await eventually("the client notices", async () => (await healing.check("k", "5/h")).source === "none");
    await service.restart();
    await eventually("a decision", async () => (await healing.check("k", "1000/h")).source === "store");
    assert.ok(messages.some((message) => /answers again/.test(message)), messages.join("\n"));
    limiters.forEach((limiter) => limiter.close());
  });

  test("slow to answer, slow in the middle of an answer, and closing instead of answering", async () => {
    const faults = {
      silent: () => {},
      "half an answer": (_, response) => {
        response.writeHead(200, { "content-length": "1000" });
        response.write('{"allowed":');
      },
      closing: (_, response) => response.destroy(),
    };
    for (const [name, handle] of Object.entries(faults)) {
      const fake = await fakeService(handle);
      const limiters = [];
      const limiterFor = (options) => {
        limiters.push(new Tidegate(fake.url, { ...options, maxConnections: 4 }));
        return limiters.at(-1);
      };
      await assertFailure(limiterFor, name === "closing" ? ["unreachable", "timeout"] : ["timeout"]);
      limiters.forEach((limiter) => limiter.close());
      await eventually("no connection is left behind", () => fake.open === 0);
      fake.close();
    }
  });

  test("slow, byte by byte, and fast again", async () => {
    let isSlow = true;
    const fake = await fakeService(async (_, response) => {
      const answer = JSON.stringify(ADMITTED);
      response.writeHead(200, { "content-type": "application/json", "content-length": answer.length });
      // Each byte comes soon after the one before, so that a timeout per read never expires.
      for (const letter of answer) {
        response.write(letter);
        if (isSlow) await new Promise((resolve) => setTimeout(resolve, 5));
      }
      response.end();
    });
    const { messages, logger } = keepingLog();
    const tidegate = new Tidegate(fake.url, { logger });
    const decision = await tidegate.check("a", "10/min");
    assert.deepEqual([decision.allowed, decision.source, decision.error.code], [true, "none", "timeout"]);
    assert.equal(messages.length, 1);
    isSlow = false;
    await eventually("a decision", async () => (await tidegate.check("a", "10/min")).source === "store");
    tidegate.close();
    fake.close();
  });

  test("a host that does not exist", async () => {
    const tidegate = new Tidegate("http://tidegate.invalid", { logger: () => {} });
    const decision = await tidegate.check("a", "1/h");
    assert.deepEqual([decision.allowed, decision.source], [true, "none"]);
    assert.ok(["unreachable", "timeout"].includes(decision.error.code));
    tidegate.close();
  });

  test("after a burst of timeouts all connections are usable again", async () => {
    let isSlow = true;
    const fake = await fakeService((_, response) => {
      if (!isSlow) json(response, 200, ADMITTED);
    });
    const tidegate = new Tidegate(fake.url, { maxConnections: 4, logger: () => {} });
    await Promise.all(Array.from({ length: 200 }, () => tidegate.check("a", "10/min")));
    isSlow = false;
    const heals = async () => {
      const decisions = await Promise.all(Array.from({ length: 4 }, () => tidegate.check("a", "10/min")));
      return decisions.every(({ source }) => source === "store");
    };
    await eventually("four decisions at once", heals);
    tidegate.close();
    fake.close();
  });
});

describe("Redis", () => {
  for (const [name, open] of Object.entries(CLIENTS)) {
    test(`${name}: suspended, killed and back`, async () => {
      const server = await RedisServer.start();
      const { client, close } = await open(server.url);
      const limiterFor = (options) => new RedisLimiter(client, options);
      const { messages, logger } = keepingLog();
      const healing = limiterFor({ logger });
      await eventually("a decision", async () => (await healing.check("k", "5/h")).source === "store");

      server.child.suspend();
      await assertFailure(limiterFor, ["timeout"]);
      server.child.resume();
      await eventually("a decision", async () => (await healing.check("k", "5/h")).source === "store");

      await server.kill();
      await assertFailure(limiterFor, ["timeout", "unreachable"]);
      for (let n = 0; n < 20; n++) assert.equal((await healing.check("outage", "1000/h")).allowed, true);
      await server.restart();
      await eventually("a decision", async () => (await healing.check("k", "5/h")).source === "store");
      assert.ok(messages.some((message) => /Redis answers again/.test(message)), messages.join("\n"));
      close();
      await server.kill();
    });
  }

  test("what was not sent during an outage is not charged after it", async () => {
    const server = await RedisServer.start();
    const { client, close } = await CLIENTS.ioredis(server.url);
    const limiter = new RedisLimiter(client, { logger: () => {} });
    await eventually("a decision", async () => (await limiter.check("k", "5/h")).source === "store");
    await server.kill();
    await eventually("the client notices", () => client.status !== "ready");
    for (let n = 0; n < 20; n++) await limiter.check("uncharged", "1000/h");
    await server.restart();
    await eventually("the client is connected", () => client.status === "ready");
    const patient = new RedisLimiter(client, { deadlineMs: 30_000, onError: "throw" });
    assert.equal((await patient.peek("uncharged", "1000/h")).remaining, 1_000);
    close();
    await server.kill();
  });
});
