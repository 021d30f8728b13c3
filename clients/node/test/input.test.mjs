// Bad input: a typed error, whatever `onError` is, and never an error of the Redis client or of the transport.
import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { FORMS } from "./harness.mjs";

const readyClient = () => ({ isOpen: true, isReady: true, evalSha: async () => assert.fail("nothing is sent") });

for (const [form, tidegate] of Object.entries(FORMS)) {
  describe(form, () => {
    const { InvalidInputError, RedisLimiter, Tidegate, TrustedProxies } = tidegate;
    const rejects = (call, phrase) => assert.rejects(call, (error) => isInvalid(error, phrase));
    const throws = (call, phrase) => assert.throws(call, (error) => isInvalid(error, phrase));
    const isInvalid = (error, phrase) => {
      assert.ok(error instanceof InvalidInputError && error instanceof tidegate.TidegateError, String(error));
      assert.equal(error.code, "invalid_input");
      assert.match(error.message, phrase);
      return true;
    };

    test("malformed limits, keys and costs are rejected before anything is sent", async () => {
      const limiters = [
        new RedisLimiter(readyClient(), { onError: "allow" }),
        new Tidegate("http://127.0.0.1:1", { onError: "allow", logger: () => assert.fail("nothing is sent") }),
      ];
      const cases = [
        ["a", "10/fortnight", {}, /us, ms, s, min, h, day, week/],
        ["a", "0/min", {}, /1 to 10000000/],
        ["a", 10, {}, /expected a limit/],
        ["a", undefined, {}, /expected a limit/],
        ["a", [], {}, /at least one limit/],
        ["a", Array(33).fill("1/s"), {}, /at most 32 limits/],
        ["a", ["1/s", "2/s"], {}, /same counter/],
        ["a", "1/s", { cost: -1 }, /cost must be a whole number/],
        ["a", "1/s", { cost: 1.5 }, /cost must be a whole number/],
        ["a", "1/s", { cost: NaN }, /cost must be a whole number/],
        ["a", "1/s", { cost: 2 ** 32 }, /from 0 to 4294967295/],
        ["a", "1/s", { cost: "1" }, /cost must be a whole number/],
        [undefined, "1/s", {}, /a key must be a string/],
        [null, "1/s", {}, /a key must be a string/],
        [42, "1/s", {}, /a key must be a string/],
        ["\ud800", "1/s", {}, /well-formed/],
        ["x".repeat(65_537), "1/s", {}, /at most 65536 bytes/],
      ];
      for (const limiter of limiters) {
        for (const [key, limit, options, phrase] of cases) await rejects(limiter.check(key, limit, options), phrase);
      }
      await rejects(limiters[1].check(Buffer.from([0xff]), "1/s"), /must be UTF-8/);
      await rejects(limiters[1].wait("a", "1/s", { maxWaitMs: 60_001 }), /from 0 to 60000/);
      await rejects(limiters[1].checkRequest({ method: "GET", path: "/" }), /the peer of a request must be text/);
      await rejects(limiters[0].ban("a", { seconds: -1 }), /a ban must last/);
      await rejects(limiters[0].checkAll([null]), /expected \{key, limit, cost\}/);
    });

    test("replies of a server that does not decide are typed errors without their text", async () => {
      const replies = {
        "TIDEGATE_ARGUMENT a step is a limit line": "script",
        "TIDEGATE_INTERNAL user_script:12: oops": "script",
        "TIDEGATE_FOREIGN the key holds another type": "foreign",
        "TIDEGATE_PARTLY TIDEGATE_FOREIGN the key holds another type": "foreign",
        "NOPERM this user has no permissions to access secret-key": "forbidden",
        "ERR The user executing the script can't access at least one of the keys": "forbidden",
        "WRONGPASS invalid username-password pair": "forbidden",
        "CROSSSLOT Keys in request don't hash to the same slot": "invalid_input",
        "CLUSTERDOWN Hash slot not served": "unavailable",
        "Too many Cluster redirections. Last error: ReplyError: TRYAGAIN Multiple keys request": "unavailable",
        "Too many Cluster redirections. Last error: Error: Connection is closed.": "unreachable",
        "MOVED 3999 127.0.0.1:6381": "unavailable",
        "OOM command not allowed when used memory > 'maxmemory'.": "unavailable",
        "LOADING Redis is loading the dataset in memory": "unavailable",
        "READONLY You can't write against a read only replica.": "unavailable",
        "ERR max number of clients reached": "unavailable",
        "ERR secret-key is unknown": "protocol",
        "WHATEVER secret-key": "protocol",
        "Connection is closed.": "unreachable",
        "connect ECONNREFUSED 127.0.0.1:6379": "unreachable",
      };
      for (const [reply, code] of Object.entries(replies)) {
        const client = { isOpen: true, isReady: true, evalSha: () => Promise.reject(new Error(reply)) };
        await assert.rejects(new RedisLimiter(client, { onError: "throw" }).check("secret-key", "1/s"), (error) => {
          const name = code === "invalid_input" ? "InvalidInputError" : "UnavailableError";
          assert.deepEqual([error.name, error.code], [name, code], reply);
          assert.doesNotMatch(error.message, /secret-key/);
          return error.cause.message === reply;
        });
      }
    });

    test("replies that are not those of the script are typed errors", async () => {
      const replies = [null, "OK", [], [1], [1, 1], [1, 2, 1, 1, 1, 1, 1, 0], [1, 1, 2, 9, 0, 0, 0, 0], [1, 1, 1, -1, 0, 0, 0, 0]];
      replies.push([1, 1, 1, 9, -2, 0, 0, 0], [1, 1, 1, "x", 0, 0, 0, 0], [1, 1, 1, 9, 0, 0, 0], [1, 1, 1, 9, 0, 0, 0, -1], [1, 0], [1, 0, 1, 1]);
      for (const reply of replies) {
        const client = { isOpen: true, isReady: true, evalSha: async () => reply };
        const limiter = new RedisLimiter(client, { onError: "throw" });
        await assert.rejects(limiter.check("a", "1/s"), { code: "protocol" }, JSON.stringify(reply));
      }
    });

    test("invalid options are rejected at the start", () => {
      throws(() => new Tidegate("127.0.0.1:8080"), /such as http:\/\/127.0.0.1:8080/);
      throws(() => new Tidegate("ftp://127.0.0.1"), /such as http/);
      throws(() => new Tidegate("http://u:secret@127.0.0.1"), /^(?!.*secret)/);
      throws(() => new Tidegate("http://127.0.0.1", { deadlineMs: 0 }), /deadlineMs must be above 0/);
      throws(() => new Tidegate("http://127.0.0.1", { onError: "raise" }), /"allow", "deny" or "throw"/);
      throws(() => new Tidegate("http://127.0.0.1", { token: "a\nb" }), /^(?!.*a\nb)/);
      throws(() => new Tidegate("http://127.0.0.1", { maxConnections: 0 }), /maxConnections/);
      throws(() => new RedisLimiter({}), /expected a Redis client/);
      throws(() => new RedisLimiter(null), /expected a Redis client/);
      throws(() => new RedisLimiter(readyClient(), { prefix: "a{b}" }), /key prefix/);
      throws(() => new RedisLimiter(readyClient(), { prefix: "" }), /key prefix/);
      throws(() => new RedisLimiter(readyClient(), { logger: "console" }), /logger must be a function/);
      for (const network of ["10.0.0.1/8", "localhost", "10.0.0.0/33", "::1/129", "10.0.0.0/", "1.2.3.4/x", ""]) {
        throws(() => new TrustedProxies([network]), /networks and addresses have the form/);
      }
      throws(() => new TrustedProxies([], "X-Forwarded-Host"), /one header with an address/);
      throws(() => new TrustedProxies([], "a, b"), /one header with an address/);
    });
  });
}
