// A URL shortener whose POST /shorten is limited by address, and whose GET /:slug never is.
//
//   POST /shorten ──▶ tidegate/hono ──▶ routes.js ──▶ slugs.js ──┐
//                        │ the limit                             │ the links
//                        └──────────▶ one connection ◀───────────┘
//                                     to Redis
import { serve } from "@hono/node-server";
import { Redis } from "ioredis";
import { RedisLimiter } from "tidegate";

import { log } from "./log.js";
import { createApp } from "./routes.js";
import { readSettings } from "./settings.js";
import { Slugs } from "./slugs.js";

let settings;
try {
  settings = readSettings(process.env);
} catch (error) {
  console.error(`shortener: ${error.message}`);
  process.exit(1);
}

const redis = new Redis(settings.redisUrl, {
  // A command that may have been executed is not sent again, and none waits for a connection.
  autoResendUnfulfilledCommands: false,
  enableOfflineQueue: false,
  maxRetriesPerRequest: 0,
  retryStrategy: (attempt) => Math.min(50 * attempt, 500),
});
// The limiter and the links log what an outage means. Without a listener, ioredis would print every attempt.
redis.on("error", () => {});

const limiter = new RedisLimiter(redis, {
  deadlineMs: settings.redisDeadlineMs,
  onError: "allow",
  logger: (message) => log("WARN", message),
});
const slugs = new Slugs(redis, settings.redisDeadlineMs);
const links = {};
const server = serve({ fetch: createApp(slugs, limiter, settings, links).fetch, port: settings.port, hostname: "127.0.0.1" });

server.on("listening", () => {
  const { port } = server.address();
  links.publicUrl = settings.publicUrl ?? `http://127.0.0.1:${port}`;
  console.log(`listening on http://127.0.0.1:${port}, documentation at http://127.0.0.1:${port}/docs/`);
});
server.on("error", (error) => {
  console.error(`shortener: PORT: cannot listen on 127.0.0.1:${settings.port}: ${error.code}`);
  process.exit(1);
});

/** Stops accepting, lets requests in progress finish, and exits. */
function stop() {
  server.close(() => {
    if (slugs.unsaved > 0) {
      log("ERROR", `links that were created while Redis was unavailable are lost lost=${slugs.unsaved}`);
    }
    process.exit(0);
  });
  server.closeIdleConnections();
}
process.once("SIGTERM", stop);
process.once("SIGINT", stop);
