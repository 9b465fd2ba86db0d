"""In front of a prefill and a decode server of vLLM: what its documentation has users write for NixlConnector.

    python -m peers.vllm_proxy PORT PREFILL_URL DECODE_URL

A request goes to the prefill server for one token; what it answers about its KV goes to the decode server with the
request, whose stream goes to the client.
"""

import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def application(prefill: str, decode: str) -> Starlette:
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(timeout=None, limits=limits)

    async def completions(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        headers = {"X-Request-Id": uuid.uuid4().hex}
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ASK_FOR_KV}
        first.pop("stream_options", None)
        answer = await client.post(f"{prefill}/v1/completions", json=first, headers=headers)
        if answer.status_code != 200:
            return Response(answer.content, answer.status_code)
        body["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        asked = client.build_request("POST", f"{decode}/v1/completions", json=body, headers=headers)
        streamed = await client.send(asked, stream=True)

        async def passed_on() -> AsyncIterator[bytes]:
            async for chunk in streamed.aiter_raw():
                yield chunk
            await streamed.aclose()

        return StreamingResponse(passed_on(), streamed.status_code, media_type=streamed.headers.get("content-type"))

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)])


def main(argv: Sequence[str]) -> None:
    port, prefill, decode = argv
    uvicorn.run(application(prefill, decode), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1:])
