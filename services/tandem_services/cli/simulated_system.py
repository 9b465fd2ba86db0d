"""What `tandem simulate` is asked to replay: its flags as a simulation. Raises `ConfigError` for what cannot be one."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_engine.errors import ConfigError
from tandem_engine.flags import positive_int
from tandem_services.cli.numbers import positive_float
from tandem_services.cli.shared_flags import slo_of

if TYPE_CHECKING:
    from tandem_services.router.policies.by_role import PolicyNames
    from tandem_services.simulate.fleet import FleetShape
    from tandem_services.simulate.gateway import GatewayShape
    from tandem_services.simulate.requests import SimulatedRequest
    from tandem_services.simulate.run import ScalingSimulation, Simulation
    from tandem_services.simulate.service_times import ServiceTimes
    from tandem_services.simulate.tenants import Tenants


def simulation_of(args: argparse.Namespace) -> "Simulation":
    """Policies side by side. Raises `ConfigError`."""
    from tandem_services.common.traces import read_trace
    from tandem_services.simulate.requests import simulated_requests
    from tandem_services.simulate.run import Simulation

    policies = _policies(args.policy)
    times = _times(args)
    counts = _worker_counts(args.workers)
    gateways, tenants = _gateways(args), _tenants(args.api_keys)
    requests = simulated_requests(
        read_trace(args.trace),
        limit=args.num_prompts,
        speed=args.trace_speed,
        tenants=tenants,
        apart=args.tenants_apart,
    )
    if not requests:
        raise ConfigError(f"--trace {args.trace}: no requests in it")
    return Simulation(
        requests=requests,
        shape=_shape(args, counts, times, requests),
        policies=policies,
        local_prefill_tokens=args.local_prefill_tokens,
        seed=args.seed,
        slo=slo_of(args),
        gateways=gateways,
    )


def _gateways(args: argparse.Namespace) -> "GatewayShape":
    from tandem_services.gateway.queueing.late_binding import AdmissionPolicy
    from tandem_services.simulate.gateway import MAX_GATEWAYS, GatewayShape

    if args.gateways > MAX_GATEWAYS:
        raise ConfigError(f"--gateways: there must be 1 to {MAX_GATEWAYS} gateways, got {args.gateways}")
    policy = AdmissionPolicy(room_s=args.queue_timeout, worker_s=args.from_zero_timeout)
    return GatewayShape(gateways=args.gateways, seats=args.max_waiting_requests, policy=policy)


def _tenants(path: Path | None) -> "Tenants":
    from tandem_services.gateway.access.key_file import KeyFileError
    from tandem_services.gateway.access.key_watch import read_keys
    from tandem_services.simulate.tenants import Tenants

    try:
        return Tenants() if path is None else Tenants(read_keys(path))
    except KeyFileError as error:
        raise ConfigError(f"--api-keys: {error}") from error


def _policies(lists: Sequence[str] | None) -> "dict[str, PolicyNames]":
    from tandem_services.router.policies.by_role import PolicyNames

    names = []
    for text in lists or ["locality,round_robin,least_loaded,power_of_two"]:
        names += [text] if "=" in text else text.split(",")
    return {name: PolicyNames.parse(name, flag="--policy") for name in names}


def _worker_counts(text: str) -> dict[str, int]:
    """`8` or `prefill=4,decode=4`."""
    counts = {}
    for part in text.split(",") if "=" in text else [f"both={text}"]:
        role, _, count = part.partition("=")
        if role not in ("both", "prefill", "decode") or role in counts or not count.isdecimal():
            raise ConfigError(f"--workers {text[:100]!r}: expected a number, or prefill=N,decode=N[,both=N]")
        counts[role] = int(count)
    return counts


def _times(args: argparse.Namespace) -> "ServiceTimes":
    from tandem_services.simulate.service_times import ServiceTimes

    return ServiceTimes(
        prefill_rate=args.prefill_rate,
        chunk_tokens=args.chunked_prefill_size,
        decode_steps=_decode_steps(args.decode_step_ms),
        token_bytes=args.token_kib * 1024,
        transfer_rate=args.transfer_gb_per_s * 1e9,
    )


def _decode_steps(text: str) -> tuple[tuple[int, float], ...]:
    steps = []
    for part in text.split(","):
        size, _, ms = part.partition(":")
        try:
            steps.append((positive_int(size), positive_float(ms) / 1e3))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"--decode-step-ms {part[:100]!r}: expected SEQUENCES:MS, e.g. 64:30") from error
    return tuple(steps)


def _shape(
    args: argparse.Namespace, counts: dict[str, int], times: "ServiceTimes", requests: "Sequence[SimulatedRequest]"
) -> "FleetShape":
    from tandem_services.common.traces import TRACE_BLOCK
    from tandem_services.simulate.fleet import FleetShape
    from tandem_services.simulate.run import distinct_blocks

    computing = counts.get("both", 0) + counts.get("prefill", 0)
    shared = int(distinct_blocks(requests) * args.cache_share) // max(1, computing)
    return FleetShape(
        **counts,
        cache_blocks=shared if args.cache_blocks is None else args.cache_blocks,
        block_tokens=TRACE_BLOCK,
        max_sequences=args.max_running_requests,
        context_length=args.context_length,
        times=times,
    )


def scaling_of(args: argparse.Namespace, simulation: "Simulation") -> "ScalingSimulation":
    """Scalers side by side, on what `simulation` has. Raises `ConfigError`."""
    from tandem_operator.scaling.law import RoleBounds, ScalingConfig
    from tandem_operator.scaling.need import Targets
    from tandem_services.simulate.autoscaling import ScalingCosts
    from tandem_services.simulate.replay import Scaled
    from tandem_services.simulate.run import ScalingSimulation
    from tandem_services.simulate.scalers import Hpa, Law, Scaler, Static

    if simulation.slo is None:
        raise ConfigError("--autoscale: needs a bound to attain, e.g. --slo-ttft-ms 5000")
    if simulation.shape.both:
        raise ConfigError("--autoscale: --workers must say prefill=N,decode=N, the roles that are scaled")
    targets = Targets(queue_seconds=args.target_queue_s, kv_usage=0.85, clear_seconds=args.worker_start_s)
    role = RoleBounds(least=1, most=args.max_workers, targets=targets, gpus=1)
    config = ScalingConfig(prefill=role, decode=role, gpu_budget=args.gpu_budget)
    known: dict[str, Callable[[], Scaler]] = {
        "internal": lambda: Law(config),
        "hpa": lambda: Hpa(config),
        "static": Static,
    }
    names = args.autoscale.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"--autoscale {name[:100]!r}: choose among {', '.join(known)}")
    costs = ScalingCosts(period_s=args.scale_period_s, start_s=args.worker_start_s)
    scalers = {name: Scaled(scaler=known[name], costs=costs) for name in names}
    return ScalingSimulation(simulation=simulation, scalers=scalers, slo=simulation.slo)
