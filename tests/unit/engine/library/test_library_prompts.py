"""Special tokens in prompts of the library."""

import pytest

from tandem_engine.library.prompts import encode_prompts
from tandem_engine.tokenizer.text_tokenizer import TextTokenizer
from tandem_testing.tokenizer_builders import EOS, write_tokenizer


@pytest.mark.parametrize("parse", [True, False])
@pytest.mark.parametrize("prompts", ["a<|im_end|>", ["a<|im_end|>"], {"prompt": "a<|im_end|>"}])
def test_library_prompts_parse_special_tokens_by_default(tmp_path, prompts, parse):
    tokenizer = TextTokenizer.load(write_tokenizer(tmp_path))
    default = encode_prompts(prompts, tokenizer)
    [encoded] = encode_prompts(prompts, tokenizer, parse_special_tokens=parse)
    assert (EOS in encoded.token_ids) == parse
    assert EOS in default[0].token_ids
