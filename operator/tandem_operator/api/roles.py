"""The two roles that the operator counts, builds and scales. What a worker does with them: `--role` of the engine."""

from typing import Literal

RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, RoleName] = ("prefill", "decode")
