// @ts-check
/** Small pictures, drawn by a few lines of SVG. Each has its value in words beside it or as its label. */
import { h, svg } from "./dom.js";

const WIDTH = 96;
const HEIGHT = 24;

/** The fewest values that fill the width. */
const FEWEST = 24;

/** A sparkline that is drawn again with `update`. Few values stand at the right, many fill it. */
export function sparkline() {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  const element = svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    area,
    line,
  );
  /** @param {(number | null)[]} values */
  function update(values) {
    const span = Math.max(values.length, FEWEST);
    const top = Math.max(...values.map((value) => value ?? 0), 1e-9);
    const points = values.flatMap((value, index) =>
      value == null ? [] : [[((span - values.length + index) / (span - 1)) * WIDTH, HEIGHT - 1.5 - (value / top) * (HEIGHT - 4)]],
    );
    const path = points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    line.setAttribute("d", path);
    area.setAttribute("d", points.length > 1 ? `${path}L${points[points.length - 1][0].toFixed(1)} ${HEIGHT}L${points[0][0].toFixed(1)} ${HEIGHT}Z` : "");
  }
  return { element, update };
}

/**
 * A bar of parts of one whole.
 * @param {string[]} names classes of the parts, left to right
 */
export function stackedBar(names) {
  const parts = names.map((name) => h("span", { class: `part ${name}` }));
  const element = h("span", { class: "stack", role: "img" }, ...parts);
  /** @param {number[]} shares 0 to 1 @param {string} label */
  function update(shares, label) {
    shares.forEach((share, index) => setWidth(parts[index], share));
    element.setAttribute("aria-label", label);
    element.title = label;
  }
  return { element, update };
}

/** @param {HTMLElement} element @param {number} share of its parent's width */
export function setWidth(element, share) {
  element.style.setProperty("width", `${(Math.min(Math.max(share, 0), 1) * 100).toFixed(2)}%`);
}

/** @param {HTMLElement} element @param {number} share of its parent's width */
export function setLeft(element, share) {
  element.style.setProperty("left", `${(Math.min(Math.max(share, 0), 1) * 100).toFixed(2)}%`);
}

/** Tint a cell: nothing at 0, the whole color at 1. @param {HTMLElement} cell @param {number | null} value */
export function heat(cell, value) {
  cell.classList.add("heat");
  cell.style.setProperty("--heat", `${Math.round(Math.min(Math.max(value ?? 0, 0), 1) * 100)}%`);
}
