// @ts-check
/** What every worker's prefix cache gives and holds, by tier. */
import { heat } from "./charts.js";
import { h, keep, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { shares } from "./history.js";
import { panel, table } from "./table.js";

/** @param {import("./history.js").FleetHistory} history */
export function cacheTable(history) {
  const body = h("tbody");
  const element = panel(
    "Cache heat",
    h("p", { class: "note" }, "Where prompt tokens came from in the last minute, and what is kept. The deeper the tint, the more."),
    table(
      ["Worker", "#Device hits", "#Host hits", "#Disk hits", "#Computed", "#Since start", "#Device blocks", "#Host blocks", "#Disk blocks"],
      body,
      "Prefix caches by worker and tier",
    ),
  );
  /** @param {any} fleet */
  function update(fleet) {
    const known = fleet.workers.filter((/** @type {any} */ worker) => worker.figures);
    const most = Math.max(1, ...known.map((/** @type {any} */ worker) => worker.figures.evictable_pages));
    keep(body, known, (/** @type {any} */ worker) => worker.incarnation, () => cacheRow(history));
    for (const cell of body.querySelectorAll("td[data-blocks]")) heat(cell, Number(cell.dataset.blocks) / most);
  }
  return { element, update };
}

/** @param {import("./history.js").FleetHistory} history */
function cacheRow(history) {
  const name = h("th", { scope: "row" });
  const cells = Array.from({ length: 8 }, () => h("td", { class: "number" }));
  const element = h("tr", {}, name, ...cells);
  /** @param {any} worker */
  function update(worker) {
    const figures = worker.figures;
    const tiers = history.tiers([worker.incarnation]);
    setText(name, worker.worker_id);
    [tiers?.device, tiers?.host, tiers?.disk].forEach((share, index) => {
      setText(cells[index], format.percent(share));
      heat(cells[index], share ?? 0);
    });
    setText(cells[3], format.percent(tiers ? 1 - tiers.all : null));
    setText(cells[4], format.percent(shares(figures)?.all));
    setText(cells[5], format.count(figures.evictable_pages));
    setAttribute(cells[5], "data-blocks", String(figures.evictable_pages));
    setAttribute(cells[5], "title", `of ${worker.page_size} tokens each, held by the cache alone`);
    setText(cells[6], figures.host_pages ? `${format.count(figures.host_pages_used)} / ${format.count(figures.host_pages)}` : format.NONE);
    setText(cells[7], figures.stored_blocks ? format.count(figures.stored_blocks) : format.NONE);
  }
  return { element, update };
}
