"""What all processes of a deployment derive alike from its key file, and nobody else can."""

from hashlib import blake2b

from tandem_engine.ipc.keys import KeyPair


def deployment_secret(keys: KeyPair | None, cluster: str) -> bytes:
    """16 bytes. Without a key file (loopback alone) they say only which cluster it is."""
    secret = b"" if keys is None else keys.secret
    return blake2b(cluster.encode(), key=secret, digest_size=16).digest()


def cache_secret(secret: bytes) -> bytes:
    """What tenants' cache salts are keyed with."""
    return blake2b(b"prefix cache", key=secret, digest_size=32).digest()
