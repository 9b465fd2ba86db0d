// @ts-check
/** The page: which view is shown, how the gateway is doing, and the key of this tab. */
import { apiKey, setApiKey } from "./api.js";
import { showApi } from "./api_reference.js";
import { fill, h, setAttribute, setText } from "./dom.js";
import { showErrors } from "./errors.js";
import { showFleet } from "./fleet.js";
import * as format from "./format.js";
import { showPlayground } from "./playground.js";
import { showRequests } from "./requests.js";
import { showTimeline } from "./timeline.js";

/**
 * What a view tells the page.
 * @typedef {object} Page
 * @property {(fleet?: any) => void} answered the gateway has, with a fleet document or something else
 * @property {(error: import("./api.js").ApiError, retryMs?: number) => void} failed
 */

const TITLES = { fleet: "Fleet", requests: "Requests", errors: "Errors", request: "Request", playground: "Playground", api: "API" };

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);

const main = byId("main");
const dialog = byId("key-dialog");
/** @type {(() => void) | void} ends the view that is shown */
let leave;

/** @type {Page} */
const page = {
  answered(fleet) {
    pulse("good", "live");
    if (!apiKey()) asksForKey = false;
    const notes = [];
    if (fleet) {
      asksForKey = fleet.gateway.requires_key;
      const clusters = fleet.gateway.clusters.filter((/** @type {string} */ name) => name !== "default");
      const models = fleet.gateway.roots.map((/** @type {string} */ root) => root.replace(/(@.{12}).*/, "$1"));
      setText(byId("where"), [...clusters, ...models].join(", "));
      setAttribute(byId("where"), "title", [`Tandem ${fleet.gateway.version}`, ...fleet.gateway.roots].join(", "));
      if (fleet.redis === "away") {
        pulse("warn", "view is old");
        notes.push(notice("warn", `Redis has not answered for ${format.seconds(fleet.view_age_s)}. Requests continue with the last view of the fleet, which this page shows.`));
      }
      if (fleet.gateway.draining) notes.push(notice("warn", "This gateway is draining: it finishes running requests and accepts no new ones."));
    }
    show(notes);
  },
  failed(error, retryMs) {
    if (error.status === 401) {
      asksForKey = true;
      pulse("warn", "needs a key");
      show([notice("warn", apiKey() ? "The gateway rejected this key." : "This gateway requires an API key.", "Enter a key", openDialog)]);
      if (!dialog.open && !dismissed) openDialog();
      return;
    }
    pulse(error.status ? "warn" : "bad", error.status ? "refused" : "no answer");
    const again = retryMs && ![403, 404].includes(error.status) ? ` Retrying in ${format.seconds(retryMs / 1000)}.` : "";
    show(error.status === 403 ? [] : [notice("bad", `${error.message}${again}`)]);
  },
};

/** The shown notices, as text: the same ones are left alone. */
let shown = "";

/** @param {HTMLElement[]} notes */
function show(notes) {
  const text = notes.map((note) => note.textContent).join("\n");
  if (text === shown) return;
  shown = text;
  fill(byId("notices"), ...notes);
}

/** @param {string} tone @param {string} text @param {string} [action] @param {() => void} [act] */
function notice(tone, text, action, act) {
  return h("p", { class: "notice", "data-tone": tone }, text, action && act && h("button", { type: "button", click: () => act() }, action));
}

/** @param {string} tone @param {string} text */
function pulse(tone, text) {
  setAttribute(byId("pulse"), "data-tone", tone);
  setText(byId("pulse-text"), text);
}

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = name in TITLES ? /** @type {keyof typeof TITLES} */ (name) : "fleet";
  leave?.();
  show([]);
  document.title = `${TITLES[view]} · Tandem console`;
  for (const link of document.querySelectorAll("nav a")) {
    const target = link.getAttribute("href")?.slice(1);
    const here = target === view || (target === "requests" && view === "request");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.dataset.view = view;
  if (view === "fleet") leave = showFleet(main, page);
  else if (view === "requests") leave = showRequests(main, page);
  else if (view === "errors") leave = showErrors(main, page);
  else if (view === "api") leave = showApi(main, page);
  else if (view === "request") leave = showTimeline(main, page, identifier(rest.join("/")));
  else leave = showPlayground(main, page);
}

/** @param {string} text */
function identifier(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/* ── The key ───────────────────────────────────────────────────────────────────────────────────────────────────── */

let dismissed = false;
/** @type {boolean | undefined} unknown until the gateway has answered without a key */
let asksForKey;

/** Whether a key is needed, as far as this page knows it. */
function keyText() {
  const stays = "It stays in this browser tab and is sent to this gateway only.";
  if (asksForKey === false) return "This gateway serves requests without a key: authentication is disabled.";
  if (apiKey()) return `This tab has a key. ${stays}`;
  return asksForKey ? `This gateway requires a key. ${stays}` : `A key is needed only if this gateway requires one. ${stays}`;
}

function openDialog() {
  setText(byId("key-why"), keyText());
  byId("key-input").value = "";
  byId("key-forget").hidden = !apiKey();
  dialog.showModal();
}

/** @param {string} key */
function useKey(key) {
  setApiKey(key);
  dismissed = false;
  dialog.close();
  markKey();
  route();
}

function markKey() {
  setText(byId("key-button"), apiKey() ? "API key set" : "API key");
}

byId("key-button").addEventListener("click", openDialog);
byId("key-cancel").addEventListener("click", () => {
  dismissed = true;
  dialog.close();
});
byId("key-forget").addEventListener("click", () => useKey(""));
// The Escape key.
dialog.addEventListener("cancel", () => (dismissed = true));
byId("key-form").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  const key = byId("key-input").value.trim();
  if (key) useKey(key);
});
addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
markKey();
route();
