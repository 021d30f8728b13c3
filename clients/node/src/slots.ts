/** A bounded number of slots. Tasks that find none free wait in order. */
export class Slots {
  #free: number;
  readonly #waiting = new Set<() => void>();

  constructor(count: number) {
    this.#free = count;
  }

  /**
   * Runs `start`, which must not throw, as soon as a slot is free, but not before this call has returned.
   *
   * Returns a function that gives the slot back, or cancels the task if it is still waiting. Call it exactly once.
   */
  acquire(start: () => void): () => void {
    if (this.#free > 0) {
      this.#free--;
      queueMicrotask(start);
      return () => this.#release();
    }
    let hasStarted = false;
    const task = () => {
      hasStarted = true;
      start();
    };
    this.#waiting.add(task);
    return () => (hasStarted ? this.#release() : void this.#waiting.delete(task));
  }

  #release(): void {
    const [next] = this.#waiting;
    if (!next) {
      this.#free++;
      return;
    }
    this.#waiting.delete(next);
    next();
  }
}
