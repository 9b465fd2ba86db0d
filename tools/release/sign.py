"""Sign the artefacts of a release with OpenPGP, and verify them.

    python tools/release/sign.py sign FOLDER KEY           FOLDER: of `make release`; KEY: fingerprint of a key of gpg
    python tools/release/sign.py verify FOLDER KEYRING     KEYRING: public keys, as `gpg --export` writes them

`sign` writes beside each file, with gpg and the keys of its home (GNUPGHOME):

    NAME-VERSION.tgz.prov     of each chart: Helm's provenance file, for `helm verify` and `helm install --verify`
    FILE.asc                  of SHA256SUMS, images.txt and each bill of materials: a detached signature

`verify` needs gpgv alone. It fails for a file without a signature, for another key, and for a chart that is not the
one that its provenance file and, where there is one, SHA256SUMS name. Signatures of images in a registry are made
when they are pushed (images.sh --sign-by).
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

SUMS = "SHA256SUMS"
DETACHED = (SUMS, "images.txt", "*.cdx.json")
"""Patterns of names of files with a detached signature."""
SEPARATOR = "\n...\n"
"""Between the metadata and the sums of a provenance file."""


class SignatureError(Exception):
    """What is wrong with the folder, the key or a signature, in one sentence."""


def sign(folder: Path, key: str) -> list[Path]:
    """Write a signature of every artefact; gives the signatures. Raises `SignatureError`."""
    made = []
    for chart in charts_of(folder):
        signed = _gpg(key, "--clearsign", text=provenance(chart))
        made.append(_write(provenance_of(chart), signed))
    for file in detached_of(folder):
        signed = _gpg(key, "--armor", "--detach-sign", text=file.read_bytes())
        made.append(_write(signature_of(file), signed))
    if not made:
        raise SignatureError(f"{folder} has no charts, {SUMS} or images.txt: run `make release` first")
    return made


def verify(folder: Path, keyring: Path) -> list[Path]:
    """Check every artefact against its signature; gives the artefacts. Raises `SignatureError`."""
    if shutil.which("gpgv") is None:
        raise SignatureError("gpgv is missing: apt-get install -y gpgv")
    charts, files = list(charts_of(folder)), list(detached_of(folder))
    if not charts and not files:
        raise SignatureError(f"{folder} has no charts, {SUMS} or images.txt")
    for file in files:
        _gpgv(keyring, _existing(signature_of(file)), file)
    sums = _sums(folder)
    for chart in charts:
        stated = _stated(keyring, _existing(provenance_of(chart)))
        digest = hashlib.sha256(chart.read_bytes()).hexdigest()
        if stated != {chart.name: f"sha256:{digest}"} or (sums and sums.get(chart.name) != digest):
            raise SignatureError(f"{chart} is not the file that {provenance_of(chart).name} and {SUMS} name")
    return [*charts, *files]


def provenance(chart: Path) -> bytes:
    """What a provenance file of Helm signs: Chart.yaml of the archive, and its digest."""
    try:
        with tarfile.open(chart) as opened:
            found = (one for one in opened if one.name.count("/") == 1 and one.name.endswith("/Chart.yaml"))
            member = next(found, None)
            file = None if member is None else opened.extractfile(member)
            if file is None:
                raise SignatureError(f"{chart} is no chart: it has no Chart.yaml")
            about = yaml.safe_load(file.read())
    except tarfile.TarError as error:
        raise SignatureError(f"{chart} is no chart: {str(error).splitlines()[0]}") from error
    digest = hashlib.sha256(chart.read_bytes()).hexdigest()
    sums = yaml.safe_dump({"files": {chart.name: f"sha256:{digest}"}}, width=1 << 20)
    return f"{yaml.safe_dump(about, width=1 << 20)}{SEPARATOR}{sums}".encode()


def charts_of(folder: Path) -> Iterator[Path]:
    """Archives of charts, at any depth."""
    yield from sorted(folder.rglob("*.tgz"))


def detached_of(folder: Path) -> Iterator[Path]:
    """Files with a detached signature."""
    yield from sorted(file for pattern in DETACHED for file in folder.rglob(pattern))


def provenance_of(chart: Path) -> Path:
    return chart.with_name(f"{chart.name}.prov")


def signature_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.asc")


def _sums(folder: Path) -> dict[str, str]:
    """Digests by name of a file; empty without SHA256SUMS."""
    sums = {}
    for file in folder.rglob(SUMS):
        for line in file.read_text("utf-8").splitlines():
            digest, separator, name = line.partition("  ")
            if not (digest and separator and name):
                raise SignatureError(f"{file}: a line is no DIGEST and NAME; make it again with `make release`")
            sums[name] = digest
    return sums


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _existing(signature: Path) -> Path:
    if not signature.is_file():
        raise SignatureError(f"{signature} is missing: the artefact is not signed")
    return signature


def _gpg(key: str, *words: str, text: bytes) -> bytes:
    # A digest of 512 bits whatever the configuration of this user says.
    command = ["gpg", "--batch", "--yes", "--digest-algo", "SHA512", "--local-user", key, *words]
    try:
        done = subprocess.run(command, input=text, capture_output=True, check=False)
    except FileNotFoundError:
        raise SignatureError("gpg is missing: apt-get install -y gnupg") from None
    if done.returncode:
        raise SignatureError(f"gpg with key {key!r}: {_last_line(done.stderr)}")
    return done.stdout


def _gpgv(keyring: Path, *words: Path | str) -> None:
    # gpgv looks for relative keyrings in its home.
    command = ["gpgv", "--keyring", str(keyring.resolve()), *map(str, words)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SignatureError(f"{words[-1]}: {_last_line(done.stderr)}")


def _stated(keyring: Path, signed: Path) -> dict[str, str]:
    """Digests by name that a provenance file states, in what is signed of it."""
    with tempfile.TemporaryDirectory() as scratch:
        content = Path(scratch) / "content"
        _gpgv(keyring, "--output", str(content), signed)
        text = content.read_text("utf-8")
    _, _, sums = text.partition(SEPARATOR)
    files = (yaml.safe_load(sums) or {}).get("files", {})
    return {str(name): str(digest) for name, digest in files.items()}


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "failed without a reason"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    signs = actions.add_parser("sign")
    signs.add_argument("folder", type=Path)
    signs.add_argument("key")
    verifies = actions.add_parser("verify")
    verifies.add_argument("folder", type=Path)
    verifies.add_argument("keyring", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.action == "sign":
            shown = sign(arguments.folder, arguments.key)
        else:
            shown = verify(arguments.folder, arguments.keyring)
    except (SignatureError, OSError) as error:
        sys.exit(f"sign.py: {error}")
    print("\n".join(map(str, shown)))


if __name__ == "__main__":
    main()
