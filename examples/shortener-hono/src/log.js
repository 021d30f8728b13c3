/** Writes a line to standard error. */
export function log(level, message) {
  console.error(`${new Date().toISOString()} ${level} ${message}`);
}
