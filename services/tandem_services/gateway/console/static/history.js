// @ts-check
/**
 * What the page remembers of the fleet: curves of the last hour, which begin with what the gateway has recorded, and
 * two minutes of each worker.
 *
 * Counters are totals since a worker's start, so a rate is a difference of two documents; an incarnation's counters
 * never decrease. A worker that is not in the newest document stays for a minute, as lost.
 */

export const SPAN = 120;
const CURVE_S = 5;
const CURVE_POINTS = 720;
const RATE_S = 4;
const SHARE_S = 60;
const LOST_S = 60;

/**
 * @typedef {{time: number, totals: {[name: string]: number}}} Sample
 * @typedef {{worker: any, samples: Sample[], output: number[], gone: number | null}} Track
 */

const COUNTERS = [
  "prompt_tokens_total",
  "cached_tokens_total",
  "host_cached_tokens_total",
  "disk_cached_tokens_total",
  "output_tokens_total",
  "transfers_total",
  "transfer_failures_total",
  "transfer_bytes_total",
];

export class FleetHistory {
  /** @type {Map<string, Track>} by incarnation */
  tracks = new Map();
  /** @type {{[name: string]: (number | null)[]}} the fleet's own curves */
  curves = {};
  /** @type {{[name: string]: number}} when the last point of a curve began */
  #noted = {};
  /** Whether it has the gateway's record. */
  begun = false;
  /** @type {any} */
  latest = null;
  /** @type {Sample[]} of this gateway */
  gateway = [];

  /** @param {any} fleet a fleet document @returns {boolean} whether it is a new one */
  add(fleet) {
    if (this.latest && fleet.time <= this.latest.time) return false;
    this.latest = fleet;
    const seen = new Set();
    for (const worker of fleet.workers) {
      seen.add(worker.incarnation);
      const track = this.tracks.get(worker.incarnation) ?? { worker, samples: [], output: [], gone: null };
      this.tracks.set(worker.incarnation, track);
      track.worker = worker;
      track.gone = null;
      if (worker.figures) remember(track.samples, { time: fleet.time, totals: pick(worker.figures) });
      track.output.push(worker.figures?.output_tokens_per_s ?? 0);
      if (track.output.length > SPAN) track.output.shift();
    }
    for (const [incarnation, track] of this.tracks) {
      if (seen.has(incarnation)) continue;
      track.gone ??= fleet.time;
      if (fleet.time - (track.gone ?? fleet.time) > LOST_S || this.#replaced(track, fleet)) this.tracks.delete(incarnation);
    }
    remember(this.gateway, { time: fleet.time, totals: { accepted: fleet.gateway.traffic.accepted_total } });
    return true;
  }

  /** Whether a newer incarnation has its name for long enough to be noticed. @param {Track} track @param {any} fleet */
  #replaced(track, fleet) {
    const back = fleet.workers.some((/** @type {any} */ worker) => worker.worker_id === track.worker.worker_id);
    return back && fleet.time - (track.gone ?? fleet.time) > 15;
  }

  /** @param {any} recorded by the gateway: a point of every curve each `CURVE_S` */
  begin(recorded) {
    this.begun = true;
    for (const name of ["running", "queued", "output", "hits", "kv", "ttft", "moved"]) {
      this.curves[name] = recorded.samples.map((/** @type {any} */ sample) => sample[name]);
      this.#noted[name] = recorded.samples.at(-1)?.time ?? -Infinity;
    }
  }

  /** The newest value of a curve, which has a point each `CURVE_S`. @param {string} name @param {number | null} value */
  note(name, value) {
    const curve = (this.curves[name] ??= []);
    if (curve.length > 0 && this.latest.time - this.#noted[name] < CURVE_S) curve[curve.length - 1] = value;
    else {
      curve.push(value);
      this.#noted[name] = this.latest.time;
    }
    if (curve.length > CURVE_POINTS) curve.shift();
    return curve;
  }

  /** Those that have gone. @returns {Track[]} */
  lost() {
    return [...this.tracks.values()].filter((track) => track.gone !== null);
  }

  /** A counter's growth per second, lately. @param {string} incarnation @param {string} counter @returns {number} */
  perSecond(incarnation, counter) {
    return growth(this.tracks.get(incarnation)?.samples ?? [], RATE_S).perSecond(counter);
  }

  /** Requests per second that this gateway has accepted. */
  acceptedPerSecond() {
    return growth(this.gateway, 10).perSecond("accepted");
  }

  /**
   * Where a worker's prompt tokens of the last minute came from, as shares of 1; null when there were none.
   * @param {string[]} incarnations
   */
  tiers(incarnations) {
    return tiersOf(incarnations.map((name) => growth(this.tracks.get(name)?.samples ?? [], SHARE_S)));
  }
}

/** @param {any} figures */
function pick(figures) {
  return Object.fromEntries(COUNTERS.map((name) => [name, figures[name]]));
}

/** @param {Sample[]} samples @param {Sample} sample */
function remember(samples, sample) {
  samples.push(sample);
  if (samples.length > SPAN) samples.shift();
}

/** @param {Sample[]} samples @param {number} within seconds */
function growth(samples, within) {
  const last = samples[samples.length - 1];
  const first = samples.find((sample) => last.time - sample.time <= within);
  const time = last && first ? last.time - first.time : 0;
  return {
    /** @param {string} name */
    by: (name) => (time > 0 && first ? last.totals[name] - first.totals[name] : 0),
    /** @param {string} name */
    perSecond: (name) => (time > 0 && first ? (last.totals[name] - first.totals[name]) / time : 0),
  };
}

/** @param {{by: (name: string) => number}[]} grown */
function tiersOf(grown) {
  const sum = (/** @type {string} */ name) => grown.reduce((total, each) => total + each.by(name), 0);
  return shares({
    prompt_tokens_total: sum("prompt_tokens_total"),
    cached_tokens_total: sum("cached_tokens_total"),
    host_cached_tokens_total: sum("host_cached_tokens_total"),
    disk_cached_tokens_total: sum("disk_cached_tokens_total"),
  });
}

/** Shares of prompt tokens by tier. @param {any} figures */
export function shares(figures) {
  const prompt = figures.prompt_tokens_total;
  if (!prompt) return null;
  const host = figures.host_cached_tokens_total;
  const disk = figures.disk_cached_tokens_total;
  return {
    device: (figures.cached_tokens_total - host - disk) / prompt,
    host: host / prompt,
    disk: disk / prompt,
    all: figures.cached_tokens_total / prompt,
  };
}
