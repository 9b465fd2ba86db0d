"""Memory that oneDNN keeps: its products are compiled for each shape of weights and each number of rows.

Two caches hold the same compiled products, oneDNN's and one in torch, each of 1,024 by default. A worker that serves
batches of every size fills them: 0.6 GiB, which no step of its start has taken yet.
"""

from tandem_engine.base.environment import set_default

KEPT_PRODUCTS = 256
"""Capacity of each cache. The products of a decoder fit: 36 numbers of rows up to 512 tokens, of seven shapes."""

PRODUCT_BYTES = 640 << 10
"""Of one product, at most: measured in float32 with AVX512."""

KEPT_BYTES = KEPT_PRODUCTS * PRODUCT_BYTES


def limit_products() -> None:
    """Set both capacities, unless the user's environment does. Takes effect before this process's first product."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        set_default(variable, str(KEPT_PRODUCTS))
