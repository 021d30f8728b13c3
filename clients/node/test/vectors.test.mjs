// The vectors that all clients replay: keys, limit lines, traces on Redis and Valkey, addresses, answers.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { after, before, describe, test } from "node:test";
import { Redis } from "ioredis";

import { FORMS, RedisServer } from "./harness.mjs";
import { replayTraces, vectors } from "./traces.mjs";

const script = new URL("../../../crates/tidegate-redis/lua/tidegate.lua", import.meta.url);

for (const [form, tidegate] of Object.entries(FORMS)) {
  describe(form, () => {
    test("embedded script is the script of this checkout", () => {
      const { SCRIPT, SCRIPT_SHA1 } = tidegate;
      assert.equal(SCRIPT, readFileSync(script, "utf8"));
      assert.equal(SCRIPT_SHA1, createHash("sha1").update(SCRIPT).digest("hex"));
      assert.equal(SCRIPT_SHA1, vectors.script_sha1);
    });

    test("keys are those of every other client", () => {
      for (const { subject_hex, limit, prefix, key, ban_key } of vectors.keys) {
        const keys = new tidegate.KeyBuilder(prefix);
        const subject = Buffer.from(subject_hex, "hex");
        assert.equal(keys.counter(subject, tidegate.parseLimit(limit)), key);
        if (ban_key !== undefined) assert.equal(keys.ban(subject), ban_key);
        const text = subject.toString();
        if (Buffer.from(text).equals(subject)) assert.equal(keys.counter(text, tidegate.parseLimit(limit)), key);
        assert.ok(key.includes(`:${tidegate.STATE_VERSION}:{`), "the version of the state");
      }
    });

    test("limits are parsed as the Rust library parses them", () => {
      for (const { text, line, error, meant } of vectors.limits) {
        if (line !== undefined) {
          assert.equal(tidegate.limitLine(tidegate.parseLimit(text), 1), line, text);
        } else {
          assert.equal(typeof error, "string");
          assert.throws(() => tidegate.parseLimit(text), (thrown) => {
            assert.ok(thrown instanceof tidegate.InvalidInputError, text);
            const suggestion = /; did you mean (.*)\?$/.exec(thrown.message)?.[1];
            assert.equal(suggestion, meant, text);
            return true;
          });
        }
      }
    });

    test("client addresses and subjects are those of the Rust library", () => {
      for (const vector of vectors.addresses) {
        const proxies = new tidegate.TrustedProxies(vector.trusted, vector.header);
        const found = proxies.clientAddress(tidegate.parseAddress(vector.peer), vector.lines);
        assert.equal(tidegate.addressText(found), vector.address, JSON.stringify(vector));
        assert.equal(tidegate.addressSubject(found), vector.subject, JSON.stringify(vector));
      }
    });

    test("headers and default answers are those of the Rust layer", async () => {
      for (const answer of vectors.answers) {
        const decision = await decide(tidegate, answer);
        if (answer.body === null) {
          assert.equal(decision.allowed, true);
          assert.deepEqual(decision.headers, answer.headers);
          continue;
        }
        const { status, headers, body } = tidegate.refusalResponse(decision);
        assert.deepEqual([status, headers], [answer.status, answer.headers]);
        assert.deepEqual(JSON.parse(body), answer.body);
        const problem = tidegate.refusalResponse(decision, "application/problem+json");
        assert.deepEqual(problem.headers, { ...headers, "content-type": "application/problem+json" });
        assert.deepEqual(JSON.parse(problem.body), answer.problem);
      }
    });

    test("a refusal is a problem if Accept asks for it", async () => {
      const decision = await decide(tidegate, vectors.answers.find((answer) => answer.status === 429));
      for (const { lines, problem } of vectors.accepts) {
        const type = tidegate.refusalResponse(decision, lines).headers["content-type"];
        assert.equal(type === "application/problem+json", problem, lines.join("|"));
      }
    });
  });
}

/** Returns the decision of an answer vector, by way of a Redis client that replies with its numbers. */
async function decide(tidegate, { at_us, limits }) {
  const numbers = limits.flatMap((status) => [
    status.allowed ? 1 : 0,
    status.remaining,
    status.retry_after_us,
    status.next_after_us,
    status.reset_after_us,
    0,
  ]);
  const client = { isOpen: true, isReady: true, evalSha: async () => [at_us, 1, ...numbers] };
  const limiter = new tidegate.RedisLimiter(client, { onError: "throw" });
  return limiter.checkAll(limits.map(({ limit, cost }, index) => ({ key: `k${index}`, limit, cost })));
}

for (const kind of ["redis-server", "valkey-server"]) {
  describe(`traces on ${kind}`, () => {
    let server, redis;
    before(async () => {
      server = await RedisServer.start({ kind });
      redis = new Redis(server.port, "127.0.0.1");
    });
    after(async () => {
      redis.disconnect();
      await server.kill();
    });

    test("every decision and refund is that of the oracle", () => replayTraces(redis));
  });
}
