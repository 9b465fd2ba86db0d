// @ts-check
/** What the whole fleet does, in eight figures. */
import { sparkline } from "./charts.js";
import { h, setText } from "./dom.js";
import * as format from "./format.js";
import { usedPages } from "./workers_table.js";

/** @param {import("./history.js").FleetHistory} history */
export function summaryTiles(history) {
  const tiles = {
    workers: tile("Workers", false),
    running: tile("Running"),
    queued: tile("Waiting"),
    output: tile("Output tokens/s"),
    hits: tile("Prefix hits"),
    kv: tile("KV in use"),
    ttft: tile("Time to first token"),
    moved: tile("KV moved"),
  };
  const element = h("section", { class: "tiles", "aria-label": "Summary" }, ...Object.values(tiles).map((one) => one.element));
  /** @param {any} fleet */
  function update(fleet) {
    const known = fleet.workers.filter((/** @type {any} */ worker) => worker.figures);
    const names = known.map((/** @type {any} */ worker) => worker.incarnation);
    const sum = (/** @type {(figures: any) => number} */ of) => known.reduce((/** @type {number} */ total, /** @type {any} */ w) => total + of(w.figures), 0);
    const ready = fleet.workers.filter((/** @type {any} */ worker) => worker.state === "ready").length;
    const traffic = fleet.gateway.traffic;
    const running = sum((f) => f.running + f.transferring);
    const waiting = sum((f) => f.waiting) + fleet.gateway.waiting;
    const output = sum((f) => f.output_tokens_per_s);
    const tiers = history.tiers(names);
    const pages = sum((f) => f.total_pages);
    const used = pages ? sum(usedPages) / pages : null;
    const moved = names.reduce((/** @type {number} */ total, /** @type {string} */ name) => total + history.perSecond(name, "transfer_bytes_total"), 0);
    tiles.workers.update(String(ready), `of ${fleet.workers_total} ready`);
    tiles.running.update(format.count(running), `${fleet.gateway.running} by this gateway`, history.note("running", running));
    tiles.queued.update(format.count(waiting), `${fleet.gateway.waiting} at this gateway`, history.note("queued", waiting));
    tiles.output.update(format.rate(output), `${format.rate(history.acceptedPerSecond())} requests/s here`, history.note("output", output));
    tiles.hits.update(format.percent(tiers?.all), "of prompts, 1 min", history.note("hits", tiers?.all ?? null));
    tiles.kv.update(format.percent(used), `of ${format.count(pages)} pages`, history.note("kv", used));
    tiles.ttft.update(format.seconds(traffic.ttft_p50_s), `here; p95 ${format.seconds(traffic.ttft_p95_s)}`, history.note("ttft", traffic.ttft_p50_s));
    tiles.moved.update(format.byteRate(moved) === format.NONE ? "0 B/s" : format.byteRate(moved), `${format.count(sum((f) => f.transfer_failures_total))} transfers failed`, history.note("moved", moved));
  }
  return { element, update };
}

/** @param {string} name @param {boolean} [drawn] */
function tile(name, drawn = true) {
  const value = h("dd", { class: "value" }, format.NONE);
  const detail = h("dd", { class: "detail" });
  const spark = drawn ? sparkline() : null;
  const element = h("dl", { class: "tile" }, h("dt", {}, name), value, detail, spark?.element);
  /** @param {string} text @param {string} more @param {(number | null)[]} [curve] */
  function update(text, more, curve) {
    setText(value, text);
    setText(detail, more);
    if (spark && curve) spark.update(curve);
  }
  return { element, update };
}
