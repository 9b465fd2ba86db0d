"""Sliding-window attention is not implemented; a checkpoint that relies on it must not be served wrongly."""

from tandem_engine.model.config_fields import ConfigFields
from tandem_engine.model.rope_fields import MAX_POSITION


def require_full_attention(config: ConfigFields, *, num_layers: int, context: int) -> None:
    """Accept a config whose layers see all of `context` tokens, be it because its window never binds.

    Raises:
        CheckpointError: some layer has another kind of attention, or a window shorter than the context.
    """
    kinds = config.items("layer_types")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.refuse("layer_types", "may name only full_attention and sliding_attention")
    if not config.flag("use_sliding_window", default=False) or not config.has("sliding_window"):
        return
    window = config.integer("sliding_window", least=1, most=MAX_POSITION)
    first = config.integer("max_window_layers", least=0, most=1 << 20, default=28)
    some_layer_slides = "sliding_attention" in kinds if kinds else first < num_layers
    if some_layer_slides and window < context:
        config.refuse(
            "sliding_window",
            f"is shorter than the context of {context} tokens and sliding-window attention is not supported; "
            "set use_sliding_window to false or lower max_position_embeddings",
        )
