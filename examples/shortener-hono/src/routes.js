// The routes of the service and its documentation.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname } from "node:path";
import { Hono } from "hono";
import { bodyLimit } from "hono/body-limit";
import { rateLimit } from "tidegate/hono";

import { log } from "./log.js";
import { Away, NoFreeSlug, NoPlace } from "./slugs.js";

/** Maximum length of a URL. Not all browsers and proxies support longer ones. */
const URL_BYTES_MAX = 2_048;
/** Maximum size of a body: the longest URL with each byte escaped, and the JSON around it. */
const BODY_BYTES_MAX = 16 * 1_024;

/** Builds the service. The limit applies to `POST /shorten` only. `links.publicUrl` is the prefix of short links. */
export function createApp(slugs, limiter, { limit, trustedProxies }, links) {
  const app = new Hono();
  const limited = rateLimit({ limiter, limit, trustedProxies });
  const bounded = bodyLimit({
    maxSize: BODY_BYTES_MAX,
    onError: (c) => bad(c, `expected a body of at most ${BODY_BYTES_MAX} bytes`),
  });

  app.post("/shorten", limited, bounded, async (c) => {
    const { url, problem } = readUrl(await c.req.text());
    if (problem) return bad(c, problem);
    try {
      const slug = await slugs.add(url);
      return c.json({ slug, short_url: `${links.publicUrl}/${slug}` }, 201);
    } catch (error) {
      if (error instanceof NoFreeSlug) return unavailable(c, "no free slug was found; try again");
      if (!(error instanceof NoPlace)) throw error;
      return unavailable(c, "no link was created: too many links are waiting for Redis; try again");
    }
  });
  app.all("/shorten", (c) => c.body(null, 405, { allow: "POST" }));

  addDocumentation(app);

  app.get("/:slug", async (c) => {
    try {
      const url = await slugs.find(c.req.param("slug"));
      if (url === undefined) return c.json({ error: "not_found", message: "there is no such link" }, 404);
      return c.body(null, 302, { location: url });
    } catch (error) {
      if (!(error instanceof Away)) throw error;
      return unavailable(c, "the link cannot be read from Redis; try again");
    }
  });
  app.notFound((c) => c.body(null, 404));
  app.onError((error, c) => {
    log("ERROR", error.stack);
    return c.json({ error: "internal", message: "the service failed" }, 500);
  });
  return app;
}

function bad(c, message) {
  return c.json({ error: "bad_request", message }, 400);
}

function unavailable(c, message) {
  return c.json({ error: "unavailable", message }, 503, { "retry-after": "1" });
}

/** Parses the URL in a body. The content type is ignored. */
function readUrl(body) {
  const json = 'expected JSON like {"url":"https://example.com/"}';
  let request;
  try {
    request = JSON.parse(body);
  } catch (error) {
    return { problem: `${json}: ${error.message}` };
  }
  if (typeof request !== "object" || request === null || Array.isArray(request)) return { problem: json };
  if (request.url === undefined) return { problem: `${json}: missing field \`url\`` };
  if (typeof request.url !== "string") return { problem: `${json}: the url is not a string` };
  const expected = `expected an absolute http or https URL of at most ${URL_BYTES_MAX} bytes`;
  if (!URL.canParse(request.url)) return { problem: expected };
  const url = new URL(request.url);
  // Parsing may escape characters, so both forms are checked.
  const isShort = [request.url, url.href].every((text) => Buffer.byteLength(text) <= URL_BYTES_MAX);
  return /^https?:$/.test(url.protocol) && isShort ? { url: url.href } : { problem: expected };
}

/** Adds the OpenAPI document and Swagger UI, which loads nothing from other hosts. */
function addDocumentation(app) {
  const page = dirname(createRequire(import.meta.url).resolve("swagger-ui-dist/package.json"));
  const files = new Set(readdirSync(page));
  const types = { css: "text/css", html: "text/html; charset=utf-8", js: "text/javascript", png: "image/png" };
  const document = readFileSync(new URL("./openapi.json", import.meta.url), "utf8");
  const initializer = `window.onload = () => {
  window.ui = SwaggerUIBundle({
    dom_id: "#swagger-ui",
    url: "/openapi.json",
    validatorUrl: "none",
    layout: "StandaloneLayout",
    presets: [SwaggerUIBundle.presets.apis, SwaggerUIStandalonePreset],
  });
};
`;
  app.get("/openapi.json", (c) => c.body(document, 200, { "content-type": "application/json" }));
  app.get("/docs", (c) => c.redirect("/docs/", 303));
  app.get("/docs/:file{.*}", (c) => {
    const file = c.req.param("file") || "index.html";
    const type = types[file.split(".").at(-1)];
    if (!files.has(file) || !type) return c.notFound();
    const body = file === "swagger-initializer.js" ? initializer : readFileSync(`${page}/${file}`);
    return c.body(body, 200, { "content-type": type });
  });
}
