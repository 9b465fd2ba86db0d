// @ts-check
/**
 * Elements from data. Text becomes text nodes and nothing else: whatever a model, a worker or a client has written
 * cannot become markup.
 *
 * @typedef {Node | string | number | null | undefined | false} Child
 * @typedef {{[name: string]: string | number | boolean | null | undefined | EventListener}} Props
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. Props are attributes; functions are listeners of the event that they are named after.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...Child} children
 * @returns {any} the element; its kind is the tag's
 */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/**
 * An SVG element.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...Child} children
 * @returns {any}
 */
export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

/** @param {Element} element @param {Props} props @param {Child[]} children */
function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...present(children));
  return element;
}

/** @param {Child[]} children @returns {(Node | string)[]} */
function present(children) {
  return children.filter((child) => child != null && child !== false).map((c) => (c instanceof Node ? c : String(c)));
}

/** Replace what is in `parent`. @param {Element} parent @param {...Child} children */
export function fill(parent, ...children) {
  parent.replaceChildren(...present(children));
}

/** An input with its label. @param {string} name @param {Element} input */
export function field(name, input) {
  return h("div", { class: "field" }, h("label", { for: input.id }, name), input);
}

/** Change a text only when it differs: selections and screen readers stay undisturbed.
 * @param {Node} node @param {string} text */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {Element} element @param {string} name @param {string} value */
export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/**
 * Keeps one element per item, in the items' order, and updates it in place.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {(item: T) => string} key
 * @param {(item: T) => {element: Element, update: (item: T) => void}} make
 */
export function keep(parent, items, key, make) {
  /** @type {Map<string, {element: Element, update: (item: T) => void}>} */
  const known = kept.get(parent) ?? new Map();
  kept.set(parent, known);
  const wanted = new Set(items.map(key));
  for (const [name, row] of known) {
    if (!wanted.has(name)) {
      row.element.remove();
      known.delete(name);
    }
  }
  items.forEach((item, index) => {
    const name = key(item);
    const row = known.get(name) ?? make(item);
    known.set(name, row);
    row.update(item);
    if (parent.children[index] !== row.element) parent.insertBefore(row.element, parent.children[index] ?? null);
  });
}

/** @type {WeakMap<Element, Map<string, any>>} */
const kept = new WeakMap();
