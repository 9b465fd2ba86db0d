"""API keys: random text that clients hold, and digests of it that the key file holds.

A key has 256 random bits, so its SHA-256 cannot be turned back into it, and no slow hash is needed.
"""

import secrets
from hashlib import sha256

PREFIX = "tdm-"
"""Tells scanners for leaked secrets, and people, what it is."""

MAX_KEY_CHARACTERS = 512


def new_key() -> str:
    """A key that nobody has."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """SHA-256 in hex: what stands in the key file."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
