// @ts-check
/** Predicted against measured latency, by kind of worker and placement, and what has been learned of them. */
import { h, keep, setAttribute, setText } from "./dom.js";
import * as format from "./format.js";
import { panel, table } from "./table.js";

const COLUMNS = ["Workers", "Placement", "#Requests", "#First token", "#Predicted", "#Between tokens", "#Predicted", "#Queue", "#Compute", "#Margin"];

export function latencyTable() {
  const body = h("tbody");
  const element = panel(
    "Latency",
    h("p", { class: "note" }, "Medians of the last requests, and how this gateway corrects its predictions by them: factors of queues and of computing, and the margin that 95 % of the requests keep."),
    table(COLUMNS, body, "Predicted and measured latency by kind of worker"),
  );
  /** @param {any} fleet */
  function update(fleet) {
    const rows = fleet.latency ?? [];
    element.hidden = rows.length === 0;
    keep(body, rows, (/** @type {any} */ row) => `${row.model} ${row.kind} ${row.placement}`, latencyRow);
  }
  return { element, update };
}

function latencyRow() {
  const name = h("th", { scope: "row" });
  const placement = h("td");
  const cells = Array.from({ length: COLUMNS.length - 2 }, () => h("td", { class: "number" }));
  const element = h("tr", {}, name, placement, ...cells);
  /** @param {any} row */
  function update(row) {
    setText(name, `${row.model} ${row.kind}`);
    setText(placement, row.placement);
    const texts = [
      format.count(row.samples),
      format.seconds(row.measured_ttft_s),
      format.seconds(row.predicted_ttft_s),
      format.seconds(row.measured_itl_s),
      format.seconds(row.predicted_itl_s),
      factor(row.queue),
      factor(row.compute),
      row.calibrated ? factor(row.margin) : `${factor(row.margin)}, beyond its bounds`,
    ];
    texts.forEach((text, index) => setText(cells[index], text));
    setAttribute(cells[7], "title", `between tokens ${factor(row.itl_margin)}; measured over predicted ${factor(row.ratio)}; ${format.seconds(row.handling_s)} outside of workers`);
  }
  return { element, update };
}

/** @param {number} value */
function factor(value) {
  return `× ${value.toFixed(2)}`;
}
