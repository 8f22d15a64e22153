"""Launches without a GPU: tensors of this machine pass for those of one, and the driver's launch is a stub.

Triton reads the kernels for compute capability 9.0 and goes all its way to the driver, which notes what it is told; no
machine's code is made, since nothing here runs it. What a call costs until then is time of the CPU that a GPU may have
to wait for. It says nothing about a GPU: neither its memory's allocator nor Triton's code in C that packs arguments is
part of it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.backends import Backend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler
from triton.runtime import driver

import attnkit
from attnkit._core import dispatch
from attnkit.backends.torch.triton import pointwise, recorded
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


class Reader(CUDABackend):  # type: ignore[misc]  # has no types
    """Triton's compiler as far as its intermediate language, which is a tenth of its time."""

    def hash(self) -> str:
        """Part of the names under which Triton keeps files: nobody takes these for code of a GPU."""
        return f"stub {super().hash()}"

    def add_stages(self, stages: dict[str, Callable[..., Any]], options: Any, language: Any) -> None:
        def name(module: Any, metadata: dict[str, Any]) -> bytes:
            metadata["name"] = module.get_entry_func_name()
            metadata["shared"] = metadata["tmem_size"] = 0
            return str(module).encode()

        stages |= {"ttir": lambda module, metadata: module, self.binary_ext: name}


@contextmanager
def stubbed() -> Iterator[Driver]:
    """Tensors of this machine go to the Triton kernels, whose launches end in the driver that is yielded."""
    with ExitStack() as stack:
        for owner, name, value in (
            (pointwise, "unsupported_device", lambda q: None),
            (pointwise, "capability", lambda device: CAPABILITY),
            (verdicts, "_warned", {".".join(map(str, CAPABILITY))}),
            (dispatch, "_choices", {}),
            (recorded, "_recordings", {}),
            (recorded, "_met", set()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        reader = Backend(compiler=Reader, driver=compiler.backends["nvidia"].driver)
        stack.enter_context(mock.patch.dict(compiler.backends, {"nvidia": reader}))
        before = driver._active
        driver.set_active(DRIVER)
        try:
            yield DRIVER
        finally:
            driver._active = before


# ---------------------------------------------------------------------------------------------- seconds


LENGTHS = torch.tensor([[200], [100]])
EDGES = torch.tensor([0, 100, 256], dtype=torch.int32)
MEASURED = partial(attnkit.attention_with_statistics, attnkit.pointwise_attention)
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "relu": (attnkit.pointwise_attention, {}),
    "relu, causal": (attnkit.pointwise_attention, {"causal": True}),
    "relu, lengths": (attnkit.pointwise_attention, {"key_lengths": LENGTHS, "length": "all"}),
    "relu, dropout": (attnkit.pointwise_attention, {"dropout": (0.1, 7)}),
    "relu, dropout by a tensor": (attnkit.pointwise_attention, {"dropout": (0.1, torch.tensor(7))}),
    "softmax, causal": (attnkit.softmax_attention, {"causal": True}),
    "softmax, lengths": (attnkit.softmax_attention, {"key_lengths": LENGTHS}),
    "softmax, lse": (attnkit.softmax_attention, {"return_lse": True}),
    "entmax": (attnkit.entmax_attention, {}),
    "relu, statistics": (MEASURED, {"fields": ("entropy",)}),
    "linear": (attnkit.linear_attention, {}),
    "linear, causal": (attnkit.linear_attention, {"causal": True}),
    "linear, states": (attnkit.linear_attention, {"return_state": True}),
}
PACKED: dict[str, Callable[..., torch.Tensor]] = {
    "relu, packed": attnkit.pointwise_attention_packed,
    "softmax, packed": attnkit.softmax_attention_packed,
}
AUTOCAST = ("relu", "softmax, causal", "linear")
COMPILED = ("relu", "relu, dropout by a tensor")
PATHS = {
    "relu": ("relu, lengths", "relu, dropout", "relu, dropout by a tensor", "relu, autocast"),
    "relu, causal": ("relu, packed",),  # which also count the keys of queries
    "softmax, causal": ("softmax, lengths", "softmax, lse", "softmax, packed", "softmax, causal, autocast"),
    "linear": ("linear, autocast", "linear, states"),
}
"""By a plain call: the paths that are to cost little more."""
GRADIENTS = ", gradients"


class Nothing(torch.autograd.Function):
    """Allocates an output and gradients: what torch alone takes."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(tensors[0].shape, dtype=tensors[0].dtype)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(x.shape, dtype=x.dtype) for x in ctx.saved_tensors)


@torch.library.custom_op("benchmarks::nothing", mutates_args=(), schema="(Tensor[] arrays) -> Tensor[]")
def nothing(arrays: list[torch.Tensor]) -> list[torch.Tensor]:
    """What torch takes for a custom op, whose gradients are the same op."""
    return [torch.empty_like(x) for x in arrays]


nothing.register_fake(lambda arrays: [torch.empty_like(x) for x in arrays])
nothing.register_autograd(
    lambda ctx, grads: nothing([*ctx.saved_tensors]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]),
)


def under_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """Forward under autocast, as models are trained."""

    def cast(*arrays: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(*arrays)

    return cast


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """One graph, run as torch.compile runs it without a generator of code."""
    answer: Callable[..., Any] = torch.compile(call, fullgraph=True, backend="aot_eager")
    return answer


def calls() -> dict[str, Callable[[], Any]]:
    """Forward, and with all gradients, in bfloat16 on (2, 8, 256, 64) arrays, or (256, 16, 64) packed ones."""
    inputs = [torch.zeros(2, 8, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    table: dict[str, Callable[[], Any]] = {}

    def add(name: str, call: Callable[..., Any], arrays: list[torch.Tensor]) -> None:
        leaves = [x.clone().requires_grad_() for x in arrays]

        def step() -> Any:
            answer = call(*leaves)
            o = answer[0] if isinstance(answer, tuple | list) else answer
            return torch.autograd.grad(o, leaves, arrays[0])

        table[name] = lambda: call(*arrays)
        table[name + GRADIENTS] = step

    add("torch alone", Nothing.apply, inputs)
    add("torch alone, custom op", lambda *arrays: nothing([*arrays])[0], inputs)
    add("torch alone, compiled", compiled(lambda *arrays: nothing([*arrays])[0]), inputs)
    functions = {name: partial(op, **options, impl="triton") for name, (op, options) in CALLS.items()}
    for name, call in functions.items():
        add(name, call, inputs)
    for name, attend in PACKED.items():
        packed: Callable[..., Any] = partial(attend, cu_seqlens_q=EDGES, cu_seqlens_k=EDGES, impl="triton")
        add(name, packed, [x.reshape(256, 16, 64) for x in inputs])
    for name in AUTOCAST:
        add(f"{name}, autocast", under_autocast(functions[name]), inputs)
    for name in COMPILED:
        add(f"{name}, compiled", compiled(functions[name]), inputs)
    return table


def measure(*, rounds: int = 15, repeats: int = 100) -> dict[str, Timing]:
    """Seconds of a repeated call until its launches are with the driver."""
    with stubbed():
        table = calls()
        for call in list(table.values()) * 3:  # compiled, recorded, and straight to the driver
            call()
        return interleave(table, rounds=rounds, repeats=repeats)


def rows(measured: dict[str, Timing]) -> list[dict[str, Any]]:
    """Every call, forward and with gradients, and the plain one that it is beside."""
    plain = {path: name for name, paths in PATHS.items() for path in paths}
    names = [name for name in measured if not name.endswith(GRADIENTS)]
    return [
        {
            "call": name,
            "beside": plain.get(name, ""),
            "forward": measured[name]._asdict(),
            "gradients": measured[name + GRADIENTS]._asdict(),
        }
        for name in names
    ]


def lines(measured: dict[str, Timing]) -> list[str]:
    """A table: microseconds per call, median, lowest and highest round."""
    head = f"{'call':44}{'median':>9}{'lowest':>9}{'highest':>9}   microseconds until a stub for the driver is called"
    times = [(name, *(1e6 * x for x in (t.median, t.lowest, t.highest))) for name, t in measured.items()]
    return [head, *(f"{name:44}{a:9.1f}{b:9.1f}{c:9.1f}" for name, a, b, c in times)]
