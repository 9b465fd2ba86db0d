"""`session`: requests of one user or conversation go to one worker, and a worker that leaves moves only its own.

The key is the request's `user`. A request without one goes anywhere, by its id.
"""

from collections.abc import Sequence
from hashlib import blake2b

from tandem_services.router.choice import RouteQuery
from tandem_services.router.policies.policy import Contender


class Session:
    """Rendezvous hashing: the worker whose digest with the key is highest. Keeps no state, so gateways agree."""

    def narrow(self, contenders: Sequence[Contender], query: RouteQuery) -> Sequence[Contender]:
        key = (query.session_key or query.request_id).encode("utf-8", "surrogatepass")
        salted = blake2b(key, digest_size=16, salt=blake2b(query.cache_salt.encode(), digest_size=16).digest()).digest()
        return [max(contenders, key=lambda each: blake2b(each.incarnation.encode(), key=salted).digest())]
