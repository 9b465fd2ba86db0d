// @ts-check
/** Numbers and names for people. Everything unknown is an en dash. */

export const NONE = "–";

const PREFIXES = ["", "k", "M", "G", "T", "P"];

/** Three significant digits, at most. @param {number} value */
function short(value) {
  if (value >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** @param {number | null | undefined} value */
export function count(value) {
  return value == null || !Number.isFinite(value) ? NONE : scaled(value, "", 10000);
}

/** @param {number} value @param {string} noun */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** @param {number} value @param {string} unit @param {number} from where prefixes begin */
function scaled(value, unit, from) {
  let step = 0;
  if (value >= from) {
    while (value >= 999.5 && step < PREFIXES.length - 1) {
      value /= 1000;
      step += 1;
    }
  }
  return `${short(value)}${PREFIXES[step] || unit ? " " : ""}${PREFIXES[step]}${unit}`.trimEnd();
}

/** Tokens per second and the like. @param {number | null | undefined} value */
export function rate(value) {
  if (value == null || !Number.isFinite(value)) return NONE;
  return value > 0 && value < 0.05 ? "<0.1" : value < 10 ? value.toFixed(1) : scaled(value, "", 10000);
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  return value == null ? NONE : scaled(value, "B", 1000);
}

/** @param {number | null | undefined} value */
export function byteRate(value) {
  return value ? `${scaled(value, "B", 1000)}/s` : NONE;
}

/** @param {number | null | undefined} share 0 to 1 */
export function percent(share) {
  if (share == null || !Number.isFinite(share)) return NONE;
  const value = share * 100;
  return value > 0 && value < 1 ? "<1 %" : `${Math.round(value)} %`;
}

/** A duration. @param {number | null | undefined} s */
export function seconds(s) {
  if (s == null || !Number.isFinite(s)) return NONE;
  if (s === 0) return "0 ms";
  if (s < 0.001) return `${Math.round(s * 1e6)} µs`;
  if (s < 0.9995) return `${short(s * 1000)} ms`;
  if (s < 100) return `${short(s)} s`;
  return s < 5400 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

/** How long ago. @param {number} s */
export function ago(s) {
  if (s < 1) return "just now";
  return s < 100 ? `${Math.floor(s)} s ago` : `${seconds(s)} ago`;
}

/** A clock time. @param {number} unix seconds */
export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
}

/** `worker@number` without the number. @param {string | null | undefined} incarnation */
export function workerOf(incarnation) {
  if (!incarnation) return NONE;
  const at = incarnation.lastIndexOf("@");
  return at > 0 ? incarnation.slice(0, at) : incarnation;
}
