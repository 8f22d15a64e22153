"""Triton kernels called from JAX: tiles, centres, how vmap joins axes, and lowering for GPUs that are not here."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.library.arrays import assert_close

from .selection import later

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("jax", reason="jax is not installed")

LOWERED = """
import functools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp

from attnkit.backends.jax.triton import launch, linear, pointwise, rows

folder = os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
call = launch.call
COMMON = {"causal": True, "dropout": (0.1, 3), "enable_gqa": True}
q, k = jnp.zeros((2, 8, 100, 64), jnp.bfloat16), jnp.zeros((2, 4, 200, 64), jnp.bfloat16)
bias = jnp.zeros((8, 100, 200), jnp.bfloat16)
STATE = {"initial_state": (jnp.zeros((4, 64, 64)), jnp.zeros((4, 64))), "return_state": True}
MASKS = {
    "mask": jnp.ones((2, 1, 1, 200), bool),
    "key_lengths": jnp.ones((2, 1), jnp.int32),
    "query_mask": jnp.ones((2, 1, 100), bool),
}
OPS = {
    "pointwise": (pointwise.attend, "pointwise_attention", {"alpha": 0.5, "activation": "gelu"}, (1, 4, 3)),
    "gaussian": (pointwise.attend, "gaussian_attention", {}, (1, 4, 3)),
    "softmax": (rows.attend, "softmax_attention", {}, (1, 4, 4)),
    "entmax": (rows.attend, "entmax_attention", {}, (1, 4, 4)),
    "linear": (linear.attend, None, MASKS | {"causal": True}, (1, 3, 2)),
    "states": (linear.attend, None, STATE, (5, 11, 6)),
}


def loss(attend, op, own, q, k, bias):
    own = {"enable_gqa": True, **own} if op is None else {"bias": bias, **COMMON, **own}
    results = attend(*(() if op is None else (op,)), q, k, k, **own)
    return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))


for op, (*call_of, launches) in OPS.items():
    of = functools.partial(loss, *call_of)
    calls = ((90, of), (90, jax.value_and_grad(of, (0, 1, 2))), (80, jax.grad(of, (0, 1, 2))))
    for (capability, function), expected in zip(calls, launches):
        launch.call = functools.partial(call, compute_capability=capability)
        launch.capability = lambda: capability // 10
        lowered = jax.jit(function).trace(q, k, bias).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("custom_call @triton_kernel_call") == expected, (op, expected)
assert os.environ["TRITON_CACHE_DIR"] == folder

import torch  # another compilation in this process is as it was before

from benchmarks.sass.compiling import compiled
from tests.kernels.test_triton_compile import launches

launch = launches(torch.empty(1, 2, 64, 64, dtype=torch.float16))["forward"]
assert compiled(launch, 90).stack == 0
print("lowered")
"""


@pytest.mark.emulated
def test_forward_and_gradients_are_lowered_and_triton_compiles_on(tmp_path: Path) -> None:
    for module, package in (("jax_triton", "jax-triton"), ("jax_cuda13_plugin", "jax-cuda13-plugin")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-c", LOWERED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("lowered\n"), done.stderr


@pytest.mark.parametrize("op", ["pointwise_attention", "linear_attention"])
def test_dispatch_says_why_there_is_none(op: str) -> None:
    import jax.numpy as jnp

    import attnkit

    x = jnp.zeros((2, 3, 4))
    told = attnkit.explain(getattr(attnkit, op), x, x, x)["triton"]
    assert told == "Triton kernels run on GPUs; the default device of JAX is a cpu"


@pytest.mark.parametrize(("told", "major"), [("8.6", 8), ("9.0", 9), ("10.0", 10), ("", 9)])
def test_tiles_are_those_of_the_device(told: str, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnkit.backends.jax import gpu
    from attnkit.backends.jax.triton import launch

    monkeypatch.setattr(gpu, "capability", lambda: told)
    assert launch.capability() == major


@pytest.mark.parametrize("masked", [later(False), True])
def test_the_centre_of_distances_is_that_of_the_generic_body(masked: bool) -> None:
    """With heads that share keys, of which the first sees none at first, and a query that sees some later."""
    import jax.numpy as jnp
    import numpy as np

    from attnkit._core import quadratic
    from attnkit._core.mask import visibility_of
    from attnkit.backends.jax.blocked import divided
    from attnkit.backends.jax.triton import pointwise
    from attnkit.ops import gaussian

    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(100.0, 1.0, size), jnp.float32) for size in ((2, 4, 5, 3), (2, 2, 7, 3)))
    options = {"causal": True, "enable_gqa": True, "key_lengths": jnp.asarray([[1, 6, 7, 7], [0, 7, 2, 5]])}
    if masked:
        options["mask"] = jnp.asarray(rng.uniform(size=(2, 4, 5, 7)) < 0.3)
    found = pointwise.centre(pointwise.call_of(*divided("gaussian_attention", {"q": q, "k": k, "v": k, **options})))
    rows, columns = jnp.arange(5)[:, None], jnp.arange(7)
    pairs = visibility_of(options).between(jnp, rows, columns, 7, 2)
    expected = gaussian._centre(jnp, quadratic.prepare(jnp, q, k, k, mask=pairs, enable_gqa=True))
    assert_close(found, expected)


@pytest.mark.parametrize("mapped", [("q", "mask"), ("mask",), ("bias",)])
def test_an_axis_of_vmap_comes_first_and_is_that_of_some_tokens(mapped: tuple[str, ...]) -> None:
    import jax.numpy as jnp

    from attnkit.backends.jax.triton import launch

    arrays = {"q": (2, 4, 5, 3), "k": (2, 1, 7, 3), "v": (7, 3), "mask": (7,), "bias": (4, 5, 7)}
    zeros = {name: jnp.zeros((6, *shape) if name in mapped else shape) for name, shape in arrays.items()}
    shapes = {
        name: x.shape for name, x in launch.with_axis(zeros, {name: name in mapped for name in zeros}, 6, ()).items()
    }
    lifted = {"q": (6, 2, 4, 5, 3), "mask": (6, 1, 1, 1, 7), "bias": (6, 1, 4, 5, 7)}
    assert shapes == {name: lifted[name] if name in (*mapped, "q") else shape for name, shape in arrays.items()}
