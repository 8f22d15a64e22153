"""Whoever takes an op serves it, or refuses it by its name: no consumer forgets a variant in silence."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnkit
from attnkit._core.family import RECORDS
from attnkit.integrations import _ops
from attnkit.nn import MultiHeadAttention
from attnkit.nn.context_parallel import SERVED, context_parallel
from attnkit.nn.gates import is_causal_alone

from .arrays import LAYER, assert_close, normal

HEADS, TOKENS, WIDTH = 4, 6, 3
Q, K, V = normal(*[(2, HEADS, TOKENS, WIDTH)] * 3)
PROJECTION, ROTATIONS = normal((5, WIDTH), (WIDTH, 2, 2), seed=1)
POOLING = np.abs(normal((2, TOKENS), seed=2)[0])
REQUIRED: dict[str, Any] = {
    "projection": PROJECTION,
    "rotations": ROTATIONS,
    "landmarks": Q[..., :2, :],
    "proj_k": POOLING,
    "proj_v": POOLING,
    "norm_weight": np.ones(HEADS * WIDTH),
    "qk": Q,
    "num_landmarks": 2,
    "chunk_size": 2,
    "log_gate": -np.abs(K),
    "log_forget": -np.abs(K[..., 0]),
    "beta": np.abs(K[..., 0]),
}
"""What ops cannot do without, beside q, k and v."""
OF_MODULE = {"linformer_attention": {"num_slots": 2, "max_length": TOKENS}, "nystrom_attention": {"num_landmarks": 2}}

Op = Callable[..., Any]


def arguments(op: Op, without: tuple[str, ...] = ()) -> dict[str, Any]:
    given = {"q": Q, "k": K, "v": V, **REQUIRED}
    parameters = inspect.signature(op).parameters.values()
    return {p.name: given[p.name] for p in parameters if p.default is p.empty and p.name not in without}


def statistics(op: Op) -> None:
    o, rows = attnkit.attention_with_statistics(op, **{"q": Q, "k": K, "v": V} | arguments(op))
    weights = getattr(attnkit, f"{op.__name__}_weights")
    assert_close(o, op(**arguments(op)))
    assert_close(rows.sum_squares, np.sum(weights(**arguments(weights)) ** 2, axis=-1))


def blocked(op: Op) -> None:
    assert_close(op(**arguments(op), impl="blocked"), op(**arguments(op), impl="generic"))


def packed(op: Op) -> None:
    form = getattr(attnkit, f"{op.__name__}_packed", None)
    if form is None:
        raise NotImplementedError(f"{op.__name__} has no packed form")
    q, k, v = (np.swapaxes(x[0], 0, 1) for x in (Q, K, V))
    o = form(q, k, v, (0, TOKENS), (0, TOKENS), **arguments(op, ("q", "k", "v")))
    assert_close(np.swapaxes(o, 0, 1), op(**arguments(op))[0])


def module(op: Op) -> None:
    causal = is_causal_alone(op)
    layer = MultiHeadAttention(HEADS * WIDTH, HEADS, op=op, options=OF_MODULE.get(op.__name__), causal=causal).double()
    x = torch.as_tensor(normal((2, TOKENS, HEADS * WIDTH), seed=3)[0])
    q, k, v = (p(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    arrays = {} if layer.operands is None else layer.operands.arrays()
    arrays |= {name: gate(x) for name, gate in layer.gates.items()}
    if op is attnkit.delta_attention:
        q, k = (torch.nn.functional.normalize(each, dim=-1) for each in (q, k))
    o = op(q, k, v, **arrays, **layer.options)
    assert_close(layer(x), layer.out_proj(o if o.ndim == 3 else o.transpose(1, 2).flatten(2)), LAYER)


def integrations(op: Op) -> None:
    assert _ops.resolve("swap_attention", op, arguments(op, ("q", "k", "v")), frozenset())[0] is op
    scale = _ops.scale_of("swap_attention", op, WIDTH**-0.5, WIDTH)
    assert bool(scale) == (op.__name__ not in (*OF_FEATURES, "sima_attention"))
    assert_close(op(**arguments(op), **scale), op(**arguments(op)))


def processes(op: Op) -> None:
    if op not in SERVED:  # what is, is judged in test_context_parallel
        context_parallel(op, *map(torch.as_tensor, (Q, K, V)), mesh=None)


IN_ONE_TENSOR = ("soft_attention", "lsh_attention")  # queries are keys
LOW_RANK = ("sima_attention", "nystrom_attention", "linformer_attention")  # pairs are not formed
OF_FEATURES = ("linear_attention", "cosine_attention", "performer_attention", "efficient_attention")
SPARSE = ("sparsemax_attention", "entmax_attention", "softpick_attention")
RECURRENT = ("gated_linear_attention", "delta_attention")  # a gate or a share of each token beside q, k and v
JOINED = ("rela_attention",)
ORDERED = (
    "ssmax_attention",
    "stick_breaking_attention",
    "forgetting_attention",
)  # count or order the keys of the whole sequence
REFUSED: dict[Callable[[Op], None], tuple[str, ...]] = {
    statistics: (*IN_ONE_TENSOR, *LOW_RANK, *RECURRENT),
    blocked: (*IN_ONE_TENSOR, *LOW_RANK, *OF_FEATURES, *JOINED, *RECURRENT),
    packed: (
        *(*IN_ONE_TENSOR, *LOW_RANK, *OF_FEATURES[1:], *SPARSE, *JOINED, *RECURRENT),
        *("reluformer_attention", "sigmoid_attention", "gaussian_attention", *ORDERED),
    ),
    module: IN_ONE_TENSOR,
    integrations: (*IN_ONE_TENSOR, *JOINED, *RECURRENT),
    processes: (*IN_ONE_TENSOR, *LOW_RANK, *SPARSE, *JOINED, *RECURRENT, *ORDERED),
}
"""Which ops a consumer does not serve."""
OPS = [getattr(attnkit, name) for name in attnkit.__all__ if name.endswith("_attention")]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("consumer", REFUSED, ids=lambda consumer: consumer.__name__)
def test_an_op_is_served_or_refused_by_name(consumer: Callable[[Op], None], op: Op) -> None:
    if op.__name__ not in REFUSED[consumer]:
        consumer(op)
        return
    with pytest.raises((ValueError, NotImplementedError), match=op.__name__):
        consumer(op)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_every_kernel_is_asked_with_what_the_public_function_hands_on(op: Op) -> None:
    """Gates are an option, wherever they are passed: of kernels for devices that are not here, only this is seen."""
    given = {n: torch.as_tensor(x) if isinstance(x, np.ndarray) else x for n, x in arguments(op).items()}
    do = op(**given)
    vjp = getattr(attnkit, f"{op.__name__}_vjp")
    asked = [attnkit.explain(op, **given), attnkit.explain(vjp, **given, do=do)]
    if all(isinstance(x, torch.Tensor) for x in given.values()):
        asked.append(attnkit.explain(vjp, *given.values(), do))
    for reasons in asked:
        assert reasons["generic"] is None


def derived(name: str) -> set[str]:
    """What follows from an op with a record, by the ends of their names; packed forms are a consumer."""
    return {n.removeprefix(name) for n in attnkit.__all__ if n.startswith(f"{name}_") and "_packed" not in n}


@pytest.mark.parametrize("name", RECORDS)
def test_an_op_has_the_derived_functions_of_its_siblings(name: str) -> None:
    siblings = [other for other, record in RECORDS.items() if record.family.stateful == RECORDS[name].family.stateful]
    assert derived(name) == set().union(*map(derived, siblings))
    assert {"_weights", "_vjp"} <= derived(name)
