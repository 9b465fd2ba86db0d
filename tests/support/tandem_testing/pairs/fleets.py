"""The flags of `tandem up` as axes of a covering array, with kills: each row is a fleet with these flags.

Streams of several kinds are sent to it; while they are generated, what the row's axis `kill` names is killed. Every
answer is that of one worker without flags. Every flag of `tandem up` is in an axis, in an axis of `options`, or in
`NOT_IN_FLEETS` with the reason.
"""

import argparse
import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

from tandem_services.cli.main import build_parser
from tandem_testing.chaos.compare import compare_answers
from tandem_testing.chaos.streams import Answer, Ask, Kind, Load, asks
from tandem_testing.pairs import options
from tandem_testing.pairs.asking import Outcome
from tandem_testing.pairs.covering import Axis, Forbidden, Row, covering_rows
from tandem_testing.redis_server import RedisServer
from tandem_testing.system import System
from tandem_testing.waiting import until

Flags = Mapping[str, str | int | float | bool]
"""Values of flags by their name in the parsed arguments; True for one without a value, False for its opposite."""
URL = "URL"
"""Stands for a Redis of the row."""

AXES: Mapping[str, Mapping[str, Flags]] = {
    "workers": {
        "1P 2D": {"prefill": 1, "decode": 2},
        "2P 1D": {"prefill": 2, "decode": 1},
        "1P 1D 1B": {"prefill": 1, "decode": 1, "both": 1},
        "2B": {"prefill": 0, "decode": 0, "both": 2},
    },
    "kill": {"none": {}, "worker": {}, "engine": {}, "Redis": {}},
    "host": {"IPv4": {}, "IPv6": {"host": "::1"}},
    "names": {"default": {}, "two": {"served_model_name": "one two"}},
    "special tokens": {"parsed": {}, "not parsed": {"parse_special_tokens": False}},
    "console": {"on": {}, "off": {"console": False}},
    "bodies": {"default": {}, "1 MiB": {"max_body_memory": 1, "max_body_memory_per_client": 1}},
    "hosts": {"default": {}, "any": {"allowed_hosts": "*"}},
    "short prompts": {"default": {}, "0": {"local_prefill_tokens": 0}, "4": {"local_prefill_tokens": 4}},
    "router": {
        "locality": {},
        "round robin": {"router_policy": "round_robin"},
        "power of two": {"router_policy": "power_of_two", "router_exploration": 0.3},
        "mixed": {"router_policy": "prefill=session,decode=least_loaded"},
    },
    "Redis": {"private": {}, "given": {"redis_url": URL, "cluster": "other"}},
    "logs": {"plain": {}, "JSON": {"log_format": "json", "log_to": "both"}, "stdout": {"log_to": "stdout"}},
    "traces": {
        "none": {},
        "to nothing": {"otlp_traces_endpoint": "http://127.0.0.1:9", "otlp_traces_sample_ratio": 0.5},
    },
    "parsers": {"auto": {}, "named": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}},
    "digest": {"sampled": {}, "full": {"kv_digest": "full"}},
    "layers": {"chunks": {}, "1": {"kv_push_layers": 1}},
    "links": {
        "tested": {},
        "not tested": {"link_probe_mib": 0, "expect_transport": "rdma", "peer_group": "a"},
    },
    "peers": {"default": {}, "impatient": {"grant_timeout": 2, "hold_timeout": 2, "prefix_fetch_timeout": 0.2}},
    "grammars": {"default": {}, "few kept": {"grammar_cache_size": 1, "grammar_compile_timeout": 20}},
    "cores": {"taken": {}, "not taken": {"cpu_affinity": "none"}},
}
FIRST = {"threads": "1"}
"""Axes of `options` whose value is the same in all rows: three workers share the cores of a machine."""
LIBRARY_ALONE = {"queue": "an engine refuses requests beyond it: a crowd of streams gets 503 where few workers have it"}
"""Axes of `options` that fleets do not have, with the reason."""
DRAWN = 2
"""Values of an axis of `options` that fleets have beside the first, by the seed. The array of options has all."""

_STARTS = "ends or prevents the start: tests/integration/test_system_startup.py"
NOT_IN_FLEETS = {
    **dict.fromkeys(("model", "offline", "model_impl", "load_format", "quantization"), "another model"),
    **dict.fromkeys(("dtype", "kv_cache_dtype"), "changes how numbers are rounded: `rounded`"),
    **dict.fromkeys(("port", "run_dir"), "each fleet has its own"),
    "api_keys": "clients of the array send no key: tests/integration/test_secret_rotation.py",
    "redis_password_file": "of a Redis with users: tests/integration/test_redis_cluster.py",
    **dict.fromkeys(("exit_when_ready", "ready_timeout", "stall_timeout", "dry_run", "print_config"), _STARTS),
    "config": "names the same flags in a file: tests/unit/services/cli/parsing",
    "grace": "of the end of a fleet: tests/integration/test_gateway_shutdown.py",
    **dict.fromkeys(("help", "help_all"), "prints"),
    "transport": "none is no fleet of prefill and decode workers: tests/integration/test_system_models.py",
    "grammar_backend": "none rejects requests of the array",
}
STREAMS, TOKENS, WORDS = 16, 32, 30
KINDS = (Kind.GREEDY, Kind.SEEDED, Kind.PLAIN, Kind.PENALIZED, Kind.CHOICES, Kind.SCHEMA, Kind.REGEX, Kind.TOOL)
PLAIN = ("--prefill", "0", "--decode", "0", "--both", "1", "--dtype", "float32", "--threads", "1")
SPEAK_S = 120.0


@cache
def up_parser() -> argparse.ArgumentParser:
    """Of `tandem up`."""
    [commands] = [each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    parser = commands.choices["up"]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def fleet_axes(seed: int) -> dict[str, Mapping[str, Flags]]:
    """`AXES`, and those of `options` with a few of their values."""
    random = Random(seed)
    axes = dict(AXES)
    for name, values in options.AXES.items():
        if name in LIBRARY_ALONE:
            continue
        first, *others = [FIRST[name]] if name in FIRST else values
        kept = [first, *random.sample(others, min(DRAWN, len(others)))]
        axes[name] = {value: values[value] for value in kept}
    return axes


def fleet_rows(seed: int, *, small: bool = False) -> list[Row]:
    """`small`: rows of the first two values of each axis."""
    values = {name: tuple(each)[: 2 if small else None] for name, each in fleet_axes(seed).items()}
    axes = [Axis(name, each) for name, each in values.items()]
    known = {value for axis in axes for value in axis.named()}
    return covering_rows(axes, [each for each in REFUSED if each.pair <= known], seed=seed)


REFUSED: Sequence[Forbidden] = options.REFUSED


def arguments(row: Row, seed: int, folder: Path, redis_url: str) -> list[str]:
    """Of `tandem up`."""
    axes, known = fleet_axes(seed), {action.dest: action for action in up_parser()._actions}
    given = {flag: value for name, chosen in row.items() for flag, value in axes[name][chosen].items()}
    argv = ["--dtype", "float32"]
    for flag, value in given.items():
        spelled = known[flag].option_strings
        if value is False:
            argv.append(next(each for each in spelled if each.startswith("--no-")))
        elif value is True:
            argv.append(spelled[0])
        else:
            text = {URL: redis_url, options.FOLDER: str(folder)}.get(str(value), str(value))
            argv += [spelled[0], *text.split(" ")]
    return argv


@dataclass(kw_only=True, slots=True)
class Expected:
    """Answers of one worker without flags; each distinct request is asked once."""

    system: System
    answers: dict[Ask, Answer] = field(default_factory=dict)

    async def of(self, wanted: Sequence[Ask]) -> list[Answer]:
        missing = [ask for ask in dict.fromkeys(wanted) if ask not in self.answers]
        for answer in await _answers(self.system.url, "tandem-mini", missing) if missing else ():
            assert answer.error is None, f"the reference failed: {answer.error}"
            self.answers[answer.ask] = answer
        return [self.answers[ask] for ask in wanted]


def compare_fleets(rows: Sequence[Row], seed: int, folder: Path, *, first: int = 0) -> Iterator[Outcome]:
    """Each row from number `first` on as a fleet, one after the other."""
    reference = System.start(folder / "reference", *PLAIN)
    try:
        expected = Expected(system=reference)
        for number, row in enumerate(rows[first:], first):
            outcome, own = Outcome(row=row), folder / f"fleet-{number}"
            own.mkdir()
            try:
                asyncio.run(_compare(row, seed, own, expected, outcome))
            except AssertionError as error:
                outcome.problems.append(str(error)[-2000:])
            yield outcome
    finally:
        reference.close()


async def _compare(row: Row, seed: int, folder: Path, expected: Expected, outcome: Outcome) -> None:
    with _redis(row) as redis:
        url = "" if redis is None else f"redis://{redis.host}:{redis.port}/0"
        system = System.start(folder / "run", *arguments(row, seed, folder, url))
        try:
            model = "two" if row["names"] == "two" else "tandem-mini"
            wanted = asks(*KINDS, count=STREAMS, prompt_words=WORDS, max_tokens=TOKENS, first=3000)
            async with Load(urls=[system.url], model=model) as load:
                load.send(wanted)
                await until(lambda: load.speaking >= 2 or load.finished, SPEAK_S, "streams speak")
                _kill(row["kill"], system, redis, Random(f"{seed} {folder.name}"))
                answers = await load.gathered()
            # The same again: from caches, and by what has been started again.
            answers += await _answers(system.url, model, wanted[:4])
            for right, mine in zip(await expected.of([each.ask for each in answers]), answers, strict=True):
                if damage := compare_answers(right, mine):
                    outcome.problems.append(f"{mine.ask.kind.value} stream: {mine.error or damage}")
        finally:
            system.close()


async def _answers(url: str, model: str, wanted: Sequence[Ask]) -> list[Answer]:
    async with Load(urls=[url], model=model) as load:
        load.send(wanted)
        return await load.gathered()


@contextlib.contextmanager
def _redis(row: Row) -> Iterator[RedisServer | None]:
    """Of a row that has its own."""
    if row["Redis"] == "private":
        yield None
        return
    server = RedisServer.start()
    try:
        yield server
    finally:
        server.stop()


def _kill(what: str, system: System, redis: RedisServer | None, random: Random) -> None:
    """`tandem up` starts it again, or this does."""
    match what:
        case "worker":
            system.kill(system.service_pid(random.choice([*system.workers])))
        case "engine":
            system.kill(system.engine_pid(random.choice([*system.workers])))
        case "Redis" if redis is None:
            system.kill(system.redis_pid())
        case "Redis" if redis is not None:
            redis.kill()
            redis.restart()
