"""Third-party implementations as adapters: `run peers`, `run entmax`, `run torch_sdpa-math`.

None of them is judged by default. Nothing of attnkit computes here: an adapter converts arguments to the form that a
library takes, declares what the library does not support, and writes its call for readers (`source`). docs/peers.md has
the results; the command `peers` writes its page.
"""

from __future__ import annotations

import importlib
import importlib.util

from attnkit_conformance.adapter import Adapter
from attnkit_conformance.adapters.absent import Absent
from attnkit_conformance.model.case import DTYPES
from attnkit_conformance.peers.gpu_only import GPU_ONLY, absent

HERE = "attnkit_conformance.peers"
ALL = "peers"
REQUIRES = {
    "torch_sdpa": ("torch",), "flex_attention": ("torch",), "jax_nn": ("jax",), "keras": ("keras", "torch", "jax"),
    "entmax": ("torch", "entmax"), "fla": ("torch", "einops", "fla"), "transformers": ("torch", "transformers"),
    "numpy_pinv": ("numpy", "scipy"), "commonly_written": ("torch", "einops"),
    "memory_efficient_attention_pytorch": ("torch", "memory_efficient_attention_pytorch"),
    "ring_attention_pytorch": ("torch", "ring_attention_pytorch"), "x_transformers": ("torch", "x_transformers"),
    "local_attention": ("torch", "local_attention"), "flash_attention_jax": ("jax", "flash_attention_jax"),
    "flax": ("jax", "flax"), "equinox": ("jax", "equinox"), "onnxruntime": ("onnx", "onnxruntime"),
    "nystrom_attention": ("torch", "nystrom_attention"), "performer_pytorch": ("torch", "performer_pytorch"),
    "linear_attention_transformer": ("torch", "linear_attention_transformer"),
    "reformer_pytorch": ("torch", "reformer_pytorch"), "onnx_reference": ("onnx",),
    "openvino": ("openvino",), "mlx": ("mlx",),
}  # fmt: skip
FAMILIES = (*REQUIRES, *dict.fromkeys(item.name.partition("-")[0] for item in GPU_ONLY))


def family(name: str) -> list[Adapter]:
    """The adapters of one library, or of all that can be judged on a CPU (`peers`)."""
    if name == ALL:
        return [adapter for library in REQUIRES for adapter in family(library)]
    if name not in REQUIRES:
        return [absent(item) for item in GPU_ONLY if item.name.partition("-")[0] == name]
    if missing := missing_modules(name):
        return [Absent(name, f"{', '.join(missing)} is not installed", DTYPES)]
    adapters: list[Adapter] = importlib.import_module(f"{HERE}.{name}").adapters()
    return adapters


def missing_modules(name: str) -> list[str]:
    """The modules that a family needs and that are not installed."""
    return [module for module in REQUIRES[name] if importlib.util.find_spec(module) is None]
