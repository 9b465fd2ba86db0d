"""The policies of a router: by name, one for each role."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tandem_engine.config import Role
from tandem_engine.errors import ConfigError
from tandem_services.router.choice import RouteQuery, WorkerView
from tandem_services.router.newcomers import Newcomers
from tandem_services.router.policies.exploring import Exploring
from tandem_services.router.policies.least_loaded import LeastLoaded
from tandem_services.router.policies.locality import Locality
from tandem_services.router.policies.policy import Contender, Policy
from tandem_services.router.policies.power_of_two import PowerOfTwo
from tandem_services.router.policies.ramping import Ramping
from tandem_services.router.policies.round_robin import RoundRobin
from tandem_services.router.policies.session import Session

POLICIES: Mapping[str, Callable[[Random], Policy]] = {
    "locality": lambda _: Locality(),
    "round_robin": lambda _: RoundRobin(),
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "session": lambda _: Session(),
}

LOCALITY = "locality"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyNames:
    """Which policy each role has."""

    prefill: str = LOCALITY
    """Of prefill workers."""
    decode: str = LOCALITY
    """Of decode workers and of those that do both."""

    def __str__(self) -> str:
        """In the form that `parse` reads."""
        return f"prefill={self.prefill},decode={self.decode}"

    @property
    def narrow(self) -> bool:
        """Whether they ever pass a worker over."""
        return (self.prefill, self.decode) != (LOCALITY, LOCALITY)

    @classmethod
    def parse(cls, text: str, *, flag: str = "--router-policy") -> "PolicyNames":
        """`NAME` for both roles, or `prefill=NAME,decode=NAME`. Raises `ConfigError`, which names `flag`."""
        if "=" not in text:
            return cls(prefill=_known(text, flag), decode=_known(text, flag))
        named = {}
        for part in text.split(","):
            role, _, name = part.partition("=")
            if role not in ("prefill", "decode") or role in named:
                raise ConfigError(f"{flag} {text[:200]!r}: expected a name, or prefill=NAME,decode=NAME")
            named[role] = _known(name, flag)
        return cls(**named)


def _known(name: str, flag: str) -> str:
    if name not in POLICIES:
        raise ConfigError(f"{flag}: there is no policy {name[:100]!r}; choose from {', '.join(POLICIES)}")
    return name


class PoliciesByRole:
    """Narrows what a query may choose among. `outstanding` is as in `Contender`."""

    def __init__(
        self,
        names: PolicyNames,
        random: Random,
        outstanding: Callable[[WorkerView], float],
        *,
        newcomers: Newcomers,
        exploration: float = 0.0,
    ) -> None:
        """`exploration`: share of queries that go to anybody."""

        def composed(name: str) -> Policy:
            policy = POLICIES[name](random)
            if exploration:
                policy = Exploring(policy, exploration, random)
            return Ramping(policy, newcomers.share, random)

        self._prefill = composed(names.prefill)
        self._decode = composed(names.decode)
        self._outstanding = outstanding
        self._newcomers = newcomers
        self._always = names.narrow or exploration > 0.0

    @property
    def narrows(self) -> bool:
        """False: nobody would be passed over now."""
        return self._always or self._newcomers.any

    def passed_over(self, workers: Iterable[WorkerView], query: RouteQuery) -> frozenset[str]:
        """Incarnations among `workers`, all of which could take the query, that the policies leave out."""
        everybody = sorted(workers, key=lambda each: each.incarnation)
        decodes = [each for each in everybody if each.role is not Role.PREFILL]
        holders = self._kept(self._decode, decodes, query)
        kinds = {each.compat_hash for each in decodes if each.incarnation in holders}
        prefills = [each for each in everybody if each.role is Role.PREFILL and each.compat_hash in kinds]
        kept = holders | self._kept(self._prefill, prefills, query)
        return frozenset(each.incarnation for each in everybody) - kept

    def _kept(self, policy: Policy, workers: Sequence[WorkerView], query: RouteQuery) -> frozenset[str]:
        if not workers:
            return frozenset()
        contenders = [Contender(each.incarnation, self._outstanding(each)) for each in workers]
        return frozenset(each.incarnation for each in policy.narrow(contenders, query))
