"""SOFT's Newton inverse (Lu et al. 2021, Algorithm 2) by CUDA kernels: X ← 2X - XAX from init_scale·2/‖A‖₁²·A.

All steps of all matrices are one launch, and so is their gradient. Formulas are in newton.cuh.
"""

import ctypes
import math
from collections.abc import Callable
from numbers import Real
from typing import Unpack

from attnkit._core.check import broadcast
from attnkit._core.typing import OfLibrary, Options
from attnkit.backends.cupy.launch import NUMBERS, Launch, View
from attnkit.backends.cupy.pointwise import Array, Device, reduced_to
from attnkit.backends.cupy.views import Views
from attnkit.ops.lowrank.newton import generic_alone, newton_inverse

OP = newton_inverse.__name__
LARGEST = 64  # rows of a matrix: larger ones do not fit into shared memory
THREADS = 256
SOURCE = "newton.cuh"


class Newton(ctypes.Structure):
    """The argument of every kernel: `Newton` of newton.cuh."""

    _fields_ = (
        *((name, View) for name in ("a", "x", "dx", "da", "factors", "dfactors")),
        ("iterates", ctypes.c_void_p),
        ("factor", ctypes.c_double),
        *((name, ctypes.c_int) for name in ("heads", "m", "steps", "all")),
    )


def unsupported_options(a: Array, **options: object) -> str | None:
    """Why a call is not supported on any device."""
    if a.dtype.name not in NUMBERS:
        return f"no kernel for {a.dtype.name}"
    if a.shape[-1] > LARGEST:
        return f"matrices with more than {LARGEST} rows are served by the generic implementation"
    return generic_alone(**options)


def shared_bytes(matrices: int, numbers: int, m: int, compute: str) -> int:
    """What a block needs for so many matrices and further numbers."""
    return -(-(matrices * m * (m + 1) + numbers) * (8 if compute == "float64" else 4) // 16) * 16


def too_large(room: int, m: int, dtype: str, *, inverse_grad: str = "implicit", **options: object) -> str | None:
    """Why a call with matrices of m rows is not supported where a block has so much shared memory."""
    matrices, numbers = (4, m + THREADS) if inverse_grad == "unrolled" else (3, m)
    needed = shared_bytes(matrices, numbers, m, dtype)
    if needed <= room:
        return None
    return f"{m} rows in {dtype} need {needed} bytes of shared memory; the device lends a block {room}"


class Call(Views):
    """One call of `newton_inverse` or its gradient: the data shared by all of its launches."""

    def __init__(self, device: Device, a: Array, newton_steps: int, init_scale: OfLibrary) -> None:
        self.device, self.keepalive = device, []
        scales = () if isinstance(init_scale, Real) else tuple(init_scale.shape)
        self.leading, self.m = broadcast(OP, "init_scale and a", tuple(a.shape[:-2]), scales), a.shape[-1]
        self.compute = "float64" if a.dtype.name == "float64" else "float32"
        heads = self.leading[-1] if self.leading else 1
        self.arguments = Newton(heads=heads, m=self.m, steps=int(newton_steps))
        self.view_as("a", a, self.leading, self.m, self.m)
        if isinstance(init_scale, Real):
            self.arguments.factor = float(init_scale)
        else:
            self.view_as("factors", init_scale, self.leading)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of X: an array of init_scale may have more leading axes than a."""
        return (*self.leading, self.m, self.m)

    def iterates(self, every: bool) -> Array:
        """Memory for X_0 .. X_T, or for the last one alone."""
        n = self.arguments.steps + 1 if every else 1
        xs = self.device.empty((*self.leading, n, self.m, self.m), self.compute)
        self.arguments.all, self.arguments.iterates = every, self.device.pointer(xs)
        self.keepalive.append(xs)
        return xs

    def run(self, kernel: str, matrices: int, numbers: int) -> None:
        """A launch with this many matrices and numbers in shared memory; none without matrices."""
        blocks = math.prod(self.leading)
        if not (blocks and self.m):
            return
        shared = shared_bytes(matrices, numbers, self.m, self.compute)
        self.device.run(Launch(kernel, (NUMBERS[self.compute],), blocks, THREADS, shared, self.arguments, SOURCE))

    def inverse(self) -> None:
        """X_T into `x`, and into the iterates where there is room for them."""
        self.run("newton_iterations", 3, self.m)


# ---------------------------------------------------------------------------------------------- what a library calls


def forward(device: Device, a: Array, *, newton_steps: int = 20, init_scale: object = 0.9, **others: object) -> Array:
    """X_T (..., m, m) in the compute dtype."""
    call = Call(device, a, newton_steps, init_scale)
    x = device.empty(call.shape, call.compute)
    call.view_as("x", x, call.leading, call.m, call.m)
    call.inverse()
    return x


def iterates(device: Device, a: Array, *, newton_steps: int = 20, init_scale: object = 0.9, **others: object) -> Array:
    """X_0 .. X_T (..., T + 1, m, m) in the compute dtype."""
    call = Call(device, a, newton_steps, init_scale)
    xs = call.iterates(True)
    call.inverse()
    return xs


def inverse(
    residuals: Callable[..., OfLibrary], device: Device, a: Array, **options: Unpack[Options]
) -> Array | tuple[Array, Array]:
    """X_T, or with `return_residuals` (X_T, `residuals` (A, X_0 .. X_T) of the kernel's iterates)."""
    if not options.pop("return_residuals", False):
        return forward(device, a, **options)
    xs = iterates(device, a, **options)
    each = [xs[..., n, :, :] for n in range(xs.shape[-3])]
    return each[-1], residuals(a.astype(xs.dtype), each)


def backward(
    device: Device, a: Array, dx: Array, *, newton_steps: int = 20, init_scale: OfLibrary = 0.9,
    inverse_grad: str = "implicit", **others: object,
) -> dict[str, Array]:  # fmt: skip
    """Gradients {"a"} and, if it is an array, "init_scale" (0 if the gradient is implicit) for the cotangent dx."""
    call, unrolled = Call(device, a, newton_steps, init_scale), inverse_grad == "unrolled"
    da = device.empty(call.shape, a.dtype if tuple(a.shape) == call.shape else call.compute)
    call.view_as("da", da, call.leading, call.m, call.m)
    call.view_as("dx", dx, call.leading, call.m, call.m)
    if not isinstance(init_scale, Real):
        dfactors = device.empty(call.leading, call.compute)
        dfactors[...] = 0
        call.view_as("dfactors", dfactors, call.leading)
    call.iterates(unrolled)
    call.inverse()
    if unrolled:
        call.run("newton_unrolled_gradient", 4, call.m + THREADS)
    else:
        call.run("newton_implicit_gradient", 2, 0)
    grads = {"a": reduced_to(da, a)}
    if not isinstance(init_scale, Real):
        grads["init_scale"] = reduced_to(dfactors, init_scale)
    return grads
