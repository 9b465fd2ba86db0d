"""Every fault that Tandem promises to survive: what it promises, and within how many seconds.

The numbers up to 56 are those of the design's fault table. A line is here whether or not it can be tested on this
machine: what is not tested is shown as absent, never as kept.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One line of the table."""

    number: int
    title: str
    promise: str
    bound_s: float | None = None
    """Longest silence that a client may meet on a machine with a core for each worker; None: not promised."""


def _line(number: int, title: str, promise: str, bound_s: float | None = None) -> Promise:
    return Promise(number=number, title=title, promise=promise, bound_s=bound_s)


PROMISES: tuple[Promise, ...] = (
    _line(0, "no fault", "the same load without a fault is clean; the yardstick of all others"),
    _line(1, "kill -9 decode, greedy", "every stream goes on elsewhere from its next token", 1.0),
    _line(2, "kill -9 decode, seeded", "the same text as without the fault", 1.0),
    _line(3, "kill -9 decode, grammars", "JSON, regex and tool call go on valid and undoubled", 1.0),
    _line(4, "kill -9 decode, n=4, logprobs", "all choices clean, logprobs unbroken", 1.0),
    _line(5, "kill -9 decode before its first token", "clean, the first token comes once", 3.0),
    _line(6, "kill -9 prefill while it computes", "computed again elsewhere", 3.0),
    _line(7, "kill -9 prefill during a transfer", "partial pages are dropped, decode survives", 3.0),
    _line(8, "kill -9 prefill before the transfer", "recomputed; the reserved pages come back", 3.0),
    _line(9, "restart prefill at the same address", "the next request works", 3.0),
    _line(10, "freeze decode, thaw it later", "streams move; the zombie's late tokens count nothing", 3.0),
    _line(11, "freeze prefill during a transfer", "as 7, by the deadline; its pages wait for its end", 10.0),
    _line(12, "all prefill workers dead", "decode workers prefill themselves; no hang", 3.0),
    _line(13, "all decode workers dead", "streams wait, end by the deadline, and resume when one is back in time"),
    _line(14, "kill -9 a gateway", "the workers drop its requests, no page leaks, the other gateway serves on", 5.0),
    _line(15, "the router's part in Redis dies for good", "gateways route on by what they saw last", 1.0),
    _line(16, "Redis killed, restarted empty", "no error; the index is back", 3.0),
    _line(17, "Redis hangs", "no request waits for it", 1.0),
    _line(18, "Redis full, then read-only, then MOVED", "as 16", 1.0),
    _line(19, "Redis poisoned", "a wrong hint is a miss, never a wrong answer", 1.0),
    _line(20, "Redis and a decode worker die together", "as 1 and 16", 3.0),
    _line(21, "gateway cut off from one worker", "streams move; what arrives late is ignored", 3.0),
    _line(22, "prefill cut off from decode", "another pair, or local prefill", 10.0),
    _line(23, "loss, delay, a slow line between peers", "slower, clean"),
    _line(24, "transferred pages corrupted", "seen by digest and recomputed; text clean", 3.0),
    _line(25, "a push that comes after its grant", "refused by its time; never in another's page"),
    _line(26, "handoff records lost, doubled, reordered", "idempotent; what is lost is swept"),
    _line(27, "clients leave at every stage", "aborted everywhere, pages free"),
    _line(28, "1,000 clients leave at once", "free pages return to the exact number", 5.0),
    _line(29, "a client reads a byte per second", "bounded memory, other streams unaffected"),
    _line(30, "a step raises for one request", "this one fails, the others go on"),
    _line(31, "device error in the engine", "the worker exits, streams move", 3.0),
    _line(32, "the engine dies, its service lives", "found out at once", 2.0),
    _line(33, "engine loop blocked", "treated as a frozen worker", 3.0),
    _line(34, "KV pages exhausted", "retract and recompute; no deadlock between reservations"),
    _line(35, "a request that kills workers", "two die, no third; the request is refused and remembered"),
    _line(36, "SIGTERM under load", "streams finish or move; exit 0 within the grace period"),
    _line(47, "the wall clock jumps by an hour", "leases are monotonic: nothing expires", 1.0),
    _line(48, "a name fails, then has another address", "known connections live; the new address is found", 5.0),
    _line(49, "a gateway without file descriptors", "it refuses and recovers"),
    _line(50, "two workers with one name", "the newest wins, the older is told to exit", 3.0),
    _line(51, "decode with another page layout", "never paired; equals are", 0.0),
    _line(52, "decode with other weights", "never paired; equals are", 0.0),
    _line(54, "every connection is cut, idle and in use", "the next request works; streams go on", 3.0),
    _line(56, "random faults", "no wrong token, no hang, every request answered", 10.0),
    _line(57, "the address of a decode worker vanishes", "as 21; what it had elsewhere is gone with its lease", 3.0),
    _line(58, "the address of a prefill worker vanishes", "as 11, in the middle of a transfer over TCP", 10.0),
    _line(59, "another worker has the address of a dead one", "works on its first request, gets none of the old", 3.0),
    _line(60, "workers lose Redis, gateways keep it", "who answers stays a member; no process ends", 1.0),
    _line(61, "gateways lose Redis, workers keep it", "as 60", 1.0),
    _line(62, "Redis is reached in one direction only", "as 60", 1.0),
    _line(63, "a worker is reached in one direction only", "as 21", 4.0),
    _line(64, "every field of the registry overwritten", "no request fails, no process ends; mended in seconds", 1.0),
    _line(65, "a second deployment takes the cluster name", "neither deployment notices the other", 1.0),
    _line(66, "peers are reached in one direction only", "as 22; no process ends", 10.0),
    _line(67, "workers with adapters die", "as 1 and 6, with the right adapter; what was loaded is loaded again", 3.0),
    _line(69, "Redis fails over behind one address", "no request fails; the new primary is used", 1.0),
    _line(70, "Redis dies, and Sentinels promote its replica", "as 69", 1.0),
    _line(71, "the slot of a cluster moves, then its owner dies", "as 69", 1.0),
    _line(72, "an exception anywhere in an engine", "no wrong answer, no request without an answer", 10.0),
    _line(73, "an exception anywhere in a worker's service", "as 72", 10.0),
    _line(74, "processes die while adapters load on demand", "nothing wrong, nothing failed; loaded again", 10.0),
    _line(75, "as 60, gateways have no connections", "as 60: workers that were never asked stay members", 1.0),
    _line(76, "a cell dies with its Redis", "its streams and requests go on in another cell, and return", 3.0),
)


def promise(number: int) -> Promise:
    """Raises `KeyError` for a number that is not in the table."""
    return {line.number: line for line in PROMISES}[number]
