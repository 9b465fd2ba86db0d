"""Digests of quarantined requests in a real Redis, as gateways share them and operators clear them."""

import json

import pytest

from tandem_services.cli.main import main
from tandem_services.common.redis_client import RedisAddress, RedisClient
from tandem_services.router.keys import Keys
from tandem_services.router.shared_state import QuarantineBoard
from tandem_testing.router_builders import PATIENT_S


@pytest.fixture
async def board(server):
    server.command("FLUSHALL")
    client = RedisClient(RedisAddress(url=server.url), timeout_s=PATIENT_S)
    yield QuarantineBoard(client=client, keys=Keys("default"))
    await client.close()


async def put(board: QuarantineBoard, *digests: str, ttl_s: float = 60, capacity: int = 8) -> None:
    for digest in digests:
        await board.put(digest, ttl_s=ttl_s, capacity=capacity)


async def test_digests_are_shared_with_the_time_that_is_left(board):
    await put(board, "aa")
    await put(board, "bb", ttl_s=600)
    found = await board.digests()
    assert found == {"aa": pytest.approx(60, abs=5), "bb": pytest.approx(600, abs=5)}


async def test_expired_quarantine_is_not_found(board):
    await put(board, "aa", ttl_s=-1)
    assert await board.digests() == {}


async def test_quarantine_board_keeps_at_most_its_capacity_of_digests(board):
    for nth in range(20):
        await put(board, f"{nth:02x}", ttl_s=60 + nth)
    assert sorted(await board.digests()) == [f"{nth:02x}" for nth in range(12, 20)]


async def test_quarantine_of_one_or_all_is_cleared(board):
    await put(board, "aa", "bb", "cc")
    assert await board.clear("aa") == 1
    assert await board.clear("aa") == 0
    assert await board.clear() == 2
    assert await board.digests() == {}


async def test_malformed_quarantine_digests_are_ignored(board, server):  # [redis-values-untrusted]
    await put(board, "aa")
    server.command("ZADD", Keys("default").quarantine, "9e15", "no digest!", "9e15", "x" * 99)
    assert list(await board.digests()) == ["aa"]
    server.command("SET", Keys("default").quarantine, "text")
    assert await board.digests() == {}


def test_operator_lists_and_clears_them(server, capsys):
    server.command("FLUSHALL")
    server.command("ZADD", Keys("default").quarantine, "9e15", "aabb")

    def output_of(*order: str) -> tuple[int, dict[str, float]]:
        status = main(["quarantine", "--redis-url", server.url, *order])
        return status, json.loads(capsys.readouterr().out)

    status, listed = output_of("list")
    assert (status, list(listed)) == (0, ["aabb"])
    assert output_of("clear", "aabb") == (0, {"cleared": 1})
    assert output_of("clear", "--all") == (1, {"cleared": 0})
