"""Rows to the last bit: nothing else may change one, and what is exactly 0 is."""

import platform

import numpy as np
import pytest

import attnkit

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("library")


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_rows_before_dense_ones(alpha, dtype):
    """Sparse rows are lists and dense ones a product: which of the two is for each row to say."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(64, 16)).astype(dtype) for _ in range(3))
    q[:32] *= 8

    def rows():
        return attnkit.entmax_attention(q, k, v, alpha=alpha, causal=True, impl="native")[:32]

    first = rows()
    q[32:] = 0
    assert rows().tobytes() == first.tobytes()
    q[32:] = rng.normal(size=(32, 16)) * 100
    assert rows().tobytes() == first.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("top", [4, 9, 16, 25, 100])
def test_keys_exactly_on_the_threshold(top, dtype):
    """`top` keys share the weight: with α = 1.5 the threshold is 2/√top below them, and so is every other key."""
    scores = np.concatenate([np.full(top, 2 / np.sqrt(top)), np.zeros(7)])[:, None].astype(dtype)
    call = np.ones((1, 1), dtype), scores, np.eye(top + 7, dtype=dtype)
    weights = attnkit.entmax_attention(*call, impl="native")[0]
    assert np.all(weights[:top] > 0)
    assert not weights[top:].any()
    do = np.linspace(1, 2, top + 7, dtype=dtype)[None]
    grads = attnkit.entmax_attention_vjp(*call, do, impl="native")
    assert np.all(grads["v"][:top] != 0)
    assert not grads["v"][top:].any()
    assert not grads["k"][top:].any()


@pytest.mark.parametrize(("dtype", "top"), [(np.float32, 80.0), (np.float64, 640.0)])
def test_scores_of_0_have_no_weight_in_softpick_beside_large_ones(dtype, top):
    """Beyond 64, in double precision 600, exp(s - m) - exp(-m) is a difference, which has to be exact at 0."""
    q = np.linspace(0.95, 1, 64, dtype=dtype)[:, None]
    k = np.concatenate([np.linspace(-top, top, 33, dtype=dtype), np.zeros(33, dtype)])[:, None]
    options = {"fields": ("nonzero",), "scale": 1.0, "key_lengths": 40, "impl": "native"}
    assert attnkit.row_statistics("softpick_attention", q, k, **options).nonzero.tolist() == [16.0] * 64


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("alpha", [1.01, 1.3, 1.5, 2.0, "array"])
@pytest.mark.parametrize("impl", ["native", "generic"])
def test_scores_that_have_no_digits_after_the_point(impl, alpha, dtype):
    """From 2^24 on in float32, from 2^53 on in float64, 1 below a maximum is the maximum: it has all the weight."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.normal(size=(2, n, 8)).astype(dtype) for n in (40, 50, 50, 40))
    own = np.linspace(1, 2, 40)[:, None].astype(dtype) if alpha == "array" else alpha
    first = np.argmax(q.astype(np.longdouble) @ np.swapaxes(k, -1, -2).astype(np.longdouble), axis=-1)[..., None]
    for scale in (1e8, 1e18, 1e30):
        call = {"alpha": own, "scale": scale, "impl": impl}
        o = attnkit.entmax_attention(q, k, v, **call)
        assert np.array_equal(o, np.take_along_axis(v, first, axis=1))
        grads = attnkit.entmax_attention_vjp(q, k, v, do, **call)
        sums = np.zeros_like(v)
        for item in range(2):
            np.add.at(sums[item], first[item, :, 0], do[item])
        np.testing.assert_allclose(grads["v"], sums, rtol=1e-5)
        assert not grads["q"].any()
        assert not grads["k"].any()


@pytest.mark.parametrize("alpha", [1.01, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("top", [2.0**22, 2.0**23 + 1, 2.0**24 - 1, 2.0**24 + 2, 2.0**25 - 2, 2.0**26])
def test_keys_just_below_a_large_maximum(alpha, top):
    """Whatever float32 holds of scores that are large, the weights of the same scores less their maximum."""
    below = np.array([0, 0.5, 1, 2, 2, 3, 4, 8, 60, 96, 200])
    scores = np.float32(top) - below.astype(np.float32)  # rounded to what is there
    call = np.ones((1, 1), np.float32), np.eye(11, dtype=np.float32)
    weights = attnkit.entmax_attention(call[0], scores[:, None], call[1], alpha=alpha, impl="native")
    less = (scores - scores.max())[:, None].astype(float)
    exact = attnkit.entmax_attention(np.ones((1, 1)), less, np.eye(11), alpha=alpha, impl="generic")
    np.testing.assert_allclose(weights, exact, rtol=1e-4, atol=1e-6)


def halves():
    """Arguments of float16 of which every number is subnormal."""
    return [torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(i)).mul(2**-17).half() for i in range(3)]


def test_a_thread_that_flushes_subnormal_numbers():
    q, k, v = halves()
    whole = attnkit.pointwise_attention(q, k, v, scale=2.0**40, impl="native")
    assert whole.count_nonzero() > whole.numel() // 2
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormal numbers on this CPU")
    try:
        assert attnkit.pointwise_attention(q, k, v, scale=2.0**40, impl="native").equal(whole)
        assert torch.tensor(1e-310, dtype=torch.float64) * 1 == 0  # still so for others
    finally:
        torch.set_flush_denormal(False)


def test_subnormal_numbers_under_jit():
    """XLA flushes them on CPUs."""
    jax = pytest.importorskip("jax")
    q, k, v = halves()
    call = jax.jit(lambda *x: attnkit.pointwise_attention(*x, scale=2.0**40, impl="native"))
    o = np.asarray(call(*(x.numpy() for x in (q, k, v))))
    assert o.tobytes() == attnkit.pointwise_attention(q, k, v, scale=2.0**40, impl="native").numpy().tobytes()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="such results cost nothing elsewhere")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_below_the_normal_range_are_0(dtype):
    """Weights that fall along a row would cost Intel's processors three times as much: where a tile ends, some are
    there, and their products with values."""
    tiny, one, values = np.finfo(dtype).tiny, np.ones((1, 1), dtype), np.eye(65, dtype=dtype)
    falling = np.log(tiny).astype(dtype) + np.linspace(2, -2, 64, dtype=dtype)
    scores = np.concatenate([np.zeros(1, dtype), falling])[:, None]
    found = {
        "weights": attnkit.softmax_attention(one, scores, values, scale=1.0, impl="native"),
        "products": attnkit.softmax_attention(one, scores[:20], values[:20] / 1000, scale=1.0, impl="native"),
        "fading": attnkit.forgetting_attention(one, one, one * tiny / 2, 0 * one[0], impl="native"),
        "of scores": attnkit.pointwise_attention(one, values[:, :1] * tiny, values / 1000, impl="native"),
    }
    for name, x in found.items():
        assert not np.any((x != 0) & (np.abs(x) < tiny)), name
    assert np.count_nonzero(found["weights"]) > 30


@pytest.mark.parametrize("options", [{"mask": np.True_}, {"query_mask": np.True_}, {"bias": np.float32(1)}])
def test_a_scalar_of_numpy_for_an_array(options):
    q = np.random.default_rng(0).normal(size=(2, 4, 8))

    def call(op, *arrays):
        return [op(*arrays, impl=impl, **options) for impl in ("native", "generic")]

    np.testing.assert_allclose(*call(attnkit.pointwise_attention, q, q, q))
    native, generic = call(attnkit.pointwise_attention_vjp, q, q, q, q)
    assert native.keys() == generic.keys()
    for name, grad in generic.items():
        np.testing.assert_allclose(native[name], grad, err_msg=name)


@pytest.mark.parametrize("op", ["softmax_attention", "linear_attention", "row_statistics"])
@pytest.mark.parametrize("array", [np.asarray, torch.tensor])
def test_more_leading_axes_than_the_library_takes(op, array):
    """`auto` passes it over; axes of size 1 do not count, and of others six are served."""
    first = ("softmax_attention",) if op == "row_statistics" else ()
    call, x = getattr(attnkit, op), array(np.random.default_rng(0).normal(size=(2,) * 7 + (3, 4)))
    arrays = (x,) * (2 if first else 3)
    assert attnkit.explain(call, *first, *arrays)["native"] == "more than 6 leading axes"
    call(*first, *arrays)
    with pytest.raises(NotImplementedError, match=f"{op}: .*native: more than 6 leading axes"):
        call(*first, *arrays, impl="native")
    assert attnkit.explain(call, *first, *(x[:, :1] for x in arrays))["native"] is None
    call(*first, *(x[0] for x in arrays), impl="native")


@pytest.mark.parametrize("features", [2, 4, 8])
@pytest.mark.parametrize("op", [attnkit.softmax_attention, attnkit.pointwise_attention, attnkit.sparsemax_attention])
def test_what_lies_between_the_rows_of_a_head_is_not_read(op, features):
    """Two heads side by side are as wide as a vector of some level: the second one's rows end in the next token."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 9, 2, features)).astype(np.float32).swapaxes(1, 2)
    k[:, -1], v[:, -1] = np.nan, np.nan  # a key that no query sees
    call = {"key_lengths": 8, "impl": "native"}
    alone = [np.ascontiguousarray(x) for x in (q, k, v)]
    assert np.array_equal(op(q, k, v, **call), op(*alone, **call))
    grads, expected = (getattr(attnkit, f"{op.__name__}_vjp")(*x, do, **call) for x in ((q, k, v), alone))
    for name, g in expected.items():
        assert np.all(np.isfinite(g)), name
        np.testing.assert_array_equal(grads[name], g)


@pytest.mark.parametrize(("dtype", "last"), [(torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)])
def test_sums_halfway_between_two_numbers_become_the_even_one(dtype, last):
    """1 + n last + last / 2, for even and odd n."""
    ones = torch.ones(1, 1, dtype=dtype)
    v = torch.stack([1 + last * torch.arange(64, dtype=torch.float64), torch.full((64,), last / 2)]).to(dtype)
    call = ones, torch.ones(2, 1, dtype=dtype), v
    o = attnkit.pointwise_attention(*call, activation="identity", length=1.0, scale=1.0, impl="native")[0]
    assert o.equal((v[0].double() + v[1].double()).to(dtype))
    assert not o.equal(v[0])


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_a_nan_that_a_window_shows_to_some_rows(alpha):
    """It reaches the outputs of rows that see it, and the gradients that these rows take part in: nothing else."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.normal(size=(4, 2, 40, 8))
    k[0, 20] = np.nan
    options = {"alpha": alpha, "causal": True, "window": (5, 0), "impl": "native"}
    results = {"o": attnkit.entmax_attention(q, k, v, **options)}
    results |= attnkit.entmax_attention_vjp(q, k, v, do, **options)
    rows, keys = range(20, 26), range(15, 26)
    for name, reached in {"o": rows, "q": rows, "k": keys, "v": keys}.items():
        assert np.argwhere(np.isnan(results[name]).any(-1)).tolist() == [[0, i] for i in reached], name


def test_the_maximum_of_tiny_excess_keeps_its_digits():
    """Softpick's 1 - exp(-m) for m of 10⁻⁴: the difference had three digits in float32, and its gradients two."""
    q, k = np.full((1, 3, 1), 2.0**-12), np.array([[[0.5], [-0.25], [0.125]]])

    def pull(dtype, impl):
        dstats = attnkit.RowStatistics(maximum=np.ones((1, 3), dtype))
        arrays = (x.astype(dtype) for x in (q, k))
        return attnkit.row_statistics_vjp(
            "softpick_attention", *arrays, dstats, fields=("maximum",), scale=1.0, impl=impl
        )

    found, right = pull(np.float32, "native"), pull(np.float64, "generic")
    for name in "qk":
        assert np.abs(found[name] - right[name]).max() < 1e-5 * np.abs(right[name]).max()
