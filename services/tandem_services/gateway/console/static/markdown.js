// @ts-check
/**
 * Markdown of a model as elements: headings, lists, quotes, tables, code, emphasis, links to http and https.
 *
 * Everything becomes elements of these kinds and text nodes, never markup. Whatever is not understood stays text.
 */
import { copyButton } from "./copy.js";
import { h } from "./dom.js";

/** A longer paragraph is plain text: patterns with unmatched marks take time with the square of its length. */
const MAX_INLINE = 8000;
const MAX_DEPTH = 6;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +)(?=\S)/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`{1,3})([^`]+)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|~~(?=\S)(.+?)(?<=\S)~~|\*(?=\S)([^*]+?)(?<=\S)\*|(?<!\w)_(?=\S)([^_]+?)(?<=\S)_(?!\w)|\[([^\][]*)\]\(([^\s()]+)\)|\\([!-/:-@[-`{-~])|\b(https?:\/\/[^\s<>()[\]"]*[^\s<>()[\]".,;:!?*_`])/gs;

/** @typedef {{kind: "code" | "heading" | "list" | "quote" | "table" | "rule" | "text", lines: string[], start: number}} Block */

/** A text that grows: complete blocks stay as they are, the last one is made again. */
export class MarkdownView {
  element = h("div", { class: "text markdown" });
  /** Characters of the blocks that are complete. */
  #done = 0;
  #length = 0;
  /** @type {Element[]} of the last block */
  #last = [];

  /** @param {string} text all of it: the former text, and more */
  update(text) {
    if (text.length === this.#length) return;
    this.#length = text.length;
    const blocks = blocksOf(text.slice(this.#done));
    for (const old of this.#last) old.remove();
    const made = blocks.map((block) => element(block, 0));
    this.element.append(...made);
    this.#last = made.slice(-1);
    this.#done += blocks.at(-1)?.start ?? 0;
  }
}

/** @param {string} text @returns {Block[]} */
function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  for (let number = 0; number < lines.length; ) {
    if (!lines[number].trim()) {
      at += lines[number].length + 1;
      number += 1;
      continue;
    }
    const kind = kindOf(lines, number);
    const end = endOf(kind, lines, number);
    blocks.push({ kind, lines: lines.slice(number, end), start: at });
    for (; number < end; number += 1) at += lines[number].length + 1;
  }
  return blocks;
}

/** @param {string[]} lines @param {number} at @returns {Block["kind"]} */
function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return line.includes("|") && lines[at + 1]?.includes("|") && DELIMITERS.test(lines[at + 1]) ? "table" : "text";
}

/** The line after a block. @param {Block["kind"]} kind @param {string[]} lines @param {number} at */
function endOf(kind, lines, at) {
  let end = at + 1;
  if (kind === "code") {
    const fence = /** @type {RegExpExecArray} */ (FENCE.exec(lines[at]))[1];
    while (end < lines.length && !closes(lines[end], fence)) end += 1;
    return Math.min(end + 1, lines.length);
  }
  if (kind === "heading" || kind === "rule") return end;
  if (kind === "list") {
    while (end < lines.length && continuesList(lines, end, isNumbered(lines[at]))) end += 1;
    return end;
  }
  while (end < lines.length && lines[end].trim() && continues(kind, lines, end)) end += 1;
  return end;
}

/** @param {string} line @param {string} fence */
function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

/** @param {string} line */
function isNumbered(line) {
  return /^ *\d/.test(line);
}

/** @param {string[]} lines @param {number} at @param {boolean} numbered */
function continuesList(lines, at, numbered) {
  const belongs = (/** @type {string} */ line) => /^ {2,}\S/.test(line) || (ITEM.test(line) && !RULE.test(line) && isNumbered(line) === numbered);
  if (lines[at].trim()) return belongs(lines[at]) || (lines[at - 1].trim() !== "" && kindOf(lines, at) === "text");
  const next = lines.findIndex((line, index) => index > at && line.trim());
  return next > 0 && belongs(lines[next]);
}

/** @param {Block["kind"]} kind @param {string[]} lines @param {number} at */
function continues(kind, lines, at) {
  if (kind === "table") return lines[at].includes("|");
  const next = kindOf(lines, at);
  return next === kind || (kind === "quote" && next === "text");
}

/** @param {Block} block @param {number} depth @returns {Element} */
function element(block, depth) {
  const text = block.lines.join("\n");
  if (block.kind === "code") return code(block.lines);
  if (depth > MAX_DEPTH) return h("p", {}, text);
  if (block.kind === "heading") return heading(text);
  if (block.kind === "rule") return h("hr");
  if (block.kind === "quote") return h("blockquote", {}, ...children(block.lines.map((line) => line.replace(QUOTE, "")), depth));
  if (block.kind === "list") return list(block.lines, depth);
  return block.kind === "table" ? tableOf(block.lines) : h("p", {}, ...inline(text));
}

/** @param {string[]} lines @param {number} depth */
function children(lines, depth) {
  return blocksOf(lines.join("\n")).map((block) => element(block, depth + 1));
}

/** @param {string} line */
function heading(line) {
  const [, marks, text] = /** @type {RegExpExecArray} */ (HEADING.exec(line));
  // The page has headings of levels 1 to 3 itself.
  return h(`h${Math.min(marks.length + 3, 6)}`, {}, ...inline(text));
}

/** @param {string[]} lines @param {number} depth */
function list(lines, depth) {
  /** @type {string[][]} */
  const items = [];
  let width = 0;
  for (const line of lines) {
    const mark = ITEM.exec(line);
    if (mark && (items.length === 0 || mark[1].length < 2)) {
      width = mark[0].length;
      items.push([line.slice(width)]);
    } else items[items.length - 1].push(line.replace(new RegExp(`^ {0,${width}}`), ""));
  }
  const first = /^ *(\d+)/.exec(lines[0]);
  return h(first ? "ol" : "ul", { start: first && first[1] }, ...items.map((item) => h("li", {}, ...children(item, depth))));
}

/** @param {string[]} lines */
function tableOf(lines) {
  const [head, , ...rows] = lines.map(cellsOf);
  const row = (/** @type {string[]} */ cells, /** @type {string} */ tag) => h("tr", {}, ...head.map((_, index) => h(tag, {}, ...inline(cells[index] ?? ""))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the answer" }, h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, ...rows.map((cells) => row(cells, "td")))));
}

/** @param {string} line */
function cellsOf(line) {
  return line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** @param {string[]} lines */
function code(lines) {
  const [, fence, language] = /** @type {RegExpExecArray} */ (FENCE.exec(lines[0]));
  const closed = lines.length > 1 && closes(lines[lines.length - 1], fence);
  const text = h("code", {}, lines.slice(1, closed ? -1 : undefined).join("\n"));
  return h("div", { class: "code" }, h("p", {}, h("span", {}, language), copyButton(text)), h("pre", { tabindex: 0 }, text));
}

/** @param {string} text @param {number} [depth] @returns {(Node | string)[]} */
function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  /** @type {(Node | string)[]} */
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, , inCode, strong, struck, starred, lined, label, target, escaped, address] = found;
    const at = /** @type {number} */ (found.index);
    if (at < end) continue;
    parts.push(text.slice(end, at));
    end = at + whole.length;
    if (inCode) parts.push(h("code", {}, inCode));
    else if (strong) parts.push(h("strong", {}, ...inline(strong, depth + 1)));
    else if (struck) parts.push(h("s", {}, ...inline(struck, depth + 1)));
    else if (starred || lined) parts.push(h("em", {}, ...inline(starred || lined, depth + 1)));
    else if (target) parts.push(link(target, label || target) ?? whole);
    else if (escaped) parts.push(escaped);
    else parts.push(link(address, address) ?? whole);
  }
  return [...parts, text.slice(end)].filter((part) => part !== "");
}

/** null for anything but http and https. @param {string} target @param {string} label */
function link(target, label) {
  if (!/^https?:\/\//i.test(target)) return null;
  return h("a", { href: target, rel: "noopener noreferrer", target: "_blank", title: target }, label);
}
