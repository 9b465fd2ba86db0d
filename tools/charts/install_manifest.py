"""Write charts/install.yaml: the operator for people without Helm, as the chart renders it for the whole cluster.

    python tools/charts/install_manifest.py [PATH]     wants tools/helm/setup.sh to have been run

The custom resource definitions stay in their own file, charts/tandem/crds/: they are applied on their own before each
upgrade. tests/charts check that the committed file is what this writes.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tandem_operator.api.crds import to_yaml

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "charts" / "install.yaml"
HELM_HOME = Path(os.environ.get("TANDEM_HELM_HOME", "~/.cache/tandem-helm")).expanduser()
NAMESPACE = "tandem-system"
VALUES: Json = {"scope": "Cluster"}
OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart")
"""Labels that say what would not be so."""

HEAD = f"""\
# Tandem's operator for the whole cluster, in namespace {NAMESPACE}, without Helm:
#
#   kubectl apply --server-side -f charts/tandem/crds/ && kubectl apply -f charts/install.yaml
#
# Written by tools/charts/install_manifest.py from charts/tandem. docs/install.md tells more.
"""


def install_manifest() -> str:
    """The file's text."""
    request = {
        "do": "render",
        "chart": str(ROOT / "charts" / "tandem"),
        "release": "tandem",
        "namespace": NAMESPACE,
        "values": VALUES,
        "kube": "1.36.0",
        "without": [],
    }
    command = [str(HELM_HOME / "python"), str(ROOT / "tools" / "helm" / "helm.py")]
    done = subprocess.run(command, input=json.dumps(request), text=True, check=True, stdout=subprocess.PIPE)
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise SystemExit(answer["error"])
    rendered = yaml.safe_load_all(answer["ok"]["manifest"])
    return HEAD + to_yaml((_namespace(), *_without_helm(rendered)))


def _namespace() -> Json:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}


def _without_helm(manifests: Iterator[Json]) -> Iterator[Json]:
    for manifest in manifests:
        for part in (manifest, manifest.get("spec", {}).get("template")):
            if part is not None:
                for label in OF_HELM:
                    part["metadata"]["labels"].pop(label)
        yield manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", type=Path, default=TARGET)
    target = parser.parse_args().target
    target.write_text(install_manifest(), "utf-8")
    print(target)


if __name__ == "__main__":
    main()
