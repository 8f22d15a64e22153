"""What a person reads who calls it wrongly: op, argument, what was expected and what came."""

import inspect
import re
from typing import Any

import numpy as np
import pytest

import attnkit_reference as reference

Q, K, V = np.ones((2, 4, 3, 5)), np.ones((2, 4, 6, 5)), np.ones((2, 4, 6, 7))
OPS = ("softmax_attention", "pointwise_attention", "reluformer_attention", "sigmoid_attention")

COMMON = "mask, bias, causal, window, key_lengths, query_mask, scale, enable_gqa, dropout_mask, dropout"

FLOATS = "expected a NumPy array of float16, bfloat16, float32, float64"
PAIRS = "expected a shape that broadcasts to (2, 4, 3, 6)"

VALUE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"mask": np.ones((2, 6), dtype=bool)}, f"mask does not fit; {PAIRS}, got (2, 6)"),
    ({"bias": np.full((1, 6), np.inf)}, "bias; expected values below +inf on visible pairs, got +inf"),
    ({"causal": "lower_left"}, "causal; expected False, True or 'upper_left', got 'lower_left'"),
    ({"window": (-1, 0)}, "window; expected (left, right), integers >= 0 or None, got (-1, 0)"),
    ({"key_lengths": -1}, "key_lengths; expected integers >= 0, got -1"),
    ({"dropout": (1.0, 3)}, "dropout's p; expected 0 <= p < 1, got 1.0"),
    ({"dropout": (0.1, -1)}, "dropout's seed; expected an integer in [0, 2**64), got -1"),
    ({"dropout": (0.1, 1.5)}, "dropout's seed; expected an integer in [0, 2**64), got 1.5"),
    ({"dropout": 0.1}, "dropout; expected (p, seed), got 0.1"),
    ({"dropout": (0.1, 1), "dropout_mask": np.ones((3, 6))}, "dropout; expected dropout or dropout_mask, got both"),
    ({"dropout_mask": np.ones((3, 5))}, f"dropout_mask does not fit; {PAIRS}"),
    ({"v": V[..., :5, :]}, "v must have the tokens of k; expected (..., 6, e), got (2, 4, 5, 7)"),
    ({"k": K[..., :4]}, "k must have the features of q; expected (..., S, 5), got (2, 4, 6, 4)"),
    ({"q": np.ones(5)}, "q needs two axes, tokens and features; expected (..., n, d), got (5,)"),
    ({"v": np.ones(())}, "v needs two axes, tokens and features; expected (..., n, d), got ()"),
    ({"q": Q[..., :0], "k": K[..., :0]}, "k must have the features of q"),
    (
        {"k": K[:, :2], "v": V[:, :2]},
        "(2, 4) and (2, 2) and (2, 2); for fewer heads in k and v than in q pass enable_gqa=True",
    ),
    (
        {"q": np.ones((3, 4, 3, 5))},
        "leading axes of q, k, v do not broadcast; expected equal sizes or 1, got (3, 4) and (2, 4)",
    ),
    (
        {"k": K[:, :3], "v": V[:, :3], "enable_gqa": True},
        "k with enable_gqa; expected a divisor of the 4 heads of q, got 3",
    ),
    ({"v": V[:, :2], "enable_gqa": True}, "v with enable_gqa; expected the 4 heads of k, got 2"),
    (
        {"q": np.ones((3, 5)), "enable_gqa": True},
        "q with enable_gqa; expected (..., heads, tokens, features), got (3, 5)",
    ),
    ({"masks": None}, "unexpected argument 'masks'; did you mean 'mask'? It takes q, k, v, "),
    ({"dropout_p": 0.5}, "unexpected argument 'dropout_p'; did you mean 'dropout'?"),
]

TYPE_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"mask": np.zeros((3, 6))},
        "mask; expected a boolean array, True = takes part (numbers to be added to the scores are `bias`), got",
    ),
    (
        {"query_mask": np.ones(3)},
        "query_mask; expected a boolean array, True = takes part, got ndarray of dtype float64",
    ),
    ({"key_lengths": True}, "key_lengths; expected integers, got bool True"),
    ({"scale": "small"}, "scale; expected a number, got str 'small'"),
    ({"k": K.astype(complex)}, f"k; {FLOATS}, got ndarray of dtype complex128"),
    ({"q": Q.tolist()}, f"q; {FLOATS}, got list"),
    ({"q": Q.astype(">f8")}, f"q; {FLOATS}, got ndarray of dtype >f8"),
    ({"bias": np.ones(6, ">f4")}, f"bias; {FLOATS}, got ndarray of dtype >f4"),
    ({"key_lengths": np.ones((2, 4), ">i4")}, "key_lengths; expected integers, got ndarray of dtype >i4"),
    ({"v": np.ma.array(V)}, f"v; {FLOATS}, got MaskedArray of dtype float64"),
    ({"mask": np.ma.array(np.ones((3, 6), bool))}, "mask; expected a boolean array"),
    ({"key_lengths": np.ma.array(np.ones((2, 4), int))}, "key_lengths; expected integers, got MaskedArray"),
    *(({name: None}, f"{name}; expected a NumPy array, got None") for name in ("q", "k", "v")),
]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("index", range(len(VALUE_ERRORS)))
def test_values_and_shapes(op: str, index: int) -> None:
    changed, text = VALUE_ERRORS[index]
    with pytest.raises(ValueError, match=f"^{op}: .*{re.escape(text)}|^{op}: {re.escape(text)}"):
        getattr(reference, op)(**{"q": Q, "k": K, "v": V, **changed})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("index", range(len(TYPE_ERRORS)))
def test_dtypes(op: str, index: int) -> None:
    changed, text = TYPE_ERRORS[index]
    with pytest.raises(TypeError, match=f"^{op}: {re.escape(text)}"):
        getattr(reference, op)(**{"q": Q, "k": K, "v": V, **changed})


ONE, TOKENS, SHORT = np.ones((2, 5, 3)), np.ones((2, 4, 6, 5)), np.ones((3, 4, 6, 3))
FEW = {"q": np.ones((3, 4)), "k": np.ones((5, 4)), "v": np.ones((5, 2))}
LAYER = {"w_z": (3, 2), "w_u": (3, 4), "w_v": (3, 4), "w_o": (4, 3), "gamma_q": (2,), "beta_q": (2,), "gamma_k": (2,)}
MEMORY = {
    "keys": (4, 3),
    "values": (4, 6),
    "key_bias": (4,),
    "value_bias": (6,),
    "norm_weight": (6,),
    "norm_bias": (6,),
}
GOOD: dict[str, dict[str, Any]] = {
    "soft_attention": {"q": TOKENS, "v": V, "landmarks": np.ones((2, 4, 3, 5))},
    "nystrom_attention": {"q": TOKENS, "k": K, "v": V, "num_landmarks": 3},
    "linformer_attention": {"q": TOKENS, "k": K, "v": V, "proj_k": np.ones((3, 6)), "proj_v": np.ones((3, 8))},
    "newton_inverse": {"a": np.eye(3)},
    "gated_attention_unit": {"x": ONE, "beta_k": np.ones(2)} | {name: np.ones(shape) for name, shape in LAYER.items()},
    "key_value_memory": {"x": ONE} | {name: np.ones(shape) for name, shape in MEMORY.items()},
    "lsh_attention": {"qk": ONE, "v": np.ones((2, 5, 4)), "rotations": np.ones((3, 2, 2)), "chunk_size": 2},
    "forgetting_attention": {**FEW, "log_forget": -np.ones(5)},
    "sima_attention": {**FEW, "q": FEW["k"]},
    "rela_attention": {"q": Q, "k": K, "v": V, "norm_weight": np.ones(28)},
    "linear_attention": {"q": SHORT, "k": SHORT, "v": SHORT, "causal": True, "log_decay": np.zeros((4, 6))},
    "stick_breaking_attention": FEW,
}
OWN: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "pointwise_attention": [
        ({"activation": "tanh"}, ValueError, "activation; expected one of relu, relu_squared, relu6, "),
        ({"gain": np.inf}, ValueError, "gain; expected a finite number, got inf"),
        ({"shift": "log"}, ValueError, "shift; expected a number or '-log_length', got 'log'"),
        ({"length": "keys"}, ValueError, "length; expected 'visible', 'all', a number or an array, got 'keys'"),
        ({"bias": np.full(6, -np.inf)}, ValueError, "bias; expected finite values on visible pairs"),
    ],
    "sigmoid_attention": [
        ({"length": np.zeros(3)}, ValueError, "length; expected values > 0 and finite, got array([0., 0., 0.])"),
        ({"length": np.ones(3, dtype=int)}, TypeError, "length; expected a NumPy array of float16"),
    ],
    "reluformer_attention": [
        ({"gamma": 0.0}, ValueError, "gamma; expected a finite number > 0, got 0.0"),
        ({"gamma": np.zeros(4)}, ValueError, "gamma; expected finite numbers > 0, got array([0., "),
        ({"bias": np.full(6, -np.inf)}, ValueError, "bias; expected finite values on visible pairs"),
    ],
    "rela_attention": [
        ({"norm_axis": "token"}, ValueError, "norm_axis; expected 'hidden' or 'head', got 'token'"),
        ({"bias": np.full(6, -np.inf)}, ValueError, "bias; expected finite values on visible pairs"),
    ],
    "entmax_attention": [
        ({"alpha": "softmax"}, TypeError, "alpha; expected a number, got str 'softmax'"),
        ({"alpha": np.array([[0.5]])}, ValueError, "alpha; expected 1 or 1.01 <= alpha <= 2, got array([[0.5]])"),
    ],
    "sparsemax_attention": [({"alpha": 2.0}, ValueError, "unexpected argument 'alpha'")],
    "sima_attention": [
        ({"mask": np.ones(5, dtype=bool)}, ValueError, "query_mask; expected one beside a key mask"),
        ({"key_lengths": 3}, ValueError, "query_mask; expected one beside a key mask"),
    ],
    "forgetting_attention": [
        ({"log_forget": np.ones(5)}, ValueError, "log_forget; expected finite numbers <= 0"),
        ({"log_forget": np.full(5, -np.inf)}, ValueError, "log_forget; expected finite numbers <= 0"),
        ({"log_forget": None}, TypeError, "log_forget; expected a NumPy array, got None"),
        ({"log_forget": -np.ones(3)}, ValueError, "log_forget has another number of tokens"),
    ],
    "stick_breaking_attention": [
        ({"attend_current": 1}, TypeError, "attend_current; expected True or False, got 1"),
        ({"bias": np.full((3, 5), -np.inf)}, ValueError, "bias; expected finite values"),
    ],
    "linear_attention": [
        ({"causal": "upper_left"}, ValueError, "log_decay needs causal; expected True, got 'upper_left'"),
        ({"log_decay": np.full((4, 6), 0.1)}, ValueError, "log_decay; expected logarithms, at most 0, got 0.1"),
        ({"log_decay": 0.5}, ValueError, "log_decay; expected a logarithm, at most 0, got 0.5"),
        ({"log_decay": -np.inf}, ValueError, "log_decay; expected a finite number"),
        ({"log_decay": np.zeros(3)}, ValueError, "log_decay does not fit; expected () or (4,)"),
        ({"log_decay": np.zeros((4, 5))}, ValueError, "log_decay does not fit; expected a shape that broadcasts"),
    ],
    "gated_attention_unit": [
        ({"w_o": np.ones((5, 3))}, ValueError, "w_o has the wrong shape; expected (4, 3), got (5, 3)"),
        ({"w_v": np.ones(3)}, ValueError, "w_v; expected a matrix, got (3,)"),
        ({"beta_k": np.ones((1, 2))}, ValueError, "beta_k has the wrong shape; expected (2,), got (1, 2)"),
        ({"gamma_q": np.ones(2, int)}, TypeError, "gamma_q; expected a NumPy array of float16"),
        ({"x": np.ones(3)}, ValueError, "x needs tokens and features"),
    ],
    "key_value_memory": [
        ({"activation": "gelu"}, ValueError, "activation; expected one of relu, softmax, got 'gelu'"),
        ({"norm_weight": None}, ValueError, "norm_bias; expected a norm_weight beside it, got None"),
        ({"keys": np.ones((4, 2))}, ValueError, "keys must have the features of x; expected (..., m, 3), got (4, 2)"),
        (
            {"values": np.ones((5, 6))},
            ValueError,
            "values must have the slots of keys; expected (..., 4, e), got (5, 6)",
        ),
        ({"keys": np.ones((4, 3), "f4")}, TypeError, "keys must share the dtype of x; expected float64, got float32"),
        ({"x": np.ones(3)}, ValueError, "x needs two axes"),
        ({"keys": np.ones((3, 4, 3))}, ValueError, "leading axes of x, keys, values do not broadcast"),
    ],
    "lsh_attention": [
        ({"rotations": np.ones((3, 2))}, ValueError, "rotations; expected (..., 3, num_hashes, num_buckets/2)"),
        ({"v": ONE[:, :4]}, ValueError, "v must have the tokens of qk; expected (..., 5, e), got (2, 4, 3)"),
        ({"v": ONE.astype("f4")}, TypeError, "v must share the dtype of qk; expected float64, got float32"),
        ({"qk": np.ones(3)}, ValueError, "qk needs two axes"),
    ],
    "soft_attention": [
        ({"newton_steps": 2.0}, TypeError, "newton_steps; expected an integer >= 0, got float 2.0"),
        ({"init_scale": np.ones(3)}, ValueError, "init_scale does not fit; expected a shape that"),
        ({"init_scale": np.zeros(4)}, ValueError, "init_scale; expected values > 0 and finite"),
        ({"ridge": -0.1}, ValueError, "ridge; expected a finite number >= 0, got -0.1"),
        ({"inverse_grad": "exact"}, ValueError, "inverse_grad; expected 'implicit' or 'unrolled', got"),
        ({"landmarks": np.ones((3, 4))}, ValueError, "landmarks must have the features of q"),
        ({"landmarks": np.ones((3, 3, 5))}, ValueError, "leading axes of q, v, landmarks do not"),
        ({"v": V[..., :5, :]}, ValueError, "v must have the tokens of q; expected (..., 6, e)"),
        ({"q": Q[0, 0, 0]}, ValueError, "q needs two axes"),
        ({"q": Q.astype(int)}, TypeError, f"q; {FLOATS}"),
    ],
    "nystrom_attention": [
        ({"num_landmarks": True}, TypeError, "num_landmarks; expected an integer >= 1, got bool"),
        ({"init": "original"}, ValueError, "init; expected 'exact' or 'batch_max', got 'original'"),
        ({"k": K[..., :5, :], "v": V[..., :5, :]}, ValueError, "k must have the tokens of q"),
        ({"k": K[:, :2], "v": V[:, :2]}, ValueError, "leading axes of q, k, v do not broadcast"),
    ],
    "linformer_attention": [
        ({"proj_k": np.ones((3, 5))}, ValueError, "proj_k; expected (..., m, S_max) with S_max >= 6"),
        ({"proj_v": np.ones((4, 6))}, ValueError, "proj_v must have the slots of proj_k; expected 3"),
        ({"proj_k": np.ones((3, 3, 6))}, ValueError, "proj_k does not fit"),
        ({"proj_k": np.ones((3, 6), int)}, TypeError, f"proj_k; {FLOATS}"),
    ],
    "newton_inverse": [
        ({"a": np.ones((3, 2))}, ValueError, "a; expected square matrices (..., m, m), got (3, 2)"),
        ({"ridge": 0.1}, ValueError, "unexpected argument 'ridge'"),
    ],
}


@pytest.mark.parametrize(("op", "index"), [(op, index) for op, rows in OWN.items() for index in range(len(rows))])
def test_what_an_op_says_of_its_own(op: str, index: int) -> None:
    changed, error, text = OWN[op][index]
    with pytest.raises(error, match=f"^{op}: {re.escape(text)}"):
        getattr(reference, op)(**{**GOOD.get(op, {"q": Q, "k": K, "v": V}), **changed})


@pytest.mark.parametrize("name", [name for name in reference.__all__ if name.islower()])
def test_none_is_refused_by_name(name: str) -> None:
    """Where the annotation of an argument does not say that it may be None."""
    function = getattr(reference, name)
    if not inspect.isfunction(function):
        return
    parameters = inspect.signature(function).parameters.values()
    given: dict[str, Any] = {p.name: None for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    given |= {"op": "softmax_attention"} if "op" in given else {}
    needed = [name for name in given if name not in ("op", "state")]
    with pytest.raises(TypeError, match=rf"^{name}.*: {needed[0]}; expected .*got .*None"):
        function(**given)


def test_statistics() -> None:
    call, vjp = reference.row_statistics, reference.row_statistics_vjp
    with pytest.raises(ValueError, match=r"^row_statistics: op; expected one of .*softmax_attention, .*got 'linear'"):
        call("linear", Q, K)
    text = r"^row_statistics\(softmax_attention\): unexpected argument "
    for name, value in (("alpha", 1.0), ("dropout", (0.1, 1)), ("return_lse", True)):
        with pytest.raises(ValueError, match=f"{text}'{name}'; did you mean '"):
            call("softmax_attention", Q, K, **{name: value})
    with pytest.raises(ValueError, match=r"fields; expected a tuple of names out of total, entropy, .*got 'total'"):
        call("softmax_attention", Q, K, fields="total")
    with pytest.raises(TypeError, match=r"dstats; expected RowStatistics of cotangents, got tuple"):
        vjp("softmax_attention", Q, K, (None,) * 6)
    one = reference.RowStatistics(total=np.ones((2, 4, 3)))
    with pytest.raises(ValueError, match=r"dstats\.total; expected None for a field not in fields=\('maximum',\)"):
        vjp("softmax_attention", Q, K, one, fields=("maximum",))
    with pytest.raises(ValueError, match=r"dstats\.total has the wrong shape; expected \(2, 4, 3\), got \(3,\)"):
        vjp("softmax_attention", Q, K, reference.RowStatistics(total=np.ones(3)))


def test_regulariser() -> None:
    stats = reference.RowStatistics(total=np.ones(3), entropy=np.ones(3), visible=np.ones(3))
    with pytest.raises(
        ValueError, match=r"^attention_regulariser: stats; expected total, entropy and visible, got none"
    ):
        reference.attention_regulariser(stats._replace(entropy=None))
    with pytest.raises(ValueError, match=r"unexpected argument 'cap'; did you mean 'entropy_cap'"):
        reference.attention_regulariser(stats, cap=0.5)
    with pytest.raises(ValueError, match=r"query_mask does not fit"):
        reference.attention_regulariser(stats, query_mask=np.ones((2, 3), dtype=bool))
    with pytest.raises(ValueError, match=r"stats\.entropy has the wrong shape; expected \(3,\) as for total"):
        reference.attention_regulariser(stats._replace(entropy=np.ones(2)))


def test_qk_layernorm() -> None:
    weight = np.ones(5)
    with pytest.raises(ValueError, match=r"^qk_layernorm: k_weight has the wrong shape; expected \(5,\), got \(4,\)"):
        reference.qk_layernorm(Q, K, weight, np.ones(4))
    with pytest.raises(ValueError, match=r"^qk_layernorm: unexpected argument 'epsilon'; did you mean 'eps'"):
        reference.qk_layernorm(Q, K, weight, weight, epsilon=1e-5)
    with pytest.raises(ValueError, match=r"^qk_layernorm: eps; expected a finite number > 0, got 0.0"):
        reference.qk_layernorm(Q, K, weight, weight, eps=0.0)


def test_signatures_show_every_argument() -> None:
    own = {
        "softmax_attention": ["return_lse", "sink"],
        "pointwise_attention": ["activation", "alpha", "gain", "length", "shift"],
        "reluformer_attention": ["gamma", "length"],
        "sigmoid_attention": ["length"],
    }
    common = COMMON.split(", ")
    for op in OPS:
        assert keyword_names(op) == own[op] + common
        rest = [name for name in own[op] if name != "return_lse"]
        assert keyword_names(f"{op}_vjp") == rest + common
        assert keyword_names(f"{op}_magnitudes") == rest + common
        assert keyword_names(f"{op}_weights") == rest + [name for name in common if "dropout" not in name]


def keyword_names(function: str) -> list[str]:
    parameters = inspect.signature(getattr(reference, function)).parameters.values()
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters)
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def test_everything_public_is_exported_and_documented() -> None:
    assert sorted(reference.__all__) == reference.__all__
    for name in reference.__all__:
        assert name == "ACTIVATIONS" or getattr(reference, name).__doc__, name
