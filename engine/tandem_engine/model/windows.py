"""Which layers see only the newest tokens, in the spellings of config.json.

A window that is no shorter than the context never binds and is left out, so that such a layer costs what any
other costs.
"""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.rope_fields import MAX_POSITION

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, ...]
"""Of each layer; () when none of them binds."""


def read_window(fields: ConfigFields, *, context: int, default: int | None) -> int | None:
    """`sliding_window`. Absent means `default`, null that there is none, as in transformers."""
    window = fields.optional_integer("sliding_window", least=1, most=MAX_POSITION, default=default)
    return None if window is None or window >= context else window


def in_all_layers(window: int | None, *, num_layers: int) -> Windows:
    return () if window is None else (window,) * num_layers


def in_sliding_layers(window: int | None, kinds: tuple[str, ...]) -> Windows:
    """In the layers of kind `sliding_attention`."""
    if window is None or SLIDING not in kinds:
        return ()
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_layer_kinds(fields: ConfigFields, *, default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one per layer; absent means `default`.

    Raises:
        CheckpointError: a kind is neither full nor sliding attention, or their number is not that of the layers.
    """
    kinds = fields.items("layer_types")
    if not kinds:
        return default
    if not all(kind in (FULL, SLIDING) for kind in kinds):
        fields.refuse("layer_types", f"may name only {FULL} and {SLIDING}")
    if len(kinds) != len(default):
        fields.refuse("layer_types", f"must name a kind for each of the {len(default)} layers and names {len(kinds)}")
    return tuple(str(kind) for kind in kinds)


def qwen_windows(fields: ConfigFields, *, num_layers: int, context: int) -> Windows:
    """Off unless `use_sliding_window`; then in the layers that `layer_types` names, or from `max_window_layers` on."""
    first = fields.integer("max_window_layers", least=0, most=1 << 20, default=28)
    default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    kinds = read_layer_kinds(fields, default=default)
    if not fields.flag("use_sliding_window", default=False):
        return ()
    return in_sliding_layers(read_window(fields, context=context, default=4096), kinds)
