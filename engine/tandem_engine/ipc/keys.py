"""CURVE keys: a process that holds the pair belongs to the deployment."""

import json
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq

from tandem_engine.base.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 CURVE keys shared by the processes of one deployment."""

    public: bytes
    secret: bytes

    @staticmethod
    def generate() -> "KeyPair":
        public, secret = zmq.curve_keypair()
        return KeyPair(public, secret)

    @staticmethod
    def load(path: Path) -> "KeyPair":
        """Raises `ConfigError` when the file is absent or not a key file; warns when other users can read it."""
        try:
            if path.stat().st_mode & stat.S_IROTH:
                logger.warning("%s is world-readable; run chmod o-r", path)
            fields = json.loads(path.read_text("ascii"))
            keys = KeyPair(fields["public"].encode("ascii"), fields["secret"].encode("ascii"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--curve-keys {path}: not a key file written by `tandem up` ({error})") from error
        if len(keys.public) != 40 or len(keys.secret) != 40:
            raise ConfigError(f"--curve-keys {path}: keys must be 40 Z85 characters each")
        return keys

    def save(self, path: Path) -> None:
        """Write for the owner's eyes only, whatever was there before."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump({"public": self.public.decode(), "secret": self.secret.decode()}, file)
