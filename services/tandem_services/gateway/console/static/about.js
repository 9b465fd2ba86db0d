// @ts-check
/** What this gateway is, and what it serves. */
import { h, keep, setText } from "./dom.js";
import * as format from "./format.js";
import { panel } from "./table.js";

export function aboutPanel() {
  const list = h("dl", { class: "about" });
  /** @param {any} fleet */
  function update(fleet) {
    keep(list, factsOf(fleet), ([name]) => name, makeFact);
  }
  return { element: panel("About", list), update };
}

/** @param {any} fleet @returns {[string, string][]} */
function factsOf(fleet) {
  const { version, uptime_s, requires_key, roots, clusters } = fleet.gateway;
  const of = (/** @type {(worker: any) => string | undefined} */ read) => [...new Set(fleet.workers.map(read).filter(Boolean))].join(", ") || format.NONE;
  return [
    ["Gateway", `Tandem ${version}, up for ${format.seconds(uptime_s)}`],
    ["API keys", requires_key ? "required" : "not required: authentication is disabled"],
    ["Models", of((worker) => worker.model)],
    ...given("From the hub", roots.join(", ")),
    ["Data types", of((worker) => worker.figures?.dtype)],
    ["Devices", of((worker) => worker.figures?.device)],
    ...given("CPU kernels", of((worker) => worker.figures?.kernel_target)),
    ["KV transport", of((worker) => worker.figures?.transport)],
    ...adaptersOf(fleet.workers),
    ["Clusters", clusters.join(", ")],
  ];
}

/** A fact that not every gateway has. @param {string} name @param {string} text @returns {[string, string][]} */
function given(name, text) {
  return text && text !== format.NONE ? [[name, text]] : [];
}

/** Each with the number of its workers, where not all have it. @param {any[]} workers @returns {[string, string][]} */
function adaptersOf(workers) {
  const names = [...new Set(workers.flatMap((worker) => worker.adapters))].sort();
  const shown = names.map((name) => {
    const count = workers.filter((worker) => worker.adapters.includes(name)).length;
    return count === workers.length ? name : `${name} (${count} of ${workers.length} workers)`;
  });
  return names.length > 0 ? [["Adapters", shown.join(", ")]] : [];
}

/** @param {[string, string]} fact */
function makeFact([name]) {
  const value = h("dd");
  return {
    element: h("div", {}, h("dt", {}, name), value),
    /** @param {[string, string]} fact */
    update: ([, text]) => setText(value, text),
  };
}
