"""Samples of SOFT, its inverse and its samplers, with the functions that their golden values need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, rounded, sample
from attnkit_conformance.model.layout import DENSE
from attnkit_conformance.model.types import Keywords, Option, Params, option
from attnkit_conformance.scenes import attention
from attnkit_conformance.scenes.layouts import lay_out
from attnkit_conformance.scenes.options import of_some_dtype
from attnkit_reference import newton_inverse
from attnkit_reference.lowrank.newton import NEAR
from attnkit_reference.lowrank.soft import differences, gaussian

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op

Array = np.ndarray
Shape = tuple[int, ...]
EXPONENT_STEP, CONDITION_STEP = 16.0, 32.0
GAUSSIANS = 3.0  # P, A and P again: their relative errors add
HALVES = ("float16", "bfloat16")
CHOSEN = 5  # tokens that are landmarks, if there are as many


@dataclass(frozen=True)
class Scene:
    """Shapes, masks and parameters of one low-rank case; `lead` are the leading axes of q, v (and k), landmarks."""

    name: str
    n: int  # tokens, queries
    m: int = 9  # landmarks, slots
    S: int = 0  # keys, if they differ from the tokens
    d: int = 12
    e: int = 20
    lead: tuple[Shape, ...] = ((2, 2), (2, 2), (2, 2))
    size: float = 1.0  # standard deviation of q, k and landmarks
    options: tuple[str, ...] = ()
    params: Params = field(default_factory=dict)
    layout: str = DENSE
    quick: bool = False

    @property
    def leading(self) -> Shape:
        return self.lead[0] if "gqa" in self.options else np.broadcast_shapes(*self.lead)


UNROLLED = {"inverse_grad": "unrolled"}
APART = {"apart": 12.0, "far-apart": 100.0}  # norm of landmarks that are orthogonal
MASKS = ("key_lengths", "query_mask", "mask")
SOFT = (
    Scene("cross", 65, quick=True),
    Scene("padded", 64, options=("key_lengths", "landmark_mask", "poison"), params=UNROLLED, quick=True),
    Scene("init-scale", 63, m=7, options=("init_scale",), params={**UNROLLED, "newton_steps": 4}, quick=True),
    Scene("small", 65, m=7, size=0.2),
    Scene("small-unrolled", 65, m=7, size=0.2, params=UNROLLED),
    Scene("small-ridge", 65, m=9, size=0.2, params={"ridge": 0.01, **UNROLLED}),
    Scene("few-steps", 63, params={**UNROLLED, "newton_steps": 3}),
    Scene("no-steps", 63, params={**UNROLLED, "newton_steps": 0}),
    Scene("init-scale-implicit", 63, m=7, options=("init_scale",)),
    Scene("large", 65, size=3.0),
    Scene("paper", 196, m=49, d=32, e=32, lead=((1, 2),) * 3),
    Scene("tokens-as-landmarks", 33, m=16, options=("first",), size=2.0),
    Scene("duplicates", 33, m=8, options=("duplicates",)),
    Scene("query-mask", 65, options=("query_mask", "poison")),
    Scene("key-mask", 65, options=("mask", "poison"), params=UNROLLED),
    Scene("all-masks", 65, options=(*MASKS, "landmark_mask", "poison")),
    Scene("no-landmark", 7, m=3, options=("no_landmark", "poison")),
    Scene("as-printed", 12, m=12, options=("first", "far"), params={"init_scale": 1.0}),
    Scene("apart", 24, m=12, options=("apart",)),  # A = I to rounding: o = Pᵀ P v
    Scene("far-apart", 24, m=12, options=("far-apart",)),
    Scene("one-token", 1, m=1),
    Scene("scalar", 1, m=1, e=1),  # no sum cancels: gradients are large enough for half types
    Scene("no-leading-axes", 63, lead=((), (), ())),
    Scene("broadcast", 33, lead=((2, 1), (3, 1, 2), (1, 2))),
    Scene("transposed", 65, layout="turned"),
    Scene("strided", 65, layout="stepped"),
    Scene("empty", 0, m=3),
    Scene("no-landmarks-axis", 5, m=0),
    Scene("ridge", 65, params={"ridge": 0.5, **UNROLLED}, quick=True),
)  # fmt: skip


def of_property(scene: attention.Scene) -> Scene:
    """The scene of a property for these ops: without bias and causality, with a key mask."""
    options = tuple(name for name in scene.options if name in MASKS)
    return Scene(scene.name, scene.S, S=scene.S, d=scene.d, e=scene.e, lead=scene.lead, options=options)


def masks_of(scene: Scene, S: int, rng: np.random.Generator) -> dict[str, Array]:
    """The masks of a scene; the last item has no valid key, or no query."""
    lead = scene.leading
    masks: dict[str, Array] = {}
    if "key_lengths" in scene.options:
        shape = (*lead[:-1], 1)
        ends = np.linspace(S * 0.8, 0, int(np.prod(shape))).astype(np.int64).reshape(shape)
        masks["key_lengths"] = of_some_dtype(scene.name, S, ends)
    if "query_mask" in scene.options:
        masks["query_mask"] = rng.random((*lead[:-1], 1, scene.n)) < 0.7
        masks["query_mask"][-1] = False  # the keys of this item are not read
    if "mask" in scene.options:
        masks["mask"] = rng.random((*lead[:-1], 1, 1, S)) < 0.7
    if "mask_1d" in scene.options:
        masks["mask"] = rng.random(S) < 0.7
    return masks


def inputs_of(case: Case) -> Keywords:
    """Arrays and parameters: key_lengths are either."""
    return {**case.params, **case.arrays}


def valid_keys(inputs: Keywords, leading: Shape, S: int) -> Array:
    """Keys (leading..., S) that mask and key_lengths allow."""
    keys = np.ones((*leading, S), bool)
    if "mask" in inputs:
        keys &= inputs["mask"][..., 0, :] if inputs["mask"].ndim > 1 else inputs["mask"]
    if "key_lengths" in inputs:
        keys &= np.arange(S) < np.asarray(inputs["key_lengths"])[..., None]
    return keys


def valid_queries(arrays: Mapping[str, Array], leading: Shape, n: int) -> Array:
    return np.broadcast_to(arrays.get("query_mask", np.ones(n, bool)), (*leading, n))


def finish(op: Op, scene: Scene, dtype: str, case: Case, hidden: Mapping[str, Array], out: Shape) -> Case:
    """Rounded arrays, NaN and infinities in padding, and a cotangent."""
    inputs = {n: rounded(x, case.dtype_of(n)) if x.dtype.kind == "f" else x for n, x in case.arrays.items()}
    if "poison" in scene.options:
        for name, rows in hidden.items():
            if name in inputs:
                inputs[name] = inputs[name].copy()
                inputs[name][rows] = np.resize([np.nan, np.inf, -np.inf], inputs[name].shape[-1])
    rng = generator(f"{op.name}/{case.id}/cotangents".replace(dtype, ""))
    cotangents = {name: rounded(rng.standard_normal(out), dtype) for name in op.outputs(case.params)}
    names = (*op.arguments, *op.optional)
    arrays = {n: x for n, x in inputs.items() if n in names}
    return lay_out(op, replace(case, arrays=arrays, cotangents=cotangents if op.vjp else {}), scene.layout)


def new_case(op: Op, scene: Scene, dtype: str, arrays: Mapping[str, Array], params: Params, label: str = "") -> Case:
    name = f"{scene.name}{label}"
    tags = frozenset((scene.name, *scene.options))
    return Case(f"{op.name}/{dtype}/{name}", op.name, dtype, arrays, params, {}, tags)


def soft_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Landmarks of standard deviation 1 and 0.2, masks of tokens and of landmarks, both gradients of the inverse.

    Half types leave out two kinds of scenes: ill-conditioned ones, where rounding q to 8 bits gives other, singular
    matrices; and landmarks 100 apart, for which their bound is meaningless.
    """
    for scene in SOFT:
        if (scene.quick or profile == "full") and not (
            dtype in HALVES and scene.name.startswith(("small", "far-apart"))
        ):
            yield sample(op.name, dtype, scene.name, soft_case, op, scene, dtype)


def soft_case(op: Op, scene: Scene, dtype: str) -> Case:
    rng = generator(f"soft/{scene.name}")
    n, m, leading = scene.n, scene.m, scene.leading
    shapes = zip(scene.lead, ((n, scene.d), (n, scene.e), (m, scene.d)), strict=True)
    q, v, landmarks = (rng.standard_normal((*lead, *rest)) for lead, rest in shapes)
    q, landmarks = q * scene.size, landmarks * scene.size
    if "far" in scene.options:
        q = np.broadcast_to(100.0 * np.eye(n, scene.d), q.shape).copy()
    for size in (APART[name] for name in scene.options if name in APART):  # two tokens near each landmark
        landmarks = np.broadcast_to(size * np.eye(m, scene.d), landmarks.shape).copy()
        q = q + np.concatenate([landmarks, landmarks], axis=-2)
    if "first" in scene.options:
        landmarks = q[..., :m, :].copy()
    if "duplicates" in scene.options:
        landmarks[..., m // 2 :, :] = landmarks[..., : m // 2, :]
    arrays = {"q": q, "v": v, "landmarks": landmarks, **masks_of(scene, n, rng)}
    if "landmark_mask" in scene.options:
        arrays["landmark_mask"] = np.arange(m) % 4 != 1
    if "no_landmark" in scene.options:
        arrays["landmark_mask"] = np.zeros(m, bool)
    dtypes = {}
    if "init_scale" in scene.options:
        arrays["init_scale"], dtypes["init_scale"] = rng.uniform(0.1, 0.3, (leading[-2], 1)), compute_dtype(dtype)
    case = replace(new_case(op, scene, dtype, arrays, dict(scene.params)), dtypes=dtypes)
    tokens = ~(valid_keys(inputs_of(case), leading, n) & valid_queries(arrays, leading, n))
    hidden = {"q": tokens, "v": tokens}
    if "landmark_mask" in arrays:
        hidden["landmarks"] = np.broadcast_to(~arrays["landmark_mask"], landmarks.shape[:-1])
    return finish(op, scene, dtype, case, hidden, (*leading, n, scene.e))


def soft_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    return soft_case(op, of_property(scene), dtype)


def tokens_of(case: Case) -> tuple[Array, Array]:
    """Valid tokens (..., n) and landmarks (..., m) of a soft_attention case."""
    arrays = [case.arrays[name] for name in ("q", "v", "landmarks") if name in case.arrays]
    leading, n = np.broadcast_shapes(*(x.shape[:-2] for x in arrays)), case.arrays["q"].shape[-2]
    tokens = valid_keys(inputs_of(case), leading, n) & valid_queries(case.arrays, leading, n)
    m = case.arrays["landmarks"].shape[-2]
    return tokens, np.broadcast_to(case.arrays.get("landmark_mask", np.ones(m, bool)), (*leading, m))


def kernel_of(case: Case) -> Array:
    """A of a soft_attention case."""
    _, present = tokens_of(case)
    landmarks = np.where(present[..., None], case.arrays["landmarks"], 0.0)
    a = gaussian(landmarks, landmarks, landmarks.shape[-1] ** -0.5) * (present[..., :, None] & present[..., None, :])
    return np.asarray(a + option(case.params, "ridge", 0.0) * np.eye(a.shape[-1]) * present[..., None])


def soft_tells(case: Case) -> bool:
    return halvings_are_told(kernel_of(case), case)


def soft_growth(case: Case) -> float:
    """1 + 3 max|exponent|/16. What X adds, for it may be ill-conditioned, is in the magnitudes: they have |X|.

    Exponents ‖x - y‖²/(2√d) whose Gaussian is 0 count too: they measure the distance of the tokens from their centre,
    and with it the cancellation in an expanded square.
    """
    tokens, present = tokens_of(case)
    q = np.where(tokens[..., None], case.arrays["q"], 0.0)
    landmarks = np.where(present[..., None], case.arrays["landmarks"], 0.0)
    if 0 in (q.size, landmarks.size):
        return 1.0
    scale = 1.0 / float(np.sqrt(q.shape[-1]))
    squares = np.sum(differences(landmarks, q) ** 2, axis=-1)
    visible = np.broadcast_to(present[..., :, None] & tokens[..., None, :], squares.shape)
    largest = 0.5 * scale * float(np.max(squares, initial=0.0, where=visible))
    return 1.0 + GAUSSIANS * largest / EXPONENT_STEP


def soft_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Invalid tokens have output and gradients 0, invalid landmarks gradient 0."""
    tokens, present = tokens_of(case)
    pairs = tokens[..., :, None] & tokens[..., None, :]
    outputs = {"o": ~tokens[..., None], "w": ~pairs}
    gradients = {"q": ~tokens[..., None], "v": ~tokens[..., None], "landmarks": ~present[..., None]}
    return outputs, {n: of_input(x, case.arrays[n]) for n, x in gradients.items() if n in case.arrays}


def of_input(zero: Array, x: Array) -> Array:
    """Where every use of an entry of x is 0."""
    shape = (*x.shape[:-1], 1)
    zero = np.logical_and.reduce(zero, axis=tuple(range(zero.ndim - len(shape))))
    axes = tuple(n for n, size in enumerate(shape[:-1]) if size == 1 and zero.shape[n] != 1)
    return np.asarray(np.logical_and.reduce(zero, axis=axes, keepdims=True))


def newton_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Kernels of landmarks of standard deviation 1 and 0.5, identity, ones, zero, one that is not symmetric, and one
    with zeros in all of its columns, where the slope of ‖A‖₁ is 0."""
    names = ("random", "init-scale", "unrolled", "not-symmetric-unrolled", "zeros-unrolled", "zero")
    more = (
        "near",
        "identity",
        "ones",
        "not-symmetric",
        "no-steps",
        "one",
        "empty",
        "no-leading-axes",
    )
    for name in names if profile == "quick" else names + more:
        yield sample(op.name, dtype, name, newton_case, op, name, dtype)


def newton_case(op: Op, name: str, dtype: str) -> Case:
    rng, m = generator(f"newton/{name}"), {"one": 1, "empty": 0}.get(name, 9)
    x = rng.standard_normal((2, 3, m, 12)[int(name == "no-leading-axes") * 2 :]) * (0.5 if name == "near" else 1.0)
    a = gaussian(x, x, 12**-0.5)
    if name in ("identity", "ones", "zero"):
        a = np.broadcast_to({"identity": np.eye(m), "ones": np.ones((m, m)), "zero": np.zeros((m, m))}[name], a.shape)
    if name.startswith("not-symmetric"):
        a = a + 0.02 * rng.standard_normal(a.shape)
    if name.startswith("zeros"):
        a = np.where(a < np.median(a, axis=-1, keepdims=True), 0.0, a)
    params: dict[str, Option] = {"return_residuals": True}
    if name.endswith("unrolled") or name == "no-steps":
        steps = {"no-steps": 0, "not-symmetric-unrolled": 5, "zeros-unrolled": 3}
        params |= {"inverse_grad": "unrolled", "newton_steps": steps.get(name, 20)}
    arrays = {"a": rounded(a, dtype)}
    if name == "init-scale":
        arrays["init_scale"] = rounded(rng.uniform(0.1, 0.3, (2, 3)), dtype)
        params |= {"inverse_grad": "unrolled", "newton_steps": 3}
    cotangents = {"axa": rounded(rng.standard_normal(a.shape), dtype)}
    return Case(f"{op.name}/{dtype}/{name}", op.name, dtype, arrays, params, cotangents, frozenset({name}))


def newton_growth(case: Case) -> float:
    """1 + κ/32 with κ = max ‖A‖₂‖X‖₂: an error of A is κ times larger in X A X."""
    a = case.arrays["a"]
    if a.size == 0:
        return 1.0
    x = newton_inverse(a, newton_steps=option(case.params, "newton_steps", 20))
    condition = np.linalg.norm(a, 2, axis=(-2, -1)) * np.linalg.norm(x, 2, axis=(-2, -1))
    return 1.0 + float(condition.max()) / CONDITION_STEP


NEAR_HALVING = 1e-4  # distance from ‖I - A X_0‖₁ = NEAR at which rounding may decide
NEAR_COLUMN = 1e-5  # relative distance of sums that are equal but for rounding to float32


def newton_tells(case: Case) -> bool:
    return one_norm_is_of_one_column(case) and halvings_are_told(case.arrays["a"], case)


def one_norm_is_of_one_column(case: Case) -> bool:
    """Whether rounding leaves open in no matrix which column has the largest sum, through which gradients go."""
    sums = np.sort(np.abs(case.arrays["a"]).sum(axis=-2), axis=-1)
    return sums.shape[-1] < 2 or bool(np.all(sums[..., -2] < sums[..., -1] * (1 - NEAR_COLUMN)))


def halvings_are_told(a: Array, case: Case) -> bool:
    """Whether rounding leaves open in no matrix how often its start is halved."""
    factor = np.asarray(case.arrays.get("init_scale", case.params.get("init_scale", 0.9)))[..., None, None]
    norm = np.abs(a).sum(axis=-2).max(axis=-1, initial=0.0)[..., None, None]
    start = 2.0 * factor / np.where(norm > 0, norm, 1.0) ** 2 * (a @ a)
    distances = (
        np.abs(np.eye(a.shape[-1]) - 0.5**n * start).sum(axis=-2).max(axis=-1, initial=0.0)
        for n in range(option(case.params, "halvings", 0))
    )
    return all(bool(np.all(np.abs(distance - NEAR) > NEAR_HALVING)) for distance in distances)


def sampler_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Images whose sides are and are not multiples of r, with and without invalid tokens."""
    scenes = [("plain", (6, 8, 2), "none"), ("masked", (7, 9, 2), "some")]
    more = [("whole", (5, 5, 5), "some"), ("pixel", (3, 4, 1), "none"), ("strip", (3, 20, 3), "none")]
    for name, sizes, mask in scenes if profile == "quick" else scenes + more:
        yield sample(op.name, dtype, name, sampler_case, op, name, dtype, sizes, mask)


def sampler_case(
    op: Op,
    name: str,
    dtype: str,
    sizes: tuple[int, int, int],
    mask: str = "none",
    lead: Shape = (2, 2),
    features: int = 12,
    poison: bool = True,
) -> Case:
    """An image of height x width tokens in windows of r x r; a mask is of "some" tokens of an item, or of all: "1d"."""
    rng, kind, (height, width, r) = generator(f"sampler/{name}"), op.name.rpartition(".")[-1], sizes
    n, m = height * width, min(CHOSEN, height * width)
    arrays: dict[str, Array] = {"q": rounded(rng.standard_normal((*lead, n, features)), dtype)}
    params: dict[str, Option] = {"height": height, "width": width, "r": r}
    out: Shape = (*lead, (height // r) * (width // r), features)
    if kind == "convolution":
        arrays["kernel"], out = rounded(rng.standard_normal((7, features, r, r)), dtype), (*out[:-1], 7)
    items = (*lead[:-1], 1) if mask == "some" else ()
    if kind == "random":
        arrays["indices"], params, out = rng.integers(0, n, (*items, m)), {}, (*lead, m, features)
    if kind == "biased":
        params, out = {"m": m}, (*lead, m, features)
    if mask != "none":
        arrays["query_mask"] = rng.random((*items, n)) < 0.6
        if poison:
            arrays["q"][~np.broadcast_to(arrays["query_mask"], (*lead, n))] = np.nan
    cotangents = {"landmarks": rounded(rng.standard_normal(out), dtype)}
    tags = frozenset({name})
    return Case(f"{op.name}/{dtype}/{name}", op.name, dtype, arrays, params, cotangents, tags)
