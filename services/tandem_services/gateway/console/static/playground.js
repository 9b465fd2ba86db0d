// @ts-check
/** A chat with a model, as any client would have it, with what it took. Nothing of it is kept when the tab closes. */
import { ApiError, getJson, stream } from "./api.js";
import { field, fill, h, setText } from "./dom.js";
import * as format from "./format.js";
import { MarkdownView } from "./markdown.js";

/** @typedef {{role: string, content: string}} Message */

/** Outlives the view, not the tab. @type {Message[]} */
const messages = [];
/** Its elements. @type {Element[]} */
const shown = [];
/** What was last set. */
const settings = { model: "", temperature: "0.7", maxTokens: "256", system: "" };

/** @param {HTMLElement} main @param {import("./main.js").Page} page */
export function showPlayground(main, page) {
  /** @type {AbortController | null} */
  let running = null;
  const log = h("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "off" }, ...shown);
  const announcement = h("p", { class: "visually-hidden", role: "status" });
  const model = h("select", { id: "model" }, h("option", { value: "" }, "loading…"));
  const temperature = number("temperature", settings.temperature, { min: 0, max: 2, step: 0.1 });
  const maxTokens = number("max-tokens", settings.maxTokens, { min: 1, max: 131072, step: 1 });
  const system = h("textarea", { id: "system", rows: 3, placeholder: "none" });
  const prompt = h("textarea", { id: "prompt", rows: 2, placeholder: "Write a message", "aria-describedby": "prompt-hint" });
  const send = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", hidden: true, click: () => running?.abort() }, "Stop");
  const clear = h("button", { type: "button", class: "quiet", click: clearAll }, "New conversation");
  system.value = settings.system;

  const composer = h(
    "form",
    { class: "composer", submit: (/** @type {Event} */ event) => (event.preventDefault(), void answer()) },
    h("label", { for: "prompt", class: "visually-hidden" }, "Message"),
    prompt,
    h("p", { class: "buttons" }, send, stop, clear, h("span", { class: "note", id: "prompt-hint" }, "Enter sends, Shift and Enter makes a line.")),
  );
  const side = h(
    "aside",
    { class: "settings", "aria-label": "Settings" },
    field("Model", model),
    h("div", { class: "two" }, field("Temperature", temperature), field("Max tokens", maxTokens)),
    field("System prompt", system),
  );
  fill(main, h("h1", { class: "visually-hidden" }, "Playground"), h("div", { class: "playground" }, side, h("section", { class: "chat" }, log, composer)), announcement);
  invite();
  prompt.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    void answer();
  });
  prompt.focus({ preventScroll: true });
  const listed = models();

  async function models() {
    try {
      const { data } = await getJson("v1/models");
      page.answered();
      fill(model, ...data.map((/** @type {any} */ one) => h("option", { value: one.id }, one.id)));
      if (data.length === 0) fill(model, h("option", { value: "" }, "none"));
      if (data.some((/** @type {any} */ one) => one.id === settings.model)) model.value = settings.model;
    } catch (error) {
      fill(model, h("option", { value: "" }, "not known"));
      if (error instanceof ApiError) page.failed(error);
      else throw error;
    }
  }

  function invite() {
    if (log.children.length === 0) log.append(h("p", { class: "blank", id: "invitation" }, "Ask something. Every answer shows how long it took, and where it ran."));
  }

  function clearAll() {
    running?.abort();
    messages.length = 0;
    shown.length = 0;
    fill(log);
    invite();
    prompt.focus();
  }

  function readSettings() {
    Object.assign(settings, { model: model.value, temperature: temperature.value, maxTokens: maxTokens.value, system: system.value });
    return {
      model: settings.model,
      messages: [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...messages],
      temperature: Number(settings.temperature),
      max_tokens: Number(settings.maxTokens),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
  }

  async function answer() {
    const text = prompt.value.trim();
    if (running || !text || !temperature.reportValidity() || !maxTokens.reportValidity()) return;
    prompt.value = "";
    messages.push({ role: "user", content: text });
    add(h("article", { class: "chat-message user" }, h("h3", {}, "You"), h("p", { class: "text" }, text)));
    const reply = new Reply();
    add(reply.element);
    running = new AbortController();
    busy(true);
    try {
      await listed;
      for await (const event of stream("v1/chat/completions", readSettings(), running.signal)) reply.take(event);
      reply.end("");
      page.answered();
    } catch (error) {
      if (running.signal.aborted) reply.end("stopped");
      else if (error instanceof ApiError) {
        reply.end(error.message);
        if (error.status === 401 || error.status === 0) page.failed(error);
      } else throw error;
    } finally {
      // Without an answer the question is taken back, so that the next one is not the second in a row.
      if (reply.content) messages.push({ role: "assistant", content: reply.content });
      else messages.pop();
      running = null;
      busy(false);
      setText(announcement, reply.content ? "The answer is complete." : "There is no answer.");
    }
  }

  /** @param {boolean} now */
  function busy(now) {
    send.hidden = now;
    stop.hidden = !now;
    if (now) stop.focus();
    else prompt.focus({ preventScroll: true });
  }

  /** @param {Element} element */
  function add(element) {
    log.querySelector("#invitation")?.remove();
    shown.push(element);
    log.append(element);
    log.scrollTop = log.scrollHeight;
  }

  return () => {
    readSettings();
    running?.abort();
  };
}

/** One answer as it grows. Pieces are shown once per frame, however fast they come. */
class Reply {
  content = "";
  reasoning = "";
  #id = "";
  #usage = /** @type {any} */ (null);
  #began = performance.now();
  /** @type {number | null} */
  #first = null;
  #last = 0;
  #due = false;
  #text = new MarkdownView();
  #thought = document.createTextNode("");
  #thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Reasoning"), h("p", { class: "text" }, this.#thought));
  #facts = h("span", { class: "facts" }, "waiting for the first token");
  #ending = h("span", { class: "facts" });
  element = h("article", { class: "chat-message model" }, h("h3", {}, "Model"), this.#thinking, this.#text.element, h("p", { class: "facts" }, this.#facts, this.#ending));

  /** @param {any} event a chunk of a chat completion */
  take(event) {
    this.#id = event.id ?? this.#id;
    this.#usage = event.usage ?? this.#usage;
    const delta = event.choices?.[0]?.delta ?? {};
    const piece = delta.content ?? "";
    const thought = delta.reasoning_content ?? "";
    if (piece || thought) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    this.content += piece;
    this.reasoning += thought;
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      this.#show();
    });
  }

  /** @param {string} problem "" when it ended by itself */
  end(problem) {
    this.#show();
    if (this.#first === null) fill(this.#facts);
    fill(
      this.#ending,
      problem && h("span", { class: "state", "data-state": problem === "stopped" ? "unknown" : "failed" }, problem),
      this.#id && h("a", { href: `#request/${encodeURIComponent(this.#id)}` }, "Timeline"),
    );
  }

  #show() {
    const log = this.element.parentElement;
    const follows = log && log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    this.#text.update(this.content);
    grow(this.#thought, this.reasoning);
    this.#thinking.hidden = !this.reasoning;
    if (this.#first !== null) fill(this.#facts, ...this.#figures());
    if (log && follows) log.scrollTop = log.scrollHeight;
  }

  #figures() {
    const first = /** @type {number} */ (this.#first);
    const tokens = this.#usage?.completion_tokens ?? null;
    const span = (this.#last - first) / 1000;
    const cached = this.#usage?.prompt_tokens_details?.cached_tokens;
    return [
      figure("first token", format.seconds((first - this.#began) / 1000)),
      figure("tokens/s", tokens > 1 && span > 0 ? format.rate((tokens - 1) / span) : format.NONE),
      figure("tokens", tokens === null ? format.NONE : format.count(tokens)),
      cached ? figure("cached", `${format.count(cached)} of ${format.count(this.#usage.prompt_tokens)}`) : null,
    ];
  }
}

/** Add what is new: what is there, however long, is not written again. @param {Text} node @param {string} whole */
function grow(node, whole) {
  if (whole.length > node.length) node.appendData(whole.slice(node.length));
}

/** @param {string} name @param {string} value */
function figure(name, value) {
  return h("span", { class: "figure" }, h("b", {}, value), ` ${name}`);
}

/** @param {string} id @param {string} value @param {{min: number, max: number, step: number}} bounds */
function number(id, value, bounds) {
  const input = h("input", { id, type: "number", required: true, ...bounds });
  input.value = value;
  return input;
}
