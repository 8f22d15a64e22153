"""Graphs that torch's autograd records of a call."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from attnkit._core.library import library
from attnkit._core.special import is_autocast
from attnkit._core.typing import AnyFunction, Array, Arrays, Keywords, OfLibrary, Option

if TYPE_CHECKING:
    from torch import Tensor

Node = Any  # of the graph of gradients; torch's own type has `metadata` as a method
PRODUCTS = frozenset(f"{name}Backward0" for name in ("Mm", "Bmm", "Addmm", "Baddbmm"))
"""Nodes whose gradients are products, which autocast rounds."""
_MARK, _ENDS = "attnkit: without autocast", "attnkit: ends"
"""What nodes keep in their metadata: that a product has its hooks, and where the graph behind a result ends."""


def with_exact_gradients(call: AnyFunction, arrays: Arrays, options: Keywords) -> AnyFunction | None:
    """`call` for tensors with the same signature, with `keep_autocast_out` if any of them needs gradients; None under
    autocast.

    What has a signature is no wrapper, and its arrays are tensors. One dict of hooks serves all calls, as the hooks of
    a tensor, which costs 1 µs: `register_prehook` makes a dict and a handle for each, in 6 µs.
    """
    import torch

    device = arrays[0].device.type
    if torch._C._is_any_autocast_enabled() and is_autocast(device):
        return None
    if True not in [getattr(x, "requires_grad", False) for x in (*arrays, *options.values())]:
        return call

    names = [name for name, x in options.items() if hasattr(x, "grad_fn")]
    hooked = torch.empty(0)
    hooked._backward_hooks = {0: partial(_enter, device)}

    def recorded(*arrays: "Tensor", **options: Option) -> object:
        results = call(*arrays, **options)
        ends = [x.grad_fn for x in arrays]
        if names:
            ends += [options[name].grad_fn for name in names]
        for x in (results,) if hasattr(results, "grad_fn") else _tensors(results):
            node: Node = x.grad_fn
            if node not in ends and node is not None:
                if any(ends):
                    node.metadata[_ENDS] = ends
                node._register_hook_dict(hooked)
        return results

    return recorded


def keep_autocast_out(results: object, arrays: tuple[Array, ...], options: Keywords) -> None:
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


def _tensors(x: OfLibrary) -> "Iterator[Tensor]":
    """The tensors of torch in nested tuples, lists and dicts."""
    if hasattr(x, "grad_fn"):
        yield x
    elif isinstance(x, tuple | list):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        yield from _tensors(tuple(x.values()))


def _with_wrapped(tensors: "Iterable[Tensor]") -> "Iterator[Tensor]":
    """Tensors, and those that torch.func wrapped in them, which have graphs of their own."""
    from torch._C import _functorch

    for x in tensors:
        yield x
        while _functorch.is_functorch_wrapped_tensor(x):
            x = _functorch.get_unwrapped(x)
            yield x


def _hook_results(results: "list[Tensor]", arguments: "list[Tensor]", before: Iterable[Node] = ()) -> "list[Tensor]":
    """Hook the nodes of results. Their graph ends at those of the arguments and at the nodes `before`.

    Nothing on a node refers to itself or a later one: graphs are freed by counting references. Returns the results, as
    torch.compile wants.
    """
    outputs = [x for x in _with_wrapped(results) if x.grad_fn is not None]
    if outputs:
        ends = [*before, *[x.grad_fn for x in _with_wrapped(arguments)]]
        for x in outputs:
            node: Node = x.grad_fn
            device = x.device.type
            if node not in ends:
                node.metadata[_ENDS] = ends
                node.register_prehook(partial(_enter, device))
                _hook_product(node, device)  # a node that runs takes no further prehooks
    return results


def _hook_product(node: Node, device: str) -> list[Node]:
    """Hook a node if it is a product. Returns the nodes of its factors."""
    factors = [other for other, _ in node.next_functions]
    if node.name() in PRODUCTS and _MARK not in node.metadata:
        node.metadata[_MARK] = True
        node.register_prehook(partial(_disable_autocast, device))
        node.register_hook(partial(_hook_gradients, factors))
    return factors


def _enter(device: str, cotangents: object) -> None:
    """The hook of a node of the results: hooks the products from there back to the ends."""
    import torch

    if not (torch._C._is_any_autocast_enabled() or torch.is_grad_enabled()):
        return
    entry: Node = torch._C._current_autograd_node()
    if entry is None:  # torch's compiled autograd runs no nodes
        return
    nodes, seen = [entry], {*entry.metadata.get(_ENDS, ()), None}
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            nodes += _hook_product(node, device)


def _disable_autocast(device: str, cotangents: tuple[Array, ...]) -> None:
    """A hook: as long as its node runs."""
    if is_autocast(device):
        import torch

        torch.set_autocast_enabled(device, False)


def _hook_gradients(factors: list[Node], grads: object, cotangents: object) -> None:
    """The hook of a product after it ran: does the same to its gradients, whose graph ends at the product's factors."""
    _hook_results(list(_tensors(grads)), list(_tensors(cotangents)), factors)
