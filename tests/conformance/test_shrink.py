"""Planted bugs shrink to the smallest case that is known to show them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import attnkit_reference
from attnkit_conformance import core
from attnkit_conformance.model.case import Case
from attnkit_conformance.model.layout import MAKERS
from attnkit_conformance.model.memory import memory_of
from attnkit_conformance.opdb import BY_NAME
from attnkit_conformance.peers import heads
from attnkit_conformance.report.disagreements import largest_error, same
from attnkit_conformance.search.shrink import shrink, size
from attnkit_conformance.search.snippet import literal, snippet
from tests.conformance.plain import OnNumpy
from tests.conformance.test_layouts import drawn, plain_case

Arrays = Mapping[str, Any]


class Planted(OnNumpy):
    """The reference with a bug: `wrong(arrays, params, o)`."""

    name, dtypes = "planted", ("float64",)

    def __init__(self, wrong: Callable[[Arrays, Arrays, np.ndarray], np.ndarray]) -> None:
        self.wrong = wrong

    def call(self, op: str, arrays: Arrays, params: Arrays) -> dict[str, np.ndarray]:
        row = BY_NAME[op]
        found = row.binding.forward(attnkit_reference, row, arrays, params)
        return {**found, "o": self.wrong(arrays, params, found["o"])}


def case_of(name: str) -> Case:
    return next(
        case for case in core.cases("softmax_attention", "scenes", ("float64",)) if case.id.endswith(f"/{name}")
    )


def smallest(name: str, wrong: Callable[[Arrays, Arrays, np.ndarray], np.ndarray]) -> Case:
    adapter, case = Planted(wrong), case_of(name)
    sight = largest_error(adapter, case)
    assert sight is not None
    assert sight.output == "o"
    return shrink(case, same(adapter, case, sight))


def test_three_keys_are_left_of_a_hundred() -> None:
    found = smallest("cross", lambda arrays, params, o: o + (arrays["k"].shape[-2] >= 3))
    shapes = {name: x.shape for name, x in found.arrays.items()}
    assert shapes == {"q": (1, 1, 1, 1), "k": (1, 1, 3, 1), "v": (1, 1, 3, 1)}
    assert not any(x.any() for x in found.arrays.values())


def test_options_that_do_not_matter_go_and_the_one_that_does_stays() -> None:
    found = smallest("everything.return_lse=True", lambda arrays, params, o: o + ("scale" in params))
    assert {*found.params} == {"scale"}
    assert {*found.arrays} == {"q", "k", "v"}
    assert found.layouts == {}


def test_a_causal_mask_with_the_wrong_corner_is_two_keys() -> None:
    def upper_left(arrays: Arrays, params: Arrays, o: np.ndarray) -> np.ndarray:
        moved = {**params, "causal": "upper_left"} if params.get("causal") else params
        row = BY_NAME["softmax_attention"]
        return row.binding.forward(attnkit_reference, row, arrays, moved)["o"]

    found = smallest("64x100-causal", upper_left)
    assert found.params == {"causal": True}
    assert (found.arrays["q"].shape[-2], found.arrays["k"].shape[-2]) == (1, 2)
    assert sorted(found.arrays["v"].ravel()) in ([0.0, 1.0], [1.0, 1.0])


def test_heads_are_cut_with_the_group_they_use() -> None:
    def crossed(arrays: Arrays, params: Arrays, o: np.ndarray) -> np.ndarray:
        return o + (arrays["v"] > 2).any()

    found = smallest("gqa", crossed)
    assert "enable_gqa" not in found.params
    assert all(x.shape == (1, 1, 1, 1) for x in found.arrays.values())
    assert found.arrays["v"].item() == 3


def test_what_does_not_fail_is_refused_and_patience_ends() -> None:
    case = case_of("cross")
    with pytest.raises(ValueError, match=f"shrink: {case.id} does not fail"):
        shrink(case, lambda candidate: False)
    asked: list[str] = []
    shrink(case, lambda candidate: bool(asked.append(candidate.id) or True), evaluations=5)
    assert len(asked) == 6
    assert len({*asked}) == 6, "golden values are kept by id"


@pytest.mark.parametrize("op", [name for name in BY_NAME if name.endswith("_step")])
def test_a_case_of_a_step_becomes_smaller(op: str) -> None:
    """Its tokens and gates have other names than those of a sequence."""
    for case in core.cases(op, "scenes", ("float64",)):
        small = shrink(case, lambda candidate: True, evaluations=40)
        assert size(small) <= size(case)


def test_a_snippet_shows_the_shrunk_case() -> None:
    sdpa = pytest.importorskip("attnkit_conformance.peers.torch_sdpa").adapters()[1]
    case = case_of("key-mask")
    sight = largest_error(sdpa, case)
    assert sight is not None
    small = shrink(case, same(sdpa, case, sight))
    told: dict[str, Any] = {}
    exec(snippet(sdpa, small, "o")[0], told)
    assert np.isnan(told["got"].numpy()).any()
    assert np.isfinite(told["expected"]).all()
    assert same(sdpa, case, sight)(small)
    assert not same(sdpa, case, sight)(replace(small, id="other", arrays={**small.arrays, "v": np.zeros((1, 1, 2, 1))}))


def test_a_snippet_keeps_the_shape_of_an_array_without_entries() -> None:
    sdpa = pytest.importorskip("attnkit_conformance.peers.torch_sdpa").adapters()[1]
    case = case_of("empty-keys")
    sight = largest_error(sdpa, case)
    assert sight is not None
    small = shrink(case, same(sdpa, case, sight))
    told: dict[str, Any] = {}
    exec(snippet(sdpa, small, "o")[0], told)
    assert told["k"].shape == small.arrays["k"].shape
    assert told["k"].shape[-2] == 0
    assert told["expected"].shape == tuple(told["got"].shape)
    assert np.isnan(told["got"].numpy()).any()


def dense_strides(x: Any) -> tuple[int, ...]:
    """The strides of a dense array of its shape, in elements."""
    return tuple(int(np.prod(x.shape[axis + 1 :])) for axis in range(len(x.shape)))


def torch_ignoring_strides(call: heads.Call) -> Any:
    """A peer that reads v as a dense array."""
    torch = pytest.importorskip("torch")
    v = call.v.as_strided(call.v.shape, dense_strides(call.v))
    return torch.nn.functional.scaled_dot_product_attention(call.q, call.k, v)


def numpy_ignoring_strides(call: heads.Call) -> np.ndarray:
    """The same of NumPy arrays, from the first number in memory."""
    first = memory_of(call.v).content.view(call.v.dtype)[: call.v.size].reshape(call.v.shape)
    return attnkit_reference.softmax_attention(call.q, call.k, first)


@pytest.mark.parametrize(
    ("library", "dtype", "layout", "laid"),
    [
        ("torch", "float32", "stepped", "v"),
        ("torch", "bfloat16", "turned", "v"),
        ("torch", "float32", "turned", "all"),
        ("numpy", "float64", "negative", "v"),
    ],
)
def test_a_snippet_keeps_the_strides_that_a_failure_needs(library: str, dtype: str, layout: str, laid: str) -> None:
    base = pytest.importorskip(f"attnkit_conformance.peers.{library}_base")
    run = {"torch": torch_ignoring_strides, "numpy": numpy_ignoring_strides}[library]
    text = f"{run.__name__}(Call({{q}}, {{k}}, {{v}}, None, None, False, None))"
    imports = (f"from {__name__} import {run.__name__}", "from attnkit_conformance.peers.heads import Call")
    function = heads.Function("planted", "", (dtype,), heads.Takes(), run, text, imports, '"1"')
    adapter = {"torch": "TorchHeads", "numpy": "NumpyHeads"}[library]
    peer, case = getattr(base, adapter)(function), plain_case(dtype=dtype, layout=layout, laid=laid)
    sight = largest_error(peer, case)
    assert sight is not None
    small = shrink(case, same(peer, case, sight))
    told: dict[str, Any] = {}
    exec(snippet(peer, small, sight.output)[0], told)
    assert "v" in small.layouts
    got, expected = (np.asarray(told[name].tolist()) for name in ("got", "expected"))
    assert not np.allclose(got, expected, atol=0.1)


def test_a_gradient_is_shown_where_a_program_can_show_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from attnkit_conformance.peers.torch_base import TorchHeads

    def doubled(call: heads.Call) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(call.q, call.k, 2 * call.v - call.v.detach())

    peer = TorchHeads(heads.Function("planted", "", ("float32",), heads.Takes(), doubled, "", (), '"1"'))
    case, source = plain_case(), peer.source
    sight = largest_error(peer, case)
    assert sight is not None
    assert sight.output == "dv"
    monkeypatch.setattr(peer, "source", lambda *call: replace(source(*call), library="numpy"))
    assert largest_error(peer, case) is None


def lies(x: np.ndarray) -> tuple[Any, ...]:
    """How an array lies in memory, and the numbers there."""
    memory = memory_of(x)
    content = str(memory.content.view(x.dtype).tolist())
    return x.shape, x.strides, memory.start, memory.offset % x.itemsize, content, x.dtype


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64", "bool"])
def test_an_array_of_a_snippet_lies_in_memory_as_it_did(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bases = pytest.importorskip("attnkit_conformance.adapters.bases.torch")
    told: dict[str, Any] = {"np": np, "nan": np.nan, "torch": torch}
    for layout in MAKERS:
        x = drawn(layout, (2, 3, 4), dtype)[1]
        if layout not in bases.TorchAdapter().copied:
            exec(literal("y", x, dtype, "torch"), told)
            assert lies(bases.array_of(told["y"], torch.device("cpu"), "y")) == lies(x)
        if dtype != "bfloat16":
            exec(literal("y", x, dtype, "numpy"), told)
            assert lies(told["y"]) == lies(x)
            assert told["y"].flags.writeable == x.flags.writeable


@pytest.mark.parametrize("name", ["forgetting_attention", "gated_linear_attention", "delta_attention"])
def test_gates_and_states_shrink_with_their_tokens_heads_and_features(name: str) -> None:
    op = BY_NAME[name]
    wanted = {"log_forget", "log_gate", "beta", "initial_S"} & {*op.arguments, *op.optional}

    def accepted(case: Case) -> bool:
        """Whether the reference takes it, with its gates, state and cotangents."""
        try:
            outputs = op.binding.forward(attnkit_reference, op, case.arrays, case.params)
        except (ValueError, TypeError):
            return False
        shapes = {n: x.shape for n, x in outputs.items()}
        return wanted <= {*case.arrays} and shapes == {n: x.shape for n, x in case.cotangents.items()}

    cases = core.cases(name, "small", ("float64",))
    small = shrink(next(case for case in cases if wanted <= {*case.arrays}), accepted)
    assert {n: x.size for n, x in small.arrays.items()} == dict.fromkeys(small.arrays, 1)
