"""Packed sequences as the library takes them: their boundaries are two more arrays of a call of the op."""

from functools import partial
from typing import Unpack

from attnkit._core.dispatch import Kernel
from attnkit._core.typing import AnyFunction, Array, Options, Results
from attnkit.backends.native import linear
from attnkit.backends.native.lower import EDGES
from attnkit.backends.native.served import Arguments, Served
from attnkit.ops import packed
from attnkit.ops.linear.attention import LINEAR
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.softmax import SOFTMAX

Edges = tuple[int, ...] | Array
OPS: dict[str, tuple[AnyFunction, AnyFunction]] = {
    SOFTMAX.name: (packed.softmax_attention_packed, packed.softmax_attention_packed_vjp),
    POINTWISE.name: (packed.pointwise_attention_packed, packed.pointwise_attention_packed_vjp),
    LINEAR.name: (packed.linear_attention_packed, packed.linear_attention_packed_vjp),
}
"""By op, its packed form and the gradients of that."""


def formula(op: str, arguments: Arguments, cotangents: Arguments) -> Arguments:
    """Gradients by the generic formula, which can be differentiated."""
    boundaries = {f"cu_seqlens_{end}": arguments[f"edges_{end}"] for end in "qk"}
    options = {name: x for name, x in arguments.items() if name not in EDGES}
    grads: Arguments = OPS[op][1](**options, **boundaries, **({"do": None} | cotangents), impl="generic")
    return grads


class Packed(Served):
    """The tables of `OPS`."""

    def attend_packed(
        self, op: str, q: Array, k: Array, v: Array, cu_q: Edges, cu_k: Edges, **options: object
    ) -> Results:
        """The packed form of an op, whose chunks are the library's."""
        options.pop("chunk_size", None)
        return self.attend(op, q, k, v, edges_q=cu_q, edges_k=cu_k, **options)

    def pull_packed(
        self,
        op: str,
        q: Array,
        k: Array,
        v: Array,
        cu_q: Edges,
        cu_k: Edges,
        *cotangents: Array | None,
        **options: object,
    ) -> Arguments:
        """Its explicit gradients."""
        options.pop("chunk_size", None)
        return self.pull(op, q, k, v, *cotangents, edges_q=cu_q, edges_k=cu_k, **options)

    def refuse(
        self, op: str, backward: bool, q: Array, k: Array, v: Array, *others: Array, **options: Unpack[Options]
    ) -> str | None:
        """Why the library does not serve a call."""
        reason = linear.refused(op, backward, (q, k, v), **options) if op in linear.OPS else None
        return reason or self.unsupported(op, q, k, v, *others, **options)

    def kernels(self) -> dict[str, Kernel]:
        """By packed form and its gradients."""
        table = {}
        for op, (form, vjp) in OPS.items():
            table[form.__name__] = Kernel("native", partial(self.attend_packed, op), partial(self.refuse, op, False))
            table[vjp.__name__] = Kernel("native", partial(self.pull_packed, op), partial(self.refuse, op, True))
        return table
