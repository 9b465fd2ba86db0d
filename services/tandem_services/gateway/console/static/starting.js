// @ts-check
/** Workers that are not registered yet, with what their engines do. Hidden where there are none. */
import { h, keep, setAttribute, setText } from "./dom.js";
import { panel } from "./table.js";

export function startingPanel() {
  const list = h("ul", { class: "starting" });
  const element = panel("Starting", list);
  element.hidden = true;
  /** @param {any[]} workers a gateway of an earlier release lists none */
  function update(workers) {
    element.hidden = workers.length === 0;
    keep(list, workers, (worker) => worker.incarnation, startingRow);
  }
  return { element, update };
}

function startingRow() {
  const name = h("span", { class: "name" });
  const role = h("span", { class: "role" });
  const phase = h("span", { class: "phase" });
  const bar = h("progress", { max: 1 });
  const since = h("span", { class: "faint" });
  const element = h("li", {}, name, role, phase, bar, since);
  /** @param {any} worker */
  function update(worker) {
    setText(name, worker.worker_id);
    setAttribute(name, "title", worker.model);
    setText(role, worker.role);
    setAttribute(role, "data-role", worker.role);
    setText(phase, worker.progress);
    bar.hidden = worker.share === null;
    setAttribute(bar, "value", String(worker.share ?? 0));
    setAttribute(bar, "aria-label", `${worker.worker_id}: ${worker.phase}`);
    setText(since, `${Math.round(worker.seconds)} s`);
  }
  return { element, update };
}
