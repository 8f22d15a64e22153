"""Types that several modules share. Public ops return arrays of the library that they are called with (`A`); behind
them an array is `Any`, for its operators are the library's."""

from typing import Any, Literal, Protocol, TypedDict, TypeVar


class StandardArray(Protocol):
    """What arrays of NumPy, torch, JAX and CuPy share by name."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


A = TypeVar("A", bound=StandardArray)
Array = Any
Namespace = Any
Causal = Literal["upper_left"] | bool
Length = Any  # "visible" | "all" | a number > 0 | an array broadcast to (..., Hq, L)
Impl = str | tuple[str, ...] | list[str]
LEARNED = ("scale", "alpha", "gain", "shift", "gamma", "slope", "intercept", "sink")
"""Numbers of ops whose scores are products or distances; as arrays they have gradients."""


class WithoutCausal(TypedDict, total=False):
    """The options of quadratic ops that are causal themselves."""

    mask: Array | None
    bias: Array | None
    window: tuple[int | None, int | None] | None
    key_lengths: Array | int | None
    query_mask: Array | None
    scale: float | Array | None
    enable_gqa: bool
    dropout_mask: Array | None
    dropout: tuple[float, Any] | None


class Common(WithoutCausal, total=False):
    """The options of every quadratic op: which pairs interact, how q·k becomes a score, which weights are dropped."""

    causal: Causal


DEFAULTS: dict[str, Any] = {
    "mask": None,
    "bias": None,
    "causal": False,
    "window": None,
    "key_lengths": None,
    "query_mask": None,
    "scale": None,
    "enable_gqa": False,
    "dropout_mask": None,
    "dropout": None,
}
