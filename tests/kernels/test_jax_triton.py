"""Triton kernels called from JAX: judged by the kit in Triton's interpreter, and lowered for GPUs that are not here."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnkit_conformance.adapters.worker import WorkerAdapter
from attnkit_conformance.judge import judge

from .selection import FEW

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("jax", reason="jax is not installed")

TARGET = "attnkit_conformance.adapters.jax_triton_interpreted:Interpreted"
LOWERED = """
import functools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp

from attnkit.backends.jax import triton

folder = os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
call = triton.call


def loss(q, k, bias):
    given = {"bias": bias, "causal": True, "alpha": 0.5, "dropout": (0.1, 3), "activation": "gelu", "enable_gqa": True}
    return jnp.sum(triton.attend(q, k, k, **given).astype(jnp.float32))


q, k = jnp.zeros((2, 8, 100, 64), jnp.bfloat16), jnp.zeros((2, 4, 200, 64), jnp.bfloat16)
bias = jnp.zeros((8, 100, 200), jnp.bfloat16)
calls = ((90, loss, 1), (90, jax.value_and_grad(loss, (0, 1, 2)), 4), (80, jax.grad(loss, (0, 1, 2)), 3))
for capability, function, launches in calls:
    triton.call = functools.partial(call, compute_capability=capability)
    lowered = jax.jit(function).trace(q, k, bias).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @triton_kernel_call") == launches, launches
assert os.environ["TRITON_CACHE_DIR"] == folder

import torch  # another compilation in this process is as it was before

from benchmarks.sass.compiling import compiled
from tests.kernels.test_triton_compile import launches

launch = launches(torch.empty(1, 2, 64, 64, dtype=torch.float16))["forward"]
assert compiled(launch, 90).stack == 0
print("lowered")
"""


def test_conforms() -> None:
    adapter = WorkerAdapter("jax_triton_interpreted", TARGET, {"TRITON_INTERPRET": "1"})
    results = list(judge([adapter], "quick", FEW, ("float32", "bfloat16"), ops=("pointwise_attention",)))
    adapter.close()
    assert [f"{result.id}\n{result.message}" for result in results if result.status == "fail"] == []
    assert sum(result.status == "pass" for result in results) >= 2


@pytest.mark.emulated
def test_forward_and_gradients_are_lowered_and_triton_compiles_on(tmp_path: Path) -> None:
    for module, package in (("jax_triton", "jax-triton"), ("jax_cuda13_plugin", "jax-cuda13-plugin")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-c", LOWERED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("lowered\n"), done.stderr


def test_dispatch_says_why_there_is_none() -> None:
    import jax.numpy as jnp

    import attnkit

    x = jnp.zeros((2, 3, 4))
    told = attnkit.explain(attnkit.pointwise_attention, x, x, x)["triton"]
    assert told == "Triton kernels run on GPUs; the default device of JAX is a cpu"
