"""torch modules built on attnkit's ops."""

from attnkit.nn.attention import MultiHeadAttention
from attnkit.nn.cache import KeyValueCache, StateCache
from attnkit.nn.capture import LayerAnalysis, Record, capture
from attnkit.nn.context_parallel import Traffic, context_parallel, count_traffic
from attnkit.nn.context_parallel.modules import parallelize
from attnkit.nn.describe import Attending, Description, describe
from attnkit.nn.gated import GatedAttentionUnit
from attnkit.nn.memory import KeyValueMemory
from attnkit.nn.record import Attention
from attnkit.nn.shared import LSHAttention, SoftAttention1d
from attnkit.nn.soft2d import SoftAttention2d

__all__ = [
    "Attending",
    "Attention",
    "Description",
    "GatedAttentionUnit",
    "KeyValueCache",
    "KeyValueMemory",
    "LSHAttention",
    "LayerAnalysis",
    "MultiHeadAttention",
    "Record",
    "SoftAttention1d",
    "SoftAttention2d",
    "StateCache",
    "Traffic",
    "capture",
    "context_parallel",
    "count_traffic",
    "describe",
    "parallelize",
]
