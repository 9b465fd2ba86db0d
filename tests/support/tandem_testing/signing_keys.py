"""Keys of gpg that sign releases in tests, each in a home of its own."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

UID = "Release test <release@example.org>"


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A secret key without a passphrase."""

    home: Path
    """GNUPGHOME; short paths alone, because gpg's agent listens on a socket there."""
    fingerprint: str
    keyring: Path
    """Its public part, as `gpg --export` writes it."""


@contextmanager
def signing_key(home: Path) -> Iterator[SigningKey]:
    """A new one; the agent of its home ends with the block."""
    home.mkdir(mode=0o700, parents=True)
    gpg = ["gpg", "--homedir", str(home), "--batch"]
    try:
        subprocess.run([*gpg, "--passphrase", "", "--quick-gen-key", UID, "rsa2048", "sign", "1d"], check=True)
        words = [*gpg, "--with-colons", "--list-keys"]
        listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        keyring = home / "public.gpg"
        keyring.write_bytes(subprocess.run([*gpg, "--export"], check=True, capture_output=True).stdout)
        fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))
        yield SigningKey(home=home, fingerprint=fingerprint, keyring=keyring)
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=True)
