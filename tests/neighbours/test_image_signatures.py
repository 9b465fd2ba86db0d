"""Images in a real OCI registry: tools/release/push.sh signs them, and a policy refuses those without a signature."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tandem_testing.helm_library import ROOT
from tandem_testing.neighbours import NEEDS_NEIGHBOURS, registry
from tandem_testing.signing_keys import UID, signing_key

pytestmark = [
    *NEEDS_NEIGHBOURS,
    pytest.mark.skipif(os.geteuid() != 0, reason="buildah needs root here"),
]


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def home(tmp_path):
    """A user with a storage of images and a key of its own."""
    (tmp_path / "home").mkdir()
    storage = tmp_path / "storage.conf"
    folders = f'graphroot = "{tmp_path}/storage"\nrunroot = "{tmp_path}/run"\n'
    storage.write_text(f'[storage]\ndriver = "vfs"\n{folders}')
    with signing_key(tmp_path / "gpg") as key:
        yield {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "GNUPGHOME": str(key.home),
            "CONTAINERS_STORAGE_CONF": str(storage),
        }


def configure(home: Path, host: str, authority: Path, signatures: Path) -> None:
    """Trust the registry's certificate, and keep signatures of its images in a folder."""
    settings = home / ".config/containers"
    (settings / "registries.d").mkdir(parents=True)
    (settings / "certs.d" / host).mkdir(parents=True)
    (settings / "certs.d" / host / "ca.crt").write_bytes(authority.read_bytes())
    place = f"file://{signatures}"
    # `sigstore` is the name that releases before 5.22 of the library know; later ones read it, too.
    rows = {host: {"sigstore": place, "sigstore-staging": place}}
    (settings / "registries.d" / "test.yaml").write_text(json.dumps({"docker": rows}))


def test_signed_image_is_pulled_and_an_unsigned_one_is_not(home, tmp_path):
    with registry(tmp_path) as served:
        configure(Path(home["HOME"]), served.host, served.authority, tmp_path / "signatures")
        names = [f"{served.host}/tandem/{name}:1" for name in ("signed", "plain")]
        for name in names:
            container = run(home, "buildah", "from", "scratch").stdout.strip()
            assert run(home, "buildah", "commit", "--quiet", "--rm", container, name).returncode == 0
        digests = []
        for name, words in zip(names, (("--sign-by", UID), ()), strict=True):
            done = run(home, str(ROOT / "tools/release/push.sh"), *words, name)
            assert done.returncode == 0, done.stderr
            [shown, digest] = done.stdout.split()
            assert (shown, digest[:7]) == (name, "sha256:")
            digests.append(f"{name.rpartition(':')[0]}@{digest}")
        rule = {"type": "signedBy", "keyType": "GPGKeys", "keyPath": str(tmp_path / "gpg/public.gpg")}
        policy = tmp_path / "policy.json"
        # The digest names the image, whatever its tag is now.
        identity = {"signedIdentity": {"type": "matchRepository"}}
        required = {"docker": {served.host: [{**rule, **identity}]}}
        policy.write_text(json.dumps({"default": [{"type": "reject"}], "transports": required}))
        pulled = [
            run(home, "buildah", "pull", "--signature-policy", str(policy), f"docker://{image}") for image in digests
        ]
        assert pulled[0].returncode == 0, pulled[0].stderr
        assert pulled[1].returncode != 0
        assert "signature" in pulled[1].stderr
