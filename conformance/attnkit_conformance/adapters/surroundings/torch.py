"""Surroundings of torch: modes around the forward and the backward pass, checkpointing, threads and tasks."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from attnkit_conformance.adapters.surroundings import Function, Surrounding
from attnkit_conformance.adapters.surroundings.together import InTasks, InThreads
from attnkit_conformance.model.types import Arrays, Keywords

Tensors = Mapping[str, torch.Tensor]
Context = Callable[[], AbstractContextManager[object]]


def fresh(leaves: Tensors) -> dict[str, torch.Tensor]:
    """The same values as leaves of a graph to come."""
    return {name: x.detach().requires_grad_() for name, x in leaves.items()}


def pull_back(outputs: Tensors, leaves: Tensors, cotangents: Tensors, retain_graph: bool = False) -> Tensors:
    """The gradients that `backward` adds up in leaves; 0 in one that no output depends on."""
    live = [name for name in cotangents if outputs[name].requires_grad]
    if live:
        torch.autograd.backward([outputs[n] for n in live], [cotangents[n] for n in live], retain_graph=retain_graph)
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}


def within(name: str, text: str, forward: Context = nullcontext, backward: Context = nullcontext) -> Surrounding:
    """A context around the forward pass and one around the backward pass."""

    def call(function: Function, arrays: Arrays) -> Arrays:
        with forward():
            return function(arrays)

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        x = fresh(leaves)
        with forward():
            outputs = function({**x, **rest})
        with backward():
            return pull_back(outputs, x, cotangents)

    return Surrounding(name, text, call, vjp)


def around(name: str, text: str, context: Context) -> Surrounding:
    """A context around both passes."""
    return within(name, text, context, context)


def without_gradients(name: str, text: str, context: Context) -> Surrounding:
    """A context in which no graph is recorded, and in which the arrays are made."""

    def call(function: Function, arrays: Arrays) -> Arrays:
        with context():
            return function({name: x.clone() for name, x in arrays.items()})

    return Surrounding(name, text, call, forward_only=f"no gradients under {name}")


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """torch.set_default_device, and back."""
    before = torch.empty(0).device  # torch 2.6 no longer says which after set_default_device(None)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms, under which torch fills what it allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def flush_subnormals() -> Iterator[None]:
    """Numbers below the normal range become 0."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def anomalies(check_nan: bool = True) -> Iterator[None]:
    """Anomaly detection without the warning that it takes time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection", UserWarning)
        mode = torch.autograd.set_detect_anomaly(True, check_nan=check_nan)
    with mode:
        yield


def detecting_anomalies(name: str, text: str) -> Surrounding:
    """Anomaly detection; of NaN where cotangents have none, as those of null rows may (semantics A5)."""

    def call(function: Function, arrays: Arrays) -> Arrays:
        with anomalies():
            return function(arrays)

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        finite = all(bool(x.isfinite().all()) for x in cotangents.values())
        x = fresh(leaves)
        with anomalies(finite):
            return pull_back(function({**x, **rest}), x, cotangents)

    return Surrounding(name, text, call, vjp)


def copies_saved() -> AbstractContextManager[object]:
    """Tensors kept for the backward pass are copied, and copied back."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), torch.clone)


class Functions(TorchFunctionMode):
    """Passes on every function."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, arguments: tuple[object, ...] = (),
        keywords: Keywords | None = None,
    ) -> object:  # fmt: skip
        return function(*arguments, **(keywords or {}))


class Operators(TorchDispatchMode):
    """Passes on every operator."""

    def __torch_dispatch__(
        self, function: Callable[..., object], types: object, arguments: tuple[object, ...] = (),
        keywords: Keywords | None = None,
    ) -> object:  # fmt: skip
        return function(*arguments, **(keywords or {}))


def with_checkpoints(name: str, text: str, use_reentrant: bool) -> Surrounding:
    """The forward pass is run again in the backward pass."""

    def run(function: Function, leaves: Arrays, rest: Arrays) -> Arrays:
        names: list[str] = []

        def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            answer = function({**dict(zip(leaves, tensors, strict=True)), **rest})
            names[:] = answer
            return tuple(answer.values())

        tensors = checkpoint(outputs, *leaves.values(), use_reentrant=use_reentrant)
        return dict(zip(names, tensors, strict=True))

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        x = fresh(leaves)
        return pull_back(run(function, x, rest), x, cotangents)

    def call(function: Function, arrays: Arrays) -> Arrays:
        floats = fresh({name: x for name, x in arrays.items() if x.is_floating_point()})
        return run(function, floats, {name: x for name, x in arrays.items() if name not in floats})

    return Surrounding(name, text, call, vjp)


def twice(name: str, text: str) -> Surrounding:
    """Two backward passes through one graph: the gradients of the second."""

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        x = fresh(leaves)
        outputs = function({**x, **rest})
        pull_back(outputs, x, cotangents, retain_graph=True)
        for leaf in x.values():
            leaf.grad = None
        return pull_back(outputs, x, cotangents)

    return Surrounding(name, text, lambda function, arrays: function(arrays), vjp)


def as_parameters(name: str, text: str) -> Surrounding:
    """Arguments that are parameters of a module."""

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        x = {name: torch.nn.Parameter(leaf) for name, leaf in leaves.items()}
        return pull_back(function({**x, **rest}), x, cotangents)

    def call(function: Function, arrays: Arrays) -> Arrays:
        floats = {name: torch.nn.Parameter(x) for name, x in arrays.items() if x.is_floating_point()}
        return function({**arrays, **floats})

    return Surrounding(name, text, call, vjp)


def beside_a_thread(name: str, text: str) -> Surrounding:
    """A call with its gradients in a thread beside another."""
    run_call, run_vjp = InThreads(), InThreads()
    plain = within(name, text)

    def call(function: Function, arrays: Arrays) -> Arrays:
        return run_call(lambda: plain.call(function, arrays))

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        assert plain.vjp is not None
        return run_vjp(partial(plain.vjp, function, leaves, rest, cotangents))

    return Surrounding(name, text, call, vjp)


def beside_a_task(name: str, text: str) -> Surrounding:
    """A call in a task; another one comes between its forward and its backward pass."""
    run_call, run_vjp = InTasks(), InTasks()

    def call(function: Function, arrays: Arrays) -> Arrays:
        async def work() -> Arrays:
            await asyncio.sleep(0)
            return function(arrays)

        return run_call(work)

    def vjp(function: Function, leaves: Arrays, rest: Arrays, cotangents: Arrays) -> Arrays:
        async def work() -> Arrays:
            x = fresh(leaves)
            outputs = function({**x, **rest})
            await asyncio.sleep(0)
            return pull_back(outputs, x, cotangents)

        return run_vjp(work)

    return Surrounding(name, text, call, vjp)


SURROUNDINGS = (
    around("default_device", 'torch.set_default_device("meta"), with tensors of a CPU', lambda: default_device("meta")),
    around("with_device", 'with torch.device("meta"), with tensors of a CPU', lambda: torch.device("meta")),
    around("double_default", "torch.set_default_dtype(torch.float64)", lambda: default_dtype(torch.float64)),
    around("half_default", "torch.set_default_dtype(torch.bfloat16)", lambda: default_dtype(torch.bfloat16)),
    without_gradients("inference_mode", "torch.inference_mode(), tensors made in it", torch.inference_mode),
    without_gradients("no_grad", "torch.no_grad()", torch.no_grad),
    around("autocast", "autocast to bfloat16 around the forward and the backward pass", autocast),
    within("autocast_forward", "autocast around the forward pass, as one should", autocast),
    within("autocast_backward", "autocast around the backward pass alone", backward=autocast),
    with_checkpoints("checkpoint", "torch.utils.checkpoint, use_reentrant=False", use_reentrant=False),
    with_checkpoints("checkpoint_reentrant", "torch.utils.checkpoint, use_reentrant=True", use_reentrant=True),
    around("deterministic", "torch.use_deterministic_algorithms(True), which fills new memory with NaN", deterministic),
    detecting_anomalies("anomalies", "torch.autograd.set_detect_anomaly(True)"),
    within("save_on_cpu", "torch.autograd.graph.save_on_cpu()", torch.autograd.graph.save_on_cpu),
    within("saved_copies", "hooks that copy the tensors saved for the backward pass", copies_saved),
    around("function_mode", "a TorchFunctionMode that passes everything on", Functions),
    around("dispatch_mode", "a TorchDispatchMode that passes everything on", Operators),
    as_parameters("parameters", "arguments that are torch.nn.Parameter"),
    twice("retain_graph", "backward twice, with retain_graph=True"),
    around("flush_denormal", "torch.set_flush_denormal(True)", flush_subnormals),
    beside_a_thread("threads", "two threads at the same time, each with a call of its own"),
    beside_a_task("tasks", "two asyncio tasks, which take turns between forward and backward"),
)
