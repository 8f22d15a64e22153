"""What the kit does not ask of the statistics of softmax, sparsemax and entmax. Run by test_triton_interpreted.py with
TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch

import attnkit
from attnkit.backends.torch.triton import launch, rows_statistics, statistics
from attnkit.ops.statistics import RowStatistics

from .in_interpreter import agree, draw, inputs

OPS: dict[str, dict[str, Any]] = {
    "softmax_attention": {},
    "sparsemax_attention": {},
    "entmax_attention": {"alpha": 1.3},
}
FIELDS = statistics.FIELDS
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"causal": True, "mask": draw(8, 2, 1, 20, 30) > -1, "bias": draw(7, 2, 20, 30)},
    "window": {"window": (5, 3), "key_lengths": torch.tensor([[30], [11]]), "scale": -0.7},
    "dropout": {"dropout": (0.3, 5), "query_mask": torch.arange(20) % 3 > 0},
}


def own(op: str) -> dict[str, Any]:
    """The options of an op as statistics get them: those of the op that it is a case of."""
    return {"alpha": 2.0} if op == "sparsemax_attention" else OPS[op]


def cotangents(rows: RowStatistics, fields: tuple[str, ...] = FIELDS[:4]) -> RowStatistics:
    return RowStatistics(**{name: draw(n, *getattr(rows, name).shape) for n, name in enumerate(fields)})


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_the_generic_body(op: str, options: str) -> None:
    q, k, v, do = inputs(20, 30)
    given = OPTIONS[options]
    o, rows = attnkit.attention_with_statistics(op, q, k, v, **OPS[op], **given, impl="generic")
    found = statistics.attend(q, k, v, op=op, fields=FIELDS, **own(op), **given)
    agree(found.pop("o"), o)
    for name, x in found.items():
        agree(x, getattr(rows, name))
    # the logarithm of a weight of sparsemax near 0 has few digits, which the bounds of the kit know of
    dstats = cotangents(rows, ("total", "sum_squares", "maximum") if op == "sparsemax_attention" else FIELDS[:4])
    expected = attnkit.attention_with_statistics_vjp(op, q, k, v, do, dstats, **OPS[op], **given, impl="generic")
    got = statistics.pull(q, k, v, do, dstats._asdict(), op=op, **own(op), **given)
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        agree(grad, expected[name])


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("op", OPS)
def test_a_field_alone(op: str, field: str) -> None:
    q, k, _, _ = (x.requires_grad_() for x in inputs(9, 11))
    rows = attnkit.row_statistics(op, q.detach(), k.detach(), **OPS[op], impl="generic")
    found = statistics.attend(q, k, None, op=op, fields=(field,), **own(op))
    assert found.keys() == {field}
    agree(found[field].detach(), getattr(rows, field))
    if field not in FIELDS[:4]:
        return
    dstats = cotangents(rows, (field,))
    expected = attnkit.row_statistics_vjp(op, q.detach(), k.detach(), dstats, **OPS[op], impl="generic")
    cotangent = getattr(dstats, field)
    explicit = statistics.pull(q.detach(), k.detach(), None, None, {field: cotangent}, op=op, **own(op))
    for name, grad in zip("qk", torch.autograd.grad(found[field], (q, k), cotangent), strict=True):
        if field == "total":  # Σw = 1: rounding alone
            assert max(x.abs().max() for x in (grad, explicit[name], expected[name])) < 1e-5
            continue
        agree(grad, expected[name])
        agree(explicit[name], expected[name])


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sweep for numbers and statistics of softmax, and for the maximum's gradient one that finds its key."""
    made: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda q, launches: made.extend(launches))
    q, k, _, _ = inputs(9, 11)
    statistics.attend(q, k, None, op="softmax_attention", fields=("total",))
    assert [one.kernel.__name__ for one in made] == ["statistics_of_softmax"]
    assert made[0].constants["KIND"] == (True, False, False, False, False, False, False, False)
    made.clear()
    row = torch.empty(2, 2, 9)
    args = {"q": q, "k": k}
    numbers = torch.empty(rows_statistics.shape_of_numbers("softmax_attention", args, (2, 2)))
    of_rows = (row.int(), None, None, None, row, None, None)
    rows_statistics.backward("softmax_attention", args, None, numbers, of_rows, ("q",))
    assert [one.kernel.__name__ for one in made] == ["statistics_of_rows", "backward_tiled"]


def test_values_with_more_items_than_queries() -> None:
    q, k, v, do = inputs(9, 11)
    q, k = q[:1], k[:1]
    o, rows = attnkit.attention_with_statistics("softmax_attention", q, k, v, impl="generic")
    dstats = cotangents(rows)
    expected = attnkit.attention_with_statistics_vjp("softmax_attention", q, k, v, do, dstats, impl="generic")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = statistics.attend(*leaves, op="softmax_attention", fields=FIELDS[:4])
    agree(found["o"].detach(), o)
    given = {name: x for name, x in {"o": do, **dstats._asdict()}.items() if x is not None}
    outputs = [found[name] for name in given]
    for name, grad in zip("qkv", torch.autograd.grad(outputs, leaves, list(given.values())), strict=True):
        agree(grad, expected[name])


def test_no_keys_and_no_queries() -> None:
    q, k, v, do = inputs(3, 4)
    for op in OPS:
        found = statistics.attend(q, k[..., :0, :], v[..., :0, :], op=op, fields=FIELDS, **own(op))
        assert all(torch.all(x == 0) for x in found.values())
        none = statistics.attend(q[..., :0, :], k, v, op=op, fields=FIELDS, **own(op))
        assert none["o"].shape == (2, 2, 0, 5)
        dstats = {"maximum": torch.ones(2, 2, 3)}
        grads = statistics.pull(q, k[..., :0, :], v[..., :0, :], do, dstats, op=op, **own(op))
        assert torch.all(grads["q"] == 0)
