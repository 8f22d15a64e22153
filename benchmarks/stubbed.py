"""Launches without a GPU: tensors of this machine pass for those of one, and the driver's launch is a stub.

Triton compiles the kernels for compute capability 9.0 and goes all its way to the driver, which notes what it is told.
What a call costs until then is time of the CPU that a GPU may have to wait for. It says nothing about a GPU: neither
its memory's allocator nor Triton's code in C that packs arguments is part of it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import attnkit
from attnkit._core import dispatch
from attnkit.backends.torch.triton import pointwise
from attnkit.kernels import verdicts
from benchmarks.timing import Timing, interleave

CAPABILITY = (9, 0)


class Launched(NamedTuple):
    """What the driver is told."""

    kernel: str
    code: int  # of what was compiled
    programs: tuple[int, int, int]
    stream: int
    arguments: tuple[Any, ...]


class Driver:
    """The part of Triton's driver that a launch asks; `launches` is filled while it is a list."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = self, self.launcher
        self.launches: list[Launched] | None = None
        self.stream = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, code: bytes, *rest: Any) -> tuple[Any, ...]:
        return None, (name, hash(code)), 0, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Any:
        return self.launch

    def launch(self, x: int, y: int, z: int, stream: int, function: tuple[str, int], *rest: Any) -> None:
        if self.launches is not None:
            self.launches.append(Launched(*function, (x, y, z), stream, rest[4:]))


DRIVER = Driver()
"""The only one: what Triton compiled remembers whom it is launched by."""


@contextmanager
def stubbed() -> Iterator[Driver]:
    """Tensors of this machine go to the Triton kernels, whose launches end in the driver that is yielded."""
    with ExitStack() as stack:
        for owner, name, value in (
            (pointwise, "unsupported_device", lambda q: None),
            (pointwise, "capability", lambda device: CAPABILITY),
            (verdicts, "_warned", {".".join(map(str, CAPABILITY))}),
            (dispatch, "_choices", {}),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        before = driver._active
        driver.set_active(DRIVER)
        try:
            yield DRIVER
        finally:
            driver._active = before


# ---------------------------------------------------------------------------------------------- seconds


CALLS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "relu": (attnkit.pointwise_attention, {}),
    "relu, causal": (attnkit.pointwise_attention, {"causal": True}),
    "softmax, causal": (attnkit.softmax_attention, {"causal": True}),
    "entmax": (attnkit.entmax_attention, {}),
    "linear": (attnkit.linear_attention, {}),
}


class Nothing(torch.autograd.Function):
    """Allocates an output and gradients: what torch alone takes."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(tensors[0].shape, dtype=tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(x.shape, dtype=x.dtype) for x in ctx.saved_tensors)


def calls() -> dict[str, Callable[[], Any]]:
    """Forward, and with all gradients, in bfloat16 on (2, 8, 256, 64) arrays."""
    inputs = [torch.zeros(2, 8, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in inputs]

    def step(call: Callable[..., torch.Tensor], **options: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(*leaves, **options), leaves, inputs[0])

    table: dict[str, Callable[[], Any]] = {"torch alone, gradients": step(Nothing.apply)}
    for name, (op, options) in CALLS.items():
        options = options | {"impl": "triton"}
        table[name] = lambda op=op, options=options: op(*inputs, **options)  # type: ignore[misc]
        table[f"{name}, gradients"] = step(op, **options)
    return table


def measure(*, rounds: int = 15, repeats: int = 100) -> dict[str, Timing]:
    """Seconds of a repeated call until its launches are with the driver."""
    with stubbed():
        table = calls()
        for call in list(table.values()) * 3:  # compiled, recorded, and straight to the driver
            call()
        return interleave(table, rounds=rounds, repeats=repeats)


def lines(measured: dict[str, Timing]) -> list[str]:
    """A table: microseconds per call, median, lowest and highest round."""
    head = f"{'call':28}{'median':>9}{'lowest':>9}{'highest':>9}   microseconds until a stub for the driver is called"
    rows = [(name, *(1e6 * x for x in (t.median, t.lowest, t.highest))) for name, t in measured.items()]
    return [head, *(f"{name:28}{a:9.1f}{b:9.1f}{c:9.1f}" for name, a, b, c in rows)]
