"""hypothesis strategies of the ops with their own kinds of scenes, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from attnkit_conformance.families import lsh as hashing
from attnkit_conformance.families import memory
from attnkit_conformance.families.analysis import samples
from attnkit_conformance.families.linear import samples as linear_samples
from attnkit_conformance.families.lowrank import samples as lowrank_samples
from attnkit_conformance.families.lowrank import softmax_samples
from attnkit_conformance.families.packed import row
from attnkit_conformance.model.case import Case, compute_dtype, generator, rounded
from attnkit_conformance.model.op import Op
from attnkit_conformance.scenes import plain
from attnkit_conformance.scenes.attention import CAUSAL, GQA
from attnkit_conformance.search.attention import LAYOUTS, LENGTHS, POSITIVE, SEEDS, WIDTHS, optional
from attnkit_reference.lowrank.soft import gaussian

Draw = Any
SMALL = st.integers(1, 9)
LEADS = st.sampled_from((((2, 2),) * 3, ((1, 1),) * 3, ((3, 1),) * 3))
MEMORY_LEADS = st.sampled_from((((2, 2), ()), ((), ()), ((2, 3), (3,))))
MODERATE = st.sampled_from((1.0, 0.5, 2.0))  # sizes for which iterations converge


def some(*names: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Some of these names."""
    return st.lists(st.sampled_from(names), unique=True, max_size=len(names)).map(sorted).map(tuple)


@st.composite
def lowrank_scene(draw: Draw, options: tuple[str, ...], **own: Any) -> lowrank_samples.Scene:
    """A scene of a low-rank op with some of these options and drawn fields of its own."""
    fields = {name: draw(strategy) for name, strategy in own.items()}
    return lowrank_samples.Scene(
        f"search-{draw(SEEDS)}", draw(LENGTHS), d=draw(WIDTHS), e=draw(WIDTHS), lead=draw(LEADS), size=draw(MODERATE),
        options=draw(some(*options)), layout=draw(LAYOUTS), **fields,
    )  # fmt: skip


@st.composite
def soft(draw: Draw, op: Op, dtype: str) -> Case:
    """SOFT with both gradients of its inverse. It has fewer landmarks than features, so A is far from singular."""
    params = optional(inverse_grad=st.just("unrolled"), newton_steps=st.integers(0, 25), ridge=st.just(0.125))
    scene = draw(
        lowrank_scene(("key_lengths", "query_mask", "mask", "landmark_mask", "poison"), params=params, m=SMALL)
    )
    return lowrank_samples.soft_case(op, scene, dtype)


@st.composite
def nystrom(draw: Draw, op: Op, dtype: str) -> Case:
    scene = draw(lowrank_scene(("key_lengths", "query_mask", "mask", "poison"), m=SMALL))
    variant = draw(st.sampled_from(softmax_samples.NYSTROM_VARIANTS))
    return softmax_samples.nystrom_case(op, scene, dtype, variant)


@st.composite
def linformer(draw: Draw, op: Op, dtype: str) -> Case:
    names = ("key_lengths", "query_mask", "mask", "poison", "per_head", "longer", "projection_float32", "dropout_mask")
    scene = draw(lowrank_scene(names, m=SMALL, S=LENGTHS))
    return softmax_samples.linformer_case(op, scene, dtype)


@st.composite
def newton(draw: Draw, op: Op, dtype: str) -> Case:
    """The kernel of fewer landmarks than features."""
    rng, m = generator(f"newton/{draw(SEEDS)}"), draw(SMALL)
    lead = draw(st.sampled_from(((), (2, 3), (1,))))
    x = draw(MODERATE) * rng.standard_normal((*lead, m, draw(st.integers(m, 16))))
    params = draw(optional(inverse_grad=st.just("unrolled"), newton_steps=st.integers(0, 20)))
    a = rounded(gaussian(x, x, x.shape[-1] ** -0.5), dtype)
    cotangents = {"axa": rounded(rng.standard_normal(a.shape), dtype)}
    return Case("", op.name, dtype, {"a": a}, {**params, "return_residuals": True}, cotangents)


@st.composite
def sampler(draw: Draw, op: Op, dtype: str) -> Case:
    sizes = (draw(st.integers(3, 12)), draw(st.integers(3, 12)), draw(st.integers(1, 3)))
    return lowrank_samples.sampler_case(op, f"search-{draw(SEEDS)}", dtype, sizes, draw(st.booleans()))


@st.composite
def lsh(draw: Draw, op: Op, dtype: str) -> Case:
    """Chunks and rounds of every size; also a single chunk, one token, none."""
    lead = draw(st.sampled_from((((2, 2), (2, 2), (2,)), ((), (), ()), ((1, 1), (1, 1), (1,)))))
    masks = ("mask", "mask_1d", "mask_nothing") if lead[0] else ("mask_1d",)
    options = draw(st.one_of(st.just(()), st.sampled_from(masks).map(lambda name: (name,))))
    scene = hashing.Scene(
        f"search-{draw(SEEDS)}", draw(LENGTHS), draw(st.integers(1, 70)), draw(st.integers(1, 4)),
        2 * draw(st.integers(1, 8)), draw(st.integers(2, 20)), draw(WIDTHS), lead,
        draw(st.sampled_from((1.0, 0.1, 3.0))), (*options, *draw(some("poison", "rotations_float32"))),
        draw(st.sampled_from(({}, CAUSAL, {"causal": "upper_left"}))),
    )  # fmt: skip
    return hashing.lsh_case(op, scene, dtype)


@st.composite
def key_value_memory(draw: Draw, op: Op, dtype: str) -> Case:
    scene = memory.Scene(
        f"search-{draw(SEEDS)}", draw(LENGTHS), draw(LENGTHS), draw(MEMORY_LEADS),
        draw(st.sampled_from(((), ("key_bias",), ("value_bias",), memory.VECTORS, ("norm_weight",)))),
        draw(some("wide_vectors", "positive")),
        draw(st.sampled_from(({}, memory.SOFTMAX))), draw(st.sampled_from((1.0, 1e-2, 6.0))),
    )  # fmt: skip
    return memory.memory_case(op, scene, dtype)


@st.composite
def gated_attention_unit(draw: Draw, op: Op, dtype: str) -> Case:
    options = ("key_lengths", "mask", "query_mask", "bias", "wide_weights", "dropout_mask", "poison")
    params = optional(alpha=POSITIVE, causal=st.sampled_from((True, "upper_left")), length=st.just("all"))
    scene = memory.Scene(
        f"search-{draw(SEEDS)}", draw(LENGTHS), lead=draw(st.sampled_from((((2, 2), ()), ((1,), ())))),
        options=draw(some(*options)), params=draw(params), size=draw(MODERATE),
    )  # fmt: skip
    return memory.unit_case(op, scene, dtype)


@st.composite
def packed_sequences(draw: Draw, op: Op, dtype: str) -> Case:
    """Several sequences, also empty ones, with enough keys for a causal mask."""
    lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4)
    pairs, heads, groups = draw(lengths), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = tuple(n for n, _ in pairs), tuple(n for _, n in pairs)
    params = draw(optional(causal=st.sampled_from((True, "upper_left"))))
    if row.takes_windows(op):
        edge = st.one_of(st.none(), st.integers(0, 9))
        params = {**params, **draw(optional(window=st.tuples(edge, edge)))}
    pack = row.Pack(
        f"search-{draw(SEEDS)}", queries, keys, (heads * groups, heads), {**params, **(GQA if groups > 1 else {})}
    )
    return row.packed_case(op, pack, draw(st.sampled_from(op.variants)), dtype)


@st.composite
def step(draw: Draw, op: Op, dtype: str) -> Case:
    """A token after none, or after some; its leading axes and the state's broadcast."""
    leading = draw(st.sampled_from((((), ()), ((2, 2), (1, 2)), ((2, 2), (2, 2)), ((3,), (3,)))))
    state, variant = draw(st.booleans()), draw(st.sampled_from(op.variants))
    return linear_samples.step_case(op, f"search-{draw(SEEDS)}", dtype, leading, state, variant)


@st.composite
def layernorm(draw: Draw, op: Op, dtype: str) -> Case:
    """Rows near and far from 0, of one feature and of many; no row is flat: its variance would be rounding."""
    rng, d = generator(f"layernorm/{draw(SEEDS)}"), draw(WIDTHS)
    shapes = {"q_normed": (*draw(LEADS)[0], draw(LENGTHS), d), "k_normed": (*draw(LEADS)[0], draw(LENGTHS), d)}
    size = draw(st.sampled_from((1.0, 1e-2, 30.0)))
    arrays = {name[0]: size * rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays |= {f"{name}_weight": 1 + 0.3 * rng.standard_normal(d) for name in "qk"}
    dtypes = dict.fromkeys(("q_weight", "k_weight"), compute_dtype(dtype)) if draw(st.booleans()) else {}
    return plain.build(
        op, f"search-{draw(SEEDS)}", dtype, arrays, draw(optional(eps=POSITIVE)), shapes, dtypes, draw(LAYOUTS)
    )


@st.composite
def regulariser(draw: Draw, op: Op, dtype: str) -> Case:
    rng, rows = generator(f"regulariser/{draw(SEEDS)}"), (*draw(LEADS)[0], draw(LENGTHS))
    visible = rng.integers(1, 100, rows).astype(np.float64)
    total, entropy = np.exp(rng.standard_normal(rows)), rng.random(rows) * np.log(visible)
    dead, null = (
        rng.random(rows) < draw(st.sampled_from((0.0, 0.2))),
        rng.random(rows) < draw(st.sampled_from((0.0, 0.2))),
    )
    visible[null], total[null | dead], entropy[null | dead] = 0, 0, 0
    arrays = {"total": total, "entropy": entropy, "visible": visible}
    if draw(st.booleans()):
        arrays["query_mask"] = rng.random(rows) < 0.6
    params = draw(optional(entropy_cap=POSITIVE, sum_weight=POSITIVE, entropy_weight=POSITIVE))
    return plain.build(op, f"search-{draw(SEEDS)}", dtype, arrays, params, dict.fromkeys(op.outputs(params), ()))


@st.composite
def analysis(draw: Draw, op: Op, dtype: str) -> Case:
    """The makers of the fixed samples with drawn shapes."""
    masked, seed = draw(st.booleans()), draw(SEEDS)
    name = f"{'masked-' if masked else ''}search-{seed}"
    shape = (*draw(LEADS)[0], draw(st.integers(4, 40)), draw(st.integers(1, 40)))
    kind, params = op.name.rpartition(".")[-1], {}
    if op.samples is samples.weights_samples:
        arrays, params = samples.weights(name, shape), draw(st.sampled_from(op.variants))
    elif kind == "anisotropy":
        arrays = samples.vectors("masked" if masked else name, shape)
    elif kind == "variance_ratio":
        arrays, params = samples.branch_and_residual(name, shape), {"pooled": draw(st.booleans())}
    else:
        x = generator(name).standard_normal((*shape[:-2], shape[-1] % 9 + 1, 12))
        arrays = {"a": gaussian(x, x, 12**-0.5)}
    return samples.new_case(op, name, dtype, arrays, params)
