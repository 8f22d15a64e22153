"""Linear attention by Triton kernels: segments in the interpreter, and what is compiled for two GPUs."""

from typing import Any

import pytest
import torch

from attnkit_conformance import core
from attnkit_conformance.judge import judge

pytest.importorskip("triton", reason="triton is not installed")

from attnkit._core.check import dtype_name
from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton import linear_launch
from attnkit.kernels.triton import sizes
from benchmarks.sass.compiling import compiled, device_of

from .interpreted import worker
from .selection import later
from .spills import assert_tensor_cores, gated

OP = "linear_attention"
SCENES = ("mqa-causal", "everything")
PLANTED = "tests.kernels.planted_in_interpreter"


@pytest.mark.emulated
def test_segments_conform() -> None:
    adapter = worker(f"{PLANTED}:Segmented")
    every = list(core.cases(OP, "scenes", adapter.dtypes))
    resumed = (case for case in every if "initial_S" in case.arrays and case.params.get("causal"))
    chosen = [case for case in every if case.dtype == "float32" and case.tags & {*SCENES}]
    chosen += {case.dtype: case for case in resumed}.values()
    found = [core.check(adapter, case) for case in chosen]
    adapter.close()
    assert len([result for result in found if result.status == "pass"]) >= len(SCENES) + len(adapter.dtypes)
    assert [f"{result.id}\n{result.message}" for result in found if result.status == "fail"] == []


@pytest.mark.emulated
def test_sums_that_nothing_divides_have_two_digits() -> None:
    """Without an initial state, whose gradients need what is left over as well."""
    errors, one = [], {"REPLACED": "linear.left_over", "PLANTED": "nothing"}
    cases = "pair and normalize=False and not initial_state"
    for adapter in (worker(f"{PLANTED}:Segmented"), worker(f"{PLANTED}:wrong_segmented", **one)):
        results = list(judge([adapter], "small", cases, ("bfloat16", "float16"), ops=(OP,)))
        adapter.close()
        assert {result.status for result in results} <= {"pass", "unsupported"}
        of_o = [(r.dtype, x.rms) for r in results for x in r.measured if x.output == "o"]  # gradients have no such sums
        errors.append({dtype: sum(x for of, x in of_o if of == dtype) for dtype in adapter.dtypes[-2:]})
    two, one = errors
    assert all(two[dtype] < one[dtype] for dtype in one)


def launches(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> dict[str, triton_launch.Launch]:
    """The launches of a call and of its gradients, by the names of their kernels.

    `rows` prepares gradients that are no sweeps, whose sums of keys are `twice`. With a state those of the state that
    is returned are `kept` and `final`.
    """
    k = q if k is None else k
    v = k if v is None else v
    setting = linear_launch.setting(q, k, v, **options, initial_S=None if state is None else state[0])
    decay = options.get("log_decay")
    of_gradients = setting.of_gradients(dtype_name(v))
    call, gradients = (linear_launch.Call(q, k, v, s) for s in (setting, of_gradients))
    o = q.new_empty((*setting.a.leading, setting.a.queries, setting.a.e))
    grads = {name: x.new_empty((*setting.plan.state_leading, *x.shape[-2:])) for name, x in (("k", k), ("v", v))} | {
        "q": q
    }
    grads |= {} if state is None else {"initial_S": state[0], "initial_z": state[1]}
    grads |= {} if decay is None else {"log_decay": q.new_empty((*setting.plan.state_leading, setting.a.keys))}
    forward = {launch.kernel.fn.__name__: launch for launch in call.forward(o, state)}
    backward = {launch.kernel.fn.__name__: launch for launch in gradients.backward(o, grads, state, state)}
    found = {**backward, **forward}
    for own, name in (("rows", "outputs"), ("twice", "key_sums")):
        if name in backward and (own == "twice") == gradients.s.sweeps:
            found[own] = backward[name]
    if state is not None:
        alone = setting.of_keys_alone(tuple(state[0].shape[:-2]))
        sums, final = linear_launch.Call(k[..., :0, :], k, v, alone).final_state(state, state)
        found |= {"kept": sums, "final": final}
    return found


@pytest.mark.parametrize(
    ("dtype", "features", "floor", "resumed", "expected"),
    [
        (torch.bfloat16, 64, False, False, True),
        (torch.bfloat16, 128, False, True, True),
        (torch.bfloat16, 65, True, False, True),
        (torch.bfloat16, 65, True, True, False),  # the gradient of z would be beyond its bound
        (torch.bfloat16, 129, False, False, False),
        (torch.float16, 128, False, True, True),
        (torch.float32, 64, False, False, False),
    ],
)
def test_which_gradients_are_sweeps(
    dtype: torch.dtype, features: int, floor: bool, resumed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, v = torch.empty(1, 2, 70, features), torch.empty(1, 2, 70, 8, dtype=dtype)
    S = torch.empty(1, 2, features, 8) if resumed else None
    setting = linear_launch.setting(q, q, v, causal=True, feature_map="identity", floor=floor, initial_S=S)
    for widest in (128, 64):  # before Triton 3.9
        monkeypatch.setattr(sizes, "WIDEST_SWEEP", widest)
        assert setting.of_gradients(dtype_name(v)).sweeps is (expected and features <= widest)


# Bytes by dtype, head size and capability: numbers from before a loop, and more of sums that fade (of features: 336 in
# both sweeps on 9.0, 488 when tokens were rows of the products); without causality two operands of a whole state, which
# no loop changes, are more than registers hold with 128 features. Features in float32 take more to load.
SPILLS = {
    ("float32", 64, 80): {"key_sums": 16, "rows": 8},
    ("bfloat16", 64, 80): {"sweep_keys": 96, "key_sums": 16},
    ("bfloat16", 64, 90): {"sweep_queries": 256, "sweep_keys": 288},
    ("bfloat16", 128, 80): {"query_sums": 184, "sweep_keys": 64},
    ("bfloat16", 128, 90): {"sweep_keys": 152},
    ("float16", 64, 90): {"sweep_keys": 8},
    ("float16", 128, 80): {"sweep_keys": 56},
    ("float16", 128, 90): {"sweep_keys": 336},
}


def gate(
    made: dict[str, triton_launch.Launch], capability: int, dtype: torch.dtype = torch.float64, d: int = 0
) -> None:
    """No spilled registers but those of a dtype and a head size that are known, enough memory, tensor cores used."""
    known = SPILLS.get((str(dtype).removeprefix("torch."), d, capability))
    for name, kernel in gated(made, capability, known).items():
        if name != "running":
            assert_tensor_cores(name, kernel)


@pytest.mark.parametrize("causal", [True, later(False)], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("dtype", "d", "capability"),
    [
        later(torch.float16, 64, 80),
        later(torch.float16, 64, 90),
        later(torch.float16, 128, 80),
        later(torch.float16, 128, 90),
        later(torch.bfloat16, 64, 80),
        (torch.bfloat16, 64, 90),
        later(torch.bfloat16, 128, 80),
        later(torch.bfloat16, 128, 90),
        later(torch.float32, 64, 80),
        later(torch.float32, 64, 90),
    ],
    ids=str,
)
def test_no_spills_enough_memory_and_tensor_cores(dtype: torch.dtype, d: int, capability: int, causal: bool) -> None:
    with device_of(capability):
        made = launches(torch.empty(2, 8, 2048, d, dtype=dtype), causal=causal)
    assert len(made) == (8 if dtype == torch.float32 or d > sizes.WIDEST_SWEEP else 7)
    gate(made, capability, dtype, d)


@pytest.mark.emulated
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_products_of_two_digits_do_not_spill(dtype: torch.dtype, d: int, capability: int) -> None:
    q = torch.empty(2, 8, 2048, d, dtype=dtype)
    with device_of(capability):
        setting = linear_launch.setting(q, q, q, causal=True, normalize=False, feature_map="identity")
        made = {launch.kernel.fn.__name__: launch for launch in linear_launch.Call(q, q, q, setting).forward(q, None)}
    gate({"outputs": made["outputs"]}, capability)


def test_causal_heads_that_fill_a_gpu_take_one_pass() -> None:
    few, many = torch.empty(1, 8, 4096, 64), torch.empty(32, 8, 4096, 64)
    with device_of(90):
        assert {*launches(few, causal=True)} >= {"key_sums", "running", "outputs"}
        assert not {*launches(many, causal=True)} & {"key_sums", "query_sums", "running"}
        assert {*launches(many, causal=False)} >= {"key_sums", "running", "outputs"}


LONG_SUMS = ("rows", "gradient_queries", "gradient_keys", "gradient_values")


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("dtype", "d", "capability"),
    [
        (torch.float16, 256, 90),
        later(torch.bfloat16, 256, 80),
        (torch.float32, 128, 90),
        (torch.float32, 256, 80),
    ],
    ids=str,
)
def test_long_sums_do_not_spill(dtype: torch.dtype, d: int, capability: int) -> None:
    with device_of(capability):
        made = launches(torch.empty(2, 8, 2048, d, dtype=dtype), causal=True)
    gate({name: made[name] for name in LONG_SUMS}, capability)


@pytest.mark.emulated
@pytest.mark.parametrize("d", [24, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_gradients_of_gates_do_not_spill(dtype: torch.dtype, d: int, capability: int) -> None:
    with device_of(capability):
        made = launches(torch.empty(2, 8, 2048, d, dtype=dtype), causal=True, log_decay=torch.empty(2, 8, 2048))
    gate({"gradient_gates": made["gradient_gates"]}, capability)


@pytest.mark.emulated
def test_every_option_compiles() -> None:
    q, k, v = (torch.empty(2, *shape, dtype=torch.bfloat16) for shape in ((4, 700, 40), (2, 900, 40), (2, 900, 24)))
    options = {
        "feature_map": "relu", "eps": 0.1, "scale": 0.5, "causal": True, "enable_gqa": True,
        "mask": torch.zeros(2, 4, 1, 900, dtype=torch.bool), "key_lengths": torch.zeros(2, 1, dtype=torch.int64),
        "query_mask": torch.zeros(2, 1, 700, dtype=torch.bool),
    }  # fmt: skip
    state = (torch.empty(2, 2, 40, 24), torch.empty(2, 2, 40))
    decay = {"log_decay": torch.empty(2, 2, 900)}
    found = [launches(q, k, v, **options), launches(k, k, v, state, causal=True)]
    found += [launches(q, k, v, **options, **decay), launches(k, k, v, state, causal=True, **decay)]
    for launch in (launch for made in found for launch in made.values()):
        assert compiled(launch, 90).registers > 0
