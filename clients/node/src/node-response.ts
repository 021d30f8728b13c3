import type { IncomingMessage, ServerResponse } from "node:http";

/**
 * Calls `finish` once with the status of the response when the exchange ends.
 *
 * Not called if the connection closes before the response has begun, or the client did not send its whole body: the work
 * may have been done, and a client must not get its units back by disconnecting.
 */
export function whenAnswered(response: ServerResponse, finish: (status: number) => void): void {
  response.once("close", () => {
    if (response.headersSent && !isAborted(response.req, response.statusCode)) finish(response.statusCode);
  });
}

/** Returns whether the client disconnected before the end of its body, or the response says that it was too slow. */
export function isAborted(request: Pick<IncomingMessage, "complete" | "readableAborted">, status: number): boolean {
  return !request.complete && (request.readableAborted || status === 408);
}
