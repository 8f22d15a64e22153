"""Graphs that torch's autograd records of a call."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

from attnkit._core.library import library
from attnkit._core.special import is_autocast

PRODUCTS = frozenset(f"{name}Backward0" for name in ("Mm", "Bmm", "Addmm", "Baddbmm"))
"""Nodes whose gradients are products, which autocast rounds."""
_MARK = "attnkit: without autocast"  # of a product that has its hooks


def with_exact_gradients(
    call: Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any]
) -> Callable[..., Any]:
    """`call` for arguments like these, with `keep_autocast_out` if any of them needs gradients."""
    if library(arrays[0]) != "torch" or not any(x.requires_grad for x in _tensors((arrays, options))):
        return call

    @wraps(call)
    def recorded(*arrays: Any, **options: Any) -> Any:
        results = call(*arrays, **options)
        keep_autocast_out(results, arrays, options)
        return results

    return recorded


def keep_autocast_out(results: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Let autocast not round the gradients of a call in torch where `backward()` runs inside it (semantics A7).

    torch computes each node of a graph under the autocast of the caller of `backward()`, and sets that anew for the
    next one. So every product disables it by a hook of its own. They are made when a node of the results runs, which
    is before all others, and only where they matter: if autocast is on, or if the gradients are recorded for another
    `backward()`. torch.compile takes the autocast around the call for its gradients too.
    """
    if library(arrays[0]) != "torch":
        return
    import torch

    outputs = [x for x in _tensors(results) if x.requires_grad]
    if outputs and torch.compiler.is_compiling():
        if not is_autocast(arrays[0].device.type):
            return
        _allow_hooks()
    if outputs:
        _hook_results(outputs, list(_tensors((arrays, options))))


def _allow_hooks() -> None:
    """Leave `_hook_results` in the program of torch.compile, which calls it when the graph of gradients is recorded."""
    import torch

    torch.compiler.allow_in_graph(_hook_results)
    torch.fx.node.has_side_effect(_hook_results)


_allow_hooks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while torch.compile traces


def _tensors(x: Any) -> Iterator[Any]:
    """The tensors of torch in nested tuples, lists and dicts."""
    if hasattr(x, "grad_fn"):
        yield x
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        yield from _tensors(tuple(x.values()))


def _with_wrapped(tensors: Iterable[Any]) -> Iterator[Any]:
    """Tensors, and those that torch.func wrapped in them, which have graphs of their own."""
    from torch._C import _functorch

    for x in tensors:
        yield x
        while _functorch.is_functorch_wrapped_tensor(x):
            x = _functorch.get_unwrapped(x)
            yield x


def _hook_results(results: list[Any], arguments: list[Any], before: Iterable[Any] = ()) -> list[Any]:
    """Hook the nodes of results. Their graph ends at those of the arguments and at the nodes `before`.

    No hook refers to its own node or a later one: graphs are freed by counting references. Returns the results, as
    torch.compile wants.
    """
    outputs = [x for x in _with_wrapped(results) if x.grad_fn is not None]
    if outputs:
        ends = [*before, *[x.grad_fn for x in _with_wrapped(arguments)]]
        for x in outputs:
            node, device = x.grad_fn, x.device.type
            factors = [other for other, _ in node.next_functions]
            node.register_prehook(_Entry(device, factors, ends))
            _hook_product(node, device, factors)
    return results


def _hook_product(node: Any, device: str, factors: list[Any]) -> None:
    if node.name() in PRODUCTS and _MARK not in node.metadata:
        node.metadata[_MARK] = True
        node.register_prehook(partial(_disable_autocast, device))
        node.register_hook(_Again(factors))


def _disable_autocast(device: str, cotangents: tuple[Any, ...]) -> None:
    """A hook: as long as its node runs."""
    if is_autocast(device):
        import torch

        torch.set_autocast_enabled(device, False)


class _Entry(NamedTuple):
    """The hook of a node of the results: hooks the products behind it, from its factors back to the ends."""

    device: str
    factors: list[Any]
    ends: list[Any]

    def __call__(self, cotangents: tuple[Any, ...]) -> None:
        import torch

        if not (is_autocast(self.device) or torch.is_grad_enabled()):
            return
        nodes, seen = list(self.factors), {*self.ends, None}
        while nodes:
            node = nodes.pop()
            if node not in seen:
                seen.add(node)
                factors = [other for other, _ in node.next_functions]
                _hook_product(node, self.device, factors)
                nodes += factors


class _Again(NamedTuple):
    """The hook of a product after it ran: does the same to its gradients, whose graph ends at the product's factors."""

    factors: list[Any]

    def __call__(self, grads: tuple[Any, ...], cotangents: tuple[Any, ...]) -> None:
        _hook_results(list(_tensors(grads)), list(_tensors(cotangents)), self.factors)
