"""How a pod reaches Redis, managed or external: its address, its password and its authority, both as files.

Kubelets renew the files when their Secrets change, and both are read at each connect.
"""

from tandem_engine.addresses import Address
from tandem_operator.api.redis import Redis
from tandem_operator.builders.containers import Manifest, secret_volume
from tandem_operator.builders.naming import redis_name, redis_secret_name

PASSWORD_FOLDER = "/etc/tandem/redis"  # noqa: S105 - a folder
PASSWORD_KEY = "password"  # noqa: S105 - a name
CA_FOLDER = "/etc/tandem/redis-ca"
CA_FILE = "ca.crt"
PORT = 6379


def redis_words(redis: Redis, service: str) -> list[str]:
    """Arguments of workers and gateways. No password is among them."""
    words = ["--redis-url", _url(redis, service)]
    if _password_volume(redis, service) is not None:
        words += ["--redis-password-file", f"{PASSWORD_FOLDER}/{PASSWORD_KEY}"]
    return words


def redis_volumes(redis: Redis, service: str) -> list[tuple[Manifest, Manifest]]:
    """Volumes with their mounts."""
    found = [_password_volume(redis, service)]
    if redis.external is not None and redis.external.ca_secret is not None:
        ca = redis.external.ca_secret
        found.append(secret_volume("redis-ca", ca.name, CA_FOLDER, {ca.key: CA_FILE}))
    return [pair for pair in found if pair is not None]


def _url(redis: Redis, service: str) -> str:
    if redis.external is None:
        return Address(redis_name(service), PORT).url("/0", scheme="redis")
    authority = f"?ssl_ca_certs={CA_FOLDER}/{CA_FILE}" if redis.external.ca_secret is not None else ""
    return redis.external.url + authority


def _password_volume(redis: Redis, service: str) -> tuple[Manifest, Manifest] | None:
    if redis.external is None:
        return secret_volume(
            "redis-password", redis_secret_name(service), PASSWORD_FOLDER, {PASSWORD_KEY: PASSWORD_KEY}
        )
    secret = redis.external.password
    if secret is None:
        return None
    return secret_volume("redis-password", secret.name, PASSWORD_FOLDER, {secret.key: PASSWORD_KEY})
