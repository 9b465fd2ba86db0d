"""Windows, of layers that see only the newest tokens, have several spellings in config.json.

A window that is at least as long as the context has no effect and is left out, so that such a layer costs no more than
any other.
"""

from tandem_engine.model.config_fields import FULL, MAX_POSITION, SLIDING, ConfigFields

Windows = tuple[int | None, ...]
"""Of each layer; () when none of them binds."""


def read_window(fields: ConfigFields, *, context: int, default: int | None) -> int | None:
    """`sliding_window`. Absent means `default`, null that there is none, as in transformers."""
    window = stated_window(fields, default=default)
    return None if window is None or window >= context else window


def stated_window(fields: ConfigFields, *, default: int | None) -> int | None:
    """As `read_window`, whether it ever binds or not. 1 is refused: caches of transformers keep everything then."""
    return fields.optional_integer("sliding_window", least=2, most=MAX_POSITION, default=default)


def in_all_layers(window: int | None, *, num_layers: int) -> Windows:
    return () if window is None else (window,) * num_layers


def in_sliding_layers(fields: ConfigFields, kinds: tuple[str, ...], *, context: int, default: int | None) -> Windows:
    """`sliding_window` in the layers of kind `sliding_attention`.

    Raises:
        CheckpointError: there are such layers, and no window.
    """
    if SLIDING not in kinds:
        return ()
    if stated_window(fields, default=default) is None:
        fields.refuse("sliding_window", f"must be a number, as layer_types has {SLIDING}")
    window = read_window(fields, context=context, default=default)
    return () if window is None else tuple(window if kind == SLIDING else None for kind in kinds)


def read_layer_kinds(fields: ConfigFields, *, default: tuple[str, ...]) -> tuple[str, ...]:
    """`layer_types`, one per layer; absent means `default`.

    Raises:
        CheckpointError: a kind is neither full nor sliding attention, or their number is not that of the layers.
    """
    kinds = fields.items("layer_types")
    if not fields.has("layer_types"):
        return default
    if not all(kind in (FULL, SLIDING) for kind in kinds):
        fields.refuse("layer_types", f"may name only {FULL} and {SLIDING}")
    if len(kinds) != len(default):
        fields.refuse("layer_types", f"must name a kind for each of the {len(default)} layers and names {len(kinds)}")
    return tuple(str(kind) for kind in kinds)


def require_uniform_layers(
    fields: ConfigFields, *, num_layers: int, default_window: int | None, slides: bool = True
) -> None:
    """`layer_types` of a family whose layers all have the window, or none has one.

    transformers reads the field for the cache of such a family and not for its masks, so nothing but what
    `sliding_window` says anyway has a clear meaning.

    Args:
        default_window: what an absent `sliding_window` stands for.
        slides: whether the window counts at all.

    Raises:
        UnsupportedVariantError: it says something else.
    """
    if not fields.has("layer_types"):
        return
    window = stated_window(fields, default=default_window) if slides else None
    uniform = (FULL if window is None else SLIDING,) * num_layers
    if read_layer_kinds(fields, default=uniform) != uniform:
        fields.defer("layer_types", f"must be {uniform[0]} in every layer, in accordance with sliding_window")
