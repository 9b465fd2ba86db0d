"""Signatures of a release: made with a generated key, verified, and refused for whatever was changed."""

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from tandem_testing.api_schemas import ROOT
from tandem_testing.signing_keys import signing_key
from tandem_testing.tool_modules import load_tool

pytestmark = pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg is not installed")

CHART = "demo-0.1.0.tgz"
FILES = (CHART, "SHA256SUMS", "images.txt", "services.cdx.json")


tool = load_tool(ROOT / "tools/release/sign.py")


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    with signing_key(tmp_path_factory.mktemp("g") / "a") as made:
        yield made


@pytest.fixture
def signed(key, tmp_path, monkeypatch) -> Path:
    """A folder as `make release` leaves it, and its signatures."""
    charts, images = tmp_path / "charts", tmp_path / "images"
    charts.mkdir()
    images.mkdir()
    about = b"name: demo\nversion: 0.1.0\nannotations:\n  list: |\n    - first\n    - second\n"
    with tarfile.open(charts / CHART, "w:gz") as opened:
        member = tarfile.TarInfo("demo/Chart.yaml")
        member.size = len(about)
        opened.addfile(member, io.BytesIO(about))
    digest = hashlib.sha256((charts / CHART).read_bytes()).hexdigest()
    (charts / "SHA256SUMS").write_text(f"{digest}  {CHART}\n")
    (images / "images.txt").write_text("registry.example/services:0.1.0 sha256:ab\n")
    (images / "services.cdx.json").write_text("{}\n")
    monkeypatch.setenv("GNUPGHOME", str(key.home))
    tool.sign(tmp_path, key.fingerprint)
    monkeypatch.delenv("GNUPGHOME")
    return tmp_path


def test_every_artefact_is_signed_and_verified(signed, key):
    assert sorted(path.name for path in tool.verify(signed, key.keyring)) == sorted(FILES)
    names = {path.name for path in signed.rglob("*") if path.is_file()}
    assert names == {*FILES, f"{CHART}.prov", "SHA256SUMS.asc", "images.txt.asc", "services.cdx.json.asc"}


def test_provenance_has_the_form_of_helm(signed):
    """Chart.yaml, a line of three dots, and digests of files, in one clear-signed message."""
    text = (signed / "charts" / f"{CHART}.prov").read_text()
    assert text.startswith("-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA512\n")
    body = text.partition("\n\n")[2].partition("-----BEGIN PGP SIGNATURE-----")[0]
    about, _, sums = body.replace("\n- -", "\n-").partition("\n...\n")
    assert yaml.safe_load(about)["annotations"]["list"] == "- first\n- second\n"
    digest = hashlib.sha256((signed / "charts" / CHART).read_bytes()).hexdigest()
    assert yaml.safe_load(sums) == {"files": {CHART: f"sha256:{digest}"}}


@pytest.mark.parametrize("name", FILES)
def test_changed_artefact_is_refused_by_name(signed, key, name):
    (file,) = signed.rglob(name)
    with file.open("ab") as opened:
        opened.write(b" ")
    with pytest.raises(tool.SignatureError, match=name):
        tool.verify(signed, key.keyring)


@pytest.mark.parametrize("name", FILES)
def test_artefact_without_a_signature_is_refused(signed, key, name):
    (signature,) = signed.rglob(f"{name}.prov" if name == CHART else f"{name}.asc")
    signature.unlink()
    with pytest.raises(tool.SignatureError, match=rf"{name}.*is missing: the artefact is not signed"):
        tool.verify(signed, key.keyring)


def test_chart_under_the_signature_of_another_is_refused(signed, key):
    chart = signed / "charts" / CHART
    other = chart.with_name("demo-0.2.0.tgz")
    chart.rename(other)
    tool.provenance_of(chart).rename(tool.provenance_of(other))
    with pytest.raises(tool.SignatureError, match="is not the file that"):
        tool.verify(signed, key.keyring)


def test_signed_chart_that_the_sums_do_not_name_is_refused(signed, key, monkeypatch):
    """One of an earlier release, with its own signature."""
    other = signed / "charts" / "demo-0.0.9.tgz"
    other.write_bytes((signed / "charts" / CHART).read_bytes())
    monkeypatch.setenv("GNUPGHOME", str(key.home))
    tool.provenance_of(other).write_bytes(tool._gpg(key.fingerprint, "--clearsign", text=tool.provenance(other)))
    with pytest.raises(tool.SignatureError, match=r"demo-0\.0\.9\.tgz is not the file that"):
        tool.verify(signed, key.keyring)


@pytest.mark.parametrize("text", ["no sums\n", "\n"])
def test_sums_of_another_form_are_refused(signed, key, monkeypatch, text):
    sums = signed / "charts/SHA256SUMS"
    sums.write_text(text)
    monkeypatch.setenv("GNUPGHOME", str(key.home))
    tool.sign(signed, key.fingerprint)
    with pytest.raises(tool.SignatureError, match="SHA256SUMS: a line is no DIGEST and NAME"):
        tool.verify(signed, key.keyring)


def test_file_that_is_no_archive_is_not_signed(signed, key, monkeypatch):
    (signed / "charts/broken.tgz").write_bytes(b"no archive")
    monkeypatch.setenv("GNUPGHOME", str(key.home))
    with pytest.raises(tool.SignatureError, match=r"broken\.tgz is no chart"):
        tool.sign(signed, key.fingerprint)


def test_signature_of_another_key_is_refused(signed, tmp_path_factory):
    with (
        signing_key(tmp_path_factory.mktemp("g") / "b") as other,
        pytest.raises(tool.SignatureError, match="SHA256SUMS"),
    ):
        tool.verify(signed, other.keyring)


def test_missing_key_and_empty_folder_are_named(signed, key, tmp_path_factory, monkeypatch):
    empty = tmp_path_factory.mktemp("e")
    monkeypatch.setenv("GNUPGHOME", str(key.home))
    with pytest.raises(tool.SignatureError, match="gpg with key 'nobody'"):
        tool.sign(signed, "nobody")
    with pytest.raises(tool.SignatureError, match="run `make release` first"):
        tool.sign(empty, "nobody")
