"""The kernels for GPUs, judged by the kit without one: CUDA executed on the CPU, Triton interpreted."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnkit_conformance import core
from attnkit_conformance.judge import judge, matcher
from attnkit_conformance.report import saved

from .selection import FEW, case_of, later

CUDA, TRITON, JAX = "cuda_cpu", "triton_interpreted", "jax_triton_interpreted"
ORDERED, SPLIT = f"{TRITON}-ordered", f"{TRITON}-split"
HALVES = ("bfloat16", "float16")
SERVED_BY_TRITON = ("float32", *HALVES)
EVERY = ("float64", *SERVED_BY_TRITON)
GENERIC = "served by the generic implementation"
NUMBERS = (f"as an array is {GENERIC}", f"an array alpha is {GENERIC}")
"""Of a number that is an array, which attnkit sees to before it calls a kernel, and of α."""
FEWER_AXES = f"states with fewer axes than queries are {GENERIC}"
PAIRS = f"a mask of pairs is {GENERIC}"
DECAY = f"log_decay is {GENERIC}"
JUDGED = "ATTNKIT_JUDGED"
"""Names a file of the kit's verdicts, which `make emulated` writes before its tests: these judge the rest."""
HALVINGS = "halvings are served by the generic implementation"


class Judged(NamedTuple):
    """Kernels, an op, which cases of the quick profile, and texts in the reasons for which some may be refused."""

    adapter: str
    op: str
    expression: str | None
    dtypes: tuple[str, ...]
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.adapter}-{self.op}-{self.expression}-{'+'.join(self.dtypes)}"


# Part of the rows behind them, for `make test`: one of each kind of kernels.
FIRST = [
    Judged(CUDA, "pointwise_attention", FEW, ("float32",), NUMBERS),
    Judged(CUDA, "gaussian_attention", FEW, ("float16",), NUMBERS),
    Judged(CUDA, "softmax_attention", FEW, ("float16",), NUMBERS),
    Judged(CUDA, "entmax_attention", FEW, ("bfloat16",), NUMBERS),
    Judged(CUDA, "linear_attention", FEW, ("float32",), (PAIRS, DECAY)),
    Judged(CUDA, "newton_inverse", "-unrolled and not property", ("float32",), (HALVINGS,)),
    Judged(CUDA, "soft_attention", "padded", ("float32",)),
    Judged(CUDA, "softmax_attention_packed", "not property", ("float32",)),
    Judged(JAX, "pointwise_attention", "/causal-padded", ("float32",), (GENERIC,)),
]
BY_CUDA = {
    "pointwise_attention": EVERY,
    "reluformer_attention": HALVES,
    "sigmoid_attention": ("float32",),
    "rela_attention": ("float16",),
    "gaussian_attention": EVERY,
    "softmax_attention": ("float32", "float16"),
    "sparsemax_attention": ("float64",),
    "entmax_attention": ("bfloat16",),
}
BY_TRITON = {
    "pointwise_attention": ("float32", "float16"),
    "reluformer_attention": HALVES,
    "sigmoid_attention": ("float32", "bfloat16"),
    "gaussian_attention": SERVED_BY_TRITON,
    "rela_attention": ("float32",),
}
"""Dtypes by op, and properties of the first op alone by Triton: the kernels are the same, and the full profile by hand
has all dtypes and properties."""
LATER = [
    *(Judged(CUDA, op, None, dtypes, NUMBERS) for op, dtypes in BY_CUDA.items()),
    Judged(CUDA, "linear_attention", None, EVERY, (PAIRS, DECAY, "has no step of its own")),
    *(Judged(CUDA, "newton_inverse", None, (dtype,), (HALVINGS,)) for dtype in ("float32", "float64")),
    Judged(CUDA, "soft_attention", "not property", EVERY, (HALVINGS,)),
    Judged(CUDA, "softmax_attention_packed", "not property", ("bfloat16",)),
    *(
        Judged(CUDA, f"{kind}_attention_packed", "not property", (dtype,))
        for kind, own in (("pointwise", "float16"), ("linear", "bfloat16"))
        for dtype in (own, "float32", "float64")
    ),
    *(
        Judged(TRITON, op, None if op == "pointwise_attention" else "not property", dtypes, NUMBERS)
        for op, dtypes in BY_TRITON.items()
    ),
    Judged(TRITON, "softmax_attention", "not property", ("float16",), NUMBERS),
    Judged(TRITON, "forgetting_attention", "not property", ("float32", "bfloat16"), NUMBERS),
    Judged(TRITON, "sparsemax_attention", "not property", ("float32",), NUMBERS),
    Judged(TRITON, "entmax_attention", FEW, ("float32",), NUMBERS),
    Judged(TRITON, "entmax_attention", None, ("float16",), NUMBERS),
    Judged(TRITON, "softpick_attention", None, SERVED_BY_TRITON, NUMBERS),
    Judged(TRITON, "linear_attention", None, SERVED_BY_TRITON, (PAIRS,)),
    Judged(TRITON, "linear_attention_step", "not property", SERVED_BY_TRITON, (FEWER_AXES,)),
    *(
        Judged(TRITON, f"{kind}_attention", "not property", SERVED_BY_TRITON, (GENERIC,))
        for kind in ("cosine", "performer", "efficient")
    ),
    *(Judged(TRITON, op, None, ("float32",), (HALVINGS,)) for op in ("newton_inverse", "soft_attention")),
    Judged(TRITON, "softmax_attention_packed", None, ("float32",)),
    Judged(TRITON, "pointwise_attention_packed", None, ("float16",)),
    Judged(TRITON, "linear_attention_packed", None, ("float32",)),
    Judged(SPLIT, "pointwise_attention", "/gqa-mask", ("float32",), NUMBERS),
    Judged(SPLIT, "softmax_attention", "/gqa-mask", ("float32",), NUMBERS),
    Judged(SPLIT, "pointwise_attention", FEW, ("float32", "bfloat16"), NUMBERS),
    Judged(SPLIT, "softmax_attention", "not property", ("float32", "float16"), NUMBERS),
    Judged(SPLIT, "forgetting_attention", FEW, ("float16",), NUMBERS),
    Judged(SPLIT, "sigmoid_attention", "not property", ("float16",), NUMBERS),
    Judged(ORDERED, "pointwise_attention", "not property", ("float16",), NUMBERS),
    *(Judged(ORDERED, "gaussian_attention", "not property", (dtype,), NUMBERS) for dtype in ("float32", "bfloat16")),
    *(
        Judged(JAX, f"{kind}_attention", FEW, ("float32", "bfloat16"), (GENERIC,))
        for kind in ("pointwise", "softmax", "entmax", "gaussian")
    ),
    Judged(
        JAX, "linear_attention", "not property", ("float32", "bfloat16"), (GENERIC,)
    ),  # few have its masks and groups
]


@cache
def judged_before() -> tuple[core.CaseResult, ...]:
    """The verdicts of the file that JUDGED names, without what was measured."""
    records = saved.read(Path(os.environ[JUDGED]))["results"] if JUDGED in os.environ else ()
    names = ("id", "adapter", "op", "dtype", "status", "reason")
    return tuple(
        core.CaseResult(
            **{name: record[name] for name in names},
            failures=tuple((failure["check"], failure["message"]) for failure in record["failures"]),
        )
        for record in records
    )


def verdicts(row: Judged, adapter_of: Callable[[str], Any]) -> list[core.CaseResult]:
    """The kit's on a row: those that it had before, and of cases that it had not."""
    keep = matcher(row.expression)
    before = {
        f"{result.adapter}::{result.id}": result
        for result in judged_before()
        if (result.adapter, result.op) == (row.adapter, row.op) and result.dtype in row.dtypes
    }
    before = {identity: result for identity, result in before.items() if keep(identity)}
    rest = replace(keep, known=frozenset(before))
    return [*before.values(), *judge([adapter_of(row.adapter)], "small", rest, row.dtypes, ops=(row.op,))]


@pytest.mark.parametrize("row", [*FIRST, *map(later, LATER)], ids=str)
def test_conforms(row: Judged, adapter_of: Callable[[str], Any]) -> None:
    results = verdicts(row, adapter_of)
    refused = [result for result in results if result.status == "unsupported"]
    judged = [result for result in results if result not in refused]
    assert [result.reason for result in refused if not any(text in result.reason for text in row.refused)] == []
    assert {result.dtype for result in judged} == {*row.dtypes}
    assert faults(judged) == []
    assert len(judged) > len(results) // 3


@pytest.mark.emulated
def test_statistics_of_every_op_conform(adapter_of: Callable[[str], Any]) -> None:
    results = verdicts(Judged(TRITON, "attention_with_statistics", "not property", ("float32",)), adapter_of)
    passed = " ".join(result.id.split("/", 2)[2] for result in results if result.status == "pass")
    of_rows = {"softmax_attention", "sparsemax_attention", "entmax_attention"}
    wanted = {*BY_TRITON, *of_rows} - {"rela_attention"}  # whose statistics have no kernel
    assert [op for op in wanted if op not in passed] == []
    assert faults(result for result in results if result.status != "unsupported") == []
    assert all("served by the generic" in result.reason for result in results if result.status == "unsupported")


def faults(results: Iterable[core.CaseResult]) -> list[str]:
    """What is wrong with those that do not pass."""
    return [f"{result.id}\n{result.message}" for result in results if result.status != "pass"]


HALF = ("float16", "bfloat16")
FLOAT32 = ("float32",)
POINTWISE = (
    "64x64-d64", "100x257", "257x100-causal", "63x100-upper-left", "window", "transposed", "strided-causal",
    "broadcast", "broadcast-mask", "bias-per-key", "dropout-gqa", "dropout-mask", "everything",
)  # fmt: skip
GAUSSIAN = (
    "64x64-d64", "100x257", "257x100-causal", "window", "transposed", "strided-causal", "broadcast", "broadcast-mask",
    "dropout-gqa", "everything", "offset-causal", "offset-padded", "offset-self",
)  # fmt: skip
LINEAR = (
    "64x64-d64", "1x257", "63x63-causal", "100x64-upper-left", "63x100-upper-left", "key-mask", "query-mask",
    "strided-causal", "broadcast", "mqa-causal", "empty-queries", "empty-keys", "item-unseen", "everything",
)  # fmt: skip
NEWTON = ("not-symmetric-unrolled", "zero", "ones", "empty", "one", "no-leading-axes")
STATISTICS = {
    "float32": (
        "causal-padded.gaussian_attention", "causal-padded.entmax_attention.alpha=1.25", "dropout.pointwise_attention",
        "bias-inf.gaussian_attention", "dropout.softmax_attention", "bias-inf.softmax_attention",
        "dropout.sparsemax_attention", "bias-inf.entmax_attention.alpha=2.0",
    ),
    "bfloat16": (
        "gqa-mask.reluformer_attention", "100x257.sigmoid_attention", "dropout-mask.pointwise_attention",
        "100x257.gaussian_attention", "100x257.softmax_attention", "cross.entmax_attention",
        "100x257.sparsemax_attention",
    ),
    "float64": (
        "gqa-mask.gaussian_attention", "gqa-mask.softmax_attention", "gqa-mask.entmax_attention.alpha=1.25",
    ),
}  # fmt: skip
OF_ROWS = (
    "1x257.pointwise_attention", "mask-none-visible.reluformer_attention", "kinks.pointwise_attention",
    "empty-keys.softmax_attention", "mask-none-visible.softmax_attention", "kinks.entmax_attention.alpha=1.25",
    "kinks.entmax_attention.alpha=1.0", "1x257.entmax_attention.alpha=2.0", "mask-none-visible.sparsemax_attention",
)  # fmt: skip
"""What the quick profile lacks: copies of 16 bytes, many tiles, segments, common offsets and padding, rows that are not
resident, and options."""
FIRST_SCENES = [
    (CUDA, "row_statistics", FLOAT32, "cross.sigmoid_attention"),
    (CUDA, "attention_with_statistics", FLOAT32, "causal-padded.softmax_attention"),
    (TRITON, "pointwise_attention", FLOAT32, "causal-padded"),
    (TRITON, "pointwise_attention", HALVES, "1x257"),  # keys in two parts
    (TRITON, "gaussian_attention", FLOAT32, "causal-padded"),
    (TRITON, "softmax_attention", FLOAT32, "causal-padded"),
    (TRITON, "forgetting_attention", FLOAT32, "cross"),
    (TRITON, "entmax_attention", HALVES, "causal-padded"),
    (TRITON, "softpick_attention", FLOAT32, "causal-padded"),
    (TRITON, "linear_attention", HALVES, "cross"),
    (TRITON, "linear_attention", FLOAT32, "pair.shape=7x13,width=17x5,heads=grouped,batch=none"),
    (TRITON, "linear_attention_step", FLOAT32, "state"),
    (TRITON, "cosine_attention", HALVES, "cross"),
    (TRITON, "newton_inverse", FLOAT32, "init-scale"),
    (TRITON, "softmax_attention_packed", HALVES, "cross"),
]
LATER_SCENES = [
    *((CUDA, "pointwise_attention", dtypes, scene) for dtypes in (HALF, FLOAT32) for scene in POINTWISE),
    *((CUDA, "gaussian_attention", dtypes, scene) for dtypes in (HALVES, FLOAT32, ("float64",)) for scene in GAUSSIAN),
    *((CUDA, "linear_attention", FLOAT32, scene) for scene in LINEAR),
    *(
        (kernels, op, FLOAT32, "item-unseen")
        for kernels in (TRITON, JAX)
        for op in ("linear_attention", "pointwise_attention")
    ),
    *(
        (CUDA, "linear_attention", HALVES[:1], scene)
        for scene in ("1x257", "63x100-upper-left", "mqa-causal", "everything")
    ),
    *((CUDA, "newton_inverse", FLOAT32, scene) for scene in NEWTON),
    *(
        (CUDA, "softmax_attention", HALVES[:1], scene)
        for scene in ("257x100-causal", "dropout-mask", "huge", "64x64-d64")
    ),
    *((CUDA, "entmax_attention", FLOAT32, scene) for scene in ("1x257", "bias-inf", "dropout-mask", "ties")),
    *((CUDA, "row_statistics", FLOAT32, scene) for scene in OF_ROWS),
    (CUDA, "attention_with_statistics", FLOAT32, "causal-padded.pointwise_attention"),
    *((CUDA, "attention_with_statistics", (dtype,), scene) for dtype, scenes in STATISTICS.items() for scene in scenes),
]


@pytest.mark.parametrize(("adapter", "op", "dtypes", "scene"), [*FIRST_SCENES, *(later(*row) for row in LATER_SCENES)])
def test_scenes_conform(
    adapter: str, op: str, dtypes: tuple[str, ...], scene: str, adapter_of: Callable[[str], Any]
) -> None:
    kernels = adapter_of(adapter)
    assert faults([core.check(kernels, case_of(kernels, op, dtypes, scene))]) == []
