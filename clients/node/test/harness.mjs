// Real servers for tests: redis-server, valkey-server, clusters of them and tidegate, on free ports of 127.0.0.1. All are
// killed when the process ends.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { existsSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer as createHttpServer } from "node:http";
import { createRequire } from "node:module";
import { connect, createServer } from "node:net";
import { tmpdir } from "node:os";
import { createInterface } from "node:readline";
import { after } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import * as esm from "tidegate";

/** Both module forms of the package. */
export const FORMS = { esm, cjs: createRequire(import.meta.url)("tidegate") };

const root = fileURLToPath(new URL("../../../", import.meta.url));
const children = new Set();
process.on("exit", () => children.forEach((child) => child.kill("SIGKILL")));

/** What is closed after the last test of a file, so that a failed test does not keep the process running. */
const open = new Set();
after(async () => {
  for (const close of open) {
    try {
      await close();
    } catch {
      // Some clients fail to close twice.
    }
  }
  for (const child of children) child.kill("SIGKILL");
});

/** Returns `close`, and also calls it after the last test of the file. */
export function closing(close) {
  open.add(close);
  return close;
}

/** Creates a directory that is removed when the process ends, and returns its path. */
function temporaryDirectory() {
  const directory = mkdtempSync(`${tmpdir()}/tidegate-node-`);
  process.on("exit", () => rmSync(directory, { recursive: true, force: true }));
  return directory;
}

/** Writes a configuration of the service, and returns its path. */
export function writeConfig(text) {
  const path = `${temporaryDirectory()}/tidegate.toml`;
  writeFileSync(path, text);
  return path;
}

function program(name) {
  const local = `${root}.tools/bin/${name}`;
  return existsSync(local) ? local : name;
}

/** Calls `read` until it returns something truthy, and returns that. Fails after 30 s with `what`. */
export async function eventually(what, read) {
  const end = performance.now() + 30_000;
  let last;
  do {
    try {
      last = await read();
      if (last) return last;
    } catch (error) {
      last = error;
    }
    await sleep(10);
  } while (performance.now() < end);
  throw new Error(`waited in vain for: ${what}; last: ${last?.stack ?? last}`);
}

/** A child process. Its output is in `output`. */
class Child {
  constructor(command, args, stdin = "ignore") {
    this.output = "";
    this.process = spawn(command, args, { stdio: [stdin, "pipe", "pipe"] });
    children.add(this.process);
    this.process.on("error", (error) => (this.output += `${error}\n`));
    this.process.stdout.on("data", (chunk) => (this.output += chunk));
    this.process.stderr.on("data", (chunk) => (this.output += chunk));
  }

  get hasExited() {
    return this.process.exitCode !== null || this.process.signalCode !== null;
  }

  /** Suspends the process: it accepts connections and answers nothing. */
  suspend() {
    this.process.kill("SIGSTOP");
  }

  resume() {
    this.process.kill("SIGCONT");
  }

  async kill() {
    if (this.hasExited) return;
    const exited = once(this.process, "exit");
    this.process.kill("SIGKILL");
    await exited;
    children.delete(this.process);
  }
}

export async function freePort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return port;
}

/** A Redis or Valkey server without persistence. */
export class RedisServer {
  static async start({ kind = "redis-server", args = [], port } = {}) {
    for (let attempt = 0; ; attempt++) {
      const server = new RedisServer(kind, args, port ?? (await freePort()));
      if (await server.launch()) return server;
      if (attempt === 5) throw new Error(`${kind} does not start: ${server.child.output}`);
    }
  }

  constructor(kind, args, port) {
    [this.kind, this.args, this.port] = [kind, args, port];
    this.directory = temporaryDirectory();
  }

  get url() {
    return `redis://127.0.0.1:${this.port}`;
  }

  /** Starts the process. Returns whether it serves; another process may have taken the port. */
  async launch() {
    const fixed = ["--port", this.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", this.directory];
    this.child = new Child(program(this.kind), [...fixed, ...this.args].map(String));
    return eventually("the server answers", async () => {
      if (this.child.hasExited) return "exited";
      return (await this.command("PING")).startsWith("+PONG") || (await this.command("PING")).startsWith("-");
    }).then((state) => state !== "exited");
  }

  /** Sends an inline command on a connection of its own and returns the beginning of the reply. */
  async command(line) {
    const socket = connect(this.port, "127.0.0.1");
    try {
      socket.write(`${line}\r\n`);
      const [reply] = await once(socket, "data", { signal: AbortSignal.timeout(5_000) });
      return reply.toString();
    } finally {
      socket.destroy();
    }
  }

  async kill() {
    await this.child.kill();
  }

  /** Starts the server again on its port, without data. */
  async restart() {
    await eventually("the port is free again", () => this.launch());
  }
}

/** A Redis or Valkey Cluster of three masters, started by `tidegate-test-cluster`. */
export class TestCluster {
  /** `brand` is `redis` or `valkey`. */
  static async start(brand) {
    const binary = `${root}target/debug/tidegate-test-cluster`;
    if (!existsSync(binary)) throw new Error(`${binary} is missing: cargo build -p tidegate-testkit`);
    const cluster = new TestCluster(new Child(binary, [brand], "pipe"));
    cluster.addresses = (await cluster.#read()).split(" ");
    return cluster;
  }

  #lines;

  constructor(child) {
    this.child = child;
    this.#lines = createInterface({ input: child.process.stdout })[Symbol.asyncIterator]();
  }

  /** Host and port of each master. */
  get nodes() {
    return this.addresses.map((address) => ({ host: "127.0.0.1", port: Number(address.split(":")[1]) }));
  }

  get urls() {
    return this.addresses.map((address) => `redis://${address}`);
  }

  /** Changes the slot of a key: `begin-move`, `end-move`, `drop-slot` or `restore-slot`. */
  async run(command, key) {
    this.child.process.stdin.write(`${command} ${key}\n`);
    const answer = await this.#read();
    if (answer !== "ok") throw new Error(`${command}: ${answer}`);
  }

  async #read() {
    const { value, done } = await this.#lines.next();
    if (done) throw new Error(`tidegate-test-cluster has ended: ${this.child.output}`);
    return value;
  }
}

/** The real service, `tidegate serve`. */
export class Service {
  static async start(args = [], port = 0) {
    const service = new Service(args);
    await service.launch(port);
    return service;
  }

  constructor(args) {
    this.args = args;
  }

  async launch(port) {
    const binary = process.env.TIDEGATE_BIN ?? `${root}target/debug/tidegate`;
    if (!existsSync(binary)) throw new Error(`${binary} is missing: cargo build -p tidegate-cli, or set TIDEGATE_BIN`);
    const fixed = ["serve", "--http", `127.0.0.1:${port}`, "--resp", "off", "--admin", "off"];
    this.child = new Child(binary, [...fixed, ...this.args]);
    const address = await eventually("the service listens", () => {
      if (this.child.hasExited) return [];
      return /http\s+(127\.0\.0\.1:\d+)/.exec(this.child.output);
    });
    if (!address[1]) throw new Error(`the service does not start: ${this.child.output}`);
    this.url = `http://${address[1]}`;
  }

  async restart() {
    await this.launch(new URL(this.url).port);
  }
}

/** An HTTP server with a handler of the test. Counts connections and requests. */
export async function fakeService(handle) {
  const fake = { connections: 0, requests: [], open: 0 };
  const server = createHttpServer((request, response) => {
    const chunks = [];
    request.on("data", (chunk) => chunks.push(chunk));
    request.on("end", () => {
      const text = Buffer.concat(chunks).toString();
      const body = text === "" ? null : JSON.parse(text);
      fake.requests.push({ path: request.url, headers: request.headers, body });
      handle({ path: request.url, body, headers: request.headers }, response);
    });
  });
  server.on("connection", (socket) => {
    fake.connections++;
    fake.open++;
    socket.on("close", () => fake.open--);
  });
  // Node closes idle connections after 5 seconds, which a busy machine reaches between two calls.
  server.keepAliveTimeout = 600_000;
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  fake.url = `http://127.0.0.1:${server.address().port}`;
  fake.close = closing(() => {
    server.closeAllConnections();
    server.close();
  });
  return fake;
}

/** Answers with JSON. */
export function json(response, status, body, headers = {}) {
  response.writeHead(status, { "content-type": "application/json", ...headers });
  response.end(JSON.stringify(body));
}

/** The body of an admission with one limit. */
export const ADMITTED = {
  allowed: true,
  source: "store",
  limits: [
    {
      name: "per-minute",
      quota: 10,
      window_ms: 60_000,
      remaining: 9,
      retry_after_ms: 0,
      next_after_ms: 60_000,
      reset_after_ms: 60_000,
      allowed: true,
    },
  ],
};

/** Returns a logger that keeps its messages. */
export function keepingLog() {
  const messages = [];
  return { messages, logger: (message) => messages.push(message) };
}

/** The Redis clients that the package supports, each with how to open and close it. */
export const CLIENTS = {
  ioredis: async (url, options = {}) => {
    const { Redis } = await import("ioredis");
    const client = new Redis(url, options);
    client.on("error", () => {});
    return { client, close: closing(() => client.disconnect()) };
  },
  "redis v4": (url) => openNodeRedis("redis-v4", url),
  "redis v5": (url) => openNodeRedis("redis-v5", url),
  "redis v6": (url) => openNodeRedis("redis", url),
  "redis v6 pool": async (url) => {
    const { createClientPool } = await import("redis");
    const client = createClientPool({ url });
    client.on("error", () => {});
    await client.connect();
    return { client, close: closing(() => client.destroy()) };
  },
};

async function openNodeRedis(name, url) {
  const { createClient } = await import(name);
  const client = createClient({ url });
  client.on("error", () => {});
  await client.connect();
  return { client, close: closing(() => client.isOpen && (client.destroy ? client.destroy() : client.disconnect())) };
}
