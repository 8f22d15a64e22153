"""The table of differentiation: complete, as the kit sees it, and with planted bugs that the kit sees."""

from pathlib import Path

import pytest

import attnkit
from attnkit.backends import jax as jax_backend
from attnkit.backends import torch as torch_backend
from attnkit.backends.torch import blocked, recomputed, watchers
from attnkit.ops import entmax
from attnkit.ops.lowrank import newton
from attnkit_conformance.studies import transforms
from attnkit_conformance.studies.transforms import EITHER, REFUSED, RIGHT, Row, Verdict, page

TABLE = Path(__file__).parents[2] / "docs" / "differentiation.md"
COMPILED = (  # by XLA, of all ops
    "pointwise_attention",
    *(
        pytest.param(op, marks=pytest.mark.referee)
        for op in ("entmax_attention", "newton_inverse", "linear_attention_step", "delta_attention")
    ),
)
LONGEST = 512  # tokens; longer rows are judged by make transforms


def settled(row: Row) -> bool:
    """Whether the row is the same on every machine: without a C++ compiler `auto` takes something else."""
    return attnkit.native_status().reason is None or row.impl not in ("native", "auto")


def allowed(word: str) -> set[str]:
    return {RIGHT, REFUSED} if word == EITHER else {word}


def assert_as_in_table(verdicts: list[Verdict]) -> None:
    table = page.cells(TABLE)
    for verdict in verdicts:
        assert allowed(verdict.word) <= allowed(table[page.key(verdict.row, verdict.transform)]), verdict


def test_the_table_has_every_cell() -> None:
    expected = {
        page.key(row, transform)
        for library in transforms.LIBRARIES
        for row in filter(settled, transforms.rows(library))
        for transform in transforms.runner(library)[1]
    }
    there = set(page.cells(TABLE))
    assert expected <= there, "run `make transforms`"
    assert there == expected or attnkit.native_status().reason, "run `make transforms`"


def test_rows_that_were_not_judged_keep_what_the_page_says(tmp_path: Path) -> None:
    copy = tmp_path / "differentiation.md"
    copy.write_text(TABLE.read_text())
    before = page.cells(copy)
    row = next(row for row in transforms.rows("torch") if (row.op, row.impl) == ("softmax_attention", "generic"))
    page.write(copy, [Verdict(row, transform, REFUSED) for transform in transforms.runner("torch")[1]])
    changed = {key for key, word in page.cells(copy).items() if word != before[key]}
    assert changed == {key for key in before if key[:3] == ("torch", "softmax_attention", "generic")}


def cheap(row: Row) -> tuple[str, ...]:
    """make_fx takes seconds to record a generic body, whose operations are torch's own."""
    own = row.impl in ("generic", "auto")
    return tuple(name for name in transforms.runner("torch")[1] if not (own and name == "make_fx"))


OPS = [op.name for op in transforms.differentiable()]


@pytest.mark.parametrize("op", [*OPS[::2], *(pytest.param(op, marks=pytest.mark.referee) for op in OPS[1::2])])
def test_torch(op: str) -> None:
    rows = [row for row in transforms.rows("torch") if row.op == op and (row.tokens or 0) <= LONGEST and settled(row)]
    assert_as_in_table([verdict for row in rows for verdict in transforms.judge(row, 1, cheap(row))])


def test_what_a_scan_carries_varies_within_shard_map() -> None:
    """As what it reads: JAX refuses a state of zeros beside chunks that differ between devices."""
    row = Row("jax", "delta_attention", "generic")
    assert words(row, "grad in shard_map") == {"grad in shard_map": RIGHT}


@pytest.mark.parametrize("op", COMPILED)
def test_jax(op: str) -> None:
    rows = [row for row in transforms.rows("jax") if row.op == op and not row.tokens and settled(row)]
    assert_as_in_table([verdict for row in rows for verdict in transforms.judge(row, most=1)])


# ---------------------------------------------------------------------------------------------- planted bugs


def words(row: Row, *names: str) -> dict[str, str]:
    return {verdict.transform: verdict.word for verdict in transforms.judge(row, 1, names)}


@pytest.mark.parametrize("kernel", [blocked.KERNELS["pointwise_attention"], recomputed.KERNELS["linear_attention"]])
def test_kernels_that_let_forward_mode_pass_are_seen(kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the refusal tangents are 0 or missing, and derivatives of torch.func end in torch's own error."""
    op = next(op for op in ("pointwise_attention", "linear_attention") if op.startswith(kernel.call.args[0]))
    monkeypatch.setitem(torch_backend.KERNELS, op, (kernel,))
    row = Row("torch", op, kernel.name)
    assert words(row, "func.jvp", "dual numbers", "func.grad", "vmap(grad)") == {
        "func.jvp": "wrong",
        "dual numbers": "wrong",
        "func.grad": "error",
        "vmap(grad)": "error",
    }


def test_calls_that_nobody_watches_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the list of watchers addresses are written behind a trace, and asked of a batch of cotangents."""
    monkeypatch.setattr(watchers, "watched", lambda: False)
    monkeypatch.setattr(watchers, "traces", lambda: False)
    row = Row("torch", "pointwise_attention", "native")
    assert words(row, "jit.trace", "is_grads_batched", "jacobian(vectorize)", "make_fx") == {
        "jit.trace": "error",
        "is_grads_batched": "error",
        "jacobian(vectorize)": "error",
        "make_fx": "wrong",
    }


def test_forward_mode_through_explicit_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnkit.backends.jax import blocked

    op = "pointwise_attention"
    monkeypatch.setitem(jax_backend.KERNELS, op, (blocked.KERNELS[op],))
    assert words(Row("jax", op, "blocked"), "jvp") == {"jvp": "error"}


def test_a_threshold_after_one_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has first derivatives only."""
    monkeypatch.setattr(entmax, "_STEPS", 1)
    row = Row("torch", "entmax_attention", "generic")
    assert words(row, "func.grad", "backward twice") == {"func.grad": RIGHT, "backward twice": "wrong"}


@pytest.mark.parametrize("op", ["newton_inverse", "soft_attention"])
def test_an_implicit_inverse_of_first_order_is_seen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton, "_ORDERS", 1)
    row = Row("torch", op, "generic")
    assert words(row, "func.grad", "func.hessian") == {"func.grad": RIGHT, "func.hessian": "wrong"}
