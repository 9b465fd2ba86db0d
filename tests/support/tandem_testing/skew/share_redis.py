"""Run by an older release, with its packages and builders: a worker and a router on a Redis of two releases.

Argument: URL of Redis, where the worker `new` is registered, with blocks of `PROMPT`. Output: JSON of what the router
knows and chooses. The worker `old` stays registered.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

from tandem_testing.router_builders import LASTING, PAGE, Fleet, make_query, make_record, patient_router

PROMPT = tuple(range(20 * PAGE))


async def share(url: str) -> dict[str, Any]:
    server: Any = SimpleNamespace(url=url)
    fleet, router = Fleet(server, **LASTING), patient_router(server)
    try:
        await fleet.beat(make_record("old"))
        await router.start()
        choice = await router.choose(make_query(PROMPT))
        await router.release(choice)
        return {
            "known": sorted(worker.incarnation for worker in router.workers()),
            "chosen": choice.decode.incarnation,
            "source": choice.source.value,
            "matched": choice.matched_tokens,
        }
    finally:
        await router.stop()
        await fleet.close()


if __name__ == "__main__":
    json.dump(asyncio.run(share(sys.argv[1])), sys.stdout)
