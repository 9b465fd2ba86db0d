"""The models that all engines serve: random weights from a seed, a tokenizer of Python's own sources, no downloads.

    q25m-float32/  q25m-bfloat16/ …     checkpoints as transformers writes them, the same weights rounded to the dtype
    q25m-float32.gguf …                 llama.cpp's copy, by its own converter

`python -m peers.checkpoints q25m HOME` makes one size in both dtypes.
"""

import argparse
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from peers.engines.base import python_path
from peers.home import llama_source
from peers.install.steps import command
from peers.jobs import VOCABULARY
from peers.shapes import BYTES, SHAPES

CONTEXT = 8192
CORPUS_BYTES = 6 << 20
# Qwen's way to split text, for which llama.cpp has a name.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The converter knows tokenizers by a hash and refuses others; ours splits as Qwen2's does. It looks for a sentencepiece
# file first, with a library that need not be there.
_CONVERT = """\
import runpy, sys
from pathlib import Path
source, checkpoint, kind, target = sys.argv[1:]
sys.path[:0] = [source, str(Path(source, "gguf-py"))]
from conversion import base
def no_sentencepiece(self):
    raise FileNotFoundError
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
base.TextModel._set_vocab_sentencepiece = no_sentencepiece
sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outtype", kind, "--outfile", target]
runpy.run_path(str(Path(source, "convert_hf_to_gguf.py")), run_name="__main__")
"""
GGUF_KINDS = {"float32": "f32", "bfloat16": "bf16"}


def checkpoint_of(home: Path, model: str, dtype: str) -> Path:
    return home / "models" / f"{model}-{dtype}"


def gguf_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.gguf")


def make_checkpoints(home: Path, models: list[str]) -> None:
    """Make what is missing. Raises `NotInstalledError`."""
    for model in models:
        if not all((checkpoint_of(home, model, dtype) / "done").is_file() for dtype in BYTES):
            argv = ["env", *(f"{name}={value}" for name, value in python_path().items()), sys.executable]
            argv += ["-m", "peers.checkpoints", model, str(home)]
            command(argv, title=f"weights of {model}", log=home / "logs" / f"weights-{model}.log")


def make_gguf(home: Path, model: str, dtype: str) -> None:
    """llama.cpp's copy of a checkpoint. Raises `NotInstalledError`."""
    checkpoint = checkpoint_of(home, model, dtype)
    convert_to_gguf(home, checkpoint, gguf_of(checkpoint), dtype)


def convert_to_gguf(home: Path, checkpoint: Path, target: Path, dtype: str) -> None:
    """By llama.cpp's own converter, unless `target` is there. Raises `NotInstalledError`."""
    if target.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    argv = [sys.executable, "-c", _CONVERT, llama_source(home), checkpoint, GGUF_KINDS[dtype], partial]
    command(argv, title=f"{checkpoint.name} for llama.cpp", log=home / "logs" / f"gguf-{checkpoint.name}.log")
    partial.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make one size in both dtypes.")
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("home", type=Path)
    args = parser.parse_args()
    _make(args.model, args.home)


def _make(name: str, home: Path) -> None:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = None
    for dtype in BYTES:  # float32 first: bfloat16 is made of it
        target = checkpoint_of(home, name, dtype)
        model.to(getattr(torch, dtype))
        model.config.dtype = getattr(torch, dtype)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        (target / "done").touch()


def _tokenizer() -> "object":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the tokenizer came out with {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    return tokenizer


def _corpus() -> Iterator[str]:
    """Python's own sources: English words and code, on every machine that runs this."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or left <= 0:
            continue
        text = path.read_text("utf-8", "replace")
        left -= len(text)
        yield text


if __name__ == "__main__":
    main()
