/**
 * One interface for all Redis clients that applications use.
 *
 * **A call ends within its deadline.** While a client is not connected, it queues commands and sends them later, long
 * after the request that they belong to was answered, which would be charged for nothing. So no command is given to a
 * client that is not ready. A call waits while the client connects, up to its deadline, and fails at once while the
 * client pauses between attempts. After one call has waited in vain, others fail at once until the client is ready.
 */
import { InvalidInputError } from "./errors.js";

interface Emitter {
  on(event: string, listener: () => void): unknown;
  off(event: string, listener: () => void): unknown;
}

/** The part of ioredis' `Redis` and `Cluster` that is used. */
export interface IoredisClient extends Emitter {
  readonly status: string;
  connect(): Promise<unknown>;
  evalsha(sha1: string, keyCount: number, ...keysAndArguments: string[]): Promise<unknown>;
  eval(script: string, keyCount: number, ...keysAndArguments: string[]): Promise<unknown>;
  del(...keys: string[]): Promise<number>;
  set(key: string, value: string): Promise<unknown>;
  set(key: string, value: string, px: "PX", ttlMs: number): Promise<unknown>;
}

/** The part of node-redis' clients, pools and clusters that is used. */
export interface NodeRedisClient extends Emitter {
  readonly isOpen: boolean;
  readonly isReady?: boolean;
  evalSha(sha1: string, options: { keys: string[]; arguments: string[] }): Promise<unknown>;
  eval(script: string, options: { keys: string[]; arguments: string[] }): Promise<unknown>;
  del(keys: string[]): Promise<number>;
  set(key: string, value: string, options?: { PX: number }): Promise<unknown>;
}

/** The additional part of node-redis' clusters that is used. */
export interface NodeRedisCluster extends NodeRedisClient {
  nodeClient(node: unknown): unknown;
  sendCommand(firstKey: string, isReadonly: boolean, command: string[]): Promise<unknown>;
}

/**
 * A supported Redis client: ioredis' `Redis` or `Cluster`, or a client, pool or cluster of node-redis.
 *
 * The types of the clients differ between versions, so any object is accepted. The constructor of `RedisLimiter`
 * verifies it.
 */
export type RedisClient = object;

/** A Redis client in the form that the limiter uses. */
export interface RedisConnection {
  /**
   * Calls `proceed(true)` when the client is ready, now or later, or `proceed(false)` if it will not be soon.
   *
   * Returns a function that ends the waiting, after which `proceed` is not called.
   */
  whenReady(proceed: (isReady: boolean) => void): () => void;
  evalSha(sha1: string, keys: string[], args: string[]): Promise<unknown>;
  eval(script: string, keys: string[], args: string[]): Promise<unknown>;
  del(keys: string[]): Promise<number>;
  set(key: string, value: string, ttlMs: number | undefined): Promise<unknown>;
}

/** Recognises a client by its methods. */
export function connectionOf(client: RedisClient): RedisConnection {
  const found = client as Partial<IoredisClient & NodeRedisCluster> | null | undefined;
  if (typeof found?.evalSha === "function") {
    const isCluster = typeof found.nodeClient === "function";
    return isCluster ? ofNodeRedisCluster(client as NodeRedisCluster) : ofNodeRedis(client as NodeRedisClient);
  }
  if (typeof found?.evalsha === "function" && typeof found.status === "string") return ofIoredis(client as IoredisClient);
  throw new InvalidInputError(
    "expected a Redis client: Redis or Cluster of ioredis, or createClient, createClientPool or createCluster of redis",
  );
}

function ofIoredis(client: IoredisClient): RedisConnection {
  const state = (): State => {
    // A client with `lazyConnect` connects on first use. Its error events are the application's.
    if (client.status === "wait") client.connect().catch(() => {});
    if (client.status === "ready") return "ready";
    return client.status === "connecting" || client.status === "connect" ? "connecting" : "down";
  };
  return {
    whenReady: readiness(client, state, "close"),
    evalSha: (sha1, keys, args) => client.evalsha(sha1, keys.length, ...keys, ...args),
    eval: (script, keys, args) => client.eval(script, keys.length, ...keys, ...args),
    del: (keys) => client.del(...keys),
    set: (key, value, ttlMs) => (ttlMs === undefined ? client.set(key, value) : client.set(key, value, "PX", ttlMs)),
  };
}

function ofNodeRedis(client: NodeRedisClient): RedisConnection {
  // Clusters and pools have no `isReady`. They fail by themselves if a node is not connected.
  const state = (): State => ((client.isReady ?? client.isOpen) ? "ready" : client.isOpen ? "connecting" : "down");
  return {
    whenReady: readiness(client, state, "reconnecting"),
    evalSha: (sha1, keys, args) => client.evalSha(sha1, { keys, arguments: args }),
    eval: (script, keys, args) => client.eval(script, { keys, arguments: args }),
    del: (keys) => client.del(keys),
    set: (key, value, ttlMs) => (ttlMs === undefined ? client.set(key, value) : client.set(key, value, { PX: ttlMs })),
  };
}

/** The `evalSha` of a cluster of version 4 does not find the first key, and sends the call to any node. */
function ofNodeRedisCluster(cluster: NodeRedisCluster): RedisConnection {
  const run = (verb: string) => (script: string, keys: string[], args: string[]) =>
    cluster.sendCommand(keys[0] ?? "", false, [verb, script, String(keys.length), ...keys, ...args]);
  return { ...ofNodeRedis(cluster), evalSha: run("EVALSHA"), eval: run("EVAL") };
}

/** The state of a client's connection. `down`: it is closed, or the client pauses before it connects again. */
type State = "ready" | "connecting" | "down";

/**
 * Creates the function `whenReady` of a client. `failed` is the event of a failed attempt to connect.
 *
 * All waiting calls share one listener per event.
 */
function readiness(client: Emitter, state: () => State, failed: string): RedisConnection["whenReady"] {
  const waiting = new Set<(isReady: boolean) => void>();
  let hasWaitedInVain = false;
  const onReady = () => release(true);
  const onFailed = () => release(false);
  const listen = (method: "on" | "off") => {
    client[method]("ready", onReady);
    client[method](failed, onFailed);
  };
  const release = (isReady: boolean) => {
    listen("off");
    const calls = [...waiting];
    waiting.clear();
    for (const proceed of calls) proceed(isReady);
  };
  return (proceed) => {
    const found = state();
    if (found === "ready") hasWaitedInVain = false;
    if (found !== "connecting" || hasWaitedInVain) {
      queueMicrotask(() => proceed(found === "ready"));
      return () => {};
    }
    if (waiting.size === 0) listen("on");
    waiting.add(proceed);
    return () => {
      if (!waiting.delete(proceed)) return;
      hasWaitedInVain = true;
      if (waiting.size === 0) listen("off");
    };
  };
}
