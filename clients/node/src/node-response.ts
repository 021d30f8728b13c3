import type { ServerResponse } from "node:http";

/**
 * Calls `finish` once with the status of the response when the exchange ends.
 *
 * Not called if the connection closes before the response has begun: the work may have been done, and a client must not
 * get its units back by disconnecting.
 */
export function whenAnswered(response: ServerResponse, finish: (status: number) => void): void {
  response.once("close", () => {
    if (response.headersSent) finish(response.statusCode);
  });
}
