// The middleware in real servers of each framework.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createRequire } from "node:module";
import { connect } from "node:net";
import { after, before, describe, test } from "node:test";
import { serve } from "@hono/node-server";
import express from "express";
import fastify from "fastify";
import { Hono } from "hono";
import { Redis } from "ioredis";

import * as expressEsm from "tidegate/express";
import * as fastifyEsm from "tidegate/fastify";
import * as honoEsm from "tidegate/hono";
import { ADMITTED, FORMS, RedisServer, closing, eventually, fakeService, json } from "./harness.mjs";

const require = createRequire(import.meta.url);
const { InvalidInputError, RedisLimiter, Tidegate } = FORMS.esm;
const PATIENT = { deadlineMs: 30_000, onError: "throw" };

/**
 * Each framework: starts a server with these options, whose route `/x` answers as the query `status` says and shows the
 * decision, `/raw` answers with a response of its own, `/throw` fails, `/hang` never answers, `/body` reads the body, and
 * `/free` is not limited. `broken()` returns how many bodies were incomplete.
 */
const FRAMEWORKS = {
  express: (rateLimit) => async (options) => {
    const app = express();
    const limited = rateLimit(options);
    let broken = 0;
    app.post("/body", limited, express.text(), (_, res) => res.send("complete"));
    app.all("/x", limited, (req, res) => res.status(Number(req.query.status ?? 200)).json(shown(req.tidegate)));
    app.get("/raw", limited, (_, res) => res.writeHead(200, { "content-type": "text/plain" }).end("raw"));
    app.get("/throw", limited, () => {
      throw new Error("on purpose");
    });
    app.get("/hang", limited, () => {});
    app.get("/free", (_, res) => res.send("free"));
    app.use((error, req, res, _next) => {
      if (req.path === "/body") broken++;
      res.status(500).send(error.name);
    });
    const server = app.listen(0, "127.0.0.1");
    await once(server, "listening");
    return { port: server.address().port, broken: () => broken, close: closing(() => (server.closeAllConnections(), void server.close())) };
  },
  fastify: (rateLimit) => async (options) => {
    const app = fastify();
    const limited = { onRequest: rateLimit(options) };
    let broken = 0;
    app.post("/body", limited, async () => "complete");
    app.all("/x", limited, (request, reply) =>
      reply.code(Number(request.query.status ?? 200)).send(shown(request.tidegate)),
    );
    app.get("/raw", limited, (_, reply) => reply.type("text/plain").send(Buffer.from("raw")));
    app.get("/throw", limited, async () => {
      throw new Error("on purpose");
    });
    app.get("/hang", limited, () => {});
    app.get("/free", async () => "free");
    app.setErrorHandler((error, request, reply) => {
      if (request.url === "/body") broken++;
      return reply.code(500).send(error.name);
    });
    await app.listen({ port: 0, host: "127.0.0.1" });
    return { port: app.server.address().port, broken: () => broken, close: closing(() => (app.server.closeAllConnections(), void app.close())) };
  },
  hono: (rateLimit) => async (options) => {
    const app = new Hono();
    const limited = rateLimit(options);
    let broken = 0;
    app.post("/body", limited, async (c) => c.text(await c.req.text()));
    app.all("/x", limited, (c) => c.json(shown(c.get("tidegate")), Number(c.req.query("status") ?? 200)));
    app.get("/raw", limited, () => new Response("raw", { headers: { "content-type": "text/plain" } }));
    app.get("/throw", limited, () => {
      throw new Error("on purpose");
    });
    app.get("/hang", limited, () => new Promise(() => {}));
    app.get("/free", (c) => c.text("free"));
    app.onError((error, c) => {
      if (c.req.path === "/body") broken++;
      return c.text(error.name, 500);
    });
    const server = serve({ fetch: app.fetch, port: 0, hostname: "127.0.0.1" });
    await once(server, "listening");
    return { port: server.address().port, broken: () => broken, close: closing(() => (server.closeAllConnections(), void server.close())) };
  },
};

function shown(decision) {
  return { allowed: decision.allowed, remaining: decision.remaining, source: decision.source };
}

const FORMS_OF = {
  express: { esm: expressEsm, cjs: require("tidegate/express") },
  fastify: { esm: fastifyEsm, cjs: require("tidegate/fastify") },
  hono: { esm: honoEsm, cjs: require("tidegate/hono") },
};

let redisServer, redis;
before(async () => {
  redisServer = await RedisServer.start();
  redis = new Redis(redisServer.port, "127.0.0.1");
});
after(async () => {
  redis.disconnect();
  await redisServer.kill();
});

let prefixes = 0;
/** Returns a limiter with counters of its own. */
function freshLimiter() {
  return new RedisLimiter(redis, { ...PATIENT, prefix: `test-${prefixes++}` });
}

test("by rules, a request target in another form is described by its path", async () => {
  const fake = await fakeService((_, response) => json(response, 200, ADMITTED));
  const app = await FRAMEWORKS.express(expressEsm.rateLimit)({ tidegate: new Tidegate(fake.url, PATIENT) });
  for (const target of ["http://other.example/x?a=b", "/x?a=b#c", "/x?a=b"]) {
    const socket = connect(app.port, "127.0.0.1");
    socket.write(`GET ${target} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n`);
    const [answer] = await once(socket, "data");
    assert.match(answer.toString(), /^HTTP\/1.1 200/, target);
    assert.equal(fake.requests.at(-1).body.request.path, "/x?a=b", target);
    socket.destroy();
  }
  app.close();
  fake.close();
});

for (const [name, framework] of Object.entries(FRAMEWORKS)) {
  for (const [form, module] of Object.entries(FORMS_OF[name])) {
    describe(`${name}, ${form}`, () => {
      const start = framework(module.rateLimit);
      const get = ({ port }, path, init) => fetch(`http://127.0.0.1:${port}${path}`, init);

      test("limits by address, shows headers on every response and the decision to the handler", async () => {
        const app = await start({ limiter: freshLimiter(), limit: ["2/h", "100/day"] });
        const first = await get(app, "/x?status=404");
        assert.equal(first.status, 404);
        assert.deepEqual(await first.json(), { allowed: true, remaining: 1, source: "store" });
        assert.equal(first.headers.get("x-ratelimit-limit"), "2");
        assert.equal(first.headers.get("x-ratelimit-remaining"), "1");
        assert.match(first.headers.get("ratelimit"), /^"per-hour";r=1;t=3600, "per-day";r=99;t=86400$/);
        const raw = await get(app, "/raw");
        assert.deepEqual([raw.status, await raw.text(), raw.headers.get("x-ratelimit-remaining")], [200, "raw", "0"]);

        const denied = await get(app, "/x", { method: "POST", headers: { "x-forwarded-for": "198.51.100.7" } });
        assert.equal(denied.status, 429);
        const body = await denied.json();
        assert.deepEqual(Object.keys(body), ["error", "message", "limit", "retry_after", "retry_after_ms", "policy"]);
        assert.deepEqual([body.error, body.limit, body.policy], ["rate_limited", 2, "per-hour"]);
        assert.equal(denied.headers.get("retry-after"), String(Math.ceil(body.retry_after_ms / 1_000)));
        assert.equal(denied.headers.get("cache-control"), "no-store");
        assert.match(denied.headers.get("content-type"), /^application\/json/);
        assert.equal(denied.headers.get("x-ratelimit-remaining"), "0");
        const free = await get(app, "/free");
        assert.deepEqual([free.status, free.headers.get("x-ratelimit-limit")], [200, null]);
        app.close();
      });

      test("a refusal is a problem if the request asks for it", async () => {
        const app = await start({ limiter: freshLimiter(), limit: "1/h", key: () => "a" });
        await get(app, "/x");
        const problem = await get(app, "/x", { headers: { accept: "text/html, application/problem+json" } });
        assert.equal(problem.status, 429);
        assert.match(problem.headers.get("content-type"), /^application\/problem\+json/);
        const body = await problem.json();
        assert.deepEqual([body.title, body["violated-policies"]], ["Quota exceeded", ["per-hour"]]);
        assert.match(body.detail, /^the limit of 1 per hour has been reached/);
        const plain = await get(app, "/x", { headers: { accept: "*/*" } });
        assert.match(plain.headers.get("content-type"), /^application\/json/);
        app.close();
      });

      test("an error of the handler keeps the headers", async () => {
        const app = await start({ limiter: freshLimiter(), limit: "2/h" });
        const failed = await get(app, "/throw");
        assert.deepEqual([failed.status, failed.headers.get("x-ratelimit-remaining")], [500, "1"]);
        app.close();
      });

      test("behind trusted proxies the forwarded address is counted", async () => {
        const options = { limiter: freshLimiter(), limit: "1/h", trustedProxies: ["127.0.0.1", "10.0.0.0/8"] };
        const app = await start(options);
        const from = async (address) => (await get(app, "/x", { headers: { "x-forwarded-for": address } })).status;
        assert.deepEqual([await from("203.0.113.1"), await from("203.0.113.1")], [200, 429]);
        assert.equal(await from("203.0.113.2"), 200);
        assert.equal(await from("203.0.113.9, 203.0.113.1, 10.1.2.3"), 429);
        assert.deepEqual([await from("2001:db8:1:2::1"), await from("2001:db8:1:2::9")], [200, 429]);
        app.close();
      });

      test("counts by a key and a cost of the application", async () => {
        const header = (request, name) => (request.req ? request.req.header(name) : request.headers[name]);
        const app = await start({
          limiter: freshLimiter(),
          limit: "3/h",
          key: async (request) => `user:${header(request, "x-user")}`,
          cost: (request) => Number(header(request, "x-cost") ?? 1),
        });
        const as = async (user, cost) =>
          (await get(app, "/x", { headers: { "x-user": user, "x-cost": cost } })).status;
        assert.deepEqual([await as("a", "2"), await as("a", "2"), await as("a", "1"), await as("b", "3")], [200, 429, 200, 200]);
        app.close();
      });

      test("units are given back for the named ending only", async () => {
        for (const [refundOn, free, charged] of [["success", 200, 404], ["failure", 500, 302]]) {
          const limiter = freshLimiter();
          const app = await start({ limiter, limit: "10/h", refundOn, key: () => "k" });
          const remaining = async () => (await limiter.peek("k", "10/h")).remaining;
          for (let n = 0; n < 5; n++) await (await get(app, `/x?status=${free}`)).arrayBuffer();
          await eventually("all five are given back", async () => (await remaining()) === 10);
          await (await get(app, `/x?status=${charged}`, { redirect: "manual" })).arrayBuffer();
          assert.equal(await remaining(), 9);
          app.close();
        }
      });

      test("a client that disconnects before the response keeps its charge", async () => {
        const limiter = freshLimiter();
        let refunds = 0;
        const counting = {
          check: (...args) => limiter.check(...args),
          refund: (...args) => (refunds++, limiter.refund(...args)),
        };
        const app = await start({ limiter: counting, limit: "10/h", refundOn: "success", key: () => "k" });
        const socket = connect(app.port, "127.0.0.1");
        socket.write("GET /hang HTTP/1.1\r\nhost: a\r\n\r\n");
        await eventually("the request is charged", async () => (await limiter.peek("k", "10/h")).remaining === 9);
        socket.destroy();
        await (await get(app, "/x?status=200")).arrayBuffer();
        await eventually("the other request is refunded", () => refunds === 1);
        assert.equal((await limiter.peek("k", "10/h")).remaining, 9);
        app.close();
        assert.equal(refunds, 1);
      });

      test("a client that disconnects in its body keeps its charge", async () => {
        const limiter = freshLimiter();
        let refunds = 0;
        const counting = {
          check: (...args) => limiter.check(...args),
          refund: (...args) => (refunds++, limiter.refund(...args)),
        };
        const app = await start({ limiter: counting, limit: "10/h", refundOn: "failure", key: () => "k" });
        const socket = connect(app.port, "127.0.0.1");
        socket.write("POST /body HTTP/1.1\r\nhost: a\r\ncontent-type: text/plain\r\ncontent-length: 100\r\n\r\nhalf");
        await eventually("the request is charged", async () => (await limiter.peek("k", "10/h")).remaining === 9);
        socket.destroy();
        await eventually("the handler has answered", () => app.broken() === 1);
        await (await get(app, "/x?status=500")).arrayBuffer();
        await eventually("the other request is refunded", () => refunds === 1);
        assert.equal((await limiter.peek("k", "10/h")).remaining, 9);
        app.close();
        assert.equal(refunds, 1);
      });

      test("a ban is 403", async () => {
        const limiter = freshLimiter();
        await limiter.ban("ip:127.0.0.1", { seconds: 60 });
        const app = await start({ limiter, limit: "10/h" });
        const banned = await get(app, "/x");
        assert.equal(banned.status, 403);
        assert.equal((await banned.json()).error, "banned");
        assert.equal(banned.headers.get("x-ratelimit-limit"), null);
        app.close();
      });

      test("without Redis, onError decides", async () => {
        const gone = { isOpen: true, isReady: true, evalSha: () => Promise.reject(new Error("gone")) };
        for (const [onError, status] of [["allow", 200], ["deny", 503], ["throw", 500]]) {
          const limiter = new RedisLimiter(gone, { onError, logger: () => {} });
          const app = await start({ limiter, limit: "10/h" });
          const response = await get(app, "/x");
          const text = await response.text();
          assert.equal(response.status, status, text);
          assert.equal(response.headers.get("x-ratelimit-limit"), null, "no quota is claimed");
          if (onError === "deny") {
            assert.equal(response.headers.get("retry-after"), "1");
            assert.equal(JSON.parse(text).error, "unavailable");
          }
          if (onError === "throw") assert.match(text, /UnavailableError/);
          app.close();
        }
      });

      test("by rules, a refusal is relayed as it is, and admissions carry the headers of the service", async () => {
        const refusal = {
          ...ADMITTED,
          allowed: false,
          error: "rate_limited",
          message: "no",
          response: { status: 429, headers: { "content-type": "text/x-own", "x-own": "1" }, body: "own body" },
        };
        let isRefused = false;
        const admitted = { ...ADMITTED, response: { headers: { "x-ratelimit-limit": "10" } } };
        const fake = await fakeService((_, response) =>
          isRefused ? json(response, 429, refusal) : json(response, 200, admitted),
        );
        const app = await start({ tidegate: new Tidegate(fake.url, PATIENT) });
        const passed = await get(app, "/x?a=b", { headers: { "x-test": "1" } });
        assert.deepEqual([passed.status, passed.headers.get("x-ratelimit-limit")], [200, "10"]);
        const { request } = fake.requests[0].body;
        assert.deepEqual([request.method, request.path, request.peer], ["GET", "/x?a=b", "127.0.0.1"]);
        assert.ok(request.headers.some(([name, value]) => name.toLowerCase() === "x-test" && value === "1"));
        isRefused = true;
        const refused = await get(app, "/x");
        assert.deepEqual([refused.status, await refused.text()], [429, "own body"]);
        assert.deepEqual([refused.headers.get("x-own"), refused.headers.get("content-type")], ["1", "text/x-own"]);
        app.close();
        fake.close();
      });

      test("by rules, units are given back once, for the endings that the service names", async () => {
        const fake = await fakeService(({ path }, response) =>
          path === "/v1/check"
            ? json(response, 200, { ...ADMITTED, receipt: "R", refund_on: ["failure"] })
            : json(response, 200, { applied: true }),
        );
        const app = await start({ tidegate: new Tidegate(fake.url, PATIENT) });
        const refunds = () => fake.requests.filter(({ path }) => path === "/v1/refund").map(({ body }) => body);
        await (await get(app, "/x?status=200")).arrayBuffer();
        await (await get(app, "/x?status=503")).arrayBuffer();
        await eventually("the refund", () => refunds().length > 0);
        await (await get(app, "/x?status=200")).arrayBuffer();
        assert.deepEqual(refunds(), [{ receipt: "R", status: 503 }]);
        app.close();
        fake.close();
      });

      test("the service can be the limiter of explicit limits", async () => {
        const fake = await fakeService((_, response) => json(response, 200, ADMITTED, { "x-ratelimit-limit": "10" }));
        const app = await start({ limiter: new Tidegate(fake.url, PATIENT), limit: "10/min", key: () => "k" });
        const passed = await get(app, "/x");
        assert.deepEqual([passed.status, passed.headers.get("x-ratelimit-limit")], [200, "10"]);
        assert.deepEqual(fake.requests[0].body, { key: "k", limit: "10/min", cost: 1 });
        app.close();
        fake.close();
      });

      test("a leaky-bucket delays requests", async () => {
        const app = await start({ limiter: freshLimiter(), limit: "20/s leaky-bucket", key: () => "k" });
        const responses = await Promise.all(Array.from({ length: 5 }, () => get(app, "/x")));
        assert.deepEqual(responses.map(({ status }) => status), [200, 200, 200, 200, 200]);
        app.close();
      });

      test("invalid options are rejected at the start", () => {
        const limiter = freshLimiter();
        const isInvalid = (error) => error.name === InvalidInputError.name && error.code === "invalid_input";
        for (const options of [
          undefined,
          {},
          { limiter },
          { limiter, limit: "10/fortnight" },
          { limiter, limit: [] },
          { limiter, limit: "1/s", trustedProxies: ["proxy"] },
          { limiter, limit: "1/s", refundOn: "error" },
          { tidegate: {} },
        ]) {
          assert.throws(() => module.rateLimit(options), isInvalid, JSON.stringify(options));
        }
      });
    });
  }
}
