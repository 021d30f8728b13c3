// Runs the tests, or those whose file name contains an argument: npm test -- redis
import { readdirSync } from "node:fs";
import { spawnSync } from "node:child_process";
import { fileURLToPath } from "node:url";

const directory = fileURLToPath(new URL("../test/", import.meta.url));
const filters = process.argv.slice(2);
const files = readdirSync(directory)
  .filter((name) => name.endsWith(".test.mjs") && (filters.length === 0 || filters.some((text) => name.includes(text))))
  .map((name) => directory + name);
const { status } = spawnSync(process.execPath, ["--test", "--test-reporter=spec", "--test-concurrency=2", ...files], { stdio: "inherit" });
process.exit(status ?? 1);
