"""Samples of Nyström and Linformer attention, with the functions that their golden values need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnkit_conformance.families.lowrank.samples import (
    EXPONENT_STEP,
    Array,
    Scene,
    Shape,
    finish,
    inputs_of,
    masks_of,
    new_case,
    of_input,
    of_property,
    valid_keys,
    valid_queries,
)
from attnkit_conformance.model.case import Case, Sample, compute_dtype, generator, sample
from attnkit_conformance.model.types import Params
from attnkit_conformance.scenes import attention

if TYPE_CHECKING:
    from attnkit_conformance.model.op import Op

GQA = {"enable_gqa": True}
NYSTROM = (
    Scene("cross", 65, quick=True),
    Scene("padded", 64, options=("key_lengths", "poison"), quick=True),
    Scene("gqa-mask", 63, lead=((2, 4), (2, 2), (2, 2)), params=GQA, options=("query_mask", "mask", "gqa"), quick=True),
    Scene("even", 72),
    Scene("long", 257, m=16, d=32, e=32, lead=((1, 2),) * 3),
    Scene("one-landmark", 33, m=1),
    Scene("exact", 9, m=9),
    Scene("exact-padded", 12, m=20, options=("key_lengths", "poison")),
    Scene("lengths-around-m", 12, m=4, lead=((6, 2),) * 3, options=("key_lengths", "peaked", "poison")),
    Scene("no-steps", 63, params={"inverse_steps": 0}),
    Scene("many-steps", 63, params={"inverse_steps": 10}),
    Scene("scale", 63, params={"scale": 0.7}),
    Scene("tiny", 63, size=0.3),
    Scene("query-mask", 65, options=("query_mask", "poison")),
    Scene("key-mask", 65, options=("mask", "poison")),
    Scene("one-token", 1, m=1),
    Scene("opposite-keys", 2, m=2, e=1, size=0.3, options=("opposite",)),
    Scene("no-leading-axes", 63, lead=((), (), ())),
    Scene("broadcast", 33, lead=((2, 1), (3, 1, 2), (1, 2))),
    Scene("broadcast-values", 33, lead=((2,), (2,), (3, 2))),
    Scene("mqa", 63, lead=((2, 3), (2, 1), (2, 1)), params=GQA, options=("gqa",)),
    Scene("transposed", 65, layout="turned"),
    Scene("strided", 65, layout="stepped"),
    Scene("empty", 0, m=3),
)
LINFORMER = (
    Scene("cross", 65, S=100, quick=True),
    Scene("padded", 64, S=64, options=("key_lengths", "poison"), quick=True),
    Scene("gqa-mask", 7, S=63, lead=((2, 4), (2, 2), (2, 2)), params=GQA,
          options=("query_mask", "mask", "gqa", "per_head"), quick=True),
    Scene("longer-projection", 63, S=65, options=("longer",)),
    Scene("per-head", 63, S=65, options=("per_head", "longer")),
    Scene("float32-projections", 63, S=65, options=("projection_float32",)),
    Scene("dropout-mask", 65, S=63, options=("dropout_mask",)),
    Scene("dropout-mask-gqa", 65, S=63, lead=((2, 4), (2, 2), (2, 2)), params=GQA,
          options=("gqa", "dropout_mask", "query_mask", "poison")),
    Scene("scale", 63, S=65, params={"scale": -0.4}),
    Scene("long", 100, S=257, m=32, d=32, e=32, lead=((1, 2),) * 3),
    Scene("one-slot", 63, S=65, m=1),
    Scene("query-mask", 65, S=63, options=("query_mask", "poison")),
    Scene("key-mask", 65, S=100, options=("mask", "poison")),
    Scene("1x1", 1, S=1, m=1),
    Scene("opposite-keys", 1, S=2, m=2, e=1, size=0.3, options=("opposite",)),
    Scene("no-leading-axes", 63, S=65, lead=((), (), ())),
    Scene("broadcast", 33, S=5, lead=((2, 1), (3, 1, 2), (1, 2))),
    Scene("transposed", 65, S=63, layout="turned"),
    Scene("strided", 65, S=63, layout="stepped"),
    Scene("empty-queries", 0, S=65),
    Scene("empty-keys", 63, S=0),
)  # fmt: skip


def whole_items(valid: Array, x: Array, groups: bool) -> Array:
    """Rows of x that are valid in any use; masks are the same for all heads here."""
    return np.broadcast_to(valid[..., :1, :], x.shape[:-1]) if groups else valid


NYSTROM_VARIANTS: tuple[Params, ...] = ({}, {"init": "batch_max"})


def nystrom_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Uneven segments, items around m tokens, none, GQA; both initialisations (the quick profile alternates)."""
    for index, scene in enumerate(SCENE for SCENE in NYSTROM if SCENE.quick or profile == "full"):
        for turn, variant in enumerate(NYSTROM_VARIANTS):
            if profile == "full" or turn == index % 2:
                name = f"{scene.name}{nystrom_label(variant)}"
                yield sample(op.name, dtype, name, nystrom_case, op, scene, dtype, variant)


def nystrom_label(variant: Params) -> str:
    return ".batch_max" if variant else ""


def nystrom_case(op: Op, scene: Scene, dtype: str, variant: Params, label: str | None = None) -> Case:
    rng = generator(f"nystrom/{scene.name}")
    n, leading = scene.n, scene.leading
    shapes = zip(scene.lead, (scene.d, scene.d, scene.e), strict=True)
    q, k, v = (rng.standard_normal((*lead, n, width)) for lead, width in shapes)
    if "opposite" in scene.options:  # no sum of a gradient cancels: it is large enough for half types
        q[..., 1, :], k[..., 1, :], v[..., 1, :] = q[..., 0, :], -k[..., 0, :], -v[..., 0, :]
    if "peaked" in scene.options:  # the short items, which get exact softmax, have the largest ‖K‖₁
        q[len(q) // 2 :] = 4 * q[len(q) // 2 :, :, :1]
    arrays = {"q": q * scene.size, "k": k * scene.size, "v": v, **masks_of(scene, n, rng)}
    params = {"num_landmarks": scene.m, **scene.params, **variant}
    case = new_case(op, scene, dtype, arrays, params, nystrom_label(variant) if label is None else label)
    hidden = {}
    if "poison" in scene.options:
        tokens = ~(valid_keys(inputs_of(case), leading, n) & valid_queries(arrays, leading, n))
        hidden = {name: whole_items(tokens, arrays[name], "gqa" in scene.options) for name in ("q", "k", "v")}
    return finish(op, scene, dtype, case, hidden, (*leading, n, scene.e))


def nystrom_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    return nystrom_case(op, of_property(scene), dtype, params)


def leading_of(case: Case) -> Shape:
    """Leading axes of the output."""
    shapes = [case.arrays[name].shape[:-2] for name in ("q", "k", "v") if name in case.arrays]
    if case.params.get("enable_gqa"):
        return (*np.broadcast_shapes(*(shape[:-1] for shape in shapes)), shapes[0][-1])
    return np.broadcast_shapes(*shapes)


def scores_growth(case: Case) -> float:
    """1 + max|s|/16 over all pairs; Nyström's means and Linformer's slots have scores of that size at most."""
    leading, q, k = leading_of(case), case.arrays["q"], case.arrays["k"]
    keys, queries = valid_keys(inputs_of(case), leading, k.shape[-2]), valid_queries(case.arrays, leading, q.shape[-2])
    q = np.where(of_input(queries[..., None], q), q, 0.0)
    q, k = (np.where(np.isfinite(x), x, 0.0) for x in (q, k))  # rows that see nothing may hold anything
    if "proj_k" in case.arrays:
        k = project(case.arrays["proj_k"], np.where(keys_of_input(keys, k), k, 0.0), case)
    k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3) if case.params.get("enable_gqa") else k
    s = np.abs(q @ np.swapaxes(k, -1, -2)) * abs(case.params.get("scale", 1.0 / np.sqrt(q.shape[-1])))
    return 1.0 + float(np.max(s, initial=0.0, where=np.isfinite(s))) / EXPONENT_STEP


def keys_of_input(keys: Array, k: Array) -> Array:
    """Valid keys in the shape of k; samples mask all heads alike."""
    shape = (*k.shape[:-1], 1)
    head = keys[..., :1, :] if k.ndim > 2 else keys
    head = np.logical_or.reduce(head, axis=tuple(range(head.ndim - len(shape) + 1)))
    return np.asarray(head[..., None])


def project(projection: Array, k: Array, case: Case) -> Array:
    projected: Array = projection[..., : k.shape[-2]] @ k
    return projected


def nystrom_growth(case: Case) -> float:
    """(1 + max|s|/16)·4: a cubic step multiplies an error of Z by up to ¼(13 + 15 + 7 + 1) = 9 before it contracts, and
    6 steps on row-stochastic matrices were measured to leave a fraction of that; ×4 covers it, ×1 does not.
    """
    return 4.0 * scores_growth(case)


def nystrom_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Invalid tokens have output and gradients 0."""
    leading, n = leading_of(case), case.arrays["q"].shape[-2]
    null = ~(valid_keys(inputs_of(case), leading, n) & valid_queries(case.arrays, leading, n))
    outputs = {"o": null[..., None], "w": null[..., :, None] | null[..., None, :]}
    return outputs, {"q": of_input(null[..., None], case.arrays["q"]), **of_keys(case, null)}


def of_keys(case: Case, unseen: Array) -> dict[str, Array]:
    """Keys that no query head of a group sees, in the shapes of k and v."""
    zeros = {}
    for name in ("k", "v"):
        if name in case.arrays:
            x, rows = case.arrays[name], unseen[..., None]
            if case.params.get("enable_gqa"):
                heads = x.shape[-3]
                rows = np.logical_and.reduce(
                    rows.reshape(*rows.shape[:-3], heads, rows.shape[-3] // heads, *rows.shape[-2:]), axis=-3
                )
            zeros[name] = of_input(rows, x)
    return zeros


def linformer_samples(op: Op, dtype: str, profile: str) -> Iterator[Sample]:
    """Projections shared and per head, longer than the keys, in a dtype of their own; masks; dropout of slots."""
    for scene in LINFORMER:
        if scene.quick or profile == "full":
            yield sample(op.name, dtype, scene.name, linformer_case, op, scene, dtype)


def linformer_case(op: Op, scene: Scene, dtype: str) -> Case:
    rng = generator(f"linformer/{scene.name}")
    n, m, S, leading = scene.n, scene.m, scene.S, scene.leading
    shapes = zip(scene.lead, ((n, scene.d), (S, scene.d), (S, scene.e)), strict=True)
    q, k, v = (rng.standard_normal((*lead, *rest)) for lead, rest in shapes)
    own = {"per_head": scene.lead[1][-1:], "per_item": scene.lead[1]}
    heads = next((lead for option, lead in own.items() if option in scene.options), ())
    width = S + (1 + S % 7 if "longer" in scene.options else 0)  # by one column too
    proj_k, proj_v = (rng.standard_normal((*heads, m, width)) / max(S, 1) ** 0.5 for _ in range(2))
    if "opposite" in scene.options:
        k[..., 1, :], v[..., 1, :] = -k[..., 0, :], -v[..., 0, :]
        proj_k, proj_v = np.eye(2), np.eye(2)
    if "longer" in scene.options:  # a slot without keys: its score is 0, and it is not masked
        proj_k[..., 0, :S] = 0
    arrays = {
        "q": q * scene.size,
        "k": k * scene.size,
        "v": v,
        "proj_k": proj_k,
        "proj_v": proj_v,
        **masks_of(scene, S, rng),
    }
    if "dropout_mask" in scene.options:
        arrays["dropout_mask"] = (rng.random((*leading, n, m)) < 0.75) / 0.75
    wide = {name: compute_dtype(dtype) for name in ("proj_k", "proj_v") if "projection_float32" in scene.options}
    case = replace(new_case(op, scene, dtype, arrays, dict(scene.params)), dtypes=wide)
    hidden = {}
    if "poison" in scene.options:
        unseen, hidden["q"] = unseen_and_null(case)
        hidden |= {name: whole_items(unseen, arrays[name], "gqa" in scene.options) for name in ("k", "v")}
        hidden["dropout_mask"] = hidden["q"]
    return finish(op, scene, dtype, case, hidden, (*leading, n, scene.e))


def linformer_property(op: Op, scene: attention.Scene, params: Params, label: str, dtype: str) -> Case:
    return linformer_case(op, replace(of_property(scene), n=scene.L), dtype)


def unseen_and_null(case: Case) -> tuple[Array, Array]:
    """Keys (..., S) that no query sees, and queries (..., L) without a key."""
    leading = leading_of(case)
    keys = valid_keys(inputs_of(case), leading, case.arrays["k"].shape[-2])
    queries = valid_queries(case.arrays, leading, case.arrays["q"].shape[-2])
    return ~(keys & queries.any(-1, keepdims=True)), ~(queries & keys.any(-1, keepdims=True))


def linformer_zeros(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """Null rows, unseen keys, and the columns of the projections that no token uses."""
    unseen, null = unseen_and_null(case)
    gradients = {"q": of_input(null[..., None], case.arrays["q"]), **of_keys(case, unseen)}
    for name in ("proj_k", "proj_v"):
        if name in case.arrays:
            gradients[name] = np.arange(case.arrays[name].shape[-1]) >= case.arrays["k"].shape[-2]
    return {"o": null[..., None], "w": null[..., None]}, gradients
