"""Ops as programs: one graph of torch.compile, a function under jax.jit, and mapped by both; judged like calls.

What they are called with are cases of the conformance kit: padding that holds NaN, states, and options of which bodies
have branches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import attnkit
from attnkit_conformance import core
from attnkit_conformance.adapters.bases.torch import pulled_back
from attnkit_conformance.adapters.jax import light
from attnkit_conformance.model import tolerance
from attnkit_conformance.model.case import Case
from attnkit_conformance.opdb import BY_NAME

Arrays = Mapping[str, Any]
PADDED = "padded"
CALLS = (
    *(
        (f"{op}_attention", PADDED)
        for op in (
            *("softmax", "pointwise", "reluformer", "sigmoid", "gaussian", "sparsemax", "entmax", "rela", "sima"),
            *("softpick", "ssmax", "stick_breaking", "forgetting", "linear", "cosine", "performer", "efficient"),
            *("soft", "nystrom", "linformer", "lsh"),
        )
    ),
    ("gaussian_attention", "gqa-mask"),
    ("entmax_attention", "alpha=1.25"),
    ("entmax_attention", "alpha=<array>"),
    ("rela_attention", "gqa-mask"),
    ("linear_attention", "feature_map=identity"),
    ("performer_attention", "kernel=relu"),
    ("soft_attention", "inverse_grad=unrolled"),
    ("nystrom_attention", "cross"),
    ("key_value_memory", "biases"),
    ("key_value_memory", "softmax-norm"),
    ("gated_attention_unit", PADDED),
    ("gated_attention_unit", "mask"),
    *((f"landmarks.{sampler}", "masked") for sampler in ("average_pool", "convolution", "random", "biased")),
)
every = pytest.mark.parametrize(("op", "name"), CALLS, ids=lambda x: x)


def case_of(op: str, name: str) -> Case:
    """The first sample with this in its name."""
    return core.draw_case(next(s for s in core.samples(op, "small", ("float32",)) if name in s.id.split("/", 2)[2]))


def arrays_of(case: Case, convert: Callable[[np.ndarray], Any]) -> tuple[Arrays, Arrays, Arrays]:
    """Those that have a gradient, the others, and cotangents."""
    op = BY_NAME[case.op]
    arrays = {name: convert(np.array(case.typed(name), order="C")) for name in case.arrays}
    leaves = {name: arrays.pop(name) for name in op.differentiable if name in arrays}
    cotangents = {name: convert(x.astype(op.output_dtype(name, "float32"))) for name, x in case.cotangents.items()}
    return leaves, arrays, cotangents


def function(case: Case) -> Callable[[Arrays, Arrays], Arrays]:
    """The outputs of an op by names, of the arrays with a gradient and the others."""
    op = BY_NAME[case.op]
    return lambda leaves, rest: op.binding.forward(attnkit, op, {**leaves, **rest}, case.params)


def assert_right(case: Case, outputs: Arrays, gradients: Arrays) -> None:
    known = core.golden(case)
    limits = {**{f"o {name}": x for name, x in known.outputs.items()}, **(known.gradients if gradients else {})}
    found = {**{f"o {name}": x for name, x in outputs.items()}, **gradients}
    measured = [tolerance.measure(name, np.asarray(found[name]), limit) for name, limit in limits.items()]
    assert not [one.failures for one in measured if one.failures]


@every
def test_one_graph_of_torch_compile(op: str, name: str) -> None:
    case = case_of(op, name)
    leaves, rest, cotangents = arrays_of(case, torch.from_numpy)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    torch._dynamo.reset()
    outputs = torch.compile(function(case), fullgraph=True, backend="aot_eager")(leaves, rest)
    gradients = pulled_back(outputs, leaves, cotangents)
    assert_right(case, {name: x.detach() for name, x in outputs.items()}, gradients)


@every
def test_jit(op: str, name: str) -> None:
    case = case_of(op, name)

    def program(leaves: Arrays, rest: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        outputs, pull = jax.vjp(lambda leaves: function(case)(leaves, rest), leaves)
        return outputs, pull({name: cotangents.get(name, jnp.zeros_like(x)) for name, x in outputs.items()})[0]

    assert_right(case, *jax.jit(program, compiler_options=light())(*arrays_of(case, jnp.asarray)))


@pytest.mark.parametrize("library", ["torch", "jax"])
@every
def test_vmap_over_every_other_array(op: str, name: str, library: str) -> None:
    """q and v, for example, but not k."""
    case = case_of(op, name)
    xp, convert, vmap = {"torch": (torch, torch.from_numpy, torch.vmap), "jax": (jnp, jnp.asarray, jax.vmap)}[library]
    leaves, rest, _ = arrays_of(case, convert)
    mapped = {name: place % 2 == 0 for place, name in enumerate(leaves)}
    twice = {name: xp.stack([0 * x, x]) if mapped[name] else x for name, x in leaves.items()}
    program = vmap(function(case), ({name: 0 if yes else None for name, yes in mapped.items()}, None))
    outputs = (jax.jit(program, compiler_options=light()) if library == "jax" else program)(twice, rest)
    assert_right(case, {name: x[1] for name, x in outputs.items()}, {})
