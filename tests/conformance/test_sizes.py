"""Long and wide calls: every length and head size is met, options are met at some, and what they cost is bounded."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attnkit_conformance import core, judge
from attnkit_conformance.adapters.base import AttnkitAdapter
from attnkit_conformance.golden import draw_case, golden, has_near_tie
from attnkit_conformance.judge import declared
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import DTYPES, Sample
from attnkit_conformance.model.op import Op
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.scenes import rows, sizes

LARGE = OPDB
SOME = ("softmax_attention", "row_statistics", "linear_attention_weights")


@pytest.mark.parametrize("op", LARGE, ids=lambda op: op.name)
def test_every_size_is_met_by_a_plain_call_and_every_option_at_some_size(op: Op) -> None:
    own, single = rows.grammar(op, "sizes"), rows.rows(op, "sizes")
    given = {name for size in op.sizes for name in size} if op.row_case else {"shape", "width", "heads", "batch"}
    plain = [row for row in single if all(row[n] == own.plain[n] or n in {*given, "dtype", "op"} for n in row)]
    for name in given & {"shape", "width"}:
        assert {row[name] for row in plain} >= set(own.factors[name]) - {sizes.MANY["width"]}
    for name, levels in own.factors.items():
        if len(levels) > 1 and name not in sizes.NOT_OPTIONS:
            assert {row[name] for row in single} & {*levels[1:]}, name
    for row in (*single, *rows.rows(op, "large")):
        assert own.allows(row)
        assert op.row_case or row["batch"] == "many" or sizes.is_cheap(row["shape"], row["width"])
        name = rows.row_name(op, row)
        assert rows.sample_named(op, str(row["dtype"]), f"size.{name}").id.endswith(name)


@pytest.mark.parametrize(
    "op", [op for op in LARGE if "poison" in rows.grammar(op, "sizes").factors], ids=lambda op: op.name
)
def test_a_long_call_with_poison_hides_tokens_that_hold_it(op: Op) -> None:
    (row,) = (row for row in rows.rows(op, "sizes") if row["poison"] == "yes")
    case = rows.sample_named(op, str(row["dtype"]), f"size.{rows.row_name(op, row)}").draw(0)
    assert any(np.isnan(x).any() for x in case.arrays.values() if x.dtype.kind == "f")


def large(op: str, dtypes: tuple[str, ...] = DTYPES) -> list[Sample]:
    return [sample for sample in core.samples(op, "quick", dtypes) if rows.is_large(sample)]


@pytest.mark.parametrize(
    "op", [op.name if op.name in SOME else pytest.param(op.name, marks=pytest.mark.referee) for op in LARGE]
)
def test_bounds_of_long_and_wide_calls_tell_wrong_from_right(op: str) -> None:
    samples = large(op) if op not in SOME else large(op)[::6]
    for case in map(draw_case, samples):
        assert golden(case).tells(), case.id
        assert not has_near_tie(BY_NAME[op], case), case.id


class Planted(AttnkitAdapter):
    def __init__(self) -> None:
        super().__init__("planted", ("float32", "float16"), "generic")


class Narrow(Planted):
    """Reads no more than 64 features of queries and keys."""

    def answer(self, op: str, arrays: Any, params: Any) -> Any:
        cut = {name: x[..., :64] if name in ("q", "k") else x for name, x in arrays.items()}
        return super().answer(op, cut, {"scale": arrays["q"].shape[-1] ** -0.5, **params})


class Short(Planted):
    """Reads no more than 512 keys."""

    def answer(self, op: str, arrays: Any, params: Any) -> Any:
        axes = {"k": -2, "v": -2}
        return super().answer(op, {n: x[..., :512, :] if n in axes else x for n, x in arrays.items()}, params)


@pytest.mark.parametrize("wrong", [Narrow, Short])
def test_what_reads_too_little_dies_by_long_or_wide_calls_alone(wrong: type[Planted]) -> None:
    results = [*judge.judge([wrong()], "quick", "pair.plain or /size.", ("float32",), ops=SOME[:1])]
    failed = [result.id for result in results if result.status == "fail"]
    assert len(failed) >= 3
    assert all("/size." in identity for identity in failed)


class OfTheKind(AttnkitAdapter):
    """NumPy's generic bodies, of which `wrong` changes what some arrays hold."""

    def __init__(self, wrong: Any) -> None:
        super().__init__("planted", DTYPES, "generic")
        self.wrong = wrong

    def answer(self, op: str, arrays: Any, params: Any) -> Any:
        return super().answer(op, self.wrong({name: np.array(x) for name, x in arrays.items()}), params)


def cut_sequences(arrays: Any) -> Any:
    """A packed kernel that reads the first 512 keys of a sequence, and 0 for others."""
    if "cu_seqlens_k" in arrays:
        starts = np.asarray(arrays["cu_seqlens_k"])
        for start, stop in itertools.pairwise(starts):
            arrays["k"][start + 512 : stop], arrays["v"][start + 512 : stop] = 0, 0
    return arrays


def cut_total(arrays: Any) -> Any:
    """One that reads the first 1,024 keys of all sequences."""
    arrays["v"][1024:] = 0
    return arrays


def forget_tokens(arrays: Any) -> Any:
    """A step whose state counts no more than 2,048 tokens, as a half type does."""
    if "initial_z" in arrays and arrays["initial_z"].size:
        arrays["initial_z"] = np.minimum(arrays["initial_z"], 2048)
    return arrays


def cut_slots(arrays: Any) -> Any:
    """A memory of 4,096 slots at most."""
    return {name: x[..., :4096, :] if name in ("keys", "values") else x for name, x in arrays.items()}


def cut_chunks(arrays: Any) -> Any:
    """Hashing that reads 128 features."""
    arrays["qk"][..., 128:] = 0
    return arrays


def cut_image(arrays: Any) -> Any:
    """Landmarks of the first 1,024 tokens."""
    arrays["q"][..., 1024:, :] = 0
    return arrays


OTHERS = {
    "softmax_attention_packed": cut_sequences,
    "pointwise_attention_packed": cut_sequences,
    "linear_attention_packed": cut_total,
    "linear_attention_step": forget_tokens,
    "cosine_attention_step": forget_tokens,
    "key_value_memory": cut_slots,
    "lsh_buckets": cut_chunks,
    "landmarks.average_pool": cut_image,
}


@pytest.mark.parametrize(
    "op",
    [
        name if name.endswith("linear_attention_step") else pytest.param(name, marks=pytest.mark.referee)
        for name in OTHERS
    ],
)
def test_what_only_long_calls_of_other_ops_tell_dies_by_them(op: str) -> None:
    results = [*judge.judge([OfTheKind(OTHERS[op])], "quick", "/pair.plain or /size.", ops=(op,))]
    failed = [result.id for result in results if result.status == "fail"]
    assert failed
    assert all("/size." in identity for identity in failed)


@pytest.mark.parametrize(
    ("op", "serves"),
    [
        ("softmax_attention_packed", {"width": ("64x64", "128x128"), "causal": ("lower_right",)}),
        ("nystrom_attention", {"shape": ("64x8", "128x8")}),
        ("key_value_memory", {}),
    ],
)
def test_a_declaration_of_such_an_op_meets_long_and_wide_calls_within_it(op: str, serves: Any) -> None:
    adapter: Any = SimpleNamespace(name="x", dtypes=("float32", "float16"), serves={op: serves})
    own = declared.arrays(adapter, BY_NAME[op], "quick")["size."]
    assert len(own) >= len(BY_NAME[op].sizes)
    for name, levels in serves.items():
        assert {row[name] for row in own} <= {*levels, "none"}
        assert name == "causal" or {row[name] for row in own} == {*levels}


class Dear(Planted):
    emulates = True


def test_what_emulates_or_compiles_is_judged_on_few_and_in_the_full_profile_alone() -> None:
    op = BY_NAME["softmax_attention"]
    for profile, most in (("quick", 0), ("full", judge.LARGE)):
        chosen = judge.select([Dear()], op, profile, judge.matcher("size. or large."), ("float32", "float16"))
        counts = {dtype: sum(f"/{dtype}/" in sample.id for sample, _ in chosen) for dtype in ("float32",)}
        assert counts == {"float32": most}


def test_more_heads_than_a_launch_has_blocks_are_met_in_the_full_profile() -> None:
    (row,) = (row for row in rows.rows(BY_NAME["softmax_attention"], "large") if row["batch"] == "many")
    lead, *_ = rows.leads(row)
    assert np.prod(lead) > 65_535


def test_wide_heads_grow_the_probe() -> None:
    """In order, in float32, sums of 192 products are off by more than those of 64 beside their inputs."""
    assert [tolerance.growth_of_width(d) for d in (1, 64, 256)] == [1.0, 1.0, 2.0]
    rng, off = np.random.default_rng(0), {}
    for d in (64, 256):
        x, y = (rng.standard_normal((2000, d)).astype(np.float32) for _ in range(2))
        total = list(itertools.accumulate((x * y).T, lambda a, b: np.float32(a + b)))[-1]
        exact = np.sum((x * y).astype(np.float64), axis=-1)
        probe = np.sqrt(2 * np.sum((x.astype(np.float64) * y) ** 2, axis=-1))
        off[d] = np.sqrt(np.mean(((total - exact) / probe) ** 2))
    assert 1.5 < off[256] / off[64] < 2.5


def test_a_near_tie_is_drawn_again_and_not_halved() -> None:
    """Halved numbers would have it too."""
    drawn = []

    def draw(halvings: int, again: int = 0) -> Any:
        drawn.append((halvings, again))
        return rows.sample_named(
            BY_NAME["row_statistics"], "float32", "size.shape=127x129,width=64x64,batch=single,mask=2d"
        ).draw(halvings, again)

    case = draw_case(Sample("row_statistics/float32/tie", draw))
    assert drawn[0] == (0, 0)
    assert len(drawn) > 1
    assert drawn[-1][0] == 0
    assert not has_near_tie(BY_NAME["row_statistics"], case)


@pytest.mark.parametrize(
    "op",
    [op for op in BY_NAME.values() if {"initial_state", "causal"} <= {*rows.grammar(op).factors} and op.group],
    ids=lambda op: op.name,
)
def test_causality_with_a_state_meets_as_many_queries_as_keys(op: Op) -> None:
    """Of every array, the long and wide ones too: the reference refuses other calls."""
    asked = [
        row["shape"]
        for array in rows.ARRAYS["full"]
        for row in rows.rows(op, array)
        if row.get("initial_state") is not None and row.get("causal", "none") != "none"
    ]
    assert asked
    assert all(L == S for L, S in map(rows.sizes, asked))
    assert list(rows.of_unequal_lengths(op, ("4x7", "1x9"))) == list(op.equal_lengths)  # none can be asked
