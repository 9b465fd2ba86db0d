"""Gemma 2: norms on both sides of each block, capped scores and logits, every second layer with a window."""

from dataclasses import replace

from tandem_engine.config import ModelConfig
from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.decoder_fields import Defaults, read_decoder
from tandem_engine.model.families.gemma import GEMMA_FIELDS, as_gemma
from tandem_engine.model.family import Family
from tandem_engine.model.known_fields import decoder_fields
from tandem_engine.model.windows import FULL, SLIDING, in_sliding_layers, read_layer_kinds

DEFAULTS = Defaults(head_dim=256, num_kv_heads=4, tie_embeddings=True)
DEFAULT_WINDOW = 4096
DEFAULT_ATTENTION_CAP = 50.0
DEFAULT_LOGIT_CAP = 30.0
MAX_CAP = 1e6


def _read(fields: ConfigFields) -> ModelConfig:
    base = read_decoder(fields, family=GEMMA2.name, defaults=DEFAULTS)
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(base.num_layers))
    kinds = read_layer_kinds(fields, default=alternating)
    return replace(
        as_gemma(fields, base),
        windows=in_sliding_layers(fields, kinds, context=base.max_position, default=DEFAULT_WINDOW),
        attention_soft_cap=_cap(fields, "attn_logit_softcapping", default=DEFAULT_ATTENTION_CAP),
        logit_soft_cap=_cap(fields, "final_logit_softcapping", default=DEFAULT_LOGIT_CAP),
    )


def _cap(fields: ConfigFields, name: str, *, default: float) -> float | None:
    return fields.optional_number(name, least=1e-3, most=MAX_CAP, default=default)


GEMMA2 = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    fields=decoder_fields(*GEMMA_FIELDS, no_effect=("hidden_act",)),
    read=_read,
)
