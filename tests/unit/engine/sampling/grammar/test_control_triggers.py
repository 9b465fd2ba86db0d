"""Structural tags whose triggers are control tokens of any spelling, with llguidance as the backend."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tandem_engine.config import GrammarConfig
from tandem_engine.messages.grammar import GrammarKind, GrammarSpec
from tandem_engine.sampling.grammar.guidance.backend import GuidanceBackend
from tandem_engine.sampling.grammar.guidance.translate import GuidanceVocabulary

TOKENIZER = Path(__file__).resolve().parents[5] / "models" / "tandem-mini" / "tokenizer.json"
VOCAB, EOS = 3072, 2


@pytest.mark.parametrize("trigger", ["[TOOL_CALLS]", "<tool call>", "<|call>"])
@pytest.mark.parametrize("answer", [{}, {"answer": {"type": "integer"}}], ids=["text", "answer"])
def test_control_token_trigger_of_any_spelling_holds_the_call(tmp_path, trigger, answer):
    tokenizer, file = Tokenizer.from_file(str(TOKENIZER)), tmp_path / "tokenizer.json"
    tokenizer.add_special_tokens([trigger])
    tokenizer.save(str(file))
    vocabulary = GuidanceVocabulary(tokenizer_file=file, vocab_size=VOCAB + 1, eos_token_ids=(EOS,))
    tags = {"structures": [{"begin": f"{trigger}add", "schema": {"type": "integer"}}], "triggers": [trigger], **answer}
    call, digit, letter = (tokenizer.encode(text, add_special_tokens=False).ids for text in (f"{trigger}add", "1", "x"))
    backend = GuidanceBackend(vocabulary=vocabulary, config=GrammarConfig())
    try:
        matcher = backend.compile(GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, source=json.dumps(tags))).matcher()
        assert matcher.accept(call) == len(call)
        assert (matcher.accept(letter), matcher.accept(digit)) == (0, 1)
    finally:
        backend.close()
