"""Write the software bill of materials of an image: its Debian and Python packages, as CycloneDX 1.6 JSON.

    python tools/release/sbom.py ROOT --name engine --version 0.1.0 [--digest sha256:…] > engine.cdx.json

ROOT is the unpacked file system of the image (`buildah mount`). Packages are read from its files; no resolver is asked.

    var/lib/dpkg/status            →  pkg:deb/debian/…, with the name of the source package
    opt/**/*.dist-info/METADATA    →  pkg:pypi/…, with the License-Expression

Equal images give equal documents: no date, and a serial number that follows from the contents.
"""

import argparse
import json
import sys
import uuid
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseAcknowledgement, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

NAMESPACE = uuid.UUID("1b671a64-40d5-491e-99b0-da01ff1f3341")
"""Of serial numbers."""


def bill(root: Path, *, name: str, version: str, digest: str = "") -> Bom:
    """Of the image whose file system is at `root`. Raises `ValueError` where it has no package at all."""
    components = [*debian_packages(root), *python_packages(root)]
    if not components:
        raise ValueError(f"{root}: neither var/lib/dpkg/status nor a *.dist-info: is it the root of an image?")
    image = Component(name=f"tandem/{name}", version=version, type=ComponentType.CONTAINER, bom_ref=f"tandem/{name}")
    if digest:
        algorithm, _, value = digest.partition(":")
        if algorithm != "sha256" or len(value) != 64:
            raise ValueError(f"digest {digest!r}: expected sha256: and 64 hexadecimal digits")
        image.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=value))
    bom = Bom(components=components)
    bom.metadata.component = image
    bom.register_dependency(image, components)
    contents = "\n".join(sorted(str(one.purl) for one in components))
    bom.serial_number = uuid.uuid5(NAMESPACE, f"{name} {version} {digest}\n{contents}")
    return bom


def debian_packages(root: Path) -> Iterator[Component]:
    """Those that are installed, with their source packages."""
    status = root / "var/lib/dpkg/status"
    if not status.exists():
        return
    for paragraph in status.read_text("utf-8").split("\n\n"):
        fields = HeaderParser().parsestr(paragraph)
        if "installed" not in fields.get("Status", "").split():
            continue
        name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
        purl = PackageURL("deb", "debian", name, version, {"arch": architecture})
        source = fields.get("Source", name).partition(" ")[0]
        yield Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=str(purl),
            properties=[Property(name="tandem:debian:source", value=source)],
        )


def python_packages(root: Path) -> Iterator[Component]:
    """All distributions, those of Debian left out: they are packages of Debian."""
    found: dict[str, Component] = {}
    for path in sorted(root.glob("opt/**/*.dist-info/METADATA")):
        fields = HeaderParser().parsestr(path.read_text("utf-8"))
        name, version = fields["Name"], fields["Version"]
        purl = PackageURL("pypi", None, name.lower().replace("_", "-"), version)
        expression = fields.get("License-Expression")
        found[str(purl)] = Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            purl=purl,
            bom_ref=str(purl),
            licenses=[LicenseExpression(expression, acknowledgement=LicenseAcknowledgement.DECLARED)]
            if expression
            else [],
        )
    yield from found.values()


def document(bom: Bom) -> str:
    """As JSON, without the date of its making."""
    made = json.loads(JsonV1Dot6(bom).output_as_string())
    made["metadata"].pop("timestamp", None)
    return json.dumps(made, indent=1, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="ROOT")
    parser.add_argument("--name", required=True, help="image, without its registry")
    parser.add_argument("--version", required=True, help="tag of the image")
    parser.add_argument("--digest", default="", help="of the image's manifest")
    arguments = parser.parse_args()
    made = bill(arguments.root, name=arguments.name, version=arguments.version, digest=arguments.digest)
    sys.stdout.write(document(made))


if __name__ == "__main__":
    main()
