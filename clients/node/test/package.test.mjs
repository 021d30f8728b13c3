// The package as a user installs it: packed, installed into a fresh directory, used in both module forms and from strict
// TypeScript.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, realpathSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
let directory;

function run(program, args) {
  return execFileSync(program, args, { cwd: directory, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] });
}

before(() => {
  directory = realpathSync(mkdtempSync(`${tmpdir()}/tidegate-node-package-`));
  writeFileSync(`${directory}/package.json`, '{ "name": "user", "private": true }');
  // The package is built already.
  const [packed] = JSON.parse(run("npm", ["pack", "--json", "--ignore-scripts", "--silent", root]));
  const offline = ["--offline", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"];
  run("npm", ["install", ...offline, `./${packed.filename}`]);
});
after(() => rmSync(directory, { recursive: true, force: true }));

test("has both module forms, types and the script, and no dependencies", () => {
  const list = run("npm", ["ls", "--all", "--parseable"]).trim().split("\n");
  assert.deepEqual(list, [directory, `${directory}/node_modules/tidegate`]);
  writeFileSync(
    `${directory}/form.mjs`,
    `import { Tidegate, RedisLimiter, parseLimit } from "tidegate";
     const middleware = await Promise.all(["express", "fastify", "hono"].map((name) => import("tidegate/" + name)));
     console.log(typeof Tidegate, typeof RedisLimiter, parseLimit("10/min").quota,
       ...middleware.map(({ rateLimit }) => typeof rateLimit));`,
  );
  writeFileSync(
    `${directory}/form.cjs`,
    `const { Tidegate, RedisLimiter, parseLimit } = require("tidegate");
     const middleware = ["express", "fastify", "hono"].map((name) => require("tidegate/" + name));
     console.log(typeof Tidegate, typeof RedisLimiter, parseLimit("10/min").quota,
       ...middleware.map(({ rateLimit }) => typeof rateLimit));`,
  );
  for (const file of ["form.mjs", "form.cjs"]) {
    assert.equal(run(process.execPath, [file]), "function function 10 function function function\n", file);
  }
});

const CONSUMER = `
import express from "express";
import fastify from "fastify";
import { Hono } from "hono";
import { Redis } from "ioredis";
import { createClient } from "redis";
import { RedisLimiter, Tidegate, TidegateError, type Decision, type Limiter } from "tidegate";
import { rateLimit as byExpress } from "tidegate/express";
import { rateLimit as byFastify } from "tidegate/fastify";
import { rateLimit as byHono } from "tidegate/hono";

const limiter: Limiter = new RedisLimiter(new Redis(), { onError: "throw", deadlineMs: 25 });
const other = new RedisLimiter(createClient());
const tidegate = new Tidegate("http://127.0.0.1:8080", { logger: (message, error?: TidegateError) => console.log(message, error?.code) });

const app = express();
app.use(byExpress({ tidegate }));
app.post("/", byExpress({ limiter, limit: "10/min", key: (req) => req.get("x-user") ?? "" }), (req, res) => {
  const decision: Decision | undefined = req.tidegate;
  res.json(decision?.remaining ?? null);
});

const server = fastify();
server.addHook("onRequest", byFastify({ tidegate }));
server.post("/", { onRequest: byFastify({ limiter: other, limit: ["10/min", "100/day"] }) }, (request) => request.tidegate?.limit);

const hono = new Hono();
hono.use(byHono({ limiter: tidegate, limit: "10/min", key: (c) => c.req.header("x-user") ?? "", refundOn: "failure" }));
hono.get("/", (c) => c.json(c.get("tidegate").remaining));

export async function retryAfter(): Promise<number | null> {
  const decision = await other.check("user:42", ["10/min"], { cost: 2 });
  return decision.allowed ? 0 : decision.retryAfter;
}
// @ts-expect-error a limit is needed
byExpress({ limiter });
// @ts-expect-error raise is not a name of this package
new Tidegate("http://127.0.0.1:8080", { onError: "raise" });
`;

test("its types work in strict TypeScript, for both module forms", () => {
  for (const name of ["express", "fastify", "hono", "ioredis", "redis"]) {
    symlinkSync(realpathSync(`${root}node_modules/${name}`), `${directory}/node_modules/${name}`);
  }
  mkdirSync(`${directory}/node_modules/@types`);
  for (const name of ["node", "express"]) {
    symlinkSync(realpathSync(`${root}node_modules/@types/${name}`), `${directory}/node_modules/@types/${name}`);
  }
  writeFileSync(`${directory}/consumer.mts`, CONSUMER);
  writeFileSync(`${directory}/consumer.cts`, CONSUMER);
  const options = ["--noEmit", "--strict", "--skipLibCheck", "--esModuleInterop", "--types", "node"];
  const modules = ["--module", "NodeNext", "--moduleResolution", "NodeNext", "--target", "ES2022"];
  try {
    run(process.execPath, [tsc, ...options, ...modules, "consumer.mts", "consumer.cts"]);
  } catch (error) {
    assert.fail(error.stdout);
  }
});
