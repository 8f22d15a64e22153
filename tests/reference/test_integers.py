"""Integers of any dtype and any size in the reference, and numbers that float64 does not hold."""

from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

Q, K, V = (np.random.default_rng(n).standard_normal((2, 3, tokens, 8)) for n, tokens in enumerate((5, 7, 7)))
HUGE = 10**400


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_lengths_and_boundaries_of_any_dtype(dtype: str) -> None:
    lengths, meant = np.array([[3], [np.iinfo(dtype).max]], dtype), np.array([[3], [7]])
    o = reference.softmax_attention(Q, K, V, key_lengths=lengths)
    assert np.array_equal(o, reference.softmax_attention(Q, K, V, key_lengths=meant))
    states = [reference.linear_attention(Q, K, V, key_lengths=n, return_state=True)[1] for n in (lengths, meant)]
    assert all(map(np.array_equal, *states))
    tokens = [x[0].transpose(1, 0, 2) for x in (Q, K, V)]
    edges = [np.array(x, dtype) for x in ((0, 2, 5), (0, 3, 7))]
    packed = reference.softmax_attention_packed(*tokens, *edges, window=(2**70, 0))
    assert np.array_equal(packed, reference.softmax_attention_packed(*tokens, (0, 2, 5), (0, 3, 7), window=(7, 0)))


@pytest.mark.parametrize("size", [2**31 - 1, 2**63 - 1, 2**64, HUGE, np.uint64(2**63)], ids=lambda x: str(x)[:12])
def test_windows_and_lengths_of_any_size(size: Any) -> None:
    plain = reference.softmax_attention(Q, K, V)
    assert np.array_equal(reference.softmax_attention(Q, K, V, window=(size, size)), plain)
    assert np.array_equal(reference.softmax_attention(Q, K, V, key_lengths=size), plain)
    small = reference.softmax_attention(Q, K, V, window=(np.uint8(2), np.uint64(1)))
    assert np.array_equal(small, reference.softmax_attention(Q, K, V, window=(2, 1)))


@pytest.mark.parametrize("value", [HUGE, -HUGE, 10**5000], ids=["positive", "negative", "long"])
def test_numbers_beyond_float64(value: int) -> None:
    for name in ("scale", "alpha", "gain", "shift", "length"):
        with pytest.raises(
            ValueError, match=rf"pointwise_attention: {name}; expected a finite number.*, got .{{1,40}}$"
        ):
            reference.pointwise_attention(Q, K, V, **{name: value})
    with pytest.raises(ValueError, match="dropout's p; expected a finite number"):
        reference.softmax_attention(Q, K, V, dropout=(value, 1))
    for options in ({"key_lengths": -(10**5000)}, {"window": (-(10**5000), 0)}, {"dropout": (0.5, 10**5000)}):
        with pytest.raises(ValueError, match=r"got .* with thousands of digits"):
            reference.softmax_attention(Q, K, V, **options)
