"""Trains the bundled model, `models/tandem-mini`, from the synthetic text of `tools/corpus`.

Life of a run
    1. tokenizer   byte-level BPE learned from the first documents, or the one already in --out
    2. weights     random, or those of --start-from
    3. steps       packed documents, Muon for the matrices and AdamW for the rest, bfloat16 autocast
    4. checkpoint  every few minutes under --work; --resume continues from it. The weights so far are exported
    5. export      bfloat16 Hugging Face layout, built beside --out and renamed into its place

With --steps alone the result depends on the seed only. With --minutes the learning rate follows
the clock as well, so the number of steps depends on the machine.

    python tools/train_mini.py --minutes 35
    python tools/train_mini.py --minutes 20 --rate 1.2e-3 --seed 2 --start-from models/tandem-mini
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
from corpus.mixture import END_OF_TEXT, TURN_END, TURN_START, documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 3072
POSITIONS = 4096
TOKENIZER_DOCUMENTS = 12_000
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
# The Qwen2/3 expression, so that tools which know the family split text alike.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Content may be a string, a list of text parts, or null beside tool calls. Tools and calls are written as Hermes does.
CHAT_TEMPLATE = (
    "{% macro text(content) %}{% if content is string %}{{ content }}"
    "{% elif content %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ text(messages[0]['content']) }}\n\n{% endif %}"
    "You may call these tools:\n<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'To call one, write\n<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{{ text(message['content']) }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": {{ call['function']['name'] | tojson }}, \"arguments\": "
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One optimizer step reads 2048 tokens in one of these (length, rows). Most text is short, and attention is
# dear on a CPU; the rare long rows teach far positions. The cycle is fixed: a step number names its shape.
SHORT, MIDDLE, LONG = (256, 8), (512, 4), (2048, 1)
SHAPE_CYCLE = (*(SHORT, SHORT, SHORT, MIDDLE) * 3, SHORT, SHORT, SHORT, LONG)
TOKENS_PER_STEP = 2048
SHARD_SIZE = "5MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line decides."""

    out: Path
    work: Path
    start_from: Path | None
    steps: int
    minutes: float | None
    seed: int
    threads: int
    rate: float
    checkpoint_minutes: float
    resume: bool
    compiled: bool


@dataclass(slots=True)
class Progress:
    """How far the run is. `fraction` drives the learning rate."""

    options: Options
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    seconds_before: float = 0.0

    def seconds(self) -> float:
        """Training time, earlier runs of a resumed training included."""
        return self.seconds_before + time.monotonic() - self.started

    def fraction(self) -> float:
        """Steps or minutes, whichever is further."""
        by_clock = self.seconds() / 60 / self.options.minutes if self.options.minutes else 0.0
        return min(1.0, max(self.step / self.options.steps, by_clock))


def train_tokenizer(seed: int) -> Tokenizer:
    """All 256 bytes are in the alphabet, so any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(islice(documents(seed), TOKENIZER_DOCUMENTS), trainer)
    return tokenizer


def load_or_train_tokenizer(options: Options) -> Tokenizer:
    """A tokenizer in --out is kept: a retrained model must stay usable by users of the old one."""
    path = options.out / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else train_tokenizer(options.seed)


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    """4.3 million parameters; head size 64 and 256-wide rows suit every kernel and quantized format."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )


def initial_model(options: Options, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """Fresh weights, or an earlier model to continue from, with float32 as the training precision."""
    if options.start_from:
        return Qwen3ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
    return Qwen3ForCausalLM(model_config(tokenizer))


@dataclass(slots=True)
class Batches:
    """Documents packed end to end; a row may begin and end inside a document."""

    tokenizer: Tokenizer
    source: Iterator[str]
    buffer: list[int] = field(default_factory=list)

    def take(self, length: int, rows: int) -> Tensor:
        """[rows, length] token ids."""
        wanted = length * rows
        while len(self.buffer) < wanted:
            for encoded in self.tokenizer.encode_batch(list(islice(self.source, 32))):
                self.buffer += encoded.ids
        taken, self.buffer = self.buffer[:wanted], self.buffer[wanted:]
        return torch.tensor(taken).view(rows, length)


def shape_of(step: int) -> tuple[int, int]:
    """Length and rows of a step."""
    return SHAPE_CYCLE[step % len(SHAPE_CYCLE)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token loss in nats."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def optimizers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices: it needs fewer steps. Embeddings and norms are not matrices in its sense."""
    named = dict(model.named_parameters())
    matrices = [parameter for name, parameter in named.items() if "proj" in name]
    others = [parameter for name, parameter in named.items() if "proj" not in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, fraction: float) -> float:
    """Short warm-up, constant, then linear to zero over the last 80 %."""
    return min(1.0, (step + 1) / 20, (1.0 - fraction) / 0.8)


@torch.no_grad()
def held_out_loss(model: nn.Module, tokenizer: Tokenizer, seed: int) -> float:
    """On documents of another seed; templates are shared with training, the fillings are not."""
    batches = Batches(tokenizer, documents(seed + 1_000_003))
    return sum(float(loss_of(model, batches.take(*MIDDLE))) for _ in range(24)) / 24


def save_checkpoint(path: Path, model: nn.Module, parts: list[torch.optim.Optimizer], progress: Progress) -> None:
    """Written beside and renamed, so that a kill never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [part.state_dict() for part in parts],
        "step": progress.step,
        "seconds": progress.seconds(),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def restore(
    path: Path, model: nn.Module, parts: list[torch.optim.Optimizer], progress: Progress, batches: Batches
) -> None:
    """Continue a run; batches already seen are drawn again and dropped."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for part, saved in zip(parts, state["optimizers"], strict=True):
        part.load_state_dict(saved)
    progress.step, progress.seconds_before = state["step"], state["seconds"]
    for step in range(progress.step):
        batches.take(*shape_of(step))


def train(options: Options, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> Progress:
    """The loop. Every decision that is not the clock's follows from the step number and the seed."""
    loss = torch.compile(loss_of, dynamic=False) if options.compiled else loss_of
    parts = optimizers(model, options.rate)
    batches = Batches(tokenizer, documents(options.seed))
    progress = Progress(options)
    checkpoint = options.work / "checkpoint.pt"
    if options.resume and checkpoint.exists():
        restore(checkpoint, model, parts, progress, batches)
    saved_at = progress.seconds()
    bar = tqdm(total=options.steps, initial=progress.step, unit="step", mininterval=5)
    while (fraction := progress.fraction()) < 1.0:
        for part in parts:
            for group in part.param_groups:
                group["lr"] = options.rate * rate_factor(progress.step, fraction)
        value = loss(model, batches.take(*shape_of(progress.step)))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in parts:
            part.step()
            part.zero_grad()
        progress.step += 1
        bar.update()
        bar.set_postfix(loss=f"{value.item():.3f}", done=f"{fraction:.0%}")
        if progress.seconds() - saved_at > 60 * options.checkpoint_minutes:
            saved_at = progress.seconds()
            save_checkpoint(checkpoint, model, parts, progress)
            export(model, tokenizer, options.out)
            measured = held_out_loss(model, tokenizer, options.seed)
            bar.write(f"step {progress.step}: held-out loss {measured:.4f}")
    bar.close()
    save_checkpoint(checkpoint, model, parts, progress)
    return progress


def tokenizer_config() -> dict[str, object]:
    """What `transformers` and Tandem read beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [TURN_START],
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def export(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write a whole new directory, carry the model card over, and swap it in."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    for stale in (new, old):
        shutil.rmtree(stale, ignore_errors=True)
    model = deepcopy(model).to(torch.bfloat16)
    model.generation_config.eos_token_id = [
        tokenizer.token_to_id(TURN_END),
        tokenizer.token_to_id(END_OF_TEXT),
    ]
    model.generation_config.pad_token_id = tokenizer.token_to_id(END_OF_TEXT)
    model.save_pretrained(new, max_shard_size=SHARD_SIZE)
    for shard in new.glob("*.safetensors"):
        shard.chmod(0o644)  # safetensors writes 0600, which another user's container could not read
    tokenizer.save(str(new / "tokenizer.json"))
    (new / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    if (out / "README.md").exists():
        shutil.copy(out / "README.md", new / "README.md")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def parse() -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the bundled model from synthetic text.")
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "tandem-mini", help="where the model goes")
    parser.add_argument("--work", type=Path, default=ROOT / ".tandem" / "train-mini", help="checkpoints and the log")
    parser.add_argument("--start-from", type=Path, default=None, help="continue from the weights of this model")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of 2048 tokens, at most")
    parser.add_argument("--minutes", type=float, default=None, help="time budget; the learning rate follows it")
    parser.add_argument(
        "--seed", type=int, default=1, help="documents and initial weights; another seed to continue with new documents"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0, help="time between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint under --work")
    parser.add_argument("--eager", dest="compiled", action="store_false", help="do not compile the step")
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Train, report, export."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = load_or_train_tokenizer(options)
    model = initial_model(options, tokenizer)
    progress = train(options, model, tokenizer)
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": tokenizer.get_vocab_size(),
        "steps": progress.step,
        "tokens": progress.step * TOKENS_PER_STEP,
        "minutes": round(progress.seconds() / 60, 1),
        "held_out_loss": round(held_out_loss(model, tokenizer, options.seed), 4),
        "options": {name: str(value) for name, value in asdict(options).items()},
    }
    export(model, tokenizer, options.out)
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
