"""Calls of the CPU library in programs that are exported, saved, sharded, mapped by shard_map or traced strictly."""

import os
import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

import attnkit

jax = pytest.importorskip("jax")
export = pytest.importorskip("jax.export")
serialize_executable = pytest.importorskip("jax.experimental.serialize_executable")
jnp, Spec = jax.numpy, jax.sharding.PartitionSpec
pytestmark = pytest.mark.usefixtures("library")
RNG = np.random.default_rng(0)
BOUND = 2e-5
CUSTOM_CALL = "custom_call @attnkit"


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


Q, K = normal(2, 4, 5, 8), normal(2, 2, 7, 8)
GQA = {"enable_gqa": True}


def attend(q, impl="auto", op=attnkit.softmax_attention, **options):
    return op(q, K, K, impl=impl, **GQA, **options)


def loss(q, **options):
    return (attend(q, **options) ** 2).sum()


def near(found, golden):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(golden), strict=True)
    return all(float(jnp.abs(a - b).max()) <= BOUND * max(1.0, float(jnp.abs(b).max())) for a, b in pairs)


# ---------------------------------------------------------------------------------------------- export

CALLS = {
    "softmax": attend,
    "dropout": partial(attend, dropout=(0.3, 5)),
    "dropout, mapped": jax.vmap(jax.vmap(lambda q: attnkit.softmax_attention(q, q, q, dropout=(0.3, 5)))),
    "gradients": jax.grad(loss),
    "lse": lambda q: attnkit.softmax_attention(q, q, q, return_lse=True),
    "state": lambda q: attnkit.linear_attention(q, q, q, causal=True, return_state=True),
    "statistics": lambda q: tuple(attnkit.row_statistics(attnkit.sparsemax_attention, q, K, **GQA)),
    "packed": lambda q: attnkit.softmax_attention_packed(q[0], q[1], q[1], (0, 1, 4), (0, 2, 4)),
    "gradients, linear": jax.grad(lambda q: (attnkit.linear_attention(q, q, q, causal=True) ** 2).sum()),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_exported_program_has_the_generic_body(call):
    written = export.export(jax.jit(CALLS[call]))(Q)
    assert CUSTOM_CALL not in written.mlir_module()
    assert near(export.deserialize(written.serialize()).call(Q), CALLS[call](Q))


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids="+".join)
def test_a_program_for_another_platform_has_the_generic_body(platforms):
    for function in (attend, jax.grad(loss)):
        assert CUSTOM_CALL not in export.export(jax.jit(function), platforms=platforms)(Q).mlir_module()
        lowered = jax.jit(function).trace(Q).lower(lowering_platforms=platforms).as_text()
        assert (CUSTOM_CALL in lowered) == ("cpu" in platforms)


@pytest.mark.parametrize(
    "op",
    [
        attnkit.softmax_attention,
        *(
            pytest.param(op, marks=pytest.mark.referee)
            for op in (attnkit.reluformer_attention, attnkit.linear_attention)
        ),
    ],
    ids=lambda op: op.__name__,
)
def test_symbolic_shapes(op):
    for sizes, options in (("2, 4, n, 8", {}), ("b, h, n, d", {"causal": True})):
        symbols = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)

        def whole(q, options=options):
            return op(q, q, q, **options)

        for function in (whole, jax.grad(lambda q, whole=whole: (whole(q) ** 2).sum())):
            assert near(export.export(jax.jit(function))(symbols).call(Q), function(Q))


def test_symbolic_shapes_that_decide_something_are_refused_by_name():
    symbols = jax.ShapeDtypeStruct(export.symbolic_shape("2, 4, n, 8"), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"nystrom_attention: impl='generic' does not serve these symbolic"):
        export.export(jax.jit(lambda q: attnkit.nystrom_attention(q, q, q, num_landmarks=4)))(symbols)
    with pytest.raises(NotImplementedError, match=r"native: symbolic shapes .* served by the generic"):
        export.export(jax.jit(lambda q: attnkit.softmax_attention(q, q, q, impl="native")))(symbols)


# ---------------------------------------------------------------------------------------------- types and promotion


@pytest.mark.parametrize("impl", ["native", "blocked"])
def test_gradients_and_scan_within_shard_map(impl):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))

    def inside(q, k, impl):
        def step(q, _):
            return attnkit.softmax_attention(q, k, k, impl=impl, **GQA), None

        return (jax.lax.scan(step, q, length=2)[0] ** 2).sum()

    def sharded(impl):
        specs = (Spec("x"), Spec())
        return jax.shard_map(jax.grad(partial(inside, impl=impl), (0, 1)), mesh=mesh, in_specs=specs, out_specs=specs)(
            Q, K[:1]
        )

    assert near(sharded(impl), jax.grad(partial(inside, impl="generic"), (0, 1))(Q, K[:1]))


@pytest.mark.parametrize("impl", ["generic", "native", "blocked"])
def test_strict_promotion(impl):
    """Of the program that is differentiated after the call, too."""
    options = {"mask": jnp.asarray(RNG.random((5, 7)) < 0.7), "bias": normal(4, 1, 7), "causal": True}
    golden = jax.grad(loss)(Q, impl="generic", **options)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        compiled = jax.jit(partial(loss, impl=impl, dropout=None, **options))
        assert near(jax.jit(jax.grad(compiled))(Q), golden)
        if impl == "native":
            jax.make_jaxpr(jax.grad(lambda q: (jax.grad(compiled)(q) ** 2).sum()))(Q)


# ---------------------------------------------------------------------------------------------- other processes

ELSEWHERE = """
import pickle, sys
import attnkit
import jax  # of attnkit, which came first, it knows at once
from jax.experimental import serialize_executable
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec

with open(sys.argv[1], "rb") as file:
    program, q, o = pickle.load(file)
load = serialize_executable.deserialize_and_load
assert abs(load(*program, execution_devices=jax.devices()[:1])(q) - o).max() < 1e-5  # before any op is called

x = jax.numpy.concatenate([jax.numpy.asarray(q)] * 2)
k = x[:, ::2]

def loss(q, k, bias):
    o = attnkit.softmax_attention(q, k, k, bias=bias, enable_gqa=True)
    return (o**2).sum(), o

function = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
bias = jax.numpy.sin(x[0, :, :, :5])
golden = jax.tree.leaves(function(x, k, bias))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, Spec(*spec)))
    call = (place(x, "x", "y"), place(k, "x", "y"), place(bias, "y"))
    found = jax.tree.leaves(function(*call))
    assert all(abs(a - jax.device_get(b)).max() < 1e-4 for a, b in zip(golden, jax.device_get(found)))
    specs = [a.sharding.spec[:2] for a in found[1:]]
    assert specs == [("x", "y")] * 3 + [("y",) if kind is AxisType.Auto else ("y", None)], specs
    text = function.lower(*call).compile().as_text()
    assert text.count('custom_call_target="attnkit"') == 2 and "all-gather(" not in text
"""


def test_programs_of_other_processes_and_sharded_arrays(tmp_path):
    """A compiled program is loaded where no op was called; leading axes stay sharded, forward and backward."""
    compiled = jax.jit(partial(attend, impl="native")).lower(Q).compile()
    path = tmp_path / "program"
    path.write_bytes(pickle.dumps((serialize_executable.serialize(compiled), np.asarray(Q), np.asarray(attend(Q)))))
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", ELSEWHERE, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
