// Compares tidegate with express-rate-limit + rate-limit-redis, in one interleaved run: requests per second of an
// Express application, and the CPU time of the application and of Redis per request.
//
//   npm install --prefix clients/node/bench && npm run build --prefix clients/node
//   node clients/node/bench/bench.mjs [ROUNDS [REQUESTS]]
//
// One process serves, another one sends the requests, a third one is Redis. Each round measures every candidate once, in
// turn, so that other load on the machine affects all of them. The medians of all rounds are printed.
import { fork, spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync } from "node:fs";
import { Agent, request } from "node:http";
import { createServer } from "node:net";
import { fileURLToPath } from "node:url";
import express from "express";
import { Redis } from "ioredis";

const [rounds, requests] = [Number(process.argv[2] ?? 7), Number(process.argv[3] ?? 5_000)];
const CLIENTS = 100;
const PARALLEL = 32;
const QUOTA = 1_000;

/** Each candidate: its middleware on a Redis client, and what it guarantees. */
const CANDIDATES = {
  "no limiter": {
    guarantees: "nothing",
    middleware: () => (_req, _res, next) => next(),
  },
  "express-rate-limit + rate-limit-redis": {
    guarantees: "fixed window per client: up to twice the quota in a trailing window; no deadline; denials are counted",
    middleware: async (redis) => {
      const [{ rateLimit }, { RedisStore }] = await Promise.all([import("express-rate-limit"), import("rate-limit-redis")]);
      return rateLimit({
        windowMs: 60_000,
        limit: QUOTA,
        standardHeaders: "draft-8",
        legacyHeaders: true,
        keyGenerator: (req) => req.get("x-client"),
        store: new RedisStore({ sendCommand: (...args) => redis.call(...args) }),
      });
    },
  },
  "tidegate sliding": {
    guarantees: "never more than the quota in any trailing window, exact; deadline 25 ms; bans; denials are not charged",
    middleware: (redis) => tidegate(redis, `${QUOTA}/min`),
  },
  "tidegate sliding-counter": {
    guarantees: "two weighted counters, approximate; deadline 25 ms; bans; denials are not charged",
    middleware: (redis) => tidegate(redis, `${QUOTA}/min sliding-counter`),
  },
  "tidegate fixed-window": {
    guarantees: "fixed window by the clock: up to twice the quota in a trailing window; deadline 25 ms; bans",
    middleware: (redis) => tidegate(redis, `${QUOTA}/min fixed-window`),
  },
};

async function tidegate(redis, limit) {
  const [{ RedisLimiter }, { rateLimit }] = await Promise.all([
    import("../dist/esm/index.js"),
    import("../dist/esm/express.js"),
  ]);
  const limiter = new RedisLimiter(redis, { deadlineMs: 10_000, onError: "throw" });
  return rateLimit({ limiter, limit, key: (req) => req.get("x-client") });
}

/** Serves all candidates, each under a path of its own, and reports the port. */
async function runServer(redisPort) {
  const app = express();
  const redis = new Redis(redisPort, "127.0.0.1");
  for (const [index, { middleware }] of Object.values(CANDIDATES).entries()) {
    app.get(`/${index}`, await middleware(redis), (_req, res) => res.json({ ok: true }));
  }
  const server = app.listen(0, "127.0.0.1", () => process.send(server.address().port));
  process.on("message", () => {
    const { user, system } = process.cpuUsage();
    process.send(user + system);
  });
}

async function startRedis() {
  const probe = createServer().listen(0, "127.0.0.1");
  await once(probe, "listening");
  const { port } = probe.address();
  probe.close();
  const local = fileURLToPath(new URL("../../../.tools/bin/redis-server", import.meta.url));
  const args = ["--port", String(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"];
  const child = spawn(existsSync(local) ? local : "redis-server", args, { stdio: "ignore" });
  return { port, child };
}

/** Sends `requests` requests of many clients, and returns the statuses with their counts. */
async function load(port, path, agent) {
  let sent = 0;
  const statuses = {};
  const one = () =>
    new Promise((resolve, reject) => {
      const headers = { "x-client": `client-${sent % CLIENTS}` };
      const call = request({ port, path, host: "127.0.0.1", agent, headers }, (response) => {
        statuses[response.statusCode] = (statuses[response.statusCode] ?? 0) + 1;
        response.resume().on("end", resolve);
      });
      call.on("error", reject).end();
    });
  const worker = async () => {
    while (sent++ < requests) await one();
  };
  await Promise.all(Array.from({ length: PARALLEL }, worker));
  return statuses;
}

/** Returns the CPU time that Redis has used, in microseconds. */
async function redisCpuUs(redis) {
  const info = await redis.info("cpu");
  const seconds = (name) => Number(new RegExp(`${name}:([0-9.]+)`).exec(info)[1]);
  return (seconds("used_cpu_user") + seconds("used_cpu_sys")) * 1e6;
}

/** Returns the CPU time that the application has used, in microseconds. */
async function serverCpuUs(server) {
  server.send("cpu");
  const [us] = await once(server, "message");
  return us;
}

function median(values) {
  return [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
}

async function main() {
  const { port: redisPort, child } = await startRedis();
  const server = fork(fileURLToPath(import.meta.url), ["serve", String(redisPort)]);
  const [port] = await once(server, "message");
  const redis = new Redis(redisPort, "127.0.0.1");
  const agent = new Agent({ keepAlive: true, maxSockets: PARALLEL });
  const results = Object.keys(CANDIDATES).map(() => ({ perSecond: [], appUs: [], redisUs: [] }));
  for (let round = -1; round < rounds; round++) {
    for (const [index, result] of results.entries()) {
      // Each round starts with empty counters, so that no request is denied.
      await redis.flushall();
      const [redisBefore, appBefore] = [await redisCpuUs(redis), await serverCpuUs(server)];
      const startMs = performance.now();
      const statuses = await load(port, `/${index}`, agent);
      const elapsedMs = performance.now() - startMs;
      const [redisAfter, appAfter] = [await redisCpuUs(redis), await serverCpuUs(server)];
      if (statuses[200] !== requests) throw new Error(`unexpected answers: ${JSON.stringify(statuses)}`);
      if (round < 0) continue; // a round to warm up
      result.perSecond.push((requests / elapsedMs) * 1_000);
      result.appUs.push((appAfter - appBefore) / requests);
      result.redisUs.push((redisAfter - redisBefore) / requests);
    }
  }
  console.log(`${rounds} rounds of ${requests} requests, ${PARALLEL} at a time, ${CLIENTS} clients, medians\n`);
  console.log("| | requests/s | app CPU µs/request | Redis CPU µs/request | guarantees |\n|---|---|---|---|---|");
  for (const [index, [name, { guarantees }]] of Object.entries(CANDIDATES).entries()) {
    const { perSecond, appUs, redisUs } = results[index];
    const numbers = [median(perSecond).toFixed(0), median(appUs).toFixed(0), median(redisUs).toFixed(1)];
    console.log(`| ${name} | ${numbers.join(" | ")} | ${guarantees} |`);
  }
  server.kill();
  child.kill();
  process.exit(0);
}

if (process.argv[2] === "serve") await runServer(Number(process.argv[3]));
else await main();
