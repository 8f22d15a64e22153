"""CUDA C++ kernels on CuPy arrays, forward and explicit gradients.

No GPU has run or timed them yet: `impl="cuda"` names them, and `impl="auto"` leaves them alone.
"""

from functools import partial
from typing import Any

from attnkit._dispatch import Kernel
from attnkit.backends.cupy.gpu import Gpu, unready
from attnkit.kernels.cuda import pointwise


def attend(op: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """What `op` gives on the device of q."""
    with q.device:
        return op(Gpu(), q, k, v, **options)


def pull(op: Any, q: Any, k: Any, v: Any, do: Any, **options: Any) -> dict[str, Any]:
    """Its gradients."""
    with q.device:
        grads: dict[str, Any] = op(Gpu(), q, k, v, do, **options)
    return grads


def unsupported(unserved: Any, q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> str | None:
    """Why a call is not served."""
    if any(x is None for x in rest):
        return "no cotangent of the output was given"
    return unready(q) or unserved(q, k, v, **options)


def pays(*arrays: Any, **options: Any) -> bool:
    """Unknown until a GPU has timed them."""
    return False


OPS = {"pointwise_attention": (pointwise.forward, pointwise.backward, pointwise.unserved)}
"""{op: (forward, backward, why a call is not served)}."""
KERNELS = {
    f"{op}{suffix}": Kernel("cuda", partial(serve, function), partial(unsupported, unserved), pays)
    for op, (forward, backward, unserved) in OPS.items()
    for suffix, serve, function in (("", attend, forward), ("_vjp", pull, backward))
}
