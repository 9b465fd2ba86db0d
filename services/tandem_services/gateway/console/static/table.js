// @ts-check
/** What the tables of all views share. */
import { h } from "./dom.js";

/**
 * A table that scrolls by itself where it is wider than the page. Columns that begin with # hold numbers.
 * @param {string[]} columns @param {Element} body @param {string} label
 */
export function table(columns, body, label) {
  const heads = columns.map((name) => h("th", { scope: "col", class: name.startsWith("#") ? "number" : null }, name.replace("#", "")));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", {}, h("thead", {}, h("tr", {}, ...heads)), body));
}

/** @param {string} title @param {...import("./dom.js").Child} children */
export function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h2", {}, title), ...children);
}
