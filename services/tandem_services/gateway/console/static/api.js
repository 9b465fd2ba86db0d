// @ts-check
/** The gateway as the page knows it: requests with the key of this tab, and errors that say what to do. */

const KEY = "tandem-console-key";
export const PATIENCE_MS = 10_000;
const MAX_EVENT_CHARACTERS = 1 << 20;

/** @returns {string} "" when there is none */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** @param {string} key "" forgets it */
export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** An answer that is none, or a refusal. `status` 0: no server has answered. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * @param {string} path relative, so that a prefix before the gateway's paths does no harm
 * @param {RequestInit} [options]
 * @returns {Promise<Response>} of any status
 */
async function reach(path, options = {}) {
  const headers = new Headers(options.headers);
  const key = apiKey();
  if (key) headers.set("authorization", `Bearer ${key}`);
  try {
    return await fetch(new URL(path, document.baseURI), { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new ApiError(0, "The gateway does not answer.");
  }
}

/** As `reach`, with an error for each status that is one. @param {string} path @param {RequestInit} [options] */
async function ask(path, options = {}) {
  const response = await reach(path, options);
  if (!response.ok) throw new ApiError(response.status, await refusal(response));
  return response;
}

/**
 * One request as its user wrote it. Errors of the gateway are answers too.
 * @param {string} method @param {string} path @param {string} body "" for none @param {AbortSignal} signal
 * @returns {Promise<Response>}
 */
export function send(method, path, body, signal) {
  const content = body ? { body, headers: { "content-type": "application/json" } } : {};
  return reach(path, { method, signal, ...content });
}

/** @param {Response} response */
async function refusal(response) {
  try {
    const document = await response.json();
    if (typeof document.error?.message === "string") return document.error.message;
  } catch {
    // A proxy's page, perhaps: the status alone has to do.
  }
  return `The gateway answered ${response.status}.`;
}

/** @param {string} path @returns {Promise<any>} */
export async function getJson(path) {
  const response = await ask(path, { signal: AbortSignal.timeout(PATIENCE_MS) });
  return response.json();
}

/**
 * A streamed answer's events, as they come. Ends at `[DONE]`.
 * @param {string} path @param {object} body @param {AbortSignal} signal
 * @returns {AsyncGenerator<any, void>}
 */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json" },
    signal,
  });
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The stream ended before the answer did.");
    rest += value;
    if (rest.length > MAX_EVENT_CHARACTERS) throw new ApiError(0, "The stream is not one of events.");
    const events = rest.split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const document = JSON.parse(data);
      if (document.error) throw new ApiError(500, document.error.message ?? "The request failed.");
      yield document;
    }
  }
}
