"""What kernels for GPUs have in common on JAX: the device, and which calls `auto` takes them for.

XLA compiles programs, so launches cost the generic body no more than kernels. A traced array has no device: it is taken
to be on JAX's default one.
"""

from collections.abc import Callable

import jax
from jax import Array

from attnkit._core.dispatch import Kernel
from attnkit._core.special import varying
from attnkit._core.typing import AnyFunction
from attnkit.backends.jax import transforms
from attnkit.kernels import predicted, verdicts

OLDEST = (8, 0)


def capability() -> str:
    """That of the default device, such as "9.0"; "" if it is no GPU of NVIDIA."""
    text = str(getattr(jax.devices()[0], "compute_capability", ""))
    return text if all(part.isdigit() for part in text.split(".")) else ""


def major() -> int | None:
    """The major number of that, None if there is none."""
    found = capability()
    return int(found.partition(".")[0]) if found else None


def unsupported(*arguments: object) -> str | None:
    """Why kernels do not run on JAX's default device, or not under these transformations."""
    if jax.default_backend() != "gpu":
        return f"Triton kernels run on GPUs; the default device of JAX is a {jax.default_backend()}"
    found = capability()
    if not found:
        return "compiled and tested for NVIDIA only"
    if tuple(map(int, found.split("."))) < OLDEST:
        return f"needs compute capability 8.0 or higher; the device has {found}"
    if any(map(varying, jax.tree.leaves(arguments))):
        return "jax.shard_map with check_vma=True is served by the generic implementation"
    return transforms.differentiated_twice(arguments)


def is_faster(kind: str, q: Array, k: Array, *rest: Array, **options: object) -> bool:
    """Whether a call is predicted not to be slower, or keeps too much without."""
    pairs = predicted.pairs(q.shape, k.shape)
    width = max(q.shape[-1], *(x.shape[-1] for x in rest[:1]))
    return predicted.takes(kind, q.dtype.itemsize, pairs, width, compiled=True, major=major())


def taken(q: Array) -> None:
    """Warn once where kernels of this class of devices have not been judged; a program that is traced runs nothing."""
    if not isinstance(q, jax.core.Tracer):
        verdicts.warn_once(capability())


def kernel(call: AnyFunction, unsupported: Callable[..., str | None], is_faster: Callable[..., bool]) -> Kernel:
    """A row of the table of kernels that `auto` takes by prediction."""
    return Kernel("triton", call, unsupported, is_faster, taken=taken)
