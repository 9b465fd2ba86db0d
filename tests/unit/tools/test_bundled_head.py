"""The bundled draft head fits the bundled model, guesses well, and can be trained by the script that is named."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem_engine.config import CacheConfig, EngineConfig, SpecAlgorithm, SpecConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams
from tandem_engine.model.checkpoint import read_model_config
from tandem_engine.speculative.eagle import read_head_config

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "tandem-mini"
HEAD = ROOT / "models" / "tandem-mini-eagle"


def test_bundled_head_drafts_over_one_accepted_token_per_step():
    config = EngineConfig(
        model_path=str(MODEL),
        dtype="float32",
        threads=1,
        cache=CacheConfig(num_pages=100),
        speculative=SpecConfig(
            algorithm=SpecAlgorithm.EAGLE, draft_model_path=str(HEAD), num_draft_tokens=3, adaptive=False
        ),
    )
    loaded = load(config, progress=False)
    prompt = tuple(loaded.text.encode("Once upon a time, in a village by the sea,"))
    request = GenerateRequest(rid="r", input_ids=prompt, sampling=SamplingParams(max_tokens=60, temperature=0.0))
    with Engine.build(loaded, loaded.config) as engine:
        engine.generate([request])
        stats = engine.stats().speculation
    assert stats.accepted_total >= stats.runs_total > 0


@pytest.fixture
def train_eagle(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("train_eagle", ROOT / "tools" / "train_eagle.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_eagle", module)
    spec.loader.exec_module(module)
    return module


def test_script_writes_a_head_that_can_be_loaded(train_eagle, tmp_path):
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    target.eval().requires_grad_(False)
    head = train_eagle.Head(target).requires_grad_(True)
    ids = torch.randint(3072, (1, 24), generator=torch.Generator().manual_seed(0))
    before = train_eagle.loss_of(head, target, ids).item()
    for part in train_eagle.optimizers(head, 3e-3):
        for _ in range(3):
            train_eagle.loss_of(head, target, ids).backward()
            part.step()
            part.zero_grad()
    assert train_eagle.loss_of(head, target, ids).item() < before
    train_eagle.export(head, target, tmp_path / "head")
    config = read_head_config(str(tmp_path / "head"), read_model_config(MODEL))
    assert config.num_layers == 1
