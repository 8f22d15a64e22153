"""The attention layers that the recipes of sequences compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import nn

from attnkit._core.typing import OpName
from attnkit.nn import LSHAttention, MultiHeadAttention, SoftAttention1d

NYSTROM_CONV = 35
LSH_CHUNK = 64  # what the published code's Reformer layer has by default


class Sizes(Protocol):
    """What of a model's configuration a layer is made from; tokens of a padded sequence are its `length`."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def weight_dropout(self) -> float: ...


class Method(NamedTuple):
    """An attention layer for the comparison.

    Attributes:
        build: the layer of a configuration.
        masks: the keywords under which it takes the mask of tokens.
        about: what it is, and how it differs from what was published.
        any_padding: whether logits are the same whatever number of padding tokens follows.
        alone: whether logits of a sequence are the same whatever else is in the batch.
    """

    build: Callable[[Sizes], nn.Module]
    masks: tuple[str, ...]
    about: str
    any_padding: bool = True
    alone: bool = True


def multi_head(
    op: OpName, *, drops_weights: bool = False, value_conv: int | None = None, **options: Any
) -> Callable[[Sizes], nn.Module]:
    """Attention with separate queries, keys and values: `op` of attnkit with its options."""

    def build(config: Sizes) -> nn.Module:
        return MultiHeadAttention(
            config.width,
            config.heads,
            op=op,
            options=options,
            value_conv=value_conv,
            dropout=config.weight_dropout if drops_weights else 0.0,
        )

    return build


def linformer(*, num_slots: int) -> Callable[[Sizes], nn.Module]:
    """Projections of all positions of a padded sequence."""
    return lambda config: multi_head("linformer_attention", num_slots=num_slots, max_length=config.length)(config)


def reformer(*, num_hashes: int) -> Callable[[Sizes], nn.Module]:
    """LSH attention with as many buckets as the authors' rule gives for a padded sequence."""

    def build(config: Sizes) -> nn.Module:
        buckets = 2 * max(1, config.length // LSH_CHUNK)
        return LSHAttention(
            config.width, config.heads, num_buckets=buckets, num_hashes=num_hashes, chunk_size=LSH_CHUNK
        )

    return build


def soft(*, window: int) -> Callable[[Sizes], nn.Module]:
    """SOFT with the ridge of the authors' code for pictures, 0.01; their code for sequences is not public."""

    def build(config: Sizes) -> nn.Module:
        return SoftAttention1d(config.width, config.heads, window=window, ridge=0.01)

    return build


_SEPARATE, _SHARED = ("key_mask", "query_mask"), ("token_mask",)

METHODS: dict[str, Method] = {
    "transformer": Method(
        multi_head("softmax_attention", drops_weights=True), _SEPARATE, "softmax attention; weights can be dropped"
    ),
    "reformer": Method(
        reformer(num_hashes=2),
        _SHARED,
        "2 rounds of hashing, chunks of 64; rotations are drawn once per model, the published code draws them at every "
        "call, in evaluation too",
        any_padding=False,
    ),
    "linformer": Method(
        linformer(num_slots=256),
        _SEPARATE,
        "256 slots; every layer learns a projection of keys and one of values for all heads, the published code learns "
        "one per head for keys, values and all layers",
    ),
    "performer": Method(
        multi_head("performer_attention", num_features=256),
        _SEPARATE,
        "256 orthogonal features of the exponential (FAVOR+). The published configuration says relu features, its code "
        "ignores that, scales scores twice and does not mask keys",
    ),
    "performer_relu": Method(
        multi_head("performer_attention", num_features=256, kernel="relu"),
        _SEPARATE,
        "256 relu features, as the published configuration says",
    ),
    "nystromformer": Method(
        multi_head("nystrom_attention", value_conv=NYSTROM_CONV, num_landmarks=64),
        _SEPARATE,
        "64 landmarks, convolution of 35 values; landmarks are means of tokens only, and every matrix is divided by "
        "its own norm",
    ),
    "nystromformer_128": Method(
        multi_head("nystrom_attention", value_conv=NYSTROM_CONV, num_landmarks=128),
        _SEPARATE,
        "the same with 128 landmarks",
    ),
    "nystromformer_batch_max": Method(
        multi_head("nystrom_attention", value_conv=NYSTROM_CONV, num_landmarks=64, init="batch_max"),
        _SEPARATE,
        "64 landmarks and the published start of the inverse: the largest norm of the batch, so that a sequence's "
        "logits depend on its neighbours",
        alone=False,
    ),
    "soft": Method(
        soft(window=4), _SHARED, "Gaussian kernel, landmarks are means of 4 tokens with stride 4 (Lu et al. 2021 §4.5)"
    ),
    "soft_16": Method(
        soft(window=16), _SHARED, "the same with 16 tokens: 4×4 if the paper's window is one of a picture"
    ),
    "linear": Method(
        multi_head("linear_attention"),
        _SEPARATE,
        "φ = elu + 1 with its denominator (Katharopoulos et al. 2020); the published code's has none",
    ),
    "cosine": Method(multi_head("cosine_attention"), _SEPARATE, "1 + cos(q, k), divided by its sum"),
    "efficient": Method(
        multi_head("efficient_attention"),
        _SEPARATE,
        "softmax of queries over features, of keys over tokens (Shen et al. 2021)",
    ),
    "relu": Method(
        multi_head("pointwise_attention", drops_weights=True, activation="relu", alpha=1.0),
        _SEPARATE,
        "relu / n over the tokens that are there (Wortsman et al. 2023); weights can be dropped",
    ),
    "average": Method(
        multi_head("softmax_attention", scale=0.0),
        _SEPARATE,
        "the mean of the values of all tokens: what the model reaches without scores",
    ),
    "zeros": Method(
        multi_head("pointwise_attention", activation="relu", alpha=1.0, gain=0.0),
        _SEPARATE,
        "attention that returns zeros: what the model reaches without",
    ),
}
