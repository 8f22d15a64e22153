"""Bad input, with the text that a person sees."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference
from attnkit_conformance.opdb import BY_NAME

from .arrays import qkv

Q, K, V = qkv(5, 7)
HALF = np.zeros((2, 3, 5, 8), np.float16)

CASES = {
    "features": (
        {"k": K[..., :4]},
        ValueError,
        r"softmax_attention: k has shape \(2, 3, 7, 4\); expected \(\.\.\., S, 8\) as q has 8 features",
    ),
    "tokens": ({"v": V[:, :, :6]}, ValueError, r"v has shape \(2, 3, 6, 6\); expected \(\.\.\., 7, e\)"),
    "leading": ({"k": np.stack([K] * 3)}, None, ""),
    "batch": ({"k": np.concatenate([K, K])}, ValueError, r"the leading axes of q, k and v do not broadcast"),
    "heads": ({"k": K[:, :2], "v": V[:, :2]}, ValueError, r"do not broadcast.*pass enable_gqa=True"),
    "gqa": ({"k": K[:, :2], "v": V[:, :2], "enable_gqa": True}, ValueError, r"divisible by heads of k; got 3 and 2"),
    "one axis": ({"q": Q[0, 0, 0]}, ValueError, r"q has shape \(8,\); expected at least two axes"),
    "integer q": ({"q": Q.astype(int)}, TypeError, r"q has dtype int64; expected one of float16, bfloat16"),
    "mixed dtypes": ({"k": K.astype("float32")}, TypeError, r"q and k must share one dtype; got q float64, k float32"),
    "no array": ({"v": [1.0]}, TypeError, r"v must be an array of .*got list"),
    "mixed libraries": (
        {"k": torch.tensor(K)},
        TypeError,
        r"all arrays must come from one library; got torch k with numpy q",
    ),
    "mixed mask": (
        {"mask": jnp.ones((5, 7), bool)},
        TypeError,
        r"all arrays must come from one library; got jax mask with numpy q",
    ),
    "float mask": (
        {"mask": np.zeros((5, 7))},
        TypeError,
        r"mask has dtype float64; expected bool \(True = may attend\); pass additive scores as bias",
    ),
    "mask of a batch": (
        {"mask": np.ones((2, 7), bool)},
        ValueError,
        r"mask has shape \(2, 7\); expected a shape that broadcasts to \(\.\.\., L, S\) = \(2, 3, 5, 7\)",
    ),
    "mask enlarges": ({"mask": np.ones((4, 2, 3, 5, 7), bool)}, ValueError, r"mask has shape \(4, 2, 3, 5, 7\)"),
    "boolean bias": ({"bias": np.ones((5, 7), bool)}, TypeError, r"bias has dtype bool.*goes to mask"),
    "integer dropout mask": ({"dropout_mask": np.ones((5, 7), int)}, TypeError, r"dropout_mask has dtype int64"),
    "two dropouts": (
        {"dropout_mask": np.ones((5, 7)), "dropout": (0.1, 1)},
        ValueError,
        r"pass dropout_mask or dropout, not both",
    ),
    "dropout p": ({"dropout": (1.0, 1)}, ValueError, r"dropout p must lie in \[0, 1\); got 1.0"),
    "dropout seed": ({"dropout": (0.1, -1)}, ValueError, r"dropout seed must be an integer in \[0, 2\*\*64\); got -1"),
    "query mask": ({"query_mask": np.ones((5,))}, TypeError, r"query_mask has dtype float64; expected bool"),
    "key lengths": ({"key_lengths": np.ones((2,), int)}, ValueError, r"key_lengths has shape \(2,\)"),
    "negative key lengths": ({"key_lengths": -1}, ValueError, r"key_lengths must not be negative; got -1"),
    "causal": ({"causal": "lower"}, ValueError, r"causal must be False, True \(lower right\) or 'upper_left'"),
    "window": ({"window": (-1, 0)}, ValueError, r"window must be \(left, right\)"),
    "scale": ({"scale": float("nan")}, ValueError, r"scale must be finite; got nan"),
    "scales of other heads": (
        {"scale": np.ones(2)},
        ValueError,
        r"scale has shape \(2,\); expected \(\) or \(3,\), a number for each head",
    ),
    "scale per head on axes": ({"scale": np.ones((3, 1, 1))}, ValueError, r"scale has shape \(3, 1, 1\)"),
    "integer scale": ({"scale": np.array(1)}, TypeError, r"scale has dtype int64; expected a real float dtype"),
    "scale of another library": (
        {"scale": torch.ones(3)},
        TypeError,
        r"all arrays must come from one library; got torch scale with numpy q",
    ),
    "flag": ({"return_lse": 1}, TypeError, r"return_lse must be True or False; got 1"),
    "unexpected": ({"lenght": 3}, ValueError, r"softmax_attention: unexpected argument 'lenght'; expected some of"),
    "not taken": ({"length": "all"}, ValueError, r"softmax_attention: unexpected argument 'length'"),
    "no features": ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, r"q has shape .*; expected at least one feature"),
}


@pytest.mark.parametrize("name", CASES)
def test_softmax_says_what_is_wrong(name):
    changed, error, text = CASES[name]
    arguments = {"q": Q, "k": K, "v": V} | changed
    if error is None:
        assert attnkit.softmax_attention(**arguments).shape == (3, 2, 3, 5, 6)
        return
    with pytest.raises(error, match=text):
        attnkit.softmax_attention(**arguments)


OWN = {
    "activation": ("pointwise_attention", {"activation": "rleu"}, ValueError, r"activation must be one of .*'relu'\?"),
    "alpha": ("pointwise_attention", {"alpha": float("nan")}, ValueError, r"alpha must be finite; got nan"),
    "alphas of other heads": ("pointwise_attention", {"alpha": np.ones(2)}, ValueError, r"alpha has shape \(2,\)"),
    "gains of keys": ("pointwise_attention", {"gain": np.ones(7)}, ValueError, r"gain has shape \(7,\); expected \(\)"),
    "integer gamma": ("reluformer_attention", {"gamma": np.array(1)}, TypeError, r"gamma has dtype int64"),
    "scale of landmarks": (
        "nystrom_attention",
        {"scale": np.ones(()), "num_landmarks": 2, "k": Q, "v": Q},
        TypeError,
        r"nystrom_attention: scale must be a number; got an array of shape \(\)",
    ),
    "scale of features": ("linear_attention", {"scale": np.ones(3)}, TypeError, r"scale must be a number"),
    "length": ("pointwise_attention", {"length": 0}, ValueError, r"length must be greater than 0; got 0"),
    "length name": (
        "pointwise_attention",
        {"length": "keys"},
        ValueError,
        r"length must be 'visible', 'all', a number",
    ),
    "length shape": ("pointwise_attention", {"length": np.ones(3)}, ValueError, r"length has shape \(3,\)"),
    "shift": ("pointwise_attention", {"shift": "log"}, ValueError, r"shift must be a number or '-log_length'"),
    "gamma": (
        "reluformer_attention",
        {"gamma": 0.0},
        ValueError,
        r"reluformer_attention: gamma must be greater than 0",
    ),
    "gamma nan": ("reluformer_attention", {"gamma": float("nan")}, ValueError, r"gamma must be finite"),
    "lse": ("sigmoid_attention", {"return_lse": True}, ValueError, r"sigmoid_attention: unexpected argument"),
}


@pytest.mark.parametrize("name", OWN)
def test_own_options_say_what_is_wrong(name):
    op, options, error, text = OWN[name]
    with pytest.raises(error, match=text):
        getattr(attnkit, op)(**{"q": Q, "k": K, "v": V, **options})


def test_a_scale_without_heads_is_one_number():
    with pytest.raises(ValueError, match=r"scale has shape \(3,\); expected \(\), as there is no axis of heads"):
        attnkit.softmax_attention(Q[0, 0], K[0, 0], V[0, 0], scale=np.ones(3))


@pytest.mark.parametrize("name", ["scale", "alpha", "gain", "shift"])
def test_packed_sequences_take_plain_numbers(name):
    x, edges = np.ones((4, 2, 3)), (0, 1, 4)
    op = attnkit.softmax_attention_packed if name == "scale" else attnkit.pointwise_attention_packed
    with pytest.raises(TypeError, match=rf"{op.__name__}: {name} must be a number; got an array of shape \(2,\)"):
        op(x, x, x, edges, edges, **{name: np.ones(2)})


def test_missing_and_surplus_arrays():
    with pytest.raises(TypeError, match=r"softmax_attention: missing argument 'v'"):
        attnkit.softmax_attention(Q, K)
    with pytest.raises(TypeError, match=r"takes 3 positional arguments \(q, k, v\), got 4"):
        attnkit.softmax_attention(Q, K, V, V)


def test_devices_must_agree():
    q, k, v = (torch.tensor(x) for x in (Q, K, V))
    with pytest.raises(TypeError, match=r"all arrays must be on one device; got k on meta with q on cpu"):
        attnkit.softmax_attention(q, k.to("meta"), v)


def test_cotangents_must_have_the_shape_of_the_output():
    with pytest.raises(ValueError, match=r"do has shape \(2, 3, 7, 6\); expected \(2, 3, 5, 6\)"):
        attnkit.softmax_attention_vjp(Q, K, V, V)


def test_statistics_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"op must be one of .*got 'softmax'; did you mean 'softmax_attention'\?"):
        attnkit.row_statistics("softmax", Q, K)
    with pytest.raises(ValueError, match=r"row_statistics\(softmax_attention\): unexpected argument 'dropout'"):
        attnkit.row_statistics("softmax_attention", Q, K, dropout=(0.1, 1))
    with pytest.raises(
        ValueError, match=r"entropy needs weights that are not negative; got activation='identity'.*fields="
    ):
        attnkit.row_statistics("pointwise_attention", Q, K, activation="identity")
    with pytest.raises(ValueError, match=r"entropy needs weights"):
        attnkit.row_statistics("pointwise_attention", Q, K, gain=-1.0)
    with pytest.raises(ValueError, match=r"fields must be one of .*did you mean 'entropy'\?"):
        attnkit.row_statistics("softmax_attention", Q, K, fields=("entropie",))
    with pytest.raises(TypeError, match=r"dstats must be a RowStatistics of cotangents; got float"):
        attnkit.row_statistics_vjp("softmax_attention", Q, K, 1.0)
    few = attnkit.row_statistics("softmax_attention", Q, K, fields=("total",))
    with pytest.raises(ValueError, match=r"stats must hold total, entropy and visible; entropy, visible missing"):
        attnkit.attention_regulariser(few)


def test_layernorm_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"qk_layernorm: k_weight has shape \(7,\); expected \(8,\)"):
        attnkit.qk_layernorm(Q, K, np.ones(8), np.ones(7))
    with pytest.raises(ValueError, match=r"eps must be greater than 0"):
        attnkit.qk_layernorm(Q, K, np.ones(8), np.ones(8), eps=0.0)


S, Z = np.zeros((2, 3, 8, 6)), np.zeros((2, 3, 8))
GQA = {"k": K[:, :1], "v": V[:, :1], "enable_gqa": True}
TOKEN = {"q_t": Q[:, :, 0], "k_t": K[:, :, 0], "v_t": V[:, :, 0], "state": (S, Z)}
GATED = {
    "x": np.ones((5, 4)),
    "w_u": np.ones((4, 6)),
    "w_v": np.ones((4, 6)),
    "w_z": np.ones((4, 3)),
    "w_o": np.ones((6, 4)),
    **dict.fromkeys(("gamma_q", "beta_q", "gamma_k", "beta_k"), np.ones(3)),
}

ANY = {
    "no head axis": (
        "softmax_attention", {"q": Q[0, 0], "k": K[0, 0], "v": V[0, 0], "enable_gqa": True}, ValueError,
        r"softmax_attention: enable_gqa=True needs a head axis \(-3\) on q, k and v; got \(5, 8\), \(7, 8\), \(7, 6\)",
    ),
    "no pair": (
        "softmax_attention", {"q": Q, "k": K, "v": V, "dropout": 0.1}, ValueError,
        r"softmax_attention: dropout must be \(p, seed\); got 0\.1",
    ),
    "a cotangent of a norm": (
        "qk_layernorm_vjp",
        {"q": Q, "k": K, "q_weight": np.ones(8), "k_weight": np.ones(8), "dq_normed": Q, "dk_normed": Q}, ValueError,
        r"qk_layernorm_vjp: dk_normed has shape \(2, 3, 5, 8\); expected \(2, 3, 7, 8\), the shape of k",
    ),
    "map": (
        "linear_attention", {"q": Q, "k": K, "v": V, "feature_map": "elu"}, ValueError,
        r"linear_attention: feature_map must be one of 'elu_plus_one', 'relu', 'identity' or a callable; got 'elu'",
    ),
    "normalize": (
        "linear_attention", {"q": Q, "k": K, "v": V, "normalize": 1}, TypeError,
        r"linear_attention: normalize must be None, True or False; got 1",
    ),
    "normalize identity": (
        "linear_attention", {"q": Q, "k": K, "v": V, "normalize": True, "feature_map": "identity"}, ValueError,
        r"linear_attention: normalize must be None or False for identity, whose row sums can be 0; got True",
    ),
    "eps": (
        "linear_attention", {"q": Q, "k": K, "v": V, "eps": -1e-3}, ValueError,
        r"linear_attention: eps must not be negative; got -0\.001",
    ),
    "no state": (
        "linear_attention", {"q": Q, "k": K, "v": V, "initial_state": S}, ValueError,
        r"linear_attention: initial_state must be a tuple \(S, z\); got ndarray",
    ),
    "half a state": (
        "linear_attention", {"q": Q, "k": K, "v": V, "initial_state": (S,)}, ValueError,
        r"linear_attention: initial_state must be a tuple \(S, z\); got 1 parts",
    ),
    "a state of other features": (
        "linear_attention", {"q": Q, "k": K, "v": V, "initial_state": (S[..., :5], Z)}, ValueError,
        r"initial_state's S has shape \(2, 3, 8, 5\)",
    ),
    "a flat state": (
        "linear_attention", {"q": Q, "k": K, "v": V, "initial_state": (S, Z[0, 0, :1])}, ValueError,
        r"initial_state's z has shape \(1,\); expected \(2, 3, 8\) or what broadcasts to it",
    ),
    "a state and other keys": (
        "linear_attention", {"q": Q, "k": K, "v": V, "initial_state": (S, Z), "causal": True}, ValueError,
        r"linear_attention: initial_state with causal needs as many queries as keys; got 5 and 7",
    ),
    "a state of a group": (
        "linear_attention", {"q": Q, **GQA, "mask": np.ones((2, 3, 1, 7), bool), "return_state": True}, ValueError,
        r"linear_attention: mask and key_lengths must not have 3 heads with a state and enable_gqa",
    ),
    "no flag of a step": (
        "linear_attention_step", {**TOKEN, "enable_gqa": 1}, TypeError,
        r"linear_attention_step: enable_gqa must be True or False; got 1",
    ),
    "a step without features": (
        "linear_attention_step", {**TOKEN, "q_t": Q[:, :, 0, :0], "k_t": K[:, :, 0, :0]}, ValueError,
        r"linear_attention_step: q_t has shape \(2, 3, 0\); expected at least one feature",
    ),
    "a step of other features": (
        "linear_attention_step", {**TOKEN, "k_t": K[:, :, 0, :4]}, ValueError,
        r"linear_attention_step: k_t has shape \(2, 3, 4\); expected \(\.\.\., 8\) as q_t has 8 features",
    ),
    "a cotangent of a step": (
        "linear_attention_step_vjp", {**TOKEN, "do_t": Q[:, :, 0]}, ValueError,
        r"linear_attention_step_vjp: do_t has shape \(2, 3, 8\); expected \(2, 3, 6\), the shape of the output",
    ),
    "directions of other items": (
        "performer_attention", {"q": Q, "k": K, "v": V, "projection": np.ones((3, 1, 4, 8))}, ValueError,
        r"projection has shape \(3, 1, 4, 8\); expected leading axes that broadcast to \(2, 3\), those of q and k",
    ),
    "no landmarks": (
        "soft_attention", {"q": Q[..., :0], "v": V[:, :, :5], "landmarks": Q[..., :2, :0]}, ValueError,
        r"soft_attention: q has shape \(2, 3, 5, 0\); expected at least one feature",
    ),
    "nothing to hash": (
        "lsh_attention", {"qk": Q[..., :0], "v": V, "rotations": np.ones((1, 1, 1)), "chunk_size": 2}, ValueError,
        r"lsh_attention: qk has shape \(2, 3, 5, 0\); expected at least one feature",
    ),
    "nothing to remember": (
        "key_value_memory", {"x": np.ones((5, 0)), "keys": np.ones((3, 0)), "values": np.ones((3, 2))}, ValueError,
        r"key_value_memory: x has shape \(5, 0\); expected at least one feature",
    ),
    "a unit without features": (
        "gated_attention_unit", {**GATED, "x": np.ones((5, 0))}, ValueError,
        r"gated_attention_unit: x has shape \(5, 0\); expected at least one feature",
    ),
    "a unit without scores": (
        "gated_attention_unit", {**GATED, "w_z": np.ones((4, 0))}, ValueError,
        r"gated_attention_unit: w_z has shape \(4, 0\); expected \(4, s\) with s at least 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ANY)
def test_what_other_ops_take_is_said_by_name(name):
    op, arguments, error, text = ANY[name]
    with pytest.raises(error, match=text):
        getattr(attnkit, op)(**arguments)


def test_cotangents_of_statistics_and_of_a_loss_have_their_shapes():
    stats = attnkit.row_statistics("softmax_attention", Q, K)
    wrong = attnkit.RowStatistics(*[None] * (len(stats) - 1), np.ones((2, 3, 7)))
    name = stats._fields[-1]
    with pytest.raises(
        ValueError, match=rf"dstats\.{name} has shape \(2, 3, 7\); expected \(2, 3, 5\), the shape of the"
    ):
        attnkit.row_statistics_vjp("softmax_attention", Q, K, wrong)
    with pytest.raises(ValueError, match=r"dsum_term has shape \(1,\); expected \(\), the shape of a loss"):
        attnkit.attention_regulariser_vjp(stats, 1.0, np.ones(1))


def test_indices_of_landmarks_are_arrays_of_whole_numbers():
    with pytest.raises(TypeError, match=r"indices must be an array; got list"):
        attnkit.landmarks.random(Q, [0, 1])
    with pytest.raises(ValueError, match=r"indices has shape \(\); expected \(\.\.\., m\)"):
        attnkit.landmarks.random(Q, np.array(0))


# ---------------------------------------------------------------------------------------------- every op

SAID = re.compile(r"\bgot\b|has (shape|dtype)|unexpected argument|must not have")
# the reference has one implementation and takes any value for a flag
OF_THE_LIBRARY = ("impl", "gqa-number", "own-return-state")


@pytest.mark.parametrize("library", [attnkit, attnkit_reference], ids=lambda library: library.__name__)
@pytest.mark.parametrize("name", BY_NAME)
def test_what_the_kit_calls_wrongly_is_refused_with_what_came(name: str, library: Any) -> None:
    """By the library and by the reference; the kit asks the library alone, and for the argument."""
    op = BY_NAME[name]
    for sample in op.errors(op):
        of_reference = library is attnkit_reference
        if of_reference and sample.name.startswith(OF_THE_LIBRARY):
            continue
        with pytest.raises(sample.exception) as error:
            op.binding.forward(library, op, sample.arrays, sample.params)
        text = str(error.value)
        begins = name.rpartition(".")[2].removesuffix("_packed" if of_reference else "")
        assert text.startswith((begins, "newton_inverse") if name == "analysis.newton_residuals" else begins), text
        assert SAID.search(text), text
