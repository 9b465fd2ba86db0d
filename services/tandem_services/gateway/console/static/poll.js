// @ts-check
/** Polls: one request at a time, none while the page is hidden, fewer while no answer comes. */
import { ApiError } from "./api.js";

const MAX_PAUSE_MS = 15_000;
const FINAL = new Set([401, 403, 404]);

/**
 * @template T
 * @param {object} work
 * @param {number} work.everyMs
 * @param {() => Promise<T>} work.ask
 * @param {(answer: T) => boolean | void} work.show false: it was the last one
 * @param {(error: ApiError, retryMs: number) => void} work.fail
 * @returns {() => void} stops it
 */
export function poll({ everyMs, ask, show, fail }) {
  let stopped = false;
  let asking = false;
  let failures = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;

  async function turn() {
    timer = undefined;
    if (stopped || asking || document.hidden) return;
    let pause = everyMs;
    asking = true;
    try {
      const answer = await ask();
      if (stopped) return;
      failures = 0;
      if (show(answer) === false) {
        stop();
        return;
      }
    } catch (error) {
      if (stopped) return;
      failures += 1;
      pause = Math.min(everyMs * 2 ** failures, MAX_PAUSE_MS);
      if (!(error instanceof ApiError)) console.error(error);
      const shown = error instanceof ApiError ? error : new ApiError(0, "The page cannot read the answer.");
      // Another key is another conversation, which starts again.
      if (FINAL.has(shown.status)) stop();
      fail(shown, pause);
    } finally {
      asking = false;
    }
    if (!stopped) timer = setTimeout(turn, pause);
  }

  function seen() {
    if (!document.hidden && timer === undefined && !stopped) turn();
  }

  function stop() {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  }

  document.addEventListener("visibilitychange", seen);
  turn();
  return stop;
}
