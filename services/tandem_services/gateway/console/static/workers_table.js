// @ts-check
/** Every worker, with its state and its load. */
import { sparkline, stackedBar } from "./charts.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { panel, table } from "./table.js";

/** @type {Record<string, string>} */
const STATES = {
  ready: "takes requests",
  draining: "takes no new requests; running ones move on or finish",
  paused: "an operator has paused it",
  standby: "its revision is being tried: it takes no ordinary requests yet",
  stalled: "its engine shows no sign of life",
  suspect: "this gateway has lost its connection to it",
  skewed: "its release is too far from this gateway's: it gets no requests",
  left: "has drained and left",
  lost: "has gone without a word",
};

/** @param {import("./history.js").FleetHistory} history */
export function workerTable(history) {
  const body = h("tbody");
  const note = h("p", { class: "note" });
  const element = panel(
    "Workers",
    note,
    table(
      ["Worker", "Role", "State", "#Running", "#Waiting", "KV pages", "#Output tok/s", "", "#Step", "#Prefill tok/s"],
      body,
      "Workers, with their load",
    ),
    h("p", { class: "legend" }, key("used", "in use"), key("cached", "cached, free to take"), key("quarantined", "in quarantine")),
  );
  /** @param {any[]} rows @param {any} fleet */
  function update(rows, fleet) {
    const models = new Set(rows.map((worker) => worker.model));
    keep(body, rows, (worker) => worker.incarnation, () => workerRow(history));
    for (const row of body.children) row.classList.toggle("one-model", models.size < 2);
    setText(note, fleet.workers_total > fleet.workers.length ? `The first ${fleet.workers.length} of ${fleet.workers_total}.` : "");
  }
  return { element, update };
}

/** @param {import("./history.js").FleetHistory} history */
function workerRow(history) {
  const name = h("span", { class: "name" });
  const number = h("span", { class: "faint" });
  const model = h("span", { class: "faint model" });
  const role = h("span", { class: "role" });
  const state = h("span", { class: "state" });
  const running = h("td", { class: "number" });
  const waiting = h("td", { class: "number" });
  const pages = stackedBar(["used", "cached", "quarantined"]);
  const usage = h("span", { class: "beside number" });
  const output = h("td", { class: "number" });
  const spark = sparkline();
  const step = h("td", { class: "number" });
  const prefill = h("td", { class: "number" });
  const element = h(
    "tr",
    {},
    h("th", { scope: "row" }, name, number, model),
    h("td", {}, role),
    h("td", {}, state),
    running,
    waiting,
    h("td", {}, h("span", { class: "gauge" }, pages.element, usage)),
    output,
    h("td", { class: "curve" }, spark.element),
    step,
    prefill,
  );
  /** @param {any} worker */
  function update(worker) {
    const figures = worker.figures;
    const gone = worker.gone != null;
    element.classList.toggle("gone", gone);
    setText(name, worker.worker_id);
    setText(number, `@${worker.incarnation.slice(worker.worker_id.length + 1).slice(-4)}`);
    setAttribute(number, "title", worker.incarnation);
    setText(model, worker.model);
    setText(role, worker.role);
    setAttribute(role, "data-role", worker.role);
    setText(state, gone ? `${worker.state} ${format.ago(Math.max(0, history.latest.time - worker.gone))}` : worker.state);
    setAttribute(state, "data-state", worker.state);
    setAttribute(state, "title", STATES[worker.state] ?? "");
    setText(running, gone || !figures ? format.NONE : format.count(figures.running));
    setText(waiting, gone || !figures ? format.NONE : format.count(figures.waiting + figures.transferring));
    setAttribute(waiting, "title", figures ? `${figures.waiting} to be scheduled, ${figures.transferring} for KV from a peer, ${format.count(worker.queue_tokens)} prompt tokens to compute` : "");
    showPages(gone ? null : figures);
    setText(output, gone || !figures ? format.NONE : format.rate(figures.output_tokens_per_s));
    spark.update(history.tracks.get(worker.incarnation)?.output ?? []);
    setText(step, gone || !worker.decode_step_s ? format.NONE : format.seconds(worker.decode_step_s));
    setText(prefill, gone ? format.NONE : format.count(Math.round(worker.prefill_tokens_per_s)));
  }
  /** @param {any} figures */
  function showPages(figures) {
    const total = figures?.total_pages;
    if (!total) {
      pages.update([0, 0, 0], "not known");
      setText(usage, format.NONE);
      return;
    }
    const used = usedPages(figures);
    const label = `${used} of ${total} pages in use, ${figures.evictable_pages} cached, ${figures.quarantined_pages} in quarantine`;
    pages.update([used / total, figures.evictable_pages / total, figures.quarantined_pages / total], label);
    setText(usage, format.percent(used / total));
  }
  return { element, update };
}

/** Pages that requests hold. @param {any} figures */
export function usedPages(figures) {
  return Math.max(0, figures.total_pages - figures.free_pages - figures.evictable_pages - figures.quarantined_pages);
}

/** @param {string} kind @param {string} text */
function key(kind, text) {
  return h("span", { class: "key" }, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
}
