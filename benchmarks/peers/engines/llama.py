"""llama.cpp: `llama-server`, built from the sources that `llama-cpp-python` carries, on a GGUF of the weights."""

from collections.abc import Sequence
from typing import Any

from peers.checkpoints import gguf_of
from peers.engines.base import Result, ServerEngine, Setting, require_lengths
from peers.home import llama_server
from peers.jobs import Job
from peers.streams import ask_all
from tandem_services.common.sockets import free_port

SLOT_TOKENS = 2304
"""KV of each slot: the longest prompt of a workload and its output."""


class LlamaServer(ServerEngine):
    """Its own endpoint is asked for batches, because it tells token ids; streams come from its OpenAI endpoint."""

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting, model="random", port=free_port())
        # One cache for all slots (--kv-unified) is several times slower with many slots.
        flags: dict[str, Any] = {
            "-m": gguf_of(setting.checkpoint),
            "--host": "127.0.0.1",
            "--port": self.port,
            "-np": setting.streams,
            "-c": setting.streams * SLOT_TOKENS,
            "-t": setting.threads,
            "-tb": setting.threads,
            "-b": 2048,
            "-ub": 512,
        }
        if setting.dtype == "float32":
            flags |= {"--cache-type-k": "f32", "--cache-type-v": "f32"}
        try:
            self.begin([str(llama_server(setting.home)), *(str(word) for flag in flags.items() for word in flag)])
            self.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Sequence[Job]) -> Result:
        bodies = [
            {
                "prompt": job.prompt,
                "n_predict": job.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "return_tokens": True,
            }
            for job in jobs
        ]
        seconds, answers = ask_all(self.port, "/completion", bodies, limit_s=self.deadline.wait_s())
        outputs = tuple(tuple(answer["tokens"]) for answer in answers)
        require_lengths(self.name, jobs, [len(each) for each in outputs])
        return Result(seconds=seconds, outputs=outputs)


def llama_cpp(setting: Setting) -> LlamaServer:
    return LlamaServer("llama.cpp", setting)
