"""Which library an array is of, asked of types alone, so that torch.compile can trace the question in silence."""

import subprocess
import sys
import warnings
from typing import Any

import array_api_compat
import array_api_strict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attnkit
from attnkit._core.library import beside, library, namespace

X = np.ones((2, 3), np.float32)


class Mine(np.ndarray):
    """A subclass, as users have them."""


class Tensor(torch.Tensor):
    """The same of torch."""


ARRAYS: dict[str, tuple[Any, str]] = {
    "numpy": (X, "numpy"),
    "numpy subclass": (X.view(Mine), "numpy"),
    "numpy scalar": (np.float32(1.0), "numpy"),
    "torch": (torch.ones(2), "torch"),
    "torch parameter": (torch.nn.Parameter(torch.ones(2)), "torch"),
    "torch subclass": (torch.ones(2).as_subclass(Tensor), "torch"),
    "torch meta": (torch.ones(2, device="meta"), "torch"),
    "torch fake": (FakeTensorMode().from_tensor(torch.ones(2)), "torch"),
    "jax": (jnp.ones(2), "jax"),
    "strict": (array_api_strict.ones(2), "array_api_strict"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_of_their_library(name: str) -> None:
    x, expected = ARRAYS[name]
    assert library(x) == expected
    assert namespace(x) is array_api_compat.array_namespace(x)
    assert beside(x) == ({} if expected in ("numpy", "jax") else {"device": x.device})


def test_what_is_traced_is_of_its_library() -> None:
    asked: list[str | None] = []

    def ask(x: Any) -> Any:
        asked.append(library(x))
        assert namespace(x) is array_api_compat.array_namespace(x)
        return (x * x).sum()

    jax.jit(jax.grad(ask))(jnp.ones(2))
    jax.jvp(jax.vmap(ask), (jnp.ones((2, 2)),), (jnp.ones((2, 2)),))
    assert asked == ["jax"] * 2
    torch.func.grad(ask)(torch.ones(2))
    torch.func.vmap(ask)(torch.ones(2, 2))
    assert asked[2:] == ["torch"] * 2


@pytest.mark.parametrize(
    "x",
    [None, 1.0, [1.0], "numpy", np, torch.float32, jax.ShapeDtypeStruct((2,), np.float32), array_api_strict.float32],
)
def test_what_is_no_array_is_of_none(x: Any) -> None:
    assert library(x) is None


# ---------------------------------------------------------------------------------------------- torch.compile

Q, K, V = (torch.from_numpy(np.random.default_rng(n).standard_normal((2, 6, 4)).astype("float32")) for n in range(3))
KEYS = torch.arange(6) < 5
COMPILED: dict[str, Any] = {
    "softmax": lambda q, k, v: attnkit.softmax_attention(q, k, v, causal=True),
    "pointwise": lambda q, k, v: attnkit.pointwise_attention(q, k, v, activation="gelu", mask=KEYS),
    "sparsemax": lambda q, k, v: attnkit.sparsemax_attention(q, k, v),
    "gaussian": lambda q, k, v: attnkit.gaussian_attention(q, k, v, mask=KEYS),
    "linear": lambda q, k, v: attnkit.linear_attention(q, k, v, causal=True, impl="generic"),
    "statistics": lambda q, k, v: attnkit.row_statistics("entmax_attention", q, k).entropy,
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiling_warns_of_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*torch.jit.script.*", DeprecationWarning)  # of torch's own imports
        compiled(Q, K, V)
    assert [str(one.message) for one in warned] == []


COLD = """
import torch, attnkit
q = torch.ones(2, 6, 4)
run = torch.compile(lambda q: attnkit.softmax_attention(q, q, q, impl="generic"), fullgraph=True, backend="aot_eager")
assert torch.equal(run(q), q)
"""


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """Torch's kernels are loaded while the call is traced."""
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
