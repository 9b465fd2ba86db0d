// @ts-check
/** Requests that this gateway refused before it accepted them: type, code and parameter, and nothing of their bodies. */
import { getJson } from "./api.js";
import { fill, h, keep, setText } from "./dom.js";
import * as format from "./format.js";
import { poll } from "./poll.js";
import { endpointName } from "./requests.js";
import { table } from "./table.js";

const EVERY_MS = 2000;

/** @param {HTMLElement} main @param {import("./main.js").Page} page */
export function showErrors(main, page) {
  const body = h("tbody");
  const blank = h("div", { class: "blank" }, h("p", { class: "loading" }, "Loading errors…"));
  const panel = h("section", { class: "panel", hidden: true }, table(["When", "Status", "Error", "Endpoint", "Tenant", "Request"], body, "Refused requests"));
  fill(main, h("div", { class: "headline" }, h("h1", {}, "Errors")), blank, panel);
  return poll({
    everyMs: EVERY_MS,
    ask: () => getJson("console/data/errors"),
    show(rows) {
      page.answered();
      panel.hidden = rows.length === 0;
      blank.hidden = rows.length > 0;
      if (rows.length === 0) fill(blank, h("h2", {}, "No refused requests"), h("p", {}, "Requests that are answered with an error before a worker has them are listed here."));
      keep(body, rows, (/** @type {any} */ row) => row.request_id, errorRow);
    },
    fail(error, retryMs) {
      page.failed(error, retryMs);
      if (!panel.hidden) return;
      if (error.status === 403) fill(blank, h("h2", {}, "The list is for administrators"), h("p", {}, "It has requests of all tenants."));
      else fill(blank, h("p", {}, error.message));
    },
  });
}

/** @param {any} first */
function errorRow(first) {
  const cells = Array.from({ length: 5 }, () => h("td"));
  const [when, status, error, endpoint, tenant] = cells;
  when.classList.add("number", "start");
  error.classList.add("wide");
  const link = h("a", { class: "id", href: `#request/${encodeURIComponent(first.request_id)}`, title: first.request_id }, first.request_id.slice(0, 10));
  /** @param {any} row */
  function update(row) {
    setText(when, format.clock(row.created));
    setText(status, String(row.status ?? format.NONE));
    setText(endpoint, endpointName(row.endpoint));
    setText(tenant, row.tenant || format.NONE);
    setText(error, row.error ?? format.NONE);
  }
  return { element: h("tr", {}, when, status, error, endpoint, tenant, h("th", { scope: "row" }, link)), update };
}
