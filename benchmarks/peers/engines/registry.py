"""Every engine by its name, and which peer's installation it needs."""

from peers.engines import llama, tandem, transformers, vllm
from peers.engines.base import Engine, Setting, Start

ENGINES: dict[str, Start] = {
    "tandem": tandem.tandem,
    "tandem mixed": tandem.tandem_mixed,
    "tandem 1P+1D": tandem.tandem_disaggregated,
    "transformers": transformers.generate,
    "transformers CB": transformers.continuous_batching,
    "vllm": vllm.vllm,
    "vllm serve": vllm.vllm_serve,
    "vllm 1P+1D": vllm.vllm_disaggregated,
    "llama.cpp": llama.llama_cpp,
}
INSTALLATION = {"vllm": "vllm", "vllm serve": "vllm", "vllm 1P+1D": "vllm", "llama.cpp": "llama.cpp"}


def open_engine(name: str, setting: Setting) -> Engine:
    """Started and ready. Raises `PeerError`."""
    return ENGINES[name](setting)
