/**
 * One form of the Redis clients that applications use.
 *
 * **A call ends within its deadline.** While a client is not connected, it queues commands and sends them later, when
 * the request that they belong to has long been answered: it would be charged for nothing. So no command is given to a
 * client that is not ready. A call waits for the connection, up to its deadline. After one call has waited in vain,
 * others fail at once until the client is ready again.
 */
import { InvalidInputError } from "./errors.js";

interface Emitter {
  once(event: string, listener: () => void): unknown;
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
  const found = client as Partial<IoredisClient & NodeRedisClient> | null | undefined;
  if (typeof found?.evalSha === "function") return ofNodeRedis(client as NodeRedisClient);
  if (typeof found?.evalsha === "function" && typeof found.status === "string") return ofIoredis(client as IoredisClient);
  throw new InvalidInputError(
    "expected a Redis client: Redis or Cluster of ioredis, or createClient, createClientPool or createCluster of redis",
  );
}

function ofIoredis(client: IoredisClient): RedisConnection {
  return {
    whenReady: readiness(client, () => {
      // A client with `lazyConnect` connects on first use. Its error events are the application's.
      if (client.status === "wait") client.connect().catch(() => {});
      return client.status === "ready";
    }),
    evalSha: (sha1, keys, args) => client.evalsha(sha1, keys.length, ...keys, ...args),
    eval: (script, keys, args) => client.eval(script, keys.length, ...keys, ...args),
    del: (keys) => client.del(...keys),
    set: (key, value, ttlMs) => (ttlMs === undefined ? client.set(key, value) : client.set(key, value, "PX", ttlMs)),
  };
}

function ofNodeRedis(client: NodeRedisClient): RedisConnection {
  return {
    // Clusters and pools have no `isReady`. They fail by themselves if a node is not connected.
    whenReady: readiness(client, () => client.isReady ?? client.isOpen),
    evalSha: (sha1, keys, args) => client.evalSha(sha1, { keys, arguments: args }),
    eval: (script, keys, args) => client.eval(script, { keys, arguments: args }),
    del: (keys) => client.del(keys),
    set: (key, value, ttlMs) => (ttlMs === undefined ? client.set(key, value) : client.set(key, value, { PX: ttlMs })),
  };
}

/** Creates the function `whenReady` of a client. All waiting calls share one listener of its event `ready`. */
function readiness(client: Emitter, isReady: () => boolean): RedisConnection["whenReady"] {
  const waiting = new Set<(isReady: boolean) => void>();
  let hasWaitedInVain = false;
  const onReady = () => {
    hasWaitedInVain = false;
    const calls = [...waiting];
    waiting.clear();
    for (const proceed of calls) proceed(true);
  };
  return (proceed) => {
    if (isReady()) {
      hasWaitedInVain = false;
      queueMicrotask(() => proceed(true));
      return () => {};
    }
    if (hasWaitedInVain) {
      queueMicrotask(() => proceed(false));
      return () => {};
    }
    if (waiting.size === 0) client.once("ready", onReady);
    waiting.add(proceed);
    return () => {
      if (!waiting.delete(proceed)) return;
      hasWaitedInVain = true;
      if (waiting.size === 0) client.off("ready", onReady);
    };
  };
}
