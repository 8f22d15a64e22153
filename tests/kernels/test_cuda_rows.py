"""The CUDA kernels of softmax, sparsemax and entmax, executed on the CPU: what the kit does not ask."""

import numpy as np
import pytest

from attnkit import entmax_attention, entmax_attention_vjp, softmax_attention, softmax_attention_vjp
from attnkit.backends.cupy import rows
from attnkit_conformance.adapters.cuda_cpu import CudaOnCpu
from attnkit_conformance.model.tolerance import growth_of_exponent
from tests.library.arrays import assert_agrees

from .emulated import draw

# ---------------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("alpha", [1.05, 1.5, 2.0])
@pytest.mark.parametrize("keys", [200, 300], ids=["resident", "by passes"])
def test_thresholds_are_exact(alpha: float, keys: int, kernels: CudaOnCpu) -> None:
    """Rows of v that are the unit matrix give the weights: they sum to 1 whatever the spread of the scores."""
    q, k = np.linspace(0.01, 60, 9, dtype=np.float32)[:, None], draw(1, keys, 1)
    v = np.eye(keys, 200, dtype=np.float32)
    v[:, 0] = 1
    got = kernels.call("entmax_attention", {"q": q, "k": k, "v": v}, {"alpha": alpha, "scale": 1.0})["o"]
    exact = entmax_attention(*(x.astype(np.float64) for x in (q, k, v)), alpha=alpha, scale=1.0)
    assert_agrees(got[:, 0], np.ones(9))
    assert_agrees(got, exact, growth=growth_of_exponent(np.max(np.abs(q @ k.T))))


def test_resident_rows_and_passes_give_the_same(kernels: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"q": draw(0, 70, 16), "k": draw(1, 150, 16), "v": draw(2, 150, 16)}
    results = []
    for keys in (256, 0):
        monkeypatch.setattr(rows, "RESIDENT", keys)
        results.append(kernels.call("entmax_attention", arrays, {"causal": True})["o"])
    assert np.array_equal(*results)


def test_scores_that_overflow_exp(kernels: CudaOnCpu) -> None:
    q, k, v = (draw(n, 70, 8) for n in range(3))
    got = kernels.call("softmax_attention", {"q": q, "k": k, "v": v}, {"scale": 300.0, "return_lse": True})
    o, lse = softmax_attention(*(x.astype(np.float64) for x in (q, k, v)), scale=300.0, return_lse=True)
    assert_agrees(got["o"], o, growth=growth_of_exponent(np.max(np.abs(300 * q @ k.T))))
    assert_agrees(got["lse"], lse)


def test_no_queries_and_no_keys(kernels: CudaOnCpu) -> None:
    q, k, v, do = draw(0, 5, 8), draw(1, 0, 8), draw(2, 0, 8), draw(3, 5, 8)
    found = kernels.call("softmax_attention", {"q": q, "k": k, "v": v}, {"return_lse": True})
    assert np.all(found["o"] == 0)
    assert np.all(found["lse"] == -np.inf)
    grads = kernels.vjp("entmax_attention", {"q": q, "k": k, "v": v}, {}, {"o": do})
    expected = entmax_attention_vjp(q, k, v, do)
    assert {name: x.shape for name, x in grads.items()} == {name: x.shape for name, x in expected.items()}
    assert np.all(grads["q"] == 0)


def test_values_of_no_width_leave_the_gradient_of_lse(kernels: CudaOnCpu) -> None:
    q, k, v, do = draw(0, 5, 8), draw(1, 7, 8), np.zeros((7, 0), np.float32), np.zeros((5, 0), np.float32)
    dlse = draw(4, 5)
    params = {"return_lse": True}
    grads = kernels.vjp("softmax_attention", {"q": q, "k": k, "v": v}, params, {"o": do, "lse": dlse})
    expected = softmax_attention_vjp(q, k, v, do, dlse)
    for name, grad in grads.items():
        assert_agrees(grad, expected[name])
