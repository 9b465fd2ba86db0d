// @ts-check
/** The API's operations from /openapi.json, each with its fields, a curl command and a form that sends a request. */
import { ApiError, apiKey, getJson, send } from "./api.js";
import { copyButton } from "./copy.js";
import { field, fill, h, setText } from "./dom.js";
import * as format from "./format.js";
import { curlOf, exampleOf, fieldsOf, partsOf, resolved, typeOf } from "./schemas.js";
import { panel, table } from "./table.js";

const MAX_DEPTH = 6;
const MAX_SHOWN = 200_000;

/** @typedef {{path: string, method: string, operation: any}} Entry */

/** @param {HTMLElement} main @param {import("./main.js").Page} page */
export function showApi(main, page) {
  const running = new AbortController();
  const filter = h("input", { id: "api-filter", type: "search", placeholder: "path or words", input: () => narrow() });
  const list = h("div", { class: "stack-view" }, h("p", { class: "blank loading" }, "Loading the API's description…"));
  const heading = h("div", { class: "headline" }, h("h1", {}, "API"), h("div", { class: "lookup" }, h("label", { for: "api-filter" }, "Filter"), filter, h("a", { href: "openapi.json" }, "openapi.json")));
  fill(main, heading, list);
  /** @type {{element: HTMLElement, text: string}[]} */
  let shown = [];

  function narrow() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const { element, text } of shown) element.hidden = !words.every((/** @type {string} */ word) => text.includes(word));
  }

  async function load() {
    try {
      const [document, models] = await Promise.all([getJson("openapi.json"), getJson("v1/models")]);
      page.answered();
      const model = models.data[0]?.id ?? "";
      const rows = entriesOf(document).map((entry) => ({ element: entryElement(document, entry, model, running.signal), text: textOf(entry) }));
      shown = rows;
      fill(list, h("p", { class: "note" }, document.info.description), panel(`Tandem ${document.info.version}`, ...rows.map((row) => row.element)));
      narrow();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      page.failed(error);
      fill(list, h("p", { class: "blank" }, error.message));
    }
  }
  void load();
  return () => running.abort();
}

/** @param {any} document @returns {Entry[]} */
function entriesOf(document) {
  return Object.entries(document.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
}

/** What the filter looks at. @param {Entry} entry */
function textOf({ path, method, operation }) {
  return `${method} ${path} ${operation.summary}`.toLowerCase();
}

/**
 * One operation, closed. Its contents are made when it is opened for the first time.
 * @param {any} document @param {Entry} entry @param {string} model @param {AbortSignal} signal
 */
function entryElement(document, entry, model, signal) {
  const summary = h(
    "summary",
    {},
    h("span", { class: "method", "data-method": entry.method }, entry.method.toUpperCase()),
    h("code", {}, entry.path),
    h("span", { class: "faint" }, entry.operation.summary),
  );
  return opened("operation", summary, () => operationParts(document, entry, model, signal));
}

/** A <details> that is filled when it opens. @param {string} kind @param {Element} summary @param {() => import("./dom.js").Child[]} parts */
function opened(kind, summary, parts) {
  let filled = false;
  const element = h("details", {
    class: kind,
    toggle: () => {
      if (filled || !element.open) return;
      filled = true;
      element.append(h("div", { class: "inside" }, .../** @type {any[]} */ (parts().filter(Boolean))));
    },
  }, summary);
  return element;
}

/** @param {any} document @param {Entry} entry @param {string} model @param {AbortSignal} signal */
function operationParts(document, entry, model, signal) {
  const { operation } = entry;
  const body = operation.requestBody?.content["application/json"].schema;
  const answers = operation.responses["200"].content ?? {};
  const answer = answers["application/json"]?.schema;
  const event = answers["text/event-stream"]?.["x-event-schema"];
  return [
    tryForm(document, entry, model, signal),
    body && schemaDetails(document, "Body", body, 0),
    parametersTable(operation.parameters),
    h("p", { class: "note" }, operation.responses["200"].description),
    answer && schemaDetails(document, "Answer", answer, 0),
    event && schemaDetails(document, "Event of a stream", event, 0),
    errorsTable(document, operation.responses),
  ];
}

/** @param {any[]} parameters */
function parametersTable(parameters) {
  const rows = parameters.map((one) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, one.name)), h("td", {}, one.in), h("td", { class: "wide" }, one.description ?? "")));
  return rows.length > 0 && table(["Parameter", "In", "Meaning"], h("tbody", {}, ...rows), "Parameters");
}

/** @param {any} document @param {any} responses */
function errorsTable(document, responses) {
  const rows = Object.entries(responses).flatMap(([status, response]) => {
    if (status === "200") return [];
    const whole = response.$ref ? document.components.responses[response.$ref.split("/").pop()] : response;
    return [h("tr", {}, h("th", { scope: "row", class: "number start" }, status), h("td", { class: "wide" }, whole.description))];
  });
  return opened("part", h("summary", {}, "Errors"), () => [table(["Status", "Meaning"], h("tbody", {}, ...rows), "Errors")]);
}

/**
 * The fields of a schema, and below them the schemas that they consist of.
 * @param {any} document @param {string} title @param {any} schema @param {number} depth @returns {HTMLElement}
 */
function schemaDetails(document, title, schema, depth) {
  return opened("part", h("summary", {}, title), () => {
    const fields = fieldsOf(document, schema);
    const below = fields.length > 0 ? fields.flatMap((field) => field.parts) : partsOf(resolved(document, schema));
    const parts = depth < MAX_DEPTH ? [...new Set(below)] : [];
    return [
      fields.length === 0 && h("p", {}, typeOf(resolved(document, schema))),
      resolved(document, schema).description && h("p", { class: "note" }, resolved(document, schema).description),
      fields.length > 0 && fieldsTable(fields),
      ...parts.map((name) => schemaDetails(document, name, { $ref: `#/components/schemas/${name}` }, depth + 1)),
    ];
  });
}

/** @param {import("./schemas.js").Field[]} fields */
function fieldsTable(fields) {
  const rows = fields.map((field) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", {}, field.name), field.required && h("span", { class: "faint" }, " required")), h("td", { class: "wide" }, field.type, field.fallback && ` (default ${field.fallback})`, field.description && `. ${field.description}`)),
  );
  return table(["Field", "Type"], h("tbody", {}, ...rows), "Fields");
}

/** @param {any} document @param {Entry} entry @param {string} model @param {AbortSignal} ended the view was left */
function tryForm(document, entry, model, ended) {
  const { path, method, operation } = entry;
  const schema = operation.requestBody?.content["application/json"].schema;
  const places = operation.parameters.filter((/** @type {any} */ one) => one.in !== "header");
  const id = `try-${operation.operationId}`;
  const inputs = places.map((/** @type {any} */ one) => h("input", { id: `${id}-${one.name}`, value: one.name === "name" || one.name === "model" ? model : "", required: one.in === "path", input: () => redraw() }));
  const body = schema && h("textarea", { id: `${id}-body`, rows: 8, spellcheck: "false", class: "id", input: () => redraw() });
  if (body) body.value = JSON.stringify(exampleOf(document, path, schema, model), null, 2);
  const command = h("code");
  const output = h("div", { class: "answer", role: "status" });
  const button = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", hidden: true, click: () => running?.abort() }, "Stop");
  /** @type {AbortController | null} */
  let running = null;

  function target() {
    const query = new URLSearchParams();
    let filled = path.slice(1);
    places.forEach((/** @type {any} */ one, /** @type {number} */ index) => {
      const value = inputs[index].value;
      // A model's name may have slashes, which are parts of the path.
      if (one.in === "path") filled = filled.replace(`{${one.name}}`, value.split("/").map(encodeURIComponent).join("/"));
      else if (value) query.set(one.name, value);
    });
    return query.size > 0 ? `${filled}?${query}` : filled;
  }

  function redraw() {
    setText(command, curlOf(new URL(target(), window.document.baseURI).href, method, body ? body.value : "", Boolean(document.security)));
  }

  async function run() {
    if (running) return;
    running = new AbortController();
    const signal = AbortSignal.any([running.signal, ended]);
    button.hidden = true;
    stop.hidden = false;
    try {
      await showAnswer(output, (timeout) => send(method.toUpperCase(), target(), body ? body.value : "", timeout), signal);
    } finally {
      running = null;
      button.hidden = false;
      stop.hidden = true;
    }
  }

  redraw();
  return h(
    "form",
    { class: "try", submit: (/** @type {Event} */ event) => (event.preventDefault(), void run()) },
    ...inputs.map((/** @type {Element} */ input, /** @type {number} */ index) => field(places[index].name, input)),
    body && field("Body (JSON)", body),
    h("div", { class: "code" }, h("p", {}, h("span", {}, document.security && !apiKey() ? "curl (requires an API key)" : "curl"), copyButton(command)), h("pre", { tabindex: 0 }, command)),
    h("p", { class: "buttons" }, button, stop),
    output,
  );
}

/**
 * Sends, and shows status, duration and body as they arrive.
 * @param {Element} output @param {(signal: AbortSignal) => Promise<Response>} request @param {AbortSignal} signal
 */
async function showAnswer(output, request, signal) {
  const began = performance.now();
  const facts = h("span", {}, "waiting for the answer");
  const text = document.createTextNode("");
  const pre = h("pre", { tabindex: 0, hidden: true }, text);
  fill(output, h("p", { class: "facts" }, facts), pre);
  try {
    const response = await request(signal);
    const id = response.headers.get("x-request-id");
    fill(
      facts,
      h("span", { class: "state", "data-state": response.ok ? "good" : "failed" }, `${response.status}`),
      ` after ${format.seconds((performance.now() - began) / 1000)} `,
      id && h("a", { href: `#request/${encodeURIComponent(id)}` }, "Timeline"),
    );
    pre.hidden = false;
    await drawn(response, text);
  } catch (error) {
    if (signal.aborted) facts.append(" stopped");
    else if (error instanceof ApiError) fill(facts, h("span", { class: "state", "data-state": "failed" }, error.message));
    else throw error;
  }
}

/** Appends the body, and cuts it off where a page should not hold more. @param {Response} response @param {Text} text */
async function drawn(response, text) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    if (text.length + value.length > MAX_SHOWN) {
      text.appendData("\n… (the rest is not shown)");
      await reader.cancel();
      return;
    }
    text.appendData(value);
  }
  if (response.headers.get("content-type")?.startsWith("application/json")) text.data = indented(text.data);
}

/** @param {string} json */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
