"""Packed sequences: what each of them gets alone."""

from typing import Any

import numpy as np

import attnkit_reference as reference

EDGES = np.array([0, 3, 3, 7]), np.array([0, 2, 6, 11])


def test_each_sequence_gets_what_it_gets_alone(same: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((7, 4, 3), (11, 2, 3), (11, 2, 5)))
    options: dict[str, Any] = {"causal": True, "enable_gqa": True}
    o, lse = reference.softmax_attention_packed(q, k, v, *EDGES, return_lse=True, **options)
    assert (o.shape, lse.shape) == ((7, 4, 5), (7, 4))
    for rows, keys in ((slice(0, 3), slice(0, 2)), (slice(3, 7), slice(6, 11))):
        alone = (np.swapaxes(x, 0, 1) for x in (q[rows], k[keys], v[keys]))
        expected = reference.softmax_attention(*alone, return_lse=True, **options)
        for found, x in zip((o[rows], lse[rows]), expected, strict=True):
            same(found, np.swapaxes(x, 0, 1))
    same(reference.softmax_attention_packed(q, k, v, *EDGES, **options), o)
