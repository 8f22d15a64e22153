"""The table of a library of arrays, from the three functions by which it calls the CPU library."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from attnkit._core.dispatch import Kernel
from attnkit.ops.vjps import VJPS

Given = dict[str, Any]  # the arguments of a call by name


class Served(NamedTuple):
    """What a library of arrays has; its tables are those of quadratic attention."""

    evaluate: Callable[[str, Given, tuple[str, ...]], Sequence[Any]]  # the named outputs of an op
    pulled: Callable[[str, Given, Mapping[str, Any]], Given]  # its gradients, from cotangents that may be None
    unsupported: Callable[..., str | None]  # (op, backward, *arrays, **options)

    def attend(self, op: str, q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        """An op."""
        found = self.evaluate(op, {"q": q, "k": k, "v": v, **options}, ("o", "lse") if return_lse else ("o",))
        return tuple(found) if return_lse else found[0]

    def pull(self, op: str, q: Any, k: Any, v: Any, do: Any, dlse: Any = None, **options: Any) -> Given:
        """Its explicit gradients."""
        return self.pulled(op, {"q": q, "k": k, "v": v, **options}, {"do": do, "dlse": dlse})

    def kernels(self) -> dict[str, Kernel]:
        """By op and its gradients."""
        table = {}
        for op in VJPS:
            table[op] = Kernel("native", partial(self.attend, op), partial(self.unsupported, op, False))
            table[f"{op}_vjp"] = Kernel("native", partial(self.pull, op), partial(self.unsupported, op, True))
        return table
