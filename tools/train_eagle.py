"""Trains a draft head for `--speculative-algorithm EAGLE`, by default that of the bundled model.

Life of a run
    1. outputs    the model continues documents of `tools/corpus`, greedily and at a temperature: what it is
                  going to say is what the head must guess, more than what the documents say
    2. head       its block starts as the model's last one; the fusing matrix starts by passing the state on
    3. steps      rows of outputs and documents in turn. The model computes hidden states, the head drafts the
                  next from each, then from its own drafts, as it will when it drafts several tokens
    4. export     bfloat16 safetensors and config.json, built beside --out and renamed into its place

The loss of a guess is the cross entropy of its token distribution against the model's, and its distance from
the model's hidden state. The text source is that of the bundled model; a head for another model needs text
of its own kind.

    nice python tools/train_eagle.py --minutes 5
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from corpus.mixture import documents
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from tandem_engine.engine import Engine
from tandem_engine.engine.loaded_model import load
from tandem_engine.messages.requests import GenerateRequest
from tandem_engine.messages.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
LENGTH, ROWS = 256, 8
PROMPT, OUTPUT = 32, 224
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
GUESS_WEIGHTS = (1.0, 0.7, 0.5)
"""Of the guess after the model's own state, after one guess, after two."""
STATE_WEIGHT = 0.2
"""Of the distance between hidden states, beside the cross entropy of tokens."""
HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line decides."""

    model: Path
    out: Path
    minutes: float
    steps: int
    outputs: int
    seed: int
    threads: int
    rate: float


class Head(nn.Module):
    """What `speculative.eagle` runs, with gradients."""

    def __init__(self, target: PreTrainedModel) -> None:
        super().__init__()
        base = target.model
        size = target.config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([deepcopy(base.layers[-1])])
        self.norm = deepcopy(base.norm)
        self.layers[0].self_attn.layer_idx = 0
        nn.init.zeros_(self.fc.weight)
        with torch.no_grad():
            self.fc.weight[:, :size].copy_(torch.eye(size))
            self.fc.weight[:, size:].copy_(torch.eye(size) * 0.1)

    def forward(self, embedded: Tensor, before: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """[rows, length, size] each: embeddings, and the state before each token, to guessed states."""
        hidden = self.fc(torch.cat((embedded, before), dim=-1))
        hidden = self.layers[0](hidden, attention_mask=mask, position_embeddings=rotation)
        return self.norm(hidden[0] if isinstance(hidden, tuple) else hidden)


@dataclass(slots=True)
class Targets:
    """What the frozen model makes of some rows."""

    embedded: Tensor
    states: Tensor
    rotation: tuple[Tensor, Tensor]
    mask: Tensor

    @staticmethod
    @torch.no_grad()
    def of(target: PreTrainedModel, ids: Tensor) -> "Targets":
        base = target.model
        length = ids.shape[1]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        embedded = base.embed_tokens(ids)
        return Targets(
            embedded=embedded,
            states=base(input_ids=ids, use_cache=False).last_hidden_state,
            rotation=base.rotary_emb(embedded, torch.arange(length)[None]),
            mask=mask,
        )


def shifted(states: Tensor) -> Tensor:
    """The state before each token: none before the first."""
    return nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]


def drafts(head: Head, targets: Targets, depth: int) -> Iterator[Tensor]:
    """States drafted from the model's, then from drafts, then from drafts of drafts."""
    before = shifted(targets.states)
    for _ in range(depth):
        states = head(targets.embedded, before, targets.rotation, targets.mask)
        yield states
        before = shifted(states)


def loss_of(head: Head, target: PreTrainedModel, ids: Tensor) -> Tensor:
    """Weighted over depths of guessing, in nats per token."""
    with torch.autocast("cpu", torch.bfloat16):
        return _loss_of(head, target, ids)


def _loss_of(head: Head, target: PreTrainedModel, ids: Tensor) -> Tensor:
    targets = Targets.of(target, ids)
    with torch.no_grad():
        wanted = target.lm_head(targets.states).float().softmax(dim=-1)
    total = torch.zeros(())
    for weight, states in zip(GUESS_WEIGHTS, drafts(head, targets, len(GUESS_WEIGHTS)), strict=True):
        logprobs = target.lm_head(states).float().log_softmax(dim=-1)
        entropy = -(wanted * logprobs).sum(dim=-1).mean()
        distance = nn.functional.smooth_l1_loss(states.float(), targets.states.float())
        total = total + weight * (entropy + STATE_WEIGHT * distance)
    return total / sum(GUESS_WEIGHTS)


@torch.no_grad()
def agreement(head: Head, target: PreTrainedModel, rows: list[Tensor]) -> list[float]:
    """Share of positions where the head's greedy token is the model's, by depth of guessing."""
    agreed = torch.zeros(len(GUESS_WEIGHTS))
    for ids in rows:
        targets = Targets.of(target, ids)
        wanted = target.lm_head(targets.states).argmax(dim=-1)
        for depth, states in enumerate(drafts(head, targets, len(GUESS_WEIGHTS))):
            agreed[depth] += (target.lm_head(states).argmax(dim=-1) == wanted).float().mean()
    return (agreed / len(rows)).tolist()


def own_outputs(options: Options, tokenizer: Tokenizer, seed: int, count: int) -> list[list[int]]:
    """Beginnings of documents, continued by the model."""
    starts = (tokenizer.encode(text).ids[:PROMPT] for text in documents(seed))
    prompts = list(islice((ids for ids in starts if len(ids) >= 4), count))
    config = EngineConfig(
        model_path=str(options.model),
        dtype="float32",
        threads=options.threads,
        context_length=PROMPT + OUTPUT + 1,
        cache=CacheConfig(num_pages=2 + 64 * (PROMPT + OUTPUT + 32) // 16),
        scheduler=SchedulerConfig(max_running_requests=64, max_queued_requests=count),
    )
    requests = [
        GenerateRequest(
            rid=str(index),
            input_ids=tuple(ids),
            sampling=SamplingParams(
                max_tokens=OUTPUT, temperature=TEMPERATURES[index % len(TEMPERATURES)], seed=seed + index
            ),
        )
        for index, ids in enumerate(prompts)
    ]
    loaded = load(config, progress=False)
    with Engine.build(loaded, loaded.config) as engine:
        outputs = engine.generate(requests)
    return [[*ids, *output.token_ids] for ids, output in zip(prompts, outputs, strict=True)]


def packed(texts: Iterator[list[int]]) -> Iterator[Tensor]:
    """Texts end to end as [ROWS, LENGTH] batches."""
    buffer: list[int] = []
    for text in texts:
        buffer += text
        while len(buffer) >= LENGTH * ROWS:
            yield torch.tensor(buffer[: LENGTH * ROWS]).view(ROWS, LENGTH)
            del buffer[: LENGTH * ROWS]


def endless(texts: list[list[int]], seed: int) -> Iterator[list[int]]:
    """The same texts again and again, each time in another order."""
    dice = random.Random(seed)
    while True:
        yield from dice.sample(texts, len(texts))


def batches(options: Options, tokenizer: Tokenizer, outputs: list[list[int]]) -> Iterator[Tensor]:
    """Two batches of the model's outputs, then one of documents."""
    generated = packed(endless(outputs, options.seed))
    written = packed(tokenizer.encode(text).ids for text in documents(options.seed + 1))
    while True:
        yield from islice(generated, 2)
        yield from islice(written, 1)


def optimizers(head: Head, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it needs fewer steps."""
    matrices = [parameter for parameter in head.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in head.parameters() if parameter.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(options: Options, head: Head, target: PreTrainedModel, source: Iterator[Tensor]) -> int:
    """Returns the number of steps: as many as the time allows, at most --steps."""
    parts = optimizers(head, options.rate)
    began, step, done = time.monotonic(), 0, 0.0
    bar = tqdm(total=100, unit="%", mininterval=5)
    while done < 1.0:
        for part in parts:
            for group in part.param_groups:
                group["lr"] = options.rate * min(1.0, (step + 1) / 10, (1.0 - done) / 0.8)
        loss = loss_of(head, target, next(source))
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for part in parts:
            part.step()
            part.zero_grad()
        step += 1
        done = min(1.0, max(step / options.steps, (time.monotonic() - began) / 60 / options.minutes))
        bar.update(round(100 * done) - bar.n)
        bar.set_postfix(step=step, loss=f"{loss.item():.3f}")
    bar.close()
    return step


def export(head: Head, target: PreTrainedModel, out: Path) -> None:
    """Write a whole new directory, carry the card over, and swap it in."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    for stale in (new, old):
        shutil.rmtree(stale, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {
        name if name.startswith("fc.") else f"model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    (new / "model.safetensors").chmod(0o644)
    config = target.config.to_dict()
    config.pop("_name_or_path", None)  # where the model was on this machine
    config |= {"num_hidden_layers": 1, "architectures": [type(target).__name__], "dtype": "bfloat16"}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:1]
    (new / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if (out / "README.md").exists():
        shutil.copy(out / "README.md", new / "README.md")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def parse(argv: list[str] | None) -> Options:
    """The command line."""
    models = ROOT / "models"
    parser = argparse.ArgumentParser(description="Train a draft head on a model's own outputs.")
    parser.add_argument("--model", type=Path, default=models / "tandem-mini", help="the model to draft for")
    parser.add_argument("--out", type=Path, default=models / "tandem-mini-eagle", help="where the head goes")
    parser.add_argument("--minutes", type=float, default=5.0, help="time for steps; the learning rate follows it")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps of 2048 tokens, at most")
    parser.add_argument("--outputs", type=int, default=384, help="outputs that the model writes to learn from")
    parser.add_argument("--seed", type=int, default=1, help="documents and their order")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    return Options(**vars(parser.parse_args(argv)))


def main(argv: list[str] | None = None) -> None:
    """Outputs, steps, export, report."""
    options = parse(argv)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    outputs = own_outputs(options, tokenizer, options.seed, options.outputs)
    held_out = own_outputs(options, tokenizer, HELD_OUT_SEED, max(32, options.outputs // 8))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    target = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager")
    target.eval().requires_grad_(False)
    head = Head(target).requires_grad_(True)
    steps = train(options, head, target, batches(options, tokenizer, outputs))
    export(head, target, options.out)
    shares = agreement(head, target, [*packed(iter(held_out))])
    report = {
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "steps": steps,
        "tokens": steps * LENGTH * ROWS,
        "held_out_agreement_by_depth": [round(share, 4) for share in shares],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
