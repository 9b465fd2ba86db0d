// @ts-check
/** The ways that KV takes between workers, as their senders have measured them. The worst come first. */
import { setWidth } from "./charts.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { panel, table } from "./table.js";

export function linkTable() {
  const body = h("tbody");
  const note = h("p", { class: "note" });
  const none = h("p", { class: "note", hidden: true }, "No links: workers that do both, or that have no peers, move no KV.");
  const shown = table(["From", "To", "By", "Rate", "#Latency", "#Measured", "Health"], body, "Links between workers");
  const element = panel("Links and transfers", note, none, shown);
  /** @param {any} fleet */
  function update(fleet) {
    keep(body, fleet.links, (/** @type {any} */ link) => `${link.source} ${link.target}`, () => linkRow());
    shown.hidden = fleet.links.length === 0;
    none.hidden = fleet.links.length > 0;
    setText(note, transfers(fleet));
  }
  return { element, update };
}

/** @param {any} fleet */
function transfers(fleet) {
  let done = 0;
  let failed = 0;
  let moved = 0;
  let now = 0;
  for (const worker of fleet.workers) {
    done += worker.figures?.transfers_total ?? 0;
    failed += worker.figures?.transfer_failures_total ?? 0;
    moved += worker.figures?.transfer_bytes_total ?? 0;
    now += worker.figures?.transferring ?? 0;
  }
  const cut = fleet.links_total > fleet.links.length ? ` Worst ${fleet.links.length} of ${fleet.links_total} links.` : "";
  return `${format.count(done)} handoffs since start, ${format.bytes(moved)}; ${format.count(now)} under way, ${format.count(failed)} failed.${cut}`;
}

function linkRow() {
  const from = h("th", { scope: "row" });
  const to = h("td");
  const by = h("td");
  const bar = h("span", { class: "bar" });
  const speed = h("span", { class: "beside wide-number number" });
  const latency = h("td", { class: "number" });
  const measured = h("td", { class: "number" });
  const health = h("span", { class: "state" });
  const element = h(
    "tr",
    {},
    from,
    to,
    by,
    h("td", {}, h("span", { class: "gauge" }, h("span", { class: "track", "aria-hidden": "true" }, bar), speed)),
    latency,
    measured,
    h("td", { class: "wide" }, health),
  );
  /** @param {any} link */
  function update(link) {
    setText(from, format.workerOf(link.source));
    setText(to, format.workerOf(link.target));
    setText(by, link.transport);
    setWidth(bar, link.broken ? 0 : logShare(link.bytes_per_s));
    setText(speed, link.broken ? format.NONE : format.byteRate(link.bytes_per_s));
    setText(latency, link.latency_s ? format.seconds(link.latency_s) : format.NONE);
    setText(measured, link.bytes_per_s ? format.ago(link.age_s) : "not yet");
    const state = link.broken ? "broken" : link.problem ? "degraded" : link.bytes_per_s ? "good" : "unknown";
    setAttribute(health, "data-state", state);
    setText(health, link.broken ? `broken${link.problem ? `: ${link.problem}` : ""}` : link.problem || (state === "good" ? "good" : "not measured"));
  }
  return { element, update };
}

/** 1 MB/s is nothing, 100 GB/s is all. @param {number} bytesPerS */
function logShare(bytesPerS) {
  return bytesPerS > 1e6 ? Math.log10(bytesPerS / 1e6) / 5 : 0;
}
