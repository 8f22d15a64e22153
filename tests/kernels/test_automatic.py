"""What `impl="auto"` takes on GPUs that are not here: the choice, the memory that it saves, and the warning about it.

torch's fake tensors are on CUDA devices without one; JAX's and CuPy's arrays are stood in for.
"""

import itertools
import json
import math
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
from attnkit._core import dispatch
from attnkit.backends.cupy import KERNELS as CUPY
from attnkit.backends.torch import KERNELS
from attnkit.backends.torch.triton import pointwise
from attnkit.kernels import predicted, verdicts
from attnkit.kernels.triton import sizes
from attnkit.nn import MultiHeadAttention
from benchmarks import kept
from benchmarks.__main__ import RESULTS

OPS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "softmax_attention": ((), {"key_lengths": 5}),
    "pointwise_attention": ((), {}),
    "reluformer_attention": ((), {}),
    "sigmoid_attention": ((), {"causal": True}),
    "softpick_attention": ((), {}),
    "sparsemax_attention": ((), {}),
    "entmax_attention": ((), {}),
    "rela_attention": ((), {}),
    "gaussian_attention": ((), {}),
    "linear_attention": ((), {}),
    "row_statistics": (("pointwise_attention",), {}),
    "attention_with_statistics": (("gaussian_attention",), {}),
}
"""Calls that `sdpa` does not serve."""
GENERIC_WHERE_SMALL = ("rela_attention", "row_statistics", "attention_with_statistics")
"""The generic body launches less than leads to these kernels."""


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    if sizes.TRITON is None:
        pytest.skip("triton is not installed")
    with FakeTensorMode() as mode:
        yield mode


def tensors(tokens: int, dtype: torch.dtype = torch.bfloat16, heads: int = 8, d: int = 64) -> list[torch.Tensor]:
    return [torch.empty(1, heads, tokens, d, dtype=dtype, device="cuda") for _ in range(3)]


def first(reasons: dict[str, str | None]) -> str:
    """What `auto` takes."""
    return next(name for name, reason in reasons.items() if reason is None)


def chosen(op: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> str:
    named, options = OPS[op]
    q, k, v = tensors(tokens, dtype)
    arrays = (q, k) if op == "row_statistics" else (q, k, v)
    if op == "rela_attention":
        arrays = (*arrays, torch.empty(8 * 64, device="cuda"))
    return first(attnkit.explain(getattr(attnkit, op), *named, *arrays, **options))


@pytest.mark.parametrize("op", OPS)
def test_long_sequences_go_to_kernels(op: str, fake: FakeTensorMode) -> None:
    assert chosen(op, 16_384) == "triton"
    assert chosen(op, 16_384, torch.float32) == "triton"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiny_calls_go_to_what_launches_less(op: str, dtype: torch.dtype, fake: FakeTensorMode) -> None:
    assert chosen(op, 32, dtype) == ("generic" if op in GENERIC_WHERE_SMALL else "triton")


def test_half_types_go_earlier_than_float32(fake: FakeTensorMode) -> None:
    """Gradients in float32 are predicted slower than the generic ones: memory alone decides."""
    limit = math.isqrt(predicted.KEPT // 4 // 8)  # tokens whose weights are still small
    for op in ("softmax_attention", "sigmoid_attention"):
        assert chosen(op, limit) == "triton"
        assert chosen(op, limit, torch.float32) == "generic"
        assert chosen(op, limit + 1, torch.float32) == "triton"


@pytest.mark.parametrize("tokens", [16, 16_384])
def test_softmax_stays_with_torchs_own_where_that_serves(tokens: int, fake: FakeTensorMode) -> None:
    reasons = attnkit.explain(attnkit.softmax_attention, *tensors(tokens))
    assert first(reasons) == "sdpa"
    assert reasons["triton"] is None


def decoding(items: int, dtype: torch.dtype = torch.bfloat16, keys: int = 8192) -> list[torch.Tensor]:
    """One query of 32 heads in groups of four."""
    q = torch.empty(items, 32, 1, 128, dtype=dtype, device="cuda")
    return [q, *(torch.empty(items, 8, keys, 128, dtype=dtype, device="cuda") for _ in range(2))]


@pytest.mark.parametrize(
    ("op", "options"),
    [("pointwise_attention", {}), ("sigmoid_attention", {}), ("softmax_attention", {"window": (9, 0)})],
)
def test_one_query_of_new_shapes_goes_to_kernels_from_many_keys_on(
    op: str, options: dict[str, Any], fake: FakeTensorMode
) -> None:
    attend = getattr(attnkit, op)
    for dtype in (torch.bfloat16, torch.float32):
        assert first(attnkit.explain(attend, *decoding(64, dtype), enable_gqa=True, **options)) == "triton"
    q, k, v = decoding(1, keys=64)
    assert first(attnkit.explain(attend, q, k, v, enable_gqa=True, **options)) == "generic"
    q.requires_grad_()  # a training step, whose shapes are the same each time
    assert first(attnkit.explain(attend, q, k, v, enable_gqa=True, **options)) == "triton"
    with torch.no_grad():
        assert first(attnkit.explain(attend, q, k, v, enable_gqa=True, **options)) == "generic"


def test_steps_of_states_go_to_the_kernel_unless_they_have_gradients() -> None:
    linear_step = pytest.importorskip("attnkit.backends.torch.triton.linear_step", reason="triton is not installed")
    for items in (256, 1):
        S, z = torch.empty(items, 16, 128, 128, device="meta"), torch.empty(items, 16, 128, device="meta")
        assert linear_step.is_faster(z, z, z, state=(S, z))
        assert not linear_step.is_faster(z, z, z, state=(S, z), log_decay_t=-0.1)
        assert not linear_step.is_faster(z, z, z, state=(S.requires_grad_(), z))


def test_calls_with_a_decay_are_served_by_name_alone(fake: FakeTensorMode) -> None:
    q, k, v = tensors(16_384)
    assert first(attnkit.explain("linear_attention", q, k, v, causal=True)) == "triton"
    told = attnkit.explain("linear_attention", q, k, v, causal=True, log_decay=-0.1)
    assert first(told) == "generic"
    assert told["triton"] is None


def test_explicit_gradients_and_the_inverse_go_with_them(fake: FakeTensorMode) -> None:
    q, k, v = tensors(16_384)
    for op in ("softmax", "pointwise", "entmax", "gaussian", "linear"):
        assert first(attnkit.explain(getattr(attnkit, f"{op}_attention_vjp"), q, k, v, torch.empty_like(q))) == "triton"
    a, x, one = (torch.empty(shape, device="cuda") for shape in ((96, 49, 49), (96, 784, 32), (1, 49, 49)))
    assert first(attnkit.explain(attnkit.newton_inverse, a)) == "triton"
    assert first(attnkit.explain(attnkit.newton_inverse, one, newton_steps=2)) == "generic"
    assert first(attnkit.explain(attnkit.soft_attention, x, x, torch.empty(96, 49, 32, device="cuda"))) == "triton"


@pytest.mark.parametrize(
    ("op", "edges", "expected"),
    [
        ("softmax_attention_packed", (0, 64), None),
        ("softmax_attention_packed", tuple(range(0, 4097, 64)), "triton"),
        ("pointwise_attention_packed", (0, 2000, 4096), "triton"),
        ("pointwise_attention_packed", "array", "triton"),
        ("linear_attention_packed", (0, 200), None),
        ("linear_attention_packed", tuple(range(0, 4097, 512)), "triton"),
        ("linear_attention_packed", "array", "triton"),
    ],
)
def test_packed_sequences(op: str, edges: Any, expected: str | None, fake: FakeTensorMode) -> None:
    """A generic call for every sequence, or a mask of all pairs where boundaries are an array."""
    q = torch.empty(4096 if edges == "array" else edges[-1], 8, 64, dtype=torch.bfloat16, device="cuda")
    edges = torch.empty(5, dtype=torch.int32, device="cuda") if edges == "array" else edges
    row = dispatch._kernel_at_once(KERNELS[op], "auto", (q, q, q, edges, edges), {})
    assert (row.name if row else None) == expected


def test_what_kernels_refuse_stays_generic(fake: FakeTensorMode) -> None:
    q = torch.empty(1, 8, 16_384, 512, dtype=torch.bfloat16, device="cuda")
    assert first(attnkit.explain(attnkit.pointwise_attention, q, q, q)) == "generic"
    q = tensors(16_384, torch.float64)[0]
    assert first(attnkit.explain(attnkit.pointwise_attention, q, q, q)) == "generic"


@pytest.mark.parametrize(("before", "major", "refused"), [(True, 10, True), (True, 9, False), (False, 10, False)])
def test_what_an_older_compiler_fails_in_is_refused(
    before: bool, major: int, refused: bool, fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates with two arrays of pairs; with one it compiles them."""
    monkeypatch.setattr(sizes, "BEFORE_3_9", before)
    monkeypatch.setattr(pointwise, "capability", lambda device: (major, 0))
    q, k, v = tensors(64)
    gates, pairs = torch.empty(1, 8, 64, device="cuda"), torch.empty(64, 64, device="cuda")

    def reason(op: Any, **options: Any) -> str | None:
        return attnkit.explain(op, q, k, v, **options)["triton"]

    forgetting = partial(reason, attnkit.forgetting_attention, log_forget=gates)
    for two in itertools.combinations(("mask", "bias", "dropout_mask"), 2):
        expected = f"{' and '.join(two)} need triton 3.9 or later on compute capability 10" if refused else None
        assert forgetting(**{name: pairs > 0 if name == "mask" else pairs for name in two}) == expected
    assert forgetting(bias=pairs) is forgetting(dropout_mask=pairs) is None
    assert reason(attnkit.softmax_attention, bias=pairs, dropout_mask=pairs) is None


def test_programs_that_wait_for_one_another_are_never_taken(fake: FakeTensorMode) -> None:
    names = list(attnkit.explain(attnkit.pointwise_attention, *tensors(16_384)))
    assert names.index("triton") < names.index("generic") < names.index("triton_ordered")


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ["relu", "softmax, padded"])
def test_a_training_step_keeps_no_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 tokens in bfloat16: what `auto` takes has no tensor of pairs, the generic body has several at once."""
    op, options = kept.CALLS[name]
    weights = kept.HEADS * kept.TOKENS**2 * 4
    generic, auto = (kept.of_step(op, impl, torch.bfloat16, **options) for impl in ("generic", "auto"))
    assert generic.largest >= weights
    assert generic.peak >= 3 * weights
    assert auto.largest <= kept.HEADS * kept.TOKENS * kept.WIDTH * 4
    assert auto.peak < weights / 40


# ---------------------------------------------------------------------------------------------- the warning


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of this machine pass for those of a GPU of a class that has not been judged, and launches for run."""
    monkeypatch.setattr(pointwise, "unsupported_device", lambda q: None)
    monkeypatch.setattr(pointwise, "capability", lambda device: (9, 0))
    monkeypatch.setattr(pointwise.launch, "run", lambda q, launches: [*launches])
    monkeypatch.setattr(verdicts, "_warned", set())
    monkeypatch.setattr(verdicts, "judged", frozenset)
    dispatch._choices.clear()


def test_a_class_counts_as_judged_by_verdicts_that_are_committed() -> None:
    judged = set()
    for path in RESULTS.glob("verdicts-*.json"):
        verdict = json.loads(path.read_text())
        assert not any(row["fail"] for row in verdict["rows"])
        judged.add(verdict["environment"]["capability"])
    assert judged == verdicts.judged()


LONG = 1536


def call(**options: Any) -> None:
    q = torch.zeros(1, 8, LONG, 64, dtype=torch.bfloat16)
    attnkit.pointwise_attention(q, q, q, **options)


@pytest.mark.usefixtures("device")
def test_the_first_call_of_auto_warns_once() -> None:
    with pytest.warns(
        UserWarning, match=r"compute capability 9\.0 .*attnkit_conformance verify.*impl=\"generic\""
    ) as seen:
        call()
    assert [one.filename for one in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        call(causal=True)
        attnkit.sigmoid_attention(*[torch.zeros(1, 8, LONG, 64, dtype=torch.bfloat16)] * 3)


@pytest.mark.usefixtures("device")
def test_a_kernel_by_name_or_of_a_judged_class_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(impl="triton")
        monkeypatch.setattr(verdicts, "judged", lambda: frozenset({"9.0"}))
        call()


@pytest.mark.usefixtures("device")
def test_what_runs_nothing_does_not_warn() -> None:
    q = torch.zeros(1, 8, LONG, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert first(attnkit.explain(attnkit.pointwise_attention, q, q, q)) == "triton"
        with FakeTensorMode() as mode:
            attnkit.pointwise_attention(*[mode.from_tensor(q)] * 3)
        attnkit.pointwise_attention(*[q.to("meta")] * 3)
        torch.export.export(Attention(), (q,), strict=True)
        torch.export.export(Attention(), (q,), strict=False)
    assert not verdicts._warned


class Attention(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return attnkit.pointwise_attention(q, q, q)


@pytest.mark.usefixtures("device")
def test_later_calls_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="have not been judged"):
        call()
    monkeypatch.setattr(verdicts, "warn_once", lambda capability: pytest.fail("asked again"))
    call()


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:attnkit's GPU kernels")
def test_modules_take_what_auto_takes() -> None:
    """Nothing names the generic body on the way."""
    layers: dict[str, torch.nn.Module] = {
        "pointwise_attention": MultiHeadAttention(64, 8, op="relu", causal=True),
        "linear_attention": MultiHeadAttention(64, 8, op="linear", causal=True),
        "attention_with_statistics": MultiHeadAttention(64, 8, op="relu"),
    }
    x = torch.zeros(1, LONG, 64, dtype=torch.bfloat16)
    for op, layer in layers.items():
        options = {"return_statistics": True} if op == "attention_with_statistics" else {}
        with attnkit.implementations() as ran:
            layer.bfloat16()(x, **options)
        assert ran[op] == {"triton"}


# ---------------------------------------------------------------------------------------------- CuPy


@pytest.mark.parametrize(("tokens", "dtypes"), [(512, ()), (1300, ("float64",)), (1500, ("float16", "float64"))])
def test_cupy_takes_kernels_for_the_memory_of_weights(
    tokens: int, dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clocks are not counted, and linear attention has no weights in memory."""
    monkeypatch.setattr(verdicts, "judged", lambda: frozenset({"9.0"}))
    for op in ("pointwise_attention", "sigmoid_attention", "softmax_attention", "entmax_attention", "linear_attention"):
        (row,) = CUPY[op]
        for dtype in ("float16", "float64"):
            x = on_a_gpu((1, 8, tokens, 64), dtype)
            expected = dtype in dtypes and op != "linear_attention"
            assert row.unsupported(x, x, x) is None
            assert (dispatch._automatic((row,), (x, x, x), {}) is row) is expected


def on_a_gpu(shape: tuple[int, ...], dtype: str) -> Any:
    """What dispatch asks of a CuPy array."""
    device, data = SimpleNamespace(compute_capability="90"), SimpleNamespace(ptr=0)
    strides = (0,) * len(shape)
    return SimpleNamespace(
        shape=shape, ndim=len(shape), strides=strides, dtype=np.dtype(dtype), device=device, data=data
    )


def test_cupy_warns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_warned", set())
    monkeypatch.setattr(verdicts, "judged", frozenset)
    x = on_a_gpu((1, 8, 4096, 64), "float16")
    with pytest.warns(UserWarning, match=r"compute capability 9\.0 "):
        dispatch._automatic(CUPY["pointwise_attention"], (x, x, x), {})
