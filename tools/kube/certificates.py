"""The certificates of one control plane: a CA, the API server's, an administrator's and the front proxy's.

Made with the openssl command, so that nothing has to be installed into Python.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
DAYS = "3650"


class Certificates:
    """Files below one folder: ca, apiserver, admin and front-proxy as .crt and .key, sa as .pub and .key."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, name: str) -> str:
        """Of the file with that name."""
        return str(self.directory / name)

    def create(self, hosts: Sequence[str], addresses: Sequence[str]) -> None:
        """Make them all; the servers' certificate is for these names and addresses."""
        self.directory.mkdir(parents=True)
        self._authority()
        names = ",".join([f"IP:{one}" for one in addresses] + [f"DNS:{one}" for one in hosts])
        self._leaf(
            "apiserver", "/CN=kube-apiserver", f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        self._leaf("admin", "/O=system:masters/CN=admin", "extendedKeyUsage=clientAuth\n")
        self._leaf("front-proxy", "/CN=front-proxy-client", "extendedKeyUsage=clientAuth\n")
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
        self._openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def _authority(self) -> None:
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,digitalSignature")
        words = [word for one in extensions for word in ("-addext", one)]
        files = ("-keyout", "ca.key", "-out", "ca.crt")
        self._openssl("req", "-x509", *KEY, "-subj", "/CN=tandem-kube-ca", "-days", DAYS, *files, *words)

    def _leaf(self, name: str, subject: str, extensions: str) -> None:
        (self.directory / f"{name}.ext").write_text(extensions)
        self._openssl("req", *KEY, "-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS)
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", f"{name}.ext", "-out", f"{name}.crt")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(("openssl", *arguments), cwd=self.directory, check=True, capture_output=True)
