"""Linear, cosine, Performer and efficient attention in the library: forms, states, feature maps, dtypes, memory."""

import io
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference

from .arrays import assert_agrees, assert_close, close, normal, to_numpy

PROJECTION = attnkit.orthogonal_features(5, 4, seed=1)
OPS = {
    "linear_attention": {},
    "linear_attention-relu": {"feature_map": "relu", "eps": 0.1},
    "linear_attention-identity": {"feature_map": "identity"},
    "cosine_attention": {},
    "performer_attention": {"projection": PROJECTION},
    "performer_attention-relu": {"projection": PROJECTION, "kernel": "relu"},
    "efficient_attention": {},
}
N = 19


def of(name, suffix=""):
    return getattr(attnkit, name.partition("-")[0] + suffix)


def own_of(name, convert=lambda x: x):
    return {key: convert(x) if isinstance(x, np.ndarray) else x for key, x in OPS[name].items()}


def inputs(dtype="float32", n=N, seed=0):
    return normal((2, 4, n, 4), (2, 2, n, 4), (2, 2, n, 3), dtype=dtype, seed=seed)


def all_close(a, b):
    for x, y in zip(a, b, strict=True):
        close(x, y)


# ---------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize("name", OPS)
def test_parallel_chunked_and_recurrent_forms_agree(name):
    q, k, v = inputs()
    own, common = own_of(name), {"causal": True, "enable_gqa": True}
    pairs = np.ones((N, N), bool)  # a mask of pairs asks for the quadratic form
    whole, state = of(name)(q, k, v, return_state=True, **own, **common)
    for size in (1, 2, 5, N, 1000):
        close(of(name)(q, k, v, chunk_size=size, **own, **common), whole)
    if not name.startswith("efficient"):
        close(of(name)(q, k, v, mask=pairs, **own, **common), whole)
    close(of(name, "_weights")(q, k, **own, **common) @ np.repeat(v, 2, axis=1), whole)
    held, steps = None, []
    for t in range(N):
        o, held = of(name, "_step")(held, q[..., t, :], k[..., t, :], v[..., t, :], enable_gqa=True, **own)
        steps.append(o)
    close(np.stack(steps, axis=-2), whole)
    all_close(held, state)


@pytest.mark.parametrize("name", OPS)
def test_a_state_can_be_saved_and_resumed(name):
    q, k, v = inputs()
    own, common = own_of(name), {"causal": True, "enable_gqa": True}
    whole, last = of(name)(q, k, v, return_state=True, **own, **common)
    first, state = of(name)(*(x[..., :8, :] for x in (q, k, v)), return_state=True, **own, **common)
    file = io.BytesIO()
    np.savez(file, *state)
    file.seek(0)
    loaded = tuple(np.load(file).values())
    rest = [x[..., 8:, :] for x in (q, k, v)]
    second, final = of(name)(*rest, initial_state=loaded, return_state=True, **own, **common)
    close(np.concatenate([first, second], axis=-2), whole)
    all_close(final, last)
    close(of(name)(*rest, initial_state=state, **own, **common), second)


@pytest.mark.parametrize("name", OPS)
def test_a_state_of_one_head_serves_all(name):
    q, k, v = inputs()
    own = own_of(name)
    state = of(name)(q[:1, :1], k[:1, :1], v[:1, :1], return_state=True, **own)[1]
    wide = tuple(np.broadcast_to(x, (2, 2, *x.shape[2:])) for x in state)
    for causal in (False, True):
        common = {"causal": causal, "enable_gqa": True, **own}
        close(of(name)(q, k, v, initial_state=state, **common), of(name)(q, k, v, initial_state=wide, **common))
        do = np.ones((2, 4, N, 3), np.float32)
        narrow = of(name, "_vjp")(q, k, v, do=do, initial_state=state, **common)["initial_state"]
        full = of(name, "_vjp")(q, k, v, do=do, initial_state=wide, **common)["initial_state"]
        for a, b, part in zip(narrow, full, state, strict=True):
            assert a.shape == part.shape
            if np.any(b):  # a level has no gradient but through the parts it scales, which cancel
                size = np.sum(np.abs(b))
                assert np.max(np.abs(a - b.sum((0, 1), keepdims=True))) <= 64 * np.finfo(np.float32).eps * size


@pytest.mark.parametrize("convert", [np.asarray, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("name", OPS)
def test_a_step_changes_nothing_that_it_was_given(name, convert):
    q, k, v = (convert(x[..., 0, :].copy()) for x in inputs())
    own = own_of(name, lambda x: convert(x.astype("float32")))
    state = of(name, "_step")(None, q, k, v, enable_gqa=True, **own)[1]
    given = (q, k, v, *state)
    before = [to_numpy(x).copy() for x in given]
    if convert is np.asarray:
        for x in given:
            x.setflags(write=False)
    of(name, "_step")(state, q, k, v, enable_gqa=True, **own)
    assert all(np.array_equal(a, to_numpy(b)) for a, b in zip(before, given, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_the_future_changes_no_bit_before_it(name):
    """However large it is: a stabiliser taken over the whole sequence would round what comes before."""
    q, k, v = (x[:, :2].copy() for x in inputs())
    other = [x.copy() for x in (q, k, v)]
    for x in other:
        x[..., 11:, :] *= -30
    for size in (1, 4, 64):
        a, b = (of(name)(*x, causal=True, chunk_size=size, **own_of(name)) for x in ((q, k, v), other))
        assert a[..., :11, :].tobytes() == b[..., :11, :].tobytes()
        assert np.any(a[..., 11:, :] != b[..., 11:, :])


# ---------------------------------------------------------------------------------------------- feature maps


class Squares:
    """[x², x₀ + 2] and its gradient: more features than x has."""

    def __call__(self, x):
        if isinstance(x, torch.Tensor):
            return torch.cat([x * x, x[..., :1] + 2.0], dim=-1)
        return np.concatenate([x * x, x[..., :1] + 2.0], axis=-1)

    def vjp(self, x, d):
        return 2 * x * d[..., :-1] + np.concatenate([d[..., -1:], np.zeros_like(x[..., 1:])], axis=-1)


def test_a_callable_feature_map_and_its_gradients():
    q, k, v = inputs("float64")
    options = {"feature_map": Squares(), "causal": True, "enable_gqa": True, "mask": np.arange(N) != 3}
    k[..., 3, :] = np.nan
    do = normal((2, 4, N, 3), seed=5)[0]
    found = attnkit.linear_attention_vjp(q, k, v, do, **options)
    expected = attnkit_reference.linear_attention_vjp(q, k, v, do, **options)
    leaves = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    o = attnkit.linear_attention(*leaves, **{**options, "mask": torch.tensor(options["mask"])})
    o.backward(torch.tensor(do))
    assert_close(to_numpy(o), attnkit_reference.linear_attention(q, k, v, **options))
    for name, leaf in zip("qkv", leaves, strict=True):
        assert_close(found[name], expected[name])
        assert_close(to_numpy(leaf.grad), expected[name])


def test_what_a_feature_map_must_be():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r"^linear_attention: feature_map must map .*\(2, 4, 19, f\); got \(2, 4, 4\)"):
        attnkit.linear_attention(q, k, v, enable_gqa=True, feature_map=lambda x: x.sum(-2))
    with pytest.raises(ValueError, match=r"feature_map must map .* got float"):
        attnkit.linear_attention(q, k, v, enable_gqa=True, feature_map=lambda x: 1.0)
    with pytest.raises(NotImplementedError, match="linear_attention_vjp: explicit gradients need a feature_map"):
        attnkit.linear_attention_vjp(q, k, v, np.ones_like(q[..., :3]), enable_gqa=True, feature_map=lambda x: x)


def test_orthogonal_features_are_those_of_the_reference():
    for m, d, seed in ((5, 4, 1), (3, 7, 2**40), (8, 8, 0), (1, 1, 3)):
        found = attnkit.orthogonal_features(m, d, seed)
        assert np.array_equal(found, attnkit_reference.orthogonal_features(m, d, seed))
    with pytest.raises(ValueError, match="orthogonal_features: m must be at least 1"):
        attnkit.orthogonal_features(0, 4, seed=0)


# ---------------------------------------------------------------------------------------------- dtypes, layouts


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_half_types_keep_their_states_in_float32(name, dtype):
    q, k, v = (torch.tensor(x).to(getattr(torch, dtype)) for x in inputs())
    own = own_of(name, torch.tensor)
    o, state = of(name)(q, k, v, causal=True, enable_gqa=True, return_state=True, **own)
    assert o.dtype == q.dtype
    assert all(x.dtype == torch.float32 for x in state)
    exact = of(name)(q.float(), k.float(), v.float(), causal=True, enable_gqa=True, **own)
    assert torch.max(torch.abs(o.float() - exact)) <= torch.finfo(o.dtype).eps * torch.max(torch.abs(exact))
    step, after = of(name, "_step")(state, q[..., 0, :], k[..., 0, :], v[..., 0, :], enable_gqa=True, **own)
    assert step.dtype == q.dtype
    assert all(x.dtype == torch.float32 for x in after)


def test_sums_may_exceed_what_float16_holds():
    q, k, v = (np.full((2000, 4), x, np.float16) for x in (1.0, 100.0, 3.0))
    o, (S, z) = attnkit.linear_attention(q, k, v, return_state=True)
    assert np.min(z) > np.finfo(np.float16).max
    assert np.all(np.isfinite(S))
    assert np.all(o == 3)


def test_gradients_of_sums_whose_squares_underflow():
    """The sums are about 1e-25: JAX's own derivative of a quotient would divide by 0."""
    q, k = np.array([[28.5], [28.0]], np.float32), np.array([[-28.5], [-28.25], [-28.0]], np.float32)
    (v, do), omega = normal((3, 2), (2, 2), dtype="float32"), np.array([[1.0], [-1.0]], np.float32)
    explicit = attnkit.performer_attention_vjp(q, k, v, omega, do)

    def attend(*arrays):
        return attnkit.performer_attention(*arrays, projection=jnp.asarray(omega), impl="generic")

    pull = jax.vjp(attend, *map(jnp.asarray, (q, k, v)))[1]
    for name, x in zip("qkv", pull(jnp.asarray(do)), strict=True):
        assert_agrees(x, explicit[name], magnitude=q)  # gradients of features, about 1, times q cancel


@pytest.mark.parametrize("name", OPS)
def test_views_are_served_as_they_are(name):
    q, k, v = inputs()
    views = [np.ascontiguousarray(np.swapaxes(x, 1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    views = [np.repeat(x, 2, axis=-1)[..., ::2] for x in views]
    assert not any(x.flags.c_contiguous for x in views)
    common = {"causal": True, "enable_gqa": True, "return_state": True, **own_of(name)}
    (o, state), (other, held) = of(name)(q, k, v, **common), of(name)(*views, **common)
    close(other, o)
    all_close(held, state)


# ---------------------------------------------------------------------------------------------- memory, statistics


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_memory_is_linear_in_the_number_of_tokens(name, causal):
    """Not even a boolean (n, n) array is made, masks and gradients included; float32 weights would be 4 times that."""
    n = 16384
    q, k, v = normal((n, 4), (n, 4), (n, 3), dtype="float32")
    options = {"mask": np.arange(n) % 5 > 0, "query_mask": np.arange(n) % 7 > 0, "causal": causal, **own_of(name)}
    tracemalloc.start()
    try:
        _, state = of(name)(q, k, v, key_lengths=n - 3, return_state=True, **options)
        of(name, "_vjp")(q, k, v, do=v, dstate=state, initial_state=state, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n * n


@pytest.mark.parametrize("name", OPS)
def test_statistics_are_those_of_the_weights(name):
    q, k, _ = inputs("float64")
    options = {"causal": True, "enable_gqa": True, **own_of(name)}
    w = of(name, "_weights")(q, k, **options)
    fields = ("total", "sum_squares", "maximum", "visible")
    found = attnkit.row_statistics(of(name), q, k, fields=fields, **options)
    visible = np.tril(np.ones((N, N), bool))
    assert_close(found.total, w.sum(-1))
    assert_close(found.sum_squares, (w * w).sum(-1))
    assert_close(found.maximum, np.where(visible, w, -np.inf).max(-1))
    assert np.array_equal(found.visible, np.broadcast_to(np.arange(1, N + 1), found.visible.shape))


def test_statistics_are_of_calls_without_a_state():
    q, k, v = (x[:, :2] for x in inputs())
    state = attnkit.linear_attention(q, k, v, return_state=True)[1]
    with pytest.raises(ValueError, match="unexpected argument 'initial_state'"):
        attnkit.attention_with_statistics("linear_attention", q, k, v, initial_state=state)
    with pytest.raises(ValueError, match="entropy needs weights that are not negative"):
        attnkit.row_statistics("linear_attention", q, k, feature_map="identity")
    with pytest.raises(ValueError, match="entropy needs weights that are not negative"):
        attnkit.row_statistics("linear_attention", q, k, scale=-1.0)
