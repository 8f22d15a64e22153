"""torch.library.opcheck of custom ops with the arguments that calls of the library give them, forward and backward."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

NAMESPACE = "attnkit"
NOT_DIFFERENTIABLE = ("projection",)


class Case(NamedTuple):
    """A call that ends in a custom op; `arrays` stand beside q, k and v."""

    custom: str
    op: str
    options: dict[str, Any]
    arrays: Mapping[str, Tensor] = {}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(heads: int, shared: int) -> dict[str, Tensor]:
    """Heads inside of tokens in memory, as projections leave them; 5 queries and 6 keys."""
    shapes = {"q": (1, 5, heads, 8), "k": (1, 6, shared, 8), "v": (1, 6, shared, 4)}
    return {name: draw(seed, *shape).transpose(1, 2) for seed, (name, shape) in enumerate(shapes.items())}


def registered() -> set[str]:
    """Names of all custom ops of the library."""
    import attnkit.backends.torch  # noqa: F401

    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return {name for space, _, name in names if space == NAMESPACE}


class Recorder(TorchDispatchMode):
    """Notes every call of a custom op of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            assert not kwargs
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def tensors_of(answer: Any) -> list[Tensor]:
    """The tensors of an output, of several, or of statistics."""
    if answer is None or isinstance(answer, Tensor):
        return [] if answer is None else [answer]
    return [x for value in (answer.values() if isinstance(answer, dict) else answer) for x in tensors_of(value)]


def copied(arguments: tuple[Any, ...], with_gradients: bool) -> tuple[Any, ...]:
    """The arguments as leaves with the same strides, those that had a gradient with one where it is asked for."""
    made: tuple[Any, ...] = tree_map_only(
        Tensor, lambda x: x.detach().requires_grad_(with_gradients and x.requires_grad), arguments
    )
    return made


def checked(function: Callable[..., Any], arrays: Mapping[str, Tensor], traced: bool = True) -> set[str]:
    """Run opcheck on the custom ops behind a call and its gradients; the answer is their names.

    Schema, registration with autograd, fake tensors, and if `traced` one graph of the forward op and of its gradients.
    """
    leaves = {
        name: x.detach().requires_grad_(x.is_floating_point() and name not in NOT_DIFFERENTIABLE)
        for name, x in arrays.items()
    }
    with Recorder() as recorder:
        outputs = [x for x in tensors_of(function(**leaves)) if x.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    for op, arguments in recorder.calls:
        torch.library.opcheck(op, copied(arguments, True), test_utils="test_autograd_registration")
        torch.library.opcheck(op, copied(arguments, False), test_utils=("test_schema", "test_faketensor"))
        if traced and not op.name().endswith("_vjp"):
            torch.library.opcheck(op, copied(arguments, True), test_utils="test_aot_dispatch_dynamic")
    return {op.name().partition("::")[2] for op, _ in recorder.calls}


def pair(custom: str) -> set[str]:
    """A custom op and the one of its gradients."""
    return {custom, f"{custom}_vjp"}
