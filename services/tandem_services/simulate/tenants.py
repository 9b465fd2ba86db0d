"""Whose the requests of a trace are, as a gateway would find it out from their keys.

Without a key file everybody whom the trace names is a tenant of weight 1 in one cache, and asks for what priority it
likes. With one, names are those of its entries, and weight, priority and cache are as the gateway's own code has them.
"""

from dataclasses import dataclass

from tandem_engine.errors import ConfigError
from tandem_engine.logs import quoted
from tandem_services.gateway.access.caller import UNKNOWN, Caller
from tandem_services.gateway.access.key_file import KeyRing
from tandem_services.gateway.access.tenants import EVERYBODY, Tenant


@dataclass(frozen=True, slots=True)
class Admitted:
    """One request's tenant, and what the request gets of what it asked for."""

    tenant: Tenant
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Tenants:
    """Of one trace."""

    keys: KeyRing | None = None
    """None: no keys are required."""

    def admit(self, name: str, priority: int) -> Admitted:
        """Raises `ConfigError` when the key file has no such entry."""
        if self.keys is None:
            tenant = UNKNOWN if name == EVERYBODY else Tenant(name=name, sha256=())
            return Admitted(tenant, priority, "")
        holder = next((tenant for tenant in self.keys.tenants if tenant.name == name), None)
        if holder is None:
            names = ", ".join(tenant.name for tenant in self.keys.tenants[:10])
            raise ConfigError(f"--api-keys: no entry for tenant {quoted(name)} of the trace; there are {names}")
        caller = Caller(tenant=holder)
        return Admitted(holder, caller.priority(priority), caller.cache_salt(""))
