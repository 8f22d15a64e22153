"""The Triton kernels compile for GPUs that are not here: no spilled registers, enough memory, tensor cores used.

Arguments are those of a launch. Triton's compiler comes with the assembler, so that machine code is looked at.
"""

import os
import re
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

# What imports triton stands behind the skips.
from attnkit.backends.torch.triton import launch as triton_launch  # noqa: E402
from attnkit.backends.torch.triton import pointwise, statistics  # noqa: E402
from attnkit.kernels.triton.sizes import Tile  # noqa: E402
from benchmarks.sass.clocks import counted  # noqa: E402
from benchmarks.sass.compiling import Compiled, compiled, device_of  # noqa: E402

from .selection import later  # noqa: E402
from .spills import MEMORY, TUNED, assert_memory, assert_no_spills, assert_tensor_cores  # noqa: E402


def launches(q: torch.Tensor, v: torch.Tensor | None = None, **options: Any) -> dict[str, triton_launch.Launch]:
    """The launches of a call and of its gradients, by the names of their kernels."""
    v = q if v is None else v
    call = triton_launch.call_of(q, q, v, **options)
    grads = {"q": q, "k": q, "v": v}
    if call.bias is not None:
        grads["bias"] = torch.empty(1, q.shape[1], q.shape[2], q.shape[2])
    made = triton_launch.forward_launches(q, q, v, v, call)
    made += triton_launch.backward_launches(q, q, v, v, grads, call)
    return {launch.kernel.fn.__name__: launch for launch in made}


@pytest.fixture
def compile_for() -> Any:
    """A function (launches as a function of nothing, capability) -> {kernel: Compiled}."""

    def run(make: Any, capability: int) -> dict[str, Compiled]:
        with device_of(capability):
            return {name: compiled(launch, capability) for name, launch in make().items()}

    return run


FEW_BYTES = 16  # of stack, which is used once


def assert_spills_nothing(name: str, kernel: Compiled, dtype: torch.dtype, capability: int) -> None:
    """Half types in no loop and a few registers elsewhere, float32 next to nothing in its main loop."""
    if not TUNED:
        assert_no_spills(name, kernel)
        return
    counts = counted(kernel, capability)
    if dtype == torch.float32:
        share = counts.work.kinds["spill"] / counts.work.instructions
        assert share < 0.01, f"{name}: {share:.1%} of the instructions of its main loop are spills"
    else:
        assert not any(loop.kinds["spill"] for each in counts.passes for loop in each.loops), f"{name} spills in a loop"
        assert kernel.stack <= FEW_BYTES, f"{name} spills {kernel.stack} bytes"


ALL_FIELDS = ",".join(statistics.FIELDS)
HEAVY = ("forward", "backward_queries", "backward_keys")


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "activation"),
    [
        later(torch.float16, 64, 80, "sigmoid"),
        later(torch.float16, 128, 80, "relu"),
        (torch.bfloat16, 64, 90, "relu"),
        later(torch.bfloat16, 128, 90, "sigmoid"),
        later(torch.float32, 64, 80, "relu"),
        later(torch.float32, 64, 90, "sigmoid"),
    ],
    ids=str,
)
def test_no_spills_enough_memory_and_tensor_cores(
    compile_for: Any, dtype: torch.dtype, d: int, capability: int, activation: str
) -> None:
    q = torch.empty(2, 8, 1024, d, dtype=dtype)
    found = compile_for(lambda: launches(q, activation=activation, causal=True), capability)
    for name in HEAVY:
        kernel = found[name]
        assert_spills_nothing(name, kernel, dtype, capability)
        assert_memory(name, kernel, capability)
        assert_tensor_cores(name, kernel)
        if capability == 90 and dtype != torch.float32:
            assert "wgmma.mma_async" in kernel.ptx, f"{name} does not use the instructions of this GPU"


@pytest.mark.parametrize(
    ("dtype", "d", "capability"),
    [
        (torch.bfloat16, 128, 90),
        later(torch.bfloat16, 64, 80),
        later(torch.float16, 128, 80),
        later(torch.float32, 128, 80),
    ],
    ids=str,
)
def test_distances_spill_nothing(compile_for: Any, dtype: torch.dtype, d: int, capability: int) -> None:
    q = torch.empty(2, 8, 1024, d, dtype=dtype)
    found = compile_for(lambda: launches(q, **pointwise.GAUSSIAN, causal=True), capability)
    assert {*found} == {*HEAVY, "centre", "move"}
    for name, kernel in found.items():
        assert_no_spills(name, kernel)
        assert_memory(name, kernel, capability)


@pytest.mark.emulated
def test_distances_of_wide_heads_have_enough_memory(compile_for: Any) -> None:
    """They need more than anything else."""
    q = torch.empty(2, 8, 1024, 256, dtype=torch.bfloat16)
    for name, kernel in compile_for(lambda: launches(q, **pointwise.GAUSSIAN), 80).items():
        assert_memory(name, kernel, 80)


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "spilled"),
    [later(torch.float16, 64, 80, 8), (torch.bfloat16, 64, 90, 136), later(torch.bfloat16, 128, 90, 384)],
    ids=str,
)
def test_programs_that_take_turns_wait_and_tell(
    compile_for: Any, dtype: torch.dtype, d: int, capability: int, spilled: int
) -> None:
    """They spill a few numbers: larger tiles ask for fewer additions."""
    q = torch.empty(2, 8, 1024, d, dtype=dtype)
    found = compile_for(lambda: launches(q, causal=True, ordered=True), capability)
    assert {*found} == {"forward", "row_constants", "backward_keys"}
    kernel = found["backward_keys"]
    assert_no_spills("backward_keys", kernel, spilled)
    assert_memory("backward_keys", kernel, capability)
    assert all(re.search(rf"global\S*\.{order}", kernel.ptx) for order in ("acquire", "release"))


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (197, {"activation": "gelu"}),
        later(256, {"activation": "sigmoid"}),
        later(256, {"activation": "sigmoid", "causal": True}),
    ],
    ids=str,
)
def test_whole_heads_keep_their_gradients_in_registers(compile_for: Any, tokens: int, options: dict[str, Any]) -> None:
    """What is spilled is a few addresses, once for all queries: sums would take thirty times as many instructions."""
    q = torch.empty(2, 8, tokens, 64, dtype=torch.bfloat16)
    kernel = compile_for(lambda: launches(q, **options), 90)["backward_whole"]
    assert_memory("backward_whole", kernel, 90)
    assert "wgmma.mma_async" in kernel.ptx
    if TUNED:
        (loop,) = counted(kernel, 90).passes[0].loops
        assert loop.kinds["spill"] < 0.02 * loop.instructions
        assert counted(kernel, 90).programs == 2


def test_whole_heads_are_of_one_class_of_gpus(compile_for: Any) -> None:
    """Others read operands of products from registers, which dq needs."""
    q = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16)
    with device_of(80):
        assert {*launches(q)} == {*HEAVY}
    with device_of(90):
        assert {*launches(q)} == {"forward", "backward_whole"}


def launches_with_statistics(
    q: torch.Tensor, fields: str = ALL_FIELDS, with_output: bool = True, **options: Any
) -> dict[str, triton_launch.Launch]:
    """The launches of a call with statistics and of its gradients."""
    v = q if with_output else None
    call = triton_launch.call_of(q, q, v, **options)
    rows = {name: torch.empty(q.shape[:-1]) for name in statistics.outputs(fields)}
    rows["first"] = rows["first"].to(torch.int32)
    wanted = tuple(rows.get(name) for name in (*statistics.FIELDS, "first"))
    given = (rows["first"], *wanted[:4], *(wanted[:2] if "entropy" in fields else (None, None)))
    grads = {"q": q, "k": q, "v": q}
    if call.bias is not None:
        grads["bias"] = torch.empty(1, q.shape[1], q.shape[2], q.shape[2])
    made = triton_launch.forward_launches(q, q, v, v, call, wanted)
    made += triton_launch.backward_launches(q, q, v, v, grads, call, given)
    return {launch.kernel.fn.__name__: launch for launch in made}


@pytest.mark.emulated
@pytest.mark.parametrize(("fields", "own"), [("total", {}), ("maximum", pointwise.GAUSSIAN)], ids=str)
def test_statistics_alone_compile_with_every_option(compile_for: Any, fields: str, own: dict[str, Any]) -> None:
    q = torch.empty(2, 4, 100, 64, dtype=torch.float16)
    options = {**own, "bias": torch.empty(4, 100, 100), "mask": torch.empty(100, 100, dtype=torch.bool)}
    found = compile_for(lambda: launches_with_statistics(q, fields, False, window=(7, 3), **options), 90)
    assert {*HEAVY, "backward_bias"} <= {*found}
    assert all(kernel.shared <= MEMORY[90] for kernel in found.values())


@pytest.mark.parametrize(
    ("dtype", "d", "capability", "own"),
    [
        later(torch.float16, 64, 80, {}),
        later(torch.bfloat16, 64, 90, pointwise.GAUSSIAN),
        later(torch.bfloat16, 128, 90, {}),  # test_sass.py has one for `make test`
        later(torch.float32, 64, 90, {}),
    ],
    ids=str,
)
def test_statistics_spill_nothing(
    compile_for: Any, dtype: torch.dtype, d: int, capability: int, own: dict[str, Any]
) -> None:
    q = torch.empty(2, 8, 1024, d, dtype=dtype)
    found = compile_for(lambda: launches_with_statistics(q, causal=True, **own), capability)
    for name in HEAVY:
        kernel = found[name]
        assert_spills_nothing(name, kernel, dtype, capability)
        assert_memory(name, kernel, capability)
        assert_tensor_cores(name, kernel)


@pytest.mark.emulated
@pytest.mark.parametrize("own", [{"activation": "gelu", "shift": "-log_length"}, pointwise.GAUSSIAN], ids=str)
def test_every_option_compiles_and_has_enough_memory(own: dict[str, Any], compile_for: Any) -> None:
    q, v = torch.empty(2, 4, 100, 128, dtype=torch.bfloat16), torch.empty(2, 4, 100, 100, dtype=torch.bfloat16)
    options = {
        **own, "window": (7, 3), "dropout": (0.1, 5),
        "bias": torch.empty(4, 100, 100), "mask": torch.empty(100, 100, dtype=torch.bool),
        "dropout_mask": torch.empty(100, 100), "key_lengths": torch.empty(2, 1, dtype=torch.int64),
        "query_mask": torch.empty(2, 1, 100, dtype=torch.bool),
    }  # fmt: skip
    found = compile_for(lambda: launches(q, v, **options), 90)
    before = {"centre", "move"} if own is pointwise.GAUSSIAN else {"row_constants"}
    assert set(found) == {*HEAVY, "backward_bias"} | before
    for name, kernel in found.items():
        assert_memory(name, kernel, 90)


def test_the_gate_sees_a_tile_that_is_too_large(compile_for: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnkit.kernels.triton.sizes.pointwise", lambda *sizes: Tile(128, 128, 4, 2))
    q = torch.empty(1, 1, 128, 128, dtype=torch.bfloat16)
    found = compile_for(lambda: {"forward": launches(q)["forward"]}, 80)
    assert found["forward"].stack > 0
