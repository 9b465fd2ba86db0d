"""The list of kernels that an engine calls: it follows from the configuration, and lacks nothing."""

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("numba")

from tandem_engine.config import Activation, EngineConfig, LatentConfig, ModelConfig, ParallelConfig, Role
from tandem_engine.config.flags import add_engine_flags, engine_config
from tandem_engine.engine.kernel_plan import kernel_plan
from tandem_engine.kernels.cpu.kept import kept_by, store
from tandem_services.cli.flags import bundled_model
from tandem_testing.import_blocker import write_import_blocker
from tandem_testing.random_weights import small_config

STEPS = ["_cut_queries", "_find_in_blocks", "_group_tasks", "store"]
TRANSFERS = ["_full_digests", "_merge_runs", "_sampled_digests"]
ATTENTION = ["build_block_kernel", "build_paged_kernel", "build_product_kernel"]
ROWS = ["build_gate_kernel", "build_norm_kernel", "build_place_kernel"]
FUSED = ["build_step_kernel"]


def config_of(*flags: str, model: str = "model") -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    args = parser.parse_args(["--dtype", "float32", *flags])
    args.model, args.role = model, Role.BOTH.value
    return engine_config(args)


def functions(config: EngineConfig, facts: ModelConfig) -> tuple[list[str], list[str]]:
    """Of the step, and others."""
    plan = kernel_plan(config, facts)
    assert len(set(plan.all)) == len(plan.all)
    for spec in plan.all:
        if spec.types is not None:
            assert len(spec.types) == len(inspect.signature(kept_by(spec).py_func).parameters), spec.name
    step, others = ([spec.function.partition(":")[2] for spec in part] for part in plan)
    return step, sorted(others)


@pytest.mark.parametrize(
    ("flags", "fields", "step", "others"),
    [
        ((), {}, FUSED, [*STEPS, *TRANSFERS, *ATTENTION, *ROWS]),
        (("--dtype", "bfloat16"), {}, FUSED, [*STEPS, *TRANSFERS, *ATTENTION, *ROWS]),
        (("--transport", "none"), {}, FUSED, [*STEPS, *ATTENTION, *ROWS]),
        ((), {"activation": Activation.GELU_TANH}, [], [*STEPS, *TRANSFERS, *ATTENTION]),
        ((), {"quantization": "held int8"}, [], [*STEPS, *TRANSFERS, *ATTENTION, "build_product_kernel"]),
        ((), {"quantization": "Int4(group_size=64)"}, FUSED, [*STEPS, *TRANSFERS, *ATTENTION, *ROWS]),
        ((), {"windows": (None, 8)}, [], [*STEPS, *TRANSFERS, *ATTENTION]),
        (("--lora-modules", "sql=folder"), {}, 2 * FUSED, [*STEPS, *TRANSFERS, *ATTENTION, *ROWS]),
        (("--allow-runtime-lora-updating",), {}, 2 * FUSED, [*STEPS, *TRANSFERS, *ATTENTION, *ROWS]),
    ],
    ids=[
        "plain",
        "bfloat16",
        "without transfers",
        "another activation",
        "int8",
        "unpacked",
        "two kinds of attention",
        "adapters",
        "adapters later",
    ],
)
def test_kernel_plan_has_kernels_that_model_calls(flags, fields, step, others):
    assert functions(config_of(*flags), small_config(**fields)) == (step, sorted(others))


def test_kernel_plan_of_several_ranks_has_no_fused_steps():
    config = replace(config_of(), parallel=ParallelConfig(tp_size=2))
    facts = small_config(num_heads=8, num_kv_heads=2)
    assert functions(config, facts) == ([], sorted([*STEPS, *TRANSFERS, *ATTENTION]))
    (paged,) = [spec for spec in kernel_plan(config, facts).all if "paged" in spec.function]
    assert dict(paged.arguments or ())["group"] == 4


def test_plan_of_latents_has_no_attention():
    latent = LatentConfig(query_rank=None, rank=24, plain_size=16, rotated_size=8, value_size=16, interleaved=True)
    facts = small_config(latent=latent, num_kv_heads=1, head_dim=latent.width)
    expected = sorted(["_find_in_blocks", "build_product_kernel", *TRANSFERS])
    assert functions(config_of(), facts) == ([], expected)


def test_plan_follows_the_numbers_of_pages_and_caps():
    plan = kernel_plan(config_of("--kv-cache-dtype", "fp8_e4m3"), small_config(attention_soft_cap=30.0)).all
    arguments = {spec.function.partition(":")[2]: dict(spec.arguments or ()) for spec in plan}
    assert arguments["build_block_kernel"] == {"pages_dtype": "uint8"}
    assert arguments["build_paged_kernel"]["capped"] is True
    assert arguments["build_product_kernel"] == {"dtype": "float32", "int8": False}


def test_plan_of_a_gpu_is_empty():
    assert kernel_plan(replace(config_of(), device="cuda"), small_config()).all == ()


COMPILER = """
import importlib, sys
import tandem_engine.kernels.cpu.build, tandem_engine.kernels.cpu.kept

for module in sys.argv[1:]:
    importlib.import_module(module)
print(sorted({"torch", "scipy", "transformers"} & {*sys.modules}))
"""


def test_builders_of_a_plan_import_no_torch(tmp_path):
    """It would take each of them as long as a kernel."""
    plan = kernel_plan(config_of(), small_config()).all
    modules = sorted({spec.function.partition(":")[0] for spec in plan})
    path = os.pathsep.join([str(write_import_blocker(tmp_path / "site", "torch")), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", COMPILER, *modules]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


VERIFY = """
import json
import sys

from numba.core import event
from tandem_services.cli.main import main

with event.install_recorder("numba:compile") as compiles:
    status = main(["verify", "--quick"])
names = [recorded.data["dispatcher"].py_func.__qualname__ for _, recorded in compiles.buffer if recorded.is_start]
print("\\n" + json.dumps([status, names]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiles the first time
def test_requests_of_every_kind_compile_nothing(tmp_path):
    """With the kernels of the plan, and no others: what it lacked would be compiled while requests wait."""
    model = str(bundled_model())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    build = [sys.executable, "-m", "tandem_services.cli.main", "kernels", "build"]
    subprocess.run(build, env=environment, check=True)
    config = config_of(model=model)
    from tandem_engine.engine.loaded_model import require_loadable

    cache = tmp_path / "kernels"
    cache.mkdir(mode=0o755)
    for spec in kernel_plan(config, require_loadable(config)).all:
        shutil.copy(file_of(kept_by(spec).keys(spec)), cache)
    environment["TANDEM_CACHE_DIR"] = str(tmp_path)
    listed = subprocess.run(
        [*build[:-1], "list", "--missing"], env=environment, capture_output=True, text=True, check=False
    )
    assert (listed.returncode, listed.stdout) == (0, ""), listed.stderr
    before = {path.name for path in cache.iterdir()}
    verified = subprocess.run(
        [sys.executable, "-c", VERIFY], env=environment, capture_output=True, text=True, check=False
    )
    status, compiled = json.loads(verified.stdout.splitlines()[-1])
    assert (status, compiled) == (0, []), verified.stderr
    assert {path.name for path in cache.iterdir() if path.is_file()} == before


def file_of(keys) -> Path:
    (found, *_) = [store().own / key.file_name for key in keys if (store().own / key.file_name).exists()]
    return found
