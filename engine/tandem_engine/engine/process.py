"""An engine process from its configuration to its exit status: builds the parts, handles signals and the end."""

import gc
import logging
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import torch

from tandem_engine.base.errors import CheckpointError, EngineError
from tandem_engine.base.freed_memory import give_back
from tandem_engine.base.library_pages import unmap_libraries
from tandem_engine.base.linux import die_with_parent
from tandem_engine.base.progress import START, Phase
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine, EnginePort
from tandem_engine.engine.control import Operations
from tandem_engine.engine.launch import launched_engine
from tandem_engine.engine.process_loop import Control, EngineLoop, Outbox, Reports, Requests
from tandem_engine.engine.watchdog import Watchdog, describe_scheduler
from tandem_engine.executor.self_test import SelfTestReport
from tandem_engine.ipc.channels import IpcContext, Poller
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.control import EngineFailed, EngineReady, EngineToWorker, WorkerToEngine
from tandem_engine.messages.outputs import EngineReply
from tandem_engine.messages.requests import EngineRequest
from tandem_engine.model.checkpoint_folder import open_directory
from tandem_engine.parallel.node_leader import NodeAccess
from tandem_engine.tokenizer.bundle import TokenizerBundle

logger = logging.getLogger(__name__)

LAST_WORDS_S = 1.0
"""How long outputs may take to leave when the process ends."""

CANNOT_START = 3
"""Exit status of an engine that has reported the reason to the worker service."""

UNEXPECTED_ERROR = 70
"""Exit status, EX_SOFTWARE of sysexits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessConfig:
    """Where an engine process listens, and its worker service."""

    engine: EngineConfig
    worker_id: str
    incarnation: str
    host: str
    request_port: int
    peer_port: int
    control: str | None
    """Endpoint of the worker service; None runs without one."""
    report_ended: bool = False
    """Report when traced requests were computed."""
    curve_keys: Path | None


def serve(config: ProcessConfig) -> int:
    """Run one engine until it is stopped; returns the exit status."""
    die_with_parent()
    keys = KeyPair.load(config.curve_keys) if config.curve_keys is not None else None
    context = IpcContext(keys)
    control = _open_control(context, config)
    try:
        _serve(config, context, control)
    except EngineError as error:
        logger.error("%s", error)
        if control is not None:
            control.send(EngineFailed(message=str(error), code=error.code))
            control.drain(seconds=LAST_WORDS_S)
        return CANNOT_START
    except Exception:
        # A bug: its state cannot be trusted, so the worker service restarts the engine.
        logger.exception("engine stopped by an unexpected error")
        return UNEXPECTED_ERROR
    finally:
        if control is not None:
            control.close()
        context.close()
    return 0


def _serve(config: ProcessConfig, context: IpcContext, control: Control | None) -> None:
    outbox = Outbox()
    port = EnginePort(
        worker_id=config.worker_id,
        incarnation=config.incarnation,
        context=context,
        host=config.host,
        peer_port=config.peer_port,
    )
    nodes = NodeAccess(host=config.host, curve_keys=config.curve_keys)
    with launched_engine(config.engine, progress=True, self_test=True, sink=outbox, port=port, nodes=nodes) as engine:
        logger.info("running a test prompt and step; compiling kernels that are not cached")
        START.report(Phase.SELF_TEST)
        test = engine.self_test()
        engine.warm_up()
        # What is there now stays. Else every full collection walks all of torch: measured, 0.2 s without a token.
        gc.collect()
        gc.freeze()
        give_back()
        if config.engine.device == "cpu":
            unmap_libraries()
        requests = Requests(context, config.host, config.request_port, inbound=EngineRequest, outbound=EngineReply)
        outbox.channel = requests
        watchdog = _watchdog(config, engine)
        tokenizer = _tokenizer(Path(config.engine.model_path))
        ready = _ready(config, engine, requests.endpoint, test)
        if tokenizer is not None:
            ready = msgspec.structs.replace(ready, tokenizer=tokenizer.digest, encoding=tokenizer.encoding)
        reports = Reports(engine=engine, control=control, watchdog=watchdog, ready=ready)
        loop = _loop(config, engine, requests, outbox, reports)
        loop.tokenizer = tokenizer
        _stop_on_signal(loop, has_worker=control is not None)
        START.report(Phase.REGISTRATION)
        START.report_to(None)
        logger.info(
            "engine %s serves %s on %s (peers %s), %d pages of %d tokens, prefill %.0f tokens/s",
            config.incarnation,
            config.engine.model_path,
            requests.endpoint,
            engine.peer_endpoint,
            engine.total_pages,
            engine.geometry.page_size,
            test.prefill_tokens_per_s,
        )
        try:
            loop.run()
        finally:
            watchdog.close()
            requests.drain(LAST_WORDS_S)


def _loop(config: ProcessConfig, engine: Engine, requests: Requests, outbox: Outbox, reports: Reports) -> EngineLoop:
    control, traces = reports.control, config.engine.operation.torch_profiler_dir
    engine.scheduler.ended.wanted = config.report_ended and control is not None
    engine.scheduler.on_hang(reports.watchdog.step_hangs)
    sockets = [requests.socket, *engine.sockets(), *([] if control is None else [control.socket])]
    return EngineLoop(
        engine=engine,
        incarnation=config.incarnation,
        requests=requests,
        control=control,
        outbox=outbox,
        operations=Operations(
            engine=engine,
            profiler=engine.profiler(Path(traces) if traces else None),
            answer=reports.send,
            changed=reports.announce,
        ),
        reports=reports,
        poller=Poller(sockets, engine.descriptors()),
    )


def _watchdog(config: ProcessConfig, engine: Engine) -> Watchdog:
    folder = config.engine.operation.crash_dump_folder
    return Watchdog(
        timeout=config.engine.scheduler.watchdog_timeout,
        folder=Path(folder) if folder else None,
        name=config.incarnation,
        describe=lambda: describe_scheduler(engine.scheduler),
    )


def _ready(config: ProcessConfig, engine: Engine, request_endpoint: str, test: SelfTestReport) -> EngineReady:
    return EngineReady(
        incarnation=config.incarnation,
        request_endpoint=request_endpoint,
        peer_endpoint=engine.peer_endpoint,
        geometry=engine.geometry,
        compat_hash=engine.compat_hash,
        context_length=engine.scheduler.max_request_tokens,
        max_running_requests=engine.scheduler_config.max_running_requests,
        total_pages=engine.total_pages,
        prefill_tokens_per_s=test.prefill_tokens_per_s,
        decode_step_s=test.decode_step_s,
        transport=engine.transport_name,
        adapters=engine.served_adapters,
        adapter_memory=engine.adapter_memory,
        device=_device_label(config.engine.device),
        kernel_target=_kernel_target(config.engine.device),
    )


def _tokenizer(folder: Path) -> TokenizerBundle | None:
    """What gateways may request; None where the checkpoint has no such files."""
    try:
        # A link in a checkpoint must not lead to other files of this machine: gateways show parts of these.
        return TokenizerBundle.read(folder, located=open_directory(folder).file)
    except CheckpointError as error:
        logger.warning("gateways need the model's folder, this worker cannot send them the tokenizer: %s", error)
        return None


def _device_label(device: str) -> str:
    """`device` with the name of the GPU, as in `cuda:0 (NVIDIA H200)`."""
    return device if device == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def _kernel_target(device: str) -> str:
    """The kind of CPU that the kernels of an engine on `device` are compiled for; empty for a GPU."""
    if device != "cpu":
        return ""
    from tandem_engine.kernels.cpu.target import target  # needs llvmlite, which engines on a GPU may lack

    return target().name


def _open_control(context: IpcContext, config: ProcessConfig) -> Control | None:
    if config.control is None:
        return None
    return Control(context, config.control, inbound=WorkerToEngine, outbound=EngineToWorker)


def _stop_on_signal(loop: EngineLoop, *, has_worker: bool) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        loop.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    # A terminal that closes tells every process of its session; the worker service drains before it ends its engine.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if has_worker else stop)
