"""Arrays as the views that kernels take: `View` of views.cuh."""

from typing import Any

import array_api_compat

from attnkit.kernels.cuda.launch import KINDS, View
from attnkit.kernels.strides import joined, strides_of

Array = Any


class Views:
    """What the launches of a call share: a device, their arguments, and arrays that only addresses refer to."""

    device: Any
    arguments: Any
    held: list[Array]

    def view(self, name: str, x: Array, leading: tuple[int, ...], *rest: int) -> None:
        """Set the view `name` of the arguments to x broadcast to (*leading, *rest), rest being rows and columns."""
        *items, heads = leading or (1,)
        shape = (*items, heads, *rest)
        strides = strides_of(x.shape, x.strides, (*leading, *rest))
        strides = strides if leading else [0, *strides]
        item = joined(items, strides[: len(items)])
        if item is None:
            x = array_api_compat.array_namespace(x).broadcast_to(x, shape).reshape(-1, heads, *rest)
            item, strides = x.strides[0], [0] * len(items) + list(x.strides[1:])
        self.held.append(x)
        row, column = (*strides[len(items) + 1 :], 0, 0)[:2]
        at = self.device.pointer(x)
        setattr(self.arguments, name, View(at, item, strides[len(items)], row, column, KINDS[x.dtype.name]))
