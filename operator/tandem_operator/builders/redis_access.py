"""How a pod reaches Redis, managed or external: its address and its password as a file."""

from tandem_operator.api.redis import Redis
from tandem_operator.builders.containers import Manifest, secret_volume
from tandem_operator.builders.naming import redis_name, redis_secret_name

PASSWORD_FOLDER = "/etc/tandem/redis"  # noqa: S105 - a folder
PASSWORD_KEY = "password"  # noqa: S105 - a name
PORT = 6379


def redis_url(redis: Redis, service: str) -> str:
    """Address without a password."""
    return redis.external.url if redis.external is not None else f"redis://{redis_name(service)}:{PORT}/0"


def password_volume(redis: Redis, service: str) -> tuple[Manifest, Manifest] | None:
    """Volume and mount; None when there is no password."""
    if redis.external is None:
        return secret_volume(
            "redis-password", redis_secret_name(service), PASSWORD_FOLDER, {PASSWORD_KEY: PASSWORD_KEY}
        )
    secret = redis.external.password
    if secret is None:
        return None
    return secret_volume("redis-password", secret.name, PASSWORD_FOLDER, {secret.key: PASSWORD_KEY})
