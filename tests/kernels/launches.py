"""Launches of CUDA kernels, described and not run."""

from typing import Any

import numpy as np

from attnkit.backends.cupy import linear, newton, pointwise, rows, statistics
from attnkit.backends.cupy.launch import Launch
from attnkit_conformance.model.case import numpy_dtype

MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C++ programming guide, Technical
Specifications per Compute Capability)."""


class Noting:
    """A device on which nothing runs. A block may have `shared_bytes`."""

    def __init__(self, shared_bytes: int) -> None:
        self.launches: list[Launch] = []
        self.shared_bytes = shared_bytes

    def pointer(self, x: np.ndarray) -> int:
        return int(x.ctypes.data)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)

    def word(self, value: int) -> np.ndarray:
        return np.array(value, np.uint64)

    def run(self, launch: Launch) -> None:
        self.launches.append(launch)


def launched(
    kind: Any, q: np.ndarray, k: np.ndarray, gradients: bool = True, capability: int = 90, **options: Any
) -> dict[str, Launch]:
    """The launches of a call of a module, and of its gradients, by their names in C++."""
    device = Noting(MEMORY[capability])
    kind.forward(device, q, k, k, **options)
    if gradients:
        kind.backward(device, q, k, k, q, **options)
    return {launch.name: launch for launch in device.launches}


def zeros(dtype: str, *shape: int) -> np.ndarray:
    return np.zeros(shape, numpy_dtype(dtype))


OF_STATISTICS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sigmoid": ({"activation": "sigmoid"}, ["pointwise_rows", "statistics_forward"]),
    "gaussian": ({}, ["statistics_forward"]),
    "softmax": ({}, ["rows_softmax", "statistics_of_rows"]),
    "sparsemax": ({"alpha": 2.0}, ["rows_threshold", "statistics_of_rows"]),
    "entmax": ({"alpha": 1.25}, ["rows_threshold", "statistics_of_rows"]),
}


def of_pointwise(dtype: str, d: int, **options: Any) -> dict[str, Launch]:
    x = zeros(dtype, 1, 2, 128, d)
    return launched(pointwise, x, x, **options)


def of_rows(dtype: str, d: int, keys: int, **options: Any) -> dict[str, Launch]:
    return launched(rows, zeros(dtype, 1, 2, 128, d), zeros(dtype, 1, 2, keys, d), **options)


def of_statistics(dtype: str, d: int, op: str, **options: Any) -> dict[str, Launch]:
    x = zeros(dtype, 1, 2, 128, d)
    return launched(
        statistics, x, x, gradients=False, op=f"{op}_attention", causal=True, **OF_STATISTICS[op][0], **options
    )


def of_linear(dtype: str, d: int, feature_map: str, **options: Any) -> dict[str, Launch]:
    x = zeros(dtype, 2, 300, d)
    found = launched(linear, x, x, causal=True, **options)
    assert {launch.template[-1] for launch in found.values()} >= {feature_map}
    return found


def of_newton(dtype: str, capability: int = 90, m: int = 64) -> dict[str, Launch]:
    device, a = Noting(MEMORY[capability]), zeros(dtype, 2, m, m)
    newton.forward(device, a)
    for kind in ("implicit", "unrolled"):
        newton.backward(device, a, a, inverse_grad=kind)
    return {launch.name: launch for launch in device.launches}


def of_packed(kind: Any, dtype: str, d: int, **options: Any) -> dict[str, Launch]:
    x, edges = zeros(dtype, 2, 128, d), np.array([0, 60, 128])
    return launched(kind, x, x, edges_q=edges, edges_k=edges, causal=True, window=(50, None), **options)
