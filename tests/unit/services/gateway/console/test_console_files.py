"""The page's files by themselves: scripts that parse, colors that can be read."""

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

NODE = shutil.which("node")
STATIC = files("tandem_services.gateway.console") / "static"
SCRIPTS = sorted(file.name for file in STATIC.iterdir() if file.name.endswith(".js"))

TEXTS = ("ink", "soft", "accent", "good", "warn", "bad")
GROUNDS = ("ground", "surface", "raised")


PARSE = """
import { readFileSync } from "node:fs";
import { SourceTextModule } from "node:vm";
for (const name of process.argv.slice(2)) new SourceTextModule(readFileSync(name, "utf8"), { identifier: name });
"""

CALCULATE = """
import assert from "node:assert/strict";
import * as format from "./format.js";
import { FleetHistory } from "./history.js";

assert.deepEqual([null, 0, 7, 9999, 12345, 2.5e9].map(format.count), ["–", "0", "7", "9999", "12.3 k", "2.50 G"]);
assert.deepEqual([null, 0, 0.0004, 0.0361, 1.5, 68, 600, 7200].map(format.seconds),
  ["–", "0 ms", "400 µs", "36.1 ms", "1.50 s", "68 s", "10 min", "2 h"]);
assert.deepEqual([null, 0, 0.004, 0.375, 1].map(format.percent), ["–", "0 %", "<1 %", "38 %", "100 %"]);
assert.deepEqual([0, 999, 1500, 1.2e9].map(format.bytes), ["0 B", "999 B", "1.50 kB", "1.20 GB"]);
assert.deepEqual(["w@1", "a@b@7", "", null].map(format.workerOf), ["w", "a@b", "–", "–"]);

const worker = (name, tokens) => ({
  worker_id: name, incarnation: `${name}@1`, state: "ready",
  figures: { prompt_tokens_total: 10 * tokens, cached_tokens_total: 6 * tokens, host_cached_tokens_total: tokens,
    disk_cached_tokens_total: 0, output_tokens_total: 0, transfers_total: 0, transfer_failures_total: 0,
    transfer_bytes_total: 100 * tokens, output_tokens_per_s: 1 },
});
const fleet = (time, ...workers) => ({ time, workers, gateway: { traffic: { accepted_total: 2 * time } } });
const history = new FleetHistory();
for (let time = 0; time < 300; time += 1) history.add(fleet(time, worker("a", time), worker("b", 0)));
assert.equal(history.add(fleet(299)), false);
assert.equal(history.perSecond("a@1", "transfer_bytes_total"), 100);
assert.equal(history.acceptedPerSecond(), 2);
assert.deepEqual(history.tiers(["a@1"]), { device: 0.5, host: 0.1, disk: 0, all: 0.6 });
assert.equal(history.tiers(["b@1"]), null);
assert.equal(history.tracks.get("a@1").samples.length, 120);

history.add(fleet(300, worker("a", 300)));
assert.deepEqual(history.lost().map((track) => track.worker.worker_id), ["b"]);
history.add(fleet(330, worker("a", 330), { ...worker("b", 0), incarnation: "b@2" }));
assert.deepEqual(history.lost(), []);
history.add(fleet(340, { ...worker("b", 0), incarnation: "b@2" }));
history.add(fleet(401, { ...worker("b", 0), incarnation: "b@2" }));
assert.deepEqual([...history.tracks.keys()], ["b@2"]);
"""

DESCRIBE = r"""
import assert from "node:assert/strict";
import { curlOf, exampleOf, fieldsOf, typeOf } from "./schemas.js";

const document = { components: { schemas: {
  Request: { type: "object", required: ["text", "count"], properties: {
    best: { anyOf: [{ type: "integer", minimum: 1, maximum: 128 }, { type: "null" }], default: null },
    text: { anyOf: [
      { type: "string", maxLength: 9 }, { type: "array", items: { $ref: "#/components/schemas/Part" } },
    ] },
    count: { type: "integer", minimum: 2, maximum: 2147483647, default: 7 },
    model: { type: "string" },
  } },
  Part: { type: "object", required: ["kind"], properties: { kind: { enum: ["a", "b"] } } },
} } };
const request = { $ref: "#/components/schemas/Request" };
const row = (one) => [one.name, one.type, one.required, one.fallback, one.parts];
assert.deepEqual(fieldsOf(document, request).map(row), [
  ["count", "integer, at least 2", true, "7", []],
  ["text", "string, at most 9 characters or list of Part", true, "", ["Part"]],
  ["best", "integer, 1 to 128", false, "", []],
  ["model", "string", false, "", []],
]);
assert.equal(typeOf({ type: "number", exclusiveMinimum: 0, maximum: 1 }), "number, above 0, at most 1");
assert.equal(typeOf({}), "any JSON");
assert.equal(typeOf({ type: "null" }), "null");
assert.deepEqual(exampleOf(document, "/other", request, "m"), { model: "m", text: "", count: 2 });
assert.deepEqual(exampleOf(document, "/other", { $ref: "#/components/schemas/Part" }, "m"), { kind: "a" });
const quote = String.raw`'\''`;
assert.equal(curlOf("http://h/v1/x", "post", JSON.stringify({ a: "it's" }), true),
  `curl 'http://h/v1/x' -H "Authorization: Bearer $TANDEM_API_KEY" ` +
  `-H 'Content-Type: application/json' -d '{"a":"it${quote}s"}'`);
assert.equal(curlOf("http://h/s", "delete", "", false), "curl -X DELETE 'http://h/s'");
"""


def run_node(program: str, folder: Path, *arguments: str) -> None:
    """Among the console's scripts, as modules. Fails with what node says."""
    assert NODE is not None
    for name in SCRIPTS:
        (folder / name).write_bytes((STATIC / name).read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "program.mjs").write_text(program)
    argv = [NODE, "--no-warnings", "--experimental-vm-modules", "program.mjs", *arguments]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


needs_node = pytest.mark.skipif(
    NODE is None,
    reason="NOT CHECKED: node is not installed, so the console's scripts are not parsed and calculated with",
)


@needs_node
def test_every_script_parses(tmp_path):
    run_node(PARSE, tmp_path, *SCRIPTS)


@needs_node
def test_rates_shares_and_numbers_are_right(tmp_path):
    run_node(CALCULATE, tmp_path)


@needs_node
def test_schemas_become_types_examples_and_commands(tmp_path):
    run_node(DESCRIBE, tmp_path)


def colors(sheet: str, scheme: int) -> dict[str, str]:
    """Custom properties of the light (0) or dark (1) scheme."""
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", sheet.split(":root {")[scheme + 1]))


def luminance(color: str) -> float:
    """WCAG's relative luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(scheme):
    palette = colors((STATIC / "console.css").read_text("utf-8"), scheme)
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
    pairs += [("ink", "warn-wash"), ("ink", "bad-wash"), ("accent-ink", "accent")]
    weak = {pair: round(contrast(palette[pair[0]], palette[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
