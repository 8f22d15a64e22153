"""Bad input, with the text that a person sees."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
import attnkit_reference
from attnkit_conformance import core
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
    "boolean bias": ({"bias": np.ones((5, 7), bool)}, TypeError, r"bias has dtype bool.*goes to mask"),
    "two dropouts": (
        {"dropout_mask": np.ones((5, 7)), "dropout": (0.1, 1)},
        ValueError,
        r"pass dropout_mask or dropout, not both",
    ),
    "dropout p": ({"dropout": (1.0, 1)}, ValueError, r"dropout p must lie in \[0, 1\); got 1.0"),
    "dropout seed": ({"dropout": (0.1, -1)}, ValueError, r"dropout seed must be an integer in \[0, 2\*\*64\); got -1"),
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
    "flag": ({"return_lse": 1}, TypeError, r"return_lse must be True or False; got 1"),
    "unexpected": ({"lenght": 3}, ValueError, r"softmax_attention: unexpected argument 'lenght'; expected some of"),
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
    "alphas of other heads": ("pointwise_attention", {"alpha": np.ones(2)}, ValueError, r"alpha has shape \(2,\)"),
    "gains of keys": ("pointwise_attention", {"gain": np.ones(7)}, ValueError, r"gain has shape \(7,\); expected \(\)"),
    "scale of landmarks": (
        "nystrom_attention",
        {"scale": np.ones(()), "num_landmarks": 2, "k": Q, "v": Q},
        TypeError,
        r"nystrom_attention: scale must be a number; got an array of shape \(\)",
    ),
    "scale of features": ("linear_attention", {"scale": np.ones(3)}, TypeError, r"scale must be a number"),
    "length name": (
        "pointwise_attention",
        {"length": "keys"},
        ValueError,
        r"length must be 'visible', 'all', a number",
    ),
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


def test_statistics_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"op must be one of .*got 'softmax'; did you mean 'softmax_attention'\?"):
        attnkit.row_statistics("softmax", Q, K)
    with pytest.raises(
        ValueError, match=r"entropy needs weights that are not negative; got activation='identity'.*fields="
    ):
        attnkit.row_statistics("pointwise_attention", Q, K, activation="identity")
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
    "no state": (
        "linear_attention", {"q": Q, "k": K, "v": V, "initial_state": S}, ValueError,
        r"linear_attention: initial_state must be a tuple \(S, z\); got ndarray",
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
    "directions of other items": (
        "performer_attention", {"q": Q, "k": K, "v": V, "projection": np.ones((3, 1, 4, 8))}, ValueError,
        r"projection has shape \(3, 1, 4, 8\); expected leading axes that broadcast to \(2, 3\), those of q and k",
    ),
    "no landmarks": (
        "soft_attention", {"q": Q[..., :0], "v": V[:, :, :5], "landmarks": Q[..., :2, :0]}, ValueError,
        r"soft_attention: q has shape \(2, 3, 5, 0\); expected at least one feature",
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


@pytest.mark.parametrize("library", [attnkit, attnkit_reference], ids=lambda library: library.__name__)
@pytest.mark.parametrize("name", [name for name, op in BY_NAME.items() if op.vjp])
def test_a_cotangent_of_another_shape_is_refused_with_that_of_its_output(name: str, library: Any) -> None:
    op = BY_NAME[name]
    if (name, library) == ("attention_regulariser", attnkit_reference):
        return  # it takes what broadcasts
    case = next(core.cases(name, "small", ("float32",)))
    arrays = {n: case.typed(n) for n in case.arrays}
    right = {n: x.astype(op.output_dtype(n, "float32")) for n, x in case.cotangents.items()}
    for output, x in right.items():
        wrong = {**right, output: np.ones((7, *x.shape), x.dtype)}
        with pytest.raises(ValueError, match=r"^\w+_vjp\S*: d\S+ (S |z |c |m )?has ") as error:
            op.binding.vjp(library, op, arrays, case.params, wrong)
        if library is attnkit or not name.endswith(
            ("_step", "_packed")
        ):  # which it asks a token, or a sequence, at a time
            assert str(x.shape) in str(error.value).partition("expected")[2]
