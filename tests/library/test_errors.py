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
S, Z = np.zeros((2, 3, 8, 6)), np.zeros((2, 3, 8))
MARKS = Q[..., :3, :]
E, F, WEIGHT = np.ones((4, 7)), np.ones((3, 4, 9)), np.ones(18)
ROTATIONS = np.ones((8, 2, 3))
GATES = dict.fromkeys(("gamma_q", "beta_q", "gamma_k", "beta_k"), np.ones(3))
GATED = {"x": np.ones((5, 4)), "w_u": np.ones((4, 6)), "w_v": np.ones((4, 6)), "w_z": np.ones((4, 3)), **GATES}
GQA = {"k": K[:, :1], "v": V[:, :1], "enable_gqa": True}
QKV = {"q": Q, "k": K, "v": V}
GOOD: dict[str, dict[str, Any]] = {
    "linear_attention_step": {"q_t": Q[:, :, 0], "k_t": K[:, :, 0], "v_t": V[:, :, 0], "state": (S, Z)},
    "soft_attention": {"q": Q, "v": V[:, :, :5], "landmarks": MARKS},
    "nystrom_attention": {"q": Q, "k": Q, "v": Q, "num_landmarks": 3},
    "linformer_attention": {**QKV, "proj_k": E, "proj_v": F},
    "newton_inverse": {"a": np.eye(3)},
    "gated_attention_unit": {**GATED, "w_o": np.ones((6, 4))},
    "key_value_memory": {"x": Q, "keys": np.ones((10, 8)), "values": np.ones((10, 5))},
    "lsh_attention": {"qk": Q, "v": V[:, :, :5], "rotations": ROTATIONS, "chunk_size": 4},
    "rela_attention": {**QKV, "norm_weight": WEIGHT},
}
"""A call of an op of which a row changes something; of the others q, k and v."""

WRONG: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "softmax_attention": [
        ({"k": K[..., :4]}, ValueError, r"k has shape \(2, 3, 7, 4\); expected \(\.\.\., S, 8\) as q has 8 features"),
        ({"v": V[:, :, :6]}, ValueError, r"v has shape \(2, 3, 6, 6\); expected \(\.\.\., 7, e\)"),
        ({"k": np.concatenate([K, K])}, ValueError, r"the leading axes of q, k and v do not broadcast"),
        ({"k": K[:, :2], "v": V[:, :2]}, ValueError, r"do not broadcast.*pass enable_gqa=True"),
        ({"k": K[:, :2], "v": V[:, :2], "enable_gqa": True}, ValueError, r"divisible by heads of k; got 3 and 2"),
        ({"q": Q[0, 0, 0]}, ValueError, r"q has shape \(8,\); expected at least two axes"),
        ({"q": Q.astype(int)}, TypeError, r"q has dtype int64; expected one of float16, bfloat16"),
        ({"k": K.astype("float32")}, TypeError, r"q and k must share one dtype; got q float64, k float32"),
        ({"mask": jnp.ones(7, bool)}, TypeError, "all arrays must come from one library; got jax mask with numpy q"),
        (
            {"mask": np.zeros((5, 7))},
            TypeError,
            r"mask has dtype float64; expected bool \(True = may attend\); pass additive scores as bias",
        ),
        (
            {"mask": np.ones((2, 7), bool)},
            ValueError,
            r"mask has shape \(2, 7\); expected a shape that broadcasts to \(\.\.\., L, S\) = \(2, 3, 5, 7\)",
        ),
        ({"bias": np.ones((5, 7), bool)}, TypeError, r"bias has dtype bool.*goes to mask"),
        ({"dropout_mask": np.ones((5, 7)), "dropout": (0.1, 1)}, ValueError, r"pass dropout_mask or dropout, not both"),
        ({"dropout": (1.0, 1)}, ValueError, r"dropout p must lie in \[0, 1\); got 1.0"),
        ({"dropout": (0.1, -1)}, ValueError, r"dropout seed must be an integer in \[0, 2\*\*64\); got -1"),
        ({"dropout": 0.1}, ValueError, r"dropout must be \(p, seed\); got 0\.1"),
        ({"causal": "lower"}, ValueError, r"causal must be False, True \(lower right\) or 'upper_left'"),
        ({"window": (-1, 0)}, ValueError, r"window must be \(left, right\)"),
        ({"scale": float("nan")}, ValueError, r"scale must be finite; got nan"),
        ({"scale": np.ones(2)}, ValueError, r"scale has shape \(2,\); expected \(\) or \(3,\), a number for each head"),
        ({"scale": np.ones((3, 1, 1))}, ValueError, r"scale has shape \(3, 1, 1\)"),
        ({"scale": np.array(1)}, TypeError, r"scale has dtype int64; expected a real float dtype"),
        ({"return_lse": 1}, TypeError, r"return_lse must be True or False; got 1"),
        ({"lenght": 3}, ValueError, r"unexpected argument 'lenght'; expected some of"),
        ({"q": Q[..., :0], "k": K[..., :0]}, ValueError, r"q has shape .*; expected at least one feature"),
        (
            {"q": Q[0, 0], "k": K[0, 0], "v": V[0, 0], "enable_gqa": True},
            ValueError,
            r"enable_gqa=True needs a head axis \(-3\) on q, k and v; got \(5, 8\), \(7, 8\), \(7, 6\)",
        ),
    ],
    "pointwise_attention": [
        ({"alpha": np.ones(2)}, ValueError, r"alpha has shape \(2,\)"),
        ({"gain": np.ones(7)}, ValueError, r"gain has shape \(7,\); expected \(\)"),
        ({"length": "keys"}, ValueError, r"length must be 'visible', 'all', a number"),
    ],
    "entmax_attention": [
        ({"alpha": 1.005}, ValueError, r"alpha must be 1 or lie in \[1.01, 2\]; got 1.005"),
        ({"alpha": [1.5]}, TypeError, r"alpha must be a number; got \[1.5\]"),
        ({"alpha": np.ones(5)}, ValueError, r"alpha has shape \(5,\).*\(..., L, 1\) = \(2, 3, 5, 1"),
    ],
    "rela_attention": [
        ({"norm_axis": "token"}, ValueError, "norm_axis must be one of 'hidden', 'head'"),
        ({"gate_weight": [1.0] * 18}, TypeError, "gate_weight must be an array of .*got list"),
    ],
    "forgetting_attention": [
        ({}, TypeError, "missing argument 'log_forget'"),
        ({"log_forget": -np.ones((3, 1))}, ValueError, "log_forget has shape .*a number for each key"),
    ],
    "linear_attention": [
        ({"scale": np.ones(3)}, TypeError, r"scale must be a number"),
        (
            {"feature_map": "elu"},
            ValueError,
            r"feature_map must be one of 'elu_plus_one', 'relu', 'identity' or a callable; got 'elu'",
        ),
        ({"normalize": 1}, TypeError, r"normalize must be None, True or False; got 1"),
        (
            {"normalize": True, "feature_map": "identity"},
            ValueError,
            r"normalize must be None or False for identity, whose row sums can be 0; got True",
        ),
        ({"initial_state": S}, ValueError, r"initial_state must be a tuple \(S, z\); got ndarray"),
        ({"initial_state": (S[..., :5], Z)}, ValueError, r"initial_state's S has shape \(2, 3, 8, 5\)"),
        (
            {"initial_state": (S, Z[0, 0, :1])},
            ValueError,
            r"initial_state's z has shape \(1,\); expected \(2, 3, 8\) or what broadcasts to it",
        ),
        (
            {"initial_state": (S, Z), "causal": True},
            ValueError,
            r"initial_state with causal needs as many queries as keys; got 5 and 7",
        ),
        (
            {**GQA, "mask": np.ones((2, 3, 1, 7), bool), "return_state": True},
            ValueError,
            r"mask and key_lengths must not have 3 heads with a state and enable_gqa",
        ),
    ],
    "linear_attention_step": [
        ({"enable_gqa": 1}, TypeError, r"enable_gqa must be True or False; got 1"),
        (
            {"q_t": Q[:, :, 0, :0], "k_t": K[:, :, 0, :0]},
            ValueError,
            r"q_t has shape \(2, 3, 0\); expected at least one feature",
        ),
        (
            {"k_t": K[:, :, 0, :4]},
            ValueError,
            r"k_t has shape \(2, 3, 4\); expected \(\.\.\., 8\) as q_t has 8 features",
        ),
    ],
    "performer_attention": [
        (
            {"projection": np.ones((3, 1, 4, 8))},
            ValueError,
            r"projection has shape \(3, 1, 4, 8\); expected leading axes that broadcast to \(2, 3\), those of q and k",
        ),
    ],
    "soft_attention": [
        ({"newton_steps": 1.5}, TypeError, "newton_steps must be an integer; got 1.5"),
        ({"init_scale": np.ones(2)}, ValueError, r"init_scale has shape \(2,\)"),
        ({"ridge": -1.0}, ValueError, "ridge must not be negative; got -1.0"),
        ({"inverse_grad": "exact"}, ValueError, "inverse_grad must be one of 'implicit', 'unrolled'"),
        (
            {"q": Q[..., :0], "landmarks": Q[..., :2, :0]},
            ValueError,
            r"q has shape \(2, 3, 5, 0\); expected at least one feature",
        ),
    ],
    "nystrom_attention": [
        ({"scale": np.ones(())}, TypeError, r"scale must be a number; got an array of shape \(\)"),
        ({"num_landmarks": 2.0}, TypeError, "num_landmarks must be an integer; got 2.0"),
        ({"init": "original"}, ValueError, "init must be one of 'exact', 'batch_max'"),
        ({"q": Q[..., :4, :]}, ValueError, "queries and keys are the same tokens"),
    ],
    "linformer_attention": [
        ({"proj_k": E[:, :5]}, ValueError, r"proj_k has shape \(4, 5\).*S_max at least 7"),
        ({"proj_k": E[:3]}, ValueError, "proj_v has shape .* as proj_k has 3 slots"),
        ({"proj_v": F[:2]}, ValueError, r"proj_v has shape .*leading axes that broadcast to \(2, 3\)"),
    ],
    "newton_inverse": [
        ({"halvings": 1.5}, TypeError, "halvings must be an integer; got 1.5"),
        ({"return_residuals": 1}, TypeError, "return_residuals must be True or False"),
        ({"a": np.ones((3, 2))}, ValueError, r"a has shape \(3, 2\); expected square matrices"),
    ],
    "gated_attention_unit": [
        ({"x": np.ones((5, 0))}, ValueError, r"x has shape \(5, 0\); expected at least one feature"),
        ({"w_z": np.ones((4, 0))}, ValueError, r"w_z has shape \(4, 0\); expected \(4, s\) with s at least 1"),
        ({"w_o": np.ones(4)}, ValueError, r"w_o has shape \(4,\); expected a matrix"),
        ({"bias": np.ones((7, 6))}, ValueError, r"bias has shape \(7, 6\)"),
        ({"gamma_q": np.ones(1)}, ValueError, r"gamma_q has shape \(1,\); expected \(3,\)"),
    ],
    "key_value_memory": [
        ({"key_bias": np.ones(1)}, ValueError, r"key_bias has shape \(1,\); expected \(10,\)"),
        ({"norm_bias": np.ones(5)}, ValueError, "norm_bias needs a norm_weight beside it; got None"),
        ({"activation": "gelu"}, ValueError, "activation must be one of 'relu', 'softmax'; got 'gelu'"),
    ],
    "lsh_attention": [
        ({"rotations": ROTATIONS[:7]}, ValueError, r"rotations has shape \(7, 2, 3\); expected \(..., 8, num_hashes"),
        ({"rotations": ROTATIONS[:, 0]}, ValueError, r"rotations has shape \(8, 3\)"),
        ({"rotations": np.ones((2, 8, 2, 3))}, ValueError, r"leading axes that broadcast to \(2, 3\)"),
    ],
}


@pytest.mark.parametrize(("op", "index"), [(op, index) for op, rows in WRONG.items() for index in range(len(rows))])
def test_an_op_says_what_is_wrong(op, index):
    changed, error, text = WRONG[op][index]
    with pytest.raises(error, match=f"^{op}: .*{text}"):
        getattr(attnkit, op)(**{**GOOD.get(op, QKV), **changed})


def test_leading_axes_broadcast():
    assert attnkit.softmax_attention(Q, np.stack([K] * 3), V).shape == (3, 2, 3, 5, 6)


@pytest.mark.parametrize(("op", "name"), [("nystrom_attention", "num_landmarks"), ("lsh_attention", "chunk_size")])
def test_what_has_no_default_must_be_given(op, name):
    with pytest.raises(TypeError, match=f"^{op}: missing argument '{name}'"):
        getattr(attnkit, op)(**{n: x for n, x in GOOD[op].items() if n != name})


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
