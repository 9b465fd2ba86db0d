// @ts-check
/** One request's story: when it waited, where it ran and why there, what moved, and what was begun again. */
import { getJson } from "./api.js";
import { candidatesTable } from "./candidates_table.js";
import { setLeft, setWidth } from "./charts.js";
import { fill, h } from "./dom.js";
import * as format from "./format.js";
import { poll } from "./poll.js";
import { endpointName, statusText, statusTone } from "./requests.js";
import { panel } from "./table.js";

const EVERY_MS = 1000;
const MAX_CHOICES = 8;

/** @type {Record<string, string>} */
const PLACEMENTS = {
  pair: "a prefill worker computed the prompt, its KV moved",
  alone: "one worker did both",
  local: "the decode worker computed the prompt itself: predicted to be faster",
  degraded: "the decode worker computed the prompt itself: no prefill worker could",
};
/** @type {Record<string, string>} */
const SOURCES = { redis: "with the shared index", local: "from this gateway's last view, without Redis", session: "by its session" };
/** @type {Record<string, string>} */
const TERMS = {
  prefix_fetch: "bring a cached prefix",
  host_load: "copy from host memory",
  prefill_queue: "wait behind other prompts",
  prefill_compute: "compute the prompt",
  prefill_stall: "what that holds up",
  transfer: "move KV",
  decode_load: "share the decode step",
  decode_room: "wait for room",
  adapter_load: "load the adapter",
  gateway_wait: "wait in the gateway's queue",
  step_base: "what any step takes",
  decode_step: "the step that is under way",
  handling: "read, tokenize, messages",
};

/** @param {HTMLElement} main @param {import("./main.js").Page} page @param {string} id */
export function showTimeline(main, page, id) {
  const body = h("div", { class: "stack-view" }, h("div", { class: "blank" }, h("p", { class: "loading" }, "Loading the request…")));
  fill(main, h("div", { class: "headline" }, h("h1", {}, "Request ", h("span", { class: "id" }, id)), h("a", { href: "#requests" }, "All requests")), body);
  let drawn = "";
  return poll({
    everyMs: EVERY_MS,
    ask: () => explain(id),
    show(record) {
      page.answered();
      const text = JSON.stringify(record);
      if (text !== drawn) fill(body, ...story(record));
      drawn = text;
      return record.e2e_s === null;
    },
    fail(error, retryMs) {
      if (error.status === 404) {
        page.answered();
        fill(body, h("div", { class: "blank" }, h("h2", {}, "Not known here"), h("p", {}, "Each gateway keeps only its own last few thousand requests. ", error.message)));
      } else {
        page.failed(error, retryMs);
      }
    },
  });
}

/** Any request for an administrator, a caller's own for others. @param {string} id */
async function explain(id) {
  const path = encodeURIComponent(id);
  try {
    return await getJson(`console/data/requests/${path}`);
  } catch (error) {
    if (!(error instanceof Error && "status" in error && error.status === 403)) throw error;
  }
  return getJson(`v1/requests/${path}/explain`);
}

/** @param {any} record */
function story(record) {
  const choices = record.choices.slice(0, MAX_CHOICES);
  const left = record.choices.length - choices.length;
  return [
    facts(record),
    record.error && h("p", { class: "notice", "data-tone": "bad" }, record.error),
    ...choices.map((/** @type {any} */ choice) => choicePanel(record, choice)),
    left > 0 && h("p", { class: "note" }, `${left} more choices are not shown.`),
  ];
}

/** @param {any} record */
function facts(record) {
  const first = record.choices[0] ?? {};
  const output = record.choices.reduce((/** @type {number} */ sum, /** @type {any} */ choice) => sum + choice.output_tokens, 0);
  const cached = record.choices.reduce((/** @type {number} */ sum, /** @type {any} */ choice, /** @type {number} */ index) => sum + (index % record.n ? 0 : (choice.cached_tokens ?? 0)), 0);
  const decoding = record.e2e_s !== null && first.ttft_s != null ? record.e2e_s - first.ttft_s : null;
  const status = h("span", { class: "state", "data-state": statusTone(record.status) }, statusText(record.status));
  return h(
    "section",
    { class: "tiles", "aria-label": "Facts" },
    fact("Status", status, first.finish_reason ? `finished by ${first.finish_reason}` : record.status === null ? "not finished" : ""),
    fact("First token", format.seconds(first.ttft_s), "after its arrival"),
    fact("Total", format.seconds(record.e2e_s), format.clock(record.created)),
    fact("Prompt", `${format.count(record.prompt_tokens)}`, `tokens, ${format.count(cached)} cached`),
    fact("Output", `${format.count(output)}`, decoding && output > 1 ? `tokens, ${format.rate((output - 1) / decoding)} per second` : "tokens"),
    fact("Request", endpointName(record.endpoint), [record.model, record.tenant && `of ${record.tenant}`, record.stream ? "streamed" : ""].filter(Boolean).join(", ")),
  );
}

/** @param {string} name @param {import("./dom.js").Child} value @param {string} detail */
function fact(name, value, detail) {
  return h("dl", { class: "tile" }, h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "detail" }, detail));
}

/** @param {any} record @param {any} choice */
function choicePanel(record, choice) {
  const title = record.choices.length > 1 ? `Choice ${choice.index}` : "Timeline";
  return panel(title, lanesOf(record, choice), ...choice.attempts.map((/** @type {any} */ attempt, /** @type {number} */ index) => attemptCard(choice, attempt, index)));
}

/* ── The picture ───────────────────────────────────────────────────────────────────────────────────────────────── */

/**
 * @typedef {{name: string, kind: string, from: number, to: number, text: string}} Lane
 */

/**
 * Phases in their order. Their lengths are measured; on the worker each begins where the one before it ended.
 * @param {any} record @param {any} choice @returns {Lane[]}
 */
export function phases(record, choice) {
  const lanes = [];
  const admitted = choice.admission_s ?? 0;
  if (choice.admission_s != null) lanes.push(lane("Gateway queue", "wait", 0, admitted, "for a worker with capacity"));
  if (choice.fetch) lanes.push(lane("Prefix fetch", "move", admitted, admitted + choice.fetch.wait_s, `${format.bytes(choice.fetch.bytes)} from ${format.workerOf(choice.fetch.peer)}`));
  let at = admitted;
  if (choice.queue_s != null) {
    lanes.push(lane("Worker queue", "wait", at, at + choice.queue_s, "until its first step"));
    at += choice.queue_s;
    if (choice.delay_s) lanes.push(lane("Scheduling delay", "wait", at - choice.delay_s, at, "of that, for prompts to compute together"));
  }
  if (choice.prefill_s != null) {
    lanes.push(lane("Prefill", "compute", at, at + choice.prefill_s, "first step to first token"));
    at += choice.prefill_s;
  }
  if (choice.transfer) {
    const end = at + choice.transfer.exposed_s;
    const text = `${format.plural(choice.transfer.pages, "page")}, ${format.bytes(choice.transfer.bytes)}, ${format.seconds(choice.transfer.exposed_s)} of it after the prompt`;
    lanes.push(lane("KV transfer", "move", Math.max(admitted, end - choice.transfer.wait_s), end, text));
  }
  const handed = Math.max(0, ...lanes.map((one) => one.to));
  if (choice.ttft_s != null && choice.ttft_s - handed > Math.max(0.002, choice.ttft_s / 20)) {
    lanes.push(lane("Elsewhere", "wait", handed, choice.ttft_s, "reading the request, messages, busy processes"));
  }
  if (choice.ttft_s != null) {
    const end = record.e2e_s ?? Math.max(at, choice.ttft_s, ...choice.attempts.map((/** @type {any} */ one) => one.ended_s ?? 0));
    lanes.push(lane("Decode", "compute", choice.ttft_s, end, format.plural(choice.output_tokens, "token")));
  }
  if (choice.attempts.length > 1) {
    choice.attempts.forEach((/** @type {any} */ attempt, /** @type {number} */ index) => {
      const end = attempt.ended_s ?? record.e2e_s ?? attempt.began_s;
      lanes.push(lane(`Attempt ${index + 1}`, attempt.outcome === "finished" || attempt.outcome === "running" ? "attempt" : "failed", attempt.began_s, end, attempt.outcome));
    });
  }
  return lanes;
}

/** @param {string} name @param {string} kind @param {number} from @param {number} to @param {string} text @returns {Lane} */
function lane(name, kind, from, to, text) {
  return { name, kind, from, to: Math.max(from, to), text };
}

/** @param {any} record @param {any} choice */
function lanesOf(record, choice) {
  const lanes = phases(record, choice);
  if (lanes.length === 0) return h("p", { class: "note" }, "Nothing has happened yet.");
  const whole = Math.max(record.e2e_s ?? 0, ...lanes.map((one) => one.to)) || 1;
  const ticks = ticksOf(whole);
  return h(
    "div",
    { class: "lanes", role: "table", "aria-label": "Phases of the request" },
    ...lanes.map((one) => laneRow(one, whole, ticks)),
    axis(ticks, whole),
  );
}

/** @param {Lane} one @param {number} whole @param {number[]} ticks */
function laneRow(one, whole, ticks) {
  const span = h("span", { class: `span ${one.kind}` });
  setLeft(span, one.from / whole);
  setWidth(span, (one.to - one.from) / whole);
  return h(
    "div",
    { class: "lane", role: "row" },
    h("span", { class: "lane-name", role: "rowheader" }, one.name),
    h("span", { class: "lane-track", role: "presentation" }, ...ticks.map((tick) => gridLine(tick / whole)), span),
    h("span", { class: "lane-time number", role: "cell" }, format.seconds(one.to - one.from)),
    h("span", { class: "lane-text", role: "cell" }, one.text),
  );
}

/** @param {number} share */
function gridLine(share) {
  const line = h("span", { class: "grid-line", "aria-hidden": "true" });
  setLeft(line, share);
  return line;
}

/** @param {number[]} ticks @param {number} whole */
function axis(ticks, whole) {
  const labels = ticks.map((tick) => {
    const label = h("span", { class: "tick" }, format.seconds(tick));
    setLeft(label, tick / whole);
    return label;
  });
  return h("div", { class: "lane axis", "aria-hidden": "true" }, h("span"), h("span", { class: "lane-track" }, ...labels));
}

/** Round times, three to six of them. @param {number} whole seconds @returns {number[]} */
export function ticksOf(whole) {
  const rough = whole / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? rough;
  return Array.from({ length: Math.floor(whole / step + 1e-9) + 1 }, (_, index) => index * step);
}

/* ── Why there ─────────────────────────────────────────────────────────────────────────────────────────────────── */

/** @param {any} choice @param {any} attempt @param {number} index */
function attemptCard(choice, attempt, index) {
  const predicted = attempt.terms.reduce((/** @type {number} */ sum, /** @type {any} */ term) => sum + term.seconds, 0);
  const lines = [
    attempt.prefill && ["Prefill by", attempt.prefill],
    [attempt.prefill ? "Decode by" : "Worker", attempt.decode],
    ["Placement", PLACEMENTS[attempt.placement] ?? attempt.placement],
    ["Chosen", SOURCES[attempt.source] ?? attempt.source],
    ["Cached prefix", `${format.plural(attempt.matched_tokens, "token")} predicted${index === 0 && choice.cached_tokens != null ? `, ${format.count(choice.cached_tokens)} found${places(choice.cache_hits)}` : ""}`],
    attempt.predicted && ["Predicted", latencyText(attempt.predicted, index === 0 ? choice : null)],
    attempt.fetch && ["Fetch", `${format.count(attempt.fetch.tokens)} tokens from ${attempt.fetch.source}, predicted ${format.seconds(attempt.fetch.seconds)}`],
    attempt.resumed_tokens > 0 && ["Resumed", `after ${format.count(attempt.resumed_tokens)} tokens that the client already had`],
    ["Outcome", attempt.outcome],
  ].filter(Boolean);
  return h(
    "article",
    { class: "attempt" },
    h("h3", {}, choice.attempts.length > 1 ? `Attempt ${index + 1}` : "Route"),
    h("dl", { class: "pairs" }, .../** @type {string[][]} */ (lines).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])),
    attempt.terms.length > 0 && termTable(attempt.terms, predicted, "Score: predicted seconds, of which the sum was the lowest"),
    attempt.predicted && termTable(attempt.predicted.terms, attempt.predicted.ttft_s, `Latency: predicted seconds to the first token; corrected by ${attempt.predicted.queue.toFixed(2)} before the first step and ${attempt.predicted.compute.toFixed(2)} from then on`),
    attempt.candidates?.options.length > 1 && candidatesTable(attempt.candidates, TERMS),
  );
}

/**
 * Where cached tokens were, other than on the device.
 * @param {any} hits
 */
function places(hits) {
  const names = { host: "in host memory", disk: "in files", fetched: "fetched" };
  const parts = Object.entries(names).filter(([place]) => hits?.[place]).map(([place, name]) => `${format.count(hits[place])} ${name}`);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

/** @param {any} predicted @param {any} choice of which it was the first attempt, or null */
function latencyText(predicted, choice) {
  const first = choice?.ttft_s != null ? `, took ${format.seconds(choice.ttft_s)}` : "";
  const between = predicted.itl_s === null ? "" : `; ${format.seconds(predicted.itl_s)} between tokens${choice?.itl_s != null ? `, took ${format.seconds(choice.itl_s)}` : ""}`;
  return `first token after ${format.seconds(predicted.ttft_s)}${first}${between}`;
}

/** @param {any[]} terms @param {number} predicted @param {string} caption */
function termTable(terms, predicted, caption) {
  const most = Math.max(...terms.map((term) => term.seconds), 1e-9);
  const rows = terms.map((term) => {
    const bar = h("span", { class: "bar" });
    setWidth(bar, term.seconds / most);
    return h(
      "tr",
      { class: term.seconds ? null : "zero" },
      h("th", { scope: "row" }, h("code", {}, term.name)),
      h("td", {}, TERMS[term.name] ?? ""),
      h("td", { class: "bar-cell" }, h("span", { class: "track", "aria-hidden": "true" }, bar)),
      h("td", { class: "number" }, format.seconds(term.seconds)),
    );
  });
  return h(
    "table",
    { class: "terms" },
    h("caption", {}, caption),
    h("tbody", {}, ...rows),
    h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "sum"), h("td"), h("td"), h("td", { class: "number" }, format.seconds(predicted)))),
  );
}
