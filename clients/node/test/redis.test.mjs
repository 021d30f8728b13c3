// The script client on a real Redis, with every supported client.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Redis } from "ioredis";

import { CLIENTS, FORMS, RedisServer, closing } from "./harness.mjs";

const { RedisLimiter } = FORMS.esm;
/** Exact counts need answers, not deadlines. */
const PATIENT = { deadlineMs: 30_000, onError: "throw" };

describe("one server", () => {
  let server, direct;
  before(async () => {
    server = await RedisServer.start();
    direct = new Redis(server.port, "127.0.0.1");
  });
  after(async () => {
    direct.disconnect();
    await server.kill();
  });

  for (const [name, open] of Object.entries(CLIENTS)) {
    describe(name, () => {
      let opened, limiter;
      before(async () => {
        opened = await open(server.url);
        limiter = new RedisLimiter(opened.client, { ...PATIENT, prefix: name.replaceAll(" ", "-") });
      });
      after(() => opened.close());

      test("counts exactly, also after the server has lost the script", async () => {
        await direct.script("FLUSH");
        const decisions = [];
        for (let n = 0; n < 4; n++) decisions.push(await limiter.check("user:42", "3/h"));
        assert.deepEqual(decisions.map(({ allowed }) => allowed), [true, true, true, false]);
        assert.deepEqual(decisions.map(({ remaining }) => remaining), [2, 1, 0, 0]);
        const denied = decisions[3];
        assert.equal(denied.reason, "rate_limited");
        assert.ok(denied.retryAfter > 3_500 && denied.retryAfter <= 3_600, String(denied.retryAfter));
        assert.equal(denied.limit, 3);
        assert.equal(denied.source, "store");
      });

      test("a check of several limits charges all or none", async () => {
        const limits = ["2/h", "100/day"];
        for (let n = 0; n < 3; n++) await limiter.check("several", limits);
        const { limits: statuses } = await limiter.peek("several", limits);
        assert.deepEqual(statuses.map(({ remaining }) => remaining), [0, 98]);
        assert.deepEqual(statuses.map((status) => status.name), ["per-hour", "per-day"]);
      });

      test("a refund is given once", async () => {
        const first = await limiter.check("refunded", "2/h", { cost: 2 });
        const other = new RedisLimiter(opened.client, PATIENT);
        assert.equal(await other.refund(first), false, "another limiter did not make the decision");
        assert.equal(await limiter.refund(first), true);
        assert.equal(await limiter.refund(first), false);
        assert.equal((await limiter.peek("refunded", "2/h")).remaining, 2);
        await limiter.check("refunded", "2/h", { cost: 2 });
        assert.equal(await limiter.refund(await limiter.check("refunded", "2/h")), false, "a denial");
        assert.equal(await limiter.refund(await limiter.peek("refunded", "2/h")), false, "a peek");
      });

      test("reset deletes the counter", async () => {
        await limiter.check("reset", "1/h");
        assert.equal((await limiter.check("reset", "1/h")).allowed, false);
        await limiter.reset("reset", "1/h");
        assert.equal((await limiter.check("reset", "1/h")).allowed, true);
      });

      test("a ban refuses checks until it is lifted, but no peek", async () => {
        await limiter.ban("banned", { seconds: 3_600 });
        const refused = await limiter.check("banned", "10/h");
        assert.deepEqual([refused.allowed, refused.reason], [false, "banned"]);
        assert.ok(refused.retryAfter > 3_500 && refused.retryAfter <= 3_600);
        assert.equal((await limiter.peek("banned", "10/h")).remaining, 10);
        await limiter.ban("banned");
        assert.equal((await limiter.check("banned", "10/h")).retryAfter, null);
        assert.equal(await limiter.unban("banned"), true);
        assert.equal(await limiter.unban("banned"), false);
        assert.equal((await limiter.check("banned", "10/h")).allowed, true);
      });

      test("a cost that never fits is denied as never", async () => {
        const denied = await limiter.check("absurd", "10/h", { cost: 4_294_967_295 });
        assert.deepEqual([denied.allowed, denied.retryAfter], [false, null]);
        assert.equal(denied.headers["retry-after"], undefined);
      });

      test("keys with spaces, braces and NULs count apart, and have the documented names", async () => {
        for (const key of ["a b", "a{b}", "a\0b", "", "%", "é", Buffer.from([0, 255])]) {
          assert.equal((await limiter.check(key, "1/h")).allowed, true, String(key));
          assert.equal((await limiter.check(key, "1/h")).allowed, false, String(key));
        }
        const prefix = name.replaceAll(" ", "-");
        assert.equal(await direct.exists(`${prefix}:tg2:{a%7Bb%7D}:sliding:3600000000`), 1);
        assert.equal(await direct.exists(`${prefix}:tg2:{a%00b}:sliding:3600000000`), 1);
      });

      test("a foreign value under the key is a typed error", async () => {
        const key = `${name.replaceAll(" ", "-")}:tg2:{foreign}:sliding:3600000000`;
        for (const command of [["SET", key, "x"], ["HSET", key, "a", "b"]]) {
          await direct.del(key);
          await direct.call(...command);
          await assert.rejects(limiter.check("foreign", "1/h"), { name: "UnavailableError", code: "foreign" });
        }
      });

      test("200 parallel calls admit exactly the quota", async () => {
        const decisions = await Promise.all(Array.from({ length: 200 }, () => limiter.check("parallel", "77/h")));
        assert.equal(decisions.filter(({ allowed }) => allowed).length, 77);
      });
    });
  }

  test("the module forms count on the same keys", async () => {
    const allowed = [];
    for (const { RedisLimiter } of [FORMS.esm, FORMS.cjs, FORMS.esm]) {
      allowed.push((await new RedisLimiter(direct, PATIENT).check("forms", "2/h")).allowed);
    }
    assert.deepEqual(allowed, [true, true, false]);
  });

  test("a client that connects on first use is connected by a check", async () => {
    const lazy = new Redis(server.port, "127.0.0.1", { lazyConnect: true });
    closing(() => lazy.disconnect());
    assert.equal((await new RedisLimiter(lazy, PATIENT).check("lazy", "1/h")).allowed, true);
  });

  test("a user without permissions is a typed error, in the answer and in the log", async () => {
    await direct.call("ACL", "SETUSER", "limited", "on", ">pw", "~*", "+@all", "-evalsha", "-eval");
    await direct.call("ACL", "SETUSER", "keyless", "on", ">pw", "~other", "+@all");
    for (const username of ["limited", "keyless"]) {
      const client = new Redis(server.port, "127.0.0.1", { username, password: "pw" });
      closing(() => client.disconnect());
      const limiter = new RedisLimiter(client, PATIENT);
      await assert.rejects(limiter.check("secret-key", "1/h"), (error) => {
        assert.deepEqual([error.name, error.code], ["UnavailableError", "forbidden"]);
        assert.match(error.message, /lacks permission/);
        assert.doesNotMatch(error.message, /secret-key/);
        return true;
      });
    }
  });

  test("a server out of memory is a typed error", async () => {
    const full = await RedisServer.start({ args: ["--maxmemory", "1", "--maxmemory-policy", "noeviction"] });
    const client = new Redis(full.port, "127.0.0.1");
    closing(() => client.disconnect());
    await assert.rejects(new RedisLimiter(client, PATIENT).check("a", "1/h"), { code: "unavailable" });
    await full.kill();
  });
});
