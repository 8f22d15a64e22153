"""Samples: seeded inputs of the attention ops as frozen `Case`s.

A `Scene` gives the shapes and common options (semantics A1-A6) of a case; an op's variants set its own parameters. In
the full profile every scene is combined with one variant and every variant with the basic scenes; the quick profile has
three scenes, whose shapes all ops share so that JAX compiles few shapes, and one without keys. Interactions of options
are left to the rows of grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from attnkit_conformance.model import scoring
from attnkit_conformance.model.case import Case, NoDraw, Sample, compute_dtype, generator, rounded
from attnkit_conformance.model.layout import TIED
from attnkit_conformance.model.op import Op
from attnkit_conformance.model.scene import Scene as Scene
from attnkit_conformance.model.types import Keywords, Params
from attnkit_conformance.scenes.layouts import lay_out
from attnkit_conformance.scenes.options import LEARNED, NUMBERS, numbers_of, option_arrays
from attnkit_reference import _core as reference
from attnkit_reference.forgetting import kept_tokens

HALF_TYPES = ("bfloat16", "float16")
TELLING = {"opposite_keys", "positive_values"}  # options of scenes needed for both half types
LENGTH_ARRAY = "<array>"  # in a variant: draw a `length` array
ATTEMPTS = 200
MARGIN = 2e-6  # relative distance of a score from a kink within which float32 may cross it


Pair = tuple[Scene, Params]
EARLIER = {"before": -1, "up_to": 0}
"""Options of scenes of ops that are causal themselves: the last key that is seen, from the query's own position."""
VISIBILITY = ("mask", "causal", "window", "key_lengths", "query_mask")
CAUSAL = {"causal": True}
GQA = {"enable_gqa": True}
QUICK = (
    Scene("cross", 65, 100),
    Scene("causal-padded", 64, 64, params=CAUSAL, options=("key_lengths", "bias", "poison")),
    Scene("gqa-mask", 7, 63, lead=((2, 4), (2, 2), (2, 2)), params=GQA, options=("mask", "query_mask", "gqa")),
)
NO_KEYS = Scene("empty-keys", 63, 0, options=("poison",))
# several blocks of keys of any kernel, of which windows begin in the first or later; several of queries, several
# chunks; padding within blocks, of which many kernels ask nothing but at the edges
BLOCKS = (
    Scene("blocks-window", 40, 300, lead=((1, 2),) * 3, params={"causal": True, "window": (150, 0)}),
    Scene("blocks-causal", 150, 150, lead=((1, 2),) * 3, params=CAUSAL, options=("key_lengths",)),
    Scene("blocks-masked", 40, 150, lead=((1, 2),) * 3, options=("key_mask", "poison")),
)
# torch's fused softmax, of plain causal calls with equal widths, hides keys by -∞ before it multiplies by the scale
TURNED_SCORES = Scene("causal-scale-negative", 33, 33, d=16, e=16, params={**CAUSAL, "scale": -0.3})
KINKS = Scene("kinks", 33, 33, d=2, options=("integers",), params={"scale": 1.0})
FULL = (
    *QUICK,
    Scene("1x1", 1, 1),
    Scene("2x1", 2, 1),
    Scene("1x2-causal", 1, 2, params=CAUSAL),
    Scene("1x257", 1, 257),
    Scene("63x65", 63, 65, d=17, e=5),
    Scene("64x64-d64", 64, 64, d=64, e=64),
    Scene("100x257", 100, 257, d=64, e=32, lead=((1, 2),) * 3),
    Scene("257x100-causal", 257, 100, d=32, e=32, lead=((1, 2),) * 3, params=CAUSAL),
    Scene("63x63-causal", 63, 63, params=CAUSAL),
    Scene("64x100-causal", 64, 100, params=CAUSAL),
    Scene("100x64-upper-left", 100, 64, params={"causal": "upper_left"}),
    Scene("63x100-upper-left", 63, 100, params={"causal": "upper_left"}),
    Scene("window-causal", 65, 65, params={"causal": True, "window": (3, 0)}),
    Scene("window", 63, 100, params={"window": (2, 5)}),
    Scene("window-open-left", 65, 63, params={"window": (None, 3)}),
    Scene("window-diagonal", 65, 65, params={"window": (0, 0)}),
    Scene("key-lengths", 63, 65, options=("key_lengths", "poison")),
    Scene("key-mask", 65, 100, options=("key_mask", "poison")),
    Scene("key-mask-1d", 2, 63, options=("key_mask_1d", "poison")),
    Scene("query-mask", 65, 63, options=("query_mask", "poison")),
    Scene("mask", 63, 65, options=("mask", "poison")),
    Scene("mask-2d", 65, 64, options=("mask_2d",)),
    Scene("mask-none-visible", 2, 65, options=("mask_nothing", "poison")),
    Scene("bias", 63, 65, options=("bias",)),
    Scene("bias-per-key", 63, 65, options=("bias_per_key",)),
    Scene("bias-float32", 63, 65, options=("bias", "bias_float32")),
    Scene("bias-inf", 65, 63, options=("bias_inf",)),
    Scene("scale", 63, 65, params={"scale": 0.7}),
    Scene("scale-negative", 2, 65, params={"scale": -0.3}),
    Scene("huge", 63, 65, size=12.0),
    Scene("tiny", 63, 65, size=1e-2),
    KINKS,
    Scene("ties", 63, 65, options=("equal_keys",)),
    Scene("positive-values", 2, 257, options=("positive_values",)),
    Scene("opposite-keys", 63, 2, size=0.5, options=("opposite_keys",)),
    Scene("zero-logits", 2, 65, size=0.0),
    Scene("transposed", 63, 65, layout="turned"),
    Scene("strided-causal", 65, 65, layout="stepped", params=CAUSAL),
    Scene("no-leading-axes", 63, 65, lead=((), (), ())),
    Scene("broadcast", 63, 2, lead=((3, 1), (1, 2), (2,))),
    Scene("broadcast-mask", 2, 65, lead=((2, 1, 2), (3, 2), (3, 1)), options=("mask",)),
    Scene("gqa", 63, 65, lead=((2, 6), (2, 2), (2, 2)), params=GQA, options=("gqa",)),
    Scene("mqa-causal", 65, 65, lead=((2, 3), (2, 1), (2, 1)), params={**GQA, **CAUSAL}, options=("gqa", "bias")),
    Scene("dropout", 63, 65, params={"dropout": (0.25, 2**63 + 5)}),
    Scene("dropout-gqa", 64, 100, lead=((2, 4), (2, 2), (2, 2)), params={**GQA, "dropout": (0.5, 7)}, options=("gqa",)),
    Scene("dropout-mask", 65, 63, options=("dropout_mask",)),
    Scene("empty-queries", 0, 65, options=("poison",)),
    NO_KEYS,
    Scene(
        "everything", 65, 100, lead=((2, 4), (2, 2), (2, 2)), layout="turned",
        params={**GQA, "causal": True, "window": (40, 2), "dropout": (0.1, 3), "scale": 0.4},
        options=("gqa", "key_lengths", "query_mask", "bias", "poison"),
    ),
    Scene("item-unseen", 2, 7, params=CAUSAL, options=("query_mask=some", "poison")),  # no query of an item is there
)  # fmt: skip

LEARNED_SCALES = (
    Scene("scale-array", 63, 65, options=("scale=array", "key_lengths", "query_mask", "poison")),
    Scene("scale-heads", 33, 65, lead=((2, 4), (2, 2), (2, 2)), params=GQA, options=("gqa", "scale=heads", "mask")),
)


def draw(scene: Scene, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """q, k, v and the optional arrays of a scene, before rounding and poison."""
    shapes = ((*lead, n, width) for lead, n, width in zip(
        scene.lead, (scene.L, scene.S, scene.S), (scene.d, scene.d, scene.e), strict=True))  # fmt: skip
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    if "integers" in scene.options:  # scores are exact and often 0 or 6
        largest = max(1, round(3 * scene.size))
        q, k = (rng.integers(-largest, largest + 1, x.shape).astype(np.float64) for x in (q, k))
    else:
        q, k = q * scene.size, k * scene.size
    if "grid" in scene.options:  # q kᵀ / 4 is exact in float32
        q, k = np.round(q * 4) / 4, np.round(k * 4) / 4
    if "equal_keys" in scene.options:
        k = np.broadcast_to(k[..., :1, :], k.shape).copy()
    if "opposite_keys" in scene.options:  # softmax gradients without cancellation: large enough for half types
        k[..., 1::2, :], v[..., 1::2, :] = -k[..., ::2, :], -v[..., ::2, :]
    if "positive_values" in scene.options:  # sums over keys grow: low-precision accumulators stagnate
        v = 0.6 * (1 + np.abs(v))  # with means just above 1, where roundings are largest
    if "far_values" in scene.options:  # states outweigh what gradients of q and k are made of
        v = v + 10
    options = option_arrays(scene, rng)
    if "bias" in options:
        options["bias"] = options["bias"] * scene.bias
    if {"grid", "integers"} & set(scene.options) and "bias" in options:
        options["bias"] = np.round(options["bias"] * 4) / 4
    return {"q": q, "k": k, "v": v, **options}


def poison(arrays: dict[str, np.ndarray], scene: Scene, keeps: bool = False) -> None:
    """Write NaN and infinities where A6 says that nothing is read (in place); `keeps`: keys stay in a state."""
    if scene.layout in TIED:
        raise ValueError(f"scene {scene.name}: poison needs a number in memory for each entry")
    shape = (*scene.leading, scene.L, scene.S)
    visible = visibility(scene, arrays)
    seen_q, seen_k = seeing(scene, arrays), visible.any(-2)
    if keeps:
        seen_k = np.broadcast_to(valid_keys(arrays, scene.S), seen_k.shape)
    for name, used in (("q", seen_q), ("k", seen_k), ("v", seen_k)):
        x = arrays[name]
        if "gqa" in scene.options and name != "q":
            group = shape[-3] // x.shape[-3]
            used = used.reshape(*shape[:-3], x.shape[-3], group, -1).any(-2)
        if used.shape != x.shape[:-1]:  # a row of a broadcast input is used by several batch items
            raise ValueError(f"scene {scene.name}: poison needs inputs that are not broadcast")
        x[~used] = np.resize([np.nan, np.inf, -np.inf], x.shape[-1])
    if "log_forget" in arrays and arrays["log_forget"].shape == (*scene.leading, scene.S):
        given = (*arrays.items(), *scene.params.items())
        options: Keywords = {name: x for name, x in given if name in ("mask", "key_lengths")}
        kept = kept_tokens((*scene.leading, scene.S), options.get("mask"), options.get("key_lengths"))
        arrays["log_forget"][~kept] = np.nan
    for name in ("bias", "dropout_mask"):
        if name in arrays and arrays[name].shape == shape:
            arrays[name][~visible] = np.nan


def seeing(scene: Scene, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Queries (leading..., L) that see a key or a state."""
    if "initial_S" in arrays:
        return np.broadcast_to(arrays.get("query_mask", np.asarray(True)), (*scene.leading, scene.L))
    return np.asarray(visibility(scene, arrays).any(-1))


def valid_keys(arrays: Mapping[str, np.ndarray], S: int) -> np.ndarray:
    """Keys (..., S) in a state: those that mask (for some query) and key_lengths allow."""
    mask = arrays.get("mask", np.ones((1, S), bool))
    valid = mask.any(-2) if mask.ndim > 1 else mask
    lengths = arrays.get("key_lengths", np.asarray(S))
    return np.asarray(valid & (np.arange(S) < lengths[..., None]))


def scene_case(op: Op, scene: Scene, variant: Params, label: str, dtype: str) -> Case:
    """The case of a scene, drawn as the op draws its cases."""
    return (op.scene_case or attention_case)(op, scene, variant, label, dtype)


def attention_case(
    op: Op, scene: Scene, variant: Params, label: str, dtype: str, attempts: int = ATTEMPTS, first: int = 0
) -> Case:
    """The case of one op, scene, variant and dtype: the first draw away from the kinks, from draw number `first` on."""
    scene = op.adapted(scene, variant) or scene
    params = {**scene.params, **variant}
    subject = op.subject(params)
    kinks = subject.kinks(params)
    if op.outputs_entropy(params) and (kinks or subject.steep(params)):  # log w of a difference: exact scores
        scene = replace(scene, options=(*scene.options, "grid"), params={"scale": 0.25, **scene.params})
        params = {"scale": 0.25, **params}
    exact = bool({"grid", "integers"} & set(scene.options))
    for attempt in range(first, first + attempts):
        rng = generator(f"{scene.name}/{label}/{attempt}")
        case = lay_out(op, drawn_case(op, scene, params, label, dtype, rng), scene.layout, scene.laid)
        completed = subject.complete(case) if subject.complete else case
        completed = completed and lay_out(op, completed, scene.layout, scene.laid)
        if completed is not None and (exact or not any(too_near(completed, kink, subject.settings) for kink in kinks)):
            break
    else:
        raise NoDraw(f"{case.id}: no draw in {attempts} keeps its distance from where the slope jumps")
    case = completed
    if "poison" in scene.options:
        poison(dict(case.arrays), scene, bool(params.get("return_state")))
    names = (*op.arguments, *op.optional)
    case = replace(case, arrays={name: x for name, x in case.arrays.items() if name in names})
    cotangents = draw_cotangents(op, case, rng, scene)
    if "poison" in scene.options and subject.group == "a":
        poison_cotangents(cotangents, seeing(scene, case.arrays), subject.joined)
    return lay_out(op, replace(case, cotangents=cotangents), scene.layout, scene.laid)


def drawn_case(op: Op, scene: Scene, params: Params, label: str, dtype: str, rng: np.random.Generator) -> Case:
    """A case without cotangents and poison."""
    arrays, params, dtypes = draw(scene, rng), dict(params), {}
    if params.get("length") == LENGTH_ARRAY:
        del params["length"]
        arrays["length"] = rng.integers(1, 90, (*scene.leading[-1:], scene.L)).astype(np.float64)
        dtypes["length"] = compute_dtype(dtype)
    for name in NUMBERS:
        if params.get(name) in LEARNED:
            arrays[name] = numbers_of(scene, name, str(params.pop(name)))
    if "scale" in arrays:
        params.pop("scale", None)
    dtypes |= {name: compute_dtype(dtype) for name in NUMBERS if name in arrays and arrays[name].ndim}
    if "bias_float32" in scene.options:
        dtypes["bias"] = compute_dtype(dtype)
    if not op.dropout:
        arrays.pop("dropout_mask", None)
        params.pop("dropout", None)
    for name, x in arrays.items():
        if x.dtype.kind == "f":
            arrays[name] = rounded(x, dtypes.get(name, dtype))
    return Case(
        id=f"{op.name}/{dtype}/{labelled(scene, label)}", op=op.name, dtype=dtype, arrays=arrays,
        params=params, cotangents={}, tags=frozenset((scene.name, *scene.options)), dtypes=dtypes,
    )  # fmt: skip


def too_near(case: Case, kink: float, settings: scoring.Settings | None) -> bool:
    """Whether rounding could move a visible score across a kink, where the gradient jumps."""
    sc = scoring.case_scores(case)
    x = scoring.shift_scores(case, sc, settings)
    size = np.abs(sc.scale) * (np.abs(sc.q) @ np.abs(np.swapaxes(sc.k, -1, -2))) + np.abs(x - sc.s)
    size = size if sc.bias is None else size + np.abs(sc.bias)
    return bool(np.any(sc.visible & (np.abs(x - kink) < MARGIN * (size + abs(kink)))))


def poison_cotangents(cotangents: Mapping[str, np.ndarray], seen: np.ndarray, joined: bool) -> None:
    """Write NaN and infinities where A5 says that nothing is passed on: in rows without keys (in place), where heads
    are `joined` in those of no head.
    """
    for name, x in cotangents.items():
        rows = seen.any(-2) if joined and name == "o" and seen.ndim > 1 else seen
        x[~rows] = np.nan if x.ndim == rows.ndim else np.resize([np.nan, np.inf, -np.inf], x.shape[-1])


def draw_cotangents(op: Op, case: Case, rng: np.random.Generator, scene: Scene) -> dict[str, np.ndarray]:
    """A cotangent for every output of `op` that has a gradient."""
    rows = (*scene.leading, scene.L)
    heads = scene.leading[-1] if scene.leading else 1
    joined = op.subject(case.params).joined
    shapes = {"o": (*scene.leading[:-1], scene.L, heads * scene.e) if joined else (*rows, scene.e)}
    shapes |= op.shapes(op, case) if op.shapes else {}
    return {
        name: rounded(rng.standard_normal(shapes.get(name, rows)), op.output_dtype(name, case.dtype))
        for name in op.outputs(case.params)
        if name not in op.not_differentiable
    }


def visibility(scene: Scene, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """A3 for a scene, (leading..., L, S), and the order of an op that is causal itself."""
    options: Keywords = {name: x for name, x in (*arrays.items(), *scene.params.items()) if name in VISIBILITY}
    visible = reference.visibility(f"scene {scene.name}", (*scene.leading, scene.L, scene.S), **options)
    ahead = next((ahead for option, ahead in EARLIER.items() if option in scene.options), None)
    return visible if ahead is None else visible & np.tri(scene.L, scene.S, scene.S - scene.L + ahead, dtype=bool)


def attention_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Scenes x variants for an attention op or its weights; no keys and several blocks in every profile and dtype,
    scores of turned sign in every profile."""
    scenes = tuple(scene for scene in FULL if op.serves(scene.options))
    always = [(scene, op.variants[0]) for scene in (NO_KEYS, *BLOCKS)]
    pairs = [*share_pairs(scene_variants(scenes, op.variants, profile), dtype), *always, *op.extra]
    pairs += [(TURNED_SCORES, op.variants[0])] if op.group == "a" and (profile == "full" or dtype == "float32") else []
    pairs += [(scene, op.variants[0]) for scene in LEARNED_SCALES if op.group == "a" and profile == "full"]
    for scene, variant in fitting(op, pairs):
        yield scene_sample(op, scene, variant, dtype)


def scene_sample(op: Op, scene: Scene, variant: Params, dtype: str, label: str | None = None) -> Sample:
    """The sample of a scene with a variant, which is its label by default."""
    label = variant_label(variant) if label is None else label

    def draw(halvings: int, again: int = 0) -> Case:
        smaller = replace(scene, size=scene.size / 2**halvings, bias=scene.bias / 2**halvings)
        return attention_case(op, smaller, variant, label, dtype, first=again * ATTEMPTS)

    return Sample(f"{op.name}/{dtype}/{labelled(scene, label)}", draw)


def labelled(scene: Scene, label: str) -> str:
    """A scene and a label as the name of a case."""
    return ".".join(filter(None, (scene.name, label)))


def fitting(op: Op, pairs: Iterable[Pair], subject: str | None = None) -> list[Pair]:
    """The distinct pairs, reduced to what the op (or that of its statistics) supports."""
    own = {} if subject is None else {"op": subject}
    adapted = [(op.adapted(scene, {**variant, **own}), variant) for scene, variant in pairs]
    return distinct([(scene, variant) for scene, variant in adapted if scene is not None])


STATISTICS_SCENES = (
    "cross", "causal-padded", "gqa-mask", "1x257", "100x257", "63x100-upper-left", "window", "bias-inf", "kinks",
    "dropout", "dropout-mask", "empty-keys", "strided-causal", "broadcast-mask", "mask-none-visible",
)  # fmt: skip


def statistics_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """The same for statistics of every attention op; the quick profile gives each op one scene, and one to its signed
    weights, which have no entropy and are summed apart; what is of its statistics alone is in both.
    """
    for n, subject in enumerate(op.subjects):
        left_out = () if "v" in op.arguments else subject.outside
        every = [subject.statistics_variant(variant, left_out) for variant in subject.variants]
        variants = tuple(v for m, v in enumerate(every) if v not in every[:m])
        signed = next((v for v in variants if "fields" in v), None)
        scenes = tuple(s for s in FULL if s.name in STATISTICS_SCENES and subject.serves(s.options))
        extra = [(scene, subject.statistics_variant(variant, left_out)) for scene, variant in subject.extra]
        extra += [(scene, variants[0]) for scene in LEARNED_SCALES if subject.group == "a"]
        pairs = [*share_pairs(scene_variants(scenes, variants, "full"), dtype), *extra]
        for scene, variant in fitting(op, pairs, subject.name):
            if "integers" in scene.options and subject.group != "a":
                continue  # not for features of integers: rounding decides which of equal keys has the maximum
            quick = (QUICK[n % len(QUICK)].name, variants[n % len(variants)]), (QUICK[0].name, signed)
            if profile == "full" or (scene.name, variant) in quick:
                label = ".".join(filter(None, (subject.name, variant_label(variant))))
                yield scene_sample(op, scene, {"op": subject.name, **variant}, dtype, label)
        for scene, variant in subject.of_statistics:
            measured = {"op": subject.name, **subject.statistics_variant(variant, left_out)}
            yield scene_sample(op, scene, measured, dtype, subject.name)


def variant_label(variant: Params) -> str:
    """`{"activation": "gelu", "alpha": 0.5}` -> "gelu,alpha=0.5"."""
    parts = (str(v) if k == "activation" else f"{k}={v}" for k, v in variant.items() if k != "fields")
    return ",".join(parts)


def scene_variants(scenes: tuple[Scene, ...], variants: tuple[Params, ...], profile: str) -> list[Pair]:
    """Quick: the three quick scenes, spread over the variants. Full: also every scene with some variant, and every
    variant with the base scenes and the kinks."""
    count = len(variants)
    pairs = [(scene, n * 3 % count) for n, scene in enumerate(QUICK)]
    if profile == "full":
        pairs += [(scene, n % count) for n, scene in enumerate(scenes)]
        pairs += [(scene, v) for scene in (*QUICK[:2], KINKS) for v in range(count)]
    return distinct([(scene, variants[v]) for scene, v in pairs])


def share_pairs(pairs: list[Pair], dtype: str) -> list[Pair]:
    """The half types alternate, because both are computed in float32, unless few samples are meaningful."""

    def keeps(n: int, scene: Scene, variant: Params) -> bool:
        drawn = {("alpha", LENGTH_ARRAY), ("initial_state", LENGTH_ARRAY)} & variant.items()
        telling = TELLING & set(scene.options) or drawn
        return dtype not in HALF_TYPES or n % 2 == HALF_TYPES.index(dtype) or bool(telling)

    return [pair for n, pair in enumerate(pairs) if keeps(n, *pair)]


def distinct(pairs: list[Pair]) -> list[Pair]:
    return [pair for n, pair in enumerate(pairs) if pair not in pairs[:n]]
