/** The kind of an error, for code that reacts to it. */
export type ErrorCode =
  /** The caller's mistake: a malformed limit, key, cost, address or option. Always thrown, whatever `onError` is. */
  | "invalid_input"
  /** No connection to the service or to Redis. */
  | "unreachable"
  /** No answer within the deadline. The call may have been executed. */
  | "timeout"
  /** The service or Redis cannot decide at the moment: loading, out of memory, a read-only replica. */
  | "unavailable"
  /** A wrong token, user or password, or a Redis user without the necessary permissions. */
  | "forbidden"
  /** A counter's key holds data that Tidegate did not write. */
  | "foreign"
  /** The Lua script failed. */
  | "script"
  /** The answer is malformed or unknown. */
  | "protocol";

/**
 * The error of a call. Every error that this package throws is one of these.
 *
 * The message never contains a key, a client's address or a token.
 */
export class TidegateError extends Error {
  /** The kind of the error. */
  readonly code: ErrorCode;

  constructor(code: ErrorCode, message: string, options?: { cause?: unknown }) {
    super(message, options);
    this.name = new.target.name;
    this.code = code;
  }
}

/** The error of a malformed limit, key, cost, address or option. The message says what is accepted. */
export class InvalidInputError extends TidegateError {
  constructor(message: string, options?: { cause?: unknown }) {
    super("invalid_input", message, options);
  }
}

/** The error of a call that the service or Redis did not decide. `onError` determines whether it is thrown. */
export class UnavailableError extends TidegateError {
  constructor(code: Exclude<ErrorCode, "invalid_input">, message: string, options?: { cause?: unknown }) {
    super(code, message, options);
  }
}

/** Returns the first 32 characters of a rejected value in quotes, for a message. */
export function quoted(value: unknown): string {
  const text = typeof value === "string" ? value : String(value);
  return JSON.stringify(text.length > 32 ? `${text.slice(0, 32)}…` : text);
}
