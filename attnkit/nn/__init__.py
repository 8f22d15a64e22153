"""torch modules built on attnkit's ops."""

from attnkit.nn.attention import KeyValueCache, MultiHeadAttention

__all__ = ["KeyValueCache", "MultiHeadAttention"]
