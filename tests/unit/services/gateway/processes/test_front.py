"""The administrators' port of several processes, with processes that are played."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tandem_services.gateway.process_place import socket_of
from tandem_services.gateway.processes.front import MAX_BODY_BYTES, Front


class Played:
    """One process: answers with what is set for the path, and notes what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[bytes] = []
        self.breaks = False
        """Ends each connection in the middle of its answer."""
        self.hangs = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.hangs:
            await reader.read()
            writer.close()
            return
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        self.asked.append(head + await reader.readexactly(length))
        status, body = self.answers.get(head.split(b" ")[1].decode(), (404, b"{}"))
        size = len(body) + (1 if self.breaks else 0)
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, size))
        if not head.startswith(b"HEAD "):
            writer.write(body)
        writer.close()


@asynccontextmanager
async def front(folder: Path, count: int) -> AsyncIterator[tuple[httpx.AsyncClient, list[Played], list[list[int]]]]:
    played, drained = [Played() for _ in range(count)], []
    app = Front(folder=folder, count=count, on_drain=lambda accepted: drained.append(sorted(accepted)))
    async with AsyncExitStack() as stack:
        for number, each in enumerate(played):
            await stack.enter_async_context(await asyncio.start_unix_server(each.serve, socket_of(folder, number)))
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
        yield (
            await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://x")),
            played,
            drained,
        )


@pytest.mark.parametrize(("statuses", "expected"), [((503, 200), 200), ((200, 503), 200), ((503, 503), 503)])
async def test_one_ready_process_makes_the_gateway_ready(tmp_path, statuses, expected):
    async with front(tmp_path, 2) as (client, played, _):
        for each, status in zip(played, statuses, strict=True):
            each.answers["/ready"] = (status, b"{}")
        assert (await client.get("/ready")).status_code == expected


async def test_process_that_hangs_is_passed_over_by_probes(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem_services.gateway.processes.front.QUICKLY_S", 0.2)
    async with front(tmp_path, 2) as (client, played, _):
        played[0].hangs = True
        played[1].answers["/ready"] = (200, b"{}")
        assert (await client.get("/ready")).status_code == 200


async def test_gateway_without_any_process_is_live_and_not_ready(tmp_path):
    async with front(tmp_path, 0) as (client, _, _):
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200


async def test_explain_is_of_the_process_that_had_the_request(tmp_path):
    async with front(tmp_path, 3) as (client, played, _):
        played[1].answers["/requests/a/explain"] = (200, b'{"of": 1}')
        assert (await client.get("/requests/a/explain")).json() == {"of": 1}
        assert (await client.get("/requests/b/explain")).status_code == 404


async def test_drain_reaches_all_processes_with_the_token(tmp_path):
    async with front(tmp_path, 2) as (client, played, drained):
        for each in played:
            each.answers["/drain"] = (202, b"{}")
        answer = await client.post("/drain", json={}, headers={"authorization": "Bearer t"})
        assert (answer.status_code, drained) == (202, [[0, 1]])
        assert all(b"authorization: Bearer t" in each.asked[0] and each.asked[0].endswith(b"{}") for each in played)


async def test_refused_drain_goes_no_further(tmp_path):
    async with front(tmp_path, 2) as (client, played, drained):
        played[0].answers["/drain"] = (401, b"{}")
        assert ((await client.post("/drain", json={})).status_code, drained) == (401, [])
        assert not played[1].asked


async def test_process_that_has_died_is_passed_over(tmp_path):
    async with front(tmp_path, 2) as (client, played, _):
        socket_of(tmp_path, 0).unlink()
        socket_of(tmp_path, 0).touch()
        played[1].answers["/v1/models?a=b"] = (200, b"[1]")
        assert (await client.get("/v1/models?a=b")).json() == [1]


async def test_answer_that_breaks_off_is_not_passed_on_as_whole(tmp_path):
    async with front(tmp_path, 1) as (client, played, _):
        played[0].answers["/console"] = (200, b"half")
        played[0].breaks = True
        with pytest.raises(ConnectionResetError):
            await client.get("/console")


async def test_metrics_of_a_process_without_any_are_left_out(tmp_path):
    async with front(tmp_path, 2) as (client, played, _):
        played[0].answers["/metrics"] = (200, b"# TYPE a counter\na_total 2.0\n")
        played[1].breaks = True
        assert "a_total 2.0" in (await client.get("/metrics")).text


async def test_internal_routes_and_long_bodies_are_refused(tmp_path):
    async with front(tmp_path, 1) as (client, played, _):
        played[0].answers["/internal/explain"] = (200, b"{}")
        assert (await client.get("/internal/explain")).status_code == 404
        assert (await client.post("/canary", content=b"x" * (MAX_BODY_BYTES + 1))).status_code == 413
        assert not played[0].asked


async def test_drain_passes_over_a_process_that_has_died(tmp_path):
    async with front(tmp_path, 2) as (client, played, drained):
        socket_of(tmp_path, 0).unlink()
        socket_of(tmp_path, 0).touch()
        played[1].answers["/drain"] = (202, b"{}")
        assert ((await client.post("/drain", json={})).status_code, drained) == (202, [[1]])


async def test_drain_passes_over_a_process_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem_services.gateway.processes.front.QUICKLY_S", 0.2)
    async with front(tmp_path, 2) as (client, played, drained):
        played[0].hangs = True
        played[1].answers["/drain"] = (202, b"{}")
        assert ((await client.post("/drain", json={})).status_code, drained) == (202, [[1]])


@pytest.mark.parametrize("path", ["/ready", "/console", "/metrics", "/requests/a/explain"])
async def test_head_request_is_answered_without_a_body(tmp_path, path):
    async with front(tmp_path, 2) as (client, played, _):
        for each in played:
            each.answers[path] = (200, b"# TYPE a gauge\na 2.0\n")
        answer = await client.head(path)
        assert (answer.status_code, answer.headers["content-type"] != "") == (200, True)


async def test_refusal_stays_when_the_last_process_is_dead(tmp_path):
    async with front(tmp_path, 2) as (client, played, _):
        played[0].answers["/ready"] = (503, b'{"reasons": ["workers"]}')
        socket_of(tmp_path, 1).unlink()
        socket_of(tmp_path, 1).touch()
        assert (await client.get("/ready")).json() == {"reasons": ["workers"]}
        assert (await client.get("/requests/a/explain")).status_code == 404


async def test_metrics_are_refused_as_processes_refuse_them(tmp_path):
    async with front(tmp_path, 2) as (client, played, _):
        for each in played:
            each.answers["/metrics"] = (403, b'{"error": "Host"}')
        answer = await client.get("/metrics", headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()) == (403, {"error": "Host"})
        assert all(b"host: evil.example" in each.asked[0] for each in played)


async def test_counts_stay_while_a_process_answers_with_an_error(tmp_path):
    async with front(tmp_path, 1) as (client, played, _):
        played[0].answers["/metrics"] = (200, b"# TYPE a counter\na_total 2.0\n")
        await client.get("/metrics")
        played[0].answers["/metrics"] = (500, b"")
        assert "a_total 2.0" in (await client.get("/metrics")).text
