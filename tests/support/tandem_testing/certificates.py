"""Certificates of this host, each of them its own authority."""

import subprocess
from pathlib import Path

CERTIFICATE = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
"""With openssl."""


def certify(folder: Path) -> None:
    """A new key and certificate: `tls.key` and `tls.crt`."""
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    files = ("-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt"))
    subprocess.run(("openssl", *CERTIFICATE, *names, *files), check=True, capture_output=True)


def tls_flags(folder: Path) -> tuple[str, ...]:
    """Of a Redis server with this certificate, whose clients need none."""
    crt, key = str(folder / "tls.crt"), str(folder / "tls.key")
    return ("--tls-cert-file", crt, "--tls-key-file", key, "--tls-ca-cert-file", crt, "--tls-auth-clients", "no")
