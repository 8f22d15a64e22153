"""What is no array of a library that is served: one error that names the op and the argument, for every op."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import attnkit
from attnkit_conformance import core
from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import BY_NAME, OPDB

SERVED = "an array of NumPy, torch, JAX, CuPy or array_api_strict"
NUMBERS = {"beta_t"}  # of one token: a number without axes is that of all
Arrays = dict[str, Any]


def foreign(module: str) -> type:
    """The array type of a library that has the array API and is not served."""

    class Array:
        def __init__(self, x: np.ndarray) -> None:
            self.shape, self.dtype, self.ndim, self.device = x.shape, x.dtype, x.ndim, "cpu"

        def __array_namespace__(self, api_version: str | None = None) -> Any:
            return np

    Array.__module__, Array.__qualname__ = module, "Array"
    return Array


def big_endian(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder(">"))


def in_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(x, order="C"))  # a copy: layouts may be read-only


def first_number(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1)[0].reshape(())


def message(op: Op, case: Case, call: Callable[[], Any], expected: type[Exception], name: str) -> str:
    """The text of the error of a call, once it names the function and the argument."""
    with pytest.raises(expected) as error:
        call()
    text = str(error.value)
    assert text.startswith((op.name.rpartition(".")[2], case.params.get("op", op.name))), (case.id, name, text)
    state = "state's " if op.name.endswith("_step") else "initial_state's "
    words = (name, f"d{name}", name.replace("initial_", state))
    assert any(re.search(rf"\b{word}\b", text.partition(": ")[2]) for word in words), (case.id, name, text)
    return text


def calls(op: Op) -> Iterator[tuple[Case, Callable[[Arrays, Arrays], Any], Arrays, Arrays, set[str]]]:
    """Few good calls of an op and of its vjp in which every array that it takes appears, and the arrays new in each."""
    seen: dict[str, set[str]] = {"": set(), "_vjp": set()}
    for case in (sample.draw(0) for sample in core.samples(op.name, "small", ("float32",))):
        arrays = {name: case.typed(name) for name in case.arrays}
        cotangents = {name: x.astype(op.output_dtype(name, "float32")) for name, x in case.cotangents.items()}

        def forward(arrays: Arrays, cotangents: Arrays, case: Case = case) -> Any:
            return op.binding.forward(attnkit, op, arrays, case.params)

        def backward(arrays: Arrays, cotangents: Arrays, case: Case = case) -> Any:
            return op.binding.vjp(attnkit, op, arrays, case.params, cotangents)

        for suffix, call in (("", forward), ("_vjp", backward)) if op.vjp else (("", forward),):
            pulled = cotangents if suffix and op.name != "newton_inverse" else {}  # whose cotangent is of A X A
            new = (arrays.keys() | {f"d{name}" for name in pulled}) - seen[suffix]
            seen[suffix] |= new
            if new:
                yield case, call, arrays, cotangents, new


def changes(
    op: Op, arrays: Arrays, cotangents: Arrays, new: set[str], wrong: Callable[[np.ndarray], Any]
) -> Iterator[tuple[str, Arrays, Arrays]]:
    """Each of the new arrays replaced by what is wrong."""
    for name in arrays.keys() & new:
        yield name, {**arrays, name: wrong(arrays[name])}, cotangents
    for name in (name for name in cotangents if f"d{name}" in new):
        yield name, arrays, {**cotangents, name: wrong(cotangents[name])}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_array_of_every_op(name: str) -> None:
    """An array of a library that is not served, or of another than the others; a masked one; one whose bytes are in
    another order; None; and an array without axes."""
    op = BY_NAME[name]
    for case, call, arrays, cotangents, new in calls(op):
        for at, a, c in changes(op, arrays, cotangents, new, foreign("dask.array.core")):
            text = message(op, case, lambda a=a, c=c, call=call: call(a, c), TypeError, at)
            assert "dask.array.core.Array" in text, (case.id, text)
        for at, a, c in changes(op, arrays, cotangents, new - {op.arguments[0]}, in_torch):
            text = message(op, case, lambda a=a, c=c, call=call: call(a, c), TypeError, at)
            assert "all arrays must come from one library; got torch" in text, (case.id, text)
        for at, a, c in changes(op, arrays, cotangents, new, np.ma.array):
            text = message(op, case, lambda a=a, c=c, call=call: call(a, c), TypeError, at)
            assert "is a masked array, whose mask would be dropped" in text, (case.id, text)
        for at, a, c in changes(op, arrays, cotangents, new, big_endian):
            if (a | c)[at].dtype.isnative:
                continue
            text = message(op, case, lambda a=a, c=c, call=call: call(a, c), TypeError, at)
            assert f"dtype {(a | c)[at].dtype}, in the byte order of other machines" in text, (case.id, text)
        needed = new & set(op.arguments)
        for at, a, c in changes(op, arrays, cotangents, needed, lambda x: None):
            expected = ValueError if op.name == "attention_regulariser" else TypeError  # a field that nobody asked for
            text = message(op, case, lambda a=a, c=c, call=call: call(a, c), expected, at)
            assert expected is ValueError or text.endswith("got None"), (case.id, text)
        for at, a, c in changes(op, arrays, cotangents, needed - NUMBERS, first_number):
            message(op, case, lambda a=a, c=c, call=call: call(a, c), ValueError, at)


@pytest.mark.parametrize(
    "module", ["dask.array.core", "ndonnx._array", "cubed.array_api.array_object", "sparse.numba_backend", "mlx.core"]
)
def test_libraries_that_are_not_served(module: str) -> None:
    x = foreign(module)(np.ones((3, 2)))
    with pytest.raises(TypeError, match=f"^softmax_attention: q must be {SERVED}; got {module}.Array$"):
        attnkit.softmax_attention(x, x, x)
    with pytest.raises(TypeError, match=f"^pointwise_attention: q must be {SERVED}; got {module}.Array$"):
        attnkit.explain(attnkit.pointwise_attention, x, x, x)
    with pytest.raises(TypeError, match=f"^biased: q must be {SERVED}; got {module}.Array$"):
        attnkit.landmarks.biased(x, 1)
    with pytest.raises(TypeError, match=f"^sparsity: weights must be {SERVED}; got {module}.Array$"):
        attnkit.analysis.sparsity(x)


class Metres(np.ndarray):
    """An array with a unit."""


@pytest.mark.filterwarnings("ignore:the matrix subclass is not the recommended way:PendingDeprecationWarning")
def test_subclasses_of_numpys_arrays(tmp_path) -> None:
    x = np.ones((3, 2))
    for other, kind in ((np.matrix(x), "numpy.matrix"), (x.view(Metres), f"{__name__}.Metres")):
        with pytest.raises(TypeError, match=f"^softmax_attention: k is a {kind}, whose own rules would be lost"):
            attnkit.softmax_attention(x, other, x)
    on_disk = np.memmap(tmp_path / "x", np.float64, "w+", shape=x.shape)
    on_disk[...] = x
    np.testing.assert_array_equal(attnkit.softmax_attention(on_disk, on_disk, on_disk), x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:Sparse CSR:UserWarning")
def test_tensors_that_are_not_dense() -> None:
    x = torch.ones(2, 3, 4)
    wrong = {
        "layout torch.sparse_coo": x.to_sparse(),
        "layout torch.sparse_csr": x.to_sparse_csr(),
        "nested tensor": torch.nested.nested_tensor([x[0], x[0, :2]]),
        "a nested tensor; pass a padded one": torch.nested.nested_tensor([x[0], x[0, :2]], layout=torch.jagged),
    }
    for text, other in wrong.items():
        for _ in range(2):  # dense calls of the same shape are remembered
            attnkit.softmax_attention(x, x, x)
            with pytest.raises(TypeError, match=f"^softmax_attention: q is .*{text}"):
                attnkit.softmax_attention(other, x, x)
            with pytest.raises(TypeError, match=f"^pointwise_attention: v is .*{text}"):
                attnkit.pointwise_attention(x, x, other)
    with pytest.raises(TypeError, match=r"^softmax_attention: mask is .*layout torch.sparse_coo"):
        attnkit.softmax_attention(x, x, x, mask=torch.ones(3, 3, dtype=torch.bool).to_sparse())
    with pytest.raises(TypeError, match=r"^softmax_attention: dropout seed is .*layout torch.sparse_coo"):
        attnkit.softmax_attention(x, x, x, dropout=(0.5, torch.tensor(1).to_sparse()))


OPTIONS: dict[str, tuple[Any, ...]] = {
    "mask": (True, False),
    "query_mask": (True, False),
    "landmark_mask": (True, False),
    "key_lengths": (3, 0),
    "bias": (0.5,),
    "dropout_mask": (2.0,),
    "length": (3.0,),
}


ATTENTION = ("softmax_attention", "sigmoid_attention", "linear_attention", "efficient_attention", "soft_attention")
TAKEN = [(name, option) for name in ATTENTION for option in OPTIONS if option in BY_NAME[name].optional]
TAKEN.remove(("soft_attention", "mask"))  # the kit's bounds for it read masks with axes


@pytest.mark.parametrize(("name", "option"), TAKEN)
def test_options_without_axes_broadcast(name: str, option: str) -> None:
    """A mask () is for all pairs, a number () for all queries, as in the reference."""
    case = next(core.cases(name, "small", ("float32",)))
    for x in OPTIONS[option]:
        scalar = replace(case, id=f"{case.id}~{option}={x}", arrays={**case.arrays, option: np.asarray(x)})
        verdict = core.check(AttnkitAdapter("numpy", ("float32",)), scalar)
        assert verdict.status == "pass", verdict.message


def test_there_is_a_case_for_every_op() -> None:
    assert all(next(core.samples(op.name, "small", ("float32",)), None) for op in OPDB)


def test_an_argument_that_is_missing_is_named() -> None:
    q = np.ones((3, 2))
    with pytest.raises(TypeError, match=r"^softmax_attention: missing argument 'k'"):
        attnkit.softmax_attention(q, v=q)
