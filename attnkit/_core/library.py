"""Which library an array is of, and what follows from it: the namespace, and the device of new arrays.

A library that is not loaded has no arrays, so nothing is loaded to find out. torch.compile traces these functions:
results are not cached, for it warns about functools.lru_cache, which array_api_compat uses; and tensors are known by a
method before `sys.modules` is asked, which the compiler would go through as a whole, and fail where a thread imports.
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from attnkit._core.typing import Array, Keywords, Namespace, OfLibrary

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")
PLACELESS = ("numpy", "jax")
"""Libraries whose arrays are created without a device: JAX places them itself."""
PLAIN = (bool, int, float, str, tuple, type(None))


def library(x: object) -> str | None:
    """ "numpy", "torch", "jax", "cupy" or "array_api_strict", of which x is an array; None for anything else."""
    kind = type(x)
    if kind in PLAIN:
        return None
    if hasattr(x, "__torch_function__") or hasattr(kind, "__torch_function__"):  # compilers see one or the other
        import torch

        if isinstance(x, torch.Tensor):
            return "torch"
    modules = sys.modules
    numpy = modules.get("numpy")
    if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
        return "numpy"
    jax = modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        return "jax"
    cupy = modules.get("cupy")
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return "cupy"
    if kind.__module__.startswith("array_api_strict.") and hasattr(x, "__array_namespace__"):
        return "array_api_strict"
    return None


def peculiar(arrays: Sequence[tuple[str, object]], home: str) -> tuple[str, str] | None:
    """The name of the first of a library's arrays that is more or less than numbers at every place, and why it is."""
    if home == "torch":
        traced = is_traced((arrays[0][1],))
        reasons = [(name, _peculiar_tensor(x, traced)) for name, x in arrays]
    elif home == "numpy":
        reasons = [(name, _peculiar_in_numpy(type(x))) for name, x in arrays]
    else:
        return None
    for name, why in reasons:  # not next(..., None), which torch 2.6 does not compile
        if why is not None:
            return name, why
    return None


def _peculiar_tensor(x: OfLibrary, traced: bool) -> str | None:
    import torch

    if x.is_nested:
        return "a nested tensor; pass a padded one with key_lengths, or packed ones to an op that ends in _packed"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}; expected a dense one, torch.strided"
    return None if traced else freed(x)


def _peculiar_in_numpy(kind: type) -> str | None:
    """NumPy's subclasses are arrays to every function, some of which drop what they add: a mask, a unit, other
    products."""
    numpy = sys.modules["numpy"]
    if issubclass(kind, numpy.ma.MaskedArray):
        return "a masked array, whose mask would be dropped; pass its data with mask, query_mask or key_lengths"
    if issubclass(kind, numpy.ndarray) and kind not in (numpy.ndarray, numpy.memmap):
        return f"a {kind.__module__}.{kind.__qualname__}, whose own rules would be lost; pass numpy.asarray of it"
    return None


def freed(x: "Tensor") -> str | None:
    """What a tensor lacks whose storage was made smaller after it; None where all its elements are there, and for what
    has no storage of its own."""
    import torch

    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not torch._C._has_storage(x) or torch._C._is_tracing():
        return None
    shape, elements = x.shape, x.storage_offset() + 1
    if 0 in shape:
        return None
    for size, stride in zip(shape, x.stride(), strict=True):
        elements += (size - 1) * stride
    needed, there = elements * x.itemsize, x.untyped_storage().nbytes()
    return (
        f"a tensor with a storage of {there} bytes, of which it needs {needed}; was it freed?"
        if there < needed
        else None
    )


def is_traced(arrays: tuple[object, ...]) -> bool:
    """Whether torch.compile traces a call on these arrays."""
    if not arrays or not (hasattr(arrays[0], "__torch_function__") or hasattr(type(arrays[0]), "__torch_function__")):
        return False
    import torch

    return torch.compiler.is_compiling()


def is_in_graph(arrays: tuple[Array, ...]) -> bool:
    """Whether torch.compile, or torch.export with strict=True, traces the Python of a call on these arrays."""
    if not is_traced(arrays):
        return False
    import torch

    return torch.compiler.is_dynamo_compiling()


def _call(function: Callable[..., R], *arrays: Array, **options: object) -> R:
    return function(*arrays, **options)


def _load_compiler() -> None:
    """Make `_call` one that torch.compile leaves out of its graph, with a reason if the graph must be whole."""
    import torch

    global _call
    if not hasattr(_call, "_torchdynamo_disable"):
        reason = "what attnkit.using(impl=...) holds for is not known to a compiled program; pass impl= to the call"
        _call = torch.compiler.disable(_call, reason=reason)


_load_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while torch.compile traces


def call_outside_graphs(function: Callable[..., R], *arrays: Array, **options: object) -> R:
    """function(*arrays, **options), called when a compiled program runs."""
    _load_compiler()
    return _call(function, *arrays, **options)


def namespace(x: OfLibrary) -> Namespace:
    """The array-API namespace of x's library."""
    name = library(x)
    xp: Namespace
    if name == "numpy":
        import array_api_compat.numpy

        xp = array_api_compat.numpy
    elif name == "torch":
        import array_api_compat.torch

        xp = array_api_compat.torch
    elif name == "cupy":
        import array_api_compat.cupy

        xp = array_api_compat.cupy
    else:
        xp = x.__array_namespace__()
    return xp


def beside(x: Array) -> Keywords:
    """The keyword that creates an array on the device of x: none in NumPy and in JAX, which places arrays itself."""
    return {} if library(x) in PLACELESS else {"device": x.device}
