"""What pages and notes tell people to type: values that the charts have, files that are there, YAML that is right."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHARTS = ROOT / "charts"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "install.md",
    ROOT / "docs" / "upgrade-rollback.md",
    CHARTS / "tandem" / "README.md",
    CHARTS / "tandem-model" / "README.md",
    CHARTS / "tandem" / "templates" / "NOTES.txt",
    CHARTS / "tandem-model" / "templates" / "modelservice.yaml",
]
SCHEMAS = {name: json.loads((CHARTS / name / "values.schema.json").read_text()) for name in ("tandem", "tandem-model")}
SET = re.compile(r"--set '?([A-Za-z.]+)=")
VALUE = re.compile(r"`([a-z][A-Za-z]*(?:\.[a-z][A-Za-z]*)+)(?::[^`]*)?`")
"""In words: `metrics.monitor` or `gateway.service.type: LoadBalancer`."""
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
TYPED = re.compile(r"(?<![-\w./])(?:charts|examples)/[-\w./]*\w")
"""On a command line, in the repository's folder."""


def known(schema: dict[str, Any], path: str) -> bool:
    """Whether `a.b.c` is a value of this schema."""
    first, _, rest = path.partition(".")
    one = schema.get("properties", {}).get(first)
    return one is not None and (not rest or known(one, rest))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_chart_values_exist(page):
    for path in SET.findall(page.read_text()):
        assert any(known(schema, path) for schema in SCHEMAS.values()), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page):
    text = page.read_text()
    for path in LINK.findall(text):
        assert (page.parent / path).exists(), path
    for path in TYPED.findall(text):
        assert (ROOT / path).exists(), path


def test_values_named_in_prose_are_values_or_fields():
    """Of the spec or of its status; `spec.` is left out of half of them."""
    crd = next(iter(yaml.safe_load_all((CHARTS / "tandem" / "crds" / "tandem.dev.yaml").read_text())))
    resource = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for page in ("install.md", "upgrade-rollback.md"):
        for path in VALUE.findall((ROOT / "docs" / page).read_text()):
            if path.endswith((".md", ".py", ".txt", ".yaml", ".json")) or path.startswith("tandem.dev"):
                continue
            of_chart = any(known(schema, path) for schema in SCHEMAS.values())
            assert of_chart or known(resource, path.replace("[]", "")), f"{page}: {path}"


def test_yaml_of_the_models_readme_is_values():
    text = (CHARTS / "tandem-model" / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert list(jsonschema_rs.validator_for(SCHEMAS["tandem-model"]).iter_errors(yaml.safe_load(block))) == []
