"""What the kernels for GPUs say of calls that they do not serve, and that the interpreter is never chosen."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

QKV = dict.fromkeys("qkv", (3, 4))
SOFT = {"q": (2, 80, 8), "v": (2, 80, 8), "landmarks": (2, 64, 8)}
STEP = {"q_t": (2, 8, 64), "k_t": (2, 8, 64), "v_t": (2, 8, 64)}
GENERIC = "is served by the generic implementation"
ARRAY_ALPHA = f"an array alpha {GENERIC}"


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        ("backends.cupy.linear", QKV, None),
        ("backends.cupy.linear", QKV | {"mask": (3, 3)}, "a mask of pairs"),
        ("backends.cupy.linear", QKV | {"feature_map": abs}, "a feature map of your own"),
        ("backends.cupy.linear", QKV | {"v": (3, 0)}, "tokens without features"),
        ("backends.cupy.linear", QKV | {"q": (3, 300)}, "head sizes beyond"),
        ("backends.cupy.newton", {"a": (64, 64)}, None),
        ("backends.cupy.newton", {"a": (65, 65)}, "more than 64 rows"),
        ("backends.cupy.newton", {"a": (64, 64), "halvings": 1}, "halvings are served by the generic implementation"),
        ("backends.cupy.rows", QKV | {"alpha": (3, 1)}, ARRAY_ALPHA),
        ("backends.cupy.soft", SOFT, None),
        ("backends.cupy.soft", SOFT | {"landmarks": (2, 65, 8)}, "more than 64 landmarks"),
        ("backends.cupy.soft", SOFT | {"halvings": 10}, "halvings are served by the generic implementation"),
        ("backends.cupy.soft", SOFT | {"v": (2, 80, 129)}, "more than 128 features"),
        ("backends.cupy.soft", SOFT | {"q": (2, 80, 300)}, "head sizes beyond 256"),
        (
            "backends.cupy.statistics", QKV | {"op": "rela_attention"},
            "statistics of rela_attention are served by the generic implementation",
        ),
        ("backends.cupy.statistics", QKV | {"op": "entmax_attention", "alpha": (3, 1)}, ARRAY_ALPHA),
        ("kernels.linear_calls", QKV | {"return_state": True}, None),
        ("kernels.linear_calls", QKV | {"mask": (3, 3)}, "mask of pairs"),
        ("kernels.linear_calls", QKV | {"feature_map": abs}, "feature map"),
        ("kernels.linear_calls", QKV | {"v": (3, 0)}, "without features"),
        ("backends.torch.triton.linear_step", STEP, None),
        (
            "backends.torch.triton.linear_step", STEP | {"k_t": (2, 1, 64), "v_t": (2, 1, 64)},
            "states with fewer axes than queries are served by the generic implementation",
        ),
        ("backends.torch.triton.linear_step", STEP | {"feature_map": abs}, f"a feature map of your own {GENERIC}"),
        (
            "backends.torch.triton.linear_step", STEP | {"v_t": (2, 8, 0)},
            "values without features are served by the generic implementation",
        ),
        ("backends.torch.triton.rows", {"alpha": (3, 1)}, ARRAY_ALPHA),
        ("backends.jax.triton.linear", QKV, None),
        ("backends.jax.triton.linear", QKV | {"causal": True, "return_state": True}, None),
        ("backends.jax.triton.linear", QKV | {"mask": (1, 3)}, None),
        ("backends.jax.triton.linear", QKV | {"mask": (3, 3)}, "a mask of pairs"),
        ("backends.jax.triton.linear", QKV | {"feature_map": abs}, "a feature map of your own"),
        ("backends.jax.triton.linear", QKV | {"v": (3, 0)}, "values without features"),
        ("backends.jax.triton.linear", QKV | {"q": (3, 257), "k": (3, 257)}, "head sizes beyond 256"),
    ],
)  # fmt: skip
def test_what_is_refused(module: str, arguments: dict[str, Any], reason: str | None) -> None:
    """Shapes stand for arrays."""
    library = "jax.numpy" if "jax" in module else "numpy" if "cupy" in module else "torch"
    xp = pytest.importorskip(library)
    if "triton" in module:
        pytest.importorskip("triton", reason="triton is not installed")
    given = {
        name: xp.ones(x, dtype=xp.bool if name == "mask" else xp.float32) if isinstance(x, tuple) else x
        for name, x in arguments.items()
    }
    told = importlib.import_module(f"attnkit.{module}").unsupported_options(**given)
    assert told is None if reason is None else reason in str(told)


ONLY = "compiled and tested for NVIDIA only"


def test_triton_kernels_are_refused_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose torch calls its devices cuda."""
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    from attnkit.backends.torch.triton import pointwise

    q: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert pointwise.unsupported_device(q) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert pointwise.unsupported_device(q) == ONLY


def test_cuda_kernels_are_refused_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy")
    from attnkit.backends.cupy import cuda

    x: Any = SimpleNamespace(device=SimpleNamespace(compute_capability="90"))
    assert cuda.unsupported_device(x) is None
    monkeypatch.setattr(cupy.cuda.runtime, "is_hip", True)
    assert cuda.unsupported_device(x) == ONLY


MATRIX = {"a": (2, 3, 3)}
LOWRANK = {"q": (2, 9, 4), "v": (2, 9, 4), "landmarks": (2, 3, 4)}


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        *((f"{kind}_attention", QKV) for kind in ("pointwise", "softmax", "sparsemax", "entmax", "linear", "cosine")),
        ("forgetting_attention", {**QKV, "log_forget": QKV["k"][:-1]}),
        ("newton_inverse", MATRIX),
        ("soft_attention", LOWRANK),
    ],
)
def test_triton_kernels_run_on_cuda(op: str, shapes: dict[str, tuple[int, ...]]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    import attnkit

    arrays = [torch.zeros(shape) for shape in shapes.values()]
    told = attnkit.explain(getattr(attnkit, op), *arrays)["triton"]
    assert told == "Triton kernels run on CUDA; the tensors are on cpu"
    with pytest.raises(NotImplementedError, match="run on CUDA"):
        getattr(attnkit, op)(*arrays, impl="triton")
