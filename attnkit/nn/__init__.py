"""torch modules built on attnkit's ops."""

from attnkit.nn.attention import KeyValueCache, MultiHeadAttention
from attnkit.nn.capture import LayerAnalysis, Record, capture

__all__ = ["KeyValueCache", "LayerAnalysis", "MultiHeadAttention", "Record", "capture"]
