"""Linear, cosine, performer and efficient attention: what a person reads who calls them wrongly, or asks for help."""

import inspect
import re
from typing import Any

import numpy as np
import pytest

from attnkit_reference.linear import attention, cosine, efficient, performer

Arrays = dict[str, Any]

OPS: dict[str, tuple[Any, Arrays]] = {
    "elu_plus_one": (attention.linear_attention, {}),
    "relu": (attention.linear_attention, {"feature_map": "relu"}),
    "identity": (attention.linear_attention, {"feature_map": "identity"}),
    "cosine": (cosine.cosine_attention, {}),
    "performer": (performer.performer_attention, {"projection": performer.orthogonal_features(8, 4, seed=0)}),
    "efficient": (efficient.efficient_attention, {}),
}

Q, K, V = np.ones((2, 4, 6, 4)), np.ones((2, 2, 6, 4)), np.ones((2, 2, 6, 3))
STATE = (np.zeros((2, 2, 4, 3)), np.zeros((2, 2, 4)))
INTEGERS, OF_FOUR = (STATE[0].astype(int), STATE[1]), (np.zeros((2, 2, 5, 3)), np.zeros((2, 4, 5)))
FITS = "does not fit; expected a shape that broadcasts to"

WRONG: dict[str, list[tuple[Any, ...]]] = {  # by op: arguments, what is said of them, and TypeError where it is one
    "elu_plus_one": [
        ({"feature_map": "elu"}, "feature_map; expected one of elu_plus_one, relu, identity or a callable, got 'elu'"),
        (
            {"feature_map": lambda x: x.sum(-2)},
            "feature_map of (..., n, d); expected (..., n, f) = (2, 4, 6, 'f'), got (2, 4, 4)",
        ),
    ],
    "relu": [
        ({"normalize": 1}, "normalize; expected None, True or False, got 1", TypeError),
        ({"eps": -1.0}, "eps; expected a number >= 0, got -1.0"),
        ({"initial_state": STATE[0]}, "expected a tuple (S, z), got ndarray"),
        ({"initial_state": (STATE[0][..., :2], STATE[1])}, f"initial_state's S {FITS} (2, 2, 4, 3), got (2, 2, 4, 2)"),
        ({"initial_state": INTEGERS}, "initial_state's S; expected a NumPy array of", TypeError),
        (
            {"mask": np.ones((4, 1, 6), dtype=bool), "return_state": True},
            "mask or key_lengths with a state and enable_gqa; expected one head, for the query heads of a group share",
        ),
    ],
    "identity": [
        ({"normalize": True}, "normalize; expected None or False for identity, whose row sums can be 0, got True"),
    ],
    "cosine": [({"initial_state": OF_FOUR}, f"initial_state's z {FITS} (2, 2, 5), got (2, 4, 5)")],
    "performer": [
        ({"initial_state": STATE}, "expected a tuple (S, z, c), got 2 parts"),
        ({"kernel": "exp"}, "kernel; expected one of softmax, relu, got 'exp'"),
        ({"projection": np.ones((4, 8, 4))}, f"projection {FITS} (2, 2, 'm', 4), got (4, 8, 4)"),
    ],
    "efficient": [
        ({"mask": np.ones((6, 6), dtype=bool)}, "mask; expected a key mask (..., 1, S) or (S,), got (6, 6)"),
        ({"initial_state": STATE}, "expected a tuple (S, z, m), got 2 parts"),
    ],
}


ROWS = [pytest.param(op, row, id=f"{op}, {next(iter(row[0]))}") for op, rows in WRONG.items() for row in rows]


@pytest.mark.parametrize(("op", "wrong"), ROWS)
def test_what_a_person_reads(op: str, wrong: tuple[Any, ...]) -> None:
    params, text, *error = wrong
    function, own = OPS[op]
    given = {"q": Q, "k": K, "v": V, "enable_gqa": True, **own, **params}
    with pytest.raises(error[0] if error else ValueError, match=f"^{function.__name__}: .*{re.escape(text)}"):
        function(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_a_state_under_causal_needs_as_many_queries_as_keys() -> None:
    text = "initial_state with causal; expected as many queries as keys, got 5 and 6"
    for causal in (True, "upper_left"):
        with pytest.raises(ValueError, match=text):
            attention.linear_attention(Q[..., :5, :], K, V, enable_gqa=True, causal=causal, initial_state=STATE)


def test_gradients_say_what_is_wrong() -> None:
    do = np.ones((2, 4, 6, 3))
    with pytest.raises(ValueError, match=re.escape("dstate; expected a tuple of 2 parts, got 3 parts")):
        attention.linear_attention_vjp(Q, K, V, do, dstate=(None, None, None), enable_gqa=True)
    with pytest.raises(ValueError, match=re.escape("dstate has another shape than the state; expected (2, 2, 4)")):
        attention.linear_attention_vjp(Q, K, V, do, dstate=(None, STATE[0]), enable_gqa=True)
    with pytest.raises(NotImplementedError, match=re.escape("feature_map; expected a callable with an attribute vjp")):
        attention.linear_attention_vjp(Q, K, V, do, feature_map=lambda x: x, enable_gqa=True)
    with pytest.raises(ValueError, match="m; expected an integer >= 1"):
        performer.orthogonal_features(0, 3, 1)
    with pytest.raises(ValueError, match=re.escape("q_t needs an axis of features; expected (..., d), got ()")):
        attention.linear_attention_step(None, np.float64(1), K, V)


def test_help_shows_what_is_accepted() -> None:
    common = ["mask", "causal", "key_lengths", "query_mask", "enable_gqa"]
    state = ["chunk_size", "initial_state", "return_state"]
    found = {f.__name__: list(inspect.signature(f).parameters)[3:] for f, _ in OPS.values()}
    own = ["feature_map", "normalize", "eps", "log_decay"]
    assert found["linear_attention"] == [*own, *state, *common[:4], "scale", "enable_gqa"]
    assert found["cosine_attention"] == ["eps", *state, *common]
    assert found["performer_attention"] == ["projection", "kernel", "eps", *state, *common]
    assert found["efficient_attention"] == [*state, *common]
