// The service client with the real service and with a fake one.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";

import { ADMITTED, FORMS, Service, fakeService, json, writeConfig } from "./harness.mjs";

const PATIENT = { deadlineMs: 30_000, onError: "throw" };
const RULES = `
[[rules]]
name = "api"
match = { path = "/a" }
by = ["ip"]
limits = ["2/h"]

[[rules]]
name = "login"
match = { path = "/login" }
by = ["ip"]
limits = ["2/h"]
charge = "on_failure"
`;

describe("the real service", () => {
  let service, byRules;
  before(async () => {
    service = await Service.start(["--store", "memory"]);
    byRules = await Service.start(["--store", "memory", "--config", writeConfig(RULES)]);
  });
  after(() => Promise.all([service.child.kill(), byRules.child.kill()]));

  for (const [form, { Tidegate }] of Object.entries(FORMS)) {
    test(`${form}: check and peek`, async () => {
      const tidegate = new Tidegate(service.url, PATIENT);
      const first = await tidegate.check(`${form}:user`, ["2/h", "100/day"]);
      assert.deepEqual([first.allowed, first.remaining, first.limit, first.source], [true, 1, 2, "store"]);
      assert.equal(first.headers["ratelimit-policy"], '"per-hour";q=2;w=3600, "per-day";q=100;w=86400');
      assert.equal(first.headers["x-ratelimit-remaining"], "1");
      await tidegate.check(`${form}:user`, ["2/h", "100/day"]);
      const denied = await tidegate.check(`${form}:user`, ["2/h", "100/day"]);
      assert.deepEqual([denied.allowed, denied.reason, denied.remaining], [false, "rate_limited", 0]);
      assert.ok(denied.retryAfter > 3_500 && denied.retryAfter <= 3_600);
      const peeked = await tidegate.peek(`${form}:user`, "100/day");
      assert.deepEqual([peeked.allowed, peeked.remaining], [true, 98]);
      const never = await tidegate.check(`${form}:other`, "2/h", { cost: 3 });
      assert.deepEqual([never.allowed, never.retryAfter], [false, null]);
      tidegate.close();
    });
  }

  test("checkRequest decides by the rules of the service", async () => {
    const tidegate = new FORMS.esm.Tidegate(byRules.url, PATIENT);
    const request = { method: "GET", path: "/a?b=c", headers: { "x-a": "1", "x-b": ["2", "3"] }, peer: "203.0.113.9" };
    const decisions = [];
    for (let n = 0; n < 3; n++) decisions.push(await tidegate.checkRequest(request));
    assert.deepEqual(decisions.map(({ allowed }) => allowed), [true, true, false]);
    assert.equal(decisions[0].headers["x-ratelimit-remaining"], "1");
    assert.equal(decisions[0].limits[0].rule, "api");
    const { status, headers, body } = decisions[2].response;
    assert.deepEqual([status, headers["x-ratelimit-remaining"], JSON.parse(body).rule], [429, "0", "api"]);
    assert.equal((await tidegate.checkRequest({ ...request, peer: "203.0.113.10" })).allowed, true);
    tidegate.close();
  });

  test("a refund by receipt is given once, in full or for what was not used", async () => {
    const tidegate = new FORMS.esm.Tidegate(service.url, PATIENT);
    const whole = await tidegate.check("refunded", "10/h", { cost: 4, receipt: true });
    assert.equal(await tidegate.refund(whole), true);
    assert.equal(await tidegate.refund(whole), false);
    const partly = await tidegate.check("refunded", "10/h", { cost: 4, receipt: true });
    assert.equal(await tidegate.refund(partly, { used: 1 }), true);
    assert.equal((await tidegate.peek("refunded", "10/h")).remaining, 9);
    assert.equal(await tidegate.refund(await tidegate.check("refunded", "10/h")), false, "no receipt was asked for");
    await assert.rejects(tidegate.refund("not a receipt"), { name: "InvalidInputError" });
    tidegate.close();
  });

  test("a refund by rules depends on the status of the response", async () => {
    const tidegate = new FORMS.esm.Tidegate(byRules.url, PATIENT);
    const request = { method: "POST", path: "/login", peer: "203.0.113.20" };
    const decision = await tidegate.checkRequest(request, { receipt: true });
    assert.deepEqual(decision.refundOn, ["success"]);
    assert.equal(await tidegate.refund(decision, { status: 200 }), true);
    assert.equal((await tidegate.checkRequest(request)).remaining, 1, "only this one is charged");
    tidegate.close();
  });

  test("wait returns when the units are available, and is denied if that is too late", async () => {
    const tidegate = new FORMS.esm.Tidegate(service.url, PATIENT);
    assert.equal((await tidegate.check("waiting", "1/200ms")).allowed, true);
    assert.equal((await tidegate.wait("waiting", "1/200ms", { maxWaitMs: 30_000 })).allowed, true);
    assert.equal((await tidegate.check("long", "1/h")).allowed, true);
    const denied = await tidegate.wait("long", "1/h", { maxWaitMs: 100 });
    assert.deepEqual([denied.allowed, denied.reason], [false, "rate_limited"]);
    tidegate.close();
  });

  test("input that only the service can judge is an InvalidInputError with its words", async () => {
    const tidegate = new FORMS.esm.Tidegate(service.url, { onError: "allow", deadlineMs: 30_000 });
    await assert.rejects(tidegate.checkRequest({ method: "GET", path: "/", peer: "localhost" }), {
      name: "InvalidInputError",
      message: /expected an IP address/,
    });
    tidegate.close();
  });

  test("200 parallel calls admit exactly the quota", async () => {
    const tidegate = new FORMS.esm.Tidegate(service.url, PATIENT);
    const calls = Array.from({ length: 200 }, () => tidegate.check("parallel", "77/h"));
    const decisions = await Promise.all(calls);
    assert.equal(decisions.filter(({ allowed }) => allowed).length, 77);
    tidegate.close();
  });
});

describe("a fake service", () => {
  const { Tidegate } = FORMS.esm;

  /** Starts a fake service with these answers by path, and a client of it. */
  async function withFake(handle, options = {}) {
    const fake = await fakeService(handle);
    const tidegate = new Tidegate(fake.url, { ...PATIENT, ...options });
    return { fake, tidegate, close: () => (tidegate.close(), fake.close()) };
  }

  test("receipts are asked for, carried and refunded", async () => {
    const { fake, tidegate, close } = await withFake(({ path }, response) =>
      path === "/v1/check"
        ? json(response, 200, { ...ADMITTED, receipt: "R1", refund_on: ["failure"] })
        : json(response, 200, { applied: fake.requests.length < 3, reason: "already_used" }),
    );
    const decision = await tidegate.check("a", "10/min", { receipt: true, cost: 2 });
    assert.deepEqual(fake.requests[0].body, { key: "a", limit: "10/min", cost: 2, receipt: true });
    assert.equal(decision.receipt, "R1");
    assert.equal(await tidegate.refund(decision, { used: 1 }), true);
    assert.deepEqual(fake.requests[1].body, { receipt: "R1", used: 1 });
    assert.equal(await tidegate.refund("R1", { status: 200 }), false, "used before");
    assert.deepEqual(fake.requests[2].body, { receipt: "R1", status: 200 });
    assert.equal(await tidegate.refund(await tidegate.check("a", "10/min").then(({ receipt, ...rest }) => rest)), false);
    close();
  });

  test("wait sends the longest wait, and its deadline is longer by it", async () => {
    const answerWaits = ({ body }, response) => {
      if (body.wait_ms !== undefined) setTimeout(() => json(response, 200, ADMITTED), 200);
    };
    const { fake, tidegate, close } = await withFake(answerWaits, { deadlineMs: 100 });
    await assert.rejects(tidegate.check("a", "10/min"), { code: "timeout" });
    assert.equal((await tidegate.wait("a", "10/min", { maxWaitMs: 30_000 })).allowed, true);
    assert.deepEqual(fake.requests.at(-1).body, { key: "a", limit: "10/min", cost: 1, wait_ms: 30_000 });
    close();
  });

  test("the token is sent, and a wrong one is a typed error without it", async () => {
    const { fake, tidegate, close } = await withFake(
      (_, response) => json(response, 401, { error: "unauthenticated", message: "no" }),
      { token: "hunter2" },
    );
    await assert.rejects(tidegate.check("a", "10/min"), (error) => {
      assert.deepEqual([error.name, error.code], ["UnavailableError", "forbidden"]);
      assert.doesNotMatch(error.message, /hunter2/);
      return true;
    });
    assert.equal(fake.requests[0].headers.authorization, "Bearer hunter2");
    close();
  });

  test("a ban, a refusal without a store and a path that is too long are decisions", async () => {
    const refused = { allowed: false, source: "none", limits: [], retry_after_ms: 1_500 };
    const answers = [
      [403, { ...refused, error: "banned" }, "banned", 1.5],
      [503, { ...refused, error: "unavailable" }, "unavailable", 1.5],
      [414, { ...refused, error: "path_too_long", retry_after_ms: undefined }, "path_too_long", null],
      [403, { ...refused, error: "banned", retry_after_ms: null }, "banned", null],
    ];
    const { tidegate, close } = await withFake((_, response) => json(response, ...answers[0]));
    while (answers.length > 0) {
      const decision = await tidegate.check("a", "10/min");
      const [, , reason, retryAfter] = answers.shift();
      assert.deepEqual([decision.allowed, decision.reason, decision.retryAfter], [false, reason, retryAfter]);
    }
    close();
  });

  test("answers that are not Tidegate's are typed errors", async () => {
    const answers = [
      [200, "<html>"],
      [200, "{}"],
      [200, '{"allowed":true}'],
      [200, '{"allowed":true,"source":"store","limits":[{}]}'],
      [200, '{"allowed":true,"source":"store","limits":[null]}'],
      [404, "{}"],
      [302, ""],
      [500, "oops"],
      [200, "x".repeat(2 * 1024 * 1024)],
    ];
    const { tidegate, close } = await withFake((_, response) => {
      response.writeHead(answers[0][0], { "content-type": "application/json" });
      response.end(answers[0][1]);
    });
    while (answers.length > 0) {
      await assert.rejects(tidegate.check("a", "10/min"), (error) => error.name === "UnavailableError", answers[0][1]);
      answers.shift();
    }
    close();
  });

  test("200 parallel calls use at most the configured connections, again and again", async () => {
    const { fake, tidegate, close } = await withFake((_, response) => json(response, 200, ADMITTED), {
      maxConnections: 8,
    });
    for (let round = 0; round < 5; round++) {
      const calls = Array.from({ length: 200 }, () => tidegate.check("a", "10/min"));
      for (const { allowed } of await Promise.all(calls)) assert.equal(allowed, true);
    }
    assert.equal(fake.requests.length, 1_000);
    assert.ok(fake.connections <= 8, `${fake.connections} connections`);
    close();
  });
});
