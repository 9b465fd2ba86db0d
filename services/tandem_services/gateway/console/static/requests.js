// @ts-check
/** The latest requests of this gateway, and a way to any other whose id is known. */
import { getJson } from "./api.js";
import { fill, h, keep, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { poll } from "./poll.js";
import { table } from "./table.js";

const EVERY_MS = 2000;

/** @param {HTMLElement} main @param {import("./main.js").Page} page */
export function showRequests(main, page) {
  const body = h("tbody");
  const shown = table(
    ["When", "Request", "Status", "Endpoint", "#Prompt", "#Cached", "#Output", "#First token", "#Total", "Workers"],
    body,
    "Latest requests",
  );
  const blank = h("div", { class: "blank" }, h("p", { class: "loading" }, "Loading requests…"));
  const panel = h("section", { class: "panel", hidden: true }, shown);
  fill(main, h("div", { class: "headline" }, h("h1", {}, "Requests"), lookup()), blank, panel);
  return poll({
    everyMs: EVERY_MS,
    ask: () => getJson("console/data/requests"),
    show(rows) {
      page.answered();
      panel.hidden = rows.length === 0;
      blank.hidden = rows.length > 0;
      if (rows.length === 0) fill(blank, h("h2", {}, "No requests yet"), h("p", {}, "Send one from the ", h("a", { href: "#playground" }, "playground"), ", or with any OpenAI client."));
      keep(body, rows, (/** @type {any} */ row) => row.request_id, requestRow);
    },
    fail(error, retryMs) {
      page.failed(error, retryMs);
      if (!panel.hidden) return;
      if (error.status === 403) fill(blank, h("h2", {}, "The list is for administrators"), h("p", {}, "With this key a request of your own can be looked up by its id, above."));
      else fill(blank, h("p", {}, error.message));
    },
  });
}

/** A field for an id. */
function lookup() {
  const input = h("input", { id: "lookup", type: "search", placeholder: "chatcmpl-…", spellcheck: "false", autocomplete: "off", maxlength: 200 });
  /** @param {Event} event */
  function go(event) {
    event.preventDefault();
    const id = input.value.trim();
    if (id) location.hash = `#request/${encodeURIComponent(id)}`;
  }
  return h("form", { class: "lookup", submit: go }, h("label", { for: "lookup" }, "Request id"), input, h("button", { type: "submit" }, "Open"));
}

/** @param {any} first */
function requestRow(first) {
  const cells = {
    when: h("td", { class: "number start" }),
    status: h("span", { class: "state" }),
    endpoint: h("td"),
    prompt: h("td", { class: "number" }),
    cached: h("td", { class: "number" }),
    output: h("td", { class: "number" }),
    ttft: h("td", { class: "number" }),
    total: h("td", { class: "number" }),
    workers: h("td", { class: "wide" }),
  };
  const link = h("a", { class: "id", href: `#request/${encodeURIComponent(first.request_id)}`, title: first.request_id }, first.request_id.slice(0, 10));
  const element = h("tr", {}, cells.when, h("th", { scope: "row" }, link), h("td", {}, cells.status), cells.endpoint, cells.prompt, cells.cached, cells.output, cells.ttft, cells.total, cells.workers);
  /** @param {any} row */
  function update(row) {
    setText(cells.when, format.clock(row.created));
    setText(cells.status, statusText(row.status));
    setAttribute(cells.status, "data-state", statusTone(row.status));
    setText(cells.endpoint, endpointName(row.endpoint));
    setAttribute(cells.endpoint, "title", [row.endpoint, row.model, row.tenant && `of ${row.tenant}`].filter(Boolean).join(", "));
    setText(cells.prompt, format.count(row.prompt_tokens));
    setText(cells.cached, row.prompt_tokens && row.ttft_s != null ? format.percent(row.cached_tokens / row.prompt_tokens) : format.NONE);
    setText(cells.output, format.count(row.output_tokens));
    setText(cells.ttft, format.seconds(row.ttft_s));
    setText(cells.total, format.seconds(row.e2e_s));
    setText(cells.workers, route(row));
  }
  return { element, update };
}

/** @param {any} row */
function route(row) {
  if (!row.decode) return row.error ?? format.NONE;
  const again = row.attempts > row.choices ? `, ${row.attempts} attempts` : "";
  return `${row.prefill ? `${format.workerOf(row.prefill)} → ` : ""}${format.workerOf(row.decode)}${again}`;
}

/** @param {string} path */
export function endpointName(path) {
  return path.replace(/^\/v1\//, "").replace("chat/completions", "chat");
}

/** @param {number | null} status */
export function statusText(status) {
  if (status === null) return "running";
  return status === 499 ? "client left" : String(status);
}

/** @param {number | null} status */
export function statusTone(status) {
  if (status === null) return "running";
  if (status === 200) return "good";
  return status === 499 ? "unknown" : "failed";
}
