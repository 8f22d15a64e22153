"""The Pallas kernels, interpreted: the kit finds planted bugs, dispatch leaves them alone, and they are lowered."""

import inspect
from typing import Any

import pytest

import attnkit
from attnkit_conformance import core

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

from attnkit.backends.jax import pallas
from attnkit.kernels.pallas import pointwise
from attnkit_conformance.adapters.pallas_interpreted import Interpreted

from .selection import case_of, first_now, later

OP = "pointwise_attention"


def every_pair(self: Any, number: Any, keys: int) -> Any:
    return jnp.ones((self.first.shape[0], keys), bool)


def half_of_them(at: Any, tiles: int) -> Any:
    start, stop = RIGHT_TILES(at, tiles)
    return start, stop - 1


RIGHT_TILES = pallas.tiles_of_queries


@pytest.mark.parametrize(
    ("module", "name", "wrong", "scene"),
    [
        (pointwise.Rows, "sees", every_pair, "257x100-causal"),
        (pointwise.Rows, "masked", lambda self, x: x, "query-mask"),
        (pointwise, "mask_rows", lambda x, mask: x, "key-lengths"),
        (pallas, "tiles_of_queries", half_of_them, "cross"),
    ],
)
@pytest.mark.emulated
def test_a_planted_bug_is_found(
    module: Any, name: str, wrong: Any, scene: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, wrong)
    wrong = Interpreted()
    assert core.check(wrong, case_of(wrong, OP, ("float32",), scene)).checks & {"bound", "nonfinite"}


def test_dispatch_never_picks_the_interpreter() -> None:
    x = jnp.zeros((2, 3, 4))
    told = attnkit.explain(attnkit.pointwise_attention, x, x, x)
    assert told["pallas"] == "Pallas kernels run on GPUs; the default device of JAX is a cpu"
    with pytest.raises(NotImplementedError, match="run on GPUs"):
        attnkit.pointwise_attention(x, x, x, impl="pallas")
    with pytest.raises(NotImplementedError, match="run on GPUs"):
        attnkit.pointwise_attention_vjp(x, x, x, x, impl="pallas")


@pytest.fixture
def gpu() -> Any:
    """A device that programs can be lowered for without one."""
    sharding = jax.sharding
    if "platform" not in inspect.signature(getattr(sharding, "AbstractDevice", int)).parameters:
        pytest.skip("this version of JAX lowers no Pallas kernel without a GPU")
    device = sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("dtype", ["float32", later("bfloat16")])
@pytest.mark.parametrize("activation", first_now(pallas.ACTIVATIONS))
def test_forward_and_gradients_are_lowered_for_a_gpu(activation: str, dtype: str, gpu: Any) -> None:
    """To Triton: JAX has another compiler of Pallas kernels, which does not take these."""
    options = {"activation": activation, "causal": True, "window": (40, 0), "enable_gqa": True}
    q, k = jnp.zeros((1, 4, 70, 32), dtype), jnp.zeros((1, 2, 70, 32), dtype)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(pallas.attend(q, k, v, **options).astype(jnp.float32))

    with gpu:
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 2
