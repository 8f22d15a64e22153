"""Types that several modules share.

Bodies are written for `Array`, the array API standard. Public ops return arrays of the library that they are called
with (`A`). `Any` stands where a library has no types that all four share, each time under a name that says for what.
"""

from collections.abc import Callable, Hashable, Mapping
from types import ModuleType
from typing import Any, Literal, Protocol, TypedDict, TypeVar

DType = Hashable  # NumPy's and JAX's are classes and instances of classes, torch's are instances
OfLibrary = Any
"""An array whose library is known where it stands: to a branch that uses functions of that library, and to the caller
who gets it back."""
Outputs = Any  # of a function that returns more than one array where an option asks for it
Operand = Any  # a number or another array: overloads of NumPy, which no union of types matches


class Array(Protocol):
    """An array of NumPy, torch, JAX or CuPy: what the array API standard gives all of them. For mypy alone; at run time
    `library` and `check.is_array` say what is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def device(self) -> Any: ...  # of which each library has its own kind, as of indices
    @property
    def mT(self) -> "Array": ...
    def __getitem__(self, index: Any, /) -> "Array": ...
    def __add__(self, other: Operand, /) -> "Array": ...
    def __radd__(self, other: Operand, /) -> "Array": ...
    def __sub__(self, other: Operand, /) -> "Array": ...
    def __rsub__(self, other: Operand, /) -> "Array": ...
    def __mul__(self, other: Operand, /) -> "Array": ...
    def __rmul__(self, other: Operand, /) -> "Array": ...
    def __truediv__(self, other: Operand, /) -> "Array": ...
    def __rtruediv__(self, other: Operand, /) -> "Array": ...
    def __floordiv__(self, other: Operand, /) -> "Array": ...
    def __mod__(self, other: Operand, /) -> "Array": ...
    def __pow__(self, other: Operand, /) -> "Array": ...
    def __matmul__(self, other: Operand, /) -> "Array": ...
    def __and__(self, other: Operand, /) -> "Array": ...
    def __or__(self, other: Operand, /) -> "Array": ...
    def __xor__(self, other: Operand, /) -> "Array": ...
    def __lshift__(self, other: Operand, /) -> "Array": ...
    def __rshift__(self, other: Operand, /) -> "Array": ...
    def __lt__(self, other: Operand, /) -> "Array": ...
    def __le__(self, other: Operand, /) -> "Array": ...
    def __gt__(self, other: Operand, /) -> "Array": ...
    def __ge__(self, other: Operand, /) -> "Array": ...
    def __eq__(self, other: Operand, /) -> "Array": ...  # type: ignore[override]
    def __ne__(self, other: Operand, /) -> "Array": ...  # type: ignore[override]
    def __invert__(self) -> "Array": ...
    def __neg__(self) -> "Array": ...
    def __float__(self) -> float: ...
    def __int__(self) -> int: ...


A = TypeVar("A", bound=Array)
OfTriton = Any  # a kernel, or what it was compiled to; mypy does not read Triton
Namespace = ModuleType  # of functions of the standard, which array_api_compat does not type
AnyFunction = Callable[..., Any]  # whose arguments only its caller knows
# Annotations of a function within a function are evaluated each time that the outer one runs, and torch.compile reads
# them too: there they are names.
Arrays = tuple[Array, ...]
OptionalFunction = AnyFunction | None
Decorator = Callable[[Any], Any]  # what it decorates keeps its type, which mypy does not see through a record
Option = Any  # of an op that only the caller knows, looked up by its name or handed on beside others
Factor = float | Array  # an array has one number for each row or head
Results = Array | tuple[Array | tuple[Array, ...] | None, ...] | Mapping[str, Array | tuple[Array, ...]]
"""Of a call: an array, or a tuple with what its options ask for beside it, or gradients by name."""
Keywords = dict[str, Any]  # options of a call by name
Bindings = Mapping[str, Any]  # arrays and options of a call by name; None is what was not passed
Causal = Literal["upper_left"] | bool
ActivationName = Literal[
    "relu", "relu_squared", "gelu", "gelu_tanh", "softplus", "identity", "relu6", "sigmoid", "silu"
]  # fmt: skip
"""The names of `attnkit.ACTIVATIONS` for type checkers; a test compares them."""
Picks = tuple[int | slice, ...]  # of an array, for each axis
Length = str | float | Array  # "visible" | "all" | a number > 0 | an array broadcast to (..., Hq, L)
Seed = int | Array  # or a key of jax.random.key
Impl = str | tuple[str, ...] | list[str]
LEARNED = ("scale", "alpha", "gain", "shift", "gamma", "slope", "intercept", "sink")
"""Numbers of ops whose scores are products or distances; as arrays they have gradients."""


class Seeing(TypedDict, total=False):
    """Which query may see which key: the fields of `mask.Visibility`."""

    mask: Array | None
    causal: Causal
    window: tuple[int | None, int | None] | None
    key_lengths: Array | int | None
    query_mask: Array | None


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
    dropout: tuple[float, Seed] | None


class Common(WithoutCausal, total=False):
    """The options of every quadratic op: which pairs interact, how q·k becomes a score, which weights are dropped."""

    causal: Causal


class Options(Common, total=False):
    """The options of all ops, each of which has the same meaning and type in every op that takes it. Functions that
    read some of an op's options and hand on the rest take these."""

    activation: ActivationName
    alpha: Factor
    gain: Factor
    gamma: Factor
    shift: float | str | Array
    slope: Factor
    intercept: Factor
    sink: Factor | None
    length: Length
    eps: float
    return_lse: bool
    return_remainder: bool
    attend_current: bool
    log_forget: Array  # (..., S)
    norm_weight: Array | None  # (e,) or of a head, (Hq, e)
    norm_axis: str
    gate_weight: Array | None
    feature_map: str | Callable[[Array], Array]
    normalize: bool | None
    log_decay: Factor | None
    initial_state: tuple[Array, ...] | None
    return_state: bool
    chunk_size: int
    num_landmarks: int
    init: str
    init_scale: Factor
    inverse_steps: int
    newton_steps: int
    inverse_grad: str
    return_residuals: bool
    ridge: float
    kernel: str
    landmark_mask: Array | None
    key_bias: Array | None
    value_bias: Array | None
    norm_bias: Array | None


DEFAULTS: Keywords = {
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
