// @ts-check
/** The fleet: what it does now, its workers, its caches, and the links between them. */
import { aboutPanel } from "./about.js";
import { getJson } from "./api.js";
import { cacheTable } from "./cache_table.js";
import { fill, h } from "./dom.js";
import { FleetHistory } from "./history.js";
import { latencyTable } from "./latency_table.js";
import { linkTable } from "./links_table.js";
import { poll } from "./poll.js";
import { startingPanel } from "./starting.js";
import { summaryTiles } from "./summary_tiles.js";
import { workerTable } from "./workers_table.js";

const EVERY_MS = 1000;

/** Outlives the view: coming back to it shows what was before. */
const history = new FleetHistory();

/** @param {HTMLElement} main @param {import("./main.js").Page} page */
export function showFleet(main, page) {
  const tiles = summaryTiles(history);
  const workers = workerTable(history);
  const caches = cacheTable(history);
  const latency = latencyTable();
  const links = linkTable();
  const about = aboutPanel();
  const starting = startingPanel();
  const body = h("div", { class: "stack-view", hidden: true }, tiles.element, workers.element, latency.element, caches.element, links.element, about.element);
  const blank = h("div", { class: "blank" });
  fill(blank, h("p", { class: "loading" }, "Loading the fleet…"));
  fill(main, h("h1", { class: "visually-hidden" }, "Fleet"), starting.element, blank, body);

  return poll({
    everyMs: EVERY_MS,
    async ask() {
      if (!history.begun) history.begin(await getJson("console/data/history"));
      return getJson("console/data/fleet");
    },
    show(fleet) {
      page.answered(fleet);
      history.add(fleet);
      const rows = [...fleet.workers, ...history.lost().map(departed)];
      blank.hidden = rows.length > 0;
      body.hidden = rows.length === 0;
      if (rows.length === 0) fill(blank, ...noWorkers(fleet));
      starting.update(fleet.starting ?? []);
      tiles.update(fleet);
      workers.update(rows, fleet);
      latency.update(fleet);
      caches.update(fleet);
      links.update(fleet);
      about.update(fleet);
    },
    fail(error, retryMs) {
      page.failed(error, retryMs);
      if (error.status === 403) {
        body.hidden = true;
        blank.hidden = false;
        fill(blank, h("h2", {}, "The fleet is for administrators"), h("p", {}, "This key may use the playground and look up its own requests. The fleet requires a key whose entry has ", h("code", {}, '"admin": true'), "."));
      } else if (error.status === 401) {
        body.hidden = true;
        blank.hidden = false;
        fill(blank, h("p", {}, "The fleet requires an administrator's key."));
      } else if (history.latest === null) {
        fill(blank, h("h2", {}, "No answer yet"), h("p", {}, error.message));
      }
    },
  });
}

/** @param {any} fleet */
function noWorkers(fleet) {
  if (fleet.starting?.length > 0) return [h("p", {}, "The gateway is up. It serves when the first workers of each role have started.")];
  const hint =
    fleet.redis === "away"
      ? "Redis is down, so this gateway cannot list the workers."
      : "The gateway is up and waits for workers. Workers register a few seconds after their model is loaded.";
  return [
    h("h2", {}, "No workers"),
    h("p", {}, hint),
    h("pre", {}, `tandem worker --role both --model … --cluster ${fleet.gateway.clusters[0]} --redis-url …`),
  ];
}

/** A worker that is not in the registry any more. @param {import("./history.js").Track} track */
function departed(track) {
  return { ...track.worker, state: track.worker.state === "draining" ? "left" : "lost", gone: track.gone };
}
