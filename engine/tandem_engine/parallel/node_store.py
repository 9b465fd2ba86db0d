"""The store by which ranks of several nodes form their groups: it is on node 0, and requires the deployment's keys.

Torch's own `TCPStore` accepts any client on all addresses of a machine. Here a rank calls the leader over its
authenticated channel, so only ranks of the engine see what is needed to connect to others (addresses, NCCL's unique
id).

    torch (C++) ─▶ RemoteStore ─▶ StoreCall ─▶ the leader's thread ─▶ answer_call ─▶ HashStore
                                                                       rank 0 ──────────┘
"""

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import Store

from tandem_engine.base.errors import RankLostError
from tandem_engine.ipc.channels import CallChannel
from tandem_engine.messages.nodes import LeaderToNode, NodeToLeader, StoreAction, StoreAnswer, StoreCall

ANSWER_S = 30.0
"""The leader answers within a turn of its thread. One that has not for so long is gone."""

WAIT_S = 300.0
"""For a key, where the caller has no bound of its own."""

ASK_AGAIN_S = 0.005
"""Between polls of a key that another rank will set."""


class RemoteStore(Store):
    """Implements torch's `Store` by calls to the leader. Thread-safe: NCCL calls it from threads of its own.

    Every method raises `RankLostError` when the leader is gone or leads another engine now.
    """

    def __init__(
        self, channel: "CallChannel[LeaderToNode, NodeToLeader]", *, session: str, timeout_s: float = ANSWER_S
    ) -> None:
        super().__init__()
        self._channel = channel
        self._session = session
        self._answer_s = timeout_s
        self._nonces = itertools.count(1)
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._call(StoreAction.SET, [key], value=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._call(StoreAction.GET, [key]).value

    def add(self, key: str, amount: int) -> int:
        return self._call(StoreAction.ADD, [key], amount=amount).amount

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(StoreAction.CHECK, keys).found

    def delete_key(self, key: str) -> bool:
        return self._call(StoreAction.DELETE, [key]).found

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all `keys` are there. Raises `RankLostError` after `timeout`."""
        limit_s = WAIT_S if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise RankLostError(f"no other rank has set {', '.join(keys)} within {limit_s:g} s")
            time.sleep(ASK_AGAIN_S)

    def _call(self, action: StoreAction, keys: Sequence[str], *, value: bytes = b"", amount: int = 0) -> StoreAnswer:
        with self._lock:
            nonce = next(self._nonces)
            call = StoreCall(
                session=self._session, nonce=nonce, action=action, keys=tuple(keys), value=value, amount=amount
            )
            self._channel.send(call)
            return self._answer_to(nonce)

    def _answer_to(self, nonce: int) -> StoreAnswer:
        deadline = time.monotonic() + self._answer_s
        while (left := deadline - time.monotonic()) > 0:
            answer = self._channel.receive(left)
            if not isinstance(answer, StoreAnswer) or answer.nonce != nonce:
                continue
            if answer.refused:
                raise RankLostError(answer.refused)
            return answer
        raise RankLostError(f"node 0 has not answered for {self._answer_s:g} s")


def answer_call(call: StoreCall, store: Store) -> StoreAnswer:
    """Do what `call` says to the leader's own store, of this session."""
    keys = list(call.keys)
    match call.action:
        case StoreAction.CHECK:
            return StoreAnswer(nonce=call.nonce, found=store.check(keys))
        case StoreAction.SET:
            # Torch takes bytes, too; its stubs do not say so.
            store.set(keys[0], cast("str", call.value))
        case StoreAction.GET:
            found = store.check(keys[:1])
            return StoreAnswer(nonce=call.nonce, found=found, value=bytes(store.get(keys[0])) if found else b"")
        case StoreAction.ADD:
            return StoreAnswer(nonce=call.nonce, amount=store.add(keys[0], call.amount))
        case StoreAction.DELETE:
            return StoreAnswer(nonce=call.nonce, found=store.delete_key(keys[0]))
    return StoreAnswer(nonce=call.nonce)
