"""The table of a library of arrays, from the three functions by which it calls the CPU library."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from attnkit._core.dispatch import Kernel
from attnkit.ops.vjps import VJPS

Arguments = dict[str, Any]  # the arguments of a call by name


class Served(NamedTuple):
    """What a library of arrays has; its tables are those of quadratic attention."""

    evaluate: Callable[[str, Arguments, tuple[str, ...]], Sequence[Any]]  # the named outputs of an op
    pulled: Callable[[str, Arguments, Mapping[str, Any]], Arguments]  # its gradients, from cotangents that may be None
    unsupported: Callable[..., str | None]  # (op, *arrays, **options)

    def attend(self, op: str, q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        """An op."""
        outputs = self.evaluate(op, {"q": q, "k": k, "v": v, **options}, ("o", "lse") if return_lse else ("o",))
        return tuple(outputs) if return_lse else outputs[0]

    def pull(self, op: str, q: Any, k: Any, v: Any, do: Any, dlse: Any = None, **options: Any) -> Arguments:
        """Its explicit gradients."""
        return self.pulled(op, {"q": q, "k": k, "v": v, **options}, {"do": do, "dlse": dlse})

    def kernels(self) -> dict[str, Kernel]:
        """By op and its gradients."""
        table: dict[str, Kernel] = {}
        for op in VJPS:
            kernel = Kernel("native", partial(self.attend, op), partial(self.unsupported, op), learned=("sink",))
            table |= {op: kernel, f"{op}_vjp": kernel._replace(call=partial(self.pull, op))}
        return table
