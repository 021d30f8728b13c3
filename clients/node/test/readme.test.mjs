// Every JavaScript block of the README runs as it is, with a real Redis, a real cluster and the real service.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { RedisServer, Service, TestCluster, eventually, freePort, writeConfig } from "./harness.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));
const readme = readFileSync(`${root}README.md`, "utf8");
const blocks = [...readme.matchAll(/^```js\n(.*?)^```$/gms)].map((match) => match[1]);

let redis, cluster, service;
before(async () => {
  const config = writeConfig('[[rules]]\nname = "api"\nby = ["ip"]\nlimits = ["10/h"]\n');
  redis = await RedisServer.start();
  cluster = await TestCluster.start("redis");
  service = await Service.start(["--store", "memory", "--config", config]);
});
after(() => Promise.all([redis.kill(), cluster.child.kill(), service.child.kill()]));

test("the README opens with ten lines that work", () => {
  assert.ok(blocks[0].trim().split("\n").length <= 10);
});

test("there are no other blocks", () => {
  assert.equal([...readme.matchAll(/^```\w+$/gm)].length, blocks.length);
});

for (const [index, block] of blocks.entries()) {
  test(`block ${index + 1}: ${/from "(tidegate.*?)";\n(?!import)/.exec(block)?.[1]}`, async () => {
    const port = String(await freePort());
    const urls = { REDIS_URL: redis.url, REDIS_CLUSTER_URL: cluster.urls[0], TIDEGATE_URL: service.url };
    const env = { ...process.env, ...urls, PORT: port };
    const child = spawn(process.execPath, ["--input-type=module", "--eval", block], { cwd: root, env });
    let output = "";
    child.stdout.on("data", (chunk) => (output += chunk));
    child.stderr.on("data", (chunk) => (output += chunk));
    try {
      if (!/PORT/.test(block)) {
        const code = await eventually("the end", () => child.exitCode !== null && { code: child.exitCode });
        assert.deepEqual([code.code, /per-minute/.test(output)], [0, true], output);
        return;
      }
      const left = async () => {
        const response = await fetch(`http://localhost:${port}/shorten`, { method: "POST" });
        return response.status === 200 && (await response.json()).left !== null && response;
      };
      const response = await eventually(`an answer, after: ${output}`, left);
      assert.ok(response.headers.has("ratelimit") || /tidegate }/.test(block), "rate-limit headers");
      assert.equal(child.exitCode, null, output);
    } finally {
      child.kill("SIGKILL");
    }
  });
}
