// @ts-check
/** JSON schemas of the OpenAPI document as text: types, tables of fields, and example bodies. */

/** @typedef {{[name: string]: any}} Schema */
/** @typedef {{name: string, type: string, required: boolean, fallback: string, description: string, parts: string[]}} Field */

const REFERENCE = "#/components/schemas/";
const MAX_ENUM = 8;

/** Bodies that a user can send as they are, apart from the model. @type {{[path: string]: Schema}} */
const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Hello" }], max_tokens: 32 },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 32 },
  "/v1/responses": { input: "Hello", max_output_tokens: 32 },
  "/v1/messages": { messages: [{ role: "user", content: "Hello" }], max_tokens: 32 },
  "/v1/messages/count_tokens": { messages: [{ role: "user", content: "Hello" }] },
  "/v1/embeddings": { input: "Hello" },
  "/tokenize": { prompt: "Hello" },
  "/v1/tokenize": { prompt: "Hello" },
  "/detokenize": { tokens: [3, 4, 5] },
  "/v1/detokenize": { tokens: [3, 4, 5] },
};

/** The schema that a reference names. @param {any} document @param {Schema} schema @returns {Schema} */
export function resolved(document, schema) {
  const name = nameOf(schema);
  return name ? document.components.schemas[name] : schema;
}

/** The name of the schema that is referenced, or "". @param {Schema} schema */
function nameOf(schema) {
  return String(schema?.$ref ?? "").startsWith(REFERENCE) ? schema.$ref.slice(REFERENCE.length) : "";
}

/** Alternatives without null: null means that the field is absent. @param {Schema} schema @returns {Schema[]} */
function alternatives(schema) {
  const all = schema.anyOf ?? schema.oneOf ?? [schema];
  const some = all.filter((/** @type {Schema} */ one) => one.type !== "null");
  return some.length > 0 ? some : all;
}

/** A type in words: `integer, 1 to 128`, `list of ChatMessage`. @param {Schema} schema @returns {string} */
export function typeOf(schema) {
  const options = alternatives(schema);
  return options.length > 1 ? options.map(typeOf).join(" or ") : described(options[0]);
}

/** @param {Schema} schema @returns {string} */
function described(schema) {
  if (nameOf(schema)) return nameOf(schema);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return listed(schema.enum);
  if (schema.type === "array") return `list of ${schema.items ? typeOf(schema.items) : "any JSON"}${between(schema.minItems, schema.maxItems, " items")}`;
  if (schema.type === "object") return "object";
  if (schema.type === "string") return `string${between(schema.minLength, schema.maxLength, " characters")}`;
  if (schema.type === "integer" || schema.type === "number") return `${schema.type}${bounds(schema)}`;
  return schema.type ?? "any JSON";
}

/** @param {any[]} values */
function listed(values) {
  const shown = values.slice(0, MAX_ENUM).map((value) => JSON.stringify(value));
  return shown.join(" | ") + (values.length > MAX_ENUM ? " | …" : "");
}

/** @param {number | undefined} least @param {number | undefined} most @param {string} unit */
function between(least, most, unit) {
  if (least == null && most == null) return "";
  if (most == null) return `, at least ${least}${unit}`;
  return least ? `, ${least} to ${most}${unit}` : `, at most ${most}${unit}`;
}

/** @param {Schema} schema */
function bounds(schema) {
  const large = (/** @type {number | undefined} */ value) => (value != null && Math.abs(value) >= 2 ** 31 - 1 ? undefined : value);
  const [least, most] = [large(schema.minimum), large(schema.maximum)];
  if (schema.exclusiveMinimum != null) return `, above ${schema.exclusiveMinimum}${most == null ? "" : `, at most ${most}`}`;
  if (least != null && most != null) return `, ${least} to ${most}`;
  return between(least, most, "");
}

/**
 * The fields of an object by their names, required ones first; none for other schemas.
 * @param {any} document @param {Schema} schema @returns {Field[]}
 */
export function fieldsOf(document, schema) {
  const { properties = {}, required = [] } = resolved(document, schema);
  const fields = Object.entries(properties).map(([name, field]) => ({
    name,
    type: typeOf(field),
    required: required.includes(name),
    fallback: field.default == null ? "" : JSON.stringify(field.default),
    description: field.description ?? "",
    parts: partsOf(field),
  }));
  return fields.sort((one, other) => Number(other.required) - Number(one.required) || one.name.localeCompare(other.name));
}

/** Names of the schemas that a type consists of. @param {Schema} schema @returns {string[]} */
export function partsOf(schema) {
  if (nameOf(schema)) return [nameOf(schema)];
  if (schema.items) return partsOf(schema.items);
  return (schema.anyOf ?? schema.oneOf ?? []).flatMap(partsOf);
}

/**
 * A body for a path: required fields at least, and the model if there is one.
 * @param {any} document @param {string} path @param {Schema} schema @param {string} model
 */
export function exampleOf(document, path, schema, model) {
  const body = EXAMPLES[path] ?? smallest(document, schema);
  const { properties = {} } = resolved(document, schema);
  return "model" in properties && model ? { model, ...body } : body;
}

/** A value with the required fields alone. @param {any} document @param {Schema} schema @returns {any} */
function smallest(document, schema) {
  const one = resolved(document, alternatives(resolved(document, schema))[0]);
  if ("const" in one) return one.const;
  if (one.enum) return one.enum[0];
  if (one.type === "array") return [];
  if (one.type === "integer" || one.type === "number") return one.minimum ?? 1;
  if (one.type === "boolean") return false;
  if (one.type === "string") return "";
  const names = one.required ?? [];
  return Object.fromEntries(names.map((/** @type {string} */ name) => [name, smallest(document, one.properties[name])]));
}

/**
 * A command for a POSIX shell. The key is a variable: commands are copied into chats and tickets.
 * @param {string} url @param {string} method @param {string} body "" for none @param {boolean} keys
 */
export function curlOf(url, method, body, keys) {
  const words = ["curl"];
  if (body.includes('"stream": true')) words.push("-N");
  if (method !== "get" && method !== "post") words.push(`-X ${method.toUpperCase()}`);
  else if (method === "post" && !body) words.push("-X POST");
  words.push(quoted(url));
  if (keys) words.push('-H "Authorization: Bearer $TANDEM_API_KEY"');
  if (body) words.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  return words.join(" ");
}

/** @param {string} text */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
