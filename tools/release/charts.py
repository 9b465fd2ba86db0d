"""Package the charts of this tree for a release, and push them to an OCI registry.

    python tools/release/charts.py package FOLDER
    python tools/release/charts.py push FOLDER oci://registry.example/charts

`package` writes NAME-VERSION.tgz of each chart in charts/, and SHA256SUMS. It adds to Chart.yaml what Artifact Hub
shows: changes (from CHANGELOG.md), images (the operator's, and its defaults) and CRDs. Equal trees give equal archives.

`push` uploads the archives that SHA256SUMS names, with the credentials of `helm registry login` or `docker login`.
SSL_CERT_FILE names the authorities of a registry that the system does not know.

Both need Helm's library: tools/helm/setup.sh.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem_operator.api.crds import crds
from tandem_operator.settings import OperatorSettings

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ROOT / "charts"
HELM_HOME = Path(os.environ.get("TANDEM_HELM_HOME", "~/.cache/tandem-helm")).expanduser()
EPOCH = 1767225600
"""Date of all files of an archive, as of images (docker/Dockerfile)."""
SUMS = "SHA256SUMS"
KINDS = {"Added": "added", "Changed": "changed", "Fixed": "fixed", "Removed": "removed", "Security": "security"}
"""Headings of the changelog → kinds of Artifact Hub."""
MAX_CHANGES = 200
MAX_DESCRIPTION = 250


class ReleaseError(Exception):
    """What is wrong with the tree or the folder, in one sentence."""


def package(folder: Path, charts: Path = CHARTS) -> list[Path]:
    """Write archives and sums; gives the archives. Raises `ReleaseError`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [_package(path.parent, folder) for path in sorted(charts.glob("*/Chart.yaml"))]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made]
    (folder / SUMS).write_text("".join(lines), "utf-8")
    return made


def push(folder: Path, registry: str) -> list[str]:
    """Upload the archives of `folder`; gives their references. Raises `ReleaseError`."""
    if not registry.startswith("oci://"):
        raise ReleaseError(f"registry {registry!r}: expected oci://HOST/PATH")
    pushed = []
    for line in (folder / SUMS).read_text("utf-8").splitlines():
        digest, name = line.split("  ")
        archive = folder / name
        if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
            raise ReleaseError(f"{archive} is not the file that {SUMS} names: package the charts again")
        helm(do="push", archive=str(archive), registry=registry)
        chart, _, version = name.removesuffix(".tgz").rpartition("-")
        pushed.append(f"{registry}/{chart}:{version}")
    return pushed


def _package(chart: Path, folder: Path) -> Path:
    about = yaml.safe_load((chart / "Chart.yaml").read_text("utf-8"))
    product = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    for field in ("version", "appVersion"):
        if about[field] != product:
            raise ReleaseError(f"{chart.name}/Chart.yaml: {field} is {about[field]}, the product's is {product}")
    about.setdefault("annotations", {}).update(annotations(chart))
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / chart.name
        shutil.copytree(chart, copy)
        (copy / "Chart.yaml").write_text(yaml.safe_dump(about, sort_keys=False, width=1 << 20), "utf-8")
        helm(do="package", chart=str(copy), folder=scratch)
        name = f"{chart.name}-{about['version']}.tgz"
        target = folder / name
        target.write_bytes(normalized((Path(scratch) / name).read_bytes()))
    return target


def normalized(archive: bytes) -> bytes:
    """The same files in the order of their names, with one date, owner and mode."""
    made = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as given,
        gzip.GzipFile(fileobj=made, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(given.getmembers(), key=lambda one: one.name):
            entry = tarfile.TarInfo(member.name)
            entry.size, entry.mtime, entry.mode = member.size, EPOCH, 0o644
            target.addfile(entry, given.extractfile(member))
    return made.getvalue()


def annotations(chart: Path) -> dict[str, str]:
    """What is known only when a release is made; each value is YAML, as Artifact Hub wants it."""
    found: dict[str, Any] = {"changes": list(changes((ROOT / "CHANGELOG.md").read_text("utf-8")))}
    if (chart / "crds").is_dir():
        found |= {"images": list(images()), "crds": list(definitions())}
    return {f"artifacthub.io/{name}": yaml.safe_dump(value, sort_keys=False) for name, value in found.items()}


def images() -> Iterator[Json]:
    """Of the operator, and those that it starts unless a resource names others."""
    settings = OperatorSettings()
    registry, _, tag = settings.services_image.rpartition(":")
    operator = f"{registry.rpartition('/')[0]}/operator:{tag}"
    engines = [settings.engine_image, settings.cuda_engine_image]
    for image in (operator, *engines, settings.services_image, settings.redis_image):
        name, _, version = image.rpartition("/")[2].partition(":")
        yield {"name": f"{name}-cuda" if version.endswith("-cuda") else name, "image": image}


def definitions() -> Iterator[Json]:
    """Our custom resources."""
    for one in crds():
        names = one["spec"]["names"]
        for version in one["spec"]["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            yield {
                "kind": names["kind"],
                "version": version["name"],
                "name": one["metadata"]["name"],
                "displayName": names["kind"],
                "description": schema.get("description") or names["kind"],
            }


def changes(changelog: str) -> Iterator[Json]:
    """Of its newest section: the first sentence of each entry, at most `MAX_CHANGES` of them."""
    section = changelog.split("\n## ")[1]
    count = 0
    for part in section.split("\n### ")[1:]:
        heading, _, text = part.partition("\n")
        for entry in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
            if count < MAX_CHANGES:
                yield {"kind": KINDS[heading.strip()], "description": first_sentence(entry)}
            count += 1


def first_sentence(entry: str) -> str:
    """Without links and code marks, at most `MAX_DESCRIPTION` characters."""
    plain = re.sub(r"\s*\(\[[^\]]*\]\([^)]*\)(?:,\s*\[[^\]]*\]\([^)]*\))*\)", "", " ".join(entry.split()))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain).replace("`", "")
    return textwrap.shorten(re.split(r"(?<=[.!]) (?=[A-Z])", plain)[0].rstrip("."), MAX_DESCRIPTION, placeholder=" …")


def helm(**request: Any) -> Any:
    """One request of tools/helm/helm.py. Raises `ReleaseError` with what Helm says."""
    python = HELM_HOME / "python"
    if not (HELM_HOME / "ready").exists():
        raise ReleaseError(f"no Helm library in {HELM_HOME}: run tools/helm/setup.sh")
    command = [str(python), str(ROOT / "tools" / "helm" / "helm.py")]
    done = subprocess.run(command, input=json.dumps(request), text=True, check=True, stdout=subprocess.PIPE)
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise ReleaseError(answer["error"])
    return answer["ok"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    packages = actions.add_parser("package")
    packages.add_argument("folder", type=Path)
    pushes = actions.add_parser("push")
    pushes.add_argument("folder", type=Path)
    pushes.add_argument("registry", metavar="oci://HOST/PATH")
    arguments = parser.parse_args()
    try:
        if arguments.action == "package":
            made: list[Any] = package(arguments.folder)
        else:
            made = push(arguments.folder, arguments.registry)
    except (ReleaseError, OSError) as error:
        sys.exit(f"charts.py: {error}")
    print("\n".join(map(str, made)))


if __name__ == "__main__":
    main()
