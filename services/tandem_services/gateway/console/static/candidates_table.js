// @ts-check
/** What one attempt's workers were chosen from: every option with its price, the chosen one first. */
import { setWidth } from "./charts.js";
import { h } from "./dom.js";
import * as format from "./format.js";

/** Parts of a price that are named; the rest is in the sum. */
const NAMED = 2;

/** @param {any} candidates @param {Record<string, string>} words what each term of a price is for */
export function candidatesTable(candidates, words) {
  const most = Math.max(...candidates.options.map((/** @type {any} */ option) => option.predicted_s), 1e-9);
  const rows = candidates.options.map((/** @type {any} */ option, /** @type {number} */ index) => candidateRow(option, index === 0, most, words));
  const more = candidates.more > 0 && h("tfoot", {}, h("tr", {}, h("td", { colspan: 5 }, `${format.plural(candidates.more, "other")}, dearer than these`)));
  return h(
    "table",
    { class: "terms candidates" },
    h("caption", {}, "Chosen from: all that could serve it, by the sum of their scores"),
    h("tbody", {}, ...rows),
    more,
  );
}

/** @param {any} option @param {boolean} chosen @param {number} most seconds @param {Record<string, string>} words */
function candidateRow(option, chosen, most, words) {
  const bar = h("span", { class: "bar" });
  setWidth(bar, option.predicted_s / most);
  return h(
    "tr",
    { class: chosen ? "chosen" : null },
    h("th", { scope: "row" }, option.prefill ? `${option.prefill} → ${option.decode}` : option.decode),
    h("td", {}, [cached(option), ...greatest(option.terms, words)].join(", ")),
    h("td", { class: "bar-cell" }, h("span", { class: "track", "aria-hidden": "true" }, bar)),
    h("td", { class: "number" }, format.seconds(option.predicted_s)),
    h("td", {}, chosen ? "chosen" : ""),
  );
}

/** @param {any} option */
function cached(option) {
  const fetched = option.fetch ? `, ${format.count(option.fetch.tokens)} with those of ${option.fetch.source}` : "";
  const inHost = option.matched_host_tokens ? ` (${format.count(option.matched_host_tokens)} in host memory)` : "";
  return `${format.count(option.matched_tokens)} tokens cached${inHost}${fetched}`;
}

/** @param {any[]} terms @param {Record<string, string>} words */
function greatest(terms, words) {
  return [...terms]
    .sort((one, other) => other.seconds - one.seconds)
    .slice(0, NAMED)
    .filter((term) => term.seconds > 0)
    .map((term) => `${words[term.name] ?? term.name} ${format.seconds(term.seconds)}`);
}
