"""The table of a library of arrays, from the three functions by which it calls the CPU library."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from attnkit._core.dispatch import Kernel
from attnkit._core.family import RECORDS
from attnkit._core.typing import Array, Bindings, Keywords, OfLibrary, Option, Results
from attnkit.ops.vjps import VJPS

FURTHER = {"return_lse": "lse", "return_remainder": "r"}
"""Outputs beside o, by the option that asks for them."""


def further(op: str) -> tuple[str, str]:
    """The option of an op that asks for an output beside o, and its name; ("", "") if it has none."""
    for asks, name in FURTHER.items():  # not next(..., ("", "")), which torch 2.6 does not compile
        if asks in RECORDS[op].family.output_only:
            return asks, name
    return "", ""


Arguments = Keywords  # the arguments of a call by name


class Served(NamedTuple):
    """What a library of arrays has; its tables are those of quadratic attention."""

    evaluate: Callable[[str, Arguments, tuple[str, ...]], Sequence[Array]]  # the named outputs of an op
    pulled: Callable[[str, Arguments, Bindings], Arguments]  # its gradients, from cotangents that may be None
    unsupported: Callable[..., str | None]  # (op, *arrays, **options)

    def attend(self, op: str, q: Array, k: Array, v: Array, **options: object) -> Results:
        """An op."""
        asks, name = further(op)
        both = options.pop(asks, False)
        outputs = self.evaluate(op, {"q": q, "k": k, "v": v, **options}, ("o", name) if both else ("o",))
        return tuple(outputs) if both else outputs[0]

    def pull(
        self, op: str, q: Array, k: Array, v: Array, do: OfLibrary, *rest: OfLibrary, **options: Option
    ) -> Arguments:
        """Its explicit gradients; `rest` is the cotangent of the output beside o, if there is one."""
        name = further(op)[1]
        beside = {f"d{name}": rest[0] if rest else options.pop(f"d{name}", None)} if name else {}
        return self.pulled(op, {"q": q, "k": k, "v": v, **options}, {"do": do, **beside})

    def kernels(self) -> dict[str, Kernel]:
        """By op and its gradients."""
        table: dict[str, Kernel] = {}
        for op in VJPS:
            kernel = Kernel("native", partial(self.attend, op), partial(self.unsupported, op), learned=("sink",))
            table |= {op: kernel, f"{op}_vjp": kernel._replace(call=partial(self.pull, op))}
        return table
