"""What the transfer thread is told to do, beside orders of digests (`DigestOrder`)."""

from dataclasses import dataclass
from typing import TypeAlias

from tandem_engine.disaggregation.transport import DigestOrder, Push
from tandem_engine.messages.transfer import Hello


@dataclass(frozen=True, slots=True)
class Connect:
    hello: Hello


@dataclass(frozen=True, slots=True)
class Forget:
    incarnation: str


@dataclass(frozen=True, slots=True)
class StartPush:
    push: Push


@dataclass(frozen=True, slots=True)
class Expect:
    transfers: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Look at outstanding pushes now."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command: TypeAlias = Connect | Forget | StartPush | DigestOrder | Expect | Wake | Stop
