"""Every option of the Triton kernels lowers in the installed version of Triton, which the interpreter cannot tell, and
compiles for GPUs that are newer than those for which tiles were chosen."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

# What imports triton stands behind the skips.
from attnkit._core.check import dtype_name
from attnkit.backends.torch.triton import launch, linear_launch, pointwise, rows, rows_statistics, softpick, statistics
from attnkit.backends.torch.triton.launch import Launch
from benchmarks.sass.compiling import compiled, device_of, lowered

from .selection import later
from .spills import assert_memory

TOKENS = 300
BOOLEAN = {
    "mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool),
    "query_mask": torch.ones(2, 1, TOKENS, dtype=torch.bool),
}
LENGTHS = {"key_lengths": torch.ones(2, 1, dtype=torch.int64)}
BIASED = {"bias": torch.empty(4, TOKENS, TOKENS), "dropout": (0.1, 5), "dropout_mask": torch.empty(TOKENS, TOKENS)}
EDGES = {"edges_q": torch.tensor([0, 100, TOKENS]), "edges_k": torch.tensor([0, 100, TOKENS])}
WINDOW = {"causal": "upper_left", "window": (30, 5)}
GATES = {"log_forget": torch.zeros(4, TOKENS)}
FEATURES = {"features": torch.float32, "feature_map": "identity", "normalize": True}
ALL = ",".join(statistics.FIELDS)


width = 64  # of a head


def tokens(packed: bool = False) -> Tensor:
    return torch.empty(*(() if packed else (2,)), 4, TOKENS, width, dtype=torch.float16)


def of_pointwise(fields: str = "", with_output: bool = True, **options: Any) -> list[Launch]:
    """Forward and backward, with statistics of some fields."""
    q = tokens("edges_q" in options)
    v, call = q if with_output else None, launch.call_of(q, q, q if with_output else None, **options)
    grads = {"q": q, "k": q, "v": q} | ({"bias": torch.empty(1, 4, TOKENS, TOKENS)} if "bias" in options else {})
    if not fields:
        return launch.forward_launches(q, q, v, v, call) + launch.backward_launches(q, q, v, v, grads, call)
    outputs, given = of_fields(q, fields)
    made = launch.forward_launches(q, q, v, v, call, outputs)
    made += launch.forward_launches(q, q, None, None, call, (*(None for _ in statistics.FIELDS), outputs[-1]), True)
    return made + launch.backward_launches(q, q, v, v, grads, call, given)


def of_fields(q: Tensor, fields: str) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The rows of statistics to write, and those that gradients read."""
    row, first = torch.empty(q.shape[:-1]), torch.empty(q.shape[:-1], dtype=torch.int32)
    outputs = tuple(row if name in statistics.outputs(fields) else None for name in statistics.FIELDS)
    return (*outputs, first), (first, *outputs[:4], *(outputs[:2] if "entropy" in fields else (None, None)))


def of_rows(op: str, **options: Any) -> list[Launch]:
    """Forward, with and without o, and backward."""
    q = tokens("edges_q" in options)
    if reason := rows.compiler_fault(op, launch.capability(q.device), options):
        pytest.skip(f"refused by name: {reason}")
    call = rows.call_of(op, {"q": q, "k": q, "v": q, **options})
    numbers = torch.empty(rows.row_numbers(call.a.leading, TOKENS, rows.alpha_of(op, options)))
    grads = {"q": q, "k": q, "v": q} | ({"bias": torch.empty(1, 4, TOKENS, TOKENS)} if "bias" in options else {})
    lse = torch.empty(q.shape[:-1])
    forward = [rows.forward_launch(q, q, q, o, lse, numbers, call) for o in (q, None)]
    sums = rows.room_for_sums(q, call) if "log_forget" in options else None
    return forward + rows.backward_launches(q, q, q, q, lse, numbers, grads, call, sums=sums)


def of_softpick(**options: Any) -> list[Launch]:
    """Forward, with and without o, and backward."""
    q = tokens()
    arguments, numbers = {"q": q, "k": q, "v": q, **options}, torch.empty(softpick.shape_of_numbers((2, 4), TOKENS))
    grads = {"q": q, "k": q, "v": q} | ({"bias": torch.empty(1, 4, TOKENS, TOKENS)} if "bias" in options else {})
    forward = [softpick.forward_launch(q, q, q, o, numbers, arguments) for o in (q, None)]
    return forward + softpick.backward_launches(q, q, q, q, numbers, grads, arguments)


def of_statistics(op: str, fields: str, with_output: bool = True, **options: Any) -> list[Launch]:
    """Statistics of rows that sum to 1, the keys of first maxima, and backward."""
    q = tokens()
    v, arguments = q if with_output else None, {"q": q, "k": q, **options}
    call = rows.call_of(op, arguments | {"v": v})
    numbers = torch.empty(rows_statistics.shape_of_numbers(op, arguments, call.a.leading))
    outputs, given = of_fields(q, fields)
    keys = (*rows_statistics.NONE, outputs[-1])
    made = [rows_statistics.statistics_launch(q, q, outputs, numbers, call)]
    made += [rows_statistics.statistics_launch(q, q, keys, numbers, call, True)]
    grads = {"q": q, "k": q, "v": q} | ({"bias": torch.empty(1, 4, TOKENS, TOKENS)} if "bias" in options else {})
    return made + rows.backward_launches(q, q, v, v, None, numbers, grads, call, given)


def of_linear(state: bool = False, features: torch.dtype = torch.float16, **options: Any) -> list[Launch]:
    """Forward, the returned state, and backward, for q and k in the dtype of `features`."""
    v = tokens("edges_q" in options)
    q, S, z = v.to(features), torch.empty(2, 4, width, width), torch.empty(2, 4, width)
    s = linear_launch.setting(q, q, v, **options, initial_S=S if state else None)
    initial, grads = (S, z) if state else None, {"q": q, "k": q, "v": v, "initial_S": S, "initial_z": z}
    grads |= {"log_decay": options["log_decay"]} if "log_decay" in options else {}
    made = linear_launch.Call(q, q, v, s).forward(q, initial)
    if state:
        alone = linear_launch.Call(q[..., :0, :], q, v, s.of_keys_alone((2, 4)))
        made += alone.final_state(initial, (S, z))
    of_gradients = s.of_gradients(dtype_name(v))
    return made + linear_launch.Call(q, q, v, of_gradients).backward(q, grads, initial, initial)


CALLS: dict[str, Callable[[], list[Launch]]] = {
    "pointwise": of_pointwise,
    "pointwise, every option": lambda: of_pointwise(
        activation="gelu", shift="-log_length", alpha=0.5, **BIASED, **BOOLEAN, **LENGTHS, **WINDOW
    ),
    "pointwise, own lengths": lambda: of_pointwise(alpha=0.5, length=torch.empty(2, 1, TOKENS)),
    "pointwise, ordered": lambda: of_pointwise(ordered=True, causal=True, window=(70, 0)),
    "pointwise, packed": lambda: of_pointwise(**EDGES),
    "pointwise, packed, causal": lambda: of_pointwise(causal=True, window=(30, None), alpha=0.5, **EDGES),
    "pointwise, packed, window": lambda: of_pointwise(**WINDOW, **EDGES),
    "gaussian": lambda: of_pointwise(**pointwise.GAUSSIAN),
    "gaussian, every option": lambda: of_pointwise(**pointwise.GAUSSIAN, **BIASED, **BOOLEAN, **LENGTHS, **WINDOW),
    "statistics": lambda: of_pointwise(ALL, causal=True),
    "statistics, of signed weights": lambda: of_pointwise(ALL, activation="identity", **BOOLEAN),
    "statistics, a sum alone": lambda: of_pointwise("total", False, **WINDOW),
    "statistics, a maximum alone": lambda: of_pointwise("maximum", False, **pointwise.GAUSSIAN, **BIASED),
    "softmax": lambda: of_rows("softmax_attention"),
    "softmax, every option": lambda: of_rows("softmax_attention", **BIASED, **BOOLEAN, **LENGTHS, **WINDOW, scale=-1.0),
    "softmax, packed": lambda: of_rows("softmax_attention", **EDGES),
    "softmax, packed, window": lambda: of_rows("softmax_attention", **WINDOW, **EDGES),
    "softpick": of_softpick,
    "softpick, every option": lambda: of_softpick(**BIASED, **BOOLEAN, **LENGTHS, **WINDOW, scale=-1.0, eps=0.1),
    "forgetting": lambda: of_rows("forgetting_attention", **GATES),
    "forgetting, every option": lambda: of_rows(
        "forgetting_attention", **GATES, **BIASED, **BOOLEAN, **LENGTHS, **WINDOW, scale=-1.0
    ),
    "entmax": lambda: of_rows("entmax_attention", alpha=1.5),
    "entmax, every option": lambda: of_rows("entmax_attention", alpha=1.3, **BIASED, **BOOLEAN, **LENGTHS, **WINDOW),
    "softmax, statistics": lambda: of_statistics("softmax_attention", ALL, causal=True),
    "softmax, statistics, every option": lambda: of_statistics(
        "softmax_attention", ALL, **BIASED, **BOOLEAN, **LENGTHS, **WINDOW, scale=-1.0
    ),
    "entmax, statistics": lambda: of_statistics("entmax_attention", ALL, alpha=1.3, **BOOLEAN),
    "sparsemax, a maximum alone": lambda: of_statistics("entmax_attention", "maximum", False, alpha=2.0, **BIASED),
    "linear": of_linear,
    "linear, features": lambda: of_linear(**FEATURES, floor=True, causal=True),
    "linear, features that fade": lambda: of_linear(**FEATURES, levels=torch.empty(2, 4, TOKENS), causal=True),
    "linear, causal": lambda: of_linear(causal=True),
    "linear, without a denominator": lambda: of_linear(feature_map="identity"),
    "linear, causal, without a denominator": lambda: of_linear(feature_map="identity", causal=True),
    "linear, every option": lambda: of_linear(causal=True, **{**BOOLEAN, "mask": BOOLEAN["mask"][:1]}, **LENGTHS),
    "linear, states": lambda: of_linear(True),
    "linear, causal, states": lambda: of_linear(True, causal=True),
    "linear, decay": lambda: of_linear(True, causal=True, log_decay=torch.empty(2, 4, TOKENS)),
    "linear, packed": lambda: of_linear(**EDGES),
    "linear, packed, causal": lambda: of_linear(causal=True, **EDGES),
}  # fmt: skip


FIRST = (
    "pointwise, every option", "gaussian, every option", "statistics, of signed weights", "pointwise, packed",
    "softpick, every option", "softmax, statistics", "entmax, statistics", "linear, causal", "forgetting",
)  # fmt: skip


@pytest.mark.parametrize(
    ("call", "capability"),
    [(call, 90) if call in FIRST else later(call, 90) for call in CALLS] + [later(call, 80) for call in CALLS],
)
def test_lowers(call: str, capability: int) -> None:
    with device_of(capability):
        for made in CALLS[call]():
            assert "tt.func public" in lowered(made, capability), made.kernel.fn.__name__


TENSOR_MEMORY = 512  # columns of a multiprocessor of 10.0
NEWEST = {100: "tcgen05.mma", 120: "mma.sync"}


@pytest.mark.emulated
@pytest.mark.parametrize("capability", NEWEST)
@pytest.mark.parametrize("call", CALLS)
def test_fits_the_newest_devices(call: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128, which need most memory. Products of 10.0 have a memory of their own; of 12.0 all are small."""
    monkeypatch.setattr(f"{__name__}.width", 128)
    multiplied = False
    with device_of(capability):
        for made in CALLS[call]():
            kernel, name = compiled(made, capability), made.kernel.fn.__name__
            assert_memory(name, kernel, capability)
            assert kernel.tensor_memory <= TENSOR_MEMORY, f"{name} needs {kernel.tensor_memory} columns"
            multiplied = multiplied or NEWEST[capability] in kernel.ptx
    assert multiplied, f"{call} has no products of this GPU"
