"""`tandem up`: the whole system on this machine, the same processes as in a cluster.

Order: Redis (unless --redis-url) → workers → gateway; ready when the gateway routes to a worker of every
role. Then it watches and restarts what dies, until Ctrl-C, SIGTERM or SIGHUP stops everything in reverse order.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_engine.base.addresses import LOOPBACK, Address, loopback_beside, reachable_here
from tandem_engine.base.cgroups import machine_memory_kills, usable_cpus
from tandem_engine.base.errors import ConfigError
from tandem_engine.base.linux import allow_many_descriptors, allowed_cpus, keep_files_private
from tandem_engine.base.progress import new_name
from tandem_engine.base.release import product_version
from tandem_engine.config.flags import (
    AUTO_AFFINITY,
    NO_AFFINITY,
    add_engine_flags,
    engine_argv,
    engine_config,
    host_address,
    non_negative_int,
)
from tandem_services.cli.entry import teach
from tandem_services.cli.flags import (
    GATEWAY_DRAIN_S,
    WORKER_DRAIN_S,
    add_allowed_hosts,
    add_api_keys,
    add_body_memory,
    add_cluster,
    add_console,
    add_local_prefill,
    add_logs,
    add_output_parsers,
    add_redis,
    add_router_policy,
    add_served_names,
    add_special_tokens,
    add_tracing,
    body_memory_argv,
    non_negative_float,
    port_number,
    positive_float,
    require_adapters,
    tracing_argv,
    tracing_of,
)
from tandem_services.cli.logs.pump import LogPump, LogTo
from tandem_services.cli.machine_shares import Cores, claim, share_of_worker
from tandem_services.cli.models.adapters import keep_adapters_here, locate_adapters
from tandem_services.cli.models.locate import add_model_source, find_here, is_bundled, locate, model_source, needs_of
from tandem_services.cli.parsing.flag_table import Sources, without_login
from tandem_services.cli.processes import Child, Ending, Identity, Supervisor, python_command
from tandem_services.cli.redis_process import CONFIG_FILE, require_redis, start_redis
from tandem_services.cli.run_dir import (
    Run,
    StartedProcess,
    describe_killed_run,
    pid_namespace,
    prepare_run_dir,
    record_run,
    rotate_log,
)
from tandem_services.cli.runs import default_run_dir
from tandem_services.cli.start_view import greeting, watch_start
from tandem_services.cli.start_watch import Watched
from tandem_services.common.service_manager import ServiceManager
from tandem_services.common.settings import read_settings
from tandem_services.common.sockets import free_port, listen
from tandem_services.common.tracing import require_opentelemetry

if TYPE_CHECKING:
    from tandem_engine.checkpoint_source.resolve import ResolvedModel
    from tandem_engine.checkpoint_source.source import ModelSource
    from tandem_engine.config import CacheConfig


Counts = tuple[int | None, int | None, int | None]
"""Numbers of prefill and decode workers, and of those that do both; None: `tandem serve` chooses."""


def add_up_flags(parser: argparse.ArgumentParser, *, operand: bool = False, workers: Counts = (1, 1, 0)) -> None:
    """`operand`: the model has no flag; `workers`: defaults."""
    model = parser.add_argument_group("model")
    add_model_source(model, operand=operand)
    add_served_names(model)
    add_output_parsers(model)
    _add_workers(parser.add_argument_group("workers"), workers)
    _add_api(parser.add_argument_group("API"))
    routing = parser.add_argument_group("routing")
    add_local_prefill(routing)
    add_router_policy(routing)
    redis = parser.add_argument_group("Redis")
    add_redis(redis, required=False)
    add_cluster(redis)
    _add_start(parser.add_argument_group("start"))
    observability = parser.add_argument_group("logs and traces")
    add_logs(observability)
    add_tracing(observability)


def _add_workers(group: argparse._ArgumentGroup, defaults: Counts) -> None:
    kinds = (("prefill", "prefill workers"), ("decode", "decode workers"), ("both", "workers that do both"))
    for (name, what), default in zip(kinds, defaults, strict=True):
        usual = "1 of --both, or of --prefill and --decode on two GPUs" if default is None else default
        group.add_argument(
            f"--{name}", type=non_negative_int, default=default, metavar="N", help=f"{what} (default: {usual})"
        )


def _add_api(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        type=host_address,
        default=LOOPBACK,
        help="address of the API; workers use the loopback address of its family (default: %(default)s)",
    )
    group.add_argument(
        "--port", type=port_number, default=8000, help="port of the API; 0 picks a free one (default: 8000)"
    )
    add_allowed_hosts(group, what="requests may be for")
    add_api_keys(group)
    add_special_tokens(group)
    add_body_memory(group)
    add_console(group)


def _add_start(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="keys and logs (default: $XDG_STATE_HOME/tandem/PORT, or ~/.local/state/tandem/PORT)",
    )
    group.add_argument(
        "--stall-timeout",
        type=positive_float,
        default=120.0,
        metavar="S",
        help="a start fails when a process that is not ready makes no progress for S seconds: same phase, nothing "
        "logged and less than 1 s of CPU time (default: %(default)g)",
    )
    group.add_argument(
        "--ready-timeout",
        type=positive_float,
        metavar="S",
        help="a start also fails when not everything is ready after S seconds, however busy (default: no limit)",
    )
    group.add_argument(
        "--grace",
        type=non_negative_float,
        default=5.0,
        metavar="S",
        help="seconds that running requests have to finish after Ctrl-C, SIGTERM or SIGHUP; a second signal ends them "
        "now (default: %(default)g)",
    )
    group.add_argument(
        "--exit-when-ready",
        action="store_true",
        help="stop everything once it is ready, with status 0: for tests of a start",
    )


LOOK_S = 1.0
"""Between two looks at processes that serve, where none ends. A signal that comes just before one waits as long."""

KEYS_FILE = "keys.json"
REDIS_LOGIN_FILE = "redis-password"
PROGRESS_SUFFIX = ".progress"

COMMON = (
    *("--model", "--served-model-name", "--prefill", "--decode", "--both", "--host", "--port", "--api-keys"),
    *("--dtype", "--device", "--context-length", "--kv-cache-gib", "--config", "--print-config"),
)
"""Flags that `--help` shows."""

EXAMPLES = """\
examples:
  tandem up                                   bundled model, 1 prefill and 1 decode worker
  tandem up --prefill 2 --decode 2            two of each
  tandem up --prefill 0 --decode 0 --both 1   one worker that does both
  tandem up --model Qwen/Qwen3-0.6B           from the Hugging Face hub
  tandem up --model ~/qwen3-0.6b --dtype bfloat16 --port 9000
  tandem up --redis-url redis://127.0.0.1:6379/0
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        help="start everything on this machine",
        description="Start Redis, a gateway and prefill and decode workers on this machine, with NIXL between them, "
        "and serve an OpenAI-compatible API until Ctrl-C.",
        epilog=EXAMPLES,
    )
    add_up_flags(parser)
    add_engine_flags(parser)
    teach(parser, common=COMMON, check=check, plan=describe, sources=Sources(names_models=True))
    parser.set_defaults(run=run, devices=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will be started, decided before anything is."""

    model: "ResolvedModel"
    model_names: tuple[str, ...]
    """Its own, and aliases."""
    port: int
    run_dir: Path
    workers: tuple[tuple[str, str, int], ...]
    """(name, role, health port)"""
    devices: tuple[str, ...]
    """Of each worker."""
    threads: int
    mem_fraction_static: float | None
    """Of each worker."""


def check(args: argparse.Namespace) -> "ModelSource":
    """Check what the settings alone say, and complete them; returns what the model is. Raises `ConfigError`."""
    if args.prefill + args.decode + args.both == 0:
        raise ConfigError("nothing to start: ask for --prefill and --decode workers, or --both")
    if args.both == 0 and args.decode == 0:
        raise ConfigError("prefill workers need a decode worker to hand over to: add --decode 1 or --both 1")
    if args.nnodes > 1:
        raise ConfigError(f"--nnodes {args.nnodes}: `tandem up` is for one machine; start `tandem worker` on each")
    if args.cpu_affinity not in (AUTO_AFFINITY, NO_AFFINITY):
        raise ConfigError(
            f"--cpu-affinity {args.cpu_affinity}: `tandem up` takes auto or none; numbers are for `tandem worker`"
        )
    if args.redis_password_file is not None and not args.redis_url:
        raise ConfigError("--redis-password-file requires --redis-url: set both or none")
    _require_keys(args.api_keys)
    source = model_source(args.model, args.model_names)
    if is_bundled(args.model) and args.dtype == "auto":
        # bfloat16 rounds differently in batches of different size; the bundled model is small enough for exactness.
        args.dtype = "float32"
    if source.folder is not None:
        locate(source, offline=True, needs=needs_of(args))
    args.model = source.text
    args.role = "both"
    engine_config(args)
    if tracing_of(args) is not None:
        require_opentelemetry()
    return source


def describe(args: argparse.Namespace) -> str:
    """What would be started, for --dry-run. Raises `ConfigError`, `StartupError` for what cannot start."""
    from tandem_engine.checkpoint_source.resolve import ResolvedModel

    source = check(args)
    found = find_here(source, needs=needs_of(args))
    place = "to be downloaded" if found is None else found.folder
    keep_adapters_here(args)
    todo = decide(args, found or ResolvedModel(folder=Path(), repo=source.repo))
    workers = ((name, f"--threads {todo.threads}") for name, _, _ in todo.workers)
    rows = [("redis", without_login(args.redis_url or "a private server")), *workers, ("gateway", "")]
    processes = "\n".join(f"  {name:<12}{what}".rstrip() for name, what in rows)
    return (
        f"`{args.parser.prog}` would serve {todo.model_names[0]} ({place}) at {_url(args, todo)}, "
        f"with logs in {todo.run_dir}:\n{processes}\n"
    )


def plan(args: argparse.Namespace) -> Plan:
    """Check everything that can be checked without starting a process, and make the run directory ready.

    Raises `ConfigError`, `StartupError`.
    """
    source = check(args)
    if args.port:
        listen(args.host, args.port).close()  # before minutes of a download
    locate_adapters(args, offline=args.offline)  # which are small
    todo = decide(args, locate(source, offline=args.offline, needs=needs_of(args)))
    killed = describe_killed_run(todo.run_dir)
    folder = prepare_run_dir(
        todo.run_dir,
        files=(KEYS_FILE, REDIS_LOGIN_FILE, CONFIG_FILE, *_progress_files(todo.workers)),
        logs=[f"{name}.log" for name in ("redis", "gateway", *(name for name, _, _ in todo.workers))],
    )
    if killed is not None:
        print(f"tandem: {killed}", file=sys.stderr, flush=True)
    return replace(todo, run_dir=folder)


def decide(args: argparse.Namespace, model: "ResolvedModel") -> Plan:
    """As `plan`, of settings that are checked, and write nothing."""
    engine = engine_config(args)
    model_names = tuple(args.served_model_name or (model.name,))
    require_adapters(engine.adapters, model_names)
    port = args.port or free_port(args.host)
    listen(args.host, port).close()
    names = [("prefill", args.prefill), ("decode", args.decode), ("both", args.both)]
    workers = tuple(
        (f"{role}-{i}", role, free_port(loopback_beside(args.host))) for role, count in names for i in range(count)
    )
    devices = args.devices or (args.device,) * len(workers)
    return Plan(
        model=model,
        model_names=model_names,
        port=port,
        run_dir=args.run_dir or default_run_dir(port),
        workers=workers,
        # Two engines with as many threads as cores each fight over them: OpenMP spins.
        threads=args.threads or max(1, usable_cpus() // len(workers)),
        devices=devices,
        mem_fraction_static=_memory_share(engine.cache.for_device(args.device), devices, model.folder),
    )


def _memory_share(cache: "CacheConfig", devices: Sequence[str], checkpoint: Path) -> float | None:
    """Of each worker. They share one memory, a GPU's too, and each measures without regard to the others."""
    if cache.mem_fraction_static:
        return round(cache.mem_fraction_static / devices.count(devices[0]), 4)
    if devices[0] == "cpu" and cache.is_default_size:
        return share_of_worker(checkpoint, len(devices))
    return None


def _progress_files(workers: Iterable[tuple[str, str, int]]) -> list[str]:
    """Names that workers write."""
    paths = [Path(f"{name}{PROGRESS_SUFFIX}") for name, _, _ in workers]
    return [str(each) for path in paths for each in (path, new_name(path))]


def _require_keys(path: Path | None) -> None:
    """Raise `ConfigError` for a key file that the gateway would not start with."""
    if path is None:
        return
    from tandem_services.gateway.access.keys import KeyFileError, read_keys

    try:
        read_keys(path)
    except KeyFileError as error:
        raise ConfigError(f"--api-keys {error}") from error


def claim_cores(args: argparse.Namespace, todo: Plan) -> Cores:
    """That the threads of each worker stay on."""
    if args.cpu_affinity == NO_AFFINITY or args.device != "cpu":
        return Cores()
    return claim(allowed_cpus(), workers=len(todo.workers), threads=todo.threads)


def run(args: argparse.Namespace) -> int:
    keep_files_private()
    allow_many_descriptors()
    todo = plan(args)
    if todo.model.root:
        print(f"tandem: {todo.model.root}", file=sys.stderr, flush=True)
    cores = claim_cores(args, todo)
    supervisor, ending = Supervisor(pump=LogPump(to=LogTo(args.log_to), rotate=rotate_log)), Ending()
    manager = ServiceManager(address=read_settings().notify_socket)
    ending.watch_signals()

    def restarting(event: str) -> None:
        # First: standard error may be closed, and `tandem stop` needs the new process ids.
        _record(args, todo, supervisor)
        print(f"tandem: {event}", file=sys.stderr, flush=True)
        manager.status(event)

    ready = False
    try:
        start(args, todo, supervisor, cores)
        _record(args, todo, supervisor)
        watch_start(_watched(args, todo, supervisor), supervisor, manager, args, restarting)
        ready = True
        if args.exit_when_ready:
            print("tandem: everything is ready; stopping", file=sys.stderr, flush=True)
            return 0
        print(greeting_of(args, todo), flush=True)
        manager.ready(f"serving {todo.model_names[0]} at {_url(args, todo)}")
        supervisor.keep_serving(restarting, LOOK_S)
    except KeyboardInterrupt as interrupt:
        print("\ntandem: stopping", file=sys.stderr, flush=True)
        return 130 if interrupt.args == (signal.SIGINT,) and not ready else 0
    finally:
        ending.stop(supervisor, args.grace, notify=manager.stopping)
        cores.release()
        _record(args, todo, None)


def _record(args: argparse.Namespace, todo: Plan, supervisor: Supervisor | None) -> None:
    """For `tandem ps` and `tandem stop`; None: everything has stopped."""
    me = Identity.of(os.getpid())
    try:
        record_run(todo.run_dir, None if supervisor is None or me is None else _run_of(args, todo, supervisor, me))
    except OSError as error:
        # A full disk: what runs is of more use than a list of it.
        print(f"tandem: cannot write to {todo.run_dir}: {error.strerror}", file=sys.stderr, flush=True)


def _run_of(args: argparse.Namespace, todo: Plan, supervisor: Supervisor, me: Identity) -> Run:
    workers = {name: (role, port) for name, role, port in todo.workers}
    started = []
    for child in supervisor.children:
        role, port = workers.get(child.name, ("", None))
        started.append(StartedProcess(name=child.name, pid=child.session, role=role, health_port=port))
    return Run(
        up=me,
        version=product_version(),
        model=todo.model_names[0],
        model_path=str(todo.model.folder),
        model_root=todo.model.root,
        port=todo.port,
        url=_url(args, todo),
        processes=tuple(started),
        grace_s=args.grace,
        memory_kills=machine_memory_kills(),
        pid_namespace=pid_namespace(),
    )


def start(args: argparse.Namespace, todo: Plan, supervisor: Supervisor, cores: Cores) -> None:
    """Start Redis, workers and gateway, in this order, without waiting for models to load."""
    from tandem_engine.ipc.keys import KeyPair

    keys = todo.run_dir / KEYS_FILE
    KeyPair.generate().save(keys)
    shared = [*_redis_flags(args, todo, supervisor), "--cluster", args.cluster, "--curve-keys", str(keys)]
    shared += ["--log-format", args.log_format]
    shared += ["--model", str(todo.model.folder), "--served-model-name", *todo.model_names, *tracing_argv(args)]
    args.threads, args.mem_fraction_static = todo.threads, todo.mem_fraction_static
    args.crash_dump_folder = args.crash_dump_folder or str(todo.run_dir)
    for number, (name, role, health_port) in enumerate(todo.workers):
        args.cpu_affinity, args.device = cores.flag(number) or args.cpu_affinity, todo.devices[number]
        argv = ["worker", "--role", role, "--worker-id", name, "--health-port", str(health_port), *shared]
        argv += ["--host", loopback_beside(args.host), "--health-host", loopback_beside(args.host)]
        progress = todo.run_dir / f"{name}{PROGRESS_SUFFIX}"
        argv += ["--progress-file", str(progress), "--drain-timeout", str(max(WORKER_DRAIN_S, args.grace))]
        supervisor.start(_child(todo, name, [*argv, *engine_argv(args)], progress))
    gateway = ["gateway", "--host", args.host, "--port", str(todo.port), *shared]
    # No other machine has to learn that it ends.
    gateway += ["--drain-notice", "0", "--drain-timeout", str(max(GATEWAY_DRAIN_S, args.grace))]
    gateway += ["--local-prefill-tokens", str(args.local_prefill_tokens), "--session-ttl", str(args.session_ttl)]
    gateway += ["--tool-call-parser", args.tool_call_parser, "--reasoning-parser", args.reasoning_parser]
    gateway += ["--router-policy", args.router_policy, "--router-exploration", str(args.router_exploration)]
    gateway += body_memory_argv(args)
    if todo.model.root:
        gateway += ["--model-root", todo.model.root]
    if not args.parse_special_tokens:
        gateway.append("--no-parse-special-tokens")
    if args.allowed_hosts:
        gateway += ["--allowed-hosts", *args.allowed_hosts]
    if args.api_keys is not None:
        gateway += ["--api-keys", str(args.api_keys)]
    if args.console is not None:
        gateway.append("--console" if args.console else "--no-console")
    supervisor.start(_child(todo, "gateway", gateway))


def _redis_flags(args: argparse.Namespace, todo: Plan, supervisor: Supervisor) -> list[str]:
    """How the other processes find Redis. A URL's password goes into a file: all users can list command lines."""
    if not args.redis_url:
        return ["--redis-url", start_redis(supervisor, todo.run_dir)]
    from tandem_services.common.redis_client import RedisAddress

    given = RedisAddress(url=args.redis_url, password_file=args.redis_password_file)
    require_redis(given)
    address = given.with_password_in(todo.run_dir / REDIS_LOGIN_FILE)
    flags = ["--redis-url", address.url]
    return flags if address.password_file is None else [*flags, "--redis-password-file", str(address.password_file)]


def _child(todo: Plan, name: str, argv: list[str], progress: Path | None = None) -> Child:
    return Child(name=name, argv=python_command(*argv), log=todo.run_dir / f"{name}.log", progress=progress)


def _watched(args: argparse.Namespace, todo: Plan, supervisor: Supervisor) -> list[Watched]:
    inner = loopback_beside(args.host)
    children = {child.name: child for child in supervisor.children}
    workers = [
        Watched(child=children[name], label=f"{name} ({role})", url=Address(inner, port).url("/ready"))
        for name, role, port in todo.workers
    ]
    gateway = children["gateway"]
    after = tuple(worker.label for worker in workers)
    return [*workers, Watched(child=gateway, label="gateway", url=f"{_url(args, todo)}/ready", after=after)]


def _url(args: argparse.Namespace, todo: Plan) -> str:
    """Of the API, as this machine reaches it."""
    return Address(reachable_here(args.host), todo.port).url()


def greeting_of(args: argparse.Namespace, todo: Plan) -> str:
    ports = {name: port for name, _, port in todo.workers}
    return greeting(args, url=_url(args, todo), model=todo.model_names[0], workers=ports, run_dir=todo.run_dir)
