"""Axes of size 0: the values of the reference, a graph to every input, and gradients of its shape and dtype.

What ops are called with are cases of the conformance kit with an axis, or several, cut to nothing, so that a new op is
among them. Legal is what the reference takes.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference
from attnkit_conformance.adapter import Adapter, Unsupported
from attnkit_conformance.adapters.base import AttnkitAdapter, dispatches, implementations
from attnkit_conformance.adapters.torch import Autograd, Explicit
from attnkit_conformance.core import scenes, typed_arrays, typed_cotangents
from attnkit_conformance.golden import growth_of
from attnkit_conformance.model.case import DTYPES, Case
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import BY_NAME, OPDB

from .arrays import assert_agrees

Arrays = Mapping[str, Any]
NAMES = [op.name for op in OPDB]
EDGES = ("cu_seqlens_q", "cu_seqlens_k")
TORCH = {name: ops for name, ops in implementations("torch").items() if not name.startswith("triton")}


# ---------------------------------------------------------------------------------------------- cases


def cut(case: Case, name: str, part: Callable[[np.ndarray], np.ndarray]) -> Case:
    """The case with a part of every array, and what counts tokens cut to those that are left."""
    arrays = {n: np.asarray(part(x)) for n, x in case.arrays.items()}
    if "key_lengths" in arrays and "k" in arrays:
        arrays["key_lengths"] = np.minimum(arrays["key_lengths"], arrays["k"].shape[-2])
    left = {n: len(arrays[n[-1]]) for n in EDGES if n in case.params}
    edges = {n: tuple(min(edge, tokens) for edge in case.params[n]) for n, tokens in left.items()}
    label = f"{case.id} without {name}"
    return replace(case, id=label, arrays=arrays, params={**case.params, **edges}, cotangents={}, layouts={})


def none_of(sizes: set[int], x: np.ndarray) -> np.ndarray:
    """x with nothing along the axes of these sizes."""
    return x[tuple(slice(0) if n in sizes else slice(None) for n in x.shape)]


def emptied(case: Case, turn: int) -> Iterator[Case]:
    """Without any token; without any item of the batch; without what every axis of one size has: of a first case for
    each size, of others for one, in turn.
    """
    items = len(case.arrays[BY_NAME[case.op].arguments[0]])
    tokens = {case.arrays[name].shape[-2] for name in ("q", "k") if name in case.arrays}
    sizes = {n for x in case.arrays.values() for n in x.shape} - {1}
    if tokens:
        yield cut(case, "tokens", partial(none_of, tokens))
    yield cut(case, "items", lambda x: x[:0] if x.ndim > 1 and len(x) == items else x)
    for n in sorted(sizes) if turn == 0 else [sorted(sizes)[turn % len(sizes)]]:
        yield cut(case, str(n), partial(none_of, {n}))


class Golden(NamedTuple):
    """A case with cotangents of 1, what the reference gives for it, and by how much its bounds grow."""

    case: Case
    outputs: Arrays
    grads: Arrays
    growth: float


def golden(case: Case, growth: float) -> Golden | None:
    """None where the reference refuses in a sentence of its own."""
    op = BY_NAME[case.op]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's means of nothing
        try:
            outputs = op.binding.forward(attnkit_reference, op, case.arrays, case.params)
            ones = {name: np.ones(np.shape(x)) for name, x in outputs.items() if name not in op.not_differentiable}
            grads = op.binding.vjp(attnkit_reference, op, case.arrays, case.params, ones) if op.vjp else {}
        except (TypeError, ValueError) as error:
            if "expected" not in str(error):
                raise
            return None
    return Golden(replace(case, cotangents=ones), outputs, grads, growth)


@cache
def legal(op: str) -> tuple[Golden, ...]:
    """Every emptied scene of an op that the reference takes; there are some."""
    whole = (sample.draw(0) for sample in scenes(op, "small", ("float32",)))
    drawn = [(case, growth_of(BY_NAME[op], case)) for case in whole]
    made = ((each, growth) for turn, (case, growth) in enumerate(drawn) for each in emptied(case, turn))
    found = tuple(known for each, growth in made if (known := golden(each, growth)))
    assert found
    return found


def assert_all(got: Arrays, exact: Arrays, growth: float) -> None:
    assert {*got} == {*exact}
    for name, x in got.items():
        if np.asarray(exact[name]).dtype.kind == "f":
            assert_agrees(x, np.asarray(exact[name]), growth)
        else:
            assert np.array_equal(x, exact[name])


def asked(op: Op, names: Mapping[str, tuple[str, ...] | None]) -> list[str]:
    """The implementations of an op."""
    return [
        name for name, ops in names.items() if (dispatches(op) or name == "generic") and (not ops or op.name in ops)
    ]


# ---------------------------------------------------------------------------------------------- judged


def explicit(adapter: Adapter, known: Golden) -> None:
    """Outputs and explicit gradients."""
    case, outputs, grads, growth = known
    arrays = typed_arrays(adapter, case)
    assert_all(adapter.call(case.op, arrays, case.params), outputs, growth)
    if BY_NAME[case.op].vjp:
        found = adapter.vjp(case.op, arrays, case.params, typed_cotangents(adapter, case))
        assert_all(found, grads, growth)
        assert {name: x.dtype for name, x in found.items()} == {name: arrays[name].dtype for name in found}


def by_autograd(adapter: Adapter, known: Golden) -> None:
    """Outputs, which keep their graph, and gradients of every input that the op differentiates."""
    case, outputs, grads, growth = known
    arrays = typed_arrays(adapter, case)
    leaves = {name: arrays[name].requires_grad_() for name in BY_NAME[case.op].differentiable if name in arrays}
    found = adapter.call(case.op, arrays, case.params)
    assert_all({name: x.detach() for name, x in found.items()}, outputs, growth)
    if leaves:
        given = typed_cotangents(adapter, case)
        assert all(found[name].requires_grad for name in given)
        pulled = torch.autograd.grad(
            [found[name] for name in given], list(leaves.values()), list(given.values()), materialize_grads=True
        )
        assert_all(dict(zip(leaves, pulled, strict=True)), grads, growth)
        assert [x.dtype for x in pulled] == [x.dtype for x in leaves.values()]


@pytest.mark.parametrize("op", NAMES)
def test_torch(op: str) -> None:
    implemented = asked(BY_NAME[op], TORCH)
    for known in legal(op):
        explicit(Explicit("", "generic", "cpu", ""), known)
        for impl in implemented:
            try:
                by_autograd(Autograd("", impl, "cpu", ""), known)
            except Unsupported:
                assert impl != "generic"


@pytest.mark.parametrize("op", NAMES)
def test_numpy(op: str) -> None:
    implemented = asked(BY_NAME[op], implementations("numpy"))
    for known in legal(op):
        for impl in implemented:
            try:
                explicit(AttnkitAdapter("", DTYPES, impl), known)
            except Unsupported:
                assert impl != "generic"


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.referee)])
@pytest.mark.parametrize("op", [op.name for op in OPDB if op.vjp])
def test_jax_traces_gradients(op: str, part: int) -> None:
    """Shapes and dtypes, without any token and without any item, of every other case each; `make conformance` has the
    other cases, and values."""
    jax = pytest.importorskip("jax")
    row, as_numpy = BY_NAME[op], AttnkitAdapter("", DTYPES)
    ways = [[known for known in legal(op) if known.case.id.endswith(name)] for name in ("tokens", "items")]
    for case, outputs, _, _ in (*ways[0][part::2], *ways[1][::-1][part::2]):
        arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in typed_arrays(as_numpy, case).items()}
        leaves = {name: arrays.pop(name) for name in row.differentiable if name in arrays}

        def pulled(leaves: Arrays, arrays: Arrays, case: Case = case) -> Any:
            def forward(leaves: Arrays) -> Any:
                found = row.binding.forward(attnkit, row, {**leaves, **arrays}, case.params)
                return {name: found[name] for name in case.cotangents}

            found, pull = jax.vjp(forward, leaves)
            return found, pull(found)[0]

        found, gradients = jax.eval_shape(pulled, leaves, arrays)
        assert {n: x.shape for n, x in found.items()} == {n: np.shape(outputs[n]) for n in found}
        assert {n: (x.shape, x.dtype) for n, x in gradients.items()} == {
            n: (x.shape, x.dtype) for n, x in leaves.items()
        }
