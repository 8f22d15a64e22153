"""No block of a CUDA kernel has more shared memory than its device lends, and the tiles for less of it are right."""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from attnkit.backends.cupy import linear, newton, pointwise, rows
from attnkit.backends.cupy.launch import Launch, Tiles, fitting, tiles_of
from attnkit_conformance import core
from attnkit_conformance.adapters.cuda_cpu import SERVED, CudaOnCpu
from attnkit_conformance.model.case import Case

from .launches import MEMORY, OF_STATISTICS, of_linear, of_newton, of_pointwise, of_rows, of_statistics
from .selection import later

SMALL, LARGE = 120, 90
"""The devices with the least and the most shared memory for a block."""
PAIRS: dict[str, Any] = {"mask": np.ones((128, 128), bool), "bias": np.zeros((128, 128), np.float32)}
FAMILIES: dict[str, Callable[..., dict[str, Launch]]] = {
    "relu": partial(of_pointwise, **PAIRS),
    "gaussian": partial(of_pointwise, **pointwise.GAUSSIAN),
    **{f"alpha {alpha}": partial(of_rows, keys=256, alpha=alpha) for alpha in (1.0, 1.25, 1.5, 2.0)},
    "alpha 2, many keys": partial(of_rows, keys=300, alpha=2.0),
    **{f"statistics of {op}": partial(of_statistics, op=op) for op in OF_STATISTICS},
    "linear": partial(of_linear, feature_map="attnkit::EluPlusOne"),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")
HEADS = (16, 64, 128, 256)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("capability", sorted(MEMORY))
def test_a_block_has_no_more_than_its_device_lends(family: str, capability: int) -> None:
    for dtype, d in itertools.product(DTYPES, HEADS):
        for launch in FAMILIES[family](dtype, d, capability=capability).values():
            assert launch.shared_bytes <= MEMORY[capability], launch.name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_best_tiles_are_taken_where_there_is_room(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Tiles, Tiles]] = []

    def noted(kernel: str, tiles: tuple[Tiles, ...], shared_bytes: Callable[[Tiles], int], room: int) -> Tiles:
        asked.append((fitting(kernel, tiles, shared_bytes, room), tiles[0]))
        return asked[-1][0]

    for module in (pointwise, rows, linear):
        monkeypatch.setattr(module, "fitting", noted)
    for dtype, d in itertools.product(DTYPES, HEADS):
        FAMILIES[family](dtype, d, capability=LARGE)
    assert asked
    assert all(chosen == best for chosen, best in asked)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matrices_that_do_not_fit_are_refused_by_name(dtype: str) -> None:
    for capability, m in itertools.product(MEMORY, (16, 48, 64)):
        room = MEMORY[capability]
        needed = max(launch.shared_bytes for launch in of_newton(dtype, capability, m).values())
        refused = newton.too_large(room, m, dtype, inverse_grad="unrolled")
        assert (refused is None) == (needed <= room)
        assert newton.too_large(room, m, dtype) is None


def test_a_device_with_less_memory_than_any_tile_is_told() -> None:
    tiles = tiles_of("pointwise_forward", "float32", 64)
    with pytest.raises(NotImplementedError, match=r"needs 11072 bytes of shared memory; the device lends a block 8192"):
        fitting("pointwise_forward", tiles, lambda x: x.shared_bytes(1, x.rows), 8192)


# ---------------------------------------------------------------------------------------------- in the emulation

WIDE = re.compile(r"width=(\d+)x(\d+)")
NARROW = ("newton_inverse",)  # which has matrices of landmarks
FIRST = ("softmax_attention", ("float32",))
LATER = [(op, DTYPES) for op in SERVED]


@pytest.fixture(scope="module")
def small() -> CudaOnCpu:
    return CudaOnCpu("cuda_cpu_small", shared_bytes=MEMORY[SMALL])


def wide_cases(adapter: CudaOnCpu, op: str, dtype: str) -> Iterator[Case]:
    """Those of the quick profile with heads wider than 64."""
    for sample in core.samples(op, "quick", (dtype,)):
        width = WIDE.search(sample.id)
        if width is None or max(map(int, width.groups())) <= 64:
            continue
        case = core.draw_case(sample)
        if not adapter.unsupported(op, core.typed_arrays(adapter, case), case.params):
            yield case


@pytest.mark.parametrize(("op", "dtypes"), [FIRST, *(later(*row) for row in LATER)])
def test_the_tiles_of_small_devices_are_right(op: str, dtypes: tuple[str, ...], small: CudaOnCpu) -> None:
    cases = 0
    for dtype in dtypes:
        for case in wide_cases(small, op, dtype):
            found = core.check(small, case)
            assert found.status == "pass", f"{case.id}: {found.message}"
            cases += 1
    assert bool(cases) != (op in NARROW)
