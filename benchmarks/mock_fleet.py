"""Our mock engines for benchmarks of gateways, their answers as `chat_load.letters` says.

`behaviour` makes what an engine generates; `expected_answer` what a client must get for the text of a chat. Started by
`gateway_systems.py` with REDIS_URL STEP_S WORKERS it is a fleet of them.
"""

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import shake_128
from pathlib import Path

from chat_load import LETTERS, letters

from tandem_engine.ipc.channels import IpcContext
from tandem_engine.ipc.keys import KeyPair
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.cost import Load
from tandem_services.router.deployment import Deployment
from tandem_services.router.keys import HEARTBEAT_S, Keys
from tandem_services.router.redis_functions import FunctionLibrary
from tandem_services.router.registry import Registry, WorkerRecord, WorkerState
from tandem_testing.mock_engine import MockBehavior, MockEngine
from tandem_testing.tokenizer_builders import write_tokenizer

CONTEXT_LENGTH = 100_000
MAX_TOKENS = 4096
"""Of one answer."""


def mock_checkpoint(folder: Path) -> Path:
    """As much of a checkpoint as a gateway needs."""
    return write_tokenizer(folder, config={})


def mock_tokenizer() -> TextTokenizer:
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        return TextTokenizer.load(mock_checkpoint(Path(folder)))


def behaviour(tokenizer: TextTokenizer, *, step_s: float) -> MockBehavior:
    ids = [only for letter in LETTERS for only in tokenizer.encode(letter, add_special_tokens=False)]
    assert len(ids) == len(LETTERS), "a letter is one token"

    @lru_cache(maxsize=16_384)
    def drawn(input_ids: tuple[int, ...]) -> bytes:
        return shake_128(_seed(input_ids)).digest(MAX_TOKENS)

    def token(request: GenerateRequest, position: int) -> int:
        return ids[drawn(request.input_ids)[position] % len(ids)]

    return MockBehavior(token=token, step_s=step_s)


def expected_answer(tokenizer: TextTokenizer) -> Callable[[str, int], str]:
    def expected(text: str, tokens: int) -> str:
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        return letters(_seed(tuple(ids)), tokens)

    return expected


def _seed(input_ids: tuple[int, ...]) -> bytes:
    return ",".join(map(str, input_ids)).encode()


async def keep_registered(redis_url: str, engines: Sequence[MockEngine], keys: KeyPair | None = None) -> None:
    """Heartbeats of idle workers with plenty of room, until cancelled."""
    client = RedisClient(RedisAddress(url=redis_url), timeout_s=5.0)
    deployment = Deployment.of(keys)
    registry = Registry(
        library=FunctionLibrary(client), keys=Keys("default", deployment.namespace), deployment=deployment
    )
    load = Load(prefill_rate=100_000.0, step_s=0.001, room_tokens=1e9, max_sequences=4096, token_bytes=1000)
    while True:
        for engine in engines:
            record = WorkerRecord(view=engine.view, state=WorkerState.READY, load=load, details={})
            await registry.heartbeat(record, known_generation=0, report_age_s=0.0)
        await asyncio.sleep(HEARTBEAT_S)


def run_fleet(redis_url: str, step_s: float, workers: int) -> None:
    """Serve until killed; print "ready" once every worker listens."""
    tokenizer = mock_tokenizer()
    context = IpcContext()
    handed_over: set[str] = set()
    engines = [
        MockEngine(
            context=context,
            handed_over=handed_over,
            worker_id=f"mock-{number}",
            behavior=behaviour(tokenizer, step_s=step_s),
            context_length=CONTEXT_LENGTH,
        ).start()
        for number in range(workers)
    ]
    print("ready", flush=True)
    asyncio.run(keep_registered(redis_url, engines))


if __name__ == "__main__":
    run_fleet(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
