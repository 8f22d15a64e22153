"""SOFT's Newton inverse by Triton kernels: `attnkit::triton_newton` and `attnkit::triton_newton_vjp`, and SOFT with it.

All steps of all matrices are one launch. Backward recomputes them: one more launch for either gradient.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from attnkit._core.dispatch import Kernel, namespace, with_gradients
from attnkit._core.typing import Array, Keywords, Options
from attnkit.backends.torch.custom import Arguments, Outputs
from attnkit.backends.torch.triton import launch, pointwise, recorded
from attnkit.backends.torch.triton.launch import Launch, View
from attnkit.kernels import predicted
from attnkit.kernels.triton import sizes
from attnkit.kernels.triton.sizes import LARGEST, padded
from attnkit.ops.lowrank import newton as lowrank_newton
from attnkit.ops.lowrank import soft
from attnkit.ops.lowrank.products import Gaussian


class Call(NamedTuple):
    """The matrices of a call and the options of their inversion."""

    a: Tensor  # (..., m, m)
    steps: int
    init_scale: float | Tensor  # a number, or (...)
    unrolled: bool
    keeps: bool  # X_0 .. X_T are stored

    @property
    def leading(self) -> tuple[int, ...]:
        """Those of X; in SOFT an array of init_scale may have more than a."""
        scales = self.init_scale.shape if isinstance(self.init_scale, Tensor) else ()
        return tuple(torch.broadcast_shapes(self.a.shape[:-2], scales))

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.leading, self.m, self.m

    @property
    def matrices(self) -> int:
        return math.prod(self.leading)

    @property
    def heads(self) -> int:
        return self.leading[-1] if self.leading else 1

    @property
    def m(self) -> int:
        return self.a.shape[-1]

    def view(self, x: Tensor) -> View:
        return launch.view_of(x, self.leading, self.m, self.m)

    def factors(self) -> tuple[float | None, View]:
        """The tuple `factors` of `attnkit.kernels.triton.newton`."""
        if isinstance(self.init_scale, Tensor):
            return None, launch.view_of(self.init_scale, self.leading)
        return float(self.init_scale), None

    def room(self, several: int) -> Tensor:
        """Memory for `n` padded matrices per matrix."""
        shape = (self.matrices, several, padded(self.m), padded(self.m))
        return torch.empty(shape, dtype=torch.float32, device=self.a.device)

    def launch(self, name: str, *arguments: object, **flags: object) -> Launch:
        from attnkit.kernels.triton import newton

        values = sizes.newton(name, self.m, launch.capability(self.a.device))
        return Launch(getattr(newton, name), self.matrices, (*arguments, self.heads), {**values, **flags})

    def inverse(self, x: Tensor | None, xs: Tensor | None, keeps: bool) -> Launch:
        """The launch that writes X_T into x and `xs`, or all of X_0 .. X_T into `xs`."""
        resident = sizes.newton("inverse", self.m, launch.capability(self.a.device))["HELD"]
        xs, scratch = (xs, None) if resident else (self.room(1) if xs is None else xs, self.room(2))
        out = None if x is None else self.view(x)
        arguments = (self.view(self.a), self.factors(), out, xs, scratch, self.steps)
        return self.launch("inverse", *arguments, KEEP=keeps)

    def backward(self, dx: Tensor, da: Tensor, dfactors: Tensor | None) -> list[Launch]:
        """The launches for the gradients of a and, if it is an array and the steps are unrolled, of init_scale."""
        dx_view, out = self.view(dx), self.view(da)
        if not self.unrolled:
            xs = self.room(1)
            gradient = self.launch("implicit_gradient", xs, self.room(2), dx_view, out)
        else:
            xs = self.room(self.steps + 1)
            arguments = (self.view(self.a), self.factors(), xs, self.room(4), dx_view, out, dfactors, self.steps)
            gradient = self.launch("unrolled_gradient", *arguments)
        return [self.inverse(None, xs, self.unrolled), gradient]


def call_of(
    a: Tensor,
    *,
    newton_steps: int = 20,
    init_scale: float | Tensor = 0.9,
    halvings: int = 0,
    inverse_grad: str = "implicit",
    return_residuals: bool = False,
) -> Call:
    """The options of newton_inverse, of which kernels refuse halvings."""
    return Call(a, int(newton_steps), init_scale, inverse_grad == "unrolled", return_residuals)


# ---------------------------------------------------------------------------------------------- the custom ops


def _outputs(op: str, arguments: Arguments) -> Outputs:
    """X_T, and all iterates if requested."""
    c = call_of(**arguments)
    every = {"iterates": ((*c.leading, c.steps + 1, c.m, c.m), torch.float32)} if c.keeps else {}
    return {"x": (c.shape, torch.float32)} | every


def _forward(op: str, arguments: Arguments) -> list[Tensor]:
    c = call_of(**arguments)
    x = torch.empty(c.shape, dtype=torch.float32, device=c.a.device)
    xs = c.room(c.steps + 1) if c.keeps else None
    if x.numel():
        launch.run(x, [c.inverse(x, xs, c.keeps)])
    if xs is None:
        return [x]
    return [x, xs[..., : c.m, : c.m].reshape(*c.leading, c.steps + 1, c.m, c.m).clone()]


def _backward(op: str, arguments: Arguments, dx: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
    c = call_of(**{name: x for name, x in arguments.items() if name not in ("iterates", "diterates")})
    da = launch.room_like(c.a, c.shape)
    dfactors = None
    if isinstance(c.init_scale, Tensor):
        dfactors = torch.zeros(c.leading, dtype=torch.float32, device=c.a.device)
    if da.numel():
        launch.run(da, c.backward(dx, da, dfactors))
    grads = {"a": da.sum_to_size(c.a.shape).to(c.a.dtype)}
    if dfactors is not None and isinstance(c.init_scale, Tensor):
        grads["init_scale"] = dfactors.sum_to_size(c.init_scale.shape).to(c.init_scale.dtype)
    return grads


OP = lowrank_newton.newton_inverse.__name__
CUSTOM = recorded.register("triton_newton", _forward, _backward, ("a", "init_scale"), _outputs)


# ---------------------------------------------------------------------------------------------- what the library calls


def invert(a: Tensor, **options: object) -> Tensor | tuple[Tensor, Array]:
    """newton_inverse; residuals are the generic ones of the iterates of the kernel."""
    if not options.get("return_residuals"):
        return CUSTOM.attend(OP, a=a, **options)
    x, xs = CUSTOM.outputs(OP, a=a, **options)
    return x, lowrank_newton.residuals(namespace(a), a.to(x.dtype), list(xs.detach().unbind(-3)))


def pull(a: Tensor, dx: Tensor, **options: object) -> dict[str, Tensor]:
    """newton_inverse_vjp."""
    return CUSTOM.pull(OP, dx, a=a, **options)


def inverted(a: Tensor, **options: object) -> tuple[Tensor, Callable[[Tensor], Keywords]]:
    """X, and its gradients as a function of its cotangent, for SOFT."""
    return CUSTOM.attend(OP, a=a, **options), lambda dx: pull(a, dx, **options)


def unsupported_options(m: int, **options: object) -> str | None:
    """Why matrices of m rows are not inverted on any device."""
    if m > LARGEST:
        return f"matrices with more than {LARGEST} rows are served by the generic implementation"
    return lowrank_newton.generic_alone(**options)


def unsupported(a: Tensor, *rest: Tensor | None, **options: object) -> str | None:
    """Why newton_inverse or its gradients are not supported by Triton."""
    none = "no cotangent of the output was given" if any(x is None for x in rest) else None
    return pointwise.unsupported_device(a) or unsupported_options(a.shape[-1], **options) or none


def soft_unsupported(q: Tensor, v: Tensor, landmarks: Tensor, *rest: Tensor | None, **options: object) -> str | None:
    """Why the inverse of SOFT is not supported by Triton."""
    none = "no cotangent of the output was given" if any(x is None for x in rest) else None
    return pointwise.unsupported_device(q) or unsupported_options(landmarks.shape[-2], **options) or none


def is_faster(a: Tensor, *rest: Tensor | None, newton_steps: int = 20, **options: object) -> bool:
    """Whether the inversion is predicted not to be slower."""
    return predicted.takes_inverses(math.prod(a.shape[:-2]), newton_steps, pointwise.major(a))


def soft_is_faster(q: Tensor, v: Tensor, landmarks: Tensor, *rest: Tensor | None, **options: Unpack[Options]) -> bool:
    """The same for that of the landmarks; the rest is the generic body."""
    return is_faster(landmarks, newton_steps=options.get("newton_steps", 20))


INVERSE = Kernel("triton", invert, unsupported, is_faster, taken=pointwise.taken, misplaced=pointwise.misplaced)
SOFT = Kernel("triton", partial(soft.attend, inverted, Gaussian.of), soft_unsupported, soft_is_faster)
SOFT = SOFT._replace(taken=pointwise.taken, misplaced=pointwise.misplaced)
KERNELS = with_gradients(lowrank_newton.newton_inverse, INVERSE, pull)
KERNELS |= with_gradients(soft.soft_attention, SOFT, partial(soft.pull, inverted, Gaussian.of))
