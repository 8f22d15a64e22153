"""Decay of linear attention: the recurrence token by token, gradients by central differences, hidden tokens, errors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

Arrays = dict[str, Any]
HIDDEN = {"key_lengths": np.array([[4], [2]]), "mask": np.array([True, False, True, True, True])}
PAIRS = np.random.default_rng(0).random((4, 4)) < 0.6
CASES: dict[str, Arrays] = {
    "square": {"shapes": ((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2))},
    "hidden": {"shapes": ((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2)), **HIDDEN},
    "queries": {"shapes": ((2, 2, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2)), "query_mask": np.arange(5) % 3 > 0},
    "grouped": {"shapes": ((2, 4, 4, 3), (1, 2, 4, 3), (2, 2, 4, 2)), "enable_gqa": True},
    "broadcast": {"shapes": ((2, 1, 4, 3), (2, 4, 3), (1, 1, 4, 2))},
    "pairs": {"shapes": ((2, 2, 4, 3), (2, 2, 4, 3), (2, 2, 4, 2)), "mask": PAIRS},
    "fewer queries": {"shapes": ((2, 2, 3, 3), (2, 2, 5, 3), (2, 2, 5, 2))},
    "more queries": {"shapes": ((2, 2, 5, 3), (2, 2, 3, 3), (2, 2, 3, 2))},
}  # fmt: skip
LEVELS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "number": lambda shape: -0.4,
    "one": lambda shape: np.asarray(-0.3),
    "heads": lambda shape: np.linspace(-0.2, -1.1, shape[-2]),
    "tokens": lambda shape: -np.random.default_rng(3).random(shape),
    "shared tokens": lambda shape: -np.random.default_rng(3).random((1, *shape[-1:])),
}
OPTIONS: dict[str, Arrays] = {
    "elu_plus_one": {"scale": 0.7, "eps": 0.1},
    "identity": {"feature_map": "identity"},
}


def sample(case: str, level: str, state: bool = False) -> tuple[Arrays, Arrays]:
    params = dict(CASES[case])
    rng, shapes = np.random.default_rng([len(case), state]), params.pop("shapes")
    arrays: Arrays = {name: rng.normal(size=shape) for name, shape in zip("qkv", shapes, strict=True)}
    g = LEVELS[level]((*np.broadcast_shapes(shapes[1][:-2], shapes[2][:-2]), shapes[1][-2]))
    params |= {"causal": True} | ({"log_decay": g} if level == "number" else {})
    arrays |= {} if level == "number" else {"log_decay": g}
    if state:
        leading = np.broadcast_shapes(shapes[1][:-2], shapes[2][:-2])
        arrays |= {"initial_S": rng.normal(size=(*leading, 3, 2)), "initial_z": 4 + rng.random((*leading, 3))}
    return arrays, params


def split(arrays: Arrays) -> tuple[Arrays, tuple[Any, ...]]:
    own = {name: x for name, x in arrays.items() if not name.startswith("initial_")}
    return own, (arrays["initial_S"], arrays["initial_z"])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES)
def test_gradients(check_vjp: Any, case: str, level: str, options: str) -> None:
    if level == "shared tokens" and case not in ("square", "hidden"):
        return
    arrays, params = sample(case, level)
    check_vjp("linear_attention", arrays, {**params, **OPTIONS[options]})
    if case not in ("fewer queries", "more queries"):
        arrays, params = sample(case, level, state=True)
        check_vjp("linear_attention", arrays, {**params, **OPTIONS[options]}, state=("S", "z"))


@pytest.mark.parametrize("case", ["grouped", "hidden", "pairs", "fewer queries", "more queries"])
def test_weights(check_weights: Any, near: Any, case: str) -> None:
    arrays, params = sample(case, "tokens")
    o, v = reference.linear_attention(**arrays, **params), arrays.pop("v")
    w = reference.linear_attention_weights(**arrays, **params)
    near(w @ np.repeat(v, w.shape[-3] // v.shape[-3], axis=-3), o)
    check_weights("linear_attention", arrays, params)


@pytest.mark.parametrize("level", LEVELS)
def test_the_recurrence_token_by_token(near: Any, level: str) -> None:
    arrays, params = sample("square", level, state=True)
    own, state = split(arrays)
    whole, (S, z) = reference.linear_attention(**own, initial_state=state, return_state=True, **params)
    g = np.asarray(own.get("log_decay", params.get("log_decay")))
    g = np.broadcast_to(g[..., None] if g.ndim == 1 else g, (2, 2, 5))
    for t in range(5):
        q, k, v = (own[name][..., t, :] for name in "qkv")
        o, state = reference.linear_attention_step(state, q, k, v, log_decay_t=g[..., t])
        near(o, whole[..., t, :])
    for part, end in zip(state, (S, z), strict=True):
        near(part, end)
    phi = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (own["q"], own["k"])]
    first = np.exp(g[..., 0])[..., None] * arrays["initial_z"] + phi[1][..., 0, :]
    near(reference.linear_attention_step(split(arrays)[1], *(own[n][..., 0, :] for n in "qkv"),
                                         log_decay_t=g[..., 0])[1][1], first)  # fmt: skip


@pytest.mark.parametrize("g", [-0.3, np.asarray(-0.3), np.array([-0.2, -1.0]), -np.ones((2, 2)) / 3])
@pytest.mark.parametrize("state", [False, True])
def test_gradients_of_a_step(check_vjp: Any, state: bool, g: Any) -> None:
    rng = np.random.default_rng(5)
    arrays = {"q_t": rng.normal(size=(2, 4, 3)), "k_t": rng.normal(size=(2, 2, 3)), "v_t": rng.normal(size=(2, 2, 2))}
    arrays |= {"initial_S": rng.normal(size=(2, 2, 3, 2)), "initial_z": 4 + rng.random((2, 2, 3))} if state else {}
    params = {"enable_gqa": True} | ({} if isinstance(g, np.ndarray) else {"log_decay_t": g})
    arrays |= {"log_decay_t": g} if isinstance(g, np.ndarray) else {}
    check_vjp("linear_attention_step", arrays, params, state=("S", "z"))


def test_hidden_tokens_do_not_decay(near: Any) -> None:
    """Their gates may be NaN; a call without them is the same, for a number too."""
    arrays, params = sample("hidden", "tokens", state=True)
    own, state = split(arrays)
    hidden = ~(np.arange(5) < HIDDEN["key_lengths"][..., None]) | ~HIDDEN["mask"]
    hidden = np.broadcast_to(hidden, own["log_decay"].shape)
    poisoned = {**own, "log_decay": np.where(hidden, np.nan, own["log_decay"])}
    for arguments in (own | {"log_decay": np.asarray(-0.5)}, poisoned):
        o, (S, z) = reference.linear_attention(**arguments, initial_state=state, return_state=True, **params)
        grads = reference.linear_attention_vjp(
            **arguments, do=np.ones(o.shape), dstate=(np.ones(S.shape), np.ones(z.shape)), initial_state=state, **params
        )
        assert np.all(np.isfinite(grads["log_decay"]))
        if arguments is poisoned:
            assert not np.any(grads["log_decay"][hidden])
            assert np.all(grads["log_decay"][~hidden])
        for n in range(2):  # each sequence without its hidden tokens
            seen = ~hidden[n, 0]
            alone = {name: x[n][:, seen] if name != "log_decay" or x.ndim else x for name, x in arguments.items()}
            start = tuple(x[n] for x in state)
            end = reference.linear_attention(**alone, causal=True, initial_state=start, return_state=True)[1]
            near(S[n], end[0])
            near(z[n], end[1])


def test_gates_of_all_sizes_at_once() -> None:
    """Small gates behind large ones, and -∞."""
    g = np.concatenate([np.full(2000, -30.0), np.full(50, -1e-3), [-np.inf], np.full(9, -1e-3)])
    x = np.ones((g.size, 1))
    o = reference.linear_attention(x, x, x, log_decay=g, causal=True, feature_map="identity")[:, 0]
    expected = np.cumsum(np.exp(-1e-3 * np.arange(51)))
    np.testing.assert_allclose(o[1999:2050], expected, rtol=1e-13)
    np.testing.assert_allclose(o[2050:], expected[:10], rtol=1e-13)


@pytest.mark.parametrize("op", ["cosine_attention", "efficient_attention", "linear_attention_packed"])
def test_others_do_not_take_it(op: str) -> None:
    x = np.ones((4, 6, 3))
    more = ([0, 4], [0, 4]) if op.endswith("packed") else ()
    with pytest.raises(ValueError, match="unexpected argument 'log_decay'"):
        getattr(reference, op)(x, x, x, *more, causal=True, log_decay=-0.1)
