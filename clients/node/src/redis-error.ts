/** Converts errors of Redis clients. The first word of an error reply determines its code. */
import { InvalidInputError, TidegateError, UnavailableError, type ErrorCode } from "./errors.js";

type FailureCode = Exclude<ErrorCode, "invalid_input">;

const REPLIES: Readonly<Record<string, readonly [FailureCode, string]>> = {
  OOM: ["unavailable", "the server has reached its maxmemory"],
  LOADING: ["unavailable", "the server is loading its data"],
  READONLY: ["unavailable", "the server is a read-only replica"],
  BUSY: ["unavailable", "the server is busy running another script"],
  MASTERDOWN: ["unavailable", "the server is a replica that has lost its connection to the master"],
  MISCONF: ["unavailable", "the server rejects writes because it cannot save its data"],
  NOREPLICAS: ["unavailable", "the server has fewer replicas than it requires for writes"],
  CLUSTERDOWN: ["unavailable", "the cluster does not serve this slot at the moment"],
  TRYAGAIN: ["unavailable", "the cluster does not serve this slot at the moment"],
  MOVED: ["unavailable", "the server is a node of a cluster and does not have the key; use a cluster client"],
  ASK: ["unavailable", "the server is a node of a cluster and does not have the key; use a cluster client"],
  NOAUTH: ["forbidden", "the server requires a different user or password"],
  WRONGPASS: ["forbidden", "the server requires a different user or password"],
  NOPERM: ["forbidden", "the Redis user lacks permission to run the script or to access its keys"],
  TIDEGATE_FOREIGN: ["foreign", "a counter's key holds data that Tidegate did not write"],
  TIDEGATE_ARGUMENT: ["script", "the script does not accept the call; its version does not match this package"],
  TIDEGATE_INTERNAL: ["script", "the Lua script failed; this is a bug in Tidegate"],
};

/** The text with which ioredis precedes the last error reply after it has given up. */
const CLUSTER_REDIRECTIONS = /^Too many Cluster redirections\. Last error: (ReplyError: )?/;

/**
 * Converts an error of a Redis client.
 *
 * The text of a reply is dropped, because it may contain keys or addresses; it is the `cause`.
 */
export function replyError(cause: unknown): TidegateError {
  if (cause instanceof TidegateError) return cause;
  const text = (cause instanceof Error ? cause.message : String(cause)).replace(CLUSTER_REDIRECTIONS, "");
  if (text.startsWith("CROSSSLOT")) {
    const message = "the keys of one check are in different slots of the Redis Cluster; use one key per check";
    return new InvalidInputError(message, { cause });
  }
  const [code, reason] = classify(text.replace(/^TIDEGATE_PARTLY /, ""), cause);
  const message = code === "unreachable" ? `cannot reach Redis: ${reason}` : `Redis: ${reason}`;
  return new UnavailableError(code, message, { cause });
}

function classify(text: string, cause: unknown): readonly [FailureCode, string] {
  const word = /^-?([A-Z][A-Z_]+)\b/.exec(text)?.[1];
  if (word !== undefined && Object.hasOwn(REPLIES, word)) return REPLIES[word]!;
  // The message depends on the version of Redis or Valkey.
  if (/ACL failure in script|The user executing the script can't/.test(text)) return REPLIES["NOPERM"]!;
  if (/max number of clients/.test(text)) return ["unavailable", "the server has reached its connection limit"];
  const system = (cause as NodeJS.ErrnoException | null)?.code;
  if (typeof system === "string") return ["unreachable", system];
  // An error reply begins with a code in upper case, an error of a client with a sentence.
  if (word !== undefined) return ["protocol", "the server returned an unknown error"];
  return ["unreachable", "the connection is closed"];
}
