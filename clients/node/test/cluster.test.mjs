// The script client on a Redis Cluster of three masters, with every supported cluster client.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Cluster, Redis } from "ioredis";
import { createCluster } from "redis";
import { createCluster as createClusterV4 } from "redis-v4";
import { createCluster as createClusterV5 } from "redis-v5";

import { FORMS, TestCluster, closing, eventually, keepingLog } from "./harness.mjs";
import { replayTraces } from "./traces.mjs";

const { RedisLimiter } = FORMS.esm;
/** Exact counts need answers, not deadlines. */
const PATIENT = { deadlineMs: 30_000, onError: "throw" };
/** Enough subjects that each master has some of them. */
const SUBJECTS = 40;

/** The cluster clients that the package supports. */
const CLUSTER_CLIENTS = {
  ioredis: ({ nodes }) => {
    // ioredis repeats rejected calls 16 times with these pauses, which are 100 ms by default.
    const client = new Cluster(nodes, { retryDelayOnFailover: 0, retryDelayOnTryAgain: 5, retryDelayOnClusterDown: 5 });
    client.on("error", () => {});
    closing(() => client.disconnect());
    return client;
  },
  "redis v4": ({ urls }) => openNodeRedis(createClusterV4, urls),
  "redis v5": ({ urls }) => openNodeRedis(createClusterV5, urls),
  "redis v6": ({ urls }) => openNodeRedis(createCluster, urls),
};

async function openNodeRedis(create, urls) {
  const client = create({ rootNodes: urls.map((url) => ({ url })) });
  client.on("error", () => {});
  await client.connect();
  closing(() => (client.destroy ? client.destroy() : client.disconnect()));
  return client;
}

/** Returns a client of each master. */
function masters(cluster) {
  return cluster.nodes.map(({ host, port }) => {
    const client = new Redis(port, host);
    closing(() => client.disconnect());
    return client;
  });
}

describe("a cluster", () => {
  let cluster, valkey;
  before(async () => {
    [cluster, valkey] = await Promise.all([TestCluster.start("redis"), TestCluster.start("valkey")]);
  });
  after(() => Promise.all([cluster, valkey].map(({ child }) => child.kill())));

  async function replayOn(target, client, prefix) {
    await replayTraces(client, { prefix, isCluster: true });
    for (const master of masters(target)) {
      assert.notDeepEqual(await master.keys(`${prefix}:*`), [], "each master has counters");
    }
  }

  test("ioredis on Valkey: every decision and refund is that of the oracle", async () => {
    await replayOn(valkey, CLUSTER_CLIENTS.ioredis(valkey), "traces");
  });

  for (const [name, connect] of Object.entries(CLUSTER_CLIENTS)) {
    describe(name, () => {
      const prefix = name.replaceAll(" ", "-");
      let client, limiter;
      before(async () => {
        client = await connect(cluster);
        limiter = new RedisLimiter(client, { ...PATIENT, prefix });
      });

      test("every decision and refund is that of the oracle", () => replayOn(cluster, client, `traces-${prefix}`));

      test("all calls work for the keys of all masters", async () => {
        for (let n = 0; n < SUBJECTS; n++) {
          const key = `a b{c}${n}`;
          const decision = await limiter.check(key, ["1/h", "5/day"]);
          assert.equal(decision.allowed, true);
          assert.equal((await limiter.check(key, ["1/h", "5/day"])).allowed, false);
          assert.equal(await limiter.refund(decision), true);
          assert.deepEqual((await limiter.peek(key, ["1/h", "5/day"])).limits.map(({ remaining }) => remaining), [1, 5]);
          await limiter.ban(key);
          assert.equal((await limiter.check(key, ["1/h", "5/day"])).reason, "banned");
          assert.equal(await limiter.unban(key), true);
          await limiter.check(key, ["1/h", "5/day"]);
          await limiter.reset(key, ["1/h", "5/day"]);
          assert.equal((await limiter.check(key, ["1/h", "5/day"])).allowed, true);
        }
      });

      test("a check of several keys is invalid input, whatever onError is, and charges nothing", async () => {
        const demands = Array.from({ length: 10 }, (_, n) => ({ key: `several:${n}`, limit: "9/h" }));
        for (const onError of ["allow", "throw"]) {
          const rejecting = new RedisLimiter(client, { ...PATIENT, prefix, onError });
          await assert.rejects(rejecting.checkAll(demands), {
            code: "invalid_input",
            message: "the keys of one check are in different slots of the Redis Cluster; use one key per check",
          });
        }
        for (const { key, limit } of demands) assert.equal((await limiter.peek(key, limit)).remaining, 9);
      });

      test("the script is sent once to each master", async () => {
        for (const master of masters(cluster)) {
          await master.script("FLUSH");
          await master.config("RESETSTAT");
        }
        for (const remaining of [8, 7]) {
          for (let n = 0; n < SUBJECTS; n++) assert.equal((await limiter.check(`sent:${n}`, "9/h")).remaining, remaining);
        }
        for (const master of masters(cluster)) {
          assert.match(await master.info("commandstats"), /cmdstat_eval:calls=1,/);
        }
      });

      test("counters follow a slot that moves", async () => {
        const subject = `moving-${prefix}`;
        assert.equal((await limiter.check(subject, "9/h")).remaining, 8);
        await cluster.run("begin-move", `{${subject}}`);
        // The node has the counter, but not the key of the ban: it rejects the call with TRYAGAIN.
        await assert.rejects(limiter.check(subject, "9/h"), { code: "unavailable" });
        const { messages, logger } = keepingLog();
        const passed = await new RedisLimiter(client, { ...PATIENT, prefix, onError: "allow", logger }).check(subject, "9/h");
        assert.deepEqual([passed.allowed, passed.source, messages.length], [true, "none", 1]);
        await cluster.run("end-move", `{${subject}}`);
        // The masters learn of the new owner from each other.
        await eventually("a decision", async () => (await limiter.peek(subject, "9/h")).source === "store");
        assert.equal((await limiter.check(subject, "9/h")).remaining, 7, "calls without a verdict charge nothing");
      });

      test("a slot without a master is unavailable", async () => {
        const subject = `dropped-${prefix}`;
        assert.equal((await limiter.check(subject, "9/h")).remaining, 8);
        await cluster.run("drop-slot", `{${subject}}`);
        await assert.rejects(limiter.check(subject, "9/h"), { code: "unavailable" });
        const denied = await new RedisLimiter(client, { ...PATIENT, onError: "deny", prefix, logger: () => {} }).check(subject, "9/h");
        assert.deepEqual([denied.allowed, denied.reason], [false, "unavailable"]);
        await cluster.run("restore-slot", `{${subject}}`);
        assert.equal((await limiter.check(subject, "9/h")).remaining, 7);
      });
    });
  }

  test("ioredis: a call whose reply was lost is not repeated if retryDelayOnFailover is 0", async () => {
    const client = CLUSTER_CLIENTS.ioredis(cluster);
    const limiter = new RedisLimiter(client, { ...PATIENT, prefix: "lost" });
    assert.equal((await limiter.check("k", "9/h")).remaining, 8);
    for (const { stream } of client.nodes("master").filter(({ status }) => status === "ready")) {
      stream.removeAllListeners("data");
      stream.once("data", () => stream.destroy());
    }
    await assert.rejects(limiter.check("k", "9/h"), { code: "unreachable" });
    const healed = new RedisLimiter(CLUSTER_CLIENTS.ioredis(cluster), { ...PATIENT, prefix: "lost" });
    assert.equal((await healed.peek("k", "9/h")).remaining, 7, "charged once");
  });

  test("the error of a client of one node says to use a cluster client", async () => {
    const errors = [];
    for (const master of masters(cluster)) {
      const limiter = new RedisLimiter(master, PATIENT);
      await limiter.check("k", "9/h").catch((error) => errors.push(error));
    }
    assert.equal(errors.length, 2, "one of three masters has the key");
    for (const { code, message } of errors) {
      assert.deepEqual([code, /use a cluster client/.test(message), /tg2/.test(message)], ["unavailable", true, false]);
    }
  });
});
